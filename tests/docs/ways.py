"""The ways through the package that docs/explain/code.md draws: small programs, and the modules whose code they run."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import numpy as np

import recollect as rc
import recollect.rollout as rr
from recollect.ipc.replay_pipelines import CPUPinnedDoubleBufferReplayPipeline

# What every room stands on; a way that named these would name them everywhere.
GROUND = "_lazy budget checks errors files indexing interrupts observe plugins spaces system text".split()


class Passed:
    """The modules of the package whose functions are called while it is entered, in every thread."""

    def __init__(self) -> None:
        self.modules: dict[str, None] = {}

    def _look(self, frame: FrameType, event: str, _: Any) -> None:
        name = frame.f_globals.get("__name__", "")
        if event != "call" or not name.startswith("recollect.") or frame.f_code.co_name == "<module>":
            return
        room = name.removeprefix("recollect.")
        if room.split(".")[0] not in GROUND:
            self.modules[room] = None

    def forget(self) -> None:
        """Begin anew; threads that were started meanwhile stay watched."""
        self.modules.clear()

    def __enter__(self) -> Passed:
        threading.setprofile(self._look)
        sys.setprofile(self._look)
        return self

    def __exit__(self, *error: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)


def _append_and_sample(passed: Passed) -> None:
    with rc.ReplayBuffer.create("memory", {"x": ((3,), "float32")}, capacity=100) as buf:
        sampler = rc.StepSampler(buf, 4)
        with passed:
            buf.append({"x": np.zeros(3, "float32")})
            sampler.sample()


def _weights(passed: Passed) -> None:
    state = {"w": np.ones((4, 4), "float32")}
    sync = rc.ipc.SharedWeightSync.from_state_dict(state)
    with passed:
        sync.write_weights(state)
        sync.read_weights_into({"w": np.zeros((4, 4), "float32")})
    sync.cleanup()


def _rollout_ring(passed: Passed) -> None:
    ring = rc.ipc.RolloutRingBuffer(num_envs=2, num_steps=3, obs_dim=4, action_dim=1, num_lanes=1)
    lane = ring.on_lane(0)
    with passed:
        lane.write_buffer["obs"][:] = 1
        lane.signal_write_done(version=1)
        ring.wait_for_data(timeout=10.0)
        ring.read_torch("numpy")
        ring.advance_read()
    ring.cleanup()


def _device_batch(passed: Passed) -> None:
    buf = rc.ipc.ReplayBuffer(100, obs_dim=4, action_dim=2, device="cpu", seed=0)
    obs = np.ones((8, 4), "float32")
    buf.add(obs, np.zeros((8, 2), "float32"), np.ones(8), obs, np.zeros(8, bool), np.zeros(8, bool))
    with passed, CPUPinnedDoubleBufferReplayPipeline(buf, device="cpu", sample_count=4, base_seed=7) as pipe:
        passed.forget()
        for tick in (1, 2):
            pipe.sample_large_batch(tick, 4)
            pipe.start_prepare(tick + 1, 4)
            pipe.after_tick()
        found = dict(passed.modules)
    passed.modules = found
    buf.cleanup()


def _remote_add(passed: Passed) -> None:
    space = {"x": ((2,), "float32"), "log_reward": ((), "float64")}
    ends = rc.remote.LocalCarrier.group(2)
    with passed:
        manager = rc.remote.ReplayBufferManager(
            space, 1, 1, capacity=100, communication_backend=ends[1]
        ).start()
        with rc.remote.RemoteReplay(space, 1, ends[0]) as replay:
            items = {"x": np.zeros((8, 2), "float32"), "log_reward": np.arange(8.0)}
            replay.add(items)  # the two ends know each other now
            passed.forget()
            replay.add(items)
            found = dict(passed.modules)
    passed.modules = found
    manager.close()
    for end in ends:
        end.close()


def _batch_of_rollouts(passed: Passed) -> None:
    async def add(task: Any, models: Any) -> Any:
        [found] = await models.rollout.generate("1+1=", max_tokens=4)
        return found.experience(reward=1.0)

    async def main() -> None:
        async with rc.RolloutCoordinator(rr.Config(operators=("grpo",)), [rr.ScriptedModel(["2"])]) as c:
            with passed:
                tasks = [rr.Task(add, {}, repeat_times=2)]
                await c.submit_batch(batch_id=1, tasks=tasks, batch_type="train")
                await c.finalize_train_batch(1, timeout=30)

    asyncio.run(main())


WAYS: dict[str, Callable[[Passed], None]] = {
    "append → sample": _append_and_sample,
    "weights": _weights,
    "rollout ring": _rollout_ring,
    "device batch": _device_batch,
    "remote add → score": _remote_add,
    "submit → finalize": _batch_of_rollouts,
}


def modules_of(way: str) -> list[str]:
    """Run a way and return the modules that it passed, in the order of their first call."""
    WAYS[way](Passed())  # loads what is loaded at the first use
    passed = Passed()
    WAYS[way](passed)
    return list(passed.modules)
