"""Ranking: the log rewards of a buffer by row, with their minimum and quantiles always at hand."""

from __future__ import annotations

from math import floor
from typing import Any

import numpy as np

from recollect import _core
from recollect.remote.items.trajectories import Array


class Ranking:
    """Mirrors the log rewards of the rows of a buffer; NaN where there is none.

    The minimum of the finite ones costs O(log capacity) per change. The sorted array is made when a quantile is first
    asked for, and then kept by one merge per container.
    """

    def __init__(self, capacity: int) -> None:
        self.values = np.full(capacity, np.nan)
        self._tree = _core.MinTree(capacity)
        self._n_finite = 0
        self._sorted: Array | None = None

    def rebuild(self, rows: Array, values: Array) -> None:
        """Start again from what the buffer holds."""
        capacity = len(self.values)
        self.values = np.full(capacity, np.nan)
        self._tree = _core.MinTree(capacity)
        self._n_finite, self._sorted = 0, None
        self.set(rows, values)

    def set(self, rows: Array, values: Array) -> None:
        """These rows now hold items of these log rewards; of a row named twice the last counts."""
        if not len(rows):
            return
        if self._sorted is not None:
            last = len(rows) - 1 - np.unique(rows[::-1], return_index=True)[1]
            old, now = self.values[rows[last]], values[last]
            gone, new = old[np.isfinite(old)], now[np.isfinite(now)]
            self._sorted = merged(self._sorted, np.sort(gone), np.sort(new))
        rows, values = np.ascontiguousarray(rows, np.int64), np.ascontiguousarray(values, np.float64)
        self._n_finite += _core.mirror_keys(self._tree, self.values, rows, values)

    @property
    def n_finite(self) -> int:
        """How many finite log rewards there are."""
        return self._n_finite

    def finite(self) -> Array:
        """The finite log rewards, sorted; not to be changed."""
        if self._sorted is None:
            self._sorted = np.sort(self.values[np.isfinite(self.values)])
        return self._sorted

    def lowest(self) -> float | None:
        """The smallest finite log reward, None if there is none."""
        return float(self._tree.lowest()[0]) if self._n_finite else None

    def quantile(self, q: float) -> float | None:
        """What `np.quantile(finite, q)` is, None if there is nothing."""
        return quantile_of(self.finite(), q) if self._n_finite else None


def merged(held: Array, gone: Array, new: Array) -> Array:
    """A sorted array without `gone` (all of them in it) and with `new`; all three sorted."""
    if len(gone):
        # Of equal values each takes the next place.
        nth = np.arange(len(gone)) - np.searchsorted(gone, gone)
        held = np.delete(held, np.searchsorted(held, gone) + nth)
    return np.insert(held, np.searchsorted(held, new), new) if len(new) else held


def quantile_of(ordered: Array, q: float) -> float:
    """`np.quantile` (linear) of a sorted array, to the last bit, without looking at all of it."""
    at = q * (len(ordered) - 1)
    below = floor(at)
    low: Any = ordered[below]
    high: Any = ordered[min(below + 1, len(ordered) - 1)]
    part = at - below
    gap = high - low
    # numpy computes from the nearer end, so that the result never leaves [low, high].
    return float(high - gap * (1 - part) if part >= 0.5 else low + gap * part)
