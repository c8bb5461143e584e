"""One leaf's value as an array of exactly its dtype and shape, or an error naming it.

Arrays must have the dtype (with `cast`, the kind). Python numbers have no width, so they need only fit: a
float is rounded to the leaf's width, an int must be exact, a bool is only ever a bool.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from recollect.errors import DtypeError, SchemaError, class_name
from recollect.spaces.arrays import as_numpy, is_arraylike
from recollect.spaces.dtypes import dtype_kind, exact_bits, float_bounds, int_bounds, native

Array = np.ndarray[Any, Any]
Shape = tuple[int, ...]
Items = list[Any] | tuple[Any, ...]
_NUMPY = (np.ndarray, np.generic)  # tuples, not unions: a union is built anew at every call
_NUMBER = (int, float)
_LIST = (list, tuple)
_DTYPE_HINT = "cast it first, create the buffer with cast=True, or change the space"


def to_array(value: Any, dtype: np.dtype[Any], shape: Shape, name: str, cast: bool) -> Array:
    """Return `value` as a C-contiguous array of `dtype` and `shape`; it may alias `value`."""
    if isinstance(value, _NUMPY):
        return _fit(np.asarray(value), dtype, shape, name, cast)
    if isinstance(value, _NUMBER):
        if shape:
            raise _shape_error(name, shape, ())
        return _from_number(value, dtype, name)
    if isinstance(value, _LIST):
        return _from_list(value, dtype, shape, name, cast)
    return _fit(foreign(value, name, dtype), dtype, shape, name, cast)


def to_batch(value: Any, dtype: np.dtype[Any], shape: Shape, name: str, cast: bool) -> Array:
    """Return `value` as an array of `dtype` and shape `(n, *shape)`, whatever n it has."""
    if isinstance(value, _LIST):
        if shape and _shape_of(value) == shape:
            raise _axis_error(name, f"shape {shape}")
        return _from_list(value, dtype, (len(value), *shape), name, cast)
    if isinstance(value, _NUMBER) and not isinstance(value, np.generic):
        raise _axis_error(name, type(value).__name__)
    array = foreign(value, name, dtype)
    if array.shape == shape or array.ndim == 0:
        raise _axis_error(name, f"shape {array.shape}")
    return _fit(array, dtype, (array.shape[0], *shape), name, cast)


def foreign(value: Any, name: str, dtype: np.dtype[Any]) -> Array:
    """Return an array of any backend as numpy; anything that is no array is a DtypeError."""
    try:
        if is_arraylike(value):
            return np.asarray(as_numpy(value))
    except Exception as error:
        raise DtypeError(
            f"{name}: must be readable as an array of {dtype}, got {class_name(value)}; convert it first"
        ) from error
    raise DtypeError(f"{name}: must be an array or number of {dtype}, got {class_name(value)}; convert it")


def _fit(array: Array, dtype: np.dtype[Any], shape: Shape, name: str, cast: bool) -> Array:
    if array.dtype is not dtype and array.dtype != dtype:
        array = _retype(array, dtype, name, cast)
    if array.shape != shape:
        raise _shape_error(name, shape, array.shape)
    return array if array.flags.c_contiguous else np.ascontiguousarray(array)


def _retype(array: Array, dtype: np.dtype[Any], name: str, cast: bool) -> Array:
    if native(array.dtype) == dtype:
        return array.astype(dtype)
    if cast and dtype_kind(array.dtype) == dtype_kind(dtype) is not None:
        return narrow(array, dtype, name)
    hint = "cast across kinds yourself" if cast else _DTYPE_HINT
    raise DtypeError(f"{name}: dtype must be {dtype}, got {array.dtype}; {hint}")


def narrow(array: Array, dtype: np.dtype[Any], name: str) -> Array:
    """Return `array` as `dtype`: integers stay equal, floats are rounded but stay finite."""
    kind = dtype_kind(dtype)
    if kind == "float":
        with np.errstate(over="ignore", invalid="ignore"):
            out = array.astype(dtype)
        bad = (np.isfinite(out) != np.isfinite(array)) | (np.isnan(out) != np.isnan(array))
    else:
        bad = _outside(array, dtype)
        with np.errstate(invalid="ignore"):
            out = array.astype(dtype)
    if bad.any():
        raise _range_error(name, dtype, array[bad].flat[0])
    return out


def _outside(array: Array, dtype: np.dtype[Any]) -> Array:
    low, high = (0, 1) if dtype_kind(dtype) == "bool" else int_bounds(dtype)
    if dtype_kind(array.dtype) == "float":
        wide = array.astype(np.float64)
        # high + 1 is a power of two and so exact; high itself may not be (2**63 - 1).
        return np.asarray(~((wide >= low) & (wide < float(high + 1)) & (np.floor(wide) == wide)))
    # numpy compares integers of any width and sign by value.
    wide = array.astype(np.int64) if array.dtype.kind not in "iu" else array
    return np.asarray((wide < low) | (wide > high))


def _from_number(value: bool | int | float, dtype: np.dtype[Any], name: str) -> Array:
    kind = dtype_kind(dtype)
    is_bool = isinstance(value, bool)
    if is_bool != (kind == "bool") or (kind == "int" and isinstance(value, float)):
        given = class_name(value)
        raise DtypeError(f"{name}: must be {kind} for dtype {dtype}, got {given} {shown(value)}; convert it")
    if kind == "float":
        return _rounded(value, dtype, name)
    if kind == "int":
        low, high = int_bounds(dtype)
        if not low <= value <= high:
            raise _range_error(name, dtype, value)
    return np.array(value, dtype=dtype)


def _rounded(value: int | float, dtype: np.dtype[Any], name: str) -> Array:
    low, high = float_bounds(dtype)
    if low <= value <= high and (type(value) is float or abs(value) <= 2 ** exact_bits(dtype)):
        return np.array(value, dtype=dtype)  # the usual case: it cannot overflow, and an int is exact
    try:
        wide = np.float64(value)
    except OverflowError:
        wide = np.float64(np.inf)
    with np.errstate(over="ignore", invalid="ignore"):
        out = np.array(wide, dtype=dtype)
    if isinstance(value, int):
        fits = bool(np.isfinite(out)) and int(out) == value
    else:
        fits = bool(np.isfinite(out) == np.isfinite(wide)) and bool(np.isnan(out) == np.isnan(wide))
    if not fits:
        raise _range_error(name, dtype, value)
    return out


def _from_list(value: Items, dtype: np.dtype[Any], shape: Shape, name: str, cast: bool) -> Array:
    if not shape or len(value) != shape[0]:
        raise _shape_error(name, shape, _shape_of(value))
    if _is_plain(value, dtype_kind(dtype)):
        return _from_plain_list(value, dtype, shape, name)
    for item in value:  # before the items, whose errors would speak of their own shapes
        if _shape_of(item) != shape[1:]:
            raise _shape_error(name, shape, (len(value), *_shape_of(item)))
    parts = [to_array(item, dtype, shape[1:], name, cast) for item in value]
    return np.stack(parts) if parts else np.empty(shape, dtype)


def _is_plain(value: Items, kind: str | None) -> bool:
    """Tell whether numpy alone can convert: nothing but floats, or but ints, at any depth."""
    types = set(map(type, value))
    if types <= {list, tuple}:
        return bool(value) and all(_is_plain(item, kind) for item in value)
    return types == {float if kind == "float" else int} and kind != "bool"


def _from_plain_list(value: Any, dtype: np.dtype[Any], shape: Shape, name: str) -> Array:
    kind = dtype_kind(dtype)
    try:
        wide = np.array(value, dtype=np.float64 if kind == "float" else np.int64)
    except OverflowError:  # an int beyond int64: each by itself, for uint64 may hold it
        return np.stack([to_array(item, dtype, shape[1:], name, False) for item in value])
    except ValueError:
        raise _shape_error(name, shape, _shape_of(value)) from None
    if wide.shape != shape:
        raise _shape_error(name, shape, wide.shape)
    return narrow(wide, dtype, name)


def _shape_of(value: Any) -> Shape:
    """Return the shape of an array, or of nested lists along their first items."""
    if isinstance(value, list | tuple):
        return (len(value), *(_shape_of(value[0]) if value else ()))
    shape = getattr(value, "shape", ())
    return shape if isinstance(shape, tuple) else ()


def _axis_error(name: str, got: str) -> SchemaError:
    return SchemaError(
        f"{name}: must have a leading batch axis, got {got}; write one sample with append(), several as arrays (n, ...)"
    )


def _range_error(name: str, dtype: np.dtype[Any], got: Any) -> SchemaError:
    rule = f"be exact in {dtype}" if isinstance(got, int) else f"fit {dtype}"
    return SchemaError(f"{name}: value must {rule}, got {shown(got)}; change the value or the space")


def shown(number: Any) -> str:
    """Return a number for a message; Python refuses to print ints of thousands of digits."""
    if isinstance(number, int) and number.bit_length() > 128:
        return f"an int of {number.bit_length()} bits"
    return str(number)


def _shape_error(name: str, shape: Shape, got: Shape) -> SchemaError:
    hint = "reshape the value or change the space"
    if len(got) == len(shape) + 1 and got[1:] == shape:
        hint = f"write several samples with extend(), or {hint}"
    return SchemaError(f"{name}: shape must be {shape}, got {got}; {hint}")
