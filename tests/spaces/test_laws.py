"""Laws that hold for every space of the catalogue."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from recollect.spaces import (
    Layout,
    as_space,
    batch_space,
    canonical,
    compile_layout,
    first_difference,
    space_at,
    space_from_json,
    space_to_json,
)
from recollect.testing.spaces import CATALOGUE, assert_same, max_lengths_of, samples, stack

# gymnasium looks into a stacked Sequence of scalars with numpy scalars, and warns of its own doing.
pytestmark = pytest.mark.filterwarnings("ignore:.*Casting input x to numpy array")
EVERY = pytest.mark.parametrize("name", CATALOGUE)
FIXED = pytest.mark.parametrize(
    "name", [name for name in CATALOGUE if compile_layout(CATALOGUE[name], max_lengths_of(name)).is_fixed]
)


def layout_of(name: str) -> Layout:
    return compile_layout(CATALOGUE[name], max_lengths_of(name))


def native_form(value: Any) -> Any:
    """A sample as it reads back: rows are kept in this machine's byte order."""
    if isinstance(value, dict):
        return {key: native_form(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return tuple(native_form(item) for item in value)
    if isinstance(value, np.ndarray) and not value.dtype.isnative:
        return value.astype(value.dtype.newbyteorder("="))
    return value


def as_arrays(value: Any) -> Any:
    """A sample with 0-d arrays for scalars: gymnasium gives either for an integer Box of shape ()."""
    if isinstance(value, dict):
        return {key: as_arrays(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return tuple(as_arrays(item) for item in value)
    return np.asarray(value) if isinstance(value, np.generic) else value


def check_fields(layout: Layout, arrays: Sequence[np.ndarray[Any, Any]], lead: tuple[int, ...]) -> None:
    for field, array in zip(layout.fields, arrays, strict=True):
        assert type(array) is np.ndarray
        assert array.dtype == field.dtype
        assert array.shape == (*lead, *field.shape)
        assert array.flags.c_contiguous


@EVERY
def test_samples_are_of_the_space(name: str) -> None:
    assert all(sample in CATALOGUE[name] for sample in samples(CATALOGUE[name], 20))


@EVERY
def test_one_sample_reads_back_bit_for_bit(name: str) -> None:
    layout = layout_of(name)
    for sample in samples(layout.space, 20, seed=1):
        arrays = layout.encode_one(sample)
        check_fields(layout, arrays, ())
        back = layout.decode_one([array.copy() for array in arrays])
        assert_same(back, native_form(sample))
        assert back in layout.space


@EVERY
@pytest.mark.parametrize("n", [0, 1, 7])
def test_a_batch_reads_back_bit_for_bit(name: str, n: int) -> None:
    layout = layout_of(name)
    batch = stack(layout.space, samples(layout.space, n, seed=2))
    count, arrays = layout.encode_batch(batch)
    assert count == n
    check_fields(layout, arrays, (n,))
    back = layout.decode_batch(arrays, n)
    assert_same(back, native_form(batch))
    if n:  # gymnasium has no space of no samples
        assert back in batch_space(layout.space, n)


@EVERY
def test_a_row_of_a_batch_is_the_sample(name: str) -> None:
    layout = layout_of(name)
    ones = samples(layout.space, 6, seed=3)
    _, arrays = layout.encode_batch(stack(layout.space, ones))
    for i, sample in enumerate(ones):
        for batched, single in zip(arrays, layout.encode_one(sample), strict=True):
            assert_same(np.asarray(batched[i]), single)


# gymnasium's own sampling overflows at the ends of the 64-bit range
@pytest.mark.parametrize(
    "name", sorted(CATALOGUE.keys() - {"scalar-uint64", "box-int64-limits", "discrete-uint64"})
)
def test_gymnasiums_own_samples_read_back(name: str) -> None:
    # gymnasium's Sequences have no greatest length, but 60 are as good as never reached
    layout = compile_layout(CATALOGUE[name], dict.fromkeys(max_lengths_of(name), 60))
    space = space_from_json(space_to_json(CATALOGUE[name]))
    space.seed(4)
    for _ in range(5):
        sample = space.sample()
        back = layout.decode_one(layout.encode_one(sample))
        assert_same(as_arrays(back), as_arrays(native_form(sample)))


@EVERY
def test_offsets_are_aligned_and_fields_are_apart(name: str) -> None:
    layout = layout_of(name)
    assert layout.row_nbytes > 0
    assert layout.row_nbytes % 8 == 0
    end = 0
    for field in layout.fields:
        assert field.offset % field.dtype.itemsize == 0
        assert end <= field.offset < end + 8
        end = field.offset + field.nbytes
    assert end <= layout.row_nbytes < end + 8 + (end == 0)


@EVERY
def test_rows_hold_samples(name: str) -> None:
    layout = layout_of(name)
    ones = samples(layout.space, 4, seed=5)
    n, arrays = layout.encode_batch(stack(layout.space, ones))
    rows = np.zeros((n, layout.row_nbytes), np.uint8)
    views = [
        np.ndarray(
            (n, *f.shape), f.dtype, rows, f.offset, (layout.row_nbytes, *np.empty(f.shape, f.dtype).strides)
        )
        for f in layout.fields
    ]
    for view, array in zip(views, arrays, strict=True):
        view[...] = array
    for view, array in zip(views, arrays, strict=True):
        assert_same(view.copy(), array)


@EVERY
def test_leaves_own_the_fields_in_order(name: str) -> None:
    layout = layout_of(name)
    assert [i for leaf in layout.leaves for i in leaf.fields] == list(range(len(layout.fields)))
    assert layout.is_fixed == all(leaf.kind not in ("text", "sequence") for leaf in layout.leaves)
    if layout.is_fixed:
        assert [leaf.name for leaf in layout.leaves] == [field.name for field in layout.fields]
    for leaf in layout.leaves:
        assert leaf.name == "/".join(map(str, leaf.path)) or leaf.path == ()


@EVERY
def test_the_template_leads_to_every_leaf(name: str) -> None:
    layout = layout_of(name)

    def walk(node: tuple[Any, ...], path: tuple[str | int, ...]) -> list[tuple[int, tuple[str | int, ...]]]:
        kind, body = node
        if kind == "leaf":
            return [(body, path)]
        pairs = body if kind == "dict" else list(enumerate(body))
        return [found for key, child in pairs for found in walk(child, (*path, key))]

    assert walk(layout.template, ()) == [(i, leaf.path) for i, leaf in enumerate(layout.leaves)]


@EVERY
def test_the_space_survives_json(name: str) -> None:
    space = CATALOGUE[name]
    text = json.dumps(space_to_json(space), allow_nan=False)
    back = space_from_json(json.loads(text))
    assert back == space
    assert first_difference(back, space) is None
    assert canonical(space_to_json(back)) == canonical(space_to_json(space))
    assert repr(back) == repr(space)


@EVERY
def test_the_layout_survives_json_and_pickle(name: str) -> None:
    layout = layout_of(name)
    for back in (
        Layout.from_json(json.loads(json.dumps(layout.to_json()))),
        pickle.loads(pickle.dumps(layout)),
    ):
        assert back == layout
        assert hash(back) == hash(layout)
        assert (back.fields, back.leaves, back.row_nbytes) == (
            layout.fields,
            layout.leaves,
            layout.row_nbytes,
        )
        assert back.template == layout.template
        sample = samples(layout.space, 1, seed=6)[0]
        assert_same(back.decode_one(layout.encode_one(sample)), native_form(sample))


def test_hashes_are_equal_in_another_process_and_all_different() -> None:
    ours = {name: layout_of(name).hash for name in CATALOGUE}
    code = (
        "import json; from recollect.spaces import compile_layout;"
        "from recollect.testing.spaces import CATALOGUE as C, max_lengths_of as m;"
        "print(json.dumps({k: compile_layout(C[k], m(k)).hash for k in C}))"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONHASHSEED": "7", "PYTHONPATH": ":".join(sys.path)},
        capture_output=True, text=True, check=True, timeout=50,
    )  # fmt: skip
    assert json.loads(out.stdout) == ours
    assert len(set(ours.values())) == len(ours)


@EVERY
def test_compiling_again_gives_an_equal_layout_of_the_given_space(name: str) -> None:
    space = space_from_json(space_to_json(CATALOGUE[name]))
    layout = compile_layout(space, max_lengths_of(name))
    assert layout == layout_of(name)
    assert layout.space is space
    assert as_space(space) is space


@EVERY
def test_repr_names_every_field(name: str) -> None:
    layout = layout_of(name)
    text = repr(layout)
    assert text.startswith("Layout(")
    assert text.endswith(f"; {layout.row_nbytes} B)")
    assert all(f"{field.name}: {field.dtype}" in text for field in layout.fields)


def paths_of(node: tuple[Any, ...], path: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    kind, body = node
    pairs = [] if kind == "leaf" else (body if kind == "dict" else list(enumerate(body)))
    return [path] + [found for key, child in pairs for found in paths_of(child, (*path, key))]


@EVERY
def test_projecting_agrees_with_picking(name: str) -> None:
    layout = layout_of(name)
    ones = samples(layout.space, 3, seed=8)
    n, arrays = layout.encode_batch(stack(layout.space, ones))
    for path in paths_of(layout.template):
        mine = layout.field_indices(path)
        if not mine:  # an empty Dict or Tuple has no layout
            with pytest.raises(ValueError, match="at least one leaf"):
                layout.project(path)
            continue
        part = layout.project(path)
        assert part.space is space_at(layout.space, path)
        assert part.row_nbytes == layout.row_nbytes
        assert [f.offset for f in part.fields] == [layout.fields[i].offset for i in mine]
        picked = stack(layout.space, ones)
        for key in path:
            picked = picked[key]
        assert_same(part.decode_batch([arrays[i] for i in mine], n), native_form(picked))
        assert pickle.loads(pickle.dumps(part)) == part


@FIXED
def test_flattening_and_back(name: str) -> None:
    layout = layout_of(name)
    if name in ("tuple-nested", "dict-nested", "dict-mixed-widths", "dict-bfloat16"):
        ones = [_small_ints(sample) for sample in samples(layout.space, 5, seed=9)]  # int64 beside floats
    else:
        ones = samples(layout.space, 5, seed=9)
    matrix = layout.flatten_batch(stack(layout.space, ones))
    assert matrix.shape == (5, layout.flat_dim)
    assert matrix.dtype == layout.flat_dtype
    assert_same(layout.unflatten_batch(matrix), native_form(stack(layout.space, ones)))
    for sample, row in zip(ones, matrix, strict=True):
        assert_same(layout.flatten_one(sample), row.copy())
        assert_same(layout.unflatten_one(row), native_form(sample))
    empty = layout.flatten_batch(stack(layout.space, []))
    assert empty.shape == (0, layout.flat_dim)


def _small_ints(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _small_ints(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return tuple(_small_ints(item) for item in value)
    return np.asarray(value % 2**53) if value.dtype == np.int64 else value


@pytest.mark.parametrize("name", [name for name in CATALOGUE if not layout_of(name).is_fixed])
def test_flattening_text_and_sequences_is_a_type_error_naming_the_leaf(name: str) -> None:
    layout = layout_of(name)
    leaf = next(leaf for leaf in layout.leaves if leaf.kind in ("text", "sequence"))
    calls = [lambda: layout.flat_dim, lambda: layout.flat_dtype]
    calls += [lambda f=f: f(None) for f in (layout.flatten_one, layout.flatten_batch)]
    calls += [lambda f=f: f(None) for f in (layout.unflatten_one, layout.unflatten_batch)]
    for call in calls:
        with pytest.raises(TypeError, match=f"^{leaf.name}: "):
            call()


def test_the_catalogue_covers_what_it_should() -> None:
    assert len(CATALOGUE) >= 40
    kinds = {leaf.kind for name in CATALOGUE for leaf in layout_of(name).leaves}
    assert kinds == {"box", "discrete", "multibinary", "multidiscrete", "text", "sequence"}
