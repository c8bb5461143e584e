"""Every interleaving of the protocol of Latest, by a model; and each of its steps is needed."""

from __future__ import annotations

import pytest
from tests.memory.latest_model import BREAKAGES, Model, Process, Violation, walk


def writer(n: int) -> Process:
    return Process("writer", "pick", n)


def reader(role: str, n: int = 1) -> Process:
    return Process(role, "begin", n)


CASES = {
    "plain reader": ([writer(4), reader("plain", 2)], 0),
    "holder": ([writer(4), reader("holder", 1)], 0),
    "holder and thief": ([writer(3), reader("holder"), reader("thief")], 0),
    "writer killed": ([writer(3), reader("plain")], 1),
    "holder or writer killed": ([writer(3), reader("holder")], 1),
    "holder killed, thief after it": ([writer(2), reader("holder"), reader("thief")], 1),
}


@pytest.mark.parametrize("case", CASES)
def test_every_interleaving_is_whole(case: str) -> None:
    processes, kills = CASES[case]
    assert walk(Model(), processes, kills) > 100


@pytest.mark.parametrize("broken", BREAKAGES)
def test_every_step_is_needed(broken: str) -> None:
    with pytest.raises(Violation):
        for processes, kills in CASES.values():
            walk(Model(broken), processes, kills)
