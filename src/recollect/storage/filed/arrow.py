"""Between the columns of a layout and Arrow: what a Parquet file of samples looks like.

A leaf is one column, named by its path. An array leaf is a fixed-size list of its numbers in C order (a plain number
for shape ()), a Text a string, a Sequence a list, and within it a Dict or Tuple a struct. Dtypes that Arrow does not
have (bfloat16, float8, ...) are the unsigned integers of their bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

import numpy as np
from gymnasium import Space, spaces

from recollect.budget import check_fits
from recollect.errors import FormatError
from recollect.spaces import Layout
from recollect.spaces.dtypes import is_extended, native
from recollect.spaces.tree import ELEMENT, Path, array_form, children, path_name, space_at
from recollect.storage.filed.columns import wide_layout

Array = np.ndarray[Any, Any]
_SURROGATES = frozenset(map(chr, range(0xD800, 0xE000)))


def raw_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The dtype itself, or the unsigned integer of its bits where files do not know it."""
    return np.dtype(f"u{dtype.itemsize}") if is_extended(dtype) else dtype


# -- out


def to_table(pa: Any, layout: Layout, arrays: Sequence[Array]) -> Any:
    """Return rows as an Arrow table, a column per leaf."""
    n = len(arrays[0])
    columns = {
        leaf.name: _to_arrow(pa, space_at(layout.space, leaf.path), iter([arrays[i] for i in leaf.fields]), n)
        for leaf in layout.leaves
    }
    return pa.table(columns)


def _to_arrow(pa: Any, space: Space[Any], arrays: Iterator[Array], n: int) -> Any:
    if isinstance(space, spaces.Text):
        return _text_to_arrow(pa, space, next(arrays), next(arrays), n)
    if isinstance(space, spaces.Sequence):
        return _list_to_arrow(pa, space, arrays, n)
    if isinstance(space, spaces.Dict | spaces.Tuple):
        parts = {str(key): _to_arrow(pa, child, arrays, n) for key, child in children(space)}
        return pa.StructArray.from_arrays(list(parts.values()), list(parts))
    array = next(arrays)
    size = prod(array.shape[1:])
    if not size:
        return pa.nulls(n, pa.int8())
    flat = np.ascontiguousarray(array).reshape(-1)
    values = pa.array(flat.view(raw_dtype(flat.dtype)))
    return values if array.ndim == 1 else pa.FixedSizeListArray.from_arrays(values, size)


def _text_type(pa: Any, space: spaces.Text) -> Any:
    # A lone surrogate has no UTF-8; where the charset has one, the column is bytes.
    return pa.string() if _SURROGATES.isdisjoint(space.character_set) else pa.binary()


def _text_to_arrow(pa: Any, space: spaces.Text, data: Array, lengths: Array, n: int) -> Any:
    offsets = _offsets(lengths)
    used = data[np.arange(data.shape[1]) < lengths[:, None]]
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(np.ascontiguousarray(used))]
    return pa.Array.from_buffers(_text_type(pa, space), n, buffers)


def _list_to_arrow(pa: Any, space: spaces.Sequence, arrays: Iterator[Array], n: int) -> Any:
    lengths = next(arrays)
    inner = [next(arrays) for _ in range(_width(space.feature_space))]
    elements = [a[np.arange(a.shape[1]) < lengths[:, None]] for a in inner]
    total = int(lengths.sum())
    return pa.ListArray.from_arrays(
        pa.array(_offsets(lengths)), _to_arrow(pa, space.feature_space, iter(elements), total)
    )


def _offsets(lengths: Array) -> Array:
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int32)


def _width(space: Space[Any]) -> int:
    """How many columns of a layout a space has."""
    if isinstance(space, spaces.Text):
        return 2
    if isinstance(space, spaces.Sequence):
        return 1 + _width(space.feature_space)
    inner = [child for _, child in children(space)]
    return sum(map(_width, inner)) if isinstance(space, spaces.Dict | spaces.Tuple) else 1


# -- back


def from_table(pa: Any, layout: Layout, table: Any, where: str) -> tuple[Layout, list[Array]]:
    """Return the rows of a table as arrays, and the layout that fits their longest Sequences.

    Tables come from files: what does not fit the space is a FormatError.
    """
    most = dict.fromkeys(layout.max_lengths, 1)
    arrays: list[Array] = []
    for leaf in layout.leaves:
        try:
            chunked = table.column(leaf.name)
            column = chunked.chunk(0) if chunked.num_chunks == 1 else chunked.combine_chunks()
            space = space_at(layout.space, leaf.path)
            arrays += _from_arrow(pa, space, leaf.path, column, most)
        except (KeyError, TypeError, ValueError, AttributeError, IndexError, pa.ArrowException) as error:
            raise FormatError(
                f"{where}: {leaf.name}: must fit its space, got {error}; it is damaged"
            ) from None
    return (wide_layout(layout.space, most) if most else layout), arrays


def _from_arrow(pa: Any, space: Space[Any], path: Path, column: Any, most: dict[str, int]) -> list[Array]:
    n = len(column)
    if isinstance(space, spaces.Text):
        return _text_from_arrow(pa, space, column, n)
    if isinstance(space, spaces.Sequence):
        return _list_from_arrow(pa, space, path, column, most, n)
    if isinstance(space, spaces.Dict | spaces.Tuple):
        fields = column.flatten()
        return [
            array
            for (key, child), part in zip(children(space), fields, strict=True)
            for array in _from_arrow(pa, child, (*path, key), part, most)
        ]
    return [_array_from_arrow(pa, space, column, n)]


def _array_from_arrow(pa: Any, space: Space[Any], column: Any, n: int) -> Array:
    dtype, shape = array_form(space)
    dtype = native(dtype)
    if not prod(shape):
        return np.empty((n, *shape), dtype)
    values = column if shape == () else column.values
    if len(values) != n * prod(shape):  # a slice of a longer array
        values = column.flatten()
    if column.null_count or values.null_count or len(values) != n * prod(shape):
        raise ValueError(f"{column.type} with {column.null_count} nulls for {dtype}{shape}")
    found: Array = values.to_numpy(zero_copy_only=False)
    if found.dtype != raw_dtype(dtype):
        raise ValueError(f"{column.type} for {dtype}{shape}")
    return found.view(dtype).reshape(n, *shape)


def _text_from_arrow(pa: Any, space: spaces.Text, column: Any, n: int) -> list[Array]:
    if column.type != _text_type(pa, space) or column.null_count:
        raise ValueError(f"{column.type} with {column.null_count} nulls for a Text")
    width = space.max_length * (len(_widest(space)) if space.character_set else 1)
    _, offsets, data = column.buffers()
    at = (
        np.frombuffer(offsets, np.int32)[column.offset : column.offset + n + 1]
        if n
        else np.zeros(1, np.int32)
    )
    lengths = np.diff(at).astype(np.int32)
    if n and int(lengths.max()) > width:
        raise ValueError(f"a text of {int(lengths.max())} bytes for at most {width}")
    check_fits(
        2 * n * width, f"{n} texts of {width} bytes", "free memory, or it is damaged", when=" to be read"
    )
    out = np.zeros((n, width), np.uint8)
    if data is not None:
        used = np.frombuffer(data, np.uint8)[int(at[0]) : int(at[-1])]
        out[np.arange(width) < lengths[:, None]] = used
    return [out, lengths]


def _widest(space: spaces.Text) -> bytes:
    return max(space.character_set).encode("utf-8", "surrogatepass")


def _list_from_arrow(
    pa: Any, space: spaces.Sequence, path: Path, column: Any, most: dict[str, int], n: int
) -> list[Array]:
    if column.null_count:
        raise ValueError(f"{column.null_count} nulls for a Sequence")
    lengths = np.diff(column.offsets.to_numpy()).astype(np.int32) if n else np.zeros(0, np.int32)
    width = 1 << max(int(lengths.max(initial=1)) - 1, 0).bit_length()
    name = path_name(path)
    most[name] = max(most.get(name, 1), width)
    elements = _from_arrow(pa, space.feature_space, (*path, ELEMENT), column.flatten(), most)
    inside = np.arange(width) < lengths[:, None]
    out: list[Array] = [lengths]
    for array in elements:
        padded = np.zeros((n, width, *array.shape[1:]), array.dtype)
        padded[inside] = array
        out.append(padded)
    return out
