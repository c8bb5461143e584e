"""Columns: rows of a layout as one growing array per field, and layouts that widen with their Sequences.

A Sequence without a greatest length has as many columns as its longest value so far; a longer one widens the arrays.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium import Space, spaces

from recollect.spaces import Layout, compile_layout
from recollect.spaces.tree import ELEMENT, Path, children, path_name

Array = np.ndarray[Any, Any]


class Columns:
    """Arrays `[capacity, *shape]` per field, of which the first `n` rows are filled.

    Ownership: what is put in is copied; `take` returns the caller's own.
    """

    def __init__(self, layout: Layout, capacity: int = 0) -> None:
        self.layout, self.n = layout, 0
        self.arrays = [np.empty((capacity, *f.shape), f.dtype) for f in layout.fields]

    def widen(self, layout: Layout) -> None:
        """Make room for the values of a layout with longer Sequences."""
        if layout.hash != self.layout.hash:
            arrays = [widened(a, f.shape) for a, f in zip(self.arrays, layout.fields)]
            self.arrays, self.layout = arrays, layout

    def add(self, arrays: Sequence[Array], n: int) -> None:
        """Append rows, doubling the room when it is used up."""
        end = self.n + n
        if end > len(self.arrays[0]):
            room = max(end, 2 * len(self.arrays[0]), 16)
            self.arrays = [_grown(a, room, self.n) for a in self.arrays]
        for mine, given in zip(self.arrays, arrays):
            mine[self.n : end] = given
        self.n = end

    def cut(self, first: int, end: int) -> list[Array]:
        """Views of the rows from `first` to `end`."""
        return [a[first:end] for a in self.arrays]

    def without_front(self, n: int) -> Columns:
        """A copy without the oldest `n` rows."""
        rest = Columns(self.layout)
        rest.arrays = [a[n : self.n].copy() for a in self.arrays]
        rest.n = self.n - n
        return rest


def widened(array: Array, shape: tuple[int, ...]) -> Array:
    """The array with its trailing axes padded with zeros to `shape`."""
    if array.shape[1:] == shape:
        return array
    out = np.zeros((len(array), *shape), array.dtype)
    out[tuple(slice(k) for k in array.shape)] = array
    return out


def _grown(array: Array, room: int, n: int) -> Array:
    out = np.empty((room, *array.shape[1:]), array.dtype)
    out[:n] = array[:n]
    return out


def wide_layout(space: Space[Any], most: Mapping[str, int]) -> Layout:
    """The layout whose Sequences hold at least `most`, rounded up so that few layouts are ever made."""
    return compile_layout(space, {name: 1 << max(n - 1, 0).bit_length() for name, n in most.items()})


def part_of(layout: Layout, keys: Path) -> Layout:
    """The layout of the part under `keys`; of all, itself."""
    return layout.project(keys) if keys else layout


def longest(space: Space[Any], values: Any, most: dict[str, int], path: Path = ()) -> None:
    """Raise each Sequence's entry in `most` to its longest value in a batch; what is no value is left to the checks."""
    if isinstance(space, spaces.Sequence):
        name = path_name(path)
        for value in values if isinstance(values, tuple | list) else ():
            elements = _elements(space, value)
            if elements is not None:
                most[name] = max(most.get(name, 1), len(elements))
                longest(space.feature_space, _as_batch(space, value, elements), most, (*path, ELEMENT))
        most.setdefault(name, 1)
        if not isinstance(values, tuple | list) or not values:
            longest(space.feature_space, (), most, (*path, ELEMENT))
        return
    for key, child in children(space):
        try:
            part = values[key]
        except (KeyError, IndexError, TypeError):
            part = ()
        longest(child, part, most, (*path, key))


def sequence_names(space: Space[Any]) -> set[str]:
    """The names of a space's Sequences."""
    most: dict[str, int] = {}
    longest(space, (), most)
    return set(most)


def _elements(space: spaces.Sequence, value: Any) -> Any:
    """What tells how many elements a value has: itself, or the first leaf of a stacked one."""
    while isinstance(value, Mapping) and value:
        value = next(iter(value.values()))
    if space.stack and isinstance(space.feature_space, spaces.Tuple) and isinstance(value, tuple) and value:
        value = value[0]
    return value if hasattr(value, "__len__") else None


def _as_batch(space: spaces.Sequence, value: Any, elements: Any) -> Any:
    """The elements of a value as a batch, which inner Sequences are measured in."""
    if space.stack or not isinstance(space.feature_space, spaces.Dict | spaces.Tuple):
        return value
    items = [v for v in elements if isinstance(v, Mapping | tuple | list)]
    keys = [key for key, _ in children(space.feature_space)]
    try:
        return {key: [item[key] for item in items] for key in keys}  # type: ignore[index]
    except (KeyError, IndexError, TypeError):
        return {}
