"""Diversity: which new items are too close to kept ones, and which kept ones make room."""

from __future__ import annotations

from dataclasses import dataclass
from math import isnan
from typing import Any

import numpy as np

from recollect.remote.items.trajectories import Array

BLOCK_NBYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class Diversity:
    """How far apart kept items are: the p-norm between their leaves `key` is above `cutoff`.

    >>> Diversity(cutoff=0.5, p=2)
    Diversity(key='final_state', cutoff=0.5, p=2)
    """

    key: str = "final_state"
    cutoff: float = 0.0
    p: float = 1.0

    def __post_init__(self) -> None:
        if not self.p >= 1:
            raise ValueError(f"p: must be at least 1, or inf, got {self.p!r}")
        if isnan(self.cutoff):
            raise ValueError("cutoff: must be a number, got NaN; negative tests nothing")


def near(points: Array, others: Array, rule: Diversity) -> Array:
    """Which of `others` are within the cutoff of each point, (n, m) bools; in blocks of bounded memory."""
    out = np.zeros((len(points), len(others)), bool)
    width = max(points.shape[1], 1)
    step = max(1, BLOCK_NBYTES // (8 * width * max(len(points), 1)))
    for first in range(0, len(others), step):
        part = slice(first, first + step)
        out[:, part] = _distance(points[:, None] - others[None, part], rule.p) <= rule.cutoff
    return out


def _distance(gap: Array, p: float) -> Any:
    if p == np.inf:
        return np.abs(gap).max(axis=-1, initial=0.0)
    if p == 1:
        return np.abs(gap).sum(axis=-1)
    return (np.abs(gap) ** p).sum(axis=-1) ** (1 / p)


def crowding(
    points: Array, rewards: Array, kept: Array, kept_rewards: Array, rule: Diversity
) -> tuple[Array, Array]:
    """Try new items in order, best first; return which go in (bools), and the indices of kept ones that leave."""
    winners, alive = np.zeros(len(points), bool), np.ones(len(kept), bool)
    most = max(8 * points.shape[1], len(kept), len(points), 1)  # bytes that one new item needs
    step = max(1, BLOCK_NBYTES // most)
    for first in range(0, len(points), step):
        some = points[first : first + step]
        close_kept, close_new = near(some, kept, rule), near(some, some, rule)
        crowded: Array = np.asarray(near(some, points[:first][winners[:first]], rule).any(axis=1))
        for i, reward in enumerate(rewards[first : first + step]):
            beside = close_kept[i] & alive
            if (
                crowded[i]
                or (beside & (kept_rewards >= reward)).any()
                or (close_new[i] & winners[first : first + len(some)]).any()
            ):
                continue
            alive &= ~beside
            winners[first + i] = True
    return winners, np.flatnonzero(~alive)
