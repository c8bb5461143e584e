// Priorities of rows: a mass for each live row, kept up with the writers, and draws in proportion to it.
//
// What is new or gone since the last call is read off the lanes' windows: positions behind the old cursor are new,
// those before the new low are gone. So keeping up costs what was written, not what is held. A change inside a window
// (overwrite, removal) shows as another epoch; then the generations of that lane's rows tell which samples are others
// now, in one pass.
//
// Where windows are asked for (see windows.hpp), only the rows at which one begins have a mass, and a window is known
// by that row and its generation. A new row can complete the window that begins `length - 1` rows before it, so keeping
// up costs `length` rows more for each lane that was written to.
//
// The sums are a function of the leaves alone (see tree.hpp): whoever sets the same masses gets the same bits, however
// the masses came about. A saved and restored sampler therefore draws as if it had never stopped.
#pragma once

#include <cmath>

#include "powers.hpp"
#include "rows.hpp"
#include "tree.hpp"
#include "windows.hpp"

namespace recollect {

constexpr double kMostMass = 0x1p900;  // masses up to this add up to something finite, however many there are

struct Least {
    using value = double;
    static constexpr bool has_running = false;
    static constexpr double empty = std::numeric_limits<double>::infinity();
    static double of(const double* c) {
        double low[4] = {c[0], c[1], c[2], c[3]};  // side by side, as the sums
        for (size_t i = 4; i < kArity; i += 4)
            for (size_t k = 0; k < 4; ++k) low[k] = c[i + k] < low[k] ? c[i + k] : low[k];
        return std::min(std::min(low[0], low[1]), std::min(low[2], low[3]));
    }
};

// Masses by row, their sum, and the least of those above zero. The least is kept per sixteen rows: the leaves
// themselves are in the sum tree.
class Masses {
  public:
    explicit Masses(size_t capacity) : sum_(capacity), least_((capacity + kArity - 1) / kArity) {}

    size_t capacity() const { return sum_.capacity(); }
    double total() const { return sum_.top(); }
    double least() const { return least_.top(); }
    double of(size_t row) const { return sum_.leaf(row); }
    template <typename Found> void find(double* masses, size_t n, int64_t* rows, Found found) const {
        sum_.find_all(masses, n, rows, found);
    }

    void set(const int64_t* rows, const double* masses, size_t n) {
        sum_.set(rows, masses, n);
        blocks_.clear();
        lows_.clear();
        for (size_t i = 0; i < n; ++i) {
            const int64_t block = rows[i] / int64_t(kArity);
            const double low = low_of(size_t(block));
            if (low == least_.leaf(size_t(block))) continue;  // as of most: the least of sixteen is rarely the one that changes
            blocks_.push_back(block);
            lows_.push_back(low);
        }
        least_.set(blocks_.data(), lows_.data(), blocks_.size());
    }

  private:
    double low_of(size_t block) const {
        double above_zero[kArity];
        const double* leaves = sum_.leaves() + block * kArity;
        for (size_t i = 0; i < kArity; ++i) above_zero[i] = leaves[i] > 0.0 ? leaves[i] : Least::empty;
        return Least::of(above_zero);
    }

    Tree<Sum> sum_;
    Tree<Least> least_;
    std::vector<int64_t> blocks_;
    std::vector<double> lows_;
};

// What a lane shows, and at which row it starts: then the position of a row is an addition, not a division.
struct Shown : Window {
    size_t first = 0, run = 0, start = 0;  // the lane's first row, its rows (0: unbounded), where `low` is in it
    Shown() : Window{0, 0, 1} {}            // an odd epoch is never shown, hence never equal
    Shown(const Memory& m, size_t k, const Window& v)
        : Window(v), first(k * m.run), run(m.run), start(m.run ? v.low % m.run : 0) {}

    uint64_t position(size_t row) const {
        if (!run) return row;
        const size_t at = row - first;
        return low + (at >= start ? at - start : at + run - start);
    }
    bool has(size_t row) const {
        const uint64_t p = position(row);
        return p >= low && p < cursor;
    }
};

// Where to put what is drawn; pointers may be null.
struct Drawn {
    int64_t *row, *generation;
    float *probability, *weight;
};

class Priorities {
  public:
    Priorities(std::weak_ptr<Memory> memory, double alpha, double eps, Wanted wanted)
        : memory_(std::move(memory)), alpha_(alpha), eps_(eps), wanted_(wanted), masses_(1) {
        auto m = lock();
        windows_.assign(m->n_lanes, Shown());
        reach(m->capacity);
    }

    std::shared_ptr<Memory> lock() const {
        auto m = memory_.lock();
        if (!m) throw std::logic_error("closed");
        return m;
    }

    // For a call that looks or changes: threads take turns, since a draw may run without the GIL.
    std::mutex& turn() {
        const uint32_t now = fork_count.load(std::memory_order_relaxed);
        if (now != forks_) { turn_ = std::make_unique<std::mutex>(); forks_ = now; }  // a thread of the parent may have it
        return *turn_;
    }

    double top() const { return top_; }
    double mass_of(double value) const { return power(value + eps_, alpha_); }
    std::vector<double> masses_of(const double* values, size_t n) const {
        std::vector<double> masses(n);
        for (size_t i = 0; i < n; ++i) masses[i] = values[i] + eps_;
        powers(masses.data(), alpha_, masses.data(), n);
        return masses;
    }
    double total() { auto m = lock(); Locked turn_of_ours(turn()); keep_up(*m); return masses_.total(); }
    double least() const { return masses_.least(); }

    // n draws, the i-th in the i-th of n equal parts of the mass, gathered by `codec` unless that is null. False when
    // there is nothing to draw.
    bool draw(Memory& m, uint64_t key, uint64_t counter, size_t n, double beta, const Codec* codec, byte* const* leaves,
              Drawn out) {
        bool found = true;
        Reader reader(m);
        reader.run([&] {
            Snapshot& s = reader.snapshot();
            keep_up(m, s);
            found = masses_.total() > 0.0;
            return !found || draw_from(m, s, key, counter, n, codec, leaves, out);
        });
        if (found) label(out.row, n, beta, out.probability, out.weight);
        return found;
    }

    // Give values (and the masses they come to) to those (row, generation) that still are the same sample; how many.
    size_t update(Memory& m, const int64_t* rows, const int64_t* generations, const double* values, const double* masses,
                  size_t n) {
        keep_up(m);
        for (size_t i = 0; i < n; ++i) {
            if (i + kLead < n && is_row(rows[i + kLead])) __builtin_prefetch(&m.stamp(size_t(rows[i + kLead])));
            if (!is_same(m, rows[i], generations[i])) continue;
            at_.push_back(rows[i]);
            new_masses_.push_back(masses[i]);
            top_ = std::max(top_, values[i]);
        }
        const size_t applied = at_.size();
        flush();
        return applied;
    }

    // Probability and weight as they are now; zeros for what is another sample now.
    void look(Memory& m, const int64_t* rows, const int64_t* generations, size_t n, double beta, float* probability,
              float* weight) {
        keep_up(m);
        std::vector<int64_t> known(rows, rows + n);
        for (size_t i = 0; i < n; ++i)
            if (!is_same(m, rows[i], generations[i])) known[i] = -1;
        label(known.data(), n, beta, probability, weight);
    }

    struct Known { int64_t row, generation; double mass; };
    // Every live row, at one moment but for those that are overwritten meanwhile.
    std::vector<Known> known(Memory& m) {
        std::vector<Known> found;
        Reader reader(m);
        reader.run([&] {
            keep_up(m, reader.snapshot());
            found.clear();
            for (size_t k = 0; k < windows_.size(); ++k)
                for (uint64_t p = windows_[k].low; p < windows_[k].cursor; ++p) {
                    const size_t r = m.row_of(k, p);
                    if (!seen_[r]) continue;  // no window begins here
                    moment();
                    const int64_t generation = int64_t(m.generation(r));
                    if (!is_lapped(m, r)) found.push_back({int64_t(r), generation, masses_.of(r)});
                }
            return reader.snapshot().same_epochs();
        });
        return found;
    }

    // Forget everything; then these masses hold for those (row, generation) that exist, and all others are new.
    void restore(Memory& m, const int64_t* rows, const int64_t* generations, const double* masses, size_t n, double top) {
        top_ = top;
        masses_ = Masses(masses_.capacity());
        std::fill(seen_.begin(), seen_.end(), 0);
        windows_.assign(m.n_lanes, Shown());
        keep_up(m);
        for (size_t i = 0; i < n; ++i) {
            if (!is_same(m, rows[i], generations[i])) continue;
            at_.push_back(rows[i]);
            new_masses_.push_back(masses[i]);
        }
        flush();
    }

  private:
    static constexpr size_t kLead = 12;
    static constexpr size_t kPart = 4096;

    // --- keeping up ---------------------------------------------------------------------------------------------
    void keep_up(Memory& m) {
        Reader reader(m);
        reader.run([&] { keep_up(m, reader.snapshot()); return true; });
    }

    void keep_up(Memory& m, const Snapshot& s) {
        if (!m.capacity) reach(m.held_rows());
        fresh_ = mass_of(top_);
        for (size_t k = 0; k < windows_.size(); ++k) {
            if (windows_[k].epoch == s[k].epoch && windows_[k].low == s[k].low && windows_[k].cursor == s[k].cursor) continue;
            const Shown before = windows_[k], now(m, k, s[k]);
            before.epoch == now.epoch ? advance(m, s, k, before, now) : compare(m, s, k, before, now);
            windows_[k] = now;
        }
        flush();
    }

    void advance(Memory& m, const Snapshot& s, size_t k, const Shown& before, const Shown& now) {
        leave(m, k, before.low, std::min(now.low, before.cursor), now);
        if (!wanted_.length) {
            for (uint64_t p = std::max(before.cursor, now.low); p < now.cursor; ++p) enter(m, m.row_of(k, p));
            return;
        }
        const Runs runs(m, s, true);
        const uint64_t back = std::min(wanted_.length - 1, before.cursor);  // rows whose window was too short until now
        const uint64_t from = std::max(before.cursor - back, now.low);
        for (uint64_t p = from; p < now.cursor; ++p) look_at(m, runs, k, p);
        if (now.low < from) look_at(m, runs, k, now.low);  // with `pad`, where the oldest segment begins by now
    }

    // Positions [from, to) are gone; a row that shows a newer sample will be entered anyway.
    void leave(Memory& m, size_t k, uint64_t from, uint64_t to, const Shown& now) {
        for (uint64_t p = from; p < to; ++p) {
            const size_t r = m.row_of(k, p);
            if (!now.has(r)) put(r, 0.0, 0);
        }
    }

    // After a change in place: whatever has another generation than we know is another sample.
    void compare(Memory& m, const Snapshot& s, size_t k, const Shown& before, const Shown& now) {
        leave(m, k, before.low, before.cursor, now);
        const Runs runs(m, s, true);
        for (uint64_t p = now.low; p < now.cursor; ++p) look_at(m, runs, k, p);
    }

    // Give the row of a position its mass if it is another sample than we know, and none if no window begins there.
    void look_at(const Memory& m, const Runs& runs, size_t k, uint64_t p) {
        const size_t r = m.row_of(k, p);
        if (wanted_.length && !runs.starts(wanted_, {k, p})) {
            if (seen_[r]) put(r, 0.0, 0);
        } else if (seen_[r] != tag(m, r)) {
            enter(m, r);
        }
    }

    // Enough of a generation to tell it from its neighbours; 0 is none.
    static uint32_t tag(const Memory& m, size_t r) { return uint32_t(m.generation(r)) << 1 | 1; }
    void enter(const Memory& m, size_t r) { put(r, fresh_, tag(m, r)); }

    void put(size_t r, double mass, uint32_t seen) {
        seen_[r] = seen;
        if (at_.size() == kPart) flush();
        at_.push_back(int64_t(r));
        new_masses_.push_back(mass);
    }
    void flush() {
        masses_.set(at_.data(), new_masses_.data(), at_.size());
        at_.clear();
        new_masses_.clear();
    }

    // Room for n rows. Sums do not depend on how much room there is: zeros add nothing.
    void reach(size_t n) {
        if (n <= seen_.size()) return;
        Masses more(n);
        std::vector<int64_t> rows(seen_.size());
        std::vector<double> masses(seen_.size());
        for (size_t r = 0; r < rows.size(); ++r) { rows[r] = int64_t(r); masses[r] = masses_.of(r); }
        more.set(rows.data(), masses.data(), rows.size());
        masses_ = std::move(more);
        seen_.resize(n);
    }

    // --- rows -----------------------------------------------------------------------------------------------------
    bool is_row(int64_t r) const { return r >= 0 && size_t(r) < seen_.size(); }
    size_t lane_of(const Memory& m, size_t r) const { return m.n_lanes == 1 ? 0 : r / m.run; }
    // Has the row been overwritten, or is it about to be, since the windows were taken? Ask after reading it.
    bool is_lapped(const Memory& m, size_t r) const {
        std::atomic_thread_fence(std::memory_order_acquire);
        const size_t k = lane_of(m, r);
        return windows_[k].position(r) < m.low_of(m.lane(k));
    }

    // Is (r, generation) a sample that we know of? (If it goes just now, keep_up() will find that its row is new.)
    bool is_same(const Memory& m, int64_t r, int64_t generation) const {
        return is_row(r) && windows_[lane_of(m, size_t(r))].has(size_t(r)) && seen_[size_t(r)] &&
               int64_t(m.generation(size_t(r))) == generation;
    }

    // --- draws ------------------------------------------------------------------------------------------------------
    static double unit(uint64_t key, uint64_t counter) {  // number `counter` of the stream `key`, in [0, 1)
        return double(mix(key + (counter + 1) * 0x9E3779B97F4A7C15ull) >> 11) * 0x1p-53;
    }

    bool draw_from(Memory& m, Snapshot& s, uint64_t key, uint64_t counter, size_t n, const Codec* codec,
                   byte* const* leaves, Drawn out) {
        const double part = masses_.total() / double(n);
        targets_.resize(n);
        for (size_t i = 0; i < n; ++i) targets_[i] = (double(i) + unit(key, counter + i)) * part;
        // What is found is asked for at once: its memory is on the way while the rest are searched for.
        const size_t lines = n <= kPart && codec ? std::min<size_t>(codec->extent().nbytes, 512) : 0;
        const byte* first = m.capacity && codec ? m.row(0) + codec->extent().offset : nullptr;
        masses_.find(targets_.data(), n, out.row, [&m, first, lines, nbytes = m.row_nbytes, n](size_t row) {
            if (n <= kPart) __builtin_prefetch(&m.stamp(row));
            if (first)
                for (size_t at = 0; at < lines + 63; at += 64)
                    __builtin_prefetch(first + row * nbytes + std::min(at, lines - 1), 0, kL2);
        });
        moment();
        if (codec) gather_rows(m, out.row, n, *codec, leaves);
        moment();
        if (out.generation)
            for (size_t i = 0; i < n; ++i) out.generation[i] = int64_t(m.generation(size_t(out.row[i])));
        moment();
        for (uint64_t again = 1; !s.is_untouched(); ++again) {
            if (again > kRedraws) return false;
            const Redrawn redrawn = draw_lapped(m, s, mix(key ^ again), counter, n, codec, leaves, out);
            if (redrawn == kAllGone) return false;
            if (redrawn == kNone) break;
        }
        return s.same_epochs();
    }

    static void gather_rows(const Memory& m, const int64_t* rows, size_t n, const Codec& codec, byte* const* leaves) {
        in_parallel(n, n * m.row_nbytes, [&](size_t begin, size_t end) {
            auto row = [&m, rows](size_t i) { return static_cast<const byte*>(m.row(size_t(rows[i]))); };
            gather_leaves(row, begin, end, codec.extent(), codec.spans(), codec.size(), leaves);
        });
    }

    enum Redrawn { kNone, kSome, kAllGone };
    // Draw again, from what is left, those that were overwritten while they were copied.
    Redrawn draw_lapped(Memory& m, Snapshot& s, uint64_t key, uint64_t counter, size_t n, const Codec* codec,
                     byte* const* leaves, Drawn out) {
        s.shrink();  // then judge by that very moment: a later one could take more than is drawn again
        moment();
        std::vector<size_t> lapped;
        for (size_t i = 0; i < n; ++i) {
            const size_t k = lane_of(m, size_t(out.row[i]));
            if (windows_[k].position(size_t(out.row[i])) < s[k].low) lapped.push_back(i);
        }
        keep_up(m, s);
        if (lapped.empty()) return kNone;
        if (!(masses_.total() > 0.0)) return kAllGone;  // and what is left would pass for untouched
        const double part = masses_.total() / double(n);
        for (size_t i : lapped) {
            double mass = (double(i) + unit(key, counter + i)) * part;
            masses_.find(&mass, 1, &out.row[i], [](size_t) {});
            if (codec) copy_sample(m, size_t(out.row[i]), i, *codec, leaves);
            if (out.generation) out.generation[i] = int64_t(m.generation(size_t(out.row[i])));
        }
        moment();
        return kSome;
    }

    // P = mass / total; weight = (N P)**-beta over the largest that a live row has, which is the one of least mass.
    void label(const int64_t* rows, size_t n, double beta, float* probability, float* weight) const {
        if (!probability) return;
        const double total = masses_.total(), least = masses_.least();
        constexpr size_t kSome = 256;
        double mass[kSome], ratio[kSome];
        for (size_t at = 0; at < n; at += kSome) {
            const size_t m = std::min(kSome, n - at);
            for (size_t i = 0; i < m; ++i) {
                mass[i] = rows[at + i] < 0 ? 0.0 : masses_.of(size_t(rows[at + i]));
                ratio[i] = mass[i] > 0.0 ? least / mass[i] : 1.0;
                probability[at + i] = mass[i] > 0.0 ? float(mass[i] / total) : 0.0f;
            }
            powers(ratio, beta, ratio, m);
            for (size_t i = 0; i < m; ++i) weight[at + i] = mass[i] > 0.0 ? float(ratio[i]) : 0.0f;
        }
    }

    std::weak_ptr<Memory> memory_;
    std::unique_ptr<std::mutex> turn_ = std::make_unique<std::mutex>();
    uint32_t forks_ = fork_count.load();
    double alpha_, eps_, top_ = 1.0, fresh_ = 1.0;
    const Wanted wanted_;
    Masses masses_;
    std::vector<uint32_t, InPages<uint32_t>> seen_;  // a tag of the generation that each row's mass is for
    std::vector<Shown> windows_;
    std::vector<int64_t> at_;  // what flush() will set; empty between calls
    std::vector<double> new_masses_, targets_;
};

}  // namespace recollect
