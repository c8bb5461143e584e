// crc32c (Castagnoli), by the processor's instructions where it has them.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
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

// x^n mod the polynomial, bit-reflected as the carry-less product of reflected numbers wants it.
constexpr uint64_t crc32c_power(unsigned n) {
    uint32_t r = 0x80000000u;
    for (unsigned i = 0; i < n; ++i) r = (r >> 1) ^ (r & 1 ? 0x82F63B78u : 0u);
    return uint64_t(r) << 1;
}

constexpr size_t kFold = 4 * 32, kSteps = 32, kWords = 5;  // bytes folded in a step, steps, words walked in each piece
constexpr size_t kFolded = (1 + kSteps) * kFold, kWalked = 8 * kSteps * kWords;
constexpr size_t kCrcChunk = kFolded + 3 * kWalked;

__attribute__((target("avx2"))) inline __m256i load_wide(const unsigned char* at) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at));
}

// Four wide registers are folded along the first part of a chunk while the instruction walks three more pieces: the two
// use different units, so together they go at 1.5 times the speed of either. What is left in the registers is congruent to
// all that was folded into them, so its crc is that of the whole part. No stream is long enough for the hardware to see:
// what comes after the chunk is asked for meanwhile (cold memory: 1.5 times a memcpy of it, asked for 1.0).
__attribute__((target("avx2,vpclmulqdq,pclmul,sse4.2")))
inline uint32_t crc32c_wide(uint32_t crc, const unsigned char*& data, size_t& n, const unsigned char* next) {
    constexpr int64_t low = crc32c_power(8 * kFold + 32), high = crc32c_power(8 * kFold - 32);
    const __m256i powers = _mm256_setr_epi64x(low, high, low, high);
    for (; n >= kCrcChunk; n -= kCrcChunk, data += kCrcChunk, next += kCrcChunk) {
        __m256i x[4];
        for (size_t k = 0; k < 4; ++k) x[k] = load_wide(data + 32 * k);
        x[0] = _mm256_xor_si256(x[0], _mm256_setr_epi32(int(crc), 0, 0, 0, 0, 0, 0, 0));
        uint64_t a = 0, b = 0, c = 0;
        const unsigned char* folded = data + kFold;
        const unsigned char* walked = data + kFolded;
        for (size_t step = 0; step < kSteps; ++step, folded += kFold, walked += 8 * kWords) {
            for (size_t k = 0; k < 4; ++k) __builtin_prefetch(next + 64 * (4 * step + k));
#pragma GCC unroll 4
            for (size_t k = 0; k < 4; ++k) {
                const __m256i product = _mm256_xor_si256(_mm256_clmulepi64_epi128(x[k], powers, 0x00),
                                                         _mm256_clmulepi64_epi128(x[k], powers, 0x11));
                x[k] = _mm256_xor_si256(product, load_wide(folded + 32 * k));
            }
#pragma GCC unroll 8
            for (size_t k = 0; k < kWords; ++k) {
                a = crc32c_word(a, walked + 8 * k);
                b = crc32c_word(b, walked + kWalked + 8 * k);
                c = crc32c_word(c, walked + 2 * kWalked + 8 * k);
            }
        }
        unsigned char left[kFold];
        std::memcpy(left, x, kFold);
        uint64_t whole = 0;
        for (size_t k = 0; k < kFold; k += 8) whole = crc32c_word(whole, left + k);
        crc = static_cast<uint32_t>(whole);
        for (const uint64_t piece : {a, b, c}) crc = AfterZeros<kWalked>::of(crc) ^ static_cast<uint32_t>(piece);
    }
    return crc;
}
#else
constexpr size_t kCrcChunk = 8192;
#endif

// The product of two polynomials, bit-reflected, modulo that of the crc.
constexpr uint32_t crc32c_product(uint32_t a, uint32_t b) {
    uint32_t product = 0;
    for (uint32_t bit = 0x80000000u; bit; bit >>= 1) {
        if (a & bit) product ^= b;
        b = (b >> 1) ^ (b & 1 ? 0x82F63B78u : 0u);
    }
    return product;
}

// The crc of a buffer whose first part has the crc `head` and whose last `n` bytes have `tail`: each was begun at 0.
constexpr uint32_t crc32c_joined(uint32_t head, uint32_t tail, size_t n) {
    uint32_t square = crc32c_product(0x40000000u, 0x40000000u);  // x^2, then its squares: a byte is x^8
    square = crc32c_product(crc32c_product(square, square), crc32c_product(square, square));
    for (; n; n >>= 1, square = crc32c_product(square, square))
        if (n & 1) head = crc32c_product(head, square);
    return head ^ tail;
}

// Continue `seed` (0 to begin with) over `n` bytes, without wide registers.
inline uint32_t crc32c_narrow(uint32_t seed, const unsigned char* data, size_t n) {
#if defined(__x86_64__)
    static const bool has_sse = __builtin_cpu_supports("sse4.2");
    if (has_sse) return ~crc32c_sse(~seed, data, n);
#endif
    return ~crc32c_table(~seed, data, n);
}

// The same by whatever there is; fastest over multiples of kCrcChunk. `next` is what will be needed after the first chunk,
// asked for while that is summed.
inline uint32_t crc32c(uint32_t seed, const unsigned char* data, size_t n, const unsigned char* next) {
#if defined(__x86_64__)
    static const bool is_wide = __builtin_cpu_supports("sse4.2") && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("vpclmulqdq");
    if (is_wide) seed = ~crc32c_wide(~seed, data, n, next);
#endif
    return crc32c_narrow(seed, data, n);
}
inline uint32_t crc32c(uint32_t seed, const unsigned char* data, size_t n) { return crc32c(seed, data, n, data + kCrcChunk); }

}  // namespace recollect
