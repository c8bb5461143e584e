"""Recollect, as its contract says it is used."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any, cast

import numpy as np

import recollect as rc
from adapters import Turn, turn_of, turn_over
from prioritized import ALPHA, BETA, first_priorities, new_priorities
from works import Block, Work, one, pool

newest: list[weakref.ref[Recollect]] = []


def open_adapter() -> Recollect:
    """The one whose buffer is open now, in this process."""
    adapter = newest[0]()
    assert adapter is not None
    return adapter


def open_rows() -> np.ndarray[Any, Any]:
    """The packed rows of the buffer that is open now, as bytes: the memory itself."""
    segment = open_adapter().buffer.storage.rows._segment
    geometry = segment.geometry
    view: np.ndarray[Any, Any] = segment.mapping.view(
        geometry.rows_at, geometry.capacity * geometry.row_nbytes
    )
    return view


class Recollect:
    """Plain use: no `out=`, no views, every check on, each batch the caller's own."""

    buffer: Any

    def create(self, work: Work) -> None:
        space = {leaf.name: (leaf.shape, leaf.dtype) for leaf in work.leaves}
        self.buffer = rc.ReplayBuffer.create(rc.MemoryStorage, space, capacity=work.rows)
        newest[:] = [weakref.ref(self)]

    def fill(self, blocks: Iterable[tuple[int, Block]]) -> None:
        for _, block in blocks:
            self.buffer.extend(block)

    def look(self, n: int) -> Block:
        return cast(Block, rc.StepSampler(self.buffer, n, seed=1).sample())

    def draw(self, work: Work) -> Turn:
        return turn_of(rc.StepSampler(self.buffer, work.batch, seed=0).sample)

    def add(self, work: Work) -> Turn:
        if work.batch == 1:
            return turn_over(self.buffer.append, [(one(block),) for block in pool(work)])
        return turn_over(self.buffer.extend, [(block,) for block in pool(work)])

    def prioritized(self, work: Work) -> Turn:
        sampler = rc.PrioritizedSampler(self.buffer, work.batch, ALPHA, BETA, seed=0)
        first = first_priorities(work.rows)
        for at in range(0, work.rows, 1 << 16):
            place = self.buffer.locate(np.arange(at, min(at + (1 << 16), work.rows)))
            sampler.update_priorities(
                {"row": place.row, "generation": place.generation}, first[at : at + (1 << 16)]
            )

        def call(values: Any) -> None:
            _, meta = sampler.sample_with_metadata()
            sampler.update_priorities(meta, values)

        return turn_over(call, [(values,) for values in new_priorities(work.batch)])

    prioritized_many = prioritized
