// Processes as seen from shared memory: which one holds a word, and is it alive.
#pragma once

#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <system_error>

#include "process_files.hpp"
#include "system.hpp"
#include "wait.hpp"

namespace recollect {

// Bumped in every forked child: cheaper to compare than to ask the kernel for the pid on each append.
inline std::atomic<uint32_t> fork_count{0};
inline std::atomic<uint64_t> known_own_word{0}, known_domain{0};  // of this process, 0 before the first look
inline void watch_forks() {
    static const bool once = [] {
        pthread_atfork(nullptr, nullptr, [] {
            fork_count.fetch_add(1, std::memory_order_relaxed);
            known_own_word.store(0, std::memory_order_relaxed);
            known_domain.store(0, std::memory_order_relaxed);
        });
        return true;
    }();
    (void)once;
}

// --- names of processes -----------------------------------------------------------------------------------------
// One word names a process for good: pid (22 bits, all that Linux gives out), the boot of its machine (10), when it
// started (16) and its pid namespace (14). 0 names nobody. A pid and a start time alone mean something only to those
// who see the same processes: another container, or another machine on the same file, finds nobody under that pid, or
// somebody else. Words without a boot are of earlier releases: start time << 32 | pid, taken to be of our namespace.
//
// Whether a process lives has three answers. Dead is said only of what is known to be dead; a process of another
// namespace or machine, and one that could not be looked up (no free descriptor, no /proc, hidden by its mount), is
// unknown, and whoever asks waits, as for a live one.
//
// Without /proc a word says not when a process started but which file it holds locked (process_files.hpp), and not
// which boot and namespace but which directory has those files: who does not see it can tell nothing.
enum class Life { kAlive, kDead, kUnknown };

constexpr int kPidBits = 22, kBootBits = 10, kStartBits = 16, kSpaceBits = 14;  // 62: messages carry no more
constexpr uint64_t kNoDomain = (1u << kBootBits) - 1;  // as a boot: the process could not tell where it is
constexpr uint64_t kNoBoot = kNoDomain - 1;            // it could tell its namespace, and not the boot

inline pid_t pid_of(uint64_t word) { return static_cast<pid_t>(word & ((1u << kPidBits) - 1)); }
inline uint64_t boot_of(uint64_t word) { return word >> kPidBits & kNoDomain; }
inline uint64_t start_of(uint64_t word) { return word >> 32 & ((1u << kStartBits) - 1); }
inline uint64_t space_of(uint64_t word) { return word >> (32 + kStartBits) & ((1u << kSpaceBits) - 1); }
constexpr uint64_t kDomain = kNoDomain << kPidBits | ((uint64_t(1) << kSpaceBits) - 1) << (32 + kStartBits);  // boot and namespace

// The beginning of a small file; its length, or -1 and errno.
inline ssize_t read_text(const char* path, char* text, size_t room) {
    int fd;
    do fd = ::open(path, O_RDONLY | O_CLOEXEC); while (fd < 0 && errno == EINTR);
    if (fd < 0) return -1;
    ssize_t n;
    do n = ::read(fd, text, room - 1); while (n < 0 && errno == EINTR);
    const int error = errno;
    ::close(fd);
    errno = error;
    text[n > 0 ? n : 0] = 0;
    return n;
}

// The boot of this machine as 10 bits. Read once, when the module is loaded: later there may be no free descriptor.
inline uint64_t own_boot() {
    if (is_portable) return process_files::directory_id % (kNoBoot - 1) + 1;
    static const uint64_t boot = [] {
        char text[64];
        if (read_text("/proc/sys/kernel/random/boot_id", text, sizeof text) < 36) return kNoBoot;
        uint64_t hash = 0xCBF29CE484222325u;
        for (int i = 0; i < 36; ++i) hash = (hash ^ static_cast<unsigned char>(text[i])) * 0x100000001B3u;
        return (hash >> 20) % (kNoBoot - 1) + 1;
    }();
    return boot;
}

// Where this process is: the bits of kDomain of its word, and bit 0 if /proc shows it under the pid that it has
// itself. Takes no descriptor. Namespaces of one boot have small numbers of their own, so 14 bits tell them apart.
inline uint64_t own_domain() {
    uint64_t known = known_domain.load(std::memory_order_relaxed);
    if (known) return known;
    watch_forks();
    if (is_portable) {
        known = ((own_boot() << kPidBits | process_files::directory_id >> 10 << (32 + kStartBits)) & kDomain) | 1;
        known_domain.store(known, std::memory_order_relaxed);
        return known;
    }
    struct stat pids, times;
    if (::stat("/proc/self/ns/pid", &pids) != 0) {
        known = kNoDomain << kPidBits;
    } else {
        uint64_t space = pids.st_ino;
        if (::stat("/proc/self/ns/time", &times) == 0) space += 5003 * (times.st_ino - 0xEFFFFFFA);  // shifts start times
        known = (own_boot() << kPidBits | space << (32 + kStartBits)) & kDomain;
    }
    char self[32];
    const ssize_t n = ::readlink("/proc/self", self, sizeof self - 1);
    self[n > 0 ? n : 0] = 0;
    if (std::atoi(self) == ::getpid()) known |= 1;
    known_domain.store(known, std::memory_order_relaxed);
    return known;
}

// What can be seen of a process or thread by its number in our namespace.
struct Look {
    Life life;
    uint64_t start;  // in clock ticks since boot, of a live one
    int error;       // why it is unknown
};
inline Look parse_stat(const char* text, bool is_thread) {
    const char* at = std::strrchr(text, ')');  // the command may hold blanks and brackets
    if (!at || at[1] != ' ') return {Life::kUnknown, 0, EIO};
    const char state = at[2];
    at += 2;  // field 3, the state; the number of threads is field 20, the start time field 22
    uint64_t n_threads = 0;
    for (int field = 3; field < 22; ++field) {
        at = std::strchr(at, ' ');
        if (!at) return {Life::kUnknown, 0, EIO};
        if (field == 19) n_threads = std::strtoull(at, nullptr, 10);
        ++at;
    }
    // The first thread may end before the others, which may still write.
    if (state == 'X' || (state == 'Z' && (is_thread || n_threads <= 1))) return {Life::kDead, 0, 0};
    return {Life::kAlive, std::strtoull(at, nullptr, 10), 0};
}
inline Look look_up(pid_t pid, bool is_thread = false) {
    if (pid <= 0) return {Life::kDead, 0, 0};
    int error = ENOENT;
    if (!is_portable && own_domain() & 1) {
        char path[64], text[1024];
        std::snprintf(path, sizeof path, "/proc/%d/stat", pid);
        if (read_text(path, text, sizeof text) > 0) return parse_stat(text, is_thread);
        error = errno;
    }
    // Not there to be read: it is gone, or hidden. Signal 0 tells, and needs neither /proc nor a descriptor.
    if (::kill(pid, 0) != 0 && errno == ESRCH) return {Life::kDead, 0, 0};
    return {Life::kUnknown, 0, error};
}

inline uint64_t start_bits(uint64_t start) { return start % ((1u << kStartBits) - 1) + 1; }  // 0: it is not known
inline uint64_t make_word(pid_t pid, uint64_t start) {
    return (own_domain() & kDomain) | start << 32 | static_cast<uint64_t>(pid);
}

// The word of a process of our namespace; 0 when it is dead. One that cannot be looked up is an error.
inline uint64_t own_word();
inline uint64_t process_word(pid_t pid) {
    if (is_portable) {
        if (pid == ::getpid()) return own_word();
        const uint64_t start = process_files::find(pid);
        if (!start && ::kill(pid, 0) != 0 && errno == ESRCH) return 0;
        return make_word(pid, start);
    }
    const Look found = look_up(pid);
    if (found.life == Life::kDead) return 0;
    if (found.life == Life::kUnknown) throw std::system_error(found.error, std::generic_category(), "process");
    return make_word(pid, start_bits(found.start));
}

// The word of this process. Without /proc it says no start time; without a free descriptor it is an error.
inline uint64_t own_word() {
    uint64_t known = known_own_word.load(std::memory_order_relaxed);
    if (known) [[likely]] return known;
    watch_forks();
    if (is_portable) {
        const process_files::Held held = process_files::enter();
        const uint64_t word = make_word(::getpid(), held.number);
        if (known_own_word.compare_exchange_strong(known, word, std::memory_order_relaxed)) {
            process_files::keep(held);
            return word;
        }
        process_files::leave(held);  // another thread was first
        return known;
    }
    char text[1024];
    uint64_t start = 0;
    if (read_text("/proc/self/stat", text, sizeof text) > 0) {
        const Look found = parse_stat(text, false);
        if (found.life == Life::kAlive) start = start_bits(found.start);
    } else if (errno == EMFILE || errno == ENFILE || errno == ENOMEM) {
        throw std::system_error(errno, std::generic_category(), "/proc/self/stat");
    }
    const uint64_t word = make_word(::getpid(), start);
    return known_own_word.compare_exchange_strong(known, word, std::memory_order_relaxed) ? word : known;
}
// The word of this process if it ever used it, else 0: what it never used it cannot have put anywhere.
inline uint64_t used_word() { return known_own_word.load(std::memory_order_relaxed); }

// Whether the process that a word names is of another machine, of this one before it was restarted, or of a container
// that has a boot id of its own.
inline bool is_of_other_boot(uint64_t word) {
    const uint64_t boot = boot_of(word), own = boot_of(own_domain());
    return boot && boot < kNoBoot && own < kNoBoot && boot != own;
}
inline bool is_of_other_space(uint64_t word) {
    const uint64_t domain = own_domain() & kDomain;
    return boot_of(word) && ((word & kDomain) != domain || boot_of(word) == kNoDomain);
}

inline Life life_by_file(pid_t pid, uint64_t start, int* error = nullptr) {
    const int held = process_files::is_held(pid, start);
    if (held < 0 && error) *error = errno;
    return held < 0 ? Life::kUnknown : held ? Life::kAlive : Life::kDead;
}

inline Life life_of(uint64_t word, int* error = nullptr) {
    if (!word) return Life::kDead;
    if (word == used_word()) return Life::kAlive;
    if (is_of_other_space(word)) return Life::kUnknown;
    if (is_portable && word >> 32 == 0) return Life::kDead;  // no process ever had it
    if (is_portable && boot_of(word) && start_of(word)) return life_by_file(pid_of(word), start_of(word), error);
    const Look found = look_up(pid_of(word));
    if (error) *error = found.error;
    if (found.life != Life::kAlive) return found.life;
    if (!boot_of(word)) return std::max<uint64_t>(found.start, 1) << 32 == word >> 32 << 32 ? Life::kAlive : Life::kDead;
    if (!start_of(word)) return Life::kUnknown;
    return start_bits(found.start) == start_of(word) ? Life::kAlive : Life::kDead;
}
inline bool is_dead(uint64_t word) { return life_of(word) == Life::kDead; }

// The process that a word names, for messages, and why it is not known to be dead.
inline std::string describe_process(uint64_t word) {
    std::string text = "process " + std::to_string(pid_of(word));
    int error = 0;
    if (life_of(word, &error) != Life::kUnknown) return text;
    if (is_of_other_boot(word)) return text + " of another machine or container, or of this machine before it was restarted";
    if (boot_of(word) && boot_of(word) != kNoDomain && is_of_other_space(word)) return text + " of another pid namespace (container)";
    return text + ", which cannot be looked up" + (error ? std::string(" (") + std::strerror(error) + ")" : std::string());
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
