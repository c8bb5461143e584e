// Blocks of rows written past the caches.
//
// A store to memory that is in no cache first reads the line it is about to replace. Where a block is a part of memory
// larger than the caches that is read for nothing, and what is evicted for it may be of use. So rows are put together in
// a few KiB that stay in the first cache and leave from there by stores that fetch nothing. Measured on an Intel Xeon,
// 4096 rows of 168 and of 448 bytes: 0.75 and 0.58 of a memcpy, in place 1.9 and 1.5. On an AMD EPYC it won nothing
// reliable (1.2 to 1.7 against 1.3 to 1.5), and there rows are written in place.
#pragma once

#include <atomic>

#include "copy.hpp"
#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace recollect {

constexpr size_t kStage = 8 * 1024;

// What is streamed: blocks of at least `block` bytes in memory of at least `memory`. Tests lower them, on any processor.
struct Streaming {
    std::atomic<size_t> block{kStage}, memory{is_intel() ? size_t(16) << 20 : SIZE_MAX};
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

// Words of 8 bytes; whole lines wherever they can be.
inline void stream_bytes(byte* to, const byte* from, size_t n) {
    auto word = [&](size_t i) {
        long long w;
        std::memcpy(&w, from + i, 8);
        _mm_stream_si64(reinterpret_cast<long long*>(to + i), w);
    };
    size_t i = 0;
    for (; i < n && reinterpret_cast<uintptr_t>(to + i) % 64; i += 8) word(i);
    for (; i + 64 <= n; i += 64)
#pragma GCC unroll 4
        for (size_t j = i; j < i + 64; j += 16)
            _mm_stream_si128(reinterpret_cast<__m128i*>(to + j), _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + j)));
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
