"""Nested data between backends and devices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from recollect.backends.base import Backend
from recollect.backends.registry import find_backend, get_backend
from recollect.spaces.arrays import as_numpy


def map_arrays(fn: Callable[[Any], Any], data: Any) -> Any:
    """Return `data` with `fn` of each array and numpy scalar in its dicts, tuples and lists.

    Strings, Python numbers, None and numpy arrays of strings or objects stay as they are.
    """
    if isinstance(data, dict):
        return {key: _named(fn, key, value) for key, value in data.items()}
    if isinstance(data, tuple):
        items = [map_arrays(fn, value) for value in data]
        return type(data)(*items) if hasattr(data, "_fields") else tuple(items)
    if isinstance(data, list):
        return [map_arrays(fn, value) for value in data]
    return fn(data) if _is_numeric(data) else data


def _named(fn: Callable[[Any], Any], key: Any, value: Any) -> Any:
    """`map_arrays` of what is under a key; an error about a dtype names the leaf."""
    try:
        return map_arrays(fn, value)
    except ValueError as error:
        name, dtype, rest = str(error).partition("dtype: ")
        if not dtype or (name and not name.endswith(" ")):
            raise
        path, leaf = name.rstrip(), isinstance(value, dict)
        raise ValueError(f"{key}{'/' if leaf and path else ''}{path} dtype: {rest}") from error


def copied(data: Any) -> Any:
    """Return `data` with every array as a numpy copy, which nobody else has."""
    return map_arrays(lambda x: np.array(as_numpy(x)), data)


def _is_numeric(x: Any) -> bool:
    if isinstance(x, np.ndarray | np.generic):
        return x.dtype.kind not in "OSUT"
    return hasattr(x, "__dlpack__")


def move(data: Any, backend: str | Backend | None = None, device: Any = None) -> Any:
    """Return `data` with every array as one of `backend`, on `device` if one is named.

    Ownership: arrays that need no change are passed on, and others share memory where backends can; move only
    what is the caller's own.
    """
    target = get_backend(backend)
    if device is not None:
        device = target.as_device(device)

    def convert(x: Any) -> Any:
        if target.is_array(x):
            return x if device is None else target.to_device(x, device)
        source = find_backend(x)
        array = as_numpy(x) if source is None else source.to_numpy(x)
        return target.from_numpy(array, device)

    return map_arrays(convert, data)
