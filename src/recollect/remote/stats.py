"""Timing: how long each kind of work took, and the summary that is printed at the end."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from math import inf
from time import perf_counter

from recollect.remote.config import OTHERS, ManagerStats, Phase

RECENT = 1000
_NOTHING = nullcontext()


class Timing:
    """Counts, totals and extremes by phase, and the last 1,000 durations of each. Concurrency: any thread."""

    def __init__(self, is_on: bool) -> None:
        self.is_on = is_on
        self._recent: dict[str, deque[float]] = {}
        self._sums: dict[str, tuple[int, float, float, float]] = {}  # count, total, min, max
        self._lock = threading.Lock()

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Time what happens inside, if timing is on."""
        return self._timed(name) if self.is_on else _NOTHING

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        start = perf_counter()
        try:
            yield
        finally:
            self.add(name, perf_counter() - start)

    def add(self, name: str, seconds: float) -> None:
        """Note one duration."""
        with self._lock:
            count, total, low, high = self._sums.get(name, (0, 0.0, inf, 0.0))
            self._sums[name] = (count + 1, total + seconds, min(low, seconds), max(high, seconds))
            self._recent.setdefault(name, deque(maxlen=RECENT)).append(seconds)

    def recent(self) -> dict[str, list[float]]:
        """The last durations of each phase."""
        with self._lock:
            return {name: list(values) for name, values in self._recent.items()}

    def phases(self) -> dict[str, Phase]:
        """A record for each phase."""
        with self._lock:
            return {n: Phase(c, t, t / c, low, high) for n, (c, t, low, high) in self._sums.items()}

    @staticmethod
    def summary(stats: ManagerStats) -> str:
        """What happened, as text."""
        doors = ("live", "evicted", "removed", "n_rejected", "passed")
        lines = [
            f"items offered {stats.offered:,}: "
            + ", ".join(f"{door.removeprefix('n_')} {getattr(stats, door):,}" for door in doors),
            f"containers {stats.containers:,}, duplicates {stats.duplicates:,}, malformed {stats.malformed:,}, "
            f"scoring errors {stats.scoring_errors:,}, baseline {stats.baseline}",
            f"{'rank':>6} {'state':>9} {'requests':>10} {'items':>12} {'MB':>10}",
        ]
        for rank, sender in sorted(stats.senders.items()):
            name = "others" if rank == OTHERS else str(rank)
            lines.append(
                f"{name:>6} {sender.state:>9} {sender.requests:>10,} {sender.items:>12,} {sender.nbytes / 1e6:>10.2f}"
            )
        if stats.phases:
            lines.append(
                f"{'phase':>9} {'count':>9} {'total s':>9} {'mean µs':>10} {'min µs':>10} {'max µs':>10}"
            )
        for name, p in stats.phases.items():
            micro = " ".join(f"{x * 1e6:>10.1f}" for x in (p.mean_s, p.min_s, p.max_s))
            lines.append(f"{name:>9} {p.count:>9,} {p.total_s:>9.2f} {micro}")
        return "\n".join(lines)
