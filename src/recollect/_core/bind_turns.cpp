#include "turns.hpp"

#include "bind.hpp"

namespace recollect {

void bind_turns(nb::module_& m) {
    nb::class_<Turn>(m, "Turn")
        .def(nb::init<std::string, nb::object>(), nb::arg("refusal"), nb::arg("is_entered"))
        .def("__enter__", [](nb::handle self) { nb::cast<Turn&>(self).enter(self); })
        .def("__exit__", [](Turn& self, nb::handle, nb::handle, nb::handle) { self.leave(); },
             nb::arg().none(), nb::arg().none(), nb::arg().none())
        .def_rw("batches", &Turn::batches);
    nb::class_<Condition>(m, "Condition")
        .def(nb::init<>())
        .def("__enter__", &Condition::enter)
        .def("__exit__", [](Condition& self, nb::handle, nb::handle, nb::handle) { self.leave(); },
             nb::arg().none(), nb::arg().none(), nb::arg().none())
        .def("wait", &Condition::wait, nb::arg("timeout_s"))
        .def("notify_all", &Condition::notify_all)
        .def_prop_ro("n_waiting", &Condition::n_waiting)
        .def_prop_ro("is_held", &Condition::is_held);
}

}  // namespace recollect
