// numpy arrays in and out of the bindings: contiguous, of one exact type.
#pragma once

#include <nanobind/nanobind.h>

#define NPY_NO_DEPRECATED_API NPY_2_0_API_VERSION
#include <numpy/arrayobject.h>

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <vector>

namespace nb = nanobind;

namespace recollect::arrays {

template <typename T> struct Type;
template <> struct Type<bool> { static constexpr int number = NPY_BOOL; static constexpr const char* name = "bool"; };
template <> struct Type<uint8_t> { static constexpr int number = NPY_UINT8; static constexpr const char* name = "uint8"; };
template <> struct Type<int32_t> { static constexpr int number = NPY_INT32; static constexpr const char* name = "int32"; };
template <> struct Type<int64_t> { static constexpr int number = NPY_INT64; static constexpr const char* name = "int64"; };
template <> struct Type<float> { static constexpr int number = NPY_FLOAT32; static constexpr const char* name = "float32"; };
template <> struct Type<double> { static constexpr int number = NPY_FLOAT64; static constexpr const char* name = "float64"; };

template <typename T> struct View {
    T* data;
    size_t n;
};

// The data of a 1-D array of exactly this type; the caller's reference keeps it alive.
template <typename T> View<T> view(nb::handle h, const char* what) {
    auto* a = reinterpret_cast<PyArrayObject*>(h.ptr());
    if (!PyArray_Check(h.ptr()) || PyArray_TYPE(a) != Type<T>::number || PyArray_NDIM(a) != 1 || !PyArray_IS_C_CONTIGUOUS(a))
        throw nb::type_error((std::string(what) + ": must be a contiguous 1-D array of " + Type<T>::name).c_str());
    return {static_cast<T*>(PyArray_DATA(a)), static_cast<size_t>(PyArray_DIM(a, 0))};
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
