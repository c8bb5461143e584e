"""The running jobs of this user: where they register, how another process finds them and reads their newest state.

There is no server. A job keeps its state in shared memory (`Latest`) and puts one small file into a directory that
only this user can enter; the file says which process it is and where the memory is. The memory goes with the process.
The file of a process that was killed stays, names a process (pid and start time) that is dead, and is removed by
whoever looks next.
"""

from __future__ import annotations

import fnmatch
import math
import os
import secrets
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from time import time
from typing import Any, Self

import msgspec
import numpy as np

from recollect import _core
from recollect.errors import AttachError, RecollectError
from recollect.files.record import read_bytes
from recollect.memory.latest import Latest
from recollect.system.directory import private
from recollect.system.processes import pid_space
from recollect.text import encoded

STARTING, RUNNING = "starting", "running"
COMPLETED, INTERRUPTED, FAILED = "completed", "interrupted", "failed"
LOST = "lost"  # what a reader says of a job that was killed
RECORDED = "recorded"  # and of one that is read from disk, where nothing says how it ended
_MOST_NBYTES = 1 << 20  # of a job's file
ENDED = (COMPLETED, INTERRUPTED, FAILED, LOST)
Cell = str | float | int | bool | None
Table = list[dict[str, Cell]]


class History(msgspec.Struct, frozen=True):
    """Figures over time: `values[name][k]` is what `name` was `at[k]` seconds after the start, None: nothing."""

    at: list[float] = []
    values: dict[str, list[float | None]] = {}


class Snapshot(msgspec.Struct, frozen=True):
    """The state of a job at one moment, as it published it.

    `figures` are its numbers by name, in groups (`reward/mean`, `time/learner_wait_ms`). `tables` are rows of cells,
    such as one for each collector. `charts` says which figures belong together, the most telling chart first.
    `facts` are what does not change.
    """

    kind: str
    title: str
    pid: int
    started: float
    elapsed_s: float
    state: str
    figures: dict[str, float] = {}
    tables: dict[str, Table] = {}
    charts: dict[str, list[str]] = {}
    facts: dict[str, Cell] = {}
    history: History = History()

    def numbers(self) -> Iterator[float]:
        """All numbers that are counted with."""
        yield from (self.started, self.elapsed_s, *self.figures.values(), *self.history.at)
        yield from (x for values in self.history.values.values() for x in values if x is not None)

    @property
    def is_over(self) -> bool:
        """Whether the job has ended, well or not."""
        return self.state in ENDED

    def chart_names(self) -> dict[str, list[str]]:
        """Return the figures of each chart, those that there are; a name with * stands for all that match."""
        known = [*self.figures, *(name for name in self.history.values if name not in self.figures)]
        found = {
            title: [x for p in names for x in fnmatch.filter(known, p)]
            for title, names in self.charts.items()
        }
        return {title: names for title, names in found.items() if names}

    @property
    def headlines(self) -> list[str]:
        """The charts whose first figure says what they are about: those that name their figures one by one."""
        return [title for title in self.chart_names() if not any("*" in name for name in self.charts[title])]

    @property
    def age_s(self) -> float:
        """Seconds since it was published, by the clock on the wall."""
        return max(0.0, time() - self.started - self.elapsed_s)


class JobEntry(msgspec.Struct, frozen=True):
    """What the file of a job says."""

    kind: str
    title: str
    pid: int
    started: float
    process: int  # pid and start time in one word: a reused pid is another process
    pid_space: str  # a container's pids mean nothing outside of it
    box: str
    release: int = 1
    id: str = ""  # the name of the file: one process may have several jobs


class Job:
    """A running job as others see it.

    Ownership: attaches to the job's memory, and keeps it until `close`, also when the job has ended.
    Concurrency: one thread at a time; the job never waits for a reader.
    """

    def __init__(self, entry: JobEntry) -> None:
        """AttachError if the job is gone."""
        self.entry = entry
        self._box = Latest.attach(entry.box)
        self._bytes = np.empty(self._box.sizes[0], np.uint8)
        self.version = 0

    kind = property(lambda self: self.entry.kind)
    title = property(lambda self: self.entry.title)
    pid = property(lambda self: self.entry.pid)
    started = property(lambda self: self.entry.started)
    id = property(lambda self: self.entry.id)

    @property
    def is_alive(self) -> bool:
        """Whether its process lives, as far as can be seen; a zombie does not."""
        return not _core.is_dead(self.entry.process)

    def snapshot(self) -> Snapshot | None:
        """Return the newest state, None before the first; of a job that was killed, its last one as `lost`.

        AttachError for a state that cannot be read: it is of another release, or was overwritten.
        """
        was_alive = self.is_alive
        self.version = self._box.latest([self._bytes])
        if not self.version:
            return None
        nbytes = int(self._bytes[:8].view(np.uint64)[0])
        try:
            found: Snapshot = _decoder().decode(self._bytes[8 : 8 + nbytes].data)
        except ValueError as error:
            raise AttachError(
                f"job {self.pid}: its state must be readable, got {error}; it is of another release or damaged"
            ) from None
        if not all(map(math.isfinite, found.numbers())):
            raise AttachError(
                f"job {self.pid}: its state must have finite numbers, got others; it is damaged"
            )
        return found if was_alive or found.is_over else msgspec.structs.replace(found, state=LOST)

    def wait_newer(self, timeout: float) -> bool:
        """Wait for a state newer than the one last read; False after `timeout` seconds or when the job is gone."""
        try:
            return self._box.wait_newer(self.version, timeout)
        except RecollectError:
            return False

    def close(self) -> None:
        """Detach."""
        self._box.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def find_jobs(kind: str | None = None) -> list[Job]:
    """Return the running jobs of this user, oldest first; close each. Files that dead jobs left are removed."""
    return [job for job in map(_attached, _living()) if job is not None and kind in (None, job.kind)]


def _attached(entry: JobEntry) -> Job | None:
    try:
        return Job(entry)
    except AttachError:  # it ended just now
        return None


def _living() -> list[JobEntry]:
    found = []
    for path in runtime_dir().glob("*.json"):
        entry = _read(path)
        if entry is None or entry.pid_space != pid_space():
            continue
        if _core.is_dead(entry.process):
            path.unlink(missing_ok=True)
        else:
            found.append(entry)
    return sorted(found, key=lambda entry: (entry.started, entry.pid))


def _read(path: Path) -> JobEntry | None:
    """Read a job's file; None if it has just gone, is damaged or no plain file, or is of another release."""
    try:
        found = msgspec.json.decode(read_bytes(path, most=_MOST_NBYTES), type=JobEntry)
    except (OSError, ValueError):  # ValueError: text that is no UTF-8, too
        return None
    sound = 0 <= found.process < 1 << 64 and math.isfinite(found.started)
    return msgspec.structs.replace(found, id=path.stem) if sound else None


def register(kind: str, title: str, started: float, box: str) -> Path:
    """Let other processes of this user find the job whose `Latest` is named `box`; return the file to remove."""
    _living()  # a killed job's file must not outlive the next job
    pid = os.getpid()
    entry = JobEntry(kind, title, pid, started, _core.own_word(), pid_space(), box)
    path = runtime_dir() / f"{pid}-{secrets.token_hex(4)}.json"
    hidden = path.with_suffix(".new")
    hidden.write_bytes(encoded(msgspec.json.encode, entry))
    hidden.replace(path)
    return path


def runtime_dir() -> Path:
    """Return the directory where this user's jobs register, made if it is not there and for nobody else.

    RECOLLECT_RUNTIME_DIR if it is set, else in the user's XDG_RUNTIME_DIR, else in /tmp.
    """
    chosen = os.environ.get("RECOLLECT_RUNTIME_DIR")
    session = os.environ.get("XDG_RUNTIME_DIR")
    if chosen:
        path = Path(chosen)
    elif session and os.access(session, os.W_OK):
        path = Path(session) / "recollect"
    else:
        path = Path("/tmp") / f"recollect-{os.getuid()}"
    return private(path, "set RECOLLECT_RUNTIME_DIR")


@cache
def _decoder() -> Any:
    return msgspec.msgpack.Decoder(Snapshot)
