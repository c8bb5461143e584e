"""Experience between processes of one computer: weights, statistics, replay, errors and memory budgets.

Names are loaded when they are first used; none of them needs torch until it is asked for tensors.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

_NAMES = {
    "recollect.ipc.async_runner": "AsyncRunner",
    "recollect.ipc.replay_buffer": "ReplayBuffer",
    "recollect.ipc.rollout_ring_buffer": "RolloutRingBuffer",
    "recollect.ipc.shared_buffer": "SharedBufferBase",
    "recollect.ipc.shared_obs_stats": "SharedObsNormStats",
    "recollect.ipc.weight_sync": "SharedWeightSync",
}
_HOME = {name: module for module, names in _NAMES.items() for name in names.split()}

if TYPE_CHECKING:
    from recollect.ipc.async_runner import AsyncRunner as AsyncRunner
    from recollect.ipc.replay_buffer import ReplayBuffer as ReplayBuffer
    from recollect.ipc.rollout_ring_buffer import RolloutRingBuffer as RolloutRingBuffer
    from recollect.ipc.shared_buffer import SharedBufferBase as SharedBufferBase
    from recollect.ipc.shared_obs_stats import SharedObsNormStats as SharedObsNormStats
    from recollect.ipc.weight_sync import SharedWeightSync as SharedWeightSync

__all__ = sorted(_HOME)

if not TYPE_CHECKING:  # a type checker that saw __getattr__ would let any misspelt name pass

    def __getattr__(name: str) -> Any:
        if name not in _HOME:
            raise AttributeError(f"module 'recollect.ipc' has no attribute {name!r}")
        value = getattr(import_module(_HOME[name]), name)
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
