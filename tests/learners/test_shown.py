"""What others see of a run: who it is, where its files go as the user put it, and each collector."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.learners.test_sac import runner, without_collectors

from recollect.ipc.async_runner import CollectorStats, RunnerStats
from recollect.learners.shown import collector_table, light
from recollect.observe import find_jobs


def test_the_facts_of_a_run_name_no_directory_but_the_one_that_was_given() -> None:
    with runner(num_collectors=2) as it, light(it, 10, Path("runs/a")) as beacon:
        assert beacon.last is not None and beacon.last.title == "sac reach"
        assert beacon.last.facts == {
            "algorithm": "sac", "environment": "reach", "environments": 4, "collectors": 2, "device": "cpu",
            "iterations": 10, "log_dir": "runs/a",
        }  # fmt: skip


def test_a_run_is_found_while_it_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RECOLLECT_RUNTIME_DIR", str(tmp_path / "runtime"))
    seen: list[Any] = []

    def look(iteration: int, values: Any) -> None:
        (job,) = find_jobs("train")
        with job:
            found = job.snapshot()
            assert found is not None
            seen.append((found.title, found.figures["iteration"]))

    with without_collectors(runner()) as it:
        it.learn(20, 0, tmp_path, on_metrics=look)
    assert seen == [("sac reach", 10), ("sac reach", 20)] and find_jobs() == []


def test_a_dead_collector_is_shown_as_dead() -> None:
    lanes = (
        CollectorStats(0, 4711, 0, 0, "env_step", 0.5, {"env_steps": 64}),
        CollectorStats(1, None, 2, 3, "env_step", None, {}),
    )
    rows = collector_table(RunnerStats(1, 2, 3, {}, lanes))
    assert [(row["pid"], row["state"], row["env steps"], row["restarts"]) for row in rows] == [
        (4711, "env_step", 64, 0),
        (None, "dead", 0, 2),
    ]
