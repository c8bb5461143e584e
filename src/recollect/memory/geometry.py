"""Where everything lies in a segment of rows, and the header that says so.

    header: 256 bytes (the last 64 of them for a limiter's counts), then 128 per lane, rounded up to a page
    stamps: 8 bytes a row, rounded up
    segment ids, steps: 8 bytes a row each, only where segments are kept
    rows: row_nbytes each

An unbounded segment has the header alone; its rows follow in chunks that double the total, each laid out as above.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

import numpy as np

from recollect import _core
from recollect.errors import AttachError, FormatError

PAGE = 4096
LIMITER_AT = 192
LIMITER_CHANGES_AT = LIMITER_AT + 24  # who waits for a limiter sleeps on this word
CLOSED_AT = (
    _core.SHARED_WORDS
)  # its lower half counts how often it was closed for all; who waits for rows has the upper
MAGIC = b"RECOLROW"
VERSION = 1
_TAGGED = 1
# magic, version, flags, layout hash, nonce, capacity (0: unbounded), lanes, row bytes, process that made it, crc32c
_HEADER = struct.Struct("<8sII32s16sQQQQI")
_CRC_AT = _HEADER.size - 4


def page_up(nbytes: int) -> int:
    """Round up to whole pages."""
    return -(-nbytes // PAGE) * PAGE


@dataclass(frozen=True, slots=True)
class Geometry:
    """The sizes of a segment of rows; `capacity` None is unbounded."""

    capacity: int | None
    n_lanes: int
    row_nbytes: int
    tagged: bool
    layout_hash: str

    @property
    def header_nbytes(self) -> int:
        return page_up(_core.HEADER_NBYTES + _core.LANE_NBYTES * self.n_lanes)

    @property
    def words_nbytes(self) -> int:
        """Of one word per row: the stamps, or one of the two tags."""
        return page_up(8 * (self.capacity or 0))

    @property
    def stamps_at(self) -> int:
        return self.header_nbytes

    @property
    def segments_at(self) -> int:
        return self.stamps_at + self.words_nbytes

    @property
    def steps_at(self) -> int:
        return self.segments_at + self.words_nbytes

    @property
    def rows_at(self) -> int:
        return self.stamps_at + self.words_nbytes * (3 if self.tagged else 1)

    @property
    def nbytes(self) -> int:
        """Of the whole segment (of the header alone when unbounded)."""
        if self.capacity is None:
            return self.header_nbytes
        return self.rows_at + page_up(self.row_nbytes * self.capacity)

    def sections(self, mapping: _core.Mapping) -> tuple[Any, ...] | None:
        """Where the core finds stamps, segment ids, steps and rows in one mapping of the segment."""
        if self.capacity is None:
            return None
        tags = ((mapping, self.segments_at), (mapping, self.steps_at)) if self.tagged else (None, None)
        return ((mapping, self.stamps_at), *tags, (mapping, self.rows_at))


def write_header(mapping: _core.Mapping, geometry: Geometry, nonce: bytes) -> None:
    """Write the static part; the words behind it start as zeros."""
    g = geometry
    packed = _HEADER.pack(
        MAGIC,
        VERSION,
        _TAGGED if g.tagged else 0,
        g.layout_hash.encode()[:32],
        nonce,
        g.capacity or 0,
        g.n_lanes,
        g.row_nbytes,
        _core.own_word(),
        0,
    )
    packed = packed[:_CRC_AT] + struct.pack("<I", _core.crc32c(packed[:_CRC_AT]))
    mapping.view(0, len(packed))[:] = np.frombuffer(packed, np.uint8)


def read_header(mapping: _core.Mapping, what: str) -> tuple[Geometry, bytes]:
    """Return the geometry and the nonce; FormatError if this is no segment of rows."""
    packed = mapping.view(0, _HEADER.size).tobytes()
    magic, version, flags, layout_hash, nonce, capacity, n_lanes, row_nbytes, _, crc = _HEADER.unpack(packed)
    if magic != MAGIC:
        raise FormatError(f"{what}: must begin with {MAGIC!r}, got {magic!r}; it is not a segment of rows")
    if version != VERSION:
        raise FormatError(
            f"{what}: version {version} is not readable here; it needs a release that writes it"
        )
    if crc != _core.crc32c(packed[:_CRC_AT]):
        raise FormatError(f"{what}: the checksum of its header does not match; it is damaged")
    if not n_lanes or capacity % n_lanes or (n_lanes > 1 and not capacity):
        raise FormatError(
            f"{what}: must have lanes of equal size, or one without end, got {n_lanes} of {capacity}; it is damaged"
        )
    text = layout_hash.rstrip(b"\0").decode("ascii", "replace")
    return Geometry(capacity or None, n_lanes, row_nbytes, bool(flags & _TAGGED), text), nonce


def check_lanes(mapping: _core.Mapping, geometry: Geometry, nbytes: int, what: str) -> None:
    """Raise FormatError if the words of a lane cannot be, or speak of rows that a file of `nbytes` has not."""
    for k in range(geometry.n_lanes):
        at = _core.HEADER_NBYTES + _core.LANE_NBYTES * k
        # Writers may be at work: `cursor` before `reserved`, which runs ahead of it; both only in a quiet epoch.
        epoch, cursor, reserved, tail = (mapping.load(at + offset) for offset in (24, 8, 0, 16))
        if epoch & 1 or mapping.load(at + 24) != epoch:
            continue
        if not (cursor <= reserved and tail <= reserved < 1 << 62):
            raise FormatError(f"{what}: lane {k} has a cursor at {cursor} of {reserved}; it is damaged")
        if geometry.capacity is None and nbytes < geometry.nbytes + _chunks_nbytes(geometry, cursor):
            raise FormatError(f"{what}: must hold {cursor} rows, got {nbytes} bytes; it is truncated")


def _chunks_nbytes(geometry: Geometry, n_rows: int) -> int:
    """Of the chunks that an unbounded segment of `n_rows` has behind its header."""
    total, held, rows = 0, 0, _core.FIRST_CHUNK
    while held < n_rows:
        total += page_up(8 * rows) * (3 if geometry.tagged else 1) + page_up(geometry.row_nbytes * rows)
        held += rows
        rows = held
    return total


def check_same(wanted: Geometry, found: Geometry, what: str) -> None:
    """Raise AttachError naming the first field that differs."""
    for name in ("layout_hash", "row_nbytes", "capacity", "n_lanes", "tagged"):
        mine, theirs = getattr(wanted, name), getattr(found, name)
        if name == "layout_hash":
            mine = mine[:32]
        if mine != theirs:
            raise AttachError(
                f"{what}: {name} must be {mine}, found {theirs}; attach with the layout it was made with"
            )
