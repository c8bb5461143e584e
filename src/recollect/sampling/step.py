"""StepSampler: single steps, uniformly."""

from __future__ import annotations

from typing import Any

import numpy as np

from recollect._core import Drawer
from recollect.backends import Backend
from recollect.batch.base import BatchBase
from recollect.batch.boundaries import drawn
from recollect.batch.structure import fill
from recollect.batch.view import as_source
from recollect.replay import ReplayBuffer
from recollect.sampling.base import BatchSampler
from recollect.sampling.stream import Ints


def _no_batch(stream: Any, n: int) -> None:
    """Stands for a native draw where there is none."""


class StepSampler(BatchSampler):
    """Draws `batch_size` samples of `data`, uniformly over what exists now, with replacement.

    `replace=False` draws without (too few samples: ValueError). `backend="torch"` (or `"jax"`) gives tensors, on the
    CPU without another copy where the library can share memory; `device` moves the result. Equal seeds and lengths
    give equal indices on every device; `seed=None` is a fresh one.

    Ownership: a batch is one copy, the caller's own; of what was dropped up to two are kept to be filled again.
    Concurrency: one thread at a time, a second raises RuntimeError; several samplers may share a source.

    Example:
        >>> import numpy as np, recollect as rc
        >>> buf = rc.ReplayBuffer.create(rc.MemoryStorage, {"obs": ((3,), "float32")}, capacity=100)
        >>> buf.extend({"obs": np.zeros((50, 3), "float32")})
        >>> sampler = rc.StepSampler(buf, 16, seed=0)
        >>> sampler.sample()["obs"].shape, [len(b["obs"]) for b in sampler.epoch_iter()]
        ((16, 3), [16, 16, 16, 2])
    """

    def __init__(
        self,
        data: BatchBase,
        batch_size: int,
        seed: int | None = None,
        device: Any = None,
        *,
        replace: bool = True,
        backend: str | Backend | None = None,
    ) -> None:
        """Draw from `data`; nothing is read yet."""
        as_source(data)
        super().__init__(data.single_space, data.single_metadata_space, batch_size)
        self.replace = replace
        self._bind(data, device, backend)
        if seed is not None:
            self._seed(seed)

    def _bind(self, data: BatchBase, device: Any, backend: str | Backend | None = None) -> None:
        super()._bind(data, device, backend)
        self._choose_draw()

    def _choose_draw(self) -> None:
        draw = self.batch.bound_draw() if self.replace else self._draw_without
        self._draw_at = draw if self._limiter is None else self._draw_limited
        rows = self._drawn_rows() if self._limiter is None else None
        self._next = _no_batch if rows is None else Drawer(*rows, self._turn).next

    def _unlimit(self) -> None:
        super()._unlimit()
        self._choose_draw()

    def _unpicklable(self) -> tuple[str, ...]:
        return (*super()._unpicklable(), "_draw_at", "_next")

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._choose_draw()

    def sample(self, *, out: Any = None) -> Any:
        """Draw a batch, into the arrays `out` if they are given."""
        # The hot path: one native call, which also takes the turn. None: it cannot, and below is done or said why.
        if out is None:
            draw_next = self._next
            data = draw_next(self._stream, self.batch_size)
            if data is not None:
                return data
        with self._turn:
            if out is None:
                data = self._draw_at(self._stream, self.batch_size)
            elif self.replace and self._limiter is None:
                data = self.batch.draw_into(self._stream, self.batch_size, out)
            else:
                data = fill(out, self._draw_at(self._stream, self.batch_size))
            if data is None:
                raise self._data._empty()
            self._batches += 1
        return data

    def _drawn_rows(self) -> tuple[Any, Any] | None:
        is_plain = type(self) is StepSampler and self.replace and isinstance(self.batch, ReplayBuffer)
        return self.batch.drawn_rows() if is_plain else None

    def _draw_index(self) -> Ints:
        size, n = len(self._data), self.batch_size
        if not size:
            raise self._data._empty()
        if self.replace:
            return np.asarray(self._data._pick(self._stream, size, n))
        existing = self._data._existing()
        size = len(existing)
        if n > size:
            raise ValueError(
                f"StepSampler: batch_size must be at most {size} without replacement, got {n}; "
                "draw with replacement or fewer"
            )
        chosen = self._stream.choice(size, n)
        return chosen if isinstance(existing, range) else np.asarray(existing, np.int64)[chosen]

    def _draw_limited(self, stream: Any, n: int) -> Any:
        with self._drawing(n):
            return self.batch.draw_at(stream, n) if self.replace else self._draw_without(stream, n)

    def _draw_without(self, stream: Any, n: int) -> Any:
        return drawn(self._data, lambda size: self.batch._read(self._draw_index())[0])

    def _configuration(self) -> dict[str, Any]:
        return {**super()._configuration(), "replace": self.replace}
