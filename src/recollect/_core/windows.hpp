// Where a run of consecutive samples of one segment begins and ends, and the frames that are read from runs.
//
// This is the only place that decides it for packed rows: stacks, sequences, n-step returns and relabelling ask here.
// A run never leaves its lane and never crosses the write cursor, a hole or the clipped head of the oldest segment,
// since all of that is the window of the snapshot and the segment's id on the row: two samples of a lane are in one
// run when their ids are equal. While a writer overwrites the oldest rows, their tags may be those of newer samples;
// whoever chose by them checks afterwards that what it chose is still in the window (all below it may be wrong).
#pragma once

#include <optional>

#include "rows.hpp"

namespace recollect {

struct Place {
    size_t lane;
    uint64_t position;
};

// The position of a (row, generation) that still holds the same sample.
inline std::optional<Place> place_of_row(const Memory& m, const Snapshot& s, int64_t row, int64_t generation) {
    if (row < 0 || (m.capacity && size_t(row) >= m.capacity)) return {};
    const size_t k = m.run ? size_t(row) / m.run : 0;
    const Window& v = s[k];
    uint64_t p = uint64_t(row);
    if (m.run) p = v.low + (uint64_t(row) % m.run + m.run - v.low % m.run) % m.run;
    if (p < v.low || p >= v.cursor || int64_t(m.generation(size_t(row))) != generation) return {};
    return Place{k, p};
}

inline uint64_t index_of_place(const Snapshot& s, Place at) {
    uint64_t before = 0;
    for (size_t j = 0; j < at.lane; ++j) before += s[j].count();
    return before + at.position - s[at.lane].low;
}

// Which windows are asked for: `length` samples of one segment, or with `pad` all of a shorter one.
struct Wanted {
    uint64_t length = 0;  // 0: any sample will do
    bool pad = false;
    uint64_t count_in(uint64_t n) const { return n >= length ? n - length + 1 : pad && n ? 1 : 0; }
};

constexpr size_t kTogether = 16;  // draws whose tags are fetched before the first of them is looked at

// The runs that one snapshot shows. Without segments (`tracked` false) a lane is one run.
class Runs {
  public:
    Runs(const Memory& m, const Snapshot& s, bool tracked)
        : memory_(m), snapshot_(s), tracked_(tracked && m.tagged), heads_(m.n_lanes) {
        for (size_t k = 0; k < m.n_lanes; ++k) heads_[k] = {s[k].low, m.run ? s[k].low % m.run : s[k].low};
    }

    // The row of a position in the window: as Memory::row_of, but a division is paid for once and not for each.
    size_t row(Place a) const {
        const Head& head = heads_[a.lane];
        const size_t r = head.row + (a.position - head.position);
        return memory_.run ? a.lane * memory_.run + (r >= memory_.run ? r - memory_.run : r) : r;
    }
    int64_t segment(Place a) const { return tracked_ ? memory_.segment(row(a)) : -1; }
    int64_t step(Place a) const { return tracked_ ? memory_.step(row(a)) : -1; }

    // Is position q of the same lane in the run of a? (q may be any number, also one below zero.)
    bool has(Place a, uint64_t q) const {
        const Window& w = snapshot_[a.lane];
        return q >= w.low && q < w.cursor && (!tracked_ || segment({a.lane, q}) == segment(a));
    }
    uint64_t end(Place a) const {
        const uint64_t cursor = snapshot_[a.lane].cursor;
        return tracked_ ? a.position + reach(cursor - a.position, [&](uint64_t d) { return joins(a, d); }) : cursor;
    }
    uint64_t begin(Place a) const {
        const uint64_t low = snapshot_[a.lane].low;
        return tracked_ ? a.position + 1 - reach(a.position - low + 1, [&](uint64_t d) { return joins(a, -d); }) : low;
    }
    bool starts(const Wanted& wanted, Place a) const {
        if (has(a, a.position + wanted.length - 1)) return true;
        return wanted.pad && !has(a, a.position - 1);
    }
    // Read the tags that a look from `back` before a to `ahead` after it will need. Prefetches of them are lost where the
    // translation of their address is not at hand; loads that nothing waits for go on side by side.
    void fetch(Place a, uint64_t back, uint64_t ahead) const {
        if (!tracked_) return;
        const Window& w = snapshot_[a.lane];
        const uint64_t first = a.position - std::min(back, a.position - w.low);
        const uint64_t last = a.position + std::min(ahead, w.cursor - 1 - a.position);
        for (uint64_t q : {first, a.position, last}) {
            const int64_t tag = memory_.segment(row({a.lane, q}));
            asm volatile("" : : "r"(tag));
        }
    }
    void prefetch_step(Place a) const {
        if (!tracked_) return;
        auto [c, i] = memory_.find(row(a));
        __builtin_prefetch(c->step + i);
    }

  private:
    // By id and by step: of rows that are being overwritten the id alone may be that of the open segment.
    bool joins(Place a, uint64_t d) const {
        const Place b{a.lane, a.position + d};
        return segment(b) == segment(a) && uint64_t(step(b)) - uint64_t(step(a)) == d;
    }
    // The smallest d in [1, n] for which `in(d)` is false or d == n; `in` holds up to some number and not beyond.
    template <typename In> static uint64_t reach(uint64_t n, In in) {
        uint64_t lo = 0, stride = 1;
        while (lo + stride < n && in(lo + stride)) { lo += stride; stride *= 2; }
        uint64_t hi = std::min(lo + stride, n);
        while (lo + 1 < hi) {
            const uint64_t mid = lo + (hi - lo) / 2;
            if (in(mid)) lo = mid; else hi = mid;
        }
        return hi;
    }

    struct Head { uint64_t position; size_t row; };

    const Memory& memory_;
    const Snapshot& snapshot_;
    const bool tracked_;
    std::vector<Head> heads_;  // of each lane, where its window began when the snapshot was taken
};

// Every window there is, numbered in index order; those that were overwritten while they were listed may be wrong.
class Catalogue {
  public:
    struct Entry { Place first; uint64_t count, before; };

    Catalogue(const Memory& m, const Snapshot& s, const Runs& runs, const Wanted& wanted) {
        for (size_t k = 0; k < m.n_lanes; ++k) {
            for (uint64_t p = s[k].low, end; p < s[k].cursor; p = end) {
                moment();
                end = runs.end({k, p});
                const uint64_t count = wanted.count_in(end - p);
                if (count) entries_.push_back({{k, p}, count, total_});
                total_ += count;
            }
        }
    }
    uint64_t total() const { return total_; }
    const std::vector<Entry>& entries() const { return entries_; }
    Place operator[](uint64_t i) const {
        auto after = std::upper_bound(entries_.begin(), entries_.end(), i,
                                      [](uint64_t n, const Entry& e) { return n < e.before; });
        const Entry& e = *--after;
        return {e.first.lane, e.first.position + i - e.before};
    }

  private:
    std::vector<Entry> entries_;
    uint64_t total_ = 0;
};

// Uniform draws, each a function of (key, counter) and of what there is. A start is drawn until a window begins there;
// if windows are so rare that kTries starts have none, one is chosen among all of them, so that the draw is uniform
// and ends in any case. recollect.batch.boundaries does the same for sources that are not packed rows.
class Chooser {
  public:
    static constexpr uint64_t kTries = 64;

    Chooser(const Memory& m, const Snapshot& s, const Runs& runs, Wanted wanted, uint64_t key, uint64_t counter)
        : memory_(m), snapshot_(s), runs_(runs), wanted_(wanted), key_(key), counter_(counter) {}

    std::optional<Place> choose(size_t j, uint64_t again) {
        for (uint64_t r = 0; r < kTries; ++r) {
            const Place a = try_(j, again, r);
            if (wanted_.length == 0 || runs_.starts(wanted_, a)) return a;
        }
        if (!all_) all_.emplace(memory_, snapshot_, runs_, wanted_);
        if (all_->total() == 0) return {};
        return (*all_)[draw_one(key_of(again, kTries), counter_ + j, all_->total())];
    }
    void forget() { all_.reset(); }  // the snapshot has shrunk
    void prefetch_label(Place a) const { runs_.prefetch_step(a); }
    void fetch(size_t j, uint64_t back, uint64_t ahead) const { runs_.fetch(try_(j, 0, 0), back, ahead); }

  private:
    Place try_(size_t j, uint64_t again, uint64_t r) const {
        auto [k, p] = snapshot_.place(draw_one(key_of(again, r), counter_ + j, snapshot_.total()));
        return {k, p};
    }
    uint64_t key_of(uint64_t again, uint64_t r) const {
        const uint64_t number = again * 2 * kTries + r;
        return number ? mix(key_ ^ number) : key_;
    }

    const Memory& memory_;
    const Snapshot& snapshot_;
    const Runs& runs_;
    const Wanted wanted_;
    uint64_t key_, counter_;
    std::optional<Catalogue> all_;
};

// The frames round some anchors: sample j, frame i is the row at the anchor's position plus offsets[i]. A frame outside
// the anchor's run is not valid, and the nearest valid one on the anchor's side stands in its place.
class Frames {
  public:
    Frames(const Memory& m, const Runs& runs, size_t n, const int64_t* offsets, size_t n_offsets)
        : memory_(m), runs_(runs), offsets_(offsets), t_(n_offsets), anchors_(n), lowest_(n), rows_(checked_product(n, n_offsets)),
          anchor_(size_t(std::find(offsets, offsets + n_offsets, 0) - offsets)),
          gapless_(uint64_t(offsets[n_offsets - 1]) - uint64_t(offsets[0]) == n_offsets - 1) {}

    size_t size() const { return anchors_.size(); }
    uint64_t back() const { return -uint64_t(offsets_[0]); }
    uint64_t ahead() const { return uint64_t(offsets_[t_ - 1]); }
    Place anchor(size_t j) const { return anchors_[j]; }

    void plan(size_t j, Place a, bool* valid) {
        size_t first = 0, last = t_ - 1;
        if (!runs_.has(a, at(a, first)))
            for (first = anchor_; first > 0 && runs_.has(a, at(a, first - 1));) --first;
        if (!runs_.has(a, at(a, last)))
            for (last = anchor_; last + 1 < t_ && runs_.has(a, at(a, last + 1));) ++last;
        anchors_[j] = a;
        lowest_[j] = at(a, first);
        std::fill_n(valid + j * t_, t_, false);
        std::fill_n(valid + j * t_ + first, last + 1 - first, true);
        point(j, a, first, last);
    }
    void copy(size_t from, size_t n, const Codec& codec, byte* const* leaves) const {
        in_parallel(n * t_, n * t_ * memory_.row_nbytes, [&](size_t begin, size_t end) {
            auto row = [rows = rows_.data()](size_t i) { return rows[i]; };
            gather_leaves(row, from * t_ + begin, from * t_ + end, codec.extent(), codec.spans(), codec.size(), leaves);
        });
    }
    bool is_in(const Snapshot& s, size_t j) const { return lowest_[j] >= s[anchors_[j].lane].low; }
    // Call after the copy and a look at the epochs.
    bool is_whole(size_t j) const { return lowest_[j] >= memory_.low_of(memory_.lane(anchors_[j].lane)); }
    bool all_whole(const Snapshot& s) const {
        if (s.is_untouched()) return true;
        if (!s.same_epochs()) return false;
        for (size_t j = 0; j < size(); ++j)
            if (!is_whole(j)) return false;
        return true;
    }

  private:
    uint64_t at(Place a, size_t i) const { return a.position + uint64_t(offsets_[i]); }

    void point(size_t j, Place a, size_t first, size_t last) {
        const byte** to = rows_.data() + j * t_;
        size_t r = runs_.row({a.lane, at(a, first)});
        const size_t wrap = memory_.run ? (a.lane + 1) * memory_.run : SIZE_MAX;
        if (gapless_ && memory_.run && first == 0 && last == t_ - 1 && r + last < wrap) {  // the usual case, at once
            const byte* row = memory_.row(r);
            for (size_t i = 0; i < t_; ++i, row += memory_.row_nbytes) to[i] = row;
            __builtin_prefetch(to[0]);
            return;
        }
        for (size_t i = 0; i < t_; ++i) {
            if (i > first && i <= last) {
                r += size_t(offsets_[i] - offsets_[i - 1]);
                if (r >= wrap) r -= memory_.run;
            }
            to[i] = memory_.row(r);
        }
        __builtin_prefetch(to[0]);  // where it is, is looked up meanwhile
    }

    const Memory& memory_;
    const Runs& runs_;
    const int64_t* offsets_;
    const size_t t_;
    std::vector<Place> anchors_;
    std::vector<uint64_t> lowest_;
    std::vector<const byte*> rows_;
    const size_t anchor_;
    const bool gapless_;
};

// n drawn anchors with their frames, into leaves. What was overwritten while it was copied is drawn again.
class FrameDraw {
  public:
    // `labelled`: the anchors' tags will be asked for.
    FrameDraw(Snapshot& s, Chooser& chooser, Frames& frames, bool* valid, bool labelled)
        : snapshot_(s), chooser_(chooser), frames_(frames), valid_(valid), labelled_(labelled) {}

    bool is_empty() const { return empty_; }

    // False when the whole of it must be tried again.
    bool run(const Codec* codec, byte* const* leaves) {
        const size_t n = frames_.size();
        for (size_t j = 0; j < n; ++j) {
            if (j % kTogether == 0)
                for (size_t i = j; i < std::min(j + kTogether, n); ++i) chooser_.fetch(i, frames_.back(), frames_.ahead());
            if (!choose(j, 0)) return empty_;
        }
        if (codec) frames_.copy(0, frames_.size(), *codec, leaves);
        moment();
        for (uint64_t again = 1; !frames_.all_whole(snapshot_); ++again)
            if (again > kRedraws || !snapshot_.same_epochs() || !redraw(again, codec, leaves)) return false;
        return true;
    }

  private:
    bool choose(size_t j, uint64_t again) {
        moment();
        const auto found = chooser_.choose(j, again);
        empty_ = !found;
        if (found) frames_.plan(j, *found, valid_);
        if (found && labelled_) chooser_.prefetch_label(*found);
        return found.has_value();
    }
    bool redraw(uint64_t again, const Codec* codec, byte* const* leaves) {
        moment();
        snapshot_.shrink();  // then judge by that very moment: a later one could take more than is drawn again
        moment();
        chooser_.forget();
        if (snapshot_.total() == 0) return false;
        std::vector<size_t> lapped;
        for (size_t j = 0; j < frames_.size(); ++j)
            if (!frames_.is_in(snapshot_, j)) lapped.push_back(j);
        for (size_t j : lapped) {
            if (!choose(j, again)) return false;  // begin afresh: there may be newer ones
            if (codec) frames_.copy(j, 1, *codec, leaves);
        }
        return true;
    }

    Snapshot& snapshot_;
    Chooser& chooser_;
    Frames& frames_;
    bool* valid_;
    const bool labelled_;
    bool empty_ = false;
};

}  // namespace recollect
