"""SubIndexedBatch: frozen positions, or a live pass-through."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.batch.make import batch, block, numbers, sample

from recollect.batch import FrameStackedBatch, SubIndexedBatch
from recollect.errors import ReadOnlyError, SegmentOpenError
from recollect.sampling import IndexStream
from recollect.testing.batch_contract import equal


class TestFrozen:
    @given(st.integers(1, 10), st.data())
    def test_shows_the_list_at_those_positions(self, n: int, data: st.DataObject) -> None:
        index = data.draw(st.lists(st.integers(-n, n - 1), max_size=12))
        view, model = SubIndexedBatch(numbers(n), index), [i % n for i in index]
        assert view[:].tolist() == model
        assert len(view) == len(model)
        if model:
            at = data.draw(st.lists(st.integers(-len(model), len(model) - 1), max_size=5))
            assert view[at].tolist() == [model[i] for i in at]
            assert [int(x) for x in view] == model

    def test_is_frozen_at_that_moment(self) -> None:
        source = numbers(5)
        last, mask = SubIndexedBatch(source, -1), SubIndexedBatch(source, np.arange(5) > 2)
        index = np.array([0, 1])
        pair = SubIndexedBatch(source, index)
        index[:] = 4
        source.extend([5, 6])
        assert last[:].tolist() == [4]
        assert mask[:].tolist() == [3, 4]
        assert pair[:].tolist() == [0, 1]
        assert pair.sub_indexes.tolist() == [0, 1]
        assert len(SubIndexedBatch(source, slice(None))) == 7

    def test_an_int_is_a_batch_of_one(self) -> None:
        view = SubIndexedBatch(numbers(5), 3)
        assert len(view) == 1
        assert view[0] == 3

    def test_on_a_ring_it_shows_what_is_there_now(self) -> None:
        ring = numbers(4, capacity=4)
        view = ring.get_slice([0, 3])
        ring.append(4)
        assert view[:].tolist() == [1, 4]

    def test_a_position_no_longer_there_is_an_index_error(self) -> None:
        source = numbers(4)
        view = source.get_slice([0, 3])
        source.remove_at([1])
        assert view[0] == 0
        with pytest.raises(IndexError, match="3"):
            view[1]
        with pytest.raises(IndexError):
            view[:]
        assert [int(x) for x in view] == [0]
        with pytest.raises(IndexError):
            view.draw_at(IndexStream(0), 50)

    def test_writes_through(self) -> None:
        source = batch(5)
        view = source.get_slice([4, 2])
        view[1] = sample(20)
        view[[0]] = block([40])
        view.set_flattened_at(0, batch(1, start=41).get_flattened_at(0))
        assert source[:]["id"].tolist() == [0, 1, 20, 3, 41]
        assert view.is_mutable

    def test_cannot_grow_or_shrink(self) -> None:
        source = batch(3)
        view = source.get_slice(slice(None))
        writes = [
            lambda: view.append(sample(0)),
            lambda: view.extend(block([0])),
            lambda: view.remove_at(0),
            lambda: view.append_flattened(source.get_flattened_at(0)),
            lambda: view.extend_flattened(source.get_flattened_at([0])),
            lambda: view.extend_from(batch(1)),
            lambda: view._check_remove_at(0),
        ]
        for write in writes:
            with pytest.raises(ReadOnlyError, match="ListBatch"):
                write()
        assert len(source) == 3

    def test_is_drawn_from_by_its_own_length(self) -> None:
        view = numbers(100).get_slice([7, 9])
        assert set(view.draw_at(IndexStream(0), 40).tolist()) == {7, 9}
        pair = batch(100).get_slice([7, 9])
        assert set(pair.draw_column_at(("id",), IndexStream(0), 40).tolist()) == {7, 9}

    def test_the_index_cannot_be_changed(self) -> None:
        with pytest.raises(ValueError, match="read-only"):
            numbers(3).get_slice([0]).sub_indexes[0] = 1

    def test_only_of_a_batch(self) -> None:
        with pytest.raises(TypeError, match="must be a BatchBase"):
            SubIndexedBatch([1, 2], ...)  # type: ignore[arg-type]

    def test_out_of_range_at_once(self) -> None:
        with pytest.raises(IndexError):
            SubIndexedBatch(numbers(3), [3])

    def test_pickles(self) -> None:
        assert pickle.loads(pickle.dumps(numbers(5).get_slice([4, 0])))[:].tolist() == [4, 0]


class TestLive:
    def test_has_the_length_of_now(self) -> None:
        source = numbers(2)
        view = SubIndexedBatch(source, ...)
        source.append(2)
        assert len(view) == 3
        assert view[-1] == 2
        assert view.sub_indexes is ...
        assert view.draw_at(IndexStream(1), 9).tolist() == source.draw_at(IndexStream(1), 9).tolist()

    def test_passes_all_writes_on(self) -> None:
        source = batch(1, segments=[])
        view = source.get_slice(...)
        view.append(sample(1))
        with pytest.raises(SegmentOpenError):
            view.remove_at(-1)
        source.mark_segment_end()
        view.extend(block([2, 3]))
        view.append_flattened(batch(1, start=4).get_flattened_at(0))
        source.mark_segment_end()
        view.extend_flattened(batch(2, start=5).get_flattened_at([0, 1]))
        view.remove_at([0])
        view[0] = sample(50)
        assert source[:]["id"].tolist() == [50, 2, 3, 4, 5, 6]
        assert view.get_segments() == source.get_segments()


def model_segments(index: list[int], segments: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Maximal runs of the view that step by one within one source segment."""
    number = {i: k for k, (a, b) in enumerate(segments) for i in range(a, b)}
    found: list[tuple[int, int]] = []
    for v, i in enumerate(index):
        if i not in number:
            continue
        joins = bool(found) and found[-1][1] == v and i == index[v - 1] + 1 and number[i] == number.get(i - 1)
        found[-1:] = [(found[-1][0], v + 1)] if joins else [*found[-1:], (v, v + 1)]
    return found


class TestSegments:
    @given(st.sets(st.integers(0, 12)), st.lists(st.integers(0, 11), max_size=14))
    def test_end_where_the_index_skips(self, cuts: set[int], index: list[int]) -> None:
        edges = sorted(cuts)
        segments = list(zip(edges[::2], edges[1::2]))  # gaps between them, and samples in none
        view = SubIndexedBatch(numbers(12, segments=segments), index)
        want = model_segments(index, segments)
        assert view.get_segments() == want
        ids = view.locate(slice(None)).segment
        same = {(a, b) for a in range(len(index)) for b in range(len(index)) if ids[a] == ids[b]}
        together = {(a, a) for a in range(len(index))}
        together |= {(a, b) for s, e in want for a in range(s, e) for b in range(s, e)}
        # A sample in no segment is the same as itself only, also when the view shows it twice.
        doubles = {(a, b) for a, b in same - together if index[a] == index[b]}
        assert same - doubles == together

    def test_unknown_stays_unknown(self) -> None:
        view = numbers(4).get_slice([0, 2])
        assert view.get_segments() is None
        assert view.locate(slice(None)).segment.tolist() == [-1, -1]

    def test_one_run_keeps_the_ids_of_the_source(self) -> None:
        source = numbers(6, segments=[(0, 3), (3, 6)])
        view = source.get_slice(slice(2, 5))
        assert view.locate(slice(None)).segment.tolist() == source.locate([2, 3, 4]).segment.tolist()
        assert view.locate(slice(None)).step.tolist() == [2, 0, 1]

    def test_positions_that_are_gone_are_in_none(self) -> None:
        source = numbers(6, segments=[(0, 6)])
        view = source.get_slice([0, 1, 5])
        source.remove_at([2, 3])
        assert view.get_segments() == [(0, 2)]


class TestPlaces:
    def test_a_sample_shown_twice_is_found_where_it_was_asked_for(self) -> None:
        view = numbers(10).get_slice([5, 6, 5, 9])
        place = view.locate([2, 0, 3])
        assert view.relocate(place).tolist() == [2, 0, 3]
        first = numbers(10).get_slice([0, 1, 0])
        assert first.relocate(first.locate([2, 0])).tolist() == [2, 0]
        stack = FrameStackedBatch(view, 1)
        found = stack.get_located(stack.locate([2, 0]))
        assert found is not None
        assert found[0].tolist() == [[6, 5], [5, 5]]

    def test_through_two_views(self) -> None:
        inner = numbers(10).get_slice([5, 6, 5, 9])
        outer = inner.get_slice([2, 3])
        assert outer.relocate(outer.locate([0, 1])).tolist() == [0, 1]
        assert outer.is_current(outer.locate([0, 1])).all()

    def test_without_a_hint_the_first_is_found(self) -> None:
        from recollect.batch import Location

        view = numbers(10).get_slice([5, 6, 5])
        place = view.locate([2])
        assert view.relocate(Location.of(place.row, place.generation)).tolist() == [0]
        every = numbers(10).locate(slice(None))
        found = view.relocate(Location.of(every.row, every.generation)).tolist()
        assert found == [-1, -1, -1, -1, -1, 0, 1, -1, -1, -1]

    def test_what_moved_out_of_sight_has_no_index(self) -> None:
        ring = numbers(4, capacity=4)
        view = ring.get_slice([0, 1])
        place = view.locate([0, 1])
        ring.append(4)
        assert view.relocate(place).tolist() == [-1, 0]
        assert view.is_current(place).tolist() == [False, True]
        assert numbers(3).get_slice([]).relocate(numbers(3).locate([0])).tolist() == [-1]

    def test_located_samples_are_read_from_the_source(self) -> None:
        ring = numbers(4, capacity=4)
        view: Any = ring.get_slice([2, 3])
        place = view.locate([0, 1])
        ring.append(4)
        found = view.get_located(place)
        assert found is not None
        assert equal(found[0], np.array([2, 3]))
