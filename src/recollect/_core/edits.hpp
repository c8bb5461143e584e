// Changes inside the window: overwrite, remove, clear. Rare, checked whole first, and safe against a kill.
#pragma once

#include <map>
#include <set>

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
    bool has(size_t k) const {
        const auto found = locks_.find(k);
        return found != locks_.end() && found->second;
    }
    void take(size_t k) {
        if (has(k)) return;
        std::optional<Locked>& lock = locks_[k];
        borrowed_.reserve(borrowed_.size() + 1);
        for (;;) {
            const bool fresh = memory_.claim(k);
            lock.emplace(memory_.lock(k));
            if (fresh) borrowed_.push_back(k);
            if (memory_.is_ours(k)) return;
            lock.reset();  // another thread has released it meanwhile
            if (fresh) borrowed_.pop_back();
        }
    }

  private:
    Memory& memory_;
    Locked one_at_a_time_;  // two edits could otherwise take their lanes in opposite orders
    std::map<size_t, std::optional<Locked>> locks_;
    std::vector<size_t> borrowed_;
};

// A change in place of lane k, which the caller holds. One that an exception cuts short is taken back or finished at once, as
// that of a killed process would be by whoever comes next: while this process lives nobody else would.
class Change {
  public:
    Change(Memory& m, size_t k, uint64_t op) : memory_(m), k_(k) {
        m.open_epoch(m.lane(k));
        m.set_op(m.lane(k), op);
    }
    Change(const Change&) = delete;
    ~Change() {
        if (ended_) return;
        try { memory_.repair(k_); }
        catch (const std::exception&) {}  // the first one is on its way
    }
    void end() {
        memory_.close_epoch(memory_.lane(k_));
        ended_ = true;
    }

  private:
    Memory& memory_;
    const size_t k_;
    bool ended_ = false;
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

// Overwrite row r by `fill(its memory)`; its lane is being changed.
template <typename Fill> void overwrite_row(Memory& m, size_t r, Fill fill) {
    m.begin_row(r);
    std::atomic_thread_fence(std::memory_order_release);
    fill(m.row(r));
    fault_point();
    m.end_row(r);
    fault_point();
}

inline void copy_fields(byte* row, const Codec& codec, const byte* const* leaves, size_t i) {
    for (size_t f = 0; f < codec.size(); ++f) {
        const Span& span = codec.spans()[f];
        copy_bytes(row + span.offset, leaves[f] + i * span.nbytes, span.nbytes);
    }
}

// Overwrite the rows given as (lane, row), one after the other, so that of duplicates the last wins.
inline void overwrite(Memory& m, const std::vector<std::pair<size_t, size_t>>& rows, const byte* const* leaves,
                      const Codec& codec) {
    std::set<size_t> lanes;  // all memory is taken before the first lane is touched
    for (auto& [k, r] : rows) lanes.insert(k);
    for (size_t k : lanes) { m.open_epoch(m.lane(k)); m.set_op(m.lane(k), kOverwrite); }
    for (size_t i = 0; i < rows.size(); ++i)
        overwrite_row(m, rows[i].second, [&](byte* row) { copy_fields(row, codec, leaves, i); });
    for (size_t k : lanes) m.close_epoch(m.lane(k));
}

inline void remove_from_lane(Memory& m, size_t k, const std::vector<uint64_t>& gone) {
    Lane& w = m.lane(k);
    const Window v = m.window(k);
    const uint64_t n = gone.size(), first = gone.front(), last = gone.back();
    const uint64_t removed = w.removed.load() + n, skip = w.skip.load();
    const bool contiguous = last - first + 1 == n;
    if (first < v.low || last >= v.cursor) m.damaged("a window from " + std::to_string(v.low) + " to " + std::to_string(v.cursor));
    if (contiguous && last + 1 == v.cursor)
        return m.install(k, w.tail.load(), first, w.reserved.load(), skip + n, removed);
    if (contiguous && first == v.low && m.run)
        return m.install(k, last + 1, v.cursor, w.reserved.load(), skip, removed);
    Change change(m, k, kMark);
    for (uint64_t p : gone) { m.stamp(m.row_of(k, p)).fetch_or(kTomb); fault_point(); }
    moment();
    m.split_at_tombs(k, v, first, last);
    m.compact(k, v, first, last, n, removed);
    change.end();
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
