"""Store: the items that a manager keeps in a ReplayBuffer, why others were not kept, and which ones a draw chooses."""

from __future__ import annotations

import ctypes
from collections import Counter
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np

from recollect import _core
from recollect.budget import human_nbytes
from recollect.errors import BudgetError, EmptyError
from recollect.memory.rows import packed_codec
from recollect.remote.items.packed import PackedItems, storable
from recollect.remote.items.space import ItemSpace, stored_places
from recollect.remote.items.trajectories import LOG_REWARD, Array
from recollect.remote.manager.baseline import Ranking
from recollect.remote.manager.diversity import Diversity, crowding
from recollect.replay import ReplayBuffer
from recollect.sampling.stream import IndexStream
from recollect.spaces import Layout
from recollect.system import is_portable

_PAGE = 4096
_MADV_NOHUGEPAGE = 15


@dataclass(slots=True)
class Placement:
    """What became of the items of one container."""

    kept: Array  # bool, by item
    row: Array  # where, -1: nowhere
    rejected: Counter[str] = field(default_factory=Counter)
    evicted: int = 0
    removed: int = 0
    passed: int = 0


def make_buffer(items: ItemSpace, capacity: int, evict: str, storage: str) -> ReplayBuffer:
    """Make the buffer that holds such items."""
    return ReplayBuffer.create(
        storage,
        items.space,
        capacity=capacity,
        multiprocessing=storage == "shared",
        evict=evict,
        evict_key=LOG_REWARD if evict == "lowest" else None,
        max_lengths={"steps": items.max_length} if items.is_trajectory else None,
    )


def use_small_pages(buffer: ReplayBuffer) -> None:
    """Let room that was never written cost no memory: a 2 MB page would be taken whole for its first byte."""
    if is_portable():  # none were asked for
        return
    rows = buffer.inner_storage.rows  # type: ignore[attr-defined]
    if rows.layout.row_nbytes <= _PAGE:
        return
    mapping = rows.segment().mapping
    whole = mapping.view(0, mapping.nbytes)
    libc = ctypes.CDLL(None, use_errno=True)
    # A wish, as the one for large pages was: a kernel that knows neither refuses both.
    libc.madvise(ctypes.c_void_p(whole.ctypes.data), ctypes.c_size_t(whole.nbytes), _MADV_NOHUGEPAGE)


def item_plan(items: ItemSpace, layout: Layout) -> _core.ItemPlan:
    """Where the parts of a packed item go in a stored row of this layout."""
    if not items.is_trajectory:
        whole = [(0, 0, layout.row_nbytes)]
        return _core.ItemPlan(layout.row_nbytes, [], 0, whole, layout.row_nbytes, 0, 0)
    places = stored_places(layout)
    step, fields = items.rows.layout, items.fields.layout if items.fields else None

    def moves(sources: Any, targets: tuple[int, ...]) -> list[tuple[int, int, int]]:
        return [
            (f.offset, layout.fields[to].offset, f.nbytes) for f, to in zip(sources, targets, strict=True)
        ]

    return _core.ItemPlan(
        layout.row_nbytes, moves(step.fields, places.steps), step.row_nbytes,
        moves(fields.fields if fields else (), places.fields), fields.row_nbytes if fields else 0,
        layout.fields[places.length].offset, items.max_length,
    )  # fmt: skip


def _as_points(values: Any, n: int) -> Array:
    array = np.asarray(values, np.float64)
    return array.reshape(n, prod(array.shape[1:]))


class Store:
    """Puts packed items into a buffer and says where each went.

    Ownership: owns the buffer's contents, not the buffer. Concurrency: one thread at a time; readers of the buffer
    are free.
    """

    def __init__(self, items: ItemSpace, buffer: ReplayBuffer, diversity: Diversity | None) -> None:
        self.items, self.buffer, self.diversity = items, buffer, diversity
        self.capacity = int(buffer.capacity or 0)
        self.layout = buffer.storage.layout if not items.is_trajectory else buffer.inner_storage.rows.layout  # type: ignore[attr-defined]
        self._native: Any = buffer.engine.native
        self._lowest: Any = buffer.engine if buffer.engine.turns_away else None
        self._whole = packed_codec(self.layout.row_nbytes)
        self._codecs: dict[int, _core.Codec] = {}
        if items.is_trajectory:
            use_small_pages(buffer)
            self._places = stored_places(self.layout)
        self._plan = item_plan(items, self.layout)
        self.ranking = Ranking(self.capacity) if items.has_log_reward else None
        self._weights: tuple[Array, Array] | None = None
        self._mirror()

    def __len__(self) -> int:
        return len(self.buffer)

    def _mirror(self) -> None:
        if self.ranking is not None:
            rows = self.rows()
            values = np.asarray(self.buffer.get_column_at((LOG_REWARD,), np.arange(len(rows))), np.float64)
            self.ranking.rebuild(rows, values)
        self._weights = None

    def rows(self) -> Array:
        """The row of each index, oldest first."""
        return np.asarray((self.buffer.offset + np.arange(len(self.buffer))) % self.capacity)

    # -- in

    def add(self, packed: PackedItems) -> Placement:
        """Keep what may be kept."""
        outcome = Placement(np.zeros(packed.n, bool), np.full(packed.n, -1))
        allowed = self._allowed(packed, outcome)
        if self.diversity is not None and self.diversity.cutoff >= 0:
            self._add_diverse(packed, allowed, outcome)
        else:
            self._place(packed, allowed, outcome)
        self._weights = None
        return outcome

    def _allowed(self, packed: PackedItems, outcome: Placement) -> Array:
        def refuse(reason: str, n: int) -> None:
            outcome.rejected[reason] += n

        allowed = storable(packed, self.items.max_length, refuse)
        return np.arange(packed.n) if allowed is None else np.flatnonzero(allowed)

    def _place(self, packed: PackedItems, index: Array, outcome: Placement) -> None:
        """Write items in order; note where each is, and which of them a later one displaced."""
        if not len(index):
            return
        rewards = packed.log_rewards
        if rewards is not None:
            rewards = rewards[index]
        if self._lowest is not None and rewards is not None:
            rows, _, evicted, too_low = self._lowest.place(self._plan, *self._parts(packed), index, rewards)
            outcome.rejected["too_low"] += too_low
            outcome.evicted += evicted
        else:
            held = len(self.buffer)
            rows = self._append(packed, index)
            outcome.evicted += len(index) - (len(self.buffer) - held)
        kept = rows >= 0
        outcome.kept[index] = kept
        outcome.row[index] = np.maximum(rows, -1)
        if self.ranking is not None and rewards is not None:
            self.ranking.set(rows[kept], rewards[kept])

    def _parts(self, packed: PackedItems) -> tuple[Array | None, Array | None, Array | None]:
        """Steps, lengths and fields; a sample is a row of fields."""
        if self.items.is_trajectory:
            return packed.rows, packed.lengths, packed.fields
        return None, None, packed.rows

    def _append(self, packed: PackedItems, index: Array) -> Array:
        """Into the ring, in order; -2 for what a later one displaced."""
        if self.items.is_trajectory:
            return self._plan.place_newest(self._native, *self._parts(packed), index)
        (_, cursor, _), *_ = self._native.windows()
        for first in range(0, len(index), max(1, self.capacity // 2)):
            part = np.ascontiguousarray(packed.rows[index[first : first + max(1, self.capacity // 2)]])
            self._native.write(self._whole, [part], len(part), -1, None, False)
        rows = np.asarray((cursor + np.arange(len(index))) % self.capacity)
        rows[: max(0, len(index) - self.capacity)] = -2
        return rows

    def _codec(self, length: int) -> _core.Codec:
        """The way into and out of a stored row of which only the first `length` steps are touched."""
        codec = self._codecs.get(length)
        if codec is None:
            fields = [
                (f.offset, f.dtype, (length, *f.shape[1:]) if i in self._places.steps else f.shape, False)
                for i, f in enumerate(self.layout.fields)
            ]
            codec = self._codecs[length] = _core.Codec(fields, None, self.layout.row_nbytes)
        return codec

    # -- diversity

    def _add_diverse(self, packed: PackedItems, index: Array, outcome: Placement) -> None:
        """Best first; one too close to a better or equal one stays out, worse ones close to it leave."""
        rule = self.diversity
        if rule is None:
            return
        points = self._points(packed)
        bad = ~np.isfinite(points[index]).all(axis=1)
        outcome.rejected["bad_value"] += int(bad.sum())
        index = index[~bad]
        rewards = packed.log_rewards if packed.log_rewards is not None else np.zeros(packed.n)
        order = index[np.argsort(-rewards[index], kind="stable")]
        kept_points = self._kept_points()
        kept_rewards = self.log_rewards()
        winners, gone = crowding(points[order], rewards[order], kept_points, kept_rewards, rule)
        outcome.rejected["too_close"] += int(len(order) - winners.sum())
        if len(gone):
            self.buffer.remove_at(gone)
            outcome.removed += len(gone)
            self._mirror()
        self._place(packed, order[winners], outcome)

    def _points(self, packed: PackedItems) -> Array:
        rule = self.diversity
        if rule is None:
            return np.empty((packed.n, 0))
        block = self.items.decode_fields(packed) if self.items.is_trajectory else self.items.decode(packed)
        for key in rule.key.split("/"):
            block = block[key]
        return _as_points(block, packed.n)

    def _kept_points(self) -> Array:
        rule, n = self.diversity, len(self.buffer)
        if rule is None:
            return np.empty((n, 0))
        found = self.buffer.get_column_at(tuple(rule.key.split("/")), np.arange(n))
        return _as_points(found, n)

    def log_rewards(self) -> Array:
        """The log reward of each index, zeros if items have none."""
        n = len(self.buffer)
        return self.ranking.values[self.rows()] if self.ranking is not None else np.zeros(n)

    # -- out

    def draw(self, n: int, by: str, replace: bool, stream: IndexStream) -> Array:
        """Choose the indices of n items; EmptyError if none can be drawn."""
        if by == "uniform":
            size = len(self)
            _check_drawable(n, size, replace)
            return stream.indices(size, n) if replace else stream.choice(size, n)
        if self.ranking is None:
            raise ValueError("by: 'log_reward' needs items that have one; draw uniformly")
        index, mass = self.weights()
        _check_drawable(n, len(index), replace)
        if replace:
            at = np.searchsorted(mass, stream.uniform(n) * (mass[-1] if n else 1.0), side="right")
            return index[np.minimum(at, len(index) - 1)]
        # The largest of log weight + Gumbel noise are a draw without replacement, one after the other.
        weight = self.log_rewards()[index]
        uniform = np.maximum(stream.uniform(len(index)), np.finfo(float).tiny)
        return index[np.argsort(np.log(-np.log(uniform)) - weight, kind="stable")[:n]]

    def read(self, index: Array, most_nbytes: int | None = None) -> PackedItems:
        """The items at these indices, packed; BudgetError, before any is read, if they have more than `most_nbytes`."""
        index = np.ascontiguousarray(index, np.int64)
        if not self.items.is_trajectory:
            _check_most(len(index), self.items.shapes.row_nbytes, most_nbytes)
            rows = np.asarray(self._native.read(self._whole, index, False, None))
            return PackedItems(len(index), rows, log_rewards=None)
        number = self._places.length
        f = self.layout.fields[number]
        only = _core.Codec([(f.offset, f.dtype, f.shape, False)], None, self.layout.row_nbytes)
        width = int(np.max(self._native.read(only, index, False, None)[0], initial=1))
        shapes = self.items.shapes
        _check_most(len(index), width * shapes.row_nbytes + shapes.field_nbytes, most_nbytes)
        return self.items.from_stored(
            self.layout, list(self._native.read(self._codec(width), index, False, None))
        )

    def weights(self) -> tuple[Array, Array]:
        """The indices that can be drawn by reward, and the running sum of their exp(log_reward)."""
        if self._weights is None:
            values = self.log_rewards()
            index = np.flatnonzero(np.isfinite(values))
            mass = np.exp(values[index] - values[index].max(initial=-np.inf)) if len(index) else np.empty(0)
            self._weights = (index, np.cumsum(mass))
        return self._weights


def _check_most(n: int, nbytes: int, most: int | None) -> None:
    if most is not None and n * nbytes > most:
        raise BudgetError(
            f"n: {n} items must have at most {human_nbytes(most)} together, got {human_nbytes(n * nbytes)} (each as "
            "long as the longest); draw fewer at a time"
        )


def _check_drawable(n: int, size: int, replace: bool) -> None:
    if n and not size:
        raise EmptyError("sample: nothing can be drawn, the buffer holds no such item; add some first")
    if not replace and n > size:
        raise ValueError(
            f"n: must be at most {size} without replacement, got {n}; draw with replacement or fewer"
        )
