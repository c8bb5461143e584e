"""Every benchmark runs: its figures mean nothing here, but it says them all."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
LINES = {  # what it is run with, and what it ends by telling
    "ipc.py": (["--quick"], "all cores busy"),
    "pipeline.py": (["--quick"], "row added to packer awake"),
    "rollout_ring.py": (["--quick"], "torch.multiprocessing.Queue"),
    "remote.py": (["--quick"], "idle manager"),
    "rollout.py": (["--quick"], "memory"),
    "workers.py": (["--quick"], "4 workers with 5 ms of work"),
    "recording.py": (["--quick"], "these figures say only that everything runs"),
    "compare.py": (["--quick", "--env", "none"], "these figures say only that everything runs"),
    "view.py": (["--rows", "2000"], "one plain read"),
    "lerobot_chunks.py": (["--quick"], "batches of 64 frames with 50 actions each"),
    "files.py": (["--rows", "2000", "--repeats", "1"], "epoch / scan, processor time"),
}
# A part of compare.py; tests/cli has it; minutes of training; the others need their framework.
NOT_HERE = {
    "worker.py",
    "roundtrip.py",
    "grpo_curves.py",
    "sb3_buffers.py",
    "sb3_curves.py",
    "torchrl_adapter.py",
}


@pytest.mark.process
@pytest.mark.parametrize("name", LINES)
def test_it_runs(name: str) -> None:
    options, last = LINES[name]
    command = [sys.executable, str(BENCHMARKS / name), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    assert last in done.stdout


def test_every_script_is_run() -> None:
    scripts = {path.name for path in BENCHMARKS.glob("*.py") if "__main__" in path.read_text()}
    assert scripts == NOT_HERE | set(LINES)
