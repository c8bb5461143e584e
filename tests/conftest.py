"""Fixtures and profiles for all tests."""

from __future__ import annotations

from collections.abc import Iterator

import hypothesis
import pytest

from recollect.testing import leftovers

pytest_plugins = ["pytester"]

# No deadline per example: a busy machine is not a bug. pytest's own timeout bounds the whole test.
hypothesis.settings.register_profile("small", max_examples=50, stateful_step_count=30, deadline=None)
hypothesis.settings.register_profile("soak", max_examples=2_000, stateful_step_count=100, deadline=None)
hypothesis.settings.load_profile("small")


@pytest.fixture
def leaves_nothing() -> Iterator[None]:
    """Fails the test if it leaves a child process, a descriptor or shared memory behind."""
    with leftovers.leaves_nothing():
        yield


@pytest.fixture(autouse=True)
def _process_tests_leave_nothing(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("process"):
        request.getfixturevalue("leaves_nothing")
