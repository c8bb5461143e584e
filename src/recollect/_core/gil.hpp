// Locks and the GIL: nobody waits for a lock while holding the GIL, since the lock's holder may need it to finish.
#pragma once

#include <nanobind/nanobind.h>

#include <mutex>

namespace nb = nanobind;

namespace recollect {

// Whether this thread has the GIL: true from the call by Python on but for the lifetime of an Unlocked. (PyGILState_Check
// is no part of the stable ABI.)
constinit inline thread_local bool has_gil = true;

// Releases the GIL for its lifetime, if asked to. A lock is waited for inside no other release of it.
struct Unlocked {
    explicit Unlocked(bool release) : state(release ? PyEval_SaveThread() : nullptr) { if (state) has_gil = false; }
    Unlocked(const Unlocked&) = delete;
    ~Unlocked() {
        if (!state) return;
        PyEval_RestoreThread(state);
        has_gil = true;
    }
    PyThreadState* state;
};

struct Locked {
    explicit Locked(std::mutex& m) : mutex(m) {
        if (mutex.try_lock()) return;
        waited = true;
        Unlocked unlocked(has_gil);
        mutex.lock();
    }
    Locked(const Locked&) = delete;
    ~Locked() { mutex.unlock(); }
    std::mutex& mutex;
    bool waited = false;  // then other threads have run
};

}  // namespace recollect
