"""Which samples of a batch are off their space: bounds, NaN, and values that are no member at all."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import Space, spaces

from recollect.batch.structure import has_no_array, leaf_paths, pick
from recollect.spaces import as_numpy
from recollect.spaces.tree import path_name

Array = np.ndarray[Any, Any]


def outside(space: Space[Any], batch: Any, n: int) -> dict[int, str]:
    """Return what is wrong with samples of a batch, by position; dtypes and shapes are taken as checked."""
    wrong: dict[int, str] = {}
    for path, leaf in leaf_paths(space):
        values = pick(batch, path)
        for i in np.flatnonzero(~_inside(leaf, values, n)).tolist():
            wrong.setdefault(i, f"{path_name(path)}: {_problem(leaf, values[i])}")
    return wrong


def _inside(leaf: Space[Any], values: Any, n: int) -> Array:
    if has_no_array(leaf):
        return np.array([leaf.contains(value) for value in values], bool)
    low, high = _bounds(leaf)
    x = as_numpy(values)
    fits = (x >= low) & (x <= high)  # NaN is never inside
    return np.asarray(fits.all(axis=tuple(range(1, fits.ndim))))


def _bounds(leaf: Space[Any]) -> tuple[Any, Any]:
    if isinstance(leaf, spaces.Discrete):
        return leaf.start, leaf.start + leaf.n - 1
    if isinstance(leaf, spaces.MultiDiscrete):
        start = getattr(leaf, "start", 0)
        return start, start + leaf.nvec - 1
    if isinstance(leaf, spaces.MultiBinary):
        return 0, 1
    return leaf.low, leaf.high  # type: ignore[attr-defined]


def _problem(leaf: Space[Any], value: Any) -> str:
    if has_no_array(leaf):
        return f"must be a member of {leaf}, got {value!r}"
    x = as_numpy(value)
    low, high = (np.broadcast_to(bound, x.shape) for bound in _bounds(leaf))
    at = tuple(np.argwhere(~((x >= low) & (x <= high)))[0]) if x.ndim else ()
    where = f" at {list(map(int, at))}" if at else ""
    return f"value must be within [{low[at]}, {high[at]}]{where}, got {x[at]}"
