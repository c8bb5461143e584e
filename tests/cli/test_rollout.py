"""`recollect rollout`: a job from a file, seen while it runs, stopped and gone on with."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import recollect.rollout as rr
from recollect.cli import run
from recollect.cli.rollout import RolloutView, batch_rows
from recollect.errors import SchemaError
from recollect.observe import find_jobs
from recollect.observe.view.catalogue import open_catalogue
from recollect.rollout.job import RolloutJob

MODULE = """
import asyncio, pathlib
import recollect.rollout as rr

@rr.workflow("tests.job.add")
async def add(task, models):
    held = pathlib.Path(task.args.get("hold", "/nonexistent"))
    if held.exists() and task.data["a"] == 3 and not task.is_eval:
        held.with_suffix(".reached").touch()
        await asyncio.get_running_loop().create_future()
    [g] = await models.rollout.generate("?")
    [v] = await models["judge"].chat([{"role": "user", "content": g.text}])
    assert v.text == "fine"
    right = float(g.text == str(task.data["a"]))
    return rr.Result(metrics={"right": right}) if task.is_eval else g.experience(reward=right)
"""
TOML = """
[rollout]
name = "job"
runners = 4
operators = ["grpo"]
workflow_modules = ["tests_job_workflows"]
sink = {{kind = "file", path = "out", format = "jsonl"}}
journal = "run.sqlite"
drain_s = 0.0
cancel_grace_s = 0.2

[[models]]
kind = "scripted"
script = ["0", "1"]

[[auxiliary.judge]]
kind = "scripted"
script = ["fine"]

[train]
tasks = "tasks.jsonl"
workflow = "tests.job.add"
args = {{hold = "{hold}"}}
batch_size = 3
repeat_times = 2
steps = 4
shuffle = false

[eval]
tasks = "tasks.jsonl"
workflow = "tests.job.add"
every = 2
name = "all"
"""


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A job file with its tasks and workflows; remove `hold` and nothing waits."""
    (tmp_path / "tests_job_workflows.py").write_text(MODULE)
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps({"a": a}) + "\n" for a in range(5)))
    (tmp_path / "job.toml").write_text(TOML.format(hold=tmp_path / "hold"))
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path / "job.toml"
    sys.modules.pop("tests_job_workflows", None)
    from recollect.rollout import tasks

    tasks._registered.pop("tests.job.add", None)


def rows(folder: Path) -> list[dict[str, Any]]:
    found = []
    for file in sorted((folder / "out").glob("*.jsonl")):
        found += [json.loads(line) for line in file.read_text().splitlines()]
    return found


def test_help_has_an_example(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "140")
    with pytest.raises(SystemExit):
        run(["rollout", "--help"])
    text = capsys.readouterr().out
    assert "recollect rollout job.toml" in text and "--journal" in text and "[train]" in text


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("runners = 4", "runers = 4", "did you mean 'runners'"),
        ('workflow = "tests.job.add"', 'workflow = "tests.job.ad"', "train.workflow: must be registered"),
        ('[eval]\ntasks = "tasks.jsonl"\nworkflow = "tests.job.add"',
         '[eval]\ntasks = "tasks.jsonl"\nworkflow = "no_such:thing"', "eval.workflow: must be registered"),
        ("batch_size = 3", "batch_sizes = 3", "train"),
        ("batch_size = 3", "batch_size = 0", "train.batch_size"),
        ('[train]\ntasks = "tasks.jsonl"', '[train]\ntasks = "no"', "train.tasks"),
        ('sink = {kind = "file", path = "out", format = "jsonl"}', "", "has no reader"),
        ('"tests_job_workflows"', '"no_such_module_at_all"', "no_such_module_at_all"),
        ('kind = "scripted"\nscript = ["0"', 'kind = "opanai"\nscript = ["0"', "opanai"),
        ('kind = "scripted"\nscript = ["0", "1"]',
         'kind = "openai"\nbase_url = "http://127.0.0.1:9/v1"\nmodel = "m"\napi_key_env = "TESTS_IS_NOT_SET"',
         "must name a variable of the environment, got 'TESTS_IS_NOT_SET', which is not set"),
        ("runners = 4", "runners = \udcff", "must be TOML"),
        ("runners = 4", "runners = " + "[" * 2000, "must be TOML"),
        ("[rollout]", "rollout = 3\n[other]", "rollout"),
        ('journal = "run.sqlite"', "journal = 3", "journal"),
        ('path = "out"', "path = 3", "sink"),
        ('[train]\ntasks = "tasks.jsonl"', '[train]\ntasks = "/dev/zero"', "train.tasks"),
        ('"tests_job_workflows"', '""', "workflow_modules"),
        ('"tests_job_workflows"', '".x"', "workflow_modules"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_one_line(job: Path, old: str, new: str, said: str) -> None:
    text = job.read_text()
    assert old in text
    job.write_text(text.replace(old, new, 1), errors="surrogateescape")
    with pytest.raises(SystemExit) as caught:
        run(["rollout", str(job)])
    assert said in str(caught.value.code) and "Traceback" not in str(caught.value.code)
    assert not (job.parent / "run.sqlite").exists()  # nothing was begun


def test_a_job_runs_to_its_end_and_says_what_it_did(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(["rollout", str(job), "--json"])
    results = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [r["batch_id"] for r in results] == ["0/all", 0, 1, "2/all", 2, 3, "4/all"]
    assert all(r["failed_task_count"] == 0 for r in results)
    assert sum(r["experience_count"] for r in results) == 24 == len(rows(job.parent))
    run(["rollout", str(job), "--json"])  # all of it is done
    out, error = capsys.readouterr()
    assert out == "" and "nothing was left to do" in error and "has all 4 steps; pass more --steps" in error
    run(["rollout", str(job), "--json", "--steps", "5"])
    assert [json.loads(x)["batch_id"] for x in capsys.readouterr().out.splitlines()] == [4, "5/all"]


def test_the_tasks_of_a_step_depend_on_seed_and_step_alone(job: Path) -> None:
    made = RolloutJob.from_toml(job)
    assert [t.data["a"] for t in made.train_tasks(1)] == [3, 4, 0]
    made.spec.train.shuffle = True
    epoch = [t.data["a"] for step in range(5) for t in made.train_tasks(step)]
    assert sorted(epoch[:5]) == sorted(epoch[5:10]) == [0, 1, 2, 3, 4] and epoch[:5] != epoch[5:10]
    assert [t.data for t in RolloutJob.from_toml(job, seed=0).train_tasks(0)] == [{"a": a} for a in range(3)]


def test_the_view_shows_batches_doors_and_why(job: Path) -> None:
    (job.parent / "hold").touch()
    console = Console(force_terminal=True, width=150, record=True)

    async def main() -> None:
        made = RolloutJob.from_toml(job)
        view = RolloutView("job", 4, console=console)
        seen: list[Any] = []

        async def watch(c: Any) -> None:
            while not (job.parent / "hold.reached").exists():
                await asyncio.sleep(0)
            seen.append(batch_rows(c))
            with view:
                view.show(c)
                [beacon] = [b for b in find_jobs("rollout") if b.title == "job"]
                seen.append(beacon.snapshot())
                beacon.close()
            working.cancel()

        working = asyncio.ensure_future(made.run(watch, view.finished))
        with pytest.raises(asyncio.CancelledError):
            await working
        [held] = [row for row in seen[0] if row["batch"] == "1"]
        assert (held["state"], held["of"]) == ("running", 3)
        assert "task 0 run" in held["why"] and "attempt 1 of 3" in held["why"]
        assert seen[1].figures["runs/submitted"] >= 6 and seen[1].tables["batches"][0]["why"]

    asyncio.run(asyncio.wait_for(main(), 200))
    text = console.export_text()
    assert "why it is not done" in text and "submitted" in text and "4 local" in text


def test_what_it_wrote_is_inspected_and_viewed_in_words(
    job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(["rollout", str(job)])
    out = str(job.parent / "out")
    assert f"look at it with recollect view {out}" in capsys.readouterr().out
    run(["inspect", out, "--json"])
    report = json.loads(capsys.readouterr().out)
    assert (report["kind"], report["samples"], report["segments"]["count"]) == ("rollout", 24, 24)
    assert report["first_texts"]["prompt"] == "?" and report["first_texts"]["answer"] in ("0", "1")
    run(["inspect", out])
    assert "prompt of the first sample: ?" in capsys.readouterr().out
    with open_catalogue(out) as catalogue:
        catalogue.list.finish()
        [row, *_] = catalogue.episodes()["rows"]
        assert row["length"] == 1 and row["return"] in (0.0, 1.0)
        shown = catalogue.step(1, 0)
        assert shown["prompt"] == "?" and shown["tokens"] == f"[63, {ord(shown['answer'])}]"


@pytest.mark.process
def test_ctrl_c_ends_cleanly_and_the_same_command_goes_on(job: Path) -> None:
    (job.parent / "hold").touch()
    command = [sys.executable, "-c", "from recollect.cli import run; run()", "rollout", str(job), "--json"]
    first = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=dict(os.environ)
    )
    assert first.stdout is not None
    lines = [first.stdout.readline() for _ in range(2)]  # the first eval and step 0; step 1 holds
    first.send_signal(signal.SIGINT)
    out, error = first.communicate(timeout=200)
    assert first.returncode == 130 and "go on" in error and "Traceback" not in error
    assert [json.loads(x)["batch_id"] for x in lines + out.splitlines()] == ["0/all", 0]
    (job.parent / "hold").unlink()
    second = subprocess.run(command, capture_output=True, text=True, timeout=200, check=True)
    assert [json.loads(x)["batch_id"] for x in second.stdout.splitlines()] == [1, "2/all", 2, 3, "4/all"]
    uids = [(row["group_id"], row["run_id"], row["step"]) for row in rows(job.parent)]
    assert len(uids) == 24 == len(set(uids))
    third = subprocess.run(command, capture_output=True, text=True, timeout=200, check=True)
    assert third.stdout == "" and "nothing was left to do" in third.stderr and "--steps" in third.stderr


@pytest.mark.parametrize("n_told", range(1, 8))
def test_a_job_stopped_after_any_result_tells_the_others_once(job: Path, n_told: int) -> None:
    """Steps 0 to 3 and, every two steps, an eval: 7 results, of which some are told before the restart."""
    told: list[Any] = []

    async def watch(c: Any) -> None:
        await asyncio.get_running_loop().create_future()

    def tell(result: dict[str, Any]) -> None:
        told.append(result["batch_id"])
        if len(told) == n_told:
            raise InterruptedError

    for _ in range(2):
        with contextlib.suppress(InterruptedError):
            asyncio.run(RolloutJob.from_toml(job).run(watch, tell))
    assert told == ["0/all", 0, 1, "2/all", 2, 3, "4/all"]


def test_a_model_comes_from_a_factory(job: Path) -> None:
    factory = 'kind = "factory"\nfactory = "recollect.rollout:ScriptedModel"\noptions = {script = ["3"]}'
    text = job.read_text().replace('kind = "scripted"\nscript = ["0", "1"]', factory)
    job.write_text(text)
    results: list[Any] = []

    async def watch(c: rr.RolloutCoordinator) -> None:
        await asyncio.get_running_loop().create_future()

    asyncio.run(RolloutJob.from_toml(job).run(watch, results.append))
    assert results[2]["metrics"]["rollout/reward/mean"] == pytest.approx(1 / 3)
    job.write_text(text.replace("ScriptedModel", "NoModel"))
    with pytest.raises(SchemaError, match="factory"):
        asyncio.run(RolloutJob.from_toml(job).run(watch, results.append))
