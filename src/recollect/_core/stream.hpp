// Blocks of rows written past the caches.
//
// A store to memory that is in no cache first reads the line it is about to replace. Where a block is a part of memory
// larger than the caches that is read for nothing, and what is evicted for it may be of use. So rows are put together in
// a few KiB that stay in the first cache and leave from there by stores that fetch nothing. Measured on an Intel Xeon,
// 4096 rows of 168 and of 448 bytes: 0.75 and 0.58 of a memcpy, in place 1.9 and 1.5. An AMD EPYC wants stores of half
// a line (448 bytes: 0.7 of a memcpy, in place 1.0 to 1.5); by quarters it wins nothing reliable.
#pragma once

#include <atomic>

#include "copy.hpp"
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace recollect {

constexpr size_t kStage = 8 * 1024;

// Whether a store of half a line is to be had.
inline bool has_wide() {
#if defined(__x86_64__)
    static const bool found = __builtin_cpu_supports("avx2");
    return found;
#else
    return false;
#endif
}

// What is streamed: blocks of at least `block` bytes in memory of at least `memory`. Tests lower them, on any processor.
struct Streaming {
    std::atomic<size_t> block{kStage}, memory{is_intel() || has_wide() ? size_t(16) << 20 : SIZE_MAX};
};
inline Streaming& streaming() {
    static Streaming one;
    return one;
}

#if defined(__x86_64__) && !defined(__SANITIZE_THREAD__)
inline bool is_streamed(const byte* to, size_t row_nbytes, size_t n, size_t memory_nbytes) {
    const Streaming& at = streaming();
    return memory_nbytes >= at.memory.load(std::memory_order_relaxed) && n * row_nbytes >= at.block.load(std::memory_order_relaxed) &&
           row_nbytes % 8 == 0 && row_nbytes <= kStage / 8 && reinterpret_cast<uintptr_t>(to) % 8 == 0;
}
// What was stored before is seen before what is streamed, and that before what is stored after. Nothing less orders it.
inline void stream_fence() { _mm_sfence(); }

// Whole lines, by half and by quarter of one.
__attribute__((target("avx2"))) inline void stream_halves(byte* to, const byte* from, size_t n) {
    for (size_t i = 0; i < n; i += 32)
        _mm256_stream_si256(reinterpret_cast<__m256i*>(to + i), _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i)));
}
inline void stream_quarters(byte* to, const byte* from, size_t n) {
    for (size_t i = 0; i < n; i += 16)
        _mm_stream_si128(reinterpret_cast<__m128i*>(to + i), _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i)));
}

// Words of 8 bytes; whole lines wherever they can be.
inline void stream_bytes(byte* to, const byte* from, size_t n) {
    auto word = [&](size_t i) {
        long long w;
        std::memcpy(&w, from + i, 8);
        _mm_stream_si64(reinterpret_cast<long long*>(to + i), w);
    };
    size_t i = 0;
    for (; i < n && reinterpret_cast<uintptr_t>(to + i) % 64; i += 8) word(i);
    const size_t lines = (n - i) / 64 * 64;
    if (has_wide()) stream_halves(to + i, from + i, lines);
    else stream_quarters(to + i, from + i, lines);
    i += lines;
    for (; i < n; i += 8) word(i);
}
#else
inline bool is_streamed(const byte*, size_t, size_t, size_t) { return false; }
inline void stream_fence() {}
inline void stream_bytes(byte* to, const byte* from, size_t n) { copy_bytes(to, from, n); }
#endif

// Samples [begin, end) of leaves into rows that follow each other from `to` on (sample 0's row). `patch(to, begin, end)`
// may change rows of these that are in place, or about to be.
template <typename Patch>
void write_rows(byte* to, size_t row_nbytes, size_t begin, size_t end, const Span* spans, size_t n_spans,
                const byte* const* leaves, size_t memory_nbytes, Patch patch) {
    if (!is_streamed(to, row_nbytes, end - begin, memory_nbytes)) {
        scatter_leaves(to, row_nbytes, begin, end, spans, n_spans, leaves);
        patch(to, begin, end);
        return;
    }
    alignas(64) byte stage[kStage] = {};  // zero: the bytes between leaves
    const size_t group = kStage / row_nbytes / 8 * 8;  // whole lines
    stream_fence();
    for (size_t i = begin; i < end; i += group) {
        const size_t n = std::min(group, end - i);
        byte* staged = stage - i * row_nbytes;  // where sample 0 would be
        scatter_leaves(staged, row_nbytes, i, i + n, spans, n_spans, leaves);
        patch(staged, i, i + n);
        stream_bytes(to + i * row_nbytes, stage, n * row_nbytes);
    }
    stream_fence();
}

}  // namespace recollect
