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

bool is_float32(nb::handle values) {
    return PyArray_Check(values.ptr()) && PyArray_TYPE(reinterpret_cast<PyArrayObject*>(values.ptr())) == NPY_FLOAT32;
}

template <typename Unfit> int64_t first(nb::handle values, Unfit unfit) {
    return is_float32(values) ? first_of<float>(values, unfit) : first_of<double>(values, unfit);
}

// The first index at which one array is above the other.
template <typename T> int64_t first_above_of(nb::handle values, nb::handle limits) {
    const auto [x, n] = arrays::view<T>(values, "values");
    const auto [most, n_limits] = arrays::view<T>(limits, "limits");
    if (n != n_limits) throw nb::value_error("values, limits: must have equal lengths");
    for (size_t i = 0; i < n; ++i)
        if (x[i] > most[i]) return int64_t(i);
    return -1;
}

}  // namespace

// The first index of such a value in a contiguous 1-D array of float32 or float64, -1 if there is none.
void bind_values(nb::module_& m) {
    arrays::load_numpy();
    m.def("first_not_finite", [](nb::handle values) { return first(values, [](auto x) { return !std::isfinite(x); }); }, nb::arg("values"));
    m.def("first_below_zero", [](nb::handle values) { return first(values, [](auto x) { return x < 0; }); }, nb::arg("values"));
    m.def("first_not_flag", [](nb::handle values) { return first(values, [](auto x) { return !(x == 0 || x == 1); }); }, nb::arg("values"));
    m.def("first_above", [](nb::handle values, nb::handle limits) {
        return is_float32(values) ? first_above_of<float>(values, limits) : first_above_of<double>(values, limits);
    }, nb::arg("values"), nb::arg("limits"));
}

}  // namespace recollect
