"""What a manager and a client tell about themselves: records of counts and seconds, and how they are printed."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, fields
from math import inf
from time import perf_counter
from typing import Any

OTHERS = -2  # the sender that stands for all that are forgotten
RECENT = 1000
_NOTHING = nullcontext()


@dataclass(frozen=True, slots=True)
class Phase:
    """Seconds of one kind of work."""

    count: int
    total_s: float
    mean_s: float
    min_s: float
    max_s: float


@dataclass(frozen=True, slots=True)
class Sender:
    """What came from one rank."""

    requests: int = 0
    items: int = 0
    nbytes: int = 0
    state: str = "present"
    malformed: int = 0
    undelivered: int = 0


@dataclass(frozen=True, slots=True)
class ManagerStats:
    """What a manager was offered and by which door it left: offered = live + evicted + removed + rejected + passed.

    `rejected` is by reason; `senders` by rank, the last 10,000 of them, and rank -2 for all others together; `phases`
    only with `timing`. `log_damages`: places of its log that were damaged when it resumed.
    """

    offered: int
    live: int
    evicted: int
    removed: int
    rejected: Mapping[str, int]
    passed: int
    containers: int
    duplicates: int
    stray: int
    malformed: int
    scoring_errors: int
    pending_sends: int
    unsent: int
    baseline: float | None
    exit_counter: int
    senders: Mapping[int, Sender] = field(default_factory=dict)
    phases: Mapping[str, Phase] = field(default_factory=dict)
    forwarded: Any = None
    dump_errors: int = 0
    log_damages: int = 0

    @property
    def n_rejected(self) -> int:
        """Rejected items, for whatever reason."""
        return sum(self.rejected.values())


@dataclass(frozen=True, slots=True)
class ClientStats:
    """Items: offered = kept + rejected + passed + filtered + dropped + lost + pending. Sends, bytes and seconds."""

    offered: int
    kept: int
    rejected: int
    passed: int
    filtered: int
    dropped: int
    lost: int
    pending: int
    forgotten: int
    reasons: dict[str, int]
    sent: int
    skipped: int
    forced: int
    retried: int
    stray: int
    nbytes: int
    encode_s: float
    send_s: float
    wait_s: float


@dataclass(frozen=True, slots=True)
class ForwardStats:
    """Items that were to be forwarded, and what became of them."""

    offered: int
    kept: int
    rejected: int
    passed: int
    arrived: int  # before a restart: what the other manager made of them is not known here
    lost: int
    pending: int


def as_plain(record: Any) -> dict[str, Any]:
    """A record as plain values, for JSON."""
    plain = {}
    for f in fields(record):
        value = getattr(record, f.name)
        if isinstance(value, Mapping):
            value = {
                str(k): as_plain(v) if hasattr(v, "__dataclass_fields__") else v for k, v in value.items()
            }
        elif hasattr(value, "__dataclass_fields__"):
            value = as_plain(value)
        plain[f.name] = value
    return plain


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
