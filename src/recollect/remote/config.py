"""Frozen records: what a manager is told (Shards, Checkpoint, Limits), and what it tells (ManagerStats)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from math import isfinite
from os import PathLike
from typing import Any

WINDOW_MOST = 4096
MOST_CLIENTS = (
    10_000  # that are remembered; of more, the longest silent is forgotten, if it can be one that left
)
OTHERS = -2  # the sender that stands for all who are forgotten


@dataclass(frozen=True, slots=True)
class Shards:
    """The managers that agree on one baseline, and how often.

    >>> Shards((2, 3))
    Shards(manager_ranks=(2, 3), sync_s=1.0)
    """

    manager_ranks: tuple[int, ...]
    sync_s: float = 1.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "manager_ranks", tuple(int(rank) for rank in self.manager_ranks))
        if len(set(self.manager_ranks)) != len(self.manager_ranks) or not self.manager_ranks:
            raise ValueError(f"manager_ranks: must be different ranks, got {self.manager_ranks}")
        _check_seconds("sync_s", self.sync_s, positive=True)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Where a manager writes itself, how often, and whether it goes on from what is there.

    A dump that the disk refuses is counted (`dump_errors`), warned of and tried again; until then the log goes on. A
    container that cannot be logged is refused. Damage in a log costs the containers it lies in; it is warned of and
    counted (`log_damages`), and the damaged log is kept beside the new one.

    >>> Checkpoint("runs/m0", resume=True)
    Checkpoint(path='runs/m0', every_s=300.0, resume=True, power_safe=False)
    """

    path: str | PathLike[str]
    every_s: float = 300.0
    resume: bool = False
    power_safe: bool = False

    def __post_init__(self) -> None:
        _check_seconds("every_s", self.every_s, positive=True)


@dataclass(frozen=True, slots=True)
class Limits:
    """What a manager waits for, and how long at most.

    `max_window`: unanswered containers of one worker. `join_s`: to come at all. `rejoin_s`: to come back after a lost
    connection. `silence_s`: to say something where a death cannot be seen. `send_s`: to take an answer. `drain_s`: for
    the last answers at the end.

    >>> Limits(join_s=60.0).max_window
    64
    """

    max_window: int = 64
    join_s: float = 300.0
    rejoin_s: float = 10.0
    silence_s: float = 300.0
    send_s: float = 30.0
    drain_s: float = 5.0

    def __post_init__(self) -> None:
        most: Any = self.max_window
        if isinstance(most, bool) or not isinstance(most, int) or not 1 <= most <= WINDOW_MOST:
            raise ValueError(f"max_window: must be an int in [1, {WINDOW_MOST}], got {most!r}")
        for name in ("join_s", "rejoin_s", "silence_s", "send_s", "drain_s"):
            _check_seconds(name, getattr(self, name))


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


def _check_seconds(name: str, value: Any, *, positive: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value) or value < 0:
        raise ValueError(f"{name}: must be a finite number of seconds, got {value!r}")
    if positive and value <= 0:
        raise ValueError(f"{name}: must be above 0, got {value!r}")


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
