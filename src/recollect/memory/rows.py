"""Rows: any whole value. Random access to packed rows, in RAM, between processes or in a file.

A segment of rows is memory of one process, of several (`descriptor`), or a file, with one way to share it. Another
process of the same user reaches it through a handle, which says whose descriptor to open; the nonce in the header tells
a descriptor number that was given to another file since.


    header: 256 bytes (the last 64 of them for a limiter's counts), then 128 per lane, rounded up to a page
    stamps: 8 bytes a row, rounded up
    segment ids, steps: 8 bytes a row each, only where segments are kept
    rows: row_nbytes each

An unbounded segment has the header alone; its rows follow in chunks that double the total, each laid out as above.
"""

from __future__ import annotations

import errno
import os
import secrets
import struct
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from recollect import _core, interrupts
from recollect.budget import check_fits, human_nbytes
from recollect.errors import AttachError, ClosedError, FormatError, LaneBusyError
from recollect.files import lock_file
from recollect.memory.descriptor import close_memory, make_memory, open_memory
from recollect.memory.segment import Closed, Mapped, page_up, registry
from recollect.spaces import Layout

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


class Rows:
    """Packed rows of one layout, with lanes, stamps and (if `tagged`) segment tags.

    `native` is the core's object; it has the protocol. This class makes, shares and closes it.

    Ownership: `close()` gives up this object's share; memory goes with the last user. Reads are copies.
    Concurrency: readers anywhere, without locks; one writer process per lane, its threads take turns.
    """

    def __init__(self, segment: RowSegment, layout: Layout) -> None:
        self.layout = layout
        self.geometry = segment.geometry
        self.native: Any = segment.rows
        self._segment: RowSegment | None = segment.hold()

    @classmethod
    def in_ram(cls, layout: Layout, capacity: int | None, n_lanes: int = 1, tagged: bool = False) -> Rows:
        return cls(_in_ram(_geometry(layout, capacity, n_lanes, tagged), "capacity"), layout)

    @classmethod
    def in_shared(cls, layout: Layout, capacity: int, n_lanes: int = 1, tagged: bool = False) -> Rows:
        return cls(in_shared(_geometry(layout, capacity, n_lanes, tagged), "capacity"), layout)

    @classmethod
    def in_file(
        cls,
        path: Path,
        layout: Layout,
        capacity: int | None,
        n_lanes: int = 1,
        tagged: bool = False,
        sparse: bool = False,
    ) -> Rows:
        geometry = _geometry(layout, capacity, n_lanes, tagged)
        return cls(_in_file(path, geometry, "capacity", sparse=sparse), layout)

    @classmethod
    def open_file(cls, path: Path, layout: Layout, *, writable: bool) -> Rows:
        rows = cls(_open_file(path, writable=writable), layout)
        try:
            g = rows.geometry
            check_same(_geometry(layout, g.capacity, g.n_lanes, g.tagged), g, str(path))
        except AttachError as error:
            rows.close()
            raise FormatError(str(error)) from None
        return rows

    @classmethod
    def in_mapped_file(cls, path: Path, layout: Layout, capacity: int, n_lanes: int, tagged: bool) -> Rows:
        """Plain packed rows in a file, mapped for reading; header, stamps and tags are this process's own."""
        return cls(_over_file(path, _geometry(layout, capacity, n_lanes, tagged)), layout)

    @property
    def is_shared(self) -> bool:
        return self.segment().is_shared

    @property
    def is_writable(self) -> bool:
        return self.segment().writable

    @property
    def identity(self) -> bytes:
        """The same for all objects over the same rows."""
        return self.segment().nonce

    @property
    def header(self) -> _core.Mapping:
        """The memory that begins with the header."""
        return self.segment().mapping

    @property
    def path(self) -> str | None:
        """The file, if the rows lie in one that others can open."""
        return self.segment().path

    def is_at(self, path: Path) -> bool:
        """Whether this is the file of these rows, and not another of the same name."""
        try:
            return os.path.samestat(os.lstat(path), os.fstat(self.segment().fd))
        except FileNotFoundError:
            return False

    @property
    def nbytes(self) -> int:
        """Bytes of address space; untouched pages cost nothing."""
        return self.geometry.nbytes

    def check_open(self) -> None:
        """Raise ClosedError after `close()`."""
        self.segment()

    def sync(self) -> None:
        """Write a file's pages to disk."""
        self.segment().mapping.sync()

    def close_for_all(self) -> None:
        """End the rows for every process, in the one that made them or opened their file."""
        self.segment().close_for_all()

    def close(self) -> None:
        if self._segment is not None:
            segment, self._segment, self.native = self._segment, None, Closed()
            segment.release()

    def segment(self) -> RowSegment:
        """The segment that this object maps; ClosedError once it was closed."""
        if self._segment is None:
            raise ClosedError("this object was closed; open or create it again")
        return self._segment

    def __reduce__(self) -> tuple[Any, ...]:
        return _attach_rows, (self.segment().handle(), self.layout.to_json())


def _attach_rows(handle: Handle, layout: dict[str, Any]) -> Rows:
    return Rows(attach(handle), Layout.from_json(layout))


def _geometry(layout: Layout, capacity: int | None, n_lanes: int, tagged: bool) -> Geometry:
    return Geometry(capacity, n_lanes, layout.row_nbytes, tagged, layout.hash)


def codec_of(layout: Layout) -> _core.Codec:
    """The native way in and out of rows of this layout (flat lists of fields when sizes vary)."""
    scalars = {leaf.fields[0] for leaf in layout.leaves if leaf.kind == "discrete"}
    fields = [(f.offset, f.dtype, f.shape, i in scalars) for i, f in enumerate(layout.fields)]
    return _core.Codec(fields, layout.template if layout.is_fixed else None, layout.row_nbytes)


def packed_codec(row_nbytes: int) -> _core.Codec:
    """The native way to move whole rows as bytes `[n, row_nbytes]`."""
    return _core.Codec([(0, np.dtype(np.uint8), (row_nbytes,), False)], ("leaf", 0), row_nbytes)


# -- the segment that rows are in


@dataclass(frozen=True, slots=True)
class Handle:
    """What another process needs to attach: a descriptor of a live process, or a file, and the nonce inside."""

    pid: int
    fd: int
    path: str | None
    nonce: bytes
    geometry: Geometry
    writable: bool
    n_closed: int = 0  # how often it had been closed for all when its sender opened it


class RowSegment(Mapped):
    """A mapped segment and the native rows in it; one per process and nonce, shared by its users.

    Ownership: the kernel's; `release` of the last user unmaps and closes, nothing is ever unlinked. A descriptor
    that nobody released goes with the last reference. `close_for_all` ends it for every process.
    Concurrency: `hold` and `release` from any thread.
    """

    def __init__(
        self,
        mapping: _core.Mapping,
        geometry: Geometry,
        fd: int,
        nonce: bytes,
        path: str | None,
        writable: bool,
        *,
        can_repair: bool = True,
        rows: _core.Rows | None = None,
        opener: int = 0,
        n_closed: int = 0,
    ) -> None:
        self.mapping, self.geometry, self.nonce, self.path, self.writable = (
            mapping,
            geometry,
            nonce,
            path,
            writable,
        )
        self.fd = fd
        self._opener, self._n_closed = opener, n_closed  # a process word: no forked child's
        self.rows = rows or _core.Rows(
            mapping,
            geometry.capacity or 0,
            geometry.n_lanes,
            geometry.row_nbytes,
            geometry.tagged,
            can_repair,
            fd < 0,
            fd if geometry.capacity is None or path is not None else -1,
            geometry.sections(mapping),
            path is not None,
            n_closed,
        )
        if rows is None and can_repair and not writable:
            self.rows.freeze()
        # Last: until this object is made, the descriptor is closed by who opened it.
        self._close_fd = weakref.finalize(self, close_memory, fd) if fd >= 0 else None

    @property
    def is_shared(self) -> bool:
        """True when other processes can attach."""
        return self.fd >= 0

    def handle(self) -> Handle:
        """Return what another process needs to attach to this segment."""
        fd = self.fd
        if self.rows.is_closed:
            raise ClosedError("this object was closed; open or create it again")
        if fd < 0:
            raise TypeError("this memory belongs to one process; use SharedMemoryStorage to share it")
        return Handle(os.getpid(), fd, self.path, self.nonce, self.geometry, self.writable, self._n_closed)

    def close_for_all(self) -> None:
        """In the process that made it or opened its file: end it for every process, and wake who waits in one.

        Any later call raises ClosedError. A file can be opened again.
        """
        if self.fd < 0 or not self.writable or self._opener != _core.own_word():
            return
        mapping = self.mapping
        mapping.store(
            CLOSED_AT, (self._n_closed + 1) % (1 << 32)
        )  # who waits for rows and is not asleep yet sees the 0
        mapping.wake(CLOSED_AT + 4)
        mapping.add(LIMITER_CHANGES_AT, 1)
        mapping.wake(LIMITER_CHANGES_AT)

    def hold(self) -> RowSegment:
        """Count one more user."""
        with registry.lock:
            if self.rows.is_closed:  # found by its handle just before its last user left
                raise ClosedError("this object was closed; open or create it again")
            self.users += 1
        return self

    def _end(self) -> None:
        self.rows.close()


_ADVICE = "lower capacity, or use MemmapStorage, which may be larger than memory"


def _in_ram(geometry: Geometry, what: str) -> RowSegment:
    """Memory of this process alone."""
    check_fits(geometry.nbytes, what, _ADVICE)
    return _fresh(_core.Mapping(-1, 0, geometry.nbytes, True), geometry, -1, None)


@interrupts.undivided  # a descriptor is closed by who opened it or with the segment, and once
def in_shared(geometry: Geometry, what: str) -> RowSegment:
    """Memory that other processes can attach to, freed by the kernel with its last user."""
    nonce = secrets.token_bytes(16)
    fd = make_memory(geometry.nbytes, nonce, what, _ADVICE)
    try:
        return _fresh(_core.Mapping(fd, 0, geometry.nbytes, True), geometry, fd, None, nonce)
    except BaseException:
        close_memory(fd)
        raise


@interrupts.undivided
def _in_file(path: Path, geometry: Geometry, what: str, *, sparse: bool = False) -> RowSegment:
    """A new file. Its space is taken at once unless `sparse`: a full disk is an error here, not a crash later."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        lock_file(fd, path, shared=True)
        if sparse:
            os.ftruncate(fd, geometry.nbytes)
        else:
            _core.reserve_file(fd, 0, geometry.nbytes)
        return _fresh(_core.Mapping(fd, 0, geometry.nbytes, True), geometry, fd, str(path))
    except BaseException as error:
        os.close(fd)
        path.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            raise OSError(
                errno.ENOSPC,
                f"{what}: needs {human_nbytes(geometry.nbytes)} of disk, which are not free",
                str(path),
            ) from None
        raise


@interrupts.undivided
def _over_file(path: Path, geometry: Geometry) -> RowSegment:
    """Rows that lie packed in a file of nothing else, mapped for reading; the rest is memory of this process."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        rows = _core.Mapping(fd, 0, geometry.row_nbytes * (geometry.capacity or 0), False)
    finally:
        os.close(fd)
    rest = _core.Mapping(-1, 0, geometry.rows_at, True)
    nonce = secrets.token_bytes(16)
    write_header(rest, geometry, nonce)
    stamps, ids, steps, _ = geometry.sections(rest) or (None,) * 4
    native = _core.Rows(
        rest,
        geometry.capacity or 0,
        geometry.n_lanes,
        geometry.row_nbytes,
        geometry.tagged,
        True,
        True,
        -1,
        (stamps, ids, steps, (rows, 0)),
    )
    return RowSegment(rest, geometry, -1, nonce, None, False, rows=native)


@interrupts.undivided
def _open_file(path: Path, *, writable: bool) -> RowSegment:
    """Attach to an existing file. A reader too opens it for writing if it may: to mend what a killed writer left."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        can_repair = True
    except PermissionError:
        can_repair = False
    except OSError as error:
        if error.errno != errno.EROFS:
            raise
        can_repair = False
    if not can_repair:
        if writable:
            raise PermissionError(errno.EACCES, "may not be written; load it with read_only=True", str(path))
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if writable:
            _use(fd, path)
        return _attach(fd, str(path), writable, None, str(path), can_repair)
    except BaseException:
        os.close(fd)
        raise


def _use(fd: int, path: Path) -> None:
    """Say that this process writes a file: nobody may replace it. FileNotFoundError if somebody has."""
    if not lock_file(fd, path, shared=True):
        raise LaneBusyError(f"{path}: is being replaced, got a second writer; load it again later")
    if not os.fstat(fd).st_nlink:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))


@interrupts.undivided
def attach(handle: Handle) -> RowSegment:
    """Attach to the segment a handle speaks of; AttachError if it is gone or another."""
    known: RowSegment | None = registry.find(handle.nonce)
    if handle.writable and known is not None:
        return known
    what = handle.path if handle.path is not None else f"segment of process {handle.pid}"
    if handle.path is None:
        fd = open_memory(handle.pid, handle.fd, handle.nonce, what)
    else:
        try:
            fd = os.open(handle.path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            reason = error.strerror
            raise AttachError(f"{what}: its owner is gone or closed it ({reason}); create it again") from None
    try:
        if handle.path is not None and handle.writable:
            try:
                _use(fd, Path(handle.path))
            except FileNotFoundError:
                raise AttachError(f"{what}: its owner is gone or closed it; create it again") from None
        return _attach(fd, handle.path, handle.writable, handle, what, True)
    except BaseException:
        close_memory(fd)
        raise


def _attach(
    fd: int, path: str | None, writable: bool, handle: Handle | None, what: str, can_repair: bool
) -> RowSegment:
    nbytes = os.fstat(fd).st_size
    try:
        if nbytes < page_up(1):
            raise FormatError(f"{what}: must hold at least a header, got {nbytes} bytes; it is truncated")
        geometry, nonce = read_header(_core.Mapping(fd, 0, page_up(1), False), what)
        if nbytes < geometry.nbytes:
            raise FormatError(f"{what}: must have {geometry.nbytes} bytes, got {nbytes}; it is truncated")
    except FormatError as error:
        if handle is None:
            raise
        raise AttachError(str(error)) from None
    if handle is not None:
        if nonce != handle.nonce:
            raise AttachError(f"{what}: its owner is gone and the descriptor was reused; create it again")
        check_same(handle.geometry, geometry, what)
    mapping = _core.Mapping(fd, 0, geometry.nbytes, can_repair)
    check_lanes(mapping, geometry, nbytes, what)
    opener = _core.own_word() if handle is None else 0
    n_closed = mapping.load(CLOSED_AT) % (1 << 32) if handle is None else handle.n_closed
    if not writable:  # its own rows, which refuse to write, even beside a writer of this process
        return RowSegment(mapping, geometry, fd, nonce, path, False, can_repair=can_repair, n_closed=n_closed)
    segment = registry.find_or_add(
        nonce, lambda: RowSegment(mapping, geometry, fd, nonce, path, True, opener=opener, n_closed=n_closed)
    )
    if segment.fd != fd:  # another thread was first
        close_memory(fd)
    return segment


def _fresh(
    mapping: _core.Mapping, geometry: Geometry, fd: int, path: str | None, nonce: bytes | None = None
) -> RowSegment:
    nonce = nonce or secrets.token_bytes(16)
    write_header(mapping, geometry, nonce)
    segment = RowSegment(mapping, geometry, fd, nonce, path, True, opener=_core.own_word())
    registry.add(segment)
    return segment


# -- where everything lies, and the header that says so


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
