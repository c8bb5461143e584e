"""Environments and learners for runs: at the top of a module, since spawned collectors import them by name."""

from __future__ import annotations

import os
import signal
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector import SyncVectorEnv

from recollect.learners.sac_learner import SACLearner


class Reach(gymnasium.Env[Any, Any]):
    """Go to the middle; short episodes that end or time out. Cheap and repeatable."""

    observation_space = spaces.Box(-10, 10, (2,), np.float32)
    action_space = spaces.Box(-1, 1, (1,), np.float32)

    def __init__(self, dies_at: int = 0, nan_at: int = 0) -> None:
        self.dies_at, self.nan_at, self.total = dies_at, nan_at, 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.x, self.t = self.np_random.uniform(-2, 2), 0
        return self._obs(), {}

    def _obs(self) -> Any:
        return np.array([self.x, self.t / 10], np.float32)

    def step(self, action: Any) -> Any:
        self.total += 1
        if self.dies_at and self.total >= self.dies_at:
            os.kill(os.getpid(), signal.SIGKILL)
        self.x, self.t = float(self.x + action[0]), self.t + 1
        reward = np.nan if self.nan_at and self.total >= self.nan_at else -abs(self.x)
        return self._obs(), reward, abs(self.x) < 0.1, self.t >= 10, {}


def reach(num_envs: int, sim_backend: str, **overrides: Any) -> Any:
    """Vector environments of Reach."""
    mode = overrides.pop("autoreset_mode", gymnasium.vector.AutoresetMode.NEXT_STEP)
    return SyncVectorEnv([lambda: Reach(**overrides)] * num_envs, autoreset_mode=mode)


class OwnLearner(SACLearner):
    """A user's learner: counts its calls, has no normaliser."""

    def update_actor(self, batch: Any) -> dict[str, float]:
        return {**super().update_actor(batch), "own": 1.0}


def own_learner(spaces_: Any, config: Any, device: str, seed: int) -> Any:
    learner = OwnLearner(spaces_, config, device, seed)
    learner.obs_normalizer = None
    return learner
