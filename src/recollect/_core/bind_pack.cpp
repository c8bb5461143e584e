// Bindings of packing. The Python side is recollect.ipc.replay_pipelines; the stubs are in _native.pyi.
#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>

#include "pack.hpp"

namespace recollect {
namespace {

using MemoryPtr = std::shared_ptr<Memory>;

Taken take(MemoryPtr m, uint64_t headroom) {
    Taken taken(m->n_lanes);
    Reader reader(*m);
    reader.run([&] { return taken.from(*m, reader.snapshot(), headroom); });
    return taken;
}

// The address is that of n rows in a mapping that the caller keeps; how many were drawn again.
uint64_t pack_into(MemoryPtr m, Taken& taken, uint64_t headroom, const Codec& codec, uint64_t seed, size_t n,
                   std::shared_ptr<Mapping> to, size_t offset) {
    size_t nbytes;
    if (taken.windows.size() != m->n_lanes || codec.size() != 1 || codec.row_nbytes() != m->row_nbytes)
        throw nb::value_error("pack: snapshot and codec must be of these rows");
    if (!to->writable() || __builtin_mul_overflow(n, m->row_nbytes, &nbytes) || offset > to->nbytes() || nbytes > to->nbytes() - offset)
        throw nb::value_error("pack: the slot must lie in a writable mapping");
    Unlocked unlocked(nbytes > kHoldGil);
    return pack(*m, taken, headroom, mix(seed), n, codec, to->base() + offset);  // the stream IndexStream(seed)
}

int wait(MemoryPtr m, uint64_t floor, double timeout_s, std::shared_ptr<Mapping> stop, size_t stop_at) {
    if (stop_at % 4 || stop_at > stop->nbytes() - 4) throw nb::index_error("word: offset is off the mapping");
    if (!m->can_repair) throw nb::value_error("wait: the rows must be mapped for writing");
    const auto* word = reinterpret_cast<const std::atomic<uint32_t>*>(stop->base() + stop_at);
    if (rows_added(*m) >= floor) return int(Wait::kReached);
    nb::gil_scoped_release unlocked;
    return int(wait_added(*m, floor, timeout_s, word));
}

}  // namespace

void bind_pack(nb::module_& m) {
    nb::class_<Memory>(m, "RowMemory");
    nb::class_<Taken>(m, "PackSnapshot")
        .def_ro("ptr", &Taken::added)
        .def_ro("size", &Taken::total)
        .def_prop_ro("windows", [](const Taken& t) {
            nb::list out;
            for (const Window& w : t.windows) out.append(nb::make_tuple(w.low, w.cursor));
            return out;
        });
    m.def("take_snapshot", &take, nb::arg("memory"), nb::arg("headroom") = 0);
    m.def("pack", &pack_into, nb::arg("memory"), nb::arg("snapshot"), nb::arg("headroom"), nb::arg("codec"),
          nb::arg("seed"), nb::arg("n"), nb::arg("to"), nb::arg("offset"));
    m.def("rows_added", [](MemoryPtr memory) { return rows_added(*memory); }, nb::arg("memory"));
    m.def("wait_added", &wait, nb::arg("memory"), nb::arg("floor"), nb::arg("timeout_s"), nb::arg("stop"), nb::arg("stop_at"));
    m.def("writers_gone", [](MemoryPtr memory) { return writers_gone(*memory); }, nb::arg("memory"));
    m.def("wake_waiters", [](MemoryPtr memory) { memory->wake_waiters(); }, nb::arg("memory"));
}

}  // namespace recollect
