"""A leaf over time in as many points as a screen has: each pixel keeps its least and its greatest value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
Read = Callable[[int, int], Array]

_BLOCK_NBYTES = 16 << 20


def series(read: Read, first: int, end: int, width: int, row_nbytes: int = 64) -> tuple[Array, Array, bool]:
    """Steps and values `[points, components]` of `[first, end)`, and whether they are exact.

    `read(a, b)` gives the values `[b - a, components]`. Up to two steps a pixel are given as they are; beyond that each
    of `width` pixels gives two points, its least and its greatest value, so that no spike is lost. A pixel
    of NaN alone stays NaN.
    """
    n = end - first
    if n <= 2 * width:
        return np.arange(first, end), read(first, end), True
    edges = first + (np.arange(width + 1) * n) // width
    parts = []
    a = 0
    while a < width:  # whole pixels, as many as fit in a block
        b = int(np.searchsorted(edges, edges[a] + max(1, _BLOCK_NBYTES // row_nbytes), side="right")) - 1
        b = min(max(b, a + 1), width)
        parts.append(extremes(read(int(edges[a]), int(edges[b])), edges[a:b] - edges[a]))
        a = b
    middle = (edges[:-1] + edges[1:]) // 2
    steps = np.stack([edges[:-1], np.maximum(middle, edges[:-1])], axis=1).reshape(-1)
    return steps, np.concatenate(parts), False


def extremes(values: Array, starts: Array) -> Array:
    """The least and the greatest of each run of rows, `[2 * runs, components]`; NaN is passed over.

    >>> extremes(np.array([[3.0], [1.0], [np.nan], [5.0]]), np.array([0, 2])).T
    array([[1., 3., 5., 5.]])
    """
    if values.dtype == bool:
        values = values.astype(np.uint8)
    low = np.fmin.reduceat(values, starts, axis=0)
    high = np.fmax.reduceat(values, starts, axis=0)
    return np.stack([low, high], axis=1).reshape(-1, values.shape[1])


def plain(column: Array) -> list[Any]:
    """One component as JSON has it: what is not finite is None."""
    if column.dtype.kind in "biu":
        whole: list[Any] = column.astype(np.int64 if column.dtype == bool else column.dtype).tolist()
        return whole
    wide = column.astype(np.float64)
    values = wide.tolist()
    if column.dtype != np.float64:  # a narrower float has no more digits than these
        values = [float(f"{value:.7g}") for value in values]
    return [value if fine else None for value, fine in zip(values, np.isfinite(wide).tolist())]
