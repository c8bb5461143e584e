"""TraceRecorder: one file of all processes, readable while it grows, whole after close."""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import threading
from pathlib import Path
from typing import Any

import pytest
from tests.process.actor import Actor

from recollect.errors import ClosedError
from recollect.observe import TraceRecorder
from recollect.observe.phases import Phases


def events(path: Path) -> list[dict[str, Any]]:
    return [e for e in json.loads(path.read_text())["traceEvents"] if e["ph"] != "M"]


def test_what_is_recorded_is_written(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    with TraceRecorder(path) as trace:
        trace.add_slice("a", "cat", 5_000, 7_500, {"k": 1})
        trace.add_counter("c", 6_000, 2.5)
    slice_, counter = events(path)
    assert slice_ == {
        "name": "a", "cat": "cat", "ph": "X", "ts": 5.0, "dur": 2.5, "tid": threading.get_native_id(),
        "args": {"k": 1}, "pid": os.getpid(),
    }  # fmt: skip
    assert (counter["ph"], counter["ts"], counter["args"]) == ("C", 6.0, {"value": 2.5})
    names = [e for e in json.loads(path.read_text())["traceEvents"] if e["ph"] == "M"]
    assert [(e["name"], e["pid"]) for e in names] == [
        ("process_name", os.getpid()),
        ("thread_name", os.getpid()),
    ]
    assert names[1]["args"]["name"] == threading.current_thread().name


def test_it_makes_its_directory_and_writes_what_json_has_no_word_for_as_text(tmp_path: Path) -> None:
    path = tmp_path / "new" / "t.json"
    with TraceRecorder(path) as trace:
        trace.add_slice("a", "cat", 0, 1, {"path": Path("x")})
    assert events(path)[0]["args"] == {"path": "x"}


def test_it_is_written_while_the_run_goes_on(tmp_path: Path) -> None:
    trace = TraceRecorder(tmp_path / "t.json")
    many(trace, 300, "a")
    assert trace.path.read_text().count('"name": "a"') > 200
    trace.close()


def test_a_limit_keeps_the_first_events_of_each_process(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    with TraceRecorder(path, limit=3) as trace:
        trace.name_process("learner")
        for k in range(10):
            trace.add_counter("c", k, k)
        assert pickle.loads(pickle.dumps(trace)).limit == 3
    assert [e["args"]["value"] for e in events(path)] == [0, 1, 2]
    assert f"learner {os.getpid()}" in path.read_text()


@pytest.mark.parametrize("kind", [OSError, KeyError])
def test_a_recorder_that_fails_ends_the_tracing_of_phases(
    kind: type[Exception], caplog: pytest.LogCaptureFixture
) -> None:
    class Broken:
        calls = 0

        def name_process(self, name: str) -> None: ...

        def add_slice(self, *args: object) -> None:
            self.calls += 1
            raise kind("disk full")

    broken = Broken()
    phases = Phases(broken, "collector 3", wait="ring/write_wait")
    phases.add("wait", 1, 2)
    phases.add("wait", 2, 3)
    assert broken.calls == 1 and "tracing ends here" in caplog.text


def test_phases_have_the_names_of_their_process(tmp_path: Path) -> None:
    with TraceRecorder(tmp_path / "t.json") as trace:
        phases = Phases(trace, "collector 3", wait="ring/write_wait")
        phases.add("wait", 1_000, 2_000)
        phases.add("env_step", 2_000, 5_000)
    assert f"collector 3 {os.getpid()}" in (tmp_path / "t.json").read_text()
    assert [(e["name"], e["cat"], e["dur"]) for e in events(tmp_path / "t.json")] == [
        ("ring/write_wait", "collector 3", 1.0),
        ("collector/env_step", "collector 3", 3.0),
    ]


class Event:
    def __init__(self, at: float, passed: bool) -> None:
        self.at, self.passed = at, passed

    def query(self) -> bool:
        return self.passed

    def elapsed_time(self, later: Event) -> float:
        return later.at - self.at


@pytest.mark.parametrize("then", ["add_counter", "add_cuda_pending_span", "flush", "close"])
def test_device_spans_are_written_once_their_events_have_passed(tmp_path: Path, then: str) -> None:
    path = tmp_path / "t.json"
    with TraceRecorder(path) as trace:
        late, never = Event(3.0, False), Event(9.0, False)
        trace.add_cuda_pending_span("gpu/x", Event(1.0, True), late, {"tick": 1})
        trace.add_cuda_pending_span("gpu/y", Event(1.0, True), never, {})
        trace.flush()
        assert "gpu/x" not in path.read_text()
        late.passed = True
        args = {"add_counter": ("c", 0, 0), "add_cuda_pending_span": ("gpu/z", never, never)}
        getattr(trace, then)(*args.get(then, ()))
        late.at = 100.0  # used again: too late to matter
    assert [(e["name"], e["dur"]) for e in events(path) if e["ph"] == "X"] == [("gpu/x", 2000.0)]


def many(trace: TraceRecorder, n: int, label: str) -> None:
    for i in range(n):
        trace.add_slice(label, "c", i, i + 1, {"i": i, "text": "x" * 50})


def spawned(trace: TraceRecorder) -> None:
    many(trace, 600, "spawned")
    trace.close()  # ends nothing: this process did not make it


@pytest.mark.process
def test_processes_do_not_mix_lines(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    trace = TraceRecorder(path)
    many(trace, 3, "before")  # kept by this process: a forked child must not write them too
    actors = [Actor(work=lambda n: (many(trace, n, "forked"), trace.flush())[1]) for _ in range(3)]
    process = multiprocessing.get_context("spawn").Process(target=spawned, args=(trace,))
    process.start()
    for actor in actors:
        actor.tell("work", 600)
    many(trace, 600, "here")
    for actor in actors:
        actor.answer()
        actor.kill()
    process.join(20)
    assert process.exitcode == 0
    process.close()
    trace.close()
    found = events(path)
    count = {k: sum(e["name"] == k for e in found) for k in ("before", "forked", "spawned", "here")}
    assert count == {"before": 3, "forked": 1800, "spawned": 600, "here": 600}
    assert len({e["pid"] for e in found}) == 5


def test_a_file_without_an_end_can_be_opened_and_half_a_line_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    trace = TraceRecorder(path)
    many(trace, 5, "a")
    trace.flush()
    assert len(json.loads(path.read_text().removesuffix(",\n") + "]")) == 7  # five, their process and thread
    with path.open("ab") as file:
        file.write(b'"\xff",\n' + b"[" * 100_000 + b"\n")  # the disk is damaged
        file.write(b'{"name": "ha')  # somebody was killed
    trace.close()
    assert len(events(path)) == 5
    trace.close()
    with pytest.raises(ClosedError):
        trace.add_counter("c", 0, 0)
    with pytest.raises(ClosedError):
        trace.add_cuda_pending_span("gpu/x", Event(1.0, True), Event(2.0, True))


def test_a_forgotten_recorder_writes_what_it_has(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    trace = TraceRecorder(path)
    many(trace, 5, "a")
    del trace
    assert path.read_text().count('"name": "a"') == 5
