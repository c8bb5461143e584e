// Rows: any whole value. Reading, drawing and writing packed rows over the memory of lanes.hpp.
#pragma once

#include "codec.hpp"
#include "lanes.hpp"
#include "parallel.hpp"
#include "stream.hpp"

namespace recollect {

constexpr size_t kHoldGil = 64 * 1024;   // copies smaller than this are over before another thread could start
constexpr uint64_t kRedraws = 64;        // rounds of drawing lapped rows again before the whole draw starts afresh
constexpr size_t kLooks = 256;           // at lanes that change while they are looked at, before the last look counts
constexpr double kContention_s = 1.0;    // how long a read may be lapped
constexpr double kLookAtOwner_s = 0.002; // after waiting this long for a change to end, ask whether its writer lives

inline uint64_t mix(uint64_t z) {  // the SplitMix64 finaliser
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return z ^ (z >> 31);
}
// Number `counter` of the stream `key`, uniform in [0, bound) without bias.
inline uint64_t draw_one(uint64_t key, uint64_t counter, uint64_t bound) {
    uint64_t x = mix(key + (counter + 1) * 0x9E3779B97F4A7C15ull);
    unsigned __int128 m = static_cast<unsigned __int128>(x) * bound;
    if (static_cast<uint64_t>(m) < bound) [[unlikely]] {
        const uint64_t threshold = -bound % bound;
        while (static_cast<uint64_t>(m) < threshold) {
            x = mix(x ^ 0xD1B54A32D192ED03ull);
            m = static_cast<unsigned __int128>(x) * bound;
        }
    }
    return static_cast<uint64_t>(m >> 64);
}

// A stream of draws: its state is a key and how many were drawn.
struct Stream { uint64_t key = 0, counter = 0; };

// What all lanes show at one moment, and the order in which their samples are numbered.
class Snapshot {
  public:
    explicit Snapshot(const Memory& m) : memory_(m), windows_(m.n_lanes <= 8 ? small_ : new Window[m.n_lanes]) {}
    ~Snapshot() { if (windows_ != small_) delete[] windows_; }
    Snapshot(const Snapshot&) = delete;

    // One moment of all lanes; false while one of them is being changed in place.
    bool take() {
        if (!look()) return false;
        for (size_t again = 0; memory_.n_lanes > 1 && again < kLooks && !is_one_moment(); ++again)
            if (!look()) return false;
        return true;
    }
    uint64_t total() const { return total_; }
    size_t changing() const { return changing_; }
    const Window& operator[](size_t k) const { return windows_[k]; }

    // Index i as (lane, position).
    std::pair<size_t, uint64_t> place(uint64_t i) const {
        size_t k = 0;
        while (i >= windows_[k].count()) i -= windows_[k++].count();
        return {k, windows_[k].low + i};
    }
    size_t row(uint64_t i) const {
        auto [k, p] = place(i);
        return memory_.row_of(k, p);
    }
    // True if nothing at all has moved out of these windows since they were taken.
    bool is_untouched() const {
        std::atomic_thread_fence(std::memory_order_acquire);
        for (size_t k = 0; k < memory_.n_lanes; ++k)
            if (memory_.lane(k).epoch.load(std::memory_order_relaxed) != windows_[k].epoch ||
                std::min(memory_.low_of(memory_.lane(k)), windows_[k].cursor) > windows_[k].low) return false;
        return true;
    }
    bool same_epochs() const {
        std::atomic_thread_fence(std::memory_order_acquire);
        for (size_t k = 0; k < memory_.n_lanes; ++k)
            if (memory_.lane(k).epoch.load(std::memory_order_relaxed) != windows_[k].epoch) return false;
        return true;
    }
    // Is what index i meant still readable now? Call after same_epochs() and a copy.
    bool is_live(uint64_t i) const {
        auto [k, p] = place(i);
        return p >= memory_.low_of(memory_.lane(k));
    }
    // The windows of an earlier snapshot instead of these.
    void restore(const Window* windows) {
        total_ = 0;
        for (size_t k = 0; k < memory_.n_lanes; ++k) total_ += (windows_[k] = memory_.within(windows[k])).count();
    }
    // Leave out what the next `headroom` rows of each lane will overwrite.
    void leave_room(uint64_t headroom) {
        total_ = 0;
        for (size_t k = 0; k < memory_.n_lanes; ++k) {
            Window& w = windows_[k];
            const uint64_t end = w.cursor + headroom, run = memory_.run;
            w.low = std::min(w.cursor, std::max(w.low, run && end > run ? end - run : 0));
            total_ += w.count();
        }
    }
    // Leave out what has been overwritten meanwhile.
    void shrink() {
        total_ = 0;
        for (size_t k = 0; k < memory_.n_lanes; ++k) {
            windows_[k].low = std::clamp(memory_.low_of(memory_.lane(k)), windows_[k].low, windows_[k].cursor);
            total_ += windows_[k].count();
        }
    }

  private:
    bool look() {
        total_ = 0;
        for (size_t k = 0; k < memory_.n_lanes; ++k) {
            if (k) moment();
            windows_[k] = memory_.window(k);
            if (windows_[k].epoch & 1) { changing_ = k; return false; }
            total_ += windows_[k].count();
        }
        return true;
    }
    // Lanes are looked at one after the other. If none has a new sample when all have been seen, then between the two
    // looks all were as we have them. (What has left a lane since is found out after the copy, as always.)
    bool is_one_moment() const {
        for (size_t k = 0; k < memory_.n_lanes; ++k)
            if (memory_.lane(k).cursor.load(std::memory_order_acquire) != windows_[k].cursor) return false;
        return same_epochs();
    }

    const Memory& memory_;
    Window small_[8];
    Window* windows_;
    uint64_t total_ = 0;
    size_t changing_ = 0;
};

struct Lapped : std::runtime_error { using std::runtime_error::runtime_error; };

// A source of row addresses for one lane: adds and one comparison, no division.
class RowAddress {
  public:
    RowAddress(const Memory& m, const Snapshot& s) : memory_(m), snapshot_(s) {
        if (m.n_lanes == 1 && m.capacity) {
            base_ = m.row(0);
            first_ = s[0].low % m.run;
            run_ = m.run;
            nbytes_ = m.row_nbytes;
        }
    }
    const byte* operator()(uint64_t i) const {
        if (!base_) return memory_.row(snapshot_.row(i));
        uint64_t r = first_ + i;
        if (r >= run_) r -= run_;
        return base_ + r * nbytes_;
    }

  private:
    const Memory& memory_;
    const Snapshot& snapshot_;
    const byte* base_ = nullptr;
    uint64_t first_ = 0, run_ = 0, nbytes_ = 0;
};

class Reader {
  public:
    explicit Reader(Memory& m) : memory_(m), snapshot_(m) {}
    Snapshot& snapshot() { return snapshot_; }

    // Call `attempt()` on a fresh snapshot until it returns true.
    template <typename Attempt> void run(Attempt attempt) {
        double start = 0;  // of the trouble, if there is any
        for (;;) {
            if (snapshot_.take()) {
                if (!memory_.capacity) memory_.find_rows(snapshot_[0].cursor);
                if (attempt()) return;
                if (start == 0) start = monotonic_s();
            } else {
                if (start == 0) start = monotonic_s();
                wait_for_change(start);
            }
            if (monotonic_s() - start > kContention_s)
                throw Lapped("a read was lapped by writers for 1 s; read newer samples or a larger buffer");
        }
    }

  private:
    // A change in place is short unless its writer was killed in it; then whoever comes first finishes it.
    void wait_for_change(double start) {
        const size_t k = snapshot_.changing();
        std::this_thread::yield();
        if (monotonic_s() - start < kLookAtOwner_s) return;
        const Lane& w = memory_.lane(k);
        const uint64_t owner = w.owner.load(std::memory_order_acquire);
        if (owner && memory_.life(owner) != Life::kDead) { nap(50'000); return; }
        if (!memory_.can_repair || memory_.is_forked_copy())
            throw Lapped("its writer was killed while it changed samples in place; open it for writing once to repair it");
        if (memory_.try_claim(k)) memory_.release(k, true);
    }

    Memory& memory_;
    Snapshot snapshot_;
};

// Were all these samples whole while they were copied?
template <typename Index> bool all_whole(const Snapshot& s, size_t n, Index index) {
    moment();
    if (s.is_untouched()) return true;
    if (!s.same_epochs()) return false;
    for (size_t i = 0; i < n; ++i)
        if (!s.is_live(index(i))) return false;
    return true;
}

// Copy samples [0, n) into leaves. `index(i)` is called once per sample, and may be for the `beyond` that are read next.
template <typename Index>
void gather(const Memory& m, const Snapshot& s, size_t n, Index index, const Codec& codec, byte* const* leaves,
            size_t beyond = 0) {
    const RowAddress address(m, s);
    in_parallel(n, n * m.row_nbytes, [&](size_t begin, size_t end) {
        // By value: the copies store bytes, which might be anything that is reached by reference.
        auto row = [address, index](size_t i) { return address(index(i)); };
        gather_leaves(row, begin, end, codec.extent(), codec.spans(), codec.size(), leaves, end == n ? beyond : 0);
    });
}

inline void copy_sample(const Memory& m, size_t row, size_t i, const Codec& codec, byte* const* leaves) {
    for (size_t k = 0; k < codec.size(); ++k) {
        const Span& span = codec.spans()[k];
        copy_bytes(leaves[k] + i * span.nbytes, m.row(row) + span.offset, span.nbytes);
    }
}

// n uniform draws into leaves; false when the whole of it must be tried again. While the last rows are copied, those
// of the draws from `next` on are asked for: whoever draws again soon finds them there.
class Draw {
  public:
    Draw(Memory& m, Snapshot& s, uint64_t key, uint64_t counter, uint64_t next, size_t n)
        : memory_(m), snapshot_(s), key_(key), counter_(counter), next_(next), n_(n) {}

    bool run(const Codec& codec, byte* const* leaves) {
        auto drawn = [key = key_, n = n_, counter = counter_, next = next_ - n_, total = snapshot_.total()](size_t i) {
            return draw_one(key, (i < n ? counter : next) + i, total);
        };
        gather(memory_, snapshot_, n_, drawn, codec, leaves, kAhead);
        if (all_whole(snapshot_, n_, drawn)) return true;
        index_.resize(n_);
        for (size_t i = 0; i < n_; ++i) index_[i] = drawn(i);
        for (uint64_t again = 1; again <= kRedraws && snapshot_.same_epochs() && redraw(again, codec, leaves); ++again)
            if (all_whole(snapshot_, n_, [this](size_t i) { return index_[i]; })) return true;
        return false;
    }

    uint64_t redrawn() const { return redrawn_; }

  private:
    // Draw again what was overwritten while it was copied, from what is left of the snapshot.
    bool redraw(uint64_t again, const Codec& codec, byte* const* leaves) {
        const size_t n = n_;
        std::vector<std::pair<size_t, uint64_t>> places(n);
        for (size_t i = 0; i < n; ++i) places[i] = snapshot_.place(index_[i]);
        snapshot_.shrink();
        if (snapshot_.total() == 0) return false;
        std::vector<uint64_t> before(memory_.n_lanes, 0);  // indices count from the oldest: what stays is renumbered
        for (size_t k = 1; k < memory_.n_lanes; ++k) before[k] = before[k - 1] + snapshot_[k - 1].count();
        for (size_t i = 0; i < n; ++i) {
            auto [k, p] = places[i];
            if (p >= snapshot_[k].low) { index_[i] = before[k] + p - snapshot_[k].low; continue; }
            index_[i] = draw_one(mix(key_ ^ again), counter_ + i, snapshot_.total());
            copy_sample(memory_, snapshot_.row(index_[i]), i, codec, leaves);
            ++redrawn_;
        }
        return true;
    }

    Memory& memory_;
    Snapshot& snapshot_;
    uint64_t key_, counter_, next_;
    size_t n_;
    std::vector<uint64_t> index_;  // made when something was overwritten: until then they are what the stream says
    uint64_t redrawn_ = 0;
};

// How a block of rows ends segments. Without tags nothing of it matters.
struct Ends {
    const bool* flags = nullptr;  // one per row: a segment ends after it
    bool keep_open = false;          // rows after the last end stay in the open segment
};

// Other values for some leaves of some samples of a block, which are ascending: they are there before the row is.
struct Patches {
    struct Leaf { Span span; const byte* values; };  // as many values as the block has samples
    const int64_t* samples = nullptr;
    size_t n = 0;
    std::vector<Leaf> leaves;
};

class Writer {
  public:
    Writer(Memory& m, size_t k, const Patches* patches = nullptr) : memory_(m), lane_(m.lane(k)), k_(k), patches_(patches) {}

    // Write n rows of leaves at the cursor, in pieces of half a lane so that rows stay readable meanwhile.
    void write(const byte* const* leaves, size_t n, const Codec& codec, Ends ends) {
        std::vector<const byte*> at(leaves, leaves + codec.size());
        size_t done = 0;
        uint64_t cursor = memory_.cursor_of(k_);
        int64_t segment = memory_.tagged ? int64_t(lane_.open_segment.load()) : 0, step = next_step(segment, cursor);
        const bool oversized = memory_.run && n >= memory_.run;
        if (oversized) {
            // Only the newest stay, from row 0 on; the others are offered and gone in the same moment.
            done = n - memory_.run;
            advance(at, codec, done);
            for (size_t i = 0; i < done; ++i) after_row(i, ends, segment, step, true);
        }
        const size_t half = memory_.run ? std::max<size_t>(memory_.run / 2, 1) : n;
        for (bool first = oversized; done < n; first = false) {
            const size_t piece = std::min(half, n - done);
            const uint64_t start = first ? round_up(cursor) : cursor;
            put(at.data(), done, piece, codec, start, [&](size_t i, size_t row) {
                if (segment == 0) segment = memory_.new_segment(k_), step = 0;
                memory_.set_tag(row, segment, step);
                after_row(done + i, ends, segment, step, false);
            });
            done += piece;
            if (memory_.tagged && ends.keep_open) lane_.open_segment.store(segment, std::memory_order_relaxed);
            if (first) {
                const uint64_t offered = cursor + lane_.skip.load() + done;
                memory_.install(k_, start, start + piece, lane_.reserved.load(), offered - (start + piece),
                                lane_.removed.load());
            } else {
                lane_.cursor.store(start + piece, std::memory_order_release);
            }
            cursor = start + piece;
            advance(at, codec, piece);
        }
        if (n && memory_.tagged && !ends.keep_open) lane_.open_segment.store(0, std::memory_order_relaxed);
        memory_.tell_waiters();
    }

    void append(const Source* sources, const Codec& codec) {
        append_by([&](byte* row, size_t) {
            for (size_t k = 0; k < codec.size(); ++k)
                copy_bytes(row + codec.spans()[k].offset, sources[k].data, codec.spans()[k].nbytes);
        });
    }

    // One row at the cursor, by `fill(its memory, its number)`, which may also change its tag.
    template <typename Fill> size_t append_by(Fill fill) {
        const uint64_t p = memory_.cursor_of(k_);
        memory_.reach(p + 1);
        const size_t r = memory_.row_of(k_, p);
        int64_t segment = 0, step = 0;
        if (memory_.tagged) {
            segment = int64_t(lane_.open_segment.load(std::memory_order_relaxed));
            step = next_step(segment, p);
            if (segment == 0) lane_.open_segment.store(segment = memory_.new_segment(k_), std::memory_order_relaxed);
        }
        reserve(p + 1);
        memory_.begin_row(r);
        std::atomic_thread_fence(std::memory_order_release);
        fault_point();
        if (memory_.tagged) memory_.set_tag(r, segment, step);
        fill(memory_.row(r), r);
        memory_.end_row(r);
        fault_point();
        lane_.cursor.store(p + 1, std::memory_order_release);
        fault_point();
        return r;
    }

  private:
    uint64_t round_up(uint64_t p) const { return (p + memory_.run - 1) / memory_.run * memory_.run; }

    void reserve(uint64_t end) {
        if (lane_.reserved.load(std::memory_order_relaxed) < end) lane_.reserved.store(end, std::memory_order_relaxed);
        std::atomic_thread_fence(std::memory_order_release);
        fault_point();
    }

    // The step that follows the newest row, if that row is in the open segment.
    int64_t next_step(int64_t segment, uint64_t cursor) const {
        if (!memory_.tagged || segment == 0 || cursor == 0 || memory_.window(k_).count() == 0) return 0;
        const size_t r = memory_.row_of(k_, cursor - 1);
        return memory_.segment(r) == segment ? int64_t(uint64_t(memory_.step(r)) + 1) : 0;
    }

    void after_row(size_t i, const Ends& ends, int64_t& segment, int64_t& step, bool skipped) {
        if (!memory_.tagged) return;
        if (skipped && segment == 0) segment = memory_.new_segment(k_), step = 0;
        step = int64_t(uint64_t(step) + 1);
        if (ends.flags && ends.flags[i]) segment = 0;
    }

    static void advance(std::vector<const byte*>& at, const Codec& codec, size_t n) {
        for (size_t k = 0; k < codec.size(); ++k) at[k] += n * codec.spans()[k].nbytes;
    }

    // Samples [base, base + n) of a block, whose leaves begin with sample `base`.
    template <typename Tag>
    void put(const byte* const* leaves, size_t base, size_t n, const Codec& codec, uint64_t start, Tag tag) {
        memory_.reach(start + n);
        reserve(start + n);
        memory_.each_run(k_, start, n, [&](const Chunk& c, size_t first, size_t, size_t count) {
            for (word* w = c.stamp + first; count--; ++w)
                w->store((w->load(std::memory_order_relaxed) & ~kTomb) | 1, std::memory_order_relaxed);
        });
        std::atomic_thread_fence(std::memory_order_release);
        fault_point();
        const size_t nbytes = memory_.row_nbytes;
        memory_.each_run(k_, start, n, [&](const Chunk& c, size_t first, size_t done, size_t count) {
            byte* to = c.rows + first * nbytes - done * nbytes;  // where sample 0 would be
            in_parallel(count, count * nbytes, [&](size_t begin, size_t end) {
                write_rows(to, nbytes, done + begin, done + end, codec.spans(), codec.size(), leaves, memory_.nbytes(),
                           [&](byte* rows, size_t from, size_t until) { patch(rows, base, from, until); });
            }, kWriterNbytes);
        });
        fault_point();
        memory_.each_run(k_, start, n, [&](const Chunk& c, size_t first, size_t done, size_t count) {
            if (memory_.tagged)
                for (size_t i = 0; i < count; ++i) tag(done + i, memory_.row_of(k_, start + done + i));
            for (word* w = c.stamp + first; count--; ++w)
                w->store((w->load(std::memory_order_relaxed) | 1) + 1, std::memory_order_release);
        });
        fault_point();
    }

    // Of samples [begin, end) of those from `base` on; sample `base` has the first row.
    void patch(byte* rows, size_t base, size_t begin, size_t end) const {
        if (!patches_) return;
        const int64_t* last = patches_->samples + patches_->n;
        for (const int64_t* s = std::lower_bound(patches_->samples, last, int64_t(base + begin)); s < last && size_t(*s) < base + end; ++s)
            for (const auto& [span, values] : patches_->leaves)
                copy_bytes(rows + (size_t(*s) - base) * memory_.row_nbytes + span.offset, values + size_t(*s) * span.nbytes, span.nbytes);
    }

    Memory& memory_;
    Lane& lane_;
    size_t k_;
    const Patches* patches_;
};

}  // namespace recollect
