"""Batches whose samples the parent chooses: an epoch, or the draws of a sampler that only one process can make.

The parent sends places, workers gather them, batches come back in order. A worker that finds a sample gone says so;
then the parent chooses again, and sends again what was under way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from recollect.batch.base import BatchBase
from recollect.batch.location import Ints
from recollect.batch.walk import Walk
from recollect.sampling.epoch import shuffled
from recollect.sampling.stream import IndexStream, mix
from recollect.sampling.workers.messages import GATHER, WorkRequest
from recollect.sampling.workers.pool import Pool
from recollect.sampling.workers.slots import EMPTY, GONE

Places = dict[str, Any]


@dataclass(slots=True)
class Item:
    """A batch under way: what to gather, and what the parent keeps for itself until it is back."""

    places: Places
    kept: Any


class Gathers:
    """A line of batches under way between the parent and its workers; number i is worker i mod n's.

    `choose()` gives the next batch's places and what to keep with them, None at the end; `again(items)` is called
    when a sample of the first is gone, and returns what to send instead of all of them.
    """

    def __init__(self, choose: Callable[[], Item | None], again: Callable[[list[Item]], list[Item]],
                 key: int, number: int) -> None:  # fmt: skip
        self._choose, self._again = choose, again
        self.key, self.number = key, number
        self.items: deque[Item] = deque()
        self._run = -1  # none yet
        self._is_behind = False  # a fetch was cut short: what is under way may not be what `items` says
        self._is_over = False

    def fetch(self, pool: Pool, metadata: bool) -> tuple[Any, Any, Any, int] | None:
        """Return the next batch as (data, metadata, kept, its size), and keep the workers busy; None at the end."""
        if self._run != pool.run or self._is_behind:  # something else was asked for meanwhile
            self._send_all(pool, metadata)
        self._is_behind = True
        while True:
            self._top_up(pool, metadata)
            if not self.items:
                self._is_behind = False
                return None
            try:
                kind, (n, *_), data, found = pool.fetch(self.number % pool.n_workers, metadata)
            except Exception:  # it may still come
                self._is_behind = False
                raise
            if kind not in (GONE, EMPTY):
                kept, rest = self.items[0].kept, deque(islice(self.items, 1, None))
                self.items, self.number, self._is_behind = rest, self.number + 1, False  # no call, so at once
                return data, found, kept, n
            self.items = deque(self._again(list(self.items)))
            self._send_all(pool, metadata)

    def _top_up(self, pool: Pool, metadata: bool) -> None:
        while not self._is_over and len(self.items) < pool.n_workers * pool.n_slots:
            item = self._choose()
            if item is None:
                self._is_over = True
                return
            self._send(pool, self.number + len(self.items), item, metadata)
            self.items.append(item)

    def _send_all(self, pool: Pool, metadata: bool) -> None:
        self._run, self._is_over = pool.begin(), False
        for i, item in enumerate(self.items):
            self._send(pool, self.number + i, item, metadata)

    def _send(self, pool: Pool, number: int, item: Item, metadata: bool) -> None:
        request = WorkRequest(GATHER, self._run, self.key, number, metadata, item.places)
        pool.send(number % pool.n_workers, request)

    def is_on(self, pool: Pool) -> bool:
        """Whether the workers have batches of this line under way."""
        return self._run == pool.run and bool(self.items)


class PlannedEpoch:
    """One pass over what a batch holds, gathered by workers; samples gone before their turn are left out, counted."""

    def __init__(self, walk: Walk, key: int, number: int, batch_size: int) -> None:
        self._walk, self._size = walk, batch_size
        self._left: Ints = np.arange(len(walk))
        self.skipped = 0
        self.drop_last = False
        self.line = Gathers(self._choose, self._return, key, number)

    @classmethod
    def start(cls, batch: BatchBase, stream: IndexStream, batch_size: int) -> PlannedEpoch:
        """Fix what `batch` holds now, in a fresh permutation."""
        key = mix(stream.key ^ mix(stream.counter + 1))
        return cls(shuffled(batch, stream), key, 0, batch_size)

    def _choose(self) -> Item | None:
        chosen: Ints = self._left[:0]
        while len(chosen) < self._size and len(self._left):
            n = self._size - len(chosen)
            more, self._left = self._left[:n], self._left[n:]
            current = self._walk.current(more)
            self.skipped += int(len(more) - np.count_nonzero(current))
            chosen = np.concatenate([chosen, more[current]])
        if not len(chosen) or (self.drop_last and len(chosen) < self._size):
            return None
        return Item(self._walk.part(chosen), chosen)

    def next_size(self) -> int:
        """Return how many the next batch has if none of its samples is gone by then."""
        if self.line.items:
            return len(self.line.items[0].kept)
        left = min(self._size, len(self._left))
        return 0 if self.drop_last and left < self._size else left

    def places(self, chosen: Ints) -> Places:
        """Return where the samples of a batch are."""
        return self._walk.part(chosen)

    def _return(self, items: list[Item]) -> list[Item]:
        """Take back what was chosen: it is chosen anew, without what is gone."""
        self._left = np.concatenate([*(item.kept for item in items), self._left])
        return []

    def state_dict(self) -> dict[str, Any]:
        """Return plain arrays and numbers from which the rest, delivered or not yet, is made."""
        under_way = [item.kept for item in self.line.items]
        rest = self._walk.part(np.concatenate([*under_way, self._left]).astype(np.int64))
        return {**rest, "key": self.line.key, "number": self.line.number}

    @classmethod
    def restore(cls, batch: BatchBase, state: dict[str, Any], batch_size: int) -> PlannedEpoch:
        """Make the rest of an epoch."""
        return cls(Walk.restore(batch, state), int(state["key"]), int(state["number"]), batch_size)
