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

// Rows of up to `kLines` lines, a few at a time and leaf by leaf; each is asked for kAhead rows before its copy, and again
// nearer to it. AMD's processor drops requests when too many are under way, and those would be waited for: three of them
// (256 rows of 168 bytes in times of plain C; once: 1.3, twice: 1.04, three times: 0.97). Intel's never drops one but has
// few places for what goes to its first cache: the first request goes to the second, which has more (once or three
// times: 1.13, by the second cache: 0.93).
// While the last are copied, those of the next `beyond` (at most kAhead) are asked for.
template <size_t kLines, Cache kFirst, typename Row>
void gather_short(Row row, size_t begin, size_t end, size_t beyond, const Extent& extent, const Span* spans,
                  size_t n_spans, byte* const* leaves) {
    constexpr size_t kGroup = kLines <= 5 ? 4 : 2, kBlock = 512;
    constexpr size_t kSoon = kAhead * 2 / 3, kSooner = kAhead / 3;
    const byte* rows[kBlock + kAhead];
    for (size_t at = begin; at < end; at += kBlock) {
        const size_t n = std::min(kBlock, end - at), to_ask = at + n < end ? n : n + beyond;
        size_t asked = 0;
        auto ask = [&] {
            rows[asked] = row(at + asked) + extent.offset;
            prefetch<kLines, kFirst>(rows[asked], extent.nbytes);
            ++asked;
        };
        auto copy = [&](size_t i, auto group) {
            for (size_t k = 0; k < n_spans; ++k) {
                const size_t size = spans[k].nbytes, offset = spans[k].offset - extent.offset;
                // By value throughout: the copies store bytes, which might be anything that is reached by reference.
                with_copy(size, [=, to = leaves[k] + (at + i) * size, from = rows + i](auto copy_one) {
                    byte* t = to;
                    for (size_t j = 0; j < group(); ++j, t += size) copy_one(t, from[j] + offset);
                });
            }
        };
        while (asked < std::min(kAhead, to_ask)) ask();  // also of the next ones: below, those soon to be copied have been asked for
        size_t i = 0;
        for (; i + kGroup <= n; i += kGroup) {
            if (asked + kGroup <= to_ask) {
#pragma GCC unroll 4
                for (size_t j = 0; j < kGroup; ++j) {
                    ask();
                    if constexpr (kFirst == kL1) prefetch<kLines>(rows[i + kSoon + j], extent.nbytes);
                    prefetch<kLines>(rows[i + kSooner + j], extent.nbytes);
                }
            } else {
                while (asked < to_ask) ask();
            }
            copy(i, std::integral_constant<size_t, kGroup>{});
        }
        while (asked < to_ask) ask();
        if (i < n) copy(i, [rest = n - i] { return rest; });
    }
}

// The lines of a long row, asked for a few at a time while the row before it is copied: of that one the hardware has
// seen the stream, of this one it has not.
class Lines {
  public:
    Lines(const byte* at, size_t nbytes) : at_(at), end_(at + nbytes) {}
    void ask() {
        for (size_t i = 0; i < 4 && at_ < end_; ++i, at_ += 64) __builtin_prefetch(at_);
    }

  private:
    const byte *at_, *end_;
};

inline void copy_asking(byte* to, const byte* from, size_t n, Lines& lines) {
    constexpr size_t kPiece = 2048;
    for (size_t i = 0; i < n; i += kPiece) {
        lines.ask();
        copy_bytes(to + i, from + i, std::min(kPiece, n - i));
    }
}

// Leaves of samples [begin, end) into leaves[k] + i * size of leaf k; `row(i)` is called once, in order, for where
// the row of sample i is, and may be for up to `beyond` more, which are asked for and not copied.
template <typename Row>
void gather_leaves(Row row, size_t begin, size_t end, const Extent& extent, const Span* spans, size_t n_spans,
                   byte* const* leaves, size_t beyond = 0) {
    auto short_rows = [&]<size_t kLines>(std::integral_constant<size_t, kLines>) {
        if (is_intel()) gather_short<kLines, kL2>(row, begin, end, beyond, extent, spans, n_spans, leaves);
        else gather_short<kLines, kL1>(row, begin, end, beyond, extent, spans, n_spans, leaves);
    };
    if (extent.nbytes == 0) return;
    if (extent.nbytes < kLong) {
        switch ((extent.nbytes + 63) / 64) {
            case 1: return short_rows(std::integral_constant<size_t, 2>{});
            case 2: return short_rows(std::integral_constant<size_t, 3>{});
            case 3: return short_rows(std::integral_constant<size_t, 4>{});
            case 4: return short_rows(std::integral_constant<size_t, 5>{});
            case 5: return short_rows(std::integral_constant<size_t, 6>{});
            case 6: return short_rows(std::integral_constant<size_t, 7>{});
            case 7: return short_rows(std::integral_constant<size_t, 8>{});
            default: return short_rows(std::integral_constant<size_t, 9>{});
        }
    }
    const byte* next = begin < end ? row(begin) : nullptr;
    for (size_t i = begin; i < end; ++i) {
        const byte* at = next;
        const bool asks = i + 1 < end + beyond;
        if (asks) next = row(i + 1);
        Lines lines(next + extent.offset, asks ? extent.nbytes : 0);
        for (size_t k = 0; k < n_spans; ++k)
            copy_asking(leaves[k] + i * spans[k].nbytes, at + spans[k].offset, spans[k].nbytes, lines);
    }
}

// Leaves of samples [begin, end) into rows that follow each other from `to` on (sample 0's row): the mirror.
inline void scatter_leaves(byte* to, size_t row_nbytes, size_t begin, size_t end, const Span* spans, size_t n_spans,
                           const byte* const* leaves) {
    const size_t group = row_nbytes < kLong ? 16 : 1;
    for (size_t i = begin; i < end; i += group) {
        const size_t n = std::min(group, end - i);
        for (size_t k = 0; k < n_spans; ++k) {
            const size_t size = spans[k].nbytes;
            const byte* in = leaves[k] + i * size;
            byte* out = to + i * row_nbytes + spans[k].offset;
            with_copy(size, [=](auto copy_one) {
                const byte* f = in;
                byte* t = out;
                for (size_t j = 0; j < n; ++j, f += size, t += row_nbytes) copy_one(t, f);
            });
        }
    }
}

}  // namespace recollect
