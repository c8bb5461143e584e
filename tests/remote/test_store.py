"""The store: a container goes into its rows in one native call, as a plain list would have kept it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import example, given
from hypothesis import strategies as st

from recollect import _core
from recollect.remote.items.packed import RowPacker
from recollect.remote.items.space import item_space
from recollect.remote.items.trajectories import Trajectories
from recollect.remote.manager.store import Store, item_plan, make_buffer
from recollect.spaces import as_space, compile_layout

STEP = spaces.Dict({"state": spaces.Box(-9, 9, (3,), np.int16), "action": spaces.Discrete(5)})
REWARD = spaces.Box(-np.inf, np.inf, (), np.float64)
SPACE = spaces.Dict({"steps": spaces.Sequence(STEP, stack=True), "goal": spaces.Box(0, 99, (), np.int64)})
RANKED = spaces.Dict({**SPACE.spaces, "log_reward": REWARD})
INF = float("inf")
one = st.tuples(st.sampled_from([-INF, -1.0, 0.0, 0.5, 2.0, INF, float("nan")]), st.integers(1, 5))
containers = st.lists(st.lists(one, max_size=12), min_size=1, max_size=6)


def block_of(items: list[tuple[float, int]], first: int, is_ranked: bool) -> Trajectories:
    lengths = np.array([n for _, n in items], np.int64)
    total = int(lengths.sum())
    steps = {
        "state": (np.arange(total * 3).reshape(-1, 3) % 17 - 8).astype(np.int16) + first % 2,
        "action": np.arange(total) % 5,
    }
    rewards = np.array([r for r, _ in items]) if is_ranked else None
    return Trajectories(steps, lengths, rewards, goal=first + np.arange(len(items)))


class Kept:
    """What is kept, as a list of (reward, order, goal, steps) by row."""

    def __init__(self, capacity: int, is_ranked: bool) -> None:
        self.capacity, self.is_ranked = capacity, is_ranked
        self.held: list[Any] = []
        self.cursor = self.n = 0

    def add(self, reward: float, goal: int, steps: Any) -> str:
        entry = (reward if self.is_ranked else 0.0, self.n, goal, steps)
        if len(self.held) < self.capacity:
            self.held.append(entry)
        elif self.is_ranked:
            lowest = min(self.held, key=lambda e: e[:2])
            if reward < lowest[0]:
                return "too_low"
            self.held[self.held.index(lowest)] = entry
        else:
            self.held.remove(min(self.held, key=lambda e: e[1]))
            self.held.append(entry)
        self.n += 1
        return "kept"


@given(containers, st.integers(1, 9), st.booleans())
@example([[(0.0, 1)] * 12, [(2.0, 5)] * 12], 3, True)  # more than fit, all of them equal
@example([[(0.0, 2)] * 12], 5, False)
def test_a_container_is_kept_as_a_list_would(given_: list[Any], capacity: int, is_ranked: bool) -> None:
    items = item_space(RANKED if is_ranked else SPACE, 4)
    buffer = make_buffer(items, capacity, "lowest" if is_ranked else "oldest", "memory")
    store, model, first = Store(items, buffer, None), Kept(capacity, is_ranked), 0
    for container in given_:
        block = block_of(container, first, is_ranked)
        outcome = store.add(items.encode(block))
        fates = []
        for i, (reward, length) in enumerate(container):
            if is_ranked and not reward < INF:
                fates.append("bad_value")
            elif length > 4:
                fates.append("too_long")
            else:
                fates.append(model.add(reward, first + i, block[i]["steps"]))
        goals = {goal for _, _, goal, _ in model.held}
        assert outcome.kept.tolist() == [first + i in goals for i in range(len(container))]
        assert (outcome.row >= 0).tolist() == outcome.kept.tolist()
        for reason in ("bad_value", "too_long", "too_low"):
            assert outcome.rejected[reason] == fates.count(reason)
        stored = {int(item["goal"]): item for item in (buffer[i] for i in range(len(buffer)))}
        assert set(stored) == goals
        for _, _, goal, steps in model.held:
            np.testing.assert_equal(stored[goal]["steps"]["state"], steps["state"])
            np.testing.assert_equal(stored[goal]["steps"]["action"], steps["action"])
        for i in np.flatnonzero(outcome.kept):
            index = store.rows().tolist().index(int(outcome.row[i]))
            assert int(buffer[index]["goal"]) == first + i
        if store.ranking is not None:
            finite = [e[0] for e in model.held if np.isfinite(e[0])]
            assert store.ranking.lowest() == min(finite, default=None)
            assert store.ranking.n_finite == len(finite)
        first += len(container)
    counters = buffer.stats()
    assert counters.offered == counters.live + counters.evicted + counters.rejected
    buffer.close()


def test_lengths_and_rows_that_do_not_fit_are_refused_before_anything_is_written() -> None:
    items = item_space(RANKED, 4)
    buffer = make_buffer(items, 5, "lowest", "memory")
    plan = item_plan(items, buffer.inner_storage.rows.layout)  # type: ignore[attr-defined]
    packed = items.encode(block_of([(0.0, 2), (1.0, 3)], 0, True))
    native, tree, index, keys = buffer.engine.native, _core.MinTree(5), np.arange(2), np.zeros(2)
    good = (packed.rows, packed.lengths, packed.fields, index, keys, 0)
    for at, wrong in (
        (0, packed.rows[:-1]),
        (0, packed.rows[:, :-1]),
        (1, np.array([2, 4], np.int32)),
        (1, np.array([5, 0], np.int32)),
        (1, np.array([2, 3], np.int64)),
        (2, np.ascontiguousarray(packed.fields[:, 1:])),  # type: ignore[index]
        (3, np.array([0, 2])),
        (3, np.array([-1, 0])),
        (4, np.array([0.0, np.nan])),
        (4, np.zeros(3)),
    ):
        args = [*good]
        args[at] = wrong
        with pytest.raises((ValueError, TypeError, IndexError)):
            plan.place_lowest(native, tree, *args)
    long = items.encode(block_of([(0.0, 5)], 0, True))
    with pytest.raises(ValueError, match="no room"):
        plan.place_lowest(native, tree, long.rows, long.lengths, long.fields, np.arange(1), np.zeros(1), 0)
    shorter = item_space(RANKED, 3)
    with make_buffer(shorter, 5, "lowest", "memory") as small:
        other = item_plan(shorter, small.inner_storage.rows.layout)  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="these rows"):
        other.place_lowest(native, tree, *good)
    with pytest.raises(ValueError, match="past the end"):
        _core.ItemPlan(8, [(0, 0, 4)], 4, [], 0, 0, 3)
    assert len(buffer) == 0
    buffer.close()


spaces_of_rows = st.dictionaries(
    st.sampled_from("abcde"),
    st.tuples(
        st.sampled_from([(), (3,), (2, 5), (40,)]), st.sampled_from(["uint8", "int16", "float32", "float64"])
    ),
    min_size=1,
)


@given(spaces_of_rows, st.integers(0, 700), st.booleans())
def test_packed_rows_are_the_leaves_side_by_side(space: Any, n: int, exact: bool) -> None:
    layout = compile_layout(as_space(space))
    rng = np.random.default_rng(n)
    block = {k: rng.integers(0, 100, (n, *shape)).astype(dtype) for k, (shape, dtype) in space.items()}
    given_ = block if exact else {k: np.asfortranarray(v) for k, v in block.items()}
    rows, crc = RowPacker(layout).pack_block(given_)
    plain = np.zeros((n, layout.row_nbytes), np.uint8)
    for f in layout.fields:
        plain[:, f.offset : f.offset + f.nbytes] = block[f.name].view(np.uint8).reshape(n, f.nbytes)
    np.testing.assert_equal(rows, plain)
    assert crc == _core.crc32c_portable(plain.tobytes())
