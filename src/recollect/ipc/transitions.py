"""The packed transition row: its fields, and the checks that a block of transitions passes before it is written."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from recollect import _core, checks, interrupts
from recollect.errors import DtypeError, SchemaError
from recollect.spaces import Layout, compile_layout
from recollect.spaces.arrays import as_numpy
from recollect.spaces.dtypes import dtype_from, dtype_kind, dtype_name

Array = np.ndarray[Any, Any]
Patches = tuple[Array, list[tuple[int, Array]]]
"""Some rows of a block, and by number of field the values that they have instead."""
FLAGS = ("dones", "truncated")
_FIELDS = ("obs", "next_obs", "actions", "rewards", *FLAGS, "critic", "next_critic")


def row_layout(
    obs_dim: int, action_dim: int, critic_dim: int = 0, dtypes: Mapping[str, Any] | None = None
) -> Layout:
    """Return the layout obs | next_obs | actions | rewards | dones | truncated [| critic | next_critic]."""
    for label, n, least in (
        ("obs_dim", obs_dim, 1),
        ("action_dim", action_dim, 1),
        ("critic_dim", critic_dim, 0),
    ):
        checks.count(label, n, least)
    sizes = ((obs_dim,), (obs_dim,), (action_dim,), (), (), (), (critic_dim,), (critic_dim,))
    shapes = dict(zip(_FIELDS if critic_dim else _FIELDS[:6], sizes))
    dtypes = dict(dtypes or {})
    unknown = sorted(set(dtypes) - set(shapes))
    if unknown:
        raise ValueError(f"dtypes: names must be of {list(shapes)}, got {unknown}")
    space = {name: (shape, dtype_from(dtypes.get(name, "float32"), name)) for name, shape in shapes.items()}
    return compile_layout(space)


def dtypes_as_text(layout: Layout) -> str:
    """The dtypes that are not float32, each with the numbers of its fields: `int64:3,bfloat16:01`."""
    found: dict[str, str] = {}
    for k, f in enumerate(layout.fields):
        if f.dtype != np.float32:
            found[dtype_name(f.dtype)] = found.get(dtype_name(f.dtype), "") + str(k)
    return ",".join(f"{dtype}:{numbers}" for dtype, numbers in found.items())


def dtypes_of_text(text: str) -> dict[str, str]:
    """Field → dtype of what `dtypes_as_text` wrote."""
    pairs = [pair.split(":") for pair in text.split(",") if pair]
    return {_FIELDS[int(k)]: dtype for dtype, numbers in pairs for k in numbers}


def fields_of(block: Any, layout: Any) -> dict[str, Any]:
    """The fields of packed rows `[n, row_bytes]`, as views of that one block."""
    found = {}
    for f in layout.fields:
        column = block[:, f.offset : f.offset + f.nbytes]
        if isinstance(block, np.ndarray):
            found[f.name] = column.view(f.dtype).reshape(len(block), *f.shape)
        else:
            found[f.name] = _tensor_field(column, f)
    return found


def _tensor_field(column: Any, f: Any) -> Any:
    torch: Any = interrupts.import_whole("torch")
    typed = column.view(getattr(torch, f.dtype.name))
    return typed.view(len(column), *f.shape) if f.shape else typed.squeeze(1)


class Checker:
    """Turns what a caller adds into one exact contiguous array per field, or says which leaf is wrong.

    Ownership: the arrays may alias what came; they are written before `add` returns.
    """

    def __init__(self, layout: Layout, cast: bool) -> None:
        self._fields = {f.name: f for f in layout.fields}
        self._cast = cast
        self._has_critic = "critic" in self._fields
        self._numbers = {name: k for k, name in enumerate(self._fields)}

    def block(
        self, leaves: Mapping[str, Any], mask: Any, terminal: Mapping[str, Any]
    ) -> tuple[int, list[Array], Patches | None]:
        """Return n, the arrays in row order, and what terminal rows have instead."""
        n = self._length(leaves["obs"])
        made = {}
        for name in self._fields:
            x = leaves[name]
            if x is None:
                raise SchemaError(f"{name}: is needed with critic_dim > 0, got None")
            made[name] = self._flag(name, x, n) if name in FLAGS else self._leaf(name, name, x, n)
        if not self._has_critic:
            for name in ("critic", "next_critic"):
                if leaves[name] is not None:
                    raise SchemaError(
                        f"{name}: must be None where critic_dim is 0, got {type(leaves[name]).__name__}"
                    )
        at = _first_alone(made["truncated"], made["dones"])
        if at >= 0:
            raise SchemaError(
                f"truncated: must be done as well, got row {at} truncated and not done; dones = both"
            )
        return n, list(made.values()), self._patches(mask, terminal, n)

    @staticmethod
    def _length(obs: Any) -> int:
        shape = getattr(obs, "shape", None)
        if shape is None:
            raise SchemaError(f"obs: must be an array or a tensor, got {type(obs).__name__}")
        if len(shape) < 1:
            raise SchemaError("obs: must have a leading axis of rows, got a scalar")
        return int(shape[0])

    def _leaf(self, name: str, label: str, x: Any, n: int) -> Array:
        field = self._fields[name]
        if not hasattr(x, "shape"):
            raise SchemaError(f"{label}: must be an array or a tensor, got {type(x).__name__}")
        array = as_numpy(x)
        if array.shape != (n, *field.shape):
            one = "; for a single row, add an axis before the others" if array.shape == field.shape else ""
            raise SchemaError(f"{label}: shape must be {(n, *field.shape)}, got {array.shape}{one}")
        if array.dtype != field.dtype:
            narrows = name == "rewards" and array.dtype == np.float64 and dtype_kind(field.dtype) == "float"
            array = self._converted(label, array, field.dtype, narrows)
        return np.ascontiguousarray(array)

    def _converted(self, label: str, array: Array, dtype: np.dtype[Any], narrows: bool) -> Array:
        kind = dtype_kind(array.dtype)
        of_a_kind = kind == dtype_kind(dtype)
        if not narrows and not (self._cast and of_a_kind):
            other = "it is of another kind: convert it"
            hint = "convert it, or create the buffer with cast=True" if of_a_kind else other
            raise DtypeError(f"{label}: dtype must be {dtype}, got {array.dtype}; {hint}")
        with np.errstate(over="ignore"):
            made = array.astype(dtype)
        if kind == "int" and not np.array_equal(made, array):
            raise SchemaError(f"{label}: values must fit {dtype}, got {array.dtype} values out of its range")
        if kind == "float" and not np.array_equal(np.isfinite(made), np.isfinite(array)):
            raise SchemaError(f"{label}: values must fit {dtype}, got {array.dtype} values beyond it")
        return made

    def _flag(self, name: str, x: Any, n: int) -> Array:
        if not hasattr(x, "shape"):
            raise SchemaError(f"{name}: must be an array or a tensor, got {type(x).__name__}")
        array = as_numpy(x)
        if array.shape != (n,):
            raise SchemaError(f"{name}: shape must be {(n,)}, got {array.shape}")
        dtype = self._fields[name].dtype
        at = -1 if array.dtype == bool else _first_not_flag(array)
        if at >= 0:
            raise SchemaError(f"{name}: must be 0 or 1, got {array[at]} in row {at}")
        return np.ascontiguousarray(array, dtype)

    def _patches(self, mask: Any, terminal: Mapping[str, Any], n: int) -> Patches | None:
        """The rows with a true last observation, and for each field that has one its values, of all rows."""
        given = {name: x for name, x in terminal.items() if x is not None}
        if mask is None:
            if given:
                raise SchemaError(f"terminal_{next(iter(given))}: needs a terminal_mask, got None")
            return None
        flags = as_numpy(mask) if hasattr(mask, "shape") else np.asarray(mask)
        if flags.dtype != bool or flags.shape != (n,):
            raise SchemaError(
                f"terminal_mask: must be bool of shape {(n,)}, got {flags.dtype} of {flags.shape}"
            )
        if "next_critic" in given and not self._has_critic:
            raise SchemaError("terminal_next_critic: must be None where critic_dim is 0")
        checked = {name: self._leaf(name, f"terminal_{name}", x, n) for name, x in given.items()}
        rows = np.flatnonzero(flags)
        if not len(rows):
            return None
        names = ("next_obs", "next_critic") if self._has_critic else ("next_obs",)
        for name in names:
            if name not in checked:
                raise SchemaError(f"terminal_{name}: is needed where terminal_mask is set, got None")
        return rows, [(self._numbers[name], checked[name]) for name in names]


def _first_not_flag(array: Array) -> int:
    """The first row that is neither 0 nor 1, or -1."""
    if _is_plain(array):
        return _core.first_not_flag(array)
    wrong = (array != 0) & (array != 1)
    return int(np.argmax(wrong)) if wrong.any() else -1


def _first_alone(truncated: Array, dones: Array) -> int:
    """The first row that is truncated and not done, or -1; both are 0 or 1."""
    if _is_plain(truncated) and dones.dtype == truncated.dtype:
        return _core.first_above(truncated, dones)
    alone = truncated > dones
    return int(np.argmax(alone)) if alone.any() else -1


def _is_plain(array: Array) -> bool:
    """Whether the core can look at it: numpy needs several passes and temporaries."""
    return array.dtype in (np.float32, np.float64) and array.flags.c_contiguous
