"""SharedBufferBase: what buffers between collectors and a learner have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Self

from recollect import checks

NUMPY = "numpy"


class SharedBufferBase(ABC):
    """Rows in shared memory that collectors add and a learner samples, as numpy arrays or tensors on a device.

    `device` is "numpy" for numpy arrays, or anything that names a device of torch, which is loaded when the first
    batch is made and not before. `defer_gpu` is accepted and changes nothing: storage is always on the host.

    Ownership: as the subclass says; `close` detaches, `cleanup` in the process that made it closes it for all.
    """

    def __init__(self, capacity: int, device: Any, defer_gpu: bool = False) -> None:
        """Say how many rows there are at most, and where batches go."""
        checks.count("capacity", capacity)
        if not isinstance(device, str) and type(device).__module__ != "torch":
            raise ValueError(f"device: must be 'numpy' or a device of torch, got {device!r}")
        self.capacity, self.device, self.defer_gpu = int(capacity), str(device), bool(defer_gpu)

    @abstractmethod
    def add(self, *args: Any, **kwargs: Any) -> None:
        """Add rows."""

    @abstractmethod
    def sample(self, batch_size: int) -> dict[str, Any]:
        """Draw rows."""

    @abstractmethod
    def close(self) -> None:
        """Detach this object; may be called twice."""

    @abstractmethod
    def cleanup(self) -> None:
        """Close; in the process that made it, for everybody."""

    @property
    @abstractmethod
    def ptr(self) -> int:
        """Rows ever added."""

    @property
    @abstractmethod
    def size(self) -> int:
        """Rows held now."""

    def __len__(self) -> int:
        return self.size

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def check_lane(lane: Any, num_lanes: int) -> None:
    """Raise ValueError unless `lane` is None or the number of a lane."""
    if lane is not None:
        checks.count("lane", lane, 0, most=num_lanes - 1, advice="create more lanes")
