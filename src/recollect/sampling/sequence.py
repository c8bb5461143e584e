"""SequenceSampler: stretches of consecutive samples of one episode, uniformly."""

from __future__ import annotations

from typing import Any

import numpy as np

from recollect import checks
from recollect.backends import Backend
from recollect.batch.base import BatchBase
from recollect.batch.boundaries import check_known
from recollect.batch.view import Read
from recollect.batch.windows import WindowBatch
from recollect.errors import EmptyError
from recollect.sampling.base import BatchSampler, limiter_of, unweighted
from recollect.sampling.stream import Ints


class SequenceSampler(BatchSampler):
    """Draws `batch_size` windows of `length` consecutive samples of `data`, uniformly over all there are.

    A batch is `(B, burn_in + length, ...)` in time order. No window crosses a segment, a removed sample, a lane or the
    write cursor; an open segment counts as far as it is committed. The `burn_in` samples before a window are context:
    where the episode had not begun (or its head was overwritten) they are zeros. `pad` admits segments shorter than
    `length`: one window each, from the first sample on, zeros at the end. Metadata: `segment` and `step` of the first
    of the `length` samples, and `valid_mask` `(B, burn_in + length)`, False where zeros are.

    No window: EmptyError. An epoch yields each window that exists at its start once. The cost of a draw does not
    depend on the capacity, unless windows are so rare that few random starts have one. `backend="torch"` (or `"jax"`)
    gives tensors.

    Ownership: holds no data; a batch is one copy, the caller's own.
    Concurrency: one thread at a time. With live writers each window is whole and of one moment; one that is
    overwritten while it is read is drawn again.

    Example:
        >>> import numpy as np, recollect as rc
        >>> buf = rc.ReplayBuffer.create(
        ...     rc.MemoryStorage, {"obs": ((3,), "float32")}, capacity=100, maintain_segment_metadata=True)
        >>> buf.extend({"obs": np.ones((30, 3), "float32")}, ends=np.arange(30) % 10 == 9)
        >>> batch, meta = rc.SequenceSampler(buf, 4, length=5, burn_in=2, seed=0).sample_with_metadata()
        >>> batch["obs"].shape, meta["valid_mask"].shape, bool((meta["step"] <= 5).all())
        ((4, 7, 3), (4, 7), True)
    """

    batch: WindowBatch

    def __init__(
        self,
        data: BatchBase,
        batch_size: int,
        length: int,
        burn_in: int = 0,
        pad: bool = False,
        seed: int | None = None,
        device: Any = None,
        *,
        backend: str | Backend | None = None,
    ) -> None:
        """Draw from `data`, which must keep segments; no sample is read yet."""
        self.length = checks.count("length", length, advice="pass a number of samples")
        self.burn_in = checks.count("burn_in", burn_in, 0, advice="pass a number of samples")
        self.pad = bool(pad)
        windows = self._windows(data, device, backend)
        super().__init__(windows.single_space, windows.single_metadata_space, batch_size)
        self._data, self.batch, self._limiter = data, windows, limiter_of(data)
        if seed is not None:
            self._seed(seed)

    def _windows(self, data: BatchBase, device: Any, backend: str | Backend | None) -> WindowBatch:
        check_known(unweighted(data, type(self).__name__), type(self).__name__)
        return WindowBatch(self._moved(data, device, backend), self.length, self.burn_in, self.pad)

    def _bind(self, data: BatchBase, device: Any, backend: str | Backend | None = None) -> None:
        self._data, self.batch, self._limiter = data, self._windows(data, device, backend), limiter_of(data)

    def _sample_once(self, flat: bool, metadata: bool) -> Read:
        found: Read = self.batch.draw(self._stream, self.batch_size, flat, metadata)
        return found

    def _draw_index(self) -> Ints:
        """Draw the indices at which windows begin."""
        place = self.batch.draw_starts(self._stream, self.batch_size)
        return np.asarray(place.index)

    def _empty(self) -> EmptyError:
        return self.batch._empty()

    def _configuration(self) -> dict[str, Any]:
        mine = {"length": self.length, "burn_in": self.burn_in, "pad": self.pad}
        return {**super()._configuration(), **mine}
