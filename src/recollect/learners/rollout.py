"""Rollouts: writing steps into the cells of a ring's slot, and staging slots side by side for the learner."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from recollect.learners.environment import Array, EnvSpaces, Step

VALID = {"valid": ((), "bool")}


def has_finals(spec: EnvSpaces) -> bool:
    """Whether final observations need a block of their own: under NEXT_STEP the next cell holds them."""
    return spec.autoreset != "NEXT_STEP"


class RolloutWriter:
    """Fills a time-major slot (the arrays of `RolloutRingBuffer(order="time").write_buffer`) step by step.

    Ownership: the slot is the ring's; every cell of it is written. Concurrency: the collector's thread.
    """

    def __init__(self, slot: Mapping[str, Array]) -> None:
        self._slot, self._t, self._count = slot, 0, 0
        self._n = slot["rewards"].shape[1]

    def write(self, step: Step, log_probs: Array) -> None:
        """Write the next cell of every environment."""
        slot, t = self._slot, self._t
        slot["obs"][t], slot["actions"][t], slot["log_probs"][t] = step.obs, step.actions, log_probs
        slot["rewards"][t], slot["dones"][t], slot["truncated"][t] = step.rewards, step.dones, step.truncated
        slot["valid"][t] = step.valid
        if step.critic is not None:
            slot["critic"][t] = step.critic
        if "final_obs" in slot:
            self._write_finals(step)
        self._t += 1

    def _write_finals(self, step: Step) -> None:
        done = np.flatnonzero(step.dones & step.valid)
        rows = slice(self._count, self._count + len(done))
        self._slot["final_index"][rows] = self._t * self._n + done
        self._slot["final_obs"][rows] = step.next_obs[done]
        if step.next_critic is not None:
            self._slot["final_critic"][rows] = step.next_critic[done]
        self._count += len(done)

    def finish(self, last_obs: Array, last_critic: Array | None) -> None:
        """Write what comes after the last cell; the slot is then whole."""
        self._slot["last_obs"][:] = last_obs
        if last_critic is not None:
            self._slot["last_critic"][:] = last_critic
        if "final_obs" in self._slot:
            self._slot["final_count"][...] = self._count


class StagingPool:
    """The learner's copies of the newest rollouts, side by side: tensors `[T, size·N, ...]`.

    `shapes` and `dtypes` are those of one time-major slot. Fill `slot(k)` for k = 0, 1, ... and then over again.

    Ownership: allocated once; `batch()` is views, valid until a slot is filled again. Concurrency: one thread.
    """

    def __init__(
        self, shapes: Mapping[str, tuple[int, ...]], dtypes: Mapping[str, str], size: int, device: Any
    ) -> None:
        import torch

        self.size, self._n = size, shapes["rewards"][1]
        self._whole: dict[str, Any] = {}
        self._finals: list[dict[str, Any]] = [{} for _ in range(size)]
        for name, shape in shapes.items():
            dtype = getattr(torch, dtypes.get(name, "float32"))
            if name.startswith("final_"):
                for finals in self._finals:
                    finals[name] = torch.zeros(shape, dtype=dtype, device=device)
            else:
                axis = _axis(name)
                wide = (*shape[:axis], shape[axis] * size, *shape[axis + 1 :])
                self._whole[name] = torch.zeros(wide, dtype=dtype, device=device)
        self._filled = 0

    def slot(self, k: int) -> dict[str, Any]:
        """Return where to copy a rollout to; slots are filled in order before any is filled again."""
        self._filled = max(self._filled, k + 1)
        found = {name: x.narrow(_axis(name), k * self._n, self._n) for name, x in self._whole.items()}
        return {**found, **self._finals[k]}

    def batch(self) -> dict[str, Any]:
        """Return all rollouts filled so far as one; `final_cells` are places `t·width + n` of it."""
        import torch

        width, n = self._filled * self._n, self._n
        out = {name: x.narrow(_axis(name), 0, width) for name, x in self._whole.items()}
        used = self._finals[: self._filled]
        if used and used[0]:
            counts = [int(finals["final_count"]) for finals in used]
            cells = [finals["final_index"][:count] for finals, count in zip(used, counts)]
            places = [cell // n * width + cell % n + k * n for k, cell in enumerate(cells)]
            out["final_cells"] = torch.cat(places)
            for name in ("final_obs", "final_critic"):
                if name in used[0]:
                    out[name] = torch.cat([finals[name][:count] for finals, count in zip(used, counts)])
        return out


def _axis(name: str) -> int:
    return 0 if name.startswith("last_") else 1
