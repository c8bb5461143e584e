"""Replay on other ranks: a manager that stores, scores and filters, and its workers' clients.

Names are loaded when they are first used; none of them loads mpi4py, torch or ray before it is needed.
"""

from __future__ import annotations

from recollect._lazy import lazy

# name -> module; a line per public name
_HOME = {
    "ANY": "recollect.remote.carriers.base",
    "Carrier": "recollect.remote.carriers.base",
    "Checkpoint": "recollect.remote.records",
    "DATA_TAG": "recollect.remote.messages",
    "Diversity": "recollect.remote.diversity",
    "Limits": "recollect.remote.records",
    "LocalCarrier": "recollect.remote.carriers.local",
    "METADATA_TAG": "recollect.remote.messages",
    "ManagerStats": "recollect.remote.records",
    "MpiCarrier": "recollect.remote.carriers.mpi",
    "RayCarrier": "recollect.remote.carriers.ray",
    "RemoteReplay": "recollect.remote.client",
    "ReplayBufferManager": "recollect.remote.manager",
    "ClientStats": "recollect.remote.records",
    "Shards": "recollect.remote.records",
    "TcpCarrier": "recollect.remote.carriers.tcp",
    "TorchCarrier": "recollect.remote.carriers.torch",
    "Trajectories": "recollect.remote.trajectories",
    "launch": "recollect.remote.launching",
    "rank_layout": "recollect.remote.ranks",
}

__getattr__, __dir__, __all__ = lazy(__name__, _HOME)
