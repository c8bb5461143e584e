// The module: its errors, and what the files of bindings add. The Python side is in recollect.memory; the stubs are in
// _native.pyi.
#include "bind.hpp"
#include "edits.hpp"

using namespace recollect;

namespace {

// The classes are never given up: a static object would be, after the interpreter has ended.
PyObject* error_class(const char* name) {
    static PyObject* errors = nb::module_::import_("recollect.errors").release().ptr();
    return nb::object(nb::handle(errors).attr(name)).release().ptr();
}

void translate(const std::exception_ptr& p, void*) {
    try { std::rethrow_exception(p); }
    catch (const Busy& e) {
        std::string text = e.lane < 0 ? "no lane is free" : "lane " + std::to_string(e.lane) + " is taken";
        text += ": held by " + describe_process(e.owner);
        text += life_of(e.owner) == Life::kUnknown ? "; close it there, or dump what can be read and load the dump"
                                                   : "; create the buffer with more lanes (num_lanes=), or let that process "
                                                     "release_lane() or close when it has written what it had to";
        PyErr_SetString(error_class("LaneBusyError"), text.c_str());
    }
    catch (const Forked& e) { PyErr_SetString(error_class("ReadOnlyError"), e.what()); }
    catch (const Refused& e) { PyErr_SetString(error_class("SegmentOpenError"), e.what()); }
    catch (const Damaged& e) { PyErr_SetString(error_class(e.is_file ? "FormatError" : "AttachError"), e.what()); }
    catch (const Lapped& e) { PyErr_SetString(error_class("ContentionError"), e.what()); }
    catch (const std::out_of_range& e) { PyErr_SetString(PyExc_IndexError, e.what()); }
    catch (const std::logic_error& e) {
        const std::string what = e.what();
        if (what != "closed" && what != "closed for all") throw;
        PyErr_SetString(error_class("ClosedError"), what == "closed" ? "this object was closed; open or create it again"
                                                                     : "this object was closed by its owner; create it again");
    }
    catch (const std::system_error& e) {
        errno = e.code().value();
        PyErr_SetFromErrno(PyExc_OSError);
    }
}

}  // namespace

NB_MODULE(_native, m) {
    watch_forks();
    own_boot();  // while there are descriptors to read it
    nb::set_leak_warnings(false);  // module-level tables may outlive the interpreter's teardown order
    nb::register_exception_translator(translate);
    bind_turns(m);
    bind_mapping(m);
    bind_rows(m);
    bind_trees(m);
    bind_ring(m);
    bind_pack(m);
    bind_orphan(m);
    bind_copy(m);
    bind_items(m);
    bind_payload(m);
    bind_latest(m);
    bind_prioritized(m);
    bind_windows(m);
    bind_values(m);
}
