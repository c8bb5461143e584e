"""What a manager and a client may be told: their arguments, checked before anything is made."""

from __future__ import annotations

from math import isfinite
from typing import Any

import numpy as np

from recollect.remote.config import Shards
from recollect.remote.manager.baseline import STRATEGIES

MODES = ("sync", "async_score", "async_comm")


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
