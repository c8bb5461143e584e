// crc32c (Castagnoli), by the processor's instruction where it has one.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <nmmintrin.h>
#endif

namespace recollect {

inline uint32_t crc32c_table(uint32_t crc, const unsigned char* data, size_t n) {
    static const auto table = [] {
        std::array<uint32_t, 256> t{};
        for (uint32_t i = 0; i < 256; ++i) {
            uint32_t c = i;
            for (int k = 0; k < 8; ++k) c = (c >> 1) ^ (c & 1 ? 0x82F63B78u : 0u);
            t[i] = c;
        }
        return t;
    }();
    for (size_t i = 0; i < n; ++i) crc = table[(crc ^ data[i]) & 0xFF] ^ (crc >> 8);
    return crc;
}

#if defined(__x86_64__)
// What the register becomes when `kNbytes` zero bytes follow: linear in the register, so four table lookups.
template <size_t kNbytes> class AfterZeros {
  public:
    static uint32_t of(uint32_t crc) {
        static const AfterZeros zeros;
        const auto& t = zeros.table_;
        return t[0][crc & 0xFF] ^ t[1][crc >> 8 & 0xFF] ^ t[2][crc >> 16 & 0xFF] ^ t[3][crc >> 24];
    }

  private:
    AfterZeros() {
        const std::array<unsigned char, kNbytes> nothing{};
        for (size_t k = 0; k < 4; ++k) {
            for (size_t bit = 0; bit < 8; ++bit)
                table_[k][size_t(1) << bit] = crc32c_table(uint32_t(1) << (8 * k + bit), nothing.data(), kNbytes);
            for (size_t i = 1; i < 256; ++i) table_[k][i] = table_[k][i & (i - 1)] ^ table_[k][i & -i];
        }
    }
    std::array<std::array<uint32_t, 256>, 4> table_{};
};

__attribute__((target("sse4.2"))) inline uint64_t crc32c_word(uint64_t crc, const unsigned char* at) {
    uint64_t word;
    std::memcpy(&word, at, 8);
    return _mm_crc32_u64(crc, word);
}

// The instruction takes three cycles and one may begin in each: so three pieces side by side, joined at the end.
template <size_t kNbytes>
__attribute__((target("sse4.2"))) inline uint32_t crc32c_three(uint32_t crc, const unsigned char*& data, size_t& n) {
    for (; n >= 3 * kNbytes; n -= 3 * kNbytes, data += 3 * kNbytes) {
        uint64_t a = crc, b = 0, c = 0;
        for (size_t i = 0; i < kNbytes; i += 8) {
            a = crc32c_word(a, data + i);
            b = crc32c_word(b, data + kNbytes + i);
            c = crc32c_word(c, data + 2 * kNbytes + i);
        }
        crc = AfterZeros<kNbytes>::of(static_cast<uint32_t>(a)) ^ static_cast<uint32_t>(b);
        crc = AfterZeros<kNbytes>::of(crc) ^ static_cast<uint32_t>(c);
    }
    return crc;
}

__attribute__((target("sse4.2"))) inline uint32_t crc32c_sse(uint32_t crc, const unsigned char* data, size_t n) {
    crc = crc32c_three<4096>(crc, data, n);
    crc = crc32c_three<128>(crc, data, n);
    uint64_t c = crc;
    for (; n >= 8; n -= 8, data += 8) c = crc32c_word(c, data);
    uint32_t tail = static_cast<uint32_t>(c);
    for (; n; --n) tail = _mm_crc32_u8(tail, *data++);
    return tail;
}
#endif

// Continue `seed` (0 to begin with) over `n` bytes.
inline uint32_t crc32c(uint32_t seed, const unsigned char* data, size_t n) {
#if defined(__x86_64__)
    static const bool has_sse = __builtin_cpu_supports("sse4.2");
    if (has_sse) return ~crc32c_sse(~seed, data, n);
#endif
    return ~crc32c_table(~seed, data, n);
}

}  // namespace recollect
