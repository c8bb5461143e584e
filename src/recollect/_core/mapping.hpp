// A stretch of mapped memory: anonymous, or of a descriptor (shared memory or a file).
#pragma once

#include <cerrno>
#include <cstdint>
#include <system_error>

#include "copy.hpp"
#include "sizes.hpp"
#include "system.hpp"

namespace recollect {

constexpr size_t kPage = 4096;
constexpr size_t kHugePage = size_t(2) << 20;
inline size_t page_up(size_t n) { return (n + kPage - 1) / kPage * kPage; }

class Mapping {
  public:
    // `fd` < 0: private anonymous memory. Large mappings start on a 2 MB border and ask for huge pages: a random
    // gather then misses the TLB far less often.
    Mapping(int fd, size_t offset, size_t nbytes, bool writable)
        : nbytes_(page_up(nbytes ? nbytes : 1)), writable_(writable) {
        if (nbytes > kMostNbytes) { errno = ENOMEM; fail("mmap"); }  // what is added below would overflow
        const int protection = PROT_READ | (writable ? PROT_WRITE : 0);
        const bool huge = nbytes_ >= kHugePage;
        const size_t span = nbytes_ + (huge ? kHugePage : 0);
        byte* reserved = static_cast<byte*>(
            ::mmap(nullptr, span, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
        if (reserved == MAP_FAILED) fail("mmap");
        byte* base = reserved;
        if (huge) base += (kHugePage - reinterpret_cast<uintptr_t>(reserved) % kHugePage) % kHugePage;
        if (base > reserved) ::munmap(reserved, base - reserved);
        if (reserved + span > base + nbytes_) ::munmap(base + nbytes_, reserved + span - base - nbytes_);
        // Beyond the end of a file lie zeros of our own, so that no address in the mapping can fault.
        size_t in_file = 0;
        if (fd >= 0) {
            struct stat about;
            if (::fstat(fd, &about) != 0) fail_unmapped(base, "fstat");
            if (static_cast<size_t>(about.st_size) > offset) in_file = std::min(nbytes_, page_up(about.st_size - offset));
        }
        map(base, nbytes_ - in_file, in_file, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        map(base, in_file, 0, protection, MAP_SHARED, fd, offset);
        base_ = base;
        if (huge) want_huge_pages(base_, nbytes_);
    }
    Mapping(const Mapping&) = delete;
    Mapping& operator=(const Mapping&) = delete;
    ~Mapping() { ::munmap(base_, nbytes_); }

    byte* base() const { return base_; }
    size_t nbytes() const { return nbytes_; }
    bool writable() const { return writable_; }
    void sync() const {
        if (::msync(base_, nbytes_, MS_SYNC) != 0) fail("msync");
    }

  private:
    void map(byte* base, size_t nbytes, size_t at, int protection, int flags, int fd, size_t offset) {
        if (nbytes == 0) return;
        if (::mmap(base + at, nbytes, protection, flags | MAP_FIXED, fd, static_cast<off_t>(offset)) == MAP_FAILED)
            fail_unmapped(base, "mmap");
    }
    [[noreturn]] void fail_unmapped(byte* base, const char* what) {
        const int error = errno;
        ::munmap(base, nbytes_);
        errno = error;
        fail(what);
    }
    [[noreturn]] static void fail(const char* what) { throw std::system_error(errno, std::generic_category(), what); }

    byte* base_ = nullptr;
    size_t nbytes_;
    bool writable_;
};

}  // namespace recollect
