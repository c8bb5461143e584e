"""NStepBatch: each transition with the return of the next n steps instead of one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium import Space, spaces

from recollect import checks
from recollect.backends import move
from recollect.batch.base import BatchBase, Draws
from recollect.batch.boundaries import Frames, Lapped, again_and_again, check_known, counted
from recollect.batch.frames import stand_ins
from recollect.batch.location import Bools, Ints, Location
from recollect.batch.structure import Key, Keys, pick, unbatch
from recollect.batch.view import Read, View, as_source
from recollect.errors import MissingLeafError, class_name
from recollect.indexing import is_single
from recollect.spaces import as_numpy, as_space, space_at
from recollect.spaces.tree import as_keys, leaf_paths, make_dict, path_name

DISCOUNT = "discount"
Array = np.ndarray[Any, Any]


class NStepBatch(View):
    """`batch` with n-step returns, computed when they are read; the index is that of the first step.

    `reward` is the discounted sum of k <= n steps, `next_obs` and `terminated` are those of the k-th, and the new leaf
    `discount` is `gamma**k * (1 - terminated)`, so that a target is `reward + discount * value(next_obs)`. k is n, or
    less at the segment's end (or a terminated step, after which nothing follows): an end that was truncated, or cut
    by the write cursor, by a removed sample or because the episode still goes on, bootstraps from there. The keys may
    be nested, as tuples or as paths like `"agent/reward"`. An integer reward comes out as a float.

    Ownership: owns nothing. Read-only; write to the batch it views.
    Concurrency: as the batch it views; a call sees one moment. Locations are those of the first step.

    Example:
        >>> import numpy as np, recollect as rc
        >>> space = {"next_obs": ((), "int64"), "reward": ((), "float32"), "terminated": ((), "bool")}
        >>> buf = rc.ReplayBuffer.create(rc.MemoryStorage, space, capacity=8, maintain_segment_metadata=True)
        >>> buf.extend({"next_obs": np.arange(4), "reward": np.ones(4, "float32"), "terminated": np.arange(4) == 3})
        >>> found = rc.NStepBatch(buf, n=2, gamma=0.5)[[0, 3]]
        >>> found["reward"].tolist(), found["next_obs"].tolist(), found["discount"].tolist()
        ([1.5, 1.0], [1, 3], [0.25, 0.0])
    """

    def __init__(
        self,
        batch: BatchBase,
        n: int,
        gamma: float,
        reward: Key | Sequence[Key] = "reward",
        next_obs: Key | Sequence[Key] = "next_obs",
        terminated: Key | Sequence[Key] = "terminated",
    ) -> None:
        """View `batch`, which must keep segments, with returns of `n` steps discounted by `gamma`."""
        check_known(as_source(batch), type(self).__name__)
        self.n = checks.count("n", n, advice="pass a number of steps")
        self.gamma = checks.fraction("gamma", gamma, advice="pass a discount factor")
        space = batch.single_space
        self.reward = _part(space, "reward", reward)
        self.next_obs = _part(space, "next_obs", next_obs)
        self.terminated = _part(space, "terminated", terminated)
        self._dtype = _float_of(space_at(space, self.reward), self.reward)
        _check_flag(space_at(space, self.terminated), self.terminated)
        self._offsets: Ints = np.arange(self.n)
        super().__init__(batch, self._space(space), batch.single_metadata_space)

    def _space(self, space: Space[Any]) -> spaces.Dict:
        if not isinstance(space, spaces.Dict):
            raise ValueError(f"batch: space must be a Dict, got {class_name(space)}; name its parts")
        if DISCOUNT in space.spaces:
            raise ValueError("batch: must have no leaf 'discount', got one; rename it by a TransformedBatch")
        reward = as_space((space_at(space, self.reward).shape, self._dtype))
        flag = space_at(space, self.terminated)
        parts = _replaced(space, self.reward, reward).spaces
        return make_dict([*parts.items(), (DISCOUNT, as_space((flag.shape, self._dtype)))])

    # Reads

    def _read(self, idx: Any, keys: Keys = (), flat: bool = False, metadata: bool = False) -> Read:
        def read(index: Any) -> Read:
            anchors = np.atleast_1d(index)
            return again_and_again(
                self,
                lambda: self._gather(self._boundaries().frames(anchors, self._offsets), keys, flat, metadata),
            )

        data, meta = counted(self.batch, idx, read)
        if not is_single(idx):
            return data, meta
        if meta is not None and self.single_metadata_space is not None:
            meta = unbatch(self.single_metadata_space, meta, 0)
        return data[0] if flat else unbatch(space_at(self.single_space, keys), data, 0), meta

    def get_located(
        self, location: Location, keys: Keys = (), flat: bool = False, metadata: bool = False
    ) -> Read | None:
        def attempt() -> Read | None:
            frames = self._boundaries().frames_round(location, self._offsets, 0)
            return None if frames is None else self._gather(frames, keys, flat, metadata)

        return again_and_again(self, attempt)

    def _gather(self, frames: Frames, keys: Keys, flat: bool, metadata: bool) -> Read:
        """Read and sum located steps `(B, n)`; Lapped if any of them is gone."""
        valid = frames.valid(0)
        valid[:, 0] = True
        b, n = valid.shape
        steps = frames.place.take((np.arange(b)[:, None] * n + stand_ins(valid, 0)).ravel())
        reward, ended = (self._per_step(steps, path, b, n) for path in (self.reward, self.terminated))
        on = _goes_on(valid, ended[:, :, 0].astype(np.bool_))
        last = on.sum(axis=1) - 1
        data, meta = self._whole(frames.column(0), metadata)
        next_obs = self._column(frames.place.take(np.arange(b) * n + last), self.next_obs)
        flag = ended[np.arange(b), last]
        data = _put(data, self.reward, self._out(self._sum(reward, on), self.reward))
        data = _put(data, self.next_obs, next_obs)
        data = _put(data, self.terminated, self._out(flag, self.terminated))
        discount = self.gamma ** (last + 1.0)[:, None] * (1.0 - flag)
        data[DISCOUNT] = self._out(discount.astype(self._dtype), (DISCOUNT,))
        data = pick(data, keys)
        return self._flatten(data, False, keys) if flat else data, meta

    def _per_step(self, steps: Location, path: Keys, b: int, n: int) -> Any:
        column = as_numpy(self._column(steps, path))
        return column.reshape(b, n, math.prod(column.shape[1:]))

    def _column(self, place: Location, keys: Keys) -> Any:
        return self._whole(place, False, keys)[0]

    def _whole(self, place: Location, metadata: bool, keys: Keys = ()) -> Read:
        found = self.batch.get_located(place, keys, False, metadata)
        if found is None:
            raise Lapped
        return found

    def _sum(self, reward: Array, on: Bools) -> Array:
        weight = np.where(on, self.gamma**self._offsets, 0.0)
        kept = np.where(
            on[:, :, None], reward.astype(np.float64), 0.0
        )  # not 0 * NaN of a step that is not ours
        return np.asarray(np.einsum("bn,bnk->bk", weight, kept), self._dtype)

    def _out(self, value: Array, keys: Keys) -> Any:
        shape = space_at(self.single_space, keys).shape or ()
        return move(value.reshape(len(value), *shape), self.backend, self.device)

    # Draws and places

    def draw_at(self, stream: Draws, n: int) -> Any:
        return BatchBase.draw_at(self, stream, n)

    def draw_column_at(self, keys: Keys, stream: Draws, n: int) -> Any:
        return BatchBase.draw_column_at(self, keys, stream, n)

    def is_current(self, location: Location) -> Bools:
        return np.asarray(self.batch.relocate(location) >= 0)


def _goes_on(valid: Bools, ended: Bools) -> Bools:
    """Return which steps belong to the return: those before which no step was missing or terminated."""
    before = np.concatenate([np.zeros_like(ended[:, :1]), ended[:, :-1]], axis=1)
    return np.asarray(np.logical_and.accumulate(valid & ~before, axis=1))


def _put(data: Any, keys: Keys, value: Any) -> Any:
    """Return nested data with one part replaced; the containers on the way are new."""
    if not keys:
        return value
    key, *rest = keys
    if isinstance(data, tuple):
        return tuple([_put(x, tuple(rest), value) if i == key else x for i, x in enumerate(data)])
    return {k: _put(x, tuple(rest), value) if k == key else x for k, x in data.items()}


def _replaced(space: Space[Any], keys: Keys, leaf: Space[Any]) -> Any:
    """Return the space with one part replaced."""
    if not keys:
        return leaf
    key, *rest = keys
    if isinstance(space, spaces.Tuple):
        return spaces.Tuple([_replaced(s, tuple(rest), leaf) if i == key else s for i, s in enumerate(space)])
    if not isinstance(space, spaces.Dict):
        raise KeyError(key)
    return make_dict(
        [(k, _replaced(s, tuple(rest), leaf) if k == key else s) for k, s in space.spaces.items()]
    )


def _part(space: Space[Any], name: str, key: Key | Sequence[Key]) -> Keys:
    try:
        return _path(space, key)
    except KeyError as error:
        there = [path_name(path) for path, _ in leaf_paths(space)]
        raise MissingLeafError(
            f"NStepBatch: {name} must name a part of a sample, got {key!r}, and there are {there}; "
            f"pass {name}=... as yours is called, or record it (rc.transition_space(env) has it)"
        ) from error


def _path(space: Space[Any], key: Key | Sequence[Key]) -> Keys:
    """Return keys that name a part of `space`; a string may be one key or a path with slashes."""
    keys = as_keys(key)
    try:
        space_at(space, keys)
    except KeyError:
        if not (isinstance(key, str) and "/" in key):
            raise
        keys = tuple(key.split("/"))
        space_at(space, keys)
    return keys


def _float_of(space: Space[Any], keys: Keys) -> np.dtype[Any]:
    kind = None if space.dtype is None else np.dtype(space.dtype).kind
    if kind is None or kind not in "fiu" or space.shape is None:
        raise ValueError(f"{path_name(keys)}: reward must be a numeric leaf, got {space}; name another leaf")
    return np.result_type(space.dtype, np.float32)


def _check_flag(space: Space[Any], keys: Keys) -> None:
    kind = None if space.dtype is None else np.dtype(space.dtype).kind
    if kind is None or kind not in "bfiu" or space.shape is None or np.prod(space.shape) != 1:
        raise ValueError(f"{path_name(keys)}: terminated must be one flag, got {space}; name another leaf")
