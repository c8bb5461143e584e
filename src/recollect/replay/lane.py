"""A lane by number: one writer's share of a buffer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

from recollect.errors import ClosedError
from recollect.replay.engines.base import REFUSED, Engine, n_offered, writers

if TYPE_CHECKING:
    from recollect.replay.buffer import ReplayBuffer


class Lane:
    """Writes to one lane (`number`) of a `buffer`, for threads and for processes that choose their lane.

    Ownership: holds the lane until `close()`; a dead process's lanes are free.
    Concurrency: threads may share it; each call is atomic.
    """

    def __init__(self, buffer: ReplayBuffer, engine: Engine, number: int) -> None:
        self.buffer, self.number = buffer, number
        claimed = engine.claimed(number)
        self._engine: Engine | None = claimed
        self._append, self._extend, _ = writers(claimed, buffer.limiter)

    def append(self, value: Any) -> None:
        """Add one sample to this lane."""
        engine = self._open()
        try:
            self._append(value)
        except REFUSED:
            engine.reject(1)
            raise

    def extend(self, value: Any, *, ends: Any = None) -> None:
        """Add a block of samples to this lane; `ends` as in `ReplayBuffer.extend`."""
        engine = self._open()
        try:
            self._extend(value, ends)
        except REFUSED:
            engine.reject(n_offered(engine.storage, value))
            raise

    def mark_segment_end(self) -> None:
        """Close this lane's open segment; none: nothing happens."""
        self._open().end_segment()

    @property
    def open_segment(self) -> tuple[int, int] | None:
        """This lane's open segment as `(start, end)`, or None."""
        return self._open().open_segment()

    def close(self) -> None:
        """Release the lane; its open segment ends."""
        if self._engine is not None:
            engine, self._engine = self._engine, None
            engine.release()

    def check_open(self) -> None:
        """Raise ClosedError if this handle, or its buffer, was closed."""
        self._open()

    def _open(self) -> Engine:
        if self._engine is None:
            raise ClosedError(
                f"lane {self.number}: this handle was closed; call on_lane({self.number}) again"
            )
        self._engine.check_open()
        return self._engine

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
