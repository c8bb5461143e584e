"""Ctrl-C: for the parent alone, also while a child starts, and nothing of ours stays taken because of it."""

from __future__ import annotations

import os
import signal
import sys
import threading

# What `signal` wraps in enums, which would cost 6 µs a call.
from _signal import SIGINT, getsignal  # type: ignore[import-not-found]
from _signal import signal as set_signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from importlib import import_module
from multiprocessing import resource_tracker
from threading import get_ident
from types import FrameType, ModuleType
from typing import Any, ParamSpec, TypeVar

# Signals by which programs are told to save, to end or to hurry.
ASKING = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM)

P = ParamSpec("P")
T = TypeVar("T")

_main_ident = threading.main_thread().ident


def _after_fork() -> None:
    global _main_ident
    _main_ident = get_ident()


os.register_at_fork(after_in_child=_after_fork)


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


class deferred:  # a class, not a generator: a carrier enters it several times for each message
    """Ctrl-C in here is raised at the end: for calls into libraries that would break if it were raised inside.

    So are `more` signals that the program handles, whose handlers may raise, or call us again.
    """

    __slots__ = ("_before", "_came", "_more")

    def __init__(self, *more: int) -> None:
        self._more = more
        self._before: tuple[tuple[int, Any], ...] = ()
        self._came: list[int] = []

    def __enter__(self) -> None:
        # They are never raised in another thread; and a handler that is not of Python could not be put back.
        if get_ident() != _main_ident or (handler := getsignal(SIGINT)) is None:
            return
        self._before = ((SIGINT, handler),)
        for number in self._more:
            if callable(handler := getsignal(number)):
                self._before += ((number, handler),)
        try:
            for number, _ in self._before:
                set_signal(number, self._note)
        except BaseException:  # by a handler that was not replaced yet
            _put_back(list(self._before))
            raise

    def _note(self, number: int, frame: object) -> None:
        self._came.append(number)

    def __exit__(self, *error: object) -> None:
        if self._more:
            _put_back(list(self._before))
        elif self._before:
            set_signal(*self._before[0])
        if self._came:
            before = dict(self._before)
            _handle([before[number] for number in self._came], self._came)


def _put_back(handlers: list[tuple[int, Any]]) -> None:
    """Set all handlers, also if one of them runs meanwhile and raises."""
    try:
        while handlers:
            set_signal(*handlers[-1])
            handlers.pop()
    finally:
        if handlers:
            _put_back(handlers)


def _handle(handlers: list[Any], numbers: list[int]) -> None:
    """Call each handler, also if the one before raised."""
    if handlers:
        try:
            if callable(handlers[0]):
                handlers[0](numbers[0], None)
        finally:
            _handle(handlers[1:], numbers[1:])


def undivided(function: Callable[P, T]) -> Callable[P, T]:
    """Raise a Ctrl-C that comes during a call when the call is over; what it returned is dropped."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        with deferred():
            return function(*args, **kwargs)

    return call


def import_whole(name: str) -> ModuleType:
    """Import a module; Ctrl-C meanwhile is raised when that is done.

    Inside of torch it would abort the process, or leave parts that no later import mends.
    """
    if name in sys.modules:
        return import_module(name)  # which waits, if another thread imports it just now
    with deferred():
        return import_module(name)


def drop_held_back() -> None:
    """In the child: forget what came meanwhile, and ignore SIGINT from now on."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def is_running(owner: object, *methods: Callable[..., Any]) -> bool:
    """Whether one of these methods of an object runs further up this thread's stack; not one that was cut short."""
    codes = [method.__code__ for method in methods]
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code in codes and frame.f_locals.get("self") is owner:
            return True
        frame = frame.f_back
    return False


def is_entered(turn: object) -> bool:
    """Whether a call further up this thread's stack is inside of `with self._turn`; one that was cut short is not."""
    frame = sys._getframe(1).f_back
    while frame is not None:
        if "_turn" in frame.f_code.co_names and getattr(frame.f_locals.get("self"), "_turn", None) is turn:
            return True
        frame = frame.f_back
    return False
