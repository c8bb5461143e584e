"""The names of recollect.ipc for type checkers; `__init__.py` loads each when it is first used."""

from recollect.ipc.async_runner import AsyncRunner as AsyncRunner
from recollect.ipc.replay_buffer import ReplayBuffer as ReplayBuffer
from recollect.ipc.rollout_ring_buffer import RolloutRingBuffer as RolloutRingBuffer
from recollect.ipc.shared_buffer import SharedBufferBase as SharedBufferBase
from recollect.ipc.shared_obs_stats import SharedObsNormStats as SharedObsNormStats
from recollect.ipc.weight_sync import SharedWeightSync as SharedWeightSync
