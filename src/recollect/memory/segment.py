"""A segment: memory of one process, of several (`descriptor`), or of a file, with one way to share it.

Another process of the same user reaches shared memory through a handle, which says whose descriptor to open; the nonce
in the header tells a descriptor number that was given to another file since.
"""

from __future__ import annotations

import errno
import os
import secrets
import threading
import weakref
from dataclasses import dataclass
from pathlib import Path

from recollect import _core, interrupts
from recollect.budget import check_fits, human_nbytes
from recollect.errors import AttachError, ClosedError, FormatError, LaneBusyError
from recollect.files import lock_file
from recollect.memory.closed import Closed
from recollect.memory.descriptor import close_memory, make_memory, open_memory
from recollect.memory.geometry import (
    CLOSED_AT,
    LIMITER_CHANGES_AT,
    Geometry,
    check_lanes,
    check_same,
    page_up,
    read_header,
    write_header,
)


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


class Segment:
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
        self.users = 0
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

    def hold(self) -> Segment:
        """Count one more user."""
        with _lock:
            if self.rows.is_closed:  # found by its handle just before its last user left
                raise ClosedError("this object was closed; open or create it again")
            self.users += 1
        return self

    def release(self) -> None:
        """Count one user less; the last one closes."""
        with _lock:
            self.users -= 1
            if self.users > 0:
                return
            if _attached.get(self.nonce) is self:  # not that of a writer beside this reader
                del _attached[self.nonce]
            self.rows.close()
            if self._close_fd is not None:
                self._close_fd()
                self.fd = -1
            self.mapping = Closed()  # type: ignore[assignment]  # threads that were about to use it hear of it


_ADVICE = "lower capacity, or use MemmapStorage, which may be larger than memory"
_lock = threading.Lock()
# A child forked while another thread holds it would wait for that thread, which it does not have.
os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)
# Two objects of one process that mean the same segment must share its lane locks, hence its native rows.
_attached: weakref.WeakValueDictionary[bytes, Segment] = weakref.WeakValueDictionary()


def in_ram(geometry: Geometry, what: str) -> Segment:
    """Memory of this process alone."""
    check_fits(geometry.nbytes, what, _ADVICE)
    return _fresh(_core.Mapping(-1, 0, geometry.nbytes, True), geometry, -1, None)


@interrupts.undivided  # a descriptor is closed by who opened it or with the segment, and once
def in_shared(geometry: Geometry, what: str) -> Segment:
    """Memory that other processes can attach to, freed by the kernel with its last user."""
    nonce = secrets.token_bytes(16)
    fd = make_memory(geometry.nbytes, nonce, what, _ADVICE)
    try:
        return _fresh(_core.Mapping(fd, 0, geometry.nbytes, True), geometry, fd, None, nonce)
    except BaseException:
        close_memory(fd)
        raise


@interrupts.undivided
def in_file(path: Path, geometry: Geometry, what: str, *, sparse: bool = False) -> Segment:
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
def over_file(path: Path, geometry: Geometry) -> Segment:
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
    return Segment(rest, geometry, -1, nonce, None, False, rows=native)


@interrupts.undivided
def open_file(path: Path, *, writable: bool) -> Segment:
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
def attach(handle: Handle) -> Segment:
    """Attach to the segment a handle speaks of; AttachError if it is gone or another."""
    with _lock:
        known = _attached.get(handle.nonce)
    if handle.writable and known is not None and known.fd >= 0:
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
) -> Segment:
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
        return Segment(mapping, geometry, fd, nonce, path, False, can_repair=can_repair, n_closed=n_closed)
    with _lock:
        known = _attached.get(nonce)
        if known is not None and known.fd >= 0:
            close_memory(fd)
            return known
        segment = _attached[nonce] = Segment(
            mapping, geometry, fd, nonce, path, True, opener=opener, n_closed=n_closed
        )
    return segment


def _fresh(
    mapping: _core.Mapping, geometry: Geometry, fd: int, path: str | None, nonce: bytes | None = None
) -> Segment:
    nonce = nonce or secrets.token_bytes(16)
    write_header(mapping, geometry, nonce)
    segment = Segment(mapping, geometry, fd, nonce, path, True, opener=_core.own_word())
    with _lock:
        _attached[nonce] = segment
    return segment
