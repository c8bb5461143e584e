// Rows as Python holds them: the memory of lanes.hpp until close(), and the checks that every binding makes.
#pragma once

#include <nanobind/stl/shared_ptr.h>

#include "arrays.hpp"
#include "rows.hpp"

namespace recollect {

using MappingPtr = std::shared_ptr<Mapping>;

class Rows {
  public:
    Rows(MappingPtr header, size_t capacity, size_t n_lanes, size_t row_nbytes, bool tagged, bool writable,
         bool is_private, int fd, nb::object sections, bool is_file, uint32_t n_closed) {
        size_t nbytes_of_rows;
        if (n_lanes == 0 || header->nbytes() < kHeaderNbytes || n_lanes > (header->nbytes() - kHeaderNbytes) / sizeof(Lane))
            throw nb::value_error("n_lanes: must be at least 1 and fit the header");
        if (capacity % n_lanes || capacity > (size_t(1) << 60) || __builtin_mul_overflow(capacity, row_nbytes, &nbytes_of_rows))
            throw nb::value_error("sections: must hold a capacity that is a multiple of n_lanes");
        const int own = fd >= 0 ? ::fcntl(fd, F_DUPFD_CLOEXEC, 0) : -1;
        if (fd >= 0 && own < 0) throw std::system_error(errno, std::generic_category(), "the descriptor of the rows");
        memory_ = std::make_shared<Memory>(header, capacity, n_lanes, row_nbytes, tagged, writable, is_private, own);
        memory_->is_file = is_file;
        memory_->n_closed = n_closed;
        if (!capacity) return;
        nb::tuple t = tuple_of(sections, 4, "sections");  // (mapping, offset) of stamps, segments, steps, rows
        auto at = [&](size_t i, size_t nbytes) -> byte* {
            if (t[i].is_none()) {
                if (tagged || i == 0 || i == 3) throw nb::value_error("sections: one is missing");
                return nullptr;
            }
            nb::tuple pair = tuple_of(t[i], 2, "sections");
            auto mapping = nb::cast<MappingPtr>(pair[0]);
            const size_t offset = nb::cast<size_t>(pair[1]);
            if (offset % 8 || offset > mapping->nbytes() || nbytes > mapping->nbytes() - offset)
                throw nb::value_error("sections: one reaches past its mapping");
            memory_->keep(mapping);
            return mapping->base() + offset;
        };
        Chunk chunk;
        chunk.stamp = reinterpret_cast<word*>(at(0, capacity * 8));
        chunk.segment = reinterpret_cast<int64_t*>(at(1, capacity * 8));
        chunk.step = reinterpret_cast<int64_t*>(at(2, capacity * 8));
        chunk.rows = at(3, nbytes_of_rows);
        memory_->add_chunk(chunk, header);
    }

    void close() { memory_.reset(); }
    bool is_closed() const { return !memory_; }

    std::shared_ptr<Memory> memory() const {
        if (!memory_) throw std::logic_error("closed");
        if (memory_->is_closed_for_all()) [[unlikely]] throw std::logic_error("closed for all");
        return memory_;
    }
    std::shared_ptr<Memory> writable() const {
        auto m = memory();
        if (!m->writable) throw Forked("it was opened for reading; load it with read_only=False to change it");
        m->check_fork();
        return m;
    }
    std::shared_ptr<Memory> memory(const Codec& codec) const { return fitting(memory(), codec); }
    std::shared_ptr<Memory> writable(const Codec& codec) const { return fitting(writable(), codec); }

  private:
    // With a codec of these rows: another's could reach past their ends.
    static std::shared_ptr<Memory> fitting(std::shared_ptr<Memory> m, const Codec& codec) {
        if (codec.row_nbytes() != m->row_nbytes)
            throw nb::value_error(("codec: must be made for rows of " + std::to_string(m->row_nbytes) + " bytes, got " +
                                   std::to_string(codec.row_nbytes())).c_str());
        return m;
    }

    std::shared_ptr<Memory> memory_;
};

inline void check_count(const Snapshot& s, int64_t counted) {
    if (counted >= 0 && s.total() != uint64_t(counted)) throw std::out_of_range("the length has changed meanwhile");
}

inline void check_lane(const Memory& m, size_t k) {
    if (k >= m.n_lanes)
        throw std::out_of_range("lane " + std::to_string(k) + " is out of range: there are " + std::to_string(m.n_lanes));
}

inline void check_row(const Memory& m, int64_t r) {
    const size_t end = m.capacity ? m.capacity : m.held_rows();
    if (r < 0 || size_t(r) >= end)
        throw std::out_of_range("row " + std::to_string(r) + " is out of range for " + std::to_string(end) + " rows");
}

// A lane to write to, < 0 for any.
inline int64_t checked_lane(const Memory& m, int64_t lane) {
    if (lane >= 0) check_lane(m, size_t(lane));
    return lane;
}

}  // namespace recollect
