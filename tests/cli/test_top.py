"""`recollect top`: finds the job of another process, shows it once or until it ends, and says what else there is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from recollect.cli import run
from recollect.cli.top import states
from recollect.observe import Beacon, find_jobs

JOB = """
import sys
from recollect.observe import Beacon
with Beacon("train", "sac Pendulum-v1", charts={"mean return": ["reward/mean"]}, facts={"iterations": 100}) as beacon:
    beacon.publish({"iteration": 20, "reward/mean": -150.5}, {"collectors": [{"lane": 0, "state": "stepping"}]})
    print("lit", flush=True)
    sys.stdin.readline()
    beacon.publish({"iteration": 100, "reward/mean": -120.0})
"""


@pytest.fixture(autouse=True)
def _own_jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RECOLLECT_RUNTIME_DIR", str(tmp_path / "runtime"))
    monkeypatch.setenv("COLUMNS", "120")


@pytest.fixture
def job() -> Iterator[subprocess.Popen[str]]:
    child = subprocess.Popen(
        [sys.executable, "-c", JOB], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with child:
        assert child.stdout is not None and child.stdout.readline() == "lit\n"
        yield child
        child.kill()


def test_it_shows_the_only_job_of_another_process(
    job: subprocess.Popen[str], capsys: pytest.CaptureFixture[str]
) -> None:
    run(["top", "--once"])
    text = capsys.readouterr().out
    for part in ("sac Pendulum-v1", "running", f"pid {job.pid}", "20 of 100", "-150.5", "stepping"):
        assert part in text, part


def test_it_follows_a_job_to_its_end(job: subprocess.Popen[str]) -> None:
    (watched,) = find_jobs()
    with watched:
        seen = states(watched)
        assert next(seen).figures["reward/mean"] == -150.5
        assert job.stdin is not None
        job.stdin.write("\n")
        job.stdin.flush()
        *_, last = seen
        assert last.state == "completed" and last.figures["reward/mean"] == -120.0


def test_a_killed_job_ends_the_watching(
    job: subprocess.Popen[str], capsys: pytest.CaptureFixture[str]
) -> None:
    watcher = subprocess.Popen(
        [sys.executable, "-m", "recollect", "top", "--json"], stdout=subprocess.PIPE, text=True
    )
    with watcher:
        assert watcher.stdout is not None
        assert json.loads(watcher.stdout.readline())["state"] == "running"
        job.kill()
        job.wait(20)
        states = [json.loads(line)["state"] for line in watcher.stdout]
        assert states[-1] == "lost" and watcher.wait(20) == 0


def test_several_jobs_are_listed(job: subprocess.Popen[str], capsys: pytest.CaptureFixture[str]) -> None:
    with Beacon("serve", "replay at 127.0.0.1:7077"), pytest.raises(SystemExit, match="2 jobs are running"):
        run(["top"])
    out = capsys.readouterr().out.splitlines()
    assert str(job.pid) in out[0] and "serve" in out[1] and str(os.getpid()) in out[1]


def test_one_of_several_jobs_is_chosen_by_its_process(
    job: subprocess.Popen[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with Beacon("serve", "replay at 127.0.0.1:7077"):
        run(["top", str(job.pid), "--once"])
        text = capsys.readouterr().out
        assert f"pid {job.pid}" in text and "replay at" not in text
        run(["top", "--json", "--once"])
        both = [json.loads(text) for text in capsys.readouterr().out.splitlines()]
        assert [state["kind"] for state in both] == ["train", "serve"]


@pytest.mark.parametrize(
    ("args", "said"), [([], "no job is running"), (["1"], "process 1 has no job that can be watched")]
)
def test_nothing_to_watch_is_one_line(args: list[str], said: str) -> None:
    with pytest.raises(SystemExit, match=said):
        run(["top", *args])
