"""`evict="lowest"`: a full buffer gives up its lowest sample, of equals the older."""

from __future__ import annotations

import pickle
import shutil
import tempfile
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.replay.make import ROW_KINDS, create
from tests.replay.test_machine import RAM_DISK

from recollect.errors import SchemaError
from recollect.replay import ReplayBuffer

SPACE = {"id": ((), "int64"), "meta": {"score": ((), "float32")}}


def make(kind: str = "memory", directory: Any = "", capacity: int = 3, key: str = "meta/score", space: Any = SPACE,
         **kwargs: Any) -> ReplayBuffer:  # fmt: skip
    return create(
        kind, space, directory=directory, capacity=capacity, evict="lowest", evict_key=key, **kwargs
    )


def one(ident: int, score: float) -> dict[str, Any]:
    return {"id": ident, "meta": {"score": score}}


def many(pairs: list[tuple[int, float]]) -> dict[str, Any]:
    return {
        "id": np.array([i for i, _ in pairs], np.int64),
        "meta": {"score": np.array([s for _, s in pairs], np.float32)},
    }


def held(buffer: ReplayBuffer) -> list[tuple[int, float]]:
    data = buffer[:]
    return list(zip(data["id"].tolist(), data["meta"]["score"].tolist()))


class Lowest(RuleBasedStateMachine):
    """Against a list of [id, score, age] in row order. Scores are few, so that equals are common."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp(prefix="replay-lowest-", dir=RAM_DISK))
        self.items: list[list[Any]] = []
        self.n = self.n_dumps = self.evicted = self.removed = self.rejected = self.offered = 0

    def teardown(self) -> None:
        if hasattr(self, "buffer"):
            self.buffer.close()
        shutil.rmtree(self.directory)

    @initialize(kind=st.sampled_from(ROW_KINDS), capacity=st.integers(1, 5))
    def start(self, kind: str, capacity: int) -> None:
        self.capacity = capacity
        self.buffer = make(kind, self.directory, capacity)

    def offer(self, score: float) -> tuple[int, float]:
        self.n, self.offered = self.n + 1, self.offered + 1
        new = [self.n, score, self.n]
        if len(self.items) < self.capacity:
            self.items.append(new)
        else:
            lowest = min(self.items, key=lambda item: (item[1], item[2]))
            if score < lowest[1]:
                self.rejected += 1
            else:
                self.evicted += 1
                self.items[self.items.index(lowest)] = new
        return self.n, score

    @rule(score=st.integers(-2, 2))
    def append(self, score: float) -> None:
        self.buffer.append(one(*self.offer(score)))

    @rule(scores=st.lists(st.integers(-2, 2), max_size=7))
    def extend(self, scores: list[float]) -> None:
        self.buffer.extend(many([self.offer(s) for s in scores]))

    @rule(how=st.sampled_from(["append", "extend"]))
    def refuse_nan(self, how: str) -> None:
        n = 1 if how == "append" else 2
        with pytest.raises(SchemaError, match="meta/score"):
            self.buffer.append(one(0, np.nan)) if n == 1 else self.buffer.extend(
                many([(0, 1.0), (0, np.nan)])
            )
        self.rejected, self.offered = self.rejected + n, self.offered + n

    @precondition(lambda self: self.items)
    @rule(data=st.data(), score=st.integers(-2, 2))
    def set_at(self, data: Any, score: float) -> None:
        index = data.draw(st.lists(st.integers(0, len(self.items) - 1), min_size=1, max_size=3))
        self.n += 1
        self.buffer.set_at(index, many([(self.n + i, score + i) for i in range(len(index))]))
        for i, at in enumerate(index):
            self.items[at][:2] = [self.n + i, score + i]
        self.n += len(index)

    @precondition(lambda self: self.items)
    @rule(data=st.data())
    def remove_at(self, data: Any) -> None:
        index = data.draw(st.lists(st.integers(0, len(self.items) - 1), max_size=3))
        self.buffer.remove_at(index)
        self.items = [item for i, item in enumerate(self.items) if i not in index]
        self.removed += len(set(index))

    @rule()
    def clear(self) -> None:
        self.buffer.clear()
        self.removed, self.items = self.removed + len(self.items), []

    @rule(kind=st.sampled_from(ROW_KINDS))
    def dump_and_load(self, kind: str) -> None:
        self.n_dumps += 1
        path = self.directory / f"dump-{self.n_dumps}"
        self.buffer.dumps(path)
        self.buffer.close()
        self.buffer = ReplayBuffer.load_from(path, read_only=False, storage=kind)
        self.offered, self.evicted, self.removed, self.rejected = len(self.items), 0, 0, 0

    @invariant()
    def holds_the_best(self) -> None:
        if hasattr(self, "buffer"):
            assert held(self.buffer) == [(i, s) for i, s, _ in self.items]
            stats = self.buffer.stats()
            counted = (stats.offered, stats.live, stats.evicted, stats.removed, stats.rejected, stats.dropped)
            assert counted == (self.offered, len(self.items), self.evicted, self.removed, self.rejected, 0)
            assert self.buffer.get_segments() is None and self.buffer.open_segment is None


TestLowest = Lowest.TestCase


def test_of_equals_the_older_goes() -> None:
    with make() as buffer:
        buffer.extend(many([(0, 1.0), (1, 1.0), (2, 1.0)]))
        buffer.append(one(3, 1.0))
        buffer.append(one(4, 2.0))
        assert held(buffer) == [(3, 1.0), (4, 2.0), (2, 1.0)]
        buffer.append(one(5, 0.5))  # lower than all: rejected
        assert held(buffer) == [(3, 1.0), (4, 2.0), (2, 1.0)] and buffer.stats().rejected == 1


def test_nan_in_set_at_changes_nothing() -> None:
    with make() as buffer:
        buffer.extend(many([(0, 1.0), (1, 2.0)]))
        with pytest.raises(SchemaError, match="meta/score.*NaN"):
            buffer.set_at([0, 1], many([(5, 1.0), (6, np.nan)]))
        assert held(buffer) == [(0, 1.0), (1, 2.0)]


def test_infinities_order_as_numbers() -> None:
    with make(capacity=2) as buffer:
        buffer.extend(many([(0, -np.inf), (1, np.inf), (2, 0.0), (3, -np.inf)]))
        assert held(buffer) == [(2, 0.0), (1, np.inf)] and buffer.stats().rejected == 1


def test_integer_keys_are_exact_or_refused() -> None:
    with make(capacity=1, key="k", space={"k": ((), "int64")}) as buffer:
        buffer.append({"k": 2**53 - 1})
        buffer.append({"k": 2**53 - 2})
        assert buffer[0]["k"] == 2**53 - 1
        for k in (2**53 + 1, -(2**53) - 1):
            with pytest.raises(SchemaError, match="k: .*2\\*\\*53"):
                buffer.append({"k": k})


@pytest.mark.parametrize("kind", ROW_KINDS)
@pytest.mark.parametrize("loaded_as", ROW_KINDS)
def test_age_is_known_after_a_reload(kind: str, loaded_as: str, tmp_path: Path) -> None:
    with make(kind, tmp_path) as buffer:
        buffer.extend(
            many([(0, 1.0), (1, 2.0), (2, 2.0), (3, 2.0)])
        )  # 3 took the row of 0: it is the youngest
        assert held(buffer) == [(3, 2.0), (1, 2.0), (2, 2.0)]
        buffer.dumps(tmp_path / "dump")
    paths = [tmp_path / "dump", *tmp_path.glob("live-*")]
    for path in paths:
        with ReplayBuffer.load_from(path, storage=loaded_as) as reader:
            assert held(reader) == [(3, 2.0), (1, 2.0), (2, 2.0)]
    for path in paths if loaded_as != "memmap" else paths[:1]:
        with ReplayBuffer.load_from(path, storage=loaded_as, read_only=False) as loaded:
            loaded.extend(many([(4, 2.0), (5, 2.0)]))  # 1 goes, then 2
            assert held(loaded) == [(3, 2.0), (4, 2.0), (5, 2.0)]
            loaded.append(one(6, 2.0))
            assert held(loaded) == [(6, 2.0), (4, 2.0), (5, 2.0)]


@pytest.mark.parametrize("kind", ROW_KINDS)
def test_the_age_of_one_that_found_room_is_known_after_a_reload(kind: str, tmp_path: Path) -> None:
    with make(kind, tmp_path) as buffer:
        buffer.extend(many([(i, 2.0) for i in range(4)]))  # 3 took the row of 0
        buffer.remove_at(1)
        buffer.extend(many([(4, 2.0)]))
        buffer.dumps(tmp_path / "dump")
    with ReplayBuffer.load_from(tmp_path / "dump", read_only=False) as loaded:
        loaded.extend(many([(5, 2.0), (6, 2.0)]))  # 2 goes, the oldest, then 3
        assert sorted(held(loaded)) == [(4, 2.0), (5, 2.0), (6, 2.0)]


def test_live_memmap_goes_on_after_reopening(tmp_path: Path) -> None:
    with make("memmap", tmp_path) as buffer:
        buffer.extend(many([(0, 1.0), (1, 1.0), (2, 3.0), (3, 1.0)]))  # 0 went: it was the older
        assert held(buffer) == [(3, 1.0), (1, 1.0), (2, 3.0)]
    with ReplayBuffer.load_from(next(tmp_path.glob("live-*")), read_only=False) as again:
        again.append(one(4, 1.0))
        assert held(again) == [(3, 1.0), (4, 1.0), (2, 3.0)]
    with ReplayBuffer.load_from(next(tmp_path.glob("live-*"))) as reader:
        assert held(reader) == [(3, 1.0), (4, 1.0), (2, 3.0)]


def test_two_objects_over_the_same_rows_agree_on_the_lowest() -> None:
    with make("shared", multiprocessing=True) as buffer, pickle.loads(pickle.dumps(buffer)) as twin:
        buffer.extend(many([(0, 1.0), (1, 2.0), (2, 3.0)]))
        twin.append(one(3, 4.0))  # 0 goes
        buffer.append(one(4, 5.0))  # now 1 is the lowest
        twin.set_at(2, one(5, 0.0))
        buffer.append(one(6, 1.0))
        assert held(twin) == [(3, 4.0), (4, 5.0), (6, 1.0)]
        twin.remove_at(0)
        buffer.extend(many([(7, 9.0), (8, 2.0)]))
        assert sorted(held(buffer)) == [(4, 5.0), (7, 9.0), (8, 2.0)]


def test_threads_keep_the_best_of_all() -> None:
    with make(capacity=10) as buffer:
        scores = np.random.default_rng(0).permutation(2_000).astype(np.float32)

        def work(part: Any) -> None:
            for s in part:
                buffer.append(one(int(s), float(s)))

        threads = [threading.Thread(target=work, args=(part,)) for part in np.split(scores, 4)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        assert sorted(held(buffer)) == [(i, float(i)) for i in range(1_990, 2_000)]
        stats = buffer.stats()
        assert stats.offered == 2_000 == stats.live + stats.evicted + stats.rejected


def test_the_tree_is_kept_from_write_to_write() -> None:
    """A write costs O(log capacity): only changes by others make the tree anew."""
    buffer = make(capacity=8)
    engine: Any = buffer.engine
    buffer.append(one(0, 0.0))
    tree = engine._tree
    for i in range(1, 20):
        buffer.append(one(i, float(i)))
        buffer.extend(many([(100 + i, i + 0.5), (200 + i, -1.0)]))
        buffer.set_at(0, one(300 + i, float(i)))
        assert engine._tree is tree


def test_it_has_no_lanes() -> None:
    with make() as buffer, pytest.raises(ValueError, match="no lanes"):
        buffer.on_lane(0)


def test_a_block_is_one_change_whatever_it_displaces() -> None:
    with make() as buffer:
        buffer.append(one(0, 5.0))
        ((_, _, before),) = buffer.engine.native.windows()
        buffer.extend(
            many([(1, 1.0), (2, 2.0), (3, 0.5), (4, 3.0), (5, 4.0)])
        )  # fresh rows, then others' rows
        ((_, _, after),) = buffer.engine.native.windows()
        assert after - before == 2  # the epoch: odd while a change lasts
        assert sorted(held(buffer)) == [(0, 5.0), (4, 3.0), (5, 4.0)]
        assert buffer.stats().rejected == 1


def test_a_block_with_one_bad_key_changes_nothing() -> None:
    with make() as buffer:
        buffer.extend(many([(0, 1.0), (1, 2.0)]))
        before = buffer.engine.native.windows(), held(buffer)
        with pytest.raises(SchemaError, match="meta/score: must be a number"):
            buffer.extend(many([(2, 3.0), (3, 4.0), (4, float("nan"))]))
        assert (buffer.engine.native.windows(), held(buffer)) == before
