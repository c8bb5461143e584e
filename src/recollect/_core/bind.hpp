// What each file of bindings adds to the module.
#pragma once

#include <nanobind/nanobind.h>

#include "rows_object.hpp"

namespace recollect {

std::shared_ptr<Memory> memory_of(nb::handle rows);  // of a Rows object, as long as it is open
std::shared_ptr<Memory> memory_of(nb::handle rows, const Codec& codec);  // the same, with a codec that fits it

void bind_mapping(nb::module_& m);
void bind_rows(nb::module_& m);
void bind_reads(nb::module_& m, nb::class_<Rows>& rows);
void bind_writes(nb::module_& m, nb::class_<Rows>& rows);
void bind_trees(nb::module_& m);
void bind_ring(nb::module_& m);
void bind_pack(nb::module_& m);
void bind_orphan(nb::module_& m);
void bind_copy(nb::module_& m);
void bind_items(nb::module_& m);
void bind_payload(nb::module_& m);
void bind_latest(nb::module_& m);
void bind_prioritized(nb::module_& m);
void bind_windows(nb::module_& m);
void bind_values(nb::module_& m);
void bind_turns(nb::module_& m);

}  // namespace recollect
