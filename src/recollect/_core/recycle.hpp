// Batches that nobody has any more, filled again instead of made again.
//
// Making five arrays and a dict costs 0.6 us, a tenth of a draw of 256 rows. A loop has one batch while it draws
// the next, so the last two are kept. A batch is the caller's own: it comes back only if no part of it is referred to
// from anywhere else, not even weakly, and all of it is as it was made. Otherwise it stays as it is.
//
// That is told by reference counts, which must be exact: a thread may have references without counting them in CPython
// from 3.14 on and in free-threaded builds, so there each batch is made anew. Saved by it, median of 300 interleaved
// rounds: 0.25 of 1.18 us at 64 rows of 165 bytes, 0.27 of 3.40 at 256, nothing to speak of at a megabyte.
#pragma once

#include "codec.hpp"

namespace recollect {

inline bool counts_are_exact() {
#ifdef Py_GIL_DISABLED
    return false;
#else
    return Py_Version < 0x030E0000;  // of the interpreter that runs: a wheel of 3.12 is loaded by all that follow
#endif
}
inline bool fills_again = counts_are_exact();  // tests and measurements set it

// Under the GIL throughout.
class Recycled {
  public:
    explicit Recycled(const Codec& codec) : codec_(codec) {}

    // A batch of n and where its leaves are.
    nb::object take(npy_intp n, PerLeaf<byte*>& leaves) {
        if (fills_again)
            for (Kept& kept : kept_) {
                if (!is_free(kept, n)) continue;
                for (size_t k = 0; k < codec_.size(); ++k) leaves[k] = data(kept.arrays[k]);
                return kept.batch;
            }
        PerLeaf<nb::object> arrays(codec_.size());
        codec_.make_arrays(n, arrays, leaves);
        nb::object batch = codec_.build(arrays, false);
        if (fills_again && checked_product(codec_.row_nbytes(), size_t(n)) <= kLargest) keep(batch, n, arrays);
        return batch;
    }

  private:
    static constexpr size_t kLargest = size_t(1) << 20;  // of larger ones the copy is all that counts

    struct Kept {
        nb::object batch;
        std::vector<nb::object> arrays;
        std::vector<byte*> leaves;
        npy_intp n = -1;
    };

    static byte* data(const nb::object& array) {
        return static_cast<byte*>(PyArray_DATA(reinterpret_cast<PyArrayObject*>(array.ptr())));
    }

    void keep(const nb::object& batch, npy_intp n, PerLeaf<nb::object>& arrays) {
        Kept& kept = kept_[next_++ % 2];
        kept.batch = batch;
        kept.arrays.assign(arrays.data(), arrays.data() + codec_.size());
        kept.leaves.clear();
        for (const nb::object& array : kept.arrays) kept.leaves.push_back(data(array));
        kept.n = n;
    }

    bool is_free(const Kept& kept, npy_intp n) const {
        if (kept.n != n || !codec_.is_built_of(kept.batch.ptr(), kept.arrays.data())) return false;
        for (size_t k = 0; k < codec_.size(); ++k)
            if (!is_free(kept, k)) return false;
        return true;
    }
    bool is_free(const Kept& kept, size_t k) const {
        PyObject* array = kept.arrays[k].ptr();
        // Two have it: the batch, which may be the array itself, and we.
        return Py_REFCNT(array) == 2 && data(kept.arrays[k]) == kept.leaves[k] &&
               !reinterpret_cast<PyArrayObject_fields*>(array)->weakreflist && codec_.can_fill(k, array, kept.n);
    }

    const Codec& codec_;
    Kept kept_[2];
    size_t next_ = 0;
};

}  // namespace recollect
