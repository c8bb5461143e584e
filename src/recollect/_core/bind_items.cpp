// Bindings of items.hpp.
#include "items.hpp"

#include "bind.hpp"

namespace recollect {

namespace {

std::vector<Move> moves_of(nb::list given, size_t from_nbytes, size_t to_nbytes, size_t times, const char* what) {
    std::vector<Move> moves;
    for (size_t i = 0; i < nb::len(given); ++i) {
        nb::tuple t = tuple_of(arrays::item(given, i), 3, what);
        const Move move{nb::cast<size_t>(t[0]), nb::cast<size_t>(t[1]), nb::cast<size_t>(t[2])};
        size_t all;
        if (move.from > from_nbytes || move.nbytes > from_nbytes - move.from || move.to > to_nbytes ||
            __builtin_mul_overflow(move.nbytes, times, &all) || all > to_nbytes - move.to)
            throw nb::value_error((std::string(what) + ": one reaches past the end of its row").c_str());
        moves.push_back(move);
    }
    return moves;
}

void make_plan(ItemPlan* self, size_t row_nbytes, nb::list steps, size_t step_nbytes, nb::list fields, size_t field_nbytes,
               size_t length_at, size_t room) {
    if (room && (row_nbytes < sizeof(int32_t) || length_at > row_nbytes - sizeof(int32_t)))
        throw nb::value_error("length_at: reaches past the end of the row");
    auto moves = moves_of(steps, step_nbytes, row_nbytes, room, "steps");
    auto others = moves_of(fields, field_nbytes, row_nbytes, 1, "fields");
    new (self) ItemPlan{row_nbytes, step_nbytes, field_nbytes, length_at, room, std::move(moves), std::move(others)};
}

// The bytes of a contiguous uint8 array (n, nbytes).
arrays::View<const byte> table(nb::handle h, size_t nbytes, const char* what, arrays::Held& held) {
    auto* a = reinterpret_cast<PyArrayObject*>(h.ptr());
    if (!PyArray_Check(h.ptr()) || PyArray_TYPE(a) != NPY_UINT8 || PyArray_NDIM(a) != 2 || !PyArray_IS_C_CONTIGUOUS(a) ||
        size_t(PyArray_DIM(a, 1)) != nbytes)
        throw nb::type_error((std::string(what) + ": must be a contiguous array of packed rows").c_str());
    held.add(h.ptr());
    return {static_cast<const byte*>(PyArray_DATA(a)), size_t(PyArray_DIM(a, 0))};
}

// Items checked against their plan, so that whatever `index` names can be stored.
PackedItems items_of(const ItemPlan& plan, nb::handle steps, nb::handle lengths, nb::handle fields, const int64_t* index,
                     size_t n_index, arrays::Held& held) {
    PackedItems items;
    const auto rows = table(fields, plan.field_nbytes, "fields", held);
    items.fields = rows.data;
    for (size_t i = 0; i < n_index; ++i) check_index(index[i], rows.n);
    if (!plan.room) return items;
    const auto walked = table(steps, plan.step_nbytes, "steps", held);
    const arrays::Values<int32_t> counts(lengths, "lengths");
    if (counts.n != rows.n) throw nb::value_error("lengths: must be one per item");
    items.steps = walked.data;
    items.lengths.assign(counts.data, counts.data + counts.n);
    items.starts.resize(counts.n);
    size_t total = 0;
    for (size_t i = 0; i < counts.n; ++i) {
        if (counts.data[i] < 1) throw nb::value_error("lengths: must be at least 1");
        items.starts[i] = total;
        total += size_t(counts.data[i]);
    }
    if (total != walked.n) throw nb::value_error("lengths: must add up to the steps");
    for (size_t i = 0; i < n_index; ++i)
        if (size_t(counts.data[index[i]]) > plan.room) throw nb::value_error("lengths: one has no room in a row");
    return items;
}

std::shared_ptr<Memory> writable_memory(nb::handle rows, const ItemPlan& plan) {
    auto m = memory_of(rows);
    if (!m->writable) throw Forked("it was opened for reading; load it with read_only=False to change it");
    m->check_fork();
    if (m->row_nbytes != plan.row_nbytes || !m->capacity || m->n_lanes != 1)
        throw nb::value_error("plan: must be made for these rows, of one lane and a capacity");
    return m;
}

nb::object newest(const ItemPlan& plan, nb::handle rows, nb::handle steps, nb::handle lengths, nb::handle fields,
                  nb::handle index) {
    auto m = writable_memory(rows, plan);
    const arrays::Values<int64_t> at(index, "index");
    arrays::Held held;
    const PackedItems items = items_of(plan, steps, lengths, fields, at.data, at.n, held);
    int64_t* out;
    nb::object found = arrays::make<int64_t>(at.n, out);
    const OwnLane own(*m, -1);
    const bool unlocks = at.n * m->row_nbytes > kHoldGil;
    held.keep(unlocks);
    Unlocked unlocked(unlocks);
    place_newest(*m, 0, plan, items, at.data, at.n, out);
    return found;
}

// (row of each, how many took fresh rows, how many took another's, how many were rejected)
nb::tuple lowest(const ItemPlan& plan, nb::handle rows, Tree<Min>& tree, nb::handle steps, nb::handle lengths,
                 nb::handle fields, nb::handle index, nb::handle keys, int64_t first) {
    auto m = writable_memory(rows, plan);
    const arrays::Values<int64_t> at(index, "index");
    const arrays::Values<double> k(keys, "keys");
    if (k.n != at.n) throw nb::value_error("keys: must be one per item");
    for (size_t i = 0; i < k.n; ++i)
        if (std::isnan(k.data[i])) throw nb::value_error("keys: must not be NaN");
    if (!m->tagged || tree.capacity() < m->capacity) throw nb::value_error("tree: must be that of these rows, with tags");
    arrays::Held held;
    const PackedItems items = items_of(plan, steps, lengths, fields, at.data, at.n, held);
    int64_t* out;
    nb::object found = arrays::make<int64_t>(at.n, out);
    Placed placed;
    {
        m->default_lane();
        Hold hold(*m);
        hold.take(0);
        const bool unlocks = at.n * m->row_nbytes > kHoldGil;
        held.keep(unlocks);
        Unlocked unlocked(unlocks);
        auto fill = [&](byte* row, size_t i) { fill_item(row, plan, items, size_t(at.data[i])); };
        placed = place_lowest(*m, tree, k.data, at.n, first, out, fill);
    }
    return nb::make_tuple(found, placed.fresh, placed.replaced, placed.rejected);
}

int64_t mirror(Tree<Min>& tree, nb::handle values, nb::handle rows, nb::handle keys) {
    const arrays::Values<int64_t> at(rows, "rows");
    const arrays::Values<double> k(keys, "keys");
    const auto held = arrays::view<double>(values, "values");
    if (!PyArray_ISWRITEABLE(reinterpret_cast<PyArrayObject*>(values.ptr()))) throw nb::value_error("values: must be writable");
    if (at.n != k.n) throw nb::value_error("rows, keys: must have equal lengths");
    for (size_t i = 0; i < at.n; ++i) check_index(at.data[i], std::min(held.n, tree.capacity()));
    return mirror_keys(tree, held.data, at.data, k.data, at.n);
}

// New rows (n, row_nbytes), from the pool if they are large, and their crc32c.
nb::tuple packed(const Codec& codec, const byte* const* leaves, size_t n, arrays::Held& held) {
    npy_intp dims[2] = {npy_intp(n), npy_intp(codec.row_nbytes())};
    const size_t nbytes = checked_product(n, codec.row_nbytes());
    nb::object rows;
    if (nbytes >= Pool::kSmallest) {
        void* block = pool().take(nbytes);
        nb::object owner = nb::capsule(block, [](void* p) noexcept { pool().give(p); });
        rows = nb::steal(PyArray_SimpleNewFromData(2, dims, NPY_UINT8, block));
        if (!rows.ptr() || PyArray_SetBaseObject(reinterpret_cast<PyArrayObject*>(rows.ptr()), owner.release().ptr()))
            throw nb::python_error();
    } else {
        rows = nb::steal(PyArray_SimpleNew(2, dims, NPY_UINT8));
        if (!rows.ptr()) throw nb::python_error();
    }
    auto* to = static_cast<byte*>(PyArray_DATA(reinterpret_cast<PyArrayObject*>(rows.ptr())));
    uint32_t crc;
    {
        const bool unlocks = nbytes > kHoldGil;
        held.keep(unlocks);
        Unlocked unlocked(unlocks);
        crc = pack_rows(to, n, codec, leaves);
    }
    return nb::make_tuple(rows, crc);
}

// (the smallest, the sum) of lengths; of none (0, 0).
nb::tuple length_bounds(nb::handle lengths) {
    const auto counts = arrays::view<int32_t>(lengths, "lengths");
    int64_t smallest = counts.n ? std::numeric_limits<int32_t>::max() : 0, total = 0;
    for (size_t i = 0; i < counts.n; ++i) {
        smallest = std::min<int64_t>(smallest, counts.data[i]);
        total += counts.data[i];
    }
    return nb::make_tuple(smallest, total);
}

nb::tuple pack_fields(const Codec& codec, nb::list arrays, size_t n) {
    std::vector<const byte*> leaves(codec.size());
    arrays::Held held;
    codec.take_fields(arrays, npy_intp(n), leaves.data(), held);
    return packed(codec, leaves.data(), n, held);
}

nb::object pack_batch(const Codec& codec, nb::handle batch) {
    std::vector<const byte*> leaves(codec.size());
    npy_intp n = -1;
    arrays::Held held;
    if (!codec.take_batch(batch.ptr(), n, leaves.data(), held)) return nb::none();
    return packed(codec, leaves.data(), size_t(std::max<npy_intp>(n, 0)), held);
}

}  // namespace

void bind_items(nb::module_& m) {
    arrays::load_numpy();
    nb::class_<ItemPlan>(m, "ItemPlan")
        .def("__init__", &make_plan, nb::arg("row_nbytes"), nb::arg("steps"), nb::arg("step_nbytes"), nb::arg("fields"),
             nb::arg("field_nbytes"), nb::arg("length_at"), nb::arg("room"))
        .def("place_newest", &newest, nb::arg("rows"), nb::arg("steps").none(), nb::arg("lengths").none(), nb::arg("fields"),
             nb::arg("index"))
        .def("place_lowest", &lowest, nb::arg("rows"), nb::arg("tree"), nb::arg("steps").none(), nb::arg("lengths").none(),
             nb::arg("fields"), nb::arg("index"), nb::arg("keys"), nb::arg("first"));
    m.def("mirror_keys", &mirror, nb::arg("tree"), nb::arg("values"), nb::arg("rows"), nb::arg("keys"));
    m.def("length_bounds", &length_bounds, nb::arg("lengths"));
    m.def("pack_fields", &pack_fields, nb::arg("codec"), nb::arg("arrays"), nb::arg("n"));
    m.def("pack_batch", &pack_batch, nb::arg("codec"), nb::arg("batch").none());
}

}  // namespace recollect
