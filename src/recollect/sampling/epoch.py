"""Epoch: every sample that exists at its start once, in a random order, resumable anywhere."""

from __future__ import annotations

from collections.abc import Sequence
from time import monotonic
from typing import Any

import numpy as np

from recollect.batch.base import BatchBase
from recollect.batch.boundaries import CONTENTION_S, drawn
from recollect.batch.location import Ints
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
        self.skipped = 0
        self.taken = 0  # how many the last batch has

    @classmethod
    def start(cls, batch: BatchBase, stream: IndexStream) -> Epoch:
        """Fix what `batch` holds now, in a fresh permutation."""
        walk = drawn(batch, lambda size: Walk.start(batch))
        order, windows = _order(batch, walk.order, stream)
        return cls(walk.permuted(order), windows)

    def take(self, n: int, drop_last: bool, flat: bool, metadata: bool) -> Found | None:
        """Return the next batch, of `n` while they last; None at the end."""
        deadline, self.taken = 0.0, 0
        while self._windows and self._windows[-1][0] <= self._position:
            self._walk.batch._expect(self._windows.pop()[1])
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


def shuffled(batch: BatchBase, stream: IndexStream) -> Walk:
    """Fix what `batch` holds now, in a fresh permutation."""
    walk = drawn(batch, lambda size: Walk.start(batch))
    return walk.permuted(_order(batch, walk.order, stream)[0])


def _order(batch: BatchBase, existing: Any, stream: IndexStream) -> tuple[Ints, Windows]:
    """A permutation; over chunks it shuffles those, and then the samples within each window of them.

    A window is as many chunks as the source keeps at once, so that every chunk is read once. With one window it is a
    permutation of all.
    """
    found = batch._chunks()
    if found is None:
        return stream.permutation(len(existing)), ()
    chunk, window = found
    chunk = chunk[: len(existing)] if isinstance(existing, range) else chunk[np.asarray(existing, np.int64)]
    n_chunks = int(chunk.max(initial=-1)) + 1
    turn = np.empty(n_chunks, np.int64)
    turn[stream.permutation(n_chunks)] = np.arange(n_chunks)
    groups = turn[chunk] // window
    return stream.permutation_of(groups), _windows(chunk, groups, existing)


def _windows(chunk: Ints, groups: Ints, existing: Any) -> Windows:
    """Where each window begins, and a sample of each chunk of it and of the next, which is to be read beside it."""
    firsts = np.flatnonzero(np.diff(chunk, prepend=-1))
    of = groups[firsts]
    index = firsts if isinstance(existing, range) else np.asarray(existing, np.int64)[firsts]
    starts = np.cumsum(np.bincount(groups)) - np.bincount(groups)
    return [(int(start), index[(of == k) | (of == k + 1)]) for k, start in enumerate(starts)]


def _check_deadline(deadline: float) -> None:
    if monotonic() > deadline:
        raise ContentionError(
            f"epoch: a batch must be read within {CONTENTION_S} s, got lapped by writers all that time; "
            "draw smaller batches or give the buffer more capacity"
        )
