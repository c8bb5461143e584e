"""The constructor adopts a storage: what cannot be is a ValueError, what can be is taken as it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.replay.make import SPACE, ListStorage, block, numbers, sample

from recollect.errors import SegmentOpenError
from recollect.replay import ReplayBuffer
from recollect.storage import MemoryStorage, SpaceStorage


def storage(kind: str, capacity: int | None = 6, n: int = 6, **kwargs: Any) -> SpaceStorage:
    """Rows 0..n-1 hold the numbers 0..n-1."""
    made: SpaceStorage
    if kind == "memory":
        made = MemoryStorage.create(SPACE, capacity=capacity, **kwargs)
    else:
        made = ListStorage.create(SPACE, capacity=capacity)
    made.extend_length(n)
    made.set(slice(0, n), block(list(range(n))))
    return made


BOTH = pytest.mark.parametrize("kind", ["memory", "list"])


@BOTH
def test_adopts_rows_round_the_end(kind: str) -> None:
    with ReplayBuffer(storage(kind), "storage", 4, 4) as buffer:
        assert numbers(buffer) == [4, 5, 0, 1] and buffer.offset == 4 and buffer.get_segments() is None
        buffer.append(sample(10))
        assert numbers(buffer) == [4, 5, 0, 1, 10] and buffer.locate(-1).row == 2
        stats = buffer.stats()
        assert (stats.offered, stats.live, stats.evicted) == (5, 5, 0)


@BOTH
def test_adopts_segments_and_an_open_one(kind: str) -> None:
    with ReplayBuffer(
        storage(kind), "storage", 5, 3, maintain_segment_metadata=True, physical_segments=[(3, 1), (4, 3)],
        active_segment_start_physical=1, active_segment_length=1,
    ) as buffer:  # fmt: skip
        assert numbers(buffer) == [3, 4, 5, 0, 1]
        assert buffer.get_segments() == [(0, 1), (1, 4)] and buffer.open_segment == (4, 5)
        with pytest.raises(SegmentOpenError):
            buffer.extend(block([7]))
        buffer.append(sample(9))
        place = buffer.locate(...)
        assert place.step.tolist() == [0, 0, 1, 2, 0, 1] and len(set(place.segment.tolist())) == 3
        buffer.mark_segment_end()
        buffer.extend(block([10]))
        ids = buffer.locate(...).segment.tolist()
        assert len(set(ids)) == 3 and ids[-1] not in place.segment  # a new id, and the oldest was dropped


@BOTH
def test_adopts_an_unbounded_storage(kind: str) -> None:
    with ReplayBuffer(storage(kind, None), "storage", 6) as buffer:
        buffer.extend(block([6, 7]))
        buffer.remove_at(0)
        assert numbers(buffer) == [1, 2, 3, 4, 5, 6, 7] and buffer.offset == 0


def test_untracked_has_no_open_segment_though_the_storage_keeps_them(tmp_path: Path) -> None:
    given = MemoryStorage.create(SPACE, capacity=8, num_lanes=2)
    with ReplayBuffer(given, "storage") as buffer:
        for value in range(2):
            buffer.append(sample(value))
        with buffer.on_lane(1) as lane:
            lane.append(sample(2))
        buffer.extend_lanes(block([3, 4]), [0, 1])
        assert buffer.open_segment is None and buffer.get_segments() is None
        buffer.extend(block([5]))
        buffer.remove_at([-1, -2, 0])
        assert numbers(buffer) == [1, 3, 5]
        given.append(sample(6))  # opens a segment of the storage's, not of the buffer's
        buffer.dumps(tmp_path)
    assert ReplayBuffer.get_length_from_path(tmp_path) == 4


def test_a_storages_open_segment_ends_when_it_is_adopted() -> None:
    given = MemoryStorage.create(SPACE, capacity=6)
    given.append(sample(0))
    given.append(sample(1))
    with ReplayBuffer(
        given, "storage", 2, maintain_segment_metadata=True, physical_segments=[(0, 2)]
    ) as buffer:
        assert buffer.open_segment is None and buffer.get_segments() == [(0, 2)]
        buffer.append(sample(2))
        assert buffer.open_segment == (2, 3) and buffer.get_segments() == [(0, 2)]


def test_segments_in_a_lane_go_round_the_lane() -> None:
    given = storage("memory", num_lanes=2)
    found = [(1, 2), (0, 1)]
    with ReplayBuffer(
        given, "storage", 3, 1, maintain_segment_metadata=True, physical_segments=found
    ) as buffer:
        assert numbers(buffer) == [1, 2, 0] and buffer.get_segments() == [(0, 2), (2, 3)]


@BOTH
@pytest.mark.parametrize(
    ("count", "offset", "kwargs", "text"),
    [
        (-1, 0, {}, "count"),
        (7, 0, {}, "count"),
        (3, -1, {}, "offset"),
        (3, 6, {}, "offset"),
        (3, 0, {"physical_segments": [(0, 3)]}, "maintain_segment_metadata"),
        (0, 0, {"active_segment_length": 2}, "active_segment_start_physical"),
        (3, 0, {"tracked": []}, "cover"),
        (3, 0, {"tracked": [(0, 2)]}, "cover"),
        (3, 0, {"tracked": [(0, 4)]}, "physical_segments"),
        (3, 0, {"tracked": [(1, 2)]}, "physical_segments"),
        (3, 0, {"tracked": [(0, 2), (1, 2)]}, "physical_segments"),
        (3, 0, {"tracked": [(0, 0), (0, 3)]}, "physical_segments"),
        (3, 0, {"tracked": [(0, -1), (0, 3)]}, "physical_segments"),
        (3, 0, {"tracked": [(6, 3)]}, "physical_segments"),
        (3, 0, {"tracked": [(-6, 3)]}, "physical_segments"),
        (3, 0, {"tracked": [(2, 1), (0, 2)]}, "physical_segments"),
        (3, 0, {"tracked": [(0, 3)], "active": (3, 0)}, "physical_segments"),
        (3, 0, {"tracked": [(0, 3)], "active": (3, 1)}, "physical_segments"),
        (3, 0, {"tracked": [(0, 2)], "active": (0, 1)}, "physical_segments"),
    ],
)  # fmt: skip
def test_refuses_what_cannot_be(
    kind: str, count: int, offset: int, kwargs: dict[str, Any], text: str
) -> None:
    if "tracked" in kwargs:
        first, length = kwargs.get("active", (None, 0))
        kwargs = {
            "maintain_segment_metadata": True, "physical_segments": kwargs["tracked"],
            "active_segment_start_physical": first, "active_segment_length": length,
        }  # fmt: skip
    with storage(kind) as given:
        with pytest.raises(ValueError, match=text):
            ReplayBuffer(given, "storage", count, offset, **kwargs)
        assert given.get(slice(0, 6))["x"].tolist() == list(range(6))


@BOTH
@pytest.mark.parametrize(("count", "offset"), [(7, 0), (3, 1), (-1, 0)])
def test_refuses_what_an_unbounded_storage_cannot_hold(kind: str, count: int, offset: int) -> None:
    with storage(kind, None) as given:
        with pytest.raises(ValueError, match="count|offset"):
            ReplayBuffer(given, "storage", count, offset)
        assert len(given) == 6


def test_refuses_more_than_a_lane_holds() -> None:
    with storage("memory", num_lanes=2) as given, pytest.raises(ValueError, match="count"):
        ReplayBuffer(given, "storage", 4)


def test_refuses_segments_where_the_storage_keeps_none() -> None:
    with storage("memory", segments=False) as given, pytest.raises(ValueError, match="segments=True"):
        ReplayBuffer(given, "storage", maintain_segment_metadata=True)


def test_refuses_to_share_what_belongs_to_one_process() -> None:
    with storage("memory") as given, pytest.raises(ValueError, match="SharedMemoryStorage"):
        ReplayBuffer(given, "storage", multiprocessing=True)


def test_adopted_rows_that_were_removed_before_are_whole() -> None:
    with storage("memory", 4, 4) as given:
        first = ReplayBuffer(given, "storage", 4)
        first.remove_at([1, 3])
        again = ReplayBuffer(given, "storage", 4)
        again.remove_at(2)
        assert len(again) == 3 and again.stats().removed == 1
        assert np.array_equal(again[:]["y"][:, 0], again[:]["x"])
