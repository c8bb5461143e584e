"""The promises of a buffer that the machine does not reach: forms of reading, caller's buffers, backends, iteration."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.replay.make import KINDS, ROW_KINDS, block, create, numbers, sample

from recollect import _core
from recollect.batch import Location, SliceStackedBatch
from recollect.errors import SchemaError
from recollect.replay import ReplayBuffer
from recollect.sampling import IndexStream, StepSampler

EVERY = pytest.mark.parametrize("kind", KINDS)


@EVERY
def test_every_form_of_index(kind: str, tmp_path: Path) -> None:
    with create(kind, directory=tmp_path, capacity=5) as buffer:
        buffer.extend(block(list(range(3))))
        buffer.extend(block(list(range(3, 8))))
        buffer.append(sample(8))
        values = list(range(4, 9))
        assert numbers(buffer) == values
        for i in (0, -1, np.int32(2), np.array(3), np.uint8(1)):
            assert buffer[i]["x"] == values[int(i)] and buffer[i]["y"].shape == (2,)
        for s in (slice(1, 4), slice(None, None, -1), slice(-2, 100), slice(4, 1), ...):
            assert buffer[s]["x"].tolist() == (values if s is ... else values[s])
        for index in ([4, 0, 0, -1], (1, 2), range(3), np.array([-5, 4]), np.array([], int), []):
            assert buffer[index]["x"].tolist() == [values[i] for i in index]
        for mask in ([True, False, True, False, False], np.zeros(5, bool)):
            assert buffer[mask]["x"].tolist() == [v for v, kept in zip(values, mask) if kept]
        assert buffer.get_flattened_at([0, -1]).tolist() == [[4, 4, -4], [8, 8, -8]]
        assert buffer.get_flattened_at(-1).tolist() == [8, 8, -8]
        assert (
            buffer.get_at_with_metadata(0)[1] is None
            and buffer.get_flattened_at_with_metadata([0])[1] is None
        )
        assert buffer.get_column_at(("x",), slice(0, 2)).tolist() == [4, 5]


@EVERY
def test_the_last_of_duplicates_wins_and_brackets_are_calls(kind: str, tmp_path: Path) -> None:
    with create(kind, directory=tmp_path, capacity=5) as buffer:
        buffer.extend(block(list(range(5))))
        buffer.set_at([1, 3, 1, -2], block([10, 11, 12, 13]))
        assert numbers(buffer) == [0, 12, 2, 13, 4]
        buffer[0] = sample(20)
        buffer[[True, False, False, False, True]] = block([21, 22])
        del buffer[1:3]
        assert numbers(buffer) == [21, 13, 22]
        buffer.append_flattened(np.array([5, 5, -5], np.float64))
        buffer.extend_flattened(np.array([[6, 6, -6]], np.float64))
        buffer.set_flattened_at(0, np.array([7, 7, -7], np.float64))
        assert numbers(buffer) == [7, 13, 22, 5, 6]
        buffer.remove_at(...)
        assert len(buffer) == 0 and buffer.stats().removed == 7
        buffer.extend(block([]))
        buffer.set_at([], block([]))
        buffer.remove_at([])
        assert len(buffer) == 0 and buffer.stats().offered == 7


@EVERY
def test_out_fills_the_callers_buffers(kind: str, tmp_path: Path) -> None:
    with create(kind, directory=tmp_path, capacity=5) as buffer:
        buffer.extend(block([1, 2, 3]))
        out = {"x": np.zeros(2, np.int64), "y": np.zeros((2, 2), np.float32)}
        assert buffer.get_at([2, 0], out=out) is out and out["x"].tolist() == [3, 1]
        one = {"x": np.zeros((), np.int64), "y": np.zeros(2, np.float32)}
        assert buffer.get_at(1, out=one) is one and one["x"] == 2 and one["y"].tolist() == [2, -2]
        for wrong in (
            {"x": np.zeros(3, np.int64), "y": np.zeros((3, 2), np.float32)},
            {"x": np.zeros(2, np.int32), "y": np.zeros((2, 2), np.float32)},
        ):
            with pytest.raises(ValueError, match="out"):
                buffer.get_at([0, 1], out=wrong)
            assert not wrong["x"].any()


@pytest.mark.parametrize("kind", ROW_KINDS)
def test_packed_rows_are_the_rows(kind: str, tmp_path: Path) -> None:
    with create(kind, directory=tmp_path, capacity=5) as buffer:
        buffer.extend(block(list(range(7))))
        layout = buffer.inner_storage.layout
        rows = buffer.get_packed_at([0, -1])
        assert rows.shape == (2, layout.row_nbytes) and rows.dtype == np.uint8
        x = next(f for f in layout.fields if f.name == "x")
        assert rows[:, x.offset : x.offset + 8].copy().view(np.int64).ravel().tolist() == [2, 6]
        out = np.zeros((2, layout.row_nbytes), np.uint8)
        assert buffer.get_packed_at([0, -1], out=out) is out and np.array_equal(out, rows)
        single = np.zeros(layout.row_nbytes, np.uint8)
        assert buffer.get_packed_at(-1, out=single) is single and np.array_equal(single, rows[1])
        assert np.array_equal(buffer.get_packed_at(0), rows[0])
        with pytest.raises(ValueError, match="out"):
            buffer.get_packed_at([0], out=out)
        with pytest.raises(ValueError, match="out"):
            buffer.get_packed_at(0, out=out)


def test_a_storage_without_rows_has_no_packed_ones() -> None:
    with create("test-list", directory="") as buffer:
        buffer.append(sample(1))
        with pytest.raises(TypeError, match="row storage"):
            buffer.get_packed_at(0)
        with pytest.raises(ValueError, match="no lanes"):
            buffer.on_lane(0)


@pytest.mark.parametrize("kind", ROW_KINDS)
def test_a_column_is_read_without_the_rest_of_the_rows(kind: str, tmp_path: Path) -> None:
    with create(kind, directory=tmp_path) as buffer:
        buffer.extend(block([1, 2, 3]))
        engine: Any = buffer.engine
        engine.codec = None  # nothing can read whole rows
        column = buffer.get_column("x")
        assert column[...].tolist() == [1, 2, 3] and column[-1] == 3
        assert set(StepSampler(column, 50, seed=0).sample().tolist()) == {1, 2, 3}
        assert set(buffer.draw_column_at(("x",), IndexStream(0), 50).tolist()) == {1, 2, 3}
        assert buffer.get_located(buffer.locate([2]), ("x",))[0].tolist() == [3]  # type: ignore[index]


def allocated(call: Callable[[], Any]) -> int:
    """The most bytes that a call holds at a time."""
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("kind", ["memory", "test-list"])
def test_a_call_costs_what_it_adds_or_returns_not_what_is_there(kind: str, tmp_path: Path) -> None:
    """To go through all samples or all segments would take a hundred kilobytes and more."""
    n, some = 4_000, 30_000
    with create(kind, directory=tmp_path, capacity=2 * n, maintain_segment_metadata=True) as buffer:
        values = block(list(range(n)))
        buffer.extend(values, ends=np.ones(n, bool))
        assert allocated(lambda: buffer.get_segments()) > some
        one, more = sample(1), block([1])
        for call in (lambda: buffer.append(one), buffer.mark_segment_end, lambda: buffer.extend(more)):
            assert allocated(call) < some
            assert allocated(lambda: buffer[[0]]) < some
        buffer.clear()
        buffer.extend(values)
        assert allocated(lambda: buffer.get_segments()) < some
        assert buffer.get_segments() == [(0, n)]


@EVERY
def test_iteration_leaves_out_what_was_overwritten(kind: str, tmp_path: Path) -> None:
    with create(kind, directory=tmp_path, capacity=4) as buffer:
        buffer.extend(block([1, 2, 3, 4]))
        seen = []
        for s in buffer:
            seen.append(int(s["x"]))
            buffer.append(sample(10 + len(seen)))  # one goes for each that is seen
        assert seen == [1, 2, 3, 4][: len(seen)] and set(seen) <= {1, 2, 3, 4} and len(seen) >= 2
        seen = []
        for s in buffer:
            if not seen:
                buffer.remove_at([-1, -2])  # the newest: nothing moves
            seen.append(int(s["x"]))
        assert len(seen) == 2


@EVERY
def test_a_record_and_locations_are_frozen_and_kept_small(kind: str, tmp_path: Path) -> None:
    with create(kind, directory=tmp_path, capacity=4, maintain_segment_metadata=True) as buffer:
        buffer.extend(block([1, 2]), ends=[True, False])
        stats, place = buffer.stats(), buffer.locate([0, 1])
        for record, name in ((stats, "live"), (place, "row")):
            with pytest.raises(FrozenInstanceError):
                setattr(record, name, 3)
        one = buffer.locate(-1)
        assert (int(one.row), int(one.step)) == (1, 0) and one.segment != place.segment[0]
        assert buffer.is_current(one) and buffer.is_current(place).tolist() == [True, True]
        buffer.remove_at(0)
        assert buffer.is_current(place).tolist() == [False, True]
        for row, generation in ((99, 1), (-1, 0), (0, 10**6)):
            assert not buffer.is_current(Location.of([row], [generation])).any()


@EVERY
def test_extend_from_counts_what_it_copied_before_an_error(kind: str, tmp_path: Path) -> None:
    with create(kind, directory=tmp_path, capacity=9) as buffer:
        with pytest.raises(ValueError, match="another batch"):
            buffer.extend_from(buffer)
        with pytest.raises(ValueError, match="another batch"):
            buffer.extend_from(buffer.get_slice([0] if len(buffer) else []))
        narrow = {"x": ((), "int8"), "y": ((2,), "float32")}
        with create(kind, narrow, directory=tmp_path, capacity=9) as target:
            buffer.extend(block([1, 2, 3, 4]))
            with pytest.raises(SchemaError, match="x") as caught:
                target.extend_from(buffer, chunk_size=2)
            assert caught.value.copied == len(target) == 0  # type: ignore[attr-defined]
            assert target.stats().rejected == 2


def test_arrays_of_other_backends_are_taken() -> None:
    torch = pytest.importorskip("torch")
    with create("memory", directory="", capacity=4) as buffer:
        buffer.append({"x": torch.tensor(1), "y": torch.tensor([1.0, -1.0])})
        buffer.extend(
            {"x": torch.tensor([2, 3]), "y": torch.tensor([[2.0, -2.0], [3.0, -3.0]], requires_grad=True)}
        )
        buffer.set_at(torch.tensor([0]), {"x": torch.tensor([5]), "y": np.array([[5, -5]], np.float32)})
        assert numbers(buffer) == [5, 2, 3] and buffer[torch.tensor([2, 0])]["x"].tolist() == [3, 5]


def test_a_loaded_buffer_reads_as_another_backend(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    with create("memory", directory="", capacity=4, maintain_segment_metadata=True) as buffer:
        buffer.extend(block([1, 2]))
        buffer.dumps(tmp_path / "dump")
    with ReplayBuffer.load_from(tmp_path / "dump", backend="torch", read_only=False) as loaded:
        assert isinstance(loaded[0]["y"], torch.Tensor) and loaded[:]["x"].tolist() == [1, 2]
        loaded.append({"x": torch.tensor(3), "y": torch.tensor([3.0, -3.0])})
        assert loaded.open_segment == (2, 3) and loaded.backend.name == "torch"


@EVERY
def test_set_at_leaves_the_open_segment_open(kind: str, tmp_path: Path) -> None:
    with create(kind, directory=tmp_path, capacity=6, maintain_segment_metadata=True) as buffer:
        buffer.extend(block([0, 1]))
        buffer.append(sample(2))
        buffer.set_at([0, 2], block([10, 12]))
        assert buffer.open_segment == (2, 3) and buffer.get_segments() == [(0, 2)]
        buffer.append(sample(3))
        assert buffer.open_segment == (2, 4) and numbers(buffer) == [10, 1, 12, 3]


@EVERY
@pytest.mark.parametrize("n", [4, 5, 9])
def test_a_block_as_large_as_the_buffer_starts_at_row_0(kind: str, n: int, tmp_path: Path) -> None:
    with create(kind, directory=tmp_path, capacity=4) as buffer:
        buffer.append(sample(0))
        buffer.extend(block(list(range(1, n + 1))))
        assert numbers(buffer) == list(range(n - 3, n + 1))
        assert buffer.locate(...).row.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("kind", ROW_KINDS)
def test_a_storage_tells_of_an_open_segment_in_any_lane(kind: str, tmp_path: Path) -> None:
    with create(kind, directory=tmp_path, capacity=6, num_lanes=3, maintain_segment_metadata=True) as buffer:
        lane = buffer.on_lane(2)
        lane.append(sample(0))
        assert buffer.inner_storage.has_open_segment
        lane.mark_segment_end()
        assert not buffer.inner_storage.has_open_segment
        lane.close()


@pytest.mark.parametrize("kind", ROW_KINDS)
def test_lanes_are_equal_rings_in_index_order(kind: str, tmp_path: Path) -> None:
    with create(kind, directory=tmp_path, capacity=6, num_lanes=3, maintain_segment_metadata=True) as buffer:
        handles = [buffer.on_lane(k) for k in (2, 0, 1)]
        for lane in handles:
            lane.extend(block([10 * lane.number + i for i in range(3)]))
        assert numbers(buffer) == [1, 2, 11, 12, 21, 22]
        assert buffer.get_segments() == [(0, 2), (2, 4), (4, 6)]
        assert buffer.locate(...).row.tolist() == [
            0,
            1,
            2,
            3,
            4,
            5,
        ]  # a block of a lane's size starts at its row 0
        handles[1].append(sample(3))
        assert numbers(buffer) == [2, 3, 11, 12, 21, 22] and handles[1].open_segment == (1, 2)
        assert buffer.get_segments() == [(0, 1), (2, 4), (4, 6)]
        handles[1].close()
        assert buffer.get_segments() == [(0, 1), (1, 2), (2, 4), (4, 6)]


@EVERY
def test_steps_count_what_of_a_block_was_never_stored(kind: str, tmp_path: Path) -> None:
    with create(kind, directory=tmp_path, capacity=4, maintain_segment_metadata=True) as buffer:
        buffer.extend(block(list(range(6))), ends=np.arange(6) == 2)
        assert numbers(buffer) == [2, 3, 4, 5] and buffer.locate(...).step.tolist() == [2, 0, 1, 2]


@EVERY
def test_clear_counts_what_it_takes_and_ends_the_open_segment(kind: str, tmp_path: Path) -> None:
    with create(kind, directory=tmp_path, capacity=8, maintain_segment_metadata=True) as buffer:
        for i in range(3):
            buffer.append(sample(i))
        (ended,) = set(buffer.locate(...).segment.tolist())
        buffer.clear()
        stats = buffer.stats()
        assert (stats.offered, stats.live, stats.evicted, stats.removed) == (3, 0, 0, 3)
        assert buffer.open_segment is None and buffer.get_segments() == [] and buffer.offset == 0
        buffer.append(sample(7))
        assert buffer.open_segment == (0, 1)
        place = buffer.locate(...)
        assert place.step.tolist() == [0] and place.segment.tolist() != [ended], "a segment of its own"


@EVERY
def test_an_appended_sample_has_a_generation_of_its_own(kind: str, tmp_path: Path) -> None:
    with create(kind, directory=tmp_path, capacity=4) as buffer:
        for i in range(4):
            buffer.append(sample(i))
        where = buffer.locate(...)
        assert buffer.storage.get([0, 3])["x"].tolist() == [0, 3], "by the numbers of their rows"
        for i in range(4, 6):
            buffer.append(sample(i))
        assert buffer.is_current(where).tolist() == [False, False, True, True]


def test_an_unbounded_buffer_keeps_its_row_numbers_as_it_grows() -> None:
    with create("memory", directory="", capacity=None, maintain_segment_metadata=True) as buffer:
        for first in range(0, 5_000, 1_000):  # past the first chunks of rows
            buffer.extend(block(list(range(first, first + 1_000))))
        place: Any = buffer.locate(...)
        assert place.row.tolist() == list(range(5_000)) and buffer.get_segments()[-1] == (4_000, 5_000)
        buffer.remove_at(np.arange(0, 5_000, 2))
        assert (
            buffer[:]["x"].tolist() == list(range(1, 5_000, 2)) and len(buffer.get_segments() or []) == 2_500
        )


@pytest.mark.parametrize(
    ("gone", "most"), [([0, 1], 0), ([-1, -2], 0), ([1], 1), ([-2], 1), ([1, 3], 2), ([4, 6], 2), ([2, 5], 4)]
)
@pytest.mark.parametrize("kind", ROW_KINDS)
def test_a_removal_copies_the_rows_of_the_shorter_side(
    kind: str, gone: list[int], most: int, tmp_path: Path
) -> None:
    with create(kind, directory=tmp_path, capacity=8) as buffer:
        buffer.extend(block(list(range(3))))
        for v in range(3, 11):
            buffer.append(sample(v))  # round the end of the ring
        before = buffer.locate(...)
        buffer.remove_at(gone)
        after = buffer.locate(...)
        assert numbers(buffer) == [
            v for i, v in enumerate(range(3, 11)) if i not in gone and i - 8 not in gone
        ]
        known = set(zip(before.row.tolist(), before.generation.tolist()))
        moved = (
            set(zip(after.row.tolist(), after.generation.tolist())) - known
        )  # a moved row is of a new generation
        assert len(moved) == most
        storage: Any = buffer.storage
        assert storage.rows.native.generations(0, 8).max() <= 3, (
            "a mark of the removal is none of a generation"
        )


@pytest.mark.parametrize("kind", ["memory", "memmap"])
def test_index_i_of_an_unbounded_buffer_is_row_i_whatever_was_removed(kind: str, tmp_path: Path) -> None:
    with create(kind, directory=tmp_path, capacity=None, maintain_segment_metadata=True) as buffer:
        buffer.extend(block(list(range(8))))
        for gone, left in (([0, 1], 6), ([1], 5), ([-1], 4), ([0], 3)):
            buffer.remove_at(gone)
            assert buffer.offset == 0 and buffer.locate(...).row.tolist() == list(range(left))
        assert numbers(buffer) == [4, 5, 6]


@pytest.mark.parametrize("kind", ROW_KINDS)
def test_a_first_write_goes_to_a_lane_that_nobody_holds(kind: str, tmp_path: Path) -> None:
    with create(kind, directory=tmp_path, capacity=8, num_lanes=2) as buffer, buffer.on_lane(0) as lane:
        lane.append(sample(1))
        buffer.append(sample(2))
        assert numbers(buffer) == [1, 2] and buffer.locate(...).row.tolist() == [0, 4]
        with buffer.on_lane(1):
            pass  # which gives it up, though it was the lane of writes that name none
        storage: Any = buffer.storage
        assert storage.rows.native.owner(1) == 0
        buffer.append(sample(3))
        assert numbers(buffer) == [1, 2, 3] and storage.rows.native.owner(1) == _core.own_word()


@pytest.mark.parametrize("kind", ROW_KINDS)
def test_segments_whose_steps_go_on_are_still_two(kind: str, tmp_path: Path) -> None:
    """The head of the second is gone, so that its first step follows the last of the first."""
    with create(kind, directory=tmp_path, capacity=16, maintain_segment_metadata=True) as buffer:
        buffer.extend(block([0, 1, 2]))
        buffer.extend(block(list(range(10, 16))))
        buffer.remove_at([3, 4, 5])
        assert buffer.locate(...).step.tolist() == [0, 1, 2, 3, 4, 5]
        assert buffer.get_segments() == [(0, 3), (3, 6)]


@pytest.mark.parametrize("kind", ROW_KINDS)
def test_frames_with_gaps_between_them(kind: str, tmp_path: Path) -> None:
    with create(kind, directory=tmp_path, capacity=20) as buffer:
        buffer.extend(block(list(range(15))))
        buffer.extend(block(list(range(15, 25))))  # round the end of the ring
        offsets = np.array([-4, -3, 0, 2])
        frames = SliceStackedBatch(buffer, offsets)[4:18]["x"]
        np.testing.assert_array_equal(frames, np.arange(9, 23)[:, None] + offsets)
