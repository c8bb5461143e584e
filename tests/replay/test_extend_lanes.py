"""extend_lanes: one call that appends one sample to each of many lanes."""

from __future__ import annotations

import multiprocessing as mp
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import recollect as rc

SPACE = {"x": ((), "int64"), "y": ((3,), "float32"), "z": ((), "bool")}


def buffer(lanes: int, run: int = 4, tracked: bool = True, cls: Any = rc.MemoryStorage, **kwargs: Any) -> Any:
    return rc.ReplayBuffer.create(
        cls, SPACE, capacity=lanes * run, num_lanes=lanes, maintain_segment_metadata=tracked, **kwargs
    )


def block(values: list[int]) -> dict[str, Any]:
    x = np.array(values, np.int64)
    return {"x": x, "y": np.repeat(x[:, None], 3, axis=1).astype("float32"), "z": x % 2 == 1}


@given(
    lanes=st.integers(1, 6),
    run=st.integers(1, 5),
    tracked=st.booleans(),
    data=st.data(),
)
def test_it_is_an_append_to_each_lane(lanes: int, run: int, tracked: bool, data: Any) -> None:
    one, many = buffer(lanes, run, tracked), buffer(lanes, run, tracked)
    handles = [one.on_lane(k) for k in range(lanes)]
    value = 0
    for _ in range(data.draw(st.integers(1, 8))):
        chosen = data.draw(st.lists(st.integers(0, lanes - 1), max_size=8))
        ends = data.draw(st.lists(st.booleans(), min_size=len(chosen), max_size=len(chosen)))
        values = list(range(value, value + len(chosen)))
        value += len(chosen)
        samples = block(values)
        for i, k in enumerate(chosen):
            handles[k].append({key: column[i] for key, column in samples.items()})
            if ends[i]:
                handles[k].mark_segment_end()
        many.extend_lanes(samples, chosen, ends=np.array(ends, bool) if tracked else None)
    assert len(one) == len(many)
    for key, column in one[:].items():
        assert column.tobytes() == many[:][key].tobytes()
    assert one.get_segments() == many.get_segments()
    assert one.stats() == many.stats()
    where, there = one.locate(...), many.locate(...)
    assert np.array_equal(where.step, there.step) and np.array_equal(where.generation, there.generation)


@given(
    size=st.integers(1, 9),
    capacity=st.integers(1, 12),
    tracked=st.booleans(),
    data=st.data(),
)
def test_rows_choose_samples_of_the_block(size: int, capacity: int, tracked: bool, data: Any) -> None:
    rows = np.array(data.draw(st.lists(st.integers(0, size - 1), max_size=9)), np.int64)
    samples = block(list(range(size)))
    picked = {key: column[rows] for key, column in samples.items()}
    one, other = buffer(1, capacity, tracked), buffer(1, capacity, tracked)
    one.extend(picked)
    other.extend(samples, rows=rows)
    assert one[:]["x"].tolist() == other[:]["x"].tolist()
    assert one.stats() == other.stats() and one.get_segments() == other.get_segments()
    lanes = np.array(data.draw(st.lists(st.integers(0, 2), min_size=len(rows), max_size=len(rows))), np.int64)
    one, other = buffer(3, capacity, tracked), buffer(3, capacity, tracked)
    one.extend_lanes(picked, lanes)
    other.extend_lanes(samples, lanes, rows=rows)
    for key, column in one[:].items():
        assert column.tobytes() == other[:][key].tobytes()


def test_rows_that_are_not_there() -> None:
    buf = buffer(2)
    for rows in ([0, 2], [-1, 0]):
        with pytest.raises(IndexError):
            buf.extend_lanes(block([1, 2]), [0, 1], rows=rows)
        for tracked in (False, True):
            with pytest.raises(IndexError):
                buffer(1, tracked=tracked).extend(block([1, 2]), rows=rows)
    with pytest.raises(ValueError, match="rows"):
        buf.extend_lanes(block([1, 2]), [0, 1], rows=[0])
    one = buffer(1, tracked=False)
    with pytest.raises(rc.DtypeError):
        one.extend({**block([1, 2]), "x": np.zeros(2, "int32")}, rows=[1])
    assert one.stats().rejected == 1 and len(one) == len(buf) == 0


def test_values_that_need_conversion_and_text() -> None:
    buf = buffer(2, cast=True)
    buf.extend_lanes({"x": [1, 2], "y": np.zeros((2, 3), "float64"), "z": [True, False]}, [1, 0])
    assert buf[:]["x"].tolist() == [2, 1]
    text = rc.ReplayBuffer.create(
        rc.MemoryStorage, {"t": __import__("gymnasium").spaces.Text(5)}, capacity=4, num_lanes=2
    )
    text.extend_lanes({"t": ("ab", "c")}, [1, 0])
    assert text[:]["t"] == ("c", "ab")


def test_a_refused_block_changes_nothing_and_is_counted() -> None:
    buf = buffer(2)
    for value, lanes, error in [
        (block([1, 2, 3]), [0, 1], ValueError),
        ({**block([1, 2]), "x": np.zeros(2, "int32")}, [0, 1], rc.DtypeError),
    ]:
        before = buf.stats().rejected
        with pytest.raises(error):
            buf.extend_lanes(value, lanes)
        assert buf.stats().rejected == before + len(value["z"])
    for lanes in ([0, 2], [-1, 0]):
        with pytest.raises(IndexError):
            buf.extend_lanes(block([1, 2]), lanes)
    with pytest.raises(ValueError, match="ends"):
        buf.extend_lanes(block([1, 2]), [0, 1], ends=np.array([True]))
    with pytest.raises(ValueError, match="ends: this buffer keeps no segments"):
        buffer(2, tracked=False).extend_lanes(block([1, 2]), [0, 1], ends=np.array([True, True]))
    assert len(buf) == 0


def test_only_buffers_with_lanes_have_it() -> None:
    best = rc.ReplayBuffer.create(rc.MemoryStorage, SPACE, capacity=4, evict="lowest", evict_key="x")
    with pytest.raises(ValueError, match="has no lanes"):
        best.extend_lanes(block([1]), [0])
    best.close()
    with pytest.raises(rc.ClosedError):
        best.extend_lanes(block([1]), [0])


def _hold(buf: Any, ready: Any, leave: Any) -> None:
    with buf.on_lane(1):
        ready.set()
        leave.wait(30)


@pytest.mark.process
def test_a_lane_of_another_process_means_that_nothing_is_written() -> None:
    with buffer(3, cls=rc.SharedMemoryStorage, multiprocessing=True) as buf:
        context = mp.get_context("fork")
        ready, leave = context.Event(), context.Event()
        child = context.Process(target=_hold, args=(buf, ready, leave))
        child.start()
        try:
            assert ready.wait(30)
            with pytest.raises(rc.LaneBusyError, match="lane 1 is taken"):
                buf.extend_lanes(block([1, 2, 3]), [0, 1, 2])
            assert len(buf) == 0
        finally:
            leave.set()
            child.join(30)
        buf.extend_lanes(block([1, 2, 3]), [0, 1, 2])
        assert len(buf) == 3
