"""Fixtures and profiles for all tests."""

from __future__ import annotations

import gc
import multiprocessing
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from recollect.testing import leftovers

pytest_plugins = ["pytester"]

# Children of the fork server begin with all this imported; a spawned one spends seconds on it.
multiprocessing.set_forkserver_preload(
    ["pytest", "gymnasium", "torch.optim", "recollect.ipc.runner.collector", "recollect.learners.sac_learner",
     "recollect.learners.collectors"]
)  # fmt: skip

# A shell that starts a run in the background lets it ignore Ctrl-C, which some tests press.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# No deadline per example: a busy machine is not a bug. pytest's own timeout bounds the whole test.
hypothesis.settings.register_profile("small", max_examples=50, stateful_step_count=30, deadline=None)
hypothesis.settings.register_profile("soak", max_examples=2_000, stateful_step_count=100, deadline=None)
hypothesis.settings.load_profile("small")


SOAK_S = 7200.0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A long run that says no time of its own has two hours, not the five minutes of the others."""
    for item in items:
        if item.get_closest_marker("soak") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(SOAK_S))


@pytest.fixture
def leaves_nothing() -> Iterator[None]:
    """Fails the test if it leaves a child process, a descriptor or shared memory behind."""
    gc.collect()
    gc.freeze()  # torch, jax and the rest stay: looking through them again and again costs a second a test
    with leftovers.leaves_nothing():
        yield


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    place = tmp_path / "disk"
    place.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)], capture_output=True)
    if done.returncode:
        pytest.skip("may not mount a small file system here")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[Any]:
    """One Ray for all tests of a file: it takes 10 s to start. For those of other files it opens sockets of its own."""
    ray = pytest.importorskip("ray")
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield ray
    ray.shutdown()


@pytest.fixture(autouse=True)
def _process_tests_leave_nothing(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("process"):
        request.getfixturevalue("leaves_nothing")
