"""Two replay buffers, two sets of words: the table of the page says which is which, and it is right."""

from __future__ import annotations

import inspect
from pathlib import Path

import gymnasium as gym
import numpy as np

import recollect as rc

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "share-between-processes.md"


def rows() -> dict[str, tuple[str, str]]:
    """The table "which when": its first column, and what each of the two buffers has there."""
    lines = PAGE.read_text().split("| | `rc.ReplayBuffer` | `rc.ipc.ReplayBuffer` |\n")[1].split("\n\n")[0]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines.splitlines()[1:]]
    return {first: (left, right) for first, left, right in cells}


def test_the_table_names_the_words_that_both_buffers_have() -> None:
    ours = rc.transition_space(
        gym.make("CartPole-v1"), ["action", "reward", "terminated", "truncated", "done"]
    )
    theirs = inspect.signature(rc.ipc.ReplayBuffer.add).parameters
    table = rows()
    for row, left, right in (
        ("the action, the reward", ["action", "reward"], ["actions", "rewards"]),
        ("the episode ended, by a terminal state", ["terminated"], ["dones", "truncated"]),
        ("the episode ended, by a limit", ["truncated"], ["truncated", "dones"]),
        ("the episode ended, either way", ["done"], ["dones"]),
    ):
        assert all(f"`{word}`" in table[row][0] and word in ours.spaces for word in left), row
        assert all(f"`{word}`" in table[row][1] and word in theirs for word in right), row


def test_the_table_says_which_to_take_and_how_each_is_used() -> None:
    table = rows()
    for row in ("take it", "a row", "lives in", "write", "draw", "episodes"):
        assert all(table[row]), row
    assert hasattr(rc.ReplayBuffer, "append") and hasattr(rc.ipc.ReplayBuffer, "add")


def test_the_rule_of_the_page_cuts_both_values_alike() -> None:
    """`terminated` on one side is `dones * (1 - truncated)` on the other."""
    assert "`dones * (1 - truncated)`" in PAGE.read_text()
    terminated, truncated = np.array([0, 1, 0], bool), np.array([0, 0, 1], bool)
    obs = np.arange(3, dtype="float32")[:, None]
    buf = rc.ipc.ReplayBuffer(8, obs_dim=1, action_dim=1, device="numpy", seed=0)
    buf.add(obs, obs, np.ones(3), obs, terminated | truncated, truncated)
    batch = buf.sample(64)
    cut = batch["dones"] * (1 - batch["truncated"])
    assert (cut.ravel().astype(bool) == terminated[batch["obs"].ravel().astype(int)]).all()
    buf.cleanup()
