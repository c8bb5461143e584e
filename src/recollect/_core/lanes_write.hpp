// One row to each of many lanes: what a step of a vector environment writes, one slot per lane.
//
// Each row is an append to its lane by that lane's own protocol, so readers and crashes see nothing new. What is
// saved is the way here: one call for B slots instead of B. Measured with 1,024 lanes of 48-byte rows.
#pragma once

#include "rows.hpp"

namespace recollect {

constexpr size_t kLanesAhead = 16;  // lanes whose memory is asked for before they are written

inline void ask_for(const Memory& m, size_t k) {
    const size_t r = m.row_of(k, m.lane(k).cursor.load(std::memory_order_relaxed));
    auto [chunk, i] = m.find(r);
    __builtin_prefetch(chunk->stamp + i, 1);
    __builtin_prefetch(chunk->rows + i * m.row_nbytes, 1);
    if (m.row_nbytes) __builtin_prefetch(chunk->rows + (i + 1) * m.row_nbytes - 1, 1);
    if (m.tagged) {
        __builtin_prefetch(chunk->segment + i, 1);
        __builtin_prefetch(chunk->step + i, 1);
    }
}

// Some samples of a batch, copied together: where a vector environment has slots that record nothing this step.
class Chosen {
  public:
    Chosen(const Codec& codec, const byte* const* leaves, const int64_t* rows, size_t n) : leaves_(codec.size()) {
        size_t total = 0;
        for (size_t k = 0; k < codec.size(); ++k) total = checked_size(total + aligned(checked_product(n, codec.spans()[k].nbytes)));
        block_.resize(total);
        byte* at = block_.data();
        for (size_t k = 0; k < codec.size(); ++k) {
            const size_t size = codec.spans()[k].nbytes;
            const byte* from = leaves[k];
            byte* to = at;
            with_copy(size, [=](auto copy_one) {
                for (size_t i = 0; i < n; ++i) copy_one(to + i * size, from + size_t(rows[i]) * size);
            });
            leaves_[k] = at;
            at += aligned(n * size);
        }
    }
    const byte* const* leaves() const { return leaves_.data(); }

  private:
    static size_t aligned(size_t nbytes) { return (nbytes + 15) / 16 * 16; }
    std::vector<byte> block_;
    std::vector<const byte*> leaves_;
};

// Append sample i of `leaves` to lane `lanes[i]`, and end that lane's segment where ends[i] is set. All lanes are
// claimed before the first row is written: a lane of another process means that nothing is. `look()` is called when other
// threads may have run.
template <typename Look>
void write_lanes(Memory& m, const Codec& codec, const byte* const* leaves, const int64_t* lanes, size_t n, const bool* ends,
                 const int64_t* rows, Look look) {
    for (size_t i = 0; i < n; ++i) m.keep_lane(size_t(lanes[i]));
    look();
    std::vector<Source> sources(codec.size());
    const bool bounded = m.capacity != 0;  // an unbounded lane may have to grow before it has a next row
    for (size_t i = 0; bounded && i < std::min(n, kLanesAhead); ++i) ask_for(m, size_t(lanes[i]));
    for (size_t i = 0; i < n; ++i) {
        if (bounded && i + kLanesAhead < n) ask_for(m, size_t(lanes[i + kLanesAhead]));
        for (size_t j = 0; j < codec.size(); ++j) sources[j].data = leaves[j] + (rows ? size_t(rows[i]) : i) * codec.spans()[j].nbytes;
        const OwnLane own(m, lanes[i]);
        if (own.waited) look();
        Writer(m, own.k).append(sources.data(), codec);
        if (ends && ends[i]) m.lane(own.k).open_segment.store(0, std::memory_order_release);
    }
}

}  // namespace recollect
