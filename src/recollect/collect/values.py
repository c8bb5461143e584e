"""Observations and actions as values: copied when seen, compared by bits, one slot replaced in a batch."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import numpy as np
from gymnasium import Space, spaces

from recollect.spaces import as_numpy
from recollect.spaces.arrays import is_arraylike

_IMMUTABLE = (str, bytes, int, float, complex, bool, np.generic, type(None))
Array = np.ndarray[Any, Any]


def copied(value: Any, into: Any = None) -> Any:
    """Return a copy of a nested value that shares nothing with it, arrays as C-contiguous numpy.

    Ownership: `into`, an earlier copy that nobody else holds, is filled again where dtypes and shapes allow.
    """
    if type(value) is np.ndarray and value.dtype != object:
        if into is not None and type(into) is np.ndarray and _alike(into, value):
            _fill(into, value)
            return into
        return np.array(value, order="C")
    if isinstance(value, _IMMUTABLE):
        return value
    if isinstance(value, Mapping):
        old = into if isinstance(into, dict) else {}
        return {key: copied(part, old.get(key)) for key, part in value.items()}
    if isinstance(value, tuple | list):
        parts = into if isinstance(into, tuple | list) and len(into) == len(value) else [None] * len(value)
        return (
            type(value)([copied(part, old) for part, old in zip(value, parts)])
            if _is_plain(value)
            else deepcopy(value)
        )
    if is_arraylike(value):
        return np.array(as_numpy(value), order="C")
    return deepcopy(value)


def _fill(to: Array, value: Array) -> None:
    """Copy; a narrow matrix stored by columns goes column by column (numpy alone takes 2 to 3 times as long)."""
    if value.ndim == 2 and value.shape[1] <= 32 and value.flags.f_contiguous and not value.flags.c_contiguous:
        for k in range(value.shape[1]):
            to[:, k] = value[:, k]
    else:
        np.copyto(to, value)


def _alike(a: Array, b: Array) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.flags.writeable


def _is_plain(value: Any) -> bool:
    return type(value) is tuple or type(value) is list


def same(a: Any, b: Any) -> bool:
    """Tell whether two nested values are equal bit for bit (NaN equals NaN; dtypes count)."""
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(same(part, b[key]) for key, part in a.items())
    if isinstance(a, tuple | list) and isinstance(b, tuple | list):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b))
    if is_arraylike(a) and is_arraylike(b):
        x, y = as_numpy(a), as_numpy(b)
        return x.dtype == y.dtype and x.shape == y.shape and x.tobytes() == y.tobytes()
    return bool(np.array_equal(np.asarray(a), np.asarray(b)))


def slot_of(space: Space[Any], batch: Any, i: int) -> Any:
    """Return slot i of a batch of `space`, without batch axis; it may alias the batch."""
    if isinstance(space, spaces.Dict):
        return {key: slot_of(part, batch[key], i) for key, part in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple([slot_of(part, batch[k], i) for k, part in enumerate(space.spaces)])
    if isinstance(batch, np.ndarray):
        return batch[i] if batch.ndim == 1 else batch[i, ...]
    return batch[i]


def same_at(space: Space[Any], batch: Any, i: int, value: Any) -> bool:
    """Tell whether slot i of a batch equals a value bit for bit."""
    return same(slot_of(space, batch, i), value)


def same_slots(space: Space[Any], a: Any, b: Any, slots: Array) -> bool:
    """Tell whether two batches are equal bit for bit in these slots."""
    return all(same(slot_of(space, a, i), slot_of(space, b, i)) for i in slots.tolist())


def replaced(space: Space[Any], batch: Any, values: Mapping[int, Any]) -> tuple[Any, dict[int, str]]:
    """Return a new batch with some slots replaced, and what does not fit, by slot."""
    wrong: dict[int, str] = {}
    return _replaced(space, batch, values, wrong), wrong


def _replaced(space: Space[Any], batch: Any, values: Mapping[int, Any], wrong: dict[int, str]) -> Any:
    if isinstance(space, spaces.Dict):
        return {
            key: _replaced(part, batch[key], _parts(values, key, wrong), wrong)
            for key, part in space.spaces.items()
        }
    if isinstance(space, spaces.Tuple):
        return tuple(
            [
                _replaced(part, batch[k], _parts(values, k, wrong), wrong)
                for k, part in enumerate(space.spaces)
            ]
        )
    if not isinstance(batch, np.ndarray):
        return tuple([values.get(i, old) for i, old in enumerate(batch)])
    out = batch.copy(order="C")
    for i, value in values.items():
        array = (
            as_numpy(value) if is_arraylike(value) else np.asarray(value, None if out.ndim > 1 else out.dtype)
        )
        if array.shape != out.shape[1:] or array.dtype != out.dtype:
            wrong[i] = (
                f"{array.dtype} of shape {array.shape} where {out.dtype} of shape {out.shape[1:]} belongs"
            )
        else:
            out[i] = array
    return out


def _parts(values: Mapping[int, Any], key: Any, wrong: dict[int, str]) -> dict[int, Any]:
    parts = {}
    for i, value in values.items():
        try:
            parts[i] = value[key]
        except (LookupError, TypeError):
            wrong[i] = f"{type(value).__name__} without {key!r}"
    return parts


def assigned(space: Space[Any], batch: Any, new: Any, mask: Array) -> Any:
    """Return `batch` with the slots of `mask` taken from `new`; `batch` is used up."""
    if isinstance(space, spaces.Dict):
        return {k: assigned(part, batch[k], new[k], mask) for k, part in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple([assigned(part, batch[k], new[k], mask) for k, part in enumerate(space.spaces)])
    if isinstance(batch, np.ndarray) and isinstance(new, np.ndarray) and _alike(batch, new):
        batch[mask] = new[mask]
        return batch
    if isinstance(batch, tuple) and len(batch) == len(mask):  # Text, Sequence
        return tuple([x if m else old for old, x, m in zip(batch, new, mask)])
    return new
