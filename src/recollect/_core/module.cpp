// Bindings. The Python side of each class is in recollect.memory; the stubs are in _native.pyi.
#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>

#include "bind_latest.hpp"
#include "codec.hpp"
#include "crc32c.hpp"
#include "edits.hpp"
#include "lanes_write.hpp"
#include "rows.hpp"
#include "tree.hpp"
#include "windows.hpp"

using namespace recollect;

namespace recollect {
void bind_items(nb::module_& m);
void bind_ring(nb::module_& m);
void bind_windows(nb::module_& m);
void bind_pack(nb::module_& m);
void bind_orphan(nb::module_& m);
void bind_copy(nb::module_& m);
}
void bind_prioritized(nb::module_& m);

namespace {

// --- arrays ------------------------------------------------------------------------------------------------------
template <typename T> struct Numpy;
template <> struct Numpy<int64_t> { static constexpr int type = NPY_INT64; static constexpr const char* name = "int64"; };
template <> struct Numpy<uint64_t> { static constexpr int type = NPY_UINT64; static constexpr const char* name = "uint64"; };
template <> struct Numpy<double> { static constexpr int type = NPY_FLOAT64; static constexpr const char* name = "float64"; };
template <> struct Numpy<bool> { static constexpr int type = NPY_BOOL; static constexpr const char* name = "bool"; };
template <> struct Numpy<uint8_t> { static constexpr int type = NPY_UINT8; static constexpr const char* name = "uint8"; };

template <typename T> struct Array {
    T* data;
    size_t n;
};

// The data of a contiguous 1-D array of exactly this type; the caller's reference keeps it alive.
template <typename T> Array<T> array_of(nb::handle h, const char* what) {
    auto* a = reinterpret_cast<PyArrayObject*>(h.ptr());
    if (!PyArray_Check(h.ptr()) || PyArray_TYPE(a) != Numpy<T>::type || PyArray_NDIM(a) != 1 || !PyArray_IS_C_CONTIGUOUS(a))
        throw nb::type_error((std::string(what) + ": must be a contiguous 1-D array of " + Numpy<T>::name).c_str());
    return {static_cast<T*>(PyArray_DATA(a)), static_cast<size_t>(PyArray_DIM(a, 0))};
}

template <typename T> nb::object make_array(size_t n, T*& data) {
    npy_intp dims[1] = {static_cast<npy_intp>(n)};
    PyObject* a = PyArray_SimpleNew(1, dims, Numpy<T>::type);
    if (!a) throw nb::python_error();
    data = static_cast<T*>(PyArray_DATA(reinterpret_cast<PyArrayObject*>(a)));
    return nb::steal(a);
}

template <typename T> nb::object to_array(const std::vector<T>& values) {
    T* data;
    nb::object out = make_array<T>(values.size(), data);
    std::copy(values.begin(), values.end(), data);
    return out;
}

// --- mapped memory -------------------------------------------------------------------------------------------------
using MappingPtr = std::shared_ptr<Mapping>;

template <typename T> T* word_at(const Mapping& m, size_t offset) {
    if (offset % sizeof(T) || offset > m.nbytes() - sizeof(T)) throw nb::index_error("word: offset is off the mapping");
    return reinterpret_cast<T*>(m.base() + offset);
}

template <typename T> T* writable_word_at(const Mapping& m, size_t offset) {
    T* at = word_at<T>(m, offset);
    if (!m.writable()) throw nb::value_error("word: the mapping is for reading");
    return at;
}

nb::object view_of(MappingPtr m, size_t offset, size_t nbytes) {
    if (offset > m->nbytes() || nbytes > m->nbytes() - offset) throw nb::index_error("view: reaches past the mapping");
    npy_intp dims[1] = {static_cast<npy_intp>(nbytes)};
    PyObject* a = PyArray_SimpleNewFromData(1, dims, NPY_UINT8, m->base() + offset);
    if (!a) throw nb::python_error();
    if (!m->writable()) PyArray_CLEARFLAGS(reinterpret_cast<PyArrayObject*>(a), NPY_ARRAY_WRITEABLE);
    auto* owner = new MappingPtr(m);
    nb::capsule keep(owner, [](void* p) noexcept { delete static_cast<MappingPtr*>(p); });
    PyArray_SetBaseObject(reinterpret_cast<PyArrayObject*>(a), keep.release().ptr());
    return nb::steal(a);
}

// --- rows ------------------------------------------------------------------------------------------------------------
class Rows {
  public:
    Rows(MappingPtr header, size_t capacity, size_t n_lanes, size_t row_nbytes, bool tagged, bool writable,
         bool is_private, int fd, nb::object sections) {
        size_t nbytes_of_rows;
        if (n_lanes == 0 || n_lanes > (header->nbytes() - kHeaderNbytes) / sizeof(Lane))
            throw nb::value_error("n_lanes: must be at least 1 and fit the header");
        if (capacity % n_lanes || capacity > (size_t(1) << 60) || __builtin_mul_overflow(capacity, row_nbytes, &nbytes_of_rows))
            throw nb::value_error("sections: must hold a capacity that is a multiple of n_lanes");
        memory_ = std::make_shared<Memory>(header, capacity, n_lanes, row_nbytes, tagged, writable, is_private,
                                           fd >= 0 ? ::dup(fd) : -1);
        if (!capacity) return;
        nb::tuple t = tuple_of(sections, 4, "sections");  // (mapping, offset) of stamps, segments, steps, rows
        auto at = [&](size_t i, size_t nbytes) -> byte* {
            if (t[i].is_none()) {
                if (tagged || i == 0 || i == 3) throw nb::value_error("sections: one is missing");
                return nullptr;
            }
            nb::tuple pair = tuple_of(t[i], 2, "sections");
            auto mapping = nb::cast<MappingPtr>(pair[0]);
            const size_t offset = nb::cast<size_t>(pair[1]);
            if (offset % 8 || offset > mapping->nbytes() || nbytes > mapping->nbytes() - offset)
                throw nb::value_error("sections: one reaches past its mapping");
            memory_->keep(mapping);
            return mapping->base() + offset;
        };
        Chunk chunk;
        chunk.stamp = reinterpret_cast<word*>(at(0, capacity * 8));
        chunk.segment = reinterpret_cast<int64_t*>(at(1, capacity * 8));
        chunk.step = reinterpret_cast<int64_t*>(at(2, capacity * 8));
        chunk.rows = at(3, nbytes_of_rows);
        memory_->add_chunk(chunk, header);
    }

    void close() { memory_.reset(); }
    bool is_closed() const { return !memory_; }
    std::shared_ptr<Memory> shared_memory() const { return memory(); }

    std::shared_ptr<Memory> opened() const { return memory(); }

    // --- reading ---
    size_t count() const {
        auto m = memory();
        size_t n = 0;
        Reader reader(*m);  // not the windows as they are: half way through a change they add up to nothing true
        reader.run([&] { n = reader.snapshot().total(); return true; });
        return n;
    }

    nb::list windows() const {
        auto m = memory();
        nb::list out;
        for (size_t k = 0; k < m->n_lanes; ++k) {
            const Window v = m->window(k);
            out.append(nb::make_tuple(v.low, v.cursor, v.epoch));
        }
        return out;
    }

    // Samples at non-negative indices. `out`: a batch of fitting arrays to fill, or None for new ones.
    // `counted` (unless < 0): how many samples there were when the index was made of a slice or negative numbers;
    // another number at the moment of the read is an IndexError, and the caller counts again.
    nb::object read(const Codec& codec, nb::handle index, bool single, nb::object out, int64_t counted) const {
        auto m = memory(codec);
        auto [at, n] = array_of<int64_t>(index, "index");
        if (single && n != 1) throw nb::value_error("index: must be one for a single sample");
        PerLeaf<nb::object> arrays(codec.size());
        PerLeaf<byte*> leaves(codec.size());
        prepare(codec, single ? -1 : npy_intp(n), out, arrays, leaves);
        {
            Unlocked unlocked(n * m->row_nbytes > kHoldGil);
            Reader reader(*m);
            const int64_t* places = at;
            reader.run([&, count = n] {
                const Snapshot& s = reader.snapshot();
                check_count(s, counted);
                for (size_t i = 0; i < count; ++i) check_index(places[i], s.total());
                auto index = [places](size_t i) { return uint64_t(places[i]); };
                gather(*m, s, count, index, codec, leaves.data());
                return all_whole(s, count, index);
            });
        }
        return out.is_none() ? codec.build(arrays, single) : out;
    }

    // The next n draws of a stream, uniform with replacement; None when there is nothing to draw from.
    nb::object draw(const Codec& codec, Stream& stream, size_t n, nb::object out) const {
        auto m = memory(codec);
        const auto [key, counter] = stream;
        if (out.is_none()) expect_draw(*m, stream, n, codec.extent());
        PerLeaf<nb::object> arrays(codec.size());
        PerLeaf<byte*> leaves(codec.size());
        prepare(codec, npy_intp(n), out, arrays, leaves);
        bool empty = false;
        {
            Unlocked unlocked(n * m->row_nbytes > kHoldGil);
            Reader reader(*m);
            reader.run([&] {
                empty = reader.snapshot().total() == 0;
                return empty || Draw(*m, reader.snapshot(), key, counter, n).run(codec, leaves.data());
            });
        }
        if (empty) return nb::none();
        stream.counter = counter + n;
        return out.is_none() ? codec.build(arrays, false) : out;
    }

    // Physical rows, in the window or not: each is whole, checked by its stamp.
    nb::object read_rows(const Codec& codec, nb::handle rows, bool single) const {
        auto m = memory(codec);
        auto [at, n] = array_of<int64_t>(rows, "rows");
        if (single && n != 1) throw nb::value_error("rows: must be one for a single sample");
        PerLeaf<nb::object> arrays(codec.size());
        PerLeaf<byte*> leaves(codec.size());
        codec.make_arrays(single ? -1 : npy_intp(n), arrays, leaves);
        for (size_t i = 0; i < n; ++i) check_row(*m, at[i]);
        {
            Unlocked unlocked(n * m->row_nbytes > kHoldGil);
            const double start = monotonic_s();
            for (size_t i = 0; i < n; ++i)
                while (!copy_row(*m, size_t(at[i]), i, codec, leaves.data()))
                    if (monotonic_s() - start > kContention_s) throw Lapped("a row was being written for 1 s");
        }
        return codec.build(arrays, single);
    }

    nb::tuple locate(nb::handle index, int64_t counted) const {
        auto m = memory();
        auto [at, n] = array_of<int64_t>(index, "index");
        int64_t *row, *generation, *segment, *step;
        nb::object rows = make_array<int64_t>(n, row), generations = make_array<int64_t>(n, generation);
        nb::object segments = make_array<int64_t>(n, segment), steps = make_array<int64_t>(n, step);
        Reader reader(*m);
        const int64_t* places = at;
        reader.run([&, count = n] {
            const Snapshot& s = reader.snapshot();
            check_count(s, counted);
            for (size_t i = 0; i < count; ++i) {
                check_index(places[i], s.total());
                const size_t r = s.row(uint64_t(places[i]));
                row[i] = int64_t(r);
                generation[i] = int64_t(m->generation(r));
                segment[i] = m->tagged ? m->segment(r) : -1;
                step[i] = m->tagged ? m->step(r) : -1;
            }
            return all_whole(s, count, [&](size_t i) { return uint64_t(places[i]); });
        });
        return nb::make_tuple(rows, generations, segments, steps);
    }

    // The index of each (row, generation) that still holds the same sample, -1 for the others.
    nb::object index_of(nb::handle rows, nb::handle generations) const {
        auto m = memory();
        auto [row, n] = array_of<int64_t>(rows, "row");
        auto [generation, n2] = array_of<int64_t>(generations, "generation");
        if (n != n2) throw nb::value_error("row, generation: must have equal lengths");
        int64_t* out;
        nb::object result = make_array<int64_t>(n, out);
        Reader reader(*m);
        const int64_t *r = row, *g = generation;
        reader.run([&, count = n] {
            const Snapshot& s = reader.snapshot();
            for (size_t i = 0; i < count; ++i) {
                const auto at = place_of_row(*m, s, r[i], g[i]);
                out[i] = at ? int64_t(index_of_place(s, *at)) : -1;
            }
            return s.is_untouched();
        });
        return result;
    }

    // Closed segments as arrays: id, lane, first index, length, first row, step of the first sample.
    nb::tuple segments() const {
        auto m = memory();
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
        return nb::make_tuple(to_array(id), to_array(lane), to_array(start), to_array(length), to_array(row), to_array(step));
    }

    // (first index, end index, id) of lane k's open segment, or None.
    nb::object open_segment(size_t k) const {
        auto m = memory();
        check_lane(*m, k);
        const int64_t open = m->tagged ? int64_t(live_segment(*m, k)) : 0;
        if (!open) return nb::none();
        uint64_t start = 0, end = 0;
        Reader reader(*m);
        reader.run([&] {
            const Snapshot& s = reader.snapshot();
            uint64_t before = 0, first = s[k].cursor;
            for (size_t j = 0; j < k; ++j) before += s[j].count();
            // Binary search for its first row: the open segment is the newest of its lane.
            uint64_t lo = s[k].low, hi = s[k].cursor;
            while (lo < hi) {
                const uint64_t mid = lo + (hi - lo) / 2;
                if (m->segment(m->row_of(k, mid)) == open) hi = mid; else lo = mid + 1;
            }
            first = lo;
            start = before + first - s[k].low;
            end = before + s[k].count();
            return s.is_untouched();
        });
        if (start == end) return nb::none();
        return nb::make_tuple(start, end, open);
    }

    // --- writing ---
    bool append(const Codec& codec, nb::handle sample, int64_t lane) {
        auto m = writable(codec);
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
    int64_t extend(const Codec& codec, nb::handle batch, int64_t lane, nb::object ends, bool keep_open) {
        auto m = writable(codec);
        std::vector<const byte*> leaves(codec.size());
        npy_intp n = -1;
        if (!codec.take_batch(batch.ptr(), n, leaves.data())) return -1;
        write_leaves(*m, codec, leaves.data(), size_t(std::max<npy_intp>(n, 0)), lane, ends, keep_open);
        return n;
    }

    void write(const Codec& codec, nb::list arrays, size_t n, int64_t lane, nb::object ends, bool keep_open) {
        auto m = writable(codec);
        std::vector<const byte*> leaves(codec.size());
        codec.take_fields(arrays, npy_intp(n), leaves.data());
        write_leaves(*m, codec, leaves.data(), n, lane, ends, keep_open);
    }

    // Sample i of a batch of field arrays to lane lanes[i]; `ends` (or None) tells whose segment ends with it.
    void write_lanes(const Codec& codec, nb::list arrays, nb::handle lanes, nb::object ends) {
        auto m = writable(codec);
        auto [k, n] = array_of<int64_t>(lanes, "lanes");
        std::vector<const byte*> leaves(codec.size());
        codec.take_fields(arrays, npy_intp(n), leaves.data());
        write_to_lanes(*m, codec, leaves.data(), k, n, ends);
    }

    // The same of a nested batch of exact arrays, of its samples `rows` (None: all, in order); false (nothing done) if
    // it needs conversion or a message.
    bool extend_lanes(const Codec& codec, nb::handle batch, nb::handle lanes, nb::object ends, nb::object rows) {
        auto m = writable(codec);
        auto [k, n] = array_of<int64_t>(lanes, "lanes");
        std::vector<const byte*> leaves(codec.size());
        npy_intp size = rows.is_none() ? npy_intp(n) : -1;
        if (!codec.take_batch(batch.ptr(), size, leaves.data())) return false;
        const int64_t* chosen = rows_of(rows, size_t(size), n);
        write_to_lanes(*m, codec, leaves.data(), k, n, ends, chosen);
        return true;
    }

    // Samples `rows` of a nested batch of exact arrays, to one lane and without segments; false as above.
    bool extend_chosen(const Codec& codec, nb::handle batch, nb::object rows, int64_t lane) {
        auto m = writable(codec);
        std::vector<const byte*> leaves(codec.size());
        npy_intp size = -1;
        if (!codec.take_batch(batch.ptr(), size, leaves.data())) return false;
        const size_t n = array_of<int64_t>(rows, "rows").n;
        const Chosen chosen(codec, leaves.data(), rows_of(rows, size_t(size), n), n);
        write_leaves(*m, codec, chosen.leaves(), n, lane, nb::none(), false);
        return true;
    }

    void end_segment(int64_t lane) {
        auto m = writable();
        if (!m->tagged) return;
        const size_t k = lane_for(*m, lane);
        Locked lock(m->lock(k));
        m->lane(k).open_segment.store(0, std::memory_order_release);
    }

    void overwrite(const Codec& codec, nb::handle index, nb::list arrays) {
        auto m = writable(codec);
        auto [at, n] = array_of<int64_t>(index, "index");
        std::vector<const byte*> leaves(codec.size());
        codec.take_fields(arrays, npy_intp(n), leaves.data());
        Hold hold(*m);
        std::vector<std::pair<size_t, size_t>> rows;
        for (auto& [k, p] : hold_places(*m, hold, at, n)) rows.emplace_back(k, m->row_of(k, p));
        recollect::overwrite(*m, rows, leaves.data(), codec);
    }

    void overwrite_rows(const Codec& codec, nb::handle index, nb::list arrays) {
        auto m = writable(codec);
        auto [at, n] = array_of<int64_t>(index, "rows");
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

    // A new sample in the place of an old one: counted as offered, and the old one as evicted.
    void replace(const Codec& codec, size_t row, nb::list arrays) {
        auto m = writable(codec);
        std::vector<const byte*> leaves(codec.size());
        codec.take_fields(arrays, 1, leaves.data());
        check_row(*m, int64_t(row));
        const size_t k = m->run ? row / m->run : 0;
        Hold hold(*m);
        hold.take(k);
        recollect::overwrite(*m, {{k, row}}, leaves.data(), codec);
        m->lane(k).skip.fetch_add(1);
    }

    void remove(nb::handle index) {
        auto m = writable();
        auto [at, n] = array_of<int64_t>(index, "index");
        remove_samples(*m, at, n);
    }

    void clear() { auto m = writable(); clear_all(*m); }

    // --- lanes ---
    size_t claim(int64_t lane) {
        auto m = writable();
        if (lane < 0) return m->default_lane();
        check_lane(*m, size_t(lane));
        m->keep_lane(size_t(lane));
        return size_t(lane);
    }
    int64_t held_lane() const { return memory()->held_lane(); }
    bool has_open(size_t lane) const {
        auto m = memory();
        check_lane(*m, lane);
        return m->tagged && m->lane(lane).open_segment.load() != 0;
    }
    void release(size_t lane) { auto m = memory(); check_lane(*m, lane); m->release(lane); }
    int owner(size_t lane) const {
        auto m = memory();
        check_lane(*m, lane);
        const uint64_t w = m->lane(lane).owner.load();
        return is_alive(w) ? pid_of(w) : 0;
    }

    // --- adoption and loading: the caller is the only user ---
    void set_window(size_t lane, uint64_t low, uint64_t cursor) {
        auto m = writable();
        check_lane(*m, lane);
        if (low > cursor || (m->run && cursor - low > m->run)) throw nb::value_error("set_window: must fit its lane");
        Hold hold(*m);
        hold.take(lane);
        m->reach(cursor);
        // A row that a removal left behind may still say that it is to be removed.
        for (uint64_t p = low; p < cursor; ++p) m->stamp(m->row_of(lane, p)).fetch_and(~kTomb);
        m->install(lane, low, cursor, cursor, (cursor - low) - cursor, 0);
    }
    void set_tags(size_t first_row, size_t n, int64_t segment, int64_t step) {
        auto m = writable();
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
    void set_open(size_t lane, int64_t segment) {
        auto m = writable();
        check_lane(*m, lane);
        m->lane(lane).open_segment.store(uint64_t(segment));
    }
    void set_generations(size_t first_row, nb::handle generations) {
        auto m = writable();
        auto [g, n] = array_of<int64_t>(generations, "generations");
        m->reach(first_row + n);
        if (n) check_row(*m, int64_t(first_row)), check_row(*m, int64_t(first_row + n - 1));
        for (size_t i = 0; i < n; ++i) m->stamp(first_row + i).store(uint64_t(g[i]) * 2);
    }
    nb::object generations(size_t first_row, size_t n) const {
        auto m = memory();
        int64_t* out;
        nb::object result = make_array<int64_t>(n, out);
        for (size_t i = 0; i < n; ++i) { check_row(*m, int64_t(first_row + i)); out[i] = int64_t(m->generation(first_row + i)); }
        return result;
    }
    // Ids below this number times the lanes have been given out; none is ever given twice.
    uint64_t segment_counter() const {
        auto m = memory();
        uint64_t n = 0;
        for (size_t k = 0; k < m->n_lanes; ++k) n = std::max(n, m->lane(k).next_segment.load());
        return n;
    }
    void set_segment_counter(uint64_t n) {
        auto m = writable();
        for (size_t k = 0; k < m->n_lanes; ++k) m->lane(k).next_segment.store(n);
    }
    void freeze() { writable()->writable = false; }
    void reserve_rows(size_t n) { writable()->reach(n); }

    // For the other files of the core: these rows, for as long as they are open.
    nb::capsule share() const {
        return nb::capsule(new std::weak_ptr<Memory>(memory()),
                           [](void* p) noexcept { delete static_cast<std::weak_ptr<Memory>*>(p); });
    }

    // --- counting ---
    void reject(uint64_t n) {
        auto m = memory();
        if (m->writable) m->shared().rejected.fetch_add(n);
    }
    nb::dict counters() const {
        auto m = memory();
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

  private:
    std::shared_ptr<Memory> memory() const {
        if (!memory_) throw std::logic_error("closed");
        return memory_;
    }
    std::shared_ptr<Memory> writable() const {
        auto m = memory();
        if (!m->writable) throw Forked("it was opened for reading; load it with read_only=False to change it");
        m->check_fork();
        return m;
    }
    // With a codec of these rows: another's could reach past their ends.
    static std::shared_ptr<Memory> fitting(std::shared_ptr<Memory> m, const Codec& codec) {
        if (codec.row_nbytes() != m->row_nbytes) 
            throw nb::value_error(("codec: must be made for rows of " + std::to_string(m->row_nbytes) + " bytes, got " +
                                   std::to_string(codec.row_nbytes())).c_str());
        return m;
    }
    std::shared_ptr<Memory> memory(const Codec& codec) const { return fitting(memory(), codec); }
    std::shared_ptr<Memory> writable(const Codec& codec) const { return fitting(writable(), codec); }
    static void check_count(const Snapshot& s, int64_t counted) {
        if (counted >= 0 && s.total() != uint64_t(counted)) throw std::out_of_range("the length has changed meanwhile");
    }
    static void check_lane(const Memory& m, size_t k) {
        if (k >= m.n_lanes)
            throw std::out_of_range("lane " + std::to_string(k) + " is out of range: there are " + std::to_string(m.n_lanes));
    }
    static void check_row(const Memory& m, int64_t r) {
        const size_t end = m.capacity ? m.capacity : m.held_rows();
        if (r < 0 || size_t(r) >= end)
            throw std::out_of_range("row " + std::to_string(r) + " is out of range for " + std::to_string(end) + " rows");
    }
    static size_t lane_for(Memory& m, int64_t lane) {
        if (lane < 0) return m.default_lane();
        check_lane(m, size_t(lane));
        m.keep_lane(size_t(lane));
        return size_t(lane);
    }
    static void prepare(const Codec& codec, npy_intp n, nb::object& out, PerLeaf<nb::object>& arrays,
                        PerLeaf<byte*>& leaves) {
        if (out.is_none()) return codec.make_arrays(n, arrays, leaves);
        npy_intp rows = n;
        if (n < 0 || !codec.take_batch(out.ptr(), rows, const_cast<const byte**>(leaves.data()), true))
            throw nb::value_error("out: must have the batch's structure, writable contiguous arrays of the exact shapes and dtypes");
    }
    void write_leaves(Memory& m, const Codec& codec, const byte* const* leaves, size_t n, int64_t lane, nb::object ends,
                      bool keep_open) {
        Ends e{nullptr, keep_open};
        if (!ends.is_none()) {
            auto [flags, n_flags] = array_of<bool>(ends, "ends");
            if (n_flags != n) throw nb::value_error("ends: must have one flag per sample");
            e.flags = reinterpret_cast<const uint8_t*>(flags);
        }
        if (n == 0) return;
        const size_t k = lane_for(m, lane);
        Locked lock(m.lock(k));
        Unlocked unlocked(n * m.row_nbytes > kHoldGil);
        Writer(m, k).write(leaves, n, codec, e);
    }
    // Which samples of a batch of `size`; null for all, in order.
    static const int64_t* rows_of(nb::object rows, size_t size, size_t n) {
        if (rows.is_none()) return nullptr;
        auto [at, count] = array_of<int64_t>(rows, "rows");
        if (count != n) throw nb::value_error("rows: must be one for each lane");
        for (size_t i = 0; i < n; ++i) check_index(at[i], size);
        return at;
    }
    static void write_to_lanes(Memory& m, const Codec& codec, const byte* const* leaves, const int64_t* lanes, size_t n,
                               nb::object ends, const int64_t* rows = nullptr) {
        const uint8_t* flags = nullptr;
        if (!ends.is_none()) {
            auto [given, n_flags] = array_of<bool>(ends, "ends");
            if (n_flags != n) throw nb::value_error("ends: must have one flag per sample");
            flags = reinterpret_cast<const uint8_t*>(given);
        }
        for (size_t i = 0; i < n; ++i) check_lane(m, size_t(lanes[i]));
        Unlocked unlocked(n * m.row_nbytes > kHoldGil);
        recollect::write_lanes(m, codec, leaves, lanes, n, flags, rows);
    }
    // The open segment of lane k; that of a dead writer has ended at its last committed row.
    static uint64_t live_segment(const Memory& m, size_t k) {
        const uint64_t open = m.lane(k).open_segment.load();
        return open && is_alive(m.lane(k).owner.load()) ? open : 0;
    }
    static bool copy_row(const Memory& m, size_t r, size_t i, const Codec& codec, byte* const* leaves) {
        const uint64_t before = m.stamp(r).load(std::memory_order_acquire);
        if (before & 1) return false;
        copy_sample(m, r, i, codec, leaves);
        std::atomic_thread_fence(std::memory_order_acquire);
        return m.stamp(r).load(std::memory_order_relaxed) == before;
    }

    std::shared_ptr<Memory> memory_;
};

// --- trees -----------------------------------------------------------------------------------------------------------
template <typename T> void check_leaves(const T& tree, const int64_t* rows, size_t n) {
    for (size_t i = 0; i < n; ++i)
        if (rows[i] < 0 || size_t(rows[i]) >= tree.capacity())
            throw std::out_of_range("row " + std::to_string(rows[i]) + " is out of range for " + std::to_string(tree.capacity()));
}

void set_sum(Tree<Sum>& tree, nb::handle rows, nb::handle values) {
    auto [r, n] = array_of<int64_t>(rows, "rows");
    auto [v, n2] = array_of<double>(values, "values");
    if (n != n2) throw nb::value_error("rows, values: must have equal lengths");
    check_leaves(tree, r, n);
    for (size_t i = 0; i < n; ++i)
        if (!(v[i] >= 0.0) || std::isinf(v[i])) throw nb::value_error("values: must be finite and not negative");
    tree.set(r, v, n);
}

nb::object find_sum(const Tree<Sum>& tree, nb::handle masses) {
    auto [m, n] = array_of<double>(masses, "masses");
    if (!(tree.top() > 0.0)) throw nb::value_error("find: the tree is empty");
    int64_t* out;
    nb::object result = make_array<int64_t>(n, out);
    for (size_t i = 0; i < n; ++i) out[i] = int64_t(tree.find(m[i]));
    return result;
}

nb::object get_sum(const Tree<Sum>& tree, nb::handle rows) {
    auto [r, n] = array_of<int64_t>(rows, "rows");
    check_leaves(tree, r, n);
    double* out;
    nb::object result = make_array<double>(n, out);
    for (size_t i = 0; i < n; ++i) out[i] = tree.leaf(size_t(r[i]));
    return result;
}

void set_min(Tree<Min>& tree, nb::handle rows, nb::handle values, nb::handle orders) {
    auto [r, n] = array_of<int64_t>(rows, "rows");
    auto [v, n2] = array_of<double>(values, "values");
    auto [o, n3] = array_of<int64_t>(orders, "orders");
    if (n != n2 || n != n3) throw nb::value_error("rows, values, orders: must have equal lengths");
    check_leaves(tree, r, n);
    std::vector<Ranked> ranked(n);
    for (size_t i = 0; i < n; ++i) {
        if (std::isnan(v[i])) throw nb::value_error("values: must not be NaN");
        ranked[i] = {v[i], o[i]};
    }
    tree.set(r, ranked.data(), n);
}

// The classes are never given up: a static object would be, after the interpreter has ended.
PyObject* error_class(const char* name) {
    static PyObject* errors = nb::module_::import_("recollect.errors").release().ptr();
    return nb::object(nb::handle(errors).attr(name)).release().ptr();
}

void translate(const std::exception_ptr& p, void*) {
    try { std::rethrow_exception(p); }
    catch (const Busy& e) {
        std::string text = e.lane < 0 ? "no lane is free" : "lane " + std::to_string(e.lane) + " is taken";
        text += ": held by process " + std::to_string(e.pid) + "; create the buffer with more lanes (num_lanes=)";
        PyErr_SetString(error_class("LaneBusyError"), text.c_str());
    }
    catch (const Forked& e) { PyErr_SetString(error_class("ReadOnlyError"), e.what()); }
    catch (const Refused& e) { PyErr_SetString(error_class("SegmentOpenError"), e.what()); }
    catch (const Lapped& e) { PyErr_SetString(error_class("ContentionError"), e.what()); }
    catch (const std::out_of_range& e) { PyErr_SetString(PyExc_IndexError, e.what()); }
    catch (const std::logic_error& e) {
        if (std::string(e.what()) != "closed") throw;
        PyErr_SetString(error_class("ClosedError"), "this object was closed; open or create it again");
    }
    catch (const std::system_error& e) {
        errno = e.code().value();
        PyErr_SetFromErrno(PyExc_OSError);
    }
}

void* load_numpy() {
    import_array();
    return nullptr;
}

}  // namespace

namespace recollect {
std::shared_ptr<Memory> memory_of(nb::handle rows) { return nb::cast<const Rows&>(rows).opened(); }
}

NB_MODULE(_native, m) {
    load_numpy();
    if (PyErr_Occurred()) throw nb::python_error();
    watch_forks();
    nb::set_leak_warnings(false);  // module-level tables may outlive the interpreter's teardown order
    nb::register_exception_translator(translate);

    m.attr("HEADER_NBYTES") = kHeaderNbytes;
    m.attr("SHARED_WORDS") = kSharedWords;
    m.attr("LANE_NBYTES") = sizeof(Lane);
    m.attr("FIRST_CHUNK") = kFirstChunk;

    m.def("process_word", [](int pid) { return process_word(pid); }, nb::arg("pid"));
    m.def("is_alive", [](uint64_t w) { return is_alive(w); }, nb::arg("word"));
    m.def("arm_fault", [](int64_t n) { fault_countdown = n; }, nb::arg("n"));
    m.def("fault_point", [] { fault_point(); });
    m.def("fault_countdown", [] { return fault_countdown; });
    m.def("crc32c", [](nb::handle data, uint32_t seed) {
        Py_buffer view;
        if (PyObject_GetBuffer(data.ptr(), &view, PyBUF_SIMPLE)) throw nb::python_error();
        uint32_t crc;
        { Unlocked unlocked(size_t(view.len) > kHoldGil); crc = crc32c(seed, static_cast<const byte*>(view.buf), size_t(view.len)); }
        PyBuffer_Release(&view);
        return crc;
    }, nb::arg("data"), nb::arg("seed") = 0);
    m.def("crc32c_portable", [](nb::bytes data) {
        return ~crc32c_table(~0u, reinterpret_cast<const byte*>(data.c_str()), data.size());
    }, nb::arg("data"));
    m.def("draw_indices", [](uint64_t key, uint64_t counter, uint64_t bound, size_t n) {
        if (bound == 0 || bound > uint64_t(1) << 63) throw nb::value_error(bound ? "bound: must be at most 2**63" : "bound: must be at least 1, got 0");
        int64_t* out;
        nb::object result = make_array<int64_t>(n, out);
        for (size_t i = 0; i < n; ++i) out[i] = int64_t(draw_one(key, counter + i, bound));
        return result;
    }, nb::arg("key"), nb::arg("counter"), nb::arg("bound"), nb::arg("n"));

    nb::class_<Mapping>(m, "Mapping")
        .def(nb::init<int, size_t, size_t, bool>(), nb::arg("fd"), nb::arg("offset"), nb::arg("nbytes"), nb::arg("writable"))
        .def_prop_ro("nbytes", &Mapping::nbytes)
        .def("view", [](MappingPtr self, size_t offset, size_t nbytes) { return view_of(self, offset, nbytes); },
             nb::arg("offset"), nb::arg("nbytes"))
        .def("sync", &Mapping::sync, nb::call_guard<nb::gil_scoped_release>())
        .def("load", [](const Mapping& s, size_t at) { return word_at<word>(s, at)->load(std::memory_order_acquire); }, nb::arg("offset"))
        .def("store", [](Mapping& s, size_t at, uint64_t v) { writable_word_at<word>(s, at)->store(v, std::memory_order_release); },
             nb::arg("offset"), nb::arg("value"))
        .def("add", [](Mapping& s, size_t at, uint64_t v) { return writable_word_at<word>(s, at)->fetch_add(v); },
             nb::arg("offset"), nb::arg("value"))
        .def("swap_if", [](Mapping& s, size_t at, uint64_t expected, uint64_t v) {
            return writable_word_at<word>(s, at)->compare_exchange_strong(expected, v); }, nb::arg("offset"), nb::arg("expected"), nb::arg("value"))
        .def("wait", [](const Mapping& s, size_t at, uint32_t expected, double timeout_s) {
            auto* w = word_at<std::atomic<uint32_t>>(s, at);
            if (std::isnan(timeout_s)) throw nb::value_error("timeout_s: must be a number of seconds, got NaN");
            nb::gil_scoped_release unlocked;
            return futex_wait(w, expected, timeout_s); }, nb::arg("offset"), nb::arg("expected"), nb::arg("timeout_s"))
        .def("wake", [](const Mapping& s, size_t at, int n) { return futex_wake(word_at<std::atomic<uint32_t>>(s, at), n); },
             nb::arg("offset"), nb::arg("n") = 0x7FFFFFFF);

    nb::class_<Stream>(m, "Stream")
        .def(nb::init<>())
        .def_rw("key", &Stream::key)
        .def_rw("counter", &Stream::counter);

    nb::class_<Codec>(m, "Codec")
        .def(nb::init<nb::list, nb::object, size_t>(), nb::arg("fields"), nb::arg("plan").none(), nb::arg("row_nbytes"))
        .def_prop_ro("row_nbytes", &Codec::row_nbytes);

    nb::class_<Rows>(m, "Rows")
        .def(nb::init<MappingPtr, size_t, size_t, size_t, bool, bool, bool, int, nb::object>(), nb::arg("header"),
             nb::arg("capacity"), nb::arg("n_lanes"), nb::arg("row_nbytes"), nb::arg("tagged"), nb::arg("writable"),
             nb::arg("is_private"), nb::arg("fd"), nb::arg("sections").none())
        .def("close", &Rows::close)
        .def_prop_ro("is_closed", &Rows::is_closed)
        .def("memory", &Rows::shared_memory)
        .def("count", &Rows::count)
        .def("windows", &Rows::windows)
        .def("read", &Rows::read, nb::arg("codec"), nb::arg("index"), nb::arg("single") = false, nb::arg("out") = nb::none(),
             nb::arg("counted") = -1)
        .def("draw", &Rows::draw, nb::arg("codec"), nb::arg("stream"), nb::arg("n"), nb::arg("out") = nb::none())
        .def("read_rows", &Rows::read_rows, nb::arg("codec"), nb::arg("rows"), nb::arg("single") = false)
        .def("locate", &Rows::locate, nb::arg("index"), nb::arg("counted") = -1)
        .def("index_of", &Rows::index_of, nb::arg("row"), nb::arg("generation"))
        .def("segments", &Rows::segments)
        .def("open_segment", &Rows::open_segment, nb::arg("lane"))
        .def("append", &Rows::append, nb::arg("codec"), nb::arg("sample").none(), nb::arg("lane") = -1)
        .def("extend", &Rows::extend, nb::arg("codec"), nb::arg("batch").none(), nb::arg("lane") = -1, nb::arg("ends") = nb::none(),
             nb::arg("keep_open") = false)
        .def("write", &Rows::write, nb::arg("codec"), nb::arg("arrays"), nb::arg("n"), nb::arg("lane") = -1,
             nb::arg("ends") = nb::none(), nb::arg("keep_open") = false)
        .def("write_lanes", &Rows::write_lanes, nb::arg("codec"), nb::arg("arrays"), nb::arg("lanes"), nb::arg("ends") = nb::none())
        .def("extend_lanes", &Rows::extend_lanes, nb::arg("codec"), nb::arg("batch").none(), nb::arg("lanes"),
             nb::arg("ends") = nb::none(), nb::arg("rows") = nb::none())
        .def("extend_chosen", &Rows::extend_chosen, nb::arg("codec"), nb::arg("batch").none(), nb::arg("rows"), nb::arg("lane") = -1)
        .def("end_segment", &Rows::end_segment, nb::arg("lane") = -1)
        .def("overwrite", &Rows::overwrite, nb::arg("codec"), nb::arg("index"), nb::arg("arrays"))
        .def("overwrite_rows", &Rows::overwrite_rows, nb::arg("codec"), nb::arg("rows"), nb::arg("arrays"))
        .def("replace", &Rows::replace, nb::arg("codec"), nb::arg("row"), nb::arg("arrays"))
        .def("remove", &Rows::remove, nb::arg("index"))
        .def("clear", &Rows::clear)
        .def("claim", &Rows::claim, nb::arg("lane") = -1)
        .def("held_lane", &Rows::held_lane)
        .def("has_open", &Rows::has_open, nb::arg("lane"))
        .def("release", &Rows::release, nb::arg("lane"))
        .def("owner", &Rows::owner, nb::arg("lane"))
        .def("set_window", &Rows::set_window, nb::arg("lane"), nb::arg("low"), nb::arg("cursor"))
        .def("set_tags", &Rows::set_tags, nb::arg("first_row"), nb::arg("n"), nb::arg("segment"), nb::arg("step"))
        .def("set_open", &Rows::set_open, nb::arg("lane"), nb::arg("segment"))
        .def("set_generations", &Rows::set_generations, nb::arg("first_row"), nb::arg("generations"))
        .def("generations", &Rows::generations, nb::arg("first_row"), nb::arg("n"))
        .def("segment_counter", &Rows::segment_counter)
        .def("set_segment_counter", &Rows::set_segment_counter, nb::arg("n"))
        .def("freeze", &Rows::freeze)
        .def("reserve_rows", &Rows::reserve_rows, nb::arg("n"))
        .def("share", &Rows::share)
        .def("reject", &Rows::reject, nb::arg("n"))
        .def("counters", &Rows::counters);

    bind_ring(m);
    bind_pack(m);
    bind_orphan(m);
    bind_copy(m);

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

    bind_items(m);
    bind_latest(m);
    bind_prioritized(m);
    bind_windows(m);
}
