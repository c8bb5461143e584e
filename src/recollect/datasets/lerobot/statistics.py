"""Running statistics of a feature: least, greatest, mean and deviation, joined without seeing the values again."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


class Running:
    """Statistics as LeRobot keeps them: over the rows; of pictures per channel `(C, 1, 1)`, in units of 255.

    >>> s = Running()
    >>> s.update(np.array([[1.0], [3.0]]))
    >>> s.update(np.array([[5.0]]))
    >>> s.record()["mean"], s.record()["max"], s.record()["count"]
    ([3.0], [5.0], [3])
    """

    def __init__(self) -> None:
        self.n_rows = 0
        self.weight = 0  # values per entry
        self.low: Any = None
        self.high: Any = None
        self.mean: Any = None
        self.m2: Any = None  # the sum of squared distances from the mean

    def update(self, rows: Array, is_picture: bool = False) -> None:
        """Take in rows `[n, ...]`, or pictures `[n, H, W, C]`."""
        if not len(rows):
            return
        axis: Any = (0, 1, 2) if is_picture else 0
        mean, m2 = np.mean(rows, axis, np.float64), np.var(rows, axis, np.float64)
        weight = int(np.prod(rows.shape[:3])) if is_picture else len(rows)
        low, high = rows.min(axis), rows.max(axis)
        if is_picture:
            low, high, mean, m2 = (np.reshape(x, (-1, 1, 1)) / s for x, s in ((low, 255), (high, 255), (mean, 255),
                                                                             (m2, 255**2)))  # fmt: skip
        self._join(len(rows), weight, low, high, mean, m2 * weight)

    def merge(self, other: Running) -> None:
        """Take in what another has seen."""
        if other.n_rows:
            self._join(other.n_rows, other.weight, other.low, other.high, other.mean, other.m2)

    def _join(self, n_rows: int, weight: int, low: Any, high: Any, mean: Any, m2: Any) -> None:
        if not self.n_rows:
            self.low, self.high, self.mean, self.m2 = low, high, mean, m2
        else:
            total, delta = self.weight + weight, mean - self.mean
            self.low, self.high = np.minimum(self.low, low), np.maximum(self.high, high)
            self.m2 = self.m2 + m2 + delta**2 * (self.weight * weight / total)
            self.mean = self.mean + delta * (weight / total)
        self.n_rows += n_rows
        self.weight += weight

    def record(self) -> dict[str, Any]:
        """The statistics as lists."""
        std = np.sqrt(self.m2 / max(1, self.weight))
        values = {"min": self.low, "max": self.high, "mean": self.mean, "std": std}
        return {**{k: np.atleast_1d(v).tolist() for k, v in values.items()}, "count": [self.n_rows]}

    def state(self) -> dict[str, Any]:
        """All of it as plain JSON values."""
        sides = {k: np.asarray(getattr(self, k)) for k in ("low", "high", "mean", "m2")}
        return {"n_rows": self.n_rows, "weight": self.weight,
                **{k: [str(v.dtype), list(v.shape), v.ravel().tolist()] for k, v in sides.items()}}  # fmt: skip

    @classmethod
    def restore(cls, state: dict[str, Any]) -> Running:
        """Make it again from `state()`."""
        made = cls()
        made.n_rows, made.weight = int(state["n_rows"]), int(state["weight"])
        for k in ("low", "high", "mean", "m2"):
            dtype, shape, values = state[k]
            setattr(made, k, np.array(values, dtype).reshape(shape))
        return made
