"""What can be seen of an environment's values: off their space, written over later, missing at an episode's end."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from gymnasium import Space, spaces

from recollect.batch.structure import has_no_array
from recollect.collect.bounds import outside
from recollect.spaces import as_numpy
from recollect.spaces.arrays import is_arraylike
from recollect.spaces.tree import children, path_name

Path = tuple[str | int, ...]


def problems(space: Space[Any], value: Any, n: int | None, path: Path = ()) -> Iterator[tuple[str, str]]:
    """Yield (leaf, problem) for each leaf of a value that is off its space; `n` is the batch axis, if there is one."""
    parts = dict(children(space))
    if parts:
        if not _has_parts(space, value, parts):
            keys = list(parts) if isinstance(space, spaces.Dict) else len(parts)
            yield path_name(path), f"must have the parts {keys}, got {_brief(value)}"
            return
        for key, part in parts.items():
            yield from problems(part, value[key], n, (*path, key))
        return
    wrong = _leaf_problem(space, value, n)
    if wrong:
        yield path_name(path), wrong


def _has_parts(space: Space[Any], value: Any, parts: Mapping[Any, Any]) -> bool:
    if isinstance(space, spaces.Dict):
        return isinstance(value, Mapping) and set(value) == set(parts)
    return isinstance(value, tuple) and len(value) == len(parts)


def _leaf_problem(space: Space[Any], value: Any, n: int | None) -> str | None:
    if has_no_array(space):
        items = [value] if n is None else value
        if n is not None and (not isinstance(value, tuple) or len(value) != n):
            return f"must be a tuple of {n}, got {_brief(value)}"
        bad = [item for item in items if not space.contains(item)]
        return f"must be a member of {space}, got {bad[0]!r}" if bad else None
    if not is_arraylike(value):
        if n is None and isinstance(space, spaces.Discrete) and type(value) is int:
            return None if space.contains(value) else f"must be a member of {space}, got {value}"
        return f"must be an array, got {_brief(value)}"
    array = as_numpy(value)
    shape = tuple(space.shape or ()) if n is None else (n, *(space.shape or ()))
    if array.shape != shape:
        return f"shape must be {shape}, got {array.shape}"
    if array.dtype != space.dtype and not (
        n is None and isinstance(space, spaces.Discrete) and array.dtype.kind in "iu"
    ):
        return f"dtype must be {space.dtype}, got {array.dtype}"
    found = outside(space, array[None] if n is None else array, n or 1)
    for i, problem in found.items():
        where = "" if n is None else f" in slot {i}"
        return problem.removeprefix("value: ") + where
    return None


def _brief(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"a dict with {list(value)}"
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)}"
    return type(value).__name__


def arrays_of(value: Any) -> list[np.ndarray[Any, Any]]:
    """Return the numpy arrays in a nested value, themselves and not copies."""
    if isinstance(value, np.ndarray):
        return [value] if value.dtype != object else []
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, tuple | list) else ()
    return [array for part in parts for array in arrays_of(part)]


def share(a: Any, b: Any) -> bool:
    """Tell whether two nested values have memory in common."""
    pairs = zip(arrays_of(a), arrays_of(b))
    return any(x.size and np.may_share_memory(x, y) for x, y in pairs)


def flag_problem(value: Any, n: int | None) -> str | None:
    """Say what is wrong with `terminated` or `truncated`."""
    if n is None:
        return None if isinstance(value, bool | np.bool_) else f"must be a bool, got {_brief(value)}"
    return _vector_problem(value, n, lambda a: a.dtype == bool, "bool")


def reward_problem(value: Any, n: int | None) -> str | None:
    """Say what is wrong with a reward."""
    if n is None:
        try:
            number = float(value)
        except (TypeError, ValueError):
            return f"must be a number, got {_brief(value)}"
        return None if np.isfinite(number) else f"must be finite, got {number}"
    wrong = _vector_problem(value, n, lambda a: a.dtype.kind in "fiub", "numbers")
    if wrong:
        return wrong
    bad = np.flatnonzero(~np.isfinite(as_numpy(value)))
    return f"must be finite, got {as_numpy(value)[bad[0]]} in slot {bad[0]}" if len(bad) else None


def _vector_problem(value: Any, n: int, fits: Any, what: str) -> str | None:
    if not is_arraylike(value):
        return f"must be an array of {n} {what}, got {_brief(value)}"
    array = as_numpy(value)
    if array.shape != (n,) or not fits(array):
        return f"must be an array of {n} {what}, got {array.dtype} of shape {array.shape}"
    return None
