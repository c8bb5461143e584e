"""Spaces as a peer described them: made with care, or only compared."""

from __future__ import annotations

from json import loads
from math import prod
from typing import Any

from gymnasium import Space

from recollect.errors import SchemaError
from recollect.spaces import space_from_json

MOST_LEAF_NBYTES = 1 << 30


def space_of_text(text: str) -> Space[Any]:
    """The space that a manager described; SchemaError if it is none, or beyond reason."""
    try:
        obj = loads(text)
        _check_sizes(obj)
        return space_from_json(obj)
    except SchemaError:
        raise
    except Exception as error:
        raise SchemaError(f"space: must be what the manager wrote, got an error: {error!r}") from None


def _check_sizes(obj: Any) -> None:
    """Refuse shapes that would take memory before anything is made of them."""
    if isinstance(obj, dict):
        for key in ("shape", "n", "nvec"):
            shape = obj.get(key)
            if isinstance(shape, list) and all(isinstance(d, int) for d in shape):
                if key != "nvec" and prod(shape) * 8 > MOST_LEAF_NBYTES:
                    raise SchemaError(
                        f"space: a leaf must have at most {MOST_LEAF_NBYTES} bytes, got {shape}"
                    )
            elif (
                key == "n" and obj.get("type") == "multibinary" and isinstance(shape, int) and shape > 1 << 27
            ):
                raise SchemaError(f"space: a leaf must have at most {MOST_LEAF_NBYTES} bytes, got {shape}")
        for child in obj.values():
            _check_sizes(child)
    elif isinstance(obj, list):
        for child in obj:
            _check_sizes(child)


def text_difference(mine: str, theirs: str) -> str | None:
    """The first leaf in which a manager's space and a worker's differ, without making the latter; None if none does."""
    if mine == theirs:
        return None
    try:
        return _difference(loads(mine), loads(theirs), "")
    except (ValueError, RecursionError):
        return "the whole: it is no JSON"


def _difference(a: Any, b: Any, path: str) -> str | None:
    here = path or "the whole"
    if not isinstance(a, dict) or not isinstance(b, dict) or a.get("type") != b.get("type"):
        return None if a == b else f"{here}: {_short(a)} at the manager, {_short(b)} at the worker"
    if a["type"] in ("dict", "tuple"):
        ours, others = _named(a), _named(b)
        for name in [*ours, *(n for n in others if n not in ours)]:
            inner = f"{path}/{name}" if path else str(name)
            if name not in ours or name not in others:
                return f"{inner}: only at the {'manager' if name in ours else 'worker'}"
            if found := _difference(ours[name], others[name], inner):
                return found
        return None if a == b else f"{here}: another order of keys"
    if a["type"] == "sequence":
        return _difference(a.get("feature"), b.get("feature"), here) or (None if a == b else f"{here}: stack")
    return None if a == b else f"{here}: {_short(a)} at the manager, {_short(b)} at the worker"


def _named(obj: dict[str, Any]) -> dict[Any, Any]:
    items = obj.get("items")
    if not isinstance(items, list):
        return {}
    if obj["type"] == "tuple":
        return dict(enumerate(items))
    return {str(pair[0]): pair[1] for pair in items if isinstance(pair, list) and len(pair) == 2}


def _short(obj: Any) -> str:
    if isinstance(obj, dict):
        return " ".join(str(obj[key])[:60] for key in ("type", "dtype", "shape", "n") if key in obj)
    return repr(obj)[:60]
