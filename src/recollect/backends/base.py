"""Backend: how arrays of one library come in and go out; numpy is what is inside."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import numpy as np


@runtime_checkable
class Backend(Protocol):
    """Arrays of one library to and from numpy, and the devices they live on.

    Ownership: both conversions share memory where the library can. Pass `from_numpy` an array that nobody
    else writes to, and treat what `to_numpy` returns as read-only.
    """

    @property
    def name(self) -> str:
        """The short name, as `get_backend` takes it."""

    @property
    def default_device(self) -> Any:
        """Where `from_numpy` puts an array when no device is named."""

    def as_device(self, device: Any) -> Any:
        """Return the backend's device for a string or device (None: the default), or ValueError."""

    def from_numpy(self, array: Any, device: Any = None) -> Any:
        """Return a numpy array or scalar as this backend's array, on `device`."""

    def to_numpy(self, x: Any) -> np.ndarray[Any, Any]:
        """Return this backend's array as numpy."""

    def is_array(self, x: object) -> bool:
        """Tell whether `x` is an array of this backend."""

    def device_of(self, x: Any) -> Any:
        """Return the device that an array of this backend is on."""

    def same_device(self, a: Any, b: Any) -> bool:
        """Tell whether two devices, each in any form that `as_device` takes, are one."""

    def to_device(self, x: Any, device: Any) -> Any:
        """Return this backend's array on `device`; itself if it is there already."""
