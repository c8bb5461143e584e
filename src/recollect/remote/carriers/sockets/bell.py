"""A bell: wakes the thread that polls."""

from __future__ import annotations

import contextlib
import os
import threading


class Bell:
    """An event that a poll sees. Concurrency: any thread may ring; after `close()` that does nothing."""

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()

    def fileno(self) -> int:
        return self._fd

    def ring(self) -> None:
        with self._lock:  # never by a number that is another file's by now
            if self._fd >= 0:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_write(self._fd, 1)

    def hush(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._fd)

    def close(self) -> None:
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1

    def close_in_child(self) -> None:
        """In a forked child, where a thread that is not there may hold the lock."""
        os.close(self._fd)
        self._fd = -1
