"""A bell: wakes the thread that polls."""

from __future__ import annotations

import threading

from recollect.system.events import Event


class Bell:
    """An event that a poll sees. Concurrency: any thread may ring; after `close()` that does nothing."""

    def __init__(self) -> None:
        self._event = Event()
        self._lock = threading.Lock()

    def fileno(self) -> int:
        return self._event.fileno()

    def ring(self) -> None:
        with self._lock:  # never by a number that is another file's by now
            if self._event.fileno() >= 0:
                self._event.set()

    def hush(self) -> None:
        self._event.clear()

    def close(self) -> None:
        with self._lock:
            self._event.close()

    def close_in_child(self) -> None:
        """In a forked child, where a thread that is not there may hold the lock."""
        self._event.close()
