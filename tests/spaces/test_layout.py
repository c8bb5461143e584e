"""Layout: names, sizes and values that the laws do not pin down."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from recollect.errors import DtypeError, FormatError, SchemaError
from recollect.spaces import Layout, as_space, compile_layout, space_at


def shape_of(layout: Layout) -> list[tuple[str, str, tuple[int, ...], int]]:
    return [(f.name, f.dtype.name, f.shape, f.offset) for f in layout.fields]


def test_leaves_lie_in_key_order_aligned_to_their_item_size() -> None:
    layout = compile_layout({"z": ((3,), "uint8"), "a": ((), "int64"), "m": {"f": ((), "float16")}})
    assert shape_of(layout) == [
        ("z", "uint8", (3,), 0),
        ("a", "int64", (), 8),
        ("m/f", "float16", (), 16),
    ]
    assert layout.row_nbytes == 24
    assert layout.fields[0].nbytes == 3
    assert [leaf.path for leaf in layout.leaves] == [("z",), ("a",), ("m", "f")]


def test_the_usual_transition_is_packed() -> None:
    space = {"obs": ((17,), "f4"), "action": ((6,), "f4"), "reward": ((), "f4"), "next_obs": ((17,), "f4")}
    layout = compile_layout({**space, "terminated": ((), "bool")})
    assert layout.fields[-1].offset + 1 == 165
    assert layout.row_nbytes == 168
    assert layout.is_fixed


def test_discrete_keeps_its_dtype_and_multibinary_is_int8() -> None:
    layout = compile_layout(
        {"a": spaces.Discrete(3), "b": spaces.Discrete(3, dtype=np.int8), "c": spaces.MultiBinary(4)}
    )
    assert [f.dtype.name for f in layout.fields] == ["int64", "int8", "int8"]
    assert [leaf.kind for leaf in layout.leaves] == ["discrete", "discrete", "multibinary"]


def test_text_is_bytes_and_a_length() -> None:
    ascii_only = compile_layout({"t": spaces.Text(5)})
    assert shape_of(ascii_only) == [("t", "uint8", (5,), 0), ("t#length", "int32", (), 8)]
    wide = compile_layout({"t": spaces.Text(5, charset="a😀")})
    assert wide.fields[0].shape == (20,)
    assert not wide.is_fixed


def test_sequence_is_a_length_and_padded_elements() -> None:
    step = as_space({"x": ((2,), "f4"), "t": spaces.Text(3), "s": spaces.Sequence(spaces.Discrete(4))})
    layout = compile_layout({"steps": spaces.Sequence(step)}, {"steps": 5, "steps/[]/s": 2})
    assert [(f.name, f.dtype.name, f.shape) for f in layout.fields] == [
        ("steps#length", "int32", ()),
        ("steps/[]/x", "float32", (5, 2)),
        ("steps/[]/t", "uint8", (5, 3)),
        ("steps/[]/t#length", "int32", (5,)),
        ("steps/[]/s#length", "int32", (5,)),
        ("steps/[]/s/[]", "int64", (5, 2)),
    ]
    assert layout.leaves[0].fields == (0, 1, 2, 3, 4, 5)
    assert layout.leaves[0].kind == "sequence"


def test_padding_is_zeros() -> None:
    layout = compile_layout({"t": spaces.Text(4), "s": spaces.Sequence(spaces.Discrete(9))}, {"s": 4})
    data, length, count, elements = layout.encode_one({"t": "ab", "s": (7, 8)})
    assert data.tolist() == [97, 98, 0, 0]
    assert (int(length), int(count)) == (2, 2)
    assert elements.tolist() == [7, 8, 0, 0]


def test_a_zero_size_box_alone_still_has_a_row() -> None:
    layout = compile_layout(((0,), "float32"))
    assert layout.fields[0].nbytes == 0
    assert layout.row_nbytes == 8
    assert layout.flat_dim == 0


def test_root_leaves_are_named_value() -> None:
    assert compile_layout(((2,), "f4")).leaves[0].name == "value"
    with pytest.raises(DtypeError, match="^value: dtype must be float32, got float64"):
        compile_layout(((2,), "f4")).encode_one(np.zeros(2))


TOKENS = {"tokens": spaces.Sequence(spaces.Discrete(9))}


@pytest.mark.parametrize(
    ("space", "most", "match"),
    [
        (TOKENS, None, r"^tokens: a Sequence needs .* max_lengths=\{'tokens': \.\.\.\}"),
        (
            TOKENS,
            {"token": 3},
            r"^max_lengths: keys must be Sequence leaves of the space, \['tokens'\], got 'token'",
        ),
        (TOKENS, {"tokens": 0}, "^max_lengths/tokens: must be an int of at least 1, got 0"),
        (TOKENS, {"tokens": True}, "^max_lengths/tokens: must be an int"),
        (TOKENS, {"tokens": 3.0}, "^max_lengths/tokens: must be an int"),
        ({"x": ((), "f4")}, {"x": 3}, "^max_lengths: keys must be Sequence leaves"),
        ({"s": spaces.Sequence(spaces.Sequence(spaces.Discrete(2)))}, {"s": 3}, r"^s/\[\]: a Sequence needs"),
        ({}, None, "^sample: must have at least one leaf"),
        (spaces.Tuple([]), None, "^sample: must have at least one leaf"),
        ({"s": spaces.Sequence(spaces.Dict({}))}, {"s": 2}, r"^s/\[\]: must have at least one leaf"),
        ({"a/b": 1, "a": {"b": 2}}, None, "^a/b: must be the name of one leaf"),
        ({"t": spaces.Text(3), "t#length": 1}, None, "^t#length: must be the name of one leaf"),
    ],
)
def test_what_cannot_be_compiled_is_a_value_error(space: Any, most: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        compile_layout(space, most)


def test_a_layout_is_no_space() -> None:
    with pytest.raises(TypeError, match="pass layout.space"):
        compile_layout(compile_layout(((), "f4")))


def test_too_long_is_refused_by_name() -> None:
    layout = compile_layout({"t": spaces.Text(3), **TOKENS}, {"tokens": 2})
    with pytest.raises(SchemaError, match="^t: must have at most 3 characters, got 4"):
        layout.encode_one({"t": "abcd", "tokens": ()})
    with pytest.raises(SchemaError, match="^tokens: must have at most 2 elements, got 3"):
        layout.encode_one({"t": "abc", "tokens": [1, 2, 3]})
    with pytest.raises(SchemaError, match="^t: characters must be of the charset, got 'é'"):
        layout.encode_one({"t": "é", "tokens": ()})


def test_lengths_below_the_least_are_bounds_and_not_checked() -> None:
    layout = compile_layout(spaces.Text(3, min_length=2))
    assert layout.decode_one(layout.encode_one("")) == ""


@pytest.mark.parametrize("text", ["", "\0", "a\0", "\0a\0\0", "é漢\0😀", "\ud800a", "\ud83d\ude00"])
def test_text_comes_back_with_nuls_and_surrogates(text: str) -> None:
    layout = compile_layout(spaces.Text(8, charset="".join(sorted({*text, "a"}))))
    assert layout.decode_one(layout.encode_one(text)) == text
    n, arrays = layout.encode_batch((text, "a", text))
    assert layout.decode_batch(arrays, n) == (text, "a", text)


def test_a_string_is_no_batch_of_strings() -> None:
    layout = compile_layout({"t": spaces.Text(3)})
    with pytest.raises(SchemaError, match="^t: must be a tuple or list of strings, got str"):
        layout.encode_batch({"t": "abc"})
    assert layout.encode_batch({"t": np.array(["ab", "c"])})[0] == 2


@pytest.mark.parametrize("stack", [False, True])
def test_sequences_of_arrays_take_lists_tuples_and_arrays(stack: bool) -> None:
    layout = compile_layout(spaces.Sequence(spaces.Discrete(9), stack=stack), {"value": 4})
    for value in ((1, 2), [1, 2], np.array([1, 2]), (np.int64(1), 2)):
        assert [int(x) for x in layout.decode_one(layout.encode_one(value))] == [1, 2]
    with pytest.raises(DtypeError, match=r"^\[\]: dtype must be int64, got float64"):
        layout.encode_one(np.zeros(2))


def test_torch_and_jax_values_are_taken() -> None:
    torch, jnp = pytest.importorskip("torch"), pytest.importorskip("jax.numpy")
    layout = compile_layout({"x": ((2,), "f4"), "b": ((2,), "bfloat16"), "a": spaces.Discrete(3)})
    sample = {
        "x": torch.ones(2, requires_grad=True),
        "b": torch.tensor([1.5, 2], dtype=torch.bfloat16),
        "a": torch.tensor(2),
    }
    assert [array.tolist() for array in layout.encode_one(sample)] == [[1, 1], [1.5, 2], 2]
    arrays = layout.encode_one({**sample, "x": jnp.ones(2), "b": jnp.ones(2, jnp.bfloat16)})
    assert [array.tolist() for array in arrays] == [[1, 1], [1, 1], 2]
    with pytest.raises(DtypeError, match="^x: dtype must be float32, got float64"):
        layout.encode_one({**sample, "x": torch.ones(2, dtype=torch.float64)})


def test_mappings_are_dicts_and_key_order_of_values_is_free() -> None:
    from types import MappingProxyType

    layout = compile_layout({"x": 1, "y": 2.0})
    x, y = layout.encode_one(MappingProxyType({"y": 4.0, "x": 3}))
    assert (int(x), float(y)) == (3, 4.0)


def test_layouts_are_frozen_values() -> None:
    layout = compile_layout({"x": ((2,), "f4")})
    with pytest.raises(dataclasses.FrozenInstanceError):
        layout.row_nbytes = 3  # type: ignore[misc]
    with pytest.raises(TypeError):
        layout.max_lengths["x"] = 3  # type: ignore[index]
    same = compile_layout({"x": ((2,), "f4")})
    assert same == layout
    assert len({same, layout}) == 1
    assert layout != "layout"
    assert copy.deepcopy(layout) == layout


@pytest.mark.parametrize(
    "other",
    [
        {"x": ((3,), "f4"), "y": 1},
        {"x": ((2,), "f8"), "y": 1},
        {"y": 1, "x": ((2,), "f4")},
        {"x": spaces.Box(0, 1, (2,)), "y": 1},
    ],
)
def test_any_difference_is_another_hash(other: Any) -> None:
    assert compile_layout(other) != compile_layout({"x": ((2,), "f4"), "y": 1})


def test_max_lengths_are_part_of_the_hash() -> None:
    assert compile_layout(TOKENS, {"tokens": 3}) != compile_layout(TOKENS, {"tokens": 4})


def test_seeding_the_given_space_does_not_reach_other_layouts() -> None:
    a, b = as_space({"x": ((2,), "f4")}), as_space({"x": ((2,), "f4")})
    assert compile_layout(a).space is a
    assert compile_layout(b).space is b


def test_projection_keeps_offsets_row_size_and_lengths() -> None:
    step = as_space({"s": spaces.Sequence(spaces.Discrete(4)), "x": ((), "f4")})
    layout = compile_layout({"r": ((), "f8"), "step": step}, {"step/s": 3})
    part = layout.project(("step", "s"))
    assert dict(part.max_lengths) == {"value": 3}
    assert part.row_nbytes == layout.row_nbytes
    assert [f.offset for f in part.fields] == [f.offset for f in layout.fields[1:3]]
    assert part != compile_layout(space_at(layout.space, ("step", "s")), {"value": 3})
    assert layout.project("step").project("s") == part
    assert layout.project(()) == layout
    assert layout.field_indices("step") == (1, 2, 3)
    with pytest.raises(KeyError, match="step: keys here are"):
        layout.project(("step", "nothing"))
    assert pickle.loads(pickle.dumps(part)) == part


def test_a_broken_layout_is_a_format_error() -> None:
    good = json.loads(json.dumps(compile_layout({"x": ((2,), "f4"), "y": 1}).to_json()))
    assert Layout.from_json(good).row_nbytes == 16

    def broken(**changes: Any) -> Any:
        return {**good, **changes}

    for obj in (
        None,
        {},
        broken(row_nbytes=12),
        broken(row_nbytes=8),
        broken(fields=good["fields"][:1]),
        broken(fields=[["x", "float32", [2], 0], ["y", "int64", [], 4]]),
        broken(fields=[["x", "float32", [2], 0], ["y", "int64", [], 0]]),
        broken(fields=[["x", "float32", [2], -8], ["y", "int64", [], 8]]),
        broken(fields=[["x", "float64", [2], 0], ["y", "int64", [], 8]]),
        broken(fields=[["z", "float32", [2], 0], ["y", "int64", [], 8]]),
        broken(space={"type": "graph"}),
        broken(max_lengths={"x": 3}),
        broken(extra=1),
    ):
        with pytest.raises(FormatError):
            Layout.from_json(obj)


def test_importing_spaces_loads_no_optional_package() -> None:
    code = (
        "import sys, recollect.spaces as s, recollect.indexing, recollect.backends;"
        "s.compile_layout({'x': ((2,), 'f4')}).encode_one({'x': [1.0, 2.0]});"
        "sys.exit(str(bad) if (bad := {'torch', 'jax', 'ml_dtypes'} & set(sys.modules)) else 0)"
    )
    subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": ":".join(sys.path)}, check=True, timeout=50
    )


def test_a_space_of_the_program_may_have_any_size() -> None:
    large = compile_layout({"t": spaces.Text(1 << 28, charset="ab")})
    assert large.row_nbytes == (1 << 28) + 8
    with pytest.raises(FormatError, match="space: a sample must have at most"):
        Layout.from_json(large.to_json())
