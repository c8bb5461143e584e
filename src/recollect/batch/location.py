"""Where a sample physically is: the only thing that travels between samplers and buffers besides indices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

Ints = np.ndarray[Any, np.dtype[np.int64]]
Bools = np.ndarray[Any, np.dtype[np.bool_]]
Segments = list[tuple[int, int]]

UNKNOWN = -1  # segment and step of a sample whose episode boundaries are not known


@dataclass(frozen=True, slots=True, eq=False)
class Location:
    """The places of some samples, as int64 arrays of one shape (numpy scalars for a single index).

    `row` and `generation` say which sample it is, for as long as it exists. Two samples of one `locate` call
    with the same `segment` lie in one unbroken run; -1 is an unknown boundary, below -1 a sample in no
    segment. `step` counts from the first sample of the segment. `index` is the index each had when it was
    located, a hint.

    Ownership: the arrays are the caller's.
    """

    row: Ints
    generation: Ints
    segment: Ints
    step: Ints
    index: Ints | None = None

    @classmethod
    def of(cls, row: Any, generation: Any, index: Any = None) -> Location:
        """Make one of the two numbers that identify a sample, as kept by a sampler."""
        row = np.asarray(row, np.int64)
        unknown = np.broadcast_to(np.int64(UNKNOWN), row.shape)
        index = None if index is None else np.asarray(index, np.int64)
        return cls(row, np.asarray(generation, np.int64), unknown, unknown, index)

    def __len__(self) -> int:
        return len(self.row)

    def take(self, positions: Any) -> Location:
        """Return the locations at `positions` (anything numpy indexes with)."""
        index = None if self.index is None else self.index[positions]
        return Location(
            self.row[positions],
            self.generation[positions],
            self.segment[positions],
            self.step[positions],
            index,
        )

    def at(self, index: Any) -> Location:
        """Return the same places under another index."""
        return replace(self, index=np.asarray(index, np.int64))


def segments_of(index: Ints, segments: Sequence[tuple[int, int]] | None) -> tuple[Ints, Ints]:
    """Return the number of the segment that holds each index, and the step within it.

    Unknown boundaries give -1. A sample in no segment has a number of its own below -1, so it equals no
    other.
    """
    if segments is None:
        unknown = np.full(index.shape, UNKNOWN)
        return unknown, unknown.copy()
    bounds = np.asarray(segments, np.int64).reshape(len(segments), 2)
    number = np.searchsorted(bounds[:, 0], index, side="right") - 1
    start, end = (np.append(bounds[:, k], np.iinfo(np.int64).min)[number] for k in (0, 1))
    inside = index < end
    return np.where(inside, number, -2 - index), np.where(inside, index - start, UNKNOWN)


def runs_of(keys: Ints | Bools) -> Segments:
    """Return the half-open runs of equal neighbours."""
    if not len(keys):
        return []
    cuts = np.flatnonzero(keys[1:] != keys[:-1]) + 1
    return list(zip([0, *cuts.tolist()], [*cuts.tolist(), len(keys)]))
