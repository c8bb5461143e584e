"""Layout: a space compiled to one packed row, and the way of a sample in and out of it.

Leaves lie in the space's key order, each aligned to its item size; the row is padded to 8 bytes, so every row
of a block is aligned as the first is. A layout is a value: frozen, hashable, equal by content, with the same
JSON and hash in every process, which is how two processes know that they speak of the same rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from hashlib import blake2b
from json import loads
from math import prod
from types import MappingProxyType
from typing import Any

import numpy as np
from gymnasium import Space

from recollect import checks
from recollect.errors import FormatError
from recollect.spaces.codec import Codec, Column
from recollect.spaces.dtypes import dtype_name
from recollect.spaces.flatten import FlatPlan, plan_flat
from recollect.spaces.json import canonical, space_from_json, space_to_json
from recollect.spaces.make import as_space
from recollect.spaces.nested import Template
from recollect.spaces.plan import LeafCodec, compile_codec
from recollect.spaces.tree import LeafKind, Path, as_keys, path_name, sequence_paths, space_at

Array = np.ndarray[Any, Any]


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


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Layout:
    """A space compiled to one packed row; make it with `compile_layout`.

    >>> layout = compile_layout({"obs": ((17,), "float32"), "done": ((), "bool")})
    >>> layout
    Layout(obs: float32(17,) @0, done: bool() @68; 72 B)
    >>> layout.encode_one({"obs": [0.0] * 17, "done": True})[1]
    array(True)
    """

    space: Space[Any]
    max_lengths: Mapping[str, int]
    fields: tuple[Field, ...]
    leaves: tuple[Leaf, ...]
    row_nbytes: int
    hash: str
    is_fixed: bool
    template: Template
    _codec: Codec
    _flat: FlatPlan | None

    # -- samples to fields and back

    def encode_one(self, sample: Any, cast: bool = False) -> list[Array]:
        """Return one C-contiguous array per field; they may alias the sample."""
        return self._codec.encode_one(sample, cast)

    def encode_batch(self, batch: Any, cast: bool = False) -> tuple[int, list[Array]]:
        """Return n and one array `[n, *field.shape]` per field; they may alias the batch."""
        return self._codec.encode_batch(batch, cast)

    def decode_one(self, arrays: Sequence[Array]) -> Any:
        """Return the sample that one array per field holds; it may alias them."""
        return self._codec.decode_one(arrays)

    def decode_batch(self, arrays: Sequence[Array], n: int) -> Any:
        """Return the batch that arrays `[n, *field.shape]` hold; it may alias them."""
        return self._codec.decode_batch(arrays, n)

    # -- the flattened form

    @property
    def flat(self) -> FlatPlan:
        """The plan of the flattened form; TypeError naming the leaf for Text and Sequence."""
        if self._flat is None:
            leaf = next(leaf for leaf in self.leaves if leaf.kind in ("text", "sequence"))
            raise TypeError(
                f"{leaf.name}: must have a fixed size to be flattened, got {leaf.kind}; leave it nested"
            )
        return self._flat

    @property
    def flat_dim(self) -> int:
        """D, the length of a flattened sample."""
        return self.flat.dim

    @property
    def flat_dtype(self) -> np.dtype[Any]:
        """The dtype of a flattened sample: numpy's promotion of the leaves' dtypes."""
        return self.flat.dtype

    def flatten_one(self, sample: Any, cast: bool = False) -> Array:
        """Return a sample as one vector `(D,)`."""
        vector: Array = self.flat.flatten(self.encode_one(sample, cast), 1)[0]
        return vector

    def flatten_batch(self, batch: Any, cast: bool = False) -> Array:
        """Return a batch as one matrix `(n, D)`."""
        plan = self.flat  # first, so that a Text leaf is a TypeError whatever the batch
        n, arrays = self.encode_batch(batch, cast)
        return plan.flatten(arrays, n)

    def unflatten_one(self, vector: Any, cast: bool = False) -> Any:
        """Return the sample of a vector `(D,)`."""
        arrays = self.flat.unflatten(self.flat.check_one(vector, cast))
        return self.decode_one([array[0] for array in arrays])

    def unflatten_batch(self, matrix: Any, cast: bool = False) -> Any:
        """Return the batch of a matrix `(n, D)`."""
        checked = self.flat.check_batch(matrix, cast)
        return self.decode_batch(self.flat.unflatten(checked), checked.shape[0])

    # -- parts

    def field_indices(self, keys: str | int | Sequence[str | int]) -> tuple[int, ...]:
        """Return which of `fields` hold the part of the sample under `keys`."""
        path = as_keys(keys)
        space_at(self.space, path)
        return tuple(i for leaf in self.leaves if leaf.path[: len(path)] == path for i in leaf.fields)

    def project(self, keys: str | int | Sequence[str | int]) -> Layout:
        """Return the layout of the part under `keys` within these rows: same offsets and row size."""
        path = as_keys(keys)
        space = space_at(self.space, path)
        offsets = [self.fields[i].offset for i in self.field_indices(path)]
        most = {path_name(p): self.max_lengths[path_name((*path, *p))] for p in sequence_paths(space)}
        return _assemble(space, most, offsets, self.row_nbytes)

    # -- a value

    def to_json(self) -> dict[str, Any]:
        """Return the layout as plain JSON values."""
        return _to_json(self.space, self.max_lengths, self.fields, self.row_nbytes)

    @staticmethod
    def from_json(obj: Mapping[str, Any]) -> Layout:
        """Return the layout that `to_json` wrote; FormatError if it is none."""
        try:
            return _from_text(canonical(obj))
        except FormatError:
            raise
        except Exception as error:
            raise FormatError(f"layout: must be what to_json wrote, got an error: {error!r}") from error

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Layout) and self.hash == other.hash

    def __hash__(self) -> int:
        return hash(self.hash)

    def __repr__(self) -> str:
        fields = ", ".join(f"{f.name}: {f.dtype}{f.shape} @{f.offset}" for f in self.fields)
        return f"Layout({fields}; {self.row_nbytes} B)"

    def __reduce__(self) -> tuple[Any, ...]:
        return Layout.from_json, (self.to_json(),)


def compile_layout(space: Any, max_lengths: Mapping[str, int] | None = None) -> Layout:
    """Return the layout of a space or short form; `max_lengths` sizes Sequences by name.

    Cached by content: equal spaces give equal layouts that share their compiled parts.
    """
    if isinstance(space, Layout):
        raise TypeError("space: must be a space or short form, got a Layout; pass layout.space")
    space = as_space(space)
    most = _checked_lengths(space, max_lengths or {})
    layout = _compiled(_Described(canonical([space_to_json(space), most]), space, most))
    return replace(layout, space=space)


@dataclass(frozen=True, slots=True)
class _Described:
    """A space with the text that says all of it, by which it is known."""

    text: str
    space: Space[Any] = field(compare=False)
    most: Mapping[str, int] = field(compare=False)


@lru_cache(maxsize=256)
def _compiled(known: _Described) -> Layout:
    return _assemble(known.space, known.most)


@lru_cache(maxsize=256)
def _from_text(text: str) -> Layout:
    obj = loads(text)
    offsets = [offset for *_, offset in obj["fields"]]
    space = space_from_json(obj["space"])
    layout = _assemble(space, _checked_lengths(space, obj["max_lengths"]), offsets, obj["row_nbytes"])
    if canonical(layout.to_json()) != text:
        raise FormatError("layout: fields must be those of its space, got others; write it again")
    return layout


def _assemble(
    space: Space[Any], most: Mapping[str, int], offsets: Sequence[int] | None = None, row_nbytes: int = 0
) -> Layout:
    plan = compile_codec(space, (), most)
    columns = plan.codec.columns
    if offsets is None:
        offsets, row_nbytes = pack(columns)
    fields = place(columns, offsets, row_nbytes)
    is_fixed = all(leaf.kind not in ("text", "sequence") for leaf in plan.leaves)
    identity = canonical(_to_json(space, most, fields, row_nbytes)).encode()
    return Layout(
        space=space,
        max_lengths=MappingProxyType(dict(most)),
        fields=fields,
        leaves=assign(plan.leaves),
        row_nbytes=row_nbytes,
        hash=blake2b(identity, digest_size=16).hexdigest(),
        is_fixed=is_fixed,
        template=plan.template,
        _codec=plan.codec,
        _flat=plan_flat(columns) if is_fixed else None,
    )


def _to_json(
    space: Space[Any], most: Mapping[str, int], fields: tuple[Field, ...], row_nbytes: int
) -> dict[str, Any]:
    return {
        "space": space_to_json(space),
        "max_lengths": dict(most),
        "fields": [[f.name, dtype_name(f.dtype), list(f.shape), f.offset] for f in fields],
        "row_nbytes": row_nbytes,
    }


def _checked_lengths(space: Space[Any], most: Mapping[str, Any]) -> dict[str, int]:
    names = [path_name(path) for path in sequence_paths(space)]
    for name, length in most.items():
        if name not in names:
            raise ValueError(f"max_lengths: keys must be Sequence leaves of the space, {names}, got {name!r}")
        checks.count(f"max_lengths/{name}", length)
    for name in names:
        if name not in most:
            remedy = f"pass max_lengths={{{name!r}: ...}}"
            raise ValueError(f"{name}: a Sequence needs its greatest length, got none; {remedy}")
    return {name: int(length) for name, length in most.items()}


ROW_ALIGNMENT = 8


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
    for one in fields:
        if one.offset < end or one.offset % one.dtype.itemsize:
            raise FormatError(f"layout: fields must be aligned and apart, got {one} after byte {end}")
        end = one.offset + one.nbytes
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
