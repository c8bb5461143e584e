"""cpprb: numpy columns behind a Cython class."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import cpprb
import numpy as np

from adapters import Turn, turn_of, turn_over
from works import Block, Work, one, pool


class Cpprb:
    # Best usage: next_obs as a column of its own; `next_of="obs"` saves memory but draws and adds slower.
    buffer: Any

    def create(self, work: Work) -> None:
        env = {leaf.name: {"shape": leaf.shape or 1, "dtype": np.dtype(leaf.dtype)} for leaf in work.leaves}
        self.buffer = cpprb.ReplayBuffer(work.rows, env)

    def fill(self, blocks: Iterable[tuple[int, Block]]) -> None:
        for _, block in blocks:
            self.buffer.add(**block)

    def look(self, n: int) -> Block:
        return cast(Block, self.buffer.sample(n))

    def draw(self, work: Work) -> Turn:
        sample, n = self.buffer.sample, work.batch
        return turn_of(lambda: sample(n))

    def add(self, work: Work) -> Turn:
        # Best usage: keyword arguments straight from numpy; a batch is the same call with a leading axis.
        add = self.buffer.add
        items = [one(block) if work.batch == 1 else block for block in pool(work)]
        return turn_over(lambda item: add(**item), [(item,) for item in items])
