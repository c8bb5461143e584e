"""Trajectories: several episodes of different lengths as one block of steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from recollect.errors import SchemaError
from recollect.indexing import normalize
from recollect.spaces import as_numpy

Array = np.ndarray[Any, Any]
LOG_REWARD = "log_reward"


class Trajectories:
    """B trajectories: `steps` is a block of sum(lengths) rows, one trajectory after the other; no padding.

    `fields` have a leading axis of B. `log_rewards` is the field `log_reward`. An integer index gives one trajectory
    as a dict, other indices give Trajectories.

    Ownership: holds what it is given, without copying; what indexing returns is a copy, the caller's own.

    Example:
        >>> import numpy as np
        >>> from recollect.remote import Trajectories
        >>> two = Trajectories({"state": np.arange(5)}, [2, 3], log_rewards=[0.0, -1.0], goal=np.array([7, 8]))
        >>> len(two), two[1]["steps"]["state"].tolist(), two[[1]].fields["goal"].tolist()
        (2, [2, 3, 4], [8])
        >>> two.to_padded()[1].astype(int).tolist()
        [[1, 1, 0], [1, 1, 1]]
    """

    __slots__ = ("_starts", "fields", "lengths", "log_rewards", "steps")

    def __init__(self, steps: Any, lengths: Any, log_rewards: Any = None, **fields: Any) -> None:
        """Check that lengths are at least 1 and that everything fits them."""
        self.lengths = _checked_lengths(lengths)
        self.steps = steps
        self.fields = fields
        self.log_rewards = None if log_rewards is None else _as_rewards(log_rewards)
        if LOG_REWARD in fields:
            raise ValueError("log_reward: must be given as log_rewards, got a field of that name; rename it")
        ends = np.cumsum(self.lengths)
        self._starts = ends - self.lengths
        _check_rows(steps, int(ends[-1]) if len(ends) else 0, "steps")
        _check_rows(dict(fields), len(self), "")
        if self.log_rewards is not None and self.log_rewards.shape != (len(self),):
            raise SchemaError(
                f"log_rewards: shape must be ({len(self)},), got {self.log_rewards.shape}; give one per trajectory"
            )

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, idx: Any) -> Any:
        found = normalize(idx, len(self))
        if isinstance(found, int):
            span = slice(int(self._starts[found]), int(self._starts[found] + self.lengths[found]))
            one = {"steps": mapped(self.steps, lambda leaf: leaf[span].copy())}
            if self.log_rewards is not None:
                one[LOG_REWARD] = self.log_rewards[found]
            return one | {k: mapped(v, lambda leaf: _one_of(leaf, found)) for k, v in self.fields.items()}
        rows = ranges(self._starts[found], self.lengths[found])
        return Trajectories(
            mapped(self.steps, lambda leaf: leaf[rows]),
            self.lengths[found],
            None if self.log_rewards is None else self.log_rewards[found],
            **{k: mapped(v, lambda leaf: _taken(leaf, found)) for k, v in self.fields.items()},
        )

    @staticmethod
    def concat(parts: Sequence[Trajectories]) -> Trajectories:
        """Return all trajectories of all parts, in order."""
        if not parts:
            raise ValueError("parts: must be at least one, got none")
        rewards = [part.log_rewards for part in parts]
        if any(r is None for r in rewards) and any(r is not None for r in rewards):
            raise ValueError("parts: must all have log_rewards or none, got some")
        return Trajectories(
            joined([part.steps for part in parts]),
            np.concatenate([part.lengths for part in parts]),
            None if rewards[0] is None else np.concatenate([r for r in rewards if r is not None]),
            **{k: joined([part.fields[k] for part in parts]) for k in parts[0].fields},
        )

    @staticmethod
    def from_padded(
        steps: Any, lengths: Any, time_major: bool = False, *, log_rewards: Any = None, **fields: Any
    ) -> Trajectories:
        """Take the real steps out of arrays (B, T, ...), or (T, B, ...) if `time_major`."""
        n = _checked_lengths(lengths)

        def real(leaf: Any) -> Array:
            array = as_numpy(leaf)
            array = np.swapaxes(array, 0, 1) if time_major else array
            if array.ndim < 2 or len(array) != len(n) or (len(n) and int(n.max()) > array.shape[1]):
                raise SchemaError(
                    f"steps: must be (B, T, ...) with room for lengths, got shape {array.shape}"
                )
            return array[np.arange(array.shape[1]) < n[:, None]]

        return Trajectories(mapped(steps, real), n, log_rewards, **fields)

    def to_padded(self, max_length: int | None = None) -> tuple[Any, Array]:
        """Return steps (B, T, ...), zeros after each end, and the mask (B, T) of what is real."""
        longest = int(self.lengths.max(initial=0))
        width = longest if max_length is None else int(max_length)
        if width < longest:
            raise ValueError(f"max_length: must be at least {longest}, the longest, got {max_length}")
        mask = np.arange(width) < self.lengths[:, None]

        def padded(leaf: Any) -> Array:
            array = as_numpy(leaf)
            out = np.zeros((len(self), width, *array.shape[1:]), array.dtype)
            out[mask] = array
            return out

        return mapped(self.steps, padded), mask

    def __repr__(self) -> str:
        fields = [*(["log_rewards"] if self.log_rewards is not None else []), *self.fields]
        return f"Trajectories({len(self)} of {int(self.lengths.sum())} steps; {', '.join(fields) or 'no fields'})"


def ranges(starts: Array, lengths: Array) -> Array:
    """The numbers start, start + 1, … of each run, one run after the other."""
    total = int(lengths.sum())
    before = np.cumsum(lengths) - lengths
    return np.asarray(np.arange(total) + np.repeat(starts - before, lengths))


def mapped(value: Any, function: Callable[[Any], Any]) -> Any:
    """Apply a function to every leaf of a nested block; a tuple of strings is a leaf."""
    if isinstance(value, Mapping):
        return {key: mapped(child, function) for key, child in value.items()}
    if isinstance(value, tuple) and not (value and isinstance(value[0], str)):
        return tuple(mapped(child, function) for child in value)
    return function(value if isinstance(value, tuple) else as_numpy(value))


def joined(blocks: Sequence[Any]) -> Any:
    """Concatenate nested blocks of one structure along their first axis."""
    first = blocks[0]
    if isinstance(first, Mapping):
        return {key: joined([block[key] for block in blocks]) for key in first}
    if isinstance(first, tuple):
        if any(isinstance(item, str) for block in blocks for item in block[:1]):
            return tuple(item for block in blocks for item in block)
        return tuple(joined([block[i] for block in blocks]) for i in range(len(first)))
    return np.concatenate([as_numpy(block) for block in blocks])


def _one_of(leaf: Any, i: int) -> Any:
    return leaf[i].copy() if isinstance(leaf[i], np.ndarray) else leaf[i]


def _taken(leaf: Any, index: Array) -> Any:
    return tuple(leaf[i] for i in index.tolist()) if isinstance(leaf, tuple) else leaf[index]


def _checked_lengths(lengths: Any) -> Array:
    array = as_numpy(lengths)
    if array.ndim != 1 or (array.dtype.kind not in "iu" and array.size):
        raise SchemaError(f"lengths: must be 1-D integers, got {array.dtype} of shape {array.shape}")
    if array.size and not 1 <= int(array.min()) <= int(array.max()) < 2**31:
        raise SchemaError(
            f"lengths: must be at least 1, got {int(array.min())}; leave empty trajectories out"
        )
    return array.astype(np.int64)


def _as_rewards(values: Any) -> Array:
    array = as_numpy(values)
    if array.dtype.kind != "f":
        raise SchemaError(f"log_rewards: must be floats, got {array.dtype}; convert them")
    return array


def _check_rows(value: Any, n: int, name: str) -> None:
    if isinstance(value, Mapping):
        for key, child in value.items():
            _check_rows(child, n, f"{name}/{key}" if name else str(key))
        return
    if isinstance(value, tuple) and not (value and isinstance(value[0], str)):
        for i, child in enumerate(value):
            _check_rows(child, n, f"{name}/{i}")
        return
    got = len(value) if isinstance(value, tuple) else np.shape(value)[:1]
    if got not in (n, (n,)):
        shown = got if isinstance(got, int) else (got[0] if got else "a scalar")
        raise SchemaError(f"{name}: must have {n} rows, got {shown}; make it fit the lengths")
