// numpy arrays in and out of the bindings: contiguous, of one exact type.
#pragma once

#include <nanobind/nanobind.h>

#define NPY_NO_DEPRECATED_API NPY_2_0_API_VERSION
#include <numpy/arrayobject.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <memory>
#include <string>
#include <type_traits>
#include <vector>

#include "stable.hpp"

namespace nb = nanobind;

namespace recollect::arrays {

template <typename T> struct Type;
template <> struct Type<bool> { static constexpr int number = NPY_BOOL; static constexpr const char* name = "bool"; };
template <> struct Type<uint8_t> { static constexpr int number = NPY_UINT8; static constexpr const char* name = "uint8"; };
template <> struct Type<int32_t> { static constexpr int number = NPY_INT32; static constexpr const char* name = "int32"; };
template <> struct Type<int64_t> { static constexpr int number = NPY_INT64; static constexpr const char* name = "int64"; };
template <> struct Type<float> { static constexpr int number = NPY_FLOAT32; static constexpr const char* name = "float32"; };
template <> struct Type<double> { static constexpr int number = NPY_FLOAT64; static constexpr const char* name = "float64"; };

// A 1-D contiguous array of exactly this type, in the order of bytes that this machine has.
template <typename T> PyArrayObject* checked(nb::handle h, const char* what) {
    auto* a = reinterpret_cast<PyArrayObject*>(h.ptr());
    if (!PyArray_Check(h.ptr()) || PyArray_TYPE(a) != Type<T>::number || PyArray_NDIM(a) != 1 || !PyArray_IS_C_CONTIGUOUS(a) ||
        !PyArray_ISNOTSWAPPED(a))
        throw nb::type_error((std::string(what) + ": must be a contiguous 1-D array of " + Type<T>::name).c_str());
    return a;
}

// A copy of the values of such an array: what is checked is what is used, whatever another thread or process writes into
// the array meanwhile. The GIL does not keep them from it: numpy copies without it, and the array may lie in shared memory.
template <typename T> class Values {
  public:
    Values(nb::handle h, const char* what) {
        auto* a = checked<T>(h, what);
        n = static_cast<size_t>(PyArray_DIM(a, 0));
        if (n > kFew) heap_.reset(new T[n]);
        T* to = n > kFew ? heap_.get() : few_;
        if constexpr (std::is_same_v<T, bool>) {  // any byte but 0 is true to numpy, and only 1 is to C++
            const auto* from = static_cast<const unsigned char*>(PyArray_DATA(a));
            for (size_t i = 0; i < n; ++i) to[i] = from[i] != 0;
        } else if (n) {
            std::memcpy(to, PyArray_DATA(a), n * sizeof(T));
        }
        data = to;
    }
    Values(const Values&) = delete;

    const T* data;
    size_t n;

  private:
    static constexpr size_t kFew = 16;
    T few_[kFew];
    std::unique_ptr<T[]> heap_;
};

template <typename T> struct View {
    T* data;
    size_t n;
};

// The values themselves, to look over or to change under the GIL; for anything that is trusted afterwards there is Values.
template <typename T> View<T> view(nb::handle h, const char* what) {
    auto* a = checked<T>(h, what);
    if (!PyArray_ISALIGNED(a)) throw nb::type_error((std::string(what) + ": must be aligned").c_str());
    return {static_cast<T*>(PyArray_DATA(a)), static_cast<size_t>(PyArray_DIM(a, 0))};
}

// Memory that an object lends until this is gone.
struct Buffer {
    Buffer(PyObject* of, int flags) {
        if (PyObject_GetBuffer(of, &view, flags) != 0) throw nb::python_error();
    }
    Buffer(const Buffer&) = delete;
    ~Buffer() { PyBuffer_Release(&view); }
    Py_buffer view;
};

// Arrays whose memory a call reads or fills. They are held from the moment on in which they are found: another thread may
// take them out of what named them, and looking for the next may run Python. Before the memory is used, `keep` says that
// each is still where it was found and as large.
class Held {
  public:
    Held() = default;
    Held(const Held&) = delete;
    ~Held() {
        for (PyObject* pin : pins_) Py_DECREF(pin);
        for (size_t i = 0; i < n_; ++i) Py_DECREF(at(i).array);
    }

    void add(PyObject* array) {
        auto* a = reinterpret_cast<PyArrayObject*>(array);
        Py_INCREF(array);
        const Entry entry{array, PyArray_DATA(a), PyArray_DESCR(a), n_items(a)};
        if (n_ < kFew) few_[n_] = entry;
        else add_to_many(entry);
        ++n_;
    }
    // Anything else that lends its memory keeps it in place by itself, but for a memoryview of an array.
    void add_if_array(PyObject* x) {
        while (PyMemoryView_Check(x))
            if (PyObject* shown = shown_by(x)) x = shown; else break;
        if (PyArray_Check(x)) add(x);
    }

    // Call it when nothing will run Python or give up the GIL any more, except the copy itself, if `unlocks`.
    void keep(bool unlocks) {
        for (size_t i = 0; i < n_; ++i) {
            const Entry& e = at(i);
            auto* a = reinterpret_cast<PyArrayObject*>(e.array);
            if (PyArray_DATA(a) != e.data || PyArray_DESCR(a) != e.descr || n_items(a) != e.n_items ||
                (PyArray_BASE(a) && !is_in_owner(a, e.n_items)))
                throw nb::value_error("arrays: must keep their memory during a call, got one that was resized; resize it before or after");
            if (unlocks) pin(a);
        }
    }

  private:
    // What lends x the memory that it shows, or null.
    static PyObject* lender(PyObject* x) {
        if (PyArray_Check(x)) return PyArray_BASE(reinterpret_cast<PyArrayObject*>(x));
        return PyMemoryView_Check(x) ? shown_by(x) : nullptr;
    }
    // Whether a view shows memory that its array still has: that may have been resized before we were given the view.
    static bool is_in_owner(PyArrayObject* a, npy_intp n) {
        PyObject* last = PyArray_BASE(a);
        while (PyObject* next = lender(last)) last = next;
        auto* owner = reinterpret_cast<PyArrayObject*>(last);
        if (!PyArray_Check(last) || !PyArray_CHKFLAGS(owner, NPY_ARRAY_OWNDATA) || PyArray_CHKFLAGS(a, NPY_ARRAY_WRITEBACKIFCOPY)) return true;
        const auto at = reinterpret_cast<uintptr_t>(PyArray_DATA(a)) - reinterpret_cast<uintptr_t>(PyArray_DATA(owner));
        const auto room = uintptr_t(n_items(owner) * PyArray_ITEMSIZE(owner)), nbytes = uintptr_t(n * PyArray_ITEMSIZE(a));
        return nbytes == 0 || (at <= room && nbytes <= room - at);
    }
    // numpy resizes no array in place that a weak reference speaks of, not even with refcheck=False. The memory may be that of
    // an array below others, or below what a memoryview shows.
    void pin(PyArrayObject* a) {
        for (PyObject* x = reinterpret_cast<PyObject*>(a); x; x = lender(x)) {
            if (!PyArray_Check(x)) continue;
            pins_.reserve(pins_.size() + 1);
            PyObject* pin = PyWeakref_NewRef(x, nullptr);
            if (!pin) throw nb::python_error();
            pins_.push_back(pin);
        }
    }

    struct Entry { PyObject* array; const void* data; const PyArray_Descr* descr; npy_intp n_items; };
    [[gnu::noinline]] void add_to_many(const Entry& entry) { many_.push_back(entry); }
    // Counted here: numpy's own count is a call through its table, and one sample asks for it twice per array (10 ns each).
    static npy_intp n_items(PyArrayObject* a) {
        npy_intp n = 1;
        for (int i = 0; i < PyArray_NDIM(a); ++i) n *= PyArray_DIM(a, i);
        return n;
    }
    const Entry& at(size_t i) const { return i < kFew ? few_[i] : many_[i - kFew]; }

    static constexpr size_t kFew = 16;
    size_t n_ = 0;
    Entry few_[kFew];
    std::vector<Entry> many_;
    std::vector<PyObject*> pins_;
};

// Item i of a list that others may change meanwhile, held.
inline nb::object item(nb::handle list, size_t i) {
    if (i >= size_t(PyList_GET_SIZE(list.ptr()))) throw nb::value_error("list: must keep its length during a call, got a shorter one");
    return nb::borrow(PyList_GET_ITEM(list.ptr(), i));
}

template <typename T> nb::object make(std::initializer_list<npy_intp> shape, T*& data) {
    PyObject* a = PyArray_SimpleNew(int(shape.size()), shape.begin(), Type<T>::number);
    if (!a) throw nb::python_error();
    data = static_cast<T*>(PyArray_DATA(reinterpret_cast<PyArrayObject*>(a)));
    return nb::steal(a);
}

template <typename T> nb::object make(size_t n, T*& data) { return make<T>({npy_intp(n)}, data); }

template <typename T> nb::object of(const std::vector<T>& values) {
    T* data;
    nb::object out = make<T>(values.size(), data);
    std::copy(values.begin(), values.end(), data);
    return out;
}

// Before any other use in a file: each has its own table of numpy's functions.
[[maybe_unused]] static void load_numpy() {
    if (PyArray_ImportNumPyAPI() < 0) throw nb::python_error();
}

}  // namespace recollect::arrays
