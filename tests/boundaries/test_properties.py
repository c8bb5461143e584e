"""Rings of any capacity, lanes, episode lengths and holes against the reference."""

from __future__ import annotations

import tempfile
from typing import Any

import hypothesis.strategies as st
from hypothesis import given
from tests.boundaries.checks import Pair, check_goals, check_n_step, check_stacks, check_windows

LANES = st.integers(0, 2)
WRITES = st.one_of(
    st.tuples(st.just("append"), LANES, st.booleans()),
    st.tuples(st.just("extend"), LANES, st.lists(st.integers(1, 6), min_size=1, max_size=3)),
    st.tuples(st.just("remove"), st.sets(st.integers(0, 30), max_size=3), st.none()),
)


def write(pair: Pair, op: tuple[Any, ...]) -> None:
    verb, a, b = op
    if verb == "remove":
        n = len(pair.model.all())
        pair.remove({i % n for i in a} if n else set())
    else:
        getattr(pair, verb)(a % len(pair.lanes), b)


@given(
    kind=st.sampled_from(["memory", "test-list"]),
    run=st.one_of(st.none(), st.integers(1, 8)),
    n_lanes=st.integers(1, 3),
    script=st.lists(WRITES, max_size=12),
    offsets=st.sets(st.integers(-5, 5), max_size=4),
    length=st.integers(1, 6),
    burn_in=st.integers(0, 3),
    n=st.integers(1, 6),
    gamma=st.sampled_from([0.0, 0.5, 1.0]),
    strategy=st.sampled_from(["future", "final", "episode"]),
)
def test_against_the_reference(
    kind: str, run: int | None, n_lanes: int, script: list[Any], offsets: set[int], length: int, burn_in: int,
    n: int, gamma: float, strategy: str,
) -> None:  # fmt: skip
    n_lanes = 1 if kind == "test-list" or run is None else n_lanes
    with tempfile.TemporaryDirectory() as directory:
        pair = Pair(kind, run, n_lanes, directory)
        for op in script:
            write(pair, op)
        steps = pair.steps
        check_stacks(pair.buffer, steps, sorted({*offsets, 0}))
        for pad in (False, True):
            check_windows(pair.buffer, steps, length, burn_in, pad)
        check_n_step(pair.buffer, steps, n, gamma)
        check_goals(pair.buffer, steps, strategy)
        pair.close()
