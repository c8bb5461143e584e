"""A PrioritizedSampler beside a list of (sample, priority), through any sequence of writes, removals and updates."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.replay.make import block, create, sample

import recollect as rc

ALPHA, EPS = 0.7, 0.0
values = st.sampled_from([0.0, 1e-3, 0.5, 1.0, 3.0, 1e6])


@dataclass
class Item:
    """A sample's number, and the priority that the sampler should have for it."""

    number: int
    priority: float


class Machine(RuleBasedStateMachine):
    """Lanes as lists, oldest first. `seen` marks samples that the sampler has had occasion to notice."""

    @initialize(kind=st.sampled_from(["memory", "memmap", "test-list"]), lanes=st.integers(1, 3), run=st.integers(1, 9),
                bounded=st.booleans(), tracked=st.booleans())  # fmt: skip
    def begin(self, kind: str, lanes: int, run: int, bounded: bool, tracked: bool) -> None:
        self.directory = tempfile.TemporaryDirectory()
        if kind == "test-list" or not bounded:
            lanes = 1
        self.run = run if bounded else None
        self.buffer = create(
            kind, directory=Path(self.directory.name), capacity=run * lanes if bounded else None,
            **({"num_lanes": lanes} if lanes > 1 else {}), maintain_segment_metadata=tracked,
        )  # fmt: skip
        self.lanes: list[list[Item]] = [[] for _ in range(lanes)]
        self.handles: list[Any] = [self.buffer]
        if lanes > 1:
            self.handles = [self.buffer.on_lane(k) for k in range(lanes)]
        self.sampler = rc.PrioritizedSampler(self.buffer, 8, alpha=ALPHA, eps=EPS, seed=0)
        self.top, self.next, self.late, self.applied = 1.0, 0, 0, 0
        self.drawn: list[tuple[dict[str, Any], list[Item]]] = []

    def items(self) -> list[Item]:
        return [item for lane in self.lanes for item in lane]

    @rule(lane=st.integers(0, 2), n=st.integers(1, 25))
    def extend(self, lane: int, n: int) -> None:
        k = lane % len(self.lanes)
        self.handles[k].mark_segment_end()
        new = [Item(self.next + i, self.top) for i in range(n)]
        self.handles[k].extend(block([item.number for item in new]))
        self.next += n
        self.lanes[k] += new
        if self.run is not None:
            del self.lanes[k][: -self.run]

    @rule(lane=st.integers(0, 2))
    def append(self, lane: int) -> None:
        k = lane % len(self.lanes)
        self.handles[k].append(sample(self.next))
        self.handles[k].mark_segment_end()
        self.lanes[k].append(Item(self.next, self.top))
        self.next += 1
        if self.run is not None:
            del self.lanes[k][: -self.run]

    @precondition(lambda self: self.items())
    @rule(data=st.data())
    def overwrite(self, data: st.DataObject) -> None:
        items = self.items()
        index = data.draw(st.lists(st.integers(0, len(items) - 1), min_size=1, max_size=3, unique=True))
        numbers = list(range(self.next, self.next + len(index)))
        self.buffer[index] = block(numbers)
        self.next += len(index)
        for i, number in zip(index, numbers, strict=True):
            self.replace(items[i], Item(number, self.top))

    def replace(self, old: Item, new: Item) -> None:
        for lane in self.lanes:
            for i, item in enumerate(lane):
                if item is old:
                    lane[i] = new

    @precondition(lambda self: self.items())
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        """Those that move get new generations: for the sampler they are new."""
        items = self.items()
        gone = sorted(data.draw(st.sets(st.integers(0, len(items) - 1), min_size=1, max_size=4)))
        before = self.places()
        self.buffer.remove_at(gone)
        after = self.places()
        self.lanes = [
            [
                Item(item.number, item.priority if after[item.number] == before[item.number] else self.top)
                for item in lane
                if item.number in after
            ]
            for lane in self.lanes
        ]
        assert len(self.items()) == len(items) - len(gone)

    def places(self) -> dict[int, tuple[int, int]]:
        place = self.buffer.locate(...)
        return {
            int(x): (int(r), int(g))
            for x, r, g in zip(self.buffer[...]["x"], place.row, place.generation, strict=True)
        }

    @rule()
    def clear(self) -> None:
        self.buffer.clear()
        self.lanes = [[] for _ in self.lanes]

    @precondition(lambda self: any(item.priority for item in self.items()))
    @rule()
    def draw(self) -> None:
        data, meta = self.sampler.sample_with_metadata()
        assert meta is not None
        by_number = {item.number: item for item in self.items()}
        items = [by_number[int(x)] for x in data["x"]]  # all of them exist
        assert all(item.priority > 0 for item in items)
        self.check_labels(meta, items)
        self.drawn.append((meta, items))

    @precondition(lambda self: self.drawn)
    @rule(data=st.data())
    def update(self, data: st.DataObject) -> None:
        meta, items = data.draw(st.sampled_from(self.drawn))
        given = data.draw(st.lists(values, min_size=len(items), max_size=len(items)))
        now = self.places()
        alive = [
            (int(r), int(g)) == now.get(item.number)
            for r, g, item in zip(meta["row"], meta["generation"], items, strict=True)
        ]
        assert self.sampler.update_priorities(meta, given) == sum(alive)
        self.applied, self.late = self.applied + sum(alive), self.late + alive.count(False)
        by_number = {item.number: item for item in self.items()}
        for item, value, lives in zip(items, given, alive, strict=True):
            if lives:
                by_number[item.number].priority = value
                self.top = max(self.top, value)

    @rule()
    def save_and_restore(self) -> None:
        state = self.sampler.state_dict()
        total = self.sampler._ledger.total()
        self.sampler = rc.PrioritizedSampler(self.buffer, 8, alpha=ALPHA, eps=EPS)
        self.sampler.load_state_dict(state)
        assert self.sampler._ledger.total() == total

    def check_labels(self, meta: dict[str, Any], items: list[Item]) -> None:
        mass = np.array([item.priority**ALPHA for item in self.items()])
        own = np.array([item.priority**ALPHA for item in items])
        np.testing.assert_allclose(meta["probability"], own / (mass.sum() or 1.0), rtol=1e-6)
        least = mass[mass > 0].min(initial=np.inf)
        expected = np.where(own > 0, (least / np.where(own > 0, own, 1.0)) ** self.sampler.beta, 0.0)
        np.testing.assert_allclose(meta["weight"], expected, rtol=1e-6)

    @invariant()
    def counts_agree(self) -> None:
        if hasattr(self, "sampler"):
            stats = self.sampler.stats()
            assert (stats.applied, stats.late, stats.top) == (self.applied, self.late, self.top)

    @rule()
    def look_at_everything(self) -> None:
        data, meta = self.sampler.get_at_with_metadata(...)
        assert [int(x) for x in data["x"]] == [item.number for item in self.items()]
        assert meta is not None
        self.check_labels(meta, self.items())

    def teardown(self) -> None:
        if hasattr(self, "sampler"):
            self.look_at_everything()
            self.buffer.close()
            self.directory.cleanup()


TestMachine = Machine.TestCase
