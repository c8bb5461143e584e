"""Frames that wait: those that came and were not taken yet, and those for peers that have not come yet."""

from __future__ import annotations

from collections import OrderedDict, deque

from recollect._core import Condition
from recollect.errors import DeadlineError
from recollect.remote.carriers.base import ANY, Frame
from recollect.remote.carriers.sockets.framed import Outgoing

_FRAME_NBYTES = 512  # what a frame costs beside its bytes
_KEPT_NBYTES = 4 << 20  # for one peer; beyond that its senders wait themselves


class Inbox:
    """Frames of each source in the order they came, and how much of each lies here; sources take turns.

    A source that sends more than is taken delays the others by a frame each time, not by all that it has sent.
    Concurrency: the carrier's lock is held in every call.
    """

    def __init__(self) -> None:
        self._frames: OrderedDict[int, deque[Frame]] = OrderedDict()  # by source: whose turn it is, first
        self._nbytes: dict[int, int] = {}

    def __bool__(self) -> bool:
        return bool(self._frames)

    def put(self, source: int, tag: int, frame: memoryview) -> None:
        """Take a frame in."""
        frames = self._frames.get(source)
        if frames is None:
            frames = self._frames[source] = deque()
        frames.append((source, tag, frame))
        self._nbytes[source] = self.nbytes(source) + frame.nbytes + _FRAME_NBYTES

    def take(self, source: int, tag: int) -> Frame | None:
        """Give out the first frame of a source and tag (or any), None if there is none."""
        for rank in self._frames if source == ANY else (source,):
            frames = self._frames.get(rank, ())
            for i, found in enumerate(frames):
                if tag in (ANY, found[1]):
                    self._remove(rank, i)
                    return found
        return None

    def _remove(self, source: int, i: int) -> None:
        frames = self._frames[source]
        self._nbytes[source] -= frames[i][2].nbytes + _FRAME_NBYTES
        del frames[i]
        if frames:
            self._frames.move_to_end(source)
        else:
            del self._frames[source], self._nbytes[source]

    def nbytes(self, source: int) -> int:
        """How much of a source lies here."""
        return self._nbytes.get(source, 0)


class DeferredFrames:
    """Frames for peers that have not come, in order. Concurrency: every call takes the carrier's lock itself."""

    def __init__(self, lock: Condition) -> None:
        self._lock = lock
        self._waiting: dict[int, deque[Outgoing]] = {}
        self._leaving: Outgoing | None = None  # the frame that the leading thread is sending

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def __contains__(self, dest: int) -> bool:
        return dest in self._waiting

    def peers(self) -> list[int]:
        """The ranks that something waits for."""
        return list(self._waiting)

    def add(self, outgoing: Outgoing, *, only_behind: bool = False) -> bool:
        """Let a frame wait for its peer; `only_behind`: only if others do already."""
        with self._lock:
            if only_behind and outgoing.dest not in self._waiting:
                return False
            self._waiting.setdefault(outgoing.dest, deque()).append(outgoing)
            return True

    def keep(self, outgoing: Outgoing) -> bool:
        """Copy a frame that waits, so that its sender need not; False if too much waits already."""
        with self._lock:
            waiting = self._waiting.get(outgoing.dest)
            if waiting is None or outgoing not in waiting or sum(o.nbytes for o in waiting) > _KEPT_NBYTES:
                return False
            outgoing.own()
            return True

    def first(self, dest: int) -> Outgoing | None:
        """What is to be sent first to a peer that came; None, once nothing waits for it any more."""
        with self._lock:
            waiting = self._waiting.get(dest)
            if not waiting:
                self._waiting.pop(dest, None)
                return None
            self._leaving = waiting[0]
            return waiting[0]

    def sent(self, outgoing: Outgoing) -> None:
        """The first frame has left."""
        with self._lock:
            waiting = self._waiting.get(outgoing.dest)
            if waiting and waiting[0] is outgoing:
                waiting.popleft()
            self._leaving = None

    def stays(self) -> None:
        """The first frame has not left: its peer is not there after all."""
        with self._lock:
            self._leaving = None

    def give_up(self, outgoing: Outgoing) -> bool:
        """Take back a frame whose sender will not wait any longer; False if it does not wait here, or is leaving."""
        with self._lock:
            waiting = self._waiting.get(outgoing.dest)
            if waiting is None or outgoing not in waiting or outgoing is self._leaving:
                return False
            waiting.remove(outgoing)
            if not waiting:
                self._waiting.pop(outgoing.dest, None)
        outgoing.finish(DeadlineError(f"send to rank {outgoing.dest}: was given up"))
        return True

    def fail(self, dest: int, error: Exception) -> None:
        """A peer will never come."""
        with self._lock:
            for outgoing in self._waiting.pop(dest, ()):
                outgoing.finish(error)
