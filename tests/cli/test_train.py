"""`recollect train`: help with an example, a live view, plain lines where there is no terminal, JSON on request."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from recollect.cli import run
from recollect.cli.train_view import TrainView, sparkline
from recollect.learners.metrics import RunSummary

VALUES = {
    "reward/mean": -150.5, "episode/length": 200.0, "axis/env_steps_total": 12_000.0, "perf/steps_per_sec": 900.0,
    "perf/iter_ms": 8.25, "loss/critic": 1.5, "time/learner_wait_ms": 0.5, "time/collector_wait_ms": 3.0,
    "replay/size": 12_000.0, "collectors/alive": 2.0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("algorithm", "example", "option"),
    [
        ("sac", "recollect train sac --env Pendulum-v1", "--batch-size"),
        ("appo", "recollect train appo --env CartPole-v1", "--steps-per-env"),
    ],
)
def test_help_has_an_example_and_every_setting(
    algorithm: str,
    example: str,
    option: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "140")
    with pytest.raises(SystemExit) as caught:
        run(["train", algorithm, "--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert example in text and option in text and "--resume" in text and "--json" in text


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["sac", "--env", "NoSuchEnv-v0"], "NoSuchEnv"),
        (["sac", "--env", "CartPole-v1"], "use APPO"),
        (["appo", "--env", "CartPole-v1", "--num-envs", "3", "--collectors", "2"], "num_envs: must divide"),
        (["appo", "--env", "CartPole-v1", "--resume", "nowhere"], "no checkpoint"),
    ],
)
def test_what_is_wrong_is_one_line(args: list[str], said: str, tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as caught:
        run(["train", *args, "--iterations", "2", "--log-dir", str(tmp_path), "--device", "cpu", "--json"])
    assert said in str(caught.value.code) and "Traceback" not in str(caught.value.code)


def test_a_wrong_setting_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run(["train", "sac", "--env", "Pendulum-v1", "--batchsize", "3"])
    assert "batch-size" in capsys.readouterr().err


def view(terminal: bool, **kwargs: Any) -> tuple[TrainView, io.StringIO]:
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=150)
    return TrainView("Pendulum-v1", 100, console=console, **kwargs), out


def test_the_live_view_shows_what_matters() -> None:
    shown, out = view(terminal=True)
    with shown:
        shown.update(10, VALUES)
        shown.update(20, {**VALUES, "reward/mean": -100.0})
    text = out.getvalue()
    for part in ("Pendulum-v1", "-100.0", "12,000", "critic 1.5", "wait 0.5", "alive 2", "20/100"):
        assert part in text


def test_without_a_terminal_there_are_plain_lines() -> None:
    shown, out = view(terminal=False)
    with shown:
        shown.update(10, VALUES)
        shown.update(20, VALUES)  # at once: no second line
    assert out.getvalue().strip() == ("Pendulum-v1 iteration 10: mean return -150.5, 12,000 env steps, 900/s")


def test_quiet_is_quiet() -> None:
    shown, out = view(terminal=True, quiet=True)
    with shown:
        shown.update(10, VALUES)
    assert out.getvalue() == ""


def test_the_report_says_how_to_go_on(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    summary = RunSummary("completed", 100, 1600, -150.0, -120.0, 200.0, "runs/a/model_100", None, 12.0)
    shown, _ = view(terminal=False)
    shown.report(summary, Path("runs/a"))
    text = capsys.readouterr().out
    assert "completed after 100 iterations" in text and "-150.0 (best -120.0)" in text
    assert "--resume runs/a/model_100" in text and "runs/a/metrics.jsonl" in text


def test_sparkline_of_nothing_and_of_one_value() -> None:
    assert sparkline([]) == "" and sparkline([3.0]) == " "
    assert len(sparkline([float(k) for k in range(100)])) == 48


@pytest.mark.process
@pytest.mark.timeout(120)
def test_a_run_ends_with_its_summary_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = "--num-envs 4 --iterations 12 --steps-per-env 8 --hidden 8 --device cpu --json --logger tensorboard".split()
    run(["train", "appo", "--env", "CartPole-v1", "--log-dir", str(tmp_path), *small])
    summary = json.loads(capsys.readouterr().out)
    assert summary["status"] == "completed" and summary["completed_iterations"] == 12
    assert summary["total_env_steps"] > 0 and (tmp_path / "model_12" / "manifest.json").exists()
    assert [p for p in tmp_path.iterdir() if p.name.startswith("events.out.tfevents")]
