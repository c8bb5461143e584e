// The kernels of copy.hpp, compiled once.
#include "copy.hpp"

namespace recollect {
namespace {

constexpr size_t kFound = 16;  // rows that are looked for at a time

// Rows of up to `kLines` lines, a few at a time and leaf by leaf; each is asked for kAhead rows before its copy, and again
// nearer to it. AMD's processor drops requests when too many are under way, and those would be waited for: three of them
// (256 rows of 168 bytes in times of plain C; once: 1.3, twice: 1.04, three times: 0.97). Intel's never drops one but has
// few places for what goes to its first cache: the first request goes to the second, which has more (once or three
// times: 1.13, by the second cache: 0.93).
// While the last are copied, those of the next `beyond` (at most kAhead) are asked for.
template <size_t kLines, Cache kFirst>
void gather_short(const RowSource& source, size_t begin, size_t end, size_t beyond, const Extent& extent, const Span* spans,
                  size_t n_spans, byte* const* leaves) {
    constexpr size_t kGroup = kLines <= 5 ? 4 : 2, kBlock = 512;
    constexpr size_t kSoon = kAhead * 2 / 3, kSooner = kAhead / 3;
    const size_t offset_of_all = extent.offset, nbytes = extent.nbytes;
    const byte* rows[kBlock + kAhead];
    for (size_t at = begin; at < end; at += kBlock) {
        const size_t n = std::min(kBlock, end - at), to_ask = at + n < end ? n : n + beyond;
        size_t asked = 0, found = 0;
        auto ask = [&] {
            if (asked == found) {
                const size_t more = std::min(kFound, to_ask - found);
                source.find(source.of, at + found, more, rows + found);
                found += more;
            }
            prefetch<kLines, kFirst>(rows[asked] + offset_of_all, nbytes);
            ++asked;
        };
        auto copy = [&](size_t i, auto group) {
            for (size_t k = 0; k < n_spans; ++k) {
                const size_t size = spans[k].nbytes, offset = spans[k].offset;
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
                    if constexpr (kFirst == kL1) prefetch<kLines>(rows[i + kSoon + j] + offset_of_all, nbytes);
                    prefetch<kLines>(rows[i + kSooner + j] + offset_of_all, nbytes);
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

}  // namespace

void gather_leaves(const RowSource& source, size_t begin, size_t end, const Extent& extent, const Span* spans, size_t n_spans,
                   byte* const* leaves, size_t beyond) {
    auto short_rows = [&]<size_t kLines>(std::integral_constant<size_t, kLines>) {
        if (is_intel()) gather_short<kLines, kL2>(source, begin, end, beyond, extent, spans, n_spans, leaves);
        else gather_short<kLines, kL1>(source, begin, end, beyond, extent, spans, n_spans, leaves);
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
    const byte* next = nullptr;
    if (begin < end) source.find(source.of, begin, 1, &next);
    for (size_t i = begin; i < end; ++i) {
        const byte* at = next;
        const bool asks = i + 1 < end + beyond;
        if (asks) source.find(source.of, i + 1, 1, &next);
        Lines lines(next + extent.offset, asks ? extent.nbytes : 0);
        for (size_t k = 0; k < n_spans; ++k)
            copy_asking(leaves[k] + i * spans[k].nbytes, at + spans[k].offset, spans[k].nbytes, lines);
    }
}

void scatter_leaves(byte* to, size_t row_nbytes, size_t begin, size_t end, const Span* spans, size_t n_spans,
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
