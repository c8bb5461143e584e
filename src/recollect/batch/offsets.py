"""Offsets per key: which frames of a stack each field of a sample shows, and what that makes of its space."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium import Space, spaces

from recollect.batch.location import Ints
from recollect.batch.structure import Key, Keys
from recollect.spaces import as_numpy, as_space, batch_space
from recollect.spaces.tree import make_dict, path_name, space_at

MASK_OF = "{}_valid_mask"


@dataclass(frozen=True, slots=True)
class Field:
    """A field of a sample and the columns of the span that it shows; None is the anchor, without an axis of time."""

    keys: Keys
    columns: Ints | None


@dataclass(frozen=True, slots=True)
class FieldMask:
    """Which of the frames that a field shows are valid."""

    columns: Ints


Fields = dict[Key, Any]
"""A Field or FieldMask for each leaf of what is shown, nested as the space is."""


def span_of_keys(offsets: Mapping[str, Any], keys: Keys = ()) -> Ints:
    """Return all offsets from the first to the last of any key, without gaps, and the anchor's 0."""
    every = [0, *_walk(offsets, keys)]
    return np.arange(min(every), max(every) + 1)


def _walk(offsets: Mapping[str, Any], keys: Keys) -> Iterator[int]:
    for key, found in offsets.items():
        if isinstance(found, Mapping):
            yield from _walk(found, (*keys, key))
        else:
            yield from _checked(found, (*keys, key)).tolist()


def _checked(found: Any, keys: Keys) -> Ints:
    name = f"fixed_offset {path_name(keys)!r}"
    try:
        offsets = as_numpy(list(found) if isinstance(found, range) else found)
    except (TypeError, ValueError):
        offsets = np.empty((0, 0))
    if offsets.ndim != 1 or offsets.dtype.kind not in "iu" or not len(offsets):
        raise ValueError(f"{name}: must be 1-D integers, got {found!r}; for example [-2, -1, 0] or range(50)")
    return offsets.astype(np.int64)


def fields_of(space: Space[Any], offsets: Mapping[str, Any], first: int, keys: Keys = ()) -> Fields:
    """Return what to show of samples of `space`, given the offsets of its keys and the first one of the span."""
    for key in offsets:
        space_at(space, (key,))  # KeyError names those there are
    fields: Fields = {}
    for key, child in space.spaces.items():  # type: ignore[attr-defined]
        here, found = (*keys, key), offsets.get(key)
        if isinstance(found, Mapping) and isinstance(child, spaces.Dict):
            fields[key] = fields_of(child, found, first, here)
        else:
            fields[key] = Field(here, None if found is None else _checked(found, here) - first)
    return fields | _masks_of(fields, keys)


def _masks_of(fields: Fields, keys: Keys) -> Fields:
    masks: Fields = {}
    for key, field in fields.items():
        if isinstance(field, Field) and field.columns is not None:
            name = MASK_OF.format(key)
            if name in fields:
                raise ValueError(
                    f"fixed_offset {path_name((*keys, key))!r}: its mask must have the name {name!r} for itself, got a "
                    "field of that name; rename the field"
                )
            masks[name] = FieldMask(field.columns)
    return masks


def space_of(space: Space[Any], fields: Fields) -> spaces.Dict:
    """Return the space of what `fields` show of a sample of `space`."""

    def part(key: Key, field: Any) -> Space[Any]:
        if isinstance(field, FieldMask):
            return as_space(((len(field.columns),), "bool"))
        child = space_at(space, (key,))
        if isinstance(field, Field):
            return child if field.columns is None else batch_space(child, len(field.columns))
        return space_of(child, field)

    return make_dict((str(key), part(key, field)) for key, field in fields.items())


def descend(fields: Fields, keys: Keys) -> tuple[Any, Keys]:
    """Return the fields under `keys`, and the keys that lead on inside one of them."""
    node: Any = fields
    while keys and isinstance(node, dict):
        node, keys = node[keys[0]], keys[1:]
    return node, keys
