"""TransformedBatch and the registry of transformations."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from tests.batch.make import batch, block, numbers, sample

from recollect.batch import (
    CastTransformation,
    DataTransformation,
    TransformedBatch,
    register_transformation,
    transformation_from_json,
    transformation_to_json,
)
from recollect.errors import FormatError, ReadOnlyError, SchemaError
from recollect.sampling import IndexStream
from recollect.testing.batch_contract import equal
from recollect.testing.batches import ListBatch


class Shift(DataTransformation):
    """Adds a number; remembers the shapes it saw."""

    def __init__(self, by: int, has_inverse: bool = True) -> None:
        self.by = by
        self.has_inverse = has_inverse
        self.seen: list[tuple[int, ...]] = []

    def get_target_space_from_source(self, space: Any) -> Any:
        return space

    def transform(self, space: Any, data: Any) -> Any:
        self.seen.append(np.shape(data))
        return data + self.by

    def direction_inverse(self, space: Any) -> DataTransformation | None:
        return Shift(-self.by) if self.has_inverse else None


class TestReads:
    def test_go_forward_always_with_a_batch_axis(self) -> None:
        shift = Shift(10)
        view = TransformedBatch(numbers(5), shift)
        assert view[2] == 12
        assert np.ndim(view[2]) == 0
        assert view[[1, 3]].tolist() == [11, 13]
        assert view.get_flattened_at(0).tolist() == [10]
        assert view.get_flattened_at([0, 1]).tolist() == [[10], [11]]
        assert view[[]].tolist() == []
        assert all(len(shape) == 1 for shape in shift.seen)
        assert shift.seen[0] == (1,)

    def test_draws_and_places(self) -> None:
        view = TransformedBatch(numbers(5, segments=[(0, 5)]), Shift(10))
        assert view.draw_at(IndexStream(0), 4).tolist() == (IndexStream(0).indices(5, 4) + 10).tolist()
        found = view.get_located(view.locate([4]))
        assert found is not None
        assert found[0].tolist() == [14]
        assert view.get_segments() == [(0, 5)]

    def test_a_column_is_that_of_the_result(self) -> None:
        view = TransformedBatch(batch(4), lambda b: {"a": b["id"] + 1, "b": b["obs"]["pos"]})
        assert view.get_column("a")[[0, 3]].tolist() == [1, 4]
        assert set(view.get_column("a").draw_at(IndexStream(0), 40).tolist()) == {1, 2, 3, 4}
        assert view.get_column("b").get_flattened_at([1]).tolist() == [[1, -1]]
        assert view.get_column("a").get_flattened_at(2).tolist() == [3]

    def test_is_live(self) -> None:
        source = numbers(1)
        view = TransformedBatch(source, Shift(1))
        source.append(5)
        assert view[:].tolist() == [1, 6]


class TestMetadata:
    def test_has_its_own_transformation(self) -> None:
        source = numbers(3, metadata=[{"w": i} for i in range(3)])
        view = TransformedBatch(source, Shift(1), lambda m: {"v": m["w"] * 2.0})
        data, metadata = view.get_at_with_metadata([1, 2])
        assert data.tolist() == [2, 3]
        assert metadata is not None
        assert metadata["v"].tolist() == [2.0, 4.0]
        assert list(view.single_metadata_space or ()) == ["v"]
        single = view.get_at_with_metadata(2)[1]
        assert single is not None
        assert single["v"] == 4.0

    def test_without_one_it_passes(self) -> None:
        view = TransformedBatch(numbers(2, metadata=[{"w": 7}, {"w": 8}]), Shift(1))
        metadata = view.get_at_with_metadata([1])[1]
        assert metadata is not None
        assert metadata["w"].tolist() == [8]

    def test_is_none_when_the_source_has_none(self) -> None:
        view = TransformedBatch(numbers(2), Shift(1), Shift(2))
        assert view.metadata_transformation is None
        assert view.get_at_with_metadata(0)[1] is None


class TestWrites:
    def test_go_through_the_inverse(self) -> None:
        source = numbers(3)
        view = TransformedBatch(source, Shift(10))
        view.append(15)
        view.extend([16, 17])
        view[0] = 20
        view[[1, 2]] = [21, 22]
        view.append_flattened(np.array([30]))
        view.extend_flattened(np.array([[31], [32]]))
        view.set_flattened_at(0, np.array([40]))
        assert source[:].tolist() == [30, 11, 12, 5, 6, 7, 20, 21, 22]
        view.remove_at([0, 1])
        assert len(source) == 7
        assert view.is_mutable

    @pytest.mark.parametrize("backend", ["numpy", "torch"])
    def test_leave_the_callers_arrays_though_the_inverse_works_in_place(self, backend: str) -> None:
        class InPlace(Shift):
            def transform(self, space: Any, data: Any) -> Any:
                data += self.by
                return data

            def direction_inverse(self, space: Any) -> DataTransformation:
                return InPlace(-self.by)

        make: Any = np.array if backend == "numpy" else pytest.importorskip("torch").tensor
        source = numbers(4)
        view = TransformedBatch(source, InPlace(10))
        one, two = make(15), make([16, 17])
        view.append(one)
        view.extend(two)
        view[0] = one
        view[[1, 2]] = two
        view.extend_flattened(two[:, None])
        assert int(one) == 15 and two.tolist() == [16, 17]
        assert source[:].tolist() == [5, 6, 7, 3, 5, 6, 7, 6, 7]

    def test_are_checked_before_anything_changes(self) -> None:
        source = batch(3)
        view = TransformedBatch(source, CastTransformation({"obs/image": "float32"}))
        with pytest.raises(SchemaError, match="image"):
            view.append(sample(1))  # uint8 is the source's dtype, not the view's
        with pytest.raises(SchemaError):
            view[[0, 1]] = block([1, 2])
        assert equal(source[:], block([0, 1, 2]))

    @pytest.mark.parametrize("transformation", [Shift(1, has_inverse=False), lambda x: x + 1])
    def test_without_an_inverse_are_read_only(self, transformation: Any) -> None:
        source = numbers(3)
        view = TransformedBatch(source, transformation)
        writes = [
            lambda: view.append(1),
            lambda: view.extend([1]),
            lambda: view.set_at(0, 1),
            lambda: view.append_flattened([1]),
            lambda: view.extend_flattened([[1]]),
            lambda: view.set_flattened_at(0, [1]),
            lambda: view._check_set_at(0, 1),
        ]
        for write in writes:
            with pytest.raises(ReadOnlyError, match="ListBatch"):
                write()
        view.remove_at(0)  # removal needs no inverse
        assert source[:].tolist() == [1, 2]

    def test_over_a_read_only_source_are_read_only(self) -> None:
        view = TransformedBatch(batch(3).get_column("id"), Shift(1))
        for write in (lambda: view.append(1), lambda: view.set_at(0, 1), lambda: view.remove_at(0)):
            with pytest.raises(ReadOnlyError):
                write()
        assert not view.is_mutable

    def test_of_text_and_sequences(self) -> None:
        space = spaces.Dict({"tokens": spaces.Sequence(spaces.Discrete(9)), "x": spaces.Box(0, 9, (1,))})
        source = ListBatch(space, max_lengths={"tokens": 4})
        view = TransformedBatch(source, CastTransformation({"x": "float64"}))
        view.append({"tokens": (1, 2), "x": np.array([3.0])})
        assert source[0]["tokens"] == (1, 2)
        assert source[0]["x"].dtype == np.float32
        view.extend({"tokens": ((3,), ()), "x": np.array([[4.0], [5.0]])})
        assert source[:]["tokens"] == ((1, 2), (3,), ())
        view._check_set_at([0, 1], view[[0, 1]])
        with pytest.raises(SchemaError, match="length"):
            source._check_set_at([0, 1], source[[0]])

    def test_of_text(self) -> None:
        source = ListBatch(spaces.Dict({"t": spaces.Text(3), "x": spaces.Box(0, 9, (1,))}))
        view = TransformedBatch(source, CastTransformation({"*": "float64"}))
        view.append({"t": "ab", "x": np.array([3.0])})
        assert source[0]["t"] == "ab"
        assert source[0]["x"].dtype == np.float32

    def test_only_of_a_batch(self) -> None:
        with pytest.raises(TypeError, match="must be a BatchBase"):
            TransformedBatch([1], Shift(1))  # type: ignore[arg-type]


class TestFunctions:
    def test_their_space_is_found_by_one_call(self) -> None:
        calls = []

        def function(data: Any) -> Any:
            calls.append(len(data["id"]))
            return {"image": data["obs"]["image"] / np.float32(255), "both": (data["id"], data["id"] > 1)}

        view = TransformedBatch(batch(5), function)
        assert calls == [1]
        assert view.single_space["image"].dtype == np.float32  # type: ignore[index]
        assert view.single_space["both"][1].dtype == np.bool_  # type: ignore[index]
        assert view[:]["both"][1].tolist() == [False, False, True, True, True]

    def test_of_an_empty_source(self) -> None:
        view = TransformedBatch(batch(0), lambda b: b["obs"]["pos"][:, :1])
        assert view.single_space.shape == (1,)
        assert len(view) == 0
        text = ListBatch(
            spaces.Dict({"t": spaces.Text(3), "s": spaces.Sequence(spaces.Discrete(2))}), max_lengths={"s": 2}
        )
        assert TransformedBatch(text, lambda b: np.array([len(t) for t in b["t"]])).single_space.shape == ()

    def test_must_keep_the_batch_axis(self) -> None:
        with pytest.raises(ValueError, match="^x: .*batch axis"):
            TransformedBatch(numbers(3), lambda x: {"x": x.sum()})

    def test_must_be_callable(self) -> None:
        with pytest.raises(TypeError, match="transformation"):
            TransformedBatch(numbers(3), 7)  # type: ignore[arg-type]


class TestCast:
    def test_there_and_back(self) -> None:
        source = batch(3)
        view = TransformedBatch(source, CastTransformation({"*": "float64"}))
        assert view[1]["id"].dtype == np.float64
        assert view[[1]]["obs"]["image"].dtype == np.float64
        view.append(view[2])
        assert equal(source[3], source[2])

    def test_tuples(self) -> None:
        space = spaces.Tuple([spaces.Box(0, 9, (2,)), spaces.Dict({"x": spaces.Discrete(5)})])
        source = ListBatch(space, [(np.ones(2, np.float32), {"x": 3})])
        view = TransformedBatch(source, CastTransformation({"0": "float64", "1/x": "float32"}))
        assert isinstance(view.single_space, spaces.Tuple)
        first, second = view[[0, 0]]
        assert first.dtype == np.float64
        assert second["x"].tolist() == [3.0, 3.0]
        view.append(view[0])
        assert equal(source[1], source[0])

    def test_only_what_is_named(self) -> None:
        view = TransformedBatch(batch(1), CastTransformation({"obs/pos": "float16"}))
        assert view[0]["obs"]["pos"].dtype == np.float16
        assert view[0]["obs"]["image"].dtype == np.uint8
        assert view.single_space["id"].dtype == np.int64  # type: ignore[index]


class TestRegistry:
    def test_names_and_json_arguments(self) -> None:
        saved = json.loads(json.dumps(transformation_to_json(CastTransformation({"x": "float16"}))))
        assert saved == {"name": "cast", "arguments": {"dtypes": {"x": "float16"}}}
        made = transformation_from_json(saved)
        assert isinstance(made, CastTransformation)
        assert made.dtypes == {"x": "float16"}

    def test_an_unregistered_class_cannot_be_saved(self) -> None:
        with pytest.raises(TypeError, match="register_transformation"):
            transformation_to_json(Shift(1))

    def test_an_unknown_name_is_a_format_error(self) -> None:
        with pytest.raises(FormatError, match=r"os.system.*cast"):
            transformation_from_json({"name": "os.system", "arguments": {}})

    def test_a_name_is_given_once(self) -> None:
        register_transformation("cast", CastTransformation)
        with pytest.raises(ValueError, match="cast"):
            register_transformation("cast", Shift)

    def test_arguments_must_be_json(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from recollect.spaces import transformation

        class Bad(CastTransformation):
            def json_arguments(self) -> dict[str, Any]:
                return {"dtypes": object()}

        monkeypatch.setitem(transformation._REGISTRY, "bad", Bad)
        with pytest.raises(TypeError):
            transformation_to_json(Bad({}))

    def test_the_base_has_no_inverse(self) -> None:
        class One(DataTransformation):
            def get_target_space_from_source(self, space: Any) -> Any:
                return space

            def transform(self, space: Any, data: Any) -> Any:
                return data

        assert One().direction_inverse(spaces.Discrete(2)) is None
        assert not One().has_inverse
        assert One().json_arguments() == {}
