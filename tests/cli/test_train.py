"""`recollect train`: help with an example, a live view, plain lines where there is no terminal, JSON on request."""

from __future__ import annotations

import io
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from recollect.cli import run
from recollect.cli.train import report
from recollect.errors import CollectorDiedError, DeadlineError, PeerDiedError
from recollect.learners.metrics import RunSummary
from recollect.learners.sac import SACRunner


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
        (["appo", "--env", "CartPole-v1", "--num-envs", "3", "--collectors", "2"], "--num-envs: must divide"),
        (["appo", "--env", "CartPole-v1", "--resume", "nowhere"], "no checkpoint"),
        (["appo", "--env", "CartPole-v1", "--log-dir", __file__], "--log-dir: must be a directory"),
    ],
)
def test_what_is_wrong_is_one_line(args: list[str], said: str, tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as caught:
        usual = ["--iterations", "2", "--log-dir", str(tmp_path), "--device", "cpu", "--json"]
        run(["train", args[0], *usual, *args[1:]])
    assert said in str(caught.value.code) and "Traceback" not in str(caught.value.code)


def test_a_wrong_setting_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run(["train", "sac", "--env", "Pendulum-v1", "--batchsize", "3"])
    assert "batch-size" in capsys.readouterr().err


def test_the_report_says_how_to_go_on() -> None:
    summary = RunSummary("completed", 100, 1600, -150.0, -120.0, 200.0, "runs/a/model_100", None, 72.0,
                         recent_mean_reward=-130.0)  # fmt: skip
    out = io.StringIO()
    report(summary, "sac Pendulum-v1", Path("runs/a"), Console(file=out, width=200))
    text = out.getvalue()
    assert (
        "completed after 100 iterations" in text
        and "last 20 episodes -130.0, of the last 100 -150.0" in text
        and "in 1:12" in text
    )
    assert "Go on: the same command with --resume runs/a/model_100" in text and "runs/a/metrics.jsonl" in text


def test_what_learn_is_told_comes_from_the_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: dict[str, Any] = {}

    def learn(runner: Any, max_iterations: int, save_interval: int, log_dir: Path, **kwargs: Any) -> None:
        told.update(kwargs, max_iterations=max_iterations, save_interval=save_interval, log_dir=log_dir)
        runner.last_run_summary = RunSummary("completed", max_iterations)

    monkeypatch.setattr(SACRunner, "learn", learn)
    options = (
        "--iterations 9 --save-interval 3 --keep 2 --logger tensorboard --trace a.json --resume a/model_4"
    )
    run(
        [
            "train",
            "sac",
            "--env",
            "Pendulum-v1",
            "--device",
            "cpu",
            "--log-dir",
            str(tmp_path),
            *options.split(),
        ]
    )
    del told["on_metrics"]
    assert told == {
        "max_iterations": 9, "save_interval": 3, "log_dir": tmp_path, "keep": 2, "logger": "tensorboard",
        "trace": Path("a.json"), "resume": Path("a/model_4"),
    }  # fmt: skip


def test_ctrl_c_is_reported_with_how_to_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def press(runner: Any, *args: Any, **kwargs: Any) -> None:
        runner.last_run_summary = RunSummary("interrupted", 70, last_checkpoint="runs/a/model_70")
        raise KeyboardInterrupt

    monkeypatch.setattr(SACRunner, "learn", press)
    with pytest.raises(SystemExit) as caught:
        run(["train", "sac", "--env", "Pendulum-v1", "--device", "cpu", "--log-dir", str(tmp_path)])
    out = capsys.readouterr().out
    assert caught.value.code == 130
    assert "interrupted after 70 iterations" in out and "--resume runs/a/model_70" in out


@pytest.mark.parametrize("is_ignored", [False, True], ids=["in front", "in the background"])
def test_sigterm_ends_a_run_as_ctrl_c_does(
    is_ignored: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def terminate(runner: Any, *args: Any, **kwargs: Any) -> None:
        runner.last_run_summary = RunSummary("interrupted", 70, last_checkpoint="runs/a/model_70")
        os.kill(os.getpid(), signal.SIGTERM)
        pytest.fail("it went on")

    before, pressed = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(SACRunner, "learn", terminate)
    if is_ignored:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with pytest.raises(SystemExit) as caught:
            run(["train", "sac", "--env", "Pendulum-v1", "--device", "cpu", "--log-dir", str(tmp_path)])
    finally:
        signal.signal(signal.SIGINT, pressed)
    out = capsys.readouterr().out
    assert caught.value.code == 130 and signal.getsignal(signal.SIGTERM) == before
    assert (
        "interrupted after 70 iterations" in out and "--resume runs/a/model_70\n" in out
    )  # no more are needed


@pytest.mark.parametrize("error", [CollectorDiedError, PeerDiedError, DeadlineError])
def test_what_collectors_end_is_told_with_what_was_saved(
    error: type[Exception],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def die(runner: Any, *args: Any, **kwargs: Any) -> None:
        runner.last_run_summary = RunSummary("error", 70, last_checkpoint="runs/a/model_70")
        raise error("collector 0: gone")

    monkeypatch.setattr(SACRunner, "learn", die)
    with pytest.raises(SystemExit) as caught:
        run(["train", "sac", "--env", "Pendulum-v1", "--device", "cpu", "--log-dir", str(tmp_path)])
    assert "collector 0: gone" in str(caught.value.code)
    assert "saved runs/a/model_70; go on from there with --resume runs/a/model_70" in capsys.readouterr().err


def test_a_resumed_run_with_nothing_left_to_do_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def nothing(runner: Any, *args: Any, **kwargs: Any) -> None:
        runner.last_run_summary = RunSummary("completed", 858)

    monkeypatch.setattr(SACRunner, "learn", nothing)
    options = [
        "--iterations",
        "500",
        "--resume",
        "a/model_858",
        "--device",
        "cpu",
        "--log-dir",
        str(tmp_path),
    ]
    run(["train", "sac", "--env", "Pendulum-v1", *options])
    assert "nothing was left to do: a/model_858 has 858 iterations; pass more" in capsys.readouterr().err


@pytest.mark.process
@pytest.mark.timeout(120)
def test_a_run_ends_with_its_summary_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = "--num-envs 4 --iterations 12 --steps-per-env 8 --hidden 8 --device cpu --json --logger tensorboard".split()
    run(
        [
            "train",
            "appo",
            "--env",
            "CartPole-v1",
            "--log-dir",
            str(tmp_path),
            "--trace",
            str(tmp_path / "t.json"),
            *small,
        ]
    )
    summary = json.loads(capsys.readouterr().out)
    assert summary["status"] == "completed" and summary["completed_iterations"] == 12
    assert summary["trace_path"] == str(tmp_path / "t.json")
    assert summary["total_env_steps"] > 0 and (tmp_path / "model_12" / "manifest.json").exists()
    assert [p for p in tmp_path.iterdir() if p.name.startswith("events.out.tfevents")]
    trace = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert {
        "learner/train",
        "weight_sync/write",
        "weight_sync/read",
        "ring/read_wait",
        "ring/write_wait",
        "collector/env_step",
    } <= {e["name"] for e in trace}
