// Bindings of payload.hpp.
#include "payload.hpp"

#include "bind.hpp"

namespace recollect {
namespace {

struct PayloadPlan {
    std::vector<FixedLeaf> fixed;
    std::vector<RaggedLeaf> ragged;
    size_t row_nbytes, alignment;
    nb::object step, tokens, prompt_length;
    bool is_token;
};

void make_plan(PayloadPlan* self, nb::list fixed, nb::list ragged, size_t row_nbytes, size_t alignment) {
    new (self) PayloadPlan{{}, {}, row_nbytes, alignment, nb::str("step"), nb::str("tokens"), nb::str("prompt_length"), false};
    for (size_t i = 0; i < nb::len(fixed); ++i) {
        nb::tuple t = tuple_of(arrays::item(fixed, i), 3, "fixed");
        auto* type = reinterpret_cast<PyArray_Descr*>(nb::handle(t[1]).ptr());
        if (!PyArray_DescrCheck(reinterpret_cast<PyObject*>(type))) throw nb::type_error("fixed: must have dtypes");
        const size_t offset = nb::cast<size_t>(t[2]), nbytes = size_t(PyDataType_ELSIZE(type));
        if (nbytes > row_nbytes || offset > row_nbytes - nbytes) throw nb::value_error("fixed: one reaches past its row");
        self->fixed.push_back({t[0], offset, PyArray_ISNBO(type->byteorder) ? put_of(type->type_num) : nullptr});
    }
    for (size_t i = 0; i < nb::len(ragged); ++i) {
        nb::tuple t = tuple_of(arrays::item(ragged, i), 6, "ragged");
        RaggedLeaf leaf{t[0], t[1], {}, nb::cast<npy_intp>(t[3]), nb::cast<bool>(t[4]), nb::cast<bool>(t[5])};
        for (nb::handle n : nb::cast<nb::tuple>(t[2])) leaf.shape.push_back(nb::cast<npy_intp>(n));
        self->is_token |= leaf.name.equal(self->tokens);
        self->ragged.push_back(std::move(leaf));
    }
}

// Held: looking for the next one may run Python, and another thread put something else in its place.
nb::object found(PyObject* dict, const nb::object& name) {
    nb::object value = nb::borrow(PyDict_GetItemWithError(dict, name.ptr()));
    if (!value.is_valid() && PyErr_Occurred()) throw nb::python_error();
    return value;
}

// Parts of a body that begin at multiples of the alignment.
class Body {
  public:
    explicit Body(size_t alignment) : alignment_(alignment) {}
    void add(nb::object part, size_t n) { parts.append(std::move(part)), nbytes += n; }
    void close_block() {
        const size_t pad = (alignment_ - nbytes % alignment_) % alignment_;
        if (pad) add(zeros(pad), pad);
    }
    nb::list parts;
    size_t nbytes = 0;

  private:
    static nb::object zeros(size_t n) {
        const byte nothing[256] = {};
        return nb::bytes(nothing, n);
    }
    size_t alignment_;
};

nb::object new_bytes(size_t n, byte*& data) {
    nb::object out = nb::steal(PyBytes_FromStringAndSize(nullptr, Py_ssize_t(n)));
    if (!out.ptr()) throw nb::python_error();
    data = reinterpret_cast<byte*>(PyBytes_AS_STRING(out.ptr()));
    return out;
}

// One packed row; false unless every fixed leaf is a plain number. `used` counts the leaves that came from the row.
bool put_fixed(const PayloadPlan& plan, PyObject* leaves, PyObject* base, PyObject* stamps, size_t step, byte* to, size_t& used) {
    for (const FixedLeaf& leaf : plan.fixed) {
        const nb::object own = found(leaves, leaf.name);
        used += own.is_valid();
        nb::object value = found(stamps, leaf.name);
        if (!value.is_valid()) value = own;
        if (!value.is_valid() && leaf.name.equal(plan.step)) value = nb::int_(step);
        if (!value.is_valid()) value = found(base, leaf.name);
        if (!value.is_valid() || !leaf.put || !leaf.put(value.ptr(), to + leaf.offset)) return false;
    }
    return true;
}

// The tokens after the prompt, -1 if they cannot be told without looking closer.
npy_intp response_of(const PayloadPlan& plan, PyObject* leaves) {
    const nb::object tokens = found(leaves, plan.tokens), prompt = found(leaves, plan.prompt_length);
    auto* a = reinterpret_cast<PyArrayObject*>(tokens.ptr());
    if (!tokens.is_valid() || !PyArray_CheckExact(tokens.ptr()) || PyArray_NDIM(a) < 1) return -1;
    const npy_intp n = PyArray_DIM(a, 0);
    if (!prompt.is_valid()) return n;
    if (!PyLong_CheckExact(prompt.ptr())) return -1;
    int overflow;
    const long long given = PyLong_AsLongLongAndOverflow(prompt.ptr(), &overflow);
    return overflow || given < 0 || given > n ? -1 : n - npy_intp(given);
}

nb::object all_true(npy_intp n) {
    byte* data;
    nb::object out = new_bytes(size_t(n), data);
    std::memset(data, 1, size_t(n));
    return out;
}

// (parts of the body, their bytes, elements by ragged leaf), or None when a value has to be looked at closer.
nb::object body_of(const PayloadPlan& plan, nb::list given, nb::dict base, nb::dict stamps) {
    const nb::tuple rows(given);  // as it is now
    const size_t n = rows.size();
    std::vector<size_t> used(n);
    std::vector<npy_intp> responses(n);
    byte* to;
    nb::object packed = new_bytes(checked_product(n, plan.row_nbytes), to);
    std::memset(to, 0, n * plan.row_nbytes);
    for (size_t i = 0; i < n; ++i) {
        PyObject* leaves = nb::handle(rows[i]).ptr();
        if (!PyDict_CheckExact(leaves) || !put_fixed(plan, leaves, base.ptr(), stamps.ptr(), i, to + i * plan.row_nbytes, used[i]))
            return nb::none();
        if (plan.is_token && (responses[i] = response_of(plan, leaves)) < 0) return nb::none();
    }
    byte* sizes;
    nb::object lengths = new_bytes(checked_product(n, plan.ragged.size() * sizeof(int32_t)), sizes);
    Body body(plan.alignment);
    body.add(packed, n * plan.row_nbytes), body.close_block();
    body.add(lengths, n * plan.ragged.size() * sizeof(int32_t)), body.close_block();
    nb::list totals;
    for (const RaggedLeaf& leaf : plan.ragged) {
        npy_intp total = 0;
        size_t element = size_t(PyDataType_ELSIZE(reinterpret_cast<PyArray_Descr*>(leaf.dtype.ptr())));
        for (const npy_intp d : leaf.shape) element *= size_t(d);
        for (size_t i = 0; i < n; ++i) {
            const nb::object value = found(nb::handle(rows[i]).ptr(), leaf.name);
            used[i] += value.is_valid();
            const npy_intp count = value.is_valid() ? elements_of(value.ptr(), leaf) : leaf.all_true ? responses[i] : -1;
            if (count < 0 || count > leaf.most || (leaf.per_response && count != responses[i])) return nb::none();
            body.add(value.is_valid() ? value : all_true(count), size_t(count) * element);
            const int32_t length = int32_t(count);
            std::memcpy(sizes, &length, sizeof length);
            sizes += sizeof length, total += count;
        }
        body.close_block();
        totals.append(total);
    }
    for (size_t i = 0; i < n; ++i)
        if (used[i] != size_t(PyDict_Size(nb::handle(rows[i]).ptr()))) return nb::none();  // a leaf that nobody knows
    return nb::make_tuple(body.parts, body.nbytes, totals);
}

// A part's bytes, held as long as this is.
struct Part {
    explicit Part(nb::handle part) : owner(nb::borrow(part)) {
        PyObject* p = part.ptr();
        if (PyBytes_CheckExact(p)) {
            data = reinterpret_cast<const byte*>(PyBytes_AS_STRING(p)), nbytes = size_t(PyBytes_GET_SIZE(p));
        } else if (PyArray_CheckExact(p) && PyArray_IS_C_CONTIGUOUS(reinterpret_cast<PyArrayObject*>(p))) {
            auto* a = reinterpret_cast<PyArrayObject*>(p);
            data = static_cast<const byte*>(PyArray_DATA(a)), nbytes = size_t(PyArray_NBYTES(a));
        } else {
            throw nb::type_error("parts: must be bytes and contiguous arrays");
        }
    }
    nb::object owner;
    const byte* data;
    size_t nbytes;
};

// `lead`, then the parts, whose crc32c is written over four bytes of the lead.
nb::object join_summed(nb::bytes lead, nb::list given, size_t crc_at) {
    if (lead.size() < 4 || crc_at > lead.size() - 4) throw nb::value_error("crc_at: must lie in the lead");
    std::vector<Part> parts;
    parts.reserve(given.size());
    arrays::Held held;
    size_t nbytes = 0;
    for (size_t i = 0; i < given.size(); ++i) {
        const Part& part = parts.emplace_back(arrays::item(given, i));
        held.add_if_array(part.owner.ptr());
        nbytes += part.nbytes;
    }
    byte* to;
    nb::object out = new_bytes(lead.size() + nbytes, to);
    std::memcpy(to, lead.c_str(), lead.size());
    uint32_t crc;
    {
        held.keep(nbytes > kHoldGil);
        Unlocked unlocked(nbytes > kHoldGil);
        SummingCopy copy(to + lead.size());
        for (const Part& part : parts) copy.add(part.data, part.nbytes);
        crc = copy.finish();
    }
    for (size_t k = 0; k < 4; ++k) to[crc_at + k] = byte(crc >> (8 * k));
    return out;
}

}  // namespace

void bind_payload(nb::module_& m) {
    arrays::load_numpy();
    nb::class_<PayloadPlan>(m, "PayloadPlan")
        .def("__init__", &make_plan, nb::arg("fixed"), nb::arg("ragged"), nb::arg("row_nbytes"), nb::arg("alignment"))
        .def("gather", &body_of, nb::arg("rows"), nb::arg("base"), nb::arg("stamps"));
    m.def("join_summed", &join_summed, nb::arg("lead"), nb::arg("parts"), nb::arg("crc_at"));
}

}  // namespace recollect
