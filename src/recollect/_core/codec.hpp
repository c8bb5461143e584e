// Between Python values and the leaves of a packed row.
//
// A codec accepts only what needs no thought: exact dtypes, exact shapes, contiguous arrays, plain numbers that
// fit. Anything else it declines, having changed nothing, and the Python side converts it or says what is wrong.
// So every rule about values and every message lives in one place (recollect.spaces), and this is its fast lane.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#define NPY_NO_DEPRECATED_API NPY_2_0_API_VERSION
#include <numpy/arrayobject.h>
#include <numpy/arrayscalars.h>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "arrays.hpp"
#include "copy.hpp"
#include "pool.hpp"
#include "sizes.hpp"

namespace nb = nanobind;

namespace recollect {

// As many values as a row has leaves; a few need no allocation.
template <typename T> class PerLeaf {
  public:
    explicit PerLeaf(size_t n) : data_(n <= kFew ? few_ : new T[n]()) {}
    ~PerLeaf() { if (data_ != few_) delete[] data_; }
    PerLeaf(const PerLeaf&) = delete;
    T& operator[](size_t k) { return data_[k]; }
    T* data() { return data_; }

  private:
    static constexpr size_t kFew = 16;
    T few_[kFew] = {};
    T* data_;
};

struct Field {
    nb::object dtype;  // keeps the descriptor alive
    PyArray_Descr* descr;
    int type_num;
    size_t item_nbytes;
    std::vector<npy_intp> shape;
    bool as_scalar;  // a single read gives a numpy scalar, as Discrete.sample() does
};

// A tuple of n items; nanobind itself does not look at its length.
inline nb::tuple tuple_of(nb::handle h, size_t n, const char* what) {
    if (!PyTuple_Check(h.ptr()) || size_t(PyTuple_GET_SIZE(h.ptr())) != n)
        throw nb::type_error((std::string(what) + ": must be a tuple of " + std::to_string(n)).c_str());
    return nb::borrow<nb::tuple>(h);
}

struct Node {
    enum Kind { kDict, kTuple, kLeaf } kind;
    std::vector<nb::object> keys;
    std::vector<Node> children;
    size_t leaf = 0;
};

// Where one leaf of a sample is: in an array of the caller, or, for a plain number, here.
struct Source {
    const byte* data;
    alignas(16) byte number[16];
};

class Codec {
  public:
    // fields: [(offset, dtype, shape, as_scalar)]; plan: the nested form of a sample, or None for a flat list.
    Codec(nb::list fields, nb::object plan, size_t row_nbytes) : row_nbytes_(row_nbytes) {
        for (nb::handle item : fields) {
            nb::tuple t = tuple_of(item, 4, "fields");
            Field f;
            f.dtype = t[1];
            if (!PyArray_DescrCheck(f.dtype.ptr())) throw nb::type_error("dtype: must be a numpy dtype");
            f.descr = reinterpret_cast<PyArray_Descr*>(f.dtype.ptr());
            if (PyDataType_REFCHK(f.descr)) throw nb::value_error("fields: a row cannot hold Python objects");
            f.type_num = f.descr->type_num;
            f.item_nbytes = static_cast<size_t>(PyDataType_ELSIZE(f.descr));
            f.as_scalar = nb::cast<bool>(t[3]);
            size_t nbytes = f.item_nbytes;
            if (nb::cast<nb::tuple>(t[2]).size() >= NPY_MAXDIMS) throw nb::value_error("fields: one has too many axes");  // a batch has one more
            for (nb::handle d : nb::cast<nb::tuple>(t[2])) {
                f.shape.push_back(nb::cast<npy_intp>(d));
                if (f.shape.back() < 0 || __builtin_mul_overflow(nbytes, static_cast<size_t>(f.shape.back()), &nbytes))
                    throw nb::value_error("fields: one reaches past the end of the row");
            }
            const size_t offset = nb::cast<size_t>(t[0]);
            if (offset > row_nbytes || nbytes > row_nbytes - offset) throw nb::value_error("fields: one reaches past the end of the row");
            spans_.push_back({offset, nbytes});
            fields_.push_back(std::move(f));
        }
        extent_ = Extent(spans_.data(), spans_.size());
        has_plan_ = !plan.is_none();
        if (!has_plan_) return;
        std::vector<bool> used(fields_.size());
        root_ = read_plan(plan, used);
        if (std::find(used.begin(), used.end(), false) != used.end()) throw nb::value_error("plan: lacks a leaf");
    }

    size_t size() const { return fields_.size(); }
    size_t row_nbytes() const { return row_nbytes_; }
    const Span* spans() const { return spans_.data(); }
    const Extent& extent() const { return extent_; }
    bool has_plan() const { return has_plan_; }

    bool take_one(PyObject* sample, Source* into, arrays::Held& held) const {
        return has_plan_ && take_one(root_, sample, into, held);
    }

    // Leaves of a batch with equal leading axes; n < 0 takes it from the first. `writable`: they are to be filled.
    bool take_batch(PyObject* batch, npy_intp& n, const byte** into, arrays::Held& held, bool writable = false) const {
        return has_plan_ && take_batch(root_, batch, n, into, held, writable);
    }

    // Arrays per field, as recollect.spaces encodes them. They come from our own code: a misfit is a bug there.
    void take_fields(nb::list arrays, npy_intp n, const byte** into, arrays::Held& held) const {
        if (nb::len(arrays) != fields_.size()) throw nb::value_error("arrays: one per field is needed");
        for (size_t k = 0; k < fields_.size(); ++k) into[k] = take_field(k, arrays::item(arrays, k), n, held);
    }
    const byte* take_field(size_t k, nb::handle array, npy_intp n, arrays::Held& held) const {
        if (k >= fields_.size() || !fits(fields_[k], array.ptr(), n)) throw nb::value_error("arrays: one does not fit its field");
        held.add(array.ptr());
        return static_cast<const byte*>(PyArray_DATA(reinterpret_cast<PyArrayObject*>(array.ptr())));
    }

    // Is `batch` what `build` made of these arrays, in each part, and is each part inside it only its own?
    bool is_built_of(PyObject* batch, const nb::object* arrays) const { return has_plan_ && is_built_of(root_, batch, arrays); }
    bool can_fill(size_t k, PyObject* array, npy_intp n) const {
        return fits(fields_[k], array, n) && PyArray_ISWRITEABLE(reinterpret_cast<PyArrayObject*>(array));
    }

    // New arrays for n samples (n < 0: one sample, no batch axis); large ones share one block of the pool.
    void make_arrays(npy_intp n, PerLeaf<nb::object>& arrays, PerLeaf<byte*>& leaves) const {
        size_t total = 0;
        for (const Span& span : spans_) total = checked_size(total + aligned(checked_product(span.nbytes, size_t(std::max<npy_intp>(n, 1)))));
        nb::object owner;
        byte* at = nullptr;
        if (total >= Pool::kSmallest) {
            at = static_cast<byte*>(pool().take(total));
            owner = nb::capsule(at, [](void* block) noexcept { pool().give(block); });
        }
        for (size_t k = 0; k < fields_.size(); ++k) {
            arrays[k] = make_array(fields_[k], n, at, owner);
            leaves[k] = static_cast<byte*>(PyArray_DATA(reinterpret_cast<PyArrayObject*>(arrays[k].ptr())));
            if (at) at += aligned(spans_[k].nbytes * size_t(std::max<npy_intp>(n, 1)));
        }
    }

    // The nested sample or batch that these arrays are the leaves of.
    nb::object build(PerLeaf<nb::object>& arrays, bool single) const {
        if (single)
            for (size_t k = 0; k < fields_.size(); ++k)
                if (fields_[k].as_scalar) {
                    auto* a = reinterpret_cast<PyArrayObject*>(arrays[k].ptr());
                    arrays[k] = nb::steal(PyArray_Scalar(PyArray_DATA(a), PyArray_DESCR(a), nullptr));
                }
        if (has_plan_) return build(root_, arrays);
        nb::list out;
        for (size_t k = 0; k < fields_.size(); ++k) out.append(arrays[k]);
        return out;
    }

  private:
    static size_t aligned(size_t nbytes) { return (nbytes + 63) / 64 * 64; }

    static nb::object make_array(const Field& f, npy_intp n, byte* at, const nb::object& owner) {
        npy_intp dims[NPY_MAXDIMS];
        int ndim = 0;
        if (n >= 0) dims[ndim++] = n;
        for (npy_intp d : f.shape) dims[ndim++] = d;
        Py_INCREF(reinterpret_cast<PyObject*>(f.descr));  // the new array takes a reference
        PyObject* made = at ? PyArray_NewFromDescr(&PyArray_Type, f.descr, ndim, dims, nullptr, at, NPY_ARRAY_CARRAY, nullptr)
                            : PyArray_Empty(ndim, dims, f.descr, 0);
        if (!made) throw nb::python_error();
        nb::object array = nb::steal(made);
        if (at && PyArray_SetBaseObject(reinterpret_cast<PyArrayObject*>(made), nb::object(owner).release().ptr()) != 0)
            throw nb::python_error();
        return array;
    }

    static Node read_plan(nb::handle plan, std::vector<bool>& used) {
        nb::tuple t = tuple_of(plan, 2, "plan");
        const std::string kind = nb::cast<std::string>(t[0]);
        Node node{};
        if (kind == "leaf") {
            node.kind = Node::kLeaf;
            node.leaf = nb::cast<size_t>(t[1]);
            if (node.leaf >= used.size() || used[node.leaf]) throw nb::value_error("plan: must name each leaf once");
            used[node.leaf] = true;
        } else if (kind == "dict") {
            node.kind = Node::kDict;
            for (nb::handle item : nb::cast<nb::tuple>(t[1])) {
                nb::tuple pair = tuple_of(item, 2, "plan");
                nb::object key = pair[0];
                if (PyUnicode_CheckExact(key.ptr())) {
                    PyObject* interned = key.release().ptr();
                    PyUnicode_InternInPlace(&interned);
                    key = nb::steal(interned);
                }
                node.keys.push_back(std::move(key));
                node.children.push_back(read_plan(pair[1], used));
            }
        } else if (kind != "tuple") {
            throw nb::value_error("plan: a node must be dict, tuple or leaf");
        } else {
            node.kind = Node::kTuple;
            for (nb::handle item : nb::cast<nb::tuple>(t[1])) node.children.push_back(read_plan(item, used));
        }
        return node;
    }

    // Call `leaf(node, value)` for each leaf of `value`; false where the structure is not the plan's.
    template <typename Leaf> static bool walk(const Node& node, PyObject* value, Leaf leaf) {
        switch (node.kind) {
            case Node::kLeaf: return leaf(node, value);
            case Node::kDict:
                if (!PyDict_CheckExact(value) || PyDict_GET_SIZE(value) != Py_ssize_t(node.keys.size())) return false;
                for (size_t i = 0; i < node.keys.size(); ++i) {
                    // Held: keys of the caller's own may run Python when they are compared.
                    const nb::object child = nb::borrow(PyDict_GetItemWithError(value, node.keys[i].ptr()));
                    if (!child.is_valid()) { PyErr_Clear(); return false; }
                    if (!walk(node.children[i], child.ptr(), leaf)) return false;
                }
                return true;
            default:
                if (!PyTuple_CheckExact(value) || PyTuple_GET_SIZE(value) != Py_ssize_t(node.children.size()))
                    return false;
                for (size_t i = 0; i < node.children.size(); ++i)
                    if (!walk(node.children[i], PyTuple_GET_ITEM(value, i), leaf)) return false;
                return true;
        }
    }

    static bool is_built_of(const Node& node, PyObject* value, const nb::object* arrays) {
        if (node.kind == Node::kLeaf) return value == arrays[node.leaf].ptr();
        if (Py_REFCNT(value) != 1) return false;
        if (node.kind == Node::kTuple) {
            if (!PyTuple_CheckExact(value) || size_t(PyTuple_GET_SIZE(value)) != node.children.size()) return false;
            for (size_t i = 0; i < node.children.size(); ++i)
                if (!is_built_of(node.children[i], PyTuple_GET_ITEM(value, i), arrays)) return false;
            return true;
        }
        if (!PyDict_CheckExact(value) || size_t(PyDict_GET_SIZE(value)) != node.keys.size()) return false;
        PyObject *key, *child;
        Py_ssize_t at = 0;
        for (size_t i = 0; PyDict_Next(value, &at, &key, &child); ++i)
            if (key != node.keys[i].ptr() || !is_built_of(node.children[i], child, arrays)) return false;
        return true;
    }

    bool take_one(const Node& root, PyObject* sample, Source* into, arrays::Held& held) const {
        return walk(root, sample, [&](const Node& node, PyObject* value) {
            const Field& f = fields_[node.leaf];
            Source& source = into[node.leaf];
            if (PyArray_CheckExact(value)) {
                if (!fits(f, value, -1)) return false;
                held.add(value);
                source.data = static_cast<const byte*>(PyArray_DATA(reinterpret_cast<PyArrayObject*>(value)));
                return true;
            }
            source.data = source.number;
            return f.shape.empty() && take_number(f, value, source.number);
        });
    }

    bool take_batch(const Node& root, PyObject* batch, npy_intp& n, const byte** into, arrays::Held& held, bool writable) const {
        return walk(root, batch, [&](const Node& node, PyObject* value) {
            if (!PyArray_CheckExact(value)) return false;
            auto* a = reinterpret_cast<PyArrayObject*>(value);
            if (n < 0) n = PyArray_NDIM(a) ? PyArray_DIM(a, 0) : 0;
            if (!fits(fields_[node.leaf], value, n) || (writable && !PyArray_ISWRITEABLE(a))) return false;
            held.add(value);
            into[node.leaf] = static_cast<const byte*>(PyArray_DATA(a));
            return true;
        });
    }

    // Exact dtype, exact shape (with a leading axis n unless n < 0), contiguous.
    static bool fits(const Field& f, PyObject* value, npy_intp n) {
        if (!PyArray_Check(value)) return false;
        auto* a = reinterpret_cast<PyArrayObject*>(value);
        const int lead = n >= 0 ? 1 : 0;
        if (PyArray_NDIM(a) != int(f.shape.size()) + lead || !PyArray_IS_C_CONTIGUOUS(a)) return false;
        if (PyArray_DESCR(a) != f.descr && !PyArray_EquivTypes(PyArray_DESCR(a), f.descr)) return false;
        if (lead && PyArray_DIM(a, 0) != n) return false;
        for (size_t i = 0; i < f.shape.size(); ++i)
            if (PyArray_DIM(a, int(i) + lead) != f.shape[i]) return false;
        return true;
    }

    template <typename T> static bool store_int(PyObject* value, byte* into) {
        int overflow = 0;
        const long long x = PyLong_AsLongLongAndOverflow(value, &overflow);
        if (overflow || x < static_cast<long long>(std::numeric_limits<T>::min())) return false;
        if (x > 0 && static_cast<unsigned long long>(x) > static_cast<unsigned long long>(std::numeric_limits<T>::max()))
            return false;
        const T narrowed = static_cast<T>(x);
        std::memcpy(into, &narrowed, sizeof narrowed);
        return true;
    }

    static bool take_number(const Field& f, PyObject* value, byte* into) {
        if (PyFloat_CheckExact(value)) {
            const double x = PyFloat_AS_DOUBLE(value);
            if (f.type_num == NPY_FLOAT64) { std::memcpy(into, &x, 8); return true; }
            if (f.type_num != NPY_FLOAT32) return false;
            const float narrowed = static_cast<float>(x);
            if (std::isinf(narrowed) && !std::isinf(x)) return false;
            std::memcpy(into, &narrowed, 4);
            return true;
        }
        if (PyBool_Check(value)) {
            if (f.type_num != NPY_BOOL) return false;
            into[0] = value == Py_True;
            return true;
        }
        if (PyLong_CheckExact(value)) {
            switch (f.type_num) {
                case NPY_INT8: return store_int<int8_t>(value, into);
                case NPY_UINT8: return store_int<uint8_t>(value, into);
                case NPY_INT16: return store_int<int16_t>(value, into);
                case NPY_UINT16: return store_int<uint16_t>(value, into);
                case NPY_INT32: return store_int<int32_t>(value, into);
                case NPY_UINT32: return store_int<uint32_t>(value, into);
                case NPY_LONG: case NPY_LONGLONG: return store_int<int64_t>(value, into);
                default: return false;
            }
        }
        // Of an extended type (text, bfloat16) numpy would give a pointer to the value, not the value.
        if (PyArray_IsScalar(value, Generic) && !PyTypeNum_ISEXTENDED(f.type_num) && f.item_nbytes <= sizeof(Source::number)) {
            PyArray_Descr* descr = PyArray_DescrFromScalar(value);
            const bool same = descr && (descr == f.descr || PyArray_EquivTypes(descr, f.descr));
            Py_XDECREF(reinterpret_cast<PyObject*>(descr));
            if (same) PyArray_ScalarAsCtype(value, into);
            return same;
        }
        return false;
    }

    static nb::object build(const Node& node, PerLeaf<nb::object>& arrays) {
        if (node.kind == Node::kLeaf) return arrays[node.leaf];
        if (node.kind == Node::kDict) {
            nb::dict out;
            for (size_t i = 0; i < node.keys.size(); ++i) {
                nb::object child = build(node.children[i], arrays);
                if (PyDict_SetItem(out.ptr(), node.keys[i].ptr(), child.ptr())) throw nb::python_error();
            }
            return out;
        }
        nb::object out = nb::steal(PyTuple_New(node.children.size()));
        for (size_t i = 0; i < node.children.size(); ++i)
            PyTuple_SET_ITEM(out.ptr(), i, build(node.children[i], arrays).release().ptr());
        return out;
    }

    std::vector<Field> fields_;
    std::vector<Span> spans_;
    Extent extent_;
    Node root_{};
    bool has_plan_ = false;
    size_t row_nbytes_;
};

}  // namespace recollect
