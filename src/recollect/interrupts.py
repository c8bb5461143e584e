"""Ctrl-C: for the parent alone, also while a child starts, and nothing of ours stays taken because of it."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from multiprocessing import resource_tracker
from types import ModuleType


@contextmanager
def held_back(start_method: str) -> Iterator[None]:
    """A process started in here begins with SIGINT blocked, until it calls `drop_held_back`; here it is deferred."""
    if start_method != "fork":
        resource_tracker.ensure_running()  # first: starting it would unblock
    with deferred():  # another thread may still receive it, and then it is raised in this one
        before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        try:
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def deferred() -> Iterator[None]:
    """Ctrl-C in here is raised at the end: for calls into libraries that would break if it were raised inside."""
    # It is never raised in another thread; and a handler that is not of Python could not be put back.
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) is None:
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


def is_entered(turn: object) -> bool:
    """Whether a call further up this thread's stack is inside of `with self._turn`; one that was cut short is not."""
    frame = sys._getframe(1).f_back
    while frame is not None:
        if "_turn" in frame.f_code.co_names and getattr(frame.f_locals.get("self"), "_turn", None) is turn:
            return True
        frame = frame.f_back
    return False
