"""flashbax's trajectory buffer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from flashbax import make_trajectory_buffer

from adapters import Turn
from adapters.flashbax import Flashbax
from sequences import LENGTH
from works import Block, Work


class Trajectories(Flashbax):
    # Best usage: one time axis, any start (period 1), functions compiled, the state donated. It keeps no episodes:
    # its sequences run on from one into the next, so it does less than the others.
    def buffer_for(self, rows: int, batch: int) -> Any:
        return make_trajectory_buffer(1, batch // LENGTH, LENGTH, 1, LENGTH, max_length_time_axis=rows)

    def fill(self, blocks: Iterable[tuple[int, Block]]) -> None:
        with_axis = ({name: array[None] for name, array in block.items()} for _, block in blocks)
        super().fill((0, block) for block in with_axis)

    def look(self, n: int) -> Block:
        batch = self.buffer_for(self.rows, n).sample(self.state, self.key).experience
        return {name: np.asarray(array).reshape(n, *array.shape[2:]) for name, array in batch.items()}

    def sequence(self, work: Work) -> Turn:
        return self.draw(work)
