"""Recording an Env: one slot, values without a batch axis."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import gymnasium
import numpy as np

from recollect.collect.autoreset import final_obs, warn_of_overwritten
from recollect.collect.values import copied, same
from recollect.collect.wrapper import Bools, ReplayBufferCollectionWrapper


class EnvCollectionWrapper(ReplayBufferCollectionWrapper, gymnasium.Wrapper[Any, Any, Any, Any]):
    """A `gymnasium.Wrapper` that records."""

    def _wrap(self, env: Any) -> None:
        gymnasium.Wrapper.__init__(self, env)

    def _count(self, env: Any) -> int:
        return 1

    def _reset_arguments(self, mask: Any, kwargs: dict[str, Any]) -> tuple[Bools | None, dict[str, Any]]:
        if mask is not None:
            raise TypeError("reset: mask is for a VectorEnv, got one for an Env; call reset()")
        return None, kwargs

    def _take_reset(self, context: Any, obs: Any, mask: Bools | None) -> None:
        self._obs, self._context = copied(obs), copied(context)

    def _copy_action(self, action: Any) -> Any:
        return copied(action)

    def _record(self, action: Any, result: Any) -> tuple[Exception | None, Iterable[int]]:
        obs, reward, terminated, truncated, info = result
        done = bool(terminated) or bool(truncated)
        is_reset = self._slots.recorded() is not None
        before, self._obs = self._obs, copied(obs)
        self._slots.stepped(np.full(1, done), done)
        if is_reset:
            return self._take_context(info), ()
        error: Exception | None = None
        next_obs = self._obs
        if done and self._slots.keeps_final_obs:
            try:
                next_obs = copied(final_obs(info, 0, is_vector=False))
                self._warn_if_overwritten(next_obs)
            except ValueError as missing:
                error = missing
        if error is not None:
            self._recorder.sink.reject(0)
            self._recorder.sink.end((0,))
        else:
            parts = {
                "obs": before,
                "context": self._context,
                "action": action,
                "reward": reward,
                "next_obs": next_obs,
                "terminated": terminated,
                "truncated": truncated,
                "done": done,
                "env_index": 0,
            }
            error = self._recorder.record_one(parts, done)
        if done and self._slots.keeps_final_obs:
            error = error or self._take_context(info)
        return error, (0,) if done else ()

    def _warn_if_overwritten(self, last: Any) -> None:
        if not self._warned and same(last, self._obs):
            self._warned = True
            warn_of_overwritten(0)

    def _take_context(self, info: Any) -> Exception | None:
        """After an automatic reset the context is that of `info`; nobody may guess it."""
        if not (self._has_context and self._recorder.builder.reads_context):
            return None
        if "context" in info:
            self._context = copied(info["context"])
            return None
        self._slots.lose()
        return ValueError(
            'the environment reset itself: info["context"] must hold the new episode\'s context, got none; '
            "call reset() yourself"
        )
