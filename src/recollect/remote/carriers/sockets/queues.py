"""Inbox: frames that came and that nobody has taken yet."""

from __future__ import annotations

from collections import OrderedDict, deque

from recollect.remote.carriers.base import ANY

Frame = tuple[int, int, memoryview]  # source, tag, bytes
_FRAME_NBYTES = 512  # what a frame costs beside its bytes


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
        for who in self._frames if source == ANY else (source,):
            frames = self._frames.get(who, ())
            for i, found in enumerate(frames):
                if tag in (ANY, found[1]):
                    self._remove(who, i)
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
