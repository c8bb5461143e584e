"""Run a piece of work in a forked child that SIGKILLs itself at the n-th step of the protocol."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator

import pytest

from recollect import _core


def killed_at(step: int, work: Callable[[], object]) -> bool:
    """Do `work` in a child armed for `step`; True if it was killed there, False if it came to its end unharmed."""
    pid = os.fork()
    if pid == 0:
        try:
            _core.arm_fault(step)
            work()
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL, f"step {step}: killed by signal {os.WTERMSIG(status)}"
        return True
    assert os.WEXITSTATUS(status) == 0, f"step {step}: the child failed, see its traceback"
    return False


def in_child(work: Callable[[], object]) -> None:
    """Do `work` in another process, which must end well."""
    assert not killed_at(-1, work)


EVERY = [
    3,
    pytest.param(1, marks=pytest.mark.soak),
]  # where two may be killed, the suite takes every third step


def steps(limit: int = 2000, every: int = 1) -> Iterator[int]:
    """0, 1, 2, …: break when a child came through unharmed."""
    yield from range(0, limit, every)
    raise AssertionError(f"still killed at step {limit}")
