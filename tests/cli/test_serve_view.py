"""What `recollect serve` shows of a manager."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from rich.console import Console

from recollect.cli.serve import LEFT_SHOWN, as_table, as_text, figures, rates, shown
from recollect.remote import ReplayBufferManager


def plain(states: dict[int, str], baseline: float | None = 1.5) -> dict[str, Any]:
    rates = {"requests_per_s": 2.0, "items_per_s": 30.0, "mb_per_s": 0.25}
    senders = {rank: {"state": state, **rates} for rank, state in states.items()}
    return {"live": 1234, "offered": 5678, "baseline": baseline, "containers_per_s": 9.0, "senders": senders}


def printed(table: Any) -> str:
    console = Console(width=120)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


def test_who_is_connected_is_shown_and_the_last_who_left() -> None:
    states = dict.fromkeys(range(20), "left") | {3: "present", 50: "present", 60: "expected"}
    seen = shown(plain(states))
    assert [rank for rank in seen if states[rank] == "left"] == list(range(20 - LEFT_SHOWN, 20))
    assert {rank for rank in seen if states[rank] != "left"} == {3, 50, 60}
    n_hidden = 19 - LEFT_SHOWN
    for text in (as_text(plain(states)), printed(as_table(plain(states)))):
        assert f"; {n_hidden} more have left" in text
    assert "rank 50: present, 2 requests/s, 30 items/s, 0.25 MB/s" in as_text(plain(states))
    assert "rank 0:" not in as_text(plain(states))


def test_while_few_have_left_all_are_shown() -> None:
    states = dict.fromkeys(range(LEFT_SHOWN), "left")
    assert len(shown(plain(states))) == LEFT_SHOWN
    assert "more have left" not in as_text(plain(states))


def test_an_empty_manager_says_that_nobody_is_connected() -> None:
    assert as_text(plain({}, None)) == (
        "1,234 items held, 5,678 offered, 9 containers/s, baseline none; nobody is connected"
    )


def test_figures_count_everybody() -> None:
    states = dict.fromkeys(range(20), "left") | {21: "present", 22: "present"}
    found = figures(plain(states))
    assert (found["workers/present"], found["rate/items"], found["baseline"]) == (2.0, 660.0, 1.5)
    assert "baseline" not in figures(plain(states, None))


def test_rates_add_up_though_senders_are_forgotten_between_two_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("recollect.remote.config.MOST_CLIENTS", 3)
    with ReplayBufferManager({"id": ((), "int64")}, 0, None) as m:
        looks = []
        for rank in range(9):
            m.add({"id": np.arange(10)}, sender_rank=rank)
            if rank in (3, 8):
                looks.append(m.stats())
    seen = rates(*looks, 1.0)
    assert figures(seen)["rate/items"] == 50.0 and len(seen["senders"]) == 4
