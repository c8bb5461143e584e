"""Compile a space: find its leaves, give each a codec, and join them for whole samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium import Space, spaces

from recollect.errors import SchemaError
from recollect.spaces.codec import ArrayCodec, Codec, SequenceCodec, TextCodec
from recollect.spaces.dtypes import native
from recollect.spaces.nested import Template, compile_build, compile_pick
from recollect.spaces.tree import ELEMENT, LeafKind, Path, array_form, children, node_kind, path_name, subject

Array = np.ndarray[Any, Any]


class NestCodec:
    """A Dict or Tuple: the leaves in order, taken out of and put back into the nested form."""

    def __init__(self, template: Template, path: Path, names: list[str], leaves: list[Codec]) -> None:
        self._pick, self._build = compile_pick(template, path), compile_build(template)
        self._names, self._leaves = names, leaves
        ends = np.cumsum([len(leaf.columns) for leaf in leaves]).tolist()
        self._spans = [slice(a, b) for a, b in zip([0, *ends], ends, strict=False)]
        self.columns = tuple(column for leaf in leaves for column in leaf.columns)

    def _values(self, value: Any) -> list[Any]:
        values: list[Any] = []
        self._pick(value, values)
        return values

    def encode_one(self, value: Any, cast: bool) -> list[Array]:
        out: list[Array] = []
        for leaf, part in zip(self._leaves, self._values(value), strict=True):
            out += leaf.encode_one(part, cast)
        return out

    def encode_batch(self, value: Any, cast: bool) -> tuple[int, list[Array]]:
        out: list[Array] = []
        n = -1
        for name, leaf, part in zip(self._names, self._leaves, self._values(value), strict=True):
            count, arrays = leaf.encode_batch(part, cast)
            if n < 0:
                n = count
            elif n != count:
                raise SchemaError(
                    f"{name}: length must be {n} as that of {self._names[0]}, got {count}; "
                    "give all leaves one length"
                )
            out += arrays
        return n, out

    def decode_one(self, arrays: Sequence[Array]) -> Any:
        pairs = zip(self._leaves, self._spans, strict=True)
        return self._build([leaf.decode_one(arrays[span]) for leaf, span in pairs])

    def decode_batch(self, arrays: Sequence[Array], n: int) -> Any:
        pairs = zip(self._leaves, self._spans, strict=True)
        return self._build([leaf.decode_batch(arrays[span], n) for leaf, span in pairs])


@dataclass(frozen=True, slots=True)
class LeafCodec:
    """A leaf of a space with the codec of its values."""

    path: Path
    name: str
    kind: LeafKind
    codec: Codec


@dataclass(frozen=True, slots=True)
class SpacePlan:
    """A space compiled: the template of a sample, its leaves, and the codec of the whole."""

    template: Template
    leaves: list[LeafCodec]
    codec: Codec


def compile_codec(space: Space[Any], path: Path, most: Mapping[str, int]) -> SpacePlan:
    """Compile a space found at `path`; `most` is the greatest length of each Sequence by name."""
    leaves: list[LeafCodec] = []
    template = _template(space, path, most, leaves)
    if not leaves:
        raise ValueError(f"{subject(path)}: must have at least one leaf, got {space}; add one")
    if template[0] == "leaf":
        return SpacePlan(template, leaves, leaves[0].codec)
    names = [leaf.name for leaf in leaves]
    return SpacePlan(template, leaves, NestCodec(template, path, names, [leaf.codec for leaf in leaves]))


def _template(space: Space[Any], path: Path, most: Mapping[str, int], leaves: list[LeafCodec]) -> Template:
    kind = node_kind(space, path)
    if kind == "dict" or kind == "tuple":
        nodes = [(key, _template(child, (*path, key), most, leaves)) for key, child in children(space)]
        return kind, tuple(nodes) if kind == "dict" else tuple(node for _, node in nodes)
    name = path_name(path)
    leaves.append(LeafCodec(path, name, kind, _leaf_codec(space, kind, path, most)))
    return "leaf", len(leaves) - 1


def _leaf_codec(space: Space[Any], kind: LeafKind, path: Path, most: Mapping[str, int]) -> Codec:
    name = path_name(path)
    if isinstance(space, spaces.Text):
        return TextCodec(name, space)
    if isinstance(space, spaces.Sequence):
        element = compile_codec(space.feature_space, (*path, ELEMENT), most)
        return SequenceCodec(name, most[name], element.codec, space.stack, element.template[0] != "leaf")
    dtype, shape = array_form(space)
    return ArrayCodec(name, kind, native(dtype), shape)
