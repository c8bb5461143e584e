"""UniLab's collector idioms, on its names: every step is normalised, counts are read as [0], a runner starts one."""

from __future__ import annotations

import multiprocessing
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import recollect as rc
from recollect.adapters.unilab import (
    AsyncRunner,
    ReplayBuffer,
    RolloutRingBuffer,
    SharedObsNormStats,
    SharedWeightSync,
)

N_ENVS, OBS, ACT = 4, 3, 2


def normalised(stats: Any, n_steps: int, puts: int) -> int:
    """UniLab's loop: statistics are asked for at every step, and put every few; how many steps were normalised."""
    n = 0
    for step in range(n_steps):
        if step % (n_steps // puts) == 0:
            stats.put((np.full(OBS, step, "float32"), np.ones(OBS, "float32")))
        found = stats.get()
        if found is not None:
            assert found[0][0] == step - step % (n_steps // puts)
            n += 1
    return n


def test_their_idiom_normalises_every_step_here_and_the_new_ones_in_ipc() -> None:
    with (
        SharedObsNormStats(multiprocessing.get_context("spawn")) as theirs,
        rc.ipc.SharedObsNormStats() as page,
    ):
        assert theirs.get() is None
        assert normalised(theirs, 40, 10) == 40
        assert normalised(page, 40, 10) == 10
        copy = pickle.loads(pickle.dumps(theirs))
        assert isinstance(copy, SharedObsNormStats) and copy.get() is not None and copy.get() is not None


def collect(
    stop_event: Any, buffer: Any, weights_name: str, lock: Any, stats: Any, n_steps: int, ended: Path
) -> None:
    weights = SharedWeightSync({"w": (2,)}, create=False, shm_name=weights_name, lock=lock)
    mine = {"w": np.zeros(2, "float32")}
    ones, no = np.ones((N_ENVS, OBS), "float32"), np.zeros(N_ENVS, bool)
    while not stop_event.is_set():
        if int(buffer.ptr[0]) < N_ENVS * n_steps:
            weights.read_weights_into(mine)
            is_normalised = np.full(N_ENVS, stats.get() is not None, "float32")
            actions = np.full((N_ENVS, ACT), mine["w"][0], "float32")
            buffer.add(ones, actions, is_normalised, ones, no, no)
    weights.close()
    ended.touch()


class Runner(AsyncRunner):
    def learn(self, max_iterations: int, save_interval: int = 50, log_dir: str = "logs") -> None:
        buffer = ReplayBuffer(1024, OBS, ACT, "numpy", defer_gpu=True, packed_cpu_storage=True)
        weights = SharedWeightSync.from_state_dict({"w": np.full(2, 7, "float32")})
        stats = SharedObsNormStats(None)
        stats.put((np.zeros(OBS, "float32"), np.ones(OBS, "float32")))
        self._shared_resources.append(buffer)
        self._shared_resources.extend([weights, stats])
        kwargs = {"buffer": buffer, "weights_name": weights.name, "lock": weights._lock, "stats": stats}
        self._start_collector(
            target_fn=collect,
            kwargs={
                "stop_event": self._stop_event,
                **kwargs,
                "n_steps": max_iterations,
                "ended": Path(log_dir),
            },
        )
        while int(buffer.size[0]) < N_ENVS * max_iterations:
            assert self._check_collector_alive()
        batch = buffer.sample(512)
        assert (batch["rewards"] == 1).all() and (batch["actions"] == 7).all()
        self.counts = (buffer.size, buffer.ptr[0], int(buffer.ptr))


@pytest.mark.process
def test_a_runner_starts_a_collector_by_their_signature(tmp_path: Path) -> None:
    with Runner("CartPole-v1", {}, {}, device="cpu", num_envs=N_ENVS) as runner:
        runner.learn(20, log_dir=str(tmp_path / "ended"))
    assert runner.counts == (80, 80, 80)
    assert (tmp_path / "ended").exists()  # its stop_event told it


def test_counts_and_pointers_are_what_their_code_hands_on() -> None:
    with ReplayBuffer(8, OBS, ACT, "numpy") as buffer:
        assert isinstance(pickle.loads(pickle.dumps(buffer)), ReplayBuffer)
        assert isinstance(buffer.on_lane(0), ReplayBuffer) and buffer.size == buffer.size[0] == 0
        with pytest.raises(IndexError, match="one number, got index 1"):
            buffer.ptr[1]
    ring = RolloutRingBuffer(2, 3, OBS, ACT)
    ring.attach_sync_primitives(ring._write_ptr, ring._read_ptr)
    assert ring.available() == 0
    ring.cleanup()
