"""What kind each node of a space is, how a leaf is named, and how two spaces differ."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from heapq import nsmallest
from typing import Any, Literal

import numpy as np
from gymnasium import Space, spaces

from recollect.errors import class_name
from recollect.spaces.dtypes import supported
from recollect.spaces.extended import ExtendedBox

Path = tuple[str | int, ...]
LeafKind = Literal["box", "discrete", "multibinary", "multidiscrete", "text", "sequence"]
NodeKind = Literal["box", "discrete", "multibinary", "multidiscrete", "text", "sequence", "dict", "tuple"]

ELEMENT = "[]"  # the path step from a Sequence to its elements
_KINDS: tuple[tuple[type[Any], NodeKind], ...] = (
    (spaces.Box, "box"),
    (ExtendedBox, "box"),
    (spaces.Discrete, "discrete"),
    (spaces.MultiBinary, "multibinary"),
    (spaces.MultiDiscrete, "multidiscrete"),
    (spaces.Text, "text"),
    (spaces.Sequence, "sequence"),
    (spaces.Dict, "dict"),
    (spaces.Tuple, "tuple"),
)

_SHOWN = 120  # characters of a charset, of which those that are no white space fill a message
_ATTRIBUTES = "dtype shape n start nvec low high min_length max_length character_set".split()


def path_name(path: Path) -> str:
    """Return the name of a leaf, `obs/image`; a space that is itself a leaf is `value`."""
    return "/".join(map(str, path)) if path else "value"


def subject(path: Path) -> str:
    """Return how an error speaks of the node at `path`, which may be the whole sample."""
    return path_name(path) if path else "sample"


def node_kind(space: object, path: Path = ()) -> NodeKind:
    """Return what kind of node `space` is, or raise TypeError naming the path."""
    for cls, kind in _KINDS:
        if isinstance(space, cls):
            return kind
    known = ", ".join(cls.__name__ for cls, _ in _KINDS)
    raise TypeError(f"{path_name(path)}: space must be one of {known}, got {class_name(space)}")


def children(space: Space[Any]) -> Iterator[tuple[str | int, Space[Any]]]:
    """Yield the key and space of each child, in order; nothing for a leaf (a Sequence is one)."""
    if isinstance(space, spaces.Dict):
        yield from space.spaces.items()
    elif isinstance(space, spaces.Tuple):
        yield from enumerate(space.spaces)


def check_space(space: Space[Any], path: Path = ()) -> None:
    """Raise TypeError naming the leaf if any part of `space` cannot be stored."""
    kind = node_kind(space, path)
    if kind == "sequence":
        check_space(space.feature_space, (*path, ELEMENT))  # type: ignore[attr-defined]
    elif kind in ("box", "discrete", "multibinary", "multidiscrete"):
        supported(array_form(space)[0], path_name(path))
    for key, child in children(space):
        if kind == "dict" and not isinstance(key, str):
            raise TypeError(f"{path_name((*path, key))}: key of a Dict must be a str, got {key!r}; rename it")
        check_space(child, (*path, key))


def array_form(space: Space[Any]) -> tuple[np.dtype[Any], tuple[int, ...]]:
    """Return the dtype and shape of a leaf that is one array."""
    return np.dtype(space.dtype), tuple(space.shape or ())


def leaf_paths(space: Space[Any], path: Path = ()) -> list[tuple[Path, Space[Any]]]:
    """Return the path and space of each leaf, in leaf order."""
    if not isinstance(space, spaces.Dict | spaces.Tuple):
        return [(path, space)]
    return [found for key, part in children(space) for found in leaf_paths(part, (*path, key))]


def brief(space: Space[Any], most: int = 8) -> str:
    """Return the leaves of a space for a person: `obs float32[4], action Discrete(2), reward float32`."""
    leaves = leaf_paths(space)
    shown = [
        f"{path_name(path)} {_brief_leaf(leaf)}" if path else _brief_leaf(leaf)
        for path, leaf in leaves[:most]
    ]
    return ", ".join(shown + ([f"and {len(leaves) - most} more"] if len(leaves) > most else []))


def _brief_leaf(leaf: Space[Any]) -> str:
    if isinstance(leaf, spaces.Discrete):
        return f"Discrete({leaf.n})"
    if has_no_array(leaf):
        return type(leaf).__name__
    dtype, shape = array_form(leaf)
    return f"{dtype}{list(shape) if shape else ''}"


def has_no_array(space: Space[Any]) -> bool:
    """Tell whether a leaf is batched as a tuple (Text, Sequence) instead of as an array."""
    return isinstance(space, spaces.Text | spaces.Sequence)


def sequence_paths(space: Space[Any], path: Path = ()) -> Iterator[Path]:
    """Yield the path of every Sequence in `space`, those inside other Sequences too."""
    if isinstance(space, spaces.Sequence):
        yield path
        yield from sequence_paths(space.feature_space, (*path, ELEMENT))
    for key, child in children(space):
        yield from sequence_paths(child, (*path, key))


def make_dict(items: Iterable[tuple[str, Space[Any]]]) -> spaces.Dict:
    """Build a Dict space that keeps the given key order, also when gymnasium batches it."""
    space = spaces.Dict(OrderedDict(items))
    space.sort_keys = False  # newer gymnasium would sort again in batch_space; older ignores this
    return space


def batch_space(space: Space[Any], n: int) -> Space[Any]:
    """Return the space of `n` samples: a leading axis, and tuples for Text and Sequence.

    As gymnasium's, but a Dict keeps its key order whatever gymnasium's version.
    """
    from gymnasium.vector.utils import batch_space as gymnasium_batch_space

    if isinstance(space, spaces.Dict):
        return make_dict((key, batch_space(child, n)) for key, child in space.spaces.items())
    if isinstance(space, spaces.Tuple):
        return spaces.Tuple([batch_space(child, n) for child in space.spaces])
    batched: Space[Any] = gymnasium_batch_space(space, n)
    return batched


def as_keys(keys: str | int | Sequence[str | int]) -> Path:
    """Return nested keys as a tuple; a plain string or int is one key."""
    return (keys,) if isinstance(keys, str | int) else tuple(keys)


def space_at(space: Space[Any], keys: str | int | Sequence[str | int]) -> Space[Any]:
    """Return the part of `space` under `keys`, one per level; KeyError names those there are."""
    node = space
    path: Path = ()
    for key in as_keys(keys):
        there = dict(children(node))
        if key not in there or isinstance(key, bool):
            what = f"one of {list(there)}" if there else "nothing, for it is a leaf"
            parts = tuple(key.split("/")) if isinstance(key, str) and "/" in key else ()
            way = f"; pass {parts!r}" if parts and parts[0] in there else ""
            raise KeyError(f"{subject(path)}: keys here are {what}, got {key!r}{way}")
        node, path = there[key], (*path, key)
    return node


def first_difference(a: Space[Any], b: Space[Any], path: Path = ()) -> str | None:
    """Say where two spaces first differ, as `obs/image: dtype uint8 != float32`, or None.

    Stricter than gymnasium's `==`: bounds must be equal, not close, and keys in the same order.
    """
    kinds = type(a).__name__, type(b).__name__
    if node_kind(a, path) != node_kind(b, path) or kinds[0] != kinds[1]:
        return f"{path_name(path)}: {kinds[0]} != {kinds[1]}"
    if isinstance(a, spaces.Sequence) and isinstance(b, spaces.Sequence):
        return _difference(path, [("stack", a.stack, b.stack)]) or first_difference(
            a.feature_space, b.feature_space, (*path, ELEMENT)
        )
    ours, theirs = dict(children(a)), dict(children(b))
    if list(ours) != list(theirs):
        return f"{subject(path)}: keys {list(ours)} != {list(theirs)}"
    if ours:
        pairs = (first_difference(child, theirs[key], (*path, key)) for key, child in ours.items())
        return next((found for found in pairs if found), None)
    return _difference(path, [(name, getattr(a, name, None), getattr(b, name, None)) for name in _ATTRIBUTES])


def _difference(path: Path, pairs: Iterable[tuple[str, Any, Any]]) -> str | None:
    for name, x, y in pairs:
        if not np.array_equal(np.asarray(x), np.asarray(y)):
            return f"{path_name(path)}: {name} {_brief(x)} != {_brief(y)}"
    return None


def _brief(value: Any) -> str:
    if isinstance(value, frozenset):
        value = "".join(nsmallest(_SHOWN, value))
    text = " ".join(str(value).split())
    return text if len(text) <= 60 else text[:57] + "..."
