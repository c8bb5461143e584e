"""SpaceStorage: physical rows of one space. The contract that every storage keeps.

A storage knows no ring order, no sampler and no priority: rows have numbers, reads and writes copy. What order the
rows mean is the replay buffer's business.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from os import PathLike
from pathlib import Path
from typing import Any, ClassVar, Self

from gymnasium import Space

from recollect.backends import Backend, get_backend
from recollect.errors import ReadOnlyError
from recollect.spaces import Layout, as_numpy, as_space, compile_layout
from recollect.spaces.tree import as_keys

PathName = str | PathLike[str]
Segments = list[tuple[int, int]]


class SpaceStorage(ABC):
    """Where rows live. A subclass must give `get`, `set` and `dumps`.

    To be made and opened by a ReplayBuffer it gives `create` and `load_from` too; without a capacity, `__len__`.

    Ownership: what `get` returns is the caller's; what `set` and `append` take is copied before they return.
    Concurrency: as the subclass says; `is_multiprocessing_safe` ones pickle to a small handle.
    """

    short_name: ClassVar[str] = ""
    create_options: ClassVar[tuple[str, ...] | None] = None  # what `create` takes of its own; None: anything
    single_file_ext: ClassVar[str | None] = None
    capacity: int | None = None
    cache_filename: str | None = None
    is_multiprocessing_safe: bool = False
    is_mutable: bool = True
    cast: bool = False  # whether values may be cast within a kind
    is_append_only: bool = False  # rows are added at the end, and never changed or removed
    is_cut_by_segment: bool = (
        False  # rows of an open segment cannot be read, so segments must be ended in place
    )
    commits_from: int = 0  # see `recollect.storage.filed.commits`: what brings a commit about

    def __init__(self, single_instance_space: Any) -> None:
        """Bind the storage to the space of one row."""
        self.single_instance_space: Space[Any] = as_space(single_instance_space)

    @classmethod
    def create(
        cls,
        single_instance_space: Any,
        *args: Any,
        capacity: int | None,
        cache_path: PathName | None = None,
        multiprocessing: bool = False,
        **kwargs: Any,
    ) -> Self:
        """Make a new storage for samples of a space; `capacity=None` is unbounded."""
        raise NotImplementedError(f"{cls.__name__}: must have its own create to be made by a ReplayBuffer")

    @classmethod
    def load_from(
        cls,
        path: PathName,
        single_instance_space: Any,
        *,
        capacity: int | None = None,
        read_only: bool = True,
        multiprocessing: bool = False,
        **kwargs: Any,
    ) -> Self:
        """Open what `dumps` wrote; another space or capacity than the stored one is a ValueError."""
        raise NotImplementedError(f"{cls.__name__}: must have its own load_from to be opened again")

    @abstractmethod
    def get(self, index: Any) -> Any:
        """Read rows, by any index of the contract."""

    @abstractmethod
    def set(self, index: Any, value: Any) -> None:
        """Overwrite rows; of duplicate indices the last value wins."""

    @abstractmethod
    def dumps(self, path: PathName) -> None:
        """Write the live rows to a directory, crash-safe."""

    def __len__(self) -> int:
        """The capacity, or the rows there are when unbounded, which a subclass must say itself."""
        if self.capacity is None:
            raise NotImplementedError(
                f"{type(self).__name__}: must have its own __len__ while it is unbounded"
            )
        return self.capacity

    @property
    def layout(self) -> Layout:
        """The packed form of one row (cached by content)."""
        return compile_layout(self.single_instance_space)

    @property
    def backend(self) -> Backend:
        """The backend whose arrays `get` returns."""
        return get_backend(None)

    @property
    def device(self) -> Any:
        """Where those arrays are."""
        return self.backend.default_device

    # -- derived forms

    def get_flattened(self, index: Any) -> Any:
        """Read rows as vectors, `(D,)` or `(n, D)`."""
        from recollect.indexing import normalize

        found = normalize(index, len(self))
        data = self.get(found)
        return self.layout.flatten_one(data) if isinstance(found, int) else self.layout.flatten_batch(data)

    def set_flattened(self, index: Any, value: Any) -> None:
        """Overwrite rows, given as vectors."""
        flat = as_numpy(value)
        self.set(
            index, self.layout.unflatten_one(flat) if flat.ndim == 1 else self.layout.unflatten_batch(flat)
        )

    def get_column(self, nested_keys: Any, index: Any) -> Any:
        """Read one nested field of some rows."""
        data = self.get(index)
        for key in as_keys(nested_keys):
            data = data[key]
        return data

    # -- values, checked whole before anything changes

    def checked_one(self, value: Any) -> Any:
        """Return one sample as a block of one; SchemaError if it does not fit the space."""
        return self.layout.decode_batch([a[None] for a in self.layout.encode_one(value, self.cast)], 1)

    def checked_batch(self, value: Any) -> tuple[int, Any]:
        """Return how many samples a block has, and the block; SchemaError if it does not fit the space."""
        n, arrays = self.layout.encode_batch(value, self.cast)
        return n, self.layout.decode_batch(arrays, n)

    # -- chunks: what a reader fetches whole

    def chunk_ends(self) -> Any:
        """The row after the last of each chunk, ascending; None where single rows cost the same as neighbours."""
        return None

    def chunk_window(self) -> int:
        """How many chunks can be held at once, so that a shuffled pass reads each of them once."""
        return 1

    def expect(self, rows: Any, nested_keys: Any = ()) -> None:
        """Take note that all chunks of these rows, or one nested field of them, are read soon."""

    # -- the end of an unbounded storage

    def extend_length(self, length: int) -> None:
        """Move an unbounded storage's end by `length` rows; a fixed one ignores it."""
        if self.capacity is None:
            raise NotImplementedError(
                f"{type(self).__name__}: an unbounded storage must define extend_length"
            )

    def shrink_length(self, length: int) -> None:
        """Take the last `length` rows off an unbounded storage; a fixed one ignores it."""
        if self.capacity is None:
            raise NotImplementedError(
                f"{type(self).__name__}: an unbounded storage must define shrink_length"
            )

    def cut_to(self, length: int) -> None:
        """Take off an unbounded storage what it has beyond its first `length` rows, written or not."""
        more = len(self) + self.pending_segment_length - length
        if more > 0:
            self.shrink_length(more)

    def clear(self) -> None:
        """Drop all rows and any open segment."""
        if self.capacity is None:
            self.shrink_length(len(self))

    # -- segments; a storage that keeps none has the defaults

    def append(self, value: Any) -> None:
        """Write one sample at the storage's own cursor."""
        raise self._read_only("append")

    def mark_segment_start(self, row: int) -> None:
        """Say that the open segment begins at this row."""

    def mark_segment_end(self) -> None:
        """Close the open segment; none: nothing happens."""

    def prepare_segment_end(self) -> None:
        """Do what may fail of `mark_segment_end`, for one of several storages that end it together."""

    def cancel_segment_end(self) -> None:
        """Take back what `prepare_segment_end` did."""

    def finish_segment_end(self) -> None:
        """End the segment that was prepared; cannot fail."""

    def abort_segment(self) -> None:
        """Drop the rows of the open segment that are not visible yet."""

    @property
    def has_open_segment(self) -> bool:
        """Whether a segment is open."""
        return False

    @property
    def pending_segment_length(self) -> int:
        """How many rows of the open segment are not visible yet."""
        return 0

    def get_segments(self) -> Segments | None:
        """Half-open pairs of rows, or None when this storage knows no boundaries."""
        return None

    # -- files: how a storage takes part in the commits and dumps of the outermost one

    def describe(self) -> dict[str, Any]:
        """What a manifest says of this storage: its short name, options and inner storages."""
        return {"name": self.short_name, "options": {}, "children": {}}

    def stored_length(self) -> int:
        """How many rows the files hold, which a commit names."""
        return len(self)

    def write_out(self, urgency: int) -> None:
        """Write pending rows to files, before a commit names them."""

    def checks_reads(self) -> bool:
        """Whether a read of damaged files raises, and never returns other values than were written."""
        return False

    def more_files(self) -> dict[str, dict[str, Any]]:
        """Files that this storage's own files name, not the manifest: their sizes and checksums by name."""
        return {}

    def save_parts(self, path: Path) -> None:
        """Write the live rows below a directory of a dump."""
        self.dumps(path)

    def settle(self) -> None:
        """Make the commit that the last writes brought about; called when their owner has counted them."""

    def flush(self) -> None:
        """Commit all that was written, for storages that have files; the others have nothing to commit."""

    # -- life

    def close(self) -> None:
        """Give up what this object holds; may be called twice."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __reduce__(self) -> Any:
        raise TypeError(
            f"{type(self).__name__}: cannot be sent to another process; use SharedMemoryStorage, "
            "or load it with multiprocessing=True"
        )

    def _read_only(self, verb: str) -> ReadOnlyError:
        return ReadOnlyError(
            f"{type(self).__name__}: cannot {verb}; copy what you keep into another buffer with extend_from()"
        )
