"""TraceRecorder: what all processes of a run did when, as JSON for Chrome (chrome://tracing) and Perfetto.

While a run goes on, every process appends whole lines to the one file, which is then in the "array format" that both
viewers read without its closing bracket: after a crash it can still be opened. `close()` in the process that made it
puts whole JSON in its place. Times are those of CLOCK_MONOTONIC, which all processes of a computer share.
"""

from __future__ import annotations

import json
import os
import threading
import weakref
from pathlib import Path
from time import monotonic_ns
from typing import Any, Self

from recollect import interrupts
from recollect.errors import ClosedError
from recollect.files import replace_file
from recollect.system.processes import own_name

_KEPT = 256  # events before they are written
GPU_TRACK = "gpu"


class TraceRecorder:
    """Collects slices, counters and device spans of all processes in one Chrome trace file.

    Ownership: the file is the caller's. The process that made the recorder ends the trace by `close()`; others (it
    pickles) write what they have by `flush()` or `close()` before, or when they exit.
    Concurrency: any thread, any process.

    >>> import json, pathlib
    >>> with TraceRecorder("trace.json") as trace:
    ...     trace.add_slice("train/update", "train", 1_000, 3_500, {"tick": 1})
    ...     trace.add_counter("replay/size", 2_000, 17)
    >>> [e["name"] for e in json.loads(pathlib.Path("trace.json").read_text())["traceEvents"] if e["ph"] in "XC"]
    ['train/update', 'replay/size']
    """

    def __init__(self, path: str | os.PathLike[str], *, limit: int | None = None) -> None:
        """Start a new file; of each process the first `limit` events are kept, None: all."""
        self._setup(Path(path).absolute(), os.getpid(), limit)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text("[\n")

    def _setup(self, path: Path, owner: int, limit: int | None) -> None:
        self.path, self._owner, self.limit = path, owner, limit
        self._lock = threading.Lock()
        self._kept = _Kept(path, limit)
        self._closed = self._is_whole = False
        self._end = weakref.finalize(self, _Kept.write, self._kept)

    # -- recording

    def name_process(self, name: str) -> None:
        """Call this process by `name` in the trace."""
        with self._lock:
            self._kept.lines.append(_named(os.getpid(), name))

    def add_slice(
        self, name: str, category: str, start_ns: int, end_ns: int, args: dict[str, Any] | None = None
    ) -> None:
        """Record what this thread did from one `time.monotonic_ns()` to another."""
        self._add({
            "name": name, "cat": category, "ph": "X", "ts": start_ns / 1e3, "dur": (end_ns - start_ns) / 1e3,
            "tid": threading.get_native_id(), "args": args or {},
        })  # fmt: skip

    def add_counter(self, name: str, ts_ns: int, value: float) -> None:
        """Record the value of something at one moment."""
        self._add({"name": name, "ph": "C", "ts": ts_ns / 1e3, "tid": 0, "args": {"value": value}})

    def add_cuda_pending_span(
        self, name: str, start_event: Any, end_event: Any, args: dict[str, Any] | None = None
    ) -> None:
        """Record the time between two events of a device once they have passed; until then they are kept.

        Events are of a clock of their own: the span is as long as they say and begins when it was queued.
        """
        self._settle()
        with self._lock:
            self._check_open()
            self._kept.pending.append((name, start_event, end_event, monotonic_ns(), args or {}))

    # -- writing

    def flush(self) -> None:
        """Write what this process has recorded."""
        self._settle()
        with self._lock:
            self._kept.write()

    def close(self) -> None:
        """Write the rest; in the process that made it, end the trace as whole JSON. May be called twice."""
        if self._is_whole:
            return
        self._settle()
        with self._lock:
            self._closed = True
            self._kept.write()
            self._end.detach()
        with interrupts.deferred():  # what is whole is not made whole again; a call cut short before goes on
            if os.getpid() == self._owner:
                _make_whole(self.path)
            self._is_whole = True

    def _add(self, event: dict[str, Any]) -> None:
        self._settle()  # before the events are recorded again
        with self._lock:
            self._check_open()
            self._kept.add(event)

    def _settle(self) -> None:
        """Turn device spans whose events have passed into slices. An event that is used again meanwhile is lost."""
        if not self._kept.pending:
            return
        with interrupts.deferred(), self._lock:  # a span is pending or recorded, once
            waiting, self._kept.pending = self._kept.pending, []
            for span in waiting:
                name, start, end, at_ns, args = span
                if not end.query():
                    self._kept.pending.append(span)
                    continue
                self._kept.add({
                    "name": name, "cat": GPU_TRACK, "ph": "X", "ts": at_ns / 1e3, "dur": 1e3 * start.elapsed_time(end),
                    "tid": GPU_TRACK, "args": args,
                })  # fmt: skip

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("this trace was closed; make another one")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return _attach, (str(self.path), self._owner, self.limit)


class _Kept:
    """The events of one process that are not in the file yet."""

    def __init__(self, path: Path, limit: int | None) -> None:
        self.path, self.limit = path, limit
        self._begin()

    def _begin(self) -> None:
        self.pid, self.n_events = os.getpid(), 0
        self.lines = [_named(self.pid, own_name())]
        self.threads: set[Any] = {GPU_TRACK, 0}
        self.pending: list[tuple[str, Any, Any, int, dict[str, Any]]] = []

    def add(self, event: dict[str, Any]) -> None:
        if os.getpid() != self.pid:  # a forked child: what was kept is its parent's to write
            self._begin()
        self.n_events += 1
        if self.limit is not None and self.n_events > self.limit:
            return
        if event["tid"] not in self.threads:
            self.threads.add(event["tid"])
            self.lines.append(_thread_named(self.pid, event["tid"]))
        self.lines.append(json.dumps({**event, "pid": self.pid}, default=str))
        if len(self.lines) >= _KEPT:
            self.write()

    def write(self) -> None:
        if os.getpid() != self.pid or not self.lines:
            return
        block = "".join(f"{line},\n" for line in self.lines).encode()
        with interrupts.deferred():  # neither lost nor written twice
            fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
            try:
                self.lines = []
                os.write(fd, block)  # one write at the end of the file: processes do not mix lines
            finally:
                os.close(fd)


def _named(pid: int, name: str) -> str:
    return json.dumps({"name": "process_name", "ph": "M", "pid": pid, "args": {"name": f"{name} {pid}"}})


def _thread_named(pid: int, tid: int) -> str:
    name = threading.current_thread().name
    return json.dumps({"name": "thread_name", "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}})


def _attach(path: str, owner: int, limit: int | None) -> TraceRecorder:
    recorder = TraceRecorder.__new__(TraceRecorder)
    recorder._setup(Path(path), owner, limit)
    return recorder


def _make_whole(path: Path) -> None:
    events = []
    for line in path.read_bytes().split(b"\n")[1:]:
        try:
            events.append(json.loads(line.removesuffix(b",")))
        except (ValueError, RecursionError):
            continue  # the last line of a process that was killed while it wrote, or damage
    text = json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})
    replace_file(path, lambda f: f.write(text.encode()))
