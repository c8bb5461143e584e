"""Inbox: frames that came and that nobody has taken yet."""

from __future__ import annotations

from collections import deque

from recollect.remote.carriers.base import ANY

Frame = tuple[int, int, memoryview]  # source, tag, bytes
_FRAME_NBYTES = 64  # what a frame costs beside its bytes


class Inbox:
    """Frames in the order they came, and how much of each source lies here.

    Concurrency: the carrier's lock is held in every call.
    """

    def __init__(self) -> None:
        self._frames: deque[Frame] = deque()
        self._nbytes: dict[int, int] = {}

    def put(self, source: int, tag: int, frame: memoryview) -> None:
        """Take a frame in."""
        self._frames.append((source, tag, frame))
        self._nbytes[source] = self.nbytes(source) + frame.nbytes + _FRAME_NBYTES

    def take(self, source: int, tag: int) -> Frame | None:
        """Give out the first frame of a source and tag (or any), None if there is none."""
        for i, found in enumerate(self._frames):
            if source in (ANY, found[0]) and tag in (ANY, found[1]):
                del self._frames[i]
                self._nbytes[found[0]] -= found[2].nbytes + _FRAME_NBYTES
                if not self._nbytes[found[0]]:
                    del self._nbytes[found[0]]
                return found
        return None

    def nbytes(self, source: int) -> int:
        """How much of a source lies here."""
        return self._nbytes.get(source, 0)
