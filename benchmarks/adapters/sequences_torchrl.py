"""TorchRL's SliceSampler."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from torchrl.data import LazyTensorStorage, ReplayBuffer, SliceSampler

from adapters import Turn, turn_of, with_best_threads
from adapters.torchrl import TorchRL, tensordict
from sequences import LENGTH, with_ends
from works import Block, Work


class Slices(TorchRL):
    # Best usage, by its documentation: ends by `end_key` and not by `traj_key`; `cache_values`, which finds the
    # boundaries once and may be used only while nothing is written (without it each draw searches the whole buffer);
    # no key added for truncation.
    def create(self, work: Work) -> None:
        logging.getLogger("torchrl").setLevel(logging.WARNING)
        sampler = SliceSampler(slice_len=LENGTH, end_key="done", cache_values=True, truncated_key=None)
        storage = LazyTensorStorage(work.rows)
        self.buffer = ReplayBuffer(storage=storage, sampler=sampler, batch_size=work.batch)

    def fill(self, blocks: Iterable[tuple[int, Block]]) -> None:
        for first, block in blocks:
            self.buffer.extend(tensordict(with_ends(first, block)))

    def sequence(self, work: Work) -> Turn:
        return with_best_threads(turn_of(self.buffer.sample))
