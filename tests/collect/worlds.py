"""Environments whose every value tells where it came from, and the transitions that a plain loop over one sees."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv

import recollect as rc

NEXT_STEP, SAME_STEP, DISABLED = AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP, AutoresetMode.DISABLED
MODES = [NEXT_STEP, SAME_STEP, DISABLED]


class Counting(gymnasium.Env[Any, Any]):
    """Observes (ident, episode, step, last action); episode lengths come from the seed; ends alternate in kind."""

    observation_space: Any = spaces.Box(-1, 1e6, (4,), np.float32)
    action_space: Any = spaces.Discrete(5)

    def __init__(self, ident: int = 0, reuses: bool = False, longest: int = 6) -> None:
        self.ident, self.reuses, self.longest = ident, reuses, longest
        self._own = np.zeros(4, np.float32)
        self.episode = self.count = 0

    def _obs(self, action: float) -> Any:
        values = [self.ident, self.episode, self.count, action]
        if self.reuses:
            self._own[:] = values
            return self._own
        return np.array(values, np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        if seed is None and self.episode == 0:
            seed = 12345  # an unseeded run is the same every time too
        super().reset(seed=seed)
        self.episode, self.count = self.episode + 1, 0
        self.length = int(self.np_random.integers(1, self.longest + 1))
        return self._obs(-1), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.count += 1
        over = self.count >= self.length
        return (
            self._obs(float(action)),
            self.count + 0.25,
            over and self.episode % 2 == 0,
            over and self.episode % 2 == 1,
            {},
        )


class Nested(Counting):
    """Counting, seen through a Dict of a Tuple, a Discrete, a Text and an image."""

    observation_space = spaces.Dict(
        {
            "pair": spaces.Tuple([spaces.Box(-1, 1e6, (2,), np.float32), spaces.Discrete(1000)]),
            "name": spaces.Text(8),
            "image": spaces.Box(0, 255, (2, 3), np.uint8),
        }
    )
    action_space = spaces.Dict({"go": spaces.Discrete(3), "how": spaces.Box(-1, 1, (2,), np.float32)})

    def _obs(self, action: float) -> Any:
        return {
            "pair": (np.array([self.ident, self.count], np.float32), np.int64(self.episode)),
            "name": f"e{self.episode}s{self.count}",
            "image": np.full((2, 3), self.count, np.uint8),
        }

    def step(self, action: Any) -> Any:
        return super().step(action["go"])


class Contextual(Counting):
    """Counting, whose reset gives a context."""

    context_space = spaces.Box(0, 1e6, (2,), np.float32)

    def reset(self, **kwargs: Any) -> Any:
        obs, info = super().reset(**kwargs)
        return np.array([self.ident, self.episode], np.float32), obs, info


class ContextualVector(gymnasium.vector.VectorEnv[Any, Any, Any]):
    """Two slots with contexts; in NEXT_STEP mode `info` may carry the new ones."""

    def __init__(self, mode: AutoresetMode, tells: bool = True) -> None:
        self._inner = SyncVectorEnv([lambda: Counting(0), lambda: Counting(1)], autoreset_mode=mode)
        self.metadata, self.num_envs, self._tells = {"autoreset_mode": mode}, 2, tells
        for name in ("observation_space", "action_space", "single_observation_space", "single_action_space"):
            setattr(self, name, getattr(self._inner, name))
        self.single_context_space = spaces.Box(0, 1e6, (2,), np.float32)
        self.context_space = spaces.Box(0, 1e6, (2, 2), np.float32)

    def contexts(self) -> Any:
        return np.array([[e.ident, e.episode] for e in self._inner.envs], np.float32)

    def reset(self, **kwargs: Any) -> Any:
        obs, info = self._inner.reset(**kwargs)
        return self.contexts(), obs, info

    def step(self, actions: Any) -> Any:
        obs, reward, terminated, truncated, info = self._inner.step(actions)
        return (
            obs,
            reward,
            terminated,
            truncated,
            ({**info, "context": self.contexts()} if self._tells else info),
        )


Maker = Callable[[], Any]


def cartpole() -> Any:
    return gymnasium.make("CartPole-v1", max_episode_steps=25)


def pendulum() -> Any:
    return gymnasium.make("Pendulum-v1", max_episode_steps=7)


def reusing() -> Any:
    return Counting(reuses=True)


def counting() -> Any:
    return Counting()


def vector(make: Maker, n: int, mode: AutoresetMode, kind: str = "sync", **kwargs: Any) -> Any:
    cls = SyncVectorEnv if kind == "sync" else AsyncVectorEnv
    return cls([make] * n, autoreset_mode=mode, **kwargs)


def lanes_for(envs: Any, n: int, capacity: int = 2000, **kwargs: Any) -> rc.ReplayBuffer:
    return rc.ReplayBuffer.create(
        rc.MemoryStorage, rc.transition_space(envs), capacity=capacity // n * n, num_lanes=n,
        maintain_segment_metadata=True, **kwargs,
    )  # fmt: skip


def tracked_for(env: Any, capacity: int = 2000, **kwargs: Any) -> rc.ReplayBuffer:
    return lanes_for(env, 1, capacity, **kwargs)


def untracked_for(env: Any, capacity: int = 4000, keys: Any = None, **kwargs: Any) -> rc.ReplayBuffer:
    space = rc.transition_space(env) if keys is None else rc.transition_space(env, keys)
    return rc.ReplayBuffer.create(rc.MemoryStorage, space, capacity=capacity, **kwargs)


def plain_transitions(make: Maker, seed: int, actions: Iterator[Any]) -> Iterator[dict[str, Any]]:
    """What a plain loop over one environment sees: the truth that every recording is held against."""
    env = make()
    obs = np.array(env.reset(seed=seed)[0])
    for action in actions:
        found, reward, terminated, truncated, _ = env.step(action)
        next_obs = np.array(found)
        yield {"obs": obs, "action": action, "reward": np.float32(reward), "next_obs": next_obs,
               "terminated": terminated, "truncated": truncated}  # fmt: skip
        obs = next_obs
        if terminated or truncated:
            obs = np.array(env.reset()[0])
    env.close()


def assert_rows(rows: Any, expected: list[dict[str, Any]]) -> None:
    """Equal bit for bit, dtypes and all."""
    assert len(rows["reward"]) == len(expected)
    for key in rows:
        truth = np.stack([np.asarray(e[key], rows[key].dtype) for e in expected])
        assert rows[key].tobytes() == truth.tobytes(), key


def assert_episodes(
    segments: list[tuple[int, int]], expected: list[dict[str, Any]], open_end: bool = True
) -> None:
    """A segment for each episode that ended, and the rest in one more unless it is still open."""
    cuts = [i + 1 for i, e in enumerate(expected) if e["terminated"] or e["truncated"]]
    if not open_end and (not cuts or cuts[-1] != len(expected)):
        cuts.append(len(expected))
    assert segments == list(zip([0, *cuts], cuts))
