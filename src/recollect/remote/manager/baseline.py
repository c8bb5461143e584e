"""Baseline: the log reward below which an item would be evicted at once, by the strategy of a manager."""

from __future__ import annotations

from math import isfinite
from typing import Any

import numpy as np

from recollect.remote.items.trajectories import Array
from recollect.remote.manager.ranking import Ranking

STRATEGIES = ("min", "percentile", "ema")


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
