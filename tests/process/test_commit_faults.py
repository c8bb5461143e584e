"""A commit in which any step fails changes nothing: what was committed is there, and the object works on."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.process.failing import Fault, check_steps, may_die, ways
from tests.process.test_file_kills import KINDS, ROWS, block, create, ids, state

import recollect as rc

pytestmark = pytest.mark.process

SOAK = pytest.mark.soak
OLD = [*range(9)]
NEW = [*range(100, 105)]
MEMMAP = "memmap"
LIVE = [*KINDS, MEMMAP]


def few(*kinds: str) -> list[Any]:
    return [k if k in kinds else pytest.param(k, marks=SOAK) for k in LIVE]


def most(request: pytest.FixtureRequest) -> int | None:
    """How many steps are attempted: a few in the suite, all in soak."""
    return None if "soak" in request.config.getoption("-m").replace("not soak", "") else 6


def like(kind: str) -> str:
    """The kind whose rows are used."""
    return "parquet" if kind in ("memory", MEMMAP) else kind


def made(kind: str, path: Path) -> rc.ReplayBuffer:
    if kind in KINDS:
        return create(kind, path)
    more = {"cache_path": path} if kind == MEMMAP else {}
    return rc.ReplayBuffer.create(kind, ROWS, capacity=40, maintain_segment_metadata=True, **more)


def allowed(kind: str) -> list[list[int]]:
    """What may be found after nine rows were committed and five more were not."""
    ring = 12 if "ring" in kind else 10**6
    counts = range(6) if kind == MEMMAP else (0, 3, 5)  # 3: a full piece of Parquet
    return [[*OLD, *NEW[:n]][-ring:] for n in counts]


@pytest.mark.parametrize(("fault", "lasts"), ways([("EIO", False), ("interrupt", False)]))
@pytest.mark.parametrize("kind", few("hdf5", "image ring", "dict"))
def test_a_storage_whose_commit_fails_at_any_step(
    kind: str, fault: str, lasts: bool, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    ring = 12 if "ring" in kind else 10**6
    path = tmp_path / "data"

    def attempt(fault: Fault) -> None:
        def work() -> None:
            buffer = made(kind, path)
            buffer.extend(block(like(kind), 0, 9), ends=np.arange(9) == 3)
            buffer.mark_segment_end()
            buffer.storage.flush()

            def commit() -> None:
                buffer.extend(block(like(kind), 100, 5))
                buffer.mark_segment_end()
                buffer.storage.flush()

            fault.during(commit)
            assert kind == MEMMAP or state(like(kind), path)[0] in allowed(kind), (
                "what was committed is there"
            )
            live = ids(like(kind), buffer[...])
            assert live in allowed(kind)
            buffer.extend(block(like(kind), 50, 2))
            buffer.mark_segment_end()
            buffer.storage.flush()
            assert ids(like(kind), buffer[...]) == [*live, 50, 51][-ring:]
            assert kind == MEMMAP or state(like(kind), path)[0] == [*live, 50, 51][-ring:]
            buffer.extend(block(like(kind), 60, 1))
            buffer.close()
            assert state(like(kind), path)[0] == [*live, 50, 51, 60][-ring:]

        if not may_die(fault, work):
            assert state(like(kind), path)[0] in allowed(kind)
        with rc.ReplayBuffer.load_from(path, read_only=False) as again:
            again.extend(block(like(kind), 70, 2))
        assert state(like(kind), path)[0][-2:] == [70, 71]
        shutil.rmtree(path)

    n = check_steps(fault, lasts, attempt, most(request))
    request.node.user_properties.append(("steps", n))


@pytest.mark.parametrize(("fault", "lasts"), ways([("EIO", False), ("ENOSPC", True)]))
@pytest.mark.parametrize("kind", few("hdf5", "parquet"))
def test_a_storage_whose_close_fails_at_any_step(
    kind: str, fault: str, lasts: bool, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    path = tmp_path / "data"

    def attempt(fault: Fault) -> None:
        def work() -> None:
            buffer = made(kind, path)
            buffer.extend(block(like(kind), 0, 9), ends=np.arange(9) == 8)
            buffer.storage.flush()
            buffer.extend(block(like(kind), 100, 5))
            fault.during(buffer.close)

        may_die(fault, work)
        assert state(like(kind), path)[0] in allowed(kind)
        with rc.ReplayBuffer.load_from(path, read_only=False) as again:
            again.extend(block(like(kind), 50, 2))
        assert state(like(kind), path)[0][-2:] == [50, 51]
        shutil.rmtree(path)

    n = check_steps(fault, lasts, attempt, most(request))
    request.node.user_properties.append(("steps", n))


@pytest.mark.parametrize(("fault", "lasts"), ways([("EIO", False), ("EMFILE", True)]))
@pytest.mark.parametrize("kind", ["memory", *few("hdf5")])
def test_a_dump_that_fails_at_any_step(
    kind: str, fault: str, lasts: bool, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    path, live = tmp_path / "dump", tmp_path / "live"
    ring = 12 if "ring" in kind else 10**6
    new = [*OLD, 100, 101][-ring:]

    def attempt(fault: Fault) -> None:
        def work() -> None:
            buffer = made(kind, live)
            buffer.extend(block(like(kind), 0, 9), ends=np.arange(9) == 8)
            buffer.dumps(path)
            buffer.extend(block(like(kind), 100, 2), ends=np.arange(2) == 1)
            fault.during(lambda: buffer.dumps(path))
            assert state(like(kind), path)[0] in (OLD, new)
            buffer.dumps(path)
            assert state(like(kind), path)[0] == new
            buffer.close()

        may_die(fault, work)
        assert state(like(kind), path)[0] in (OLD, new)
        with made(kind, tmp_path / "other") as other:
            other.extend(block(like(kind), 30, 2))
            other.dumps(path)
        assert state(like(kind), path)[0] == [30, 31]
        for place in tmp_path.iterdir():
            shutil.rmtree(place)

    n = check_steps(fault, lasts, attempt, most(request))
    request.node.user_properties.append(("steps", n))
