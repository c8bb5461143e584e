"""A lane by number: one writer's share of a buffer."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any, Self

from recollect.errors import ClosedError
from recollect.replay.engine import REFUSED, RowsEngine, n_offered, writers

if TYPE_CHECKING:
    from recollect.replay.buffer import ReplayBuffer


class Lane:
    """Writes to one lane (`number`) of a `buffer`, for threads and for processes that choose their lane.

    Ownership: holds the lane until `close()`; a dead process's lanes are free.
    Concurrency: threads may share it; each call is atomic.
    """

    def __init__(self, buffer: ReplayBuffer, engine: RowsEngine, number: int) -> None:
        self._engine: RowsEngine | None = RowsEngine(engine.storage, engine.tracked, number)
        self.buffer, self.number = buffer, number
        self._append, self._extend, _ = writers(self._engine, buffer.limiter)
        engine.native.claim(number)

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
            with suppress(ClosedError):  # with the buffer the lane was given up too
                engine.native.release(self.number)

    def check_open(self) -> None:
        """Raise ClosedError if this handle, or its buffer, was closed."""
        self._open()

    def _open(self) -> RowsEngine:
        if self._engine is None:
            raise ClosedError(
                f"lane {self.number}: this handle was closed; call on_lane({self.number}) again"
            )
        self._engine.storage.rows.check_open()
        return self._engine

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
