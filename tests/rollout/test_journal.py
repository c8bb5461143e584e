"""What the journal recorded is there after a shutdown or a kill, and reaches the sink once."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sqlite3
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

import pytest
from tests.rollout.make import ListSink, check_doors, config, experience, run

import recollect.rollout as rr
from recollect.errors import BatchAborted, FormatError, LaneBusyError, PipelineError
from recollect.rollout.journal import Journal
from recollect.rollout.sinks import FileSink

ROOT = Path(__file__).parents[2]
STARTED: list[tuple[Any, int]] = []
HOLD: set[Any] = set()


@rr.workflow("tests.journal.held")
async def held(task: Any, models: Any) -> Any:
    """Ends at once, unless its task or run is held: then never."""
    STARTED.append((task.task_id, task.run_id))
    if HOLD & {task.task_id, (task.task_id, task.run_id)}:
        await asyncio.get_running_loop().create_future()
    if task.data.get("fails"):
        raise ValueError("as told")
    return experience(reward=float(task.run_id))


def made(path: Path, **fields: Any) -> rr.RolloutCoordinator:
    given = {
        "journal": str(path / "j.sqlite"),
        "sink": str(path / "out"),
        "drain_s": 0.0,
        "cancel_grace_s": 0.1,
    }
    return rr.RolloutCoordinator(config(**given | fields), [])


def rows(path: Path) -> list[tuple[int, int, int]]:
    from pyarrow import parquet

    found = []
    for file in sorted((path / "out").glob("*.parquet")):
        table = parquet.read_table(file).to_pydict()
        found += list(zip(table["group_id"], table["run_id"], table["step"]))
    return found


@pytest.fixture(autouse=True)
def _fresh() -> None:
    STARTED.clear()
    HOLD.clear()


def test_live_batches_come_back_and_only_the_rest_runs_again(tmp_path: Path) -> None:
    async def main() -> None:
        HOLD.update({1})
        tasks = [rr.Task("tests.journal.held", repeat_times=2) for _ in range(3)]
        async with made(tmp_path) as c:
            await c.submit_batch(batch_id=7, tasks=tasks, batch_type="train", min_wait_num=2)
            result = c.batch_state(7)
            while c.batch_state(7).completed_task_count < 2:
                await asyncio.sleep(0.001)
            assert result.min_wait_num == 2
        HOLD.clear()
        STARTED.clear()
        async with made(tmp_path) as c:
            assert c.batches() == [7] and c.batch_state(7).min_wait_num == 2
            result = await c.finalize_train_batch(7, timeout=20)
            assert result["ok_task_count"] == 3 and result["experience_count"] == 6
            assert sorted(STARTED) == [(1, 0), (1, 1)]
            check_doors(c)
        async with made(tmp_path) as c:
            assert c.batches() == []
            again = await c.finalize_train_batch(7)
            assert again == result
        assert len(set(rows(tmp_path))) == 6 == len(rows(tmp_path))

    run(main())


async def until(condition: Any) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.001)


def test_carried_tasks_come_back_with_their_finished_runs_and_join_once(tmp_path: Path) -> None:
    """Started again after each step of their way: while they run, when they have ended, and when they have joined."""
    sink = ListSink()

    def again() -> rr.RolloutCoordinator:
        return made(tmp_path, sink=sink, stragglers="carry")

    async def main() -> None:
        HOLD.update({(0, 1)})  # its place is also that of a task of the batch it joins
        async with again() as c:
            tasks = [rr.Task("tests.journal.held", repeat_times=2) for _ in range(3)]
            await c.submit_batch(batch_id=1, tasks=tasks, batch_type="train", min_wait_num=2)
            await until(lambda: c.batch_state(1).completed_task_count == 2 and len(STARTED) == 6)
            await until(lambda: c.stats().attempts.good == 5)
            first = await c.finalize_train_batch(1, timeout=0)
            assert first["carried_task_count"] == 1 and first["experience_count"] == 4
        STARTED.clear()
        async with c:
            runs = c.stats().runs
            assert (runs.submitted, runs.delivered, runs.live) == (6, 4, 2) and c.batches() == []
            await until(lambda: STARTED == [(0, 1)])
        HOLD.clear()
        async with again() as c:
            await until(lambda: c.stats().attempts.good == 1)
        STARTED.clear()
        sink.fail = "before"
        async with again() as c:
            await c.submit_batch(batch_id=2, tasks=[rr.Task("tests.journal.held")], batch_type="train")
            with pytest.raises(PipelineError):
                await c.finalize_train_batch(2, timeout=20)
            check_doors(c)
        sink.fail = None
        async with again() as c:
            assert c.stats().runs.live == 3
            second = await c.finalize_train_batch(2, timeout=20)
            assert second["experience_count"] == 3 and second["expected_task_count"] == 1
            assert second["metrics"]["rollout/carried_in_count"] == 1
            assert STARTED == [(0, 0)] and c.stats().runs.live == 0
            check_doors(c)
        assert len(set(sink.uids)) == 7 == len(sink.uids)
        async with again() as c:
            assert c.batches() == [] and c.stats().runs.live == 0

    run(main())


def test_a_commit_whose_answer_was_lost_is_not_repeated_after_a_restart(tmp_path: Path) -> None:
    sink = ListSink()

    async def main() -> None:
        async with made(tmp_path, sink=sink) as c:
            await c.submit_batch(batch_id=1, tasks=[rr.Task("tests.journal.held")], batch_type="train")
            sink.fail = "after"
            with pytest.raises(PipelineError, match="lost the answer"):
                await c.finalize_train_batch(1, timeout=20)
        async with made(tmp_path, sink=sink) as c:
            assert (await c.finalize_train_batch(1, timeout=20))["experience_count"] == 1
        assert len(sink.uids) == 1

    run(main())


def test_failed_tasks_and_aborted_batches_are_remembered(tmp_path: Path) -> None:
    async def main() -> None:
        async with made(tmp_path) as c:
            tasks = [rr.Task("tests.journal.held", {"fails": True}), rr.Task("tests.journal.held")]
            await c.submit_batch(batch_id=1, tasks=tasks, batch_type="train")
            while c.batch_state(1).completed_task_count < 2:
                await asyncio.sleep(0.001)
            await c.submit_batch(batch_id=2, tasks=tasks, batch_type="train")
            await c.abort_batch(2, reason="not wanted")
        STARTED.clear()
        async with made(tmp_path) as c:
            assert c.batch_state(1).statuses[0].state == "failed" and not STARTED
            with pytest.raises(BatchAborted, match="not wanted"):
                await c.finalize_train_batch(2)
            assert (await c.finalize_train_batch(1))["failed_task_count"] == 1

    run(main())


def test_a_held_journal_is_refused(tmp_path: Path) -> None:
    async def main() -> None:
        async with made(tmp_path):
            other = made(tmp_path)
            with pytest.raises(LaneBusyError, match="held"):
                await other.prepare()

    run(main())


@pytest.mark.parametrize("how", ["newer", "other space", "no database"])
def test_a_foreign_journal_is_refused(tmp_path: Path, how: str) -> None:
    async def main() -> None:
        path = tmp_path / "j.sqlite"
        if how == "no database":
            path.write_bytes(b"not a database, at all" * 100)
        else:
            async with made(tmp_path):
                pass
            with sqlite3.connect(path) as database:
                key, value = ("format", 99) if how == "newer" else ("layout", "0" * 32)
                database.execute("update meta set value = ? where key = ?", (value, key))
            database.close()
        with pytest.raises(FormatError, match="j.sqlite"):
            await made(tmp_path).prepare()

    run(main())


DRIVER = """
import asyncio, json, os, signal, sys
from pathlib import Path
from tests.rollout.test_journal import killed_and_restarted
json.dump({where: killed_and_restarted(Path(sys.argv[1]) / where, where) for where in sys.argv[2:]}, sys.stdout)
"""
WHERE = [
    "sink-before",
    "sink-after",
    "running",
    *(f"group-{n}-{at}" for n in (1, 2, 3, 4) for at in ("before", "after")),
]


def killed_and_restarted(path: Path, where: str) -> tuple[int, int, list[Any]]:
    """Fork a coordinator that is killed at a place, then two that go on; return how they ended, and the rows."""
    path.mkdir()
    first = _forked(lambda: asyncio.run(_until_killed(path, where)))
    for _ in range(2):
        assert _forked(lambda: asyncio.run(_gone_on(path))) == 0, where
    return os.waitstatus_to_exitcode(first), len(rows(path)), rows(path)


def _forked(work: Any) -> int:
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1]
    try:
        work()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Killing(FileSink):
    """Kills the process before or after a write; refuses to write a commit twice."""

    where = ""

    def write(self, x: Any, commit_id: str) -> None:
        if self.where == "sink-before":
            _kill()
        assert not self.holds(commit_id), "written twice"
        super().write(x, commit_id)
        if self.where == "sink-after":
            _kill()


async def _until_killed(path: Path, where: str) -> None:
    Killing.where = where
    if where.startswith("group"):
        _, number, at = where.split("-")
        write, groups = Journal._write_group, [0]

        def counted(self: Any, database: Any) -> bool:
            groups[0] += 1
            if groups[0] == int(number) and at == "before":
                while self._changes.empty():
                    pass
                _kill()
            went_on = write(self, database)
            if groups[0] == int(number) and at == "after":
                _kill()
            return went_on

        Journal._write_group = counted  # type: ignore[method-assign]
    c = made(path, sink=Killing(path / "out"))
    await c.prepare()
    for ident in (1, 2):
        tasks = [rr.Task("tests.journal.held", repeat_times=2) for _ in range(4)]
        await c.submit_batch(batch_id=ident, tasks=tasks, batch_type="train")
        while c.batch_state(ident).completed_task_count < 4:
            await asyncio.sleep(0)
        if where == "running":
            _kill()
        await c.finalize_train_batch(ident, timeout=20)


async def _gone_on(path: Path) -> None:
    """What a trainer does after a crash: what is live is finalized, what was never admitted is submitted again."""
    Killing.where = ""
    async with made(path, sink=Killing(path / "out")) as c:
        for ident in (1, 2):
            try:
                c.batch_state(ident)
            except KeyError:
                tasks = [rr.Task("tests.journal.held", repeat_times=2) for _ in range(4)]
                await c.submit_batch(batch_id=ident, tasks=tasks, batch_type="train")
            result = await c.finalize_train_batch(ident, timeout=20)
            assert result["experience_count"] == 8
        check_doors(c)


@pytest.mark.process
def test_a_coordinator_killed_anywhere_delivers_each_run_once(tmp_path: Path) -> None:
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    command = [sys.executable, "-c", DRIVER, str(tmp_path), *WHERE]
    done = subprocess.run(command, env=env, timeout=100, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for where, (code, n, found) in json.loads(done.stdout).items():
        assert code == -signal.SIGKILL, where
        assert n == 16 == len({tuple(uid) for uid in found}), where
