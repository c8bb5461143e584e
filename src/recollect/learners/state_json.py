"""Nested state (dicts, lists, numbers, tensors, arrays) as JSON beside one block of raw bytes, and back.

Nothing is pickled: what JSON cannot say is named by a one-key object, `{"$tensor": {...}}`, `{"$tuple": [...]}` or
`{"$pairs": [...]}` for a dict whose keys are not plain text.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import numpy as np
import torch

from recollect.errors import FormatError

ALIGN = 64
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16,
        torch.int8, torch.uint8, torch.bool,
    )
}  # fmt: skip


class Encoder:
    """Collects the bytes of tensors while it turns state into JSON."""

    def __init__(self) -> None:
        self.blocks: list[Any] = []
        self.nbytes = 0

    def encode(self, value: Any, path: str = "state") -> Any:
        """Return `value` as JSON; TypeError naming the path of what cannot be saved."""
        if value is None or isinstance(value, bool | int | str):
            return value
        if isinstance(value, float):
            return value if np.isfinite(value) else {"$float": repr(value)}
        if isinstance(value, torch.Tensor):
            return self._tensor(value, "$tensor", path)
        if isinstance(value, np.ndarray):
            return self._tensor(
                torch.from_numpy(np.ascontiguousarray(value)).reshape(value.shape), "$array", path
            )
        if isinstance(value, Mapping):
            return self._mapping(value, path)
        if isinstance(value, tuple | list):
            items = [self.encode(x, f"{path}/{i}") for i, x in enumerate(value)]
            return items if isinstance(value, list) else {"$tuple": items}
        raise TypeError(f"{path}: must be numbers, text, tensors, dicts or lists, got {type(value).__name__}")

    def _mapping(self, value: Mapping[Any, Any], path: str) -> Any:
        if all(isinstance(key, str) and not key.startswith("$") for key in value):
            return {key: self.encode(x, f"{path}/{key}") for key, x in value.items()}
        return {"$pairs": [[self.encode(k, path), self.encode(x, f"{path}/{k}")] for k, x in value.items()]}

    def _tensor(self, x: Any, tag: str, path: str) -> Any:
        name = str(x.dtype).removeprefix("torch.")
        if name not in _DTYPES:
            raise TypeError(f"{path}: dtype must be one of {sorted(_DTYPES)}, got {x.dtype}")
        data = x.detach().cpu().contiguous()
        block = data.reshape(-1).view(torch.uint8).numpy() if data.numel() else np.empty(0, np.uint8)
        about = {"dtype": name, "shape": list(x.shape), "at": self.nbytes, "bytes": block.nbytes}
        padding = -block.nbytes % ALIGN
        self.blocks += [block, bytes(padding)]
        self.nbytes += block.nbytes + padding
        return {tag: about}


def decode(value: Any, data: Any) -> Any:
    """Return the state that `Encoder` turned into JSON, tensors copied out of the bytes `data`."""
    if isinstance(value, list):
        return [decode(x, data) for x in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        tag, body = next(iter(value.items()))
        if tag in ("$tensor", "$array"):
            tensor = _tensor(body, data)
            return tensor if tag == "$tensor" else tensor.numpy()
        if tag == "$float":
            return float(body)
        if tag == "$tuple":
            return tuple(decode(x, data) for x in body)
        if tag == "$pairs":
            return {decode(k, data): decode(x, data) for k, x in body}
    return {key: decode(x, data) for key, x in value.items()}


def _tensor(about: Any, data: Any) -> Any:
    try:
        dtype, shape = _DTYPES[about["dtype"]], [int(n) for n in about["shape"]]
        at, nbytes = int(about["at"]), int(about["bytes"])
        whole = prod(shape) * dtype.itemsize
        if min([0, at, *shape]) < 0 or whole != nbytes or at + nbytes > len(data):
            raise ValueError("its place is outside the file")
        block = np.array(data[at : at + nbytes], np.uint8)
        return (
            torch.from_numpy(block).view(dtype).reshape(shape) if nbytes else torch.empty(shape, dtype=dtype)
        )
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise FormatError(f"checkpoint: a tensor cannot be {about!r} ({error}); it is damaged") from None
