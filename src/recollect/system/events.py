"""What a thread polls: descriptors of many peers, and an event that another thread sets."""

from __future__ import annotations

import contextlib
import os
import select
import threading
from typing import Protocol

from recollect.system.switch import is_portable

READABLE, WRITABLE = select.POLLIN, select.POLLOUT
READABLE_OR_GONE = READABLE | getattr(select, "POLLRDHUP", 0)


class Poll(Protocol):
    """What `select.epoll` has of methods; any thread may change what one thread polls."""

    def register(self, fd: int, events: int, /) -> None: ...
    def modify(self, fd: int, events: int, /) -> None: ...
    def unregister(self, fd: int, /) -> None: ...
    def poll(self, timeout: float, /) -> list[tuple[int, int]]: ...
    def close(self) -> None: ...


def make_poll() -> Poll:
    """An epoll, or a list that is polled."""
    return PolledList() if is_portable() else select.epoll()


class PolledList:
    """Descriptors for `poll`. A change wakes the thread that polls, which then begins again.

    Concurrency: one thread polls at a time; any thread changes what it polls.
    """

    def __init__(self) -> None:
        self._events: dict[int, int] = {}
        self._lock = threading.Lock()
        self._changed = Event()

    def register(self, fd: int, events: int) -> None:
        with self._lock:
            if fd in self._events:
                raise FileExistsError(f"descriptor {fd}: is polled already")
            self._events[fd] = events
        self._changed.set()

    def modify(self, fd: int, events: int) -> None:
        with self._lock:
            if fd not in self._events:
                raise FileNotFoundError(f"descriptor {fd}: is not polled")
            if self._events[fd] == events:
                return
            self._events[fd] = events
        self._changed.set()

    def unregister(self, fd: int) -> None:
        with self._lock:
            if self._events.pop(fd, None) is None:
                raise FileNotFoundError(f"descriptor {fd}: is not polled")
        self._changed.set()

    def poll(self, timeout: float) -> list[tuple[int, int]]:
        """Return what is ready; nothing after `timeout` seconds, or when what is polled has changed."""
        polled = select.poll()
        changed = self._changed.fileno()
        if changed < 0:
            raise ValueError("the list is closed")
        polled.register(changed, select.POLLIN)
        with self._lock:
            for fd, events in self._events.items():
                polled.register(fd, events)
        found = dict(polled.poll(max(0, timeout) * 1000))
        if found.pop(changed, 0):
            self._changed.clear()
        for fd in [fd for fd, event in found.items() if event & select.POLLNVAL]:  # closed meanwhile
            del found[fd]
            with self._lock:
                self._events.pop(fd, None)
        return list(found.items())

    def close(self) -> None:
        self._changed.close()


class Event:
    """An event that a poll sees: an eventfd, or a pipe. Concurrency: any thread may set it, until `close()`."""

    def __init__(self) -> None:
        if is_portable():
            self._fd, self._other = os.pipe()
            os.set_blocking(self._fd, False)
            os.set_blocking(self._other, False)
        else:
            self._fd, self._other = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC), -1

    def fileno(self) -> int:
        return self._fd

    def set(self) -> None:
        with contextlib.suppress(BlockingIOError):
            if self._other < 0:
                os.eventfd_write(self._fd, 1)
            else:
                os.write(self._other, b"\0")

    def clear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            if self._other < 0:
                os.eventfd_read(self._fd)
            else:
                while len(os.read(self._fd, 4096)) == 4096:
                    pass

    def close(self) -> None:
        """Give up the descriptors; may be called twice."""
        for fd in (self._fd, self._other):
            if fd >= 0:
                os.close(fd)
        self._fd = self._other = -1
