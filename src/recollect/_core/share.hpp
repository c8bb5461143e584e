// What a call takes of a count that processes share: kept when its block ends, given back when the block raises.
// Each step is one native call, so a Ctrl-C comes before or after it. The owner's `__enter__` takes, in Python.
#pragma once

#include "gil.hpp"
#include "process.hpp"
#include "rows_object.hpp"

namespace recollect {

class Share {
  public:
    // Beside the count: a word that tells that something changed, and the number of threads that wait for that.
    Share(MappingPtr mapping, word* count, word* changes, word* waiters)
        : mapping_(std::move(mapping)), count_(count), changes_(changes), waiters_(waiters) {}

    // Move the count to `value`, which is `n` more; false if it is not what was expected.
    bool take(uint64_t expected, uint64_t value, uint64_t n) {
        if (!count_->compare_exchange_strong(expected, value)) return false;
        held_ += n;
        return true;
    }

    // Give back all but `n`.
    void keep(uint64_t n) {
        if (n >= held_) return;
        count_->fetch_sub(held_ - n);
        held_ = n;
    }

    // Wait until something changes; false if nothing did.
    bool wait(uint32_t seen, double timeout_s) {
        waiters_->fetch_add(1);
        bool changed;
        {
            Unlocked unlocked(true);
            changed = wait_word(bell(), seen, timeout_s);
        }
        waiters_->fetch_sub(1);
        return changed;
    }

    void end(bool failed) {
        if (failed) keep(0);
        held_ = 0;
        changes_->fetch_add(1);
        // A waiter that was killed leaves its count: then this wakes nobody, and costs a call.
        if (waiters_->load()) wake_word(bell(), 0x7FFFFFFF);
    }

  private:
    std::atomic<uint32_t>* bell() const { return reinterpret_cast<std::atomic<uint32_t>*>(changes_); }

    MappingPtr mapping_;
    word *count_, *changes_, *waiters_;
    uint64_t held_ = 0;
};

}  // namespace recollect
