"""Baseline: the log reward below which an item would be evicted at once.

A manager reads it from its buffer (`Ranking`), or keeps a running average of batch minima. Several managers agree on
one: each tells the others every `sync_s` what its shard holds; the lowest of those that were heard lately decides, and
sends one value per epoch to all. Epochs are numbers that no two managers share, so equal epochs mean equal baselines
even while two of them think that they are the lowest.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import floor, isfinite
from time import monotonic
from typing import Any

import numpy as np

from recollect import _core
from recollect.remote.config import Shards
from recollect.remote.items.trajectories import Array
from recollect.remote.messages import Sync


class Ranking:
    """Mirrors the log rewards of the rows of a buffer; NaN where there is none.

    The minimum of the finite ones costs O(log capacity) per change. The sorted array is made when a quantile is first
    asked for, and then kept by one merge per container.
    """

    def __init__(self, capacity: int) -> None:
        self.values = np.full(capacity, np.nan)
        self._tree = _core.MinTree(capacity)
        self._n_finite = 0
        self._sorted: Array | None = None

    def rebuild(self, rows: Array, values: Array) -> None:
        """Start again from what the buffer holds."""
        capacity = len(self.values)
        self.values = np.full(capacity, np.nan)
        self._tree = _core.MinTree(capacity)
        self._n_finite, self._sorted = 0, None
        self.set(rows, values)

    def set(self, rows: Array, values: Array) -> None:
        """These rows now hold items of these log rewards; of a row named twice the last counts."""
        if not len(rows):
            return
        if self._sorted is not None:
            last = len(rows) - 1 - np.unique(rows[::-1], return_index=True)[1]
            old, now = self.values[rows[last]], values[last]
            gone, new = old[np.isfinite(old)], now[np.isfinite(now)]
            self._sorted = merged(self._sorted, np.sort(gone), np.sort(new))
        rows, values = np.ascontiguousarray(rows, np.int64), np.ascontiguousarray(values, np.float64)
        self._n_finite += _core.mirror_keys(self._tree, self.values, rows, values)

    @property
    def n_finite(self) -> int:
        """How many finite log rewards there are."""
        return self._n_finite

    def finite(self) -> Array:
        """The finite log rewards, sorted; not to be changed."""
        if self._sorted is None:
            self._sorted = np.sort(self.values[np.isfinite(self.values)])
        return self._sorted

    def lowest(self) -> float | None:
        """The smallest finite log reward, None if there is none."""
        return float(self._tree.lowest()[0]) if self._n_finite else None

    def quantile(self, q: float) -> float | None:
        """What `np.quantile(finite, q)` is, None if there is nothing."""
        return quantile_of(self.finite(), q) if self._n_finite else None


def merged(held: Array, gone: Array, new: Array) -> Array:
    """A sorted array without `gone` (all of them in it) and with `new`; all three sorted."""
    if len(gone):
        # Of equal values each takes the next place.
        nth = np.arange(len(gone)) - np.searchsorted(gone, gone)
        held = np.delete(held, np.searchsorted(held, gone) + nth)
    return np.insert(held, np.searchsorted(held, new), new) if len(new) else held


def quantile_of(ordered: Array, q: float) -> float:
    """`np.quantile` (linear) of a sorted array, to the last bit, without looking at all of it."""
    at = q * (len(ordered) - 1)
    below = floor(at)
    low: Any = ordered[below]
    high: Any = ordered[min(below + 1, len(ordered) - 1)]
    part = at - below
    gap = high - low
    # numpy computes from the nearer end, so that the result never leaves [low, high].
    return float(high - gap * (1 - part) if part >= 0.5 else low + gap * part)


def next_ema(ema: float | None, log_rewards: Any, alpha: float) -> float | None:
    """The running average of batch minima, with one more batch; non-finite rewards do not count."""
    if log_rewards is None:
        return ema
    rewards: Array = np.asarray(log_rewards, np.float64)
    if not len(rewards):
        return ema
    lowest = float(rewards.min())
    if not isfinite(lowest):
        finite = rewards[np.isfinite(rewards)]
        if not len(finite):
            return ema
        lowest = float(finite.min())
    return lowest if ema is None else alpha * lowest + (1 - alpha) * ema


def from_buffer(strategy: str, percentile: float, ranking: Ranking | None, is_full: bool) -> float | None:
    """The baseline that a full buffer gives, None if it gives none."""
    if strategy == "ema" or ranking is None or not is_full:
        return None
    return ranking.lowest() if strategy == "min" else ranking.quantile(percentile)


# -- one baseline for several managers


@dataclass(frozen=True, slots=True)
class ShardSummary:
    """What one shard holds."""

    lowest: float | None
    is_full: bool
    ema: float | None
    containers: int
    values: Array  # sorted; only for percentile


def agreed_value(summaries: list[ShardSummary], strategy: str, percentile: float) -> float | None:
    """The baseline over the union of the shards: by what is in them once all are full, else by their averages."""
    if strategy != "ema" and all(summary.is_full for summary in summaries):
        if strategy == "min":
            lowest = [summary.lowest for summary in summaries if summary.lowest is not None]
            if lowest:
                return min(lowest)
        else:
            values = np.sort(np.concatenate([summary.values for summary in summaries]))
            if len(values):
                return quantile_of(values, percentile)
    known = [(s.ema, s.containers) for s in summaries if s.ema is not None and s.containers]
    total = sum(n for _, n in known)
    return sum(ema * n for ema, n in known) / total if total else None


class SharedBaseline:
    """One manager's part in the agreement: what it sends, and what it makes of what was sent."""

    def __init__(self, rank: int, shards: Shards, strategy: str, percentile: float) -> None:
        self.rank, self.shards = rank, shards
        self.strategy, self.percentile = strategy, percentile
        self.others = tuple(other for other in shards.manager_ranks if other != rank)
        self._heard: dict[int, tuple[float, ShardSummary]] = {}
        self._agreed: tuple[int, float | None, float] | None = None
        self._top = 0  # the greatest epoch seen
        self._began: float | None = None
        self._next = 0.0

    @property
    def patience_s(self) -> float:
        return 3 * self.shards.sync_s

    def current(self, now: float) -> tuple[int, float | None] | None:
        """The epoch and the agreed baseline, None if there is none fresh enough."""
        if self._agreed is None or now - self._agreed[2] > self.patience_s:
            return None
        return self._agreed[0], self._agreed[1]

    def receive(self, sender: int, message: Sync, values: Array, now: float) -> bool:
        """Take a summary or an agreed value from another manager; False if it is none of them."""
        if sender not in self.others:
            return False
        self._top = max(self._top, message.epoch)
        if message.kind == "summary":
            lowest = message.value
            self._heard[sender] = (
                now,
                ShardSummary(lowest, message.is_full, message.ema, message.containers, values),
            )
        elif (
            self._agreed is None or message.epoch > self._agreed[0] or now - self._agreed[2] > self.patience_s
        ):
            self._agreed = (message.epoch, message.value, now)
        return True

    def tick(self, now: float, mine: ShardSummary) -> list[tuple[int, Sync, Array]]:
        """What to send now: (dest, message, values)."""
        self._began = now if self._began is None else self._began
        if now < self._next:
            return []
        self._next = now + self.shards.sync_s
        none = np.empty(0)
        summary = Sync(
            0, self._top, "summary", mine.lowest, len(mine.values), mine.is_full, mine.ema, mine.containers
        )
        out = [(other, summary, mine.values) for other in self.others]
        if self._is_lowest(now):
            fresh = [s for at, s in self._heard.values() if now - at <= self.patience_s]
            value = agreed_value([mine, *fresh], self.strategy, self.percentile)
            epoch = self._new_epoch()
            self._agreed = (epoch, value, now)
            agreed = Sync(0, epoch, "agreed", value, 0, False, None, 0)
            out += [(other, agreed, none) for other in self.others]
        return out

    def _is_lowest(self, now: float) -> bool:
        for other in self.shards.manager_ranks:
            if other == self.rank:
                return True
            last = self._heard[other][0] if other in self._heard else self._began
            if last is not None and now - last <= self.patience_s:
                return False  # it is there, or had no time to send anything yet
        return True

    def _new_epoch(self) -> int:
        n = len(self.shards.manager_ranks)
        self._top = (self._top // n + 1) * n + self.shards.manager_ranks.index(self.rank)
        return self._top


class Baseline:
    """The baseline of one manager: the agreed one if there is any, else its own.

    Concurrency: the manager's lock is held in every call.
    """

    def __init__(self, strategy: str, percentile: float, alpha: float, shared: SharedBaseline | None) -> None:
        self.strategy, self.percentile, self.alpha = strategy, percentile, alpha
        self.shared = shared
        self.ema: float | None = None

    def add_batch(self, log_rewards: Any) -> None:
        """Take a batch into the running average of minima."""
        self.ema = next_ema(self.ema, log_rewards, self.alpha)

    def current(self, ranking: Ranking | None, is_full: bool) -> tuple[int | None, float | None]:
        """The epoch, None unless it was agreed upon, and the baseline, None if there is none yet."""
        agreed = None if self.shared is None else self.shared.current(monotonic())
        if agreed is not None and agreed[1] is not None:
            return agreed
        found = from_buffer(self.strategy, self.percentile, ranking, is_full)
        return None, self.ema if found is None else found

    def summary(self, ranking: Ranking | None, is_full: bool, containers: int) -> ShardSummary:
        """What other managers need to know of this shard."""
        values = np.empty(0)
        if ranking is not None and self.strategy == "percentile":
            values = ranking.finite()
        lowest = None if ranking is None else ranking.lowest()
        return ShardSummary(lowest, is_full, self.ema, containers, values)
