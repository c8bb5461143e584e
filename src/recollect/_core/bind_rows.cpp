// Bindings of Rows: the object itself, who writes to it, adoption, counting. Stubs are in _native.pyi.
#include <nanobind/stl/shared_ptr.h>

#include "bind.hpp"
#include "edits.hpp"

namespace recollect {

std::shared_ptr<Memory> memory_of(nb::handle rows) { return nb::cast<const Rows&>(rows).memory(); }
std::shared_ptr<Memory> memory_of(nb::handle rows, const Codec& codec) { return nb::cast<const Rows&>(rows).memory(codec); }

namespace {

// --- lanes ---
size_t claim(const Rows& self, int64_t lane) {
    auto m = self.writable();
    if (lane < 0) return m->default_lane();
    check_lane(*m, size_t(lane));
    m->keep_lane(size_t(lane));
    return size_t(lane);
}
int64_t held_lane(const Rows& self) { return self.memory()->held_lane(); }
bool has_open(const Rows& self, size_t lane) {
    auto m = self.memory();
    check_lane(*m, lane);
    return m->tagged && m->lane(lane).open_segment.load() != 0;
}
void release(const Rows& self, size_t lane) { auto m = self.memory(); check_lane(*m, lane); m->release(lane); }
// The word of the process that holds a lane; 0 when nobody does, or a dead one.
uint64_t owner(const Rows& self, size_t lane) {
    auto m = self.memory();
    check_lane(*m, lane);
    const uint64_t w = m->lane(lane).owner.load();
    return m->life(w) == Life::kDead ? 0 : w;
}

// --- adoption and loading: the caller is the only user ---
void set_window(const Rows& self, size_t lane, uint64_t low, uint64_t cursor) {
    auto m = self.writable();
    check_lane(*m, lane);
    if (low > cursor || (m->run && cursor - low > m->run)) throw nb::value_error("set_window: must fit its lane");
    Hold hold(*m);
    hold.take(lane);
    m->reach(m->checked(cursor));
    // A row that a removal left behind may still say that it is to be removed.
    for (uint64_t p = low; p < cursor; ++p) m->stamp(m->row_of(lane, p)).fetch_and(~kTomb);
    m->install(lane, low, cursor, cursor, (cursor - low) - cursor, 0);
}
void set_tags(const Rows& self, size_t first_row, size_t n, int64_t segment, int64_t step) {
    auto m = self.writable();
    if (!m->tagged) throw nb::value_error("set_tags: these rows keep no segments");
    check_row(*m, int64_t(first_row));
    const size_t k = m->run ? first_row / m->run : 0, begin = k * m->run;
    for (size_t i = 0; i < n; ++i) {
        size_t r = first_row + i;
        if (m->run && r >= begin + m->run) r -= m->run;
        check_row(*m, int64_t(r));
        m->set_tag(r, segment, step + int64_t(i));
    }
}
void set_open(const Rows& self, size_t lane, int64_t segment) {
    auto m = self.writable();
    check_lane(*m, lane);
    m->lane(lane).open_segment.store(uint64_t(segment));
}
void set_generations(const Rows& self, size_t first_row, nb::handle generations) {
    auto m = self.writable();
    const arrays::Values<int64_t> g(generations, "generations");
    size_t end;
    if (__builtin_add_overflow(first_row, g.n, &end)) throw nb::value_error("first_row: is out of range");
    m->reach(end);
    if (g.n) check_row(*m, int64_t(first_row)), check_row(*m, int64_t(end - 1));
    for (size_t i = 0; i < g.n; ++i) m->stamp(first_row + i).store(uint64_t(g.data[i]) * 2);
}
nb::object generations(const Rows& self, size_t first_row, size_t n) {
    auto m = self.memory();
    int64_t* out;
    nb::object result = arrays::make<int64_t>(n, out);
    for (size_t i = 0; i < n; ++i) { check_row(*m, int64_t(first_row + i)); out[i] = int64_t(m->generation(first_row + i)); }
    return result;
}
// Ids below this number times the lanes have been given out; none is ever given twice.
uint64_t segment_counter(const Rows& self) {
    auto m = self.memory();
    uint64_t n = 0;
    for (size_t k = 0; k < m->n_lanes; ++k) n = std::max(n, m->lane(k).next_segment.load());
    return n;
}
void set_segment_counter(const Rows& self, uint64_t n) {
    auto m = self.writable();
    for (size_t k = 0; k < m->n_lanes; ++k) m->lane(k).next_segment.store(n);
}
void freeze(const Rows& self) { self.writable()->writable = false; }
void reserve_rows(const Rows& self, size_t n) { self.writable()->reach(n); }

// For the other files of the core: these rows, for as long as they are open.
nb::capsule share(const Rows& self) {
    return nb::capsule(new std::weak_ptr<Memory>(self.memory()),
                       [](void* p) noexcept { delete static_cast<std::weak_ptr<Memory>*>(p); });
}

// --- counting ---
void reject(const Rows& self, uint64_t n) {
    auto m = self.memory();
    if (m->writable) m->shared().rejected.fetch_add(n);
}
nb::dict counters(const Rows& self) {
    auto m = self.memory();
    uint64_t offered = 0, live = 0, removed = 0, dropped = 0;
    for (size_t k = 0; k < m->n_lanes; ++k) {
        const Lane& w = m->lane(k);
        const Window v = m->window(k);
        offered += v.cursor + w.skip.load();
        live += v.count();
        removed += w.removed.load();
        dropped += w.dropped.load();
    }
    const uint64_t rejected = m->shared().rejected.load(), left = live + removed + dropped;
    nb::dict out;
    out["offered"] = offered + rejected;
    out["live"] = live;
    out["evicted"] = offered > left ? offered - left : 0;
    out["removed"] = removed;
    out["rejected"] = rejected;
    out["dropped"] = dropped;
    return out;
}

}  // namespace

void bind_rows(nb::module_& m) {
    arrays::load_numpy();
    m.attr("HEADER_NBYTES") = kHeaderNbytes;
    m.attr("SHARED_WORDS") = kSharedWords;
    m.attr("LANE_NBYTES") = sizeof(Lane);
    m.attr("FIRST_CHUNK") = kFirstChunk;

    nb::class_<Stream>(m, "Stream")
        .def(nb::init<>())
        .def_rw("key", &Stream::key)
        .def_rw("counter", &Stream::counter);

    nb::class_<Codec>(m, "Codec")
        .def(nb::init<nb::list, nb::object, size_t>(), nb::arg("fields"), nb::arg("plan").none(), nb::arg("row_nbytes"))
        .def_prop_ro("row_nbytes", &Codec::row_nbytes);

    m.def("draw_indices", [](uint64_t key, uint64_t counter, uint64_t bound, size_t n) {
        if (bound == 0 || bound > uint64_t(1) << 63) throw nb::value_error(bound ? "bound: must be at most 2**63" : "bound: must be at least 1, got 0");
        int64_t* out;
        nb::object result = arrays::make<int64_t>(n, out);
        for (size_t i = 0; i < n; ++i) out[i] = int64_t(draw_one(key, counter + i, bound));
        return result;
    }, nb::arg("key"), nb::arg("counter"), nb::arg("bound"), nb::arg("n"));

    nb::class_<Rows> rows(m, "Rows");
    rows.def(nb::init<MappingPtr, size_t, size_t, size_t, bool, bool, bool, int, nb::object, bool, uint32_t>(), nb::arg("header"),
             nb::arg("capacity"), nb::arg("n_lanes"), nb::arg("row_nbytes"), nb::arg("tagged"), nb::arg("writable"),
             nb::arg("is_private"), nb::arg("fd"), nb::arg("sections").none(), nb::arg("is_file") = false,
             nb::arg("n_closed") = 0)
        .def("close", &Rows::close)
        .def_prop_ro("is_closed", &Rows::is_closed)
        .def("memory", [](const Rows& self) { return self.memory(); })
        .def("claim", &claim, nb::arg("lane") = -1)
        .def("held_lane", &held_lane)
        .def("has_open", &has_open, nb::arg("lane"))
        .def("release", &release, nb::arg("lane"))
        .def("owner", &owner, nb::arg("lane"))
        .def("set_window", &set_window, nb::arg("lane"), nb::arg("low"), nb::arg("cursor"))
        .def("set_tags", &set_tags, nb::arg("first_row"), nb::arg("n"), nb::arg("segment"), nb::arg("step"))
        .def("set_open", &set_open, nb::arg("lane"), nb::arg("segment"))
        .def("set_generations", &set_generations, nb::arg("first_row"), nb::arg("generations"))
        .def("generations", &generations, nb::arg("first_row"), nb::arg("n"))
        .def("segment_counter", &segment_counter)
        .def("set_segment_counter", &set_segment_counter, nb::arg("n"))
        .def("freeze", &freeze)
        .def("reserve_rows", &reserve_rows, nb::arg("n"))
        .def("share", &share)
        .def("reject", &reject, nb::arg("n"))
        .def("counters", &counters);
    bind_reads(m, rows);
    bind_writes(m, rows);
}

}  // namespace recollect
