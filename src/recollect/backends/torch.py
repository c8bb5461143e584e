"""torch: tensors that share memory with numpy on the CPU, and copies on other devices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from recollect.spaces.arrays import TORCH_BY_BITS, as_numpy
from recollect.spaces.dtypes import is_extended, native


@dataclass(frozen=True, slots=True)
class TorchBackend:
    """torch tensors.

    Ownership: a CPU tensor from `from_numpy` shares the array's memory, and torch writes to it whatever its
    flags say; so read-only arrays are copied.
    """

    @property
    def name(self) -> str:
        """`"torch"`."""
        return "torch"

    @property
    def default_device(self) -> Any:
        """The CPU, whatever torch's own default: moving a batch is asked for by name."""
        return torch.device("cpu")

    def as_device(self, device: Any) -> Any:
        """Return the torch.device that a string or device means, with its number."""
        if device is None:
            return self.default_device
        try:
            found = torch.device(device)
        except (RuntimeError, TypeError) as error:
            raise ValueError(f"device: must be one that torch knows, got {device!r}: {error}") from error
        if found.type == "cuda" and not torch.cuda.is_available():
            raise ValueError(
                f"device: must be one that torch has here, got {device!r} without CUDA; use 'cpu'"
            )
        if found.index is None and found.type == "cuda":
            return torch.device("cuda", torch.cuda.current_device())
        return found

    def from_numpy(self, array: Any, device: Any = None) -> Any:
        """Return `array` as a tensor that shares its memory if it stays on the CPU."""
        tensor = _tensor_of(np.asarray(array))
        return tensor if device is None else self.to_device(tensor, device)

    def to_numpy(self, x: Any) -> np.ndarray[Any, Any]:
        """Return a tensor as numpy, detached and on the CPU."""
        return as_numpy(x)

    def is_array(self, x: object) -> bool:
        """Tell whether `x` is a tensor."""
        return isinstance(x, torch.Tensor)

    def device_of(self, x: Any) -> Any:
        """Return the tensor's torch.device."""
        return x.device

    def same_device(self, a: Any, b: Any) -> bool:
        """Tell whether two devices are one; "cuda" is the current one."""
        return bool(self.as_device(a) == self.as_device(b))

    def to_device(self, x: Any, device: Any) -> Any:
        """Return the tensor on `device`."""
        return x.to(self.as_device(device))


def _tensor_of(array: np.ndarray[Any, Any]) -> Any:
    # from_numpy takes neither foreign byte order nor negative strides, and warns of read-only memory.
    if not array.dtype.isnative:
        array = array.astype(native(array.dtype))
    if not array.flags.writeable or any(stride < 0 for stride in array.strides):
        array = array.copy()
    if not is_extended(array.dtype):
        return torch.from_numpy(array)
    name = array.dtype.name
    if not name.startswith(TORCH_BY_BITS) or not hasattr(torch, name):
        raise ValueError(f"dtype: must be one that torch has, got {name}; read it with backend='numpy'")
    bits = array.view(np.int16 if array.dtype.itemsize == 2 else np.uint8)
    return torch.from_numpy(bits).view(getattr(torch, name))
