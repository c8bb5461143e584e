// Changes inside the window: overwrite, remove, clear. Rare, checked whole first, and safe against a kill.
#pragma once

#include <map>

#include "rows.hpp"

namespace recollect {

struct Refused : std::runtime_error { using std::runtime_error::runtime_error; };  // a segment is open

// Lanes held for one call: those this process did not hold before are given back at the end.
class Hold {
  public:
    explicit Hold(Memory& m) : memory_(m), one_at_a_time_(m.edits()) {}
    Hold(const Hold&) = delete;
    ~Hold() {
        for (auto& lock : locks_) lock.second.reset();
        for (size_t k : borrowed_) memory_.release(k, true);
    }
    bool has(size_t k) const { return locks_.count(k); }
    void take(size_t k) {
        if (has(k)) return;
        memory_.check_fork();
        const bool ours = memory_.lane(k).owner.load() == own_word();
        memory_.claim(k);
        if (!ours) borrowed_.push_back(k);
        locks_[k] = std::make_unique<Locked>(memory_.lock(k));
    }

  private:
    Memory& memory_;
    Locked one_at_a_time_;  // two edits could otherwise take their lanes in opposite orders
    std::map<size_t, std::unique_ptr<Locked>> locks_;
    std::vector<size_t> borrowed_;
};

using Places = std::vector<std::pair<size_t, uint64_t>>;  // (lane, position)

inline void check_index(int64_t i, uint64_t total) {
    if (i < 0 || uint64_t(i) >= total)
        throw std::out_of_range("index " + std::to_string(i) + " is out of range for length " + std::to_string(total));
}

// Resolve indices to places and hold their lanes; once held, those places cannot move.
inline Places hold_places(Memory& m, Hold& hold, const int64_t* index, size_t n) {
    for (;;) {
        Places places(n);
        Reader reader(m);
        bool all_held = true;
        reader.run([&] {
            const Snapshot& s = reader.snapshot();
            for (size_t i = 0; i < n; ++i) {
                check_index(index[i], s.total());
                places[i] = s.place(uint64_t(index[i]));
            }
            return true;
        });
        for (auto& [k, p] : places)
            if (!hold.has(k)) { hold.take(k); all_held = false; }
        if (all_held) return places;
    }
}

// Overwrite the rows given as (lane, row), one after the other, so that of duplicates the last wins: number i by
// `fill(its memory, i)`.
template <typename Fill>
void overwrite_by(Memory& m, const std::vector<std::pair<size_t, size_t>>& rows, Fill fill) {
    std::map<size_t, bool> lanes;
    for (auto& [k, r] : rows) lanes[k] = true;
    for (auto& [k, _] : lanes) { m.open_epoch(m.lane(k)); m.set_op(m.lane(k), kOverwrite); }
    for (size_t i = 0; i < rows.size(); ++i) {
        const size_t r = rows[i].second;
        m.begin_row(r);
        std::atomic_thread_fence(std::memory_order_release);
        fill(m.row(r), i);
        fault_point();
        m.end_row(r);
        fault_point();
    }
    for (auto& [k, _] : lanes) m.close_epoch(m.lane(k));
}

inline void copy_fields(byte* row, const Codec& codec, const byte* const* leaves, size_t i) {
    for (size_t f = 0; f < codec.size(); ++f) {
        const Span& span = codec.spans()[f];
        copy_bytes(row + span.offset, leaves[f] + i * span.nbytes, span.nbytes);
    }
}

inline void overwrite(Memory& m, const std::vector<std::pair<size_t, size_t>>& rows, const byte* const* leaves,
                      const Codec& codec) {
    overwrite_by(m, rows, [&](byte* row, size_t i) { copy_fields(row, codec, leaves, i); });
}

inline void remove_from_lane(Memory& m, size_t k, const std::vector<uint64_t>& gone) {
    Lane& w = m.lane(k);
    const Window v = m.window(k);
    const uint64_t n = gone.size(), first = gone.front(), last = gone.back();
    const uint64_t removed = w.removed.load() + n, skip = w.skip.load();
    const bool contiguous = last - first + 1 == n;
    if (contiguous && last + 1 == v.cursor)
        return m.install(k, w.tail.load(), first, w.reserved.load(), skip + n, removed);
    if (contiguous && first == v.low && m.run)
        return m.install(k, last + 1, v.cursor, w.reserved.load(), skip, removed);
    m.open_epoch(w);
    m.set_op(w, kMark);
    for (uint64_t p : gone) { m.stamp(m.row_of(k, p)).fetch_or(kTomb); fault_point(); }
    m.split_at_tombs(k, first, last);
    m.compact(k, first, last, n, removed);
    m.close_epoch(w);
}

// `index` is sorted and without duplicates.
inline void remove_samples(Memory& m, const int64_t* index, size_t n) {
    if (n == 0) return;
    Hold hold(m);
    const Places places = hold_places(m, hold, index, n);
    for (size_t i = 1; i < n; ++i)
        if (index[i] <= index[i - 1]) throw std::invalid_argument("index: must be ascending");
    std::map<size_t, std::vector<uint64_t>> by_lane;
    for (auto& [k, p] : places) {
        const uint64_t open = m.lane(k).open_segment.load();
        if (m.tagged && open && m.segment(m.row_of(k, p)) == int64_t(open))
            throw Refused("a sample of the open segment cannot be removed; call mark_segment_end() first");
        by_lane[k].push_back(p);
    }
    for (auto& [k, gone] : by_lane) remove_from_lane(m, k, gone);
}

inline void clear_all(Memory& m) {
    Hold hold(m);
    for (size_t k = 0; k < m.n_lanes; ++k) hold.take(k);
    for (size_t k = 0; k < m.n_lanes; ++k) {
        Lane& w = m.lane(k);
        const Window v = m.window(k);
        w.open_segment.store(0);
        // A ring starts again at row 0: the next multiple of its run. Generations go on in the stamps.
        const uint64_t at = m.run ? (m.checked(std::max(w.reserved.load(), v.cursor)) + m.run - 1) / m.run * m.run : 0;
        m.install(k, at, at, at, v.cursor + w.skip.load() - at, w.removed.load() + v.count());
    }
}

}  // namespace recollect
