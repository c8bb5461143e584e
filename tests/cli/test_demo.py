"""The demo does what it says: records in processes, survives a kill, samples, measures, saves."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import recollect as rc


def run_demo(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "recollect", *args], capture_output=True, text=True, timeout=50, check=False
    )


@pytest.mark.process
def test_demo_records_kills_samples_and_saves(tmp_path: Path) -> None:
    done = run_demo(
        "demo", "rates", "--json", "--seconds", "1", "--capacity", "20000", "--out", str(tmp_path / "dump")
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    stats = report["stats"]
    doors = ("live", "evicted", "removed", "rejected", "dropped")
    assert stats["offered"] == sum(stats[door] for door in doors) > 256
    assert report["killed_and_replaced"] == 1
    assert report["episodes"] > 1
    assert {rate["work"] for rate in report["rates"]} >= {"append one", "draw 256"}
    with rc.ReplayBuffer.load_from(tmp_path / "dump", verify=True) as saved:
        assert len(saved) == stats["live"]
        flags = saved[:]
        ends = [end - 1 for _, end in saved.get_segments()]
        # An episode ends where the environment said so, or where its recorder was killed or stopped.
        assert (flags["terminated"] | flags["truncated"])[ends].sum() >= len(ends) - 3


def test_demo_help_has_an_example() -> None:
    done = run_demo("demo", "rates", "--help")
    assert done.returncode == 0
    assert "Example: recollect demo rates" in done.stdout


def test_demo_of_an_unknown_environment_is_one_line() -> None:
    done = run_demo("demo", "rates", "--env", "NoSuch-v9")
    assert done.returncode == 1
    assert "NoSuch" in done.stderr
    assert "Traceback" not in done.stderr
