// Bindings of tree.hpp.
#include "arrays.hpp"
#include "bind.hpp"
#include "tree.hpp"

namespace recollect {
namespace {

template <typename T> void check_leaves(const T& tree, const int64_t* rows, size_t n) {
    for (size_t i = 0; i < n; ++i)
        if (rows[i] < 0 || size_t(rows[i]) >= tree.capacity())
            throw std::out_of_range("row " + std::to_string(rows[i]) + " is out of range for " + std::to_string(tree.capacity()));
}

void set_sum(Tree<Sum>& tree, nb::handle rows, nb::handle values) {
    auto [r, n] = arrays::view<int64_t>(rows, "rows");
    auto [v, n2] = arrays::view<double>(values, "values");
    if (n != n2) throw nb::value_error("rows, values: must have equal lengths");
    check_leaves(tree, r, n);
    for (size_t i = 0; i < n; ++i)
        if (!(v[i] >= 0.0) || std::isinf(v[i])) throw nb::value_error("values: must be finite and not negative");
    tree.set(r, v, n);
}

nb::object find_sum(const Tree<Sum>& tree, nb::handle masses) {
    auto [m, n] = arrays::view<double>(masses, "masses");
    if (!(tree.top() > 0.0)) throw nb::value_error("find: the tree is empty");
    int64_t* out;
    nb::object result = arrays::make<int64_t>(n, out);
    for (size_t i = 0; i < n; ++i) out[i] = int64_t(tree.find(m[i]));
    return result;
}

nb::object get_sum(const Tree<Sum>& tree, nb::handle rows) {
    auto [r, n] = arrays::view<int64_t>(rows, "rows");
    check_leaves(tree, r, n);
    double* out;
    nb::object result = arrays::make<double>(n, out);
    for (size_t i = 0; i < n; ++i) out[i] = tree.leaf(size_t(r[i]));
    return result;
}

void set_min(Tree<Min>& tree, nb::handle rows, nb::handle values, nb::handle orders) {
    auto [r, n] = arrays::view<int64_t>(rows, "rows");
    auto [v, n2] = arrays::view<double>(values, "values");
    auto [o, n3] = arrays::view<int64_t>(orders, "orders");
    if (n != n2 || n != n3) throw nb::value_error("rows, values, orders: must have equal lengths");
    check_leaves(tree, r, n);
    std::vector<Ranked> ranked(n);
    for (size_t i = 0; i < n; ++i) {
        if (std::isnan(v[i])) throw nb::value_error("values: must not be NaN");
        ranked[i] = {v[i], o[i]};
    }
    tree.set(r, ranked.data(), n);
}

}  // namespace

void bind_trees(nb::module_& m) {
    arrays::load_numpy();
    nb::class_<Tree<Sum>>(m, "SumTree")
        .def(nb::init<size_t>(), nb::arg("capacity"))
        .def_prop_ro("capacity", &Tree<Sum>::capacity)
        .def_prop_ro("total", &Tree<Sum>::top)
        .def("set", &set_sum, nb::arg("rows"), nb::arg("values"))
        .def("get", &get_sum, nb::arg("rows"))
        .def("find", &find_sum, nb::arg("masses"));

    nb::class_<Tree<Min>>(m, "MinTree")
        .def(nb::init<size_t>(), nb::arg("capacity"))
        .def_prop_ro("capacity", &Tree<Min>::capacity)
        .def("set", &set_min, nb::arg("rows"), nb::arg("values"), nb::arg("orders"))
        .def("lowest", [](const Tree<Min>& t) { return nb::make_tuple(t.top().value, t.top().order, t.find_lowest()); });
}

}  // namespace recollect
