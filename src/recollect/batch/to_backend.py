"""ToBackendOrDeviceBatch: another batch whose reads give torch or JAX arrays, on a device."""

from __future__ import annotations

from typing import Any

from recollect.backends import Backend, get_backend, move
from recollect.batch.base import BatchBase
from recollect.batch.boundaries import Ask, Found
from recollect.batch.structure import Keys
from recollect.batch.view import Read, View


class ToBackendOrDeviceBatch(View):
    """`batch` with data and metadata as arrays of `backend` on `device`; all writes pass on.

    `backend=None` keeps the source's and only moves to the device. Indices and values may be of any backend.

    Ownership: where backends share memory the hand-over is free, and what is shared is the caller's own copy.
    Concurrency: as the batch it views.

    Example:
        >>> import numpy as np, recollect as rc
        >>> buf = rc.ReplayBuffer.create(rc.MemoryStorage, {"obs": ((2,), "float32")}, capacity=4)
        >>> buf.append({"obs": np.ones(2, "float32")})
        >>> rc.ToBackendOrDeviceBatch(buf, "torch")[[0, 0]]["obs"].shape
        torch.Size([2, 2])
    """

    def __init__(self, batch: BatchBase, backend: str | Backend | None = None, device: Any = None) -> None:
        """View `batch` as arrays of `backend` on `device` (its default if None)."""
        super().__init__(batch)
        self._backend = batch.backend if backend is None else get_backend(backend)
        self._backend.as_device(device)  # raises here what the first read would
        keeps = self._backend.name == batch.backend.name
        self._device = (
            device if device is not None else batch.device if keeps else self._backend.default_device
        )
        self._is_same = keeps and device is None

    @property
    def backend(self) -> Backend:
        return self._backend

    @property
    def device(self) -> Any:
        return self._device

    @property
    def is_mutable(self) -> bool:
        return self.batch.is_mutable

    def _outward(self, found: Read, keys: Keys, flat: bool) -> Read:
        if self._is_same:
            return found
        data, metadata = found
        data = move(data, self._backend, self._device)
        return data, None if metadata is None else move(metadata, self._backend, self._device)

    def _read_frames(self, ask: Ask, keys: Keys = (), flat: bool = False) -> Found | None:
        found = self.batch._read_frames(ask, keys, flat)
        return None if found is None else (self._outward((found[0], None), keys, flat)[0], *found[1:])

    def _inward(self, value: Any) -> Any:
        return move(value, self.batch.backend, self.batch.device)

    def append(self, value: Any) -> None:
        """Append to the source."""
        self.batch.append(self._inward(value))

    def extend(self, value: Any) -> None:
        """Extend the source."""
        self.batch.extend(self._inward(value))

    def set_at(self, idx: Any, value: Any) -> None:
        """Overwrite in the source."""
        self.batch.set_at(idx, self._inward(value))

    def remove_at(self, idx: Any) -> None:
        """Remove from the source."""
        self.batch.remove_at(idx)

    def append_flattened(self, value: Any) -> None:
        """Append a vector to the source."""
        self.batch.append_flattened(self._inward(value))

    def extend_flattened(self, value: Any) -> None:
        """Extend the source by vectors."""
        self.batch.extend_flattened(self._inward(value))

    def set_flattened_at(self, idx: Any, value: Any) -> None:
        """Overwrite in the source by vectors."""
        self.batch.set_flattened_at(idx, self._inward(value))

    def _written(self) -> BatchBase:
        return self.batch._written()

    def _extend_part(self, block: Any, closes: bool) -> None:
        self.batch._extend_part(self._inward(block), closes)

    def _check_set_at(self, idx: Any, value: Any) -> None:
        self.batch._check_set_at(idx, self._inward(value))

    def _check_remove_at(self, idx: Any) -> None:
        self.batch._check_remove_at(idx)
