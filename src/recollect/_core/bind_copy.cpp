// Whole arrays copied to others without the GIL, on several threads when they are large.
#include <nanobind/nanobind.h>

#include <vector>

#include "arrays.hpp"
#include "copy.hpp"
#include "gil.hpp"
#include "parallel.hpp"

namespace nb = nanobind;

namespace recollect {
namespace {

constexpr size_t kPiece = size_t(1) << 18;

struct Piece { byte* to; const byte* from; size_t nbytes; };

void copy_arrays(nb::list targets, nb::list sources) {
    if (nb::len(targets) != nb::len(sources)) throw nb::value_error("targets: must be as many as the sources");
    std::vector<std::unique_ptr<arrays::Buffer>> held;
    std::vector<Piece> pieces;
    size_t total = 0;
    arrays::Held in_place;
    for (size_t i = 0; i < nb::len(targets); ++i) {
        const nb::object target = arrays::item(targets, i), source = arrays::item(sources, i);
        auto to = std::make_unique<arrays::Buffer>(target.ptr(), PyBUF_WRITABLE | PyBUF_C_CONTIGUOUS);
        in_place.add_if_array(target.ptr());
        auto from = std::make_unique<arrays::Buffer>(source.ptr(), PyBUF_C_CONTIGUOUS);
        in_place.add_if_array(source.ptr());
        if (to->view.len != from->view.len) throw nb::value_error("targets: must have the bytes of their sources");
        const size_t n = size_t(to->view.len);
        for (size_t at = 0; at < n; at += kPiece)
            pieces.push_back({static_cast<byte*>(to->view.buf) + at, static_cast<const byte*>(from->view.buf) + at, std::min(kPiece, n - at)});
        total += n;
        held.push_back(std::move(to));
        held.push_back(std::move(from));
    }
    in_place.keep(true);
    nb::gil_scoped_release unlocked;
    in_parallel(pieces.size(), total, [&](size_t begin, size_t end) {
        for (size_t i = begin; i < end; ++i) copy_bytes(pieces[i].to, pieces[i].from, pieces[i].nbytes);
    });
}

}  // namespace

void bind_copy(nb::module_& m) {
    arrays::load_numpy();
    m.def("copy_arrays", &copy_arrays, nb::arg("targets"), nb::arg("sources"));
}

}  // namespace recollect
