"""DataTransformation: a batch of samples into another form, and by which name a file remembers it.

A file never names a class to import. It holds a short name from the registry here and JSON arguments, so what
can be loaded is what the program has registered.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from gymnasium import Space, spaces

from recollect.errors import FormatError
from recollect.spaces.arrays import as_numpy
from recollect.spaces.dtypes import dtype_from, dtype_name
from recollect.spaces.make import as_space
from recollect.spaces.tree import has_no_array, leaf_paths, make_dict, path_name

_REGISTRY: dict[str, type[DataTransformation]] = {}


class DataTransformation(ABC):
    """Turns batches of one space into batches of another.

    `space` is always that of one source sample, `data` always has a batch axis (single reads pass n = 1). To
    be saved with a storage, a transformation is registered under a name and gives its constructor's arguments
    in `json_arguments`. One that draws random numbers has a `manual_seed(seed)` method, which samplers call.

    Ownership: `data` is the caller's own copy; `transform` may change it in place.
    Concurrency: may be called from several threads unless it keeps a state.

    Example:
        >>> import numpy as np, recollect as rc
        >>> class Halve(rc.DataTransformation):
        ...     def get_target_space_from_source(self, space):
        ...         return space
        ...     def transform(self, space, data):
        ...         return data * np.float32(0.5)
        >>> buf = rc.ReplayBuffer.create(rc.MemoryStorage, ((), "float32"), capacity=4)
        >>> buf.append(3.0)
        >>> rc.TransformedBatch(buf, Halve())[0].item()
        1.5
    """

    has_inverse: bool = False

    @abstractmethod
    def get_target_space_from_source(self, space: Space[Any]) -> Any:
        """Return the space (or its short form) of one transformed sample."""

    @abstractmethod
    def transform(self, space: Space[Any], data: Any) -> Any:
        """Return the transformed batch."""

    def direction_inverse(self, space: Space[Any]) -> DataTransformation | None:
        """Return the transformation back, for data that came from `space`; None without one."""
        return None

    def json_arguments(self) -> dict[str, Any]:
        """Return the keyword arguments that make an equal one, as JSON values."""
        return {}


def register_transformation(name: str, cls: type[DataTransformation]) -> None:
    """Make a class loadable by name; a name that another class has raises ValueError."""
    if _REGISTRY.get(name, cls) is not cls:
        raise ValueError(f"{name}: name must be free, got one of {_REGISTRY[name].__name__}; choose another")
    _REGISTRY[name] = cls


def transformation_to_json(transformation: DataTransformation) -> dict[str, Any]:
    """Return `{"name": ..., "arguments": ...}`; TypeError if its class is not registered."""
    cls = type(transformation)
    for name, known in _REGISTRY.items():
        if known is cls:
            arguments = transformation.json_arguments()
            json.dumps(arguments, allow_nan=False)
            return {"name": name, "arguments": arguments}
    raise TypeError(f"{cls.__name__}: must be registered to be saved, got none; call register_transformation")


def transformation_from_json(saved: Mapping[str, Any]) -> DataTransformation:
    """Make the transformation again; FormatError names what is registered."""
    cls = _REGISTRY.get(saved["name"])
    if cls is None:
        known = ", ".join(sorted(_REGISTRY))
        raise FormatError(
            f"{saved['name']}: transformation must be one of {known}; register_transformation first"
        )
    return cls(**saved["arguments"])


class CallableTransformation(DataTransformation):
    """A plain function on batches: no inverse, its space found by one call on an example."""

    def __init__(self, function: Callable[[Any], Any], example: Any) -> None:
        """Wrap `function`; `example` is a batch of one source sample."""
        self.function = function
        self._target = _space_of_batch(function(example), ())

    def get_target_space_from_source(self, space: Space[Any]) -> Space[Any]:
        return self._target

    def transform(self, space: Space[Any], data: Any) -> Any:
        return self.function(data)


def _space_of_batch(data: Any, path: tuple[str, ...]) -> Space[Any]:
    if isinstance(data, Mapping):
        return make_dict((key, _space_of_batch(value, (*path, str(key)))) for key, value in data.items())
    if isinstance(data, tuple | list):
        return spaces.Tuple([_space_of_batch(value, (*path, str(i))) for i, value in enumerate(data)])
    array = as_numpy(data)
    if array.ndim == 0 or len(array) != 1:
        raise ValueError(
            f"{path_name(path)}: function must keep the batch axis, got shape {array.shape} for one sample; "
            "return one row for each row given"
        )
    return as_space((array.shape[1:], array.dtype))


class CastTransformation(DataTransformation):
    """Casts array leaves to other dtypes, by path or all with `*`; the inverse casts back.

    Example:
        >>> import numpy as np, recollect as rc
        >>> from recollect.batch import CastTransformation
        >>> buf = rc.ReplayBuffer.create(rc.MemoryStorage, {"obs": ((2,), "uint8")}, capacity=4)
        >>> view = rc.TransformedBatch(buf, CastTransformation({"obs": "float32"}))
        >>> view.append({"obs": np.array([1, 2], "float32")})
        >>> view[0]["obs"].dtype, buf[0]["obs"].dtype
        (dtype('float32'), dtype('uint8'))
    """

    has_inverse = True

    def __init__(self, dtypes: Mapping[str, str]) -> None:
        """Cast each leaf named in `dtypes` (as `obs/image`, or `*` for all others)."""
        self.dtypes = dict(dtypes)

    def get_target_space_from_source(self, space: Space[Any]) -> Space[Any]:
        target: Space[Any] = self._walk(space, None, (), self._cast_space)
        return target

    def transform(self, space: Space[Any], data: Any) -> Any:
        return self._walk(space, data, (), self._cast_data)

    def direction_inverse(self, space: Space[Any]) -> DataTransformation:
        leaves = [(path_name(p), s) for p, s in leaf_paths(space) if not has_no_array(s)]
        return CastTransformation(
            {name: dtype_name(np.dtype(s.dtype)) for name, s in leaves if self._dtype(name)}
        )

    def json_arguments(self) -> dict[str, Any]:
        return {"dtypes": self.dtypes}

    def _walk(
        self, space: Space[Any], data: Any, path: tuple[str | int, ...], leaf: Callable[..., Any]
    ) -> Any:
        if isinstance(space, spaces.Dict):
            parts = {
                k: self._walk(s, None if data is None else data[k], (*path, k), leaf)
                for k, s in space.spaces.items()
            }
            return make_dict(parts.items()) if data is None else parts
        if isinstance(space, spaces.Tuple):
            items = [
                self._walk(s, None if data is None else data[i], (*path, i), leaf)
                for i, s in enumerate(space.spaces)
            ]
            return spaces.Tuple(items) if data is None else tuple(items)
        return leaf(space, data, None if has_no_array(space) else self._dtype(path_name(path)))

    def _dtype(self, name: str) -> str | None:
        return self.dtypes.get(name, self.dtypes.get("*"))

    @staticmethod
    def _cast_space(space: Space[Any], data: None, dtype: str | None) -> Space[Any]:
        if dtype is None or space.dtype == dtype_from(dtype, "dtypes"):
            return space
        return as_space((space.shape, dtype))

    @staticmethod
    def _cast_data(space: Space[Any], data: Any, dtype: str | None) -> Any:
        return data if dtype is None else as_numpy(data).astype(dtype_from(dtype, "dtypes"), copy=False)


register_transformation("cast", CastTransformation)
