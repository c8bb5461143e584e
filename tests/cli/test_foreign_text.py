r"""Text of models, peers, files and jobs on the terminal: shown as it is, never markup, never obeyed.

`[/INST]` ends no style of ours, so rich raises if it is taken for markup; `\x1b]0;x\x07` renames a terminal's window.
"""

from __future__ import annotations

import io
import unicodedata
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from tests.rollout.make import coordinator, settle
from tests.rollout.make import run as run_loop

import recollect as rc
import recollect.rollout as rr
from recollect.cli import doctor, inspect, run, train
from recollect.cli import serve as serve_command
from recollect.cli.live import JobView
from recollect.cli.machine import Fact
from recollect.cli.rollout import RolloutView
from recollect.collect import Finding
from recollect.observe import Beacon
from recollect.remote import ReplayBufferManager

SAID = "[/INST] [red]:boom:\x1b]0;x\x07\x9b2J\u202eabc"
SHOWN = r"[/INST] [red]:boom:\x1b]0;x\x07\x9b2J\u202eabc"


@pytest.fixture(autouse=True)
def _own_jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RECOLLECT_RUNTIME_DIR", str(tmp_path / "runtime"))
    monkeypatch.setenv("COLUMNS", "800")


def dump(path: Path) -> Path:
    with rc.ReplayBuffer.create("memory", {SAID: ((), "int64")}, capacity=3) as buf:
        buf.extend({SAID: np.arange(3)})
        buf.dumps(path)
    return path


def inspect_leaves(folder: Path, out: Console) -> None:
    run(["inspect", str(dump(folder / "dump"))])


def inspect_path(folder: Path, out: Console) -> None:
    run(["inspect", str(dump(folder / SAID))])


def verify_whole(folder: Path, out: Console) -> None:
    run(["verify", str(dump(folder / SAID))])


def verify_damaged(folder: Path, out: Console) -> None:
    path = dump(folder / SAID)
    for file in (path / "storage").iterdir():
        file.write_bytes(b"")
    run(["verify", str(path)])


def convert_path(folder: Path, out: Console) -> None:
    run(["convert", str(dump(folder / "dump")), str(folder / SAID), "--to", "memory"])


def error_of_a_command(folder: Path, out: Console) -> None:
    run(["inspect", str(folder / SAID)])


def light(kind: str = "train", title: str = "sac") -> Beacon:
    beacon = Beacon(kind, title, charts={SAID: ["reward"], "all": ["*"]}, facts={SAID: SAID})
    beacon.publish({"reward": 1.0, f"{SAID}/{SAID}": 2.0}, {SAID: [{SAID: SAID, "error": SAID}]})
    return beacon


def top_once(folder: Path, out: Console) -> None:
    with light(SAID, SAID):
        run(["top", "--once"])


def top_list(folder: Path, out: Console) -> None:
    with light(SAID, SAID), light():
        run(["top", "--once"])


def top_of_another_process(folder: Path, out: Console) -> None:
    with light(SAID, SAID):
        run(["top", "1"])


def job_lines(folder: Path, out: Console) -> None:
    with light(SAID, SAID) as beacon, JobView(console=out, clock=iter(range(0, 1000, 100)).__next__) as view:
        view.show(beacon.last)


def rollout(folder: Path, out: Console) -> None:
    async def failing(task: Any, models: Any) -> Any:
        raise ValueError(SAID)

    async def main() -> None:
        async with coordinator(max_retries=2, retry_backoff_s=1000.0, drain_s=0.0) as c:
            await c.submit_batch(batch_id=SAID, tasks=[rr.Task(failing)], batch_type="train")
            await settle(c)
            view = RolloutView(SAID, 4, console=out)
            with view:
                view.show(c)
            metrics = {f"rollout/{SAID}/mean": 1.0}
            counts = {f"{kind}_task_count": 0 for kind in ("ok", "partial", "failed", "cancelled")}
            view.finished({"batch_id": SAID, "metrics": metrics, **counts})
            view.report()

    run_loop(main())


def serve(folder: Path, out: Console) -> None:
    rates = {"state": SAID, "requests_per_s": 2.0, "items_per_s": 30.0, "mb_per_s": 0.25}
    seen = {"live": 1, "offered": 1, "baseline": None, "containers_per_s": 9.0, "senders": {0: rates}}
    with ReplayBufferManager({"id": ((), "int64")}, 0, None) as manager:
        view = serve_command.ServeView(manager, SAID, 60.0, False, out)
        with view:
            view.say({}, serve_command.as_text(seen))
    out.print(serve_command.as_table(seen))


def train_report(folder: Path, out: Console) -> None:
    summary = SimpleNamespace(
        recent_mean_reward=None, final_mean_reward=None, status=SAID, completed_iterations=1, total_env_steps=1,
        wall_time_s=1.0, restarts=0, misses=0, dropped=0, last_checkpoint=folder / SAID,
    )  # fmt: skip
    train.report(summary, SAID, folder / SAID, out)


def doctor_report(folder: Path, out: Console) -> None:
    facts = [Fact("warning", SAID, SAID, SAID), Fact("ok", SAID, SAID)]
    doctor.show(facts, facts, SAID, [Finding("error", SAID, SAID, SAID)], out)
    doctor.show(facts, facts, SAID, [], out)


def what_was_left_out(folder: Path, out: Console) -> None:
    report = {
        "path": SAID, "kind": "lerobot", "storage": None, "samples": 1, "files": {"count": 1, "bytes": 1},
        "segments": None, "leaves": [], "left_out": {SAID: SAID},
    }  # fmt: skip
    inspect.show_inspection(report, out)


FACES = (
    inspect_leaves, inspect_path, verify_whole, verify_damaged, convert_path, error_of_a_command, top_once, top_list,
    top_of_another_process, job_lines, rollout, serve, train_report, doctor_report, what_was_left_out,
)  # fmt: skip


@pytest.mark.parametrize("terminal", [False, True])
@pytest.mark.parametrize("face", FACES)
def test_foreign_text_is_shown_and_neither_styles_nor_drives(
    face: Callable[[Path, Console], None], terminal: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = Console(file=io.StringIO(), record=True, width=800, force_terminal=terminal)
    said = ""
    try:
        face(tmp_path, out)
    except SystemExit as end:
        said = str(end.code)
    text = out.export_text() + "".join(capsys.readouterr()) + said
    assert SHOWN in text
    assert "Traceback" not in text
    obeyed = {c for c in text if unicodedata.category(c) in ("Cc", "Cf", "Cs")} - {"\n", "\t"}
    assert not obeyed
