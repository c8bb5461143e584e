"""Ragged columns: sequences of different lengths, end to end in one array with the offsets of each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from recollect.rollout.experience.space import Array


class RaggedColumn(NamedTuple):
    """A column of sequences: row i is `values[offsets[i]:offsets[i + 1]]`."""

    values: Array
    offsets: Array

    def lengths(self) -> Array:
        """How long each row is."""
        return np.diff(self.offsets)

    def take(self, index: Array) -> RaggedColumn:
        """The same rows in another order, copied together."""
        lengths = self.lengths()[index]
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        starts = np.repeat(self.offsets[:-1][index] - offsets[:-1], lengths)
        return RaggedColumn(self.values[starts + np.arange(offsets[-1])], offsets)

    def padded(self, fill: Any = 0) -> Array:
        """The rows as (N, L), filled up to the longest one."""
        lengths = self.lengths()
        shape = (len(lengths), int(lengths.max(initial=0)), *self.values.shape[1:])
        out = np.full(shape, fill, self.values.dtype)
        out[np.arange(out.shape[1]) < lengths[:, None]] = self.values[self.offsets[0] : self.offsets[-1]]
        return out


def join_columns(
    columns: Sequence[RaggedColumn], dtype: np.dtype[Any], shape: tuple[int, ...]
) -> RaggedColumn:
    """All rows of columns whose elements have this dtype and shape, one column after another."""
    if not columns:
        return RaggedColumn(np.zeros((0, *shape), dtype), np.zeros(1, np.int64))
    lengths = np.concatenate([column.lengths() for column in columns])
    values = np.concatenate([column.values[column.offsets[0] : column.offsets[-1]] for column in columns])
    return RaggedColumn(values, offsets_of(lengths))


def offsets_of(lengths: Array) -> Array:
    """The offsets of sequences that have these lengths."""
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets
