// Bindings of windows.hpp: reads and draws of frames, runs, and samples by place. Stubs are in _native.pyi.
#include "bind.hpp"
#include "edits.hpp"
#include "windows.hpp"

namespace recollect {

namespace {

using Ints = arrays::Values<int64_t>;

// New arrays for the leaves of n samples.
struct Leaves {
    PerLeaf<nb::object> arrays;
    PerLeaf<byte*> data;

    Leaves(const Codec& codec, size_t n) : arrays(codec.size()), data(codec.size()) { codec.make_arrays(npy_intp(checked_size(n)), arrays, data); }
    nb::object build(const Codec& codec) { return codec.build(arrays, false); }
};

void check_codec(const Memory& m, const Codec& codec) {
    if (codec.row_nbytes() != m.row_nbytes) throw nb::value_error("codec: must be made for these rows");
}

void check_offsets(const Ints& offsets) {
    for (size_t i = 1; i < offsets.n; ++i)
        if (offsets.data[i] <= offsets.data[i - 1]) throw nb::value_error("offsets: must increase strictly");
    if (std::find(offsets.data, offsets.data + offsets.n, 0) == offsets.data + offsets.n)
        throw nb::value_error("offsets: must have 0, the anchor");
}

// Location of samples as the arrays index, row, generation, segment, step.
struct Located {
    int64_t* field[5];
    nb::object arrays[5];

    explicit Located(size_t n) { for (size_t k = 0; k < 5; ++k) arrays[k] = arrays::make<int64_t>(n, field[k]); }
    void set(size_t i, const Memory& m, const Snapshot& s, const Runs& runs, Place a) {
        const size_t r = runs.row(a);
        const int64_t values[5] = {int64_t(index_of_place(s, a)), int64_t(r), int64_t(m.generation(r)), runs.segment(a), runs.step(a)};
        for (size_t k = 0; k < 5; ++k) field[k][i] = values[k];
    }
    nb::tuple tuple() const { return nb::make_tuple(arrays[0], arrays[1], arrays[2], arrays[3], arrays[4]); }
};

// The frames round the anchors at some indices, or with generations at some rows: (leaves, valid, segment, step) of
// one moment. None if a (row, generation) is gone.
nb::object read_frames(nb::handle rows, const Codec& codec, nb::handle at, nb::object generations, nb::handle offsets_,
                       bool tracked, int64_t counted) {
    auto m = memory_of(rows);
    check_codec(*m, codec);
    const Ints anchors(at, "index"), offsets(offsets_, "offsets");
    check_offsets(offsets);
    const bool located = !generations.is_none();
    std::optional<Ints> generation;
    if (located) generation.emplace(generations, "generation");
    if (located && generation->n != anchors.n) throw nb::value_error("row, generation: must have equal lengths");
    bool* valid;
    int64_t *segment, *step;
    nb::object mask = arrays::make<bool>({npy_intp(anchors.n), npy_intp(offsets.n)}, valid);
    nb::object segments = arrays::make<int64_t>(anchors.n, segment), steps = arrays::make<int64_t>(anchors.n, step);
    Leaves leaves(codec, checked_product(anchors.n, offsets.n));
    bool gone = false;
    {
        Unlocked unlocked(anchors.n * offsets.n * m->row_nbytes > kHoldGil);
        Reader reader(*m);
        reader.run([&] {
            const Snapshot& s = reader.snapshot();
            check_count(s, counted);
            const Runs runs(*m, s, tracked);
            Frames frames(*m, runs, anchors.n, offsets.data, offsets.n);
            std::vector<Place> places(anchors.n);
            for (size_t j = 0; j < anchors.n; ++j) {
                Place& a = places[j];
                if (located) {
                    const auto found = place_of_row(*m, s, anchors.data[j], generation->data[j]);
                    if (!found) return gone = true;
                    a = *found;
                } else {
                    check_index(anchors.data[j], s.total());
                    std::tie(a.lane, a.position) = s.place(uint64_t(anchors.data[j]));
                }
                runs.fetch(a, frames.back(), frames.ahead());
            }
            moment();
            for (size_t j = 0; j < anchors.n; ++j) {
                frames.plan(j, places[j], valid);
                segment[j] = runs.segment(places[j]);
                step[j] = runs.step(places[j]);
            }
            frames.copy(0, anchors.n, codec, leaves.data.data());
            moment();
            return frames.all_whole(s);
        });
    }
    if (gone) return nb::none();
    return nb::make_tuple(leaves.build(codec), mask, segments, steps);
}

// Drawn anchors and their frames: (leaves, valid, segment, step), or None when there is nothing to draw from.
// `length` 0 draws samples, else starts of windows. Segment and step are None unless `labelled`. Without a codec: only
// the anchors' location.
nb::object draw_frames(nb::handle rows, const Codec* codec, uint64_t key, uint64_t counter, size_t n, nb::handle offsets_,
                       bool tracked, uint64_t length, bool pad, bool labelled) {
    auto m = memory_of(rows);
    const Ints offsets(offsets_, "offsets");
    check_offsets(offsets);
    bool* valid;
    int64_t *segment = nullptr, *step = nullptr;
    nb::object mask = arrays::make<bool>({npy_intp(n), npy_intp(offsets.n)}, valid), segments, steps;
    std::optional<Leaves> leaves;
    std::optional<Located> located;
    if (codec) {
        check_codec(*m, *codec);
        leaves.emplace(*codec, checked_product(n, offsets.n));
        if (labelled) segments = arrays::make<int64_t>(n, segment), steps = arrays::make<int64_t>(n, step);
        else segments = steps = nb::none();
    } else {
        located.emplace(n);
    }
    bool empty = false, looked_again = false;
    {
        Unlocked unlocked(codec && n * offsets.n * m->row_nbytes > kHoldGil);
        Reader reader(*m);
        reader.run([&] {
            Snapshot& s = reader.snapshot();
            if ((empty = s.total() == 0)) return true;
            const Runs runs(*m, s, tracked);
            Frames frames(*m, runs, n, offsets.data, offsets.n);
            Chooser chooser(*m, s, runs, {length, pad}, key, counter);
            FrameDraw draw(s, chooser, frames, valid, labelled);
            if (!draw.run(codec, codec ? leaves->data.data() : nullptr)) return false;
            if (draw.is_empty() && !s.is_untouched() && !looked_again) return !(looked_again = true);  // one may have moved
            if ((empty = draw.is_empty())) return true;
            moment();
            for (size_t j = 0; j < n; ++j) {
                if (located) located->set(j, *m, s, runs, frames.anchor(j));
                if (segment) segment[j] = runs.segment(frames.anchor(j)), step[j] = runs.step(frames.anchor(j));
            }
            moment();
            return frames.all_whole(s);
        });
    }
    if (empty) return nb::none();
    if (located) return located->tuple();
    return nb::make_tuple(leaves->build(*codec), mask, segments, steps);
}

// Where samples are, and the steps of the first sample of their run and of the one behind its last.
nb::tuple runs_at(nb::handle rows, nb::handle index, bool tracked, int64_t counted) {
    auto m = memory_of(rows);
    const Ints at(index, "index");
    Located located(at.n);
    int64_t *first, *end;
    nb::object firsts = arrays::make<int64_t>(at.n, first), ends = arrays::make<int64_t>(at.n, end);
    Reader reader(*m);
    reader.run([&] {
        const Snapshot& s = reader.snapshot();
        check_count(s, counted);
        const Runs runs(*m, s, tracked);
        std::vector<Place> places(at.n);
        for (size_t i = 0; i < at.n; ++i) {
            check_index(at.data[i], s.total());
            std::tie(places[i].lane, places[i].position) = s.place(uint64_t(at.data[i]));
            located.set(i, *m, s, runs, places[i]);
            first[i] = int64_t(runs.begin(places[i]));
            end[i] = int64_t(runs.end(places[i]));
            moment();
        }
        if (!s.same_epochs()) return false;
        for (size_t i = 0; i < at.n; ++i) {
            const uint64_t low = m->low_of(m->lane(places[i].lane)), p = places[i].position;
            if (p < low) return false;
            const int64_t step = located.field[4][i];
            first[i] = int64_t(uint64_t(step) - (p - std::max(low, uint64_t(first[i]))));  // its head may be gone by now
            end[i] = int64_t(uint64_t(step) + (uint64_t(end[i]) - p));
        }
        return true;
    });
    nb::tuple t = located.tuple();
    return nb::make_tuple(t[0], t[1], t[2], t[3], t[4], firsts, ends);
}

// Where every window begins now, in index order.
nb::tuple window_starts(nb::handle rows, bool tracked, uint64_t length, bool pad) {
    auto m = memory_of(rows);
    std::optional<Located> located;
    std::vector<Place> places;
    Reader reader(*m);
    reader.run([&] {
        Snapshot& s = reader.snapshot();
        const Runs runs(*m, s, tracked);
        const Catalogue all(*m, s, runs, {length, pad});
        places.clear();
        for (const auto& e : all.entries())
            for (uint64_t i = 0; i < e.count; ++i) places.push_back({e.first.lane, e.first.position + i});
        located.emplace(places.size());
        moment();
        for (size_t i = 0; i < places.size(); ++i) located->set(i, *m, s, runs, places[i]);
        moment();
        if (!s.same_epochs()) return false;
        for (size_t i = 0; i < places.size(); ++i)  // a generation that no row has: gone when its turn comes
            if (places[i].position < m->low_of(m->lane(places[i].lane))) located->field[2][i] = -1;
        return true;
    });
    return located->tuple();
}

// Samples by (row, generation), or None if any of them is gone.
nb::object read_located(nb::handle rows, const Codec& codec, nb::handle at, nb::handle generations) {
    auto m = memory_of(rows);
    check_codec(*m, codec);
    const Ints row(at, "row"), generation(generations, "generation");
    if (row.n != generation.n) throw nb::value_error("row, generation: must have equal lengths");
    Leaves leaves(codec, row.n);
    bool gone = false;
    {
        Unlocked unlocked(row.n * m->row_nbytes > kHoldGil);
        Reader reader(*m);
        std::vector<uint64_t> index(row.n);
        reader.run([&] {
            const Snapshot& s = reader.snapshot();
            for (size_t i = 0; i < row.n; ++i) {
                const auto a = place_of_row(*m, s, row.data[i], generation.data[i]);
                if (!a) return gone = true;
                index[i] = index_of_place(s, *a);
                moment();
            }
            auto at_index = [&](size_t i) { return index[i]; };
            gather(*m, s, row.n, at_index, codec, leaves.data.data());
            return all_whole(s, row.n, at_index);
        });
    }
    return gone ? nb::none() : leaves.build(codec);
}

}  // namespace

void bind_windows(nb::module_& m) {
    arrays::load_numpy();
    m.attr("WINDOW_TRIES") = Chooser::kTries;
    m.def("read_frames", &read_frames, nb::arg("rows"), nb::arg("codec"), nb::arg("at"), nb::arg("generation").none(),
          nb::arg("offsets"), nb::arg("tracked"), nb::arg("counted") = -1);
    m.def("draw_frames", &draw_frames, nb::arg("rows"), nb::arg("codec").none(), nb::arg("key"), nb::arg("counter"),
          nb::arg("n"), nb::arg("offsets"), nb::arg("tracked"), nb::arg("length") = 0, nb::arg("pad") = false,
          nb::arg("labelled") = true);
    m.def("runs_at", &runs_at, nb::arg("rows"), nb::arg("index"), nb::arg("tracked"), nb::arg("counted") = -1);
    m.def("window_starts", &window_starts, nb::arg("rows"), nb::arg("tracked"), nb::arg("length"), nb::arg("pad"));
    m.def("read_located", &read_located, nb::arg("rows"), nb::arg("codec"), nb::arg("row"), nb::arg("generation"));
}

}  // namespace recollect
