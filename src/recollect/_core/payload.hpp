// Experience on its way into a payload: leaves of rows that need no conversion, and bytes joined and summed in one pass.
#pragma once

#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "arrays.hpp"
#include "copy.hpp"
#include "crc32c.hpp"

namespace recollect {

// Copies pieces one after another and sums them while they are in the nearest cache.
class SummingCopy {
  public:
    explicit SummingCopy(byte* to) : at_(to), summed_(to) {}
    void add(const byte* from, size_t n) {
        while (n) {
            const size_t now = std::min(n, kCrcChunk);
            std::memcpy(at_, from, now);
            at_ += now, from += now, n -= now;
            sum(size_t(at_ - summed_) / kCrcChunk * kCrcChunk);
        }
    }
    uint32_t finish() {
        sum(size_t(at_ - summed_));
        return crc_;
    }

  private:
    void sum(size_t n) {
        if (n) crc_ = crc32c(crc_, summed_, n);
        summed_ += n;
    }
    byte* at_;
    byte* summed_;
    uint32_t crc_ = 0;
};

// Puts a plain number (a bool, int or float of Python, exactly) at `to`; false if it is none or does not fit.
template <typename T> bool put_plain(PyObject* value, byte* to) {
    T number;
    if constexpr (std::is_same_v<T, bool>) {
        if (!PyBool_Check(value)) return false;
        number = value == Py_True;
    } else if constexpr (std::is_floating_point_v<T>) {
        if (!PyFloat_CheckExact(value)) return false;
        const double given = PyFloat_AS_DOUBLE(value);
        number = static_cast<T>(given);
        if (std::isinf(number) && !std::isinf(given)) return false;
    } else {
        if (!PyLong_CheckExact(value)) return false;
        int overflow;
        const long long given = PyLong_AsLongLongAndOverflow(value, &overflow);
        if (overflow || given < std::numeric_limits<T>::min() || given > std::numeric_limits<T>::max()) return false;
        number = static_cast<T>(given);
    }
    std::memcpy(to, &number, sizeof number);
    return true;
}

using Put = bool (*)(PyObject*, byte*);

inline Put put_of(int type) {
    switch (type) {
        case NPY_BOOL: return put_plain<bool>;
        case NPY_INT32: return put_plain<int32_t>;
        case NPY_INT64: return put_plain<int64_t>;
        case NPY_FLOAT32: return put_plain<float>;
        case NPY_FLOAT64: return put_plain<double>;
        default: return nullptr;
    }
}

struct FixedLeaf {
    nb::object name;
    size_t offset;
    Put put;
};

struct RaggedLeaf {
    nb::object name;
    nb::object dtype;
    std::vector<npy_intp> shape;  // of one element
    npy_intp most;
    bool per_response;
    bool all_true;  // stands for a leaf left out
};

// The elements of a value that can travel as it is, -1 if it cannot.
inline npy_intp elements_of(PyObject* value, const RaggedLeaf& leaf) {
    if (!PyArray_CheckExact(value)) return -1;
    auto* a = reinterpret_cast<PyArrayObject*>(value);
    if (reinterpret_cast<PyObject*>(PyArray_DESCR(a)) != leaf.dtype.ptr() || size_t(PyArray_NDIM(a)) != 1 + leaf.shape.size() ||
        !PyArray_IS_C_CONTIGUOUS(a) || !std::equal(leaf.shape.begin(), leaf.shape.end(), PyArray_DIMS(a) + 1))
        return -1;
    return PyArray_DIM(a, 0);
}

}  // namespace recollect
