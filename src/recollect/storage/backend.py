"""ToBackendOrDeviceStorage: torch or JAX outside, numpy inside."""

from __future__ import annotations

from typing import Any, Self

from recollect.backends import Backend, get_backend, move
from recollect.spaces import Layout
from recollect.storage.base import PathName, Segments, SpaceStorage
from recollect.storage.registry import find_storage


class ToBackendOrDeviceStorage(SpaceStorage):
    """Another storage, read as arrays of a backend on a device; arrays of any backend are written.

    Ownership: owns `inner`, and closes it.
    Concurrency: as `inner`.
    """

    short_name = "backend"

    def __init__(self, inner: SpaceStorage, backend: str | Backend | None = None, device: Any = None) -> None:
        super().__init__(inner.single_instance_space)
        self.inner, self._backend = inner, get_backend(backend)
        self._device = self._backend.default_device if device is None else self._backend.as_device(device)
        self.capacity, self.cache_filename = inner.capacity, inner.cache_filename
        self.is_multiprocessing_safe, self.is_mutable = inner.is_multiprocessing_safe, inner.is_mutable

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

    def __len__(self) -> int:
        return len(self.inner)

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

    def extend_length(self, length: int) -> None:
        self.inner.extend_length(length)

    def shrink_length(self, length: int) -> None:
        self.inner.shrink_length(length)

    def clear(self) -> None:
        self.inner.clear()

    def mark_segment_start(self, row: int) -> None:
        self.inner.mark_segment_start(row)

    def mark_segment_end(self) -> None:
        self.inner.mark_segment_end()

    def abort_segment(self) -> None:
        self.inner.abort_segment()

    @property
    def has_open_segment(self) -> bool:
        return self.inner.has_open_segment

    @property
    def pending_segment_length(self) -> int:
        return self.inner.pending_segment_length

    def get_segments(self) -> Segments | None:
        return self.inner.get_segments()

    def dumps(self, path: PathName) -> None:
        self.inner.dumps(path)

    def close(self) -> None:
        self.inner.close()

    def __reduce__(self) -> Any:
        if not self.is_multiprocessing_safe:
            return super().__reduce__()
        return type(self), (self.inner, self._backend.name, str(self._device))
