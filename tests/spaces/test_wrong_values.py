"""Whatever is written, a leaf takes it exactly or raises a SchemaError that names the leaf."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from recollect.errors import DtypeError, MissingLeafError, SchemaError
from recollect.spaces import Layout, compile_layout
from recollect.testing.spaces import CATALOGUE, max_lengths_of, samples, stack

LAYOUTS = {name: compile_layout(CATALOGUE[name], max_lengths_of(name)) for name in CATALOGUE}
LEAVES = [name for name, layout in LAYOUTS.items() if layout.leaves[0].path == ()]
NESTS = [name for name in LAYOUTS if name not in LEAVES]
MANY = settings(max_examples=10 * settings.default.max_examples)  # type: ignore[union-attr]


class Unreadable:
    """Claims to be an array and is none."""

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("no array here")


class Shapeless:
    """Its array is of objects."""

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        return np.array([None, "x"], dtype=object)


NUMBERS = st.one_of(
    st.booleans(),
    st.integers(),
    st.integers(-(2**65), 2**65),
    st.sampled_from([2**53 + 1, 2**63 - 1, 2**63, 2**64 - 1, 2**64, -(2**63), 10**400, 255, 256, -129]),
    st.floats(),
    st.sampled_from([1e300, -1e300, 3.5e38, 65520.0, float("nan"), float("inf")]),
)
DTYPES = st.one_of(
    hnp.boolean_dtypes(),
    hnp.integer_dtypes(),
    hnp.unsigned_integer_dtypes(),
    hnp.floating_dtypes(sizes=(16, 32, 64)),
    hnp.complex_number_dtypes(),
    hnp.unicode_string_dtypes(max_len=3),
    hnp.datetime64_dtypes(),
)
ARRAYS = hnp.arrays(DTYPES, hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4))
ODD = st.sampled_from(
    [
        None,
        "text",
        "",
        b"bytes",
        object(),
        {},
        {"x": 1},
        set(),
        (),
        [],
        Ellipsis,
        int,
        1j,
        range(3),
        iter([1]),
        Unreadable(),
        Shapeless(),
        np.array(None),
        np.zeros(2, [("a", "i4")]),
        memoryview(b"abc"),
        np.str_("a"),
    ]
)
SIMPLE = st.one_of(NUMBERS, ARRAYS, ODD, st.text(max_size=9))
ANYTHING = SIMPLE | st.recursive(
    SIMPLE,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.lists(inner, max_size=4).map(tuple)),
    max_leaves=6,
)


def is_named(error: SchemaError, layout: Layout) -> bool:
    """Whether the message begins with a leaf of the layout, or a part of one, and a colon."""
    subject = str(error).split(": ")[0]
    inside = [field.name.removesuffix("#length") for field in layout.fields]
    names = [*inside, "sample", *(leaf.name for leaf in layout.leaves)]
    is_extra = subject.rpartition("/")[0] == "[]"  # a key or item too many in an element of a Sequence
    return is_extra or any(subject == name or name.startswith(f"{subject}/") for name in names)


@MANY
@given(name=st.sampled_from(LEAVES), cast=st.booleans(), value=ANYTHING)
def test_a_leaf_takes_a_value_whole_or_names_itself(name: str, cast: bool, value: Any) -> None:
    layout = LAYOUTS[name]
    for batched in (False, True):
        try:
            arrays = layout.encode_batch(value, cast)[1] if batched else layout.encode_one(value, cast)
        except SchemaError as error:
            assert is_named(error, layout), error  # noqa: PT017
        else:
            lead = (arrays[0].shape[0],) if batched else ()
            for field, array in zip(layout.fields, arrays, strict=True):
                assert (array.dtype, array.shape) == (field.dtype, (*lead, *field.shape))


@MANY
@given(name=st.sampled_from(NESTS), data=st.data())
def test_a_wrong_leaf_in_a_nest_is_named(name: str, data: st.DataObject) -> None:
    layout = LAYOUTS[name]
    leaf = data.draw(st.sampled_from(layout.leaves))
    batched = data.draw(st.booleans())
    value = _plant(layout, leaf.path, data.draw(ANYTHING), batched)
    try:
        layout.encode_batch(value) if batched else layout.encode_one(value)
    except SchemaError as error:
        names = (leaf.name, "length must be")  # a batch of another length may be named from the other side
        assert str(error).startswith(names[0]) or names[1] in str(error)  # noqa: PT017


@pytest.mark.parametrize("dtype", ["bool", "int8", "float32", "bfloat16"])
@pytest.mark.parametrize(
    "value", [Unreadable(), Shapeless(), None, object(), {"x": 1}, 1j, "1", np.str_("1")]
)
def test_what_is_no_number_is_a_dtype_error(dtype: str, value: Any) -> None:
    layout = compile_layout({"x": ((), dtype)})
    with pytest.raises(DtypeError, match="^x: "):
        layout.encode_one({"x": value})
    with pytest.raises(DtypeError, match="^x: "):
        layout.encode_batch({"x": [value]})


def _plant(layout: Layout, path: tuple[str | int, ...], value: Any, batched: bool) -> Any:
    ones = samples(layout.space, 2, seed=1)
    root = stack(layout.space, ones) if batched else copy.deepcopy(ones[0])
    return _replaced(root, path, value)


def _replaced(node: Any, path: tuple[str | int, ...], value: Any) -> Any:
    if not path:
        return value
    key = path[0]
    if isinstance(node, dict):
        return {**node, key: _replaced(node[key], path[1:], value)}
    assert isinstance(key, int)
    return (*node[:key], _replaced(node[key], path[1:], value), *node[key + 1 :])


@MANY
@given(name=st.sampled_from(NESTS), data=st.data())
def test_a_missing_or_extra_key_is_named(name: str, data: st.DataObject) -> None:
    layout = LAYOUTS[name]
    path, kind, keys = data.draw(st.sampled_from(_containers(layout.template)))
    sample = samples(layout.space, 1)[0]
    part = sample
    for key in path:
        part = part[key]
    prefix = "".join(f"{key}/" for key in path)
    if kind == "dict":
        with pytest.raises(SchemaError, match=f"^{prefix}extra: "):
            layout.encode_one(_replaced(sample, path, {**part, "extra": 1}))
    else:
        with pytest.raises(SchemaError, match=f"^{prefix}{len(keys)}: "):
            layout.encode_one(_replaced(sample, path, (*part, 1)))
    if keys:
        lost = data.draw(st.sampled_from(keys)) if kind == "dict" else keys[-1]
        left = {k: v for k, v in part.items() if k != lost} if kind == "dict" else part[:-1]
        with pytest.raises(MissingLeafError, match=f"^{prefix}{lost}: "):
            layout.encode_one(_replaced(sample, path, left))


def _containers(node: tuple[Any, ...], path: tuple[str | int, ...] = ()) -> list[Any]:
    kind, body = node
    if kind == "leaf":
        return []
    pairs = body if kind == "dict" else tuple(enumerate(body))
    keys = tuple(key for key, _ in pairs)
    inner = [found for key, child in pairs for found in _containers(child, (*path, key))]
    return [(path, kind, keys), *inner]


SCALARS = {
    "bool": [True, False],
    "int8": [-128, 127],
    "uint8": [0, 255],
    "int64": [-(2**63), 2**63 - 1, 2**53 + 1],
    "uint64": [0, 2**64 - 1],
    "float16": [0.1, 65504, 2048, float("inf"), float("nan")],
    "float32": [0.1, 2**24, 2**100, float("-inf")],
    "float64": [0.1, 2**53, 1e300],
    "bfloat16": [0.1, 256, 2**100, float("inf")],
    "int4": [-8, 7],
    "float8_e8m0fnu": [1, 4.0, 2.0**100],
}
REFUSED: dict[str, list[tuple[Any, type[SchemaError]]]] = {
    "bool": [(1, DtypeError), (0.0, DtypeError), (np.int8(1), DtypeError), (None, DtypeError)],
    "int8": [
        (128, SchemaError),
        (-129, SchemaError),
        (True, DtypeError),
        (1.0, DtypeError),
        ("1", DtypeError),
    ],
    "uint8": [(-1, SchemaError), (256, SchemaError), (np.int64(1), DtypeError), (np.bool_(True), DtypeError)],
    "int64": [(2**63, SchemaError), (np.int32(1), DtypeError), (1.0, DtypeError), (10**400, SchemaError)],
    "uint64": [(-1, SchemaError), (2**64, SchemaError), (np.int64(1), DtypeError)],
    "float16": [(1e5, SchemaError), (2049, SchemaError), (True, DtypeError), (np.float32(1), DtypeError)],
    "float32": [(1e39, SchemaError), (2**24 + 1, SchemaError), (np.float64(1), DtypeError), (1j, DtypeError)],
    "float64": [
        (2**53 + 1, SchemaError),
        (10**400, SchemaError),
        (False, DtypeError),
        (np.float32(1), DtypeError),
    ],
    "bfloat16": [(1e39, SchemaError), (257, SchemaError), (np.float32(1), DtypeError)],
    "float8_e8m0fnu": [(0, SchemaError), (-1.0, SchemaError), (3, SchemaError)],
    "int4": [(8, SchemaError), (-9, SchemaError), (1.0, DtypeError), (np.int8(1), DtypeError)],
}


@pytest.mark.parametrize(("dtype", "value"), [(d, v) for d, values in SCALARS.items() for v in values])
def test_a_python_number_that_fits_is_taken(dtype: str, value: Any) -> None:
    layout = compile_layout({"x": ((), dtype), "v": ((2,), dtype)})
    one, vector = layout.encode_one({"x": value, "v": [value, value]})
    wide = float(value) if "float" in dtype else value
    expected = np.asarray(wide).astype(layout.fields[0].dtype)
    assert one.tobytes() == expected.tobytes()
    assert vector.tobytes() == 2 * expected.tobytes()


@pytest.mark.parametrize(
    ("dtype", "value", "error"), [(d, *case) for d, cases in REFUSED.items() for case in cases]
)
def test_a_number_that_does_not_fit_is_refused(dtype: str, value: Any, error: type[SchemaError]) -> None:
    layout = compile_layout({"x": ((), dtype)})
    with pytest.raises(error, match="^x: ") as caught:
        layout.encode_one({"x": value})
    assert type(caught.value) is error
    vector = compile_layout({"v": ((1,), dtype)})
    with pytest.raises(error, match="^v: "):
        vector.encode_one({"v": [value]})
    with pytest.raises(error, match="^x: "):
        layout.encode_batch({"x": [value]})


CASTS: list[tuple[str, Any, bool]] = [
    ("float32", np.float64(0.1), True),
    ("float32", np.float16(0.5), True),
    ("float32", np.float64(1e300), False),
    ("float32", np.int64(1), False),
    ("float64", np.float32(0.5), True),
    ("bfloat16", np.float32(0.5), True),
    ("int8", np.int64(127), True),
    ("int8", np.int64(128), False),
    ("int8", np.uint64(2**64 - 1), False),
    ("int64", np.uint64(2**63 - 1), True),
    ("int64", np.uint64(2**63), False),
    ("uint64", np.int8(-1), False),
    ("uint64", np.int8(1), True),
    ("int4", np.int64(7), True),
    ("int4", np.int64(8), False),
    ("int64", np.float64(1.0), False),
    ("int64", np.bool_(True), False),
    ("bool", np.int8(1), False),
]


@pytest.mark.parametrize(("dtype", "value", "fits"), CASTS)
def test_cast_allows_what_fits_within_a_kind(dtype: str, value: Any, fits: bool) -> None:
    layout = compile_layout({"x": ((), dtype), "v": ((2,), dtype)})
    sample = {"x": value, "v": np.stack([value, value])}
    with pytest.raises(DtypeError, match="^x: dtype must be"):
        layout.encode_one(sample)
    if not fits:
        with pytest.raises(SchemaError, match="^x: "):
            layout.encode_one(sample, cast=True)
        return
    one, vector = layout.encode_one(sample, cast=True)
    assert one == np.asarray(value).astype(one.dtype)
    assert vector.dtype == layout.fields[1].dtype


@pytest.mark.parametrize(
    ("value", "got"),
    [
        (np.zeros(3, "f4"), r"\(3,\)"),
        (np.zeros((2, 3), "f4"), r"\(2, 3\)"),
        (0.0, r"\(\)"),
        ([0.0], r"\(1,\)"),
        ([[0.0], [0.0]], r"\(2, 1\)"),
        ([[0.0], 1.0], r"\(2, 1\)"),
        (np.float32(0), r"\(\)"),
    ],
)
def test_a_wrong_shape_is_named(value: Any, got: str) -> None:
    layout = compile_layout({"x": ((2,), "float32")})
    with pytest.raises(SchemaError, match=rf"^x: shape must be .*, got {got}"):
        layout.encode_one({"x": value})


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint64", "float16", "float64", "bfloat16"])
def test_an_int_too_long_to_print_is_refused_by_name(dtype: str) -> None:
    layout = compile_layout({"x": ((), dtype), "v": ((1,), dtype)})
    for sample in ({"x": 10**5000, "v": np.zeros(1, dtype)}, {"x": np.zeros((), dtype), "v": [10**5000]}):
        with pytest.raises(SchemaError, match="^[xv]: .*an int of 16610 bits"):
            layout.encode_one(sample)


def test_lists_of_arrays_must_have_the_dtype() -> None:
    layout = compile_layout({"x": ((2, 2), "float32")})
    rows = [np.ones(2, "f4"), np.zeros(2, "f4")]
    assert (layout.encode_one({"x": rows})[0] == np.stack(rows)).all()
    with pytest.raises(DtypeError, match="^x: dtype must be float32, got float64"):
        layout.encode_one({"x": [np.ones(2), np.zeros(2)]})


def test_unequal_lengths_name_both_leaves() -> None:
    layout = compile_layout({"a": {"x": ((), "int64")}, "b": ((), "int64")})
    with pytest.raises(SchemaError, match="^b: length must be 2 as that of a/x, got 3"):
        layout.encode_batch({"a": {"x": [1, 2]}, "b": [1, 2, 3]})


def test_a_single_value_is_no_batch() -> None:
    layout = compile_layout({"x": ((), "int64")})
    for value in (1, np.int64(1), np.array(1)):
        with pytest.raises(SchemaError, match="^x: must have a leading batch axis"):
            layout.encode_batch({"x": value})


def test_an_array_is_no_tuple() -> None:
    # Two columns of a Tuple and two samples of it look the same in an array; guessing would transpose.
    layout = compile_layout((((), "int64"), ((), "int64")))
    with pytest.raises(SchemaError, match="^sample: must be a tuple of 2, got numpy.ndarray"):
        layout.encode_batch(np.zeros((2, 2), np.int64))


def test_byte_order_is_not_a_dtype() -> None:
    layout = compile_layout({"x": ((2,), "float32")})
    array = layout.encode_one({"x": np.array([1, 2], ">f4")})[0]
    assert array.dtype.isnative
    assert array.tolist() == [1, 2]


def test_strided_values_are_made_contiguous() -> None:
    torch = pytest.importorskip("torch")
    layout = compile_layout({"x": ((3, 2), "float32")})
    value = np.arange(6, dtype="f4").reshape(2, 3).T
    for given_as in (value, torch.from_numpy(value)):
        array = layout.encode_one({"x": given_as})[0]
        assert array.flags.c_contiguous
        assert (array == value).all()
        _, (batch,) = layout.encode_batch({"x": given_as[None]})
        assert batch.flags.c_contiguous
        assert (batch[0] == value).all()
