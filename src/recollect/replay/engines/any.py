"""The ring over any storage: positions, segments and generations in Python, one process, one lock.

For storages that are not packed rows (files, wrappers, those of users). Positions count for ever; position p is in
row p mod capacity, and [low, cursor) are the live ones.

A change takes several steps, and Ctrl-C may come between any two. Before the first of them `_unfinished` says how to
take the change back, or how to complete it; the last step forgets that. Whatever is called next, should it find
something unfinished, does so first.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import numpy as np

from recollect import interrupts
from recollect.batch.structure import select
from recollect.budget import check_fits
from recollect.errors import FormatError, LaneBusyError, ReadOnlyError, SchemaError, SegmentOpenError
from recollect.replay.engines.base import OPEN, Engine, Ints, Keys, Segments, check_adoption, checked_ends
from recollect.storage.contract import SpaceStorage
from recollect.storage.dump import DumpWriter
from recollect.storage.filed.commits import commits_of, manifest_of, save

# What an epoch reads at a time: so little that it is still in the cache when it is handed out.
AHEAD_NBYTES = 1 << 19


class AnyEngine(Engine):
    """A ring of samples over a storage of any kind.

    Ownership: the storage is the buffer's.
    Concurrency: threads of one process take turns.
    """

    def __init__(self, storage: SpaceStorage, tracked: bool, state: dict[str, Any] | None) -> None:
        self.storage, self.tracked = storage, tracked
        self._lock = threading.RLock()
        self._low = self._cursor = 0
        # [id, first position, end position, step of the first], each replaced, never changed
        self._segments: list[list[int]] = []
        self._open = self._copying = False  # whether the last of them is open
        self._next_id = 1
        capacity = storage.capacity or 0
        if capacity > 1 << 16:
            check_fits(8 * capacity, "capacity", "choose a smaller one, or the file is damaged")
        self._generations = np.zeros(capacity, np.int64)
        self._renewals = 0
        self._extra: dict[str, Any] = {}
        self._unfinished: Callable[[], None] | None = None
        self._doors = {"evicted": 0, "removed": 0, "rejected": 0, "offered": 0}
        if state is not None:
            self._restore(state)

    # -- what it holds

    @property
    def offset(self) -> int:
        return self._low % self.storage.capacity if self.storage.capacity else self._low

    @property
    def moves(self) -> bool:
        return bool(self.storage.is_mutable)  # what was opened for reading stays as it is

    @property
    def moment(self) -> tuple[int, int, int]:
        """Equal as long as no sample has come, gone or changed."""
        with self._lock:
            return self._low, self._cursor, self._renewals

    def count(self) -> int:
        return self._held() - int(self.storage.pending_segment_length)

    def _held(self) -> int:
        """The samples there are, those of an open segment that cannot be read yet included."""
        self._follow()
        return self._cursor - self._low

    def _follow(self) -> None:
        """Forget the samples of an open segment that the storage was told to drop (`abort_segment`)."""
        self._mend()
        if not self.storage.is_cut_by_segment:
            return
        with self._lock:
            gone = self._cursor - len(self.storage) - self.storage.pending_segment_length
            if gone > 0:
                self._cursor -= gone
                self._doors["removed"] += gone
                if self._open:
                    self._segments.pop()
                self._open = self._copying = False

    def _mend(self) -> None:
        """Take back, or complete, what an interrupt left unfinished."""
        if self._unfinished is None:
            return
        with self._lock:  # unless another thread is at it
            if self._is_busy():
                raise LaneBusyError(
                    f"{type(self.storage).__name__}: a write of this thread is under way, got a call in the midst of "
                    "it; let a signal handler set a flag, and call after the write"
                )
            self._finish()

    def _finish(self) -> None:
        if self._unfinished is not None:
            self._unfinished()
            self._unfinished = None

    def _is_busy(self) -> bool:
        """Whether a write runs further up this thread's stack: then a signal handler calls."""
        is_begun = self._unfinished is not None
        return is_begun and interrupts.is_running(self, AnyEngine._add, AnyEngine._complete)

    def _complete(self, change: Callable[[], None]) -> None:
        """Make a change that can be made again from its start."""
        self._unfinished = change
        try:
            change()
        except Exception:
            self._unfinished = None
            raise
        self._unfinished = None

    def _rows(self, positions: Ints) -> Ints:
        return positions % self.storage.capacity if self.storage.capacity else positions

    def adopt(
        self, count: int, offset: int, segments: list[tuple[int, int]], active: tuple[int, int] | None
    ) -> None:
        whole = [*segments, *([active] if active else [])]
        check_adoption(self.storage, 1, count, offset, whole, self.tracked)
        self._place(count, offset, [(i + 1, length, 0) for i, (_, length) in enumerate(whole)])
        self._open = active is not None

    def _restore(self, state: dict[str, Any]) -> None:
        found = [(ident, length, clipped) for ident, _, _, length, clipped in state["segments"] or ()]
        count, offset, most = state["count"], state["offset"], self.storage.capacity
        if (offset >= most or count > most) if most else offset + count > len(self.storage):
            raise FormatError(
                f"manifest: {count} samples from row {offset} on are not in {len(self.storage)} rows"
            )
        if sum(length for _, length, _ in found) > count:
            raise FormatError(
                f"manifest: segments must have at most the {count} samples there are; it is damaged"
            )
        self._place(count, offset, found)
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
        n, found = self.count(), np.atleast_1d(np.asarray(index, np.int64))
        if found.size and int(found.view(np.uint64).max()) >= n:  # as unsigned, negatives are huge
            raise IndexError(f"index: must be in [0, {n}), got {int(found.max())}")

    def draw(self, stream: Any, n: int, keys: Keys = (), out: Any = None) -> Any:
        with self._lock:
            held = self.count()
            return self.read(stream.indices(held, n), keys) if held else None

    # -- writes

    def append(self, value: Any) -> None:
        self._check_mutable()
        with self._lock:
            self._follow()
            block = self.storage.checked_one(value)
            self._add(block, 1, None, keep_open=True)

    def extend(self, value: Any, ends: Any = None) -> None:
        flags = checked_ends(ends, self.tracked)
        self._extend(value, flags, keep_open=flags is not None, check=flags is None)

    def extend_part(self, value: Any, closes: bool) -> None:
        self._extend(value, None, keep_open=not closes, check=not self._copying)
        self._copying = self._keeps_open() and not closes
        if closes and self.has_open_segment():  # an empty block writes nothing, and ends it all the same
            self.end_segment()

    def _keeps_open(self) -> bool:
        return self.tracked or self.storage.is_cut_by_segment

    def _extend(self, value: Any, ends: Any, *, keep_open: bool, check: bool) -> None:
        self._check_mutable()
        with self._lock:
            if self.has_open_segment() and check:
                raise SegmentOpenError(OPEN)
            n, block = self.storage.checked_batch(value)
            if ends is not None and len(ends) != n:
                raise ValueError(f"ends: must have one flag per sample, {n}, got {len(ends)}")
            if n == 0:
                return
            self._add(block, n, ends, keep_open)

    def _add(self, block: Any, n: int, ends: Any, keep_open: bool) -> None:
        """Write samples, and make the commit that they bring about; if it fails they are taken back."""
        with self._uninterrupted():
            self._unfinished = self._taking_back(n)
            try:
                self._write(block, n, ends, keep_open)
                self.storage.settle()
            except Exception:
                if self.storage.capacity is None:
                    self._finish()
                self._unfinished = None  # of a ring the storage has kept what the write would have displaced
                raise
            self._unfinished = None

    def _uninterrupted(self) -> AbstractContextManager[None]:
        """A ring cannot be put back, so there signals wait until what was written is counted."""
        return nullcontext() if self.storage.capacity is None else interrupts.deferred(*interrupts.ASKING)

    def _write(self, block: Any, n: int, ends: Any, keep_open: bool) -> None:
        capacity, space = self.storage.capacity, self.storage.single_instance_space
        skip = max(0, n - capacity) if capacity else 0
        if capacity and n >= capacity:  # only the newest stay, from row 0 on
            self._restart(skip)
            block = select(space, block, np.arange(skip, n)) if skip else block
        self._doors["offered"] += skip
        first = 0
        left = n - skip
        keep_open = keep_open and (ends is None or not bool(ends[-1]))
        for cut in self._parts(ends, n, skip, keep_open):
            part = block if cut - first == left else select(space, block, np.arange(first, cut))
            self._put(part, cut - first)
            first = cut
            if self._keeps_open() and not (keep_open and cut == left):
                self.storage.mark_segment_end()
        self._tag(n, ends, keep_open=keep_open)

    def _parts(self, ends: Any, n: int, skip: int, keep_open: bool) -> list[int]:
        """Where the rows to write are cut, so that the storage is told of segments that end among them."""
        cuts = _cuts(
            ends, n
        )  # a storage that is cut by segments has no capacity, so nothing is skipped there
        if self.storage.is_cut_by_segment:
            return cuts
        ended = cuts[-2] - skip if keep_open and len(cuts) > 1 else 0
        return [ended, n - skip] if ended > 0 else [n - skip]

    def _taking_back(self, n: int) -> Callable[[], None]:
        """What takes back a write of `n` samples; in a ring what it displaced is gone."""
        capacity = self.storage.capacity
        low = (
            self._low if capacity is None else min(self._cursor, max(self._low, self._cursor + n - capacity))
        )
        before = low, self._cursor, self._next_id, self._open, self._copying, dict(self._doors)
        last = self._segments[-1:]

        def take_back() -> None:
            self._low, self._cursor, self._next_id, self._open, self._copying, self._doors = before
            while self._segments and self._segments[-1][0] >= self._next_id:
                self._segments.pop()
            if self._segments and last and self._segments[-1][0] == last[0][0]:
                self._segments[-1] = last[0]
            self._clip()
            if self._open and not self._segments:  # all its samples are gone, but it goes on
                self._segments = [[last[0][0], low, low, last[0][3] + low - last[0][1]]]
            if capacity is None:
                self.storage.cut_to(self._cursor)

        return take_back

    def _restart(self, skip: int = 0) -> None:
        """Empty the ring and go to row 0; an open segment goes on `skip` positions before it."""
        capacity = self.storage.capacity or 1
        self._low = self._cursor = -(-self._cursor // capacity) * capacity
        ident, start, end, step = self._segments[-1] if self._open else (0, 0, 0, 0)
        shift = self._cursor - skip - end
        self._segments = [[ident, start + shift, end + shift, step]] if self._open else []

    def _check_mutable(self) -> None:
        if not self.storage.is_mutable:
            raise ReadOnlyError(
                f"{type(self.storage).__name__}: was opened for reading; load it with read_only=False"
            )

    def _put(self, block: Any, n: int) -> None:
        at = np.arange(self._cursor, self._cursor + n)
        if self.storage.capacity is None:
            self.storage.extend_length(n)
        self.storage.set(self._rows(at), block)
        self._renew(at)
        self._cursor += n
        self._doors["offered"] += n
        if self.storage.capacity:
            self._low = max(self._low, self._cursor - self.storage.capacity)

    def _renew(self, positions: Ints) -> None:
        self._renewals += 1
        rows = self._rows(positions)
        short = int(rows.max(initial=-1)) + 1 - len(self._generations)
        if short > 0:
            self._generations = np.pad(self._generations, (0, max(short, len(self._generations))))
        self._generations[rows] += 1

    def _tag(self, n: int, ends: Any, *, keep_open: bool) -> None:
        if not self.tracked:
            return
        first = self._cursor - n
        start = first
        for cut in _cuts(ends, n):
            if self._open:
                self._segments[-1] = [*self._segments[-1][:2], first + cut, self._segments[-1][3]]
            else:
                self._segments.append([self._next_id, start, first + cut, 0])
                self._next_id += 1
            start, self._open = first + cut, False
        self._open = keep_open
        self._clip()  # not before: an open segment may have lost all its samples but the new ones

    def _clip(self) -> None:
        while self._segments and self._segments[0][2] <= self._low:
            self._segments.pop(0)
        if self._segments and self._segments[0][1] < self._low:
            ident, start, end, step = self._segments[0]
            self._segments[0] = [ident, self._low, end, step + self._low - start]

    def overwrite(self, index: int | Ints, value: Any) -> None:
        at = np.atleast_1d(index)
        with self._lock:
            block = self.check_overwrite(index, value)
            self._complete(partial(self._overwrite, self._low + at, block))

    def _overwrite(self, at: Ints, block: Any) -> None:
        self.storage.set(self._rows(at), block)
        self._renew(np.unique(at))
        self.storage.settle()

    def check_overwrite(self, index: int | Ints, value: Any) -> Any:
        """Raise what `overwrite` would, and change nothing; return the value as a block."""
        self._refuse_to_change("set_at")
        with self._lock:
            self._check(index)
        if isinstance(index, int):
            return self.storage.checked_one(value)
        n, block = self.storage.checked_batch(value)
        if n != len(index):
            raise SchemaError(
                f"value: length must equal the index's {len(index)}, got {n}; give one sample each"
            )
        return block

    def check_remove(self, index: Ints) -> None:
        """Raise what `remove` would, and change nothing."""
        self._refuse_to_change("remove_at")
        with self._lock:
            self._check(index)
            if self._open and int(index.max(initial=-1)) + self._low >= self._segments[-1][1]:
                raise SegmentOpenError(
                    "a sample of the open segment cannot be removed; call mark_segment_end() first"
                )

    def remove(self, index: Ints) -> None:
        gone = np.unique(index)
        with self._lock:
            self.check_remove(gone)
            if not len(gone):
                return
            first, last = int(gone[0]), int(gone[-1])
            # The newer move down, or in a ring the older up, whichever are fewer.
            up = self.storage.capacity is not None and last + 1 < self.count() - first
            keep = np.setdiff1d(np.arange(0, last + 1) if up else np.arange(first, self.count()), gone)
            to = self._low + np.arange(len(keep)) + (len(gone) if up else first)
            moved = self.read(keep) if len(keep) else None
            self._complete(partial(self._remove, to, moved, self._without(gone, len(gone) if up else 0, up)))

    def _remove(self, to: Ints, moved: Any, after: tuple[Any, ...]) -> None:
        if moved is not None:
            self.storage.set(self._rows(to), moved)
            self._renew(to)
        self._segments, self._low, self._cursor, self._next_id, self._doors = after
        if self.storage.capacity is None:
            self.storage.cut_to(self._cursor)
        self.storage.settle()

    def _without(self, gone: Ints, shift: int, up: bool) -> tuple[Any, ...]:
        """Segments, ends, the next id and the counters after the removal of these indices."""
        n = len(gone)
        segments, next_id = self._cut(gone, shift)
        doors = {**self._doors, "removed": self._doors["removed"] + n}
        return segments, self._low + n * up, self._cursor - n * (not up), next_id, doors

    def truncate(self, length: int) -> None:
        # Of an append-only storage too.
        with self._lock:
            gone = np.arange(length, self.count())
            if not len(gone):
                return
            if self._open or self.storage.capacity is not None:
                raise SegmentOpenError("truncate: must be of an unbounded storage with no open segment")
            self._complete(partial(self._remove, gone, None, self._without(gone, 0, up=False)))
            self.storage.flush()

    def _refuse_to_change(self, verb: str) -> None:
        if self.storage.is_append_only:
            raise ReadOnlyError(
                f"{type(self.storage).__name__}: only grows, got {verb}(); "
                "copy what you keep into a new buffer with extend_from(buf.get_slice(keep))"
            )

    def _cut(self, gone: Ints, up: int) -> tuple[list[list[int]], int]:
        """Segments shrunk, split and moved for the removal of these indices, and the next id.

        `up` is how far the older move.
        """
        kept: list[list[int]] = []
        next_id = self._next_id
        removed = gone + self._low
        for ident, start, end, step in self._segments:
            inside = removed[(removed >= start) & (removed < end)]
            alive = np.setdiff1d(np.arange(start, end), inside)
            parts = np.split(alive, np.flatnonzero(np.diff(alive) > 1) + 1) if len(alive) else ()
            for number, part in enumerate(parts):  # the first keeps the id
                shift = int(np.searchsorted(removed, part[0])) - up
                kept.append([next_id if number else ident, int(part[0]) - shift, int(part[-1]) + 1 - shift,
                             step + int(part[0]) - start])  # fmt: skip
                next_id += bool(number)
        return kept, next_id

    def clear(self) -> None:
        with self._lock:
            doors = {**self._doors, "removed": self._doors["removed"] + self._held()}
            capacity = self.storage.capacity
            at = -(-self._cursor // capacity) * capacity if capacity else 0
            self._complete(partial(self._clear, at, doors))

    def _clear(self, at: int, doors: dict[str, int]) -> None:
        # First the storage, which may refuse. What it has dropped before an interrupt, it drops again.
        self.storage.clear()
        self._segments, self._open, self._doors, self._low, self._cursor = [], False, doors, at, at

    # -- segments

    def end_segment(self) -> None:
        with self._lock:
            self._follow()
            self._complete(self._end_segment)

    def _end_segment(self) -> None:
        self.storage.mark_segment_end()  # first: if it fails, the segment stays open
        self._open = self._copying = False
        self.storage.settle()

    def open_segment(self) -> tuple[int, int] | None:
        with self._lock:
            self._follow()
            if not self._open:
                return None
            return self._segments[-1][1] - self._low, self._segments[-1][2] - self._low

    def has_open_segment(self) -> bool:
        self._follow()
        return self._open or self.storage.has_open_segment

    def segments(self) -> Segments | None:
        with self._lock:
            self._follow()
            if not self.tracked:
                known = self.storage.get_segments()  # video knows them; such a storage never goes round
                return known or (None if self.count() else known)
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
        d, live = self._doors, self._held()
        evicted = d["offered"] - live - d["removed"]
        return {"offered": d["offered"] + d["rejected"], "live": live, "evicted": evicted, "removed": d["removed"],
                "rejected": d["rejected"], "dropped": 0}  # fmt: skip

    def reject(self, n: int) -> None:
        with self._lock:
            self._doors["rejected"] += n

    # -- disk

    def go_live(self, extra: dict[str, Any]) -> None:
        """Put counters and segments, and `extra`, into every commit of a storage that has a directory."""
        commits = commits_of(self.storage)
        if commits is not None and commits.directory.is_writable:
            self._extra = extra
            commits.owner, commits.mend, commits.is_busy = self.record, self._mend, self._is_busy

    def handle_state(self) -> dict[str, Any] | None:
        return self.record()

    def dump(self, writer: DumpWriter) -> dict[str, Any]:
        with self._lock:
            commits = commits_of(self.storage)
            if commits is not None:
                commits.commit()
            base = save(self.storage, writer)
            return {**manifest_of(self.storage, self.record), "storage_path_relative": base}

    def record(self, stored: int | None = None) -> dict[str, Any]:
        """What a manifest says of the ring, of an unbounded one as far as `stored` rows go."""
        capacity, count = self.storage.capacity, self._cursor - self._low
        if capacity is None and stored is not None:
            count = min(count, max(0, stored - self._low))
        return {
            "count": count,
            "offset": self.offset,
            "lanes": [{"start": 0, "capacity": capacity, "count": count, "offset": self.offset}],
            "segments": self._segment_records(self._low + count),
            "segment_counter": self._next_id - 1,
            **self._extra,
        }

    def _segment_records(self, end: int) -> list[list[int]] | None:
        if not self.tracked:
            return None
        found = [s for s in self._segments if s[1] < end]
        firsts = self._rows(np.array([s[1] for s in found], np.int64)).tolist()
        return [[s[0], 0, first, min(s[2], end) - s[1], s[3]] for s, first in zip(found, firsts)]

    # -- chunks

    def chunks(self) -> tuple[Ints, int] | None:
        with self._lock:
            ends = self.storage.chunk_ends()
            if ends is None:
                return None
            if self.storage.capacity is None:  # rows are positions
                sizes = np.diff(ends, prepend=0)
                chunk = np.repeat(np.arange(len(ends)), sizes)[self._low : self._low + self.count()]
            else:
                rows = self._rows(np.arange(self._low, self._low + self.count()))
                chunk = np.searchsorted(ends, rows, side="right")
            return chunk, self.storage.chunk_window()

    def expect(self, index: Ints, keys: Keys = ()) -> None:
        with self._lock:
            self.storage.expect(self._rows(self._low + index[index < self.count()]), keys)

    def reads_ahead(self) -> int:
        if self.storage.chunk_ends() is None:
            return 0
        return AHEAD_NBYTES // max(1, int(self.storage.layout.row_nbytes))

    def read_located(self, row: Ints, generation: Ints, keys: Keys = ()) -> Any:
        with self._lock:
            if not self._are_current(row, generation):
                return None
            return self.storage.get_column(keys, row) if keys else self.storage.get(row)

    def _are_current(self, row: Ints, generation: Ints) -> bool:
        if self.storage.capacity is None and self._low == 0 and len(row):  # rows are positions
            first, last = int(row.min()), int(row.max())
            return 0 <= first <= last < self.count() and bool(
                (self._generations.take(row) == generation).all()
            )
        return bool((self.index_of(row, generation) >= 0).all())


def _cuts(ends: Any, n: int) -> list[int]:
    """After which samples of a block a segment ends, the last one included."""
    cuts: list[int] = [] if ends is None else (np.flatnonzero(ends) + 1).tolist()
    return cuts if cuts and cuts[-1] == n else [*cuts, n]
