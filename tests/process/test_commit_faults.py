"""A commit in which any step fails changes nothing: what was committed is there, and the object works on."""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.process.failing import FAULTS, failing
from tests.process.test_file_kills import KINDS, block, create, ids, state

import recollect as rc
from recollect.remote import Checkpoint, ReplayBufferManager

pytestmark = pytest.mark.process

SOAK = pytest.mark.soak
OLD = [*range(9)]
NEW = [*range(100, 105)]
FEW = ["hdf5"]


def in_fork(work: Callable[[], Any]) -> Any:
    """What `work` returns in a forked child; None if it was killed."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.close(read)
            os.write(write, json.dumps(work()).encode())
            code = 0
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
        finally:
            os._exit(code)
    os.close(write)
    with os.fdopen(read, "rb") as f:
        told = f.read()
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL, f"killed by signal {os.WTERMSIG(status)}"
        return None
    assert os.WEXITSTATUS(status) == 0, "the child failed, see its traceback"
    return json.loads(told)


def strike(step: int, fault: str, lasts: bool, work: Callable[[], Any]) -> bool:
    """Do `work` with a fault; whether it struck. What it raises must be that fault, or say what it led to."""
    with failing(step, fault, lasts=lasts) as told, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            work()
        except (OSError, rc.RecollectError, KeyboardInterrupt):
            assert told.struck
    return told.struck


def check_each_step(fault: str, lasts: bool, attempt: Callable[[int], bool | None], every: int = 1) -> int:
    """Attempt with a fault at each step until it does not strike any more; return how many there were."""
    for step in range(0, 2000, every):
        if attempt(step) is False:
            return step
    raise AssertionError("it never ends")


def ways(few: list[tuple[str, bool]]) -> list[Any]:
    every = [(fault, lasts) for fault in FAULTS for lasts in (False, True) if not (lasts and fault == "kill")]
    return [w if w in few else pytest.param(*w, marks=SOAK) for w in every]


@pytest.mark.parametrize(("fault", "lasts"), ways([("EIO", False)]))
@pytest.mark.parametrize("kind", [k if k in FEW else pytest.param(k, marks=SOAK) for k in KINDS])
def test_a_storage_whose_commit_fails_at_any_step(kind: str, fault: str, lasts: bool, tmp_path: Path) -> None:
    ring = 12 if "ring" in kind else 10**6
    allowed = [OLD, [*OLD, *NEW][-ring:], [*OLD, *NEW[:3]][-ring:]]

    def attempt(step: int) -> bool | None:
        path = tmp_path / str(step)

        def work() -> Any:
            buffer = create(kind, path)
            buffer.extend(block(kind, 0, 9), ends=np.arange(9) == 3)
            buffer.mark_segment_end()
            buffer.storage.flush()

            def commit() -> None:
                buffer.extend(block(kind, 100, 5))
                buffer.mark_segment_end()
                buffer.storage.flush()

            struck = strike(step, fault, lasts, commit)
            assert state(kind, path)[0] in allowed, "what was committed is there"
            buffer.mark_segment_end()
            live = ids(kind, buffer[...])
            assert live in allowed
            buffer.extend(block(kind, 50, 2))
            buffer.mark_segment_end()
            buffer.storage.flush()
            assert state(kind, path)[0] == [*live, 50, 51][-ring:]
            buffer.extend(block(kind, 60, 1))
            buffer.close()
            assert state(kind, path)[0] == [*live, 50, 51, 60][-ring:]
            return struck

        struck = in_fork(work)
        if struck is None:
            assert state(kind, path)[0] in allowed
            with rc.ReplayBuffer.load_from(path, read_only=False) as again:
                again.extend(block(kind, 50, 2))
        state(kind, path)
        return struck

    assert check_each_step(fault, lasts, attempt) >= 2


@pytest.mark.parametrize(("fault", "lasts"), ways([]))
@pytest.mark.parametrize(
    "kind", [k if k in ("hdf5", "parquet") else pytest.param(k, marks=SOAK) for k in KINDS]
)
def test_a_storage_whose_close_fails_at_any_step(kind: str, fault: str, lasts: bool, tmp_path: Path) -> None:
    ring = 12 if "ring" in kind else 10**6
    allowed = [OLD, [*OLD, *NEW][-ring:], [*OLD, *NEW[:3]][-ring:]]

    def attempt(step: int) -> bool | None:
        path = tmp_path / str(step)

        def work() -> Any:
            buffer = create(kind, path)
            buffer.extend(block(kind, 0, 9), ends=np.arange(9) == 8)
            buffer.storage.flush()
            buffer.extend(block(kind, 100, 5))
            return strike(step, fault, lasts, buffer.close)

        struck = in_fork(work)
        assert state(kind, path)[0] in allowed
        with rc.ReplayBuffer.load_from(path, read_only=False) as again:
            again.extend(block(kind, 50, 2))
        assert state(kind, path)[0][-2:] == [50, 51]
        return struck

    assert check_each_step(fault, lasts, attempt) >= 2


@pytest.mark.parametrize(("fault", "lasts"), ways([]))
@pytest.mark.parametrize("kind", ["memory", *(pytest.param(k, marks=SOAK) for k in KINDS)])
def test_a_dump_that_fails_at_any_step(kind: str, fault: str, lasts: bool, tmp_path: Path) -> None:
    def made(place: Path) -> rc.ReplayBuffer:
        if kind != "memory":
            return create(kind, place)
        return rc.ReplayBuffer.create(
            "memory", KINDS["parquet"][0], capacity=20, maintain_segment_metadata=True
        )

    like = "parquet" if kind == "memory" else kind

    def attempt(step: int) -> bool | None:
        path = tmp_path / f"dump-{step}"

        def work() -> Any:
            buffer = made(tmp_path / f"live-{step}")
            buffer.extend(block(like, 0, 9), ends=np.arange(9) == 8)
            buffer.dumps(path)
            buffer.extend(block(like, 100, 2), ends=np.arange(2) == 1)
            struck = strike(step, fault, lasts, lambda: buffer.dumps(path))
            assert state(like, path)[0] in (OLD, [*OLD, 100, 101])
            buffer.dumps(path)
            assert state(like, path)[0] == [*OLD, 100, 101]
            buffer.close()
            return struck

        struck = in_fork(work)
        assert state(like, path)[0] in (OLD, [*OLD, 100, 101])
        return struck

    assert check_each_step(fault, lasts, attempt) >= 2


@pytest.mark.parametrize(("fault", "lasts"), ways([]))
@pytest.mark.parametrize("power_safe", [True, pytest.param(False, marks=SOAK)])
def test_a_manager_whose_log_or_dump_fails_at_any_step(
    power_safe: bool, fault: str, lasts: bool, tmp_path: Path
) -> None:
    """What `add` acknowledged is there after a restart; what it refused may be there or not, whole."""

    def manager(path: Path, resume: bool) -> ReplayBufferManager:
        about = Checkpoint(path, resume=resume, power_safe=power_safe)
        return ReplayBufferManager({"id": ((), "int64")}, 1, 1, capacity=50, checkpoint=about)

    def attempt(step: int) -> bool | None:
        path = tmp_path / str(step)
        acknowledged = tmp_path / f"acknowledged-{step}"
        acknowledged.write_text("")

        def add(m: ReplayBufferManager, number: int) -> None:
            m.add({"id": np.array([number])})
            fd = real_open(acknowledged, os.O_WRONLY | os.O_APPEND)
            real_write(fd, f"{number}\n".encode())
            os.close(fd)

        real_open, real_write = os.open, os.write

        def work() -> Any:
            m = manager(path, False)
            add(m, 0)

            def more() -> None:
                add(m, 1)
                m._desk.saving.try_dump()
                add(m, 2)

            struck = strike(step, fault, lasts, more)
            add(m, 3)
            m.close()
            return struck

        struck = in_fork(work)
        with manager(path, True) as again:
            found = again.buffer[:]["id"].tolist()
            assert again.stats().log_damages == 0
        told = [int(line) for line in acknowledged.read_text().split()]
        assert [i for i in found if i in told] == told
        assert found == sorted(set(found)) and set(found) <= {0, 1, 2, 3}
        return struck

    assert check_each_step(fault, lasts, attempt) >= 2
