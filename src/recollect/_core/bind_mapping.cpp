// Bindings of mapped memory: its words, waits on them, processes, checksums.
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>

#include <cmath>

#include "bind.hpp"
#include "share.hpp"
#include "sums.hpp"

namespace recollect {
namespace {

template <typename T> T* word_at(const Mapping& m, size_t offset) {
    if (offset % sizeof(T) || offset > m.nbytes() - sizeof(T)) throw nb::index_error("word: offset is off the mapping");
    return reinterpret_cast<T*>(m.base() + offset);
}

template <typename T> T* writable_word_at(const Mapping& m, size_t offset) {
    T* at = word_at<T>(m, offset);
    if (!m.writable()) throw nb::value_error("word: the mapping is for reading");
    return at;
}

nb::object view_of(MappingPtr m, size_t offset, size_t nbytes) {
    if (offset > m->nbytes() || nbytes > m->nbytes() - offset) throw nb::index_error("view: reaches past the mapping");
    npy_intp dims[1] = {static_cast<npy_intp>(nbytes)};
    PyObject* a = PyArray_SimpleNewFromData(1, dims, NPY_UINT8, m->base() + offset);
    if (!a) throw nb::python_error();
    if (!m->writable()) PyArray_CLEARFLAGS(reinterpret_cast<PyArrayObject*>(a), NPY_ARRAY_WRITEABLE);
    auto* owner = new MappingPtr(m);
    nb::capsule keep(owner, [](void* p) noexcept { delete static_cast<MappingPtr*>(p); });
    PyArray_SetBaseObject(reinterpret_cast<PyArrayObject*>(a), keep.release().ptr());
    return nb::steal(a);
}

// At the n-th moment to come, call `meanwhile()`; below zero: at none.
void arm_moment(int64_t n, nb::object meanwhile) {
    static PyObject* kept = nullptr;
    PyObject* before = kept;
    kept = meanwhile.release().ptr();
    Py_XDECREF(before);
    at_moment = [] {
        struct Again { const bool had = has_gil; ~Again() { has_gil = had; } } again;
        nb::gil_scoped_acquire locked;
        has_gil = true;
        nb::borrow(kept)();
    };
    moment_countdown = n;
}

}  // namespace

void bind_mapping(nb::module_& m) {
    arrays::load_numpy();
    m.def("use_portable", [](std::string directory, uint64_t id) {
        process_files::directory = std::move(directory);
        process_files::directory_id = id;
#if RECOLLECT_LINUX
        is_portable = true;
#endif
        known_domain.store(0);
    }, nb::arg("directory"), nb::arg("id"));
    m.attr("IS_PORTABLE") = !RECOLLECT_LINUX;
    m.def("process_word", [](int pid) { return process_word(pid); }, nb::arg("pid"));
    m.def("own_word", [] { return own_word(); });
    m.def("pid_of", [](uint64_t w) { return pid_of(w); }, nb::arg("word"));
    m.def("reserve_file", [](int fd, size_t offset, size_t nbytes) {
        nb::gil_scoped_release unlocked;
        if (const int error = reserve_file(fd, offset, nbytes)) throw std::system_error(error, std::generic_category(), "reserving");
    }, nb::arg("fd"), nb::arg("offset"), nb::arg("nbytes"));
    m.def("is_dead", [](uint64_t w) { return is_dead(w); }, nb::arg("word"));
    m.def("is_near", [](uint64_t w) { return !is_of_other_space(w); }, nb::arg("word"));
    m.def("describe_process", [](uint64_t w) { return describe_process(w); }, nb::arg("word"));
    m.def("arm_fault", [](int64_t n) { fault_countdown = n; }, nb::arg("n"));
    m.def("fault_point", [] { fault_point(); });
    m.def("fault_countdown", [] { return fault_countdown; });
    m.def("arm_moment", &arm_moment, nb::arg("n"), nb::arg("meanwhile").none());
    m.def("crc32c", [](nb::handle data, uint32_t seed) {
        const arrays::Buffer buffer(data.ptr(), PyBUF_SIMPLE);
        const auto n = size_t(buffer.view.len);
        arrays::Held held;
        held.add_if_array(data.ptr());
        held.keep(n > kHoldGil);
        Unlocked unlocked(n > kHoldGil);
        return sum_parts(n, 1, [seed, bytes = static_cast<const byte*>(buffer.view.buf)](size_t first, size_t last) {
            return crc32c(first ? 0 : seed, bytes + first, last - first);
        });
    }, nb::arg("data"), nb::arg("seed") = 0);
    m.def("crc32c_portable", [](nb::bytes data) {
        return ~crc32c_table(~0u, reinterpret_cast<const byte*>(data.c_str()), data.size());
    }, nb::arg("data"));
    m.def("crc32c_narrow", [](nb::bytes data) {
        return crc32c_narrow(0, reinterpret_cast<const byte*>(data.c_str()), data.size());
    }, nb::arg("data"));

    nb::class_<Mapping>(m, "Mapping")
        .def(nb::init<int, size_t, size_t, bool>(), nb::arg("fd"), nb::arg("offset"), nb::arg("nbytes"), nb::arg("writable"))
        .def_prop_ro("nbytes", &Mapping::nbytes)
        .def("view", [](MappingPtr self, size_t offset, size_t nbytes) { return view_of(self, offset, nbytes); },
             nb::arg("offset"), nb::arg("nbytes"))
        .def("sync", &Mapping::sync, nb::call_guard<nb::gil_scoped_release>())
        .def("load", [](const Mapping& s, size_t at) { return word_at<word>(s, at)->load(std::memory_order_acquire); }, nb::arg("offset"))
        .def("store", [](Mapping& s, size_t at, uint64_t v) { writable_word_at<word>(s, at)->store(v, std::memory_order_release); },
             nb::arg("offset"), nb::arg("value"))
        .def("add", [](Mapping& s, size_t at, uint64_t v) { return writable_word_at<word>(s, at)->fetch_add(v); },
             nb::arg("offset"), nb::arg("value"))
        .def("swap_if", [](Mapping& s, size_t at, uint64_t expected, uint64_t v) {
            return writable_word_at<word>(s, at)->compare_exchange_strong(expected, v); }, nb::arg("offset"), nb::arg("expected"), nb::arg("value"))
        .def("wait", [](const Mapping& s, size_t at, uint32_t expected, double timeout_s) {
            auto* w = word_at<std::atomic<uint32_t>>(s, at);
            if (std::isnan(timeout_s)) throw nb::value_error("timeout_s: must be a number of seconds, got NaN");
            nb::gil_scoped_release unlocked;
            return wait_word(w, expected, timeout_s); }, nb::arg("offset"), nb::arg("expected"), nb::arg("timeout_s"))
        .def("wake", [](const Mapping& s, size_t at, int n) { return wake_word(word_at<std::atomic<uint32_t>>(s, at), n); },
             nb::arg("offset"), nb::arg("n") = 0x7FFFFFFF);

    nb::class_<Share>(m, "Share")
        .def("__init__", [](Share* self, MappingPtr mapping, size_t count, size_t changes, size_t waiters) {
            const Mapping& s = *mapping;
            new (self) Share(mapping, writable_word_at<word>(s, count), writable_word_at<word>(s, changes),
                             writable_word_at<word>(s, waiters));
        }, nb::arg("mapping"), nb::arg("count"), nb::arg("changes"), nb::arg("waiters"))
        .def("take", &Share::take, nb::arg("expected"), nb::arg("value"), nb::arg("n"))
        .def("keep", &Share::keep, nb::arg("n"))
        .def("wait", &Share::wait, nb::arg("seen"), nb::arg("timeout_s"))
        .def("end", &Share::end, nb::arg("failed"))
        .def("__exit__", [](Share& self, nb::handle type, nb::handle, nb::handle) { self.end(!type.is_none()); },
             nb::arg().none(), nb::arg().none(), nb::arg().none());
}

}  // namespace recollect
