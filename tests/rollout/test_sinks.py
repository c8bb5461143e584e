"""Sinks: the public suite over all of them, files that are whole or not there, and the queue."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import resource
import threading
from pathlib import Path
from typing import Any

import pytest
from tests.process.killing import killed_at, steps
from tests.rollout.make import batch, config, experience, good, run

import recollect.rollout as rr
from recollect.errors import ClosedError, DeadlineError
from recollect.replay import ReplayBuffer
from recollect.rollout.experience.sinks import make_sink
from recollect.rollout.experience.space import plan_of
from recollect.testing import SinkContract


def test_a_replay_sink_writes_all_or_nothing_and_knows_its_groups() -> None:
    buffer = rr.experience_buffer("memory", capacity=3, max_tokens=8)
    sink = rr.ReplaySink(buffer)
    with pytest.raises(ValueError, match="must fit the buffer's 3 rows, got 4"):
        sink.write(batch((1.0, 2.0), (3.0, 4.0)), "c-g0-1")
    assert len(buffer) == 0 and not sink.holds("c-g0-1")
    x = batch((1.0, 2.0))
    sink.write(x, "c-g0-0")
    later = rr.ReplaySink(buffer)  # of another process: it knows what is there by its group ids
    assert later.holds("c-g0-0") and later.holds("x-g0-5") and not later.holds("c-g1-5")
    assert not later.holds("by another name")
    assert later.holds_rows(x, "c-g0-0") and not later.holds_rows(batch((), (1.0,)), "c-g0-0")
    sink.close()
    assert len(buffer) == 2  # it was given
    rr.ReplaySink(buffer, owned=True).close()
    with pytest.raises(ClosedError):
        len(buffer[:])


def test_a_buffer_of_the_config_is_on_disk_and_found_again(tmp_path: Path) -> None:
    async def main(ident: int) -> int:
        sink = {
            "kind": "replay",
            "storage": "memmap",
            "path": str(tmp_path / "buf"),
            "capacity": 8,
            "max_tokens": 16,
        }
        async with rr.RolloutCoordinator(config(sink=sink), []) as c:
            await c.submit_batch(batch_id=ident, tasks=[rr.Task(good)], batch_type="train")
            await c.finalize_train_batch(ident)
            return len(c.sink)

    assert run(main(1)) == 1 and (tmp_path / "buf").exists()
    assert run(main(2)) == 2


def test_a_shared_buffer_of_experience_can_be_opened_elsewhere() -> None:
    buffer = rr.experience_buffer("shared", capacity=4, max_tokens=8)
    try:
        assert buffer.multiprocessing and buffer.engine.tracked and buffer.capacity == 4
    finally:
        buffer.close()
    for space in (None, rr.experience_space(max_tokens=77)):
        buffer = rr.experience_buffer("memory", capacity=4, max_tokens=8, space=space)
        assert set(dict(buffer.inner_storage.rows.layout.max_lengths).values()) == {8}


def test_a_file_is_synced_renamed_and_never_half_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    fsync, replace = os.fsync, os.replace

    def synced(fd: int) -> None:
        done.append("directory" if os.path.isdir(f"/proc/self/fd/{fd}") else "file")
        fsync(fd)

    def renamed(old: Any, new: Any) -> None:
        done.append("rename")
        replace(old, new)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", renamed)
    sink = rr.FileSink(tmp_path / "new" / "out", "jsonl")
    x = rr.decode(
        rr.encode([experience(info={"a": 1}, metrics={"m": 2.0})], batch_id=3, task_id="t", group_id=5)
    )
    sink.write(x, "c/1")
    assert done == [
        "directory",
        "directory",
        "file",
        "rename",
        "directory",
    ]  # first the names of new directories
    [file] = (tmp_path / "new" / "out").iterdir()
    assert file.name == "c_1.jsonl"
    [line] = [json.loads(text) for text in file.read_text().splitlines()]
    assert (line["batch_id"], line["task_id"], line["group_id"]) == ("3", "t", 5)
    assert (json.loads(line["info"]), json.loads(line["metrics"])) == ({"a": 1}, {"m": 2.0})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        with pytest.raises(OSError, match="too large"):
            sink.write(x, "c/2")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list((tmp_path / "new" / "out").iterdir()) == [file] and not sink.holds("c/2")
    assert rr.FileSink("x").format == "parquet"
    with pytest.raises(ValueError, match="^format: "):
        rr.FileSink("x", "csv")


def test_two_sinks_in_one_directory_do_not_overwrite_each_other(tmp_path: Path) -> None:
    """As two coordinators of one name would: the second is refused, and does not take the first's file for its own."""
    first, second = rr.FileSink(tmp_path, "jsonl"), rr.FileSink(tmp_path, "jsonl")
    rows = [rr.decode(rr.encode([experience()], batch_id=n, task_id="t", group_id=n)) for n in (1, 2)]
    first.write(rows[0], "run-b-g0-0")
    [file] = tmp_path.iterdir()
    before = file.read_bytes()
    with pytest.raises(FileExistsError, match="another sink"):
        second.write(rows[1], "run-b-g0-0")
    assert first.holds("run-b-g0-0") and not second.holds("run-b-g0-0")
    second.write(rows[1], "run-b-g1-1")
    assert file.read_bytes() == before and len(list(tmp_path.iterdir())) == 2
    assert rr.FileSink(tmp_path, "jsonl").holds("run-b-g0-0")  # as after a restart


@pytest.mark.parametrize("stride", [4, pytest.param(1, marks=pytest.mark.soak)])
def test_a_sink_leaves_the_files_of_a_killed_dump_alone(tmp_path: Path, stride: int) -> None:
    """A dump lists the files that it is about to replace; the sink cannot tell which of them a manifest names."""
    sink, x, written = rr.FileSink(tmp_path, "jsonl"), batch((1.0, 2.0)), set()
    with rr.experience_buffer("memory", capacity=3, max_tokens=8) as buffer:
        buffer.extend(x.get_at(slice(None)))
        buffer.dumps(tmp_path)
        for step in steps():
            if step % stride:
                continue
            if not killed_at(step, lambda: buffer.dumps(tmp_path)):
                break
            sink.write(x, f"c-{step}")
            written.add(f"c-{step}.jsonl")
            with ReplayBuffer.load_from(tmp_path) as found:
                assert len(found) == 2
        assert len(written) > 1
        assert {p.name for p in tmp_path.iterdir()} == {"manifest.json", "storage", *written}


def test_temporary_files_of_a_killed_sink_are_removed_and_no_others(tmp_path: Path) -> None:
    sink = rr.FileSink(tmp_path, "jsonl")
    x = rr.decode(rr.encode([experience()], batch_id=1, task_id="t", group_id=1))
    (tmp_path / ".mine.tmp").write_text("mine")
    for step in range(3):
        assert killed_at(step, lambda: sink.write(x, "c-1")) and not sink.holds("c-1")
        assert len(list(tmp_path.iterdir())) == 3  # its list and one file
    sink.write(x, "c-2")
    assert sorted(f.name for f in tmp_path.iterdir()) == [".mine.tmp", "c-2.jsonl"]


def test_a_sink_of_the_config_is_made_as_it_says(tmp_path: Path) -> None:
    queue, ours = make_sink({"kind": "queue", "capacity": 7}, plan_of())
    assert isinstance(queue, rr.QueueSink) and queue.capacity == 7 and ours
    file, ours = make_sink({"kind": "file", "path": str(tmp_path), "format": "jsonl"}, plan_of())
    assert isinstance(file, rr.FileSink) and file.format == "jsonl" and ours
    for path in (tmp_path, str(tmp_path)):
        file, ours = make_sink(path, plan_of())
        assert isinstance(file, rr.FileSink) and file.path == tmp_path and ours
    given_queue = rr.QueueSink()
    assert make_sink(given_queue, plan_of()) == (given_queue, False) and given_queue.capacity == 65_536
    for wrong in (0, 1.5, True):
        with pytest.raises(ValueError, match="^capacity: "):
            rr.QueueSink(wrong)  # type: ignore[arg-type]


def test_the_rest_of_a_write_is_still_the_oldest() -> None:
    async def main() -> None:
        sink = rr.QueueSink()
        sink.write(batch((1.0, 2.0)), "a")
        sink.write(batch((3.0, 4.0)), "b")
        assert [(await sink.get(n)).reward.tolist() for n in (1, 2, 1)] == [[1.0], [2.0, 3.0], [4.0]]

    run(main())


def test_a_get_whose_loop_was_closed_holds_up_no_other() -> None:
    """As after a Ctrl-C in a notebook, which goes on with a new loop."""
    sink, loop, found = rr.QueueSink(), asyncio.new_event_loop(), []

    async def begin() -> Any:
        getting = asyncio.ensure_future(sink.get(2, 600.0))
        await asyncio.sleep(0)
        return getting

    getting = loop.run_until_complete(begin())
    loop.close()
    other = threading.Thread(target=lambda: found.append(len(asyncio.run(sink.get(2, 60.0)))))
    other.start()
    while len(sink._waiting) < 2:
        threading.Event().wait(0.001)
    sink.write(batch((1.0,), (2.0,)), "c")
    other.join(60.0)
    assert found == [2]
    getting._log_destroy_pending = False
    del getting


def test_a_queue_gives_rows_across_writes_and_wakes_waiting_readers() -> None:
    async def main() -> None:
        sink = rr.QueueSink(4)
        waits = asyncio.create_task(sink.get(3, timeout=20))
        await asyncio.sleep(0)
        for name in ("a", "b"):
            sink.write(batch((1.0, 2.0)), name)
        assert (await waits).reward.tolist() == [1.0, 2.0, 1.0] and len(sink) == 1
        assert sink.holds("a") and sink.holds("b") and not sink.holds("c")
        sink.write(rr.decode(rr.encode([experience(9.0)], model_version=5)), "c")
        assert (await sink.get(1)).reward.tolist() == [2.0]
        for wrong in (-1, 1.5, True):
            with pytest.raises(ValueError, match="^n: "):
                await sink.get(wrong)
        with pytest.raises(ValueError, match="timeout"):
            await sink.get(1, timeout=-1)
        with pytest.raises(DeadlineError):
            await sink.get(2, timeout=0)
        assert len(sink) == 1
        sink.close()
        assert (await sink.get(1)).reward.tolist() == [9.0]
        with pytest.raises(ClosedError):
            await sink.get(1)
        sink.reopen()
        sink.write(batch((1.0,)), "d")
        assert len(sink) == 1

    run(main())
    defaults = inspect.signature(rr.QueueSink.get).parameters
    assert (defaults["timeout"].default, defaults["min_version"].default) == (60.0, None)


@pytest.mark.parametrize("how", ["get", "min_version", "close", "give_up"])
def test_a_writer_that_waits_is_woken(how: str) -> None:
    sink = rr.QueueSink(2)
    sink.write(batch((1.0, 2.0)), "a")
    ended: list[Any] = []

    def write() -> None:
        try:
            sink.write(batch((3.0,)), "b")
            ended.append("written")
        except ClosedError:
            ended.append("closed")
        except DeadlineError:
            ended.append("given up")

    thread = threading.Thread(target=write, daemon=True)
    thread.start()
    if how == "get":
        assert len(run(sink.get(1))) == 1
    elif how == "min_version":
        with pytest.raises(DeadlineError):
            run(sink.get(9, timeout=0, min_version=1))
    elif how == "close":
        sink.close()
    else:
        sink.give_up("another")
        sink.give_up("b")
    thread.join(20)
    assert ended == [{"close": "closed", "give_up": "given up"}.get(how, "written")]
    assert sink.holds("b") is (ended == ["written"])


def test_a_write_that_was_given_up_before_it_began_does_not_enter_later() -> None:
    sink = rr.QueueSink(2)
    sink.write(batch((1.0, 2.0)), "a")
    sink.give_up("a")  # it has entered and stays
    sink.give_up("b")
    with pytest.raises(DeadlineError, match="given up"):
        sink.write(batch((3.0,)), "b")
    assert len(run(sink.get(2))) == 2 and sink.holds("a") and not sink.holds("b")
    sink.write(batch((3.0,)), "b")  # the next try
    assert sink.holds("b") and len(sink) == 1


class TestFileSink(SinkContract):
    def make_sink(self, tmp_path: Path) -> Any:
        return rr.FileSink(tmp_path / "out", "jsonl")

    def rows_in(self, sink: Any) -> list[Any]:
        lines = [
            json.loads(line) for f in sorted(sink.path.glob("*.jsonl")) for line in f.read_text().splitlines()
        ]
        return [(line["group_id"], line["run_id"], line["step"]) for line in lines]


class TestReplaySink(SinkContract):
    def make_sink(self, tmp_path: Path) -> Any:
        return rr.ReplaySink(rr.experience_buffer("memory", capacity=100, max_tokens=4096), owned=True)

    def rows_in(self, sink: Any) -> list[Any]:
        x = sink.buffer[:]
        return list(zip(x["group_id"].tolist(), x["run_id"].tolist(), x["step"].tolist()))


class TestQueueSink(SinkContract):
    def make_sink(self, tmp_path: Path) -> Any:
        return rr.QueueSink()

    def rows_in(self, sink: Any) -> list[Any]:
        return run(sink.get(len(sink))).uids.tolist() if len(sink) else []


def test_parquet_keeps_ids_and_info(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    payload = rr.encode([experience(info={"a": 1})], batch_id=3, task_id="t", group_id=9, run_id=0)
    rr.FileSink(tmp_path).write(rr.decode(payload), "c-1")
    table = parquet.read_table(tmp_path / "c-1.parquet").to_pydict()
    assert (
        table["batch_id"] == ["3"] and table["task_id"] == ["t"] and json.loads(table["info"][0]) == {"a": 1}
    )
    assert table["tokens"] == [[0, 1, 2, 3]] and [p.name for p in tmp_path.iterdir()] == ["c-1.parquet"]


def test_the_queue_gives_exactly_n_or_nothing() -> None:
    async def main() -> None:
        sink = rr.QueueSink(4)
        sink.write(batch((1.0, 2.0, 3.0)), "a")
        assert (await sink.get(2)).reward.tolist() == [1.0, 2.0]
        with pytest.raises(DeadlineError, match="2 rows"):
            await sink.get(2, timeout=0)
        assert len(sink) == 1
        full = threading.Thread(target=sink.write, args=(batch((4.0, 5.0, 6.0, 7.0)), "b"))
        full.start()  # waits: 1 + 4 > 4
        first = await sink.get(1)
        more = await sink.get(4, timeout=10)
        full.join(10)
        assert first.reward.tolist() == [3.0] and more.reward.tolist() == [4.0, 5.0, 6.0, 7.0]
        waiting = asyncio.create_task(sink.get(1, timeout=10))
        await asyncio.sleep(0)
        sink.close()
        with pytest.raises(ClosedError):
            await waiting
        with pytest.raises(ClosedError):
            sink.write(batch((1.0,)), "c")

    run(main())


def test_no_rows_are_an_empty_batch_of_the_space_at_once() -> None:
    """A pass that delivers nothing says `experience_count` 0, and a loop asks for that many."""
    space = rr.experience_space(max_tokens=8, extra={"turn": ((), "int32")})

    async def silent(task: Any, models: Any) -> Any:
        return rr.Experience(tokens=[1, 2], prompt_length=1, logprobs=[-0.5], turn=3)

    async def main() -> None:
        assert len(await rr.QueueSink().get(0, timeout=0)) == 0
        async with rr.RolloutCoordinator(config(space=space, operators=("grpo",)), []) as c:
            await c.submit_batch(batch_id=1, tasks=[rr.Task(silent, repeat_times=2)], batch_type="train")
            result = await c.finalize_train_batch(1, timeout=20)
            none = await c.sink.get(result["experience_count"])
            assert len(none) == 0 and none.turn.shape == (0,) and none.padded("tokens").shape[0] == 0
            with pytest.raises(ValueError, match="of at least 0, got -1"):
                await c.sink.get(-1)

    run(main())


def test_the_queue_drops_what_is_too_old_and_counts_it() -> None:
    async def main() -> None:
        sink = rr.QueueSink()
        for version in (1, 2, 3):
            sink.write(
                rr.decode(rr.encode([experience()], group_id=version, run_id=0, model_version=version)),
                str(version),
            )
        assert (await sink.get(2, min_version=2)).model_version.tolist() == [2, 3]
        assert sink.dropped_stale == 1

    run(main())


def test_a_batch_larger_than_the_queue_enters_an_empty_one_and_only_that() -> None:
    sink = rr.QueueSink(2)
    entered = threading.Event()

    def write(commit_id: str) -> None:
        sink.write(batch((1.0, 2.0, 3.0)), commit_id)
        entered.set()

    first = threading.Thread(target=write, args=("a",), daemon=True)
    first.start()
    assert entered.wait(20) and len(sink) == 3
    entered.clear()
    second = threading.Thread(target=write, args=("b",), daemon=True)
    second.start()
    assert len(run(sink.get(2))) == 2 and not sink.holds("b")  # one is left: it waits for that too
    assert len(run(sink.get(1))) == 1
    assert entered.wait(20) and sink.holds("b")
