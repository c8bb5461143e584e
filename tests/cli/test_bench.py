"""recollect bench times every work beside memcpy, in turns."""

from __future__ import annotations

import json
from typing import Any

import pytest

from recollect.cli import run

WORKS = ["add 1", "add 64", "add 4096", "draw 64", "draw 4096"]


def test_bench_reports_ratios_as_json(capsys: Any) -> None:
    run(["bench", "--rows", "5000", "--batch", "64", "--rounds", "1", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert [work["work"] for work in report["works"]] == WORKS
    for work in report["works"]:
        assert work["times_memcpy"] == pytest.approx(work["us"]["Recollect"] / work["us"]["memcpy"])
        assert work["gb_per_s"] == pytest.approx(work["samples"] * 168 / work["us"]["Recollect"] / 1e3)


def test_bench_shows_both_as_a_table(capsys: Any) -> None:
    run(["bench", "--rows", "300", "--batch", "64", "--rounds", "1"])
    out = capsys.readouterr().out
    assert "Recollect over memcpy" in out and "memcpy, µs a call" in out
    assert all(work in out for work in WORKS)


def test_bench_refuses_what_cannot_be(capsys: Any) -> None:
    with pytest.raises(SystemExit, match="at least 1"):
        run(["bench", "--rows", "0"])
    with pytest.raises(SystemExit):
        run(["bench", "--help"])
    assert "Example: recollect bench" in " ".join(capsys.readouterr().out.split())
