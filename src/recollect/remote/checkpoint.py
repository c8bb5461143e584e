"""Checkpoint: a dump of the manager now and then, and between dumps a log of every container.

The dump is a replay dump (`manifest.json`, `storage/`) with one more file, `manager-<commit>.bin`, in the same commit.
`log-<commit>.bin` beside it has what came after that commit, each record written before its answer leaves. A record
that a kill cut short was never acknowledged, and is cut off.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from recollect import _core
from recollect.errors import FormatError
from recollect.files import OwnedDirectory, open_inside, open_named, remove_inside, sync_directory
from recollect.remote.forwarding import ForwardState
from recollect.replay import ReplayBuffer, snapshot
from recollect.storage.dump import STORAGE, file_crc, last_commit, read_manifest

_RECORD = struct.Struct("<IIqI")  # magic, bytes, sender, crc32c
_MAGIC = 0x474F4C52  # "RLOG"
_MOST = 1 << 30
NAME, LOG = "manager", "log"
VERSION = 1


class State(msgspec.Struct):
    """What a manager is beside its buffer."""

    version: int
    config: dict[str, Any]
    writers: list[tuple[bytes, int, int, list[tuple[int, bytes]], bool]]
    ema: float | None
    counts: dict[str, int]
    rejected: dict[str, int]
    generator: dict[str, int]
    scoring: Any
    senders: dict[str, dict[str, int]]
    forward: ForwardState | None = None


class Log:
    """An append-only file of frames.

    Ownership: owns the descriptor. Concurrency: one thread at a time.
    """

    def __init__(self, path: Path, commit: int) -> None:
        self.path, self.commit = path / f"{LOG}-{commit}.bin", commit
        # A link of that name would let it be cut where it leads to.
        self._fd = open_inside(path, self.path.name, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        self._end = self._before = os.fstat(self._fd).st_size
        self._unsynced = False
        self.is_torn = False  # it ends in what is no record: what followed would not be read

    def write(self, sender: int, frame: Any) -> None:
        """Append a frame; it outlives this process once this returns. All or nothing."""
        view = memoryview(frame).cast("B") if not isinstance(frame, bytes) else memoryview(frame)
        head = _RECORD.pack(_MAGIC, view.nbytes, sender, _core.crc32c(view))
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
        """The whole records, in order; what follows them is cut off."""
        at = 0
        with open(self.path, "rb") as f:
            while True:
                head = f.read(_RECORD.size)
                if len(head) < _RECORD.size:
                    break
                magic, nbytes, sender, crc = _RECORD.unpack(head)
                if magic != _MAGIC or nbytes > _MOST:
                    break
                frame = f.read(nbytes)
                if len(frame) < nbytes or _core.crc32c(frame) != crc:
                    break
                at += _RECORD.size + nbytes
                yield sender, frame
        os.ftruncate(self._fd, at)
        self._end = self._before = at

    def remove(self) -> None:
        """Close it, and remove the file: a newer dump has all that is in it."""
        self.close()
        remove_inside(self.path.parent, self.path.name)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def exists(path: Path) -> bool:
    """Whether a dump lies there."""
    return (path / "manifest.json").exists()


def write(buffer: ReplayBuffer, path: Path, state: State, owned: OwnedDirectory | None = None) -> Log:
    """Dump buffer and state in one commit, and return the log that follows it."""
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
    """Whether this log belongs to the newest commit."""
    return last_commit(path) == log.commit


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
        try:
            state = msgspec.msgpack.decode(f.read(), type=State)
        except msgspec.MsgspecError as error:
            raise FormatError(f"{path / name}: cannot be read ({error}); it is damaged") from None
    if state.version != VERSION:
        raise FormatError(
            f"{path / name}: version must be {VERSION}, got {state.version}; use a newer release"
        )
    buffer = ReplayBuffer.load_from(
        path,
        read_only=False,
        single_instance_space=space,
        storage=storage,
        multiprocessing=storage == "shared",
    )
    return buffer, state, Log(path, manifest["commit"])
