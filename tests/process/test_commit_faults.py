"""A commit in which any step fails changes nothing: what was committed is there, and the object works on."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.process.failing import Fault, check_steps, may_die, ways
from tests.process.test_file_kills import KINDS, ROWS, block, create, ids, state
from tests.remote.scripted import ScriptedCarrier
from tests.rollout.make import experience

import recollect as rc
import recollect.rollout as rr
from recollect.datasets import open_dataset
from recollect.datasets.convert import convert
from recollect.learners.checkpoint import load_checkpoint, replay_path, save_checkpoint
from recollect.remote import Checkpoint, ReplayBufferManager

pytestmark = pytest.mark.process

SOAK = pytest.mark.soak
OLD = [*range(9)]
NEW = [*range(100, 105)]
IN_MEMORY = ("memory", "memmap")  # these have no steps but those of a dump


def few(*kinds: str) -> list[Any]:
    return [k if k in kinds else pytest.param(k, marks=SOAK) for k in KINDS]


def most(request: pytest.FixtureRequest) -> int | None:
    """How many steps are attempted: a few in the suite, all in soak."""
    return None if "soak" in request.config.getoption("-m").replace("not soak", "") else 6


def like(kind: str) -> str:
    """The kind whose rows are used."""
    return "parquet" if kind in IN_MEMORY else kind


def made(kind: str, path: Path) -> rc.ReplayBuffer:
    if kind in KINDS:
        return create(kind, path)
    more = {"cache_path": path} if kind == "memmap" else {}
    return rc.ReplayBuffer.create(kind, ROWS, capacity=40, maintain_segment_metadata=True, **more)


def allowed(kind: str) -> list[list[int]]:
    """What may be found after nine rows were committed and five more were not."""
    ring = 12 if "ring" in kind else 10**6
    return [[*OLD, *NEW[:n]][-ring:] for n in (0, 3, 5)]  # 3: a full piece of Parquet


@pytest.mark.parametrize(("fault", "lasts"), ways([("EIO", False), ("interrupt", False)]))
@pytest.mark.parametrize("kind", few("hdf5", "image ring", "dict"))
def test_a_storage_whose_commit_fails_at_any_step(
    kind: str, fault: str, lasts: bool, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    ring = 12 if "ring" in kind else 10**6
    path = tmp_path / "data"

    def attempt(fault: Fault) -> None:
        def work() -> None:
            buffer = create(kind, path)
            buffer.extend(block(kind, 0, 9), ends=np.arange(9) == 3)
            buffer.mark_segment_end()
            buffer.storage.flush()

            def commit() -> None:
                buffer.extend(block(kind, 100, 5))
                buffer.mark_segment_end()
                buffer.storage.flush()

            fault.during(commit)
            assert state(kind, path)[0] in allowed(kind), "what was committed is there"
            live = ids(kind, buffer[...])
            assert live in allowed(kind)
            buffer.extend(block(kind, 50, 2))
            buffer.mark_segment_end()
            buffer.storage.flush()
            assert ids(kind, buffer[...]) == [*live, 50, 51][-ring:]
            assert state(kind, path)[0] == [*live, 50, 51][-ring:]
            buffer.extend(block(kind, 60, 1))
            buffer.close()
            assert state(kind, path)[0] == [*live, 50, 51, 60][-ring:]

        if not may_die(fault, work):
            assert state(kind, path)[0] in allowed(kind)
        with rc.ReplayBuffer.load_from(path, read_only=False) as again:
            again.extend(block(kind, 70, 2))
        assert state(kind, path)[0][-2:] == [70, 71]
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
            buffer = create(kind, path)
            buffer.extend(block(kind, 0, 9), ends=np.arange(9) == 8)
            buffer.storage.flush()
            buffer.extend(block(kind, 100, 5))
            fault.during(buffer.close)

        may_die(fault, work)
        assert state(kind, path)[0] in allowed(kind)
        with rc.ReplayBuffer.load_from(path, read_only=False) as again:
            again.extend(block(kind, 50, 2))
        assert state(kind, path)[0][-2:] == [50, 51]
        shutil.rmtree(path)

    n = check_steps(fault, lasts, attempt, most(request))
    request.node.user_properties.append(("steps", n))


@pytest.mark.parametrize(("fault", "lasts"), ways([("EIO", False), ("EMFILE", True)]))
@pytest.mark.parametrize("kind", ["memory", pytest.param("memmap", marks=SOAK), *few("hdf5")])
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


@pytest.mark.parametrize(("fault", "lasts"), ways([("EIO", False), ("EMFILE", True)]))
@pytest.mark.parametrize("by", ["dumps", "create", pytest.param("create memmap", marks=SOAK)])
def test_a_writer_that_fails_at_any_step_after_a_killed_dump(
    by: str,
    fault: str,
    lasts: bool,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The killed dump listed the rows of the commit before it; without Pillow nobody can tell which these are."""
    left, path = tmp_path / "left", tmp_path / "data"
    with create("image", left) as images:
        images.extend(block("image", 0, 9), ends=np.arange(9) == 8)
    with made("memory", left) as memory:
        memory.extend(block("parquet", 100, 2), ends=np.arange(2) == 1)

        def killed() -> None:
            os.replace = lambda *names: os.kill(os.getpid(), signal.SIGKILL)
            memory.dumps(left)

        assert not may_die(Fault(0, "kill", False), killed)

        def write() -> None:
            monkeypatch.setitem(sys.modules, "PIL.Image", None)
            if by == "dumps":
                memory.dumps(path)
            else:
                kind = "memmap" if "memmap" in by else "hdf5"
                with rc.ReplayBuffer.create(kind, ROWS, capacity=4, cache_path=path, overwrite=True) as new:
                    new.extend(block("parquet", 100, 2))

        def found() -> list[int]:
            monkeypatch.undo()
            with rc.ReplayBuffer.load_from(path) as got:
                rows = got[...]
                return ids("parquet" if isinstance(rows, dict) else "image", rows)

        def attempt(fault: Fault) -> None:
            shutil.copytree(left, path)
            may_die(fault, lambda: fault.during(write))
            assert found() in (OLD, [], [100, 101])
            write()
            assert found() == [100, 101]
            shutil.rmtree(path)

        n = check_steps(fault, lasts, attempt, most(request))
    request.node.user_properties.append(("steps", n))


@pytest.mark.parametrize(
    ("fault", "lasts"), ways([("EIO", False), ("EMFILE", True), ("interrupt", False), ("kill", False)])
)
@pytest.mark.parametrize("power_safe", [True, pytest.param(False, marks=SOAK)])
def test_a_manager_whose_log_or_dump_fails_at_any_step(
    power_safe: bool, fault: str, lasts: bool, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """What `add` acknowledged is there after a restart; what it refused may be there or not, whole."""
    path, told = tmp_path / "manager", tmp_path / "acknowledged"

    def manager(resume: bool) -> ReplayBufferManager:
        about = Checkpoint(path, resume=resume, power_safe=power_safe)
        return ReplayBufferManager(
            {"id": ((), "int64")},
            1,
            1,
            capacity=50,
            checkpoint=about,
            communication_backend=ScriptedCarrier(1, sees_death=False),
        )

    def attempt(fault: Fault) -> None:
        told.write_bytes(b"")
        with open(told, "r+b", buffering=0) as out:

            def add(m: ReplayBufferManager, number: int) -> None:
                m.add({"id": np.array([number])})
                out.write(b"%d\n" % number)

            def work() -> None:
                m = manager(False)
                add(m, 0)

                def more() -> None:
                    add(m, 1)
                    m.stop()
                    m.run()  # it ends with a dump
                    add(m, 2)

                fault.during(more)
                add(m, 3)
                m.close()

            may_die(fault, work)
        acknowledged = [int(line) for line in told.read_text().split()]
        with manager(True) as again:
            found = again.buffer[:]["id"].tolist()
            assert again.stats().log_damages == 0
        assert [i for i in found if i in acknowledged] == acknowledged
        assert found == sorted(set(found)) and set(found) <= {0, 1, 2, 3}
        shutil.rmtree(path)

    n = check_steps(fault, lasts, attempt, most(request))
    request.node.user_properties.append(("steps", n))


@pytest.mark.parametrize(("fault", "lasts"), ways([("EIO", False), ("EMFILE", True)]))
def test_a_learner_whose_checkpoint_fails_at_any_step(
    fault: str, lasts: bool, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    path = tmp_path / "models" / "model_1"
    with rc.ReplayBuffer.create("memory", ROWS, capacity=20) as replay:
        replay.extend(block("parquet", 0, 9))

        def save(number: int) -> None:
            state = {"iteration": number, "weights": np.full(10, float(number))}
            save_checkpoint(path, state, dump_replay=replay.dumps)

        def check(*allowed: int) -> None:
            found = load_checkpoint(path)
            assert found["iteration"] in allowed and np.all(found["weights"] == found["iteration"])
            place = replay_path(path)
            assert place is not None and state("parquet", place)[0] == OLD

        def attempt(fault: Fault) -> None:
            def work() -> None:
                save(1)
                fault.during(lambda: save(2))
                check(1, 2)

            may_die(fault, work)
            check(1, 2)
            save(3)
            check(3)
            assert [p.name for p in path.parent.iterdir()] == [path.name], "nothing is left beside it"
            shutil.rmtree(path.parent)

        n = check_steps(fault, lasts, attempt, most(request))
    request.node.user_properties.append(("steps", n))


@pytest.mark.parametrize(("fault", "lasts"), ways([("EIO", False), ("interrupt", True)]))
@pytest.mark.parametrize("kind", ["jsonl", pytest.param("parquet", marks=SOAK)])
def test_a_file_sink_whose_write_fails_at_any_step(
    kind: str, fault: str, lasts: bool, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    path = tmp_path / "out"
    given = rr.decode(
        rr.encode([experience(float(i)) for i in range(2)], batch_id=1, task_id="t", group_id=0)
    )

    def attempt(fault: Fault) -> None:
        sink = rr.FileSink(path, kind)
        may_die(fault, lambda: fault.during(lambda: sink.write(given, "one")))
        before = [file.read_bytes() for file in path.glob(f"one.{kind}")]
        assert sink.holds("one") == bool(before)
        if not before:
            sink.write(given, "one")
        [file] = path.glob(f"one.{kind}")
        assert before in ([], [file.read_bytes()]), "it is whole"
        shutil.rmtree(path)

    n = check_steps(fault, lasts, attempt, most(request))
    request.node.user_properties.append(("steps", n))


@pytest.mark.parametrize(("fault", "lasts"), ways([("EIO", False), ("interrupt", False)]))
@pytest.mark.parametrize(
    "target", ["lerobot", *(pytest.param(t, marks=SOAK) for t in ("parquet", "hdf5", "memory"))]
)
def test_a_conversion_that_fails_at_any_step(
    target: str, fault: str, lasts: bool, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """The same call goes on where it was; nothing is at its place before it is whole, and no row is left beside it."""
    path = tmp_path / "made" / "data"
    options: Any = {"fps": 10.0, "tasks": "", "commit_rows": 3} if target == "lerobot" else {}
    with rc.ReplayBuffer.create("memory", ROWS, capacity=20, maintain_segment_metadata=True) as source:
        source.extend(block("parquet", 0, 9), ends=np.arange(9) % 3 == 2)

        def make() -> None:
            convert(source, path, target, origin="it", chunk_size=3, **options)

        def attempt(fault: Fault) -> None:
            may_die(fault, lambda: fault.during(make))
            if not path.exists():
                make()
            with open_dataset(path) as got:  # type: ignore[attr-defined]
                assert got[:]["id"].reshape(-1).tolist() == OLD
                assert got.get_segments() == [(0, 3), (3, 6), (6, 9)]
            stage = path.with_name("data.partial")
            if stage.exists():  # the fault came after the rename of the copy: the next one takes it
                assert {p.name for p in stage.iterdir()} <= {"convert.json", ".recollect-writer"}
                shutil.rmtree(path)
                make()
            assert [p.name for p in path.parent.iterdir()] == [path.name]
            shutil.rmtree(path.parent)

        n = check_steps(fault, lasts, attempt, most(request))
    request.node.user_properties.append(("steps", n))
