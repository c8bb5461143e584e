// Which means of the system are used: those of Linux, or only what POSIX has.
//
// Built for another system, or with -DRECOLLECT_PORTABLE=ON, the core knows the second alone. Built for Linux it knows
// both, and recollect.system says which to use, before anything else is done. What there are two of has one file each:
// waits on a word (wait.hpp), processes (process.hpp), memory of a descriptor (mapping.hpp) and what is below.
#pragma once

#if defined(__linux__) && !defined(RECOLLECT_PORTABLE)
#define RECOLLECT_LINUX 1
#else
#define RECOLLECT_LINUX 0
#endif

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <thread>

#if RECOLLECT_LINUX
#include <sched.h>
#endif

#ifndef MAP_ANONYMOUS
#define MAP_ANONYMOUS MAP_ANON
#endif
#ifndef MAP_NORESERVE
#define MAP_NORESERVE 0
#endif

namespace recollect {

#if RECOLLECT_LINUX
inline bool is_portable = false;
#else
inline constexpr bool is_portable = true;
#endif

// Cores that this process may run on: others may be there, and a thread for each would only wait for its turn.
inline size_t usable_cores() {
#if RECOLLECT_LINUX
    cpu_set_t set;
    if (!is_portable) return ::sched_getaffinity(0, sizeof set, &set) == 0 ? size_t(CPU_COUNT(&set)) : 1;
#endif
    return std::max(1u, std::thread::hardware_concurrency());
}

// A wish, refused on some kernels: a random gather from 2 MB pages misses the TLB far less often.
inline void want_huge_pages([[maybe_unused]] void* at, [[maybe_unused]] size_t nbytes) {
#if RECOLLECT_LINUX
    if (!is_portable) ::madvise(at, nbytes, MADV_HUGEPAGE);
#endif
}

// Take the disk for a part of a file that may lie past its end; 0, or why not.
inline int reserve_file(int fd, size_t offset, size_t nbytes) {
#if RECOLLECT_LINUX
    if (!is_portable) return ::posix_fallocate(fd, static_cast<off_t>(offset), static_cast<off_t>(nbytes));
#endif
    struct stat about;
    if (::fstat(fd, &about) != 0) return errno;
    static constexpr char zeros[1 << 16] = {};
    for (size_t at = std::max(offset, size_t(about.st_size)), end = offset + nbytes; at < end;) {
        const ssize_t n = ::pwrite(fd, zeros, std::min(sizeof zeros, end - at), static_cast<off_t>(at));
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) return n < 0 ? errno : ENOSPC;
        at += size_t(n);
    }
    return 0;
}

}  // namespace recollect
