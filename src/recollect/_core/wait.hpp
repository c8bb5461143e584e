// Waits for a shared word to change, and wake-ups: a futex, or short polls.
//
// A poll sees only a change, so whoever wakes others changes the word first.
#pragma once

#include <pthread.h>
#include <signal.h>
#include <sys/select.h>
#include <time.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdint>

#include "system.hpp"

#if RECOLLECT_LINUX
#include <linux/futex.h>
#include <sys/syscall.h>
#endif

namespace recollect {

inline double monotonic_s() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec * 1e-9;
}

inline void nap(long ns) {
    timespec t{0, ns};
    nanosleep(&t, nullptr);
}

// Naps of 20 us that double up to 1 ms. Signals are let in only during a nap, so that none comes unnoticed in between.
inline bool poll_word(const std::atomic<uint32_t>* word, uint32_t expected, double timeout_s) {
    const double end = monotonic_s() + timeout_s;
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    bool changed = false;
    for (double nap_s = 20e-6;; nap_s = std::min(2 * nap_s, 1e-3)) {
        changed = word->load(std::memory_order_acquire) != expected;
        const double left = end - monotonic_s();
        if (changed || left <= 0) break;
        const timespec t{0, static_cast<long>(std::min(nap_s, left) * 1e9)};
        if (::pselect(0, nullptr, nullptr, nullptr, &t, &before) < 0) {
            changed = word->load(std::memory_order_acquire) != expected;
            break;
        }
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    return changed;
}

// False when `timeout_s` passed, or a signal came, with the word still equal to `expected`.
inline bool wait_word(const std::atomic<uint32_t>* word, uint32_t expected, double timeout_s) {
#if RECOLLECT_LINUX
    if (!is_portable) {
        const double end = monotonic_s() + timeout_s;
        while (word->load(std::memory_order_acquire) == expected) {
            const double left = std::min(end - monotonic_s(), 1e6);  // an endless one waits in parts
            if (left <= 0) return false;
            timespec t{static_cast<time_t>(left), static_cast<long>((left - static_cast<time_t>(left)) * 1e9)};
            const long rc = syscall(SYS_futex, word, FUTEX_WAIT, expected, &t, nullptr, 0);
            if (rc == -1 && errno == EINTR) return word->load(std::memory_order_acquire) != expected;
        }
        return true;
    }
#endif
    return poll_word(word, expected, timeout_s);
}

// How many were woken; 0 where those who wait look by themselves.
inline int wake_word([[maybe_unused]] const std::atomic<uint32_t>* word, [[maybe_unused]] int n) {
#if RECOLLECT_LINUX
    if (!is_portable) return static_cast<int>(syscall(SYS_futex, word, FUTEX_WAKE, n, nullptr, nullptr, 0));
#endif
    return 0;
}

}  // namespace recollect
