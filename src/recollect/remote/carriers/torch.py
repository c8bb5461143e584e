"""TorchCarrier: ranks and addresses by torch.distributed, frames by tcp.

gloo's receives have no deadline and nccl moves no host bytes, so torch only tells all ranks where each listens: one
all_gather. Every rank of the group serves and is joined by those above it.
"""

from __future__ import annotations

import secrets
import socket
import threading
from typing import Any

from recollect.errors import MissingExtraError
from recollect.remote.carriers.tcp import TcpCarrier
from recollect.remote.frame import MAX_FRAME

_making = threading.Lock()
_the_carrier: TcpCarrier | None = None


def _distributed() -> Any:
    try:
        import torch.distributed as distributed
    except ImportError as error:
        raise MissingExtraError(
            'the carrier "torch" needs torch; run pip install "recollect[torch]", or use "local", which needs nothing'
        ) from error
    return distributed


def TorchCarrier(group: Any = None, *, max_frame: int = MAX_FRAME) -> TcpCarrier:
    """Return the carrier of this rank of a process group; every rank of the group calls it.

    With one node it binds to loopback, with several to this node's address. The token is random, from rank 0.
    """
    distributed = _distributed()
    if not distributed.is_available() or not distributed.is_initialized():
        raise RuntimeError(
            "TorchCarrier: torch.distributed must be initialised; call init_process_group first"
        )
    rank, size = distributed.get_rank(group), distributed.get_world_size(group)
    host = socket.gethostname()
    first: list[Any] = [None] * size
    distributed.all_gather_object(first, (host, secrets.token_bytes(32) if rank == 0 else b""), group=group)
    is_one_node = len({name for name, _ in first}) == 1
    bind = "127.0.0.1" if is_one_node else socket.gethostbyname(host)
    carrier = TcpCarrier.serve(rank, f"{bind}:0", token=first[0][1], max_frame=max_frame)
    try:
        carrier.size = size  # no rank comes or goes
        addresses: list[Any] = [None] * size
        distributed.all_gather_object(addresses, carrier.address, group=group)
        carrier.link(addresses[:rank])
        distributed.barrier(group=group)
    except BaseException:  # a rank died meanwhile
        carrier.close()
        raise
    return carrier


def the_torch_carrier() -> TcpCarrier:
    """This process's one carrier over the default group, made at the first use."""
    global _the_carrier
    with _making:  # once: every rank of the group makes as many as the others
        if _the_carrier is None or _the_carrier.is_closed:
            _the_carrier = TorchCarrier()
        return _the_carrier
