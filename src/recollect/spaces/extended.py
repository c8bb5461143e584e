"""ExtendedBox: gymnasium's Box for the dtypes of ml_dtypes, which Box refuses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from gymnasium import Space
from gymnasium.vector import utils as vector_utils

from recollect.spaces.dtypes import dtype_from, dtype_kind, dtype_name, float_bounds, int_bounds, is_extended

Array = np.ndarray[Any, Any]


class ExtendedBox(Space[Array]):
    """A box of bfloat16, float8, int4 ... numbers: `Box` for the dtypes of ml_dtypes.

    >>> space = ExtendedBox(-1, 1, (2,), "bfloat16")
    >>> space
    ExtendedBox(-1, 1, (2,), 'bfloat16')
    >>> space.sample() in space
    True
    """

    dtype: np.dtype[Any]

    def __init__(
        self,
        low: float | Array | None = None,
        high: float | Array | None = None,
        shape: Sequence[int] = (),
        dtype: Any = "bfloat16",
        seed: int | np.random.Generator | None = None,
    ) -> None:
        """Bound a box; `None` is the whole range of the dtype (infinite where it has infinities)."""
        leaf_dtype = dtype_from(dtype, "ExtendedBox")
        if not is_extended(leaf_dtype):
            raise ValueError(f"ExtendedBox: dtype must be one of ml_dtypes, got {leaf_dtype}; use Box")
        self._full_shape = tuple(int(d) for d in shape)
        super().__init__(self._full_shape, leaf_dtype, seed)
        least, most = _range(leaf_dtype)
        self.low = self._bound(least if low is None else low)
        self.high = self._bound(most if high is None else high)
        if not np.all(self.low <= self.high):
            raise ValueError(f"ExtendedBox: low must not be above high, got {low} and {high}")

    def _bound(self, value: float | Array) -> Array:
        return np.broadcast_to(np.asarray(value, dtype=self.dtype), self.shape).copy()

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one element, never None."""
        return self._full_shape

    @property
    def is_np_flattenable(self) -> bool:
        """False: gymnasium's `flatten` does not know these dtypes (`Layout.flatten_one` does)."""
        return False

    def sample(self, mask: Any | None = None, probability: Any | None = None) -> Array:
        """Draw uniformly between finite bounds, else from a normal distribution cut to the bounds."""
        if mask is not None or probability is not None:
            raise ValueError("ExtendedBox: sample takes no mask and no probability; leave them out")
        low, high = self.low.astype(np.float64), self.high.astype(np.float64)
        bounded = np.isfinite(low) & np.isfinite(high)
        values = self.np_random.standard_normal(self.shape)
        width = np.where(bounded, high, 1.0) - np.where(bounded, low, 0.0)
        values = np.where(bounded, low + self.np_random.random(self.shape) * width, values)
        if dtype_kind(self.dtype) == "int":
            values = np.rint(values)
        return np.asarray(np.clip(values, low, high)).astype(self.dtype)

    def contains(self, x: Any) -> bool:
        """Tell whether `x` is an array of this dtype and shape within the bounds."""
        return bool(
            isinstance(x, np.ndarray)
            and x.dtype == self.dtype
            and x.shape == self.shape
            and np.all((self.low <= x) & (x <= self.high))
        )

    def __repr__(self) -> str:
        low, high = (_short(bound) for bound in (self.low, self.high))
        return f"ExtendedBox({low}, {high}, {self.shape}, {dtype_name(self.dtype)!r})"

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, ExtendedBox)
            and self.dtype == other.dtype
            and self.shape == other.shape
            and bool(np.all(self.low == other.low) and np.all(self.high == other.high))
        )

    def to_jsonable(self, sample_n: Any) -> list[Any]:
        """Turn samples into nested lists."""
        return [sample.tolist() for sample in sample_n]

    def from_jsonable(self, sample_n: list[Any]) -> list[Any]:
        """Turn nested lists into samples."""
        return [np.asarray(sample, dtype=self.dtype) for sample in sample_n]


def _range(dtype: np.dtype[Any]) -> tuple[float, float]:
    if dtype_kind(dtype) == "int":
        return int_bounds(dtype)
    has_infinity = bool(np.isinf(np.asarray(np.inf, dtype=dtype)))
    return (-np.inf, np.inf) if has_infinity else float_bounds(dtype)


def _short(bound: Array) -> str:
    distinct = np.unique(bound.astype(np.float64))
    return f"{distinct[0]:g}" if distinct.size == 1 else str(bound.tolist())


# gymnasium's vector functions dispatch on the class; without these an ExtendedBox would batch to a tuple.
@vector_utils.batch_space.register(ExtendedBox)
def _batch_space(space: ExtendedBox, n: int = 1) -> ExtendedBox:
    low, high = (np.broadcast_to(bound, (n, *space.shape)) for bound in (space.low, space.high))
    return ExtendedBox(low, high, (n, *space.shape), space.dtype)


@vector_utils.iterate.register(ExtendedBox)
def _iterate(space: Any, items: Array) -> Iterator[Any]:  # type: ignore[misc]  # its T is unbound
    return (np.asarray(item) for item in items)


@vector_utils.concatenate.register(ExtendedBox)
def _concatenate(space: ExtendedBox, items: Any, out: Array) -> Array:
    return np.stack(list(items), axis=0, out=out)


@vector_utils.create_empty_array.register(ExtendedBox)
def _create_empty_array(space: ExtendedBox, n: int = 1, fn: Any = np.zeros) -> Any:
    return fn((n, *space.shape), dtype=space.dtype)
