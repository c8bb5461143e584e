"""Segments: mapped memory that several objects of a process, and several processes, use.

Here is what all of them have in common, whole pages, users that are counted and one registry in each process; and the
segment of any primitive but rows: header, schema block and data in one piece of memory, and the name to attach by.

    header: 256 bytes (what it is, and a word that says whether its owner closed it), then the primitive's own
        words, rounded up to a page
    schema: JSON of what the values are, rounded up to a page
    data: as the primitive says

The memory is one of `descriptor`. Another process of the same user reaches it by a *name*, a line of text that says
whose descriptor to open. The nonce in name and header tells a descriptor number that was given to another file since.

Two objects of one process that mean the same segment share its native part, hence its locks: they find it in the
registry by its nonce. The last of its users closes it.
"""

from __future__ import annotations

import json
import os
import secrets
import struct
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, TypeVar

import numpy as np

from recollect import _core, interrupts
from recollect.errors import AttachError, ClosedError
from recollect.memory.descriptor import close_memory, make_memory, open_memory

PAGE = 4096


def page_up(nbytes: int) -> int:
    """Round up to whole pages."""
    return -(-nbytes // PAGE) * PAGE


class Closed:
    """Stands in for what was closed: whatever is asked of it raises."""

    def __getattr__(self, name: str) -> Any:
        raise ClosedError("this object was closed; open or create it again")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.called


class Mapped:
    """A mapped segment that several objects of a process use; a subclass says what its end is, in `_end`.

    Ownership: of its descriptor, if it has one, which is closed with the last user, or with the last reference.
    Concurrency: `release` from any thread.
    """

    nonce: bytes
    mapping: _core.Mapping
    fd = -1  # no descriptor, or given up
    users = 0
    _close_fd: Callable[[], Any] | None = None

    def release(self) -> None:
        """Count one user less; the last one closes."""
        with registry.lock:
            self.users -= 1
            if self.users > 0:
                return
            registry.drop(self)
            self._end()
            if self._close_fd is not None:
                self._close_fd()
                self.fd = -1
            self.mapping = Closed()  # type: ignore[assignment]  # threads that were about to use it hear of it

    def _end(self) -> None:
        """Close the native part."""
        raise NotImplementedError


Found = TypeVar("Found", bound=Mapped)


class SegmentRegistry:
    """The segments that this process has open, by nonce.

    Concurrency: any thread; `lock` also guards the counts of users. A forked child finds it free, whatever thread of
    its parent held it.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._segments: weakref.WeakValueDictionary[bytes, Any] = weakref.WeakValueDictionary()
        # A child forked while another thread holds it would wait for that thread, which it does not have.
        os.register_at_fork(
            before=self.lock.acquire, after_in_parent=self.lock.release, after_in_child=self.lock.release
        )

    def find(self, nonce: bytes) -> Any:
        """The segment of a nonce whose descriptor is open, or None."""
        with self.lock:
            return self._found(nonce)

    def find_or_add(self, nonce: bytes, make: Callable[[], Found]) -> Found:
        """The segment of a nonce, or the one that is made now: another thread may have been first."""
        with self.lock:
            found: Found | None = self._found(nonce)
            if found is None:
                found = self._segments[nonce] = make()
            return found

    def add(self, segment: Mapped) -> None:
        """Take up a new segment."""
        with self.lock:
            self._segments[segment.nonce] = segment

    def drop(self, segment: Mapped) -> None:
        """Forget a segment that is about to be closed; the lock is held. Not that of a writer beside a reader."""
        if self._segments.get(segment.nonce) is segment:
            del self._segments[segment.nonce]

    def clear(self) -> None:
        """Forget all, as in a process that has opened none."""
        with self.lock:
            self._segments.clear()

    def _found(self, nonce: bytes) -> Any:
        found = self._segments.get(nonce)
        return found if found is not None and found.fd >= 0 else None


registry = SegmentRegistry()


# -- the segment of a primitive, and its name


MAGIC = b"RECOLSHM"
VERSION = 1
CLOSED_AT = 128  # a word: not 0 once the owner has closed the segment for everybody
WORDS_AT = 256
_PREFIX = "recollect"
# magic, version, kind, schema hash, nonce, bytes of words, schema and data, process that made it, crc32c
_HEADER = struct.Struct("<8sI12s32s16sQQQQI")
_CRC_AT = _HEADER.size - 4


def schema_text(schema: Any) -> str:
    """The one JSON text of a schema."""
    return json.dumps(schema, separators=(",", ":"), ensure_ascii=True)


def segment_nbytes(schema: Any, words_nbytes: int, data_nbytes: int) -> int:
    """Bytes of the segment that `create` would make."""
    return page_up(WORDS_AT + words_nbytes) + page_up(len(schema_text(schema))) + page_up(data_nbytes)


@dataclass(frozen=True, slots=True)
class Name:
    """What another process needs to attach, as one line of text."""

    kind: str
    pid: int
    fd: int
    nonce: bytes
    schema_hash: str

    def __str__(self) -> str:
        return f"{_PREFIX}-{self.kind}-{self.pid}-{self.fd}-{self.nonce.hex()}-{self.schema_hash}"

    @staticmethod
    def parse(text: Any, kind: str) -> Name:
        """Read a name; AttachError if it is none, or one of another kind of object."""
        parts = text.split("-") if isinstance(text, str) else []
        try:
            prefix, found, pid, fd, nonce, schema_hash = parts
            name = Name(found, int(pid), int(fd), bytes.fromhex(nonce), schema_hash)
        except ValueError:
            prefix = ""
        if prefix != _PREFIX:
            raise AttachError(f"name: must be the `name` of a shared object, got {text!r}; pass it unchanged")
        if name.kind != kind:
            raise AttachError(
                f"name: kind must be {kind}, found {name.kind}; pass the name of such an object"
            )
        return name


class SharedSegment(Mapped):
    """One mapped segment of any primitive; one per process and nonce, shared by its users.

    `core` is the primitive's native object in it, made once in each process, so that all its threads share one lock.

    Ownership: the kernel's. `release` of the last user unmaps and closes; a descriptor that nobody released goes with
    the last reference. `mark_closed` ends it for every process.
    Concurrency: from any thread.
    """

    def __init__(self, fd: int, header: _Header, mapping: _core.Mapping, schema: Any) -> None:
        self.fd, self.mapping, self.schema = fd, mapping, schema
        self.kind, self.nonce, self.schema_hash = header.kind, header.nonce, header.schema_hash
        self.owner, self.data_nbytes = header.owner, header.data_nbytes
        self.data_at, self.nbytes = header.data_at, header.nbytes
        self.core: Any = None
        self._close_fd = weakref.finalize(self, close_memory, fd)

    @property
    def name(self) -> str:
        """The line of text by which any process of this user attaches, as long as this one lives."""
        fd = self.fd
        if fd < 0:
            raise ClosedError("this object was closed; open or create it again")
        return str(Name(self.kind, os.getpid(), fd, self.nonce, self.schema_hash))

    @property
    def is_owner(self) -> bool:
        """Whether this process made it (a forked child did not)."""
        return self.owner == _core.own_word()

    @property
    def is_closed(self) -> bool:
        """Whether its owner has closed it for everybody."""
        return self.mapping.load(CLOSED_AT) != 0

    def mark_closed(self, futexes: Sequence[int] = ()) -> None:
        """Close it for every process and wake who sleeps on these words (offsets of 8 aligned bytes)."""
        self.mapping.store(CLOSED_AT, 1)
        for at in futexes:
            self.mapping.add(at, 1)
            self.mapping.wake(at)

    def hold(self, make_core: Callable[[SharedSegment], Any]) -> SharedSegment:
        """Count one more user; the first one makes the native object."""
        with registry.lock:
            if self.fd < 0:  # found by name just before its last user left
                raise ClosedError("this object was closed; open or create it again")
            if self.core is None:
                self.core = make_core(self)
            self.users += 1
        return self

    def _end(self) -> None:
        self.core.close()


@dataclass(frozen=True, slots=True)
class _Header:
    kind: str
    schema_hash: str
    nonce: bytes
    words_nbytes: int
    schema_nbytes: int
    data_nbytes: int
    owner: int

    @property
    def schema_at(self) -> int:
        return page_up(WORDS_AT + self.words_nbytes)

    @property
    def data_at(self) -> int:
        return self.schema_at + page_up(self.schema_nbytes)

    @property
    def nbytes(self) -> int:
        return self.data_at + page_up(self.data_nbytes)

    def pack(self) -> bytes:
        packed = _HEADER.pack(
            MAGIC, VERSION, self.kind.encode(), self.schema_hash.encode(), self.nonce, self.words_nbytes,
            self.schema_nbytes, self.data_nbytes, self.owner, 0,
        )  # fmt: skip
        return packed[:_CRC_AT] + struct.pack("<I", _core.crc32c(packed[:_CRC_AT]))

    @staticmethod
    def unpack(packed: bytes, what: str) -> _Header:
        magic, version, kind, schema_hash, nonce, words, schema, data, owner, crc = _HEADER.unpack(packed)
        if magic != MAGIC:
            raise AttachError(f"{what}: magic must be {MAGIC!r}, found {magic!r}; it is another object")
        if version != VERSION:
            raise AttachError(
                f"{what}: version must be {VERSION}, found {version}; use one release everywhere"
            )
        if crc != _core.crc32c(packed[:_CRC_AT]):
            raise AttachError(f"{what}: the checksum of its header does not match; it is damaged")
        kind, schema_hash = (
            kind.rstrip(b"\0").decode("ascii", "replace"),
            schema_hash.decode("ascii", "replace"),
        )
        return _Header(kind, schema_hash, nonce, words, schema, data, owner)


@interrupts.undivided
def create(kind: str, schema: Any, words_nbytes: int, data_nbytes: int, what: str) -> SharedSegment:
    """Make a segment; BudgetError before anything is allocated if it cannot fit."""
    text = schema_text(schema).encode()
    header = _Header(
        kind, _hash(text), secrets.token_bytes(16), words_nbytes, len(text), data_nbytes,
        _core.own_word(),
    )  # fmt: skip
    fd = make_memory(header.nbytes, header.nonce, what)
    try:
        mapping = _core.Mapping(fd, 0, header.nbytes, True)
        mapping.view(header.schema_at, len(text))[:] = np.frombuffer(text, np.uint8)
        mapping.view(0, _HEADER.size)[:] = np.frombuffer(header.pack(), np.uint8)
        segment = SharedSegment(fd, header, mapping, schema)
    except BaseException:
        close_memory(fd)
        raise
    registry.add(segment)
    return segment


@interrupts.undivided
def attach(text: str, kind: str, words_nbytes: int | None = None) -> SharedSegment:
    """Attach by name; AttachError names the first difference, or says that the owner is gone.

    `words_nbytes` None: how many there are follows from the schema, whose hash is compared.
    """
    name = Name.parse(text, kind)
    what = f"{kind} of process {name.pid}"
    known: SharedSegment | None = registry.find(name.nonce)
    if known is not None:
        return known
    fd = open_memory(name.pid, name.fd, name.nonce, what)
    try:
        segment = _read(fd, name, words_nbytes, what)
    except BaseException:
        close_memory(fd)
        raise
    # If another thread was first, ours closes its descriptor when it is dropped.
    return registry.find_or_add(name.nonce, lambda: segment)


def _read(fd: int, name: Name, words_nbytes: int | None, what: str) -> SharedSegment:
    nbytes = os.fstat(fd).st_size
    if nbytes < PAGE:
        raise AttachError(f"{what}: size must be at least {PAGE}, found {nbytes}; it is another object")
    header = _Header.unpack(_core.Mapping(fd, 0, PAGE, False).view(0, _HEADER.size).tobytes(), what)
    if header.nonce != name.nonce:
        raise AttachError(f"{what}: its owner is gone and the descriptor was reused; create it again")
    n_words = header.words_nbytes if words_nbytes is None else words_nbytes
    wanted = (name.kind, name.schema_hash, n_words, header.nbytes)
    found = (header.kind, header.schema_hash, header.words_nbytes, nbytes)
    for label, mine, theirs in zip(("kind", "layout hash", "words", "size"), wanted, found):
        if mine != theirs:
            raise AttachError(
                f"{what}: {label} must be {mine}, found {theirs}; attach with what it was made with"
            )
    mapping = _core.Mapping(fd, 0, nbytes, True)
    text = mapping.view(header.schema_at, header.schema_nbytes).tobytes()
    if _hash(text) != header.schema_hash:
        raise AttachError(f"{what}: its schema does not have the hash {header.schema_hash}; it is damaged")
    return SharedSegment(fd, header, mapping, json.loads(text))


def _hash(text: bytes) -> str:
    return blake2b(text, digest_size=16).hexdigest()
