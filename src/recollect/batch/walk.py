"""The samples that a batch holds at one moment, to be read later, one part after another.

In a ring that is being written the index of a sample changes and in the end the sample is gone. A walk
remembers rows and generations instead, where the source has them, so that nothing is read twice, in another's
place, or torn; what was overwritten in the meantime is left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from recollect.batch.base import BatchBase
from recollect.batch.boundaries import drawn
from recollect.batch.location import Bools, Ints, Location, Segments, runs_of
from recollect.batch.structure import unbatch

Found = tuple[Any, "dict[str, Any] | None"]


class Walk:
    """A fixed list of samples of a batch; position k is the k-th of them."""

    def __init__(self, batch: BatchBase, order: Sequence[int] | Ints, location: Location | None) -> None:
        self.batch = batch
        self._order = order
        self._location = location

    @classmethod
    def start(cls, batch: BatchBase) -> Walk:
        """Fix what `batch` holds now, in index order."""
        return cls(batch, *batch._located())

    def __len__(self) -> int:
        return len(self._order)

    def permuted(self, permutation: Ints) -> Walk:
        """Return the same samples in another order."""
        place = None if self._location is None else self._location.take(permutation)
        # As it is if all indices exist: to make an array of a range takes longer than to permute it.
        whole = isinstance(self._order, range)
        order = permutation if whole else np.asarray(self._order, np.int64)[permutation]
        return Walk(self.batch, order, place)

    @property
    def order(self) -> Sequence[int] | Ints:
        """The indices that the samples had at the start."""
        return self._order

    @property
    def is_still(self) -> bool:
        """Whether the samples stay where they are, as they are."""
        return self._location is None and not self.batch._moves

    def segments(self) -> Segments:
        """Return runs of positions: segments, and gaps between them. For walks in index order."""
        if self._location is not None:
            return runs_of(self._location.segment)
        known = self.batch.get_segments()
        cuts = sorted({0, len(self), *(edge for pair in known or () for edge in pair)})
        return list(pairwise(cuts))

    def read(self, at: Ints, flat: bool = False, metadata: bool = False) -> Found | None:
        """Read the samples at some positions, with a batch axis; None if any of them is gone."""
        if self._location is not None:
            return self.batch.get_located(self._location.take(at), (), flat, metadata)
        try:
            return self.batch._read(self._index(at), (), flat, metadata)
        except IndexError:
            if self.current(at).all():
                raise
            return None

    def current(self, at: Ints) -> Bools:
        """Tell which of the samples at some positions still exist."""
        if self._location is not None:
            return self.batch.is_current(self._location.take(at))
        return np.asarray(self._index(at) < len(self.batch))

    def _index(self, at: Ints) -> Ints:
        return at if isinstance(self._order, range) else np.asarray(self._order)[at]

    def rest(self, position: int) -> dict[str, Any]:
        """Return plain arrays from which `restore` makes the walk from `position` on."""
        return self.part(slice(position, None))

    def part(self, at: Ints | slice) -> dict[str, Any]:
        """Return plain arrays from which `restore` makes a walk of the samples at some positions."""
        places = {"index": np.asarray(self._order, np.int64)}
        if self._location is not None:
            places |= {"row": self._location.row, "generation": self._location.generation}
        return {name: array[at].copy() for name, array in places.items()}

    @classmethod
    def restore(cls, batch: BatchBase, state: dict[str, Any]) -> Walk:
        """Make a walk of what `rest` returned."""
        index = np.asarray(state["index"], np.int64)
        place = Location.of(state["row"], state["generation"], index) if "row" in state else None
        shapes = {index.shape} if place is None else {index.shape, place.row.shape, place.generation.shape}
        if index.ndim != 1 or len(shapes) > 1 or (index < 0).any():
            raise ValueError(
                f"state: places must be 1-D of one length and not negative, got {shapes}; it is damaged"
            )
        return cls(batch, index, place)


def iterate(batch: BatchBase) -> Iterator[Any]:
    """Yield the samples of a batch one by one; see `BatchBase.__iter__`."""
    walk = drawn(batch, lambda size: Walk.start(batch))
    for position in range(len(walk)):
        found = walk.read(np.array([position]))
        if found is not None:
            yield unbatch(batch.single_space, found[0], 0)
