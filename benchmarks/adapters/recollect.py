"""Recollect, as its contract says it is used."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import recollect as rc
from adapters import Turn, turn_of, turn_over
from works import Block, Work, one, pool


class Recollect:
    """Plain use: no `out=`, no views, every check on, each batch the caller's own."""

    buffer: Any

    def create(self, work: Work) -> None:
        space = {leaf.name: (leaf.shape, leaf.dtype) for leaf in work.leaves}
        self.buffer = rc.ReplayBuffer.create(rc.MemoryStorage, space, capacity=work.rows)

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
