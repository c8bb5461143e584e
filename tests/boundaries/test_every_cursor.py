"""Small rings at every cursor position: no stack, sequence, return or goal crosses what it must not cross.

Sequences that cross the write cursor of a full ring, returns that run on into the next episode and goals from
another episode are the oldest mistakes of replay buffers; here every position is looked at.
"""

from __future__ import annotations

from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.boundaries.checks import Pair, check_all, check_stacks, check_windows

import recollect as rc

EPISODES = ([1], [3], [7], [2, 1, 4], [5, 9])  # lengths, over and over; one is longer than the ring


@pytest.mark.parametrize(
    ("kind", "lengths"), [*(("memory", lengths) for lengths in EPISODES), ("test-list", [2, 1, 4])], ids=str
)
def test_appends_at_every_cursor(kind: str, lengths: list[int], tmp_path: Path) -> None:
    capacity = 6 if kind == "memory" else 3
    pair = Pair(kind, capacity, directory=tmp_path)
    left = cycle(lengths)
    to_go = next(left)
    for _ in range(2 * capacity):
        to_go -= 1
        pair.append(0, ends=to_go == 0)
        to_go = to_go or next(left)
        check_all(pair.buffer, pair.steps)
    pair.close()


@pytest.mark.parametrize("kind", ["memory", "test-list"])
def test_a_hole_anywhere_at_every_cursor(kind: str, tmp_path: Path) -> None:
    """The ring is filled to each cursor in turn, and each of its samples is removed."""
    capacity = 5 if kind == "memory" else 3
    for n in range(1, 2 * capacity + 1):
        for hole in range(min(n, capacity)):
            pair = Pair(kind, capacity, directory=tmp_path)
            for value in range(n):
                pair.append(0, ends=value % 4 == 3)
            pair.remove({hole})
            pair.append(0, ends=False)  # and the ring goes on behind it
            check_all(pair.buffer, pair.steps)
            pair.close()


def test_lanes_never_meet(tmp_path: Path) -> None:
    pair = Pair("memory", 4, n_lanes=3, directory=tmp_path)
    rng = np.random.default_rng(0)
    for i in range(24):
        pair.append(int(rng.integers(3)), ends=bool(rng.random() < 0.3))
        if i % 2:
            check_all(pair.buffer, pair.steps)
    pair.close()


@pytest.mark.parametrize(
    ("kind", "run"), [("shared", 7), ("memmap", 7), ("memmap", None), ("memory", None), ("test-list", None)]
)
def test_every_storage(kind: str, run: int | None, tmp_path: Path) -> None:
    pair = Pair(kind, run, directory=tmp_path)
    for lengths in ([2, 3], [1], [4, 1], [9]):
        pair.extend(0, lengths)
        pair.append(0, ends=False)
        check_all(pair.buffer, pair.steps)
    pair.close()


VIEWS: dict[str, Any] = {
    "as a slice": lambda batch: batch.get_slice(np.arange(len(batch))),
    "live slice": lambda batch: batch.get_slice(...),
    "transformed": lambda batch: rc.TransformedBatch(batch, dict),
    "same backend": lambda batch: rc.ToBackendOrDeviceBatch(batch, "numpy"),
    "combined": lambda batch: rc.CombinedBatch([batch]),
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_through_views(view: Any, tmp_path: Path) -> None:
    pair = Pair("memory", 7, directory=tmp_path)
    for lengths in ([2, 3], [5], [1, 1, 4]):
        pair.extend(0, lengths)
        pair.append(0, ends=False)
        check_all(view(pair.buffer), pair.steps)
    pair.close()


def test_a_slice_ends_runs_where_it_skips(tmp_path: Path) -> None:
    pair = Pair("memory", 20, directory=tmp_path)
    pair.extend(0, [6, 7])
    keep = [0, 1, 2, 4, 5, 6, 7, 11, 12]
    whole = pair.steps
    steps = [whole[i] for i in keep]
    cuts = np.cumsum(np.diff(keep, prepend=0) > 1)
    steps = [type(s)(s.value, int(c), s.segment, s.step, s.terminated) for s, c in zip(steps, cuts)]
    view = pair.buffer.get_slice(keep)
    check_stacks(view, steps, [-2, 0, 1])
    for pad in (False, True):
        check_windows(view, steps, 3, 1, pad)
    pair.close()


def test_members_never_meet(tmp_path: Path) -> None:
    one, two = Pair("memory", 6, directory=tmp_path), Pair("memory", 6, directory=tmp_path)
    two.next = 100
    for pair in (one, two):
        for i in range(8):
            pair.append(0, ends=i % 3 == 0)
    second = [type(s)(s.value, 1, s.segment, s.step, s.terminated) for s in two.steps]
    one.terminated |= two.terminated
    check_all(rc.CombinedBatch([one.buffer, two.buffer]), one.steps + second)
    one.close(), two.close()
