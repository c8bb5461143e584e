// Sum and min trees of 16 children a node: shallow, and a node's children share two cache lines.
//
// An update recomputes each touched node from its children, so rounding never accumulates: the total is always
// the sum of what is stored, and setting everything to zero gives exactly zero.
//
// Of sums, the nodes above the leaves also keep the running sums of their children: a descent then counts which of
// sixteen numbers it has passed, where it would have to add them up (256 descents through 10^6 leaves: 14.7 to 9.3 us).
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <new>
#include <stdexcept>
#include <vector>

#include "sizes.hpp"
#include "system.hpp"
#include "wide.hpp"

namespace recollect {

constexpr size_t kArity = 16;

// Memory on cache lines; from 2 MB on in huge pages, where descents would otherwise miss the TLB at every step.
template <typename T> struct InPages {
    using value_type = T;
    static constexpr size_t kHuge = size_t(2) << 20;
    InPages() = default;
    template <typename U> InPages(const InPages<U>&) {}
    T* allocate(size_t n) {
        const size_t nbytes = n * sizeof(T), unit = nbytes < kHuge ? 64 : kHuge;
        void* p = std::aligned_alloc(unit, (nbytes + unit - 1) / unit * unit);
        if (!p) throw std::bad_alloc();
        if (unit == kHuge) want_huge_pages(p, nbytes);
        return static_cast<T*>(p);
    }
    void deallocate(T* p, size_t) { std::free(p); }
    template <typename U> bool operator==(const InPages<U>&) const { return true; }
};

struct Sum {
    using value = double;
    static constexpr bool has_running = true;
    static constexpr double empty = 0.0;
    // Always in this order, four sums side by side: they do not wait for one another.
    static double of(const double* c) {
        double s[4] = {c[0], c[1], c[2], c[3]};
        for (size_t i = 4; i < kArity; i += 4)
            for (size_t k = 0; k < 4; ++k) s[k] += c[i + k];
        return (s[0] + s[1]) + (s[2] + s[3]);
    }
    // Running sums within each four, and of the fours: they rise nowhere but where a child is above zero.
    static double run(const double* c, double* running) {
        double before = 0.0, within[kArity];
        for (size_t i = 0; i < kArity; i += 4) {
            within[i] = c[i];
            for (size_t k = 1; k < 4; ++k) within[i + k] = within[i + k - 1] + c[i + k];
        }
        for (size_t i = 0; i < kArity; i += 4) {
            for (size_t k = 0; k < 4; ++k) running[i + k] = before + within[i + k];
            before += within[i + 3];
        }
        return before;
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
    static constexpr bool has_running = false;
    static constexpr Ranked empty{std::numeric_limits<double>::infinity(), std::numeric_limits<int64_t>::max()};
    static Ranked of(const Ranked* children) { return *std::min_element(children, children + kArity); }
};

template <typename Op> class Tree {
  public:
    using value = typename Op::value;

    explicit Tree(size_t capacity) : capacity_(checked_size(capacity)) {
        if (capacity == 0) throw std::invalid_argument("capacity: must be at least 1, got 0");
        size_t n = capacity;
        do {
            n = (n + kArity - 1) / kArity;
            levels_.emplace_back((levels_.empty() ? (capacity + kArity - 1) / kArity * kArity
                                                  : (levels_.back().size() / kArity + kArity - 1) / kArity * kArity),
                                 Op::empty);
            if constexpr (Op::has_running) running_.emplace_back(levels_.size() > 1 ? levels_.back().size() : 0, Op::empty);
        } while (n > 1);
    }

    size_t capacity() const { return capacity_; }
    value top() const {
        if constexpr (Op::has_running)
            if (levels_.size() > 1) return running_.back()[kArity - 1];
        return Op::of(levels_.back().data());
    }
    value leaf(size_t row) const { return levels_[0][row]; }
    const value* leaves() const { return levels_[0].data(); }

    // Room to set n leaves at a time without taking memory.
    void reserve(size_t n) { touched_.reserve(n); }

    // Set many leaves (of duplicates the last wins), then mend each level once.
    RECOLLECT_WIDE void set(const int64_t* rows, const value* values, size_t n) {
        if (n == 0) return;
        touched_.resize(n);
        for (size_t i = 0; i < n; ++i) {
            if (i + kLead < n) __builtin_prefetch(&levels_[0][rows[i + kLead]], 1);
            levels_[0][rows[i]] = values[i];
            touched_[i] = static_cast<size_t>(rows[i]) / kArity;
        }
        for (size_t level = 1; level < levels_.size(); ++level) {
            size_t kept = 0, last = std::numeric_limits<size_t>::max();
            for (size_t i = 0; i < touched_.size(); ++i) {
                if (i + kLead < touched_.size()) {
                    prefetch_children(level - 1, touched_[i + kLead]);
                    __builtin_prefetch(&levels_[level][touched_[i + kLead]], 1);
                }
                const size_t node = touched_[i];
                if (node == last) continue;  // neighbours are often drawn together
                last = node;
                levels_[level][node] = mend(level - 1, node);
                touched_[kept++] = node / kArity;
            }
            touched_.resize(kept);
        }
        if (levels_.size() > 1) mend(levels_.size() - 1, 0);
    }

    // Sum only. The row where the running sum passes `mass`; zero leaves are never found.
    size_t find(double mass) const {
        size_t node = 0;
        mass = mass > 0.0 ? mass : 0.0;
        for (size_t level = levels_.size(); level-- > 0;) node = descend(level, node, mass);
        return node;
    }

    // find() of many, level by level, so that their cache misses overlap. `masses` are used up; `found(row)` is called as
    // each is known.
    template <typename Found> RECOLLECT_WIDE void find_all(double* masses, size_t n, int64_t* rows, Found found) const {
        for (size_t i = 0; i < n; ++i) { rows[i] = 0; masses[i] = masses[i] > 0.0 ? masses[i] : 0.0; }
        for (size_t level = levels_.size(); level-- > 0;) {
            const double *children = levels_[level].data(), *running = running_[level].data();
            if (level) {
                for (size_t i = 0; i < n; ++i) {
                    const size_t at = size_t(rows[i]) * kArity;
                    rows[i] = int64_t(at + child_passed(children + at, running + at, masses[i]));
                }
                continue;
            }
            for (size_t i = 0; i < n; ++i) {
                if (i + kLead < n) prefetch_children(0, size_t(rows[i + kLead]));
                rows[i] = int64_t(descend(children + size_t(rows[i]) * kArity, size_t(rows[i]), masses[i]));
                found(size_t(rows[i]));
            }
        }
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
    static constexpr size_t kLead = 12;  // how far ahead to ask for memory

    void prefetch_children(size_t level, size_t node) const {
        const value* at = &levels_[level][node * kArity];
        for (size_t i = 0; i < kArity; i += 64 / sizeof(value)) __builtin_prefetch(at + i);
    }

    // Combine the children of a node, and run through them where that is kept.
    value mend(size_t level, size_t node) {
        if constexpr (Op::has_running)
            if (level) return Op::run(&levels_[level][node * kArity], &running_[level][node * kArity]);
        return Op::of(&levels_[level][node * kArity]);
    }

    // The child of `node` in which the running sum passes `mass`, which becomes the mass within it. A running sum that
    // passes a mass has risen: what is found is above zero.
    size_t descend(size_t level, size_t node, double& mass) const {
        const size_t at = node * kArity;
        return level ? at + child_passed(&levels_[level][at], &running_[level][at], mass) : descend(&levels_[0][at], node, mass);
    }
    static size_t child_passed(const double* c, const double* running, double& mass) {
        typedef double Wide __attribute__((vector_size(32)));
        typedef int64_t Counts __attribute__((vector_size(32)));
        const Wide masses = {mass, mass, mass, mass};
        Counts passed = {};
        for (size_t k = 0; k < kArity; k += 4) {
            Wide sums;
            std::memcpy(&sums, running + k, sizeof sums);
            passed -= sums <= masses;  // true is -1
        }
        const int64_t i = (passed[0] + passed[1]) + (passed[2] + passed[3]);
        if (i == int64_t(kArity)) [[unlikely]] return last_above_zero(c, kArity - 1, mass);
        mass -= i ? running[i - 1] : 0.0;
        return size_t(i);
    }
    // Of leaves: first which four, then which of them; counted, not searched, so that there is no branch to mispredict
    // and the sums of several nodes are under way at once.
    static size_t descend(const double* c, size_t node, double& mass) {
        double fours[4];
        for (size_t k = 0; k < 4; ++k) fours[k] = (c[4 * k] + c[4 * k + 1]) + (c[4 * k + 2] + c[4 * k + 3]);
        const size_t four = pass(fours, mass);
        if (four < 4) [[likely]] {
            const size_t i = pass(c + 4 * four, mass);
            if (i < 4) [[likely]] return node * kArity + 4 * four + i;
        }
        return node * kArity + last_above_zero(c, four < 4 ? 4 * four + 3 : kArity - 1, mass);
    }
    // Rounding carried the mass past the end: then the last child (of these four) that has any is the one.
    static size_t last_above_zero(const double* c, size_t i, double& mass) {
        while (i > 0 && !(c[i] > 0.0)) --i;
        mass = c[i];
        return i;
    }
    static size_t pass(const double* parts, double& mass) {
        double sum = 0.0, before = 0.0;
        size_t i = 0;
        for (size_t k = 0; k < 4; ++k) {
            sum += parts[k];
            const bool passed = sum <= mass;
            i += passed;
            before = passed ? sum : before;
        }
        mass -= before;
        return i;
    }

    size_t capacity_;
    std::vector<std::vector<value, InPages<value>>> levels_;  // levels_[0] are the leaves
    std::vector<std::vector<value, InPages<value>>> running_;  // of sums: for each level but the leaves
    std::vector<size_t> touched_;
};

}  // namespace recollect
