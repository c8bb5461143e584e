"""Checkpoint: a dump of the manager now and then, and between dumps a log of every container.

The dump is a replay dump (`manifest.json`, `storage/`) with one more file, `manager-<commit>.bin`, in the same commit.
`log-<commit>.bin` beside it has what came after that commit, each record written before its answer leaves. A record
that a kill cut short was never acknowledged, and is cut off. Damage (a flipped bit, foreign bytes) costs the records
it lies in: reading goes on at the next whole one, and a damaged log is kept as `damaged-log-<commit>.bin`.
"""

from __future__ import annotations

import mmap
import os
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from recollect import _core, interrupts
from recollect.errors import FormatError
from recollect.files import OwnedDirectory, has_name, open_inside, open_named, remove_inside, sync_directory
from recollect.files.record import Count, damage_in
from recollect.remote.frame import PREFIX, is_frame
from recollect.remote.manager.forwarder import ForwardState
from recollect.replay import ReplayBuffer, snapshot
from recollect.storage.dump import STORAGE, file_crc, is_committed, read_manifest

_RECORD = struct.Struct("<IIqI")  # magic, bytes, sender, crc32c of the frame and then of what precedes
_MAGIC = 0x474F4C52  # "RLOG"
_MARK = struct.pack("<I", _MAGIC)
_MOST = 1 << 30
NAME, LOG = "manager", "log"
VERSION = 2  # in version 1 the checksum was that of the frame alone


class State(msgspec.Struct):
    """What a manager is beside its buffer."""

    version: int
    config: dict[str, Any]
    writers: list[tuple[bytes, int, Count, list[tuple[int, bytes]], bool]]
    ema: float | None
    counts: dict[str, Count]
    rejected: dict[str, Count]
    generator: dict[str, int]
    scoring: Any
    senders: dict[str, dict[str, Count]]
    forward: ForwardState | None = None


class Log:
    """An append-only file of frames.

    Ownership: owns the descriptor. Concurrency: one thread at a time.
    """

    def __init__(self, path: Path, commit: int) -> None:
        self.path, self.commit, self._fd = path / f"{LOG}-{commit}.bin", commit, -1
        # A link of that name would let it be cut where it leads to.
        with (
            interrupts.deferred(),
            open_inside(path, self.path.name, os.O_RDWR | os.O_CREAT | os.O_APPEND) as file,
        ):
            self._fd = os.dup(file.fileno())
        self._end = self._before = os.fstat(self._fd).st_size
        self._unsynced = False
        self.is_torn = False  # it ends in what is no record
        self.is_damaged = False  # it must be kept
        self.damages: list[tuple[int, int]] = []  # from where to where `records` found no record
        self._aside: str | None = None  # the copy of a damaged log

    def write(self, sender: int, frame: Any) -> None:
        """Append a frame; it outlives this process once this returns. All or nothing."""
        view = memoryview(frame).cast("B") if not isinstance(frame, bytes) else memoryview(frame)
        head = _head(view, sender)
        want = len(head) + view.nbytes
        try:
            done = os.writev(self._fd, [head, view])
            while done < want:
                done += os.write(self._fd, (head + bytes(view))[done:])
        except BaseException:
            self._cut(self._end)
            raise
        self._before, self._end = self._end, self._end + want
        self._unsynced = True

    def take_back(self) -> None:
        """Cut off the record that was written last; once."""
        self._end = self._before
        self._cut(self._end)

    def _cut(self, end: int) -> None:
        try:
            os.ftruncate(self._fd, end)
        except OSError:
            self.is_torn = True

    def sync(self) -> None:
        """Make what was written survive a power loss."""
        if self._unsynced:
            os.fdatasync(self._fd)
            self._unsynced = False

    def records(self) -> Iterator[tuple[int, bytes]]:
        """The whole records, in order, those behind damage too; then call `go_on`."""
        self.damages = []
        size = os.fstat(self._fd).st_size
        if not size:  # nothing that could be mapped
            return
        with mmap.mmap(self._fd, size, access=mmap.ACCESS_READ) as data:
            at = 0
            while at < size:
                found = _record_at(data, at)
                if found is None:
                    after = _next_record(data, at + 1)
                    if after == size and _is_cut_short(data, at):
                        break
                    self.damages.append((at, after))
                    at = after
                    continue
                sender, end = found
                yield sender, data[at + _RECORD.size : end]
                at = end
        self._end = self._before = at

    def go_on(self, is_damaged: bool) -> None:
        """Get ready for writes: a record that a kill cut short is cut off, but nothing of a damaged log is."""
        self.is_damaged = is_damaged
        if is_damaged:
            self._end = self._before = os.fstat(self._fd).st_size
        else:
            os.ftruncate(self._fd, self._end)

    def keep_aside(self) -> None:
        """Copy a damaged log, which the next commit removes, to a name that nothing removes."""
        if self._aside is not None:
            return
        number = 0
        while has_name(self.path.parent, name := self._aside_name(number)):
            number += 1
        with open_named(self.path.parent, name, "xb+") as copy:
            try:
                with open_named(self.path.parent, self.path.name) as original:
                    shutil.copyfileobj(original, copy)
                copy.flush()
                os.fsync(copy.fileno())
            except BaseException:
                remove_inside(self.path.parent, name)
                raise
        self._aside = name

    def _aside_name(self, number: int) -> str:
        return f"damaged-{self.path.stem}{f'-{number}' if number else ''}.bin"

    def remove(self) -> None:
        """Close it, and remove the file: a newer dump has all that is in it."""
        self.close()
        remove_inside(self.path.parent, self.path.name)

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:  # one that was cut short while it was made
        self.close()


def _head(frame: Any, sender: int) -> bytes:
    lead = _RECORD.pack(_MAGIC, len(frame), sender, 0)[:-4]
    return lead + struct.pack("<I", _core.crc32c(lead, _core.crc32c(frame)))


def _record_at(data: Any, at: int) -> tuple[int, int] | None:
    """The sender and the end of the record that begins here; None if no whole one does."""
    if at + _RECORD.size > len(data):
        return None
    magic, nbytes, sender, crc = _RECORD.unpack_from(data, at)
    start, end = at + _RECORD.size, at + _RECORD.size + nbytes
    if (
        magic != _MAGIC
        or nbytes > _MOST
        or end > len(data)
        or not is_frame(data[start : start + PREFIX.size], nbytes)
    ):
        return None
    frame = data[start:end]
    own = _core.crc32c(frame)
    return (sender, end) if crc in (own, _core.crc32c(data[at : start - 4], own)) else None


def _next_record(data: Any, at: int) -> int:
    """Where the next whole record begins; the end if there is none."""
    while (at := data.find(_MARK, at)) >= 0:
        if _record_at(data, at) is not None:
            return at
        at += 1
    return len(data)


def _is_cut_short(data: Any, at: int) -> bool:
    """Whether the rest is the beginning of a record, as a kill in the middle of its write leaves it."""
    rest = data[at : at + _RECORD.size + PREFIX.size]
    if len(rest) < _RECORD.size:
        return bool(rest.startswith(_MARK[: len(rest)]))
    magic, nbytes, _, _ = _RECORD.unpack_from(rest)
    if magic != _MAGIC or at + _RECORD.size + nbytes <= len(data):
        return False
    prefix = rest[_RECORD.size :]
    return len(prefix) < PREFIX.size or is_frame(prefix, nbytes)


def exists(path: Path) -> bool:
    """Whether a dump lies there."""
    return (path / "manifest.json").exists()


def write(
    buffer: ReplayBuffer,
    path: Path,
    state: State,
    old: Log | None = None,
    owned: OwnedDirectory | None = None,
) -> Log:
    """Dump buffer and state in one commit, and return the log that follows it; `old`, the one before, is removed."""
    if old is not None and old.is_damaged:
        old.keep_aside()
    files = {NAME: msgspec.msgpack.encode(state)}
    commit = snapshot.dump(buffer, path, False, files, log=LOG, owned=owned)
    log = Log(path, commit)
    try:
        sync_directory(path)
    except BaseException:
        log.close()
        raise
    return log


def is_followed_by(path: Path, log: Log) -> bool:
    """Whether this log is known to belong to the newest commit: the manifest may be unreadable now."""
    return is_committed(path, log.commit) is True


def read(path: Path, space: Any, storage: str) -> tuple[ReplayBuffer, State, Log]:
    """Load what `write` wrote, and open the log that followed it."""
    manifest = read_manifest(path, (snapshot.FORMAT,))
    name = f"{STORAGE}/{NAME}-{manifest['commit']}.bin"
    if name not in manifest["files"]:
        raise ValueError(
            f"{path}: must be the dump of a manager, got one of a buffer alone; choose another path"
        )
    with open_named(path, name) as f:
        if file_crc(f) != manifest["files"][name]["crc32c"]:
            raise FormatError(f"{path / name}: its checksum does not match; it is damaged")
        f.seek(0)
        with damage_in(path / name):
            state = msgspec.msgpack.decode(f.read(manifest["files"][name]["bytes"]), type=State)
    if not 1 <= state.version <= VERSION:
        raise FormatError(
            f"{path / name}: version must be at most {VERSION}, got {state.version}; use a newer release"
        )
    buffer = ReplayBuffer.load_from(
        path,
        read_only=False,
        single_instance_space=space,
        storage=storage,
        multiprocessing=storage == "shared",
    )
    return buffer, state, Log(path, manifest["commit"])
