"""jax: immutable arrays; 64-bit leaves need jax's 64-bit mode and are never narrowed."""

from __future__ import annotations

import copyreg
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from recollect.spaces.arrays import as_numpy
from recollect.spaces.dtypes import native


@dataclass(frozen=True, slots=True)
class JaxBackend:
    """jax arrays.

    Ownership: on the CPU jax may share the memory of a numpy array (when it is aligned to 64 bytes) and takes
    it for immutable: nobody may write to an array given to `from_numpy` afterwards.
    """

    @property
    def name(self) -> str:
        """`"jax"`."""
        return "jax"

    @property
    def default_device(self) -> Any:
        """The device on which jax puts arrays by itself."""
        chosen = jax.config.jax_default_device
        return jax.devices()[0] if chosen is None else self.as_device(chosen)

    def as_device(self, device: Any) -> Any:
        """Return the jax.Device that a device or a string such as "cpu" or "gpu:1" means."""
        if device is None:
            return self.default_device
        if not isinstance(device, str):
            if isinstance(device, jax.Device):
                return device
            raise ValueError(f"device: must be a jax.Device or a string, got {device!r}")
        platform, _, number = device.partition(":")
        try:
            return jax.devices(platform)[int(number or 0)]
        except (RuntimeError, ValueError, IndexError) as error:
            raise ValueError(f"device: must be one of {jax.devices()}, got {device!r}") from error

    def from_numpy(self, array: Any, device: Any = None) -> Any:
        """Return `array` as a jax array; ValueError if jax would narrow its dtype."""
        array = np.asarray(array)
        array = array if array.dtype.isnative else array.astype(native(array.dtype))
        narrowed = jax.dtypes.canonicalize_dtype(array.dtype)
        if narrowed != array.dtype:
            raise ValueError(
                f"dtype: must be one that jax keeps, got {array.dtype}, which it would make {narrowed}; "
                'call jax.config.update("jax_enable_x64", True), or record 32 bits: gymnasium.spaces.Discrete(n, '
                "dtype=np.int32)"
            )
        return jax.device_put(array, self.as_device(device))

    def to_numpy(self, x: Any) -> np.ndarray[Any, Any]:
        """Return a jax array as numpy (read-only)."""
        return as_numpy(x)

    def is_array(self, x: object) -> bool:
        """Tell whether `x` is a jax array."""
        return isinstance(x, jax.Array)

    def device_of(self, x: Any) -> Any:
        """Return the array's jax.Device, or its Sharding if it lies on several."""
        return x.device

    def same_device(self, a: Any, b: Any) -> bool:
        """Tell whether two devices are one."""
        return bool(self.as_device(a) == self.as_device(b))

    def to_device(self, x: Any, device: Any) -> Any:
        """Return the array on `device`."""
        return jax.device_put(x, self.as_device(device))


def _reduced(device: Any) -> Any:
    return _device, (device.platform, jax.devices(device.platform).index(device))


def _device(platform: str, number: int) -> Any:
    return jax.devices(platform)[number]


# jax does not say how a device is pickled, and whatever is read on one goes to worker processes.
copyreg.pickle(jax.Device, _reduced)
