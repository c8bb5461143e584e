"""EpisodeMask: the frames of the anchor's episode told by a column, for stacks without segments."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from gymnasium import spaces

from recollect.batch.base import BatchBase
from recollect.batch.location import Bools, Ints, Location
from recollect.batch.structure import Keys, pick
from recollect.batch.view import Read
from recollect.spaces import as_numpy, space_at

if TYPE_CHECKING:
    from recollect.batch.stacked import SliceStackedBatch


def span_of(offsets: Ints) -> Ints:
    """Return all offsets from the first to the last, without gaps."""
    return np.arange(offsets[0], offsets[-1] + 1)


@dataclass(frozen=True, slots=True)
class EpisodeMask:
    """A mask function that looks at one column over the whole span, also at the rows that offsets skip."""

    key: Keys
    is_in_metadata: bool
    rule: Callable[[Any, int], Bools]

    def __call__(
        self, stack: SliceStackedBatch, expanded_idx: Any, data: Any = None, metadata: Any = None
    ) -> Bools:
        """Return the mask `(B, T)` of positions `(B, T)`, reading the column there."""
        anchors = np.asarray(as_numpy(expanded_idx), np.int64)[:, stack.anchor]
        rows = anchors[:, None] + span_of(stack.fixed_offset)
        last = max(len(stack.batch) - 1, 0)
        found = stack.batch._read(np.clip(rows, 0, last).ravel(), *self._form())
        return self.judge(stack.fixed_offset, found, len(anchors))

    def check(self, batch: BatchBase) -> None:
        """Raise KeyError unless the column is there."""
        space = batch.single_metadata_space if self.is_in_metadata else batch.single_space
        space_at(spaces.Dict({}) if space is None else space, self.key)

    def read(self, batch: BatchBase, place: Location) -> Read | None:
        """Read the column at located samples; None if any of them is gone."""
        return batch.get_located(place, *self._form())

    def judge(self, offsets: Ints, found: Read, n: int) -> Bools:
        """Return the mask `(n, T)`, given the column over the span of n anchors."""
        column = as_numpy(pick(found[1], self.key) if self.is_in_metadata else found[0])
        rows = column.reshape(n, len(span_of(offsets)), *column.shape[1:])
        return self.rule(rows, int(-offsets[0]))[:, offsets - offsets[0]]

    def _form(self) -> tuple[Keys, bool, bool]:
        return ((), False, True) if self.is_in_metadata else (self.key, False, False)
