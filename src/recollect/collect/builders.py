"""Transition builders: what an environment's step becomes in a buffer.

A step is a dict of parts: `obs action reward next_obs terminated truncated done env_index`, and `context` where there
is one. From a vector environment every part has a batch axis over its slots.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np
from gymnasium import Space, spaces

from recollect.batch.structure import select, unbatch
from recollect.collect.values import copied, slot_of
from recollect.errors import class_name
from recollect.replay import ReplayBuffer
from recollect.spaces import as_numpy, as_space, first_difference, transition_space
from recollect.spaces.convert import narrow
from recollect.spaces.dtypes import dtype_kind
from recollect.spaces.transformation import DataTransformation

KEYS = ("obs", "action", "reward", "next_obs", "terminated", "truncated", "done", "env_index", "context")
CONVERTED = ("reward", "terminated", "truncated", "done", "env_index")
Array = np.ndarray[Any, Any]
Ints = np.ndarray[Any, np.dtype[np.int64]]
Parts = Mapping[str, Any]
# A batch; which of its samples are meant, one for each slot asked for (None: it has no others); what failed, by slot.
Built = tuple[Any, Ints | None, dict[int, Exception]]


class Builder(Protocol):
    """Makes samples of a buffer's space from steps.

    Ownership: the parts are the caller's, who fills them again for the next step; foreign code gets copies.
    """

    reads_context: bool

    def one(self, parts: Parts) -> Any:
        """Return the sample of an Env's step."""
        ...

    def batch(self, parts: Parts, slots: Ints | None) -> Built:
        """Return the samples of these slots (None: all), without those that failed, and why they did."""
        ...


def make_builder(env: Any, buffer: ReplayBuffer, given: Any) -> Builder:
    """Return the builder for a buffer; ValueError if it cannot make samples of the buffer's space."""
    if given is None:
        return DefaultBuilder(env, buffer.single_space)
    if isinstance(given, DataTransformation):
        return TransformationBuilder(env, buffer.single_space, given)
    if callable(given):
        return CallableBuilder(env, buffer, given)
    raise TypeError(
        f"transition_builder: must be a callable, a DataTransformation or None, got {class_name(given)}"
    )


def has_context(env: Any) -> bool:
    """Tell whether an environment has a `context_space`."""
    return "context" in available_keys(env)


def available_keys(env: Any) -> list[str]:
    """Return the parts that an environment's steps have."""
    try:
        transition_space(env, ["context"])
    except ValueError:
        return [key for key in KEYS if key != "context"]
    return list(KEYS)


class DefaultBuilder:
    """Takes each key of a Dict space from the part of that name."""

    def __init__(self, env: Any, space: Space[Any]) -> None:
        known = available_keys(env)
        if not isinstance(space, spaces.Dict):
            raise ValueError(
                f"replay_buffers: the default builder needs a Dict space with keys among {known}, got "
                f"{class_name(space)}; pass a transition_builder"
            )
        for key in space.spaces:
            if key not in known:
                raise ValueError(
                    f"replay_buffers: keys must be among {known}, got {key!r}; change the space, or pass a "
                    "transition_builder"
                )
        self.reads_context = "context" in space.spaces
        self._leaves = [(key, leaf if key in CONVERTED else None) for key, leaf in space.spaces.items()]

    def one(self, parts: Parts) -> Any:
        return {
            key: parts[key] if leaf is None else _converted_one(parts[key], leaf)
            for key, leaf in self._leaves
        }

    def batch(self, parts: Parts, slots: Ints | None) -> Built:
        whole = {
            key: parts[key] if leaf is None else converted(parts[key], leaf, key)
            for key, leaf in self._leaves
        }
        return whole, slots, {}  # taken apart when it is written: a copy here would be one too many


def converted(value: Any, leaf: Space[Any], name: str) -> Any:
    """Return rewards or flags as the leaf's dtype; SchemaError if they do not fit it."""
    array = np.asarray(as_numpy(value))
    dtype = leaf.dtype
    if dtype is None or array.dtype == dtype:
        return array
    if dtype_kind(np.dtype(dtype)) == "float":
        try:
            with np.errstate(over="raise"):
                return array.astype(dtype)
        except FloatingPointError:
            pass
    return narrow(array, np.dtype(dtype), name)


def _converted_one(value: Any, leaf: Space[Any]) -> Any:
    if leaf.shape or leaf.dtype is None:
        return converted(value, leaf, "reward")
    kind = dtype_kind(np.dtype(leaf.dtype))
    if kind == "float":
        return float(value)
    if kind == "bool":
        return bool(value)
    number = float(value)
    return int(number) if number.is_integer() else number  # what is no integer is refused with its name


class CallableBuilder:
    """Asks a function for each slot's sample."""

    reads_context = True

    def __init__(self, env: Any, buffer: ReplayBuffer, function: Callable[..., Any]) -> None:
        self._function, self._space = function, buffer.single_space
        self._layout = buffer.inner_storage.layout
        self._cast = bool(getattr(buffer.inner_storage, "cast", False))
        keys = [key for key in available_keys(env) if key not in CONVERTED]
        self._parts = transition_space(env, keys)

    def one(self, parts: Parts) -> Any:
        return self._call(parts, 0)

    def _call(self, parts: Parts, slot: int) -> Any:
        return self._function(
            cached_obs=copied(parts["obs"]),
            cached_context=copied(parts.get("context")),
            action=copied(parts["action"]),
            next_obs=copied(parts["next_obs"]),
            reward=parts["reward"],
            terminated=parts["terminated"],
            truncated=parts["truncated"],
            env_index=slot,
            rb_single_space=self._space,
        )

    def batch(self, parts: Parts, slots: Ints | None) -> Built:
        rows, wrong = [], {}
        for slot in range(len(parts["env_index"])) if slots is None else slots.tolist():
            try:
                sample = self._call(self._of(parts, slot), slot)
                rows.append(self._layout.encode_one(sample, self._cast))
            except Exception as error:
                wrong[slot] = error
        fields = [np.stack(column) for column in zip(*rows)]
        return (self._layout.decode_batch(fields, len(rows)) if rows else None), None, wrong

    def _of(self, parts: Parts, slot: int) -> Parts:
        nested = {key: slot_of(leaf, parts[key], slot) for key, leaf in self._parts.spaces.items()}
        return nested | {key: as_numpy(parts[key])[slot] for key in ("reward", "terminated", "truncated")}


class TransformationBuilder:
    """Hands the canonical dict of the recorded slots to a DataTransformation."""

    reads_context = True

    def __init__(self, env: Any, space: Space[Any], transformation: DataTransformation) -> None:
        self._source = transition_space(env, available_keys(env))
        self._target = as_space(transformation.get_target_space_from_source(self._source))
        difference = first_difference(self._target, space)
        if difference:
            raise ValueError(
                f"transition_builder: must make samples of the buffer's space, got a difference at {difference}"
            )
        self._transformation = transformation

    def one(self, parts: Parts) -> Any:
        canonical = {key: self._as_batch(leaf, parts[key]) for key, leaf in self._source.spaces.items()}
        return unbatch(self._target, self._transform(canonical), 0)

    def _as_batch(self, leaf: Space[Any], value: Any) -> Any:
        if isinstance(leaf, spaces.Dict):
            return {key: self._as_batch(part, value[key]) for key, part in leaf.spaces.items()}
        if isinstance(leaf, spaces.Tuple):
            return tuple([self._as_batch(part, value[i]) for i, part in enumerate(leaf.spaces)])
        if isinstance(leaf, spaces.Text | spaces.Sequence):
            return (value,)
        return np.array(as_numpy(value))[None]

    def batch(self, parts: Parts, slots: Ints | None) -> Built:
        every = np.arange(len(parts["env_index"])) if slots is None else slots
        canonical = {key: parts[key] for key in self._source.spaces}
        copy = select(self._source, canonical, every)  # which may be changed in place
        return self._transform(copy), None, {}

    def _transform(self, canonical: dict[str, Any]) -> Any:
        for key in CONVERTED:
            canonical[key] = converted(canonical[key], self._source[key], key)
        return self._transformation.transform(self._source, canonical)
