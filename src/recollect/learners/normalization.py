"""Observations on the scale that the statistics say; one function for learner and collector."""

from __future__ import annotations

from typing import Any

import numpy as np

from recollect.errors import FormatError


def normalize(obs: Any, stats: tuple[Any, Any] | None, eps: float = 1e-2) -> Any:
    """Return (obs - mean) / (std + eps), or `obs` itself when there are no statistics yet.

    `obs` may be a numpy array or a tensor; the statistics follow it to its kind, dtype and device.

    >>> import numpy as np
    >>> normalize(np.float32([[2.0]]), (np.float32([1.0]), np.float32([0.99]))).tolist()
    [[1.0]]
    """
    if stats is None:
        return obs
    mean, std = stats
    if hasattr(obs, "detach"):
        mean, std = (_like(obs, x) for x in (mean, std))
    else:
        obs, mean, std = np.asarray(obs), np.asarray(mean), np.asarray(std)
        mean, std = (x.astype(obs.dtype, copy=False) if obs.dtype.kind == "f" else x for x in (mean, std))
    return (obs - mean) / (std + eps)


def _like(obs: Any, x: Any) -> Any:
    from recollect.backends import get_backend

    tensor = x if hasattr(x, "detach") else get_backend("torch").from_numpy(np.asarray(x))
    return tensor.to(device=obs.device, dtype=obs.dtype if obs.is_floating_point() else None)


class RunningStats:
    """Mean and standard deviation of all rows seen, kept in float64 and merged block by block.

    >>> stats = RunningStats(1)
    >>> stats.update(np.float32([[1.0], [3.0]]))
    >>> [x.tolist() for x in stats.pair()]
    [[2.0], [1.0]]
    """

    def __init__(self, dim: int) -> None:
        self.count = 0
        self._mean, self._m2 = np.zeros(dim), np.zeros(dim)

    def update(self, rows: np.ndarray[Any, Any]) -> None:
        """Take a block `[n, dim]` into account."""
        n = len(rows)
        if n == 0:
            return
        block = np.asarray(rows, np.float64)
        mean = block.mean(0)
        shift, total = mean - self._mean, self.count + n
        self._m2 += ((block - mean) ** 2).sum(0) + shift**2 * (self.count * n / total)
        self._mean += shift * (n / total)
        self.count = total

    def pair(self) -> tuple[Any, Any] | None:
        """Return (mean, std) in float32, None before the first row."""
        if not self.count:
            return None
        return self._mean.astype(np.float32), np.sqrt(self._m2 / self.count).astype(np.float32)

    def get_state_dict(self) -> dict[str, Any]:
        """Return what the next update depends on."""
        return {"count": self.count, "mean": self._mean.copy(), "m2": self._m2.copy()}

    def load_state_dict(self, state: Any) -> None:
        """Take over what `get_state_dict` returned."""
        mean, m2 = (np.array(state[name], np.float64) for name in ("mean", "m2"))
        if mean.shape != self._mean.shape or m2.shape != self._m2.shape or int(state["count"]) < 0:
            raise FormatError(
                f"normalizer: must be of {self._mean.shape}, got {mean.shape}; it is of another learner"
            )
        self.count, self._mean, self._m2 = int(state["count"]), mean, m2
