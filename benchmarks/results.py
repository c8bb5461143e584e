"""What was measured, and what it means: timings, ratios, goals, and where a peer wins."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from adapters import C_GATHERS, ENTRIES
from prioritized import Growth
from works import Work

OURS = "recollect"
SAME_BYTES = 1.1
"""Deliveries that differ by more than this factor are compared per byte."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Microseconds per call of one participant at one work, one figure per round."""

    rounds_us: tuple[float, ...]
    calls: int
    nbytes: int

    @property
    def median_us(self) -> float:
        return statistics.median(self.rounds_us)

    @property
    def quartiles_us(self) -> tuple[float, float]:
        if len(self.rounds_us) < 2:
            return self.median_us, self.median_us
        low, _, high = statistics.quantiles(self.rounds_us, n=4, method="inclusive")
        return low, high


@dataclass(frozen=True, slots=True)
class Outcome:
    """All timings of one work, by participant."""

    work: Work
    timings: dict[str, Timing]

    def delivers_other_bytes(self, name: str) -> bool:
        share = self.timings[name].nbytes / self.work.call_nbytes
        return not 1 / SAME_BYTES < share < SAME_BYTES

    def us(self, name: str) -> float | None:
        """Median, scaled to the work's bytes where the participant cannot but deliver more (or fewer)."""
        timing = self.timings.get(name)
        if timing is None:
            return None
        scale = self.work.call_nbytes / timing.nbytes if self.delivers_other_bytes(name) else 1.0
        return timing.median_us * scale

    def fastest(self, names: Sequence[str]) -> float | None:
        return min((us for name in names if (us := self.us(name)) is not None), default=None)

    @property
    def peers(self) -> list[str]:
        return [name for name in self.timings if ENTRIES[name].role == "peer"]

    def reference_us(self, against: str) -> float | None:
        """The time that a goal or a column compares with: fastest peer, the faster C gather, or one by name."""
        names = {"peers": self.peers, "C": C_GATHERS}
        return self.fastest(names.get(against, (against,)))


@dataclass(slots=True)
class Results:
    """Everything of one run."""

    outcomes: dict[str, Outcome] = field(default_factory=dict)
    memory: dict[str, dict[str, int]] = field(default_factory=dict)
    memory_work: Work | None = None
    versions: dict[str, str] = field(default_factory=dict)
    skipped: list[tuple[str, str]] = field(default_factory=list)

    def skip(self, who: str, why: str) -> None:
        self.skipped.append((who, why))

    def memory_ratio(self, name: str, which: str = "filled_nbytes") -> float | None:
        """Peak memory of making a buffer, as a multiple of its packed rows."""
        if self.memory_work is None or name not in self.memory:
            return None
        return self.memory[name][which] / (self.memory_work.rows * self.memory_work.row_nbytes)


@dataclass(frozen=True, slots=True)
class Goal:
    """`faster`: at least `factor` times its speed. `within`: at most `factor` times its time (or size)."""

    work: str
    rule: Literal["faster", "within"]
    against: Literal["peers", "C", "memcpy", "size", "torchrl", "1M rows", "gather"]
    factor: float

    @property
    def text(self) -> str:
        if self.rule == "within":
            return f"within {self.factor:g}x of {'its size' if self.against == 'size' else self.against}"
        who = "the fastest peer" if self.against == "peers" else self.against
        return "ahead of every peer" if self.factor == 1 else f"at least {self.factor:g}x {who}"

    def measured(self, results: Results) -> float | None:
        if self.against == "size":
            return results.memory_ratio(OURS)
        outcome = results.outcomes.get(self.work)
        ours = outcome.us(OURS) if outcome else None
        theirs = outcome.reference_us(self.against) if outcome else None
        if ours is None or theirs is None:
            return None
        return theirs / ours if self.rule == "faster" else ours / theirs

    def verdict(self, results: Results) -> str:
        value = self.measured(results)
        if value is None:
            return "not measured"
        return "PASS" if (value >= self.factor if self.rule == "faster" else value <= self.factor) else "MISS"


GOALS: tuple[Goal | Growth, ...] = (
    Goal("uniform-256", "faster", "peers", 10),
    Goal("uniform-256", "within", "C", 1.3),
    Goal("uniform-4096", "faster", "peers", 4),
    Goal("uniform-4096", "within", "C", 1.3),
    Goal("uniform-8192", "faster", "peers", 4),
    Goal("uniform-8192", "within", "C", 1.3),
    Goal("add-1", "faster", "peers", 3),
    Goal("add-256", "faster", "peers", 1),
    Goal("add-4096", "faster", "peers", 1),
    Goal("add-4096", "within", "memcpy", 1.5),
    Goal("image-32", "faster", "peers", 1),
    Goal("image-32", "within", "memcpy", 1.2),
    Goal("sequences", "faster", "torchrl", 5),
    Goal("sequences", "faster", "peers", 1),
    Goal("sequences-flat", "within", "1M rows", 1.15),
    Goal("stack-8x256", "within", "gather", 2),
    Goal("peak-memory", "within", "size", 1.05),
    Goal("prioritized-256", "faster", "peers", 5),
    Growth(),
)


def peer_wins(results: Results) -> list[str]:
    """One sentence for each place where somebody else is faster than we are."""
    return [
        sentence
        for outcome in results.outcomes.values()
        for name in outcome.timings
        if ENTRIES[name].role in ("peer", "note") and (sentence := win(outcome, name))
    ]


def win(outcome: Outcome, name: str) -> str | None:
    ours, theirs = outcome.us(OURS), outcome.us(name)
    if ours is None or theirs is None or theirs >= ours:
        return None
    per_byte = " per byte delivered" if outcome.delivers_other_bytes(name) else ""
    figures = f"{theirs:.1f} against {ours:.1f} µs"
    return f"{outcome.work.name}: {name} is {ours / theirs:.2f}x as fast as {OURS}{per_byte} ({figures})."
