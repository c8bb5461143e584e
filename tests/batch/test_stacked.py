"""SliceStackedBatch and FrameStackedBatch against a plain list."""

from __future__ import annotations

import pickle
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st
from tests.batch.make import Counting, batch, numbers, sample

from recollect.batch import (
    BatchBase,
    CombinedBatch,
    FrameStackedBatch,
    Location,
    SliceStackedBatch,
    ToBackendOrDeviceBatch,
    TransformedBatch,
)
from recollect.batch import boundaries as boundaries_module
from recollect.errors import ContentionError, ReadOnlyError
from recollect.sampling import IndexStream, StepSampler
from recollect.testing.batches import ListBatch

by_id = SliceStackedBatch.get_valid_mask_function_with_episodeid_key
by_end = SliceStackedBatch.get_valid_mask_function_with_episode_end_key
OFFSETS = st.sets(st.integers(-5, 5)).map(lambda found: sorted({0, *found}))


def mask_of(stack: BatchBase, index: Any) -> Any:
    metadata = stack.get_at_with_metadata(index)[1]
    assert metadata is not None
    return metadata["slice_valid_mask"]


def model(n: int, same: Any, anchor: int, offsets: list[int], fill: bool) -> tuple[list[int], list[bool]]:
    """Frames and mask of one anchor in the list 0 .. n - 1; `same(i, anchor)` tells what belongs together."""
    at = [anchor + k for k in offsets]
    valid = [0 <= i < n and same(i, anchor) for i in at]
    frames = [min(max(i, 0), n - 1) for i in at]
    if fill:
        zero = offsets.index(0)
        for t in range(len(at)):
            step = 1 if t < zero else -1
            u = t
            while not valid[u]:
                u += step
            frames[t] = at[u]
    return frames, valid


class TestAgainstAList:
    @given(st.integers(1, 12), st.none() | st.sets(st.integers(1, 11)), OFFSETS, st.booleans(), st.data())
    def test_segments(self, n: int, cuts: Any, offsets: list[int], fill: bool, data: st.DataObject) -> None:
        edges = sorted({0, n, *(c for c in cuts or () if c < n)})
        segments = None if cuts is None else list(pairwise(edges))
        number = [sum(e <= i for e in edges) for i in range(n)]
        source = numbers(n, segments=segments)
        stack = SliceStackedBatch(source, offsets, fill_invalid_data=fill)
        anchors = data.draw(st.lists(st.integers(0, n - 1), max_size=6))
        self.check(stack, n, lambda i, a: cuts is None or number[i] == number[a], anchors, fill)

    @given(st.lists(st.integers(0, 2), min_size=1, max_size=12), OFFSETS, st.booleans(), st.booleans())
    def test_episode_ids(self, ids: list[int], offsets: list[int], fill: bool, in_metadata: bool) -> None:
        def same(i: int, a: int) -> bool:
            return all(ids[j] == ids[a] for j in range(min(i, a), max(i, a) + 1))

        source = self.labelled("episode_id", ids, in_metadata)
        stack = SliceStackedBatch(source, offsets, by_id(is_in_metadata=in_metadata), fill)
        self.check(stack.get_column("x"), len(ids), same, list(range(len(ids))), fill, stack)

    @given(st.lists(st.booleans(), min_size=1, max_size=12), OFFSETS, st.booleans(), st.booleans())
    def test_episode_ends(self, ends: list[bool], offsets: list[int], fill: bool, in_metadata: bool) -> None:
        def same(i: int, a: int) -> bool:
            return not any(ends[j] for j in range(min(i, a), max(i, a)))

        source = self.labelled("episode_end", ends, in_metadata)
        stack = SliceStackedBatch(source, offsets, by_end(is_in_metadata=in_metadata), fill)
        self.check(stack.get_column("x"), len(ends), same, list(range(len(ends))), fill, stack)

    @given(st.lists(st.booleans(), min_size=1, max_size=12), OFFSETS)
    def test_the_two_helpers_agree_and_so_does_a_plain_call(
        self, ends: list[bool], offsets: list[int]
    ) -> None:
        ids = np.concatenate([[0], np.cumsum(ends)[:-1]])
        rows = [{"episode_end": bool(e), "episode_id": int(i)} for e, i in zip(ends, ids)]
        source = ListBatch({"episode_end": ((), "bool"), "episode_id": ((), "int64")}, rows)
        one, two = SliceStackedBatch(source, offsets, by_id()), SliceStackedBatch(source, offsets, by_end())
        want = mask_of(one, slice(None))
        assert np.array_equal(mask_of(two, slice(None)), want)
        helper = by_end()
        wrapped = SliceStackedBatch(source, offsets, lambda *args: helper(*args))
        assert np.array_equal(mask_of(wrapped, slice(None)), want)
        expanded = one.expand_index(slice(None))
        assert np.array_equal(one.get_valid_mask(expanded, None, None), want)

    @staticmethod
    def labelled(key: str, values: list[Any], in_metadata: bool) -> ListBatch:
        if in_metadata:
            kind = "bool" if key == "episode_end" else "int64"
            rows = [{"x": i} for i in range(len(values))]
            return ListBatch(
                {"x": ((), "int64")},
                rows,
                metadata=[{key: v} for v in values],
                metadata_space={key: ((), kind)},
            )
        kind = "bool" if key == "episode_end" else "int64"
        return ListBatch(
            {"x": ((), "int64"), key: ((), kind)}, [{"x": i, key: v} for i, v in enumerate(values)]
        )

    @staticmethod
    def check(view: BatchBase, n: int, same: Any, anchors: list[int], fill: bool, stack: Any = None) -> None:
        stack = stack or view
        offsets = stack.fixed_offset.tolist()
        want = [model(n, same, a, offsets, fill) for a in anchors]
        assert view[anchors].tolist() == [frames for frames, _ in want]
        assert view[anchors].dtype == np.int64
        assert mask_of(stack, anchors).tolist() == [mask for _, mask in want]
        for a, (frames, mask) in zip(anchors, want):
            assert view[a].tolist() == frames
            assert mask_of(stack, a).tolist() == mask


class TestOffsets:
    @pytest.mark.parametrize("bad", [[], [1], [-1, 1], [0, 0], [1, 0], [[0]], [0.0], 0, ["0"]])
    def test_bad_ones(self, bad: Any) -> None:
        with pytest.raises(ValueError, match="fixed_offset"):
            SliceStackedBatch(numbers(3), bad)

    def test_of_any_backend(self) -> None:
        torch = pytest.importorskip("torch")
        assert SliceStackedBatch(numbers(3), torch.tensor([-1, 0]))[1].tolist() == [0, 1]

    def test_expand_index_stays_inside_the_batch(self) -> None:
        stack = SliceStackedBatch(numbers(4), [-2, 0, 3])
        assert stack.expand_index([0, -1]).tolist() == [[0, 0, 3], [1, 3, 3]]
        assert stack.expand_index(np.array([False, True, False, False])).tolist() == [[0, 1, 3]]
        assert stack.expand_index([]).shape == (0, 3)
        with pytest.raises(IndexError):
            stack.expand_index([4])

    @given(st.integers(1, 9), OFFSETS)
    def test_rows_at_expanded_positions_are_the_frames(self, n: int, offsets: list[int]) -> None:
        seen = []

        def look(stack: Any, index: Any, data: Any, metadata: Any) -> Any:
            seen.append(np.array_equal(stack.batch[index.ravel()], data.ravel()))
            return np.ones(index.shape, np.bool_)

        source = numbers(n)
        plain = SliceStackedBatch(source, offsets, fill_invalid_data=False)
        asked = SliceStackedBatch(source, offsets, look, fill_invalid_data=False)
        expanded = plain.expand_index(slice(None))
        assert np.array_equal(source[expanded.ravel()].reshape(expanded.shape), plain[:])
        assert np.array_equal(plain.get_valid_mask(expanded, plain[:], None), mask_of(plain, slice(None)))
        assert np.array_equal(mask_of(asked, slice(None)), mask_of(plain, slice(None))) and all(seen)


class TestShapes:
    def test_of_data_flat_and_mask(self) -> None:
        stack = SliceStackedBatch(batch(6), [-4, 0, 1])
        data, metadata = stack.get_at_with_metadata([0, 5])
        assert data["obs"]["image"].shape == (2, 3, 2, 2)
        assert data["obs"]["image"].dtype == np.uint8
        assert data["id"].shape == (2, 3)
        assert metadata is not None
        assert metadata["slice_valid_mask"].shape == (2, 3)
        assert metadata["slice_valid_mask"].dtype == np.bool_
        assert stack.get_flattened_at([0, 5]).shape == (2, 3, 7)
        assert stack.get_flattened_at(0).shape == (3, 7)
        assert stack[0]["obs"]["pos"].shape == (3, 2)
        assert mask_of(stack, 0).shape == (3,)
        assert stack[[]]["obs"]["pos"].shape == (0, 3, 2)
        assert stack.single_space["obs"]["image"].shape == (3, 2, 2)  # type: ignore[index]
        assert len(stack) == 6

    def test_text_is_stacked_as_a_tuple(self) -> None:
        space = spaces.Dict({"t": spaces.Text(3), "k": spaces.Discrete(9)})
        source = ListBatch(space, [{"t": c, "k": i} for i, c in enumerate("abcd")], segments=[(0, 2), (2, 4)])
        stack = FrameStackedBatch(source, 1, 1)
        assert stack[1]["t"] == ("a", "b", "b")
        assert stack[[1, 2]]["t"] == (("a", "c"), ("b", "c"), ("b", "d"))
        assert stack.get_column(("t", 0))[[1, 2]] == ("a", "c")
        assert stack.single_space.contains(stack[1])
        filled = stack.fill_data_with_stack_mask(
            stack.single_space, stack[[1, 2]], np.array([[False, True, True], [True, True, True]])
        )
        assert filled["t"] == (("b", "c"), ("b", "c"), ("b", "d"))

    def test_of_a_stack(self) -> None:
        twice = FrameStackedBatch(FrameStackedBatch(numbers(6), 1), 1)
        assert twice[3].tolist() == [[1, 2], [2, 3]]
        assert twice[[0]].tolist() == [[[0, 0], [0, 0]]]


class TestFrameStack:
    def test_offsets_and_anchor(self) -> None:
        stack = FrameStackedBatch(numbers(9), 2, 1)
        assert stack.fixed_offset.tolist() == [-2, -1, 0, 1]
        assert stack.anchor == 2
        assert stack[4].tolist() == [2, 3, 4, 5]
        assert FrameStackedBatch(numbers(3))[1].tolist() == [1]

    @pytest.mark.parametrize("horizons", [(-1, 0), (0, -1)])
    def test_negative_horizons(self, horizons: tuple[int, int]) -> None:
        with pytest.raises(ValueError, match="fetch_horizon: must be an int of at least 0"):
            FrameStackedBatch(numbers(3), *horizons)

    def test_the_example_of_the_contract(self) -> None:
        source = ListBatch(
            {"obs": ((17,), "float32")}, [{"obs": np.full(17, i, np.float32)} for i in range(20)]
        )
        frames = FrameStackedBatch(source.get_column("obs"), prefetch_horizon=3)
        x, meta = StepSampler(frames, 64, seed=0).sample_with_metadata()
        assert (x.shape, meta["slice_valid_mask"].shape) == ((64, 4, 17), (64, 4))  # type: ignore[index]


class TestMaskFunctions:
    def test_sees_positions_frames_and_metadata_as_read(self) -> None:
        seen: list[Any] = []

        def function(stack: Any, index: Any, data: Any, metadata: Any) -> Any:
            seen.append((stack, index, data, metadata))
            return np.ones(index.shape, np.bool_)

        source = numbers(4, metadata=[{"w": 10 * i} for i in range(4)])
        stack = SliceStackedBatch(source, [-1, 0], function)
        assert mask_of(stack, [0, 3]).tolist() == [[False, True], [True, True]]
        got, index, data, metadata = seen[0]
        assert got is stack
        assert index.tolist() == [[0, 0], [2, 3]]
        assert data.tolist() == [[0, 0], [2, 3]]
        assert metadata["w"].tolist() == [[0, 0], [20, 30]]
        SliceStackedBatch(numbers(4), [-1, 0], function)[0]
        assert seen[-1][3] == {}

    def test_adds_to_segments_and_the_anchor_stays(self) -> None:
        source = numbers(6, segments=[(0, 3), (3, 6)])
        stack = SliceStackedBatch(source, [-2, -1, 0], lambda s, i, d, m: d != 3)
        assert mask_of(stack, slice(None)).tolist() == [
            [False, False, True],
            [False, True, True],
            [True, True, True],
            [False, False, True],
            [False, False, True],
            [False, True, True],
        ]
        assert stack[:].tolist() == [[0, 0, 0], [0, 0, 1], [0, 1, 2], [3, 3, 3], [4, 4, 4], [4, 4, 5]]

    def test_never_can_drop_the_anchor(self) -> None:
        stack = SliceStackedBatch(numbers(3), [-1, 0], lambda s, i, d, m: np.zeros(i.shape, np.bool_))
        assert mask_of(stack, slice(None))[:, 1].all()
        assert stack[:].tolist() == [[0, 0], [1, 1], [2, 2]]

    @pytest.mark.parametrize("answer", [np.ones((3, 3), np.bool_), np.ones((2, 2)), np.ones(2, np.bool_)])
    def test_must_return_a_flag_per_frame(self, answer: Any) -> None:
        with pytest.raises(ValueError, match="get_valid_mask_function"):
            SliceStackedBatch(numbers(3), [-1, 0], lambda *args: answer)[[0, 1]]

    def test_the_same_for_flattened_reads(self) -> None:
        def odd(stack: Any, index: Any, data: Any, metadata: Any) -> Any:
            return data["id"] % 2 == 1

        stack = SliceStackedBatch(batch(6), [-2, -1, 0], odd)
        data, metadata = stack.get_flattened_at_with_metadata([4, 5])
        assert data.shape == (2, 3, 7)
        assert data[..., -1].tolist() == [[3, 3, 4], [3, 5, 5]]
        assert metadata is not None
        assert np.array_equal(metadata["slice_valid_mask"], mask_of(stack, [4, 5]))
        expanded = stack.expand_index([4, 5])
        raw = SliceStackedBatch(batch(6), [-2, -1, 0], fill_invalid_data=False).get_flattened_at([4, 5])
        assert np.array_equal(stack.get_valid_mask_flattened(expanded, raw, {}), mask_of(stack, [4, 5]))

    def test_positions_outside_are_invalid(self) -> None:
        stack = SliceStackedBatch(numbers(3), [-1, 0, 1])
        expanded = stack.expand_index([0, 2])
        assert stack.get_valid_mask(expanded, None, None).tolist() == [
            [False, True, True],
            [True, True, False],
        ]
        flat = np.zeros((2, 3, 1), np.int64)
        assert stack.get_valid_mask_flattened(expanded, flat, {}).tolist() == [
            [False, True, True],
            [True, True, False],
        ]
        assert stack.get_valid_mask(stack.expand_index([]), None, None).shape == (0, 3)

    def test_a_subclass_may_decide(self) -> None:
        class OnlyEven(SliceStackedBatch):
            def get_valid_mask(self, expanded_idx: Any, data: Any, metadata: Any) -> Any:
                return super().get_valid_mask(expanded_idx, data, metadata) & (data % 2 == 0)

        stack = OnlyEven(numbers(6), [-2, -1, 0])
        assert mask_of(stack, [3]).tolist() == [[False, True, True]]
        assert stack[[3]].tolist() == [[2, 2, 3]]

    def test_key_helpers_look_for_their_column(self) -> None:
        with pytest.raises(KeyError, match="episode_id"):
            SliceStackedBatch(batch(3), [0], by_id())
        with pytest.raises(KeyError):
            SliceStackedBatch(batch(3), [0], by_end("id", is_in_metadata=True))
        assert SliceStackedBatch(batch(3), [-1, 0], by_id("id"))[2]["id"].tolist() == [2, 2]

    def test_key_helpers_take_columns_with_axes(self) -> None:
        rows = [{"e": [0, i // 2], "x": i} for i in range(4)]
        source = ListBatch({"e": ((2,), "int64"), "x": ((), "int64")}, rows)
        assert mask_of(SliceStackedBatch(source, [-1, 0], by_id("e")), slice(None))[:, 0].tolist() == [
            False,
            True,
            False,
            True,
        ]
        assert mask_of(SliceStackedBatch(source, [-1, 0], by_end("e")), slice(None))[:, 0].tolist() == [
            False,
            True,
            True,
            False,
        ]

    def test_pickle(self) -> None:
        stack = SliceStackedBatch(batch(4), [-1, 0], by_id("id"))
        assert pickle.loads(pickle.dumps(stack))[1]["id"].tolist() == [1, 1]


class TestFill:
    def test_returns_new_data_of_the_same_dtype(self) -> None:
        stack = SliceStackedBatch(numbers(9), [-2, -1, 0, 1, 2])
        data = np.arange(10, dtype=np.uint8).reshape(2, 5)
        mask = np.array([[True, False, True, False, True], [False, False, True, False, False]])
        filled = stack.fill_data_with_stack_mask(None, data, mask)
        assert filled.tolist() == [[0, 2, 2, 2, 4], [7, 7, 7, 7, 7]]
        assert filled.dtype == np.uint8
        assert data.tolist() == np.arange(10).reshape(2, 5).tolist()
        whole = stack.fill_data_with_stack_mask(None, data, np.ones((2, 5), bool))
        assert whole.tolist() == data.tolist() and not np.shares_memory(whole, data)

    def test_of_nested_data(self) -> None:
        stack = SliceStackedBatch(batch(9), [-1, 0])
        data = SliceStackedBatch(batch(9), [-1, 0], fill_invalid_data=False)[[3, 4]]
        filled = stack.fill_data_with_stack_mask(
            batch(1).single_space, data, np.array([[False, True], [True, True]])
        )
        assert filled["id"].tolist() == [[3, 3], [3, 4]]
        assert filled["obs"]["pos"][..., 0].tolist() == [[3, 3], [3, 4]]

    def test_without_it_frames_stay_as_read(self) -> None:
        source = numbers(6, segments=[(0, 3), (3, 6)])
        stack = SliceStackedBatch(source, [-2, 0, 2], fill_invalid_data=False)
        assert stack[[0, 2, 3, 5]].tolist() == [[0, 0, 2], [0, 2, 4], [1, 3, 5], [3, 5, 5]]
        user = SliceStackedBatch(source, [-2, 0, 2], lambda s, i, d, m: d < 0, fill_invalid_data=False)
        assert user[[0, 2]].tolist() == [[0, 0, 2], [0, 2, 4]]


class TestMetadata:
    @pytest.mark.parametrize("function", [None, lambda s, i, d, m: np.ones(i.shape, np.bool_)])
    def test_of_the_anchor_or_stacked(self, function: Any) -> None:
        source = numbers(4, metadata=[{"w": 10 * i, "v": [i, i]} for i in range(4)], segments=[(0, 4)])
        plain = SliceStackedBatch(source, [-1, 0], function)
        metadata = plain.get_at_with_metadata([2, 0])[1]
        assert metadata is not None
        assert metadata["w"].tolist() == [20, 0]
        assert metadata["v"].tolist() == [[2, 2], [0, 0]]
        stacked = SliceStackedBatch(source, [-1, 0], function, stack_metadata=True)
        metadata = stacked.get_at_with_metadata([2, 0])[1]
        assert metadata is not None
        assert metadata["w"].tolist() == [[10, 20], [0, 0]]
        assert metadata["v"].shape == (2, 2, 2)
        single = stacked.get_at_with_metadata(2)[1]
        assert single is not None
        assert single["w"].tolist() == [10, 20]
        assert stacked.single_metadata_space is not None
        assert stacked.single_metadata_space["w"].shape == (2,)
        assert plain.single_metadata_space is not None
        assert plain.single_metadata_space.contains(
            {k: np.asarray(v) for k, v in plain.get_at_with_metadata(1)[1].items()}
        )  # type: ignore[union-attr]

    def test_a_filled_frame_brings_its_own(self) -> None:
        source = numbers(4, metadata=[{"w": i} for i in range(4)], segments=[(0, 2), (2, 4)])
        stack = SliceStackedBatch(source, [-1, 0], stack_metadata=True)
        metadata = stack.get_at_with_metadata([2])[1]
        assert metadata is not None
        assert metadata["w"].tolist() == [[2, 2]]


class TestCost:
    def test_one_gather_of_all_frames(self) -> None:
        source = Counting(((), "int64"), range(30), segments=[(0, 30)])
        SliceStackedBatch(source, [-7, -1, 0])[[5, 9, 9, 20]]
        assert source.gathers == [12]

    def test_a_mask_function_needs_no_second_gather(self) -> None:
        source = Counting(((), "int64"), range(30))
        SliceStackedBatch(source, [-7, -1, 0], lambda s, i, d, m: d > 3)[[5, 9, 9, 20]]
        assert source.gathers == [12]

    def test_key_helpers_read_one_column_over_the_span(self) -> None:
        source = Counting(batch(1).single_space, [sample(i) for i in range(30)])
        SliceStackedBatch(source, [-7, -1, 0], by_id("id"))[[9, 20]]
        assert source.columns == [("id",)]
        assert source.gathers == [2 * 8, 2 * 3]  # the column (a list has no cheaper way), then the frames

    def test_a_column_of_a_stack_reads_only_the_column(self) -> None:
        source = Counting(batch(1).single_space, [sample(i) for i in range(30)])
        assert FrameStackedBatch(source, 1).get_column(("obs", "pos"))[[3]].shape == (1, 2, 2)
        assert source.columns == [("obs", "pos")]


class TestPlaces:
    def test_are_the_anchors(self) -> None:
        source = numbers(6, segments=[(0, 3), (3, 6)])
        stack = SliceStackedBatch(source, [-1, 0, 1])
        assert stack.locate([4]).step.tolist() == [1]
        assert stack.locate([4]).row.tolist() == source.locate([4]).row.tolist()
        assert stack.get_segments() == [(0, 3), (3, 6)]

    def test_an_open_segment_is_one(self) -> None:
        source = numbers(3, segments=[(0, 3)])
        source.append(3)
        source.append(4)
        stack = FrameStackedBatch(source, 2)
        assert stack[-1].tolist() == [3, 3, 4]
        assert mask_of(stack, -1).tolist() == [False, True, True]

    def test_located_stacks_follow_their_anchor(self) -> None:
        ring = numbers(6, capacity=6, segments=[(0, 6)])
        stack = FrameStackedBatch(ring, 1, 1)
        place = stack.locate([2, 4])
        ring.extend([6, 7])
        found = stack.get_located(place, (), False, True)
        assert found is not None
        assert found[0].tolist() == [[2, 2, 3], [3, 4, 5]]
        ring.append(8)  # evicts 2
        assert stack.get_located(place) is None
        assert stack.is_current(place).tolist() == [False, True]

    def test_over_other_views(self) -> None:
        source = CombinedBatch([numbers(3, segments=[(0, 3)]), numbers(3, start=10, segments=[(0, 3)])])
        doubled = FrameStackedBatch(TransformedBatch(source, lambda x: x * 2), 1)
        assert doubled[:].tolist() == [[0, 0], [0, 2], [2, 4], [20, 20], [20, 22], [22, 24]]
        assert doubled.draw_at(IndexStream(0), 5).shape == (5, 2)
        columns = FrameStackedBatch(batch(4), 1)
        assert columns.draw_column_at(("id",), IndexStream(0), 3).shape == (3, 2)

    def test_torch_underneath(self) -> None:
        torch = pytest.importorskip("torch")

        def function(stack: Any, index: Any, data: Any, metadata: Any) -> Any:
            return (data % 2 == 0) & (index >= 0)  # all three are tensors

        source = ToBackendOrDeviceBatch(numbers(6), "torch")
        stack = SliceStackedBatch(source, [-2, -1, 0], function)
        data, metadata = stack.get_at_with_metadata([3])
        assert torch.equal(data, torch.tensor([[2, 2, 3]]))
        assert metadata is not None
        assert torch.equal(metadata["slice_valid_mask"], torch.tensor([[False, True, True]]))
        mask = stack.get_valid_mask(stack.expand_index([3]), torch.tensor([[1, 2, 3]]), None)
        assert isinstance(mask, torch.Tensor)
        assert isinstance(stack.fill_data_with_stack_mask(None, torch.ones(1, 3), mask), torch.Tensor)

    def test_jax_underneath(self) -> None:
        jax = pytest.importorskip("jax")
        source = ToBackendOrDeviceBatch(ListBatch(((), "int32"), range(6)), "jax")
        stack = SliceStackedBatch(source, [-1, 0], lambda s, i, d, m: (d % 2 == 0) & (i >= 0))
        assert isinstance(stack[[3, 0]], jax.Array)
        assert stack[[3, 0]].tolist() == [[2, 3], [0, 0]]


class TestWritersBeside:
    @pytest.mark.parametrize("function", [None, by_id("id"), lambda s, i, d, m: np.ones(i.shape, np.bool_)])
    def test_mask_and_frames_are_of_one_moment(self, function: Any) -> None:
        class Moving(ListBatch):
            pending = 3

            def get_located(self, location: Location, *form: Any, **named: Any) -> Any:
                if self.pending:
                    self.pending -= 1
                    self.append({"id": 0, "x": int(self[-1]["x"]) + 1})
                return super().get_located(location, *form, **named)

        rows = [{"id": 0, "x": i} for i in range(8)]
        source = Moving({"id": ((), "int64"), "x": ((), "int64")}, rows, capacity=8, segments=[(0, 8)])
        data, metadata = FrameStackedBatch(source, 1, 0, function).get_at_with_metadata([0, 3])
        assert metadata is not None
        first = int(data["x"][0, 1])
        # By the time the frames were read the ring had moved, but they belong together as located.
        assert data["x"].tolist() == [[first, first], [first + 2, first + 3]]
        assert metadata["slice_valid_mask"].tolist() == [[False, True], [True, True]]

    def test_a_stack_that_is_always_lapped_ends(self, monkeypatch: pytest.MonkeyPatch) -> None:
        class Lapped(ListBatch):
            def get_located(self, *args: Any, **named: Any) -> Any:
                return None

        monkeypatch.setattr(boundaries_module, "CONTENTION_S", 0.01)
        stack = FrameStackedBatch(Lapped(((), "int64"), range(5)), 1)
        with pytest.raises(ContentionError):
            stack[0]
        with pytest.raises(ContentionError):
            stack.get_located(stack.locate([0]))

    def test_anchors_that_move_while_they_are_found(self) -> None:
        class Shifting(ListBatch):
            pending = 2

            def locate(self, idx: Any) -> Location:
                if self.pending and np.size(idx) > 2:
                    self.pending -= 1
                    self.append(int(super().get_at(-1)) + 1)
                return super().locate(idx)

        ring = Shifting(((), "int64"), range(8), capacity=8)
        stack = FrameStackedBatch(ring, 1)
        place = stack.locate([5, 6])
        found = stack.get_located(place)
        assert found is not None
        assert found[0].tolist() == [[4, 5], [5, 6]]


def test_only_of_a_batch() -> None:
    with pytest.raises(TypeError, match="must be a BatchBase"):
        FrameStackedBatch([1, 2], 1)  # type: ignore[arg-type]


def test_is_read_only() -> None:
    stack = FrameStackedBatch(batch(3), 1)
    for write in (
        lambda: stack.append(sample(1)),
        lambda: stack.set_at(0, sample(1)),
        lambda: stack.remove_at(0),
        lambda: stack.extend_flattened([]),
        lambda: stack.extend_from(stack.get_slice([0])),
    ):
        with pytest.raises((ReadOnlyError, ValueError)):
            write()
    assert not stack.is_mutable


@pytest.mark.parametrize("index", [np.array(3), np.int32(3), 3], ids=["0-d", "numpy", "int"])
def test_every_form_of_one_index_gives_one_sample(index: Any) -> None:
    stacks, plain = FrameStackedBatch(numbers(5), 2), TransformedBatch(numbers(5), lambda data: data + 1)
    assert stacks.get_at(index).tolist() == [1, 2, 3] and stacks.get_flattened_at(index).tolist() == [
        [1],
        [2],
        [3],
    ]
    assert plain.get_at(index).tolist() == 4 and plain.get_flattened_at(index).tolist() == [4]
