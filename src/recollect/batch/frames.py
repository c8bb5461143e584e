"""The arithmetic of stacks: which frames belong to the anchor's episode, and what stands in for the others.

Arrays here are numpy, B anchors by T frames (or by S rows of a gapless span), the anchor at a known column.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import Space

from recollect.batch.location import Bools, Ints
from recollect.batch.structure import Keys, has_no_array, map_leaves
from recollect.spaces import space_at

Array = np.ndarray[Any, Any]


def stand_ins(valid: Bools, anchor: int) -> Ints:
    """Return, for each frame, the column to show: itself, or the nearest valid one on the anchor's side."""
    n = valid.shape[1]
    columns = np.broadcast_to(np.arange(n), valid.shape)
    before = np.where(valid, columns, n)[:, : anchor + 1]
    after = np.where(valid, columns, -1)[:, anchor:]
    left = np.minimum.accumulate(before[:, ::-1], axis=1)[:, ::-1]
    right = np.maximum.accumulate(after, axis=1)
    return np.concatenate([left, right[:, 1:]], axis=1)


def outward_all(flags: Bools, anchor: int) -> Bools:
    """Return where `flags` hold for every column from here to the anchor, both included."""
    left = np.logical_and.accumulate(flags[:, anchor::-1], axis=1)[:, ::-1]
    right = np.logical_and.accumulate(flags[:, anchor:], axis=1)
    return np.concatenate([left, right[:, 1:]], axis=1)


def same_id(ids: Array, anchor: int) -> Bools:
    """Return where every row from here to the anchor has the anchor's id."""
    same = ids == ids[:, anchor : anchor + 1]
    return outward_all(same.all(axis=tuple(range(2, same.ndim))), anchor)


def no_end_between(ends: Array, anchor: int) -> Bools:
    """Return where no row from the earlier of here and the anchor to the later (excluded) has the flag."""
    goes_on: Bools = np.logical_not(ends.astype(np.bool_).any(axis=tuple(range(2, ends.ndim))))
    past = goes_on.copy()
    past[:, anchor] = True
    left = outward_all(past, anchor)[:, : anchor + 1]
    # To the right the anchor's own flag counts and the frame's does not: shift by one.
    shifted = np.concatenate([np.ones_like(goes_on[:, :1]), goes_on[:, anchor:-1]], axis=1)
    right = np.logical_and.accumulate(shifted, axis=1)
    return np.concatenate([left, right[:, 1:]], axis=1)


def fold(space: Space[Any] | None, data: Any, b: int, t: int) -> Any:
    """Return a batch of b * t samples as b stacks of t: arrays `(b, t, ...)`; of Text, t tuples of b."""
    if space is None:
        return _fold_leaf(None, data, b, t)
    if type(data) is dict and all(type(x) is np.ndarray for x in data.values()):  # the usual case, at once
        return {key: x.reshape((b, t, *x.shape[1:])) for key, x in data.items()}
    return map_leaves(lambda leaf, x: _fold_leaf(leaf, x, b, t), space, data)


def _fold_leaf(space: Space[Any] | None, x: Any, b: int, t: int) -> Any:
    if space is not None and has_no_array(space):
        return tuple([tuple([x[i * t + k] for i in range(b)]) for k in range(t)])
    return x.reshape((b, t, *x.shape[1:]))


def show(space: Space[Any] | None, data: Any, columns: Ints) -> Any:
    """Return new stacks whose frame k is frame `columns[:, k]` of `data`."""
    if space is None:
        return _show_leaf(None, data, columns)
    return map_leaves(lambda leaf, x: _show_leaf(leaf, x, columns), space, data)


def _show_leaf(space: Space[Any] | None, x: Any, columns: Ints) -> Any:
    if space is not None and has_no_array(space):
        stacks, frames = columns.shape
        return tuple([tuple([x[columns[i, k]][i] for i in range(stacks)]) for k in range(frames)])
    return x[np.arange(len(columns))[:, None], columns]


def frame(space: Space[Any], data: Any, column: int) -> Any:
    """Return one frame of each stack, a plain batch."""
    return map_leaves(lambda leaf, x: x[column] if has_no_array(leaf) else x[:, column], space, data)


def split_keys(space: Space[Any], keys: Keys) -> tuple[Keys, Keys]:
    """Return the keys within a sample of `space`, and those within a stack of Text (a tuple of T)."""
    n = len(keys)
    while n:
        try:
            space_at(space, keys[:n])
            break
        except KeyError:
            n -= 1
    return keys[:n], keys[n:]
