// The crc32c of much, on several threads.
#pragma once

#include <mutex>

#include "crc32c.hpp"
#include "parallel.hpp"

namespace recollect {

// The crc32c of n pieces of so many bytes: `sum(first, last)` gives that of some, on threads of their own when all are large.
template <typename Sum> uint32_t sum_parts(size_t n, size_t nbytes, Sum sum) {
    if (thread_count(n * nbytes) == 1) return sum(size_t(0), n);
    struct Part { size_t first, last; uint32_t crc; };
    std::vector<Part> parts;
    std::mutex mutex;
    in_parallel(n, n * nbytes, [&](size_t first, size_t last) {
        const uint32_t crc = sum(first, last);
        std::lock_guard lock(mutex);
        parts.push_back({first, last, crc});
    });
    std::sort(parts.begin(), parts.end(), [](const Part& a, const Part& b) { return a.first < b.first; });
    uint32_t crc = 0;
    for (const Part& p : parts) crc = p.first ? crc32c_joined(crc, p.crc, (p.last - p.first) * nbytes) : p.crc;
    return crc;
}

}  // namespace recollect
