#pragma once

#include <nanobind/nanobind.h>

namespace recollect {

void bind_latest(nanobind::module_& m);

}  // namespace recollect
