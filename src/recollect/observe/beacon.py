"""Beacon: a running job shows its newest state to whoever looks, and never waits for them."""

from __future__ import annotations

import logging
import math
import os
import threading
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from time import monotonic, time
from typing import Self

import msgspec
import numpy as np

from recollect import interrupts
from recollect.errors import RecollectError
from recollect.memory.latest import Latest
from recollect.observe.jobs import (
    COMPLETED,
    FAILED,
    INTERRUPTED,
    RUNNING,
    STARTING,
    Cell,
    History,
    Snapshot,
    Table,
    register,
)
from recollect.text import encoded

MAX_NBYTES = 1 << 20  # of one state; untouched pages cost nothing
HISTORY = 360  # points of each figure
_log = logging.getLogger(__name__)
_encoder = msgspec.msgpack.Encoder()


class Beacon:
    """Publishes a job's figures and tables, so that `recollect top` and `recollect dash` can show them.

    Ownership: the memory and the file by which others find it are this object's, until `close`; after a kill the
    memory is gone and the file is ignored. A beacon that cannot be lit (no directory for it) says so in the log and
    does nothing: being watched never costs a job.
    Concurrency: any thread of the process that made it; in a forked child it does nothing.

    >>> from recollect.observe import Beacon, find_jobs
    >>> with Beacon("example", "Pendulum-v1", charts={"return": ["reward/mean"]}) as beacon:
    ...     beacon.publish({"reward/mean": -200.0}, {"collectors": [{"lane": 0, "rows": 128}]})
    ...     job = find_jobs("example")[-1]
    ...     print(job.title, job.snapshot().figures)
    Pendulum-v1 {'reward/mean': -200.0}
    >>> job.snapshot().state
    'completed'
    >>> job.close()
    """

    def __init__(
        self,
        kind: str,
        title: str,
        *,
        charts: Mapping[str, Sequence[str]] | None = None,
        facts: Mapping[str, Cell] | None = None,
    ) -> None:
        """Show a job; `charts` are figures that belong together by title, `facts` what does not change."""
        self.kind, self.title, self.started = kind, title, time()
        self._charts = {name: list(figures) for name, figures in (charts or {}).items()}
        self._facts = dict(facts or {})
        self._start, self._pid, self._lock = monotonic(), os.getpid(), threading.Lock()
        self._history = _Growing()
        self.last: Snapshot | None = None
        self._box: Latest | None = None
        with interrupts.deferred():
            self._light()

    def _light(self) -> None:
        box: Latest | None = None
        try:
            self._box = box = Latest.create([8 + MAX_NBYTES])
            self._publish({}, {}, STARTING)
            path = register(self.kind, self.title, self.started, box.name)
        except (OSError, MemoryError, RecollectError) as error:
            _log.warning("this job cannot be watched: %s", error)
            self._box = None
            if box is not None:
                box.cleanup()
            return
        self._forget = weakref.finalize(self, _forget, path, self._pid)  # runs at exit too

    def publish(
        self,
        figures: Mapping[str, float],
        tables: Mapping[str, Sequence[Mapping[str, Cell]]] | None = None,
        state: str = RUNNING,
    ) -> None:
        """Replace the state; figures that are not finite are left out. Their history is kept here."""
        finite = {name: float(x) for name, x in figures.items() if math.isfinite(x)}
        rows = {name: [dict(row) for row in table] for name, table in (tables or {}).items()}
        with interrupts.deferred(), self._lock:
            self._history.add(monotonic() - self._start, finite)
            self._publish(finite, rows, state)

    def _publish(self, figures: dict[str, float], tables: dict[str, Table], state: str) -> None:
        if self._box is None or os.getpid() != self._pid:
            return
        snapshot = self.last = Snapshot(
            self.kind, self.title, self._pid, self.started, monotonic() - self._start, state, figures, tables,
            self._charts, self._facts, self._history.seen(),
        )  # fmt: skip
        block = encoded(_encoder.encode, snapshot)
        if len(block) > MAX_NBYTES:  # more than anyone can read: the numbers of now matter most
            block = encoded(_encoder.encode, msgspec.structs.replace(snapshot, tables={}, history=History()))
        if len(block) <= MAX_NBYTES:
            head = np.array([len(block)], np.uint64).view(np.uint8)
            self._box.publish_at([head, np.frombuffer(block, np.uint8)], [0, 8])

    def close(self, state: str = COMPLETED) -> None:
        """Say how it ended, to those who look now, and go out; may be called twice."""
        with interrupts.deferred():
            with self._lock:
                if self._box is None or os.getpid() != self._pid:
                    return
                if self.last is not None:
                    self._publish(self.last.figures, self.last.tables, state)
                box, self._box = self._box, None
            self._forget()
            box.close()  # not for everybody: who looks now may still read how it ended

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is None:
            self.close()
        else:
            self.close(INTERRUPTED if issubclass(kind, KeyboardInterrupt) else FAILED)


class _Growing:
    """A history of any length in a bounded number of points: when it is full, every second point goes."""

    def __init__(self, most: int = HISTORY) -> None:
        self._most, self._gap_s = most, 0.0
        self._at: list[float] = []
        self._values: dict[str, list[float | None]] = {}

    def add(self, at: float, figures: Mapping[str, float]) -> None:
        if self._at and at - self._at[-1] < self._gap_s:
            return
        for name in figures.keys() - self._values.keys():
            self._values[name] = [None] * len(self._at)
        self._at.append(at)
        for name, kept in self._values.items():
            kept.append(figures.get(name))
        if len(self._at) > self._most:
            self._thin()

    def _thin(self) -> None:
        self._at = self._at[::2]
        self._values = {name: kept[::2] for name, kept in self._values.items()}
        self._gap_s = (self._at[-1] - self._at[0]) / (len(self._at) - 1)

    def seen(self) -> History:
        return History(self._at, self._values)


def _forget(path: Path, pid: int) -> None:
    if os.getpid() == pid:
        path.unlink(missing_ok=True)
