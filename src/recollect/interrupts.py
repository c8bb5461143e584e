"""Ctrl-C reaches all processes of a terminal's group, but it is for the parent to handle, also while a child starts."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker


@contextmanager
def held_back(start_method: str) -> Iterator[None]:
    """A process started in here begins with SIGINT blocked, until it calls `drop_held_back`."""
    if start_method != "fork":
        resource_tracker.ensure_running()  # first: starting it would unblock
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def drop_held_back() -> None:
    """In the child: forget what came meanwhile, and ignore SIGINT from now on."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
