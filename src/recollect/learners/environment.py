"""Environments as the reference learners see them: float32 vectors, true next observations, no fake transition.

How episodes end and who resets is decided in `recollect.collect.autoreset`; this applies it to whole batches.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode

from recollect.collect.autoreset import Slots, last_observations, mode_or_next_step, warn_of_overwritten
from recollect.errors import EnvContractError

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class EnvSpaces:
    """What a learner must know of an environment: sizes, actions and how it resets. Small and picklable."""

    obs_dim: int
    critic_dim: int
    action_dim: int
    n_choices: int
    first_choice: int
    low: tuple[float, ...]
    high: tuple[float, ...]
    action_shape: tuple[int, ...]
    action_dtype: str
    autoreset: str

    def action_bounds(self) -> tuple[Array, Array]:
        """Return finite bounds of a Box; EnvContractError otherwise."""
        low, high = self._bounds()
        if self.n_choices:
            raise EnvContractError(
                f"action: must be a Box for a tanh policy, got Discrete({self.n_choices}); use APPO"
            )
        if not (np.isfinite(low).all() and np.isfinite(high).all() and (low < high).all()):
            raise EnvContractError(
                f"action: bounds must be finite and apart, got low {list(self.low)} and high {list(self.high)}; "
                "wrap the environment with RescaleAction"
            )
        return low, high

    def _bounds(self) -> tuple[Array, Array]:
        return np.array(self.low, np.float32), np.array(self.high, np.float32)

    def to_env(self, actions: Array) -> Array:
        """Return actions `[n, action_dim]` as the environment takes them: in bounds, its shape, its dtype."""
        if self.n_choices:
            return actions[:, 0].astype(np.int64) + self.first_choice
        bounded = np.clip(actions, *self._bounds())
        return bounded.reshape(len(actions), *self.action_shape).astype(self.action_dtype, copy=False)


def spaces_of(env: Any) -> EnvSpaces:
    """Read the spaces of a vector environment; EnvContractError names the leaf that no learner can use."""
    reader = ObsReader(env.single_observation_space)
    action, mode = env.single_action_space, mode_or_next_step(env).name
    if isinstance(action, spaces.Discrete):
        n, first = int(action.n), int(action.start)
        return EnvSpaces(reader.obs_dim, reader.critic_dim, 1, n, first, (), (), (), "int64", mode)
    if not isinstance(action, spaces.Box) or action.dtype.kind != "f":
        raise EnvContractError(f"action: must be a Box of floats or Discrete, got {action}")
    low, high = (tuple(float(x) for x in np.ravel(bound)) for bound in (action.low, action.high))
    size = math.prod(action.shape)
    if not size:
        raise EnvContractError(f"action: must have at least one number, got {action}")
    return EnvSpaces(
        reader.obs_dim, reader.critic_dim, size, 0, 0, low, high, action.shape, action.dtype.name, mode
    )


class ObsReader:
    """Turns a batch of observations into float32 matrices for the actor and, if there is a leaf for it, the critic."""

    def __init__(self, space: Any) -> None:
        self.obs, self.critic = _leaves_of_roles(space)
        self.obs_dim, self.critic_dim = (
            sum(math.prod(leaf.shape) for leaf in x) for x in (self.obs, self.critic)
        )

    def read(self, batch: Any, n: int) -> tuple[Array, Array | None]:
        """Return new float32 arrays `[n, obs_dim]` and `[n, critic_dim]` (None without a critic leaf)."""
        obs = _matrix(self.obs, self.obs_dim, batch, n)
        return obs, _matrix(self.critic, self.critic_dim, batch, n) if self.critic else None


@dataclass(frozen=True, slots=True)
class _Leaf:
    path: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def name(self) -> str:
        return "/".join(("observation", *self.path))


def _leaves_of_roles(space: Any) -> tuple[list[_Leaf], list[_Leaf]]:
    if isinstance(space, spaces.Dict) and "obs" in space.spaces and set(space.spaces) <= {"obs", "critic"}:
        critic = _leaves(space["critic"], ("critic",)) if "critic" in space.spaces else []
        return _leaves(space["obs"], ("obs",)), critic
    return _leaves(space, ()), []


def _leaves(space: Any, path: tuple[str, ...]) -> list[_Leaf]:
    if isinstance(space, spaces.Dict):
        return [leaf for key, part in space.spaces.items() for leaf in _leaves(part, (*path, key))]
    if not isinstance(space, spaces.Box):
        name = "/".join(("observation", *path))
        raise EnvContractError(
            f"{name}: must be a Box, got {space}; wrap the environment with FlattenObservation"
        )
    return [_Leaf(path, space.shape, np.dtype(space.dtype))]


def _matrix(leaves: list[_Leaf], dim: int, batch: Any, n: int) -> Array:
    out = np.empty((n, dim), np.float32)
    at = 0
    with np.errstate(
        over="ignore", invalid="ignore"
    ):  # what is beyond float32 becomes inf and is reported as such
        for leaf in leaves:
            values, width = _checked(leaf, batch, n), math.prod(leaf.shape)
            out[:, at : at + width] = values.reshape(n, width)
            at += width
    return out


def _checked(leaf: _Leaf, batch: Any, n: int) -> Array:
    for key in leaf.path:
        if not isinstance(batch, Mapping) or key not in batch:
            raise EnvContractError(
                f"{leaf.name}: must be in the observation, got {type(batch).__name__} without {key!r}"
            )
        batch = batch[key]
    values = np.asarray(batch)
    if values.shape != (n, *leaf.shape):
        raise EnvContractError(
            f"{leaf.name}: shape must be {(n, *leaf.shape)} as its space says, got {values.shape}"
        )
    if values.dtype != leaf.dtype:
        raise EnvContractError(
            f"{leaf.name}: dtype must be {leaf.dtype} as its space says, got {values.dtype}"
        )
    return values


@dataclass(frozen=True, slots=True)
class Step:
    """One step of n environments: what the policy saw, what it did, what truly came of it.

    `valid` is False where there is no transition (the step was a reset) or it was rejected for a value that is not
    finite. `ends` are the ends of episodes, `rejected` counts what was dropped, `n_steps` real environment steps.
    """

    obs: Array
    critic: Array | None
    actions: Array
    rewards: Array
    next_obs: Array
    next_critic: Array | None
    dones: Array
    truncated: Array
    valid: Array
    is_step: Array
    rejected: int
    info: Mapping[str, Any]

    @property
    def n_steps(self) -> int:
        """Environment steps that were made: all but the resets."""
        return int(np.count_nonzero(self.is_step))


class EnvDriver:
    """Steps a vector environment and says what is true of each step, in every auto-reset mode.

    Ownership: closes the environment. Arrays are copied before the next step, so environments may reuse theirs.
    Concurrency: one thread.
    """

    def __init__(self, env: Any, *, seed: int, nan_policy: str = "raise") -> None:
        self.env, self.n = env, int(env.num_envs)
        self.spec = spaces_of(env)
        self._mode = AutoresetMode[self.spec.autoreset]
        self._space, self._reader = env.single_observation_space, ObsReader(env.single_observation_space)
        self._slots = Slots(self._mode, self.n)
        self._raises = nan_policy == "raise"
        self._warned = False
        obs, _ = env.reset(seed=int(seed) % 2**31)
        self._slots.reset(None)
        self.obs, self.critic = self._reader.read(obs, self.n)
        if self._raises:
            self._check_obs(self.obs, self.critic)

    def acting_obs(self) -> Array:
        """Observations to act on: where one is not finite (its rows are rejected), zeros."""
        if self._raises:
            return self.obs
        bad = np.asarray(~np.isfinite(self.obs).all(axis=1))
        return np.where(bad[:, None], np.float32(0), self.obs) if bad.any() else self.obs

    def step(self, actions: Array) -> Step:
        """Step all environments by actions `[n, action_dim]`; EnvContractError for what breaks the contract."""
        before = self.obs, self.critic
        recorded = self._slots.recorded()
        is_step = np.ones(self.n, bool)
        if recorded is not None:
            is_step[:] = False
            is_step[recorded] = True
        raw, rewards, terminated, truncated, info = self.env.step(self.spec.to_env(actions))
        rewards = self._flags("reward", rewards, None).astype(np.float32)
        terminated, truncated = (
            self._flags(name, x, np.dtype(bool)) & is_step
            for name, x in (("terminated", terminated), ("truncated", truncated))
        )
        # One flag says how an episode ended: what terminated needs no bootstrap, whatever the clock said.
        truncated = truncated & ~terminated
        dones = terminated | truncated
        any_done = bool(dones.any())
        self._slots.stepped(dones.copy(), any_done)  # it clears its own at a reset
        next_obs, next_critic = self._advance(raw, info, dones, any_done)
        bad = self._bad(next_obs, next_critic) | self._bad(*before)
        nan_reward = ~np.isfinite(rewards)
        if self._raises:
            wrong = np.flatnonzero(nan_reward & is_step)
            if len(wrong):
                raise _not_finite("reward", int(wrong[0]))
            self._check_obs(next_obs, next_critic)
            self._check_obs(self.obs, self.critic)
        rejected = is_step & (bad | nan_reward)
        return Step(
            *before, actions, rewards, next_obs, next_critic, dones, truncated, is_step & ~rejected, is_step,
            int(np.count_nonzero(rejected)), info,
        )  # fmt: skip

    def _advance(self, raw: Any, info: Any, dones: Array, any_done: bool) -> tuple[Array, Array | None]:
        """Set the observations to act on next; return the true next ones of this step."""
        true = raw
        if any_done and self._mode is AutoresetMode.SAME_STEP:
            true = self._with_finals(raw, info, dones)
        next_obs = self._reader.read(true, self.n)
        if any_done and self._mode is AutoresetMode.DISABLED:
            raw, _ = self.env.reset(options={"reset_mask": dones.copy()})
            self._slots.reset(dones)
            self.obs, self.critic = self._reader.read(raw, self.n)
        else:
            self.obs, self.critic = next_obs if true is raw else self._reader.read(raw, self.n)
        return next_obs

    def _with_finals(self, raw: Any, info: Any, dones: Array) -> Any:
        true, wrong, equal = last_observations(self._space, raw, info, np.flatnonzero(dones))
        if wrong:
            raise EnvContractError(str(next(iter(wrong.values()))))
        if equal is not None and not self._warned:
            self._warned = True
            warn_of_overwritten(equal)
        return true

    def _flags(self, name: str, x: Any, dtype: np.dtype[Any] | None) -> Array:
        found = np.asarray(x)
        if found.shape != (self.n,):
            raise EnvContractError(f"{name}: shape must be ({self.n},), got {found.shape}")
        if dtype is not None and found.dtype != dtype:
            raise EnvContractError(f"{name}: dtype must be {dtype}, got {found.dtype}")
        if dtype is None and found.dtype.kind not in "fiu":
            raise EnvContractError(f"{name}: dtype must be a number, got {found.dtype}")
        return found

    def _bad(self, obs: Array, critic: Array | None) -> Array:
        bad = np.asarray(~np.isfinite(obs).all(axis=1))
        return bad if critic is None else bad | ~np.isfinite(critic).all(axis=1)

    def _check_obs(self, obs: Array, critic: Array | None) -> None:
        for leaves, matrix in ((self._reader.obs, obs), (self._reader.critic, critic)):
            if matrix is not None and not np.isfinite(matrix).all():
                env, column = (int(k) for k in np.argwhere(~np.isfinite(matrix))[0])
                ends = np.cumsum([math.prod(leaf.shape) for leaf in leaves])
                raise _not_finite(leaves[int(np.searchsorted(ends, column, "right"))].name, env)

    def close(self) -> None:
        """Close the environment."""
        self.env.close()


def _not_finite(leaf: str, env: int) -> EnvContractError:
    return EnvContractError(
        f"{leaf}: must be finite, got NaN or infinity in environment {env}; "
        'correct it, or pass nan_policy="reject" to drop and count such rows'
    )
