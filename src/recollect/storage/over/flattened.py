"""FlattenedStorage: samples of any flattenable space as vectors in a storage of one Box."""

from __future__ import annotations

from typing import Any, Self

import numpy as np
from gymnasium import spaces

from recollect.spaces import ExtendedBox, compile_layout
from recollect.spaces.dtypes import dtype_kind, is_extended
from recollect.storage.contract import SpaceStorage
from recollect.storage.over.base import WrapperStorage


class FlattenedStorage(WrapperStorage):
    """Leaves raveled into one vector, dtype by numpy promotion; an integer that this would change is a SchemaError.

    Ownership: owns `inner`, and closes it.
    Concurrency: as `inner`.

    >>> import recollect as rc
    >>> space = {"x": ((2,), "float32"), "k": ((), "int16")}
    >>> storage = rc.FlattenedStorage.create(space, capacity=4, inner="memory")
    >>> storage.set(0, {"x": [1.0, 2.0], "k": 3})
    >>> storage.inner.get(0).tolist(), storage.get(0)["k"].item()
    ([1.0, 2.0, 3.0], 3)
    """

    short_name = "flattened"

    @classmethod
    def inner_space(cls, space: Any, own: dict[str, Any]) -> Any:
        layout = compile_layout(space)
        shape, dtype = (layout.flat_dim,), layout.flat_dtype
        if is_extended(dtype):
            return ExtendedBox(None, None, shape, dtype)
        if dtype_kind(dtype) == "bool":
            return spaces.Box(0, 1, shape, np.bool_)
        if dtype_kind(dtype) == "int":
            info = np.iinfo(dtype)
            return spaces.Box(info.min, info.max, shape, dtype.type)
        return spaces.Box(-np.inf, np.inf, shape, dtype.type)

    @classmethod
    def wrap(cls, space: Any, inner: SpaceStorage, own: dict[str, Any]) -> Self:
        return cls(space, inner)

    def _inward(self, block: Any, n: int) -> Any:
        return self.layout.flatten_batch(block)

    def _outward(self, block: Any, n: int) -> Any:
        return self.layout.unflatten_batch(block)
