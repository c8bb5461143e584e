"""ListBatch: a batch kept in a Python list, slow and plain, to test views and samplers against."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from recollect.batch import BatchBase, Location
from recollect.batch.location import Bools, Ints, Segments
from recollect.errors import SchemaError, SegmentOpenError
from recollect.indexing import normalize, positions
from recollect.spaces import Layout, as_space, compile_layout

Array = np.ndarray[Any, Any]


@dataclass(slots=True)
class _Item:
    fields: list[Array]
    metadata: list[Array]
    row: int
    generation: int
    segment: int
    step: int


class ListBatch(BatchBase):
    """Samples in a list, with the behaviour of a ReplayBuffer: a ring, segments, generations, removal.

    `segments` are half-open index pairs of the given samples, or None for an untracked batch; `[]` tracks
    from the first append. `metadata` is a dict for each sample; samples added later have zeros. With a
    `capacity` the oldest sample makes room.

    Ownership: copies what it takes and what it gives.
    Concurrency: one thread.

    Example:
        >>> from recollect.testing.batches import ListBatch
        >>> batch = ListBatch(((), "int64"), [1, 2, 3], segments=[(0, 2), (2, 3)])
        >>> batch.append(4)
        >>> batch[-2:].tolist(), batch.get_segments(), batch.open_segment
        ([3, 4], [(0, 2), (2, 3)], (3, 4))
    """

    def __init__(
        self,
        space: Any,
        samples: Iterable[Any] = (),
        segments: Sequence[tuple[int, int]] | None = None,
        metadata: Sequence[Mapping[str, Any]] | None = None,
        *,
        metadata_space: Any = None,
        capacity: int | None = None,
        max_lengths: Mapping[str, int] | None = None,
    ) -> None:
        """Hold copies of `samples`."""
        if metadata_space is None and metadata:
            metadata_space = as_space(metadata[0])
        super().__init__(space, metadata_space)
        self._row_layout = compile_layout(self.single_space, max_lengths)
        self._metadata_layout = None if metadata_space is None else compile_layout(metadata_space)
        self.capacity = capacity
        self._items: list[_Item] = []
        self._rows = 0
        self._tracked = segments is not None
        self._segments = 0
        self._open: int | None = None
        self._part = False
        for k, sample in enumerate(samples):
            self._add(self._encode(sample), -1, -1, None if metadata is None else metadata[k])
        for start, end in segments or ():
            self._mark(self._items[start:end])

    # Reads

    def __len__(self) -> int:
        return len(self._items)

    def get_at(self, idx: Any) -> Any:
        return self._get(idx, self._row_layout, [item.fields for item in self._items])

    def get_at_with_metadata(self, idx: Any) -> tuple[Any, dict[str, Any] | None]:
        if self._metadata_layout is None:
            return self.get_at(idx), None
        metadata = self._get(idx, self._metadata_layout, [item.metadata for item in self._items])
        return self.get_at(idx), metadata

    def _get(self, idx: Any, layout: Layout, rows: list[list[Array]]) -> Any:
        index = normalize(idx, len(self))
        if isinstance(index, int):
            return layout.decode_one([field.copy() for field in rows[index]])
        columns = [
            np.array([rows[i][k] for i in index], field.dtype).reshape(len(index), *field.shape)
            for k, field in enumerate(layout.fields)
        ]
        return layout.decode_batch(columns, len(index))

    # Writes

    def append(self, value: Any) -> None:
        fields = self._encode(value)
        if self._tracked and self._open is None:
            self._open = self._new_segment()
        self._add(fields, self._open, self._next_step())

    def extend(self, value: Any, ends: Any = None) -> None:
        rows = self._encode_block(value)
        if ends is None:
            self._refuse_open()
        flags = np.zeros(len(rows), np.bool_) if ends is None else np.asarray(ends)
        if flags.shape != (len(rows),) or flags.dtype != np.bool_:
            raise SchemaError(
                f"ends: must be bool ({len(rows)},), got {flags.dtype} {flags.shape}; one per row"
            )
        for fields, ends_here in zip(rows, flags):
            self._open = self._new_segment() if self._tracked and self._open is None else self._open
            self._add(fields, self._open, self._next_step())
            self._open = None if ends_here else self._open
        if ends is None:
            self._open = None

    def set_at(self, idx: Any, value: Any) -> None:
        index = normalize(idx, len(self))
        rows = [self._encode(value)] if isinstance(index, int) else self._encode_block(value)
        at = positions(index, len(self))
        if len(rows) != len(at):
            raise SchemaError(f"value: length must equal the index's {len(at)}, got {len(rows)}; one each")
        for i, fields in zip(at, rows):
            self._items[i].fields = fields
            self._items[i].generation += 1

    def remove_at(self, idx: Any) -> None:
        self._check_remove_at(idx)
        gone = set(positions(idx, len(self)).tolist())
        last, renamed, hole = -1, {}, False
        kept = []
        for i, item in enumerate(self._items):
            if i in gone:
                hole = True
                continue
            source = item.segment
            if hole and source == last and source >= 0:
                renamed[source] = self._new_segment()
            item.segment = renamed.get(source, source)
            last, hole = source, False
            kept.append(item)
        self._items = kept

    def _check_remove_at(self, idx: Any) -> None:
        for i in positions(idx, len(self)):
            if self._open is not None and self._items[i].segment == self._open:
                raise SegmentOpenError(
                    f"remove_at: segment must be closed, got index {i}; mark_segment_end()"
                )

    def mark_segment_end(self) -> None:
        """Close the open segment, if there is one."""
        self._open = None

    def _extend_part(self, block: Any, closes: bool) -> None:
        rows = self._encode_block(block)
        if not self._part:
            self._refuse_open()
        for fields in rows:
            self._open = self._new_segment() if self._tracked and self._open is None else self._open
            self._add(fields, self._open, self._next_step())
        self._part = not closes
        self._open = None if closes else self._open

    # Segments and places

    @property
    def open_segment(self) -> tuple[int, int] | None:
        """The index pair of the open segment, or None."""
        at = [
            i for i, item in enumerate(self._items) if self._open is not None and item.segment == self._open
        ]
        return (at[0], at[-1] + 1) if at else None

    def get_segments(self) -> Segments | None:
        if not self._tracked:
            return None
        found: Segments = []
        last = None
        for i, item in enumerate(self._items):
            if item.segment >= 0 and item.segment != self._open:
                start = found.pop()[0] if item.segment == last else i
                found.append((start, i + 1))
            last = item.segment
        return found

    def locate(self, idx: Any) -> Location:
        index = np.asarray(normalize(idx, len(self)), np.int64)
        items = [self._items[i] for i in np.atleast_1d(index)]
        fields = [[i.row, i.generation, self._segment_of(i), i.step] for i in items]
        row, generation, segment, step = np.array(fields, np.int64).reshape(len(items), 4).T.copy()
        place = Location(row, generation, segment, step, np.atleast_1d(index))
        return place if index.ndim else place.take(0)

    def _segment_of(self, item: _Item) -> int:
        return item.segment if item.segment >= 0 or not self._tracked else -2 - item.row

    def is_current(self, location: Location) -> Bools:
        return np.asarray(self.relocate(location) >= 0)

    def relocate(self, location: Location) -> Ints:
        at = {(item.row, item.generation): i for i, item in enumerate(self._items)}
        row, generation = np.atleast_1d(location.row), np.atleast_1d(location.generation)
        found = np.array([at.get((int(r), int(g)), -1) for r, g in zip(row, generation)], np.int64)
        return found.reshape(np.shape(location.row))

    # What it is made of

    def _encode(self, value: Any) -> list[Array]:
        return [field.copy() for field in self._row_layout.encode_one(value)]

    def _encode_block(self, value: Any) -> list[list[Array]]:
        n, columns = self._row_layout.encode_batch(value)
        return [[np.array(column[i]) for column in columns] for i in range(n)]

    def _add(self, fields: list[Array], segment: int | None, step: int, metadata: Any = None) -> None:
        layout = self._metadata_layout
        extra: list[Array] = []
        if layout is not None:
            zeros = [np.zeros(field.shape, field.dtype) for field in layout.fields]
            extra = zeros if metadata is None else [field.copy() for field in layout.encode_one(metadata)]
        self._items.append(_Item(fields, extra, self._rows, 1, -1 if segment is None else segment, step))
        self._rows += 1
        if self.capacity is not None and len(self._items) > self.capacity:
            self._items.pop(0)

    def _mark(self, items: list[_Item]) -> None:
        segment = self._new_segment()
        for step, item in enumerate(items):
            item.segment, item.step = segment, step

    def _new_segment(self) -> int:
        self._segments += 1
        return self._segments - 1

    def _next_step(self) -> int:
        if self._open is None:
            return -1
        last = self._items[-1] if self._items else None
        return last.step + 1 if last is not None and last.segment == self._open else 0

    def _refuse_open(self) -> None:
        if self._open is not None:
            raise SegmentOpenError(
                "extend: segment must be closed, got an open one; mark_segment_end() first"
            )
