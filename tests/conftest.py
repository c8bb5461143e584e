"""Fixtures and profiles for all tests."""

from __future__ import annotations

import functools
import gc
import multiprocessing
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from xdist.scheduler.loadscope import LoadScopeScheduling

from recollect.testing import leftovers

pytest_plugins = ["pytester"]

# Children of the fork server begin with all this imported; a spawned one spends seconds on it.
multiprocessing.set_forkserver_preload(
    ["pytest", "gymnasium", "torch.optim", "recollect.ipc.collector", "recollect.learners.sac_learner",
     "recollect.learners.collectors"]
)  # fmt: skip

# A shell that starts a run in the background lets it ignore Ctrl-C, which some tests press.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# No deadline per example: a busy machine is not a bug. pytest's own timeout bounds the whole test.
hypothesis.settings.register_profile("small", max_examples=50, stateful_step_count=30, deadline=None)
hypothesis.settings.register_profile("soak", max_examples=2_000, stateful_step_count=100, deadline=None)
hypothesis.settings.load_profile("small")


class FilesTogether(LoadScopeScheduling):  # type: ignore[misc]
    """With `-n 2`, the tests of a file run in one worker, and those that need Ray in one: it takes long to start."""

    def _split_scope(self, nodeid: str) -> str:
        return _scope(nodeid.partition("::")[0])


@functools.cache
def _scope(file: str) -> str:
    text = (Path(__file__).parents[1] / file).read_text(encoding="utf-8")
    return "ray" if "ray_cluster" in text else file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    return FilesTogether(config, log)


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


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[Any]:
    """One Ray for the whole session: it takes 10 s to start, on a busy machine 40."""
    ray = pytest.importorskip("ray")
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield ray
    ray.shutdown()


@pytest.fixture(autouse=True)
def _process_tests_leave_nothing(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("process"):
        request.getfixturevalue("leaves_nothing")
