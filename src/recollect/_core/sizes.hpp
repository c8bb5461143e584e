// Sizes that are products of numbers from a caller, a file or a peer: no memory is taken for one that has overflowed.
#pragma once

#include <cstddef>
#include <new>

namespace recollect {

constexpr size_t kMostNbytes = size_t(1) << 60;  // more than any machine has; a sum of two does not overflow

struct TooLarge : std::bad_alloc {
    const char* what() const noexcept override { return "sizes: must come to less than 2**60 bytes, got more; ask for less at once"; }
};

inline size_t checked_size(size_t n) {
    if (n > kMostNbytes) [[unlikely]] throw TooLarge();
    return n;
}
inline size_t checked_product(size_t a, size_t b) {
    size_t product;
    if (__builtin_mul_overflow(a, b, &product)) [[unlikely]] throw TooLarge();
    return checked_size(product);
}

}  // namespace recollect
