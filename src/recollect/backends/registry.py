"""Find a backend: by name, or by an array of it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module

from recollect import interrupts
from recollect.backends.base import Backend
from recollect.backends.numpy import NumpyBackend
from recollect.errors import MissingExtraError

_NUMPY = NumpyBackend()
_OPTIONAL = {"torch": "TorchBackend", "jax": "JaxBackend"}
_NAMES = ("numpy", *_OPTIONAL)


def get_backend(spec: str | Backend | None = None) -> Backend:
    """Return the backend of a name (None is numpy), or the given backend object itself.

    >>> get_backend(None).name
    'numpy'
    """
    if spec is None or spec == "numpy":
        return _NUMPY
    if isinstance(spec, str):
        if spec not in _OPTIONAL:
            raise ValueError(f"backend: must be one of {list(_NAMES)} or a backend object, got {spec!r}")
        return _load(spec)
    if isinstance(spec, type) or not isinstance(spec, Backend):
        raise TypeError(f"backend: must be one of {list(_NAMES)} or a backend object, got {spec!r}")
    return spec


def _load(name: str) -> Backend:
    try:
        interrupts.import_whole(name)
    except ImportError as error:
        raise MissingExtraError(
            f'backend {name!r}: needs {name}; run pip install "recollect[{name}]"'
        ) from error
    make: Callable[[], Backend] = getattr(import_module(f"recollect.backends.{name}"), _OPTIONAL[name])
    return make()


def backend_of(x: object) -> Backend:
    """Return the backend whose array `x` is; TypeError if it is none of any that is loaded."""
    found = find_backend(x)
    if found is None:
        raise TypeError(f"value: must be an array of numpy, torch or jax, got {type(x).__name__}")
    return found


def find_backend(x: object) -> Backend | None:
    """Return the backend whose array `x` is, or None; imports no library that is not loaded."""
    if _NUMPY.is_array(x):
        return _NUMPY
    if not hasattr(x, "__dlpack__"):
        return None
    loaded = (_load(name) for name in _OPTIONAL if sys.modules.get(name) is not None)
    return next((backend for backend in loaded if backend.is_array(x)), None)
