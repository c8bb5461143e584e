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
__attribute__((target("sse4.2"))) inline uint32_t crc32c_sse(uint32_t crc, const unsigned char* data, size_t n) {
    uint64_t c = crc;
    size_t i = 0;
    for (; i + 8 <= n; i += 8) {
        uint64_t word;
        std::memcpy(&word, data + i, 8);
        c = _mm_crc32_u64(c, word);
    }
    uint32_t tail = static_cast<uint32_t>(c);
    for (; i < n; ++i) tail = _mm_crc32_u8(tail, data[i]);
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
