"""How many bytes a run will take, before it takes them; and saying so in good time.

An estimate equals the bytes of the segments that are then made. pg, p64 and p8 round up to 4096, 64 and 8.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from recollect import checks
from recollect.budget import available_nbytes, human_nbytes
from recollect.errors import BudgetError
from recollect.ipc.rollout_ring_buffer import rollout_ring_nbytes
from recollect.ipc.rollout_slots import plan_slot
from recollect.memory.segment import PAGE, page_up

MUTE = "RECOLLECT_SKIP_MEMORY_CHECK"
_warned: set[str] = set()


def estimate_offpolicy_bytes(
    num_envs: int,
    replay_buffer_n: int,
    obs_dim: int,
    action_dim: int,
    critic_dim: int,
    batch_size: int,
    updates_per_step: int,
    *,
    num_lanes: int = 1,
    device: str = "cpu",
    param_bytes: int = 0,
    param_shapes: Mapping[str, Any] | None = None,
    envs_per_lane: int = 0,
) -> dict[str, Any]:
    """Return the bytes of an off-policy run: replay buffer, two batch slots and weights.

    `num_lanes` and `envs_per_lane` are those of the ReplayBuffer.
    `param_bytes` counts one page for the names and shapes of the parameters; `param_shapes` (as SharedWeightSync takes
    them) counts exactly. `total` is shared host memory, `peak` adds what the learner allocates for a draw.

    >>> estimate_offpolicy_bytes(16, 1000, 48, 12, 0, 256, 4)["row_bytes"]
    448
    """
    _counts(num_envs=num_envs, replay_buffer_n=replay_buffer_n, obs_dim=obs_dim, action_dim=action_dim,
                  batch_size=batch_size, updates_per_step=updates_per_step, num_lanes=num_lanes)  # fmt: skip
    _counts(0, critic_dim=critic_dim, param_bytes=param_bytes, envs_per_lane=envs_per_lane)
    rows, n = num_envs * replay_buffer_n, batch_size * updates_per_step
    n_rings, words = num_lanes * max(1, envs_per_lane), 3 if envs_per_lane else 1
    if rows % n_rings:
        label = "num_lanes × envs_per_lane" if envs_per_lane else "num_lanes"
        raise ValueError(f"{label}: must divide the {rows} rows, got {n_rings}")
    row_bytes = _up(4 * (2 * obs_dim + action_dim + 3 + 2 * critic_dim), 8)
    replay_buffer = page_up(256 + 128 * n_rings) + words * page_up(8 * rows) + page_up(row_bytes * rows)
    slots = 2 * PAGE + 2 * page_up(row_bytes * n)  # a page for words, a page for sizes
    weights = _weights(param_bytes, param_shapes)
    total = replay_buffer + slots + weights
    on_host = device.partition(":")[0] in ("cpu", "numpy")
    return _with_breakdown({
        "row_bytes": row_bytes, "replay_buffer": replay_buffer, "double_buffer_slots": slots, "weights": weights,
        "total": total, "device_slots": 0 if on_host else 2 * row_bytes * n, "peak": total + 16 * n,
    })  # fmt: skip


def estimate_appo_bytes(
    num_envs: int,
    steps_per_env: int,
    obs_dim: int | tuple[int, ...],
    action_dim: int,
    critic_dim: int,
    num_slots: int = 4,
    *,
    num_lanes: int = 1,
    staging: int = 1,
    finals: bool = False,
    fields: Mapping[str, Any] | None = None,
    param_bytes: int = 0,
    param_shapes: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the bytes of an asynchronous PPO run: rollout ring, weights and the learner's staging pool.

    `num_envs` is the total over all lanes; `fields` are the ring's additional per-step fields, name → (shape, dtype).
    """
    _counts(num_envs=num_envs, steps_per_env=steps_per_env, action_dim=action_dim, num_slots=num_slots,
                  num_lanes=num_lanes, staging=staging)  # fmt: skip
    _counts(0, critic_dim=critic_dim, param_bytes=param_bytes)
    if num_envs % num_lanes:
        raise ValueError(f"num_lanes: must divide the {num_envs} environments, got {num_lanes}")
    plan = plan_slot(num_envs // num_lanes, steps_per_env, obs_dim, action_dim, critic_dim, finals, fields)
    slot, ring_buffer = plan.slot_nbytes, rollout_ring_nbytes(plan, num_slots, num_lanes)
    weights = _weights(param_bytes, param_shapes)
    total, pool = ring_buffer + weights, staging * num_lanes * slot
    return _with_breakdown({
        "slot_bytes": slot, "ring_buffer": ring_buffer, "weights": weights, "total": total, "staging_pool": pool,
        "peak": total + pool,
    })  # fmt: skip


def get_available_memory_bytes() -> int | None:
    """Return the least of what the system and each enclosing cgroup still allow, None if unknown."""
    return available_nbytes()


def get_shared_memory_available_bytes(path: str | os.PathLike[str] | None = None) -> int | None:
    """Return what shared segments may take: as other memory, since they lie in no mount; or a mount's free bytes."""
    if path is None:
        return available_nbytes()
    try:
        found = os.statvfs(Path(path))
    except OSError:
        return None
    return found.f_bavail * found.f_frsize


def warn_if_over_budget(est: Mapping[str, Any] | int, label: str, fraction: float = 0.8) -> None:
    """Warn, once for each label, if an estimate's `peak` (or a number of bytes) is over its share of memory.

    The environment variable RECOLLECT_SKIP_MEMORY_CHECK=1 mutes it.
    """
    needed, share = _bytes_of(est, "peak"), checks.fraction("fraction", fraction, above=True)
    available = get_available_memory_bytes()
    if os.environ.get(MUTE) == "1" or label in _warned or available is None or needed <= share * available:
        return
    _warned.add(label)
    warnings.warn(f"{_over(needed, label, share, available)}{_details(est)}", ResourceWarning, stacklevel=2)


def raise_if_shared_memory_over_budget(
    est: Mapping[str, Any] | int,
    label: str,
    fraction: float = 0.8,
    path: str | os.PathLike[str] | None = None,
) -> None:
    """Raise BudgetError if an estimate's `total` (or a number of bytes) is over its share; silent if unknown."""
    needed, share = _bytes_of(est, "total"), checks.fraction("fraction", fraction, above=True)
    available = get_shared_memory_available_bytes(path)
    if available is not None and needed > share * available:
        raise BudgetError(f"{_over(needed, label, share, available)}; nothing was allocated{_details(est)}")


def _over(needed: int, label: str, share: float, available: int) -> str:
    return (
        f"{label}: must fit in {share:.0%} of the {human_nbytes(available)} available, got {human_nbytes(needed)}; "
        "lower the capacity, the environments or the slots"
    )


def _details(est: Any) -> str:
    return f"\n{est['breakdown']}" if isinstance(est, Mapping) and "breakdown" in est else ""


def _bytes_of(est: Any, key: str) -> int:
    if isinstance(est, Mapping):
        if key not in est:
            raise ValueError(f"est: must have {key!r}, got {sorted(est)}; pass what an estimate returned")
        est = est[key]
    if isinstance(est, bool) or not isinstance(est, int | np.integer) or est < 0:
        raise ValueError(f"est: must be an estimate or a number of bytes, got {est!r}")
    return int(est)


def _counts(least: int = 1, **counts: Any) -> None:
    for name, n in counts.items():
        checks.count(name, n, least)


def _up(n: int, to: int) -> int:
    return -(-n // to) * to


def _weights(param_bytes: int, param_shapes: Mapping[str, Any] | None) -> int:
    if param_shapes is not None:
        from recollect.ipc.weight_sync import weights_nbytes

        return weights_nbytes(param_shapes)
    return PAGE + PAGE + 3 * page_up(param_bytes) if param_bytes else 0


def _with_breakdown(est: dict[str, int]) -> dict[str, Any]:
    lines = [f"{name:>20}: {n:>16,} B  ({human_nbytes(n)})" for name, n in est.items()]
    lines.append("not counted: networks, optimiser state, activations")
    return {**est, "breakdown": "\n".join(lines)}
