"""Polling the sockets of a carrier: one thread at a time does it for all, and any thread can wake it.

The thread that waits leads: it polls, reads and writes for all threads, and wakes the others that wait; when it has
what it wanted, another takes over. So a frame costs no change of threads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import monotonic
from typing import Any

from recollect._core import Condition
from recollect.remote.carriers.base import too_late
from recollect.system.events import Event


class PollLeader:
    """Lets one thread at a time do the work of all that wait. Concurrency: any thread.

    The leading thread calls `work(timeout)`, which polls once, without the lock; `check(what)` raises once a wait is
    in vain.
    """

    def __init__(self, work: Callable[[float], None], check: Callable[[Callable[[], str]], None]) -> None:
        self.cond = Condition()
        self._leader: object | None = None
        self._work, self._check = work, check

    @property
    def is_led(self) -> bool:
        """Whether a thread does the work now."""
        return self._leader is not None

    def wait(self, ready: Callable[[], Any], timeout: float, what: Callable[[], str]) -> Any:
        """Wait until `ready()`, called with the lock, is not None; lead the work, or let another thread do so."""
        end, me = monotonic() + timeout, object()
        while True:
            try:
                with self.cond:
                    while True:
                        self._check(what)
                        found = ready()
                        if found is not None:
                            return found
                        left = end - monotonic()
                        if self._leader is None:
                            self._leader = me
                            break
                        if left <= 0:
                            raise too_late(what(), timeout)
                        self.cond.wait(left)
                self._work(max(left, 0.0))
            finally:  # not by a call: an interrupt could come as it begins, and no thread would lead again
                if self._leader is me:
                    with self.cond:
                        self._leader = None
                        self.cond.notify_all()
            if left <= 0:  # a last look at what the last poll brought
                with self.cond:
                    self._check(what)
                    found = ready()
                if found is None:
                    raise too_late(what(), timeout)
                return found

    def poll_now(self) -> None:
        """Do what is to do now, without waiting, unless another thread does it."""
        me = object()
        try:
            with self.cond:
                self._check(lambda: "news of its peers")
                if self._leader is not None:
                    return
                self._leader = me
            self._work(0.0)
        finally:  # as in `wait`
            if self._leader is me:
                with self.cond:
                    self._leader = None
                    self.cond.notify_all()


class Wakeup:
    """An event that a poll sees. Concurrency: any thread may `wake`; after `close()` that does nothing."""

    def __init__(self) -> None:
        self._event = Event()
        self._lock = threading.Lock()

    def fileno(self) -> int:
        return self._event.fileno()

    def wake(self) -> None:
        with self._lock:  # never by a number that is another file's by now
            if self._event.fileno() >= 0:
                self._event.set()

    def clear(self) -> None:
        self._event.clear()

    def close(self) -> None:
        with self._lock:
            self._event.close()

    def close_in_child(self) -> None:
        """In a forked child, where a thread that is not there may hold the lock."""
        self._event.close()
