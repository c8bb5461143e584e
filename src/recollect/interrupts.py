"""Ctrl-C reaches all processes of a terminal's group, but it is for the parent to handle, also while a child starts."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from multiprocessing import resource_tracker
from types import ModuleType


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


@contextmanager
def deferred() -> Iterator[None]:
    """Ctrl-C in here is raised at the end: for calls into libraries that would break if it were raised inside."""
    if threading.current_thread() is not threading.main_thread():  # it is never raised in another
        yield
        return
    pressed: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: pressed.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if pressed and callable(before):
            before(signal.SIGINT, None)


def import_whole(name: str) -> ModuleType:
    """Import a module; Ctrl-C meanwhile is raised when that is done. Inside of torch it would abort the process."""
    with deferred():
        return import_module(name)


def drop_held_back() -> None:
    """In the child: forget what came meanwhile, and ignore SIGINT from now on."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
