"""What the journal recorded is there after a shutdown or a kill, and reaches the sink once."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import functools
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.rollout.make import ListSink, check_doors, config, experience, run

import recollect.rollout as rr
from recollect.errors import (
    BatchAborted,
    ClosedError,
    DeadlineError,
    FormatError,
    LaneBusyError,
    PipelineError,
)
from recollect.rollout.journal.format import decode_batch
from recollect.rollout.journal.journal import Journal
from recollect.testing import FakeClock

ROOT = Path(__file__).parents[2]
STARTED: list[tuple[Any, int]] = []
HOLD: set[Any] = set()
WORK: list[Any] = []


@rr.workflow("tests.journal.held")
async def held(task: Any, models: Any) -> Any:
    """Ends at once, unless its task or run is held: then never."""
    STARTED.append((task.task_id, task.run_id))
    WORK.append((task.task_id, task.run_id, task.seed, task.data, task.repeat_times))
    if HOLD & {task.task_id, (task.task_id, task.run_id)}:
        await asyncio.get_running_loop().create_future()
    if task.data.get("fails"):
        raise ValueError("as told")
    return experience(reward=float(task.run_id))


GATE = asyncio.Event()
SOON = "tests.journal.soon"


@rr.workflow(SOON)
async def soon(task: Any, models: Any) -> Any:
    """Ends when the gate is opened."""
    STARTED.append((task.task_id, task.run_id))
    await GATE.wait()
    return experience()


def made(path: Path, models: Any = (), clock: Any = None, **fields: Any) -> rr.RolloutCoordinator:
    given = {
        "journal": str(path / "j.sqlite"),
        "sink": str(path / "out"),
        "drain_s": 0.0,
        "cancel_grace_s": 0.1,
    }
    return rr.RolloutCoordinator(config(**given | fields), models, clock=clock)


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
    WORK.clear()
    GATE.clear()


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


@pytest.mark.parametrize(
    "sink", ["queue", {"kind": "queue", "capacity": 8}, rr.QueueSink()], ids=["word", "table", "sink"]
)
def test_a_queue_beside_a_journal_is_warned_of(sink: Any, tmp_path: Path) -> None:
    """What it held is gone after a kill, while the journal says that it was delivered."""
    with pytest.warns(RuntimeWarning, match='sink: must outlive the process .* use sink={"kind": "file"'):
        made(tmp_path, sink=sink)


def test_a_held_journal_is_refused(tmp_path: Path) -> None:
    async def main() -> None:
        async with made(tmp_path):
            other = made(tmp_path)
            with pytest.raises(LaneBusyError, match="held"):
                await other.prepare()

    run(main())


@pytest.mark.parametrize("how", ["newer", "other space", "no database", "damaged name"])
def test_a_foreign_journal_is_refused(tmp_path: Path, how: str) -> None:
    async def main() -> None:
        path = tmp_path / "j.sqlite"
        if how == "no database":
            path.write_bytes(b"not a database, at all" * 100)
        elif how == "damaged name":
            async with made(tmp_path):
                pass
            path.write_bytes(path.read_bytes().replace(b"tablerunsruns", b"tabler\xa0nsruns"))
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


@pytest.mark.parametrize("mode", ["delete", "wal"])
def test_another_programs_database_is_left_as_it_is(tmp_path: Path, mode: str) -> None:
    path = tmp_path / "j.sqlite"
    database = sqlite3.connect(path)
    database.execute(f"pragma journal_mode = {mode}")
    database.execute("create table meta (key text, value)")
    database.execute("insert into meta values ('mine', 1)")
    database.commit()
    database.close()
    before = path.read_bytes()
    with pytest.raises(FormatError, match="j.sqlite"):
        run(made(tmp_path).prepare())
    assert path.read_bytes() == before and [f.name for f in tmp_path.iterdir()] == ["j.sqlite"]


def test_a_journal_whose_workflows_are_not_there_is_let_go_and_can_be_opened_once_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "later.py").write_text(
        "from tests.rollout.test_journal import held\n"
        "async def flow(task, models):\n    return await held(task, models)\n"
    )

    async def main() -> None:
        HOLD.update({1})
        async with made(tmp_path) as c:
            await c.submit_batch(batch_id=1, tasks=[rr.Task("later:flow")] * 2, batch_type="train")
            await c.submit_batch(batch_id=2, tasks=[rr.Task(NAMED)], batch_type="train")
            await until(lambda: c.stats().attempts.good == 2)
        known = sys.modules.pop("later")
        again = made(tmp_path)
        for _ in range(2):
            with pytest.raises(ValueError, match="later:flow.* import .*later"):
                await again.prepare()
            with pytest.raises(ClosedError):
                again.batches()
        assert asyncio.all_tasks() == {asyncio.current_task()}
        sys.modules["later"] = known
        HOLD.clear()
        STARTED.clear()
        async with again as c:
            assert c.batches() == [1, 2] and c.stats().runs.submitted == 3
            for ident, n in ((1, 2), (2, 1)):
                assert (await c.finalize_train_batch(ident, timeout=20))["experience_count"] == n
            assert STARTED == [(1, 0)]
            check_doors(c)

    try:
        run(main())
    finally:
        sys.modules.pop("later", None)


def copied(path: Path, name: str) -> Any:
    """What a kill at this moment would leave: the files as they are, opened by no other process."""
    for file in path.glob("j.sqlite*"):
        shutil.copy(file, path / file.name.replace("j.sqlite", name))
    return sqlite3.connect(path / name)


def counted(database: Any, table: str) -> int:
    with contextlib.closing(database):
        return int(database.execute(f"select count(*) from {table}").fetchone()[0])


NAMED = "tests.journal.held"


def test_a_batch_is_recorded_when_submit_returns_and_payloads_are_deleted_when_delivered(
    tmp_path: Path,
) -> None:
    class Looks(ListSink):
        def write(self, x: Any, commit_id: str) -> None:
            seen.append(counted(copied(tmp_path, "at-the-sink"), "runs"))
            super().write(x, commit_id)

    seen: list[int] = []

    async def main() -> None:
        async with made(tmp_path, sink=Looks(), history=2) as c:
            await c.submit_batch(batch_id=0, tasks=[rr.Task(NAMED, repeat_times=3)], batch_type="train")
            assert counted(copied(tmp_path, "submitted"), "batches") == 1
            await c.finalize_train_batch(0)
            assert seen == [3]  # all of it, before any of it is delivered
            for ident in range(1, 5):
                await c.submit_batch(batch_id=ident, tasks=[rr.Task(NAMED)], batch_type="train")
                await c.finalize_train_batch(ident)
        assert counted(sqlite3.connect(tmp_path / "j.sqlite"), "runs") == 0
        assert counted(sqlite3.connect(tmp_path / "j.sqlite"), "batches") == 2  # as many as are remembered
        async with made(tmp_path, sink=ListSink(), history=2) as c:
            assert (await c.finalize_train_batch(4))["experience_count"] == 1
            assert c.batch_state(4).statuses[0].state == "ok"
            with pytest.raises(KeyError):
                await c.finalize_train_batch(2)
            await c.submit_batch(
                batch_id=9, tasks=[rr.Task(NAMED)], batch_type="train"
            )  # beside what is there
            await c.finalize_train_batch(9)

    run(main())


def test_the_newest_endings_are_remembered_whatever_was_submitted_first(tmp_path: Path) -> None:
    async def main() -> None:
        async with made(tmp_path, history=2) as c:
            for ident in (1, 2, 3):
                await c.submit_batch(batch_id=ident, tasks=[rr.Task(NAMED)], batch_type="train")
            for ident in (3, 2, 1):
                await c.finalize_train_batch(ident)
        async with made(tmp_path, history=2) as c:
            for ident in (1, 2):
                assert (await c.finalize_train_batch(ident))["batch_id"] == ident
            with pytest.raises(KeyError):
                await c.finalize_train_batch(3)
            await c.submit_batch(batch_id=4, tasks=[rr.Task(NAMED)], batch_type="train")
            await c.finalize_train_batch(4)
            with pytest.raises(KeyError):  # the oldest of them went
                await c.finalize_train_batch(2)

    run(main())


@pytest.mark.parametrize("is_safe", [False, True])
def test_the_database_is_locked_in_wal_and_synced_as_the_config_says(
    tmp_path: Path, is_safe: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, Any] = {}

    class Looked(sqlite3.Connection):
        def close(self) -> None:
            for name in ("synchronous", "journal_mode", "locking_mode"):
                seen[name] = self.execute(f"pragma {name}").fetchone()[0]
            super().close()

    monkeypatch.setattr(sqlite3, "connect", functools.partial(sqlite3.connect, factory=Looked))

    async def main() -> None:
        async with made(tmp_path, power_safe=is_safe):
            pass

    run(main())
    assert seen == {"synchronous": 2 if is_safe else 1, "journal_mode": "wal", "locking_mode": "exclusive"}


def test_counters_come_back(tmp_path: Path) -> None:
    """Train batches since the first version, and group ids, though a clock may have gone back."""

    async def main() -> None:
        fields = {"max_staleness": 0, "submit_timeout_s": 0.0}
        model = rr.ScriptedModel(["x"], version=3)
        async with made(tmp_path, [model], **fields) as c:
            await c.submit_batch(batch_id=0, tasks=[rr.Task(NAMED)], batch_type="train")
            await c.finalize_train_batch(0)
        with sqlite3.connect(tmp_path / "j.sqlite") as database:
            database.execute("update meta set value = ? where key = 'next_group'", (2**61,))
        database.close()
        model.version = 4
        for batch_id in (1, 2):  # what is aborted is taken out of the count, here and in the file
            async with made(tmp_path, [model], **fields) as c:
                await c.submit_batch(batch_id=batch_id, tasks=[rr.Task(NAMED)], batch_type="train")
                with pytest.raises(DeadlineError, match="needs version 5, got 4"):
                    await c.submit_batch(batch_id="next", tasks=[rr.Task(NAMED)], batch_type="train")
                await c.abort_batch(batch_id, reason="again")
        async with made(tmp_path, [model], **fields) as c:
            await c.submit_batch(batch_id=1, tasks=[rr.Task(NAMED)], batch_type="train")
            await c.finalize_train_batch(1)
        first, second = sorted(rows(tmp_path))
        assert first[0] < 2**61 < second[0] < 2**61 + 10

    run(main())


def test_a_task_comes_back_as_it_was(tmp_path: Path) -> None:
    def recorded() -> dict[Any, Any]:
        """The commit and the groups of each batch, as the journal says."""
        with contextlib.closing(sqlite3.connect(tmp_path / "j.sqlite")) as database:
            found = [decode_batch(about) for (about,) in database.execute("select about from batches")]
        return {batch.batch_id: (batch.commit_id, [t.group_id for t in batch.tasks]) for batch in found}

    async def main() -> None:
        HOLD.update({"t", "u"})
        fields = {"runners": 1, "max_retries": 7}
        async with made(tmp_path, **fields) as c:
            own = {"task_id": "t", "repeat_times": 2, "timeout_s": 77.0, "max_retries": 3}
            tasks = [rr.Task(NAMED, {"x": 1}, **own)]
            await c.submit_batch(batch_id="a", tasks=tasks, batch_type="train", priority=5)
            await c.submit_batch(
                batch_id="b",
                tasks=[rr.Task(NAMED, task_id="u")],
                batch_type="train",
                priority=2,
                min_wait_num=1,
            )
            await until(lambda: STARTED == [("t", 0)])
        names, [before] = recorded(), WORK
        STARTED.clear()
        WORK.clear()
        clock = FakeClock()
        async with made(tmp_path, clock=clock, **fields) as c:
            await until(lambda: STARTED == [("u", 0)])  # the priority came back: 2 before 5
            assert [c.batch_state(ident).state.value for ident in ("a", "b")] == ["running"] * 2
            assert c.batch_state("b").min_wait_num == 1
            HOLD.discard("u")
            await c.abort_batch("b", reason="next")
            await until(lambda: ("t", 0) in STARTED)
            assert WORK[-1] == before  # its data and its seed too
            assert "attempt 1 of 4 on" in str(c.why_waiting("a"))
            HOLD.discard("t")
            stream = c.events("a")
            clock.advance(77.0)
            assert (await anext(stream)).detail == "after 77 s"
            await stream.aclose()
            while c.batch_state("a").completed_task_count < 1:
                clock.advance(1.0)
                await asyncio.sleep(0)
            await c.finalize_train_batch("a")
            check_doors(c)
        commit, [group] = names["a"]
        assert [file.stem for file in (tmp_path / "out").iterdir()] == [commit]
        assert sorted(rows(tmp_path)) == [(group, 0, 0), (group, 1, 0)]

    run(main())


def test_a_journal_imports_only_what_the_program_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "strange.py").write_text(
        "import asyncio\nasync def work(task, models):\n    await asyncio.Event().wait()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)

    async def main() -> None:
        async with made(tmp_path) as c:
            await c.submit_batch(batch_id=1, tasks=[rr.Task("strange:work")], batch_type="train")
        del sys.modules["strange"]
        with pytest.raises(ValueError, match="workflow: .*strange:work.* workflow_modules"):
            async with made(tmp_path):
                pass
        assert "strange" not in sys.modules
        async with made(tmp_path, workflow_modules=("strange",)) as c:
            assert c.batch_state(1).state is rr.BatchLifecycleState.RUNNING

    try:
        run(main())
    finally:
        sys.modules.pop("strange", None)


def test_finished_runs_are_staged_again_and_failed_ones_stay_failed(tmp_path: Path) -> None:
    async def main() -> None:
        HOLD.update({(0, 1)})
        async with made(tmp_path, partial_results="keep", min_group_size=1) as c:
            given = [rr.Task(NAMED, repeat_times=2), rr.Task(NAMED, {"fails": True}), rr.Task(NAMED)]
            await c.submit_batch(batch_id=1, tasks=given, batch_type="train")
            await until(lambda: c.batch_state(1).completed_task_count == 2 and len(STARTED) == 4)
            await until(lambda: c.stats().attempts.good == 2)
            staged = c.stats().staged_nbytes
        STARTED.clear()
        async with made(tmp_path, partial_results="keep", min_group_size=1) as c:
            assert c.stats().staged_nbytes == staged > 0
            await until(lambda: STARTED)
            assert STARTED == [(0, 1)] and c.stats().runs.live == 4
            statuses = c.batch_state(1).statuses
            assert {task: s.state for task, s in statuses.items()} == {1: "failed", 2: "ok"}
            assert "as told" in statuses[1].error
            HOLD.clear()
            result = await c.finalize_train_batch(1, timeout=0, below_min="accept")
            counts = [result[f"{kind}_task_count"] for kind in ("ok", "partial", "failed", "cancelled")]
            assert counts == [1, 1, 1, 0]  # the run that was staged again counts
            check_doors(c)

    run(main())


def test_runs_that_come_back_are_counted_once(tmp_path: Path) -> None:
    async def main() -> None:
        HOLD.update({0})
        async with made(tmp_path) as c:
            await c.submit_batch(batch_id=1, tasks=[rr.Task(NAMED, repeat_times=2)], batch_type="train")
            for _ in range(2):
                await c.shutdown()
                await c.prepare()
                assert c.stats().runs.submitted == c.stats().runs.live == 2
                check_doors(c)

    run(main())


def test_a_run_that_has_failed_for_good_is_not_run_again_though_its_task_goes_on(tmp_path: Path) -> None:
    async def main() -> None:
        HOLD.update({(0, 1)})
        async with made(tmp_path) as c:
            tasks = [rr.Task(NAMED, {"fails": True}, repeat_times=2)]
            await c.submit_batch(batch_id=1, tasks=tasks, batch_type="train")
            await until(lambda: c.stats().attempts.failed == 1)
        assert sorted(STARTED) == [(0, 0), (0, 1)]
        STARTED.clear()
        HOLD.clear()
        async with made(tmp_path) as c:
            await until(lambda: c.batch_state(1).completed_task_count == 1)
            assert STARTED == [(0, 1)] and c.batch_state(1).statuses[0].state == "failed"
            check_doors(c)

    run(main())


def test_a_cut_comes_back_and_can_still_be_aborted(tmp_path: Path) -> None:
    sink = ListSink()

    async def main() -> None:
        HOLD.update({1})
        async with made(tmp_path, sink=sink) as c:
            given = [rr.Task(NAMED) for _ in range(2)]
            for ident in (1, 2):
                await c.submit_batch(batch_id=ident, tasks=given, batch_type="train", min_wait_num=1)
            await until(lambda: len(STARTED) == 4)
            await until(lambda: c.stats().attempts.good == 2)
            sink.fail = "before"
            for ident in (1, 2):
                with pytest.raises(PipelineError):
                    await c.finalize_train_batch(ident, timeout=0)
        sink.fail = None
        STARTED.clear()
        async with made(tmp_path, sink=sink) as c:
            await asyncio.sleep(0)
            assert STARTED == [] and c.stats().queue.queued_runs == 0  # what was cancelled stays so
            result = await c.finalize_train_batch(1, timeout=0)
            assert (result["ok_task_count"], result["cancelled_task_count"]) == (1, 1)
            await c.abort_batch(2, reason="enough")
            stats = c.stats()
            assert (stats.queue.queued_runs, stats.staged_nbytes, stats.runs.live) == (0, 0, 0)
            check_doors(c)

    run(main())


@pytest.mark.parametrize("left", [0, 8192, 16384, 24576])
def test_a_journal_that_a_full_disk_left_half_made_can_be_opened(small_disk: Path, left: int) -> None:
    path, filler = str(small_disk / "j.sqlite"), small_disk / "filler"

    async def opened() -> None:
        await (await Journal.open(path, config(), "h")).close()

    with open(filler, "wb") as f, contextlib.suppress(OSError):
        while True:
            os.write(f.fileno(), bytes(4096))
    os.truncate(filler, filler.stat().st_size - left)
    with pytest.raises(OSError, match="free the disk"):
        run(opened())
    filler.unlink()
    run(opened())


class _Stop(BaseException):
    """As a second Ctrl-C: it ends the loop at once."""


def stopped(path: Path, verb: str, n: int) -> bool:
    """Have asyncio.run end after n turns of a verb; whether that was before its end."""
    came = False

    async def main() -> None:
        nonlocal came
        c = made(path)
        if verb != "prepare":
            await c.prepare()
            await c.submit_batch(batch_id=1, tasks=[rr.Task(NAMED)], batch_type="train")
        call = asyncio.ensure_future(c.prepare() if verb == "prepare" else c.shutdown())
        if verb != "nothing":
            for _ in range(n):
                await asyncio.sleep(0)
            if call.done():
                return await c.shutdown()
        came = True
        raise _Stop

    with contextlib.suppress(_Stop):
        asyncio.run(main())
    return came


@pytest.mark.parametrize("verb", ["prepare", "nothing", "shutdown"])
def test_a_journal_is_free_after_the_loop_of_its_coordinator_ended(tmp_path: Path, verb: str) -> None:
    async def again(n: int) -> None:
        async with made(tmp_path / str(n)) as c:
            assert c.batches() == ([] if verb == "prepare" else [1])

    n, came = 0, True
    while came and n < (1 if verb == "nothing" else 1000):
        (tmp_path / str(n)).mkdir()
        came = stopped(tmp_path / str(n), verb, n)
        run(again(n))
        n += 4 if verb == "shutdown" else 1
    assert n > (0 if verb == "nothing" else 2)


def test_a_shutdown_that_is_cancelled_goes_on_to_its_end(tmp_path: Path) -> None:
    async def main() -> None:
        HOLD.add(0)
        c = made(tmp_path, drain_s=0.2)
        await c.prepare()
        await c.submit_batch(batch_id=1, tasks=[rr.Task(NAMED, task_id=0)], batch_type="train")
        ending = asyncio.ensure_future(c.shutdown())
        await asyncio.sleep(0)
        ending.cancel()  # as asyncio.run does at a Ctrl-C
        with pytest.raises(asyncio.CancelledError):
            await ending
        left = asyncio.all_tasks() - {asyncio.current_task()}
        assert not any("_stop" in str(task) for task in left)
        async with made(tmp_path) as other:
            assert other.batches() == [1]

    run(main())


@pytest.mark.parametrize("ends", ["finalize", "restart"])
def test_a_disk_that_was_full_for_a_moment_costs_nothing(tmp_path: Path, small_disk: Path, ends: str) -> None:
    async def main() -> None:
        fields = {"journal": str(small_disk / "j.sqlite"), "sink": str(tmp_path / "out")}
        big = {"text": "x" * 20_000}
        async with made(tmp_path, **fields) as c:
            await c.submit_batch(batch_id=1, tasks=[rr.Task(NAMED, data=big)], batch_type="train")
            filler = small_disk / "filler"
            with open(filler, "wb") as f, contextlib.suppress(OSError):
                while True:
                    os.write(f.fileno(), bytes(4096))
            for _ in range(2):
                with pytest.raises(OSError, match="cannot be written .*full.*free the disk"):
                    await c.submit_batch(batch_id=2, tasks=[rr.Task(NAMED, data=big)], batch_type="train")
                assert c.batches() == [1]  # all or nothing
            with pytest.raises(BatchAborted, match="could not be recorded"):
                await c.finalize_train_batch(2)
            await until(lambda: c.batch_state(1).completed_task_count == 1)
            with pytest.raises(PipelineError, match="full"):
                await c.finalize_train_batch(1)
            filler.unlink()
            await c.submit_batch(batch_id=2, tasks=[rr.Task(NAMED, data=big)], batch_type="train")
            if ends == "finalize":
                for batch in (1, 2):
                    await c.finalize_train_batch(batch, timeout=20)
                await c.submit_batch(batch_id=3, tasks=[rr.Task(NAMED)], batch_type="train")
        async with made(tmp_path, **fields) as c:
            assert c.batches() == ([3] if ends == "finalize" else [1, 2])
            for batch in c.batches():
                await c.finalize_train_batch(batch, timeout=20)
            assert len(rows(tmp_path)) == (3 if ends == "finalize" else 2)

    run(main())


def test_a_write_that_failed_is_raised_and_later_ones_wait_for_it(tmp_path: Path) -> None:
    async def main() -> None:
        async with made(tmp_path):
            pass
        with contextlib.closing(sqlite3.connect(tmp_path / "j.sqlite")) as database:
            database.execute(
                "create trigger refuses before insert on batches when new.serial = 2 "
                "begin select raise(abort, 'refused here'); end"
            )
        async with made(tmp_path) as c:
            await c.submit_batch(batch_id=1, tasks=[rr.Task(NAMED)], batch_type="train")
            for batch_id in (2, 3):  # the third could be written
                with pytest.raises(sqlite3.IntegrityError, match="refused here"):
                    await c.submit_batch(batch_id=batch_id, tasks=[rr.Task(NAMED)], batch_type="train")
            await until(lambda: c.batch_state(1).completed_task_count == 1)
            with pytest.raises(PipelineError, match="refused here"):  # what is not recorded is not delivered
                await c.finalize_train_batch(1)
            assert not (tmp_path / "out").exists()
        async with made(tmp_path) as c:
            assert c.batches() == [1]

    with pytest.warns(RuntimeWarning, match="could not be recorded"):
        run(main())


def test_running_attempts_may_finish_into_the_journal_at_shutdown_and_none_starts(tmp_path: Path) -> None:
    async def main() -> None:
        HOLD.update({0})
        async with made(tmp_path, runners=1, drain_s=20.0) as c:
            await c.submit_batch(batch_id=1, tasks=[rr.Task(SOON), rr.Task(SOON)], batch_type="train")
            await until(lambda: len(STARTED) == 1)
            closing = asyncio.create_task(c.shutdown())
            for _ in range(5):
                await asyncio.sleep(0)
            assert not closing.done()
            GATE.set()
            await closing
        assert STARTED == [(0, 0)]
        STARTED.clear()
        async with made(tmp_path, runners=1) as c:
            assert (await c.finalize_train_batch(1, timeout=20))["ok_task_count"] == 2
            assert STARTED == [(1, 0)]

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


class Killing(rr.FileSink):
    """Kills the process before or after a write; refuses to write a commit twice."""

    where = ""

    def write(self, x: Any, commit_id: str) -> None:
        if self.where == "sink-before":
            _kill()
        assert not self.holds(commit_id), "written twice"
        super().write(x, commit_id)
        if self.where == "sink-after":
            _kill()


class KillingConnection(sqlite3.Connection):
    """Kills the process before or after it commits the changes of a group; the first commit is that of the format."""

    where = ""
    n_commits = -1

    def __enter__(self) -> Any:
        self.n_commits += 1
        if self.where == f"group-{self.n_commits}-before":
            _kill()
        return super().__enter__()

    def __exit__(self, *error: Any) -> Any:
        found = super().__exit__(*error)
        if self.where == f"group-{self.n_commits}-after":
            _kill()
        return found


async def _until_killed(path: Path, where: str) -> None:
    Killing.where = where
    if where.startswith("group"):
        KillingConnection.where = where
        sqlite3.connect = functools.partial(sqlite3.connect, factory=KillingConnection)  # type: ignore[assignment]
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
@pytest.mark.parametrize(
    "places",
    [
        pytest.param(["sink-after", "running", "group-2-after"], id="sample"),
        pytest.param(WHERE, id="everywhere", marks=pytest.mark.soak),
    ],
)
def test_a_coordinator_killed_anywhere_delivers_each_run_once(tmp_path: Path, places: list[str]) -> None:
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    command = [sys.executable, "-c", DRIVER, str(tmp_path), *places]
    done = subprocess.run(command, env=env, timeout=200, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for where, (code, n, found) in json.loads(done.stdout).items():
        assert code == -signal.SIGKILL, where
        assert n == 16 == len({tuple(uid) for uid in found}), where


class Level(enum.IntEnum):
    LOW = 2


def test_every_value_that_a_journal_accepts_it_can_read_again(tmp_path: Path) -> None:
    """Values of classes like numpy's become plain ones; what no record holds is refused before anything changes."""
    odd: list[tuple[Any, dict[str, Any], dict[str, Any]]] = [
        (np.str_("a"), {"task_id": np.str_("t"), "timeout_s": np.float64(5)}, {"priority": Level.LOW}),
        (Level.LOW, {"max_retries": np.int64(1), "repeat_times": np.int32(2)}, {"min_wait_num": 1}),
        ("late", {"max_retries": 2.0}, {}),
        ("yes", {"max_retries": True}, {}),
        ("long", {"timeout_s": 10**400}, {}),
        ("task", {"task_id": 2**64}, {}),
        (-(2**63) - 1, {}, {}),
        ("first", {}, {"priority": 2**64}),
        ("many", {"repeat_times": 2**22 + 1}, {}),
    ]

    async def main() -> None:
        HOLD.update({0, "t"})
        async with made(tmp_path) as c:
            for ident, of_task, of_batch in odd:
                with contextlib.nullcontext() if len(c.batches()) < 2 else pytest.raises(ValueError):
                    tasks = [rr.Task("tests.journal.held", **of_task)]
                    await c.submit_batch(batch_id=ident, tasks=tasks, batch_type="train", **of_batch)
            assert c.batches() == ["a", 2]
            check_doors(c)
        HOLD.clear()
        async with made(tmp_path) as c:
            assert c.batches() == ["a", 2] and [type(ident) for ident in c.batches()] == [str, int]
            for ident, n_rows in (("a", 1), (2, 2)):
                result = await c.finalize_train_batch(ident, timeout=20)
                assert result["experience_count"] == n_rows

    run(main())


def test_a_batch_with_a_long_id_reaches_its_file_once(tmp_path: Path) -> None:
    async def main() -> None:
        async with made(tmp_path) as c:
            for ident in ("é" * 10_000, "é" * 9_999 + "e"):
                tasks = [rr.Task("tests.journal.held")]
                await c.submit_batch(batch_id=ident, tasks=tasks, batch_type="train")
                await c.finalize_train_batch(ident, timeout=20)
        assert len(rows(tmp_path)) == 2

    run(main())
