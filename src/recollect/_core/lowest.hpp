// evict="lowest": while there is room a sample takes a fresh row, then the row of the lowest, or none if it is lower.
#pragma once

#include "edits.hpp"
#include "tree.hpp"

namespace recollect {

constexpr int64_t kRejected = -1, kDisplaced = -2;  // in place of a row
struct Placed { size_t fresh = 0, replaced = 0, rejected = 0; };

// n samples one after the other, sample i by `fill(its row's memory, i)`; readers see them all at once. `first` is the
// order of arrival of the first, which decides between equals and stands in the step tags. Into rows[i] goes the row of
// sample i, kRejected, or kDisplaced if a later one took its row. The caller holds lane 0, the only one.
template <typename Fill>
Placed place_lowest(Memory& m, Tree<Min>& tree, const double* keys, size_t n, int64_t first, int64_t* rows, Fill fill) {
    // All memory is taken before the lane is touched: a change that lacks it half way could not be taken back.
    const uint64_t room = m.run - m.window(0).count();
    const size_t most = n - std::min<size_t>(n, room);
    Placed out;
    std::vector<size_t> owners;  // by order of arrival from `first` on: which sample it was
    std::vector<size_t> chosen, who;
    std::vector<int64_t> orders;
    owners.reserve(n), chosen.reserve(most), who.reserve(most), orders.reserve(most);
    tree.reserve(1);
    auto enter = [&](size_t i, int64_t row) {
        const Ranked ranked{keys[i], first + int64_t(owners.size())};
        owners.push_back(i);
        rows[i] = row;
        tree.set(&row, &ranked, 1);
        return ranked.order;
    };
    Lane& lane = m.lane(0);
    Change change(m, 0, kOverwrite);
    Writer writer(m, 0);
    size_t i = 0;
    for (; i < n && i < room; ++i) {
        writer.append_by([&](byte* row, size_t r) {
            fill(row, i);
            m.set_tag(r, 1, enter(i, int64_t(r)));
        });
        lane.open_segment.store(0, std::memory_order_relaxed);
        ++out.fresh;
    }
    for (; i < n; ++i) {
        const Ranked lowest = tree.top();
        if (keys[i] < lowest.value) { rows[i] = kRejected; ++out.rejected; continue; }
        const size_t row = tree.find_lowest();
        if (row >= m.run) m.damaged("more samples than their tree has keys");
        const auto own = uint64_t(lowest.order) - uint64_t(first);  // one of these, if it came after the first
        if (own < owners.size()) rows[owners[own]] = kDisplaced;
        orders.push_back(enter(i, int64_t(row)));
        chosen.push_back(row);
        who.push_back(i);
        ++out.replaced;
    }
    for (size_t j = 0; j < chosen.size(); ++j)
        overwrite_row(m, chosen[j], [&](byte* row) {
            if (rows[who[j]] < 0) return;  // a later one takes its row
            fill(row, who[j]);
            m.set_tag(chosen[j], 1, orders[j]);
        });
    change.end();
    lane.skip.fetch_add(out.replaced);
    if (out.rejected) m.shared().rejected.fetch_add(out.rejected);
    return out;
}

}  // namespace recollect
