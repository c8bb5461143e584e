"""The flattened form: the leaves of a sample raveled in order into one vector of one dtype."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from recollect.errors import SchemaError
from recollect.spaces.codec import Column
from recollect.spaces.convert import narrow, to_array, to_batch
from recollect.spaces.dtypes import dtype_kind, exact_bits, int_bounds, promote

Array = np.ndarray[Any, Any]
_NAME = "flattened"


@dataclass(frozen=True, slots=True)
class FlatPlan:
    """Where each column of a sample lies in its flat vector, and the dtype of that."""

    columns: tuple[Column, ...]
    spans: tuple[slice, ...]
    dim: int
    dtype: np.dtype[Any]

    def flatten(self, arrays: Sequence[Array], n: int) -> Array:
        """Return columns `[n, *shape]` as `[n, dim]`; SchemaError if an integer would change."""
        out = np.empty((n, self.dim), self.dtype)
        for column, span, array in zip(self.columns, self.spans, arrays, strict=True):
            part = array.reshape(n, span.stop - span.start)
            out[:, span] = part
            if _may_change(column.dtype, self.dtype):
                _check_exact(part, out[:, span], column.name)
        return out

    def unflatten(self, flat: Array) -> list[Array]:
        """Return `[n, dim]` as columns `[n, *shape]`; integers must be exact, floats are rounded."""
        out = []
        for column, span in zip(self.columns, self.spans, strict=True):
            part = np.ascontiguousarray(flat[:, span]).reshape(flat.shape[0], *column.shape)
            out.append(part if column.dtype == self.dtype else narrow(part, column.dtype, column.name))
        return out

    def check_one(self, vector: Any, cast: bool = False) -> Array:
        """Return `vector` as an array `[1, dim]` of the flat dtype."""
        return to_array(vector, self.dtype, (self.dim,), _NAME, cast).reshape(1, self.dim)

    def check_batch(self, matrix: Any, cast: bool = False) -> Array:
        """Return `matrix` as an array `[n, dim]` of the flat dtype."""
        return to_batch(matrix, self.dtype, (self.dim,), _NAME, cast)


def plan_flat(columns: tuple[Column, ...]) -> FlatPlan:
    """Return the plan for leaves that are one column each."""
    ends = np.cumsum([prod(column.shape) for column in columns], dtype=np.int64).tolist()
    spans = tuple(slice(a, b) for a, b in zip([0, *ends], ends, strict=False))
    return FlatPlan(columns, spans, ends[-1], promote([column.dtype for column in columns]))


def _may_change(dtype: np.dtype[Any], flat: np.dtype[Any]) -> bool:
    if dtype_kind(dtype) != "int" or dtype_kind(flat) != "float":
        return False
    return bool(max(map(abs, int_bounds(dtype))) > 2 ** exact_bits(flat))


def _check_exact(integers: Array, floats: Array, name: str) -> None:
    top = float(int_bounds(integers.dtype)[1] + 1)
    # A float at or above `top` has no integer of this dtype, and casting it back is undefined.
    rounded_up = floats >= top
    back = np.where(rounded_up, 0, floats).astype(integers.dtype)
    changed = rounded_up | (back != integers)
    if changed.any():
        raise SchemaError(
            f"{name}: integers must be exact in the flattened dtype {floats.dtype}, "
            f"got {integers[changed].flat[0]}; read this leaf unflattened"
        )
