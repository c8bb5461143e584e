// Bindings of Latest. The Python side is recollect.memory.latest; the stubs are in _native.pyi.
#include "bind.hpp"

#include <nanobind/stl/shared_ptr.h>

#include <cmath>
#include <string>

#include "latest.hpp"
#include "tensors.hpp"

using namespace recollect;

namespace {

constexpr size_t kHoldGilNbytes = 16 * 1024;  // smaller copies are over before another thread could start

[[noreturn]] void raise(const char* name, const std::string& text) {
    nb::object error = nb::module_::import_("recollect.errors").attr(name);
    PyErr_SetString(error.ptr(), text.c_str());
    throw nb::python_error();
}

// The memory of some contiguous arrays, kept in place while this lives. In place of an array there may be (address, tensor)
// of a tensor, which lends no buffer without a detour through numpy; its caller has checked what is there.
class Pieces {
  public:
    Pieces(nb::list arrays, nb::list offsets, nb::list sizes, size_t limit, bool writable) {
        const size_t n = nb::len(arrays);
        if (nb::len(offsets) != n || nb::len(sizes) != n) throw nb::value_error("offsets, sizes: one per array is needed");
        views_.reserve(n);
        kept_.reserve(n);
        pieces_.reserve(n);
        for (size_t i = 0; i < n; ++i) {
            const size_t offset = nb::cast<size_t>(arrays::item(offsets, i)), nbytes = nb::cast<size_t>(arrays::item(sizes, i));
            if (offset > limit || nbytes > limit - offset) fail("offsets: an array reaches past the end of the slot");
            const nb::object item = arrays::item(arrays, i);
            kept_.push_back(item);
            pieces_.push_back({take(item.ptr(), nbytes, writable), offset, nbytes});
            total_ += nbytes;
        }
    }
    Pieces(const Pieces&) = delete;

    const Piece* data() const { return pieces_.data(); }
    size_t size() const { return pieces_.size(); }
    bool is_large() const { return total_ > kHoldGilNbytes; }
    void keep() { in_place_.keep(is_large()); }

  private:
    byte* take(PyObject* item, size_t nbytes, bool writable) {
        if (PyTuple_CheckExact(item) && PyTuple_GET_SIZE(item) == 2) {
            void* address = PyLong_AsVoidPtr(PyTuple_GET_ITEM(item, 0));
            if (!address && PyErr_Occurred()) throw nb::python_error();
            if (!address && nbytes) fail("arrays: an address is null");
            return static_cast<byte*>(address);
        }
        Py_buffer view;
        if (PyObject_GetBuffer(item, &view, writable ? PyBUF_WRITABLE : PyBUF_SIMPLE)) throw nb::python_error();
        views_.push_back(view);
        in_place_.add_if_array(item);
        if (size_t(view.len) != nbytes) fail("arrays: one has another size than its piece");
        return static_cast<byte*>(view.buf);
    }
    [[noreturn]] static void fail(const char* what) { throw nb::value_error(what); }

    struct Views : std::vector<Py_buffer> {
        ~Views() { for (Py_buffer& view : *this) PyBuffer_Release(&view); }
    };
    Views views_;
    std::vector<nb::object> kept_;  // a tensor beside its address is in a tuple that the list may let go
    arrays::Held in_place_;
    std::vector<Piece> pieces_;
    size_t total_ = 0;
};

PyObject* word(const char* text) { return PyUnicode_InternFromString(text); }
bool same(PyObject* a, PyObject* b) { return PyObject_RichCompareBool(a, b, Py_EQ) == 1; }
nb::object attribute(PyObject* x, PyObject* name) { return nb::steal(PyObject_GetAttr(x, name)); }
nb::object called(PyObject* x, PyObject* method) { return nb::steal(PyObject_VectorcallMethod(method, &x, 1, nullptr)); }

// Asks values what and where they are; neighbours are mostly of one type.
class Asking {
  public:
    explicit Asking(PyObject* names) : names_(names) {}

    // An exact array as it is, or (address, tensor) of an exact tensor that the host can read, which keeps it; nothing valid
    // for anything else.
    nb::object part_of(PyObject* x, PyObject* shape, PyObject* array_dtype, PyObject* tensor_dtype) {
        static PyObject* const array = nb::object(nb::module_::import_("numpy").attr("ndarray")).release().ptr();
        static PyObject *const dtype_ = word("dtype"), *const is_neg_ = word("is_neg");
        const nb::object dtype = attribute(x, dtype_);
        if (!dtype.is_valid()) return {};
        if (reinterpret_cast<PyObject*>(Py_TYPE(x)) == array)
            return has_shape(x, shape) && same(dtype.ptr(), array_dtype) ? nb::borrow(x) : nb::object();
        PyObject* name = PyDict_GetItemWithError(names_, dtype.ptr());
        if (!name || !same(name, tensor_dtype)) return {};
        const nb::object address = address_of(x, shape);
        if (!address.is_valid() || called(x, is_neg_).ptr() != Py_False) return {};
        return nb::steal(PyTuple_Pack(2, address.ptr(), x));
    }

  private:
    nb::object address_of(PyObject* x, PyObject* shape) {
        if (Py_TYPE(x) != type_) type_ = Py_TYPE(x), table_ = table_of(type_);
        if (!table_) return asked_address(x, shape);
        Tensor t;
        if (table_->look(x, &t) || !is_on_host(t) || !is_plain(t, shape)) return {};
        return nb::steal(PyLong_FromVoidPtr(static_cast<byte*>(t.data) + t.byte_offset));
    }
    // The same of a tensor whose library has no table.
    static nb::object asked_address(PyObject* x, PyObject* shape) {
        static PyObject *const is_cpu_ = word("is_cpu"), *const is_contiguous_ = word("is_contiguous"), *const data_ptr_ = word("data_ptr");
        const bool plain = has_shape(x, shape) && attribute(x, is_cpu_).ptr() == Py_True && called(x, is_contiguous_).ptr() == Py_True;
        return plain ? called(x, data_ptr_) : nb::object();
    }
    static bool has_shape(PyObject* x, PyObject* shape) {
        static PyObject* const shape_ = word("shape");
        const nb::object found = attribute(x, shape_);
        return found.is_valid() && same(found.ptr(), shape);
    }

    PyObject* names_;
    PyTypeObject* type_ = nullptr;
    const TensorTable* table_ = nullptr;
};

// What a state dict has for each of `wanted` (name, shape, numpy's dtype, a tensor dtype's name), as Pieces takes it; None if
// one is not exactly that: whoever checks them all says why. `names` has the names of tensors' dtypes. In
// Python these questions took as long as copying 200 KB.
nb::object exact_parts(nb::handle state, nb::list wanted, nb::dict names) {
    if (!PyDict_Check(state.ptr())) return nb::none();
    nb::list parts;
    Asking asking(names.ptr());
    for (size_t i = 0; i < nb::len(wanted); ++i) {
        const nb::tuple w = tuple_of(arrays::item(wanted, i), 4, "wanted");
        // Held: what is asked may run Python, and another thread put something else in its place.
        const nb::object x = nb::borrow(PyDict_GetItemWithError(state.ptr(), nb::handle(w[0]).ptr()));
        nb::object part = x.is_valid() ? asking.part_of(x.ptr(), nb::handle(w[1]).ptr(), nb::handle(w[2]).ptr(), nb::handle(w[3]).ptr())
                                       : nb::object();
        if (!part.is_valid()) {
            PyErr_Clear();
            return nb::none();
        }
        parts.append(part);
    }
    return parts;
}

class PyLatest {
  public:
    PyLatest(std::shared_ptr<Mapping> m, size_t words_at, size_t closed_at, size_t data_at, size_t slot_nbytes) {
        const size_t end = m->nbytes();
        if (!m->writable() || words_at % kLine || closed_at % 4 || words_at > end || sizeof(LatestWords) > end - words_at ||
            closed_at > end - 4 || data_at > end || slot_nbytes > (end - data_at) / 3 || 3 * page_up(slot_nbytes) > end - data_at)
            throw nb::value_error("Latest: words and slots must lie in a writable mapping");
        latest_ = std::make_shared<Latest>(std::move(m), words_at, closed_at, data_at, slot_nbytes);
    }
    // Another object over the same memory, counts and lock, which is closed for itself.
    PyLatest share() const { return *this; }
    void close() {
        const auto gone = std::move(latest_);
        if (gone) gone->wake();  // threads that wait in this object
    }
    uint64_t version() const { return open()->version(); }

    uint64_t publish(nb::list arrays, nb::list offsets, nb::list sizes) {
        auto latest = open();
        Pieces pieces(arrays, offsets, sizes, latest->slot_nbytes(), false);
        Locked lock(latest->lock());
        try { latest->claim(); }
        catch (const WriterBusy& busy) {
            raise("LaneBusyError", "writer: must be one process, " + describe_process(busy.writer) +
                                       " writes this; close or release_lane() there first");
        }
        pieces.keep();
        Unlocked unlocked(pieces.is_large());
        return latest->publish(pieces.data(), pieces.size());
    }
    uint64_t read(nb::list arrays, nb::list offsets, nb::list sizes) {
        auto latest = open();
        Pieces pieces(arrays, offsets, sizes, latest->slot_nbytes(), true);
        try {
            pieces.keep();
            Unlocked unlocked(pieces.is_large());
            return latest->read(pieces.data(), pieces.size());
        } catch (const Overtaken& e) {
            if (e.damaged) raise("AttachError", "latest: its words must be those of a writer, got others; the memory was overwritten: create it again");
            raise("ContentionError", "latest: the writer overtook every copy of 60 s; what was read is not whole");
        }
    }
    bool wait_newer(uint64_t version, double timeout_s, uint64_t owner) {
        auto latest = open();
        const double end = monotonic_s() + timeout_s;
        bool newer;
        { nb::gil_scoped_release unlocked; newer = timeout_s > 0 ? latest->spin(version) : latest->version() > version; }
        while (!newer && latest_) {
            const double left = end - monotonic_s();
            if (left <= 0) break;
            { nb::gil_scoped_release unlocked; newer = latest->wait_slice(version, left); }
            if (PyErr_CheckSignals()) throw nb::python_error();
            if (!newer) check_peer(*latest, owner);
        }
        if (latest->version() > version) return true;
        open();
        return false;
    }
    void release() { open()->release(); }
    uint64_t writer() const { return open()->writer(); }
    void set_patience(int tries) { open()->set_patience(tries); }
    nb::tuple counts() const {
        auto& c = open()->counts();
        return nb::make_tuple(c.reads.load(), c.overtaken.load(), c.holds.load(), c.steals.load());
    }

  private:
    std::shared_ptr<Latest> open() const {
        if (!latest_) raise("ClosedError", "this object was closed; open or create it again");
        if (latest_->is_closed()) raise("ClosedError", "this object was closed by its owner; create it again");
        return latest_;
    }
    // Nobody will ever publish: the writer is dead, or there is none and the owner is.
    static void check_peer(const Latest& latest, uint64_t owner) {
        const uint64_t writer = latest.writer();
        const uint64_t peer = writer ? writer : owner;
        if (!is_dead(peer)) return;
        raise("PeerDiedError", std::string(writer ? "writer" : "owner") + ": process " + std::to_string(pid_of(peer)) +
                                   " is gone, nothing newer will come; start a writer again");
    }

    std::shared_ptr<Latest> latest_;
};

}  // namespace

void recollect::bind_latest(nb::module_& m) {
    arrays::load_numpy();
    m.attr("LATEST_WORDS_NBYTES") = sizeof(LatestWords);
    m.def("exact_parts", &exact_parts, nb::arg("state"), nb::arg("wanted"), nb::arg("names"));
    nb::class_<PyLatest>(m, "Latest")
        .def(nb::init<std::shared_ptr<Mapping>, size_t, size_t, size_t, size_t>(), nb::arg("mapping"), nb::arg("words_at"),
             nb::arg("closed_at"), nb::arg("data_at"), nb::arg("slot_nbytes"))
        .def("share", &PyLatest::share)
        .def("close", &PyLatest::close)
        .def("version", &PyLatest::version)
        .def("publish", &PyLatest::publish, nb::arg("arrays"), nb::arg("offsets"), nb::arg("sizes"))
        .def("read", &PyLatest::read, nb::arg("arrays"), nb::arg("offsets"), nb::arg("sizes"))
        .def("wait_newer", &PyLatest::wait_newer, nb::arg("version"), nb::arg("timeout_s"), nb::arg("owner"))
        .def("release", &PyLatest::release)
        .def("writer", &PyLatest::writer)
        .def("set_patience", &PyLatest::set_patience, nb::arg("tries"))
        .def("counts", &PyLatest::counts);
}
