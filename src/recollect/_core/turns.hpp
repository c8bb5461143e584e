// What a thread has until it leaves, entered and left by `with` in one native step each: CPython runs no signal handler
// between `__enter__` of a native class and the block that it guards, nor between the block and `__exit__`, so a Ctrl-C
// leaves nothing taken. Under the GIL throughout, but for waits.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <atomic>
#include <string>

#include "gil.hpp"
#include "process.hpp"

namespace recollect {

// One thread at a time: a second is refused.
struct Turn {
    Turn(std::string text, nb::object is_entered) : refusal(std::move(text)), entered(std::move(is_entered)) {}

    // The thread that has the turn already may have lost it to an exception on its way out: `is_entered` looks.
    void enter(nb::handle self) {
        if (taken && (thread != PyThread_get_thread_ident() || nb::cast<bool>(entered(self))))
            throw std::runtime_error(refusal);
        taken = true;
        thread = PyThread_get_thread_ident();
    }
    void leave() { taken = false; }

    std::string refusal;
    nb::object entered;
    bool taken = false;
    unsigned long thread = 0;
    uint64_t batches = 0;  // drawn in all
};

// A lock that a thread may enter several times, and a wait for what others do meanwhile.
class Condition {
  public:
    void enter() {
        if (depth_ && owner_ == PyThread_get_thread_ident()) { ++depth_; return; }
        acquire(1, true);
    }

    void leave() {
        check_owned();
        if (--depth_ == 0) release();
    }

    // Gives up the lock until `notify_all`, a signal's exception or the end of the time; has it again in any case.
    bool wait(double timeout_s) {
        check_owned();
        const size_t depth = depth_;
        const uint32_t seen = notified_.load();
        const double end = monotonic_s() + timeout_s;
        depth_ = 0;
        release();
        ++n_waiting_;
        bool failed = false;
        double left = timeout_s;
        while (notified_.load() == seen && left > 0 && !failed) {
            {
                Unlocked unlocked(true);
                wait_word(&notified_, seen, std::min(left, 60.0));
            }
            failed = PyErr_CheckSignals() != 0;
            left = end - monotonic_s();
        }
        --n_waiting_;
        PyObject *type = nullptr, *value = nullptr, *trace = nullptr;
        if (failed) PyErr_Fetch(&type, &value, &trace);
        acquire(depth, false);
        if (failed) {
            PyErr_Restore(type, value, trace);
            throw nb::python_error();
        }
        return notified_.load() != seen;
    }

    void notify_all() {
        check_owned();
        notified_.fetch_add(1);
        wake_word(&notified_, 0x7FFFFFFF);
    }

    size_t n_waiting() const { return n_waiting_; }
    bool is_held() const { return depth_ != 0; }

  private:
    void check_owned() const {
        if (!depth_ || owner_ != PyThread_get_thread_ident())
            throw std::runtime_error("Condition: must be entered by this thread first");
    }

    void acquire(size_t depth, bool asks) {
        while (depth_) {
            const uint32_t seen = released_.load();
            ++waiting_;
            {
                Unlocked unlocked(true);
                wait_word(&released_, seen, 60.0);
            }
            --waiting_;
            if (asks && PyErr_CheckSignals()) throw nb::python_error();
        }
        depth_ = depth;
        owner_ = PyThread_get_thread_ident();
    }

    void release() {
        released_.fetch_add(1);
        if (waiting_) wake_word(&released_, 1);
    }

    std::atomic<uint32_t> released_{0}, notified_{0};
    size_t depth_ = 0, waiting_ = 0, n_waiting_ = 0;
    unsigned long owner_ = 0;
};

}  // namespace recollect
