"""recollect bench times every work by everybody in turns, and leaves out a peer that cannot do it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from recollect.cli import run
from recollect.cli.bench import measure
from recollect.cli.peers import PEERS, installed

WORKS = ["add 1", "add 64", "add 4096", "draw 64", "draw 4096"]


def test_bench_reports_ratios_as_json(capsys: Any) -> None:
    run(["bench", "--rows", "5000", "--batch", "64", "--rounds", "1", "--no-peers", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert [work["work"] for work in report["works"]] == WORKS
    for work in report["works"]:
        assert work["times_memcpy"] == pytest.approx(work["us"]["Recollect"] / work["us"]["memcpy"])
        assert work["gb_per_s"] == pytest.approx(work["samples"] * 168 / work["us"]["Recollect"] / 1e3)


def test_bench_shows_a_table_of_peers_and_who_was_left_out(capsys: Any, monkeypatch: Any) -> None:
    seen: list[tuple[str, int]] = []

    def peer(rows: int, blocks: Any, draws: list[int]) -> Any:
        assert rows == 300 and blocks[64]["next_obs"].shape == (64, 17)
        adders = {n: lambda n=n: seen.append(("add", n)) for n in blocks}
        return adders, {n: lambda n=n: seen.append(("draw", n)) for n in draws}

    def broken(rows: int, blocks: Any, draws: list[int]) -> Any:
        raise AttributeError("of another version")

    monkeypatch.setattr("recollect.cli.bench.installed", lambda: {"Swift": peer, "Broken": broken})
    monkeypatch.setattr("recollect.cli.bench._TURN_S", 1e-5)
    run(["bench", "--rows", "300", "--batch", "64", "--rounds", "2"])
    out = capsys.readouterr().out
    assert "Swift over Recollect" in out and "Recollect over memcpy" in out
    assert "Left out: Broken, AttributeError: of another version" in out
    assert {f"{verb} {n}" for verb, n in seen} == set(WORKS)


def test_bench_refuses_what_cannot_be(capsys: Any) -> None:
    with pytest.raises(SystemExit, match="at least 1"):
        run(["bench", "--rows", "0"])
    with pytest.raises(SystemExit):
        run(["bench", "--help"])
    assert "Example: recollect bench" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("name", PEERS)
def test_a_peer_that_is_installed_does_every_work(name: str) -> None:
    if name not in installed():
        pytest.skip("not installed")
    report = measure(5000, 64, 1, {name: installed()[name]}, quiet=True)
    assert not report["left_out"] and all(w["peer_times_recollect"][name] > 0 for w in report["works"])
