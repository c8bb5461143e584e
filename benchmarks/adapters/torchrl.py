"""TorchRL: TensorDicts in a preallocated tensor storage."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import torch
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, PrioritizedSampler, ReplayBuffer

from adapters import Turn, turn_of, turn_over, with_best_threads
from prioritized import ALPHA, BETA, first_priorities, new_priorities
from works import Block, Work, pool


def tensordict(block: Block) -> Any:
    tensors = {name: torch.from_numpy(array.copy()) for name, array in block.items()}
    return TensorDict(tensors, batch_size=[len(block["reward"])])


class TorchRL:
    # Best usage: the plain ReplayBuffer (TensorDictReplayBuffer adds an index entry, 1.2x slower), tensors in
    # RAM, no prefetch threads (they cost more than such draws), torch on its better number of threads.
    buffer: Any

    def create(self, work: Work) -> None:
        logging.getLogger("torchrl").setLevel(logging.WARNING)
        sampler = PrioritizedSampler(work.rows, ALPHA, BETA) if work.kind == "prioritized" else None
        self.buffer = ReplayBuffer(
            storage=LazyTensorStorage(work.rows), sampler=sampler, batch_size=work.batch
        )

    def fill(self, blocks: Iterable[tuple[int, Block]]) -> None:
        for _, block in blocks:
            self.buffer.extend(tensordict(block))

    def look(self, n: int) -> Block:
        return {name: tensor.numpy() for name, tensor in self.buffer.sample(n).items()}

    def draw(self, work: Work) -> Turn:
        return with_best_threads(turn_of(self.buffer.sample))

    def add(self, work: Work) -> Turn:
        # Best usage: TensorDicts made beforehand, as its collectors hand them over.
        items = [tensordict(block) for block in pool(work)]
        if work.batch == 1:
            return with_best_threads(turn_over(self.buffer.add, [(item[0].clone(),) for item in items]))
        return with_best_threads(turn_over(self.buffer.extend, [(item,) for item in items]))

    def prioritized(self, work: Work) -> Turn:
        # Best usage: the plain ReplayBuffer, index and weight as info, float32 priorities (its tree's own).
        buffer = self.buffer
        buffer.update_priority(torch.arange(work.rows), torch.from_numpy(first_priorities(work.rows)).float())

        def call(values: Any) -> None:
            _, info = buffer.sample(return_info=True)
            buffer.update_priority(info["index"], values)

        values = [(torch.from_numpy(array).float(),) for array in new_priorities(work.batch)]
        return with_best_threads(turn_over(call, values))
