"""Stable-Baselines3: numpy columns in, torch tensors out."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from gymnasium import spaces
from stable_baselines3.common.buffers import ReplayBuffer

from adapters import Turn, turn_of, turn_over, with_best_threads
from works import Block, Leaf, Work, pool


def space_of(leaf: Leaf) -> spaces.Space[Any]:
    if leaf.dtype == "int64":
        return spaces.Discrete(2)
    high = 255 if leaf.dtype == "uint8" else np.inf
    return spaces.Box(0, high, leaf.shape, np.dtype(leaf.dtype).type)


class StableBaselines3:
    # Best usage: device "cpu", no time-limit bookkeeping (a Python loop over infos in every add). It has no
    # batch without next_obs: where the work has none, obs is shared (optimize_memory_usage), read twice.
    buffer: Any

    def create(self, work: Work) -> None:
        leaves = {leaf.name: leaf for leaf in work.leaves}
        # A batch is added as one step of as many environments: the only way in for several rows at once.
        n_envs = work.batch if work.kind == "add" else 1
        self.buffer = ReplayBuffer(
            work.rows,
            space_of(leaves["obs"]),
            space_of(leaves["action"]),
            device="cpu",
            n_envs=n_envs,
            optimize_memory_usage=not work.has("next_obs"),
            handle_timeout_termination=False,
        )

    def fill(self, blocks: Iterable[tuple[int, Block]]) -> None:
        """Straight into its arrays: through `add` this takes half a minute."""
        buffer = self.buffer
        held = buffer.buffer_size * buffer.n_envs
        names = {"obs": "observations", "next_obs": "next_observations", "action": "actions"}
        names |= {"reward": "rewards", "done": "dones"}
        buffer.timeouts[:] = 0
        for first, block in blocks:
            for name, array in block.items():
                column = getattr(buffer, names[name])
                column = column.reshape(held, *column.shape[2:])
                array = array[: max(0, held - first)]
                column[first : first + len(array)] = array.reshape(-1, *column.shape[1:])
        buffer.full = True

    def look(self, n: int) -> Block:
        batch = self.buffer.sample(n)
        found = {"obs": batch.observations, "action": batch.actions, "reward": batch.rewards}
        found |= {"next_obs": batch.next_observations, "done": batch.dones}
        return {name: tensor.numpy() for name, tensor in found.items()}

    def draw(self, work: Work) -> Turn:
        sample, n = self.buffer.sample, work.batch
        return with_best_threads(turn_of(lambda: sample(n)))

    def add(self, work: Work) -> Turn:
        # Best usage: arrays with a leading axis of environments, as its VecEnv hands them over.
        order = ("obs", "next_obs", "action", "reward", "done")
        infos: list[dict[str, Any]] = [{} for _ in range(work.batch)]
        return turn_over(self.buffer.add, [(*(block[name] for name in order), infos) for block in pool(work)])
