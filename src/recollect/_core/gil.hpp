// Locks and the GIL: nobody waits for a lock while holding the GIL, since the lock's holder may need it to finish.
#pragma once

#include <nanobind/nanobind.h>

#include <mutex>

namespace nb = nanobind;

namespace recollect {

// Releases the GIL for its lifetime, if asked to.
struct Unlocked {
    explicit Unlocked(bool release) : state(release ? PyEval_SaveThread() : nullptr) {}
    Unlocked(const Unlocked&) = delete;
    ~Unlocked() { if (state) PyEval_RestoreThread(state); }
    PyThreadState* state;
};

struct Locked {
    explicit Locked(std::mutex& m) : mutex(m) {
        if (mutex.try_lock()) return;
        waited = true;
        Unlocked unlocked(PyGILState_Check());
        mutex.lock();
    }
    Locked(const Locked&) = delete;
    ~Locked() { mutex.unlock(); }
    std::mutex& mutex;
    bool waited = false;  // then other threads have run
};

}  // namespace recollect
