"""Agreement: several managers, one baseline.

Each manager tells the others every `sync_s` what its shard holds. The lowest of those that were heard of lately
decides, and sends one value per epoch to all. Epochs are numbers that no two managers share, so equal epochs mean
equal baselines even while two of them think that they are the lowest.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from recollect.remote.config import Shards
from recollect.remote.items.trajectories import Array
from recollect.remote.manager.ranking import quantile_of
from recollect.remote.messages import Sync


@dataclass(frozen=True, slots=True)
class Summary:
    """What one shard holds."""

    lowest: float | None
    is_full: bool
    ema: float | None
    containers: int
    values: Array  # sorted; only for percentile


def agreed_value(summaries: list[Summary], strategy: str, percentile: float) -> float | None:
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


class Agreement:
    """One manager's part in agreeing; it says what to send, and hears what was sent."""

    def __init__(self, rank: int, shards: Shards, strategy: str, percentile: float) -> None:
        self.rank, self.shards = rank, shards
        self.strategy, self.percentile = strategy, percentile
        self.others = tuple(other for other in shards.manager_ranks if other != rank)
        self._heard: dict[int, tuple[float, Summary]] = {}
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

    def hear(self, sender: int, message: Sync, values: Array, now: float) -> bool:
        """Take a summary or an agreed value from another manager; False if it is none of them."""
        if sender not in self.others:
            return False
        self._top = max(self._top, message.epoch)
        if message.kind == "summary":
            lowest = message.value
            self._heard[sender] = (
                now,
                Summary(lowest, message.is_full, message.ema, message.containers, values),
            )
        elif (
            self._agreed is None or message.epoch > self._agreed[0] or now - self._agreed[2] > self.patience_s
        ):
            self._agreed = (message.epoch, message.value, now)
        return True

    def tick(self, now: float, mine: Summary) -> list[tuple[int, Sync, Array]]:
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
                return False  # it is there, or has not had the time to speak
        return True

    def _new_epoch(self) -> int:
        n = len(self.shards.manager_ranks)
        self._top = (self._top // n + 1) * n + self.shards.manager_ranks.index(self.rank)
        return self._top
