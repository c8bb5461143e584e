// Names of Python's C interface that its stable ABI does not have, as what it has.
#pragma once

#include <nanobind/nanobind.h>

#if defined(Py_LIMITED_API)
#define PyTuple_GET_SIZE PyTuple_Size
#define PyTuple_GET_ITEM PyTuple_GetItem
#define PyTuple_SET_ITEM PyTuple_SetItem
#define PyList_GET_SIZE PyList_Size
#define PyList_GET_ITEM PyList_GetItem
#define PyDict_GET_SIZE PyDict_Size
#define PyFloat_AS_DOUBLE PyFloat_AsDouble
#define PyBytes_AS_STRING PyBytes_AsString
#define PyBytes_GET_SIZE PyBytes_Size
#endif

namespace recollect {

// What a memoryview shows, which it keeps, or null.
inline PyObject* shown_by(PyObject* view) {
#if defined(Py_LIMITED_API)
    PyObject* shown = PyObject_GetAttrString(view, "obj");
    if (!shown) { PyErr_Clear(); return nullptr; }  // it was released
    Py_DECREF(shown);
    return shown == Py_None ? nullptr : shown;
#else
    return PyMemoryView_GET_BUFFER(view)->obj;
#endif
}

}  // namespace recollect
