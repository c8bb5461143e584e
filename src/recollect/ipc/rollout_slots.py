"""What a slot of a rollout ring holds: its fields, where they lie, and views of them in either order.

Memory is time-major: one step's write of all environments is one block. `order="env"` only turns the views.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import numpy as np

from recollect import checks
from recollect.memory.segment import page_up
from recollect.spaces.dtypes import dtype_from, dtype_name

Array = np.ndarray[Any, Any]
ORDERS = ("env", "time")
_LINE = 64
_FLOAT = np.dtype(np.float32)
_FINALS = ("final_index", "final_count")  # their dtypes are given


@dataclass(frozen=True, slots=True)
class SlotField:
    """One field as it lies in memory; a per-step one has the axes (T, N) first."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    per_step: bool
    offset: int

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def shape_in(self, order: str) -> tuple[int, ...]:
        """The shape that users see."""
        if order == "time" or not self.per_step:
            return self.shape
        return (self.shape[1], self.shape[0], *self.shape[2:])

    def view(self, raw: Array, order: str) -> Array:
        """This field of the bytes of a slot."""
        view = raw[self.offset : self.offset + self.nbytes].view(self.dtype).reshape(self.shape)
        return view.swapaxes(0, 1) if order == "env" and self.per_step else view


@dataclass(frozen=True)
class SlotPlan:
    """The fields of a slot, in order, each on a cache line of its own."""

    fields: tuple[SlotField, ...]

    @cached_property
    def slot_nbytes(self) -> int:
        """S: the fields of one rollout, each rounded up to 64 bytes."""
        last = self.fields[-1]
        return _up(last.offset + last.nbytes)

    @property
    def stride(self) -> int:
        """Bytes from one slot to the next."""
        return page_up(self.slot_nbytes)

    def shapes(self, order: str) -> dict[str, tuple[int, ...]]:
        """What users see: field → shape."""
        return {f.name: f.shape_in(order) for f in self.fields}

    def views(self, raw: Array, order: str) -> dict[str, Array]:
        """Views of the bytes of a slot; as writable as those are."""
        return {f.name: f.view(raw, order) for f in self.fields}

    def to_json(self) -> list[Any]:
        """The plan as plain JSON values."""
        return [[f.name, list(f.shape), dtype_name(f.dtype), f.per_step] for f in self.fields]

    @staticmethod
    def from_json(obj: Any) -> SlotPlan:
        """The plan that `to_json` wrote."""
        return _placed([(n, tuple(s), dtype_from(d, n), bool(per)) for n, s, d, per in obj])

    def first_difference(self, found: SlotPlan) -> tuple[str, Any, Any] | None:
        """(what, ours, theirs) of the first field that differs."""
        mine, theirs = self.to_json(), found.to_json()
        for (name, shape, dtype, _), other in zip(mine, theirs):
            for what, ours, others in ((f"{name}: name", name, other[0]), (f"{name}: shape", shape, other[1]),
                                       (f"{name}: dtype", dtype, other[2])):  # fmt: skip
                if ours != others:
                    return what, ours, others
        if len(mine) != len(theirs):
            return "fields", [f[0] for f in mine], [f[0] for f in theirs]
        return None


def plan_slot(
    num_envs: int,
    num_steps: int,
    obs_dim: int | tuple[int, ...],
    action_dim: int,
    critic_dim: int = 0,
    finals: bool = False,
    fields: Mapping[str, Any] | None = None,
    dtypes: Mapping[str, Any] | None = None,
) -> SlotPlan:
    """Check the sizes of a rollout and place its fields; ValueError or TypeError names the argument."""
    for label, n, least in (
        ("num_envs", num_envs, 1),
        ("num_steps", num_steps, 1),
        ("action_dim", action_dim, 1),
        ("critic_dim", critic_dim, 0),
    ):
        checks.count(label, n, least)
    obs = _checked_shape("obs_dim", (obs_dim,) if not isinstance(obs_dim, tuple | list) else obs_dim, 1)
    critic = (critic_dim,)
    grid, row = (num_steps, num_envs), (num_envs,)
    kinds = {name: dtype_from(d, f"dtypes[{name!r}]") for name, d in (dtypes or {}).items()}

    def of(name: str, like: str | None = None) -> np.dtype[Any]:
        return kinds.get(name, kinds.get(like or name, _FLOAT))

    found: list[tuple[str, tuple[int, ...], np.dtype[Any], bool]] = [
        ("obs", (*grid, *obs), of("obs"), True),
        ("actions", (*grid, action_dim), of("actions"), True),
        *((name, grid, of(name), True) for name in ("log_probs", "rewards", "dones", "truncated")),
        ("last_obs", (*row, *obs), of("last_obs", "obs"), False),
    ]
    if critic_dim:
        found += [
            ("critic", (*grid, *critic), of("critic"), True),
            ("last_critic", (*row, *critic), of("last_critic", "critic"), False),
        ]
    found += [(name, (*grid, *shape), dtype, True) for name, shape, dtype in _extra(fields or {})]
    if finals:
        cells = (num_steps * num_envs,)
        found += [
            ("final_obs", (*cells, *obs), of("final_obs", "obs"), False),
            ("final_index", cells, np.dtype(np.int64), False),
            ("final_count", (), np.dtype(np.int64), False),
        ]
        found += (
            [("final_critic", (*cells, *critic), of("final_critic", "critic"), False)] if critic_dim else []
        )
    _check_names([name for name, *_ in found], kinds)
    return _placed(found)


def _placed(found: list[tuple[str, tuple[int, ...], np.dtype[Any], bool]]) -> SlotPlan:
    placed, at = [], 0
    for name, shape, dtype, per_step in found:
        placed.append(SlotField(name, shape, dtype, per_step, at))
        at = _up(at + placed[-1].nbytes)
    return SlotPlan(tuple(placed))


def _extra(fields: Mapping[str, Any]) -> list[tuple[str, tuple[int, ...], np.dtype[Any]]]:
    found = []
    for name, spec in fields.items():
        if not isinstance(spec, tuple | list) or len(spec) != 2:
            raise ValueError(f"fields: must be name: (shape, dtype), got {name!r}: {spec!r}; pass such pairs")
        shape = _checked_shape(f"fields[{name!r}]", spec[0], 0)
        found.append((name, shape, dtype_from(spec[1], f"fields[{name!r}]")))
    return found


def _check_names(names: list[str], kinds: Mapping[str, Any]) -> None:
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise ValueError(f"fields: must have new names, got {sorted(twice)}, which a slot has; rename them")
    for name in kinds:
        if name not in names or name in _FINALS:
            raise ValueError(f"dtypes: must name fields of the slot, got {name!r}; there are {names}")


def _checked_shape(label: str, shape: Any, least: int) -> tuple[int, ...]:
    sizes = shape if isinstance(shape, tuple | list) else (shape,)
    for n in sizes:
        checks.count(label, n, least)
    return tuple(int(n) for n in sizes)


def _up(n: int) -> int:
    return -(-n // _LINE) * _LINE
