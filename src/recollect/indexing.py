"""One meaning of an index for every batch, view, sampler and storage.

| index | result |
|---|---|
| int, numpy integer, 0-d integer array of any backend | an int: one sample |
| slice, `...`, list, tuple, range, 1-D integers of any backend | positions: a batch |
| 1-D bool array or list as long as the batch | positions where True |
| out of range, a mask of another length | IndexError |
| bool scalar, float, str, None, 2-D | TypeError |
"""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recollect.spaces.arrays import as_numpy, is_arraylike
from recollect.spaces.convert import shown

Positions = NDArray[np.int64]
_INT64 = np.dtype(np.int64)
_BOOLS = {bool, np.bool_}


def normalize(index: Any, n: int) -> int | Positions:
    """Return `index` into `n` samples as an int in [0, n) or an int64 array of such.

    Ownership: the result may be `index` itself; copy it to keep it.
    """
    kind = type(index)
    if kind is int:
        return _one(index, n)
    if kind is np.ndarray and index.dtype is _INT64 and index.ndim == 1:
        return _many(index, n)
    if kind is slice:
        return np.arange(*index.indices(n), dtype=np.int64)
    if index is Ellipsis:
        return np.arange(n, dtype=np.int64)
    if isinstance(index, list | tuple):
        return _from_list(index, n)
    if kind is range:
        return _from_range(index, n)
    if is_arraylike(index):
        return _from_array(_read(index), n)
    return _one(_as_int(index), n)


def is_single(index: Any) -> bool:
    """Tell whether an index that is valid means one sample (an int) and not a batch; needs no length.

    >>> is_single(-1), is_single([-1]), is_single(slice(1))
    (True, False, False)
    """
    if isinstance(index, slice | list | tuple | range) or index is Ellipsis:
        return False
    return getattr(index, "ndim", 0) == 0


def positions(index: Any, n: int) -> Positions:
    """Return `index` into `n` samples as an int64 array of positions, one for an int."""
    found = normalize(index, n)
    return np.array([found], dtype=np.int64) if isinstance(found, int) else found


def _one(i: int, n: int) -> int:
    if not -n <= i < n:
        raise _out_of_range(i, n)
    return i if i >= 0 else i + n


def _many(idx: Positions, n: int) -> Positions:
    # As unsigned, negatives are huge: one pass tells whether all are in [0, n).
    if idx.size == 0 or np.maximum.reduce(idx.view(np.uint64)) < n:
        return idx
    outside = (idx < -n) | (idx >= n)
    if outside.any():
        raise _out_of_range(int(idx[outside][0]), n)
    return np.where(idx < 0, idx + n, idx)


def _mask(mask: NDArray[np.bool_], n: int) -> Positions:
    if len(mask) != n:
        raise IndexError(f"index: a mask must have the length {n} of the batch, got length {len(mask)}")
    return np.flatnonzero(mask).astype(np.int64, copy=False)


def _from_list(index: list[Any] | tuple[Any, ...], n: int) -> Positions:
    types = set(map(type, index))
    if not types:
        return np.empty(0, np.int64)
    if types <= _BOOLS:
        return _mask(np.array(index, dtype=bool), n)
    try:
        found = np.array(index if types == {int} else [_as_int(i) for i in index], dtype=np.int64)
    except OverflowError:
        raise _out_of_range(next(i for i in map(int, index) if not -n <= i < n), n) from None
    return _many(found, n)


def _from_range(index: range, n: int) -> Positions:
    for end in (index[0], index[-1]) if index else ():
        _one(end, n)
    found = np.arange(index.start, index.stop, index.step, dtype=np.int64) if index else np.empty(0, np.int64)
    return _many(found, n)


def _from_array(array: np.ndarray[Any, Any], n: int) -> int | Positions:
    kind = array.dtype.kind
    if array.ndim > 1:
        raise _wrong_type(f"an array of shape {array.shape}")
    if array.ndim == 0:
        return _one(_as_int(array[()]), n)
    if kind == "b":
        return _mask(array, n)
    if array.size == 0 and kind in "iuf":  # np.array([]) is an empty list, though its dtype is float64
        return np.empty(0, np.int64)
    if kind not in "iu":
        raise _wrong_type(f"an array of {array.dtype}")
    if kind == "u" and array.max() > np.iinfo(np.int64).max:
        raise _out_of_range(int(array.max()), n)
    return _many(array.astype(np.int64, copy=False), n)


def _as_int(i: Any) -> int:
    if isinstance(i, np.generic):
        if i.dtype.kind not in "iu":  # np.bool_ and np.timedelta64 would pass for integers
            raise _wrong_type(f"{i.dtype} {i}")
        return int(i)
    if is_arraylike(i):
        array = _read(i)
        if array.ndim:
            raise _wrong_type(f"an array of shape {array.shape} in a list")
        return _as_int(array[()])
    if isinstance(i, bool) or not hasattr(type(i), "__index__"):
        raise _wrong_type(f"{type(i).__name__} {i!r}")
    return operator.index(i)


def _read(index: Any) -> np.ndarray[Any, Any]:
    try:
        return np.asarray(as_numpy(index))
    except Exception as error:
        raise _wrong_type(type(index).__name__) from error


def _wrong_type(got: str) -> TypeError:
    return TypeError(f"index: must be an int, slice, `...`, or 1-D integers or bools, got {got}")


def _out_of_range(i: int, n: int) -> IndexError:
    return IndexError(f"index: must be in [{-n}, {n}) for length {n}, got {shown(i)}")
