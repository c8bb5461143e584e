// Copies between packed rows and contiguous leaves.
//
// A row is one sample; a leaf is a run of bytes at a fixed offset in it. Libc's memcpy costs more in its call
// and size dispatch than in moving the ten to a hundred bytes of a typical leaf, so short leaves are copied by
// code that the compiler sees whole. A random place in memory is asked for some rows before it is copied, which
// hides most of its cost.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

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

// Also compiled for wide registers: 0.96 of the time of libc's memcpy for 28 kB rows in a bare C loop; in a draw no gain was seen.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(__SANITIZE_ADDRESS__)
__attribute__((target_clones("avx2", "default")))
#endif
inline void copy_long(byte* to, const byte* from, size_t n) {
    typedef uint64_t Wide __attribute__((vector_size(32)));
    size_t i = 0;
    for (; i + 4 * sizeof(Wide) <= n; i += 4 * sizeof(Wide)) {
        Wide a, b, c, d;
        std::memcpy(&a, from + i, 32), std::memcpy(&b, from + i + 32, 32);
        std::memcpy(&c, from + i + 64, 32), std::memcpy(&d, from + i + 96, 32);
        std::memcpy(to + i, &a, 32), std::memcpy(to + i + 32, &b, 32);
        std::memcpy(to + i + 64, &c, 32), std::memcpy(to + i + 96, &d, 32);
    }
    std::memcpy(to + i, from + i, n - i);
}

inline void copy_bytes(byte* to, const byte* from, size_t n) {
    if (n > 1024) { copy_long(to, from, n); return; }
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

// A leaf of `size` bytes, 16 at a time; the last word overlaps its neighbour, so that nothing beyond is touched.
template <size_t kWords> inline void copy_words(byte* to, const byte* from, size_t size) {
#pragma GCC unroll 12
    for (size_t w = 0; w + 1 < kWords; ++w) copy_fixed<16>(to + 16 * w, from + 16 * w);
    copy_fixed<16>(to + size - 16, from + size - 16);
}

// Call `each(copy)` with the `copy(to, from)` that is made for leaves of `size` bytes: the choice is made once for
// several rows, and what runs for each is straight code.
template <typename Each> [[gnu::always_inline]] inline void with_copy(size_t size, Each each) {
    auto words = [=]<size_t kWords>(std::integral_constant<size_t, kWords>) {
        each([size](byte* t, const byte* f) { copy_words<kWords>(t, f, size); });
    };
    switch (size <= 16 ? size : 16 + (size + 15) / 16) {
        case 0: return;
        case 1: return each([](byte* t, const byte* f) { copy_fixed<1>(t, f); });
        case 2: return each([](byte* t, const byte* f) { copy_fixed<2>(t, f); });
        case 4: return each([](byte* t, const byte* f) { copy_fixed<4>(t, f); });
        case 8: return each([](byte* t, const byte* f) { copy_fixed<8>(t, f); });
        case 16: return each([](byte* t, const byte* f) { copy_fixed<16>(t, f); });
        case 18: return words(std::integral_constant<size_t, 2>{});
        case 19: return words(std::integral_constant<size_t, 3>{});
        case 20: return words(std::integral_constant<size_t, 4>{});
        case 21: return words(std::integral_constant<size_t, 5>{});
        case 22: return words(std::integral_constant<size_t, 6>{});
        case 23: return words(std::integral_constant<size_t, 7>{});
        case 24: return words(std::integral_constant<size_t, 8>{});
        case 25: return words(std::integral_constant<size_t, 9>{});
        case 26: return words(std::integral_constant<size_t, 10>{});
        case 27: return words(std::integral_constant<size_t, 11>{});
        case 28: return words(std::integral_constant<size_t, 12>{});
        default: return each([size](byte* t, const byte* f) { copy_bytes(t, f, size); });
    }
}

struct Span { size_t offset; size_t nbytes; };  // a leaf's place in the row

constexpr size_t kAhead = 24;    // rows between asking for memory and copying from it
constexpr size_t kLong = 1024;   // rows from this size on are copied one by one
// The part of a row that some leaves lie in.
struct Extent {
    size_t offset = 0, nbytes = 0;
    Extent() = default;
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

// Some choices depend on who made the processor; each was measured on an AMD EPYC and on an Intel Xeon.
inline bool is_intel() {
#if defined(__x86_64__)
    static const bool found = __builtin_cpu_is("intel");
    return found;
#else
    return false;
#endif
}

enum Cache { kL1 = 3, kL2 = 2 };  // where memory that is asked for should come, in the words of __builtin_prefetch

// Ask for the first lines of a row, at most eight: beyond that the hardware has seen the stream.
template <size_t kLines, Cache kTo = kL1> inline void prefetch(const byte* at, size_t nbytes) {
#pragma GCC unroll 8
    for (size_t i = 0; i + 1 < kLines; ++i) __builtin_prefetch(at + 64 * i, 0, kTo);
    __builtin_prefetch(at + std::min<size_t>(nbytes, 512) - 1, 0, kTo);
}

// Where the rows of samples are: `find(of, i, n, rows)` writes the addresses of the rows of samples [i, i + n).
struct RowSource {
    const void* of;
    void (*find)(const void* of, size_t i, size_t n, const byte** rows);
};

// Leaves of samples [begin, end) into leaves[k] + i * size of leaf k; each row is looked for once, in order, and so may be
// up to `beyond` (at most kAhead) more, which are asked for and not copied.
void gather_leaves(const RowSource& source, size_t begin, size_t end, const Extent& extent, const Span* spans, size_t n_spans,
                   byte* const* leaves, size_t beyond = 0);

// The same of rows that `row(i)` finds. The kernels are compiled once, for all of these.
template <typename Row>
void gather_leaves(Row row, size_t begin, size_t end, const Extent& extent, const Span* spans, size_t n_spans,
                   byte* const* leaves, size_t beyond = 0) {
    const RowSource source{&row, [](const void* of, size_t i, size_t n, const byte** rows) {
        const Row find = *static_cast<const Row*>(of);  // a copy, which nothing that is written here can be
        for (size_t j = 0; j < n; ++j) rows[j] = find(i + j);
    }};
    gather_leaves(source, begin, end, extent, spans, n_spans, leaves, beyond);
}

// Leaves of samples [begin, end) into rows that follow each other from `to` on (sample 0's row): the mirror.
void scatter_leaves(byte* to, size_t row_nbytes, size_t begin, size_t end, const Span* spans, size_t n_spans,
                    const byte* const* leaves);

}  // namespace recollect
