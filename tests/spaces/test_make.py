"""as_space: spaces, short forms and examples."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from typing import Any

import gymnasium
import ml_dtypes
import numpy as np
import pytest
from gymnasium import spaces

from recollect.spaces import ExtendedBox, as_space, first_difference


def test_a_leaf_is_shape_and_dtype() -> None:
    assert as_space(((17,), "float32")) == spaces.Box(-np.inf, np.inf, (17,), np.float32)
    assert as_space(([2, 3], np.uint8)) == spaces.Box(0, 255, (2, 3), np.uint8)
    assert as_space(((), bool)) == spaces.Box(0, 1, (), np.bool_)
    assert as_space(((), np.dtype("uint64"))) == spaces.Box(0, 2**64 - 1, (), np.uint64)
    assert as_space(((2,), "bfloat16")) == ExtendedBox(None, None, (2,), "bfloat16")
    assert as_space(((2,), ml_dtypes.int4)) == ExtendedBox(-8, 7, (2,), "int4")
    assert as_space(((0, 3), "float32")).shape == (0, 3)


def test_signed_integers_are_unbounded_so_that_sampling_works() -> None:
    space = as_space(((3,), "int64"))
    assert isinstance(space, spaces.Box)
    assert not space.is_bounded("below")
    assert space.sample() in space


def test_nests_keep_the_given_key_order() -> None:
    space = as_space({"z": ((), "int64"), "a": {"y": ((), "bool"), "b": (((), "int8"), ((1,), "float32"))}})
    assert isinstance(space, spaces.Dict)
    assert list(space.spaces) == ["z", "a"]
    inner = space["a"]
    assert isinstance(inner, spaces.Dict)
    assert list(inner.spaces) == ["y", "b"]
    assert isinstance(inner["b"], spaces.Tuple)
    ordered = OrderedDict([("z", ((), "int64")), ("a", ((), "int64"))])
    assert list(as_space(ordered).spaces) == ["z", "a"]  # type: ignore[attr-defined]


def test_spaces_may_stand_in_a_nest() -> None:
    text = spaces.Text(5)
    space = as_space({"prompt": text, "reward": 0.0})
    assert isinstance(space, spaces.Dict)
    assert space["prompt"] is text


@pytest.mark.parametrize(
    ("example", "expected"),
    [
        (1.5, ((), "float64")),
        (True, ((), "bool")),
        (3, ((), "int64")),
        (np.float32(1), ((), "float32")),
        (np.zeros((2, 3), np.uint8), ((2, 3), "uint8")),
        ([1, 2, 3], ((3,), "int64")),
        ([[1.0], [2.0]], ((2, 1), "float64")),
        (np.zeros(2, ml_dtypes.bfloat16), ((2,), "bfloat16")),
    ],
)
def test_an_example_is_what_numpy_sees(example: Any, expected: Any) -> None:
    assert first_difference(as_space(example), as_space(expected)) is None


def test_example_samples_nest() -> None:
    pair = namedtuple("pair", "x y")
    space = as_space({"obs": np.zeros(3, "f4"), "pair": (1, 2.0), "named": pair(1, [1, 2])})
    assert space == as_space(
        {"obs": ((3,), "f4"), "pair": (((), "i8"), ((), "f8")), "named": (((), "i8"), ((2,), "i8"))}
    )


def test_torch_dtypes_and_tensors() -> None:
    torch = pytest.importorskip("torch")
    assert as_space(((2,), torch.float32)) == as_space(((2,), "float32"))
    assert as_space(((2,), torch.bfloat16)) == as_space(((2,), "bfloat16"))
    assert as_space({"x": torch.zeros(3, dtype=torch.int16)}) == as_space({"x": ((3,), "int16")})
    assert as_space(torch.zeros(3, dtype=torch.bfloat16)) == as_space(((3,), "bfloat16"))


@pytest.mark.parametrize(
    ("spec", "match"),
    [
        ({"obs": {"x": spaces.Graph(spaces.Box(0, 1), None)}}, "^obs/x: space must be one of .*Graph"),
        ({"a": (1, spaces.OneOf([spaces.Discrete(2)]))}, "^a/1: space must be one of .*OneOf"),
        ({"a": spaces.Sequence(spaces.Graph(spaces.Box(0, 1), None))}, r"^a/\[\]: space must be one of"),
        ({"name": "hello"}, "^name: dtype must be .*gymnasium.spaces.Text"),
        ({"x": None}, "^x: must describe a space, got NoneType"),
        ({"x": 1j}, "^x: dtype must be .*complex128"),
        ({"x": ((3,), "flaot32")}, "^x: dtype must be one of numpy or ml_dtypes, got 'flaot32'"),
        ({"x": ((3,), "complex64")}, "^x: dtype must be"),
        ({"x": ((3,), np.longdouble)}, "^x: dtype must be .* at most 8 bytes"),
        ({"x": spaces.Box(0, 1, (2,), np.longdouble)}, "^x: dtype must be .* at most 8 bytes"),
        ({"x": [[1], [2, 3]]}, "^x: example must be an array"),
        ({1: ((), "int64")}, "^1: key must be a str"),
        ({"a": {2: 0}}, "^a/2: key must be a str"),
        (spaces.Dict({1: spaces.Discrete(2)}), "^1: key of a Dict must be a str"),
        ("float32", "^value: must have a shape beside its dtype"),
    ],
)
def test_what_cannot_be_stored_is_a_type_error_naming_the_leaf(spec: Any, match: str) -> None:
    with pytest.raises(TypeError, match=match):
        as_space(spec)


def test_a_custom_space_is_refused() -> None:
    class Odd(gymnasium.Space[Any]):
        pass

    with pytest.raises(TypeError, match=r"^value: space must be one of .*got \S*Odd"):
        as_space(Odd())


def test_negative_shapes_are_examples_not_leaves() -> None:
    with pytest.raises(TypeError, match="^1: must have a shape beside its dtype"):
        as_space(((-1,), "float32"))


def test_what_describes_no_space_is_told_by_its_class() -> None:
    class Env:
        action_space = None

    with pytest.raises(TypeError, match=r"must describe a space, got \S+Env; transition_space\(env\)"):
        as_space(Env())
    with pytest.raises(TypeError, match="obs: must describe a space, got object; give a gymnasium space"):
        as_space({"obs": object()})
