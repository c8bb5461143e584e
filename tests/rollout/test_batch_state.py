"""The states of a batch: the names of the API page, and the moves between them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import recollect.rollout as rr
from recollect.rollout.batch.state import MOVES, move

S = rr.BatchLifecycleState


def test_states_and_fields_are_those_of_the_page() -> None:
    assert [s.value for s in S] == ["pending", "running", "finalizing", "finalized", "aborted"]
    assert isinstance(S.PENDING, str)
    state = rr.BatchState(1, "train", 3)
    assert list(vars(state))[:7] == [
        "batch_id", "batch_type", "expected_task_count", "statuses", "min_wait_num", "state", "final_result",
    ]  # fmt: skip
    assert isinstance(state.finalize_lock, asyncio.Lock) and state.completed_task_count == 0


@pytest.mark.parametrize("start", list(S))
@pytest.mark.parametrize("to", list(S))
def test_no_move_but_those_of_the_table(start: Any, to: Any) -> None:
    state = rr.BatchState(1, "train", 0, state=start)
    if to in MOVES[start]:
        move(state, to)
        assert state.state is to
    else:
        with pytest.raises(RuntimeError, match="no move"):
            move(state, to)
        assert state.state is start


def test_a_new_state_is_that_of_the_page() -> None:
    state = rr.BatchState(7, "train", 2)
    assert (state.statuses, state.min_wait_num, state.state, state.final_result) == (
        {},
        None,
        S.PENDING,
        None,
    )
