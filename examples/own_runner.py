"""A runner of your own: two collectors act with the newest weights, one learner takes their rollouts.

The "algorithm" is the smallest there is: random search by hill climbing on a linear CartPole policy. What it shows is
the frame: resources owned by the runner, one lane for each collector, and waits that notice a dead collector.

    python examples/own_runner.py
"""

from __future__ import annotations

from typing import Any

import numpy as np

import recollect as rc

STEPS = 64


def collect(ctx: Any, ring: Any, weights: Any) -> None:
    """Runs in each collector; `ring` arrives bound to this collector's lane."""
    env, policy = ctx.make_env(), {"w": np.zeros(4, "float32")}
    obs, _ = env.reset(seed=ctx.seed)
    while not ctx.stopping():
        version = weights.read_weights_into(policy)  # one whole version, never a mixture
        slot = ring.write_buffer  # waits while the learner has not caught up
        for t in range(STEPS):
            actions = (obs @ policy["w"] > 0).astype(np.int64)
            slot["obs"][t], slot["actions"][t], slot["log_probs"][t] = obs, actions[:, None], 0.0
            obs, slot["rewards"][t], terminated, slot["truncated"][t], _ = env.step(actions)
            slot["dones"][t] = terminated | (slot["truncated"][t] > 0)
        slot["last_obs"][:] = obs
        ring.signal_write_done(version=version)
        ctx.beat(env_steps=STEPS * ctx.num_envs)  # progress; a collector that stops beating is reported
    env.close()


class HillClimber(rc.ipc.AsyncRunner):
    """Keeps the weights whose rollouts ended fewest episodes."""

    best = 1.0

    def learn(self, max_iterations: int, save_interval: int = 50, log_dir: str = "logs") -> None:
        ring = self.own(
            rc.ipc.RolloutRingBuffer(
                self.envs_per_collector, STEPS, 4, 1, order="time", num_lanes=self.num_collectors
            )
        )
        rng, kept = np.random.default_rng(self.seed), np.zeros(4, "float32")
        weights = self.own(rc.ipc.SharedWeightSync.from_state_dict({"w": kept}))
        self.start_collectors(collect, {"ring": ring, "weights": weights})
        tried = {1: kept}
        for _ in range(max_iterations):
            while not ring.wait_for_data(timeout=1.0):
                self.check_collectors()
            rollout, version = ring.read_torch("numpy"), ring.read_info.version
            ring.advance_read()
            falls = float(rollout["dones"].mean())
            if falls < self.best:
                self.best, kept = falls, tried[version]
            step = rng.normal(0, 0.5, 4).astype("float32")
            weights.write_weights({"w": kept + step})
            tried[weights.version] = kept + step


if __name__ == "__main__":  # collectors are spawned, and import this file again
    with HillClimber("CartPole-v1", {}, {}, num_envs=16, num_collectors=2, device="numpy") as runner:
        runner.learn(60)
        print(f"falls per step: {runner.best:.3f}, env steps: {runner.stats().counters['env_steps']}")
        assert runner.best < 0.04  # a policy that knows nothing falls every tenth step
