"""Which leaves a set has, and how a page shows each: as curves, as pictures, as text, or as a mere value."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from recollect.errors import MissingLeafError
from recollect.observe.view.labels import Labels
from recollect.spaces.tree import Path, has_no_array, leaf_paths, node_kind, path_name

Shown = Literal["curves", "picture", "text", "value"]

_LEAST_SIDE = 8  # a narrower array of bytes is a table of numbers, not a picture
_MOST_TILES = 16


@dataclass(frozen=True, slots=True)
class ShownLeaf:
    """One leaf of a set: its path, what it is, and how it is shown."""

    path: Path
    name: str
    kind: str
    dtype: str
    shape: tuple[int, ...]
    shown: Shown
    components: tuple[str, ...] = ()

    @property
    def last_word(self) -> str:
        """The end of its name: `done` of `next.done`."""
        return str(self.path[-1]).rsplit(".", 1)[-1] if self.path else ""

    @property
    def n_values(self) -> int:
        """How many numbers one sample has here."""
        n = 1
        for side in self.shape:
            n *= side
        return n

    @property
    def nbytes(self) -> int:
        """How many bytes one sample has here."""
        return max(1, self.n_values * np.dtype(self.dtype).itemsize)

    @property
    def is_whole(self) -> bool:
        """Whether its numbers are integers or flags, which hold until the next step."""
        return self.dtype[:3] in ("int", "uin", "boo")


def leaves_of(space: Any, labels: Labels | None = None) -> list[ShownLeaf]:
    """Every leaf of a space, in leaf order, with the names that `labels` gives to its components.

    What only numbers the rows is told as a value, not drawn.

    >>> from recollect import as_space
    >>> leaves_of(as_space({"obs": ((96, 96, 3), "uint8"), "reward": ((), "float32")}))[0].shown
    'picture'
    """
    return [_labelled(_leaf(path, part), labels or Labels()) for path, part in leaf_paths(space)]


def _labelled(leaf: ShownLeaf, labels: Labels) -> ShownLeaf:
    if leaf.shown != "curves":
        return leaf
    names = tuple(labels.components.get(leaf.name, ()))
    return replace(
        leaf,
        shown="value" if leaf.name in labels.counting else "curves",
        components=names if len(names) == leaf.n_values and leaf.shape else (),
    )


def _leaf(path: Path, space: Any) -> ShownLeaf:
    shape, dtype = tuple(space.shape or ()), str(space.dtype) if space.dtype is not None else "str"
    shown: Shown = "text" if has_no_array(space) else "picture" if is_picture(shape, dtype) else "curves"
    return ShownLeaf(path, path_name(path), node_kind(space), dtype, shape, shown)


def is_picture(shape: tuple[int, ...], dtype: str) -> bool:
    """Whether arrays of this form are pictures: HxW, HxWxC or CxHxW, of bytes, depths or floats of 1 or 3 colours."""
    if len(shape) == 2:
        return dtype in ("uint8", "uint16") and min(shape) >= _LEAST_SIDE
    if len(shape) != 3:
        return False
    n_tiles = n_channels(shape)
    colours = n_tiles in (1, 3) if dtype.startswith("float") else n_tiles <= _MOST_TILES
    return dtype in ("uint8", "uint16", "float16", "float32", "float64") and n_tiles > 0 and colours


def n_channels(shape: tuple[int, ...]) -> int:
    """How many channels a picture of three axes has, 0 if it is none; the channel axis is the short one."""
    channels = shape[0] if is_channels_first(shape) else shape[2]
    sides = shape[1:] if is_channels_first(shape) else shape[:2]
    return channels if channels <= _MOST_TILES and min(sides) >= _LEAST_SIDE else 0


def is_channels_first(shape: tuple[int, ...]) -> bool:
    """Whether the first of three axes is that of the channels."""
    return shape[0] < min(shape[1:]) and not (shape[2] in (1, 3) and shape[0] not in (1, 3))


def reward_of(leaves: list[ShownLeaf], name: str | None = None) -> ShownLeaf | None:
    """The leaf whose sum over an episode is its return: the one asked for, or one called reward."""
    if name is not None:
        for leaf in leaves:
            if leaf.name == name and leaf.shown == "curves" and leaf.n_values == 1:
                return leaf
        there = [leaf.name for leaf in leaves if leaf.shown == "curves" and leaf.n_values == 1]
        raise MissingLeafError(f"reward: must be a leaf of one number, one of {there}, got {name!r}")
    return named(leaves, "reward", "rewards")


def named(leaves: list[ShownLeaf], *names: str) -> ShownLeaf | None:
    """The leaf of one number that has one of these names, also as the last word of `next.done`."""
    for leaf in leaves:
        if leaf.last_word in names and leaf.shown == "curves" and leaf.n_values == 1:
            return leaf
    return None
