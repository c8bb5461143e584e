"""cpprb: numpy columns behind a Cython class."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import cpprb
import numpy as np

from adapters import Turn, turn_of, turn_over
from prioritized import ALPHA, BETA, first_priorities, new_priorities
from works import Block, Work, one, pool


class Cpprb:
    # Best usage: next_obs as a column of its own; `next_of="obs"` saves memory but draws and adds slower.
    buffer: Any

    def create(self, work: Work) -> None:
        env = {leaf.name: {"shape": leaf.shape or 1, "dtype": np.dtype(leaf.dtype)} for leaf in work.leaves}
        if work.kind == "prioritized":
            self.buffer = cpprb.PrioritizedReplayBuffer(work.rows, env, alpha=ALPHA)
        else:
            self.buffer = cpprb.ReplayBuffer(work.rows, env)

    def fill(self, blocks: Iterable[tuple[int, Block]]) -> None:
        for _, block in blocks:
            self.buffer.add(**block)

    def look(self, n: int) -> Block:
        batch = self.buffer.sample(n)
        return cast(
            Block, {name: array for name, array in batch.items() if name not in ("weights", "indexes")}
        )

    def draw(self, work: Work) -> Turn:
        sample, n = self.buffer.sample, work.batch
        return turn_of(lambda: sample(n))

    def add(self, work: Work) -> Turn:
        # Best usage: keyword arguments straight from numpy; a batch is the same call with a leading axis.
        add = self.buffer.add
        items = [one(block) if work.batch == 1 else block for block in pool(work)]
        return turn_over(lambda item: add(**item), [(item,) for item in items])

    def prioritized(self, work: Work) -> Turn:
        # Best usage: float64 priorities, its own type; without check_for_update, which costs more.
        buffer, n = self.buffer, work.batch
        buffer.update_priorities(np.arange(work.rows), first_priorities(work.rows))

        def call(values: Any) -> None:
            batch = buffer.sample(n, beta=BETA)
            buffer.update_priorities(batch["indexes"], values)

        return turn_over(call, [(values,) for values in new_priorities(n)])
