"""DictStorage: a storage per key path, for example video for images and Parquet for the rest."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self
from urllib.parse import quote

import numpy as np
from gymnasium import spaces

from recollect.errors import FormatError, SchemaError
from recollect.indexing import normalize
from recollect.spaces import Layout, as_space, compile_layout, space_at
from recollect.spaces.tree import as_keys, children, path_name
from recollect.storage.base import PathName, Segments, SpaceStorage
from recollect.storage.dump import read_manifest
from recollect.storage.files import FiledStorage, Ints, check_capacity, checked_space, make_live, reopen_child
from recollect.storage.live import FORMATS, SEGMENT, Live, dump_storage
from recollect.storage.patterns import Part, divide
from recollect.storage.registry import find_storage, find_stored


class DictStorage(FiledStorage):
    """One storage for each pattern of `{"obs/image": (VideoStorage, {"codec": "h264"}), "*": ParquetStorage}`.

    `a/*` is the rest under `a`, `*` the rest; the most exact pattern wins. Rows are the same in all children: if one
    of them fails, all go back to where they were, and one commit is for all.

    Ownership: owns its children, and closes them.
    Concurrency: what all children allow.

    >>> import recollect as rc
    >>> space = {"obs": ((2,), "float32"), "reward": ((), "float32")}
    >>> storage = rc.DictStorage.create(space, {"obs": "memory", "*": "memory"}, capacity=4)
    >>> storage.set(0, {"obs": [1.0, 2.0], "reward": 3.0})
    >>> storage.get(0)["reward"].item()
    3.0
    """

    short_name = "dict"

    def __init__(
        self, space: Any, parts: list[Part], storages: list[SpaceStorage], live: Live | None
    ) -> None:
        """Join storages whose spaces are those of the parts."""
        super().__init__(space)
        self.parts, self.storages = parts, storages
        capacities = {storage.capacity for storage in storages}
        if len(capacities) != 1:
            raise ValueError(f"capacity: must be equal in all storages, got {capacities}")
        (self.capacity,) = capacities
        self.live = live
        self.cache_filename = None if live is None else str(live.home.path)
        self.is_mutable = all(s.is_mutable for s in storages)
        self.is_multiprocessing_safe = all(s.is_multiprocessing_safe for s in storages)
        self.is_append_only = any(s.is_append_only for s in storages)
        self.is_cut_by_segment = any(s.is_cut_by_segment for s in storages)
        self.commits_from = max(s.commits_from for s in storages)
        self._cursor = 0

    # -- making

    @classmethod
    def create(
        cls,
        single_instance_space: Any,
        storages: Any = None,
        *args: Any,
        capacity: int | None = None,
        cache_path: PathName | None = None,
        multiprocessing: bool = False,
        overwrite: bool = False,
        owned: bool = False,
        **options: Any,
    ) -> Self:
        """Make a storage for each pattern of `storages`: a class, a short name, or one of them and its keywords."""
        if args:
            raise TypeError(f"{cls.__name__}.create: takes the storages after the space, got {args!r} too")
        if multiprocessing and cache_path is not None:
            raise ValueError(
                f"multiprocessing: {cls.__name__} in files has one writer; use SharedMemoryStorage"
            )
        if cache_path is not None:
            made: Self = make_live(
                cls,
                single_instance_space,
                capacity,
                cache_path,
                overwrite,
                owned,
                storages=storages,
                **options,
            )
            return made
        space = as_space(single_instance_space)
        parts = divide(space, storages)
        inner: list[SpaceStorage] = []
        try:
            for part in parts:
                child, more = _chosen(storages[part.pattern])
                inner.append(
                    child.create(
                        part.space, capacity=capacity, multiprocessing=multiprocessing, **{**options, **more}
                    )
                )
            return cls(space, parts, inner, None)
        except BaseException:
            for storage in inner:
                storage.close()
            raise

    @classmethod
    def under(cls, live: Live, prefix: str, space: Any, capacity: int | None, *, storages: Any = None,
              **options: Any) -> Self:  # fmt: skip
        parts = divide(as_space(space), storages)
        inner: list[SpaceStorage] = []
        for number, part in enumerate(parts):
            child, more = _chosen(storages[part.pattern])
            if not issubclass(child, FiledStorage):
                raise ValueError(
                    f"storages: {child.__name__} for {part.pattern!r} must keep files below a cache_path, got one that "
                    "does not; leave out cache_path and use dumps(path)"
                )
            check_capacity(child, capacity)
            child.need()
            below = prefix + _directory(number, part) + "/"
            inner.append(child.under(live, below, part.space, capacity, **{**options, **more}))
        return cls(space, parts, inner, live)

    @classmethod
    def reopen(cls, live: Live, prefix: str, saved: dict[str, Any], space: Any, capacity: int | None,
               length: int, **options: Any) -> Self:  # fmt: skip
        parts = _saved_parts(live.home.path, saved, space)
        inner: list[SpaceStorage] = [
            reopen_child(live, prefix + child["path"] + "/", child, part.space, capacity, length)
            for part, child in zip(parts, saved["children"].values())
        ]
        storage = cls(space, parts, inner, live)
        if len({len(s) for s in inner}) > 1:
            raise FormatError(
                f"{live.home.path}: all children must have as many rows, got {[len(s) for s in inner]}"
            )
        return storage

    @classmethod
    def load_from(
        cls,
        path: PathName,
        single_instance_space: Any,
        *,
        capacity: int | None = None,
        read_only: bool = True,
        multiprocessing: bool = False,
        verify: bool = False,
        **options: Any,
    ) -> Self:
        """Open what `dumps` wrote, or a directory at its last commit."""
        path = Path(path)
        manifest = read_manifest(path, FORMATS)
        if manifest["storage"]["name"] == cls.short_name and _is_in_parts(manifest["storage"]):
            space = checked_space(path, manifest, single_instance_space, capacity)
            return cls._over_parts(path, manifest, space, read_only=read_only, verify=verify, **options)
        return super().load_from(
            path, single_instance_space, capacity=capacity, read_only=read_only, multiprocessing=multiprocessing,
            verify=verify, **options,
        )  # fmt: skip

    @classmethod
    def from_manifest(
        cls,
        path: Path,
        manifest: dict[str, Any],
        space: Any,
        *,
        read_only: bool,
        verify: bool,
        **options: Any,
    ) -> Self:
        if _is_in_parts(manifest["storage"]):
            return cls._over_parts(path, manifest, space, read_only=read_only, verify=verify, **options)
        return super().from_manifest(path, manifest, space, read_only=read_only, verify=verify, **options)

    @classmethod
    def _over_parts(cls, path: Path, manifest: dict[str, Any], space: Any, **options: Any) -> Self:
        """Load children that were dumped as directories of their own."""
        saved = manifest["storage"]
        parts = _saved_parts(path, saved, space)
        base, inner = path / manifest["storage_path_relative"], []
        for part, child in zip(parts, saved["children"].values()):
            inner.append(
                find_stored(child["name"], str(path)).load_from(base / child["path"], part.space, **options)
            )
        return cls(space, parts, inner, None)

    # -- files

    def describe(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for number, (part, storage) in enumerate(zip(self.parts, self.storages)):
            below = (
                storage.describe() if self.live is not None else {"name": storage.short_name, "parts": True}
            )
            found[part.pattern] = {"options": {}, "children": {}, **below, "path": _directory(number, part)}
        # JSON sorts keys; the order of the patterns is part of what they mean to the directories.
        order = [part.pattern for part in self.parts]
        return {"name": self.short_name, "options": {"order": order}, "children": found}

    def save_parts(self, path: Path) -> None:
        for number, (part, storage) in enumerate(zip(self.parts, self.storages)):
            storage.dumps(path / _directory(number, part))

    def stored_length(self) -> int:
        return min(storage.stored_length() for storage in self.storages)

    def write_out(self, urgency: int) -> None:
        for storage in self.storages:
            storage.write_out(urgency)

    def more_files(self) -> list[str]:
        return [name for storage in self.storages for name in storage.more_files()]

    def verify(self) -> None:
        for storage in self.storages:
            if isinstance(storage, FiledStorage):
                storage.verify()

    def dumps(self, path: PathName) -> None:
        self._check_open()
        dump_storage(self, path)

    # -- rows

    @property
    def layout(self) -> Layout:
        most: dict[str, int] = {}
        for part, storage in zip(self.parts, self.storages):
            for name, n in storage.layout.max_lengths.items():
                most[part.whole_name(name)] = n
        return compile_layout(self.single_instance_space, most)

    def __len__(self) -> int:
        return min(len(storage) for storage in self.storages)

    def _extent(self) -> int:
        """All rows, those of an open segment that cannot be read yet included."""
        return min(len(s) + s.pending_segment_length for s in self.storages)

    def _joined(self, blocks: list[Any]) -> Any:
        leaves: dict[Any, Any] = {}
        for part, block in zip(self.parts, blocks):
            leaves |= part.leaves(block)
        return _build(self.single_instance_space, (), leaves)

    def get(self, index: Any) -> Any:
        self._check_open()
        try:
            found = normalize(index, len(self))
        except IndexError:
            for storage in self.storages:
                storage.get(index)  # one of them may say more: that a segment is open
            raise
        return self._joined([storage.get(found) for storage in self.storages])

    def get_column(self, nested_keys: Any, index: Any) -> Any:
        """Read one nested field, from its own storage only if it is there alone."""
        keys = as_keys(nested_keys)
        space_at(self.single_instance_space, keys)
        for part, storage in zip(self.parts, self.storages):
            inside = [path for path in part.paths if path[: len(keys)] == keys]
            if part.node is not None and keys[: len(part.node)] == part.node:
                return storage.get_column(keys[len(part.node) :], normalize(index, len(self)))
            if part.node is None and inside == [keys]:
                return storage.get_column(path_name(keys), normalize(index, len(self)))
        return super().get_column(keys, index)

    def checked_one(self, value: Any) -> Any:
        self._check_shape(value)
        return self._joined([s.checked_one(p.pick(value)) for p, s in zip(self.parts, self.storages)])

    def checked_batch(self, value: Any) -> tuple[int, Any]:
        self._check_shape(value)
        found = [s.checked_batch(p.pick(value)) for p, s in zip(self.parts, self.storages)]
        if len({n for n, _ in found}) != 1:
            raise SchemaError(
                f"value: all leaves must have one length, got {[n for n, _ in found]}; give one each"
            )
        return found[0][0], self._joined([block for _, block in found])

    def _check_shape(self, value: Any) -> None:
        """SchemaError for keys that are missing or left over, before any child looks at its own."""
        from recollect.spaces.nested import compile_pick

        compile_pick(self.layout.template, ())(value, [])

    def set(self, index: Any, value: Any) -> None:
        self._check_mutable("set")
        found = normalize(index, self._extent())
        if isinstance(found, int):
            rows, block = np.array([found]), self.checked_one(value)
        else:
            rows = np.asarray(found)
            n, block = self.checked_batch(value)
            if n != len(rows):
                raise SchemaError(
                    f"value: length must equal the index's {len(rows)}, got {n}; give one sample each"
                )
        if len(rows):
            self._all(lambda s, k: s.set(rows, self.parts[k].pick(block)), lambda s: _undo_set(s, rows))

    def _all(self, do: Callable[[Any, int], Any], undo: Callable[[Any], Callable[[], Any]]) -> None:
        """Do something to every child; if one fails, undo it in those before."""
        done: list[Callable[[], Any]] = []
        owner = self.live.owner if self.live is not None else None
        if self.live is not None and owner is None:
            self.live.owner = _nobody  # a child must not commit before the last has written
        try:
            for number, storage in enumerate(self.storages):
                back = undo(storage)
                do(storage, number)
                done.append(back)
        except BaseException:
            for back in reversed(done):
                back()
            raise
        finally:
            if self.live is not None:
                self.live.owner = owner
        if self.live is not None and owner is None:
            self.live.settle()

    def append(self, value: Any) -> None:
        self._check_mutable("append")
        block = self.checked_one(value)
        row = self._cursor % self.capacity if self.capacity else self._extent()
        if self.capacity is None:
            self.extend_length(1)
        try:
            self.set([row], block)
        except BaseException:
            if self.capacity is None:
                self.shrink_length(1)
            raise
        self._cursor += 1

    def extend_length(self, length: int) -> None:
        if length < 0:
            raise ValueError(f"extend_length: must be at least 0, got {length}")
        self._all(
            lambda s, _: s.extend_length(length),
            lambda s: lambda: s.capacity is None and s.shrink_length(length),
        )

    def shrink_length(self, length: int) -> None:
        n = self._extent()
        if length < 0 or (self.capacity is None and length > n):
            raise ValueError(f"shrink_length: must be in [0, {n}], got {length}")
        for storage in self.storages:
            storage.shrink_length(length)

    def clear(self) -> None:
        self._check_mutable("clear")
        self._cursor = 0
        for storage in self.storages:
            storage.clear()

    # -- segments: first all files, which may fail, then the change in all

    def mark_segment_start(self, row: int) -> None:
        for storage in self.storages:
            storage.mark_segment_start(row)

    def mark_segment_end(self) -> None:
        self._check_mutable("mark_segment_end")
        try:
            for storage in self.storages:
                storage.prepare_segment_end()
        except BaseException:
            for storage in self.storages:
                storage.cancel_segment_end()
            raise
        for storage in self.storages:
            storage.finish_segment_end()
        if self.live is not None:
            self.live.due(SEGMENT)

    def abort_segment(self) -> None:
        pending = self.pending_segment_length
        for storage in self.storages:
            if storage.is_cut_by_segment:
                storage.abort_segment()
            elif pending:
                storage.shrink_length(pending)

    @property
    def has_open_segment(self) -> bool:
        return any(storage.has_open_segment for storage in self.storages if storage.is_cut_by_segment)

    @property
    def pending_segment_length(self) -> int:
        return self._extent() - len(self)

    def get_segments(self) -> Segments | None:
        found = (storage.get_segments() for storage in self.storages if storage.is_cut_by_segment)
        return next(found, None)

    # -- chunks: those of the child that has the fewest, so the dearest ones

    def _coarsest(self) -> SpaceStorage | None:
        found = [(len(s.chunk_ends()), k) for k, s in enumerate(self.storages) if s.chunk_ends() is not None]
        return self.storages[min(found)[1]] if found else None

    def chunk_ends(self) -> Any:
        storage = self._coarsest()
        return None if storage is None else _up_to(storage.chunk_ends(), len(self))

    def chunk_window(self) -> int:
        storage = self._coarsest()
        return 1 if storage is None else storage.chunk_window()

    def expect(self, rows: Any, nested_keys: Any = ()) -> None:
        for storage in () if nested_keys else self.storages:
            storage.expect(rows)

    def close(self) -> None:
        if self._closed:
            return
        try:
            if self.live is not None:
                self.live.close()
        finally:
            self._closed = True
            for storage in self.storages:
                storage.close()

    def __reduce__(self) -> Any:
        if self.live is not None or not self.is_multiprocessing_safe:
            return super().__reduce__()
        return type(self), (self.single_instance_space, self.parts, self.storages, None)


def _nobody(stored: int) -> dict[str, Any]:
    return {}


def _up_to(ends: Ints, n: int) -> Ints:
    """Ends of chunks that cover exactly `n` rows."""
    inside = ends[ends < n]
    return np.append(inside, n) if n else inside


def _undo_set(storage: SpaceStorage, rows: Ints) -> Callable[[], Any]:
    """What takes back a `set` of these rows: the old values, or in an unbounded storage the end moved and back."""
    if storage.is_append_only:
        return lambda: _refill(storage, len(rows))
    try:
        old = storage.get(rows)
    except FormatError:  # rows that were never written: nobody counts them
        return lambda: None
    return lambda: storage.set(rows, old)


def _refill(storage: SpaceStorage, n: int) -> None:
    storage.shrink_length(n)
    storage.extend_length(n)


def _build(space: Any, path: tuple[Any, ...], leaves: Mapping[Any, Any]) -> Any:
    if isinstance(space, spaces.Dict):
        return {key: _build(child, (*path, key), leaves) for key, child in children(space)}
    if isinstance(space, spaces.Tuple):
        return tuple([_build(child, (*path, key), leaves) for key, child in children(space)])
    return leaves[path]


def _chosen(spec: Any) -> tuple[type[SpaceStorage], dict[str, Any]]:
    """The class and keywords of one value of `storages`."""
    if isinstance(spec, tuple):
        if len(spec) != 2 or not isinstance(spec[1], Mapping):
            raise ValueError(f"storages: a value must be a storage or (storage, keywords), got {spec!r}")
        return find_storage(spec[0]), dict(spec[1])
    return find_storage(spec), {}


def _directory(number: int, part: Part) -> str:
    """A child's directory: its number, and its pattern for people to read."""
    return f"{number}-{quote(part.pattern.replace('/', '.'), safe='.').replace('%2A', 'rest')}"


def _is_in_parts(saved: dict[str, Any]) -> bool:
    return any(isinstance(child, dict) and child.get("parts") for child in saved.get("children", {}).values())


def _saved_parts(where: Path, saved: dict[str, Any], space: Any) -> list[Part]:
    """The parts of a manifest, whose children are put into their order."""
    try:
        order = saved["options"]["order"]
        saved["children"] = {pattern: saved["children"][pattern] for pattern in order}
        for child in saved["children"].values():
            if not isinstance(child["path"], str) or "/" in child["path"] or ".." in child["path"]:
                raise ValueError(f"path {child['path']!r}")
        return divide(space, saved["children"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise FormatError(f"{where}: its storages are garbled ({error!r}); it is damaged") from None
