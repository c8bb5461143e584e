"""Names, parts, batches and differences of spaces."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import utils as vector_utils

from recollect.spaces import ExtendedBox, as_space, batch_space, first_difference, space_at
from recollect.spaces.tree import path_name, sequence_paths

NEST = as_space({"obs": {"image": ((2, 2), "uint8"), "pos": (((), "f4"), ((), "i8"))}, "a": ((), "i8")})


def test_a_leaf_is_named_by_its_path() -> None:
    assert path_name(("obs", "pos", 1)) == "obs/pos/1"
    assert path_name(()) == "value"


def test_space_at_goes_one_key_per_level() -> None:
    assert space_at(NEST, ("obs", "pos", 1)) == as_space(((), "i8"))
    assert space_at(NEST, "a") == as_space(((), "i8"))
    assert space_at(NEST, ["obs"]) == NEST["obs"]  # type: ignore[index]
    assert space_at(NEST, ()) is NEST


@pytest.mark.parametrize(
    ("keys", "match"),
    [
        ("reward", r"sample: keys here are one of \['obs', 'a'\], got 'reward'"),
        (("obs", "x"), r"obs: keys here are one of \['image', 'pos'\], got 'x'"),
        (("obs", "pos", 2), r"obs/pos: keys here are one of \[0, 1\], got 2"),
        (("obs", "pos", -1), r"obs/pos: keys here are one of"),
        (("obs", "pos", True), r"obs/pos: keys here are one of"),
        (("a", "b"), "a: keys here are nothing, for it is a leaf, got 'b'"),
    ],
)
def test_an_unknown_key_names_those_there_are(keys: Any, match: str) -> None:
    with pytest.raises(KeyError, match=match):
        space_at(NEST, keys)


@pytest.mark.parametrize(
    ("a", "b", "difference"),
    [
        ({"x": ((2,), "u1")}, {"x": ((2,), "f4")}, "x: dtype uint8 != float32"),
        ({"x": ((2,), "f4")}, {"x": ((3,), "f4")}, "x: shape (2,) != (3,)"),
        ({"o": {"x": ((), "f4")}}, {"o": {"y": ((), "f4")}}, "o: keys ['x'] != ['y']"),
        ({"x": 1, "y": 2}, {"y": 2, "x": 1}, "sample: keys ['x', 'y'] != ['y', 'x']"),
        (spaces.Discrete(3), spaces.Discrete(4), "value: n 3 != 4"),
        (spaces.Discrete(3), spaces.Discrete(3, start=1), "value: start 0 != 1"),
        (spaces.Discrete(3), as_space(((), "i8")), "value: Discrete != Box"),
        (spaces.Box(0, 1), spaces.Box(0, 2), "value: high [1.] != [2.]"),
        (spaces.Box(0, 1), spaces.Box(0, 1.0000001), "value: high [1.] != [1.0000001]"),
        (as_space(((), "bfloat16")), as_space(((), "f4")), "value: ExtendedBox != Box"),
        (spaces.Text(3), spaces.Text(4), "value: max_length 3 != 4"),
        (spaces.Text(3, charset="ab"), spaces.Text(3, charset="abc"), "value: character_set ab != abc"),
        (spaces.MultiBinary(3), spaces.MultiBinary(4), "value: shape (3,) != (4,)"),
        (spaces.MultiDiscrete([2, 3]), spaces.MultiDiscrete([2, 4]), "value: nvec [2 3] != [2 4]"),
        (
            spaces.Sequence(spaces.Discrete(2)),
            spaces.Sequence(spaces.Discrete(2), stack=True),
            "value: stack False != True",
        ),
        (
            {"t": spaces.Sequence(spaces.Discrete(2))},
            {"t": spaces.Sequence(spaces.Discrete(3))},
            "t/[]: n 2 != 3",
        ),
        ((1, 2), (1, 2.0), "1: dtype int64 != float64"),
        ((1, 2), (1, 2, 3), "sample: keys [0, 1] != [0, 1, 2]"),
    ],
)
def test_the_first_difference_is_named(a: Any, b: Any, difference: str) -> None:
    assert first_difference(as_space(a), as_space(b)) == difference
    assert first_difference(as_space(a), as_space(a)) is None


def test_long_differences_are_cut() -> None:
    a, b = (spaces.Box(np.zeros(100), high, dtype=np.float64) for high in (np.arange(100.0), np.ones(100)))
    assert len(first_difference(a, b) or "") < 160
    every = {chr(code) for code in range(0x110000)}
    c, d = (spaces.Text(3, charset=frozenset(every - {char})) for char in "!#")
    found = first_difference(c, d) or ""
    assert found.startswith("value: character_set ") and len(found) < 160
    ours, theirs = found.split(" != ")
    assert '"#$' in ours and '!"$' in theirs and ours.endswith("...") and theirs.endswith("...")


def test_batching_keeps_the_key_order_with_ours_and_with_gymnasiums() -> None:
    space = as_space({"z": ((2,), "f4"), "a": {"y": 1, "b": 2}})
    for batched in (batch_space(space, 3), vector_utils.batch_space(space, 3)):
        assert list(batched.spaces) == ["z", "a"]  # type: ignore[attr-defined]
        assert list(batched["a"].spaces) == ["y", "b"]  # type: ignore[index]
        assert batched["z"].shape == (3, 2)  # type: ignore[index]
    sorted_space = spaces.Dict({"b": spaces.Discrete(2), "a": spaces.Discrete(2)})
    assert list(batch_space(sorted_space, 2).spaces) == ["a", "b"]  # type: ignore[attr-defined]


def test_batching_text_and_sequence_gives_tuples() -> None:
    space = batch_space(as_space({"t": spaces.Text(3), "s": spaces.Sequence(spaces.Discrete(2))}), 2)
    assert {"t": ("a", "b"), "s": ((), (np.int64(1),))} in space


def test_batching_an_extended_box() -> None:
    space = ExtendedBox(np.array([-1.0, 0.0]), 2, (2,), "bfloat16")
    batched = batch_space(space, 3)
    assert isinstance(batched, ExtendedBox)
    assert batched.shape == (3, 2)
    assert batched.low.tolist() == [[-1, 0]] * 3


def test_sequence_paths_go_inside_sequences() -> None:
    inner = as_space({"tokens": spaces.Sequence(spaces.Sequence(spaces.Discrete(2)))})
    space = as_space({"steps": spaces.Sequence(inner), "x": (1, spaces.Sequence(spaces.Discrete(2)))})
    assert [path_name(path) for path in sequence_paths(space)] == [
        "steps",
        "steps/[]/tokens",
        "steps/[]/tokens/[]",
        "x/1",
    ]
