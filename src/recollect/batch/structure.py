"""Verbs on nested data: the value of a space, with or without a batch axis, arrays of any backend.

Every function walks the space, never the data, so a tuple that is a Tuple sample and a tuple that is a batch
of Text are told apart. Text and Sequence leaves have no array form: a batch of n of them is a tuple of n.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from operator import getitem
from typing import Any

import numpy as np
from gymnasium import Space, spaces

from recollect.backends import Backend
from recollect.errors import SchemaError
from recollect.spaces import Layout, as_numpy, compile_layout
from recollect.spaces.tree import has_no_array as has_no_array
from recollect.spaces.tree import leaf_paths as leaf_paths
from recollect.spaces.tree import path_name

Key = str | int
Keys = tuple[Key, ...]
Array = np.ndarray[Any, Any]
Leaf = Callable[..., Any]

_NAMESPACES = {"torch": "torch", "jax": "jax.numpy"}


def map_leaves(fn: Leaf, space: Space[Any], *data: Any) -> Any:
    """Apply `fn(leaf_space, *leaves)` to each leaf of `space`, keeping the nesting."""
    if isinstance(space, spaces.Dict):
        return {k: map_leaves(fn, s, *(d[k] for d in data)) for k, s in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple([map_leaves(fn, s, *(d[i] for d in data)) for i, s in enumerate(space.spaces)])
    return fn(space, *data)


def pick(data: Any, keys: Keys) -> Any:
    """Return the nested field of `data` under `keys`."""
    for key in keys:
        data = data[key]
    return data


def flat_layout(space: Space[Any]) -> Layout:
    """Return the layout that flattens `space`; TypeError names a leaf that has no flattened form."""
    for path, leaf in leaf_paths(space):
        if has_no_array(leaf):
            name, kind = path_name(path), type(leaf).__name__
            raise TypeError(f"{name}: must have a fixed size to be flattened, got {kind}; leave it nested")
    return compile_layout(space)


def unbatch(space: Space[Any], data: Any, i: int) -> Any:
    """Return sample `i` of a batch, without batch axis."""
    return map_leaves(lambda leaf, x: _unbatch_leaf(leaf, x, i), space, data)


def _unbatch_leaf(space: Space[Any], x: Any, i: int) -> Any:
    # The ellipsis keeps a () leaf an array, as `Space.sample` gives it; a Discrete sample is a scalar.
    return x[i] if has_no_array(space) or isinstance(space, spaces.Discrete) else x[i, ...]


def layout_of(space: Space[Any]) -> Layout | None:
    """Return the layout that checks samples of `space`.

    None if it has a Sequence leaf, whose greatest length only the storage knows: there the storage checks.
    """
    if any(isinstance(leaf, spaces.Sequence) for _, leaf in leaf_paths(space)):
        return None
    return compile_layout(space)


def as_batch(space: Space[Any], layout: Layout | None, value: Any) -> Any:
    """Check one sample and return it as a batch of one."""
    if layout is None:
        return map_leaves(lambda leaf, x: (x,) if has_no_array(leaf) else as_numpy(x)[None], space, value)
    return layout.decode_batch([field[None] for field in layout.encode_one(value)], 1)


def checked_batch(space: Space[Any], layout: Layout | None, value: Any) -> tuple[int, Any]:
    """Check a block of samples; return how many there are and the block."""
    if layout is None:
        return batch_length(space, value), value
    n, fields = layout.encode_batch(value)
    return n, layout.decode_batch(fields, n)


def batch_length(space: Space[Any], data: Any) -> int:
    """Return how many samples a batch holds, by its first leaf."""
    paths = leaf_paths(space)
    return len(pick(data, paths[0][0])) if paths else 0


def empty_batch(space: Space[Any]) -> Any:
    """Return a batch of no samples."""
    return map_leaves(
        lambda leaf: () if has_no_array(leaf) else np.empty((0, *(leaf.shape or ())), leaf.dtype), space
    )


def select(space: Space[Any], data: Any, positions: Array) -> Any:
    """Return the samples of a batch at `positions`."""
    return map_leaves(lambda leaf, x: _select_leaf(leaf, x, positions), space, data)


def _select_leaf(space: Space[Any], x: Any, positions: Array) -> Any:
    return tuple([x[i] for i in positions]) if has_no_array(space) else x[positions]


def portioner(space: Space[Any] | None) -> Callable[[Any, slice], Any]:
    """Return what takes consecutive samples of a batch of `space`, as views; of vectors if it is None."""
    if isinstance(space, spaces.Dict):
        named = [(key, portioner(child)) for key, child in space.spaces.items()]
        return lambda data, at: {key: part(data[key], at) for key, part in named}
    if isinstance(space, spaces.Tuple):
        parts = [portioner(child) for child in space.spaces]
        return lambda data, at: tuple([part(x, at) for part, x in zip(parts, data)])
    return getitem


def assemble(
    space: Space[Any] | None, parts: Sequence[Any], places: Sequence[Array], backend: Backend
) -> Any:
    """Merge batches into one: sample j of `parts[k]` goes to position `places[k][j]`."""
    if len(parts) == 1 and _is_in_order(places[0]):
        return parts[0]

    def leaf(leaf_space: Space[Any] | None, *xs: Any) -> Any:
        if leaf_space is not None and has_no_array(leaf_space):
            return _assemble_tuple(xs, places)
        return _assemble_arrays(xs, places, backend)

    return leaf(None, *parts) if space is None else map_leaves(leaf, space, *parts)


def _is_in_order(places: Array) -> bool:
    return bool((places == np.arange(len(places))).all())


def _assemble_tuple(parts: Sequence[Sequence[Any]], places: Sequence[Array]) -> tuple[Any, ...]:
    merged: list[Any] = [None] * sum(map(len, places))
    for part, at in zip(parts, places):
        for i, x in zip(at, part):
            merged[i] = x
    return tuple(merged)


def _assemble_arrays(parts: Sequence[Any], places: Sequence[Array], backend: Backend) -> Any:
    if isinstance(parts[0], np.ndarray):
        merged = np.empty((sum(map(len, places)), *parts[0].shape[1:]), parts[0].dtype)
        for part, at in zip(parts, places):
            merged[at] = part
        return merged
    order = np.argsort(np.concatenate(places), kind="stable")
    module = _NAMESPACES.get(backend.name)
    if module is None:
        joined = np.concatenate([backend.to_numpy(part) for part in parts])[order]
        return backend.from_numpy(joined, backend.device_of(parts[0]))
    return import_module(module).concatenate(list(parts))[order]


def fill(out: Any, data: Any) -> Any:
    """Copy nested `data` into the caller's buffers `out` and return them; shapes and dtypes must be equal."""
    check_fills(out, data)
    for part, value in _parts(out, data, ""):
        part[0][...] = value
    return out


def check_fills(out: Any, data: Any) -> None:
    """Raise SchemaError unless `out` has an array of the shape and dtype of each one that it takes from `data`."""
    for (part, path), value in _parts(out, data, ""):
        want, got = (tuple(value.shape), value.dtype), (tuple(part.shape), part.dtype)
        if want != got:
            raise SchemaError(
                f"{path or 'value'}: out must be {want[0]} {want[1]}, got {got[0]} {got[1]}; allocate it so"
            )


def _parts(out: Any, data: Any, path: str) -> Iterator[tuple[tuple[Any, str], Any]]:
    """Yield each array of `out` with its path, and the value that goes there."""
    keys = out if isinstance(out, dict) else range(len(out)) if isinstance(out, tuple | list) else None
    if keys is None:
        yield (out, path), data
        return
    for key in keys:
        yield from _parts(out[key], data[key], f"{path}/{key}" if path else str(key))
