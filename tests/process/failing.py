"""Let the n-th call that writes, syncs, renames, opens or removes fail, or kill the process there."""

from __future__ import annotations

import builtins
import errno
import io
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

OPENS = ("open",)
CHANGES = (
    "write",
    "writev",
    "pwrite",
    "fsync",
    "fdatasync",
    "ftruncate",
    "replace",
    "rename",
    "unlink",
    "mkdir",
)
FAULTS = ("EIO", "ENOSPC", "EMFILE", "interrupt", "kill")


class Failing:
    """Counts calls of the operating system, and fails in one of them, or in that and all that follow."""

    def __init__(self, step: int, fault: str, lasts: bool) -> None:
        self.step, self.fault, self.lasts = step, fault, lasts
        self.n = 0
        self.struck = False
        self._pid = os.getpid()

    def check(self) -> None:
        if os.getpid() != self._pid:
            return
        n, self.n = self.n, self.n + 1
        if n == self.step or (self.lasts and n > self.step):
            self.struck = True
            if self.fault == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.fault == "interrupt":
                raise KeyboardInterrupt
            number = getattr(errno, self.fault)
            raise OSError(number, os.strerror(number))


@contextmanager
def failing(step: int, fault: str, *, lasts: bool = False) -> Iterator[Failing]:
    """Inside, the call number `step` fails; `EMFILE` fails only those that open."""
    state = Failing(step, fault, lasts)
    names = OPENS if fault == "EMFILE" else (*OPENS, *CHANGES)
    real: dict[str, Callable[..., Any]] = {name: getattr(os, name) for name in names}
    real_open = io.open

    def failed(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            state.check()
            return real[name](*args, **kwargs)

        return call

    def opened(file: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(file, int):
            state.check()
        return real_open(file, *args, **kwargs)

    for name in names:
        setattr(os, name, failed(name))
    io.open = builtins.open = opened  # type: ignore[assignment]
    try:
        yield state
    finally:
        for name in names:
            setattr(os, name, real[name])
        io.open = builtins.open = real_open
