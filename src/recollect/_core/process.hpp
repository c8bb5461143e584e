// Processes as seen from shared memory: who holds a word, is that process alive, and waiting for a word to change.
#pragma once

#include <fcntl.h>
#include <linux/futex.h>
#include <pthread.h>
#include <signal.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace recollect {

// Bumped in every forked child: cheaper to compare than to ask the kernel for the pid on each append.
inline std::atomic<uint32_t> fork_count{0};
inline void watch_forks() {
    static const bool once = [] {
        pthread_atfork(nullptr, nullptr, [] { fork_count.fetch_add(1, std::memory_order_relaxed); });
        return true;
    }();
    (void)once;
}

// Start time of a process in clock ticks since boot; 0 when it is gone or a zombie. A pid alone may be reused.
inline uint64_t process_start(pid_t pid) {
    char path[64], text[1024];
    std::snprintf(path, sizeof path, "/proc/%d/stat", pid);
    const int fd = ::open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return 0;
    const ssize_t n = ::read(fd, text, sizeof text - 1);
    ::close(fd);
    if (n <= 0) return 0;
    text[n] = 0;
    const char* at = std::strrchr(text, ')');  // the command may hold blanks and brackets
    if (!at || at[1] != ' ' || at[2] == 'Z' || at[2] == 'X') return 0;
    at += 2;  // field 3, the state; the start time is field 22
    for (int field = 3; field < 22; ++field) {
        at = std::strchr(at, ' ');
        if (!at) return 0;
        ++at;
    }
    const uint64_t start = std::strtoull(at, nullptr, 10);
    return start ? start : 1;
}

// One word that names a process for good: pid below, start time above. 0 names nobody.
inline uint64_t process_word(pid_t pid) {
    const uint64_t start = process_start(pid);
    return start ? (start << 32) | static_cast<uint32_t>(pid) : 0;
}
inline pid_t pid_of(uint64_t word) { return static_cast<pid_t>(word & 0xFFFFFFFFu); }
inline bool is_alive(uint64_t word) { return word && process_word(pid_of(word)) == word; }

inline uint64_t own_word() {
    thread_local uint64_t word = 0;
    thread_local uint32_t forks = ~0u;
    const uint32_t now = fork_count.load(std::memory_order_relaxed);
    if (forks != now) { word = process_word(::getpid()); forks = now; }
    return word;
}

inline double monotonic_s() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec * 1e-9;
}

inline void nap(long ns) {
    timespec t{0, ns};
    nanosleep(&t, nullptr);
}

// False when `timeout_s` passed with the word still equal to `expected`.
inline bool futex_wait(const std::atomic<uint32_t>* word, uint32_t expected, double timeout_s) {
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

inline int futex_wake(const std::atomic<uint32_t>* word, int n) {
    return static_cast<int>(syscall(SYS_futex, word, FUTEX_WAKE, n, nullptr, nullptr, 0));
}

// Steps of the protocol at which a test may kill this process, by SIGKILL, on the n-th pass.
inline int64_t fault_countdown = -1;
inline void fault_point() {
    if (fault_countdown >= 0 && fault_countdown-- == 0) [[unlikely]] {
        ::kill(::getpid(), SIGKILL);
        for (;;) ::pause();
    }
}

// Moments in a call at which a test may let happen what another process might do just then: the n-th to come.
inline int64_t moment_countdown = -1;
inline void (*at_moment)() = nullptr;
inline void moment() {
    if (moment_countdown >= 0 && moment_countdown-- == 0) [[unlikely]] at_moment();
}

}  // namespace recollect
