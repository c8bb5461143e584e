// Looks over the values of float arrays in one pass, where numpy needs several and a temporary.
#include <cmath>

#include "arrays.hpp"
#include "bind.hpp"

namespace recollect {
namespace {

template <typename T, typename Unfit> int64_t first_of(nb::handle values, Unfit unfit) {
    const auto [x, n] = arrays::view<T>(values, "values");
    for (size_t i = 0; i < n; ++i)
        if (unfit(x[i])) return int64_t(i);
    return -1;
}

template <typename Unfit> int64_t first(nb::handle values, Unfit unfit) {
    const bool is_float = PyArray_Check(values.ptr()) && PyArray_TYPE(reinterpret_cast<PyArrayObject*>(values.ptr())) == NPY_FLOAT32;
    return is_float ? first_of<float>(values, unfit) : first_of<double>(values, unfit);
}

}  // namespace

// The first index of such a value in a contiguous 1-D array of float32 or float64, -1 if there is none.
void bind_values(nb::module_& m) {
    arrays::load_numpy();
    m.def("first_not_finite", [](nb::handle values) { return first(values, [](auto x) { return !std::isfinite(x); }); }, nb::arg("values"));
    m.def("first_below_zero", [](nb::handle values) { return first(values, [](auto x) { return x < 0; }); }, nb::arg("values"));
}

}  // namespace recollect
