// Ring: the next whole value. Slots that one writer per lane fills and one reader empties, in commit order.
//
// One word per slot holds a ticket and a state, FREE -> WRITING -> READY -> READING -> FREE. Whoever moves a word
// owns the slot's bytes until it moves it on; nothing else is locked. Tickets are shared by all lanes, so the
// reader merges lanes by taking the smallest.
//
// Counters must add up after a kill at any instruction: written = delivered + dropped + skipped + what is there. So
// each change of a counter stands in a journal first, as the value it will have; whoever takes over the role of a
// dead process finishes what the journal says (storing a value twice does no harm) and only then goes on.
//
// Waits: spin, then sleep on a futex. A sleeper says so in `waiting`; the other side makes a system call only then.
#pragma once

#include <sched.h>

#include <chrono>
#include <memory>
#include <mutex>
#include <vector>

#include "gil.hpp"
#include "lanes.hpp"
#include "mapping.hpp"
#include "process.hpp"

namespace recollect {

constexpr size_t kInfoWords = 6;   // of the user, beside each slot
constexpr double kSpin_s = 20e-6;  // before a wait sleeps
constexpr double kLook_s = 0.1;    // between looks at signals and at the peer
constexpr int kGrabs = 1024;       // looks for a slot before a writer that may drop the oldest waits after all

struct alignas(64) RingHead {
    word ticket;
    alignas(64) std::atomic<uint32_t> data;  // bumped to wake the reader
    std::atomic<uint32_t> waiting;           // 0: nobody; 1: the reader, for any lane; 2 + k: for lane k
    alignas(64) word reader;                 // process_word, or 0
    word j_slot, j_ticket, j_count, j_skips;  // the release under way: slot + 1, its ticket, the counter's new value
};
static_assert(sizeof(RingHead) == 192);

struct alignas(64) RingLane {
    word writer;  // process_word, or 0
    std::atomic<uint32_t> space, waiting;
    alignas(64) word written;
    word dropped, abandoned;
    word j_op, j_slot, j_ticket, j_written, j_dropped;  // the commit under way
    alignas(64) word delivered;
    word skipped;
    alignas(64) word j_over;  // what the claim under way will make of `dropped`
    word j_abandoned;         // and of `abandoned`, should it be
};
static_assert(sizeof(RingLane) == 256);

struct alignas(64) Slot {
    word state;  // ticket << 3 | SlotState
    uint64_t committed_ns;
    int64_t info[kInfoWords];
};
static_assert(sizeof(Slot) == 64);

enum SlotState : uint64_t { kFree = 0, kWriting = 1, kOver = 2, kReady = 3, kReading = 4 };
enum Policy { kBlock = 0, kDropOldest = 1, kDropNewest = 2 };
enum JournalOp : uint64_t { kIdle = 0, kPublish = 1, kDropNew = 2 };
enum Outcome : int64_t { kDone = 0, kTimeout = -1, kClosedNow = -2, kPeerDied = -3, kRoleTaken = -4, kNothing = -5 };

inline uint64_t state_of(uint64_t w) { return w & 7; }
inline uint64_t ticket_of(uint64_t w) { return w >> 3; }

inline void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

inline uint64_t monotonic_ns() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return uint64_t(t.tv_sec) * 1000000000u + uint64_t(t.tv_nsec);
}

class Ring {
  public:
    const size_t n_lanes, n_slots;  // slots of one lane

    // `wake_free`: how many slots of a lane must be free before a sleeping writer is woken.
    Ring(std::shared_ptr<Mapping> mapping, size_t at, size_t closed_at, size_t lanes, size_t slots, Policy policy, size_t wake_free)
        : n_lanes(lanes), n_slots(slots), mapping_(std::move(mapping)), policy_(policy), wake_free_(wake_free),
          locks_(std::make_unique<std::timed_mutex[]>(lanes + 1)), writing_(lanes, -1), hint_(lanes, 0) {
        watch_forks();
        forks_ = fork_count.load();
        head_ = reinterpret_cast<RingHead*>(mapping_->base() + at);
        closed_ = reinterpret_cast<std::atomic<uint32_t>*>(mapping_->base() + closed_at);
        lanes_ = reinterpret_cast<RingLane*>(head_ + 1);
        slots_ = reinterpret_cast<Slot*>(lanes_ + lanes);
    }
    static size_t control_nbytes(size_t lanes, size_t slots) {
        return sizeof(RingHead) + lanes * sizeof(RingLane) + lanes * slots * sizeof(Slot);
    }

    bool is_closed() const { return left_.load() || closed_->load(std::memory_order_acquire); }
    uint64_t writer(size_t k) const { return lanes_[k].writer.load(); }
    uint64_t reader() const { return head_->reader.load(); }
    const RingLane& lane(size_t k) const { return lanes_[k]; }
    const Slot& slot(size_t s) const { return slots_[s]; }
    int64_t reading() { check_fork(); return reading_; }
    int64_t writing(size_t k) { check_fork(); return writing_[k]; }

    // --- writing -------------------------------------------------------------------------------------------------
    // The slot that lane k's writer fills next; the same until it is committed.
    int64_t claim(size_t k, double timeout_s) {
        const double end = monotonic_s() + timeout_s;
        Turn turn(*this, k, end);
        if (!turn.taken) return kTimeout;
        if (is_closed()) return kClosedNow;
        if (!own_writer(k)) return kRoleTaken;
        if (writing_[k] >= 0) return writing_[k];
        for (;;) {
            const int64_t s = grab(k);
            if (s >= 0) return writing_[k] = s;
            RingLane& l = lanes_[k];
            const int64_t waited = wait(l.space, l.waiting, 1, end, [&] { return count(k, kFree) > 0 || (policy_ == kDropOldest && count(k, kReady) > 0); },
                                        [&] { const uint64_t r = reader(); return r && is_dead(r); });
            if (waited < 0) return waited;
        }
    }

    // 0: published; 1: counted as dropped, and the slot is kept (drop_newest, no other one free).
    int64_t commit(size_t k, const int64_t* info) {
        Turn turn(*this, k, monotonic_s() + 1.0);
        if (!turn.taken) return kTimeout;
        if (is_closed()) return kClosedNow;
        if (writing_[k] < 0 || lanes_[k].writer.load() != own_word()) return kNothing;
        RingLane& l = lanes_[k];
        Slot& slot = slots_[size_t(writing_[k])];
        const uint64_t written = l.written.load(std::memory_order_relaxed) + 1;
        l.j_written.store(written, std::memory_order_relaxed);
        if (policy_ == kDropNewest && count(k, kFree) == 0) {
            const uint64_t dropped = l.dropped.load(std::memory_order_relaxed) + 1;
            l.j_dropped.store(dropped, std::memory_order_relaxed);
            l.j_op.store(kDropNew, std::memory_order_release);
            fault_point();
            l.written.store(written, std::memory_order_release);
            fault_point();
            l.dropped.store(dropped, std::memory_order_release);
            fault_point();
            l.j_op.store(kIdle, std::memory_order_release);
            return 1;
        }
        std::copy(info, info + kInfoWords, slot.info);
        slot.committed_ns = monotonic_ns();
        fault_point();
        const uint64_t ticket = head_->ticket.fetch_add(1) + 1;
        l.j_slot.store(uint64_t(writing_[k]), std::memory_order_relaxed);
        l.j_ticket.store(ticket, std::memory_order_relaxed);
        l.j_op.store(kPublish, std::memory_order_release);
        fault_point();
        slot.state.store(ticket << 3 | kReady, std::memory_order_release);
        fault_point();
        l.written.store(written, std::memory_order_release);
        fault_point();
        l.j_op.store(kIdle, std::memory_order_release);
        writing_[k] = -1;
        wake_reader(k);
        return 0;
    }

    // Give up the lane; a slot half written is free again.
    void release_lane(size_t k) {
        Turn turn(*this, k, monotonic_s() + 1.0);
        if (const uint64_t me = used_word(); !me || lanes_[k].writer.load() != me) return;
        if (writing_[k] >= 0) set_free(size_t(writing_[k]));
        writing_[k] = -1;
        lanes_[k].writer.store(0, std::memory_order_release);
    }

    // --- reading -------------------------------------------------------------------------------------------------
    // The oldest slot that is ready, of lane k or (k < 0) of all; the same until it is released.
    int64_t take(int64_t k, double timeout_s) {
        const double end = monotonic_s() + timeout_s;
        Turn turn(*this, n_lanes, end);
        if (!turn.taken) return kTimeout;
        return take_in_turn(k, end);
    }

    int64_t release(bool skips) {
        Turn turn(*this, n_lanes, monotonic_s() + 1.0);
        if (!turn.taken) return kTimeout;
        if (is_closed()) return kClosedNow;
        return release_in_turn(skips);
    }

    // True when there is something to take, also of what a dead reader held; nothing is taken, and no role.
    int64_t wait_ready(int64_t k, double timeout_s) {
        const double end = monotonic_s() + timeout_s;
        if (is_closed()) return kClosedNow;
        if (any_left(k)) return 0;
        return wait(head_->data, head_->waiting, k < 0 ? 1 : uint32_t(k) + 2, end,
                    [&] { return any_ready(k); }, [&] { return writers_dead(k); });
    }

    void release_reader() {
        Turn turn(*this, n_lanes, monotonic_s() + 1.0);
        if (const uint64_t me = used_word(); !me || head_->reader.load() != me) return;
        if (reading_ >= 0) {
            word& w = slots_[size_t(reading_)].state;
            w.store((w.load() & ~uint64_t(7)) | kReady, std::memory_order_release);
        }
        reading_ = -1;
        head_->reader.store(0, std::memory_order_release);
    }

    // Take, copy out by `use(slot)`, release: one turn. `use` is not called unless the result is >= 0.
    template <typename Use> int64_t with_next(int64_t k, double timeout_s, Use use) {
        const double end = monotonic_s() + timeout_s;
        Turn turn(*this, n_lanes, end);
        if (!turn.taken) return kTimeout;
        const int64_t s = take_in_turn(k, end);
        if (s < 0) return s;
        use(size_t(s));
        release_in_turn(false);
        return s;
    }

    // --- both ----------------------------------------------------------------------------------------------------
    size_t count(size_t k, SlotState state) const {
        size_t n = 0;
        for (size_t s = k * n_slots; s < (k + 1) * n_slots; ++s)
            n += state_of(slots_[s].state.load(std::memory_order_acquire)) == state;
        return n;
    }
    size_t available(size_t k) const { return count(k, kReady) + count(k, kReading); }

    struct Counts { uint64_t written, delivered, dropped, skipped, abandoned, available; };
    // What a journal says is done counts as done, though the process that wrote it may have died before.
    Counts counts(size_t k) const {
        const RingLane& l = lanes_[k];
        Counts c{l.written.load(), l.delivered.load(), l.dropped.load(), l.skipped.load(), l.abandoned.load(), available(k)};
        const uint64_t op = l.j_op.load();
        if (op == kDropNew) c.dropped = l.j_dropped.load();
        if (op == kDropNew || (op == kPublish && is_published(k))) c.written = l.j_written.load();
        if (count(k, kOver)) c.dropped = l.j_over.load();
        const uint64_t j = head_->j_slot.load();
        if (j == 0 || j > n_lanes * n_slots || (j - 1) / n_slots != k) return c;
        (head_->j_skips.load() ? c.skipped : c.delivered) = head_->j_count.load();
        if (slots_[j - 1].state.load() == (head_->j_ticket.load() << 3 | kReading)) --c.available;
        return c;
    }

    void leave() {  // this process only; its own waiters must notice
        left_.store(true);
        wake_all();
    }
    void wake_all() {
        head_->data.fetch_add(1);
        wake_word(&head_->data, 1 << 30);
        for (size_t k = 0; k < n_lanes; ++k) {
            lanes_[k].space.fetch_add(1);
            wake_word(&lanes_[k].space, 1 << 30);
        }
    }

  private:
    // Threads of one process take turns, one for each lane and one for the reader.
    struct Turn {
        Turn(Ring& ring, size_t i, double end) : mutex(ring.lock(i)) {
            taken = mutex.try_lock();
            if (taken) return;
            Unlocked unlocked(has_gil);
            taken = mutex.try_lock_for(std::chrono::duration<double>(std::clamp(end - monotonic_s(), 0.0, 1e6)));
        }
        Turn(const Turn&) = delete;
        ~Turn() { if (taken) mutex.unlock(); }
        std::timed_mutex& mutex;
        bool taken;
    };
    std::timed_mutex& lock(size_t i) { check_fork(); return locks_[i]; }

    void check_fork() {
        const uint32_t now = fork_count.load(std::memory_order_relaxed);
        if (now == forks_) return;
        locks_ = std::make_unique<std::timed_mutex[]>(n_lanes + 1);  // a thread of the parent may have held one
        std::fill(writing_.begin(), writing_.end(), -1);
        reading_ = -1;
        forks_ = now;
    }

    // --- roles ---
    static bool take_role(word& role, bool& fresh) {
        const uint64_t me = own_word();
        uint64_t owner = role.load(std::memory_order_acquire);
        fresh = false;
        while (owner != me) {
            if (owner && !is_dead(owner)) return false;
            if (role.compare_exchange_strong(owner, me)) return fresh = true;
        }
        return true;
    }
    bool own_writer(size_t k) {
        bool fresh;
        if (!take_role(lanes_[k].writer, fresh)) return false;
        if (fresh) recover_writer(k);
        return true;
    }
    bool own_reader() {
        bool fresh;
        if (!take_role(head_->reader, fresh)) return false;
        if (fresh) recover_reader();
        return true;
    }

    // Whether the slot that lane k's journal names has the value it speaks of. One of another lane is of no journal of ours.
    bool is_published(size_t k) const {
        const RingLane& l = lanes_[k];
        const uint64_t s = l.j_slot.load();
        return s / n_slots == k && ticket_of(slots_[s].state.load(std::memory_order_acquire)) == l.j_ticket.load();
    }

    void recover_writer(size_t k) {
        RingLane& l = lanes_[k];
        const uint64_t op = l.j_op.load(std::memory_order_acquire);
        fault_point();
        if (op == kPublish) {
            if (is_published(k)) l.written.store(l.j_written.load(), std::memory_order_release);
        } else if (op == kDropNew) {
            l.written.store(l.j_written.load(), std::memory_order_release);
            l.dropped.store(l.j_dropped.load(), std::memory_order_release);
        }
        fault_point();
        l.j_op.store(kIdle, std::memory_order_release);
        for (size_t s = k * n_slots; s < (k + 1) * n_slots; ++s) {
            const uint64_t state = state_of(slots_[s].state.load(std::memory_order_acquire));
            if (state != kWriting && state != kOver) continue;
            if (state == kOver) l.dropped.store(l.j_over.load(), std::memory_order_release);
            l.abandoned.store(l.j_abandoned.load(), std::memory_order_release);
            fault_point();
            set_free(s);
        }
        l.waiting.store(0);
    }

    void recover_reader() {
        const uint64_t j = head_->j_slot.load(std::memory_order_acquire);
        fault_point();
        if (j && j <= n_lanes * n_slots) {
            const size_t s = size_t(j - 1);
            counter(s, head_->j_skips.load()).store(head_->j_count.load(), std::memory_order_release);
            fault_point();
            uint64_t reading = head_->j_ticket.load() << 3 | kReading;
            slots_[s].state.compare_exchange_strong(reading, head_->j_ticket.load() << 3 | kFree);
            fault_point();
        }
        head_->j_slot.store(0, std::memory_order_release);
        for (size_t s = 0; s < n_lanes * n_slots; ++s) {
            uint64_t w = slots_[s].state.load(std::memory_order_acquire);
            if (state_of(w) != kReading) continue;
            fault_point();
            slots_[s].state.store((w & ~uint64_t(7)) | kReady, std::memory_order_release);
        }
        head_->waiting.store(0);
    }

    // --- steps ---
    int64_t grab(size_t k) {
        RingLane& l = lanes_[k];
        l.j_abandoned.store(l.abandoned.load(std::memory_order_relaxed) + 1, std::memory_order_release);
        for (int tries = 0; tries < kGrabs; ++tries) {
            for (size_t i = 0; i < n_slots; ++i) {
                const size_t s = k * n_slots + (hint_[k] + i) % n_slots;
                uint64_t w = slots_[s].state.load(std::memory_order_relaxed);
                if (state_of(w) != kFree) continue;
                fault_point();
                if (!slots_[s].state.compare_exchange_strong(w, w | kWriting, std::memory_order_acquire)) continue;
                fault_point();
                hint_[k] = (hint_[k] + i + 1) % n_slots;
                return int64_t(s);
            }
            if (policy_ != kDropOldest) return -1;
            auto [s, w] = oldest(int64_t(k));
            if (s < 0) continue;  // the reader is between two slots: there is a free one
            const uint64_t dropped = l.dropped.load(std::memory_order_relaxed) + 1;
            l.j_over.store(dropped, std::memory_order_release);
            fault_point();
            moment();
            if (!slots_[size_t(s)].state.compare_exchange_strong(w, (w & ~uint64_t(7)) | kOver, std::memory_order_acquire))
                continue;
            fault_point();
            l.dropped.store(dropped, std::memory_order_release);
            fault_point();
            return s;
        }
        return -1;  // slots in no state that leads anywhere: wait for one, until the time is up
    }

    int64_t take_in_turn(int64_t k, double end) {
        if (is_closed()) return kClosedNow;
        if (!own_reader()) return kRoleTaken;
        if (reading_ >= 0) return reading_;
        for (;;) {
            auto [s, w] = oldest(k);
            if (s >= 0) {
                fault_point();
                moment();
                if (!slots_[size_t(s)].state.compare_exchange_strong(w, (w & ~uint64_t(7)) | kReading, std::memory_order_acquire))
                    continue;  // dropped meanwhile, and a younger one may be there
                fault_point();
                return reading_ = s;
            }
            const int64_t waited = wait(head_->data, head_->waiting, k < 0 ? 1 : uint32_t(k) + 2, end,
                                        [&] { return any_ready(k); }, [&] { return writers_dead(k); });
            if (waited < 0) return waited;
        }
    }

    int64_t release_in_turn(bool skips) {
        if (reading_ < 0 || head_->reader.load() != own_word()) return kNothing;
        const size_t s = size_t(reading_), k = s / n_slots;
        word& counted = counter(s, skips);
        const uint64_t n = counted.load(std::memory_order_relaxed) + 1;
        head_->j_ticket.store(ticket_of(slots_[s].state.load(std::memory_order_relaxed)), std::memory_order_relaxed);
        head_->j_count.store(n, std::memory_order_relaxed);
        head_->j_skips.store(skips, std::memory_order_relaxed);
        fault_point();
        head_->j_slot.store(s + 1, std::memory_order_release);
        fault_point();
        counted.store(n, std::memory_order_release);
        fault_point();
        set_free(s);
        fault_point();
        head_->j_slot.store(0, std::memory_order_release);
        reading_ = -1;
        std::atomic_thread_fence(std::memory_order_seq_cst);
        RingLane& l = lanes_[k];
        if (l.waiting.load(std::memory_order_relaxed) && (wake_free_ <= 1 || count(k, kFree) >= wake_free_)) {
            l.space.fetch_add(1);
            wake_word(&l.space, 1);
        }
        return int64_t(s);
    }

    void set_free(size_t s) {  // keeps the ticket: that of the last value that was here
        word& w = slots_[s].state;
        w.store((w.load(std::memory_order_relaxed) & ~uint64_t(7)) | kFree, std::memory_order_release);
    }
    word& counter(size_t s, uint64_t skips) {
        RingLane& l = lanes_[s / n_slots];
        return skips ? l.skipped : l.delivered;
    }

    struct Found { int64_t slot; uint64_t word; };  // -1: none; and its state and ticket when it was found

    // The ready slot with the smallest ticket. A commit during the look may hide an older one: look again.
    Found oldest(int64_t k) const {
        const size_t first = k < 0 ? 0 : size_t(k), last = k < 0 ? n_lanes : size_t(k) + 1;
        for (;;) {
            const uint64_t before = total_written(first, last);
            Found found{-1, ~uint64_t(0)};
            for (size_t s = first * n_slots; s < last * n_slots; ++s) {
                if (s > first * n_slots) moment();
                const uint64_t w = slots_[s].state.load(std::memory_order_acquire);
                if (state_of(w) == kReady && w < found.word) found = {int64_t(s), w};
            }
            if (found.slot < 0 || total_written(first, last) == before) return found;
        }
    }
    bool any_ready(int64_t k) const {
        for (size_t i = k < 0 ? 0 : size_t(k); i < (k < 0 ? n_lanes : size_t(k) + 1); ++i)
            if (count(i, kReady)) return true;
        return false;
    }
    // Whether a dead reader held a slot that it had not done with: the next one gets it.
    bool any_left(int64_t k) const {
        const uint64_t r = reader();
        if (!r || r == used_word()) return false;
        size_t n = 0;
        for (size_t i = k < 0 ? 0 : size_t(k); i < (k < 0 ? n_lanes : size_t(k) + 1); ++i) n += counts(i).available - count(i, kReady);
        return n && is_dead(r);
    }
    uint64_t total_written(size_t first, size_t last) const {
        uint64_t n = 0;
        for (size_t k = first; k < last; ++k) n += lanes_[k].written.load(std::memory_order_acquire);
        return n;
    }

    // Every process that holds a lane is dead, and there is one.
    bool writers_dead(int64_t k) const {
        const size_t first = k < 0 ? 0 : size_t(k), last = k < 0 ? n_lanes : size_t(k) + 1;
        bool any = false;
        for (size_t i = first; i < last; ++i) {
            const uint64_t w = writer(i);
            if (w && !is_dead(w)) return false;
            any |= w != 0;
        }
        return any;
    }

    void wake_reader(size_t k) {
        std::atomic_thread_fence(std::memory_order_seq_cst);
        const uint32_t waits = head_->waiting.load(std::memory_order_relaxed);
        if (waits != 1 && waits != k + 2) return;
        head_->data.fetch_add(1);
        wake_word(&head_->data, 1);
    }

    template <typename Ready, typename Dead>
    int64_t wait(std::atomic<uint32_t>& futex, std::atomic<uint32_t>& waiting, uint32_t mark, double end, Ready ready, Dead dead) {
        const double spin_until = std::min(monotonic_s() + kSpin_s, end);
        do {
            for (int i = 0; i < 16; ++i) {
                if (ready()) return 0;
                relax();
            }
            if (is_closed()) return kClosedNow;
            ::sched_yield();
        } while (monotonic_s() < spin_until);
        const bool unlocks = has_gil;
        for (;;) {
            int64_t outcome = kNothing;
            {
                Unlocked unlocked(unlocks);
                const uint32_t seen = futex.load(std::memory_order_acquire);
                moment();
                waiting.store(mark, std::memory_order_relaxed);
                std::atomic_thread_fence(std::memory_order_seq_cst);
                const double left = end - monotonic_s();
                if (ready()) outcome = kDone;
                else if (is_closed()) outcome = kClosedNow;
                else if (left <= 0) outcome = dead() ? kPeerDied : kTimeout;
                else if (!wait_word(&futex, seen, std::min(left, kLook_s)) && !ready() && !is_closed() && dead())
                    outcome = ready() ? kDone : kPeerDied;  // it may have committed before it died
                waiting.store(0, std::memory_order_relaxed);
            }
            if (outcome != kNothing) return outcome;
            if (has_gil && PyErr_CheckSignals()) throw nb::python_error();
        }
    }

    std::shared_ptr<Mapping> mapping_;
    Policy policy_;
    size_t wake_free_;
    RingHead* head_;
    std::atomic<uint32_t>* closed_;  // by its owner, for everybody
    RingLane* lanes_;
    Slot* slots_;
    std::unique_ptr<std::timed_mutex[]> locks_;  // one for each lane, and the reader's
    std::vector<int64_t> writing_;
    std::vector<size_t> hint_;
    int64_t reading_ = -1;
    std::atomic<bool> left_{false};
    uint32_t forks_;
};

}  // namespace recollect
