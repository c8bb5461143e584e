"""Scoring: what a scoring function is given, and what it may return."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from recollect.errors import ScoringError, class_name
from recollect.remote.items.packed import PackedItems
from recollect.remote.items.space import ItemSpace
from recollect.remote.items.trajectories import Array
from recollect.remote.messages import note
from recollect.text import safe, told

Scoring = Callable[..., Mapping[str, float]]
BASELINE = "baseline_log_reward"


class Scored:
    """A whole container, for a scoring function: leaves by path, or `steps, lengths, fields` of trajectories.

    `kept` tells what the buffer took, `row` where it is (-1: nowhere). Leaves are decoded when they are first asked
    for.

    Ownership: the arrays are fresh; the function may keep and change them.
    """

    def __init__(self, items: ItemSpace, packed: PackedItems, kept: Array, row: Array) -> None:
        self._items, self._packed = items, packed
        self.kept, self.row = kept, row
        rewards = packed.log_rewards
        self.log_rewards: Any = None if rewards is None else rewards.copy()
        self._block: Any = None
        self._fields: dict[str, Any] | None = None
        self._steps: Any = None

    def __len__(self) -> int:
        return self._packed.n

    def __getitem__(self, path: str) -> Any:
        """A leaf of a block by its path, `obj["obs/image"]`."""
        if self._items.is_trajectory:
            raise TypeError(f"{path}: these are trajectories; use steps[...] or fields[...]")
        if self._block is None:
            self._block = self._items.decode(self._packed)
        found = self._block
        for key in path.split("/"):
            found = found[int(key) if isinstance(found, tuple) else key]
        return found

    @property
    def steps(self) -> Any:
        """The steps of all trajectories, one after the other."""
        self._only_trajectories("steps")
        if self._steps is None:
            self._steps = self._items.decode_steps(self._packed)
        return self._steps

    @property
    def lengths(self) -> Array:
        """How many steps each trajectory has."""
        self._only_trajectories("lengths")
        lengths = self._packed.lengths
        return np.empty(0, np.int64) if lengths is None else lengths.astype(np.int64)

    @property
    def fields(self) -> dict[str, Any]:
        """What each trajectory has beside its steps."""
        self._only_trajectories("fields")
        if self._fields is None:
            self._fields = self._items.decode_fields(self._packed)
        return self._fields

    def _only_trajectories(self, name: str) -> None:
        if not self._items.is_trajectory:
            raise TypeError(f"{name}: these are samples; use obj[path]")


def checked_scoring(function: Scoring) -> Scoring:
    """Return what scores containers, as it is; TypeError if it cannot be called."""
    if not callable(function):
        raise TypeError(
            f"scoring_function: must be callable, got {class_name(function)}; pass a function of (obj, sender_rank)"
        )
    return function


def call_scoring(function: Scoring, scored: Scored, sender_rank: int) -> dict[str, float]:
    """Call a scoring function and return a copy of its scores; ScoringError for whatever else happens."""
    try:
        found = function(scored, sender_rank=sender_rank)
    except Exception as error:
        raise ScoringError(note(f"scoring_function: raised; {told(error, limit=-3)}")) from None
    if not isinstance(found, Mapping):
        raise ScoringError(
            f"scoring_function: must return a dict of numbers by name, got {type(found).__name__}"
        )
    scores = {}
    for name, value in dict[Any, Any](found).items():
        if not isinstance(name, str) or len(name := safe(name)) > 255:
            raise ScoringError(f"scoring_function: names must be short strings, got {name!r:.80}")
        number = value.item() if isinstance(value, np.ndarray | np.generic) and np.ndim(value) == 0 else value
        if isinstance(number, bool) or not isinstance(number, int | float):
            raise ScoringError(f"scoring_function: {name!r} must be a number, got {type(value).__name__}")
        try:
            scores[name] = float(number)
        except OverflowError:
            raise ScoringError(f"scoring_function: {name!r} must fit a float, got an int beyond it") from None
    return scores
