"""Recollect's sequences and stacks, and what they are measured against."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from itertools import cycle
from typing import Any

import numpy as np

import recollect as rc
from adapters import Turn, turn_of
from adapters.recollect import Recollect, newest, open_adapter
from recollect import _core
from recollect.memory import rows as memory_rows
from recollect.memory.rows import Geometry, Rows
from recollect.replay.buffer import OLDEST
from recollect.spaces import as_space, compile_layout
from sequences import EPISODE, LENGTH, SMALL, STACK, with_ends
from works import Block, Work

PAGE_NBYTES = 1 << 21


def space_of(work: Work) -> Any:
    return {leaf.name: (leaf.shape, leaf.dtype) for leaf in work.leaves}


class Windows(Recollect):
    """Plain use: a buffer that keeps segments, SequenceSampler and FrameStackedBatch through StepSampler."""

    sampler: Any

    def create(self, work: Work) -> None:
        newest[:] = [weakref.ref(self)]
        if work.kind == "flat":
            self.buffer = sparse_buffer(work, work.rows)
            return
        self.buffer = rc.ReplayBuffer.create(
            rc.MemoryStorage, space_of(work), capacity=work.rows, maintain_segment_metadata=True
        )

    def fill(self, blocks: Iterable[tuple[int, Block]]) -> None:
        if len(self.buffer):  # a sparse one is as full as it gets
            return
        for first, block in blocks:
            self.buffer.extend(block, ends=with_ends(first, block)["done"])

    def look(self, n: int) -> Block | None:
        """What a draw delivers; sequences must be whole, and of one episode each. Nothing of a sparse buffer."""
        found = self.sampler.sample()
        rows = found["reward"].astype(np.int64)
        if not rows.any():
            return None
        same_episode = (rows // EPISODE == rows[:, :1] // EPISODE).all()
        in_order = (np.diff(rows, axis=1) == 1).all() or rows.shape[
            1
        ] == STACK  # a stack repeats the first row
        if not (same_episode and in_order):
            raise ValueError("sequence: crosses an episode or skips a row")
        return {name: array.reshape(n, *array.shape[2:]) for name, array in found.items()}

    def sequence(self, work: Work) -> Turn:
        self.sampler = rc.SequenceSampler(self.buffer, work.batch // LENGTH, LENGTH, seed=0)
        return turn_of(self.sampler.sample)

    flat = sequence

    def stack(self, work: Work) -> Turn:
        stacks = rc.FrameStackedBatch(self.buffer, prefetch_horizon=STACK - 1)
        self.sampler = rc.StepSampler(stacks, work.batch // STACK, seed=0)
        return turn_of(self.sampler.sample)


class Million:
    """The same sampler over a million rows that were made in the same way: what `flat` must not exceed."""

    def create(self, work: Work) -> None:
        self.buffer = sparse_buffer(work, min(SMALL, work.rows))

    def fill(self, blocks: Iterable[tuple[int, Block]]) -> None:
        pass

    def look(self, n: int) -> Block | None:
        return None

    def flat(self, work: Work) -> Turn:
        return turn_of(rc.SequenceSampler(self.buffer, work.batch // LENGTH, LENGTH, seed=0).sample)


class Gather:
    """The rows of random stacks read by their indices, which were made beforehand: no boundaries, no draws."""

    def create(self, work: Work) -> None:
        self.buffer = open_adapter().buffer

    def fill(self, blocks: Iterable[tuple[int, Block]]) -> None:
        pass

    def look(self, n: int) -> Block | None:
        return None

    def stack(self, work: Work) -> Turn:
        buffer, rng = self.buffer, np.random.default_rng(0)
        anchors = rng.integers(STACK, len(buffer), (512, work.batch // STACK, 1))
        pool = cycle(list((anchors + np.arange(1 - STACK, 1)).reshape(512, -1)))
        return turn_of(lambda: buffer.get_at(next(pool)))


def sparse_buffer(work: Work, n_rows: int) -> rc.ReplayBuffer:
    """A full buffer of which only stamps and tags were ever written: its rows are the kernel's page of zeros.

    So a hundred million rows need 2.4 GB and not 19. What is timed is the draw: choosing windows by their tags and
    copying rows, which come from the cache in both sizes alike.
    """
    space = as_space(space_of(work))
    layout = compile_layout(space)
    geometry = Geometry(n_rows, 1, layout.row_nbytes, True, layout.hash)
    segment = memory_rows._fresh(_core.Mapping(-1, 0, geometry.nbytes, True), geometry, -1, None)
    storage = rc.MemoryStorage(Rows(segment, layout), space, capacity=n_rows)
    native = storage.rows.native
    native.set_window(0, 0, n_rows)
    for k, first in enumerate(range(0, n_rows, EPISODE)):
        native.set_tags(first, min(EPISODE, n_rows - first), k + 1, 0)
    native.set_segment_counter(n_rows // EPISODE + 1)
    buffer = rc.ReplayBuffer._over(
        storage, tracked=True, evict=OLDEST, multiprocessing=False, cache_path=None, state=None
    )
    buffer.get_at(
        np.arange(0, n_rows, PAGE_NBYTES // layout.row_nbytes)
    )  # the first look at a page costs a fault
    return buffer
