"""What a manager and a client may be told: Shards, Checkpoint, Limits, and the checks of their arguments."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite
from os import PathLike
from typing import Any

import numpy as np

MODES = ("sync", "async_score", "async_comm")
STRATEGIES = ("min", "percentile", "ema")
WINDOW_MOST = 4096
# A manager remembers so many clients; of more it forgets the one that was silent longest, if possible one that left.
MOST_CLIENTS = 10_000


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


def _check_seconds(name: str, value: Any, *, positive: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value) or value < 0:
        raise ValueError(f"{name}: must be a finite number of seconds, got {value!r}")
    if positive and value <= 0:
        raise ValueError(f"{name}: must be above 0, got {value!r}")


def check_settings(rank: Any, n: Any, strategy: Any, percentile: Any, alpha: Any, capacity: Any, remote: Any,
           workers: list[int] | None, storage: str, shards: Shards | None) -> None:  # fmt: skip
    """Raise ValueError for the first argument of a manager that cannot be."""
    if strategy not in STRATEGIES:
        raise ValueError(f"baseline_strategy: must be one of {list(STRATEGIES)}, got {strategy!r}")
    if not isinstance(percentile, int | float) or not 0 <= percentile <= 1:
        raise ValueError(f"baseline_percentile: must be in [0, 1], got {percentile!r}")
    if not isinstance(alpha, int | float) or not 0 < alpha <= 1:
        raise ValueError(f"baseline_ema_alpha: must be in (0, 1], got {alpha!r}")
    if isinstance(capacity, bool) or not isinstance(capacity, int | np.integer) or capacity < 1:
        raise ValueError(f"capacity: must be at least 1, got {capacity!r}")
    if storage not in ("memory", "shared"):
        raise ValueError(f"storage: must be 'memory' or 'shared', got {storage!r}")
    for name, value in (("rank", rank), ("num_training_ranks", 0 if n is None else n)):
        if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 0:
            raise ValueError(f"{name}: must be an int of at least 0, got {value!r}")
    if remote is not None and (not isinstance(remote, int) or remote < 0 or remote == rank):
        raise ValueError(f"remote_manager_rank: must be another rank, got {remote!r}")
    if workers is not None and (
        rank in workers or len(set(workers)) != len(workers) or min(workers, default=0) < 0
    ):
        raise ValueError(f"worker_ranks: must be different ranks other than {rank}, got {workers}")
    if workers is not None and n is not None and n > len(workers):
        raise ValueError(f"num_training_ranks: must be at most the {len(workers)} worker_ranks, got {n}")
    if shards is not None and rank not in shards.manager_ranks:
        raise ValueError(f"shards: manager_ranks must hold this rank, {rank}, got {shards.manager_ranks}")


def check_draw(n: Any, by: Any) -> None:
    """Raise ValueError unless so many items can be asked for in such a way."""
    if isinstance(n, bool) or not isinstance(n, int | np.integer) or n < 0:
        raise ValueError(f"n: must be an int of at least 0, got {n!r}")
    if by not in ("uniform", "log_reward"):
        raise ValueError(f"by: must be 'uniform' or 'log_reward', got {by!r}")


def check_client(mode: Any, when_down: Any, counts: dict[str, Any], seconds: dict[str, Any]) -> None:
    """Raise ValueError for the first argument of a client that cannot be."""
    if mode not in MODES:
        raise ValueError(f"mode: must be one of {list(MODES)}, got {mode!r}")
    if when_down not in ("raise", "drop"):
        raise ValueError(f"when_down: must be 'raise' or 'drop', got {when_down!r}")
    for name, value in counts.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name}: must be an int of at least 1, got {value!r}")
    for name, value in seconds.items():
        is_number = isinstance(value, int | float) and isfinite(value)
        if not is_number or value < 0 or (name == "retry_s" and not value):
            raise ValueError(f"{name}: must be a finite number of seconds, got {value!r}")
