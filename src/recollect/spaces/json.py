"""Spaces as plain JSON values, exact in both directions.

A Dict is a list of [key, space] pairs, so that the key order survives. Bounds that are all equal are stored
once, infinities as strings, characters of a Text as ranges of code points (a charset may be all of Unicode).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
from gymnasium import Space, spaces

from recollect.errors import FormatError
from recollect.spaces.dtypes import dtype_from, dtype_kind, dtype_name
from recollect.spaces.extended import ExtendedBox
from recollect.spaces.tree import make_dict, node_kind

Json = dict[str, Any]
Array = np.ndarray[Any, Any]


def canonical(value: Any) -> str:
    """Return the one JSON text of `value`: sorted keys, no spaces, ASCII."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def space_to_json(space: Space[Any]) -> Json:
    """Return `space` as dicts, lists, strings and numbers."""
    kind = "extended_box" if isinstance(space, ExtendedBox) else node_kind(space)
    return {"type": kind, **_WRITERS[kind](space)}


def space_from_json(obj: Json) -> Space[Any]:
    """Return the space that `space_to_json` wrote; FormatError if it is none."""
    try:
        read = _READERS[obj["type"]]
    except (KeyError, TypeError) as error:
        raise FormatError(f"space: must be one of {sorted(_READERS)}, got {_brief(obj)}") from error
    try:
        return read(obj)
    except FormatError:
        raise
    except Exception as error:
        raise FormatError(f"space: must be complete and of valid values, got {_brief(obj)}") from error


def _brief(obj: Any) -> str:
    text = repr(obj)
    return text if len(text) <= 120 else text[:117] + "..."


# -- numbers and bounds


def _number(x: Any) -> Any:
    return str(x) if isinstance(x, float) and np.isinf(x) else x


def _array_to_json(values: Array) -> Any:
    flat = values.reshape(-1)
    raw = np.ascontiguousarray(flat).view(np.uint8).reshape(flat.size, -1) if flat.size else flat
    # Bytes, not ==, so that -0.0 and 0.0 stay apart.
    if flat.size and (raw == raw[0]).all():
        return _number(_items(flat[:1])[0])
    return [_number(x) for x in _items(flat)]


def _items(flat: Array) -> list[Any]:
    number: Callable[[Any], Any] = {"bool": bool, "int": int, "float": float}[str(dtype_kind(flat.dtype))]
    return [number(x) for x in flat]


def _array_from_json(value: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    if isinstance(value, list):
        return np.array([float(x) if isinstance(x, str) else x for x in value], dtype=dtype).reshape(shape)
    return np.full(shape, float(value) if isinstance(value, str) else value, dtype=dtype)


# -- one writer and one reader per kind of space


def _box_to_json(space: Any) -> Json:
    out = {"shape": list(space.shape), "dtype": dtype_name(space.dtype)}
    out |= {"low": _array_to_json(space.low), "high": _array_to_json(space.high)}
    # An integer Box made with infinite bounds remembers that it is unbounded; the arrays alone do not say so.
    if isinstance(space, spaces.Box) and dtype_kind(space.dtype) == "int":
        for name in ("bounded_below", "bounded_above"):
            if not np.all(getattr(space, name)):
                out[name] = _array_to_json(getattr(space, name))
    return out


def _box_from_json(obj: Json) -> Space[Any]:
    shape, dtype = tuple(obj["shape"]), dtype_from(obj["dtype"], "space")
    low, high = (_array_from_json(obj[name], shape, dtype) for name in ("low", "high"))
    if obj["type"] == "extended_box":
        return ExtendedBox(low, high, shape, dtype)
    space = spaces.Box(low, high, shape, dtype=dtype)
    for name in ("bounded_below", "bounded_above"):
        if name in obj:
            setattr(space, name, _array_from_json(obj[name], shape, np.dtype(bool)))
    return space


def _discrete_to_json(space: Any) -> Json:
    return {"n": int(space.n), "start": int(space.start), "dtype": dtype_name(space.dtype)}


def _discrete_from_json(obj: Json) -> Space[Any]:
    return spaces.Discrete(obj["n"], start=obj["start"], dtype=dtype_from(obj["dtype"], "space"))


def _multibinary_to_json(space: Any) -> Json:
    # gymnasium holds MultiBinary(3) and MultiBinary((3,)) apart, so the form of n is kept.
    return {"n": list(space.n) if isinstance(space.n, tuple) else int(space.n)}


def _multibinary_from_json(obj: Json) -> Space[Any]:
    return spaces.MultiBinary(obj["n"])


def _multidiscrete_to_json(space: Any) -> Json:
    out = {"shape": list(space.shape), "dtype": dtype_name(space.dtype)}
    return out | {"nvec": _array_to_json(space.nvec), "start": _array_to_json(space.start)}


def _multidiscrete_from_json(obj: Json) -> Space[Any]:
    shape, dtype = tuple(obj["shape"]), dtype_from(obj["dtype"], "space")
    nvec, start = (_array_from_json(obj[name], shape, dtype) for name in ("nvec", "start"))
    return spaces.MultiDiscrete(nvec, dtype=dtype, start=start)


def _text_to_json(space: Any) -> Json:
    # The set, sorted: older gymnasium keeps it in hash order, which differs from process to process.
    codes = sorted(map(ord, space.character_set))
    breaks = [i + 1 for i, (a, b) in enumerate(pairwise(codes)) if b != a + 1]
    ranges = [[codes[a], codes[b - 1]] for a, b in pairwise([0, *breaks, len(codes)])] if codes else []
    return {"min_length": space.min_length, "max_length": space.max_length, "charset": ranges}


def _text_from_json(obj: Json) -> Space[Any]:
    # chr of each end first: it refuses what is no code point before a huge range is walked.
    ranges = [range(first, ord(chr(last)) + 1) for first, last in obj["charset"]]
    charset = frozenset(chr(code) for codes in ranges for code in codes)
    return spaces.Text(obj["max_length"], min_length=obj["min_length"], charset=charset)


def _sequence_to_json(space: Any) -> Json:
    return {"feature": space_to_json(space.feature_space), "stack": bool(space.stack)}


def _sequence_from_json(obj: Json) -> Space[Any]:
    return spaces.Sequence(space_from_json(obj["feature"]), stack=obj["stack"])


def _dict_to_json(space: Any) -> Json:
    return {"items": [[key, space_to_json(child)] for key, child in space.spaces.items()]}


def _dict_from_json(obj: Json) -> Space[Any]:
    return make_dict((key, space_from_json(child)) for key, child in obj["items"])


def _tuple_to_json(space: Any) -> Json:
    return {"items": [space_to_json(child) for child in space.spaces]}


def _tuple_from_json(obj: Json) -> Space[Any]:
    return spaces.Tuple([space_from_json(child) for child in obj["items"]])


_WRITERS: dict[str, Callable[[Any], Json]] = {
    "box": _box_to_json,
    "extended_box": _box_to_json,
    "discrete": _discrete_to_json,
    "multibinary": _multibinary_to_json,
    "multidiscrete": _multidiscrete_to_json,
    "text": _text_to_json,
    "sequence": _sequence_to_json,
    "dict": _dict_to_json,
    "tuple": _tuple_to_json,
}
_READERS: dict[str, Callable[[Json], Space[Any]]] = {
    "box": _box_from_json,
    "extended_box": _box_from_json,
    "discrete": _discrete_from_json,
    "multibinary": _multibinary_from_json,
    "multidiscrete": _multidiscrete_from_json,
    "text": _text_from_json,
    "sequence": _sequence_from_json,
    "dict": _dict_from_json,
    "tuple": _tuple_from_json,
}
