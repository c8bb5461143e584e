"""Turns: whoever waits does the work of all, one thread at a time.

The thread that waits leads: it polls, reads and writes for everybody, and wakes the others that wait; when it has what
it wanted, another takes over. So a frame costs no change of threads.
"""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic
from typing import Any

from recollect._core import Condition
from recollect.remote.carriers.base import too_late


class Turns:
    """Who leads. Concurrency: any thread.

    `work(timeout)` polls once, by the leader alone and without the lock; `check(what)` raises once waiting is in vain.
    """

    def __init__(self, work: Callable[[float], None], check: Callable[[Callable[[], str]], None]) -> None:
        self.cond = Condition()
        self._leader: object | None = None
        self._work, self._check = work, check

    @property
    def is_led(self) -> bool:
        """Whether somebody does the work now."""
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
            finally:  # not by a call, at whose begin an interrupt could come: nobody would ever lead again
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

    def glance(self) -> None:
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
