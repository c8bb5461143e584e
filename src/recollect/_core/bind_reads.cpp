// Bindings of Rows, reading: samples, draws, places, segments. Stubs are in _native.pyi.
#include "turns.hpp"
#include "bind.hpp"
#include "edits.hpp"
#include "recycle.hpp"
#include "windows.hpp"

namespace recollect {
namespace {

void prepare(const Codec& codec, npy_intp n, nb::object& out, PerLeaf<nb::object>& arrays,
                    PerLeaf<byte*>& leaves, arrays::Held& held) {
    if (out.is_none()) return codec.make_arrays(n, arrays, leaves);
    npy_intp rows = n;
    if (n < 0 || !codec.take_batch(out.ptr(), rows, const_cast<const byte**>(leaves.data()), held, true))
        throw nb::value_error("out: must have the batch's structure, writable contiguous arrays of the exact shapes and dtypes");
}

// The open segment of lane k; that of a dead writer has ended at its last committed row.
uint64_t live_segment(const Memory& m, size_t k) {
    const uint64_t open = m.lane(k).open_segment.load();
    return open && m.life(m.lane(k).owner.load()) != Life::kDead ? open : 0;
}

bool copy_row(const Memory& m, size_t r, size_t i, const Codec& codec, byte* const* leaves) {
    const uint64_t before = m.stamp(r).load(std::memory_order_acquire);
    if (before & 1) return false;
    copy_sample(m, r, i, codec, leaves);
    std::atomic_thread_fence(std::memory_order_acquire);
    return m.stamp(r).load(std::memory_order_relaxed) == before;
}

size_t count(const Rows& self) {
    auto m = self.memory();
    size_t n = 0;
    Reader reader(*m);  // not the windows as they are: half way through a change they add up to nothing true
    reader.run([&] { n = reader.snapshot().total(); return true; });
    return n;
}

// (low, cursor, epoch) of each lane at one moment.
nb::list windows(const Rows& self) {
    auto m = self.memory();
    nb::list out;
    Reader reader(*m);
    reader.run([] { return true; });
    for (size_t k = 0; k < m->n_lanes; ++k) {
        const Window& v = reader.snapshot()[k];
        out.append(nb::make_tuple(v.low, v.cursor, v.epoch));
    }
    return out;
}

// Samples at non-negative indices. `out`: a batch of fitting arrays to fill, or None for new ones.
// `counted` (unless < 0): how many samples there were when the index was made of a slice or negative numbers;
// another number at the moment of the read is an IndexError, and the caller counts again.
nb::object read(const Rows& self, const Codec& codec, nb::handle index, bool single, nb::object out, int64_t counted) {
    auto m = self.memory(codec);
    const arrays::Values<int64_t> places(index, "index");
    const size_t n = places.n;
    if (single && n != 1) throw nb::value_error("index: must be one for a single sample");
    arrays::Held held;
    PerLeaf<nb::object> arrays(codec.size());
    PerLeaf<byte*> leaves(codec.size());
    prepare(codec, single ? -1 : npy_intp(n), out, arrays, leaves, held);
    {
        const bool unlocks = n * m->row_nbytes > kHoldGil;
        if (unlocks) held.keep(true);
        Unlocked unlocked(unlocks);
        Reader reader(*m);
        reader.run([&] {
            if (!unlocks) held.keep(false);  // each time: the wait for a change may have let other threads run
            const Snapshot& s = reader.snapshot();
            check_count(s, counted);
            for (size_t i = 0; i < n; ++i) check_index(places.data[i], s.total());
            auto index = [places = places.data](size_t i) { return uint64_t(places[i]); };
            gather(*m, s, n, index, codec, leaves.data());
            return all_whole(s, n, index);
        });
    }
    return out.is_none() ? codec.build(arrays, single) : out;
}

// The next n draws of a stream, uniform with replacement, into leaves; false when there is nothing to draw from.
bool draw_into(Memory& m, const Codec& codec, Stream& stream, size_t n, PerLeaf<byte*>& leaves, arrays::Held* held = nullptr) {
    const auto [key, counter] = stream;  // another thread may set it meanwhile
    bool empty = false;
    {
        const bool unlocks = n * m.row_nbytes > kHoldGil;
        if (held && unlocks) held->keep(true);
        Unlocked unlocked(unlocks);
        Reader reader(m);
        reader.run([&, key = key, counter = counter] {
            if (held && !unlocks) held->keep(false);
            empty = reader.snapshot().total() == 0;
            return empty || Draw(m, reader.snapshot(), key, counter, counter + n, n).run(codec, leaves.data());
        });
    }
    if (!empty) stream.counter += n;
    return !empty;
}

// The same as a batch, or None.
nb::object draw(const Rows& self, const Codec& codec, Stream& stream, size_t n, nb::object out) {
    auto m = self.memory(codec);
    PerLeaf<nb::object> arrays(codec.size());
    PerLeaf<byte*> leaves(codec.size());
    arrays::Held held;
    prepare(codec, npy_intp(checked_size(n)), out, arrays, leaves, held);
    nb::object batch = out.is_none() ? codec.build(arrays, false) : out;
    return draw_into(*m, codec, stream, n, leaves, &held) ? batch : nb::none();
}

// What a sampler of plain rows needs for a batch, bound once: a draw is one call.
class Drawer {
  public:
    Drawer(nb::object rows, nb::object codec, nb::object turn)
        : rows_(rows), codec_(codec), turn_(turn), of_(nb::cast<const Rows&>(rows)), by_(nb::cast<const Codec&>(codec)),
          at_(nb::cast<Turn&>(turn)), recycled_(by_) {}

    // The next batch; None if another thread has the turn or there is nothing to draw from.
    nb::object next(Stream& stream, size_t n) {
        if (at_.taken) return nb::none();
        at_.taken = true;
        at_.thread = PyThread_get_thread_ident();
        struct Leave { Turn& turn; ~Leave() { turn.leave(); } } leave{at_};
        auto m = of_.memory(by_);
        PerLeaf<byte*> leaves(by_.size());
        nb::object batch = recycled_.take(npy_intp(checked_size(n)), leaves);
        if (!draw_into(*m, by_, stream, n, leaves)) return nb::none();
        ++at_.batches;
        return batch;
    }

  private:
    nb::object rows_, codec_, turn_;  // kept alive
    const Rows& of_;
    const Codec& by_;
    Turn& at_;
    Recycled recycled_;
};

// Physical rows, in the window or not: each is whole, checked by its stamp.
nb::object read_rows(const Rows& self, const Codec& codec, nb::handle rows, bool single) {
    auto m = self.memory(codec);
    const arrays::Values<int64_t> at(rows, "rows");
    const size_t n = at.n;
    if (single && n != 1) throw nb::value_error("rows: must be one for a single sample");
    PerLeaf<nb::object> arrays(codec.size());
    PerLeaf<byte*> leaves(codec.size());
    codec.make_arrays(single ? -1 : npy_intp(n), arrays, leaves);
    for (size_t i = 0; i < n; ++i) check_row(*m, at.data[i]);
    {
        Unlocked unlocked(n * m->row_nbytes > kHoldGil);
        const double start = monotonic_s();
        for (size_t i = 0; i < n; ++i)
            while (!copy_row(*m, size_t(at.data[i]), i, codec, leaves.data()))
                if (monotonic_s() - start > kContention_s) throw Lapped("a row was being written for 1 s");
    }
    return codec.build(arrays, single);
}

nb::tuple locate(const Rows& self, nb::handle index, int64_t counted) {
    auto m = self.memory();
    const arrays::Values<int64_t> places(index, "index");
    const size_t n = places.n;
    int64_t *row, *generation, *segment, *step;
    nb::object rows = arrays::make<int64_t>(n, row), generations = arrays::make<int64_t>(n, generation);
    nb::object segments = arrays::make<int64_t>(n, segment), steps = arrays::make<int64_t>(n, step);
    Reader reader(*m);
    reader.run([&] {
        const Snapshot& s = reader.snapshot();
        check_count(s, counted);
        for (size_t i = 0; i < n; ++i) {
            check_index(places.data[i], s.total());
            const size_t r = s.row(uint64_t(places.data[i]));
            row[i] = int64_t(r);
            generation[i] = int64_t(m->generation(r));
            segment[i] = m->tagged ? m->segment(r) : -1;
            step[i] = m->tagged ? m->step(r) : -1;
        }
        return all_whole(s, n, [&](size_t i) { return uint64_t(places.data[i]); });
    });
    return nb::make_tuple(rows, generations, segments, steps);
}

// The index of each (row, generation) that still holds the same sample, -1 for the others.
nb::object index_of(const Rows& self, nb::handle rows, nb::handle generations) {
    auto m = self.memory();
    const arrays::Values<int64_t> row(rows, "row"), generation(generations, "generation");
    const size_t n = row.n;
    if (n != generation.n) throw nb::value_error("row, generation: must have equal lengths");
    int64_t* out;
    nb::object result = arrays::make<int64_t>(n, out);
    Reader reader(*m);
    reader.run([&] {
        const Snapshot& s = reader.snapshot();
        for (size_t i = 0; i < n; ++i) {
            const auto at = place_of_row(*m, s, row.data[i], generation.data[i]);
            out[i] = at ? int64_t(index_of_place(s, *at)) : -1;
        }
        return s.is_untouched();
    });
    return result;
}

// Closed segments as arrays: id, lane, first index, length, first row, step of the first sample.
nb::tuple segments(const Rows& self) {
    auto m = self.memory();
    std::vector<int64_t> id, lane, start, length, row, step;
    if (m->tagged) {
        Reader reader(*m);
        reader.run([&] {
            for (auto* v : {&id, &lane, &start, &length, &row, &step}) v->clear();
            const Snapshot& s = reader.snapshot();
            const Runs runs(*m, s, true);
            uint64_t before = 0;
            for (size_t k = 0; k < m->n_lanes; ++k) {
                const uint64_t open = live_segment(*m, k);
                for (uint64_t p = s[k].low, end; p < s[k].cursor; p = end) {
                    const size_t r = m->row_of(k, p);
                    const int64_t here = m->segment(r);
                    end = runs.end({k, p});
                    if (open && here == int64_t(open)) continue;
                    id.push_back(here); lane.push_back(int64_t(k)); start.push_back(int64_t(before + p - s[k].low));
                    length.push_back(int64_t(end - p)); row.push_back(int64_t(r)); step.push_back(m->step(r));
                }
                before += s[k].count();
            }
            return s.is_untouched();
        });
    }
    return nb::make_tuple(arrays::of(id), arrays::of(lane), arrays::of(start), arrays::of(length), arrays::of(row), arrays::of(step));
}

// (first index, end index, id) of lane k's open segment, or None.
nb::object open_segment(const Rows& self, size_t k) {
    auto m = self.memory();
    check_lane(*m, k);
    if (!m->tagged) return nb::none();
    uint64_t start = 0, end = 0;
    int64_t open = 0;
    Reader reader(*m);
    reader.run([&] {
        const Snapshot& s = reader.snapshot();
        moment();
        start = end = 0;
        open = int64_t(live_segment(*m, k));  // of now: the one that was open a moment ago may have ended since
        if (!open) return true;
        uint64_t before = 0;
        for (size_t j = 0; j < k; ++j) before += s[j].count();
        // Binary search for its first row: the open segment is the newest of its lane.
        uint64_t lo = s[k].low, hi = s[k].cursor;
        while (lo < hi) {
            moment();
            const uint64_t mid = lo + (hi - lo) / 2;
            if (m->segment(m->row_of(k, mid)) == open) hi = mid; else lo = mid + 1;
        }
        start = before + lo - s[k].low;
        end = before + s[k].count();
        moment();
        return s.is_untouched();
    });
    if (start == end) return nb::none();
    return nb::make_tuple(start, end, open);
}

}  // namespace

void bind_reads(nb::module_& m, nb::class_<Rows>& rows) {
    arrays::load_numpy();
    m.def("fill_again", [](bool on) { return std::exchange(fills_again, on && counts_are_exact()); }, nb::arg("on"));
    nb::class_<Drawer>(m, "Drawer")
        .def(nb::init<nb::object, nb::object, nb::object>(), nb::arg("rows"), nb::arg("codec"), nb::arg("turn"))
        .def("next", &Drawer::next, nb::arg("stream"), nb::arg("n"));
    rows
        .def("count", &count)
        .def("windows", &windows)
        .def("read", &read, nb::arg("codec"), nb::arg("index"), nb::arg("single") = false, nb::arg("out") = nb::none(),
             nb::arg("counted") = -1)
        .def("draw", &draw, nb::arg("codec"), nb::arg("stream"), nb::arg("n"), nb::arg("out") = nb::none())
        .def("read_rows", &read_rows, nb::arg("codec"), nb::arg("rows"), nb::arg("single") = false)
        .def("locate", &locate, nb::arg("index"), nb::arg("counted") = -1)
        .def("index_of", &index_of, nb::arg("row"), nb::arg("generation"))
        .def("segments", &segments)
        .def("open_segment", &open_segment, nb::arg("lane"));
}

}  // namespace recollect
