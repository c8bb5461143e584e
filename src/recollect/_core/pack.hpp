// Packing: draws from a snapshot that was taken earlier, and waiting until enough rows are there to take one.
//
// A snapshot is what a tick may see: per lane a window, without the rows that `headroom` further rows would overwrite.
// As long as writers add no more than that, every row of it stays whole and the same snapshot gives the same batch.
//
// Waiting costs writers one fence and one load a block: the waiter raises `waiters` before it looks at the cursors, the
// writer looks at `waiters` after it has moved its cursor, so one of them sees the other. The word is a flag, not a
// count: a killed waiter costs one needless wake-up, not one for every block that will ever be written.
#pragma once

#include "rows.hpp"

namespace recollect {

constexpr double kSpin_s = 20e-6;

// Rows ever added, as long as no lane is being changed in place meanwhile.
inline uint64_t rows_added(const Memory& m) {
    uint64_t n = 0;
    for (size_t k = 0; k < m.n_lanes; ++k) {
        const Lane& w = m.lane(k);
        n += w.cursor.load(std::memory_order_acquire) + w.skip.load(std::memory_order_acquire);
    }
    return n;
}

struct Taken {
    std::vector<Window> windows;
    uint64_t added = 0, total = 0;

    explicit Taken(size_t n_lanes = 0) : windows(n_lanes) {}

    // What `s` shows now; false when a lane was changed in place meanwhile.
    bool from(const Memory& m, Snapshot& s, uint64_t headroom) {
        s.leave_room(headroom);
        added = 0;
        for (size_t k = 0; k < windows.size(); ++k) {
            windows[k] = s[k];
            added += s[k].cursor + m.lane(k).skip.load(std::memory_order_acquire);  // skip moves with the epoch
        }
        total = s.total();
        return s.same_epochs();
    }
};

// n draws from `taken` into one packed block; how many were drawn again. If nothing of it is left, it is taken anew.
inline uint64_t pack(Memory& m, Taken& taken, uint64_t headroom, uint64_t key, size_t n, const Codec& codec, byte* out) {
    uint64_t redrawn = 0;
    bool first = true;
    Reader reader(m);
    reader.run([&] {
        Snapshot& s = reader.snapshot();
        if (first) s.restore(taken.windows.data());
        else if (!taken.from(m, s, headroom)) return false;
        if (!first) redrawn += n;
        first = false;
        if (s.total() == 0) return true;
        Draw draw(m, s, key, 0, n, n);
        const bool whole = draw.run(codec, &out);
        redrawn += whole ? draw.redrawn() : 0;
        return whole;
    });
    return redrawn;
}

enum class Wait { kReached, kTimeout, kClosed, kStopped };

// Until rows_added(m) >= floor. `stop` may be null.
inline Wait wait_added(const Memory& m, uint64_t floor, double timeout_s, const std::atomic<uint32_t>* stop) {
    Shared& shared = m.shared();
    const double start = monotonic_s(), end = start + timeout_s;
    for (;;) {
        const double now = monotonic_s();
        const bool sleeps = now - start > kSpin_s;
        if (sleeps) shared.waiters.store(1, std::memory_order_seq_cst);
        if (rows_added(m) >= floor) return Wait::kReached;
        if (shared.closed.load(std::memory_order_acquire)) return Wait::kClosed;
        if (stop && stop->load(std::memory_order_seq_cst)) return Wait::kStopped;
        if (now >= end) return Wait::kTimeout;
        if (sleeps) wait_word(&shared.waiters, 1, std::min(end - now, 0.1));
    }
}

// Whether somebody has written and nobody who did is alive.
inline bool writers_gone(const Memory& m) {
    bool any = false;
    for (size_t k = 0; k < m.n_lanes; ++k) {
        const uint64_t owner = m.lane(k).owner.load(std::memory_order_acquire);
        if (owner && m.life(owner) != Life::kDead) return false;
        any = any || owner;
    }
    return any;
}

}  // namespace recollect
