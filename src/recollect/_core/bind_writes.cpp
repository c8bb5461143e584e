// Bindings of Rows, writing: appends, blocks, changes in place. Stubs are in _native.pyi.
#include <nanobind/stl/optional.h>

#include <cmath>

#include "bind.hpp"
#include "edits.hpp"
#include "lanes_write.hpp"
#include "lowest.hpp"

namespace recollect {
namespace {

using Ints = arrays::Values<int64_t>;

// One flag per sample, or none at all.
struct Flags {
    Flags(nb::object ends, size_t n) {
        if (ends.is_none()) return;
        given.emplace(ends, "ends");
        if (given->n != n) throw nb::value_error("ends: must have one flag per sample");
    }
    const bool* data() const { return given ? given->data : nullptr; }
    std::optional<arrays::Values<bool>> given;
};

void write_leaves(Memory& m, const Codec& codec, const byte* const* leaves, arrays::Held& held, size_t n, int64_t lane,
                  nb::object ends, bool keep_open, const Patches* patches = nullptr) {
    const Flags flags(ends, n);
    if (n == 0) return;
    const OwnLane own(m, checked_lane(m, lane));
    const bool unlocks = n * m.row_nbytes > kHoldGil;
    held.keep(unlocks);
    Unlocked unlocked(unlocks);
    Writer(m, own.k, patches).write(leaves, n, codec, {flags.data(), keep_open});
}

// Which samples of a batch of `size`.
void check_rows(const Ints& rows, size_t size, size_t n) {
    if (rows.n != n) throw nb::value_error("rows: must be one for each lane");
    for (size_t i = 0; i < n; ++i) check_index(rows.data[i], size);
}

void write_to_lanes(Memory& m, const Codec& codec, const byte* const* leaves, arrays::Held& held, const Ints& lanes,
                    nb::object ends, const int64_t* rows = nullptr) {
    const Flags flags(ends, lanes.n);
    for (size_t i = 0; i < lanes.n; ++i) check_lane(m, size_t(lanes.data[i]));
    const bool unlocks = lanes.n * m.row_nbytes > kHoldGil;
    held.keep(unlocks);
    Unlocked unlocked(unlocks);
    recollect::write_lanes(m, codec, leaves, lanes.data, lanes.n, flags.data(), rows, [&] { if (!unlocks) held.keep(false); });
}

bool append(const Rows& self, const Codec& codec, nb::handle sample, int64_t lane) {
    auto m = self.writable(codec);
    Source stack[32];
    std::vector<Source> heap;
    Source* sources = stack;
    if (codec.size() > 32) { heap.resize(codec.size()); sources = heap.data(); }
    arrays::Held held;
    if (!codec.take_one(sample.ptr(), sources, held)) return false;
    const OwnLane own(*m, checked_lane(*m, lane));
    held.keep(false);
    Writer(*m, own.k).append(sources, codec);
    return true;
}

// Samples of a batch of exact arrays; -1 (nothing done) if they need conversion or a message.
int64_t extend(const Rows& self, const Codec& codec, nb::handle batch, int64_t lane, nb::object ends, bool keep_open) {
    auto m = self.writable(codec);
    std::vector<const byte*> leaves(codec.size());
    npy_intp n = -1;
    arrays::Held held;
    if (!codec.take_batch(batch.ptr(), n, leaves.data(), held)) return -1;
    write_leaves(*m, codec, leaves.data(), held, size_t(std::max<npy_intp>(n, 0)), lane, ends, keep_open);
    return n;
}

// `patches`: (samples, [(field, array)]) or None. Where a sample is named, ascending, those arrays count instead.
void take_patches(nb::object patches, const Codec& codec, size_t n, arrays::Held& held, std::optional<Ints>& samples, Patches& found) {
    if (patches.is_none()) return;
    nb::tuple pair = tuple_of(patches, 2, "patches");
    samples.emplace(pair[0], "patches");
    for (size_t i = 0; i < samples->n; ++i) {
        check_index(samples->data[i], n);
        if (i && samples->data[i] <= samples->data[i - 1]) throw nb::value_error("patches: samples must be ascending");
    }
    found.samples = samples->data, found.n = samples->n;
    const nb::list leaves = nb::cast<nb::list>(pair[1]);
    for (size_t i = 0; i < nb::len(leaves); ++i) {
        nb::tuple leaf = tuple_of(arrays::item(leaves, i), 2, "patches");
        const size_t k = nb::cast<size_t>(leaf[0]);
        const byte* values = codec.take_field(k, nb::object(leaf[1]), npy_intp(n), held);
        found.leaves.push_back({codec.spans()[k], values});
    }
}

void write(const Rows& self, const Codec& codec, nb::list arrays, size_t n, int64_t lane, nb::object ends, bool keep_open,
           nb::object patches) {
    auto m = self.writable(codec);
    std::vector<const byte*> leaves(codec.size());
    arrays::Held held;
    codec.take_fields(arrays, npy_intp(n), leaves.data(), held);
    std::optional<Ints> samples;
    Patches found;
    take_patches(patches, codec, n, held, samples, found);
    write_leaves(*m, codec, leaves.data(), held, n, lane, ends, keep_open, &found);
}

// Sample i of a batch of field arrays to lane lanes[i]; `ends` (or None) tells whose segment ends with it.
void write_fields_to_lanes(const Rows& self, const Codec& codec, nb::list arrays, nb::handle lanes, nb::object ends) {
    auto m = self.writable(codec);
    const Ints k(lanes, "lanes");
    std::vector<const byte*> leaves(codec.size());
    arrays::Held held;
    codec.take_fields(arrays, npy_intp(k.n), leaves.data(), held);
    write_to_lanes(*m, codec, leaves.data(), held, k, ends);
}

// The same of a nested batch of exact arrays, of its samples `rows` (None: all, in order); false (nothing done) if
// it needs conversion or a message.
bool extend_lanes(const Rows& self, const Codec& codec, nb::handle batch, nb::handle lanes, nb::object ends, nb::object rows) {
    auto m = self.writable(codec);
    const Ints k(lanes, "lanes");
    std::vector<const byte*> leaves(codec.size());
    npy_intp size = rows.is_none() ? npy_intp(k.n) : -1;
    arrays::Held held;
    if (!codec.take_batch(batch.ptr(), size, leaves.data(), held)) return false;
    std::optional<Ints> chosen;
    if (!rows.is_none()) chosen.emplace(rows, "rows"), check_rows(*chosen, size_t(std::max<npy_intp>(size, 0)), k.n);
    write_to_lanes(*m, codec, leaves.data(), held, k, ends, chosen ? chosen->data : nullptr);
    return true;
}

// Samples `rows` of a nested batch of exact arrays, to one lane and without segments; false as above.
bool extend_chosen(const Rows& self, const Codec& codec, nb::handle batch, nb::object rows, int64_t lane) {
    auto m = self.writable(codec);
    std::vector<const byte*> leaves(codec.size());
    npy_intp size = -1;
    arrays::Held held;
    if (!codec.take_batch(batch.ptr(), size, leaves.data(), held)) return false;
    const Ints at(rows, "rows");
    check_rows(at, size_t(std::max<npy_intp>(size, 0)), at.n);
    held.keep(false);
    const Chosen chosen(codec, leaves.data(), at.data, at.n);
    arrays::Held none;  // they are copied
    write_leaves(*m, codec, chosen.leaves(), none, at.n, lane, nb::none(), false);
    return true;
}

void end_segment(const Rows& self, int64_t lane) {
    auto m = self.writable();
    if (!m->tagged) return;
    const OwnLane own(*m, checked_lane(*m, lane));
    m->lane(own.k).open_segment.store(0, std::memory_order_release);
}

void overwrite_at(const Rows& self, const Codec& codec, nb::handle index, nb::list arrays) {
    auto m = self.writable(codec);
    const Ints at(index, "index");
    std::vector<const byte*> leaves(codec.size());
    arrays::Held held;
    codec.take_fields(arrays, npy_intp(at.n), leaves.data(), held);
    Hold hold(*m);
    std::vector<std::pair<size_t, size_t>> rows;
    for (auto& [k, p] : hold_places(*m, hold, at.data, at.n)) rows.emplace_back(k, m->row_of(k, p));
    held.keep(false);
    recollect::overwrite(*m, rows, leaves.data(), codec);
}

void overwrite_rows(const Rows& self, const Codec& codec, nb::handle index, nb::list arrays) {
    auto m = self.writable(codec);
    const Ints at(index, "rows");
    std::vector<const byte*> leaves(codec.size());
    arrays::Held held;
    codec.take_fields(arrays, npy_intp(at.n), leaves.data(), held);
    Hold hold(*m);
    std::vector<std::pair<size_t, size_t>> rows;
    for (size_t i = 0; i < at.n; ++i) {
        check_row(*m, at.data[i]);
        const size_t k = m->run ? size_t(at.data[i]) / m->run : 0;
        hold.take(k);
        rows.emplace_back(k, size_t(at.data[i]));
    }
    held.keep(false);
    recollect::overwrite(*m, rows, leaves.data(), codec);
}

// Samples of a batch of field arrays under evict="lowest", in one change; `tree` is that of the keys by row, `first` the
// order of arrival of the first. How many stayed, each in a row of its own or in another's, and how many were rejected.
nb::tuple extend_lowest(const Rows& self, const Codec& codec, nb::list fields, Tree<Min>& tree, nb::handle keys, int64_t first) {
    auto m = self.writable(codec);
    const arrays::Values<double> key(keys, "keys");
    const size_t n = key.n;
    for (size_t i = 0; i < n; ++i)
        if (std::isnan(key.data[i])) throw nb::value_error("keys: must not be NaN");
    if (!m->tagged || !m->capacity || m->n_lanes != 1 || tree.capacity() < m->capacity)
        throw nb::value_error("tree: must be that of these rows, with tags, of one lane and a capacity");
    std::vector<const byte*> leaves(codec.size());
    arrays::Held held;
    codec.take_fields(fields, npy_intp(n), leaves.data(), held);
    m->default_lane();
    std::vector<int64_t> rows(n);
    Hold hold(*m);
    hold.take(0);
    auto fill = [&](byte* row, size_t i) { copy_fields(row, codec, leaves.data(), i); };
    Placed placed;
    {
        const bool unlocks = n * m->row_nbytes > kHoldGil;
        held.keep(unlocks);
        Unlocked unlocked(unlocks);
        placed = place_lowest(*m, tree, key.data, n, first, rows.data(), fill);
    }
    return nb::make_tuple(placed.fresh + placed.replaced, placed.rejected);
}

void remove(const Rows& self, nb::handle index) {
    auto m = self.writable();
    const Ints at(index, "index");
    if (at.n >= size_t(1) << 31) throw nb::value_error("index: must be fewer than 2**31 at a time");  // see compact()
    remove_samples(*m, at.data, at.n);
}

void clear(const Rows& self) { auto m = self.writable(); clear_all(*m); }

// For tests: write past the caches from these sizes on, whoever made the processor; None as always.
void stream_from(std::optional<size_t> block_nbytes, std::optional<size_t> memory_nbytes) {
    const Streaming usual;
    streaming().block = block_nbytes.value_or(usual.block);
    streaming().memory = memory_nbytes.value_or(usual.memory);
}

}  // namespace

void bind_writes(nb::module_& m, nb::class_<Rows>& rows) {
    arrays::load_numpy();
    m.def("stream_from", &stream_from, nb::arg("block_nbytes").none(), nb::arg("memory_nbytes").none());
    rows
        .def("append", &append, nb::arg("codec"), nb::arg("sample").none(), nb::arg("lane") = -1)
        .def("extend", &extend, nb::arg("codec"), nb::arg("batch").none(), nb::arg("lane") = -1, nb::arg("ends") = nb::none(),
             nb::arg("keep_open") = false)
        .def("write", &write, nb::arg("codec"), nb::arg("arrays"), nb::arg("n"), nb::arg("lane") = -1,
             nb::arg("ends") = nb::none(), nb::arg("keep_open") = false, nb::arg("patches") = nb::none())
        .def("write_lanes", &write_fields_to_lanes, nb::arg("codec"), nb::arg("arrays"), nb::arg("lanes"), nb::arg("ends") = nb::none())
        .def("extend_lanes", &extend_lanes, nb::arg("codec"), nb::arg("batch").none(), nb::arg("lanes"),
             nb::arg("ends") = nb::none(), nb::arg("rows") = nb::none())
        .def("extend_chosen", &extend_chosen, nb::arg("codec"), nb::arg("batch").none(), nb::arg("rows"), nb::arg("lane") = -1)
        .def("end_segment", &end_segment, nb::arg("lane") = -1)
        .def("overwrite", &overwrite_at, nb::arg("codec"), nb::arg("index"), nb::arg("arrays"))
        .def("overwrite_rows", &overwrite_rows, nb::arg("codec"), nb::arg("rows"), nb::arg("arrays"))
        .def("extend_lowest", &extend_lowest, nb::arg("codec"), nb::arg("arrays"), nb::arg("tree"), nb::arg("keys"), nb::arg("first"))
        .def("remove", &remove, nb::arg("index"))
        .def("clear", &clear);
}

}  // namespace recollect
