"""The ring of packed rows: memory, shared memory and memmap."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np

from recollect import _core
from recollect.batch.base import BatchBase
from recollect.batch.boundaries import Ask, Boundaries, Found, RowBoundaries
from recollect.batch.structure import select
from recollect.errors import ClosedError, LaneBusyError, SegmentOpenError
from recollect.memory.rows import LIMITER_AT, packed_codec
from recollect.replay.engines.base import OPEN, Engine, Ints, Keys, Segments, check_adoption, checked_ends
from recollect.storage.dump import DumpWriter
from recollect.storage.rows.base import RowStorage, encode_at
from recollect.storage.rows.dump import write_rows


class RowsEngine(Engine):
    """The ring of packed rows; one native call per operation, lanes and processes included."""

    storage: RowStorage
    has_lanes = True
    shares_writes = True

    def __init__(self, storage: RowStorage, tracked: bool, lane: int = -1) -> None:
        self.storage, self.tracked, self.lane = storage, tracked, lane
        self.native, self.codec, self.layout = storage.rows.native, storage.codec, storage.layout
        self._is_fixed = self.layout.is_fixed
        # Without segments a row must not open one, even where the storage keeps them: it is written as a block.
        self._leaves_open = tracked or not storage.rows.geometry.tagged
        self._append = self.native.append if self._leaves_open else _write_as_block
        self._copying = False
        self.n_lanes = storage.rows.geometry.n_lanes
        # Without segments a run would go on from one lane to the next.
        self.has_runs = tracked or self.n_lanes == 1

    @property
    def offset(self) -> int:
        (low, _, _), *_ = self.native.windows()
        capacity = self.storage.capacity
        return int(low) if capacity is None else int(low % (capacity // self.n_lanes))

    def count(self) -> int:
        return int(self.native.count())

    def adopt(
        self, count: int, offset: int, segments: list[tuple[int, int]], active: tuple[int, int] | None
    ) -> None:
        lanes = self.n_lanes
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

    def check_open(self) -> None:
        self.storage.rows.check_open()

    # -- reads

    def read(self, index: int | Ints, keys: Keys = (), out: Any = None, **counted: int) -> Any:
        layout, codec = self.storage.column(keys) if keys else (self.layout, self.codec)
        single = isinstance(index, int)
        rows = np.array([index]) if isinstance(index, int) else np.ascontiguousarray(index)
        data = self.native.read(codec, rows, single, out, **counted)
        if layout.is_fixed:
            return data
        return layout.decode_one(data) if single else layout.decode_batch(data, len(rows))

    def read_into(self, index: int | Ints, out: Any, **counted: int) -> Any:
        if self._is_fixed and not isinstance(index, int):
            return self.read(index, (), out, **counted)
        return super().read_into(index, out, **counted)

    def read_packed(self, index: int | Ints, out: Any, **counted: int) -> Any:
        codec = packed_codec(self.layout.row_nbytes)
        if not isinstance(index, int):
            return self.native.read(codec, np.ascontiguousarray(index), False, out, **counted)
        row = np.array([index])
        if out is None:
            return self.native.read(codec, row, True, None, **counted)
        self.native.read(codec, row, False, np.asarray(out)[None], **counted)
        return out

    def draw_into(self, stream: Any, n: int, out: Any) -> Any:
        return self.draw(stream, n, (), out) if self._is_fixed else super().draw_into(stream, n, out)

    def bound_draw(self) -> Callable[[Any, int], Any]:
        return partial(self.native.draw, self.codec) if self._is_fixed else self.draw

    def drawn_rows(self) -> tuple[Any, Any] | None:
        return (self.native, self.codec) if self._is_fixed else None

    def boundaries(self, batch: BatchBase) -> Boundaries:
        return RowBoundaries(batch, self.native, self.tracked) if self.has_runs else super().boundaries(batch)

    def draw(self, stream: Any, n: int, keys: Keys = (), out: Any = None) -> Any:
        layout, codec = self.storage.column(keys) if keys else (self.layout, self.codec)
        data = self.native.draw(codec, stream, n, out)
        return data if data is None or layout.is_fixed else layout.decode_batch(data, n)

    def read_located(self, row: Ints, generation: Ints, keys: Keys = ()) -> Any:
        layout, codec = self.storage.column(keys) if keys else (self.layout, self.codec)
        row = np.ascontiguousarray(row)
        data = _core.read_located(self.native, codec, row, np.ascontiguousarray(generation))
        return data if data is None or layout.is_fixed else layout.decode_batch(data, len(row))

    def read_frames(
        self, ask: Ask, keys: Keys = (), index: Ints | None = None, **counted: int
    ) -> Found | None:
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
        return (
            self._is_fixed
            and not self.tracked
            and self.native.extend_chosen(self.codec, value, rows, self.lane)
        )

    def claimed(self, lane: int) -> RowsEngine:
        found = RowsEngine(self.storage, self.tracked, lane)
        self.native.claim(lane)
        return found

    def release(self) -> None:
        with suppress(ClosedError):  # with the buffer the lane was given up too
            self.native.release(self.lane)

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
        capacity, n_lanes = self.storage.capacity, self.n_lanes
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

    def own_counters(self) -> Callable[[], dict[str, int]]:
        counters: Callable[[], dict[str, int]] = self.native.counters
        return counters

    def limiter_words(self) -> tuple[Any, int]:
        return self.storage.rows.header, LIMITER_AT

    # -- disk and the end

    def dump(self, writer: DumpWriter) -> dict[str, Any]:
        record = self.storage.record(write_rows(writer, self.storage.rows))
        return record if self.tracked else {**record, "segments": None}

    def close_for_all(self) -> None:
        self.storage.rows.close_for_all()


def _write_as_block(codec: Any, value: Any, lane: int) -> bool:
    return False
