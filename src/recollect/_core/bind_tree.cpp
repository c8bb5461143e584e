// Bindings of tree.hpp.
#include "arrays.hpp"
#include "bind.hpp"
#include "tree.hpp"

namespace recollect {
namespace {

using Ints = arrays::Values<int64_t>;
using Doubles = arrays::Values<double>;

template <typename T> void check_leaves(const T& tree, const Ints& rows) {
    for (size_t i = 0; i < rows.n; ++i)
        if (rows.data[i] < 0 || size_t(rows.data[i]) >= tree.capacity())
            throw std::out_of_range("row " + std::to_string(rows.data[i]) + " is out of range for " + std::to_string(tree.capacity()));
}

void set_sum(Tree<Sum>& tree, nb::handle rows, nb::handle values) {
    const Ints r(rows, "rows");
    const Doubles v(values, "values");
    if (r.n != v.n) throw nb::value_error("rows, values: must have equal lengths");
    check_leaves(tree, r);
    for (size_t i = 0; i < v.n; ++i)
        if (!(v.data[i] >= 0.0) || std::isinf(v.data[i])) throw nb::value_error("values: must be finite and not negative");
    tree.set(r.data, v.data, r.n);
}

nb::object find_sum(const Tree<Sum>& tree, nb::handle masses) {
    const Doubles m(masses, "masses");
    if (!(tree.top() > 0.0)) throw nb::value_error("find: the tree is empty");
    int64_t* out;
    nb::object result = arrays::make<int64_t>(m.n, out);
    for (size_t i = 0; i < m.n; ++i) out[i] = int64_t(tree.find(m.data[i]));
    return result;
}

nb::object get_sum(const Tree<Sum>& tree, nb::handle rows) {
    const Ints r(rows, "rows");
    check_leaves(tree, r);
    double* out;
    nb::object result = arrays::make<double>(r.n, out);
    for (size_t i = 0; i < r.n; ++i) out[i] = tree.leaf(size_t(r.data[i]));
    return result;
}

void set_min(Tree<Min>& tree, nb::handle rows, nb::handle values, nb::handle orders) {
    const Ints r(rows, "rows"), o(orders, "orders");
    const Doubles v(values, "values");
    const size_t n = r.n;
    if (n != v.n || n != o.n) throw nb::value_error("rows, values, orders: must have equal lengths");
    check_leaves(tree, r);
    std::vector<Ranked> ranked(n);
    for (size_t i = 0; i < n; ++i) {
        if (std::isnan(v.data[i])) throw nb::value_error("values: must not be NaN");
        ranked[i] = {v.data[i], o.data[i]};
    }
    tree.set(r.data, ranked.data(), n);
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
