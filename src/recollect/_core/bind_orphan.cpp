// What a collector does when its learner is gone: tell everybody to stop, and end its own group if that takes too long.
//
// A native thread, because Python code of the collector may hold the GIL for as long as it likes.
#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/vector.h>
#include <poll.h>
#include <signal.h>

#include <thread>
#include <vector>

#include "mapping.hpp"
#include "process.hpp"

namespace nb = nanobind;

namespace recollect {
namespace {

void wait_for_end(const std::vector<int>& fds, uint64_t process) {
    std::vector<pollfd> polled;
    for (int fd : fds) polled.push_back({fd, POLLIN, 0});
    const int pause_ms = process ? 100 : -1;
    for (int n = 0; n == 0 || (n < 0 && errno == EINTR);) {
        if (process && is_dead(process)) return;
        n = ::poll(polled.data(), static_cast<nfds_t>(polled.size()), pause_ms);
    }
}

void end_group() {
    if (::getpgrp() == ::getpid()) ::kill(0, SIGKILL);
    ::kill(::getpid(), SIGKILL);
}

// Waits until one of `fds` ends, or `process` (a word, 0: none), which is looked at ten times a second; then stores 1 in the word at `stop_at`, changes and wakes the words at `wake_at`, and
// after `grace_s` kills the group of this process.
void watch_orphan(std::vector<int> fds, uint64_t process, std::shared_ptr<Mapping> mapping, size_t stop_at, std::vector<size_t> wake_at, double grace_s) {
    for (size_t at : wake_at)
        if (at % 8 || at + 8 > mapping->nbytes()) throw nb::value_error("wake_at: must be words of the mapping");
    if (stop_at % 8 || stop_at + 8 > mapping->nbytes()) throw nb::value_error("stop_at: must be a word of the mapping");
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);  // signals belong to Python's threads
    std::thread([=] {
        wait_for_end(fds, process);
        const auto word_at = [&](size_t at) { return reinterpret_cast<std::atomic<uint32_t>*>(mapping->base() + at); };
        word_at(stop_at)->store(1);
        for (size_t at : wake_at) {
            word_at(at)->fetch_add(1);
            wake_word(word_at(at), INT32_MAX);
        }
        for (const double end = monotonic_s() + grace_s; monotonic_s() < end;) nap(20'000'000);
        end_group();
    }).detach();
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

}  // namespace

void bind_orphan(nb::module_& m) {
    m.def("watch_orphan", &watch_orphan, nb::arg("fds"), nb::arg("process"), nb::arg("mapping"), nb::arg("stop_at"), nb::arg("wake_at"), nb::arg("grace_s"));
}

}  // namespace recollect
