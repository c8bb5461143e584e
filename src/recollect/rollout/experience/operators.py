"""Operators: what is done to the experience of a batch between its cut and the sink.

An operator is any callable `f(x) -> x` or `(x, metrics)`. It may drop and change rows, not invent them. A pass
that failed is tried again with the same input, so one that remembers does it in `commit()`, which is called after
the sink's.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from recollect.errors import SchemaError
from recollect.rollout.experience.experience import Experiences
from recollect.rollout.experience.space import Array
from recollect.text import nearest

Operator = Callable[[Experiences], Any]
WithCounts = tuple[Experiences, dict[str, float]]

_registered: dict[str, Callable[..., Operator]] = {}


def operator(name: str) -> Callable[[Any], Any]:
    """Register an operator class, or a function that is one, under a name for TOML files.

    >>> @operator("nothing")
    ... def nothing(x):
    ...     return x
    """

    def register(made: Any) -> Any:
        if name in _registered:
            raise ValueError(f"operator: the name {name!r} is taken; choose another")
        _registered[name] = made if isinstance(made, type) else lambda: made
        return made

    return register


def is_known(spec: Any) -> bool:
    """Whether this process knows an operator; a name may be that of a module which is not imported yet."""
    name = spec.get("name") if isinstance(spec, Mapping) else spec
    return not isinstance(name, str) or name in _registered


def make_operator(spec: Any, path: str = "operator") -> tuple[str, Operator]:
    """Return (name, operator) of a callable, a name or a table; SchemaError naming `path`."""
    if callable(spec) and not isinstance(spec, type):
        return _name_of(spec), spec
    options: dict[str, Any] = {}
    name = spec
    if isinstance(spec, Mapping):
        options = {key: value for key, value in spec.items() if key != "name"}
        name = spec.get("name")
    if not isinstance(name, str):
        raise SchemaError(f"{path}: must be a callable, a name or a table with a name, got {spec!r}")
    if name not in _registered:
        raise SchemaError(f"{path}.name: must be a known operator, got {name!r}{nearest(name, _registered)}")
    made = _registered[name]
    fields = getattr(made, "__dataclass_fields__", {})
    for key in options:
        if fields and key not in fields:
            raise SchemaError(
                f"{path}.{key}: must be an option of {name!r}, got an unknown one{nearest(key, fields)}"
            )
    try:
        return name, made(**options)
    except (TypeError, ValueError) as error:
        where = next((f"{path}.{key}" for key in options if str(error).startswith(f"{key}:")), path)
        raise SchemaError(f"{where}: {str(error).partition(': ')[2] or error}") from None


def _name_of(made: Any) -> str:
    for name, cls in _registered.items():
        if isinstance(cls, type) and type(made) is cls:
            return name
    return str(getattr(made, "__name__", type(made).__name__))


def _number(value: Any, name: str, low: float = -math.inf) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not value >= low:
        raise ValueError(f"{name}: must be a number of at least {low:g}, got {value!r}")


def with_reward(x: Experiences) -> tuple[Experiences, dict[str, float]]:
    """Drop rows whose reward is not known, and say how many they were."""
    unknown = np.isnan(x.reward)
    n = int(unknown.sum())
    return (x.where(~unknown), {"no_reward": float(n)}) if n else (x, {})


def last_rewards(x: Experiences) -> tuple[Array, Array]:
    """Return for each row which run it is of, and for each run its last reward."""
    keys = np.stack([x.group_id.astype(np.int64), x.run_id.astype(np.int64)])
    _, run = np.unique(keys, axis=1, return_inverse=True)
    run = run.reshape(-1)
    order = np.lexsort([x.step, run])
    last = np.append(run[order][1:] != run[order][:-1], True) if len(run) else np.zeros(0, bool)
    return run, x.reward[order][last].astype(np.float64)


def _group_of_runs(x: Experiences, run: Array) -> Array:
    group = np.zeros(int(run.max(initial=-1)) + 1, np.int64)
    group[run] = x.groups()[1]
    return group


@operator("shape_reward")
@dataclass(frozen=True)
class ShapeReward:
    """Adds weighted metrics to the reward, or sets it by `fn(x) -> (N,)`; then clips it.

    A row without a metric is not changed by it and is counted (`missing`). A metric that no row of a pass has is an
    error, since its name may be wrong; with `missing="zero"`, for a metric that is rare, it is not.

    >>> ShapeReward({"length": -0.01}).weights
    {'length': -0.01}
    """

    weights: Mapping[str, float] = field(default_factory=dict)
    fn: Callable[[Experiences], Any] | None = None
    clip: tuple[float, float] | None = None
    missing: str = field(default="raise", kw_only=True)

    def __post_init__(self) -> None:
        if self.missing not in ("raise", "zero"):
            raise ValueError(f"missing: must be 'raise' or 'zero', got {self.missing!r}")

    def __call__(self, x: Experiences) -> WithCounts:
        if self.fn is not None:
            reward = np.asarray(self.fn(x), np.float64)
            counts: dict[str, float] = {}
        else:
            x, counts = with_reward(x)
            metrics, n_missing = x.metrics, 0
            reward = x.reward.astype(np.float64)
            for name, weight in self.weights.items():
                values = metrics.get(name, np.full(len(x), np.nan))
                is_missing = np.isnan(values)
                if len(x) and is_missing.all() and self.missing == "raise":
                    raise SchemaError(
                        f"weights: must name metrics of the experience, got {name!r}, which no row has; "
                        f"there are {sorted(metrics)}; if it is rare, set missing='zero'"
                    )
                reward = reward + weight * np.nan_to_num(values)
                n_missing += int(is_missing.sum())
            counts |= {"missing": float(n_missing)} if n_missing else {}
        if self.clip is not None:
            reward = np.clip(reward, *self.clip)
        return x.replace(reward=reward.astype(np.float32)), counts


@operator("grpo")
@dataclass(frozen=True)
class GroupAdvantage:
    """Advantage over the runs of a group: (r - mean) / (std + eps), r being a run's last reward.

    The standard deviation is that of a sample (n - 1). All steps of a run get its advantage. Groups of fewer than
    `min_size` runs are dropped.

    >>> GroupAdvantage(scale=False).min_size
    2
    """

    scale: bool = True
    eps: float = 1e-6
    min_size: int = 2

    def __post_init__(self) -> None:
        _number(self.eps, "eps", 0)
        _number(self.min_size, "min_size", 1)

    def __call__(self, x: Experiences) -> WithCounts:
        x, counts = with_reward(x)
        if not len(x):
            return x, counts
        run, reward = last_rewards(x)
        group = _group_of_runs(x, run)
        size = np.bincount(group)
        mean = np.bincount(group, reward) / size
        centred = reward - mean[group]
        if self.scale:
            std = np.sqrt(np.bincount(group, centred**2) / np.maximum(size - 1, 1))
            centred = centred / (std[group] + self.eps)
        x = x.replace(advantage=centred[run].astype(np.float32))
        small = size[group][run] < self.min_size
        if small.any():
            counts["small_group"] = float(small.sum())
            x = x.where(~small)
        return x, counts


@operator("zero_variance")
@dataclass(frozen=True)
class DropUniformGroups:
    """Drops groups whose rewards differ by at most `tol`: they teach nothing.

    >>> DropUniformGroups(0.01).tol
    0.01
    """

    tol: float = 0.0

    def __post_init__(self) -> None:
        _number(self.tol, "tol", 0)

    def __call__(self, x: Experiences) -> WithCounts:
        x, counts = with_reward(x)
        if not len(x):
            return x, counts
        run, reward = last_rewards(x)
        group = _group_of_runs(x, run)
        low, high = np.full(group.max() + 1, np.inf), np.full(group.max() + 1, -np.inf)
        np.minimum.at(low, group, reward)
        np.maximum.at(high, group, reward)
        uniform = (high - low) <= self.tol
        counts["uniform_group"] = float(uniform.sum())
        return x.where(~uniform[group][run]), counts


@operator("length")
@dataclass(frozen=True)
class LengthFilter:
    """Keeps rows whose response has from `low` to `high` tokens.

    >>> LengthFilter(high=512).low
    1
    """

    low: int = 1
    high: int | None = None

    def __call__(self, x: Experiences) -> Experiences:
        length = x.response_length
        return x.where((length >= self.low) & (length <= (np.inf if self.high is None else self.high)))


@operator("reward")
@dataclass(frozen=True)
class RewardFilter:
    """Keeps rows whose reward is from `low` to `high`.

    >>> RewardFilter(low=0.5).high is None
    True
    """

    low: float | None = None
    high: float | None = None

    def __call__(self, x: Experiences) -> WithCounts:
        x, counts = with_reward(x)
        low = -np.inf if self.low is None else self.low
        high = np.inf if self.high is None else self.high
        return x.where((x.reward >= low) & (x.reward <= high)), counts


@operator("staleness")
@dataclass(frozen=True)
class StalenessFilter:
    """Drops rows made by weights more than `max_staleness` versions old; the coordinator says how old.

    >>> StalenessFilter(2).max_staleness
    2
    """

    max_staleness: int
    version: int = field(default=0, compare=False)

    def __post_init__(self) -> None:
        _number(self.max_staleness, "max_staleness", 0)

    def __call__(self, x: Experiences) -> Experiences:
        return x.where(x.model_version >= self.version - self.max_staleness)

    def at(self, version: int) -> StalenessFilter:
        """The same filter when `version` is the newest."""
        return StalenessFilter(self.max_staleness, version)


@operator("dedupe")
class Dedupe:
    """Keeps the first of equal `tokens` (or `uid`), within a batch and across the last `remember` rows.

    >>> Dedupe("uid").key
    'uid'
    """

    def __init__(self, key: str = "tokens", remember: int = 100_000) -> None:
        if not isinstance(key, str):
            raise ValueError(f"key: must be the name of a leaf or 'uid', got {key!r}")
        _number(remember, "remember", 0)
        self.key, self.remember = key, remember
        self._seen: OrderedDict[bytes, None] = OrderedDict()
        self._new: list[bytes] = []

    def __call__(self, x: Experiences) -> Experiences:
        keys = [_digest(value) for value in self._values(x)]
        fresh: set[bytes] = set()
        keep = np.zeros(len(x), bool)
        for i, key in enumerate(keys):
            if key not in self._seen and key not in fresh:
                keep[i] = True
                fresh.add(key)
        self._new = [key for key, kept in zip(keys, keep) if kept]
        return x.where(keep)

    def _values(self, x: Experiences) -> list[bytes]:
        if self.key == "uid":
            return [row.tobytes() for row in x.uids]
        if self.key not in x.ragged:
            return [np.ascontiguousarray(row).tobytes() for row in getattr(x, self.key)]
        values, offsets = x.ragged[self.key]
        return [values[a:b].tobytes() for a, b in pairwise(offsets)]

    def commit(self) -> None:
        """Remember what was let through, now that it is delivered."""
        for key in self._new:
            self._seen[key] = None
        while len(self._seen) > self.remember:
            self._seen.popitem(last=False)
        self._new = []


def _digest(data: bytes) -> bytes:
    from hashlib import blake2b

    return blake2b(data, digest_size=16).digest()
