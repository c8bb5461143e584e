"""A job's state in the terminal: what matters is there, in place on a terminal, as plain lines without one."""

from __future__ import annotations

import io
from time import time
from typing import Any

import msgspec
import pytest
from rich.console import Console

from recollect.cli.live import JobView, line, render, sparkline
from recollect.observe.jobs import History, Snapshot

STATE = Snapshot(
    "train", "sac Pendulum-v1", 4711, time(), 83.0, "running",
    figures={"iteration": 20, "reward/mean": -150.5, "episode/length": 200.0, "time/learner_wait_ms": 0.5,
             "time/learner_train_ms": 8.25, "time/learner_batch_ms": 0.125, "collectors/restarts": 2},
    tables={"collectors": [{"lane": 0, "pid": 4712, "state": "stepping"}, {"lane": 1, "pid": None, "state": "dead"}]},
    charts={"mean return": ["reward/mean"], "learner, ms": ["time/learner_*"], "absent": ["nothing/*"]},
    facts={"iterations": 100}, history=History([0.0, 1.0, 2.0], {"reward/mean": [None, -200.0, -150.5]}),
)  # fmt: skip


def shown(state: Snapshot, width: int = 150) -> str:
    out = io.StringIO()
    Console(file=out, width=width).print(render(state))
    return out.getvalue()


def test_a_state_has_its_charts_tables_and_progress() -> None:
    text = shown(STATE)
    for part in ("sac Pendulum-v1", "running", "1:23", "20 of 100", "-150.5  ▁█", "wait 0.5  train 8.25  batch 0.125",
                 "length 200", "4712", "dead", "–"):  # fmt: skip
        assert part in text, part
    assert "absent" not in text and "iteration " not in text


def test_a_silent_job_is_told_of_and_an_ended_one_is_not() -> None:
    silent = msgspec.structs.replace(STATE, started=time() - 200.0)
    fresh = msgspec.structs.replace(STATE, started=time() - STATE.elapsed_s)
    assert "nothing new for 1" in shown(silent) and "nothing new" not in shown(fresh)
    assert "nothing new" not in shown(msgspec.structs.replace(silent, state="completed"))


def view(terminal: bool, **kwargs: Any) -> tuple[JobView, io.StringIO]:
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=150)
    return JobView(console=console, **kwargs), out


def test_on_a_terminal_it_is_shown_in_place() -> None:
    shown, out = view(terminal=True)
    with shown:
        shown.show(STATE)
    assert "-150.5" in out.getvalue()


def test_without_a_terminal_there_are_plain_lines_now_and_then() -> None:
    now = [100.0]
    shown, out = view(terminal=False, clock=lambda: now[0])
    with shown:
        for _ in range(3):
            shown.show(STATE)
            now[0] += 3.0
    wanted = "1:23 sac Pendulum-v1 iteration 20 of 100: mean return -150.5, restarts 2"
    assert [text.strip() for text in out.getvalue().splitlines()] == [wanted, wanted]
    assert line(msgspec.structs.replace(STATE, facts={}, figures={})).endswith("running: no figures yet")


def test_a_line_tells_of_restarts_once_and_only_if_there_were_any() -> None:
    charts = {"mean return": ["reward/mean"], "restarts": ["collectors/restarts"]}
    state = msgspec.structs.replace(STATE, charts=charts)
    assert line(state).endswith("mean return -150.5, restarts 2")
    none = msgspec.structs.replace(state, figures={**STATE.figures, "collectors/restarts": 0})
    assert line(none).endswith("mean return -150.5")


def test_quiet_is_quiet() -> None:
    shown, out = view(terminal=True, quiet=True)
    with shown:
        shown.show(STATE)
    assert out.getvalue() == ""


@pytest.mark.parametrize(
    ("values", "bars"),
    [([], ""), ([3.0], "▁"), ([None, 1.0, None, 2.0], "▁█"), ([float(k // 10) for k in range(400)], None)],
)
def test_sparkline(values: list[float | None], bars: str | None) -> None:
    got = sparkline(values)
    assert got == bars if bars is not None else (len(got) == 32 and got[0] == "▁" and got[-1] == "█")
