"""numpy: the backend that is inside everything."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from recollect.spaces.arrays import as_numpy


@dataclass(frozen=True, slots=True)
class NumpyBackend:
    """numpy arrays and scalars, on the only device there is, "cpu"."""

    @property
    def name(self) -> str:
        """`"numpy"`."""
        return "numpy"

    @property
    def default_device(self) -> str:
        """`"cpu"`."""
        return "cpu"

    def as_device(self, device: Any) -> str:
        """Return "cpu"; any other device is a ValueError."""
        if device is None or str(device) == "cpu":
            return "cpu"
        raise ValueError(f"device: must be 'cpu' for numpy, got {device!r}; choose backend='torch' or 'jax'")

    def from_numpy(self, array: Any, device: Any = None) -> Any:
        """Return `array` as it is."""
        self.as_device(device)
        return array

    def to_numpy(self, x: Any) -> np.ndarray[Any, Any]:
        """Return `x` as an array."""
        return as_numpy(x)

    def is_array(self, x: object) -> bool:
        """Tell whether `x` is a numpy array or scalar (a numpy string is text, not an array)."""
        return isinstance(x, np.ndarray | np.generic) and not isinstance(x, str | bytes)

    def device_of(self, x: Any) -> str:
        """Return "cpu"."""
        return "cpu"

    def same_device(self, a: Any, b: Any) -> bool:
        """Tell whether both are "cpu" (anything else is a ValueError)."""
        return self.as_device(a) == self.as_device(b)

    def to_device(self, x: Any, device: Any) -> Any:
        """Return `x`."""
        self.as_device(device)
        return x
