"""ChunkCache: decoded chunks of a file in one slab, so that scattered rows are gathered by one copy per column.

Files of columns are read a chunk at a time (a Parquet piece, HDF5 rows, frames of a video). A chunk has a slot in the
slab; the least recently used gives up its own. Rows of any chunks that are held are one `take` per column. Whoever
knows which chunks come next (a shuffled epoch) says so, and they are decoded beside the reads of those that are held.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import numpy as np

from recollect import interrupts
from recollect.budget import check_fits
from recollect.errors import BudgetError, FormatError
from recollect.files.record import brief
from recollect.spaces import Layout
from recollect.storage.filed.columns import widened

Array = np.ndarray[Any, Any]
Ints = np.ndarray[Any, np.dtype[np.int64]]
CACHE_NBYTES = 64 << 20
MOST_CHUNKS = 1 << 26
"""The most that a file may be cut into: each has a place in a table, whatever it holds."""
Load = Callable[[int], tuple[Layout, list[Array]]]


def check_chunks(n_chunks: int, where: str) -> None:
    """Raise FormatError for more chunks than any file has, and BudgetError if memory has no room for their table.

    A file may declare any number of rows and hold none of them.
    """
    if n_chunks > MOST_CHUNKS:
        raise FormatError(f"{where}: must have at most {MOST_CHUNKS} chunks, got {n_chunks}; it is damaged")
    if n_chunks > 1 << 16:
        check_fits(32 * n_chunks, f"{where}: {n_chunks} chunks", "free memory", when=" to be read")


def check_sizes(sizes: Sequence[int], where: str) -> None:
    """Raise FormatError for numbers of rows, as a file says them, that cannot be added up."""
    if min(sizes, default=0) < 0 or sum(sizes) >= 1 << 62:
        raise FormatError(f"{where}: cannot have {brief(sizes)} rows; it is damaged")


def chunk_ends(ends: Ints, rows: int, where: str) -> Ints:
    """Where chunks of at most so many rows end, which begin anew in each run of rows that ends at one of `ends`."""
    starts = np.concatenate([[0], ends[:-1]]) if len(ends) else ends
    check_chunks(int(np.sum(-((starts - ends) // rows))), where)
    parts = [np.append(np.arange(a + rows, b, rows), b) for a, b in zip(starts, ends) if b > a]
    return np.concatenate(parts).astype(np.int64) if parts else np.zeros(0, np.int64)


class ChunkCache:
    """The chunks read last; `load(number)` decodes one, and may be called by several threads at once.

    Ownership: what `gather` returns is the caller's own.
    Concurrency: the storage's lock is held around every call.
    """

    def __init__(
        self, layout: Layout, rows: int, nbytes: int, load: Load, workers: int | None = None
    ) -> None:
        """Hold chunks of at most `rows` rows in about `nbytes`, but at least two of them."""
        self.layout, self.rows, self._load = layout, max(1, rows), load
        row_nbytes = sum(field.nbytes for field in layout.fields)
        self.n_slots = min(4096, max(2, nbytes // max(1, self.rows * row_nbytes)))
        self._workers = min(4, os.cpu_count() or 1) if workers is None else workers
        self._pool: ThreadPoolExecutor | None = None
        self._pid = 0
        self.decoded = 0  # chunks read since it was made
        self._coming: dict[int, Future[int]] = {}  # by slot: chunks that threads are decoding into it
        self.clear()

    def clear(self) -> None:
        """Forget all chunks."""
        for slot in list(self._coming):
            self._give_up(slot)
        self._slab: list[Array] | None = None
        self._slot = np.full(0, -1, np.int64)  # by chunk
        self._chunk = np.full(self.n_slots, -1, np.int64)  # by slot
        self._is_coming = np.zeros(self.n_slots, np.bool_)  # by slot
        self._used = np.zeros(self.n_slots, np.int64)  # when, by slot
        self._now = 0

    def forget_from(self, chunk: int) -> None:
        """Forget a chunk and all that follow; their numbers may mean other rows from now on."""
        held = self._chunk >= chunk
        self._slot[chunk:] = -1  # first: from here on they are read anew
        for slot in [slot for slot in self._coming if held[slot]]:
            self._give_up(slot)
        self._chunk[held] = -1
        self._used[held] = 0

    def gather(self, ends: Ints, rows: Ints) -> tuple[Layout, list[Array]]:
        """Copy rows out; chunk k holds the rows from `ends[k - 1]` up to `ends[k]`."""
        self._know(len(ends))
        chunk, within = self._chunks_of(ends, rows)
        slot = self._slot[chunk]
        if (slot < 0).any():
            needed = np.unique(chunk)
            if len(needed) > self.n_slots:
                return self._gather_in_parts(ends, rows, chunk, needed)
            self._fetch(needed)
            slot = self._slot[chunk]
        if self._coming and self._is_coming[slot].any():
            slot = self._arrived(chunk, slot)
        self._now += 1
        self._used[slot] = self._now
        slab = self._slab or [np.empty((0, *f.shape), f.dtype) for f in self.layout.fields]
        at = slot * self.rows + within
        return self.layout, [column.take(at, axis=0) for column in slab]

    def expect(self, ends: Ints, rows: Ints) -> None:
        """Begin to decode the chunks of these rows, which are all that is read soon; nothing is waited for."""
        if self.layout.max_lengths or self._workers < 2:
            return
        self._know(len(ends))
        needed = np.unique(self._chunks_of(ends, rows)[0])
        if len(needed) > self.n_slots:
            return  # they would push out one another
        if self._slab is None:
            self._make_slab()
        missing, free = self._room_for(needed)
        for number, slot in zip(missing, free):
            self._hold(number, slot)
            with interrupts.deferred(*interrupts.ASKING):
                self._coming[slot] = self._threads().submit(self._decode, number, slot)
            self._is_coming[slot] = True

    def _arrived(self, chunk: Ints, slot: Ints) -> Ints:
        """Wait for those of the chunks that are being decoded; raise what is wrong with one of them."""
        for coming in np.unique(slot[self._is_coming[slot]]).tolist():
            if self._pid != os.getpid():  # a forked child: its parent's threads decode for the parent only
                self._give_up(coming)
                continue
            try:
                self._coming[coming].result()
            except BaseException:
                self._give_up(coming)
                raise
            del self._coming[coming]
            self._is_coming[coming] = False
        if (self._slot[chunk] < 0).any():
            self._fetch(np.unique(chunk))
        return self._slot[chunk]

    def _give_up(self, slot: int) -> None:
        """Free a slot that a thread may be writing to."""
        future = self._coming.pop(slot)
        self._is_coming[slot] = False
        if self._pid == os.getpid() and not future.cancel():
            future.exception()  # waits: the slot must not change any more
        self._drop(slot)
        self._used[slot] = 0

    def _know(self, n_chunks: int) -> None:
        if len(self._slot) < n_chunks:
            self._slot = np.concatenate([self._slot, np.full(n_chunks - len(self._slot), -1, np.int64)])

    def _chunks_of(self, ends: Ints, rows: Ints) -> tuple[Ints, Ints]:
        """The chunk of each row, and the row within it."""
        if (
            len(ends) < 2 or ends[-2] == (len(ends) - 1) * self.rows
        ):  # all are full but the last: the usual case
            chunk = rows // self.rows
            return chunk, rows - chunk * self.rows
        chunk = np.searchsorted(ends, rows, side="right")
        return chunk, rows - np.where(chunk > 0, ends[chunk - 1], 0)

    def _gather_in_parts(
        self, ends: Ints, rows: Ints, chunk: Ints, needed: Ints
    ) -> tuple[Layout, list[Array]]:
        """Gather from more chunks than are held at once."""
        parts: list[tuple[Ints, list[Array]]] = []
        layout = self.layout
        for first in range(0, len(needed), self.n_slots):
            some = needed[first : first + self.n_slots]
            at = np.flatnonzero((chunk >= some[0]) & (chunk <= some[-1]))
            layout, columns = self.gather(ends, rows[at])
            parts.append((at, columns))
        out = []
        for i, field in enumerate(layout.fields):
            whole = np.zeros((len(rows), *field.shape), field.dtype)
            for at, columns in parts:
                whole[at] = widened(columns[i], field.shape)
            out.append(whole)
        return layout, out

    def _fetch(self, needed: Ints) -> None:
        """Decode the chunks that are missing, several at a time, into the slots used longest ago."""
        missing, free = self._room_for(needed)
        # The first, and those that may have other widths, one by one; the others side by side, right into their slots.
        alone = len(missing) if self.layout.max_lengths else int(self._slab is None)
        for number, slot in zip(missing[:alone], free):
            self._store(number, slot, *self._load(number))
        for number, slot in zip(missing[alone:], self._run(missing[alone:], free[alone:])):
            self._hold(number, slot)

    def _room_for(self, needed: Ints) -> tuple[list[int], list[int]]:
        """Those of some chunks that are not held, and as many slots, used longest ago, taken back from others."""
        self._now += 1
        held = self._slot[needed]
        self._used[held[held >= 0]] = self._now
        missing: list[int] = needed[held < 0].tolist()
        free: list[int] = np.argsort(self._used, kind="stable")[: len(missing)].tolist()
        for slot in free:
            if slot in self._coming:
                self._give_up(slot)
            self._drop(slot)
        return missing, free

    def _run(self, numbers: list[int], slots: list[int]) -> Any:
        if len(numbers) < 2 or self._workers < 2:
            return map(self._decode, numbers, slots)
        # All of them, also when one fails or a signal comes: no slot may be written to any more. And Python's own locks
        # of a pool are not made for an exception of a handler.
        with interrupts.deferred(*interrupts.ASKING):
            coming = [self._threads().submit(self._decode, n, slot) for n, slot in zip(numbers, slots)]
            wait(coming)
        return [future.result() for future in coming]

    def _threads(self) -> ThreadPoolExecutor:
        if self._pool is None or self._pid != os.getpid():  # a forked child has none of its parent's threads
            for slot in list(self._coming):
                self._give_up(slot)
            self._pool, self._pid = ThreadPoolExecutor(self._workers, "recollect-chunks"), os.getpid()
        return self._pool

    def _decode(self, number: int, slot: int) -> int:
        self._copy(slot, self._load(number)[1])
        return slot

    def _copy(self, slot: int, columns: list[Array]) -> None:
        start = slot * self.rows
        for mine, given in zip(self._slab or (), columns):
            mine[start : start + len(given)] = given

    def _drop(self, slot: int) -> None:
        old = self._chunk[slot]
        if old >= 0:
            self._slot[old] = self._chunk[slot] = -1

    def _hold(self, number: int, slot: int) -> None:
        self.decoded += 1
        self._chunk[slot], self._slot[number], self._used[slot] = number, slot, self._now

    def _store(self, number: int, slot: int, layout: Layout, columns: list[Array]) -> None:
        if self._slab is None:
            self.layout = layout
            self._make_slab()
        elif layout.hash != self.layout.hash:
            self.layout, columns = self._joined(layout, columns)
        self._copy(slot, columns)
        self._hold(number, slot)

    def _make_slab(self) -> None:
        n = self.n_slots * self.rows
        try:
            self._slab = [np.empty((n, *f.shape), f.dtype) for f in self.layout.fields]
        except (MemoryError, ValueError) as error:  # more than memory, or than an array, can have
            raise BudgetError(
                f"chunks: {n} rows of {self.layout.row_nbytes} bytes cannot be held ({error}); make pieces smaller, "
                "or they are damaged"
            ) from None

    def _joined(self, layout: Layout, columns: list[Array]) -> tuple[Layout, list[Array]]:
        """Widen the slab and a chunk to the longer of their Sequences."""
        from recollect.storage.filed.columns import wide_layout

        most = {k: max(v, layout.max_lengths[k]) for k, v in self.layout.max_lengths.items()}
        both = wide_layout(layout.space, most)
        self._slab = [widened(a, f.shape) for a, f in zip(self._slab or (), both.fields)]
        return both, [widened(a, f.shape) for a, f in zip(columns, both.fields)]

    def update(self, ends: Ints, rows: Ints, columns: list[Array]) -> None:
        """Write rows through to the chunks that are held."""
        if self._slab is None:
            return
        chunk, within = self._chunks_of(ends, rows)
        slot = np.full(len(rows), -1, np.int64)
        known = chunk < len(self._slot)
        slot[known] = self._slot[chunk[known]]
        held = np.flatnonzero(slot >= 0)
        at = slot[held] * self.rows + within[held]
        for mine, given in zip(self._slab, columns):
            mine[at] = given[held]

    def close(self) -> None:
        """End the threads and free the slab."""
        pool, self._pool = self._pool, None
        if pool is not None and self._pid == os.getpid():
            pool.shutdown(cancel_futures=True)
        self.clear()
