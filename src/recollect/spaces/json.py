"""Spaces as plain JSON values, exact in both directions.

A Dict is a list of [key, space] pairs, so that the key order survives. Bounds that are all equal are stored
once, infinities as strings, characters of a Text as ranges of code points (a charset may be all of Unicode).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from copy import copy
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np
from gymnasium import Space, spaces

from recollect.errors import FormatError
from recollect.spaces.dtypes import dtype_from, dtype_kind, dtype_name
from recollect.spaces.extended import ExtendedBox
from recollect.spaces.tree import make_dict, node_kind

Json = dict[str, Any]
Array = np.ndarray[Any, Any]
Ranges = tuple[tuple[int, int], ...]
MOST_NBYTES = 1 << 27
"""The most that the arrays of one sample may have in a description that no data speak for."""
MOST_CHARACTERS = 3 << 20
"""The most that all different charsets of a space may have: twice all of Unicode, and some."""

_SMALL_CHARSET = 1 << 14


def canonical(value: Any) -> str:
    """Return the one JSON text of `value`: sorted keys, no spaces, ASCII."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def space_to_json(space: Space[Any]) -> Json:
    """Return `space` as dicts, lists, strings and numbers."""
    kind = "extended_box" if isinstance(space, ExtendedBox) else node_kind(space)
    return {"type": kind, **_WRITERS[kind](space)}


def space_from_json(obj: Json, most_nbytes: int = MOST_NBYTES) -> Space[Any]:
    """Return the space that `space_to_json` wrote; FormatError if it is none.

    A few words can describe a space that no memory holds, so its size is found before anything is made: the arrays of
    one sample may have `most_nbytes` together, and the charsets of its Texts `MOST_CHARACTERS`.
    """
    try:
        nbytes, charsets = _size_of(obj)
    except FormatError:
        raise
    except Exception as error:
        raise FormatError(f"space: must be complete and of valid values, got {_brief(obj)}") from error
    if nbytes > most_nbytes:
        raise FormatError(
            f"space: a sample must have at most {most_nbytes} bytes, got {_brief(nbytes)}; it is damaged or forged"
        )
    characters = sum(last - first + 1 for ranges in charsets for first, last in ranges)
    if characters > MOST_CHARACTERS:
        raise FormatError(
            f"space: its charsets must have at most {MOST_CHARACTERS} characters together, got {_brief(characters)}; "
            "it is damaged or forged"
        )
    return _read(obj)


def _read(obj: Json) -> Space[Any]:
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


def _size_of(obj: Any) -> tuple[int, set[Ranges]]:
    """The bytes that the arrays of one sample have, and the different charsets, by arithmetic alone."""
    kind = obj.get("type") if isinstance(obj, dict) else None
    if kind in ("dict", "tuple"):
        found = [_size_of(item[1] if kind == "dict" else item) for item in obj["items"]]
        return sum(nbytes for nbytes, _ in found), set().union(*(charsets for _, charsets in found))
    if kind == "sequence":
        return _size_of(obj["feature"])
    if kind == "text":
        ranges = _ranges(obj)
        widest = chr(ranges[-1][1]) if ranges else " "
        return _whole(obj["max_length"]) * len(widest.encode("utf-8", "surrogatepass")), {ranges}
    if kind == "multibinary":
        n = obj["n"]
        return prod(_whole(x) for x in (n if isinstance(n, list) else [n])), set()
    if kind in ("box", "extended_box", "multidiscrete"):
        shape = [_whole(n) for n in obj["shape"]]
        return prod(shape) * dtype_from(obj["dtype"], "space").itemsize, set()
    if kind == "discrete":
        return 8, set()
    raise FormatError(f"space: must be one of {sorted(_READERS)}, got {_brief(obj)}")


def _whole(n: Any) -> int:
    if isinstance(n, bool) or not isinstance(n, int) or not 0 <= n < 1 << 62:
        raise FormatError(f"space: a shape must be of numbers that are not negative, got {_brief(n)}")
    return n


def _brief(obj: Any) -> str:
    try:
        text = repr(obj)
    except (RecursionError, ValueError):  # too many levels, or digits
        text = f"a {type(obj).__name__} of too many levels or digits"
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
    ranges = [list(pair) for pair in _ranges_of(frozenset(space.character_set))]
    return {"min_length": space.min_length, "max_length": space.max_length, "charset": ranges}


@lru_cache(maxsize=2)
def _ranges_of(charset: frozenset[str]) -> Ranges:
    if not charset:
        return ()
    # The set, sorted: older gymnasium keeps it in hash order, which differs from process to process.
    codes = np.frombuffer("".join(charset).encode("utf-32-le", "surrogatepass"), "<u4").astype(np.int64)
    codes.sort()
    breaks = np.flatnonzero(np.diff(codes) != 1) + 1
    firsts, lasts = codes[np.r_[0, breaks]], codes[np.r_[breaks, len(codes)] - 1]
    return tuple(zip(firsts.tolist(), lasts.tolist()))


def _text_from_json(obj: Json) -> Space[Any]:
    least, most = obj["min_length"], obj["max_length"]
    if type(least) is not int or type(most) is not int or not 0 <= least <= most < 1 << 31:
        raise FormatError(f"space: a Text must have lengths that are numbers, got {_brief((least, most))}")
    ranges = _ranges(obj)
    is_large = sum(last - first for first, last in ranges) > _SMALL_CHARSET
    text = copy(
        _large_text(ranges) if is_large else _text_of(ranges)
    )  # copies share the tables of their charset
    text.min_length, text.max_length = least, most
    return text


@lru_cache(maxsize=2)  # the tables of all of Unicode take a second; a space has no more of that size
def _large_text(ranges: Ranges) -> spaces.Text:
    return _text_of(ranges)


def _text_of(ranges: Ranges) -> spaces.Text:
    charset = frozenset(chr(code) for first, last in ranges for code in range(first, last + 1))
    return spaces.Text(1, min_length=0, charset=charset)


def _ranges(obj: Json) -> Ranges:
    """The charset of a Text, checked: ascending ranges of code points that do not overlap."""
    ranges = tuple((_whole(first), _whole(last)) for first, last in obj["charset"])
    ends = [end for pair in ranges for end in pair]
    if (
        any(last < first for first, last in ranges)
        or any(b <= a for a, b in zip(ends[1::2], ends[2::2]))
        or (ends and ends[-1] > 0x10FFFF)
    ):
        raise FormatError(f"space: a charset must be ascending ranges of code points, got {_brief(ranges)}")
    return ranges


def _sequence_to_json(space: Any) -> Json:
    return {"feature": space_to_json(space.feature_space), "stack": bool(space.stack)}


def _sequence_from_json(obj: Json) -> Space[Any]:
    return spaces.Sequence(_read(obj["feature"]), stack=_flag(obj["stack"]))


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise FormatError(f"space: stack must be true or false, got {_brief(value)}")
    return value


def _dict_to_json(space: Any) -> Json:
    return {"items": [[key, space_to_json(child)] for key, child in space.spaces.items()]}


def _dict_from_json(obj: Json) -> Space[Any]:
    return make_dict((key, _read(child)) for key, child in obj["items"])


def _tuple_to_json(space: Any) -> Json:
    return {"items": [space_to_json(child) for child in space.spaces]}


def _tuple_from_json(obj: Json) -> Space[Any]:
    return spaces.Tuple([_read(child) for child in obj["items"]])


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
