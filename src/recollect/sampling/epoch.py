"""Epoch: every sample that exists at its start once, in a random order, resumable anywhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Any

import numpy as np

from recollect.batch.base import BatchBase
from recollect.batch.boundaries import CONTENTION_S, drawn
from recollect.batch.location import Ints
from recollect.batch.structure import portioner
from recollect.batch.walk import Found, Walk
from recollect.errors import ContentionError
from recollect.sampling.stream import IndexStream

Windows = Sequence[tuple[int, Ints]]


class Epoch:
    """One pass over what a batch holds; samples overwritten before their turn are skipped and counted.

    Ownership: holds the order (8 B a sample) and, over a ring, rows and generations (16 B more); no data.
    """

    def __init__(self, walk: Walk, windows: Windows = ()) -> None:
        """Begin at the first position of a walk; `windows` says what to tell its batch, and where."""
        self._walk = walk
        self._windows = list(windows)[::-1]
        self._position = 0
        self._ahead = walk.batch._reads_ahead() if walk.is_still else 0
        self._block: _Block | None = None
        self.skipped = 0
        self.taken = 0  # how many the last batch has

    @classmethod
    def start(cls, batch: BatchBase, stream: IndexStream) -> Epoch:
        """Fix what `batch` holds now, in a fresh permutation."""
        walk = drawn(batch, lambda size: Walk.start(batch))
        runs = _runs(batch, walk.order, stream)
        windows = () if runs is None else runs.windows(walk.order)
        if windows:
            batch._expect(windows[0][1])  # they are decoded while the order is drawn
        return cls(walk.permuted(_order(walk, runs, stream)), windows)

    def take(self, n: int, drop_last: bool, flat: bool, metadata: bool) -> Found | None:
        """Return the next batch, of `n` while they last; None at the end."""
        deadline, self.taken = 0.0, 0
        while self._windows and self._windows[-1][0] <= self._position:
            self._walk.batch._expect(self._windows.pop()[1])
        if self._ahead >= 2 * n:
            return self._take_of_block(n, drop_last, flat, metadata)
        chosen = np.empty(0, np.int64)
        while True:
            chosen = self._top_up(chosen, n)
            if not len(chosen) or (drop_last and len(chosen) < n):
                return None
            found = self._walk.read(chosen, flat, metadata)
            if found is not None:
                self.taken = len(chosen)
                return found
            kept = chosen[self._walk.current(chosen)]
            self.skipped += len(chosen) - len(kept)
            if len(kept) == len(chosen):
                deadline = deadline or monotonic() + CONTENTION_S
                _check_deadline(deadline)
            chosen = kept

    def _take_of_block(self, n: int, drop_last: bool, flat: bool, metadata: bool) -> Found | None:
        """Return the next batch of a source that stays as it is: several are read at once, then handed out."""
        first, end = self._position, self._position + self.next_size(n, drop_last)
        if first == end:
            return None
        block = self._block
        if block is None or end > block.end or block.form != (flat, metadata):
            block = self._block = self._read_block(first, end, flat, metadata)
        self._position, self.taken = end, end - first
        return block.part(slice(first - block.start, end - block.start))

    def _read_block(self, first: int, least: int, flat: bool, metadata: bool) -> _Block:
        """Read from `first` on, up to `least` at least, but no further than the window that is held."""
        bound = self._windows[-1][0] if self._windows else len(self._walk)
        end = max(least, min(first + self._ahead, bound))
        found = self._walk.read(np.arange(first, end), flat, metadata)
        batch = self._walk.batch
        if found is None:
            raise IndexError(f"epoch: samples must stay, got a source that shrank to {len(batch)}")
        cut = portioner(None if flat else batch.single_space)
        return _Block(first, end, (flat, metadata), found, cut, portioner(batch.single_metadata_space))

    def next_size(self, n: int, drop_last: bool) -> int:
        """Return how many the next batch of at most `n` has if none was overwritten."""
        left = min(n, len(self._walk) - self._position)
        return 0 if drop_last and left < n else left

    def _top_up(self, chosen: Ints, n: int) -> Ints:
        end = min(self._position + n - len(chosen), len(self._walk))
        more = np.arange(self._position, end)
        self._position = end
        return np.concatenate([chosen, more]) if len(chosen) else more

    def state_dict(self) -> dict[str, Any]:
        """Return plain arrays from which the rest of the epoch is made."""
        return self._walk.rest(self._position)

    @classmethod
    def restore(cls, batch: BatchBase, state: dict[str, Any]) -> Epoch:
        """Make the rest of an epoch."""
        return cls(Walk.restore(batch, state))


@dataclass(frozen=True, slots=True)
class _Block:
    """Samples of positions `start` to `end`, of which batches are parts, nobody else's."""

    start: int
    end: int
    form: tuple[bool, bool]
    found: Found
    cut: Callable[[Any, slice], Any]
    cut_labels: Callable[[Any, slice], Any]

    def part(self, at: slice) -> Found:
        data, labels = self.found
        return self.cut(data, at), None if labels is None else self.cut_labels(labels, at)


def shuffled(batch: BatchBase, stream: IndexStream) -> Walk:
    """Fix what `batch` holds now, in a fresh permutation."""
    walk = drawn(batch, lambda size: Walk.start(batch))
    return walk.permuted(_order(walk, _runs(batch, walk.order, stream), stream))


@dataclass(frozen=True, slots=True)
class _Runs:
    """Positions that follow one another in one chunk: where each run begins, its length and its window."""

    first: Ints
    length: Ints
    window: Ints

    def ends(self) -> Ints:
        """Where each window ends, if they follow one another."""
        return np.cumsum(np.bincount(self.window, self.length)).astype(np.int64)

    def positions(self) -> Ints:
        """All positions, window after window."""
        by_window = np.argsort(self.window, kind="stable")
        first, length = self.first[by_window], self.length[by_window]
        found = np.repeat(first - (np.cumsum(length) - length), length)
        found += np.arange(len(found))
        return found

    def windows(self, existing: Any) -> Windows:
        """Where each window begins, and a sample of each chunk of it and of the next, to be read beside it."""
        index = self.first if isinstance(existing, range) else np.asarray(existing, np.int64)[self.first]
        starts = [0, *self.ends().tolist()[:-1]]
        return [(start, index[(self.window == k) | (self.window == k + 1)]) for k, start in enumerate(starts)]


def _order(walk: Walk, runs: _Runs | None, stream: IndexStream) -> Ints:
    """A permutation; over chunks, of the samples within each window of them."""
    if runs is None:
        return stream.permutation(len(walk))
    return stream.shuffle_parts(runs.positions(), runs.ends().tolist())


def _runs(batch: BatchBase, existing: Any, stream: IndexStream) -> _Runs | None:
    """Shuffle the chunks of a source and deal them to windows; None for one that is not read in chunks.

    A window is as many chunks as the source keeps at once, so that every chunk is read once. With one window the
    epoch is a permutation of all.
    """
    found = batch._chunks()
    if found is None:
        return None
    chunk, window = found
    chunk = chunk[: len(existing)] if isinstance(existing, range) else chunk[np.asarray(existing, np.int64)]
    first = np.flatnonzero(np.concatenate([[True], chunk[1:] != chunk[:-1]]))[: len(chunk)]
    of = chunk[first]
    n_chunks = int(of.max(initial=-1)) + 1
    turn = np.empty(n_chunks, np.int64)
    turn[stream.permutation(n_chunks)] = np.arange(n_chunks)
    return _Runs(first, np.diff(first, append=len(chunk)), turn[of] // window)


def _check_deadline(deadline: float) -> None:
    if monotonic() > deadline:
        raise ContentionError(
            f"epoch: a batch must be read within {CONTENTION_S} s, got lapped by writers all that time; "
            "draw smaller batches or give the buffer more capacity"
        )
