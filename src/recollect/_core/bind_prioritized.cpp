// Bindings of prioritized.hpp.
#include <nanobind/stl/string.h>

#include "bind.hpp"
#include "prioritized.hpp"
#include "recycle.hpp"

namespace recollect {
namespace {

using Ints = arrays::Values<int64_t>;

// The mass that each value comes to; none may be beyond what can be added up.
std::vector<double> masses_of(const Priorities& p, const double* values, size_t n) {
    std::vector<double> masses = p.masses_of(values, n);
    for (size_t i = 0; i < n; ++i) {
        const bool is_number = values[i] >= 0.0 && !std::isinf(values[i]);
        if (is_number && masses[i] <= kMostMass) continue;
        throw nb::value_error(("values: must " +
            std::string(is_number ? "have a (value + eps)**alpha below 2**900" : "be finite and not negative") + ", got " +
            nb::cast<std::string>(nb::str(nb::float_(values[i]))) + " at " + std::to_string(i) + "; none was applied").c_str());
    }
    return masses;
}

// (data, row, generation, probability, weight), data None without a codec and the last three None unless `labels`;
// None when nothing can be drawn.
nb::object draw(Priorities& self, nb::handle codec_or_none, uint64_t key, uint64_t counter, size_t n, double beta,
                bool labels) {
    auto m = self.lock();
    const Codec* codec = codec_or_none.is_none() ? nullptr : nb::cast<const Codec*>(codec_or_none);
    if (codec && codec->row_nbytes() != m->row_nbytes) throw nb::value_error("codec: must be made for these rows");
    PerLeaf<nb::object> leaf_arrays(codec ? codec->size() : 0);
    PerLeaf<byte*> leaves(codec ? codec->size() : 0);
    if (codec) codec->make_arrays(npy_intp(checked_size(n)), leaf_arrays, leaves);
    Drawn out{};
    nb::object row = arrays::make<int64_t>(n, out.row), generation = nb::none(), probability = nb::none(), weight = nb::none();
    if (labels) {
        generation = arrays::make<int64_t>(n, out.generation);
        probability = arrays::make<float>(n, out.probability);
        weight = arrays::make<float>(n, out.weight);
    }
    bool found;
    {
        Locked turn(self.turn());
        Unlocked unlocked(n * m->row_nbytes > kHoldGil);
        found = self.draw(*m, key, counter, n, beta, codec, leaves.data(), out);
    }
    if (!found) return nb::none();
    return nb::make_tuple(codec ? codec->build(leaf_arrays, false) : nb::none(), row, generation, probability, weight);
}

// What a sampler by priority needs for a batch, bound once. `labels`: the codec of row, generation, probability, weight.
class PriorityDrawer {
  public:
    PriorityDrawer(nb::object priorities, nb::object codec, nb::object labels)
        : kept_alive_{priorities, codec, labels}, of_(nb::cast<Priorities&>(priorities)), by_(nb::cast<const Codec&>(codec)),
          batches_(by_), labels_(nb::cast<const Codec&>(labels)) {
        if (by_.row_nbytes() != of_.lock()->row_nbytes) throw nb::value_error("codec: must be made for these rows");
        if (nb::cast<const Codec&>(labels).size() != 4) throw nb::value_error("labels: must be four");
    }

    // (batch, labels); None when nothing can be drawn.
    nb::object next(Stream& stream, size_t n, double beta) {
        auto m = of_.lock();
        PerLeaf<byte*> leaves(by_.size()), label(4);
        nb::object batch = batches_.take(npy_intp(checked_size(n)), leaves), labels = labels_.take(npy_intp(n), label);
        Drawn out{reinterpret_cast<int64_t*>(label[0]), reinterpret_cast<int64_t*>(label[1]),
                  reinterpret_cast<float*>(label[2]), reinterpret_cast<float*>(label[3])};
        bool found;
        {
            Locked turn(of_.turn());
            Unlocked unlocked(n * m->row_nbytes > kHoldGil);
            found = of_.draw(*m, stream.key, stream.counter, n, beta, &by_, leaves.data(), out);
        }
        if (!found) return nb::none();
        stream.counter += n;
        return nb::make_tuple(batch, labels);
    }

  private:
    nb::object kept_alive_[3];
    Priorities& of_;
    const Codec& by_;
    Recycled batches_, labels_;
};

size_t update(Priorities& self, nb::handle rows, nb::handle generations, nb::handle values) {
    auto m = self.lock();
    const Ints r(rows, "row"), g(generations, "generation");
    const arrays::Values<double> v(values, "values");
    if (r.n != g.n || r.n != v.n) throw nb::value_error("row, generation, values: must have equal lengths");
    const std::vector<double> masses = masses_of(self, v.data, v.n);
    Locked turn(self.turn());
    return self.update(*m, r.data, g.data, v.data, masses.data(), r.n);
}

nb::tuple look(Priorities& self, nb::handle rows, nb::handle generations, double beta) {
    auto m = self.lock();
    const Ints r(rows, "row"), g(generations, "generation");
    if (r.n != g.n) throw nb::value_error("row, generation: must have equal lengths");
    float *p, *w;
    nb::object probability = arrays::make<float>(r.n, p), weight = arrays::make<float>(r.n, w);
    Locked turn(self.turn());
    self.look(*m, r.data, g.data, r.n, beta, p, w);
    return nb::make_tuple(probability, weight);
}

nb::tuple state(Priorities& self) {
    auto m = self.lock();
    std::vector<Priorities::Known> known;
    { Locked turn(self.turn()); known = self.known(*m); }
    int64_t *r, *g;
    double* v;
    nb::object row = arrays::make<int64_t>(known.size(), r), generation = arrays::make<int64_t>(known.size(), g);
    nb::object mass = arrays::make<double>(known.size(), v);
    for (size_t i = 0; i < known.size(); ++i) r[i] = known[i].row, g[i] = known[i].generation, v[i] = known[i].mass;
    return nb::make_tuple(row, generation, mass);
}

void restore(Priorities& self, nb::handle rows, nb::handle generations, nb::handle masses, double top) {
    auto m = self.lock();
    const Ints r(rows, "row"), g(generations, "generation");
    const arrays::Values<double> v(masses, "mass");
    if (r.n != g.n || r.n != v.n) throw nb::value_error("row, generation, mass: must have equal lengths");
    for (size_t i = 0; i < v.n; ++i)
        if (!(v.data[i] >= 0.0 && v.data[i] <= kMostMass)) throw nb::value_error("mass: must be finite and not negative");
    if (!(top >= 0.0 && self.mass_of(top) <= kMostMass)) throw nb::value_error("top: must be finite and not negative");
    Locked turn(self.turn());
    self.restore(*m, r.data, g.data, v.data, r.n, top);
}

}  // namespace

void bind_prioritized(nb::module_& m) {
    arrays::load_numpy();
    m.attr("MOST_MASS") = kMostMass;
    m.def("powers", [](nb::handle x, double a) {
        auto [from, n] = arrays::view<double>(x, "x");
        double* to;
        nb::object out = arrays::make<double>(n, to);
        powers(from, a, to, n);
        return out;
    }, nb::arg("x"), nb::arg("a"));
    nb::class_<PriorityDrawer>(m, "PriorityDrawer")
        .def(nb::init<nb::object, nb::object, nb::object>(), nb::arg("priorities"), nb::arg("codec"), nb::arg("labels"))
        .def("next", &PriorityDrawer::next, nb::arg("stream"), nb::arg("n"), nb::arg("beta"));
    nb::class_<Priorities>(m, "Priorities")
        .def("__init__", [](Priorities* self, nb::capsule rows, double alpha, double eps, uint64_t length, bool pad) {
            new (self) Priorities(*static_cast<std::weak_ptr<Memory>*>(rows.data()), alpha, eps, Wanted{length, pad});
        }, nb::arg("rows"), nb::arg("alpha"), nb::arg("eps"), nb::arg("length") = 0, nb::arg("pad") = false)
        .def_prop_ro("top", [](Priorities& self) { Locked turn(self.turn()); return self.top(); })
        .def_prop_ro("least", [](Priorities& self) { Locked turn(self.turn()); return self.least(); })
        .def("total", &Priorities::total)
        .def("draw", &draw, nb::arg("codec").none(), nb::arg("key"), nb::arg("counter"), nb::arg("n"), nb::arg("beta"),
             nb::arg("labels") = true)
        .def("update", &update, nb::arg("row"), nb::arg("generation"), nb::arg("values"))
        .def("look", &look, nb::arg("row"), nb::arg("generation"), nb::arg("beta"))
        .def("state", &state)
        .def("restore", &restore, nb::arg("row"), nb::arg("generation"), nb::arg("mass"), nb::arg("top"));
}

}  // namespace recollect
