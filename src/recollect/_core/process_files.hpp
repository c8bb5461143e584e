// Where there is no /proc: each process holds a file of its own locked, and is alive as long as the lock is.
//
// The file is `process-PID-NUMBER` in a directory that only this user can enter (recollect.system makes it and removes
// what dead processes left). The kernel drops the lock with the process, whatever that died of, and keeps it while the
// process is stopped; a zombie has none. The lock is one of fcntl, which a forked child does not inherit, and which is
// lost when its own process closes any descriptor of the file: so nobody opens the file of the process that it is in.
#pragma once

#include <dirent.h>
#include <time.h>

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string>
#include <system_error>

#include "system.hpp"

namespace recollect::process_files {

inline std::string directory;      // set once, when the module is loaded
inline uint64_t directory_id = 0;  // a random number in it: another one of that path, after a restart, is another

// A file that this process made and has locked.
struct Held { uint64_t number; int fd; };

inline std::string path_of(pid_t pid, uint64_t number) {
    return directory + "/process-" + std::to_string(pid) + "-" + std::to_string(number);
}

inline struct flock whole(short type) {
    struct flock lock{};
    lock.l_type = type;
    lock.l_whence = SEEK_SET;
    return lock;
}

// Make and lock a file of this process, with a number from 1 to 65535.
inline Held enter() {
    timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    uint64_t mixed = uint64_t(t.tv_sec) * 1000000007u + uint64_t(t.tv_nsec) + uint64_t(::getpid()) * 40503u;
    int fd = -1, error = EEXIST;
    for (int tries = 0; tries < 1000; ++tries) {
        mixed = (mixed ^ mixed >> 31) * 0x9E3779B97F4A7C15u + 1;
        const uint64_t number = (mixed >> 40) % 65535 + 1;
        const std::string path = path_of(::getpid(), number);
        fd = ::open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
        error = errno;
        if (fd < 0 && error != EEXIST && error != EINTR) break;
        if (fd < 0) continue;
        struct flock lock = whole(F_WRLCK);
        struct stat about;
        // One that removes what the dead left may have come between: then it has the lock, or had it, and the file is gone.
        if (::fcntl(fd, F_SETLK, &lock) == 0 && ::fstat(fd, &about) == 0 && about.st_nlink) return {number, fd};
        error = errno;
        ::close(fd);
    }
    throw std::system_error(error, std::generic_category(), "the file of this process in " + directory);
}

inline void leave(Held held) {
    ::unlink(path_of(::getpid(), held.number).c_str());
    ::close(held.fd);
}

// Keep a file until this process ends; what its parent kept is in the parent's hands.
inline void keep(Held held) {
    static std::atomic<uint64_t> kept{0};  // number << 32 | pid
    static std::atomic<int> fd{-1};
    const int before = fd.exchange(held.fd);
    if (before >= 0) ::close(before);
    kept.store(held.number << 32 | static_cast<uint32_t>(::getpid()));
    static const bool once = [] {
        std::atexit([] {  // the lock goes with the process
            const uint64_t last = kept.load();
            if (static_cast<uint32_t>(::getpid()) == static_cast<uint32_t>(last)) ::unlink(path_of(::getpid(), last >> 32).c_str());
        });
        return true;
    }();
    (void)once;
}

// Whether a process holds its file: 1 or 0; -1 and errno where that cannot be told.
inline int is_held(pid_t pid, uint64_t number) {
    int fd;
    do fd = ::open(path_of(pid, number).c_str(), O_RDWR | O_CLOEXEC); while (fd < 0 && errno == EINTR);
    if (fd < 0) return errno == ENOENT ? 0 : -1;
    struct flock lock = whole(F_WRLCK);
    const int rc = ::fcntl(fd, F_GETLK, &lock), error = errno;
    ::close(fd);
    errno = error;
    return rc != 0 ? -1 : lock.l_type != F_UNLCK;
}

// The number of another process that has entered, 0 if none has.
inline uint64_t find(pid_t pid) {
    const std::string start = "process-" + std::to_string(pid) + "-";
    DIR* all = ::opendir(directory.c_str());
    uint64_t found = 0;
    while (const dirent* one = all && !found ? ::readdir(all) : nullptr)
        if (std::strncmp(one->d_name, start.c_str(), start.size()) == 0) {
            const uint64_t number = std::strtoull(one->d_name + start.size(), nullptr, 10);
            if (is_held(pid, number) == 1) found = number;
        }
    if (all) ::closedir(all);
    return found;
}

}  // namespace recollect::process_files
