// Bindings of Rows, writing: appends, blocks, changes in place. Stubs are in _native.pyi.
#include <nanobind/stl/optional.h>

#include <cmath>

#include "bind.hpp"
#include "edits.hpp"
#include "lanes_write.hpp"
#include "lowest.hpp"

namespace recollect {
namespace {

const bool* flags_of(nb::object ends, size_t n) {
    if (ends.is_none()) return nullptr;
    auto [flags, n_flags] = arrays::view<bool>(ends, "ends");
    if (n_flags != n) throw nb::value_error("ends: must have one flag per sample");
    return flags;
}

void write_leaves(Memory& m, const Codec& codec, const byte* const* leaves, size_t n, int64_t lane, nb::object ends,
                  bool keep_open, const Patches* patches = nullptr) {
    const Ends e{flags_of(ends, n), keep_open};
    if (n == 0) return;
    const size_t k = lane_for(m, lane);
    Locked lock(m.lock(k));
    Unlocked unlocked(n * m.row_nbytes > kHoldGil);
    Writer(m, k, patches).write(leaves, n, codec, e);
}

// Which samples of a batch of `size`; null for all, in order.
const int64_t* rows_of(nb::object rows, size_t size, size_t n) {
    if (rows.is_none()) return nullptr;
    auto [at, count] = arrays::view<int64_t>(rows, "rows");
    if (count != n) throw nb::value_error("rows: must be one for each lane");
    for (size_t i = 0; i < n; ++i) check_index(at[i], size);
    return at;
}

void write_to_lanes(Memory& m, const Codec& codec, const byte* const* leaves, const int64_t* lanes, size_t n,
                           nb::object ends, const int64_t* rows = nullptr) {
    const bool* flags = flags_of(ends, n);
    for (size_t i = 0; i < n; ++i) check_lane(m, size_t(lanes[i]));
    Unlocked unlocked(n * m.row_nbytes > kHoldGil);
    recollect::write_lanes(m, codec, leaves, lanes, n, flags, rows);
}

bool append(const Rows& self, const Codec& codec, nb::handle sample, int64_t lane) {
    auto m = self.writable(codec);
    Source stack[32];
    std::vector<Source> heap;
    Source* sources = stack;
    if (codec.size() > 32) { heap.resize(codec.size()); sources = heap.data(); }
    if (!codec.take_one(sample.ptr(), sources)) return false;
    const size_t k = lane_for(*m, lane);
    Locked lock(m->lock(k));
    Writer(*m, k).append(sources, codec);
    return true;
}

// Samples of a batch of exact arrays; -1 (nothing done) if they need conversion or a message.
int64_t extend(const Rows& self, const Codec& codec, nb::handle batch, int64_t lane, nb::object ends, bool keep_open) {
    auto m = self.writable(codec);
    std::vector<const byte*> leaves(codec.size());
    npy_intp n = -1;
    if (!codec.take_batch(batch.ptr(), n, leaves.data())) return -1;
    write_leaves(*m, codec, leaves.data(), size_t(std::max<npy_intp>(n, 0)), lane, ends, keep_open);
    return n;
}

// `patches`: (samples, [(field, array)]) or None. Where a sample is named, ascending, those arrays count instead.
Patches patches_of(nb::object patches, const Codec& codec, size_t n) {
    if (patches.is_none()) return {};
    nb::tuple pair = tuple_of(patches, 2, "patches");
    auto [samples, count] = arrays::view<int64_t>(pair[0], "patches");
    for (size_t i = 0; i < count; ++i) {
        check_index(samples[i], n);
        if (i && samples[i] <= samples[i - 1]) throw nb::value_error("patches: samples must be ascending");
    }
    Patches found{samples, count, {}};
    for (nb::handle item : nb::cast<nb::list>(pair[1])) {
        nb::tuple leaf = tuple_of(item, 2, "patches");
        const size_t k = nb::cast<size_t>(leaf[0]);
        const byte* values = codec.take_field(k, nb::object(leaf[1]), npy_intp(n));
        found.leaves.push_back({codec.spans()[k], values});
    }
    return found;
}

void write(const Rows& self, const Codec& codec, nb::list arrays, size_t n, int64_t lane, nb::object ends, bool keep_open,
           nb::object patches) {
    auto m = self.writable(codec);
    std::vector<const byte*> leaves(codec.size());
    codec.take_fields(arrays, npy_intp(n), leaves.data());
    const Patches found = patches_of(patches, codec, n);
    write_leaves(*m, codec, leaves.data(), n, lane, ends, keep_open, &found);
}

// Sample i of a batch of field arrays to lane lanes[i]; `ends` (or None) tells whose segment ends with it.
void write_fields_to_lanes(const Rows& self, const Codec& codec, nb::list arrays, nb::handle lanes, nb::object ends) {
    auto m = self.writable(codec);
    auto [k, n] = arrays::view<int64_t>(lanes, "lanes");
    std::vector<const byte*> leaves(codec.size());
    codec.take_fields(arrays, npy_intp(n), leaves.data());
    write_to_lanes(*m, codec, leaves.data(), k, n, ends);
}

// The same of a nested batch of exact arrays, of its samples `rows` (None: all, in order); false (nothing done) if
// it needs conversion or a message.
bool extend_lanes(const Rows& self, const Codec& codec, nb::handle batch, nb::handle lanes, nb::object ends, nb::object rows) {
    auto m = self.writable(codec);
    auto [k, n] = arrays::view<int64_t>(lanes, "lanes");
    std::vector<const byte*> leaves(codec.size());
    npy_intp size = rows.is_none() ? npy_intp(n) : -1;
    if (!codec.take_batch(batch.ptr(), size, leaves.data())) return false;
    const int64_t* chosen = rows_of(rows, size_t(size), n);
    write_to_lanes(*m, codec, leaves.data(), k, n, ends, chosen);
    return true;
}

// Samples `rows` of a nested batch of exact arrays, to one lane and without segments; false as above.
bool extend_chosen(const Rows& self, const Codec& codec, nb::handle batch, nb::object rows, int64_t lane) {
    auto m = self.writable(codec);
    std::vector<const byte*> leaves(codec.size());
    npy_intp size = -1;
    if (!codec.take_batch(batch.ptr(), size, leaves.data())) return false;
    const size_t n = arrays::view<int64_t>(rows, "rows").n;
    const Chosen chosen(codec, leaves.data(), rows_of(rows, size_t(size), n), n);
    write_leaves(*m, codec, chosen.leaves(), n, lane, nb::none(), false);
    return true;
}

void end_segment(const Rows& self, int64_t lane) {
    auto m = self.writable();
    if (!m->tagged) return;
    const size_t k = lane_for(*m, lane);
    Locked lock(m->lock(k));
    m->lane(k).open_segment.store(0, std::memory_order_release);
}

void overwrite_at(const Rows& self, const Codec& codec, nb::handle index, nb::list arrays) {
    auto m = self.writable(codec);
    auto [at, n] = arrays::view<int64_t>(index, "index");
    std::vector<const byte*> leaves(codec.size());
    codec.take_fields(arrays, npy_intp(n), leaves.data());
    Hold hold(*m);
    std::vector<std::pair<size_t, size_t>> rows;
    for (auto& [k, p] : hold_places(*m, hold, at, n)) rows.emplace_back(k, m->row_of(k, p));
    recollect::overwrite(*m, rows, leaves.data(), codec);
}

void overwrite_rows(const Rows& self, const Codec& codec, nb::handle index, nb::list arrays) {
    auto m = self.writable(codec);
    auto [at, n] = arrays::view<int64_t>(index, "rows");
    std::vector<const byte*> leaves(codec.size());
    codec.take_fields(arrays, npy_intp(n), leaves.data());
    Hold hold(*m);
    std::vector<std::pair<size_t, size_t>> rows;
    for (size_t i = 0; i < n; ++i) {
        check_row(*m, at[i]);
        const size_t k = m->run ? size_t(at[i]) / m->run : 0;
        hold.take(k);
        rows.emplace_back(k, size_t(at[i]));
    }
    recollect::overwrite(*m, rows, leaves.data(), codec);
}

// Samples of a batch of field arrays under evict="lowest", in one change; `tree` is that of the keys by row, `first` the
// order of arrival of the first. How many stayed, each in a row of its own or in another's, and how many were rejected.
nb::tuple extend_lowest(const Rows& self, const Codec& codec, nb::list fields, Tree<Min>& tree, nb::handle keys, int64_t first) {
    auto m = self.writable(codec);
    auto [key, n] = arrays::view<double>(keys, "keys");
    for (size_t i = 0; i < n; ++i)
        if (std::isnan(key[i])) throw nb::value_error("keys: must not be NaN");
    if (!m->tagged || !m->capacity || m->n_lanes != 1 || tree.capacity() < m->capacity)
        throw nb::value_error("tree: must be that of these rows, with tags, of one lane and a capacity");
    std::vector<const byte*> leaves(codec.size());
    codec.take_fields(fields, npy_intp(n), leaves.data());
    m->default_lane();
    std::vector<int64_t> rows(n);
    Hold hold(*m);
    hold.take(0);
    auto fill = [&](byte* row, size_t i) { copy_fields(row, codec, leaves.data(), i); };
    const double* given = key;
    Placed placed;
    {
        Unlocked unlocked(n * m->row_nbytes > kHoldGil);
        placed = place_lowest(*m, tree, given, n, first, rows.data(), fill);
    }
    return nb::make_tuple(placed.fresh + placed.replaced, placed.rejected);
}

void remove(const Rows& self, nb::handle index) {
    auto m = self.writable();
    auto [at, n] = arrays::view<int64_t>(index, "index");
    remove_samples(*m, at, n);
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
