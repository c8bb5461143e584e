"""Tianshou: a Batch of numpy columns."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from tianshou.data import Batch, PrioritizedReplayBuffer, ReplayBuffer

from adapters import Turn, turn_of, turn_over
from prioritized import ALPHA, BETA, first_priorities, new_priorities
from works import Block, Work, one, pool

NAMES = {"obs": "obs", "action": "act", "reward": "rew", "next_obs": "obs_next", "done": "terminated"}


def renamed(block: dict[str, Any]) -> dict[str, Any]:
    columns = {NAMES[name]: value for name, value in block.items()}
    return columns | {"truncated": np.zeros_like(columns["terminated"])}


class Tianshou:
    # Best usage: one ReplayBuffer (the vectorised one draws slower), columns preallocated. It always delivers
    # obs_next: where the work has none it is looked up in obs (ignore_obs_next), the usual way for images.
    buffer: Any

    def create(self, work: Work) -> None:
        if work.kind == "prioritized":
            self.buffer = PrioritizedReplayBuffer(work.rows, alpha=ALPHA, beta=BETA)
        else:
            self.buffer = ReplayBuffer(work.rows, ignore_obs_next=not work.has("next_obs"))
        self.columns = {leaf.name: np.zeros((work.rows, *leaf.shape), leaf.dtype) for leaf in work.leaves}

    def fill(self, blocks: Iterable[tuple[int, Block]]) -> None:
        for first, block in blocks:
            for name, array in block.items():
                self.columns[name][first : first + len(array)] = array
        self.adopt(self.buffer, self.columns)

    def adopt(self, buffer: Any, columns: Block) -> None:
        """What its `from_data` does, with the buffer's own options."""
        batch = renamed(columns)
        buffer.set_batch(Batch(batch | {"done": batch["terminated"].copy()}))
        buffer._size = buffer.maxsize

    def look(self, n: int) -> Block:
        batch = self.buffer.sample(n)[0]
        return {name: batch[theirs] for name, theirs in NAMES.items()}

    def draw(self, work: Work) -> Turn:
        sample, n = self.buffer.sample, work.batch
        return turn_of(lambda: sample(n))

    def add(self, work: Work) -> Turn:
        if work.batch == 1:
            return turn_over(self.buffer.add, [(Batch(renamed(one(block))),) for block in pool(work)])
        # Best usage: `update` from a small buffer, 5x as fast as a vectorised buffer's `add`.
        return turn_over(self.buffer.update, [(self.small(work, block),) for block in pool(work)])

    def small(self, work: Work, block: Block) -> Any:
        buffer = ReplayBuffer(work.batch)
        self.adopt(buffer, block)
        return buffer

    def prioritized(self, work: Work) -> Turn:
        buffer, n = self.buffer, work.batch
        buffer.update_weight(np.arange(work.rows), first_priorities(work.rows))

        def call(values: Any) -> None:
            _, index = buffer.sample(n)
            buffer.update_weight(index, values)

        return turn_over(call, [(values,) for values in new_priorities(n)])
