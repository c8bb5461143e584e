// Copies between packed rows and contiguous leaves.
//
// A row is one sample; a leaf is a run of bytes at a fixed offset in it. Libc's memcpy costs more in its call
// and size dispatch than in moving the ten to a hundred bytes of a typical leaf, so short leaves are copied by
// code that the compiler sees whole. A random place in memory is asked for some rows before it is copied, which
// hides most of its cost.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

namespace recollect {

using byte = unsigned char;

#if defined(__SANITIZE_THREAD__)
// Row bytes are read while they may be written and checked afterwards (a sequence lock). ThreadSanitizer cannot
// know that; under it every byte moves by a relaxed atomic, so that what it still reports is a real mistake.
inline void copy_bytes(byte* to, const byte* from, size_t n) {
    for (size_t i = 0; i < n; ++i)
        __atomic_store_n(to + i, __atomic_load_n(from + i, __ATOMIC_RELAXED), __ATOMIC_RELAXED);
}
template <size_t N> inline void copy_fixed(byte* to, const byte* from) { copy_bytes(to, from, N); }
#else
template <size_t N> inline void copy_fixed(byte* to, const byte* from) { std::memcpy(to, from, N); }

inline void copy_bytes(byte* to, const byte* from, size_t n) {
    if (n > 1024) { std::memcpy(to, from, n); return; }
    if (n >= 16) {  // whole 16-byte words, the last one overlapping its neighbour
        size_t i = 0;
        for (; i + 32 <= n; i += 32) copy_fixed<32>(to + i, from + i);
        if (i + 16 <= n) copy_fixed<16>(to + i, from + i);
        copy_fixed<16>(to + n - 16, from + n - 16);
        return;
    }
    if (n >= 8) { copy_fixed<8>(to, from); copy_fixed<8>(to + n - 8, from + n - 8); return; }
    if (n >= 4) { copy_fixed<4>(to, from); copy_fixed<4>(to + n - 4, from + n - 4); return; }
    for (size_t i = 0; i < n; ++i) to[i] = from[i];
}
#endif

// One leaf of `n` rows: `at_to(i)` and `at_from(i)` give the two places of row i.
template <typename To, typename From>
inline void copy_leaf(size_t n, size_t size, To at_to, From at_from) {
    auto each = [&](auto copy) { for (size_t i = 0; i < n; ++i) copy(at_to(i), at_from(i)); };
    switch (size) {
        case 0: return;
        case 1: return each([](byte* t, const byte* f) { copy_fixed<1>(t, f); });
        case 2: return each([](byte* t, const byte* f) { copy_fixed<2>(t, f); });
        case 4: return each([](byte* t, const byte* f) { copy_fixed<4>(t, f); });
        case 8: return each([](byte* t, const byte* f) { copy_fixed<8>(t, f); });
        case 16: return each([](byte* t, const byte* f) { copy_fixed<16>(t, f); });
        case 24: return each([](byte* t, const byte* f) { copy_fixed<24>(t, f); });
        case 32: return each([](byte* t, const byte* f) { copy_fixed<32>(t, f); });
        case 48: return each([](byte* t, const byte* f) { copy_fixed<48>(t, f); });
        case 64: return each([](byte* t, const byte* f) { copy_fixed<64>(t, f); });
        case 68: return each([](byte* t, const byte* f) { copy_fixed<68>(t, f); });
        case 192: return each([](byte* t, const byte* f) { copy_fixed<192>(t, f); });
        default: return each([size](byte* t, const byte* f) { copy_bytes(t, f, size); });
    }
}

struct Span { size_t offset; size_t nbytes; };  // a leaf's place in the row

constexpr size_t kAhead = 12;      // rows between prefetch and copy: as many lines in flight as the processor takes
constexpr size_t kStaged = 1024;   // rows up to this size are staged
constexpr size_t kStage = 16384;   // bytes of staged rows: half of a first-level cache
constexpr size_t kThreadNbytes = size_t(1) << 20;  // a thread must have this much to copy to be worth starting

inline size_t thread_count(size_t nbytes) {
    static const size_t cores = std::max(1u, std::thread::hardware_concurrency());
    return std::clamp<size_t>(nbytes / kThreadNbytes, 1, std::min<size_t>(cores, 8));
}

// Run `work(begin, end)` over [0, n), on as many threads as `nbytes` is worth.
template <typename Work> void in_parallel(size_t n, size_t nbytes, Work work) {
    const size_t parts = std::min(thread_count(nbytes), std::max<size_t>(n, 1));
    if (parts <= 1) { work(size_t(0), n); return; }
    std::vector<std::thread> others;
    others.reserve(parts - 1);
    for (size_t p = 1; p < parts; ++p) {
        try { others.emplace_back(work, n * p / parts, n * (p + 1) / parts); }
        catch (const std::system_error&) { work(n * p / parts, n * (p + 1) / parts); }  // no thread to be had
    }
    work(size_t(0), n / parts);
    for (auto& t : others) t.join();
}

// The part of a row that some leaves lie in.
struct Extent {
    size_t offset, nbytes;
    Extent(const Span* spans, size_t n) {
        size_t low = SIZE_MAX, high = 0;
        for (size_t k = 0; k < n; ++k)
            if (spans[k].nbytes) {
                low = std::min(low, spans[k].offset);
                high = std::max(high, spans[k].offset + spans[k].nbytes);
            }
        offset = high ? low : 0;
        nbytes = high - offset;
    }
};

inline void prefetch(const byte* at, size_t nbytes) {
    const size_t reach = std::min<size_t>(nbytes, 512);  // beyond that the hardware has seen the stream
    for (size_t i = 0; i + 64 < reach; i += 64) __builtin_prefetch(at + i);
    if (reach) __builtin_prefetch(at + reach - 1);
}

// Leaves of `n` rows at any addresses into leaves[k] + i * size of leaf k, for sample i = first, first + 1, ...
//
// Short rows go whole into a small stage first and from there leaf by leaf: the copy that waits for memory is then
// one straight run per row, and the one that takes it apart never leaves the cache.
inline void gather_leaves(const byte* const* rows, size_t n, size_t first, const Span* spans, size_t n_spans,
                          byte* const* leaves) {
    const Extent extent(spans, n_spans);
    const size_t nbytes = extent.nbytes, offset = extent.offset;
    size_t ahead = 0;
    for (; ahead < std::min(kAhead, n); ++ahead) prefetch(rows[ahead] + offset, nbytes);
    if (n_spans == 1 || nbytes > kStaged) {
        for (size_t i = 0; i < n; ++i) {
            if (ahead < n) prefetch(rows[ahead++] + offset, nbytes);
            for (size_t k = 0; k < n_spans; ++k)
                copy_bytes(leaves[k] + (first + i) * spans[k].nbytes, rows[i] + spans[k].offset, spans[k].nbytes);
        }
        return;
    }
    alignas(64) byte stage[kStage];
    const size_t stride = (nbytes + 15) / 16 * 16, most = kStage / std::max<size_t>(stride, 16);
    for (size_t at = 0; at < n; at += most) {
        const size_t m = std::min(most, n - at);
        for (size_t i = 0; i < m; ++i) {
            if (ahead < n) prefetch(rows[ahead++] + offset, nbytes);
            copy_bytes(stage + i * stride, rows[at + i] + offset, nbytes);
        }
        for (size_t k = 0; k < n_spans; ++k) {
            const size_t size = spans[k].nbytes;
            byte* out = leaves[k] + (first + at) * size;
            const byte* in = stage + spans[k].offset - offset;
            copy_leaf(m, size, [=](size_t i) { return out + i * size; }, [=](size_t i) { return in + i * stride; });
        }
    }
}

// Leaves of samples [begin, end) into rows that follow each other from `to` on (sample 0's row); the mirror of
// gather_leaves. Rows are put together in the stage and leave it in one piece, as memcpy likes it best.
inline void scatter_leaves(byte* to, size_t row_nbytes, size_t begin, size_t end, const Span* spans, size_t n_spans,
                           const byte* const* leaves) {
    if (row_nbytes > kStaged) {
        for (size_t i = begin; i < end; ++i)
            for (size_t k = 0; k < n_spans; ++k)
                copy_bytes(to + i * row_nbytes + spans[k].offset, leaves[k] + i * spans[k].nbytes, spans[k].nbytes);
        return;
    }
    alignas(64) byte stage[kStage] = {};  // padding between leaves is zeros
    const size_t most = kStage / std::max<size_t>(row_nbytes, 8);
    for (size_t at = begin; at < end; at += most) {
        const size_t n = std::min(most, end - at);
        for (size_t k = 0; k < n_spans; ++k) {
            const size_t size = spans[k].nbytes;
            const byte* in = leaves[k] + at * size;
            byte* out = stage + spans[k].offset;
            copy_leaf(n, size, [=](size_t i) { return out + i * row_nbytes; }, [=](size_t i) { return in + i * size; });
        }
        copy_bytes(to + at * row_nbytes, stage, n * row_nbytes);
    }
}

}  // namespace recollect
