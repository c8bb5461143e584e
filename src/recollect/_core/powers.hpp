// Powers of many numbers: four at a time, and the same bits on every processor and with every libc.
//
// x**a is 2**(a log2 x). The logarithm is the series of atanh about the nearest power of two, the exponential that of
// its own; both go on until a term is below the last bit. The error is that of a log2 x in the last bit, so it grows with
// the exponent of the result: below 1e-14 of it for results from 1e-15 to 1e15. What is not an ordinary number goes to libm.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>

#include "wide.hpp"

namespace recollect {

inline double power_of_ordinary(double x, double a) {
    constexpr uint64_t kExponents = uint64_t(1023) << 52, kRootOfHalf = 0x3FE6A09E667F3BCDull;
    const uint64_t bits = std::bit_cast<uint64_t>(x);
    // x = 2**(e - 1023) m with m from sqrt(1/2) to sqrt(2).
    const uint64_t e = (bits - kRootOfHalf + kExponents) >> 52;
    const double exponent = std::bit_cast<double>(e | 0x4330000000000000ull) - (0x1p52 + 1023.0);
    const double m = std::bit_cast<double>(bits - (e << 52) + kExponents);
    const double s = (m - 1.0) / (m + 1.0), z = s * s;
    // Pairs of terms side by side (Estrin): shorter than one after the other.
    const double z2 = z * z, z4 = z2 * z2;
    const double a0 = (1.0 / 3 + z * (1.0 / 5)) + z2 * (1.0 / 7 + z * (1.0 / 9));
    const double a1 = (1.0 / 11 + z * (1.0 / 13)) + z2 * (1.0 / 15 + z * (1.0 / 17));
    const double a2 = (1.0 / 19 + z * (1.0 / 21)) + z2 * (1.0 / 23);
    const double series = a0 + z4 * (a1 + z4 * a2);
    const double y = a * (exponent + (s + s * (z * series)) * 2.885390081777926814);  // 2 / ln 2
    // y = n + r with |r| at most a half: adding this number leaves n in the low bits.
    const double shifted = y + 0x1.8p52, r = (y - (shifted - 0x1.8p52)) * 0.6931471805599453094;
    const double r2 = r * r, r4 = r2 * r2;
    const double b0 = (1.0 / 2 + r * (1.0 / 6)) + r2 * (1.0 / 24 + r * (1.0 / 120));
    const double b1 = (1.0 / 720 + r * (1.0 / 5040)) + r2 * (1.0 / 40320 + r * (1.0 / 362880));
    const double b2 = (1.0 / 3628800 + r * (1.0 / 39916800)) + r2 * (1.0 / 479001600 + r * (1.0 / 6227020800.0));
    const double exp = 1.0 + (r + r2 * (b0 + r4 * (b1 + r4 * b2)));
    return std::bit_cast<double>(std::bit_cast<uint64_t>(exp) + (std::bit_cast<uint64_t>(shifted) << 52));
}

// out[i] = x[i]**a; `out` may be `x`.
RECOLLECT_WIDE inline void powers(const double* x, double a, double* out, size_t n) {
    if (a == 1.0) { std::copy_n(x, x == out ? 0 : n, out); return; }
    constexpr double kSmall = 0x1p-1022, kLarge = 0x1p1023;
    const double most = 1000.0 / std::fmax(std::fabs(a), 1.0);  // |log2 x| up to this leaves an ordinary result
    const double low = most < 1022 ? std::exp2(-most) : kSmall, high = most < 1022 ? std::exp2(most) : kLarge;
    constexpr size_t kPart = 64;
    for (size_t at = 0; at < n; at += kPart) {
        const size_t m = n - at < kPart ? n - at : kPart;
        double in[kPart];
        uint64_t odd = 0;
        for (size_t i = 0; i < m; ++i) {
            in[i] = x[at + i];
            odd += !(in[i] >= low && in[i] <= high);
        }
        for (size_t i = 0; i < m; ++i) out[at + i] = power_of_ordinary(in[i], a);
        if (odd || !std::isfinite(a)) [[unlikely]]
            for (size_t i = 0; i < m; ++i)
                if (!(in[i] >= low && in[i] <= high) || !std::isfinite(a)) out[at + i] = std::pow(in[i], a);
    }
}

inline double power(double x, double a) {
    powers(&x, a, &x, 1);
    return x;
}

}  // namespace recollect
