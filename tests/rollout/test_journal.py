"""What the journal recorded is there after a shutdown or a kill, and reaches the sink once."""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.rollout.make import check_doors, config, experience, run

import recollect.rollout as rr
from recollect.errors import BatchAborted, FormatError, LaneBusyError

ROOT = Path(__file__).parents[2]
STARTED: list[tuple[Any, int]] = []
HOLD: set[Any] = set()


@rr.workflow("tests.journal.held")
async def held(task: Any, models: Any) -> Any:
    """Ends at once, unless its task is held: then never."""
    STARTED.append((task.task_id, task.run_id))
    if task.task_id in HOLD:
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


CHILD = """
import asyncio, os, signal, sys
import recollect.rollout as rr
from tests.rollout.test_journal import made, experience
from recollect.rollout.sinks import FileSink
from pathlib import Path
path, where = Path(sys.argv[1]), sys.argv[2]

class Killing(FileSink):
    def write(self, x, commit_id):
        if where == "before": os.kill(os.getpid(), signal.SIGKILL)
        if self.holds(commit_id): raise AssertionError("written twice")
        super().write(x, commit_id)
        if where == "after": os.kill(os.getpid(), signal.SIGKILL)

async def main():
    sink = Killing(path / "out")
    c = made(path, sink=sink)
    await c.prepare()
    for b in c.batches():
        await c.finalize_train_batch(b, timeout=20)
    if where == "none":
        await c.shutdown()
        return
    tasks = [rr.Task("tests.journal.held", repeat_times=2) for _ in range(4)]
    await c.submit_batch(batch_id=where, tasks=tasks, batch_type="train")
    if where == "running":
        while c.batch_state(where).completed_task_count < 4: await asyncio.sleep(0)
        os.kill(os.getpid(), signal.SIGKILL)
    await c.finalize_train_batch(where, timeout=20)
asyncio.run(main())
"""


@pytest.mark.process
@pytest.mark.parametrize("where", ["before", "after", "running"])
def test_a_killed_coordinator_delivers_once(tmp_path: Path, where: str) -> None:
    def child(mode: str) -> int:
        env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
        return subprocess.run(
            [sys.executable, "-c", CHILD, str(tmp_path), mode], env=env, timeout=50
        ).returncode

    assert child(where) == -signal.SIGKILL
    assert child("none") == 0
    assert child("none") == 0
    found = rows(tmp_path)
    assert len(found) == len(set(found)) == 8
