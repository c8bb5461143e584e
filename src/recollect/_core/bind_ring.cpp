// Bindings of Ring. Outcomes below zero are turned into errors by recollect.memory.ring.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/vector.h>

#include "bind.hpp"
#include "recycle.hpp"
#include "ring.hpp"
#include "rows.hpp"

namespace recollect {
namespace {

// A batch in a slot: for each field of a codec a block of up to `most` rows at its offset.
struct Blocks {
    Blocks(nb::object codec_, std::vector<size_t> offsets_, size_t most_, size_t slot_nbytes_)
        : keep(codec_), codec(nb::cast<const Codec&>(codec_)), offsets(std::move(offsets_)), most(most_), slot_nbytes(slot_nbytes_), recycled(codec) {
        if (offsets.size() != codec.size()) throw nb::value_error("offsets: one per field is needed");
        for (size_t i = 0; i < offsets.size(); ++i) {
            size_t nbytes;
            if (__builtin_mul_overflow(codec.spans()[i].nbytes, most, &nbytes) || offsets[i] > slot_nbytes || nbytes > slot_nbytes - offsets[i])
                throw nb::value_error("offsets: a block reaches past the end of the slot");
        }
    }
    // Copies of the first n rows, nested as the codec says.
    nb::object copy(const byte* slot, size_t n, nb::object out) const {
        PerLeaf<byte*> leaves(codec.size());
        npy_intp rows = npy_intp(n);
        arrays::Held held;
        if (out.is_none()) out = recycled.take(rows, leaves);
        else if (!codec.take_batch(out.ptr(), rows, const_cast<const byte**>(leaves.data()), held, true))
            throw nb::value_error("out: must have the batch's structure, writable contiguous arrays of the exact shapes and dtypes");
        const bool unlocks = n * codec.row_nbytes() > 2 * kHoldGil;
        held.keep(unlocks);
        Unlocked unlocked(unlocks);
        for (size_t i = 0; i < offsets.size(); ++i) std::memcpy(leaves[i], slot + offsets[i], codec.spans()[i].nbytes * n);
        return out;
    }
    nb::object keep;
    const Codec& codec;
    std::vector<size_t> offsets;
    size_t most, slot_nbytes;
    mutable Recycled recycled;
};

class BoundRing {
  public:
    BoundRing(std::shared_ptr<Mapping> mapping, size_t control_at, size_t closed_at, size_t slots_at, size_t slot_nbytes, size_t lanes,
              size_t slots, int policy, size_t wake_free)
        : slot_nbytes_(slot_nbytes) {
        size_t total;
        if (lanes == 0 || slots < 2 || policy < 0 || policy > 2 || wake_free > slots) throw nb::value_error("ring: sizes are wrong");
        if (lanes > 1 << 16 || slots > 1 << 20 || control_at > slots_at || control_at % 64 || closed_at % 8 || closed_at + 8 > control_at ||
             control_at + Ring::control_nbytes(lanes, slots) > slots_at ||
            __builtin_mul_overflow(lanes * slots, slot_nbytes, &total) || slots_at > mapping->nbytes() || total > mapping->nbytes() - slots_at)
            throw nb::value_error("ring: reaches past its mapping");
        slots_ = mapping->base() + slots_at;
        ring_ = std::make_unique<Ring>(mapping, control_at, closed_at, lanes, slots, Policy(policy), wake_free);
    }
    size_t lane(size_t k) const {
        if (k >= ring_->n_lanes) throw nb::index_error("lane: is out of range");
        return k;
    }
    int64_t any_lane(int64_t k) const {
        if (k >= 0) lane(size_t(k));
        return k;
    }
    Ring& ring() const { return *ring_; }
    const byte* bytes(size_t s) const { return slots_ + s * slot_nbytes_; }
    const Slot& slot(size_t s) const {
        if (s >= ring_->n_lanes * ring_->n_slots) throw nb::index_error("slot: is out of range");
        return ring_->slot(s);
    }

    int64_t commit(size_t k, nb::tuple info) {
        int64_t words[kInfoWords] = {};
        if (info.size() > kInfoWords) throw nb::value_error("info: has too many words");
        for (size_t i = 0; i < info.size(); ++i) words[i] = nb::cast<int64_t>(info[i]);
        return ring_->commit(lane(k), words);
    }

    // (sequence, lane, committed_ns, info words) of a slot.
    nb::tuple about(size_t s) const {
        const Slot& it = slot(s);
        nb::list words;
        for (int64_t w : it.info) words.append(w);
        return nb::make_tuple(ticket_of(it.state.load(std::memory_order_relaxed)), s / ring_->n_slots, it.committed_ns, nb::tuple(words));
    }

    // The next batch of a lane: (kind, info words, data, metadata), copied out and released in one call; an outcome
    // below zero otherwise. Its info: run, kind, number of rows, ... Slots of another run are released unread, but
    // for errors (kind 1). A kind other than 0 gives its first `info[2]` bytes instead of data.
    nb::object fetch(int64_t k, double timeout_s, int64_t run, const Blocks& data, nb::object metadata, nb::object out) {
        any_lane(k);
        if (data.slot_nbytes > slot_nbytes_) throw nb::value_error("blocks: reach past the end of the slot");
        const double end = monotonic_s() + timeout_s;
        nb::object found = nb::none();
        while (found.is_none()) {
            const int64_t outcome = ring_->with_next(k, std::max(0.0, end - monotonic_s()), [&](size_t s) {
                int64_t info[kInfoWords];  // once: the writer has it, and may be broken
                std::copy_n(ring_->slot(s).info, kInfoWords, info);
                if (info[0] != run && info[1] != 1) return;  // an error is news whatever it belongs to
                found = batch(s, info, data, metadata, out);
            });
            if (outcome < 0) return nb::int_(outcome);
        }
        return found;
    }

    // Draws into slot after slot of lane k, of draw number j what the stream (key, j << 32) gives, until there is
    // something else to do: a request in `asked`, no slot for `timeout_s`, the end. The number to go on with, and whether
    // there was nothing to draw from (the slot then stays claimed).
    std::pair<int64_t, bool> draw_ahead(size_t k, double timeout_s, const BoundRing& asked, const Blocks& blocks, nb::handle rows,
                                        const Codec& codec, uint64_t key, int64_t run, int64_t number) {
        lane(k);
        check(blocks, codec);
        const auto m = memory_of(rows, codec);
        for (;; ++number) {
            if (PyErr_CheckSignals()) throw nb::python_error();
            Unlocked unlocked(true);
            const int64_t s = asked.ring().count(0, kReady) ? kTimeout : ring_->claim(k, timeout_s);
            if (s < 0 || asked.ring().count(0, kReady)) return {number, false};
            if (!draw_into(size_t(s), blocks, *m, codec, key, uint64_t(number))) return {number, true};
            const int64_t info[kInfoWords] = {run, 0, int64_t(blocks.most), number};
            ring_->commit(k, info);
        }
    }

  private:
    void check(const Blocks& blocks, const Codec& codec) const {
        if (blocks.slot_nbytes > slot_nbytes_) throw nb::value_error("blocks: reach past the end of the slot");
        if (blocks.codec.size() != codec.size()) throw nb::value_error("codec: must have the fields of the blocks");
        for (size_t i = 0; i < codec.size(); ++i)
            if (blocks.codec.spans()[i].nbytes != codec.spans()[i].nbytes) throw nb::value_error("codec: must have the fields of the blocks");
    }

    bool draw_into(size_t s, const Blocks& blocks, Memory& m, const Codec& codec, uint64_t key, uint64_t number) const {
        PerLeaf<byte*> leaves(codec.size());
        for (size_t i = 0; i < codec.size(); ++i) leaves[i] = slots_ + s * slot_nbytes_ + blocks.offsets[i];
        bool empty = false;
        Reader reader(m);
        reader.run([&] {
            empty = reader.snapshot().total() == 0;
            return empty || Draw(m, reader.snapshot(), key, number << 32, (number + 1) << 32, blocks.most).run(codec, leaves.data());
        });
        return !empty;
    }

    [[noreturn]] static void too_many(size_t n) {
        throw Damaged(false, "slot: must hold at most as many rows as its blocks, got " + std::to_string(n) +
                             "; the memory was overwritten: create it again");
    }
    nb::object batch(size_t s, const int64_t* info, const Blocks& data, nb::object metadata, nb::object out) const {
        nb::tuple words = nb::make_tuple(info[2], info[3], info[4], info[5]);
        const size_t n = size_t(std::max<int64_t>(info[2], 0));
        if (info[1] != 0) {
            nb::bytes text(reinterpret_cast<const char*>(bytes(s)), std::min(n, slot_nbytes_));
            return nb::make_tuple(info[1], words, text, nb::none());
        }
        if (n > data.most) too_many(n);
        nb::object first = data.copy(bytes(s), n, out), second = nb::none();
        if (!metadata.is_none()) {
            const auto& blocks = nb::cast<const Blocks&>(metadata);
            if (blocks.slot_nbytes > slot_nbytes_ || n > blocks.most) too_many(n);
            second = blocks.copy(bytes(s), n, nb::none());
        }
        return nb::make_tuple(0, words, first, second);
    }

    size_t slot_nbytes_;
    byte* slots_;
    std::unique_ptr<Ring> ring_;
};

}  // namespace

void bind_ring(nb::module_& m) {
    arrays::load_numpy();
    m.attr("RING_INFO_WORDS") = kInfoWords;
    m.def("ring_control_nbytes", &Ring::control_nbytes, nb::arg("n_lanes"), nb::arg("num_slots"));

    nb::class_<Blocks>(m, "Blocks")
        .def(nb::init<nb::object, std::vector<size_t>, size_t, size_t>(), nb::arg("codec"), nb::arg("offsets"), nb::arg("most"),
             nb::arg("slot_nbytes"));

    nb::class_<BoundRing>(m, "Ring")
        .def(nb::init<std::shared_ptr<Mapping>, size_t, size_t, size_t, size_t, size_t, size_t, int, size_t>(), nb::arg("mapping"),
             nb::arg("control_at"), nb::arg("closed_at"), nb::arg("slots_at"), nb::arg("slot_nbytes"), nb::arg("n_lanes"), nb::arg("num_slots"),
             nb::arg("policy"), nb::arg("wake_free"))
        .def("claim", [](BoundRing& s, size_t k, double t) { return s.ring().claim(s.lane(k), t); }, nb::arg("lane"), nb::arg("timeout_s"))
        .def("commit", &BoundRing::commit, nb::arg("lane"), nb::arg("info"))
        .def("take", [](BoundRing& s, int64_t k, double t) { return s.ring().take(s.any_lane(k), t); }, nb::arg("lane"), nb::arg("timeout_s"))
        .def("release", [](BoundRing& s, bool skips) { return s.ring().release(skips); }, nb::arg("skips") = false)
        .def("wait_ready", [](BoundRing& s, int64_t k, double t) { return s.ring().wait_ready(s.any_lane(k), t); }, nb::arg("lane"),
             nb::arg("timeout_s"))
        .def("fetch", &BoundRing::fetch, nb::arg("lane"), nb::arg("timeout_s"), nb::arg("run"), nb::arg("data"), nb::arg("metadata").none(),
             nb::arg("out") = nb::none())
        .def("draw_ahead", &BoundRing::draw_ahead, nb::arg("lane"), nb::arg("timeout_s"), nb::arg("asked"), nb::arg("blocks"),
             nb::arg("rows"), nb::arg("codec"), nb::arg("key"), nb::arg("run"), nb::arg("number"))
        .def("about", &BoundRing::about, nb::arg("slot"))
        .def("release_lane", [](BoundRing& s, size_t k) { s.ring().release_lane(s.lane(k)); }, nb::arg("lane"))
        .def("release_reader", [](BoundRing& s) { s.ring().release_reader(); })
        .def("writing", [](BoundRing& s, size_t k) { return s.ring().writing(s.lane(k)); }, nb::arg("lane"))
        .def("reading", [](BoundRing& s) { return s.ring().reading(); })
        .def("writer", [](const BoundRing& s, size_t k) { return s.ring().writer(s.lane(k)); }, nb::arg("lane"))
        .def("reader", [](const BoundRing& s) { return s.ring().reader(); })
        .def("available", [](const BoundRing& s, size_t k) { return s.ring().available(s.lane(k)); }, nb::arg("lane"))
        .def("n_ready", [](const BoundRing& s, size_t k) { return s.ring().count(s.lane(k), kReady); }, nb::arg("lane"))
        .def("is_closed", [](const BoundRing& s) { return s.ring().is_closed(); })
        .def("close", [](BoundRing& s) { s.ring().leave(); })
        .def("wake_all", [](BoundRing& s) { s.ring().wake_all(); })
        .def("counters", [](const BoundRing& s, size_t k) {
            const Ring::Counts c = s.ring().counts(s.lane(k));
            nb::dict out;
            out["written"] = c.written;
            out["delivered"] = c.delivered;
            out["dropped"] = c.dropped;
            out["skipped"] = c.skipped;
            out["abandoned"] = c.abandoned;
            out["available"] = c.available;
            return out;
        }, nb::arg("lane"));
}

}  // namespace recollect
