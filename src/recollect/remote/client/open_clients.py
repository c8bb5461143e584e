"""Open clients: one per carrier end and manager; what is never closed says Exit when its process ends."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from multiprocessing import util
from typing import TYPE_CHECKING, Any

from recollect.remote.carriers.base import Carrier

if TYPE_CHECKING:
    from recollect.remote.client.client import RemoteReplay

_open: dict[tuple[int, int], tuple[Carrier, RemoteReplay]] = {}
_known: dict[tuple[int, int], Callable[[], Any]] = {}  # by which a client here has spoken
_registered = 0
os.register_at_fork(after_in_child=_known.clear)
os.register_at_fork(after_in_child=_open.clear)  # they are the parent's, and say nothing when a child ends

# Carriers may have no hash, so both are found by id. An id is given again once its object is gone: what is open keeps
# its carrier, and what is known is compared with the carrier itself, and goes with it.


def enter(client: RemoteReplay, carrier: Carrier) -> None:
    """Note an open client; RuntimeError if its place is taken."""
    key = (id(carrier), client.manager_rank)
    if _open.get(key, (carrier, client))[1] is not client:
        raise RuntimeError(
            f"rank {client.manager_rank}: has a client on this carrier already; close it first"
        )
    _open[key] = carrier, client
    _known[key] = _found(carrier, key)
    _close_at_exit()


def _found(carrier: Carrier, key: tuple[int, int]) -> Callable[[], Any]:
    def forget(gone: Any) -> None:
        if _known.get(key) is gone:
            del _known[key]

    try:
        return weakref.ref(carrier, forget)
    except TypeError:  # a class without room for weak references: kept, so that its id is not given again
        return lambda: carrier


def leave(client: RemoteReplay) -> None:
    """Forget a client that was closed, also one that a Ctrl-C kept from opening its carrier."""
    for key, (_, found) in list(_open.items()):  # a list at once: other threads enter and leave meanwhile
        if found is client:
            _open.pop(key, None)


def was_used(carrier: Carrier, manager_rank: int) -> bool:
    """Whether a client of this process was ever open on this carrier for this manager."""
    found = _known.get((id(carrier), manager_rank))
    return found is not None and found() is carrier


def close_open_client(carrier: Carrier, manager_rank: int) -> bool:
    """Close the client that is open on this carrier for this manager; False if there is none."""
    found = _open.get((id(carrier), manager_rank))
    if found is None:
        return False
    found[1].close()
    return True


def _close_at_exit() -> None:
    """Have what was never closed say Exit when this process ends, forked children included."""
    global _registered
    if _registered != os.getpid():
        _registered = os.getpid()
        util.Finalize(None, _exit_all, exitpriority=100)


def _exit_all() -> None:
    for _, client in list(_open.values()):
        client._abandon()
