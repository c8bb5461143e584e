"""OwnedDirectory: the lock of a directory that one process writes, and the list of what it made there.

Both are one file, `.recollect-writer`. Who holds its lock (flock) is the writer; the kernel drops the lock with the
process. Its first line names the process, each other line a file that the writer is about to make or to remove. A
writer that is killed leaves the list, and the next one removes what is on it and in no manifest. So what a killed
writer left is cleaned up, and a file that was never ours is never touched. A writer that ends in order leaves no file.

A forked child does not own the directory: it closes its copy of the descriptor at once, so the lock ends with the
process that took it.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
import threading
import weakref
from collections.abc import Collection, Iterable
from contextlib import suppress
from pathlib import Path
from time import monotonic, sleep
from typing import BinaryIO, Self

from recollect import interrupts
from recollect.errors import FormatError, LaneBusyError
from recollect.files.lock import UNKNOWN, holder_of, lock_file
from recollect.files.names import check_name, has_name, open_inside, open_named, remove_inside
from recollect.files.sync import remove_empty

NAME = ".recollect-writer"
_HEAD = re.compile(rb"recollect writer, process +(\d+)\n")
_HEAD_NBYTES = len("recollect writer, process 1234567890\n")
_POLL_S = 0.005


class OwnedDirectory:
    """A directory that this object may write, until `release()`; a context.

    Ownership: of the files that it noted, and of those that a manifest of ours names; never of any other.
    Concurrency: one object of one process at a time; the others raise LaneBusyError. Calls take turns.

    >>> import tempfile
    >>> with OwnedDirectory.take(Path(tempfile.mkdtemp())) as owned:
    ...     owned.left
    []
    """

    def __init__(self, path: Path, fd: int, left: list[str]) -> None:
        """Use `take`."""
        self.path, self.left = path.absolute(), left  # this process may change its directory
        self._fd, self._pid = fd, os.getpid()
        self._noted: dict[str, None] = dict.fromkeys(left)
        self._end = os.fstat(fd).st_size  # of the list
        self._claims: list[BinaryIO] = []  # files that nobody else may write

    @classmethod
    def take(cls, path: Path, *, wait_s: float = 0.0) -> Self:
        """Lock a directory that is there; LaneBusyError names the process that has it, after `wait_s` seconds."""
        ends = monotonic() + wait_s
        while True:
            owned: Self | None = None
            try:
                # A child that is forked in between would keep the lock of a dead process.
                with interrupts.deferred(*interrupts.ASKING), _forks:
                    taken = _lock(path)
                    if isinstance(taken, int):
                        owned = cls._over(path, taken)
            except BaseException:
                if owned is not None:  # a traceback would keep it
                    owned.release()
                raise
            if owned is not None:
                return owned
            if monotonic() >= ends:
                raise LaneBusyError(
                    f"{path}: must have one writer, got a second beside {taken}; open it with read_only=True, "
                    "or close the other"
                )
            sleep(_POLL_S)

    @classmethod
    def _over(cls, path: Path, fd: int) -> Self:
        try:
            owned = cls(path, fd, _begin(path, fd))
        except BaseException:
            _drop(path, fd)
            raise
        _held.add(owned)
        return owned

    @property
    def is_held(self) -> bool:
        """Whether this process may write here."""
        return self._fd >= 0

    def check(self) -> None:
        """Raise unless this object still owns the directory of this path."""
        if self._fd < 0:
            if self._pid != os.getpid():
                raise LaneBusyError(
                    f"{self.path}: belongs to process {self._pid}, got a write by its forked child {os.getpid()}; "
                    "open it in the child"
                )
            raise LaneBusyError(f"{self.path}: was given back, got a write; open it again")
        if not _is_at(self.path, self._fd):
            raise OSError(
                errno.ESTALE,
                "is another directory than the one that was opened; it was moved or removed",
                str(self.path),
            )

    def claim(self, name: str) -> None:
        """Let nobody open a file for writing until it is removed or given back; LaneBusyError if somebody has."""
        with interrupts.deferred(*interrupts.ASKING), _forks:
            self.check()
            try:
                file = open_inside(self.path, name)
            except FileNotFoundError:
                return
            try:
                if lock_file(file.fileno(), self.path / name):
                    self._claims.append(file)
                    return
                holder = holder_of(file.fileno())
            except BaseException:
                file.close()
                raise
            file.close()
        raise LaneBusyError(
            f"{self.path / name}: must not be in use, got {holder}, or a child that it forked, that has it open for "
            "writing; close it there first"
        )

    def _give_back(self) -> None:
        while self._claims:
            self._claims.pop().close()

    # -- the list

    @property
    def noted(self) -> list[str]:
        """What is on the list."""
        return list(self._noted)

    def note(self, names: Iterable[str]) -> None:
        """Write down files that are about to be made or removed; "x/" is a new directory with all that is put in it."""
        self.check()
        new = [name for name in dict.fromkeys(names) if name not in self._noted]
        for name in new:
            check_name(self.path, name.removesuffix("/"))
        self._write("".join(json.dumps(name) + "\n" for name in new))
        self._noted.update(dict.fromkeys(new))

    def _write(self, lines: str) -> None:
        block, at = lines.encode(), self._end
        while block:
            done = os.pwrite(self._fd, block, at)
            block, at = block[done:], at + done
        self._end = at  # not before: half a line would spoil the next one

    def note_new(self, name: str) -> None:
        """Write down a file that is about to be made; FileExistsError if one is there that is not on the list."""
        self.check()
        if name in self._noted:
            remove_inside(self.path, name)
        if has_name(self.path, name.removesuffix("/")):
            raise FileExistsError(
                errno.EEXIST,
                "is there already, and no manifest names it; move it away",
                str(self.path / name),
            )
        self.note([name])

    def make(self, name: str) -> BinaryIO:
        """Make a new file and open it; FileExistsError if one is there that is not on the list."""
        self.note_new(name)
        try:
            return open_named(self.path, name, "xb+")
        except BaseException as error:
            if isinstance(error, FileExistsError):  # another program made it just now: it is not ours
                self.cross_off([name])
            raise

    def cross_off(self, names: Iterable[str]) -> None:
        """Take names off the list: they are another's, or gone. What else is on it stays."""
        self.check()
        gone = [name for name in names if name in self._noted]
        for name in gone:  # first: another's file must not be removed, whatever the disk does
            del self._noted[name]
        if self._noted:
            self._write("".join(json.dumps([name]) + "\n" for name in gone))
        else:
            self.forget()

    def remove(self, names: Iterable[str]) -> None:
        """Remove files that were noted, and their directories where those are empty now."""
        self.check()
        parents: set[Path] = set()
        for name in names:
            remove_inside(self.path, name)
            parents.update(self.path / p for p in Path(name).parents if len(p.parts) > 1)
        remove_empty(sorted(parents))  # the innermost last

    def remove_noted(self, keep: Collection[str]) -> None:
        """Remove what was noted, but for the names to keep, and begin a new list."""
        trees = tuple(
            name for name in self._noted if name.endswith("/") and any(k.startswith(name) for k in keep)
        )
        self.remove(name for name in self._noted if name not in keep and name not in trees)
        self.forget()

    def forget(self) -> None:
        """Begin a new list: what was noted is named by a manifest now, or gone."""
        self.check()
        os.ftruncate(self._fd, _HEAD_NBYTES)
        self._end = _HEAD_NBYTES
        self._noted.clear()
        self.left = []
        self._give_back()

    # -- the end

    def moved_to(self, path: Path) -> None:
        """Say that this process renamed the directory."""
        self.path = path.absolute()

    def release(self) -> None:
        """Give the directory to others; may be called twice. A list that is not empty stays, for the next writer."""
        with interrupts.deferred(*interrupts.ASKING), _forks:
            fd, self._fd = self._fd, -1
            if fd < 0:
                return
            try:
                if not self._noted:
                    with suppress(OSError):
                        if _is_at(self.path, fd):
                            os.unlink(self.path / NAME)
            finally:
                self._give_back()
                os.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()

    def __del__(self) -> None:
        fd, self._fd = getattr(self, "_fd", -1), -1
        if fd >= 0:
            self._give_back()
            os.close(fd)


def _lock(path: Path) -> int | str:
    """The locked descriptor of a directory's list, or which process has it."""
    file = path / NAME
    while True:
        try:
            fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)
        except OSError as error:
            if error.errno != errno.ELOOP:
                raise
            raise FormatError(f"{file}: must be the list of a writer, got a link; remove it") from None
        try:
            _check_ours(file, fd)
            if not lock_file(fd, file):
                holder = _writer_of(fd)
                os.close(fd)
                return holder
            if _is_at(path, fd):
                return fd
            os.close(fd)  # its writer gave it back and removed it just now
        except OSError:
            _drop(path, fd)
            raise
        except BaseException:
            os.close(fd)
            raise


def _writer_of(fd: int) -> str:
    """Which process has a list locked; first by the lock: a new writer has not put itself at the head yet."""
    holder = holder_of(fd)
    if holder != UNKNOWN:
        return holder
    head = _HEAD.match(os.pread(fd, _HEAD_NBYTES, 0))
    return UNKNOWN if head is None else f"process {int(head[1])}"


def _drop(path: Path, fd: int) -> None:
    """Close a list that could not be begun, and remove it if nothing is in it."""
    try:
        with suppress(OSError):
            if not os.fstat(fd).st_size and _is_at(path, fd):
                os.unlink(path / NAME)
    finally:
        os.close(fd)


def _check_ours(file: Path, fd: int) -> None:
    found = os.fstat(fd)
    head = os.pread(fd, _HEAD_NBYTES, 0) if stat.S_ISREG(found.st_mode) and found.st_nlink < 2 else b"?"
    if head and _HEAD.fullmatch(head) is None:
        raise FormatError(f"{file}: must be the list of a writer, got another program's file; remove it")


def _begin(path: Path, fd: int) -> list[str]:
    """Put this process at the head of the list, and return what a killed writer left on it."""
    left: dict[str, None] = {}
    text = os.pread(fd, os.fstat(fd).st_size, 0)
    os.ftruncate(fd, text.rfind(b"\n") + 1)  # the last line may have been cut short
    for line in text.split(b"\n")[1:-1]:
        try:
            found = json.loads(line)
            if isinstance(found, list):  # it was another program's
                left.pop(found[0], None)
            else:
                check_name(path, found.removesuffix("/"))
                left[found] = None
        except (ValueError, TypeError, IndexError, AttributeError, RecursionError):
            continue  # torn by a power loss
    os.pwrite(fd, f"recollect writer, process {os.getpid():>10}\n".encode(), 0)
    return list(left)


def _is_at(path: Path, fd: int) -> bool:
    try:
        found, own = os.lstat(path / NAME), os.fstat(fd)
    except FileNotFoundError:
        return False
    return (found.st_dev, found.st_ino) == (own.st_dev, own.st_ino)


_held: weakref.WeakSet[OwnedDirectory] = weakref.WeakSet()
_forks = threading.RLock()  # a signal handler may come in between, and take another directory


def _after_fork() -> None:
    for owned in list(_held):
        with suppress(OSError):
            owned._give_back()
            os.close(owned._fd)
        owned._fd = -1
    _held.clear()
    _forks.release()


os.register_at_fork(before=_forks.acquire, after_in_parent=_forks.release, after_in_child=_after_fork)
