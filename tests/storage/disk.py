"""What may happen to a storage from outside: files that may not grow, and others that act between two of its steps."""

from __future__ import annotations

import contextlib
import itertools
import resource
from collections.abc import Callable, Iterator

import pytest

from recollect import _core


@contextlib.contextmanager
def file_size(most: int) -> Iterator[None]:
    """No file of this process may grow beyond this: a write raises OSError, as under a quota."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextlib.contextmanager
def between(act: Callable[[], object], at: int | None) -> Iterator[list[int]]:
    """Call `act` at step `at` of what is done within, None: at every one; gives the steps at which it was called."""
    acted: list[int] = []
    n = itertools.count()
    patch = pytest.MonkeyPatch()

    def step() -> None:
        now = next(n)
        if at in (None, now):
            acted.append(now)
            patch.undo()  # what `act` does has steps of its own
            try:
                act()
            finally:
                patch.setattr(_core, "fault_point", step)

    patch.setattr(_core, "fault_point", step)
    try:
        yield acted
    finally:
        patch.undo()
