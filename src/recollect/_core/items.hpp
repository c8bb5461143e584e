// Items of a remote manager: packed as they travel, and stored, one to a row.
//
// A trajectory travels as packed steps and a packed row of fields. Its stored row has a column for each leaf of its
// steps, with room for the longest; only as much of it is touched as the trajectory is long.
#pragma once

#include "lowest.hpp"
#include "sums.hpp"

namespace recollect {

constexpr size_t kPackNbytes = kCrcChunk;  // packed and summed piece by piece: a piece is still in the nearest cache

// Interleave samples [first, last) into rows, the bytes between leaves zero; return the crc32c of those.
inline uint32_t pack_rows(byte* to, size_t first, size_t last, const Codec& codec, const byte* const* leaves) {
    const size_t nbytes = codec.row_nbytes(), piece = std::max<size_t>(kPackNbytes / std::max<size_t>(nbytes, 1), 1);
    size_t covered = 0, summed = first * nbytes, widest = 0;
    for (size_t k = 0; k < codec.size(); ++k) {
        covered += codec.spans()[k].nbytes;
        if (codec.spans()[k].nbytes > codec.spans()[widest].nbytes) widest = k;
    }
    uint32_t crc = 0;
    for (size_t begin = first; begin < last; begin += piece) {
        const size_t end = std::min(last, begin + piece);
        if (covered != nbytes) std::memset(to + begin * nbytes, 0, (end - begin) * nbytes);
        scatter_leaves(to, nbytes, begin, end, codec.spans(), codec.size(), leaves);
        const size_t ready = end * nbytes - summed, now = end == last ? ready : ready / kCrcChunk * kCrcChunk;
        const byte* next = codec.size() ? leaves[widest] + end * codec.spans()[widest].nbytes : to;  // the others' streams are seen
        crc = crc32c(crc, to + summed, now, next);
        summed += now;
    }
    return crc;
}

// All of n samples, and the crc32c of all, on several threads when they are large.
inline uint32_t pack_rows(byte* to, size_t n, const Codec& codec, const byte* const* leaves) {
    return sum_parts(n, codec.row_nbytes(), [&](size_t first, size_t last) { return pack_rows(to, first, last, codec, leaves); });
}

struct Move { size_t from, to, nbytes; };

// Where the parts of a packed item go in its stored row.
struct ItemPlan {
    size_t row_nbytes = 0, step_nbytes = 0, field_nbytes = 0;
    size_t length_at = 0, room = 0;  // room 0: items are samples, without steps
    std::vector<Move> steps, fields;
};

struct PackedItems {
    const byte* steps = nullptr;
    const byte* fields = nullptr;
    std::vector<int32_t> lengths;
    std::vector<size_t> starts;  // the first step of each item
};

inline void fill_item(byte* row, const ItemPlan& plan, const PackedItems& items, size_t i) {
    for (const Move& f : plan.fields) copy_bytes(row + f.to, items.fields + i * plan.field_nbytes + f.from, f.nbytes);
    if (!plan.room) return;
    const int32_t length = items.lengths[i];
    std::memcpy(row + plan.length_at, &length, sizeof length);
    for (const Move& s : plan.steps) {
        const byte* from = items.steps + items.starts[i] * plan.step_nbytes + s.from;
        byte* to = row + s.to;
        with_copy(s.nbytes, [=, step = plan.step_nbytes, size = s.nbytes](auto copy_one) {
            const byte* f = from;
            byte* t = to;
            for (int32_t j = 0; j < length; ++j, f += step, t += size) copy_one(t, f);
        });
    }
}

// Into the ring, oldest out. The caller holds lane k.
inline void place_newest(Memory& m, size_t k, const ItemPlan& plan, const PackedItems& items, const int64_t* index,
                         size_t n, int64_t* rows) {
    Writer writer(m, k);
    for (size_t i = 0; i < n; ++i) {
        rows[i] = int64_t(writer.append_by([&](byte* row, size_t) { fill_item(row, plan, items, size_t(index[i])); }));
        if (m.tagged) m.lane(k).open_segment.store(0, std::memory_order_relaxed);
        if (i >= m.run) rows[i - m.run] = kDisplaced;
    }
}

// Let a mirror of keys by row (NaN: none) and a tree of its finite ones follow a change; rows are distinct. Returns by
// how many finite ones there are more.
inline int64_t mirror_keys(Tree<Min>& tree, double* mirror, const int64_t* rows, const double* keys, size_t n) {
    int64_t more = 0;
    for (size_t i = 0; i < n; ++i) {
        more += int64_t(std::isfinite(keys[i])) - int64_t(std::isfinite(mirror[rows[i]]));
        mirror[rows[i]] = keys[i];
    }
    std::vector<Ranked> ranked(n);
    for (size_t i = 0; i < n; ++i) ranked[i] = {std::isfinite(keys[i]) ? keys[i] : Min::empty.value, 0};
    tree.set(rows, ranked.data(), n);
    return more;
}

}  // namespace recollect
