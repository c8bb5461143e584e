"""A job is found and read by others while it runs; however it ends, nothing is left that confuses."""

from __future__ import annotations

import itertools
import math
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from recollect.errors import AttachError
from recollect.observe import Beacon, find_jobs
from recollect.observe import beacon as beacon_module
from recollect.observe.beacon import HISTORY, _Growing
from recollect.observe.jobs import History, Job, JobEntry, Snapshot

pytestmark = pytest.mark.usefixtures("runtime_dir", "leaves_nothing")
JOB = """
import sys
from recollect.observe import Beacon
beacon = Beacon("train", "child")
beacon.publish({"reward/mean": 3.0})
print("lit", flush=True)
sys.stdin.read()
"""


def start(source: str = JOB) -> subprocess.Popen[str]:
    child = subprocess.Popen(
        [sys.executable, "-c", source], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None and child.stdout.readline() == "lit\n"
    return child


def test_a_job_is_found_and_read() -> None:
    with Beacon("train", "Pendulum-v1", charts={"return": ["reward/mean"]}, facts={"envs": 4}) as beacon:
        assert [job.kind for job in find_jobs("serve")] == []
        (job,) = find_jobs()
        with job:
            first = job.snapshot()
            assert first is not None and (first.state, first.figures) == ("starting", {})
            beacon.publish({"reward/mean": -2.5, "loss": math.nan}, {"collectors": [{"lane": 0, "at": None}]})
            assert job.wait_newer(5.0)
            seen = job.snapshot()
            assert seen is not None and seen.state == "running" and seen.pid == os.getpid()
            assert seen.figures == {"reward/mean": -2.5} and seen.tables["collectors"][0]["at"] is None
            assert seen.charts == {"return": ["reward/mean"]} and seen.facts == {"envs": 4}
            assert seen.history.values == {"reward/mean": [-2.5]} and seen.age_s < 60.0
            assert not job.wait_newer(0.0)


@pytest.mark.parametrize(
    ("error", "state"), [(None, "completed"), (KeyboardInterrupt, "interrupted"), (ValueError, "failed")]
)
def test_how_it_ended_is_seen_by_who_looks(
    error: type[BaseException] | None, state: str, runtime_dir: Path
) -> None:
    try:
        with Beacon("train", "x") as beacon:
            beacon.publish({"a": 1.0})
            (job,) = find_jobs()
            if error is not None:
                raise error
    except (KeyboardInterrupt, ValueError):
        pass
    with job:
        seen = job.snapshot()
        assert seen is not None and seen.state == state and seen.figures == {"a": 1.0} and seen.is_over
    assert find_jobs() == [] and list(runtime_dir.iterdir()) == []


def test_a_killed_job_is_lost_and_its_file_goes(runtime_dir: Path) -> None:
    child = start()
    (job,) = find_jobs()
    with child, job:
        assert job.is_alive and job.pid == child.pid
        child.send_signal(signal.SIGKILL)
        child.wait(10.0)
        seen = job.snapshot()
        assert seen is not None and seen.state == "lost" and seen.figures == {"reward/mean": 3.0}
        assert not job.wait_newer(20.0)
        assert len(list(runtime_dir.iterdir())) == 1
        assert find_jobs() == [] and list(runtime_dir.iterdir()) == []


def test_a_job_that_ends_just_after_it_was_read_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    lives = [True]
    monkeypatch.setattr(Job, "is_alive", property(lambda job: lives[0]))
    with Beacon("train", "x") as beacon:
        beacon.publish({"a": 1.0})
        (job,) = find_jobs()
        with job:
            read = job._box.latest

            def read_and_end(out: list[Any]) -> int:
                version = read(out)
                lives[0] = False
                return version

            monkeypatch.setattr(job._box, "latest", read_and_end)
            seen = job.snapshot()
            assert seen is not None and seen.state == "running"
            seen = job.snapshot()
            assert seen is not None and seen.state == "lost"


def test_a_killed_jobs_file_goes_with_the_next_job(runtime_dir: Path) -> None:
    with start() as child:
        child.kill()
        child.wait(10.0)
        with Beacon("train", "next"):
            assert len(list(runtime_dir.iterdir())) == 1


def test_a_job_that_forgets_to_close_is_gone_at_exit(runtime_dir: Path) -> None:
    with start() as child:
        assert len(list(runtime_dir.iterdir())) == 1
        child.communicate("")
    assert list(runtime_dir.iterdir()) == []


def test_what_is_no_living_job_of_here_is_ignored(runtime_dir: Path) -> None:
    with Beacon("train", "x"):
        (path,) = runtime_dir.iterdir()
        mine = msgspec.json.decode(path.read_bytes(), type=JobEntry)
        reused = msgspec.structs.replace(mine, process=mine.process ^ (1 << 40))  # this pid, another start
        foreign = msgspec.structs.replace(mine, pid_space="pid:[1]")
        for name, entry in (("reused", reused), ("foreign", foreign)):
            (runtime_dir / f"{name}.json").write_bytes(msgspec.json.encode(entry))
        (runtime_dir / "junk.json").write_text("{")
        (runtime_dir / "no_text.json").write_bytes(msgspec.json.encode(mine).replace(b'"x"', b'"\xff"'))
        (runtime_dir / "negative.json").write_bytes(
            msgspec.json.encode({**msgspec.to_builtins(mine), "process": -1})
        )
        os.mkfifo(runtime_dir / "pipe.json")
        Beacon("train", "y").close()  # none of these keeps a job from being watched
        found = find_jobs()
        assert [job.title for job in found] == ["x"]
        found[0].close()
        assert {p.stem for p in runtime_dir.iterdir()} == {
            path.stem,
            "foreign",
            "junk",
            "no_text",
            "negative",
            "pipe",
        }


def test_a_job_without_free_descriptors_goes_on_unwatched(caplog: pytest.LogCaptureFixture) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        beacon = Beacon("train", "x")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    beacon.publish({"a": 1.0})
    beacon.close()
    assert "cannot be watched" in caplog.text


@pytest.mark.parametrize("change", [{"figures": 3}, {"title": 7}, {"elapsed_s": float("nan")}])
def test_a_state_of_another_release_is_told(change: dict[str, Any]) -> None:
    with Beacon("train", "x") as beacon:
        (job,) = find_jobs()
        with job:
            state = {**msgspec.to_builtins(beacon.last), **change}
            block = msgspec.msgpack.encode(state)
            parts = [np.array([len(block)], np.uint64).view(np.uint8), np.frombuffer(block, np.uint8)]
            assert beacon._box is not None
            beacon._box.publish_at(parts, [0, 8])
            with pytest.raises(AttachError, match="its state must"):
                job.snapshot()


def test_a_forked_child_says_nothing_for_its_parent(runtime_dir: Path) -> None:
    with Beacon("train", "x") as beacon:
        child = os.fork()
        if child == 0:
            status = 1
            try:
                beacon.publish({"a": 1.0})
                beacon.close()
                beacon._forget()  # as at the exit of a child that exits by itself
                status = 0
            finally:
                os._exit(status)
        assert os.waitpid(child, 0)[1] == 0
        (job,) = find_jobs()
        with job:
            seen = job.snapshot()
            assert seen is not None and seen.figures == {} and seen.state == "starting"


def writable_by_all(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path.mkdir()
    path.chmod(0o777)


def a_link(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = path.with_name("elsewhere")
    target.mkdir(mode=0o700)
    path.symlink_to(target)


def of_another_user(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path.mkdir(mode=0o700)
    me = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: me + 1)


@pytest.mark.parametrize("make", [writable_by_all, a_link, of_another_user])
def test_a_directory_of_others_is_refused_and_costs_nothing(
    make: Any, runtime_dir: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(runtime_dir, monkeypatch)
    with Beacon("train", "x") as beacon:
        beacon.publish({"a": 1.0})
    assert "only this user" in caplog.text
    with pytest.raises(PermissionError):
        find_jobs()


def test_too_much_to_show_keeps_the_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beacon_module, "MAX_NBYTES", 4096)
    with Beacon("train", "x") as beacon:
        beacon.publish({"a": 1.0}, {"rows": [{"text": "x" * 5000}]})
        (job,) = find_jobs()
        with job:
            seen = job.snapshot()
            assert seen is not None and seen.figures == {"a": 1.0} and seen.tables == {}


def test_a_chart_keeps_figures_that_are_only_in_its_history() -> None:
    seen = History([0.0], {"reward/mean": [1.0], "loss": [2.0]})
    charts = {"return": ["reward/*"], "loss": ["loss"], "absent": ["x/*"]}
    state = Snapshot("train", "x", 1, 0.0, 0.0, "running", {"loss": 2.0}, {}, charts, {}, seen)
    assert state.chart_names() == {"return": ["reward/mean"], "loss": ["loss"]}
    assert state.headlines == ["loss"]


def test_history_is_bounded_aligned_and_spans_the_run() -> None:
    history = _Growing(most=16)
    for k in range(1000):
        history.add(float(k), {"a": float(k)} if k < 500 else {"a": float(k), "late": 1.0})
    seen = history.seen()
    assert 8 <= len(seen.at) <= 16 < HISTORY and seen.at[0] == 0.0 and seen.at[-1] > 850.0
    gaps = [late - early for early, late in itertools.pairwise(seen.at)]
    assert max(gaps) <= 3 * min(gaps)  # a curve has the same detail at its start and at its end
    assert seen.values["a"] == seen.at
    assert seen.values["late"] == [None if at < 500 else 1.0 for at in seen.at]
