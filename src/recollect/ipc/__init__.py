"""Experience between processes of one computer: weights, statistics, replay, errors and memory budgets.

Names are loaded when they are first used; none of them needs torch until it is asked for tensors.
"""

from __future__ import annotations

from recollect._lazy import lazy

_MODULE_OF = {
    "AsyncRunner": "recollect.ipc.async_runner",
    "ReplayBuffer": "recollect.ipc.replay_buffer",
    "RolloutRingBuffer": "recollect.ipc.rollout_ring_buffer",
    "SharedBufferBase": "recollect.ipc.shared_buffer",
    "SharedObsNormStats": "recollect.ipc.shared_obs_stats",
    "SharedWeightSync": "recollect.ipc.weight_sync",
}

__getattr__, __dir__, __all__ = lazy(__name__, _MODULE_OF)
