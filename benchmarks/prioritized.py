"""The prioritized works: draw 256 in proportion to priorities, with weights, then give all 256 new ones.

Every row has a priority of its own before the clock starts. One call is what one learner step does: draw, gather,
weights, update. Weights are computed by everybody but flashbax, which returns probabilities.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from works import MILLION, Work, transition

if TYPE_CHECKING:
    from results import Results

ALPHA, BETA = 0.6, 0.4
MANY = 10 * MILLION
WORKS = (
    Work("prioritized-256", "prioritized", 256, MILLION, transition(17, 6)),
    Work("prioritized-256-10m", "prioritized_many", 256, MANY, transition(17, 6)),
)


def first_priorities(rows: int) -> np.ndarray[Any, Any]:
    """One for each row of the buffer."""
    return np.random.default_rng(7).random(rows)


def new_priorities(batch: int) -> list[np.ndarray[Any, Any]]:
    """What a learner would find, one array a call, over and over."""
    rng = np.random.default_rng(8)
    return [rng.random(batch) for _ in range(64)]


@dataclass(frozen=True, slots=True)
class Growth:
    """Of Recollect itself: at most `factor` times as long with ten times the rows."""

    work: str = "prioritized-256-10m"
    than: str = "prioritized-256"
    factor: float = 2.0

    @property
    def text(self) -> str:
        return f"within {self.factor:g}x of {self.than}"

    def measured(self, results: Results) -> float | None:
        found = [results.outcomes.get(name) for name in (self.work, self.than)]
        times = [outcome.us("recollect") if outcome else None for outcome in found]
        full = found[0] is not None and found[0].work.rows == MANY
        return times[0] / times[1] if full and times[0] and times[1] else None

    def verdict(self, results: Results) -> str:
        value = self.measured(results)
        return "not measured" if value is None else "PASS" if value < self.factor else "MISS"
