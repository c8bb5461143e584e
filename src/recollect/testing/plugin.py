"""The pytest plugin: fixtures for those who test extensions of their own. pytest loads it by itself.

It imports nothing but pytest: a run that does not use it must not wait for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture
def leaves_nothing() -> Iterator[None]:
    """Fails the test if it leaves a child process, a descriptor or shared memory behind."""
    from recollect.testing.leftovers import leaves_nothing

    with leaves_nothing():
        yield


@pytest.fixture
def fake_clock() -> Any:
    """A clock that a test moves."""
    from recollect.testing import FakeClock

    return FakeClock()
