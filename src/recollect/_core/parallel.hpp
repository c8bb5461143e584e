// Work cut into pieces, which whoever is at hand takes.
//
// A thread on a core that was asleep takes a while to begin; on one that is busy, with an environment's steps, it may begin
// milliseconds later. So nobody waits for a thread, only for pieces that one has taken: who begins late finds none and
// ends, and the caller has done them all meanwhile.
#pragma once

#include <algorithm>
#include <atomic>
#include <memory>
#include <system_error>
#include <thread>

#include "gil.hpp"
#include "process.hpp"
#include "system.hpp"

namespace recollect {

constexpr size_t kThreadNbytes = size_t(3) << 18;  // a thread must have this much to copy to be worth starting
// And this much to write: one core streams as fast as the memory takes it, and a writer's neighbours are at work.
constexpr size_t kWriterNbytes = size_t(4) << 20;
constexpr size_t kMostThreads = 8;

inline size_t thread_count(size_t nbytes, size_t each_nbytes = kThreadNbytes) {
    static const size_t cores = usable_cores();
    return std::clamp<size_t>(nbytes / each_nbytes, 1, std::min(cores, kMostThreads));
}

// Whether more threads would help. While many were started and have not begun, or after one that began too late, all
// cores are busy; then it is tried again after some copies, twice as many each time it was in vain.
class Helpers {
  public:
    // True if one may be started; it must then call `began`.
    bool start(uint32_t forks) {
        uint32_t was = forks_.load(std::memory_order_relaxed);
        if (was != forks && forks_.compare_exchange_strong(was, forks)) late_.store(0);  // a parent's threads never begin here
        if (rest_.load(std::memory_order_relaxed) > 0) {
            rest_.fetch_sub(1, std::memory_order_relaxed);
            return false;
        }
        if (late_.fetch_add(1, std::memory_order_relaxed) < int(kMostThreads)) return true;
        late_.fetch_sub(1, std::memory_order_relaxed);
        return false;
    }
    void began() { late_.fetch_sub(1, std::memory_order_relaxed); }
    void helped(bool did) {
        const int pause = did ? 0 : std::clamp(2 * pause_.load(std::memory_order_relaxed), 4, 64);
        pause_.store(pause, std::memory_order_relaxed);
        rest_.store(pause, std::memory_order_relaxed);
    }

  private:
    std::atomic<uint32_t> forks_{0};
    std::atomic<int> late_{0}, rest_{0}, pause_{0};
};
inline Helpers helpers;

// Where pieces are taken from.
struct Board {
    explicit Board(size_t n) : n(n) {}
    const size_t n;  // pieces
    std::atomic<size_t> next{0}, done{0};

    // Take pieces while there are any; false if there were none. `work` is there as long as one is not done.
    template <typename Work> bool take(const Work* work, size_t length) {
        bool any = false;
        for (size_t p; (p = next.fetch_add(1, std::memory_order_relaxed)) < n; any = true) {
            (*work)(length * p / n, length * (p + 1) / n);
            if (done.fetch_add(1, std::memory_order_acq_rel) + 1 == n) done.notify_one();
        }
        return any;
    }
    void wait() const {
        for (size_t seen; (seen = done.load(std::memory_order_acquire)) < n;) done.wait(seen, std::memory_order_acquire);
    }
};

// Run `work(begin, end)` over [0, n), on as many threads as `nbytes` is worth at `each_nbytes`.
template <typename Work> void in_parallel(size_t n, size_t nbytes, const Work& work, size_t each_nbytes = kThreadNbytes) {
    const size_t threads = std::min(thread_count(nbytes, each_nbytes), std::max<size_t>(n, 1));
    if (threads <= 1) { work(size_t(0), n); return; }
    watch_forks();
    std::shared_ptr<Board> board;  // outlives this call for those who come late
    try { board = std::make_shared<Board>(std::min(n, 4 * threads)); }
    catch (const std::bad_alloc&) { work(size_t(0), n); return; }  // rows half written must not wait for memory
    for (size_t t = 1; t < threads && helpers.start(fork_count.load(std::memory_order_relaxed)); ++t) {
        try { std::thread([board, &work, n] { has_gil = false; helpers.began(); helpers.helped(board->take(&work, n)); }).detach(); }
        catch (const std::exception&) { helpers.began(); break; }  // no thread to be had
    }
    board->take(&work, n);
    board->wait();
}

}  // namespace recollect
