"""Latest: the newest whole value. Readers never block the writer, and never see half a value."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from time import monotonic
from typing import Any, Self

from recollect import _core, checks, interrupts
from recollect.errors import ClosedError, PeerDiedError
from recollect.memory import segment as segments
from recollect.memory.segment import CLOSED_AT, WORDS_AT, Closed, SharedSegment, page_up
from recollect.memory.waiting import LOOK_S, Watch, process_watch

KIND = "latest"


@dataclass(frozen=True, slots=True)
class LatestStats:
    """What was published, and what this process read."""

    version: int
    nbytes: int
    writer_pid: int | None
    reads: int
    overtaken: int
    holds: int
    steals: int


class Latest:
    """A mailbox between processes: values of some pieces of bytes; only the newest is kept.

    Ownership: `publish` copies in, `latest` copies out; the memory goes with its last user.
    Concurrency: one writer process (the first that publishes, until it closes, dies or calls `release_lane`), whose
    threads take turns; readers anywhere, without locks. A killed writer leaves the value before.

    >>> import numpy as np
    >>> from recollect.memory.latest import Latest
    >>> box = Latest.create([8, 4])
    >>> box.publish([np.arange(2, dtype="int32"), np.float32([0.5])])
    1
    >>> out = [np.zeros(2, "int32"), np.zeros(1, "float32")]
    >>> box.latest(out), out
    (1, [array([0, 1], dtype=int32), array([0.5], dtype=float32)])
    >>> box.cleanup()
    """

    def __init__(self, segment: SharedSegment, deadline: float = 60.0) -> None:
        self._segment: SharedSegment | None = segment.hold(_make_core)
        self.native: Any = segment.core.share()
        self.deadline = checks.seconds("deadline", deadline, most=checks.MOST_S)
        self.sizes: list[int] = list(segment.schema["sizes"])
        self._offsets = offsets_of(self.sizes)
        self._watch: Watch | None = process_watch()

    @classmethod
    def create(cls, sizes: Sequence[int], schema: Any = None, *, deadline: float = 60.0) -> Self:
        """Make one whose values are pieces of these many bytes; `schema` (JSON) is kept for whoever attaches."""
        content = _schema(sizes, schema)
        data_nbytes = 3 * page_up(sum(sizes))
        return cls(segments.create(KIND, content, _core.LATEST_WORDS_NBYTES, data_nbytes, "Latest"), deadline)

    @classmethod
    def attach(cls, name: str, *, deadline: float = 60.0) -> Self:
        """Attach to the one of that `name`, in any process of the same user."""
        return cls(segments.attach(name, KIND, _core.LATEST_WORDS_NBYTES), deadline)

    # -- what it is

    @property
    def name(self) -> str:
        """The handle as text."""
        return self.segment().name

    @property
    def schema(self) -> Any:
        """What `create` was given to keep."""
        return self.segment().schema["schema"]

    @property
    def nbytes(self) -> int:
        """Bytes of the segment; untouched pages cost nothing."""
        return self.segment().nbytes

    @property
    def version(self) -> int:
        """The number of values published so far; 0 before the first."""
        found: int = self.native.version()
        return found

    def stats(self) -> LatestStats:
        """Return a frozen record of what was published, and of this process's reads."""
        writer = self.native.writer()
        pid = None if _core.is_dead(writer) else _core.pid_of(writer)
        return LatestStats(self.version, self.nbytes, pid, *self.native.counts())

    # -- values

    def publish(self, value: list[Any]) -> int:
        """Publish one contiguous array for each piece and return the version; never waits for a reader."""
        version: int = self.native.publish(value, self._offsets, self.sizes)
        return version

    def latest(self, out: list[Any]) -> int:
        """Copy the newest value into one writable contiguous array for each piece; its version, 0: none yet."""
        version: int = self.native.read(out, self._offsets, self.sizes)
        return version

    def publish_at(self, value: list[Any], offsets: list[int]) -> int:
        """Publish arrays at other places of the slot than the pieces; for values whose size is known late."""
        version: int = self.native.publish(value, offsets, [x.nbytes for x in value])
        return version

    def latest_at(self, out: list[Any], offsets: list[int]) -> int:
        """Copy parts of the newest value; the version that all of them are of."""
        version: int = self.native.read(out, offsets, [x.nbytes for x in out])
        return version

    def wait_newer(self, version: int, timeout: float | None = None) -> bool:
        """Wait for a version above `version`; False when `timeout` seconds (None: the deadline) passed.

        PeerDiedError within a second of the writer's death, ClosedError as soon as the owner closes, or this object is.
        """
        seconds, watch = checks.timeout(timeout, self.deadline), self._watch
        if watch is None:
            return self._wait_once(version, seconds)
        end = monotonic() + seconds
        watch.by_the_way()
        while True:
            left, dead = max(0.0, end - monotonic()), None
            try:
                if self._wait_once(version, min(left, LOOK_S)):
                    return True
            except PeerDiedError as error:
                dead = error
            if not watch.look() and dead is not None:  # nobody will write again
                raise dead
            if left <= LOOK_S:
                return False

    def _wait_once(self, version: int, seconds: float) -> bool:
        newer: bool = self.native.wait_newer(version, seconds, self.segment().owner)
        return newer

    def watch(self, look: Callable[[], object] | None) -> None:
        """Have `look()` called in waits, every 100 ms; it may raise, and says if a dead writer will be replaced."""
        self._watch = None if look is None else Watch(look)

    # -- life

    def release_lane(self) -> None:
        """Let another process write; nothing happens if this one does not."""
        self.native.release()

    def close(self) -> None:
        """Detach this object; may be called twice."""
        with interrupts.deferred():
            if self._segment is not None:
                segment, self._segment = self._segment, None
                native, self.native = self.native, Closed()
                native.close()  # whoever waits in this object hears of it
                segment.release()

    def cleanup(self) -> None:
        """Close; in the process that made it, for everybody: whoever waits gets ClosedError."""
        if self._segment is not None and self._segment.is_owner:
            self._segment.mark_closed()
        self.close()  # which wakes all who wait

    def segment(self) -> SharedSegment:
        """The segment that this object maps; ClosedError once it was closed."""
        segment = self._segment
        if segment is None:
            raise ClosedError("this object was closed; open or create it again")
        if segment.is_closed:
            raise ClosedError("this object was closed by its owner; create it again")
        return segment

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return _attach, (self.name, self.deadline)


def _attach(name: str, deadline: float) -> Latest:
    return Latest.attach(name, deadline=deadline)


def _make_core(segment: SharedSegment) -> _core.Latest:
    slot_nbytes = sum(segment.schema["sizes"])
    return _core.Latest(segment.mapping, WORDS_AT, CLOSED_AT, segment.data_at, slot_nbytes)


def _schema(sizes: Sequence[Any], schema: Any) -> dict[str, Any]:
    for size in sizes:
        checks.count("sizes", size, 0)
    return {"sizes": list(sizes), "schema": schema}


def latest_nbytes(sizes: Sequence[int], schema: Any = None) -> int:
    """Bytes of the segment that `Latest.create` would make."""
    data_nbytes = 3 * page_up(sum(sizes))
    return segments.segment_nbytes(_schema(sizes, schema), _core.LATEST_WORDS_NBYTES, data_nbytes)


def offsets_of(sizes: Sequence[int]) -> list[int]:
    """Where pieces of these sizes begin when they follow one another."""
    return list(accumulate(sizes, initial=0))[:-1]
