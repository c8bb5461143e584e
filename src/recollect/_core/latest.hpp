// Latest: the newest whole value. Three slots, one writer, any number of readers, no lock in shared memory.
//
// The writer takes a slot that is neither the latest nor held, stamps it odd, fills it, stamps it 2 x version and
// then says so in `latest`. A reader copies the latest slot and looks at the stamp again: if it is not the one that
// the version in `latest` implies, before or after the copy, the writer has come round to this slot and the reader
// starts again. A reader overtaken twice writes its slot into `hold`. Writer (stamp odd, fence, look at hold) and
// holder (hold, fence, look at the stamp) cannot both miss each other, so what is held and was whole stays whole: a
// reader whose hold is still its own after the copy is done, even if the writer stamps the slot odd for a moment
// before it sees the hold and puts the stamp back.
//
// A killed writer leaves at worst an odd stamp on a slot that is not the latest. A killed reader leaves its hold,
// which keeps one slot until another reader takes it over; the writer always has one more. A hold names the thread
// that set it (number and start time), so a dead one is told from a slow one; taking over a slow one is safe too,
// since every reader checks the stamp after its copy.
//
// tests/memory/test_latest_protocol.py goes through all interleavings of a model of this file, with store buffers.
#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "gil.hpp"
#include "mapping.hpp"
#include "process.hpp"

namespace recollect {

constexpr size_t kLine = 64;
constexpr uint64_t kNoSlot = 3;
constexpr int kPatience = 2;              // tries before a reader holds its slot
constexpr double kSteal_s = 0.05;         // a live reader's hold is respected for this long, or four copies
constexpr double kLookAtHolder_s = 0.001;
constexpr double kSpin_s = 20e-6;
constexpr double kSlice_s = 0.1;          // between two looks at signals and at the writer
constexpr double kReadGivesUp_s = 60;
constexpr double kStuck_s = 1;            // a value that is not whole for this long though no newer one came never will be

struct alignas(kLine) LatestLine { std::atomic<uint64_t> value; };
struct LatestWords {
    LatestLine latest;    // version << 2 | slot
    LatestLine stamp[3];  // 2 x version, odd while written
    LatestLine hold;      // namespace << 50 | start << 24 | thread << 2 | slot + 1, or 0
    LatestLine change;    // the low half is the futex word
    LatestLine writer;    // process_word of the writer, or 0
};
static_assert(sizeof(LatestWords) == 7 * kLine);

struct Piece { byte* data; size_t offset, nbytes; };

// One word for the calling thread: its number (22 bits), start time (26, 0: not known) and pid namespace (14), room
// below for a slot.
constexpr uint64_t kThreadStart = (uint64_t(1) << 26) - 1;
inline uint64_t thread_start(uint64_t start) { return start % kThreadStart + 1; }
inline uint64_t own_thread_key_now() {
    if (is_portable) {  // threads have no number that others can look up: the process, and which of its threads it is
        static std::atomic<uint64_t> n_threads{0};
        const uint64_t process = own_word(), thread = n_threads.fetch_add(1, std::memory_order_relaxed) % 1024;
        return space_of(own_domain()) << 50 | (start_of(process) << 10 | thread) << 24 | uint64_t(pid_of(process)) << 2;
    }
#if RECOLLECT_LINUX
    const pid_t tid = static_cast<pid_t>(syscall(SYS_gettid));
    const Look found = look_up(tid, true);
    const uint64_t start = found.life == Life::kAlive ? thread_start(found.start) : 0;
    return space_of(own_domain()) << 50 | start << 24 | static_cast<uint64_t>(tid) << 2;
#else
    return 0;
#endif
}
inline uint64_t own_thread_key() {
    thread_local uint64_t key = 0;
    thread_local uint32_t forks = ~0u;
    const uint32_t now = fork_count.load(std::memory_order_relaxed);
    if (forks != now) { key = own_thread_key_now(); forks = now; }
    return key;
}
inline bool is_holder_dead(uint64_t hold) {
    if (hold >> 50 != space_of(own_domain())) return false;
    if (is_portable) return life_by_file(static_cast<pid_t>(hold >> 2 & 0x3FFFFF), hold >> 34 & 0xFFFF) == Life::kDead;
    const Look found = look_up(static_cast<pid_t>(hold >> 2 & 0x3FFFFF), true);
    const uint64_t start = hold >> 24 & kThreadStart;
    return found.life == Life::kDead || (found.life == Life::kAlive && start && start != thread_start(found.start));
}

struct WriterBusy { uint64_t writer; };
struct Overtaken { bool damaged; };  // by its writer, or by something that is none

class Latest {
  public:
    struct Counts { std::atomic<uint64_t> reads{0}, overtaken{0}, holds{0}, steals{0}; };

    Latest(std::shared_ptr<Mapping> mapping, size_t words_at, size_t closed_at, size_t data_at, size_t slot_nbytes)
        : slot_nbytes_(slot_nbytes), stride_(page_up(slot_nbytes)), mapping_(std::move(mapping)),
          lock_(std::make_unique<std::mutex>()), forks_(fork_count.load()) {
        watch_forks();
        words_ = reinterpret_cast<LatestWords*>(mapping_->base() + words_at);
        closed_ = reinterpret_cast<std::atomic<uint32_t>*>(mapping_->base() + closed_at);
        data_ = mapping_->base() + data_at;
    }
    Latest(const Latest&) = delete;
    ~Latest() { release(); }

    size_t slot_nbytes() const { return slot_nbytes_; }
    bool is_closed() const { return closed_->load(std::memory_order_acquire) != 0; }
    uint64_t version() const { return words_->latest.value.load(std::memory_order_acquire) >> 2; }
    uint64_t writer() const { return words_->writer.value.load(std::memory_order_acquire); }
    const Counts& counts() const { return counts_; }
    void set_patience(int tries) { patience_ = tries; }

    // --- writing ------------------------------------------------------------------------------------------------
    std::mutex& lock() {
        const uint32_t now = fork_count.load(std::memory_order_relaxed);
        if (now != forks_) { lock_ = std::make_unique<std::mutex>(); forks_ = now; }  // a parent's thread may hold it
        return *lock_;
    }
    void claim() {
        auto& writer = words_->writer.value;
        const uint64_t me = own_word();
        for (uint64_t seen = writer.load(std::memory_order_acquire); seen != me;) {
            if (seen && !is_dead(seen)) throw WriterBusy{seen};
            if (writer.compare_exchange_strong(seen, me, std::memory_order_acq_rel)) return;
        }
    }
    void release() {
        uint64_t me = used_word();
        if (me) words_->writer.value.compare_exchange_strong(me, 0, std::memory_order_acq_rel);
    }

    // The caller has the lock and the claim.
    uint64_t publish(const Piece* pieces, size_t n) {
        const uint64_t before = words_->latest.value.load(std::memory_order_relaxed);
        const uint64_t version = (before >> 2) + 1;
        const size_t slot = take_slot(version > 1 ? before & 3 : kNoSlot);
        byte* to = data_ + slot * stride_;
        for (size_t i = 0; i < n; ++i) copy_bytes(to + pieces[i].offset, pieces[i].data, pieces[i].nbytes);
        fault_point();
        words_->stamp[slot].value.store(2 * version, std::memory_order_release);
        fault_point();
        words_->latest.value.store(version << 2 | slot, std::memory_order_release);
        fault_point();
        wake();
        return version;
    }
    void wake() {
        words_->change.value.fetch_add(1, std::memory_order_acq_rel);
        fault_point();
        wake_word(futex(), INT32_MAX);
    }

    // --- reading ------------------------------------------------------------------------------------------------
    // Copy the newest whole value; its version, or 0 when there is none and nothing was touched.
    uint64_t read(const Piece* pieces, size_t n) {
        double start = 0, copied_s = 0, moved = 0;  // `moved`: when `latest` was last seen to have
        uint64_t before = 0;
        Waited waited;
        for (int tries = 0;; ++tries) {
            const uint64_t latest = words_->latest.value.load(std::memory_order_acquire);
            if (latest >> 2 == 0) return 0;
            if ((latest & 3) == kNoSlot) throw Overtaken{true};
            moment();
            const double began = tries >= patience_ ? monotonic_s() : 0;
            const bool held = tries >= patience_ && take_hold(latest & 3, waited, copied_s);
            fault_point();
            const bool whole = copy(latest, pieces, n, held);
            fault_point();
            if (held) release_hold(latest & 3);
            if (whole) { counts_.reads.fetch_add(1, std::memory_order_relaxed); return latest >> 2; }
            counts_.overtaken.fetch_add(1, std::memory_order_relaxed);
            if (tries < patience_) continue;
            const double now = monotonic_s();
            copied_s = now - began;
            if (start == 0) start = now;
            if (latest != before) before = latest, moved = now;
            if (now - moved > std::max(kStuck_s, 4 * copied_s)) throw Overtaken{true};
            if (now - start > kReadGivesUp_s) throw Overtaken{false};
        }
    }

    // Wait for a version above `version` for at most one slice; false if none came.
    bool wait_slice(uint64_t version_seen, double timeout_s) const {
        const uint32_t seen = futex()->load(std::memory_order_acquire);
        if (version() > version_seen || is_closed()) return true;
        wait_word(futex(), seen, std::min(timeout_s, kSlice_s));
        return version() > version_seen || is_closed();
    }
    bool spin(uint64_t version_seen) const {
        for (const double end = monotonic_s() + kSpin_s; monotonic_s() < end;)
            if (version() > version_seen || is_closed()) return true;
        return false;
    }

  private:
    std::atomic<uint32_t>* futex() const { return reinterpret_cast<std::atomic<uint32_t>*>(&words_->change.value); }

    size_t take_slot(uint64_t last) {
        for (;;) {
            const uint64_t held = (words_->hold.value.load(std::memory_order_acquire) & 3) - 1;
            size_t slot = last == kNoSlot ? 0 : (last + 1) % 3;
            if (slot == held) slot = (slot + 1) % 3;  // never the latest: that is two on
            auto& stamp = words_->stamp[slot].value;
            const uint64_t before = stamp.load(std::memory_order_relaxed);
            stamp.store(before | 1, std::memory_order_relaxed);
            std::atomic_thread_fence(std::memory_order_seq_cst);
            fault_point();
            moment();
            if ((words_->hold.value.load(std::memory_order_acquire) & 3) != slot + 1) {
                std::atomic_thread_fence(std::memory_order_release);  // who sees a new byte sees that hold has moved
                return slot;
            }
            stamp.store(before, std::memory_order_release);
            fault_point();
        }
    }

    bool copy(uint64_t latest, const Piece* pieces, size_t n, bool held) const {
        const auto& stamp = words_->stamp[latest & 3].value;
        const uint64_t whole = 2 * (latest >> 2);
        if (stamp.load(std::memory_order_acquire) != whole) return false;
        moment();
        const byte* from = data_ + (latest & 3) * stride_;
        for (size_t i = 0; i < n; ++i) copy_bytes(pieces[i].data, from + pieces[i].offset, pieces[i].nbytes);
        std::atomic_thread_fence(std::memory_order_acquire);
        return stamp.load(std::memory_order_relaxed) == whole || (held && has_hold(latest & 3));
    }
    bool has_hold(uint64_t slot) const {
        return words_->hold.value.load(std::memory_order_relaxed) == (own_thread_key() | (slot + 1));
    }

    // Whose hold we have been waiting for, and since when.
    struct Waited { uint64_t hold = 0; double since = 0, looked = 0; };

    bool take_hold(uint64_t slot, Waited& waited, double copied_s) {
        auto& hold = words_->hold.value;
        const uint64_t mine = own_thread_key() | (slot + 1);
        uint64_t seen = 0;
        bool taken = hold.compare_exchange_strong(seen, mine, std::memory_order_acq_rel);
        if (!taken && may_steal(seen, waited, copied_s)) {
            taken = hold.compare_exchange_strong(seen, mine, std::memory_order_acq_rel);
            if (taken) counts_.steals.fetch_add(1, std::memory_order_relaxed);
        }
        fault_point();
        std::atomic_thread_fence(std::memory_order_seq_cst);
        if (taken) counts_.holds.fetch_add(1, std::memory_order_relaxed);
        return taken;
    }
    static bool may_steal(uint64_t seen, Waited& waited, double copied_s) {
        const double now = monotonic_s();
        if (seen != waited.hold) waited = {seen, now, 0};
        if (now - waited.since > std::max(kSteal_s, 4 * copied_s)) return true;
        if (now - waited.looked < kLookAtHolder_s) return false;
        waited.looked = now;
        return is_holder_dead(seen);
    }
    void release_hold(uint64_t slot) {
        uint64_t mine = own_thread_key() | (slot + 1);
        words_->hold.value.compare_exchange_strong(mine, 0, std::memory_order_release);
        fault_point();
    }

    size_t slot_nbytes_, stride_;
    std::shared_ptr<Mapping> mapping_;
    std::unique_ptr<std::mutex> lock_;
    uint32_t forks_;
    LatestWords* words_;
    std::atomic<uint32_t>* closed_;
    byte* data_;
    Counts counts_;
    int patience_ = kPatience;
};

}  // namespace recollect
