"""Open clients: one per carrier end and manager; what is never closed says Exit when its process ends."""

from __future__ import annotations

import os
from multiprocessing import util
from typing import TYPE_CHECKING

from recollect.remote.carriers.base import Carrier

if TYPE_CHECKING:
    from recollect.remote.client import RemoteReplay

_open: dict[tuple[int, int], RemoteReplay] = {}
_known: set[tuple[int, int]] = set()  # carriers and managers that a client of this process has spoken by
_registered = 0
os.register_at_fork(after_in_child=_known.clear)
os.register_at_fork(after_in_child=_open.clear)  # they are the parent's, and say nothing when a child ends


def enter(client: RemoteReplay, carrier: Carrier) -> None:
    """Note an open client; RuntimeError if its place is taken."""
    key = (id(carrier), client.manager_rank)
    if _open.get(key) not in (None, client):
        raise RuntimeError(
            f"rank {client.manager_rank}: has a client on this carrier already; close it first"
        )
    _open[key] = client
    _known.add(key)
    _close_at_exit()


def leave(client: RemoteReplay, carrier: Carrier) -> None:
    """Forget a client that was closed."""
    _open.pop((id(carrier), client.manager_rank), None)


def was_used(carrier: Carrier, manager_rank: int) -> bool:
    """Whether a client of this process was ever open on this carrier for this manager."""
    return (id(carrier), manager_rank) in _known


def close_open_client(carrier: Carrier, manager_rank: int) -> bool:
    """Close the client that is open on this carrier for this manager; False if there is none."""
    client = _open.get((id(carrier), manager_rank))
    if client is None:
        return False
    client.close()
    return True


def _close_at_exit() -> None:
    """Have what was never closed say Exit when this process ends, forked children included."""
    global _registered
    if _registered != os.getpid():
        _registered = os.getpid()
        util.Finalize(None, _exit_all, exitpriority=100)


def _exit_all() -> None:
    for client in list(_open.values()):
        client._abandon()
