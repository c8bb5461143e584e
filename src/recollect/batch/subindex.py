"""SubIndexedBatch: some samples of another batch, in an order of one's own."""

from __future__ import annotations

from typing import Any

import numpy as np

from recollect.batch.base import BatchBase, Draws
from recollect.batch.boundaries import Ask, Boundaries, Found
from recollect.batch.location import Bools, Ints, Location, Segments, runs_of, segments_of
from recollect.batch.structure import Keys
from recollect.batch.view import Read, View
from recollect.indexing import normalize, positions


class SubIndexedBatch(View):
    """The samples of `batch` at `sub_indexes`, frozen as positions at this moment; an int is a batch of one.

    On a ring the view shows what is at those positions now; a position no longer there raises IndexError.
    `...` stays live, and passes `append`, `extend` and `remove_at` on. Where the index skips, a segment ends.

    Ownership: owns only its index.
    Concurrency: as the batch it views; `set_at` writes through.

    Example:
        >>> import numpy as np, recollect as rc
        >>> buf = rc.ReplayBuffer.create(rc.MemoryStorage, ((), "int64"), capacity=8)
        >>> buf.extend(np.arange(6))
        >>> odd = rc.SubIndexedBatch(buf, slice(1, None, 2))
        >>> len(odd), odd[-1].item(), odd[:2].tolist()
        (3, 5, [1, 3])
    """

    def __init__(self, batch: BatchBase, sub_indexes: Any) -> None:
        """View `batch` at `sub_indexes`, any index that a batch takes."""
        super().__init__(batch)
        self._index: Ints | None = None
        if sub_indexes is not Ellipsis:
            self._index = positions(sub_indexes, len(batch)).copy()
            self._index.flags.writeable = False
            self._runs = np.cumsum(np.diff(self._index, prepend=self._index[:1]) != 1) - 1

    @property
    def sub_indexes(self) -> Any:
        """The frozen positions (read-only), or `...` for a live view."""
        return Ellipsis if self._index is None else self._index

    def __len__(self) -> int:
        return len(self.batch) if self._index is None else len(self._index)

    @property
    def is_mutable(self) -> bool:
        return self.batch.is_mutable

    def _source_index(self, idx: Any) -> Any:
        if self._index is None:
            return idx
        at = normalize(idx, len(self._index))
        return int(self._index[at]) if isinstance(at, int) else self._index[at]

    def _read(self, idx: Any, keys: Keys = (), flat: bool = False, metadata: bool = False) -> Read:
        return self.batch._read(self._source_index(idx), keys, flat, metadata)

    def draw_at(self, stream: Draws, n: int) -> Any:
        return self.batch.draw_at(stream, n) if self._index is None else BatchBase.draw_at(self, stream, n)

    def draw_column_at(self, keys: Keys, stream: Draws, n: int) -> Any:
        if self._index is None:
            return self.batch.draw_column_at(keys, stream, n)
        return BatchBase.draw_column_at(self, keys, stream, n)

    # Segments and places

    def get_segments(self) -> Segments | None:
        known = self.batch.get_segments()
        if self._index is None or known is None:
            return known
        number, _ = segments_of(self._index, known)
        keys = self._runs * (len(known) + 1) + np.maximum(number, -1)
        return [run for run in runs_of(keys) if number[run[0]] >= 0]

    def _boundaries(self) -> Boundaries:
        return self.batch._boundaries() if self._index is None else Boundaries(self)

    def _read_frames(self, ask: Ask, keys: Keys = (), flat: bool = False) -> Found | None:
        if self._index is None:
            return self.batch._read_frames(ask, keys, flat)
        return super()._read_frames(ask, keys, flat)

    def locate(self, idx: Any) -> Location:
        if self._index is None:
            return self.batch.locate(idx)
        at = normalize(idx, len(self._index))
        place = self.batch.locate(self._source_index(at))
        # A view of one run keeps the source's ids; among several, each run needs ids of its own.
        n_runs = int(self._runs[-1]) + 1 if len(self._runs) else 1
        segment = np.where(place.segment >= 0, place.segment * n_runs + self._runs[at], place.segment)[()]
        return Location(place.row, place.generation, segment, place.step, np.asarray(at, np.int64)[()])

    def relocate(self, location: Location) -> Ints:
        source = self.batch.relocate(self._inner(location))
        if self._index is None:
            return source
        if not len(self._index):
            return np.full_like(source, -1)
        found = self._search(source)
        if location.index is None:
            return found
        hint = self._hint(location.index)
        return np.where((self._index[hint] == source) & (source >= 0), hint, found)

    def is_current(self, location: Location) -> Bools:
        return self.batch.is_current(self._inner(location))

    def get_located(
        self, location: Location, keys: Keys = (), flat: bool = False, metadata: bool = False
    ) -> Read | None:
        return self.batch.get_located(self._inner(location), keys, flat, metadata)

    def _inner(self, location: Location) -> Location:
        """Return the location with the index that the source knows it by."""
        if self._index is None or location.index is None or not len(self._index):
            return location
        return location.at(self._index[self._hint(location.index)])

    def _hint(self, index: Ints) -> Ints:
        return np.clip(index, 0, len(self) - 1)

    def _search(self, source: Ints) -> Ints:
        """Return the first view index that shows each source index, -1 if none does."""
        index = self.sub_indexes
        order = np.argsort(index, kind="stable")
        at = order[np.minimum(np.searchsorted(index, source, sorter=order), len(index) - 1)]
        return np.where(index[at] == source, at, -1)

    def _existing(self) -> Any:
        if self._index is None:
            return self.batch._existing()
        there = self.batch._existing()
        kept = self._index < len(there) if isinstance(there, range) else np.isin(self._index, there)
        return np.flatnonzero(kept)

    def _chunks(self) -> Any:
        found = self.batch._chunks()
        if found is None or self._index is None:
            return found
        # A position that is no longer there has no chunk; it is not among those that exist either.
        chunk, window = found
        inside = self._index < len(chunk)
        return np.where(inside, np.append(chunk, 0)[np.where(inside, self._index, -1)], 0), window

    def _expect(self, idx: Any, keys: Keys = ()) -> None:
        self.batch._expect(idx if self._index is None else self._index[idx], keys)

    def _reads_ahead(self) -> int:
        return self.batch._reads_ahead()

    # Writes

    def set_at(self, idx: Any, value: Any) -> None:
        """Overwrite the samples in the source."""
        self.batch.set_at(self._source_index(idx), value)

    def set_flattened_at(self, idx: Any, value: Any) -> None:
        """Overwrite the samples in the source, given as vectors."""
        self.batch.set_flattened_at(self._source_index(idx), value)

    def append(self, value: Any) -> None:
        """Append to the source; only a `...` view does."""
        self._live("append").append(value)

    def extend(self, value: Any) -> None:
        """Extend the source; only a `...` view does."""
        self._live("extend").extend(value)

    def append_flattened(self, value: Any) -> None:
        """Append a vector to the source; only a `...` view does."""
        self._live("append_flattened").append_flattened(value)

    def extend_flattened(self, value: Any) -> None:
        """Extend the source by vectors; only a `...` view does."""
        self._live("extend_flattened").extend_flattened(value)

    def remove_at(self, idx: Any) -> None:
        """Remove from the source; only a `...` view does."""
        self._live("remove_at").remove_at(idx)

    def _live(self, verb: str) -> BatchBase:
        if self._index is not None:
            raise self._read_only(verb)
        return self.batch

    def _written(self) -> BatchBase:
        return self.batch._written()

    def _extend_part(self, block: Any, closes: bool) -> None:
        self._live("extend")._extend_part(block, closes)

    def _check_set_at(self, idx: Any, value: Any) -> None:
        self.batch._check_set_at(self._source_index(idx), value)

    def _check_remove_at(self, idx: Any) -> None:
        self._live("remove_at")._check_remove_at(idx)
