"""Let the n-th call that writes, syncs, renames, opens or removes fail, be interrupted, or kill the process."""

from __future__ import annotations

import builtins
import errno
import io
import os
import random
import signal
import sqlite3
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from recollect.errors import RecollectError

OPENS = ("open",)
SYNCS = ("fsync", "fdatasync")  # they only count: a process that dies loses nothing that was written
CHANGES = ("write", "writev", "pwrite", "ftruncate", "replace", "rename", "unlink", "mkdir", *SYNCS)
FAULTS = ("EIO", "ENOSPC", "EMFILE", "interrupt", "kill")
WAYS = [(fault, lasts) for fault in FAULTS for lasts in (False, True) if not (lasts and fault == "kill")]
MOST = 3000


class Fault:
    """What happens at one step, or at that and all that follow. Step -1 is never reached: it counts the steps."""

    def __init__(self, step: int, kind: str, lasts: bool) -> None:
        self.step, self.kind, self.lasts = step, kind, lasts
        self.n = 0
        self.struck = False
        self._pid = os.getpid()

    def check(self) -> None:
        n, self.n = self.n, self.n + 1
        assert n < MOST, "it never ends"
        if os.getpid() != self._pid or self.step < 0 or n < self.step or (n > self.step and not self.lasts):
            return
        self.struck = True
        if self.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.kind == "interrupt":
            signal.raise_signal(signal.SIGINT)
        else:
            number = getattr(errno, self.kind)
            raise OSError(number, os.strerror(number))

    def during(self, work: Callable[[], Any]) -> None:
        """Do `work` with this fault; what it raises must be the fault, or an error of ours that came of it."""
        self._pid = os.getpid()
        with _patched(self), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                work()
            except (OSError, RecollectError, KeyboardInterrupt, sqlite3.Error):
                if not self.struck:
                    raise


@contextmanager
def _patched(fault: Fault) -> Iterator[None]:
    """`EMFILE` fails only what opens."""
    names = OPENS if fault.kind == "EMFILE" else (*OPENS, *CHANGES)
    real: dict[str, Callable[..., Any]] = {name: getattr(os, name) for name in names}
    real_open = io.open

    def failing(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            fault.check()
            return None if name in SYNCS else real[name](*args, **kwargs)

        return call

    def opened(file: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(file, int):
            fault.check()
        return real_open(file, *args, **kwargs)

    for name in names:
        setattr(os, name, failing(name))
    io.open = builtins.open = opened  # type: ignore[assignment]
    try:
        yield
    finally:
        for name in names:
            setattr(os, name, real[name])
        io.open = builtins.open = real_open


@contextmanager
def no_syncs() -> Iterator[None]:
    """Inside, nothing is synced: what is tested is what a process leaves, not what a power loss does."""
    real = {name: getattr(os, name) for name in SYNCS}
    for name in SYNCS:
        setattr(os, name, lambda fd: None)
    try:
        yield
    finally:
        for name in SYNCS:
            setattr(os, name, real[name])


def check_steps(kind: str, lasts: bool, attempt: Callable[[Fault], None], most: int | None = None) -> int:
    """Attempt with a fault at each step of a sound attempt, or at `most` of them; return how many were attempted.

    `attempt` does all of its work with the fault; a kill strikes in a forked child, so it must look from outside.
    """
    with no_syncs():
        sound = Fault(-1, "EMFILE" if kind == "EMFILE" else "EIO", lasts)
        attempt(sound)
        assert sound.n >= 2, "are the steps still there?"
        steps = list(range(sound.n))
        if most is not None and most < len(steps):
            steps = sorted(random.Random(f"{kind} {lasts} {sound.n}").sample(steps, most))
        for step in steps:
            fault = Fault(step, kind, lasts)
            try:
                attempt(fault)
                assert fault.struck, "fewer steps than before"
            except BaseException as error:
                error.add_note(f"{kind} {'from' if lasts else 'at'} step {step} of {sound.n}")
                raise
    return len(steps)


def may_die(fault: Fault, work: Callable[[], None]) -> bool:
    """Do `work`, in a forked child if the fault is to kill it; whether it came to its end."""
    if fault.kind != "kill":
        work()
        return True
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
        finally:
            os._exit(code)
    _, status = os.waitpid(pid, 0)
    fault.struck = os.WIFSIGNALED(status)
    if fault.struck:
        assert os.WTERMSIG(status) == signal.SIGKILL, f"killed by signal {os.WTERMSIG(status)}"
    else:
        assert os.WEXITSTATUS(status) == 0, "the child failed, see its traceback"
    return not fault.struck


def ways(few: list[tuple[str, bool]]) -> list[Any]:
    """All ways to fail; but for a few they are for soak."""
    return [way if way in few else pytest.param(*way, marks=pytest.mark.soak) for way in WAYS]
