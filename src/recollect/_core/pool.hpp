// Blocks of memory for large batches, kept for the next batch.
//
// A fresh block of some megabytes costs a page fault for every 4 KB, which is as much as filling it. A batch is the
// caller's own: its block comes back here when the last of its arrays is gone, and not before.
#pragma once

#include <sys/mman.h>

#include <cstdlib>
#include <map>
#include <new>

#include "mapping.hpp"

namespace recollect {

// Under the GIL throughout.
class Pool {
  public:
    static constexpr size_t kSmallest = 64 * 1024;       // smaller ones the allocator keeps by itself
    static constexpr size_t kKept = size_t(256) << 20;   // bytes at rest

    static size_t round(size_t nbytes) { return (nbytes + kSmallest - 1) / kSmallest * kSmallest; }

    void* take(size_t size) {
        if (auto found = free_.find(size); found != free_.end()) {
            void* block = found->second;
            free_.erase(found);
            kept_ -= size;
            return block;
        }
        void* block = std::aligned_alloc(size >= kHugePage ? kHugePage : 64, size >= kHugePage ? huge_up(size) : size);
        if (!block) throw std::bad_alloc();
        if (size >= kHugePage) ::madvise(block, size, MADV_HUGEPAGE);
        return block;
    }
    void give(void* block, size_t size) {
        while (kept_ + size > kKept && !free_.empty()) {
            auto [other, old] = *free_.begin();
            free_.erase(free_.begin());
            kept_ -= other;
            std::free(old);
        }
        if (kept_ + size > kKept) { std::free(block); return; }
        free_.emplace(size, block);
        kept_ += size;
    }

  private:
    static size_t huge_up(size_t n) { return (n + kHugePage - 1) / kHugePage * kHugePage; }
    std::multimap<size_t, void*> free_;
    size_t kept_ = 0;
};

inline Pool& pool() {
    static Pool* p = new Pool;  // never destroyed: arrays may outlive the module
    return *p;
}

}  // namespace recollect
