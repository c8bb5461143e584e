"""The seam inside a ReplayBuffer: what a ring of samples must be able to do, whatever it is made of.

`RowsEngine` is the ring of the native rows (memory, shared, memmap); `replay/plain.py` has the one over any other
storage, `replay/lowest.py` the one that evicts the lowest instead of the oldest. Data here is always numpy.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

import numpy as np

from recollect import _core
from recollect.batch.boundaries import Ask, Found
from recollect.batch.structure import leaf_paths, pick, select
from recollect.errors import LaneBusyError, SegmentOpenError
from recollect.replay.limiter import RateLimiter
from recollect.storage.contract import SpaceStorage
from recollect.storage.rows.base import RowStorage, encode_at

Ints = np.ndarray[Any, np.dtype[np.int64]]
Keys = tuple[str | int, ...]
Segments = list[tuple[int, int]]

OPEN = (
    "extend: a block without `ends` is a whole segment, got one while a segment is open; call mark_segment_end() "
    "first, or pass `ends` to go on with the open one"
)
REFUSED = (ValueError, SegmentOpenError)  # a write that raises one of these counts as rejected


class Engine(Protocol):
    """A ring of samples with segments; indices count from the oldest and are already normalised."""

    storage: Any
    tracked: bool

    @property
    def offset(self) -> int: ...
    def count(self) -> int: ...
    def read(self, index: int | Ints, keys: Keys = (), out: Any = None, **counted: int) -> Any: ...
    def draw(self, stream: Any, n: int, keys: Keys = ()) -> Any: ...
    def read_located(self, row: Ints, generation: Ints, keys: Keys = ()) -> Any: ...
    def append(self, value: Any) -> None: ...
    def extend(self, value: Any, ends: Any = None) -> None: ...
    def extend_part(self, value: Any, closes: bool) -> None: ...
    def overwrite(self, index: int | Ints, value: Any) -> None: ...
    def remove(self, index: Ints) -> None: ...
    def check_overwrite(self, index: int | Ints, value: Any) -> None: ...
    def check_remove(self, index: Ints) -> None: ...
    def clear(self) -> None: ...
    def end_segment(self) -> None: ...
    def open_segment(self) -> tuple[int, int] | None: ...
    def has_open_segment(self) -> bool: ...
    def segments(self) -> Segments | None: ...
    def locate(self, index: Ints, **counted: int) -> tuple[Ints, Ints, Ints, Ints]: ...
    def index_of(self, row: Ints, generation: Ints) -> Ints: ...
    def counters(self) -> dict[str, int]: ...
    def reject(self, n: int) -> None: ...


class RowsEngine:
    """The ring of packed rows; one native call per operation, lanes and processes included."""

    def __init__(self, storage: RowStorage, tracked: bool, lane: int = -1) -> None:
        self.storage, self.tracked, self.lane = storage, tracked, lane
        self.native, self.codec, self.layout = storage.rows.native, storage.codec, storage.layout
        self._is_fixed = self.layout.is_fixed
        # Without segments a row must not open one, even where the storage keeps them: it is written as a block.
        self._leaves_open = tracked or not storage.rows.geometry.tagged
        self._append = self.native.append if self._leaves_open else _write_as_block
        self._copying = False

    @property
    def offset(self) -> int:
        (low, _, _), *_ = self.native.windows()
        capacity = self.storage.capacity
        return int(low) if capacity is None else int(low % (capacity // self.storage.rows.geometry.n_lanes))

    def count(self) -> int:
        return int(self.native.count())

    def adopt(
        self, count: int, offset: int, segments: list[tuple[int, int]], active: tuple[int, int] | None
    ) -> None:
        """Take over rows that hold `count` samples from row `offset` on; what cannot be is a ValueError."""
        lanes = self.storage.rows.geometry.n_lanes
        whole = [*segments, *([active] if active else [])]
        check_adoption(self.storage, lanes, count, offset, whole, self.tracked)
        if (
            active and self.native.claim() != 0
        ):  # the caller's own lane, so that its next append goes on with it
            raise LaneBusyError(
                "active_segment_start_physical: lane 0 is taken; adopt the storage before others write"
            )
        self.native.set_window(0, offset, offset + count)
        for number, (first, length) in enumerate(whole):
            self.native.set_tags(first, length, number * lanes + 1, 0)
        self.native.set_segment_counter(len(whole))
        self.native.set_open(0, (len(whole) - 1) * lanes + 1 if active else 0)

    # -- reads

    def read(self, index: int | Ints, keys: Keys = (), out: Any = None, **counted: int) -> Any:
        layout, codec = self.storage.column(keys) if keys else (self.layout, self.codec)
        single = isinstance(index, int)
        rows = np.array([index]) if isinstance(index, int) else np.ascontiguousarray(index)
        data = self.native.read(codec, rows, single, out, **counted)
        if layout.is_fixed:
            return data
        return layout.decode_one(data) if single else layout.decode_batch(data, len(rows))

    def draw(self, stream: Any, n: int, keys: Keys = (), out: Any = None) -> Any:
        layout, codec = self.storage.column(keys) if keys else (self.layout, self.codec)
        data = self.native.draw(codec, stream, n, out)
        return data if data is None or layout.is_fixed else layout.decode_batch(data, n)

    def read_located(self, row: Ints, generation: Ints, keys: Keys = ()) -> Any:
        """Samples by (row, generation), or None if any of them is gone."""
        layout, codec = self.storage.column(keys) if keys else (self.layout, self.codec)
        row = np.ascontiguousarray(row)
        data = _core.read_located(self.native, codec, row, np.ascontiguousarray(generation))
        return data if data is None or layout.is_fixed else layout.decode_batch(data, len(row))

    def read_frames(
        self, ask: Ask, keys: Keys = (), index: Ints | None = None, **counted: int
    ) -> Found | None:
        """Samples with their neighbours, by index, by place or drawn: one native call."""
        layout, codec = self.storage.column(keys) if keys else (self.layout, self.codec)
        offsets, tracked, stream = ask.offsets, self.tracked, ask.stream
        found: Found | None
        if stream is not None:
            found = _core.draw_frames(
                self.native, codec, stream.key, stream.counter, ask.n, offsets, tracked,
                ask.wanted.length, ask.wanted.pad, ask.labelled,
            )  # fmt: skip
            stream.counter += ask.n
        elif ask.place is not None:
            place = np.ascontiguousarray(ask.place.row), np.ascontiguousarray(ask.place.generation)
            found = _core.read_frames(self.native, codec, *place, offsets, tracked)
        else:
            at = np.ascontiguousarray(index)
            found = _core.read_frames(self.native, codec, at, None, offsets, tracked, **counted)
        if found is None or layout.is_fixed:
            return found
        data, valid, *rest = found
        return layout.decode_batch(data, valid.size), valid, *rest

    # -- writes

    def append(self, value: Any) -> None:
        if not self._append(self.codec, value, self.lane):
            arrays = [a[None] for a in self.layout.encode_one(value, self.storage.cast)]
            self.native.write(self.codec, arrays, 1, self.lane, None, self._leaves_open)

    def extend(self, value: Any, ends: Any = None) -> None:
        flags = checked_ends(ends, self.tracked)
        self._write(value, flags, keep_open=flags is not None, check=flags is None)

    def extend_part(self, value: Any, closes: bool) -> None:
        if not self.tracked:
            return self._write(value, None, keep_open=False, check=False)
        self._write(value, None, keep_open=not closes, check=not self._copying)
        self._copying = not closes
        if closes:
            self.end_segment()  # an empty block writes nothing, and ends it all the same
        return None

    def _write(self, value: Any, ends: Any, *, keep_open: bool, check: bool) -> None:
        if check and self.tracked and self.native.has_open(self.native.claim(self.lane)):
            raise SegmentOpenError(OPEN)
        done = self.native.extend(self.codec, value, self.lane, ends, keep_open) if self._is_fixed else -1
        if done < 0:
            n, arrays = self.layout.encode_batch(value, self.storage.cast)
            self.native.write(self.codec, arrays, n, self.lane, ends, keep_open)

    def extend_lanes(self, value: Any, lanes: Ints, ends: Any = None, rows: Ints | None = None) -> None:
        """Append sample i (or `rows[i]`) to lane `lanes[i]`, in one native call; `ends` closes segments after it."""
        ends = checked_ends(ends, self.tracked)
        if ends is None and not self._leaves_open:
            ends = np.ones(len(lanes), bool)
        if self._is_fixed and self.native.extend_lanes(self.codec, value, lanes, ends, rows):
            return
        if rows is not None:
            value = select(self.layout.space, value, rows)
        n, arrays = self.layout.encode_batch(value, self.storage.cast)
        if n != len(lanes):
            raise ValueError(f"lanes: must have one number per sample, {n}, got {len(lanes)}")
        self.native.write_lanes(self.codec, arrays, lanes, ends)

    def extend_chosen(self, value: Any, rows: Ints) -> bool:
        """Add the samples `rows` of a block of exact arrays; False (nothing done) if it needs more than that."""
        return (
            self._is_fixed
            and not self.tracked
            and self.native.extend_chosen(self.codec, value, rows, self.lane)
        )

    def overwrite(self, index: int | Ints, value: Any) -> None:
        self.native.overwrite(self.codec, *encode_at(self.layout, index, value, self.storage.cast))

    def remove(self, index: Ints) -> None:
        self.native.remove(np.unique(index))

    def check_overwrite(self, index: int | Ints, value: Any) -> None:
        """Raise what `overwrite` would, and change nothing."""
        at, _ = encode_at(self.layout, index, value, self.storage.cast)
        self._check_lanes(at)

    def check_remove(self, index: Ints) -> None:
        """Raise what `remove` would, and change nothing."""
        for lane in self._check_lanes(index):
            start, end, _ = self.native.open_segment(lane) or (0, 0, 0)
            if ((index >= start) & (index < end)).any():
                raise SegmentOpenError(
                    "a sample of the open segment cannot be removed; call mark_segment_end() first"
                )

    def _check_lanes(self, index: Ints) -> list[int]:
        """The lanes of these samples; LaneBusyError if one belongs to another live process."""
        rows, *_ = self.native.locate(np.ascontiguousarray(index))
        capacity, n_lanes = self.storage.capacity, self.storage.rows.geometry.n_lanes
        lanes: list[int] = np.unique(rows // (capacity // n_lanes)).tolist() if capacity else [0]
        for lane in lanes:
            owner = self.native.owner(lane)
            if owner not in (0, _core.own_word()):
                holder = _core.describe_process(owner)
                raise LaneBusyError(f"lane {lane} is taken: held by {holder}; let that process change it")
        return lanes

    def clear(self) -> None:
        self.native.clear()

    # -- segments

    def _held_lane(self) -> int:
        return self.lane if self.lane >= 0 else int(self.native.held_lane())

    def end_segment(self) -> None:
        lane = self._held_lane()
        if lane >= 0 and self.tracked:
            self.native.end_segment(lane)

    def open_segment(self) -> tuple[int, int] | None:
        lane = self._held_lane()
        found = self.native.open_segment(lane) if lane >= 0 and self.tracked else None
        return None if found is None else (found[0], found[1])

    def has_open_segment(self) -> bool:
        return self.tracked and self.storage.has_open_segment

    def segments(self) -> Segments | None:
        if not self.tracked:
            return None
        _, _, starts, lengths, _, _ = self.native.segments()
        return list(zip(starts.tolist(), (starts + lengths).tolist()))

    # -- places and counts

    def locate(self, index: Ints, **counted: int) -> tuple[Ints, Ints, Ints, Ints]:
        row, generation, segment, step = self.native.locate(np.ascontiguousarray(index), **counted)
        if not self.tracked:
            segment, step = np.full_like(row, -1), np.full_like(row, -1)
        return row, generation, segment, step

    def index_of(self, row: Ints, generation: Ints) -> Ints:
        found: Ints = self.native.index_of(np.ascontiguousarray(row), np.ascontiguousarray(generation))
        return found

    def counters(self) -> dict[str, int]:
        return dict(self.native.counters())

    def reject(self, n: int) -> None:
        self.native.reject(n)


def _write_as_block(codec: Any, value: Any, lane: int) -> bool:
    return False


def writers(
    engine: Engine, limiter: RateLimiter | None, *, turns_away: bool = False
) -> list[Callable[..., Any]]:
    """`append`, `extend` and `extend_part` of an engine, which wait for its limiter if there is one.

    Chosen once, so that a buffer without one pays nothing.
    """
    if limiter is None:
        return [engine.append, engine.extend, engine.extend_part]
    storage = engine.storage

    def many(value: Any) -> int:
        return n_offered(storage, value)

    return [
        limiter.around_write(engine.append, lambda value: 1, turns_away),
        limiter.around_write(engine.extend, many, turns_away),
        limiter.around_write(engine.extend_part, many, turns_away),
    ]


def n_offered(storage: SpaceStorage, value: Any) -> int:
    """How many samples a refused block held, by the first leaf that has a length; one if none has."""
    for path, _ in leaf_paths(storage.single_instance_space):
        with suppress(TypeError, KeyError, IndexError):
            return len(pick(value, path))
    return 1


def checked_ends(ends: Any, tracked: bool) -> Any:
    """The flags as an array, or None; ValueError for what cannot end segments."""
    if ends is None:
        return None
    if not tracked:
        raise ValueError("ends: this buffer keeps no segments; create it with maintain_segment_metadata=True")
    flags = np.asarray(ends)
    if flags.dtype != bool or flags.ndim != 1:
        raise ValueError(f"ends: must be a 1-D bool array, got {flags.dtype} of shape {flags.shape}")
    return np.ascontiguousarray(flags)


def check_adoption(storage: SpaceStorage, lanes: int, count: int, offset: int, segments: list[tuple[int, int]],
                   tracked: bool) -> None:  # fmt: skip
    """Raise ValueError for a count, offset or segments that no ring over this storage could have."""
    run = None if storage.capacity is None else storage.capacity // lanes
    most = len(storage) if run is None else run
    if not 0 <= count <= most:
        raise ValueError(f"count: must be in [0, {most}], the rows there are, got {count}")
    if not 0 <= offset < (run or 1):
        raise ValueError(f"offset: must be a row of the ring (0 when unbounded), got {offset}")
    if segments and not tracked:
        raise ValueError("physical_segments: need maintain_segment_metadata=True")
    expected = 0
    for first, length in segments:
        at = offset + expected if run is None else (offset + expected) % run
        if length < 1 or first != at or expected + length > count:
            found = (first, length)
            raise ValueError(
                f"physical_segments: must follow each other within the {count} samples, got {found}"
            )
        expected += length
    if tracked and expected != count:
        raise ValueError(f"physical_segments: must cover the {count} samples, got {expected}")
