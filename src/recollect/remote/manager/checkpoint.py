"""Checkpoint: a dump of the manager now and then, and between dumps a log of every container.

The dump is a replay dump (`manifest.json`, `storage/`) with one more file, `manager-<commit>.bin`, in the same commit:
that of `write_dump`, where the new manifest is renamed into place.
`log-<commit>.bin` beside it has what came after that commit, each record written before its answer leaves. A record
that a kill cut short was never acknowledged, and is cut off. Damage (a flipped bit, foreign bytes) costs the records
it lies in: reading goes on at the next whole one, and a damaged log is kept as `damaged-log-<commit>.bin`.
"""

from __future__ import annotations

import mmap
import os
import shutil
import struct
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import Any

import msgspec

from recollect import _core, interrupts
from recollect.errors import FormatError, RemoteError
from recollect.files import (
    OwnedDirectory,
    file_crc,
    has_name,
    make_directory,
    open_inside,
    open_named,
    remove_inside,
    sync_directory,
    sync_file,
)
from recollect.files.record import Count, damage_in
from recollect.remote.config import Checkpoint
from recollect.remote.frame import MOST_FRAME, PREFIX, decode, is_frame
from recollect.remote.manager.forwarder import Forwarder, ForwardState
from recollect.remote.manager.peers import Writers
from recollect.remote.manager.state import ManagerState
from recollect.remote.messages import Data
from recollect.replay import ReplayBuffer, snapshot
from recollect.storage.dump import check_owned
from recollect.storage.manifest import STORAGE, is_committed, read_manifest

_RECORD = struct.Struct("<IIqI")  # magic, bytes, sender, crc32c of the frame and then of what precedes
_MAGIC = 0x474F4C52  # "RLOG"
_MARK = struct.pack("<I", _MAGIC)
_MOST = 1 << 30
NAME, LOG = "manager", "log"
VERSION = 2  # in version 1 the checksum was that of the frame alone
Repeat = Callable[[int, Data, memoryview], None]


class SavedState(msgspec.Struct):
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


class ContainerLog:
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
        head = record_head(view, sender)
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
                sync_file(copy)
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


def record_head(frame: Any, sender: int) -> bytes:
    """What stands before a frame in the log."""
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


def has_dump(path: Path) -> bool:
    """Whether a dump lies there."""
    return (path / "manifest.json").exists()


def write_dump(
    buffer: ReplayBuffer,
    path: Path,
    state: SavedState,
    old: ContainerLog | None = None,
    owned: OwnedDirectory | None = None,
) -> ContainerLog:
    """Dump buffer and state in one commit, and return the log that follows it; `old`, the one before, is removed."""
    if old is not None and old.is_damaged:
        old.keep_aside()
    files = {NAME: msgspec.msgpack.encode(state)}
    commit = snapshot.dump(buffer, path, False, files, log=LOG, owned=owned)
    log = ContainerLog(path, commit)
    try:
        sync_directory(path)
    except BaseException:
        log.close()
        raise
    return log


def is_followed_by(path: Path, log: ContainerLog) -> bool:
    """Whether this log is known to belong to the newest commit: the manifest may be unreadable now."""
    return is_committed(path, log.commit) is True


def read_dump(path: Path, space: Any, storage: str) -> tuple[ReplayBuffer, SavedState, ContainerLog]:
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
            state = msgspec.msgpack.decode(f.read(manifest["files"][name]["bytes"]), type=SavedState)
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
    return buffer, state, ContainerLog(path, manifest["commit"])


class ManagerCheckpoint:
    """The dump and the log of one manager; without a checkpoint nothing is ever written.

    A dump that fails loses nothing, for the log goes on: it is counted, warned of, and tried again at its next time.
    Only where a restart would not read the log at hand, nothing is logged or answered before a dump was written.

    Ownership: owns the log and the directory. Concurrency: the manager's lock is held in every call.
    """

    def __init__(
        self,
        state: ManagerState,
        writers: Writers,
        checkpoint: Checkpoint | None,
        forwarder: Forwarder | None,
    ) -> None:
        self.state, self.writers, self.checkpoint, self.forwarder = state, writers, checkpoint, forwarder
        self.config = _config(state)
        # At once: this process may change its directory.
        self._path = None if checkpoint is None else Path(checkpoint.path).absolute()
        self.log: ContainerLog | None = None
        self._owned: OwnedDirectory | None = None
        self.n_failed = 0  # dumps that could not be written
        self.n_damaged = 0  # places of the log, in this process, that held no record
        self._dumped_at = 0.0  # or tried in vain
        self._forwards_as: bytes | None = None  # in the dump
        self._log_is_over = False  # a restart would not read it, or not all of it
        self._warned = False

    def open(self, repeat: Repeat) -> None:
        """Make the buffer, or take it from the checkpoint and `repeat` the work of its log."""
        path = self._path
        if path is not None:
            make_directory(path)
            self._owned = OwnedDirectory.take(path)  # two managers would overwrite each other
        try:
            self._open(path, repeat)
        except BaseException:
            self.close()
            raise

    def _open(self, path: Path | None, repeat: Repeat) -> None:
        if self.checkpoint is None or path is None or not has_dump(path):
            if self._owned is not None:
                check_owned(self._owned)  # a foreign storage/ is refused before anything is made
            self.state.use_buffer(self.state.new_buffer())
            self.dump()
        elif self.checkpoint.resume:
            self._restore(path, repeat)
        else:
            raise FileExistsError(
                f"{path}: holds a checkpoint; pass resume=True to go on, or choose another path"
            )

    # -- out

    @property
    def waits_for_disk(self) -> bool:
        """Whether what was logged must be on disk before answers leave."""
        return self.checkpoint is not None and self.checkpoint.power_safe

    def write(self, sender: int, frame: Any) -> None:
        """Log a container; it outlives this process once this returns. OSError: it is not logged."""
        if self.log is None:
            return
        if self._log_is_over or self.log.is_torn:
            self.dump()
        self.log.write(sender, frame)

    def write_through(self, sender: int, frame: Any) -> None:
        """Log a container, on disk if a power loss must not undo it. OSError: it is not logged."""
        self.write(sender, frame)
        if self.log is not None and self.waits_for_disk:
            try:
                self.log.sync()
            except BaseException:
                self._log_is_over = True
                self.log.take_back()
                raise

    def commit(self) -> None:
        """What was logged must be on disk before answers leave, if a power loss must not undo it.

        OSError: it is not there. Another sync may say that it is when it is not, so a dump has to be.
        """
        if self.log is None or not self.waits_for_disk:
            return
        if not self._log_is_over:
            try:
                self.log.sync()
            except OSError:
                self._log_is_over = True
        if self._log_is_over:
            self.dump()

    def tick(self, now: float) -> None:
        """Dump, if it is time."""
        if self.checkpoint is not None and now - self._dumped_at >= self.checkpoint.every_s:
            self.try_dump()

    def follow_forwarder(self) -> None:
        """Dump when it goes on under another name, before anything is stored under it: numbers begin anew."""
        if self.checkpoint is None or self.forwarder is None or self._log_is_over:
            return
        if self.forwarder.writer != self._forwards_as:
            self._log_is_over = True
            self.try_dump()

    def try_dump(self) -> None:
        """Dump; if the disk does not let it, say so and go on."""
        try:
            self.dump()
        except OSError as error:
            self._dumped_at = monotonic()
            if not self._warned:
                self._warned = True
                warnings.warn(
                    f"checkpoint: a dump cannot be written ({error}); it is tried again, and the last one and its "
                    "log stay; free the disk", RuntimeWarning, stacklevel=2,
                )  # fmt: skip

    def dump(self) -> None:
        """Write everything, and begin a new log. OSError: it is counted, and nothing that was saved is lost."""
        if self._path is None:
            return
        path, old = self._path, self.log
        try:
            with self.state.timing.phase("dump"):
                self.log = write_dump(self.state.buffer, path, self._saved_state(), old, self._owned)
        except BaseException:
            with interrupts.deferred():
                self.n_failed += 1
                # It may have failed behind its commit: then a restart takes that one, and looks for another log.
                self._log_is_over |= old is not None and not is_followed_by(path, old)
            raise
        if old is not None:
            with suppress(OSError):  # it is not read any more
                old.remove()
        self._dumped_at, self._log_is_over, self._warned = monotonic(), False, False
        self._forwards_as = None if self.forwarder is None else self.forwarder.writer

    def _saved_state(self) -> SavedState:
        state, function = self.state, self.state.hooks.scoring()
        scoring = function.state_dict() if hasattr(function, "state_dict") else None
        writers = [
            (i, w.rank, w.last_seq, w.kept_answers(), w.has_left) for i, w in self.writers.by_id.items()
        ]
        generator = {k: int(v) for k, v in state.stream.state_dict().items()}
        return SavedState(
            VERSION, self.config, writers, state.baseline.ema, dict(state.counts), dict(state.rejected), generator,
            scoring, {str(rank): dict(about) for rank, about in state.senders.by_rank.items()},
            None if self.forwarder is None else self.forwarder.state(),
        )  # fmt: skip

    # -- in

    def _restore(self, path: Path, repeat: Repeat) -> None:
        buffer, saved, log = read_dump(path, self.state.items.space, self.state.settings.storage)
        try:
            if self._owned is not None:
                check_owned(self._owned)  # removes what a killed manager left
            self._check_config(path, saved.config)
            self.state.use_buffer(buffer)
            with damage_in(path):
                self._load(saved)
            function = self.state.hooks.scoring()
            if saved.scoring is not None and hasattr(function, "load_state_dict"):
                function.load_state_dict(saved.scoring)
            self._repeat_all(log, repeat)
            if self.forwarder is not None:
                self.forwarder.log_is_repeated()
        except BaseException:
            log.close()
            buffer.close()
            raise
        self.log = log
        self._dumped_at = monotonic()
        if self.n_damaged:
            self._tell_damage(log)

    def _repeat_all(self, log: ContainerLog, repeat: Repeat) -> None:
        """Do the work of a log again, each container once, also behind damage and in whatever order they are."""
        done: set[tuple[bytes, int]] = set()
        n_twice = 0
        dumped = {writer: record.last_seq for writer, record in self.writers.by_id.items()}
        for sender, frame in log.records():
            message, _, body = decode(frame, max_frame=MOST_FRAME)
            if not isinstance(message, Data):
                raise RemoteError(f"{log.path}: must hold containers, got something else; it is damaged")
            number = (message.writer, message.seq)
            if number in done or message.seq <= dumped.get(message.writer, 0):
                n_twice += 1
                continue
            done.add(number)
            known = self.writers.get(message.writer)
            before = 0 if known is None else known.last_seq
            repeat(sender, message, body)
            record = self.writers.get(message.writer)
            if record is not None:
                record.last_seq = max(before, message.seq)
        self.n_damaged = len(log.damages) + n_twice
        log.go_on(self.n_damaged > 0)

    def _tell_damage(self, log: ContainerLog) -> None:
        """Say what was lost, and begin a new log, so that the damaged one can be kept as it is."""
        lost = sum(end - first for first, end in log.damages)
        found = (
            f"is damaged in {self.n_damaged} places ({lost} bytes, from byte {log.damages[0][0]} on); the containers "
            "there are lost, all others were kept"
            if log.damages
            else f"holds {self.n_damaged} containers twice; each was taken once"
        )
        kept = f"damaged-{log.path.name}"
        warnings.warn(
            f"{log.path}: {found}; the file is kept as {kept}; check the disk", RuntimeWarning, stacklevel=2
        )
        self.try_dump()

    def _check_config(self, path: Path, config: dict[str, Any]) -> None:
        for name, value in self.config.items():
            if config.get(name) != value:
                raise ValueError(
                    f"{path}: {name} must be as in the checkpoint, {config.get(name)!r}, got {value!r}; "
                    "choose another path"
                )

    def _load(self, saved: SavedState) -> None:
        state = self.state
        for writer, rank, last_seq, _, has_left in saved.writers:
            record = self.writers.enter(writer, rank)
            record.last_seq, record.has_left = last_seq, has_left
        # Entering a writer ends the answers of earlier ones of its rank, so they are put back afterwards.
        for writer, _, _, answers, _ in saved.writers:
            self.writers.by_id[writer].answers.update(answers)
        state.baseline.ema = saved.ema
        state.counts.update({k: v for k, v in saved.counts.items() if k in state.counts})
        state.rejected.update(saved.rejected)
        state.senders.by_rank.update({int(rank): dict(about) for rank, about in saved.senders.items()})
        state.stream.load_state_dict(saved.generator)
        if self.forwarder is not None:
            self.forwarder.resume(saved.forward)
            self._forwards_as = None if saved.forward is None else saved.forward.writer

    def close(self) -> None:
        """Give up the log and the directory."""
        if self.log is not None:
            self.log.close()
            self.log = None
        if self._owned is not None:
            self._owned.release()


def _config(state: ManagerState) -> dict[str, Any]:
    """What must be the same for a checkpoint to fit."""
    items, settings, baseline = state.items, state.settings, state.baseline
    rule = settings.diversity
    diverse = None if rule is None else [rule.key, float(rule.cutoff), float(rule.p)]
    return {
        "space": items.text, "max_length": items.max_length, "capacity": int(settings.capacity),
        "evict": settings.evict, "store_locally": bool(settings.store_locally),
        "diverse": diverse, "strategy": baseline.strategy,
        "percentile": float(baseline.percentile), "alpha": float(baseline.alpha),
    }  # fmt: skip
