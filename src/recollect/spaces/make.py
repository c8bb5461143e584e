"""Spaces from what people have at hand: a space, a short form, or an example sample."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from gymnasium import Space, spaces

from recollect.errors import class_name
from recollect.spaces.arrays import as_numpy
from recollect.spaces.dtypes import dtype_from, int_bounds, is_dtype_like, is_extended
from recollect.spaces.extended import ExtendedBox
from recollect.spaces.tree import Path, check_space, make_dict, path_name


def as_space(spec: Any) -> Space[Any]:
    """Return the space that `spec` describes; a space is checked and returned as it is.

    A leaf is `(shape, dtype)`; dicts and tuples nest, keys in the given order; anything else is an example.

    >>> as_space({"obs": ((17,), "float32"), "reward": 0.0})
    Dict('obs': Box(-inf, inf, (17,), float32), 'reward': Box(-inf, inf, (), float64))
    """
    return _as_space(spec, ())


def _as_space(spec: Any, path: Path) -> Space[Any]:
    if isinstance(spec, Space):
        check_space(spec, path)
        return spec
    if isinstance(spec, Mapping):
        for key in spec:
            if not isinstance(key, str):
                raise TypeError(f"{path_name((*path, key))}: key must be a str, got {key!r}; rename it")
        return make_dict((key, _as_space(value, (*path, key))) for key, value in spec.items())
    if isinstance(spec, tuple):
        if _is_short_leaf(spec):
            return full_box(tuple(spec[0]), dtype_from(spec[1], path_name(path)))
        if len(spec) == 2 and isinstance(spec[0], int | np.integer) and is_dtype_like(spec[1]):
            dtype = dtype_from(spec[1], path_name(path)).name
            raise TypeError(
                f"{path_name(path)}: shape must be a tuple, got {spec[0]}; write (({spec[0]},), {dtype!r})"
            )
        return spaces.Tuple([_as_space(value, (*path, i)) for i, value in enumerate(spec)])
    return _from_example(spec, path)


def _is_short_leaf(spec: tuple[Any, ...]) -> bool:
    if len(spec) != 2 or not isinstance(spec[0], tuple | list) or not is_dtype_like(spec[1]):
        return False
    return all(isinstance(d, int | np.integer) and not isinstance(d, bool) and d >= 0 for d in spec[0])


def _named_dtype(value: Any) -> str | None:
    try:
        return dtype_from(value, "").name if is_dtype_like(value) else None
    except TypeError:
        return None


def _from_example(value: Any, path: Path) -> Space[Any]:
    name = path_name(path)
    if (dtype := _named_dtype(value)) is not None:
        raise TypeError(
            f"{name}: must have a shape beside its dtype, got {value!r}; write ((), {dtype!r}) for one number"
        )
    try:
        array = as_numpy(value)
    except Exception as error:
        raise TypeError(
            f"{name}: example must be an array, got {class_name(value)}; give a space or (shape, dtype)"
        ) from error
    if (
        array.dtype == object and array.shape == ()
    ):  # nothing that numpy knows: an environment, a config, a model
        hint = "transition_space(env) makes one of an environment" if hasattr(value, "action_space") else (
            "give a gymnasium space, (shape, dtype) or an example array"
        )  # fmt: skip
        raise TypeError(f"{name}: must describe a space, got {class_name(value)}; {hint}")
    return full_box(array.shape, dtype_from(array.dtype, name))


def full_box(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Space[Any]:
    """Return the box of everything that `dtype` can hold."""
    if is_extended(dtype):
        return ExtendedBox(None, None, shape, dtype)
    if dtype.kind == "b":
        return spaces.Box(0, 1, shape, dtype=dtype)
    if dtype.kind == "u":
        return spaces.Box(0, int_bounds(dtype)[1], shape, dtype=dtype)
    return spaces.Box(-np.inf, np.inf, shape, dtype=dtype)
