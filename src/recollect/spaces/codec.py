"""Between the value of a leaf and its columns: one codec per kind of leaf.

A codec turns a value into the arrays of its columns and back, for one sample and for a batch. A Text is its
UTF-8 bytes and their number; a Sequence is its length and the columns of its elements, padded with zeros to
the most that there may be.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import numpy as np
from gymnasium import spaces

from recollect.errors import DtypeError, FormatError, SchemaError, class_name
from recollect.spaces.convert import to_array, to_batch
from recollect.spaces.tree import LeafKind

Array = np.ndarray[Any, Any]
LENGTH = "#length"
_INT32 = np.dtype(np.int32)
_UINT8 = np.dtype(np.uint8)


@dataclass(frozen=True, slots=True)
class Column:
    """The array that a field is for one sample: a name, a dtype and a shape."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]


class Codec(Protocol):
    """Values of one space to the arrays of its columns, and back."""

    @property
    def columns(self) -> tuple[Column, ...]: ...
    def encode_one(self, value: Any, cast: bool) -> list[Array]: ...
    def encode_batch(self, value: Any, cast: bool) -> tuple[int, list[Array]]: ...
    def decode_one(self, arrays: Sequence[Array]) -> Any: ...
    def decode_batch(self, arrays: Sequence[Array], n: int) -> Any: ...


class ArrayCodec:
    """A leaf that is one array: Box, Discrete, MultiBinary, MultiDiscrete."""

    def __init__(self, name: str, kind: LeafKind, dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
        self.name, self.dtype, self.shape = name, dtype, shape
        self.columns = (Column(name, dtype, shape),)
        self._is_scalar = kind == "discrete"

    # Each begins with the usual case, an array that is right already: most of the time of a write is there.
    def encode_one(self, value: Any, cast: bool) -> list[Array]:
        if type(value) is np.ndarray and value.dtype is self.dtype and value.shape == self.shape:
            return [value if value.flags.c_contiguous else value.copy()]
        return [to_array(value, self.dtype, self.shape, self.name, cast)]

    def encode_batch(self, value: Any, cast: bool) -> tuple[int, list[Array]]:
        if (
            type(value) is np.ndarray
            and value.dtype is self.dtype
            and value.ndim
            and value.shape[1:] == self.shape
        ):
            return len(value), [value if value.flags.c_contiguous else value.copy()]
        array = to_batch(value, self.dtype, self.shape, self.name, cast)
        return array.shape[0], [array]

    def decode_one(self, arrays: Sequence[Array]) -> Any:
        # gymnasium samples a numpy scalar from Discrete and a 0-d array from Box(shape=()).
        return arrays[0][()] if self._is_scalar else np.asarray(arrays[0])

    def decode_batch(self, arrays: Sequence[Array], n: int) -> Any:
        return arrays[0]


class TextCodec:
    """A Text leaf: its UTF-8 bytes, and how many there are, so that NUL characters survive."""

    def __init__(self, name: str, space: spaces.Text) -> None:
        self.name, self.max_length, self.charset = name, space.max_length, space.character_set
        # UTF-8 width grows with the code point, so the last character is the widest.
        width = len(_utf8(max(self.charset))) if self.charset else 1
        self.nbytes = space.max_length * width
        self.columns = (Column(name, _UINT8, (self.nbytes,)), Column(name + LENGTH, _INT32, ()))

    def _bytes(self, value: Any) -> bytes:
        if not isinstance(value, str):
            raise DtypeError(f"{self.name}: must be a str, got {type(value).__name__}; convert it")
        if len(value) > self.max_length:
            raise SchemaError(
                f"{self.name}: must have at most {self.max_length} characters, got {len(value)}; "
                "cut it or raise the Text's max_length"
            )
        if not self.charset.issuperset(value):
            foreign = next(char for char in value if char not in self.charset)
            raise SchemaError(
                f"{self.name}: characters must be of the charset, got {foreign!r}; widen the Text's charset"
            )
        return _utf8(value)

    def encode_one(self, value: Any, cast: bool) -> list[Array]:
        _, (data, lengths) = self.encode_batch([value], cast)
        return [data[0], lengths.reshape(())]

    def encode_batch(self, value: Any, cast: bool) -> tuple[int, list[Array]]:
        texts = [self._bytes(text) for text in _as_items(value, self.name, "strings")]
        data = np.zeros((len(texts), self.nbytes), _UINT8)
        for row, text in zip(data, texts, strict=True):
            row[: len(text)] = np.frombuffer(text, _UINT8)
        return len(texts), [data, np.array([len(text) for text in texts], _INT32)]

    def decode_one(self, arrays: Sequence[Array]) -> str:
        data, length = arrays
        if not 0 <= (n := int(length)) <= self.nbytes:
            raise FormatError(f"{self.name}: must have at most {self.nbytes} bytes, got {n}; it is damaged")
        try:
            return data[:n].tobytes().decode("utf-8", "surrogatepass")
        except UnicodeDecodeError as error:
            raise FormatError(f"{self.name}: must be UTF-8, got {error}; it is damaged") from None

    def decode_batch(self, arrays: Sequence[Array], n: int) -> tuple[str, ...]:
        return tuple([self.decode_one(row) for row in zip(*arrays, strict=True)])


def _utf8(text: str) -> bytes:
    # A charset may hold lone surrogates; they have no UTF-8 but must come back.
    return text.encode("utf-8", "surrogatepass")


class SequenceCodec:
    """A Sequence leaf: its length, and its elements' columns padded with zeros to `most`."""

    def __init__(self, name: str, most: int, element: Codec, stack: bool, is_nested: bool) -> None:
        self.name, self.most, self.element, self.stack = name, most, element, stack
        # Elements of a Dict or Tuple come one by one unless stacked; of other spaces both look the same.
        self._one_by_one = is_nested and not stack
        padded = (Column(c.name, c.dtype, (most, *c.shape)) for c in element.columns)
        self.columns = (Column(name + LENGTH, _INT32, ()), *padded)

    def _elements(self, value: Any, cast: bool) -> tuple[int, list[Array]]:
        if self._one_by_one:
            value = _as_items(value, self.name, "elements")
            rows = [self.element.encode_one(item, cast) for item in value]
            count, arrays = len(rows), [np.stack(column) for column in zip(*rows, strict=True)]
        else:
            count, arrays = self.element.encode_batch(value, cast)
        if count > self.most:
            raise SchemaError(
                f"{self.name}: must have at most {self.most} elements, got {count}; "
                "cut it or raise max_lengths"
            )
        return count, arrays

    def encode_one(self, value: Any, cast: bool) -> list[Array]:
        _, (lengths, *padded) = self.encode_batch([value], cast)
        return [lengths.reshape(()), *(array[0] for array in padded)]

    def encode_batch(self, value: Any, cast: bool) -> tuple[int, list[Array]]:
        items = [self._elements(item, cast) for item in _as_items(value, self.name, "sequences")]
        padded = [np.zeros((len(items), *c.shape), c.dtype) for c in self.columns[1:]]
        for i, (count, arrays) in enumerate(items):
            for column, array in zip(padded, arrays, strict=False):
                column[i, :count] = array
        return len(items), [np.array([count for count, _ in items], _INT32), *padded]

    def decode_one(self, arrays: Sequence[Array]) -> Any:
        count = int(arrays[0])
        if not 0 <= count <= self.most:
            raise FormatError(
                f"{self.name}: must have at most {self.most} elements, got {count}; it is damaged"
            )
        elements = [array[:count] for array in arrays[1:]]
        if self.stack:
            return self.element.decode_batch(elements, count)
        return tuple([self.element.decode_one([column[i] for column in elements]) for i in range(count)])

    def decode_batch(self, arrays: Sequence[Array], n: int) -> tuple[Any, ...]:
        return tuple([self.decode_one([column[i] for column in arrays]) for i in range(n)])


def _as_items(value: Any, name: str, what: str) -> Sequence[Any]:
    """Return `value` if it is a list of things; a str is not, though Python can iterate it."""
    if isinstance(value, list | tuple):
        return value
    if isinstance(value, np.ndarray) and value.ndim > 0:
        return cast(Sequence[Any], value)
    raise SchemaError(f"{name}: must be a tuple or list of {what}, got {class_name(value)}; pass a tuple")
