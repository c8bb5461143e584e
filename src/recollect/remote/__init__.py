"""Replay on other ranks: a manager that stores, scores and filters, and its workers' clients.

Names are loaded when they are first used; none of them loads mpi4py, torch or ray before it is needed.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

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

__all__ = sorted(_HOME)

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name not in _HOME:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(import_module(_HOME[name]), name)

        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *_HOME})
