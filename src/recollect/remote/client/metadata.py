"""Requests that need no client: one message, one answer."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from time import monotonic
from typing import Any

from recollect.errors import DeadlineError, FrameError
from recollect.remote.carriers.base import Carrier, check_timeout
from recollect.remote.client.protocol import as_error
from recollect.remote.frame import decode, encode
from recollect.remote.messages import DATA_TAG, METADATA_TAG, Failed, GetMetadata, Metadata


def get_metadata(
    carrier: Carrier, manager_rank: int, timeout: float, retry_s: float = 5.0,
    count_stray: Callable[[], None] = lambda: None,
) -> dict[str, Any]:  # fmt: skip
    """Ask a manager for its metadata; answers to older requests are dropped and counted."""
    end = monotonic() + check_timeout(timeout)
    request = secrets.randbits(60)
    frame = encode(GetMetadata(request))
    while True:
        left = end - monotonic()
        if left < 0:
            raise DeadlineError(f"metadata of rank {manager_rank}: no answer within {timeout:g} s")
        carrier.send(manager_rank, DATA_TAG, frame, max(left, 0.0))
        again = min(end, monotonic() + retry_s)
        while (left := again - monotonic()) > 0:
            try:
                _, _, answer = carrier.recv(manager_rank, METADATA_TAG, left)
                message, _, _ = decode(answer, max_frame=carrier.max_frame)
            except DeadlineError:
                break
            except FrameError:
                continue
            if message.request != request:
                count_stray()
                continue
            if isinstance(message, Failed):
                raise as_error(message)
            if isinstance(message, Metadata):
                return message.values
