"""Offsets per key of a SliceStackedBatch, against gathering by hand."""

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

import recollect as rc
from recollect.batch import Location, SliceStackedBatch
from recollect.testing.batches import ListBatch

OFFSETS = st.lists(st.integers(-5, 5), min_size=1, max_size=5)


def by_hand(edges: list[int], anchor: int, offsets: list[int]) -> tuple[list[int], list[bool]]:
    """Rows and mask of an anchor: outside its episode the episode's first or last row stands in."""
    first, end = next((a, b) for a, b in pairwise(edges) if a <= anchor < b)
    at = [anchor + k for k in offsets]
    return [min(max(i, first), end - 1) for i in at], [first <= i < end for i in at]


def rows(n: int, edges: list[int], kind: str) -> Any:
    segments = list(pairwise(edges))
    if kind == "list":
        return batch(n, segments=segments)
    buf = rc.ReplayBuffer.create(
        rc.MemoryStorage, batch(1).single_space, capacity=n, maintain_segment_metadata=True
    )
    buf.extend_from(batch(n, segments=segments))
    return buf


@pytest.mark.parametrize("kind", ["list", "memory"])
@given(n=st.integers(1, 12), cuts=st.sets(st.integers(1, 11)), one=OFFSETS, two=OFFSETS)
def test_equal_to_gathering_by_hand(
    kind: str, n: int, cuts: set[int], one: list[int], two: list[int]
) -> None:
    edges = sorted({0, n, *(c for c in cuts if c < n)})
    source = rows(n, edges, kind)
    stack = SliceStackedBatch(source, {"obs": {"pos": one}, "id": two})
    anchors = list(reversed(range(n)))
    data, metadata = stack.get_at_with_metadata(anchors)
    want = {key: [by_hand(edges, a, k) for a in anchors] for key, k in (("pos", one), ("id", two))}
    assert data["id"].tolist() == [found for found, _ in want["id"]]
    assert data["id_valid_mask"].tolist() == [mask for _, mask in want["id"]]
    assert data["obs"]["pos"][..., 0].tolist() == [found for found, _ in want["pos"]]
    assert data["obs"]["pos_valid_mask"].tolist() == [mask for _, mask in want["pos"]]
    assert np.array_equal(data["obs"]["image"], source[anchors]["obs"]["image"])
    assert metadata is not None
    span = [by_hand(edges, a, stack.fixed_offset.tolist())[1] for a in anchors]
    assert metadata["slice_valid_mask"].tolist() == span
    for i, a in enumerate(anchors):
        assert stack.single_space.contains(stack[a])
        assert stack[a]["id"].tolist() == data["id"][i].tolist()


def chunks(**kwargs: Any) -> SliceStackedBatch:
    source = batch(6, segments=[(0, 4), (4, 6)])
    return SliceStackedBatch(source, {"id": range(3), "obs": [-1, 0]}, **kwargs)


class TestForms:
    def test_a_key_above_leaves_is_for_all_of_them(self) -> None:
        data = chunks()[[3, 4]]
        assert data["id"].tolist() == [[3, 3, 3], [4, 5, 5]]
        assert data["id_valid_mask"].tolist() == [[True, False, False], [True, True, False]]
        assert data["obs"]["pos"][..., 0].tolist() == [[2, 3], [4, 4]]
        assert data["obs"]["image"].shape == (2, 2, 2, 2)
        assert data["obs_valid_mask"].tolist() == [[True, True], [False, True]]
        assert chunks()[[]]["id"].shape == (0, 3)

    def test_flattened_columns_and_draws(self) -> None:
        stack = chunks()
        flat = stack.get_flattened_at([3, 4])
        assert flat.shape == (2, stack.get_flattened_at(3).shape[0]) == (2, 3 + 12 + 3 + 2)
        assert stack.get_column("id")[[3]].tolist() == [[3, 3, 3]]
        assert stack.get_column("id_valid_mask")[[3]].tolist() == [[True, False, False]]
        assert stack.get_column(("obs", "pos"))[4].tolist() == [[4, -4], [4, -4]]
        drawn = rc.StepSampler(stack, 5, seed=0).sample()
        assert drawn["id"].shape == (5, 3) and drawn["obs_valid_mask"].shape == (5, 2)

    def test_text(self) -> None:
        space = spaces.Dict({"t": spaces.Text(3), "k": spaces.Discrete(9)})
        source = ListBatch(space, [{"t": c, "k": i} for i, c in enumerate("abcd")])
        stack = SliceStackedBatch(source, {"t": [-1, 1]})
        assert stack[0]["t"] == ("a", "b") and stack[[0, 3]]["t"] == (("a", "c"), ("b", "d"))
        assert stack.get_column(("t", 1))[[0, 3]] == ("b", "d")

    def test_torch(self) -> None:
        torch = pytest.importorskip("torch")
        stack = SliceStackedBatch(rc.ToBackendOrDeviceBatch(batch(4), "torch"), {"id": [0, 1]})
        assert torch.equal(stack[[3]]["id_valid_mask"], torch.tensor([[True, False]]))
        assert torch.equal(stack[3]["id"], torch.tensor([3, 3]))

    def test_pickled(self) -> None:
        assert pickle.loads(pickle.dumps(chunks()))[[3]]["id"].tolist() == [[3, 3, 3]]


class TestMasks:
    def test_unfilled_frames_stay_as_read(self) -> None:
        assert chunks(fill_invalid_data=False)[[3]]["id"].tolist() == [[3, 4, 5]]

    def test_mask_functions_judge_the_whole_span(self) -> None:
        def even(stack: Any, index: Any, data: Any, metadata: Any) -> Any:
            assert index.shape == (1, 4) and data["id"].shape == (1, 4)
            return data["id"] % 2 == 0

        data = chunks(get_valid_mask_function=even)[[1]]
        assert data["id"].tolist() == [[1, 2, 2]]
        assert data["id_valid_mask"].tolist() == [[True, True, False]]
        assert data["obs"]["pos"][..., 0].tolist() == [[0, 1]]
        by_id = SliceStackedBatch.get_valid_mask_function_with_episodeid_key("id")
        assert chunks(get_valid_mask_function=by_id)[1]["id"].tolist() == [1, 1, 1]

    def test_metadata_are_the_anchors(self) -> None:
        source = ListBatch(
            {"x": ((), "int64")},
            [{"x": i} for i in range(4)],
            metadata=[{"w": 10 * i} for i in range(4)],
            metadata_space={"w": ((), "int64")},
        )
        for function in (None, lambda s, i, d, m: m["w"] < 30):
            stack = SliceStackedBatch(source, {"x": [1, 2]}, function)
            data, metadata = stack.get_at_with_metadata([1, 2])
            last = function is None
            assert data["x"].tolist() == [[2, 3 if last else 2], [3, 3] if last else [2, 2]]
            assert metadata is not None and metadata["w"].tolist() == [10, 20]


class TestCost:
    def test_each_field_is_read_only_where_it_is_shown(self) -> None:
        source = Counting(batch(1).single_space, [sample(i) for i in range(30)])
        SliceStackedBatch(source, {"id": range(10), "obs": {"pos": [-1, 0]}})[[5, 9]]
        assert sorted(zip(source.columns, source.gathers)) == [
            (("id",), 20),
            (("obs", "image"), 2),
            (("obs", "pos"), 4),
        ]

    def test_fields_are_of_one_moment(self) -> None:
        class Moving(ListBatch):
            pending = 3

            def get_located(self, location: Location, *form: Any, **named: Any) -> Any:
                if self.pending:
                    self.pending -= 1
                    at = int(self[-1]["x"]) + 1
                    self.append({"x": at, "y": at})
                return super().get_located(location, *form, **named)

        space = {"x": ((), "int64"), "y": ((), "int64")}
        source = Moving(space, [{"x": i, "y": i} for i in range(8)], capacity=8, segments=[(0, 8)])
        data = SliceStackedBatch(source, {"x": [0, 1, 2], "y": [-1, 0]})[[0, 2]]
        first = int(data["x"][0, 0])
        assert data["x"].tolist() == [[first, first + 1, first + 2], [first + 2, first + 3, first + 4]]
        assert data["y"].tolist() == [[first, first], [first + 1, first + 2]]
        assert data["y_valid_mask"].tolist() == [[False, True], [True, True]]


class TestRefused:
    @pytest.mark.parametrize("bad", [[], [[0]], [0.5], 0, ["0"], None, {"y": [0]}])
    def test_offsets(self, bad: Any) -> None:
        with pytest.raises(ValueError, match="fixed_offset 'id': must be 1-D integers"):
            SliceStackedBatch(batch(3), {"id": bad})

    def test_keys(self) -> None:
        with pytest.raises(KeyError, match="actoin"):
            SliceStackedBatch(batch(3), {"actoin": [0]})
        with pytest.raises(TypeError, match="per key must be of a Dict, got a Box"):
            SliceStackedBatch(numbers(3), {"x": [0]})
        taken = ListBatch({"x": ((), "int64"), "x_valid_mask": ((), "bool")}, [])
        with pytest.raises(ValueError, match="'x_valid_mask' for itself"):
            SliceStackedBatch(taken, {"x": [0]})

    def test_stacked_metadata(self) -> None:
        with pytest.raises(ValueError, match="stack_metadata"):
            chunks(stack_metadata=True)
