// The memory of Rows: lanes, stamps, tags and packed rows, and the words that say which rows are whole.
//
// A lane is a ring of `run` rows with one writer. Positions count for ever; position p lives in row p mod run.
// Readable is the window [max(tail, reserved - run), cursor): the writer raises `reserved` before it touches a row
// and `cursor` after it has finished one, so what is about to be overwritten is out of the window before the first
// byte changes, and what is half written is not yet in it. A reader copies, then looks at `reserved` again: every
// position that is still in the window was whole while it was copied. That costs two loads a call; reading a stamp
// per row would cost a cache miss per row (measured: 20 to 28 % of a draw of 256 from a million rows).
//
// Changes inside the window (overwrite, remove, clear) make `epoch` odd while they last. A reader that sees another
// epoch afterwards starts again. What they are about to do stands in the journal words first, so if the process is
// killed half way, whoever takes the lane next (a reader too, if it may write) finishes the work or takes it back.
//
// Each row has a stamp, 2 x generation, odd while it is written: it tells a row that a killed overwrite left torn,
// and whether a (row, generation) somebody kept still means the same sample. With tags, each row also knows its
// segment's id and its step in it, so a boundary is a comparison of two numbers and nothing is ever searched for
// when a row is written.
#pragma once

#include <sys/file.h>

#include <array>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "gil.hpp"
#include "mapping.hpp"
#include "process.hpp"

#if RECOLLECT_LINUX
#include <sys/vfs.h>
#endif

namespace recollect {

using word = std::atomic<uint64_t>;
static_assert(word::is_always_lock_free && sizeof(word) == 8);

constexpr size_t kHeaderNbytes = 256;  // static part below kSharedWords, shared counters above
constexpr size_t kSharedWords = 128;
constexpr uint64_t kTomb = uint64_t(1) << 63;  // on a stamp: to be removed by the compaction under way
constexpr size_t kFirstChunk = 1024;           // rows; each further chunk of an unbounded lane doubles the total

struct Shared {
    std::atomic<uint32_t> closed;   // how often it was closed for all processes: a file can be opened again
    std::atomic<uint32_t> waiters;
    word rejected;  // refused before a lane was touched
};

enum Op : uint64_t { kNone = 0, kOverwrite, kMark, kDown, kUp, kInstall };
constexpr uint64_t kTorn = 8;  // beside kDown and kUp: what leaves was torn, and counts as dropped, not as removed

struct alignas(128) Lane {
    word reserved, cursor, tail, epoch;
    word owner;         // process_word of the writer, or 0
    word skip;          // rows ever offered = cursor + skip (modulo 2^64)
    word removed, next_segment, open_segment, op;
    word journal[5];
    word dropped;
};
static_assert(sizeof(Lane) == 128);

struct Chunk {
    word* stamp = nullptr;
    int64_t* segment = nullptr;  // null without tags
    int64_t* step = nullptr;
    byte* rows = nullptr;
};

struct Window {
    uint64_t low, cursor, epoch;
    uint64_t count() const { return cursor - low; }
};

struct Busy : std::runtime_error {
    explicit Busy(uint64_t owner_, int lane_) : std::runtime_error("lane busy"), owner(owner_), lane(lane_) {}
    uint64_t owner;
    int lane;
};
struct Forked : std::runtime_error { using std::runtime_error::runtime_error; };
// Words that no writer of ours leaves: something else has written into the memory.
struct Damaged : std::runtime_error {
    Damaged(bool is_file_, const std::string& what) : std::runtime_error(what), is_file(is_file_) {}
    bool is_file;
};

constexpr uint64_t kMostPositions = uint64_t(1) << 62;  // far more than can ever be written; sums of two do not overflow
constexpr size_t kMostChunks = 48;
constexpr uint64_t kHalf = uint64_t(1) << 31;

class Memory {
  public:
    size_t capacity;  // 0: unbounded
    size_t n_lanes, run, row_nbytes;
    bool tagged, writable, is_private;
    const bool can_repair;  // the mapping is writable, whatever its user may do
    int fd;  // of a file, or of unbounded shared memory; else -1. Chunks of an unbounded lane are appended to it
    bool is_file = false;  // not memory alone
    uint32_t n_closed = 0;  // how often it had been closed for all when it was opened

    Memory(std::shared_ptr<Mapping> header, size_t capacity_, size_t n_lanes_, size_t row_nbytes_, bool tagged_,
           bool writable_, bool is_private_, int fd_)
        : capacity(capacity_), n_lanes(n_lanes_), run(capacity_ ? capacity_ / n_lanes_ : 0), row_nbytes(row_nbytes_),
          tagged(tagged_), writable(writable_), is_private(is_private_), can_repair(writable_), fd(fd_),
          locks_(std::make_unique<std::mutex[]>(n_lanes_)), kept_(std::make_unique<std::atomic<bool>[]>(n_lanes_)),
          forks_(fork_count.load()), header_(std::move(header)) {
        watch_forks();
        born_forks_ = growth_forks_ = forks_;
        lanes_ = reinterpret_cast<Lane*>(header_->base() + kHeaderNbytes);
        shared_ = reinterpret_cast<Shared*>(header_->base() + kSharedWords);
    }
    // Whoever gives up the memory gives up its lanes: this process may live on, and would block them for ever.
    ~Memory() {
        if (writable && !is_private)
            for (size_t k = 0; k < n_lanes; ++k) release(k);
        if (lock_fd_ >= 0 && lock_fd_ != fd) ::close(lock_fd_);
        if (fd >= 0) ::close(fd);
    }

    Lane& lane(size_t k) const { return lanes_[k]; }
    Shared& shared() const { return *shared_; }
    bool is_closed_for_all() const { return shared_->closed.load(std::memory_order_acquire) != n_closed; }

    // After a cursor has moved: wake who waits for it. See pack.hpp.
    void tell_waiters() const {
        std::atomic_thread_fence(std::memory_order_seq_cst);
        if (shared_->waiters.load(std::memory_order_relaxed)) [[unlikely]] wake_waiters();
    }
    void wake_waiters() const {
        shared_->waiters.store(0, std::memory_order_seq_cst);
        wake_word(&shared_->waiters, 0x7FFFFFFF);
    }

    void add_chunk(const Chunk& chunk, std::shared_ptr<Mapping> keep) {
        chunks_[n_chunks_] = chunk;
        keep_.push_back(std::move(keep));
        ready_.store(++n_chunks_, std::memory_order_release);
    }

    void keep(std::shared_ptr<Mapping> mapping) { keep_.push_back(std::move(mapping)); }

    // --- rows by number -----------------------------------------------------------------------------------------
    size_t row_of(size_t k, uint64_t position) const { return run ? k * run + position % run : position; }

    std::pair<const Chunk*, size_t> find(size_t row) const {
        if (capacity) return {&chunks_[0], row};
        if (row < kFirstChunk) return {&chunks_[0], row};
        const size_t c = 64 - __builtin_clzll(row / kFirstChunk);
        return {&chunks_[c], row - (kFirstChunk << (c - 1))};
    }
    // The n positions from `start` on as runs of neighbours: f(chunk, first row in it, first of the n, how many).
    template <typename F> void each_run(size_t k, uint64_t start, size_t n, F f) const {
        for (size_t done = 0; done < n;) {
            const size_t r = row_of(k, start + done);
            auto [chunk, first] = find(r);
            const size_t end = run ? (k + 1) * run : r < kFirstChunk ? kFirstChunk : r - first + r - first;
            const size_t count = std::min(n - done, end - r);
            f(*chunk, first, done, count);
            done += count;
        }
    }
    byte* row(size_t r) const {
        if (capacity) return chunks_[0].rows + r * row_nbytes;
        auto [c, i] = find(r);
        return c->rows + i * row_nbytes;
    }
    word& stamp(size_t r) const { auto [c, i] = find(r); return c->stamp[i]; }
    // Tags move while readers look at them, under the same checks as row bytes: relaxed, then verified.
    static int64_t peek(const int64_t* at) { return __atomic_load_n(at, __ATOMIC_RELAXED); }
    static void poke(int64_t* at, int64_t v) { __atomic_store_n(at, v, __ATOMIC_RELAXED); }
    int64_t segment(size_t r) const { auto [c, i] = find(r); return peek(c->segment + i); }
    int64_t step(size_t r) const { auto [c, i] = find(r); return peek(c->step + i); }
    void set_tag(size_t r, int64_t segment_, int64_t step_) const {
        auto [c, i] = find(r);
        poke(c->segment + i, segment_);
        poke(c->step + i, step_);
    }
    uint64_t generation(size_t r) const { return (stamp(r).load(std::memory_order_relaxed) & ~kTomb) >> 1; }

    void begin_row(size_t r) const {
        word& s = stamp(r);
        s.store((s.load(std::memory_order_relaxed) & ~kTomb) | 1, std::memory_order_relaxed);
    }
    void end_row(size_t r) const {
        word& s = stamp(r);
        s.store((s.load(std::memory_order_relaxed) | 1) + 1, std::memory_order_release);
    }

    // --- growth of an unbounded lane ------------------------------------------------------------------------------
    // Chunks never move: a reader's addresses stay good while the lane grows. Another process's chunks are mapped
    // here when its cursor first reaches them.
    // For a writer, who then makes those that are missing.
    void reach(size_t n_rows) {
        if (capacity) return;
        while (held_rows() < n_rows) {
            std::lock_guard hold(growth());  // with the GIL or without: whoever has it does not need that to finish
            if (held_rows() >= n_rows) return;
            grow(true);
        }
    }
    // The same of rows that a cursor speaks of. They were there before it was moved, so nothing is made.
    void find_rows(size_t n_rows) {
        if (capacity) return;
        while (held_rows() < n_rows) {
            std::lock_guard hold(growth());
            if (held_rows() >= n_rows) return;
            if (!grow(false)) damaged("a cursor at " + std::to_string(n_rows) + " of " + std::to_string(held_rows()) + " rows");
        }
    }
    [[noreturn]] void damaged(const std::string& what) const {
        throw Damaged(is_file, "lanes: their words must be those of a writer, got " + what + "; the " +
                               (is_file ? "file is damaged: load another" : "memory was overwritten: create it again"));
    }
    size_t held_rows() const {
        const size_t n = ready_.load(std::memory_order_acquire);
        return n ? kFirstChunk << (n - 1) : 0;
    }

    size_t nbytes() const { return (capacity ? capacity : held_rows()) * row_nbytes; }

    // --- who writes -------------------------------------------------------------------------------------------------
    void check_fork() {
        const uint32_t now = fork_count.load(std::memory_order_relaxed);
        if (now == forks_) return;
        if (is_private)
            throw Forked("this memory belongs to the process that made it; a forked child may only read it");
        locks_ = std::make_unique<std::mutex[]>(n_lanes);  // a thread of the parent may have held one
        edits_ = std::make_unique<std::mutex>();
        kept_ = std::make_unique<std::atomic<bool>[]>(n_lanes);
        default_lane_ = -1;
        forks_ = now;
    }
    bool is_forked_copy() const { return is_private && fork_count.load(std::memory_order_relaxed) != born_forks_; }

    std::mutex& lock(size_t k) { return locks_[k]; }
    std::mutex& edits() { return *edits_; }

    // The lane this process writes to when it names none: a free one, else one it already holds.
    size_t default_lane() {
        check_fork();
        if (default_lane_ >= 0 && try_keep(size_t(default_lane_))) return static_cast<size_t>(default_lane_);
        uint64_t busy = 0;
        for (size_t k = 0; k < n_lanes; ++k) {
            const uint64_t owner = lane(k).owner.load(std::memory_order_acquire);
            if (owner != own_word() && try_keep(k)) { default_lane_ = int64_t(k); return k; }
            if (owner != own_word()) busy = owner;
        }
        for (size_t k = 0; k < n_lanes; ++k)
            if (lane(k).owner.load(std::memory_order_acquire) == own_word() && try_keep(k)) {
                default_lane_ = int64_t(k);
                return k;
            }
        throw Busy(busy, -1);
    }

    // The lane that default_lane() has chosen, -1 before that and in a forked child.
    int64_t held_lane() const { return fork_count.load(std::memory_order_relaxed) == forks_ ? default_lane_ : -1; }

    // Whether the owner of a lane lives. What /proc cannot tell, the lock that it took on this file may: the kernel
    // gives that up with the process, in whatever container it was. Only where both are of one kernel. On a disk of
    // this machine they are, also where the boots differ: some containers have a boot id of their own, and who was
    // here before a restart holds no lock.
    Life life(uint64_t owner) const {
        const Life found = life_of(owner);
        if (found != Life::kUnknown || fd < 0) return found;
        if (boot_of(owner) == 0 || boot_of(owner) == kNoDomain) return found;
        if (is_portable) return is_file && is_only_writer() ? Life::kDead : found;
#if RECOLLECT_LINUX
        if (boot_of(own_domain()) != boot_of(owner) && !(is_of_other_boot(owner) && is_on_own_disk())) return found;
        const int description = lock_fd_forks_.load(std::memory_order_acquire) == fork_count.load() ? lock_fd_ : -1;
        struct flock lock = lock_on(owner, F_WRLCK);
        if (description < 0 || ::fcntl(description, F_OFD_GETLK, &lock) != 0) return found;
        return lock.l_type == F_UNLCK ? Life::kDead : found;
#else
        return found;
#endif
    }

    // Claim lane k if nobody who may live holds it; true when it is ours afterwards. `fresh`: it was not before.
    bool try_claim(size_t k, bool* fresh = nullptr) {
        check_fork();
        if (fresh) *fresh = false;
        Lane& w = lane(k);
        const uint64_t me = own_word();
        if (locked_.load(std::memory_order_acquire) != me) [[unlikely]] lock_own_word();
        if (w.owner.load(std::memory_order_acquire) == me) return true;
        Locked hold(lock(k));  // before the claim: another thread of ours must not write to a lane not yet repaired
        for (;;) {
            uint64_t owner = w.owner.load(std::memory_order_acquire);
            if (owner == me) return true;
            if (owner && life(owner) != Life::kDead) return false;
            if (!w.owner.compare_exchange_strong(owner, me, std::memory_order_acq_rel)) continue;
            w.open_segment.store(0, std::memory_order_relaxed);  // it ended at its last committed row
            try { repair(k); }
            catch (...) {  // it cannot be, or not with the memory there is: for whoever comes next to find out too
                w.owner.store(0, std::memory_order_release);
                throw;
            }
            if (fresh) *fresh = true;
            return true;
        }
    }
    bool claim(size_t k) {  // true if it was not ours before
        bool fresh;
        if (!try_claim(k, &fresh)) throw Busy(lane(k).owner.load(), int(k));
        return fresh;
    }
    bool is_ours(size_t k) const { return lane(k).owner.load(std::memory_order_acquire) == own_word(); }
    bool is_kept(size_t k) const { return kept_[k].load(std::memory_order_acquire) && is_ours(k); }
    // Claim lane k until release(k); a lane that another thread only borrows for an edit stays ours after it.
    bool try_keep(size_t k) {
        if (is_kept(k)) return true;
        while (try_claim(k)) {
            Locked hold(lock(k));
            if (!is_ours(k)) continue;
            kept_[k].store(true, std::memory_order_release);
            return true;
        }
        return false;
    }
    void keep_lane(size_t k) {
        check_fork();
        if (!try_keep(k)) throw Busy(lane(k).owner.load(), int(k));
    }
    // Give up lane k if this object has kept it; `borrowed`: if it has it for one edit or repair, and did not keep it since.
    // The owner's word is that of a process, and another object of ours may have the lane.
    void release(size_t k, bool borrowed = false) {
        Lane& w = lane(k);
        const uint64_t me = used_word();
        if (!me || w.owner.load(std::memory_order_acquire) != me) return;
        Locked hold(lock(k));
        if (kept_[k].load(std::memory_order_acquire) == borrowed || w.owner.load(std::memory_order_acquire) != me) return;
        kept_[k].store(false, std::memory_order_release);
        w.open_segment.store(0, std::memory_order_relaxed);
        w.owner.store(0, std::memory_order_release);
        if (default_lane_ == int64_t(k)) default_lane_ = -1;
    }

    // --- the window -------------------------------------------------------------------------------------------------
    uint64_t low_of(const Lane& w) const {
        const uint64_t reserved = w.reserved.load(std::memory_order_acquire);
        const uint64_t tail = w.tail.load(std::memory_order_acquire);
        return std::max(tail, run && reserved > run ? reserved - run : 0);
    }
    // Never more than a lane holds, whatever its words say: each is loaded once, and what is made of them is all that
    // readers go by.
    Window window(size_t k) const {
        const Lane& w = lane(k);
        const uint64_t epoch = w.epoch.load(std::memory_order_acquire);
        const uint64_t cursor = checked(w.cursor.load(std::memory_order_acquire));  // before reserved, which is never behind it
        return within({std::min(low_of(w), cursor), cursor, epoch});
    }
    Window within(Window v) const {
        if (run && v.count() > run) [[unlikely]] v.low = v.cursor - run;
        return v;
    }
    uint64_t checked(uint64_t cursor) const {
        if (cursor >= kMostPositions) [[unlikely]] damaged("a cursor at " + std::to_string(cursor));
        return cursor;
    }
    // Where the writer of lane k goes on; the rows before it are there.
    uint64_t cursor_of(size_t k) {
        const uint64_t cursor = checked(lane(k).cursor.load(std::memory_order_relaxed));
        if (!capacity) find_rows(cursor);
        return cursor;
    }

    // --- changes inside the window; the caller holds the lane and its lock ----------------------------------------
    void open_epoch(Lane& w) {
        w.epoch.store(w.epoch.load(std::memory_order_relaxed) | 1, std::memory_order_relaxed);
        std::atomic_thread_fence(std::memory_order_release);
    }
    void close_epoch(Lane& w) {
        fault_point();
        w.op.store(kNone, std::memory_order_release);
        w.epoch.store((w.epoch.load(std::memory_order_relaxed) | 1) + 1, std::memory_order_release);
    }
    void set_op(Lane& w, uint64_t op) {
        fault_point();
        w.op.store(op, std::memory_order_release);
        fault_point();
    }

    // Move the window in one step that survives a kill at any point.
    void install(size_t k, uint64_t tail, uint64_t cursor, uint64_t reserved, uint64_t skip, uint64_t removed) {
        Lane& w = lane(k);
        const uint64_t values[5] = {tail, cursor, reserved, skip, removed};
        check_install(values);
        open_epoch(w);
        for (int i = 0; i < 5; ++i) w.journal[i].store(values[i], std::memory_order_relaxed);
        set_op(w, kInstall);
        finish_install(w, values);
        close_epoch(w);
    }

    // Remove the positions of the window whose rows are tombs, from `first` to `last`, moving the shorter side up or the newer down.
    // `gone_after` is what the door they leave by (removed or, with kTorn, dropped) then counts. Down, positions are counted
    // from `first`; up, from the window's low, one above.
    void compact(size_t k, const Window& v, uint64_t first, uint64_t last, uint64_t n_gone, uint64_t gone_after, uint64_t torn = 0) {
        Lane& w = lane(k);
        const uint64_t above = v.cursor - first, below = last + 1 - v.low;
        const bool down = !run || above <= below || below > kHalf;
        const uint64_t start = down ? 0 : below;
        w.journal[0].store(start << 32 | start, std::memory_order_relaxed);
        w.journal[1].store(down ? first : v.low, std::memory_order_relaxed);
        w.journal[2].store(gone_after, std::memory_order_relaxed);
        w.journal[3].store(w.skip.load(std::memory_order_relaxed) + (down ? n_gone : 0), std::memory_order_relaxed);
        w.journal[4].store(v.cursor, std::memory_order_relaxed);
        set_op(w, (down ? kDown : kUp) | torn);
        down ? finish_down(k) : finish_up(k);
    }

    // Finish or undo what a killed writer left in lane k. The caller holds the lane and its lock.
    void repair(size_t k) {
        Lane& w = lane(k);
        if (!(w.epoch.load(std::memory_order_acquire) & 1)) {
            // An oversized block was begun ahead of the cursor and displaced everything: go on behind what it took.
            const uint64_t low = low_of(w), cursor = checked(w.cursor.load());
            if (low > cursor) install(k, low, low, w.reserved.load(), w.skip.load() - (low - cursor), w.removed.load());
            return;
        }
        switch (w.op.load(std::memory_order_acquire) & ~kTorn) {
            case kInstall: finish_install(w); break;
            case kDown: finish_down(k); break;
            case kUp: finish_up(k); break;
            case kMark: each_row(k, window(k), [&](uint64_t, word& s) { s.store(s.load() & ~kTomb); }); break;
            case kOverwrite: drop_torn(k); break;
            default: break;
        }
        close_epoch(w);
    }

  private:
    template <typename F> void each_row(size_t k, const Window& v, F f) {
        find_rows(v.cursor);
        for (uint64_t p = v.low; p < v.cursor; ++p) f(p, stamp(row_of(k, p)));
    }

    void finish_install(Lane& w) {
        uint64_t values[5];
        for (int i = 0; i < 5; ++i) values[i] = w.journal[i].load();
        check_install(values);
        finish_install(w, values);
    }
    void check_install(const uint64_t* values) {
        const auto [tail, cursor, reserved] = std::array{values[0], values[1], values[2]};
        if (tail > cursor || cursor > reserved || reserved >= kMostPositions)
            damaged("a window from " + std::to_string(tail) + " to " + std::to_string(cursor) + " of " + std::to_string(reserved));
        find_rows(cursor);
    }
    void finish_install(Lane& w, const uint64_t* values) {
        fault_point();
        w.reserved.store(values[2], std::memory_order_relaxed);
        w.tail.store(values[0], std::memory_order_relaxed);
        fault_point();
        w.cursor.store(values[1], std::memory_order_relaxed);
        w.skip.store(values[3], std::memory_order_relaxed);
        fault_point();
        w.removed.store(values[4], std::memory_order_relaxed);
    }

    void drop_torn(size_t k) {
        Lane& w = lane(k);
        const Window v = window(k);
        uint64_t n = 0, first = 0, last = 0;
        each_row(k, v, [&](uint64_t p, word& s) {
            if (!(s.load() & (kTomb | 1))) return;  // a tomb: an earlier repair was killed too
            s.store(((s.load() + 1) & ~uint64_t(1)) | kTomb);
            fault_point();
            if (n++ == 0) first = p;
            last = p;
        });
        if (n == 0) return;
        split_at_tombs(k, v, first, last);
        compact(k, v, first, last, n, w.dropped.load() + n, kTorn);
    }

  public:
    int64_t new_segment(size_t k) {
        Lane& w = lane(k);
        const uint64_t n = w.next_segment.load(std::memory_order_relaxed);
        w.next_segment.store(n + 1, std::memory_order_relaxed);
        return static_cast<int64_t>(n * n_lanes + k + 1);
    }

    // What follows a hole in a segment becomes a segment of its own, so that no window spans the hole. New ids are
    // written from the newest row back: killed half way this leaves one boundary too many, never one too few, and
    // never two stretches of one id.
    void split_at_tombs(size_t k, const Window& v, uint64_t first, uint64_t last) {
        if (!tagged) return;
        find_rows(v.cursor);
        int64_t old = segment(row_of(k, first)), fresh = 0;
        bool survivors = first > v.low && segment(row_of(k, first - 1)) == old, hole = false;
        struct Renamed { uint64_t begin, end; int64_t segment; };
        std::vector<Renamed> renamed;  // next to one another, but for gaps between segments
        for (uint64_t p = first; p < v.cursor; ++p) {
            const size_t r = row_of(k, p);
            if (segment(r) != old) {
                if (p > last) break;
                old = segment(r), fresh = 0, survivors = hole = false;
            }
            if (is_tomb(r)) {
                hole = true;
                if (fresh) renamed.back().end = p + 1;  // if the removal is taken back it must not be left behind
                continue;
            }
            if (hole && survivors) renamed.push_back({p, p, fresh = new_segment(k)});
            hole = false;
            survivors = true;
            if (fresh) renamed.back().end = p + 1;
            else if (p > last) break;
        }
        for (; !renamed.empty(); renamed.pop_back())
            for (uint64_t p = renamed.back().end; p-- > renamed.back().begin;) {
                auto [c, i] = find(row_of(k, p));
                __atomic_store_n(c->segment + i, renamed.back().segment, __ATOMIC_RELEASE);
                fault_point();
            }
    }

  private:
    void move_row(size_t from, size_t to) {
        begin_row(to);
        std::atomic_thread_fence(std::memory_order_release);
        copy_bytes(row(to), row(from), row_nbytes);
        if (tagged) set_tag(to, segment(from), step(from));
        fault_point();
        end_row(to);
    }
    static word& door(Lane& w) { return w.op.load() & kTorn ? w.dropped : w.removed; }
    bool is_tomb(size_t r) const { return stamp(r).load(std::memory_order_relaxed) & kTomb; }

    // How far a compaction has come. Of its two counts (to, from) each has half a word, so that a kill between them cannot
    // happen; a row is moved again if unsure. Before a count outgrows its half the base moves on: kRebased says that the
    // counts may not have followed yet.
    static constexpr uint64_t kRebased = uint64_t(1) << 63;
    struct Progress {
        uint64_t base, to, from, end, gone, skip;
        void store(Lane& w) const { w.journal[0].store(to << 32 | from, std::memory_order_release); }
    };
    Progress progress_of(size_t k) const {
        const Lane& w = lane(k);
        const uint64_t counts = w.journal[0].load(), base = w.journal[1].load();
        Progress p{base & ~kRebased, counts >> 32, counts & 0xFFFFFFFF, w.journal[4].load(), w.journal[2].load(), w.journal[3].load()};
        if (base & kRebased && p.to >= kHalf) p.to -= kHalf, p.from -= kHalf;
        return p;
    }
    // The rows that it moves must be some of this lane.
    void check_progress(const Progress& p) {
        if (p.end >= kMostPositions || p.base > p.end || (run && p.end - p.base > run) || p.to > p.end - p.base || p.from > p.end - p.base)
            damaged("a removal from " + std::to_string(p.base) + " to " + std::to_string(p.end));
        find_rows(p.end);
    }
    void rebase(Lane& w, Progress& p) {
        p.base += kHalf, p.to -= kHalf, p.from -= kHalf;
        w.journal[1].store(p.base | kRebased, std::memory_order_release);
        fault_point();
        p.store(w);
        fault_point();
        w.journal[1].store(p.base, std::memory_order_release);
    }

    void finish_down(size_t k) {
        Lane& w = lane(k);
        Progress p = progress_of(k);
        check_progress(p);
        if (p.to > p.from) damaged("a removal that has moved more rows than it has seen");
        p.store(w);
        w.journal[1].store(p.base, std::memory_order_release);
        for (; p.base + p.from < p.end; ++p.from, p.store(w)) {
            fault_point();
            if (p.to >= kHalf) rebase(w, p);
            if (is_tomb(row_of(k, p.base + p.from))) continue;
            if (p.to != p.from) move_row(row_of(k, p.base + p.from), row_of(k, p.base + p.to));
            ++p.to;
        }
        door(w).store(p.gone);
        w.skip.store(p.skip);
        fault_point();
        w.cursor.store(p.base + p.to, std::memory_order_release);
    }

    void finish_up(size_t k) {
        Lane& w = lane(k);
        Progress p = progress_of(k);
        check_progress(p);
        if (p.from > p.to) damaged("a removal that has moved more rows than it has seen");
        for (; p.from > 0; --p.from, p.store(w)) {
            fault_point();
            if (is_tomb(row_of(k, p.base + p.from - 1))) continue;
            if (p.to != p.from) move_row(row_of(k, p.base + p.from - 1), row_of(k, p.base + p.to - 1));
            --p.to;
        }
        door(w).store(p.gone);
        fault_point();
        w.tail.store(p.base + p.to, std::memory_order_release);
    }

    std::mutex& growth() {  // readers come here too, who do not ask check_fork()
        const uint32_t now = fork_count.load(std::memory_order_relaxed);
        if (now != growth_forks_) { growth_ = std::make_unique<std::mutex>(); growth_forks_ = now; }
        return *growth_;
    }
    // Map the next chunk. If it is not there yet, make it, or return false.
    bool grow(bool makes) {
        const size_t c = n_chunks_;
        size_t rows = 0, data = 0;
        if (c < kMostChunks) rows = c == 0 ? kFirstChunk : kFirstChunk << (c - 1);
        if (!rows || __builtin_mul_overflow(row_nbytes, rows, &data) || data > size_t(1) << 60)
            throw std::system_error(ENOMEM, std::generic_category(), "growing");
        data = page_up(data);
        const size_t words = page_up(8 * rows), tags = tagged ? 2 * words : 0;
        const size_t nbytes = words + tags + data;
        size_t offset = header_->nbytes();
        for (size_t i = 0; i < c; ++i) offset += keep_[i]->nbytes();
        if (!makes) {
            struct stat about;
            if (fd < 0 || ::fstat(fd, &about) != 0 || size_t(about.st_size) < offset + nbytes) return false;
        } else if (fd >= 0 && writable) {
            const int error = reserve_file(fd, offset, nbytes);
            if (error) throw std::system_error(error, std::generic_category(), "growing the file");
        }
        auto mapping = std::make_shared<Mapping>(fd, offset, nbytes, can_repair);
        Chunk chunk;
        chunk.stamp = reinterpret_cast<word*>(mapping->base());
        if (tagged) {
            chunk.segment = reinterpret_cast<int64_t*>(mapping->base() + words);
            chunk.step = reinterpret_cast<int64_t*>(mapping->base() + 2 * words);
        }
        chunk.rows = mapping->base() + words + tags;
        add_chunk(chunk, std::move(mapping));
        return true;
    }

    // Whoever writes to a file holds a shared flock of it: where that can be made an exclusive one, nobody else does.
    bool is_only_writer() const {
        const bool is_only = ::flock(fd, LOCK_EX | LOCK_NB) == 0;
        ::flock(fd, writable ? LOCK_SH | LOCK_NB : LOCK_UN);
        return is_only;
    }

#if RECOLLECT_LINUX
    // Every process that claims a lane of a file holds a shared lock on the byte that its word numbers, far beyond the
    // end of the file, until it closes it.
    static struct flock lock_on(uint64_t owner, short type) {
        struct flock lock{};
        lock.l_type = type;
        lock.l_whence = SEEK_SET;
        lock.l_start = static_cast<off_t>(owner & ((uint64_t(1) << 62) - 1));
        lock.l_len = 1;
        return lock;
    }
    void lock_own_word() {
        const uint64_t me = own_word();
        if (!is_portable && fd >= 0 && !is_private && boot_of(me) != kNoDomain) {
            Locked hold(growth());
            const uint32_t now = fork_count.load();
            if (lock_fd_forks_.load() != now) {  // our parent's locks would not show in a description shared with it
                char path[64];
                std::snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
                const int own = ::open(path, O_RDWR | O_CLOEXEC);
                if (own < 0) throw std::system_error(errno, std::generic_category(), "opening the file again to lock it");
                if (lock_fd_ >= 0 && lock_fd_ != fd) ::close(lock_fd_);
                lock_fd_ = own;
                lock_fd_forks_.store(now, std::memory_order_release);
            }
            struct flock lock = lock_on(me, F_RDLCK);
            if (::fcntl(lock_fd_, F_OFD_SETLK, &lock) != 0 && errno != EINVAL && errno != ENOLCK && errno != EOPNOTSUPP && errno != ENOSYS)
                throw std::system_error(errno, std::generic_category(), "locking the file");
        }
        locked_.store(me, std::memory_order_release);
    }
    bool is_on_own_disk() const {
        struct statfs about;
        if (::fstatfs(fd, &about) != 0) return false;
        constexpr uint32_t own[] = {0xEF53 /* ext */, 0x58465342 /* xfs */, 0x9123683E /* btrfs */, 0x2FC12FC1 /* zfs */,
                                    0xF2F52010 /* f2fs */, 0xCA451A4E /* bcachefs */, 0x01021994 /* tmpfs */,
                                    0x794C7630 /* overlay */};
        return std::find(std::begin(own), std::end(own), static_cast<uint32_t>(about.f_type)) != std::end(own);
    }
#else
    void lock_own_word() { locked_.store(own_word(), std::memory_order_release); }
#endif

    std::unique_ptr<std::mutex[]> locks_;
    std::unique_ptr<std::atomic<bool>[]> kept_;  // claimed to write to, not borrowed for one edit
    uint32_t forks_, born_forks_, growth_forks_;
    int64_t default_lane_ = -1;
    std::atomic<uint64_t> locked_{0};  // the word that this object holds a lock for
    int lock_fd_ = fd;                 // an open file of this process alone
    std::atomic<uint32_t> lock_fd_forks_{fork_count.load()};
    std::unique_ptr<std::mutex> growth_ = std::make_unique<std::mutex>(), edits_ = std::make_unique<std::mutex>();
    std::shared_ptr<Mapping> header_;
    Lane* lanes_;
    Shared* shared_;
    Chunk chunks_[kMostChunks];
    size_t n_chunks_ = 0;
    std::atomic<size_t> ready_{0};
    std::vector<std::shared_ptr<Mapping>> keep_;
};

// A lane that this process writes to, and its lock. Until it has the lock another thread may release the lane.
class OwnLane {
  public:
    OwnLane(Memory& m, int64_t lane) : k(keep(m, lane)) {
        for (take(m); !m.is_kept(k); take(m)) {
            lock_.reset();
            k = keep(m, lane);
            waited = true;
        }
    }
    bool waited = false;  // then other threads have run
    size_t k;

  private:
    size_t keep(Memory& m, int64_t lane) {
        if (lane < 0) return m.default_lane();
        if (!m.is_kept(size_t(lane))) waited = true, m.keep_lane(size_t(lane));
        return size_t(lane);
    }
    void take(Memory& m) {
        lock_.emplace(m.lock(k));
        waited |= lock_->waited;
    }
    std::optional<Locked> lock_;
};

}  // namespace recollect
