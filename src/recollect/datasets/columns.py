"""Arrow columns of data sets as arrays: numbers in any nesting of lists, strings, and pictures."""

from __future__ import annotations

import io
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium import Space, spaces

from recollect.datasets.batch import need
from recollect.errors import FormatError
from recollect.files.record import brief, read_bytes
from recollect.spaces.json import MOST_NBYTES
from recollect.storage.filed.image import check_side, image_damage

Array = np.ndarray[Any, Any]


def checked_table(table: Any) -> Any:
    """A table whose values all lie inside it: Arrow files say where, and Arrow reads there unchecked."""
    table.validate(full=True)
    return table


def numbers(pa: Any, column: Any, shape: tuple[int, ...], dtype: Any, where: str) -> Array:
    """Return a column of numbers as `[n, *shape]`, whatever lists it is nested in."""
    array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    if isinstance(array, pa.ChunkedArray):  # of no chunks
        array = pa.concat_arrays(array.chunks) if array.num_chunks else pa.array([], array.type)
    n = len(array)
    while is_list(pa, array.type) or isinstance(array.type, pa.BaseExtensionType):
        array = array.storage if isinstance(array.type, pa.BaseExtensionType) else array.flatten()
    if array.null_count:
        raise FormatError(f"{where}: must have a value in every row, got {array.null_count} nulls")
    flat = array.to_numpy(zero_copy_only=False)
    if flat.size != n * int(np.prod(shape)):
        raise FormatError(
            f"{where}: must hold {shape} a row, got {flat.size} numbers in {n} rows; it is damaged"
        )
    return np.ascontiguousarray(flat.reshape(n, *shape).astype(dtype, copy=False))


def is_list(pa: Any, kind: Any) -> bool:
    """Whether an Arrow type is a list of any kind."""
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def is_picture(pa: Any, kind: Any) -> bool:
    """Whether an Arrow type is that of encoded pictures: a struct of bytes and path."""
    return bool(pa.types.is_struct(kind) and {f.name for f in kind} == {"bytes", "path"})


def picture(item: Any, shape: tuple[int, ...] | None, root: Path | None, where: str) -> Array:
    """Decode one picture of a column, from its bytes or from the file that it names below `root`.

    FormatError for one that is not of the shape, or without it is larger than a sample may be, before it is decoded.
    """
    image = need("PIL.Image", "images", "pictures")
    data, name = item.get("bytes"), item.get("path")
    if data is None and (root is None or not name or ".." in Path(name).parts or Path(name).is_absolute()):
        raise FormatError(f"{where}: a picture must have bytes or a path within the data set, got {name!r}")
    with image_damage(where):
        data = data if data is not None else read_bytes(root / name, follow=True)
        with image.open(io.BytesIO(data)) as opened:
            if shape is None:
                check_size((*opened.size, 3), 1, where)
            else:
                check_side(opened, shape)
            plain = opened if opened.mode in ("RGB", "L") else opened.convert("RGB")
            return np.asarray(plain)


def pictures(items: list[Any], shape: tuple[int, ...], root: Path | None, where: str) -> Array:
    """Decode pictures into `[n, H, W, C]` or `[n, H, W]`; FormatError for one of another size."""
    out = np.empty((len(items), *shape), np.uint8)
    for i, item in enumerate(items):
        found = picture(item, shape, root, f"{where}, row {i}")
        if found.size != out[i].size:
            raise FormatError(f"{where}, row {i}: must be a picture of {shape}, got {found.shape}")
        out[i] = found.reshape(shape)
    return out


def check_size(shape: Sequence[int], itemsize: int, where: str) -> None:
    """Raise FormatError for a shape that no sample has: a few digits of metadata would take any amount of memory."""
    if min(shape, default=0) < 0 or prod(shape) * itemsize > MOST_NBYTES:
        raise FormatError(
            f"{where}: a sample must have at most {MOST_NBYTES} bytes, got the shape {brief(shape)}; it is damaged"
        )


def number_space(shape: tuple[int, ...], dtype: Any) -> Space[Any]:
    """The space of numbers of any value."""
    from recollect.spaces import as_space

    return as_space((shape, np.dtype(dtype)))


def text_space(strings: set[str]) -> spaces.Text:
    """The narrowest Text that holds all these strings."""
    characters = sorted(set("".join(strings))) or [" "]
    return spaces.Text(max(1, max(map(len, strings), default=1)), min_length=0, charset="".join(characters))
