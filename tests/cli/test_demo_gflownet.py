"""`recollect demo gflownet` runs the example and prints its summary."""

from __future__ import annotations

import pytest

from recollect.cli import run


@pytest.mark.process
def test_it_runs_the_example(capfd: pytest.CaptureFixture[str]) -> None:
    run(["demo", "gflownet", "--carrier", "tcp", "--updates", "40"])
    said = capfd.readouterr().out
    assert said.count("L1 distance 1.40 before") == 2
    assert "manager 2: 1280 items offered" in said
