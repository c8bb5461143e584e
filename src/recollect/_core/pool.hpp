// Blocks of memory for batches, kept for the next batch.
//
// A fresh block of some megabytes costs a page fault for every 4 KB, which is as much as filling it, and several small
// ones cost several calls. A batch is the caller's own: its block comes back here when the last of its arrays is gone,
// and not before.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <new>
#include <vector>

#include "mapping.hpp"

namespace recollect {

// Under the GIL throughout.
class Pool {
  public:
    static constexpr size_t kSmallest = 4096;            // smaller ones the allocator keeps by itself
    static constexpr size_t kKept = size_t(256) << 20;   // bytes at rest
    static constexpr size_t kBlocks = 64;                // and blocks, which are few enough to look through

    // At least `nbytes`, on a 64-byte boundary. The newest of a size is the warmest.
    void* take(size_t nbytes) {
        const size_t size = round(nbytes + kHead);
        for (size_t i = free_.size(); i-- > 0;)
            if (size_of(free_[i]) == size) {
                byte* block = free_[i];
                free_.erase(free_.begin() + ptrdiff_t(i));
                kept_ -= size;
                return block + kHead;
            }
        const bool huge = size >= kHugePage;
        auto* block = static_cast<byte*>(std::aligned_alloc(huge ? kHugePage : 64, size));
        if (!block) throw std::bad_alloc();
        if (huge) want_huge_pages(block, size);
        size_of(block) = size;
        return block + kHead;
    }
    void give(void* taken) {
        byte* block = static_cast<byte*>(taken) - kHead;
        free_.push_back(block);
        kept_ += size_of(block);
        while (!free_.empty() && (kept_ > kKept || free_.size() > kBlocks)) {  // the oldest goes
            kept_ -= size_of(free_.front());
            std::free(free_.front());
            free_.erase(free_.begin());
        }
    }

  private:
    static constexpr size_t kHead = 64;  // before each block: its size
    static size_t& size_of(byte* block) { return *reinterpret_cast<size_t*>(block); }
    // From half a megabyte on a block is whole 2 MB pages: on 4 KB pages filling it waits for the page table.
    static size_t round(size_t nbytes) {
        const size_t unit = nbytes < kHugePage / 4 ? kSmallest : kHugePage;
        return (nbytes + unit - 1) / unit * unit;
    }

    std::vector<byte*> free_;
    size_t kept_ = 0;
};

inline Pool& pool() {
    static Pool* p = new Pool;  // never destroyed: arrays may outlive the module
    return *p;
}

}  // namespace recollect
