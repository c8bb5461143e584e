"""Packed items: as they travel and lie in memory, and their way between arrays per field and rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from recollect import _core
from recollect.memory.rows import codec_of
from recollect.remote.items.trajectories import Array, joined, ranges
from recollect.spaces import Field, Layout


@dataclass(slots=True)
class PackedItems:
    """Items as they travel: packed rows, and of trajectories lengths (int32) and packed rows of fields.

    Ownership: the arrays are this object's own and do not change.
    """

    n: int
    rows: Array
    lengths: Array | None = None
    fields: Array | None = None
    log_rewards: Array | None = None  # float64, the finite ones and -inf
    scoring_only: bool = False
    rows_crc: int | None = None  # crc32c of the rows, the first block, if it is known

    def take(self, index: Array) -> PackedItems:
        """The items at these places, as a copy."""
        rewards = None if self.log_rewards is None else self.log_rewards[index]
        if self.fields is None:
            return PackedItems(
                len(index), self.rows[index], log_rewards=rewards, scoring_only=self.scoring_only
            )
        lengths, rows = self.lengths, self.rows
        if lengths is not None:
            starts = np.cumsum(lengths, dtype=np.int64) - lengths
            lengths = lengths[index]
            rows = rows[ranges(starts[index], lengths.astype(np.int64))]
        return PackedItems(len(index), rows, lengths, self.fields[index], rewards, self.scoring_only)

    def without_steps(self) -> PackedItems:
        """The fields alone, to be scored."""
        if self.fields is None:
            return PackedItems(self.n, self.rows, log_rewards=self.log_rewards, scoring_only=True)
        return PackedItems(self.n, self.rows[:0], None, self.fields, self.log_rewards, True)

    def blocks(self) -> list[Array]:
        """What follows the head of a frame."""
        if self.fields is None:
            return [self.rows]
        return [self.rows, self.lengths, self.fields] if self.lengths is not None else [self.fields]

    @property
    def nbytes(self) -> int:
        return sum(block.nbytes for block in self.blocks())

    def item_nbytes(self) -> Array:
        """The bytes of each item."""
        if self.lengths is None or self.fields is None:
            return np.full(self.n, (self.rows if self.fields is None else self.fields).shape[1], np.int64)
        steps: Array = self.lengths.astype(np.int64) * self.rows.shape[1]
        return np.asarray(steps + (self.fields.shape[1] + 4))

    @staticmethod
    def concat(parts: list[PackedItems]) -> PackedItems:
        """All items of all parts, in order."""
        if len(parts) == 1:
            return parts[0]
        first = parts[0]

        def all_of(name: str) -> Any:
            return None if getattr(first, name) is None else joined([getattr(part, name) for part in parts])

        return PackedItems(
            sum(part.n for part in parts), all_of("rows"), all_of("lengths"), all_of("fields"),
            all_of("log_rewards"), first.scoring_only,
        )  # fmt: skip


class RowPacker:
    """A layout as strided views: between arrays per field and packed rows."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self._codec = codec_of(layout)
        self._fields = [(f.dtype, f.shape, f.offset, _strides(f)) for f in layout.fields]

    def _view(self, rows: Array, number: int) -> Array:
        """One field of packed rows, where it lies."""
        dtype, shape, offset, strides = self._fields[number]
        return np.ndarray(
            (len(rows), *shape), dtype, rows, offset=offset, strides=(self.layout.row_nbytes, *strides)
        )

    def pack(self, n: int, arrays: list[Array]) -> tuple[Array, int]:
        """Return rows (n, row_nbytes), the bytes between fields zero, and their crc32c."""
        if not n:
            return np.empty((0, self.layout.row_nbytes), np.uint8), 0
        exact = [np.ascontiguousarray(a, f[0]) for a, f in zip(arrays, self._fields, strict=True)]
        return _core.pack_fields(self._codec, exact, n)

    def pack_block(self, block: Any) -> tuple[Array, int]:
        """The same of a block as a user gives it; SchemaError names the leaf that does not fit."""
        return _core.pack_batch(self._codec, block) or self.pack(*self.layout.encode_batch(block))

    def columns(self, rows: Array) -> list[Array]:
        """Return contiguous arrays [n, *shape] per field, as copies."""
        return [self.column(rows, number) for number in range(len(self._fields))]

    def column(self, rows: Array, number: int) -> Array:
        """Return one field of packed rows, as a copy."""
        if not len(rows):
            return np.empty((0, *self._fields[number][1]), self._fields[number][0])
        return self._view(np.ascontiguousarray(rows), number).copy()

    def numbers(self, rows: Array, number: int) -> Array:
        """Return one field of packed rows as float64, as a copy."""
        if not len(rows):
            return np.empty(0)
        return self._view(np.ascontiguousarray(rows), number).astype(np.float64)


def _strides(f: Field) -> tuple[int, ...]:
    """The bytes between neighbours along each axis of a field."""
    return tuple(f.dtype.itemsize * prod(f.shape[i + 1 :]) for i in range(len(f.shape)))


def storable(packed: PackedItems, max_length: int, refuse: Callable[[str, int], None]) -> Array | None:
    """Which items may be stored (bools), None if all; `refuse` is called with why and how many others may not.

    A log reward must not be NaN or +inf; a trajectory not longer than `max_length`.
    """
    rewards, lengths = packed.log_rewards, packed.lengths
    if not packed.n:
        return None
    fine_rewards = rewards is None or bool(rewards.max() < np.inf)  # NaN is the maximum of any that has one
    fine_lengths = lengths is None or bool(lengths.max() <= max_length)
    if fine_rewards and fine_lengths:
        return None
    allowed = np.ones(packed.n, bool) if rewards is None else rewards_ok(rewards)
    n_fine = int(np.count_nonzero(allowed))
    refuse("bad_value", packed.n - n_fine)
    if not fine_lengths and lengths is not None:
        allowed &= lengths <= max_length
        refuse("too_long", n_fine - int(np.count_nonzero(allowed)))
    return allowed


def rewards_ok(log_rewards: Array) -> Array:
    """Which log rewards may be stored: not NaN, not +inf."""
    return np.asarray(log_rewards < np.inf)
