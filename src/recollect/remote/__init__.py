"""Replay on other ranks: a manager that stores, scores and filters, and its workers' clients.

Names are loaded when they are first used; none of them loads mpi4py, torch or ray before it is needed.
"""

from __future__ import annotations

from recollect._lazy import lazy

# name -> module; a line per public name
_HOME = {
    "ANY": "recollect.remote.carriers.base",
    "Carrier": "recollect.remote.carriers.base",
    "Checkpoint": "recollect.remote.config",
    "DATA_TAG": "recollect.remote.messages",
    "Diversity": "recollect.remote.manager.diversity",
    "Limits": "recollect.remote.config",
    "LocalCarrier": "recollect.remote.carriers.local",
    "METADATA_TAG": "recollect.remote.messages",
    "ManagerStats": "recollect.remote.stats",
    "MpiCarrier": "recollect.remote.carriers.mpi",
    "RayCarrier": "recollect.remote.carriers.ray",
    "RemoteReplay": "recollect.remote.client.client",
    "ReplayBufferManager": "recollect.remote.manager.manager",
    "ClientStats": "recollect.remote.stats",
    "Shards": "recollect.remote.config",
    "TcpCarrier": "recollect.remote.carriers.tcp",
    "TorchCarrier": "recollect.remote.carriers.torch",
    "Trajectories": "recollect.remote.items.trajectories",
    "launch": "recollect.remote.launcher",
    "rank_layout": "recollect.remote.ranks",
}

__getattr__, __dir__, __all__ = lazy(__name__, _HOME)
