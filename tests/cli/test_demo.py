"""The demos do what they say, and leave what they name."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import recollect as rc
from recollect.cli import _chosen, run
from recollect.cli.demo import report as demo_report
from recollect.learners.checkpoint import load_checkpoint


def run_demo(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "recollect", *args],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )


def test_demo_help_has_an_example() -> None:
    done = run_demo("demo", "sac", "--help")
    assert done.returncode == 0
    assert "Example: recollect demo --seconds" in done.stdout


def test_demo_of_an_unknown_environment_is_one_line() -> None:
    done = run_demo("demo", "--env", "NoSuch-v9")
    assert done.returncode == 1
    assert "NoSuch" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.process
@pytest.mark.timeout(180)
def test_the_training_demo_leaves_all_that_it_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[tuple[Any, ...]] = []
    monkeypatch.setenv("COLUMNS", "300")
    small = "--iterations 12 --num-envs 20 --collectors 1 --replay-rows 4000 --no-kill".split()
    monkeypatch.setattr(demo_report, "draw", lambda *args: drawn.append(args))  # it keeps fonts open
    run(["demo", *small, "--out", str(tmp_path)])
    out, err = capsys.readouterr()
    assert "iteration 10 of 12" in err and "\x1b" not in err  # no terminal: plain lines
    assert "completed after 12 iterations" in out
    assert drawn[0][-1] == tmp_path / "demo.png" and len(drawn[0][0]) == 2
    names = {event["name"] for event in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]}
    assert {"learner/train", "replay_pipeline/pack", "collector/env_step", "weight_sync/read"} <= names
    replay = next(word for word in out.split() if word.endswith("/replay"))
    with rc.ReplayBuffer.load_from(replay, verify=True) as saved:
        assert len(saved) > 1000
    check_go_on(next(text for text in out.splitlines() if text.startswith("Go on: ")), tmp_path)


def check_go_on(said: str, path: Path) -> None:
    """The command takes the checkpoint: it makes the same learner."""
    command = said.removeprefix("Go on: recollect ").removesuffix("   (and more --iterations)")
    train = _chosen(shlex.split(command)).algorithm
    assert train.resume == path / "model_12"
    state = load_checkpoint(train.resume)
    with train.runner() as runner:
        runner._make(runner._look_at_env())
        runner._restore(state, train.resume)
        assert runner._replay.size > 1000 and runner.num_envs == 20


def test_the_plot_is_drawn_of_whatever_there_is(tmp_path: Path) -> None:
    values = {"reward/recent": -900.0, "time/learner_train_ms": 6.0, "time/collector_env_step_ms": 1.0}
    for name, points in (
        ("none", []),
        ("one", [(1.0, {})]),
        ("some", [(float(k), values) for k in range(1, 9)]),
    ):
        demo_report.draw(points, [3.0], "SAC on Pendulum-v1", tmp_path / f"{name}.png")
        assert (tmp_path / f"{name}.png").read_bytes()[:4] == b"\x89PNG"


def test_too_little_memory_for_the_replay_is_said_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as caught:
        run(["demo", "--replay-rows", str(10**12), "--out", str(tmp_path)])
    assert "SACRunner" in str(caught.value.code) and "replay_buffer" in str(caught.value.code)
