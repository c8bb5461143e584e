"""Read an array of any backend as numpy, without importing that backend."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from recollect.spaces.dtypes import dtype_from

TORCH_BY_BITS = ("bfloat16", "float8")  # dtypes that torch and numpy exchange only by their bits


def is_arraylike(x: object) -> bool:
    """Tell whether `x` is an array of some backend or a numpy scalar."""
    return isinstance(x, np.ndarray | np.generic) or hasattr(x, "__dlpack__") or hasattr(x, "__array__")


def as_numpy(x: Any) -> np.ndarray[Any, Any]:
    """Return `x` as a numpy array.

    Ownership: shares memory with `x` where the backend allows it; treat the result as read-only.
    """
    if isinstance(x, np.ndarray):
        return x
    if hasattr(x, "detach"):
        return _torch_as_numpy(x)
    if hasattr(x, "__dlpack__") and not hasattr(x, "__array__"):
        return np.from_dlpack(x)
    return np.asarray(x)


def _torch_as_numpy(x: Any) -> np.ndarray[Any, Any]:
    tensor = x.detach().cpu().resolve_conj().resolve_neg()
    name = str(tensor.dtype).removeprefix("torch.")
    if not name.startswith(TORCH_BY_BITS):
        return np.asarray(tensor.numpy())
    # torch cannot hand these to numpy, but it can reinterpret their bits. It is loaded, since x exists.
    torch = sys.modules["torch"]
    bits = tensor.view(torch.uint8 if tensor.element_size() == 1 else torch.int16).numpy()
    return np.asarray(bits.view(dtype_from(name, "tensor")))
