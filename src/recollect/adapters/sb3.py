"""Replay buffers for the off-policy algorithms of Stable-Baselines3, with the rows in a `rc.ReplayBuffer`.

They ask numpy's global generator for what SB3's own ask: with one seed, a training run is the same bit for bit.
"""

from __future__ import annotations

from copy import deepcopy
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from warnings import catch_warnings, simplefilter

import numpy as np
from gymnasium import spaces

from recollect.errors import (
    BudgetError,
    EmptyError,
    MissingExtraError,
    ReadOnlyError,
    SchemaError,
    class_name,
)
from recollect.replay import ReplayBuffer
from recollect.storage import MemoryStorage
from recollect.storage.contract import PathName

try:
    import torch
    from stable_baselines3.common import buffers
    from stable_baselines3.common.type_aliases import DictReplayBufferSamples, ReplayBufferSamples
    from stable_baselines3.her import GoalSelectionStrategy, HerReplayBuffer
except ImportError as error:
    raise MissingExtraError(
        'recollect.adapters.sb3: needs stable-baselines3; run pip install "recollect[sb3]"'
    ) from error

Array = np.ndarray[Any, Any]
# ruff: noqa: NPY002 - the global generator is the one that SB3 seeds


class SB3ReplayBuffer(buffers.DictReplayBuffer):
    """The `replay_buffer_class` for Box and Dict observations; the arguments are those of SB3's `ReplayBuffer`.

    `data` is the `rc.ReplayBuffer` behind it: a lane per environment, a segment per episode. `observations`, `actions`,
    `rewards` and the like are read-only copies in SB3's layout; only `dones` and `timeouts` can be assigned to.

    Ownership: owns `data`; a sample is the caller's own. A pickle holds all rows, as their dump.
    Concurrency: as `data`; one thread adds.
    """

    pos: int  # where SB3's ring goes on, in steps
    full: bool

    def __init__(self, buffer_size: int, observation_space: Any, action_space: Any, device: Any = "auto",
                 n_envs: int = 1, optimize_memory_usage: bool = False,
                 handle_timeout_termination: bool = True, n_steps: int = 1,
                 gamma: float | None = None) -> None:  # fmt: skip
        """Make an empty buffer of `buffer_size // n_envs` steps of `n_envs` environments.

        n-step returns are not here: `n_steps` must be 1, and `gamma` then means nothing.
        """
        _check_one_step(n_steps, type(self).__name__)
        buffers.BaseBuffer.__init__(self, buffer_size, observation_space, action_space, device, n_envs=n_envs)
        self._is_dict = isinstance(observation_space, spaces.Dict)
        if optimize_memory_usage and (handle_timeout_termination or self._is_dict):
            raise ValueError(
                "optimize_memory_usage: must go with a Box and handle_timeout_termination=False, got "
                f"{type(observation_space).__name__} and {handle_timeout_termination}; leave it out"
            )
        self.buffer_size = max(buffer_size // n_envs, 1)
        self.optimize_memory_usage = optimize_memory_usage
        self.handle_timeout_termination = handle_timeout_termination
        self._newest_obs: Any = None  # what followed the newest step, if rows have no next_obs
        self._lanes = np.arange(n_envs)
        obs: Any = (self.obs_shape, observation_space.dtype)
        if self._is_dict:
            obs = {name: (self.obs_shape[name], part.dtype) for name, part in observation_space.items()}
        action = ((self.action_dim,), self._maybe_cast_dtype(action_space.dtype))
        self._space = {"obs": obs, "action": action, "reward": ((), np.dtype(np.float32))}
        self._space |= {} if optimize_memory_usage else {"next_obs": obs}
        self._space |= {"terminated": ((), np.dtype(bool)), "truncated": ((), np.dtype(bool))}
        try:
            self._data = ReplayBuffer.create(
                MemoryStorage, self._space, capacity=self.buffer_size * n_envs, num_lanes=n_envs,
                maintain_segment_metadata=True,
            )  # fmt: skip
        except BudgetError as error:  # its advice is another storage, which is not to be had here
            needed = str(error).partition("; ")[0]
            raise BudgetError(
                f"buffer_size: must fit in memory, got {buffer_size} ({needed}); make it smaller, or keep each "
                "Box observation once with optimize_memory_usage=True and handle_timeout_termination=False"
            ) from None

    @property
    def data(self) -> ReplayBuffer:
        """The rows; made with this object, and read-only, as their number is counted here too."""
        return self._data

    @data.setter
    def data(self, value: Any) -> None:
        raise ReadOnlyError(
            f"data: cannot be assigned to, got {class_name(value)}; take over the steps of a dump with load_dump(path)"
        )

    def load_dump(self, path: PathName) -> None:
        """Drop everything and add the steps of a dump of `data`, the newest if there are more than fit.

        An episode that was going on ends there. A dump of another space or number of environments is refused.
        """
        if self.optimize_memory_usage:
            raise ValueError(
                "load_dump: needs next_obs in the rows, got a buffer with optimize_memory_usage=True; go on from "
                "model.save_replay_buffer"
            )
        with ReplayBuffer.load_from(path) as saved:
            n = self._checked_steps(saved)
            self.reset()
            for step in range(max(n - self.buffer_size, 0), n):
                rows = saved.get_at(self._lanes * n + step)
                infos = [{"TimeLimit.truncated": bool(x)} for x in rows["truncated"]]
                done = rows["terminated"] | rows["truncated"]
                self.add(rows["obs"], rows["next_obs"], rows["action"], rows["reward"], done, infos)
        self._cut_open()

    def _checked_steps(self, saved: ReplayBuffer) -> int:
        """How many steps of every environment a dump has."""
        engine: Any = saved.engine
        if saved.single_space != self._data.single_space:
            raise SchemaError(
                f"load_dump: must have rows of {self._data.single_space}, got {saved.single_space}; make the buffer "
                "with the spaces of the one that was dumped"
            )
        ends = [(0, len(saved))] if engine.native is None else [w[:2] for w in engine.native.windows()]
        lengths = [high - low for low, high in ends]
        if len(lengths) != self.n_envs or len(set(lengths)) > 1:
            raise SchemaError(
                f"load_dump: must have as many steps in each of n_envs={self.n_envs} lanes, got {lengths}; make the "
                "model with the number of environments that was dumped"
            )
        return lengths[0]

    def _cut_open(self) -> None:
        """End the episodes that are going on."""
        for lane in self._lanes:
            self._data.on_lane(int(lane)).mark_segment_end()

    def add(self, obs: Any, next_obs: Any, action: Any, reward: Any, done: Any, infos: Any) -> None:
        """Add one step of every environment."""
        rows = {"obs": obs, "action": action, "reward": reward, "next_obs": next_obs, "terminated": done}
        rows["truncated"] = np.zeros(self.n_envs, bool)
        if self.handle_timeout_termination:
            rows["truncated"] = [info.get("TimeLimit.truncated", False) for info in infos]
        block = {name: self._fitted(name, spec, rows[name]) for name, spec in self._space.items()}
        if self.optimize_memory_usage:
            self._newest_obs = self._fitted("next_obs", self._space["obs"], next_obs).copy()
        ended = block["terminated"]
        block["terminated"] = ended & ~block["truncated"]
        self.data.extend_lanes(block, self._lanes, ends=ended)
        self.pos = (self.pos + 1) % self.buffer_size
        self.full = self.full or self.pos == 0

    def _fitted(self, name: str, spec: Any, value: Any) -> Any:
        """The value as its column has it: SB3 casts, adds and drops axes of one, and makes a row of an action."""
        if isinstance(spec, dict):
            return {key: self._fitted(f"{name}/{key}", part, value[key]) for key, part in spec.items()}
        found, shape = np.asarray(value, spec[1]), (self.n_envs, *spec[0])
        if found.shape == shape:
            return found
        is_action = name == "action" and found.size == prod(shape)
        if not is_action and [n for n in found.shape if n != 1] != [n for n in shape if n != 1]:
            raise SchemaError(
                f"{name}: must have the shape {shape}, a row for each of n_envs={self.n_envs} environments, got "
                f"{found.shape}; add one step of all environments, made with the spaces of this buffer"
            )
        return found.reshape(shape)

    def reset(self) -> None:
        """Drop everything."""
        super().reset()
        self.data.clear()

    def sample(self, batch_size: int, env: Any = None) -> Any:
        """Draw steps; not the oldest, if rows have no next_obs."""
        if not self.pos and not self.full:
            raise EmptyError(
                "sample: needs a step to draw, got an empty buffer; add steps first, with model.learn or add"
            )
        return buffers.ReplayBuffer.sample(self, batch_size, env)

    def _get_samples(self, batch_inds: Array, env: Any = None) -> Any:
        which: Any = None
        if self.n_envs > 1:  # SB3 asks for one environment too, but then nothing is drawn
            which = np.random.randint(0, high=self.n_envs, size=(len(batch_inds),))
        rows = self.data.get_at(self._index(batch_inds, which))
        if self.optimize_memory_usage:
            is_newest = (batch_inds + 1) % self.buffer_size == self.pos
            following = np.where(is_newest, batch_inds, batch_inds + 1) % self.buffer_size
            rows["next_obs"] = self.data.get_column_at(("obs",), self._index(following, which))
            rows["next_obs"][is_newest] = self._newest_obs[0 if which is None else which[is_newest]]
        return self._as_samples(rows, env)

    def _index(self, step: Array, env: Array) -> Array:
        """Where steps of SB3's ring are in `data`: there the oldest is 0, and the lanes follow one another."""
        if self.full and self.pos:
            step = (step - self.pos) % self.buffer_size
        return step if self.n_envs == 1 else env * self.size() + step

    def _as_samples(self, rows: Any, env: Any) -> Any:
        tensor = torch.from_numpy if self.device.type == "cpu" else self.to_torch
        obs, next_obs = self._normalize_obs(rows["obs"], env), self._normalize_obs(rows["next_obs"], env)
        action, reward = tensor(rows["action"]), tensor(self._normalize_reward(rows["reward"][:, None], env))
        ended = tensor(rows["terminated"].astype(np.float32)[:, None])
        if not self._is_dict:
            return ReplayBufferSamples(tensor(obs), action, tensor(next_obs), ended, reward)
        obs, next_obs = ({key: tensor(x) for key, x in part.items()} for part in (obs, next_obs))
        return DictReplayBufferSamples(obs, action, next_obs, ended, reward)

    def _column(self, *keys: str) -> Any:
        """One leaf in SB3's layout, [step of the ring, environment, ...]; of a Dict, a dict of them."""
        if keys in (("obs",), ("next_obs",)) and self._is_dict:
            return {name: self._column(*keys, name) for name in self.observation_space.spaces}
        found, n = self.data.get_column_at(keys, slice(None)), self.size()
        column = np.zeros((self.buffer_size, self.n_envs, *found.shape[1:]), found.dtype)
        steps = (np.arange(n) + (self.pos if self.full else 0)) % self.buffer_size
        column[steps] = found.reshape(self.n_envs, n, *found.shape[1:]).swapaxes(0, 1)
        if keys == ("obs",) and self._newest_obs is not None:
            column[self.pos] = self._newest_obs
        column.flags.writeable = False
        return column

    observations = property(lambda self: self._column("obs"))
    next_observations = property(lambda self: self._column("next_obs"))
    actions = property(lambda self: self._column("action"))
    rewards = property(lambda self: self._column("reward"))
    timeouts = property(lambda self: _Flags.of(self, "truncated"))
    dones = property(lambda self: _Flags.of(self, "terminated"))

    def __getstate__(self) -> dict[str, Any]:
        state = {k: v for k, v in self.__dict__.items() if k not in ("_data", "env", "_valid")}
        with TemporaryDirectory() as directory:
            path = Path(directory, "data")
            self.data.dumps(path, cut_open=True)
            files = [file for file in path.rglob("*") if file.is_file()]
            return {**state, "dump": {str(file.relative_to(path)): file.read_bytes() for file in files}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update({k: v for k, v in state.items() if k != "dump"})
        with TemporaryDirectory() as directory:
            for name, content in state["dump"].items():
                file = Path(directory, name)
                file.parent.mkdir(exist_ok=True)
                file.write_bytes(content)
            self._data = ReplayBuffer.load_from(directory, read_only=False)


def _check_one_step(n_steps: int, name: str) -> None:
    if n_steps != 1:
        raise ValueError(
            f"n_steps: must be 1, as {name} has no n-step returns, got {n_steps}; leave replay_buffer_class out to "
            "have SB3's own, or draw from rc.NStepBatch(buffer.data, n, gamma) in a loop of your own"
        )


class _Flags(np.ndarray[Any, Any]):
    """`dones` or `timeouts` in SB3's layout, which SB3 assigns to where it cuts the last episode."""

    owner: SB3ReplayBuffer | None = None  # a slice of it has none, and is read-only
    leaf = ""

    @classmethod
    def of(cls, owner: SB3ReplayBuffer, leaf: str) -> _Flags:
        flags = owner._column("truncated") | owner._column(leaf)  # `dones` has both ends
        found: _Flags = flags.astype(np.float32).view(cls)
        found.flags.writeable = False
        found.owner, found.leaf = owner, leaf
        return found

    def __setitem__(self, at: Any, value: Any) -> None:
        owner, wanted = self.owner, np.array(self)
        if owner is None:
            return super().__setitem__(at, value)
        wanted[at] = value
        step, env = np.nonzero(wanted != self)
        index = owner._index(step, env)
        rows = owner.data.get_at(index)
        rows[self.leaf] = wanted[step, env] != 0
        rows["terminated"] &= ~rows["truncated"]
        owner.data.set_at(index, rows)
        for lane in env[(step + 1) % owner.buffer_size == owner.pos]:
            owner.data.on_lane(int(lane)).mark_segment_end()
        return None


class SB3HerReplayBuffer(HerReplayBuffer, SB3ReplayBuffer):
    """The `replay_buffer_class` for hindsight goals; the arguments are those of SB3's `HerReplayBuffer`.

    It draws from whole episodes: neither from one that is going on nor from one that is partly overwritten.
    Ownership and Concurrency: as `SB3ReplayBuffer`.
    """

    env: Any = None  # of a buffer that was loaded, until SB3 calls `set_env`
    _valid: Array | None = None  # the steps of whole episodes; None: not known
    __getstate__, __setstate__ = SB3ReplayBuffer.__getstate__, SB3ReplayBuffer.__setstate__

    def __init__(self, buffer_size: int, observation_space: Any, action_space: Any, env: Any, device: Any = "auto",
                 n_envs: int = 1, optimize_memory_usage: bool = False, handle_timeout_termination: bool = True,
                 n_sampled_goal: int = 4, goal_selection_strategy: Any = "future", copy_info_dict: bool = False,
                 n_steps: int = 1, gamma: float | None = None) -> None:  # fmt: skip
        """Make an empty buffer. n-step returns are not here: `n_steps` must be 1, and `gamma` then means nothing."""
        _check_one_step(n_steps, type(self).__name__)
        parts = observation_space.spaces if isinstance(observation_space, spaces.Dict) else {}
        if not {"achieved_goal", "desired_goal"} <= parts.keys():
            raise SchemaError(
                "observation_space: must be a Dict with achieved_goal and desired_goal, got "
                f"{observation_space}; use an environment with goals, or SB3ReplayBuffer"
            )
        HerReplayBuffer.__init__(
            self, buffer_size, observation_space, action_space, env, device, n_envs, optimize_memory_usage,
            handle_timeout_termination, n_sampled_goal, goal_selection_strategy, copy_info_dict,
        )  # fmt: skip

    def add(self, obs: Any, next_obs: Any, action: Any, reward: Any, done: Any, infos: Any) -> None:
        """Add one step of every environment."""
        if self.ep_length[self.pos].any():
            self._valid = None  # an episode is about to be overwritten
        super().add(obs, next_obs, action, reward, done, infos)

    def _compute_episode_length(self, env_idx: int) -> None:
        super()._compute_episode_length(env_idx)
        self._valid = None

    def reset(self) -> None:
        """Drop everything."""
        super().reset()
        self.ep_length[:], self._current_ep_start[:], self._valid = 0, 0, None

    def load_dump(self, path: PathName) -> None:
        """Drop everything and add the steps of a dump of `data`, the newest if there are more than fit.

        An episode that was going on ends there, truncated. The dump has no infos, so `copy_info_dict` must be off.
        """
        if self.copy_info_dict:
            raise ValueError(
                "load_dump: needs no infos, which are not in a dump, got a buffer with copy_info_dict=True; go on from "
                "model.save_replay_buffer"
            )
        super().load_dump(path)

    def _cut_open(self) -> None:
        with catch_warnings():
            simplefilter("ignore")  # it warns that it does what it is called for
            self.truncate_last_trajectory()

    def sample(self, batch_size: int, env: Any = None) -> Any:
        """Draw steps, a share `her_ratio` of them with a goal that their episode achieved."""
        if self._valid is None:
            self._valid = np.flatnonzero(self.ep_length > 0)
        if not len(self._valid):
            raise EmptyError(
                f"sample: needs an episode that has ended, got {self.size()} steps without; "
                "let learning_starts be more than the steps of an episode"
            )
        drawn = np.random.choice(self._valid, size=batch_size, replace=True)
        n = int(self.her_ratio * batch_size)
        drawn = np.concatenate((drawn[n:], drawn[:n]))  # the first n get other goals and come last, as in SB3
        step, which = np.unravel_index(drawn, self.ep_length.shape)
        rows = self.data.get_at(self._index(step, which))
        if n:
            self._relabel(rows, step[-n:], which[-n:])
        return self._as_samples(rows, env)

    def _relabel(self, rows: Any, step: Array, which: Array) -> None:
        """Give the last rows, which are these steps, other goals and the rewards that belong to them."""
        n, goals = len(step), self._sample_goals(step, which)
        infos = deepcopy(self.infos[step, which]) if self.copy_info_dict else [{} for _ in range(n)]
        achieved = rows["next_obs"]["achieved_goal"][-n:]
        rows["reward"][-n:] = self.env.env_method("compute_reward", achieved, goals, infos, indices=[0])[0]
        for name in ("obs", "next_obs"):
            rows[name]["desired_goal"][-n:] = goals

    def _sample_goals(self, batch_indices: Array, env_indices: Array) -> Any:
        start, length = (x[batch_indices, env_indices] for x in (self.ep_start, self.ep_length))
        if self.goal_selection_strategy == GoalSelectionStrategy.FINAL:
            chosen = length - 1
        else:
            is_future = self.goal_selection_strategy == GoalSelectionStrategy.FUTURE
            first = (batch_indices - start) % self.buffer_size if is_future else 0
            chosen = np.random.randint(first, length)
        index = self._index((start + chosen) % self.buffer_size, env_indices)
        return self.data.get_column_at(("next_obs", "achieved_goal"), index)
