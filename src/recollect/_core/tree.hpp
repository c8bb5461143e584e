// Sum and min trees of 16 children a node: shallow, and a node's children share two cache lines.
//
// An update recomputes each touched node from its children, so rounding never accumulates: the total is always
// the sum of what is stored, and setting everything to zero gives exactly zero.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <vector>

namespace recollect {

constexpr size_t kArity = 16;

struct Sum {
    using value = double;
    static constexpr double empty = 0.0;
    static double of(const double* children) {
        double total = 0.0;
        for (size_t i = 0; i < kArity; ++i) total += children[i];
        return total;
    }
};

// A value and its age: of equal values the smaller order is the lower.
struct Ranked {
    double value;
    int64_t order;
    bool operator<(const Ranked& other) const {
        return value < other.value || (value == other.value && order < other.order);
    }
};

struct Min {
    using value = Ranked;
    static constexpr Ranked empty{std::numeric_limits<double>::infinity(), std::numeric_limits<int64_t>::max()};
    static Ranked of(const Ranked* children) { return *std::min_element(children, children + kArity); }
};

template <typename Op> class Tree {
  public:
    using value = typename Op::value;

    explicit Tree(size_t capacity) : capacity_(capacity) {
        if (capacity == 0) throw std::invalid_argument("capacity: must be at least 1, got 0");
        size_t n = capacity;
        do {
            n = (n + kArity - 1) / kArity;
            levels_.emplace_back((levels_.empty() ? (capacity + kArity - 1) / kArity * kArity
                                                  : (levels_.back().size() / kArity + kArity - 1) / kArity * kArity),
                                 Op::empty);
        } while (n > 1);
    }

    size_t capacity() const { return capacity_; }
    value top() const { return Op::of(levels_.back().data()); }
    value leaf(size_t row) const { return levels_[0][row]; }

    // Set many leaves (of duplicates the last wins), then mend each level once.
    void set(const int64_t* rows, const value* values, size_t n) {
        if (n == 0) return;
        touched_.resize(n);
        for (size_t i = 0; i < n; ++i) {
            levels_[0][rows[i]] = values[i];
            touched_[i] = static_cast<size_t>(rows[i]) / kArity;
        }
        for (size_t level = 1; level < levels_.size(); ++level) {
            size_t kept = 0, last = std::numeric_limits<size_t>::max();
            for (size_t i = 0; i < touched_.size(); ++i) {
                const size_t node = touched_[i];
                if (node == last) continue;  // neighbours are often drawn together
                last = node;
                levels_[level][node] = Op::of(&levels_[level - 1][node * kArity]);
                touched_[kept++] = node / kArity;
            }
            touched_.resize(kept);
        }
    }

    // Sum only. The row where the running sum passes `mass`; zero leaves are never found.
    size_t find(double mass) const {
        size_t node = 0;
        for (size_t level = levels_.size(); level-- > 0;) {
            const double* children = &levels_[level][node * kArity];
            size_t last_positive = 0, i = 0;
            for (; i < kArity; ++i) {
                if (!(children[i] > 0.0)) continue;
                last_positive = i;
                if (mass < children[i]) break;
                mass -= children[i];
            }
            // Rounding may carry the mass past the end: then the last child that has any is the one.
            if (i == kArity) { i = last_positive; mass = children[i]; }
            node = node * kArity + i;
        }
        return node;
    }

    // Min only. The first row that holds the smallest value.
    size_t find_lowest() const {
        size_t node = 0;
        for (size_t level = levels_.size(); level-- > 0;) {
            const Ranked* children = &levels_[level][node * kArity];
            node = node * kArity + (std::min_element(children, children + kArity) - children);
        }
        return node;
    }

  private:
    size_t capacity_;
    std::vector<std::vector<value>> levels_;  // levels_[0] are the leaves
    std::vector<size_t> touched_;
};

}  // namespace recollect
