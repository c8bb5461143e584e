"""Fields: where each column of a sample lies in its packed row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from recollect.errors import FormatError
from recollect.spaces.codec import Column
from recollect.spaces.plan import LeafCodec
from recollect.spaces.tree import LeafKind, Path

ROW_ALIGNMENT = 8


@dataclass(frozen=True, slots=True)
class Field:
    """One physical column of the packed row."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        """Bytes of this field in one row."""
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Leaf:
    """One leaf of the space and the fields that hold it (indices into `Layout.fields`)."""

    path: Path
    name: str
    kind: LeafKind
    fields: tuple[int, ...]


def pack(columns: Sequence[Column]) -> tuple[list[int], int]:
    """Return the offset of each column, aligned to its item size, and the bytes of a row."""
    offsets, end = [], 0
    for column in columns:
        start = _round_up(end, column.dtype.itemsize)
        offsets.append(start)
        end = start + prod(column.shape) * column.dtype.itemsize
    # Never 0: a row of no bytes has no place of its own, though a zero-size Box is a legal leaf.
    return offsets, max(_round_up(end, ROW_ALIGNMENT), ROW_ALIGNMENT)


def _round_up(n: int, to: int) -> int:
    return -(-n // to) * to


def place(columns: Sequence[Column], offsets: Sequence[int], row_nbytes: int) -> tuple[Field, ...]:
    """Return the columns at their offsets, checked: aligned, apart, and within the row."""
    names = [column.name for column in columns]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ValueError(
            f"{twice}: must be the name of one leaf, got two; rename a key with '/' or '#' in it"
        )
    fields = tuple(Field(c.name, c.dtype, c.shape, at) for c, at in zip(columns, offsets, strict=True))
    end = 0
    for field in fields:
        if field.offset < end or field.offset % field.dtype.itemsize:
            raise FormatError(f"layout: fields must be aligned and apart, got {field} after byte {end}")
        end = field.offset + field.nbytes
    if end > row_nbytes or row_nbytes % ROW_ALIGNMENT:
        raise FormatError(f"layout: rows must hold their {end} bytes in a multiple of 8, got {row_nbytes}")
    return fields


def assign(codecs: Sequence[LeafCodec]) -> tuple[Leaf, ...]:
    """Return the leaves with the numbers of their fields, in order."""
    leaves, at = [], 0
    for leaf in codecs:
        end = at + len(leaf.codec.columns)
        leaves.append(Leaf(leaf.path, leaf.name, leaf.kind, tuple(range(at, end))))
        at = end
    return tuple(leaves)
