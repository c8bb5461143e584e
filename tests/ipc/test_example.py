"""The example of a runner of one's own learns with the budget it has, and leaves nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_runner.py"


@pytest.mark.process
def test_own_runner_learns() -> None:
    done = subprocess.run([sys.executable, str(EXAMPLE)], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    assert "falls per step" in done.stdout and done.stderr == ""
