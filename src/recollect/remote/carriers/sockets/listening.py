"""Listening: the next connection, whatever became of the one before."""

from __future__ import annotations

import errno
import socket
from time import sleep

_NAP_S = 0.02  # after a failure that may be over soon: too many open files, no memory
_ENDED = (errno.EBADF, errno.EINVAL)  # the listening socket was closed, or shut down


def accepted(listener: socket.socket) -> socket.socket | None:
    """Wait for a connection; None once nobody listens any more."""
    while True:
        try:
            return listener.accept()[0]
        except OSError as error:
            if error.errno in _ENDED:
                return None
            sleep(_NAP_S)
