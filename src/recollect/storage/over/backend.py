"""ToBackendOrDeviceStorage: torch or JAX outside, numpy inside."""

from __future__ import annotations

from typing import Any, Self

from recollect.backends import Backend, get_backend, move
from recollect.spaces import Layout
from recollect.storage.contract import PathName, SpaceStorage
from recollect.storage.over.base import ForwardingStorage
from recollect.storage.registry import find_storage


class ToBackendOrDeviceStorage(ForwardingStorage):
    """Another storage, read as arrays of a backend on a device; arrays of any backend are written.

    Ownership: owns `inner`, and closes it.
    Concurrency: as `inner`.
    """

    short_name = "backend"

    def __init__(self, inner: SpaceStorage, backend: str | Backend | None = None, device: Any = None) -> None:
        super().__init__(inner.single_instance_space)
        self._forward_to(inner)
        self._backend = get_backend(backend)
        self._device = self._backend.default_device if device is None else self._backend.as_device(device)

    @classmethod
    def create(
        cls,
        single_instance_space: Any,
        *args: Any,
        capacity: int | None,
        cache_path: PathName | None = None,
        multiprocessing: bool = False,
        inner: Any = "memory",
        backend: Any = None,
        device: Any = None,
        **kwargs: Any,
    ) -> Self:
        """Make the inner storage (`inner`: a class or short name) and wrap it."""
        made = find_storage(inner).create(
            single_instance_space,
            *args,
            capacity=capacity,
            cache_path=cache_path,
            multiprocessing=multiprocessing,
            **kwargs,
        )
        return cls(made, backend, device)

    @classmethod
    def load_from(
        cls,
        path: PathName,
        single_instance_space: Any,
        *,
        capacity: int | None = None,
        read_only: bool = True,
        multiprocessing: bool = False,
        inner: Any = "memory",
        backend: Any = None,
        device: Any = None,
        **kwargs: Any,
    ) -> Self:
        """Load the inner storage and wrap it."""
        loaded = find_storage(inner).load_from(
            path,
            single_instance_space,
            capacity=capacity,
            read_only=read_only,
            multiprocessing=multiprocessing,
            **kwargs,
        )
        return cls(loaded, backend, device)

    @property
    def layout(self) -> Layout:
        return self.inner.layout

    @property
    def backend(self) -> Backend:
        return self._backend

    @property
    def device(self) -> Any:
        return self._device

    def outward(self, data: Any) -> Any:
        """Numpy data as this storage's readers get it; the copy that came is handed over."""
        return move(data, self._backend, self._device)

    def get(self, index: Any) -> Any:
        return self.outward(self.inner.get(index))

    def get_flattened(self, index: Any) -> Any:
        return self.outward(self.inner.get_flattened(index))

    def get_column(self, nested_keys: Any, index: Any) -> Any:
        return self.outward(self.inner.get_column(nested_keys, index))

    def set(self, index: Any, value: Any) -> None:
        self.inner.set(index, value)

    def append(self, value: Any) -> None:
        self.inner.append(value)

    def dumps(self, path: PathName) -> None:
        self.inner.dumps(path)

    def __reduce__(self) -> Any:
        if not self.is_multiprocessing_safe:
            return super().__reduce__()
        return type(self), (self.inner, self._backend, self._device)
