"""Let something happen at a chosen moment of a read: what another process might do just then, without a race."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from recollect import _core


class Meanwhile:
    """Whether it has happened."""

    happened = False


@contextmanager
def at_moment(n: int, happens: Callable[[], object], times: int = 1) -> Iterator[Meanwhile]:
    """Let `happens()` be called at the n-th moment of what is read or awaited in this block, if there are as many.

    With `times` at the moments after it too, until it was called so often.
    """
    told = Meanwhile()

    def call() -> None:
        nonlocal times
        told.happened = True
        happens()
        times -= 1
        if times:
            _core.arm_moment(0, call)

    _core.arm_moment(n, call)
    try:
        yield told
    finally:
        _core.arm_moment(-1, None)


@contextmanager
def at_every_moment(happens: Callable[[], object]) -> Iterator[list[None]]:
    """Let `happens()` be called at every moment; gives a list with an element for each."""
    passed: list[None] = []

    def call() -> None:
        passed.append(None)
        happens()
        _core.arm_moment(0, call)

    _core.arm_moment(0, call)
    try:
        yield passed
    finally:
        _core.arm_moment(-1, None)
