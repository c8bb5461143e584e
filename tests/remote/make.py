"""Small grids, containers and plain models for the tests of recollect.remote."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces

from recollect.remote import Checkpoint, Limits, Trajectories
from recollect.remote.items.space import item_space
from recollect.remote.manager.baseline import Baseline
from recollect.remote.manager.checkpoint import ManagerCheckpoint
from recollect.remote.manager.forwarder import Forwarder
from recollect.remote.manager.peers import Workers, Writers
from recollect.remote.manager.protocol import ManagerProtocol
from recollect.remote.manager.state import BufferSettings, Hooks, ManagerState
from recollect.remote.stats import Timing

SAMPLE = {"id": ((), "int64"), "log_reward": ((), "float64")}
PLAIN = {"id": ((), "int64")}
MAX_LENGTH = 12


def grid(dtype: Any = np.float64) -> spaces.Dict:
    """A trajectory of grid states, its final state, an id and a log reward."""
    step = spaces.Dict({"state": spaces.Box(0, 8, (2,), np.int32), "action": spaces.Discrete(3)})
    return spaces.Dict(
        {
            "steps": spaces.Sequence(step, stack=True),
            "id": spaces.Box(-(2**62), 2**62, (), np.int64),
            "final_state": spaces.Box(-np.inf, np.inf, (2,), np.float64),
            "log_reward": spaces.Box(-np.inf, np.inf, (), dtype),
        }
    )


def samples(ids: Any, rewards: Any = None) -> dict[str, Any]:
    ids = np.asarray(ids, np.int64)
    block = {"id": ids}
    if rewards is not None:
        block["log_reward"] = np.asarray(rewards, np.float64)
    return block


def paths(ids: Any, rewards: Any, lengths: Any = None, finals: Any = None, seed: int = 0) -> Trajectories:
    """Trajectories whose steps can be told from their ids."""
    ids = np.asarray(ids, np.int64)
    rng = np.random.default_rng(seed)
    n = rng.integers(1, MAX_LENGTH + 1, len(ids)) if lengths is None else np.asarray(lengths, np.int64)
    total = int(n.sum())
    state = np.stack([np.repeat(ids, n) % 8, np.arange(total) % 8], axis=1).astype(np.int32)
    finals = np.stack([ids, ids + 0.5], axis=1) if finals is None else np.asarray(finals, np.float64)
    return Trajectories(
        {"state": state, "action": (np.arange(total) % 3).astype(np.int64)},
        n,
        np.asarray(rewards, np.float64),
        id=ids,
        final_state=finals,
    )


def assert_doors(stats: Any) -> None:
    """Items went somewhere, all of them."""
    if hasattr(stats, "live"):
        doors = stats.live + stats.evicted + stats.removed + stats.n_rejected + stats.passed
    else:
        doors = sum(
            getattr(stats, door)
            for door in ("kept", "rejected", "passed", "filtered", "dropped", "lost", "pending")
        )
    assert stats.offered == doors, stats


def manager_protocol(
    env: Any = PLAIN, rank: int = 9, *, capacity: int = 10_000, evict: str = "oldest",
    checkpoint: Checkpoint | None = None, forward_to: int | None = None, limits: Limits | None = None,
    scoring_function: Any = None,
) -> ManagerProtocol:  # fmt: skip
    """The protocol of a manager, without a carrier and without a loop: the test says what comes and what time it is."""
    items, limits = item_space(env), limits or Limits()
    workers = Workers(None, None, limits)
    hooks = Hooks(
        lambda: scoring_function or (lambda obj, sender_rank: {"score": float("inf")}),
        lambda scores, packed: state.inject_baseline(scores, packed.log_rewards),
    )
    settings = BufferSettings(capacity, evict, "memory", True, None)
    state = ManagerState(
        items, settings, Baseline("min", 0.1, 0.1, None), workers, Timing(False), hooks, None
    )
    forwarder = None
    if forward_to is not None:
        forwarder = Forwarder(items, rank, forward_to, is_bounded=checkpoint is None)
    saved = ManagerCheckpoint(state, Writers(), checkpoint, forwarder)
    made = ManagerProtocol(state, workers, limits, saved, forwarder, state.metadata)
    made.open()
    return made
