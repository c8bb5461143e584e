"""Sinks: where the experience of a finished batch goes. A write is all or nothing.

`holds(commit_id)` tells whether a write was done; it is asked after a write that overran, that raised, or that a
killed process may have made, so that nothing is delivered twice.
"""

from __future__ import annotations

import asyncio
import errno
import os
import re
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from hashlib import blake2b
from math import inf
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from recollect._core import Condition
from recollect.errors import ClosedError, DeadlineError, MissingExtraError, SchemaError, class_name
from recollect.files import OwnedDirectory, make_directory, replace_file
from recollect.interrupts import deferred
from recollect.replay import ReplayBuffer
from recollect.rollout.event_loop import checked_seconds
from recollect.rollout.experience.experience import Experiences, experience_buffer
from recollect.rollout.experience.space import ExperiencePlan
from recollect.text import nearest

REMEMBERED = 4096
_MOST_NAME = 233  # what a temporary name has beside it, a file system takes too
_TURN_S = 10.0  # for another sink that writes to the same directory
_TEMPORARY = re.compile(r"\.[A-Za-z0-9._-]*\.(parquet|jsonl)\.[0-9a-f]{16}\.tmp")  # of `replace_file`


class ExperienceSink(Protocol):
    """The seam; `recollect.testing.SinkContract` is its suite. Calls come from one thread at a time."""

    def write(self, x: Experiences, commit_id: str) -> None: ...
    def holds(self, commit_id: str) -> bool: ...
    def close(self) -> None: ...


class ReplaySink:
    """Writes into a ReplayBuffer: one `extend`, a run per segment.

    Ownership: the buffer stays the caller's unless `owned`. `holds` reads the newest rows of the buffer.
    """

    def __init__(self, buffer: ReplayBuffer, *, owned: bool = False) -> None:
        self.buffer, self.owned = buffer, owned
        self._done: OrderedDict[str, None] = OrderedDict()

    def write(self, x: Experiences, commit_id: str) -> None:
        """Extend the buffer by all rows at once."""
        capacity = self.buffer.capacity
        if capacity is not None and len(x) > capacity:
            raise ValueError(
                f"sink: a batch must fit the buffer's {capacity} rows, got {len(x)}; make it larger"
            )
        # What is in the buffer is remembered. Where a limiter may let it wait, Ctrl-C is not kept waiting too.
        with deferred() if self.buffer.limiter is None else nullcontext():
            if len(x):
                ends = {"ends": x.ends} if self.buffer.engine.tracked else {}
                self.buffer.extend(x.get_at(slice(None)), **ends)
            _remember(self._done, commit_id)

    def holds(self, commit_id: str) -> bool:
        """Tell whether this commit was written, by this process or one before it (by its group ids)."""
        if commit_id in self._done:
            return True
        found = re.fullmatch(r".*-g(\d+)-(\d+)", commit_id)
        if found is None:
            return False
        low, high = int(found[1]), int(found[2])
        ids = self._group_ids()
        return bool(((ids >= low) & (ids <= high)).any())

    def holds_rows(self, x: Experiences, commit_id: str) -> bool:
        """The same, by the groups of the rows: a carried task has its group in the range of another batch."""
        return commit_id in self._done or bool(np.isin(self._group_ids(), x.group_id).any())

    def _group_ids(self) -> Any:
        if not len(self.buffer):
            return np.empty(0, np.int64)
        return np.asarray(self.buffer.get_column_at(("group_id",), slice(None)))

    def close(self) -> None:
        """Close the buffer if the config made it."""
        if self.owned:
            self.buffer.close()


def _remember(done: OrderedDict[str, None], commit_id: str) -> None:
    done[commit_id] = None
    if len(done) > REMEMBERED:
        done.popitem(last=False)


class FileSink:
    """Writes one immutable file per pass, `parquet` or `jsonl`, synced and renamed, with ids and `info`.

    Several sinks may write to one directory, in turns; a name that another one has written is refused.

    >>> FileSink("somewhere", format="jsonl").format
    'jsonl'
    """

    def __init__(self, path: str | Path, format: str = "parquet") -> None:
        if format not in ("parquet", "jsonl"):
            raise ValueError(f"format: must be 'parquet' or 'jsonl', got {format!r}")
        self.path, self.format = Path(path).absolute(), format
        self._refused: set[str] = set()  # commits whose file is another sink's

    def write(self, x: Experiences, commit_id: str) -> None:
        """Write a temporary sibling, sync it, rename it, sync the directory."""
        make_directory(self.path)
        file, write = self._file(commit_id), _write_parquet if self.format == "parquet" else _write_jsonl
        with OwnedDirectory.take(self.path, wait_s=_TURN_S) as owned:
            _remove_temporaries(owned)  # what a killed sink left
            if os.path.lexists(file):
                self._refused.add(commit_id)
                raise FileExistsError(
                    errno.EEXIST, "was written by another sink; choose another directory", str(file)
                )
            try:
                replace_file(file, lambda f: write(x, f), note=lambda name: owned.note([name]))
            finally:
                _remove_temporaries(owned)

    def holds(self, commit_id: str) -> bool:
        """Tell whether the file of this commit is there, and not another sink's."""
        return commit_id not in self._refused and self._file(commit_id).exists()

    def close(self) -> None:
        """Nothing is open between writes."""

    def _file(self, commit_id: str) -> Path:
        name = re.sub(r"[^A-Za-z0-9._-]", "_", commit_id)
        if len(name) + len(self.format) + 1 > _MOST_NAME:
            name = f"{name[:120]}-{blake2b(commit_id.encode(), digest_size=16).hexdigest()}"
        return self.path / f"{name}.{self.format}"


def _remove_temporaries(owned: OwnedDirectory) -> None:
    """Remove what sinks noted. What else is on the list may belong to a dump in the same directory."""
    names = [name for name in owned.noted if _TEMPORARY.fullmatch(name)]
    owned.remove(names)
    owned.cross_off(names)


def _columns(x: Experiences) -> dict[str, list[Any]]:
    import json

    columns: dict[str, list[Any]] = {}
    tasks = [x.tasks.get(int(group), (None, None)) for group in x.group_id]
    columns["batch_id"] = [None if batch is None else str(batch) for batch, _ in tasks]
    columns["task_id"] = [None if task is None else str(task) for _, task in tasks]
    batch = x.get_at(slice(None))
    for name in x.plan.space.spaces:
        columns[name] = [_listed(value) for value in batch[name]]
    columns["info"] = [json.dumps(info) for info in x.info]
    columns["metrics"] = [json.dumps(dict(metrics)) for metrics in x.row_metrics]
    return columns


def _listed(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else value


def _write_jsonl(x: Experiences, file: Any) -> None:
    import json

    columns = _columns(x)
    for row in zip(*columns.values()):
        file.write(json.dumps(dict(zip(columns, row))).encode() + b"\n")


def _write_parquet(x: Experiences, file: Any) -> None:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise MissingExtraError('FileSink: needs pyarrow; pip install "recollect[parquet]"') from None
    parquet.write_table(pyarrow.table(_columns(x)), file)


class QueueSink:
    """A queue in this process: `await sink.get(n)` takes exactly n rows, oldest first.

    Full, a write waits; a batch larger than the capacity enters an empty queue. It is memory: rows that were not taken
    are gone when the process is killed, whatever a journal says of their batch.
    Concurrency: writes from the coordinator's threads, `get` from any event loop.

    >>> QueueSink(1024).capacity
    1024
    """

    def __init__(self, capacity: int = 65_536) -> None:
        if type(capacity) is not int or capacity < 1:
            raise ValueError(f"capacity: must be an int of at least 1, got {capacity!r}")
        self.capacity = capacity
        self.plan: ExperiencePlan | None = None  # of its rows, once they are known
        self.dropped_stale = 0
        self._parts: deque[Experiences] = deque()
        self._n = 0
        self._changed = Condition()
        self._waiting: list[Callable[[], None]] = []
        self._done: OrderedDict[str, None] = OrderedDict()
        self._wanted: set[str] = set()  # commits that wait for room
        self._given_up: set[str] = set()  # commits that were given up before their write began
        self._closed = False

    def __len__(self) -> int:
        return self._n

    def write(self, x: Experiences, commit_id: str) -> None:
        """Put all rows in, as soon as there is room for all of them."""
        with self._changed:
            self.plan = x.plan
            if commit_id in self._given_up:
                self._given_up.discard(commit_id)
                raise DeadlineError(f"sink: the write of {commit_id!r} was given up; finalize again")
            self._wanted.add(commit_id)
            while self._n and self._n + len(x) > self.capacity and not self._closed:
                self._changed.wait(inf)
                if commit_id not in self._wanted:
                    raise DeadlineError(
                        f"sink: {len(x)} rows did not fit in time beside {self._n}; take some out"
                    )
            self._wanted.discard(commit_id)
            if self._closed:
                raise ClosedError("sink: the queue is closed; prepare the coordinator again")
            with deferred():  # the rows, their count and the commit change together
                if len(x):
                    self._parts.append(x)
                    self._n += len(x)
                _remember(self._done, commit_id)
                self._wake()

    def holds(self, commit_id: str) -> bool:
        """Tell whether this commit is in the queue or was taken from it."""
        with self._changed:
            return commit_id in self._done

    def give_up(self, commit_id: str) -> None:
        """Let a write that waits for room, or has not begun, raise; one that has entered stays."""
        with self._changed:
            if commit_id in self._wanted:
                self._wanted.discard(commit_id)
                self._changed.notify_all()
            elif commit_id not in self._done:
                self._given_up.add(commit_id)

    async def get(self, n: int, timeout: float = 60.0, min_version: int | None = None) -> Experiences:
        """Take exactly n rows, oldest first; on DeadlineError none. Rows below `min_version` are dropped.

        None (n = 0) are an empty batch, at once.
        """
        timeout = checked_seconds(timeout)
        if type(n) is not int or n < 0:
            raise ValueError(f"n: must be an int of at least 0, got {n!r}")
        loop = asyncio.get_running_loop()
        woken = asyncio.Event()

        def wake() -> None:
            with suppress(RuntimeError):  # its loop was closed by a Ctrl-C, and nobody waits any more
                loop.call_soon_threadsafe(woken.set)

        try:
            async with asyncio.timeout(timeout):
                while True:
                    with self._changed:
                        taken = self._take(n, min_version)
                        if taken is not None:
                            return taken
                        if self._closed:
                            raise ClosedError(f"sink: closed with {self._n} rows left, got a request for {n}")
                        woken.clear()
                        self._waiting.append(wake)
                    await woken.wait()
        except TimeoutError:
            raise DeadlineError(f"sink: {n} rows were awaited for {timeout:g} s, got {self._n}") from None
        finally:
            with self._changed:
                if wake in self._waiting:
                    self._waiting.remove(wake)

    def _take(self, n: int, min_version: int | None) -> Experiences | None:
        if min_version is not None:
            self._drop_below(min_version)
        if not n:
            return Experiences.concat([], self.plan)
        if self._n < n:
            return None
        taken, rest, need = [], None, n
        for part in self._parts:
            if len(part) > need:
                part, rest = part.where(np.arange(need)), part.where(np.arange(need, len(part)))
            taken.append(part)
            need -= len(part)
            if not need:
                break
        found = taken[0] if len(taken) == 1 else Experiences.concat(taken)
        with deferred():  # the rows and their count change together
            for _ in taken:
                self._parts.popleft()
            if rest is not None:
                self._parts.appendleft(rest)
            self._n -= n
        self._wake()
        return found

    def _drop_below(self, version: int) -> None:
        fresh = [part.where(part.model_version >= version) for part in self._parts]
        n = sum(map(len, fresh))
        with deferred():
            self.dropped_stale += self._n - n
            self._parts, self._n = deque(part for part in fresh if len(part)), n
            self._wake()

    def _wake(self) -> None:
        with deferred():  # every waiting call is woken
            self._changed.notify_all()
            waiting, self._waiting = self._waiting, []
            for wake in waiting:
                wake()

    def reopen(self) -> None:
        """Take writes again, after the coordinator was prepared anew."""
        with self._changed:
            self._closed = False
            self._given_up.clear()

    def close(self) -> None:
        """Refuse writes; what is there can still be taken."""
        with deferred(), self._changed:
            self._closed = True
            self._wake()


def check_sink(spec: Any) -> None:
    """Raise SchemaError unless `spec` is something that `make_sink` can make a sink of."""
    if isinstance(spec, Mapping):
        kinds = {"replay": {"storage", "path", "capacity", "max_tokens"}, "file": {"path", "format"},
                 "queue": {"capacity"}}  # fmt: skip
        kind = spec.get("kind")
        if not isinstance(kind, str) or kind not in kinds:
            raise SchemaError(f"sink.kind: must be one of {sorted(kinds)}, got {kind!r}")
        for key, value in spec.items():
            if key != "kind" and key not in kinds[kind]:
                raise SchemaError(
                    f"sink.{key}: must be an option of {kind!r}{nearest(str(key), kinds[kind])}"
                )
            if key in ("path", "format") and not isinstance(value, str | Path):
                raise SchemaError(f"sink.{key}: must be a text, got {value!r}")
    elif not isinstance(spec, str | Path | ReplayBuffer) and not all(
        callable(getattr(spec, name, None)) for name in ("write", "holds", "close")
    ):
        raise SchemaError(f"sink: must be a ReplayBuffer, a sink, a path or 'queue', got {class_name(spec)}")


def is_queue(spec: Any) -> bool:
    """Whether `make_sink` makes a queue of this, or it is one."""
    kind = spec.get("kind") if isinstance(spec, Mapping) else spec
    return isinstance(spec, QueueSink) or kind == "queue"


def make_sink(spec: Any, plan: ExperiencePlan) -> tuple[ExperienceSink, bool]:
    """Return the sink that a config names, and whether it was made here."""
    if isinstance(spec, ReplayBuffer):
        return ReplaySink(spec), False
    if is_queue(spec):
        return _queue(spec, plan), not isinstance(spec, QueueSink)
    if isinstance(spec, str | Path):
        return FileSink(spec), True
    if isinstance(spec, Mapping):
        options = {key: value for key, value in spec.items() if key != "kind"}
        if spec["kind"] == "file":
            return FileSink(**options), True
        return ReplaySink(_own_buffer(plan, options), owned=True), True
    sink: ExperienceSink = spec
    return sink, False


def _queue(spec: Any, plan: ExperiencePlan) -> QueueSink:
    """The queue of a config, which knows the space of its rows before the first."""
    options = {"capacity": spec["capacity"]} if isinstance(spec, Mapping) and "capacity" in spec else {}
    queue = spec if isinstance(spec, QueueSink) else QueueSink(**options)
    queue.plan = plan
    return queue


def _own_buffer(plan: ExperiencePlan, options: dict[str, Any]) -> ReplayBuffer:
    path = options.pop("path", None)
    if path is not None and options.get("storage") == "memmap":
        if ReplayBuffer.is_loadable_from(path):
            return ReplayBuffer.load_from(path, read_only=False)
        options["cache_path"] = path
    return experience_buffer(options.pop("storage", "memory"), space=plan.space, **options)
