"""The ring over any storage: positions, segments and generations in Python, one process, one lock.

For storages that are not packed rows (files, wrappers, those of users). Positions count for ever; position p is in
row p mod capacity, and [low, cursor) are the live ones.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

from recollect.errors import ReadOnlyError, SegmentOpenError
from recollect.replay.engine import Ints, Keys, Segments, check_adoption, checked_ends
from recollect.spaces import space_to_json
from recollect.storage.base import SpaceStorage
from recollect.storage.dump import DumpWriter
from recollect.storage.rows import encode_at


class PlainEngine:
    """A ring of samples over a storage of any kind.

    Ownership: the storage is the buffer's.
    Concurrency: threads of one process take turns.
    """

    def __init__(self, storage: SpaceStorage, tracked: bool, state: dict[str, Any] | None) -> None:
        self.storage, self.tracked, self.layout = storage, tracked, storage.layout
        self._lock = threading.RLock()
        self._low = self._cursor = 0
        self._segments: list[list[int]] = []  # [id, first position, end position, step of the first]
        self._open = self._copying = False  # whether the last of them is open
        self._next_id = 1
        self._generations = np.zeros(storage.capacity or 0, np.int64)
        self._doors = {"evicted": 0, "removed": 0, "rejected": 0, "offered": 0}
        if state is not None:
            self._restore(state)

    # -- what it holds

    @property
    def offset(self) -> int:
        return self._low % self.storage.capacity if self.storage.capacity else self._low

    def count(self) -> int:
        return self._cursor - self._low

    def _rows(self, positions: Ints) -> Ints:
        return positions % self.storage.capacity if self.storage.capacity else positions

    def adopt(
        self, count: int, offset: int, segments: list[tuple[int, int]], active: tuple[int, int] | None
    ) -> None:
        """Take over rows that hold `count` samples from row `offset` on."""
        whole = [*segments, *([active] if active else [])]
        check_adoption(self.storage, 1, count, offset, whole, self.tracked)
        self._place(count, offset, [(i + 1, length, 0) for i, (_, length) in enumerate(whole)])
        self._open = active is not None

    def _restore(self, state: dict[str, Any]) -> None:
        found = [(ident, length, clipped) for ident, _, _, length, clipped in state["segments"] or ()]
        self._place(state["count"], state["offset"], found)
        self._next_id = max(self._next_id, state.get("segment_counter", 0) + 1)

    def _place(self, count: int, offset: int, segments: list[tuple[int, int, int]]) -> None:
        self._low, self._cursor = offset, offset + count
        self._doors["offered"] = count
        at = offset
        for ident, length, step in segments:
            self._segments.append([ident, at, at + length, step])
            at += length
        self._next_id = 1 + max((s[0] for s in self._segments), default=0)
        self._renew(np.arange(self._low, self._cursor))

    # -- reads

    def read(self, index: int | Ints, keys: Keys = (), out: Any = None, **counted: int) -> Any:
        with self._lock:
            self._check(index)
            rows = self._rows(self._low + np.asarray(index))
            at: Any = int(rows) if isinstance(index, int) else rows
            return self.storage.get_column(keys, at) if keys else self.storage.get(at)

    def _check(self, index: Any) -> None:
        n, found = self.count(), np.atleast_1d(index)
        if found.size and (found.min() < 0 or found.max() >= n):
            raise IndexError(f"index: must be in [0, {n}), got {int(found.max())}")

    def draw(self, key: int, counter: int, n: int, keys: Keys = (), out: Any = None) -> Any:
        from recollect import _core

        with self._lock:
            held = self.count()
            return self.read(_core.draw_indices(key, counter, held, n), keys) if held else None

    # -- writes

    def append(self, value: Any) -> None:
        self._check_mutable()
        arrays = self.layout.encode_one(value)
        with self._lock:
            self._put(self.layout.decode_batch([a[None] for a in arrays], 1), 1)
            self._tag(1, None, keep_open=True)

    def extend(self, value: Any, ends: Any = None) -> None:
        self._extend(value, checked_ends(ends, self.tracked), keep_open=False, check=True)

    def extend_part(self, value: Any, closes: bool) -> None:
        self._extend(value, None, keep_open=not closes, check=not self._copying)
        self._copying = self.tracked and not closes
        if closes:
            self.end_segment()

    def _extend(self, value: Any, ends: Any, *, keep_open: bool, check: bool) -> None:
        self._check_mutable()
        with self._lock:
            if check and self._open:
                raise SegmentOpenError("extend: a segment is open; call mark_segment_end() first, or append")
            n, arrays = self.layout.encode_batch(value)
            if ends is not None and len(ends) != n:
                raise ValueError(f"ends: must have one flag per sample, {n}, got {len(ends)}")
            if n == 0:
                return
            skip = max(0, n - self.storage.capacity) if self.storage.capacity else 0
            if self.storage.capacity and n >= self.storage.capacity:  # only the newest stay, from row 0 on
                self._restart(skip)
            self._doors["offered"] += skip
            self._put(self.layout.decode_batch([a[skip:] for a in arrays], n - skip), n - skip)
            self._tag(n, ends, keep_open=keep_open)

    def _restart(self, skip: int = 0) -> None:
        """Empty the ring and go to row 0; an open segment goes on `skip` positions before it."""
        capacity = self.storage.capacity or 1
        self._low = self._cursor = -(-self._cursor // capacity) * capacity
        self._segments = self._segments[-1:] if self._open else []
        for segment in self._segments:
            shift = self._cursor - skip - segment[2]
            segment[1] += shift
            segment[2] += shift

    def _check_mutable(self) -> None:
        if not self.storage.is_mutable:
            raise ReadOnlyError(
                f"{type(self.storage).__name__}: was opened for reading; load it with read_only=False"
            )

    def _put(self, block: Any, n: int) -> None:
        at = np.arange(self._cursor, self._cursor + n)
        if self.storage.capacity is None:
            self.storage.extend_length(n)
        try:
            self.storage.set(self._rows(at), block)
        except BaseException:
            if self.storage.capacity is None:
                self.storage.shrink_length(n)
            raise
        self._renew(at)
        self._cursor += n
        self._doors["offered"] += n
        if self.storage.capacity:
            self._low = max(self._low, self._cursor - self.storage.capacity)

    def _renew(self, positions: Ints) -> None:
        rows = self._rows(positions)
        short = int(rows.max(initial=-1)) + 1 - len(self._generations)
        if short > 0:
            self._generations = np.pad(self._generations, (0, max(short, len(self._generations))))
        self._generations[rows] += 1

    def _tag(self, n: int, ends: Any, *, keep_open: bool) -> None:
        if not self.tracked:
            return
        first = self._cursor - n
        cuts = [] if ends is None else (np.flatnonzero(ends) + 1).tolist()
        if n not in cuts:
            cuts.append(n)
        start = first
        for cut in cuts:
            if self._open:
                self._segments[-1][2] = first + cut
            else:
                self._segments.append([self._next_id, start, first + cut, 0])
                self._next_id += 1
            start, self._open = first + cut, False
        self._open = keep_open and (ends is None or not bool(ends[-1]))
        self._clip()  # not before: an open segment may have lost all its samples but the new ones

    def _clip(self) -> None:
        while self._segments and self._segments[0][2] <= self._low:
            self._segments.pop(0)
        if self._segments and self._segments[0][1] < self._low:
            oldest = self._segments[0]
            oldest[3] += self._low - oldest[1]
            oldest[1] = self._low

    def overwrite(self, index: int | Ints, value: Any) -> None:
        at, arrays = encode_at(self.layout, index, value, False)
        with self._lock:
            self._check(at)
            self.storage.set(self._rows(self._low + at), self.layout.decode_batch(arrays, len(at)))
            self._renew(np.unique(self._low + at))

    def remove(self, index: Ints) -> None:
        gone = np.unique(index)
        if not len(gone):
            return
        with self._lock:
            self._check(gone)
            first, last = int(gone[0]), int(gone[-1])
            if self._open and last + self._low >= self._segments[-1][1]:
                raise SegmentOpenError(
                    "a sample of the open segment cannot be removed; call mark_segment_end() first"
                )
            # The newer move down, or in a ring the older up, whichever are fewer.
            up = self.storage.capacity is not None and last + 1 < self.count() - first
            keep = np.setdiff1d(np.arange(0, last + 1) if up else np.arange(first, self.count()), gone)
            to = self._low + np.arange(len(keep)) + (len(gone) if up else first)
            if len(keep):
                self.storage.set(self._rows(to), self.read(keep))
                self._renew(to)
            self._cut(gone, len(gone) if up else 0)
            if up:
                self._low += len(gone)
            else:
                self._cursor -= len(gone)
            self._doors["removed"] += len(gone)
            if self.storage.capacity is None:
                self.storage.shrink_length(len(gone))

    def _cut(self, gone: Ints, up: int) -> None:
        """Shrink, split and move segments for the removal of these indices; `up` is how far the older move."""
        kept: list[list[int]] = []
        removed = gone + self._low
        for ident, start, end, step in self._segments:
            inside = removed[(removed >= start) & (removed < end)]
            alive = np.setdiff1d(np.arange(start, end), inside)
            parts = np.split(alive, np.flatnonzero(np.diff(alive) > 1) + 1) if len(alive) else ()
            for number, part in enumerate(parts):  # the first keeps the id
                shift = int(np.searchsorted(removed, part[0])) - up
                kept.append([self._take_id() if number else ident, int(part[0]) - shift, int(part[-1]) + 1 - shift,
                             step + int(part[0]) - start])  # fmt: skip
        self._segments = kept

    def _take_id(self) -> int:
        self._next_id += 1
        return self._next_id - 1

    def clear(self) -> None:
        with self._lock:
            self._doors["removed"] += self.count()
            self._segments, self._open = [], False
            self.storage.clear()
            self._restart() if self.storage.capacity else self._empty()

    def _empty(self) -> None:
        self._low = self._cursor = 0

    # -- segments

    def end_segment(self) -> None:
        with self._lock:
            self._open = False
            self.storage.mark_segment_end()

    def open_segment(self) -> tuple[int, int] | None:
        with self._lock:
            if not self._open:
                return None
            return self._segments[-1][1] - self._low, self._segments[-1][2] - self._low

    def has_open_segment(self) -> bool:
        return self._open or self.storage.has_open_segment

    def segments(self) -> Segments | None:
        with self._lock:
            if not self.tracked:
                return self.storage.get_segments()
            closed = self._segments[:-1] if self._open else self._segments
            return [(start - self._low, end - self._low) for _, start, end, _ in closed]

    # -- places and counts

    def locate(self, index: Ints, **counted: int) -> tuple[Ints, Ints, Ints, Ints]:
        with self._lock:
            self._check(index)
            at = self._low + index
            rows = self._rows(at)
            segment = np.full(len(at), -1, np.int64)
            step = np.full(len(at), -1, np.int64)
            if self.tracked and self._segments:
                bounds = np.array(self._segments)
                number = np.searchsorted(bounds[:, 1], at, side="right") - 1
                segment, step = bounds[number, 0], bounds[number, 3] + at - bounds[number, 1]
            return rows, self._generations[rows], segment, step

    def index_of(self, row: Ints, generation: Ints) -> Ints:
        with self._lock:
            index = (row - self._low) % self.storage.capacity if self.storage.capacity else row - self._low
            fits = (row >= 0) & (row < len(self._generations)) & (index >= 0) & (index < self.count())
            fits[fits] = self._generations[row[fits]] == generation[fits]
            return np.where(fits, index, -1).astype(np.int64)

    def counters(self) -> dict[str, int]:
        d, live = self._doors, self.count()
        evicted = d["offered"] - live - d["removed"]
        return {"offered": d["offered"] + d["rejected"], "live": live, "evicted": evicted, "removed": d["removed"],
                "rejected": d["rejected"], "dropped": 0}  # fmt: skip

    def reject(self, n: int) -> None:
        with self._lock:
            self._doors["rejected"] += n

    # -- disk

    def dump(self, writer: DumpWriter) -> dict[str, Any]:
        """Let the storage write itself below `storage/`, under a name of this commit; return the manifest's part."""
        with self._lock:
            name = f"part-{writer.commit}"
            place = writer.path / "storage" / name
            self.storage.dumps(place)
            files = [place] if place.is_file() else sorted(f for f in place.rglob("*") if f.is_file())
            for file in files:
                writer.adopt(str(file.relative_to(writer.path / "storage")))
            capacity, count = self.storage.capacity, self.count()
            return {
                "storage": {"name": self.storage.short_name, "options": {}, "children": {}},
                "storage_path_relative": f"storage/{name}",
                "space": space_to_json(self.storage.single_instance_space),
                "max_lengths": dict(self.layout.max_lengths),
                "layout_hash": self.layout.hash,
                "count": count,
                "offset": self.offset,
                "capacity": capacity,
                "lanes": [{"start": 0, "capacity": capacity, "count": count, "offset": self.offset}],
                "segments": self._segment_records(),
                "segment_counter": self._next_id - 1,
                "live": False,
            }

    def _segment_records(self) -> list[list[int]] | None:
        if not self.tracked:
            return None
        firsts = self._rows(np.array([start for _, start, _, _ in self._segments], np.int64)).tolist()
        return [[s[0], 0, first, s[2] - s[1], s[3]] for s, first in zip(self._segments, firsts)]
