"""Recording a VectorEnv: B slots, values with a batch axis."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from gymnasium.vector import VectorWrapper

from recollect.collect.autoreset import last_observations, warn_of_overwritten
from recollect.collect.sinks import Faults
from recollect.collect.values import assigned, copied, same_slots
from recollect.collect.wrapper import Bools, Ints, ReplayBufferCollectionWrapper
from recollect.spaces import as_numpy, transition_space


class VectorCollectionWrapper(ReplayBufferCollectionWrapper, VectorWrapper[Any, Any, Any, Any, Any]):
    """A `VectorWrapper` that records.

    Ownership: the copies of observations and actions are filled again and again, two and one of each; what a
    transition builder gets is a copy of its own.
    """

    def _wrap(self, env: Any) -> None:
        VectorWrapper.__init__(self, env)
        self._space = transition_space(env, ["obs"])["obs"]
        self._index = np.arange(env.num_envs)
        self._spare: Any = None
        self._action: Any = None

    def _count(self, env: Any) -> int:
        return int(env.num_envs)

    def _reset_arguments(self, mask: Any, kwargs: dict[str, Any]) -> tuple[Bools | None, dict[str, Any]]:
        options = kwargs.get("options") or {}
        if mask is not None and "reset_mask" in options:
            raise ValueError("reset: mask and options['reset_mask'] are one thing, got both; pass one")
        mask = options.get("reset_mask") if mask is None else mask
        if mask is None:
            return None, kwargs
        checked = np.array(as_numpy(mask))
        if checked.dtype != bool or checked.shape != (self._n,) or not checked.any():
            raise ValueError(
                f"mask: must be bool of shape ({self._n},) with at least one True, got {checked.dtype} of shape "
                f"{checked.shape}"
            )
        # A new dict: gymnasium takes the mask out of the one it gets.
        return checked, {**kwargs, "options": {**options, "reset_mask": checked.copy()}}

    def _take_reset(self, context: Any, obs: Any, mask: Bools | None) -> None:
        if mask is None:
            self._obs, self._context, self._spare = copied(obs), copied(context), None
            return
        others = np.flatnonzero(~mask & ~self._slots.lost)
        if not same_slots(self._space, self._obs, obs, others):
            self._lose(None)
            raise ValueError(
                "mask: the environment has moved slots outside of it, and seems not to know options['reset_mask']; "
                "call reset() for all slots"
            )
        self._obs = assigned(self._space, self._obs, copied(obs), mask)
        if self._has_context:
            self._context = assigned(self._context_space(), self._context, copied(context), mask)

    def _context_space(self) -> Any:
        return transition_space(self.env, ["context"])["context"]

    def _copy_action(self, action: Any) -> Any:
        if self._pending is not None:
            return copied(action)  # a step under way, which will refuse this one, still needs its own
        self._action = copied(action, self._action)
        return self._action

    def _record(self, action: Any, result: Any) -> tuple[Exception | None, Iterable[int]]:
        obs, reward, terminated, truncated, info = result
        done = np.logical_or(terminated, truncated)
        any_done = bool(done.any())
        slots = self._slots.recorded()
        before = self._obs
        self._obs = copied(obs, self._spare)
        self._spare = before
        self._slots.stepped(done, any_done)
        next_obs: Any = self._obs
        wrong: Faults = {}
        if any_done and self._slots.keeps_final_obs:
            next_obs, wrong = self._last_observations(info, done)
        parts = {
            "obs": before,
            "context": self._context,
            "action": action,
            "reward": reward,
            "next_obs": next_obs,
            "terminated": terminated,
            "truncated": truncated,
            "done": done,
            "env_index": self._index,
        }
        error = self._recorder.record(parts, slots, done, wrong)
        if self._has_context:
            error = error or self._take_context(info, self._reset_by_itself(slots, done))
        return error, np.flatnonzero(done).tolist() if any_done and self.dump_on_episode_end else ()

    def _last_observations(self, info: Any, done: Bools) -> tuple[Any, Faults]:
        next_obs, wrong, equal = last_observations(self._space, self._obs, info, np.flatnonzero(done))
        if equal is not None and not self._warned:
            self._warned = True
            warn_of_overwritten(equal)
        return next_obs, wrong

    def _reset_by_itself(self, recorded: Ints | None, done: Bools) -> Ints:
        if self._slots.keeps_final_obs:
            return np.flatnonzero(done)
        return self._index[:0] if recorded is None else np.setdiff1d(self._index, recorded)

    def _take_context(self, info: Any, slots: Ints) -> Exception | None:
        """After automatic resets the contexts are those of `info`; nobody may guess them."""
        if not len(slots) or not self._recorder.builder.reads_context:
            return None
        mask = np.isin(self._index, slots)
        present = info.get("_context", mask) if "context" in info else ~mask
        if not np.all(np.asarray(present)[mask]):
            self._slots.lose(mask)
            return ValueError(
                f'slots {slots.tolist()[:8]} reset themselves: info["context"] must hold their new contexts, got none; '
                "use AutoresetMode.DISABLED"
            )
        self._context = assigned(self._context_space(), self._context, copied(info["context"]), mask)
        return None
