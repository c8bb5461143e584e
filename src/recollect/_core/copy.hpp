// Copies between packed rows and contiguous leaves.
//
// A row is one sample; a leaf is a run of bytes at a fixed offset in it. Libc's memcpy costs more in its call
// and size dispatch than in moving the ten to a hundred bytes of a typical leaf, so short leaves are copied by
// code that the compiler sees whole. Rows are visited in blocks: the next block is prefetched while this one is
// copied, which hides most of the cost of a random place in memory.
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
    if (n > 256) { std::memcpy(to, from, n); return; }
    if (n >= 16) {  // whole 16-byte words, the last one overlapping its neighbour
        size_t i = 0;
        for (; i + 16 <= n; i += 16) copy_fixed<16>(to + i, from + i);
        if (i < n) copy_fixed<16>(to + n - 16, from + n - 16);
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

inline void prefetch_row(const byte* row, size_t nbytes) {
    const size_t reach = std::min<size_t>(nbytes, 512);  // beyond that the hardware has seen the stream
    for (size_t i = 0; i < reach; i += 64) __builtin_prefetch(row + i);
    __builtin_prefetch(row + reach - 1);  // the row may straddle one line more
}

constexpr size_t kBlock = 16;                 // rows in flight between prefetch and copy
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

// Rows `row_at(i)` for i in [begin, end) into leaves[k] + i * size of leaf k.
template <typename RowAt>
void gather_leaves(size_t begin, size_t end, RowAt row_at, size_t row_nbytes, const Span* spans, size_t n_spans,
                   byte* const* leaves) {
    const byte* now[kBlock];
    const byte* next[kBlock];
    auto look = [&](size_t at, const byte** into) {
        const size_t n = at < end ? std::min(kBlock, end - at) : 0;
        for (size_t i = 0; i < n; ++i) { into[i] = row_at(at + i); prefetch_row(into[i], row_nbytes); }
        return n;
    };
    size_t n_now = look(begin, now);
    for (size_t at = begin; at < end; at += kBlock) {
        const size_t n_next = look(at + kBlock, next);
        for (size_t k = 0; k < n_spans; ++k) {
            const size_t size = spans[k].nbytes, offset = spans[k].offset;
            byte* out = leaves[k] + at * size;
            copy_leaf(n_now, size, [=](size_t i) { return out + i * size; },
                      [&](size_t i) { return now[i] + offset; });
        }
        std::copy(next, next + n_next, now);
        n_now = n_next;
    }
}

// Leaves of samples [begin, end) into rows `row_at(i)`; the mirror of gather_leaves.
template <typename RowAt>
void scatter_leaves(size_t begin, size_t end, RowAt row_at, const Span* spans, size_t n_spans,
                    const byte* const* leaves) {
    byte* rows[kBlock * 4];
    for (size_t at = begin; at < end; at += kBlock * 4) {
        const size_t n = std::min(kBlock * 4, end - at);
        for (size_t i = 0; i < n; ++i) rows[i] = row_at(at + i);
        for (size_t k = 0; k < n_spans; ++k) {
            const size_t size = spans[k].nbytes, offset = spans[k].offset;
            const byte* in = leaves[k] + at * size;
            copy_leaf(n, size, [&](size_t i) { return rows[i] + offset; }, [=](size_t i) { return in + i * size; });
        }
    }
}

}  // namespace recollect
