"""DictStorage: a storage per key path, for example video for images and Parquet for the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self
from urllib.parse import quote

import numpy as np
from gymnasium import Space, spaces

from recollect import checks, interrupts
from recollect.errors import FormatError, SchemaError, check_installed
from recollect.files import check_name
from recollect.files.record import damage_in
from recollect.indexing import normalize
from recollect.spaces import Layout, as_space, compile_layout, space_at
from recollect.spaces.tree import Path as Keys
from recollect.spaces.tree import as_keys, children, leaf_paths, make_dict, path_name
from recollect.storage.contract import PathName, Segments, SpaceStorage
from recollect.storage.filed.base import DirectoryStorage, Ints, check_capacity, open_part, reopen_child
from recollect.storage.filed.columns import sequence_names
from recollect.storage.filed.commits import SEGMENT, Commits
from recollect.storage.registry import find_storage, find_stored


class DictStorage(DirectoryStorage):
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
    positional = ("storages",)

    def __init__(
        self, space: Any, parts: list[DictPart], storages: list[SpaceStorage], commits: Commits | None
    ) -> None:
        """Join storages whose spaces are those of the parts."""
        super().__init__(space)
        self.parts, self.storages = parts, storages
        capacities = {storage.capacity for storage in storages}
        if len(capacities) != 1:
            raise ValueError(f"capacity: must be equal in all storages, got {capacities}")
        (self.capacity,) = capacities
        self.commits = commits
        self.cache_filename = None if commits is None else str(commits.directory.path)
        self.is_mutable = all(s.is_mutable for s in storages)
        self.is_multiprocessing_safe = all(s.is_multiprocessing_safe for s in storages)
        self.is_append_only = any(s.is_append_only for s in storages)
        self.is_cut_by_segment = any(s.is_cut_by_segment for s in storages)
        self.commits_from = max(s.commits_from for s in storages)
        self._cursor = 0

    # -- making

    @classmethod
    def is_filed(cls, cache_path: PathName | None, options: dict[str, Any]) -> bool:
        return cache_path is not None

    @classmethod
    def in_memory(cls, space: Any, capacity: int | None, cache_path: PathName | None, multiprocessing: bool,
                  *, storages: Any = None, **options: Any) -> Self:  # fmt: skip
        parts = divide(space, storages)
        _check_installed([_chosen(storages[part.pattern])[0] for part in parts])
        inner: list[SpaceStorage] = []
        try:
            for part, shared in zip(parts, _shared_out(options, parts)):
                child, more = _chosen(storages[part.pattern])
                more = {"capacity": capacity, "multiprocessing": multiprocessing, **shared, **more}
                inner.append(child.create(part.space, **more))
            return cls(space, parts, inner, None)
        except BaseException:
            for storage in inner:
                storage.close()
            raise

    @classmethod
    def under(cls, commits: Commits, prefix: str, space: Any, capacity: int | None, *, storages: Any = None,
              **options: Any) -> Self:  # fmt: skip
        parts = divide(as_space(space), storages)
        _check_installed([_chosen(storages[part.pattern])[0] for part in parts])
        inner: list[SpaceStorage] = []
        for number, (part, shared) in enumerate(zip(parts, _shared_out(options, parts))):
            child, more = _chosen(storages[part.pattern])
            if not issubclass(child, DirectoryStorage):
                raise ValueError(
                    f"storages: {child.__name__} for {part.pattern!r} must keep files below a cache_path, got one that "
                    "does not; leave out cache_path and use dumps(path)"
                )
            check_capacity(child, capacity)
            below = prefix + directory_of(number, part) + "/"
            inner.append(child.under(commits, below, part.space, capacity, **{**shared, **more}))
        return cls(space, parts, inner, commits)

    @classmethod
    def reopen(cls, commits: Commits, prefix: str, saved: dict[str, Any], space: Any, capacity: int | None,
               length: int, **options: Any) -> Self:  # fmt: skip
        parts = saved_parts(commits.directory.path, saved, space)
        _check_installed(
            [find_stored(child["name"], str(commits.directory.path)) for child in saved["children"].values()]
        )
        inner: list[SpaceStorage] = [
            reopen_child(commits, prefix + child["path"] + "/", child, part.space, capacity, length)
            for part, child in zip(parts, saved["children"].values())
        ]
        storage = cls(space, parts, inner, commits)
        if len({len(s) for s in inner}) > 1:
            raise FormatError(
                f"{commits.directory.path}: all children must have as many rows, got {[len(s) for s in inner]}"
            )
        return storage

    @classmethod
    def is_in_parts(cls, path: Path, saved: dict[str, Any]) -> bool:
        return any(isinstance(c, dict) and c.get("parts") for c in saved.get("children", {}).values())

    @classmethod
    def over_parts(cls, path: Path, manifest: dict[str, Any], space: Any, **options: Any) -> Self:
        saved = manifest["storage"]
        parts = saved_parts(path, saved, space)
        _check_installed([find_stored(child["name"], str(path)) for child in saved["children"].values()])
        base = manifest["storage_path_relative"]
        inner = [
            open_part(
                find_stored(child["name"], str(path)), path, f"{base}/{child['path']}", part.space, **options
            )
            for part, child in zip(parts, saved["children"].values())
        ]
        return cls(space, parts, inner, None)

    # -- files

    def describe(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for number, (part, storage) in enumerate(zip(self.parts, self.storages)):
            below = (
                storage.describe()
                if self.commits is not None
                else {"name": storage.short_name, "parts": True}
            )
            found[part.pattern] = {"options": {}, "children": {}, **below, "path": directory_of(number, part)}
        # JSON sorts keys; the order of the patterns is part of what they mean to the directories.
        order = [part.pattern for part in self.parts]
        return {"name": self.short_name, "options": {"order": order}, "children": found}

    def save_parts(self, path: Path) -> None:
        for number, (part, storage) in enumerate(zip(self.parts, self.storages)):
            storage.dumps(path / directory_of(number, part))

    def stored_length(self) -> int:
        return min(storage.stored_length() for storage in self.storages)

    def write_out(self, urgency: int) -> None:
        for storage in self.storages:
            storage.write_out(urgency)

    def more_files(self) -> dict[str, dict[str, Any]]:
        return {name: about for storage in self.storages for name, about in storage.more_files().items()}

    def checks_reads(self) -> bool:
        return all(storage.checks_reads() for storage in self.storages)

    def damages(self) -> Iterator[tuple[str, str]]:
        for storage in self.storages:
            if isinstance(storage, DirectoryStorage):
                yield from storage.damages()

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
        return join(self.single_instance_space, (), leaves)

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
            do_to_all(
                self.storages,
                self.commits,
                lambda s, k: s.set(rows, self.parts[k].pick(block)),
                lambda s: undo_set(s, rows),
            )

    def append(self, value: Any) -> None:
        self._check_mutable("append")
        block = self.checked_one(value)
        row = self._cursor % self.capacity if self.capacity else self._extent()
        if self.capacity is None:
            self.extend_length(1)
        try:
            self.set([row], block)
        except BaseException:
            with interrupts.deferred():
                if self.capacity is None:
                    self.shrink_length(1)
            raise
        self._cursor += 1

    def extend_length(self, length: int) -> None:
        checks.count("extend_length", length, 0)
        do_to_all(
            self.storages, self.commits, lambda s, _: s.extend_length(length),
            lambda s: lambda: s.capacity is None and s.shrink_length(length),
        )  # fmt: skip

    def shrink_length(self, length: int) -> None:
        n = self._extent()
        checks.count("shrink_length", length, 0, most=n if self.capacity is None else None)
        for storage in self.storages:
            storage.shrink_length(length)

    def cut_to(self, length: int) -> None:
        for storage in self.storages:  # an interrupt may have left them at different lengths
            storage.cut_to(length)

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
            with interrupts.deferred():
                for storage in self.storages:
                    storage.cancel_segment_end()
            raise
        for storage in self.storages:
            storage.finish_segment_end()
        if self.commits is not None:
            self.commits.due(SEGMENT)

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
        if self.commits is not None:
            self.commits.check_free()
        try:
            if self.commits is not None:
                self.commits.close()
        finally:
            self._closed = True
            for storage in self.storages:
                storage.close()

    def __reduce__(self) -> Any:
        if self.commits is not None or not self.is_multiprocessing_safe:
            return super().__reduce__()
        return type(self), (self.single_instance_space, self.parts, self.storages, None)


def _up_to(ends: Ints, n: int) -> Ints:
    """Ends of chunks that cover exactly `n` rows."""
    inside = ends[ends < n]
    return np.append(inside, n) if n else inside


def _shared_out(options: dict[str, Any], parts: list[DictPart]) -> list[dict[str, Any]]:
    """The keywords for each part: all have the same, but the greatest lengths of its own Sequences only."""
    most = dict(options.pop("max_lengths", None) or {})
    found = []
    for part in parts:
        names = {name: part.whole_name(name) for name in sequence_names(part.space)}
        own = {name: most.pop(whole) for name, whole in names.items() if whole in most}
        found.append({**options, **({"max_lengths": own} if own else {})})
    if most:
        raise ValueError(f"max_lengths: keys must be Sequence leaves of the space, got {sorted(most)}")
    return found


def _check_installed(children: list[type[SpaceStorage]]) -> None:
    """MissingExtraError for all children at once whose packages are not there."""
    pairs = [getattr(child, "requires", None) for child in children]
    check_installed("DictStorage", *dict.fromkeys(pair[0].split(".")[0] for pair in pairs if pair))


def _chosen(spec: Any) -> tuple[type[SpaceStorage], dict[str, Any]]:
    """The class and keywords of one value of `storages`."""
    if isinstance(spec, tuple):
        if len(spec) != 2 or not isinstance(spec[1], Mapping):
            raise ValueError(f"storages: a value must be a storage or (storage, keywords), got {spec!r}")
        return find_storage(spec[0]), dict(spec[1])
    return find_storage(spec), {}


REST = "*"


@dataclass(frozen=True, slots=True)
class DictPart:
    """The leaves of one child: a node of the space by itself, or several leaves as a flat Dict by name."""

    pattern: str
    paths: tuple[Keys, ...]
    node: Keys | None  # None: a flat Dict
    space: Space[Any]

    def pick(self, data: Any) -> Any:
        """Take the child's value out of a sample or block."""
        if self.node is not None:
            return _at(data, self.node)
        return {path_name(path): _at(data, path) for path in self.paths}

    def whole_name(self, name: str) -> str:
        """The name in the whole of what the child calls `name`."""
        if not self.node:
            return name
        return path_name(self.node) if name == "value" else f"{path_name(self.node)}/{name}"

    def leaves(self, data: Any) -> dict[Keys, Any]:
        """The child's leaves, by their path in the whole."""
        if self.node is None:
            return {path: data[path_name(path)] for path in self.paths}
        return {path: _at(data, path[len(self.node) :]) for path in self.paths}


def divide(space: Space[Any], patterns: Any) -> list[DictPart]:
    """Give each leaf to the most exact pattern; a leaf or a pattern left over raises ValueError."""
    if not patterns or not isinstance(patterns, Mapping):
        raise ValueError(
            f"storages: must be a dict of patterns, as {{'obs/image': VideoStorage, '*': …}}, got {patterns!r}"
        )
    paths = [path for path, _ in leaf_paths(space)]
    taken: dict[str, list[Keys]] = {pattern: [] for pattern in patterns}
    for path in paths:
        fitting = [pattern for pattern in patterns if _exactness(pattern, path) >= 0]
        if not fitting:
            raise ValueError(
                f"storages: {path_name(path)} must be in one of {list(patterns)}, got none; add '*'"
            )
        taken[max(fitting, key=lambda pattern: _exactness(pattern, path))].append(path)
    unused = [pattern for pattern, found in taken.items() if not found]
    if unused:
        names = [path_name(path) for path in paths]
        raise ValueError(
            f"storages: every pattern must fit a leaf of {names} that no other takes, got {unused}"
        )
    return [_part(space, pattern, tuple(found)) for pattern, found in taken.items()]


def _exactness(pattern: str, path: Keys) -> int:
    """How well a pattern fits a leaf, -1 if it does not: the deeper and the plainer, the better."""
    parts, names = pattern.split("/"), [str(key) for key in path]
    if pattern == path_name(path) or (parts[-1] != REST and names[: len(parts)] == parts):
        return 2 * len(parts) + 1
    if parts[-1] == REST and names[: len(parts) - 1] == parts[:-1] and len(names) >= len(parts):
        return 2 * (len(parts) - 1)
    return 0 if pattern == REST else -1


def _part(space: Space[Any], pattern: str, paths: tuple[Keys, ...]) -> DictPart:
    node = paths[0][: len(pattern.split("/"))] if pattern != "value" else ()
    whole = {path for path, _ in leaf_paths(space) if path[: len(node)] == node}
    if pattern.split("/")[-1] != REST and whole == set(paths):
        return DictPart(pattern, paths, node, space_at(space, node))
    flat = make_dict((path_name(path), space_at(space, path)) for path in paths)
    return DictPart(pattern, paths, None, flat)


def _at(data: Any, path: Keys) -> Any:
    for key in path:
        data = data[key]
    return data


def join(space: Any, path: tuple[Any, ...], leaves: Mapping[Any, Any]) -> Any:
    """Put leaves, by their path, together to a value of a space."""
    if isinstance(space, spaces.Dict):
        return {key: join(child, (*path, key), leaves) for key, child in children(space)}
    if isinstance(space, spaces.Tuple):
        return tuple([join(child, (*path, key), leaves) for key, child in children(space)])
    return leaves[path]


def directory_of(number: int, part: DictPart) -> str:
    """A child's directory: its number, and its pattern for people to read."""
    return f"{number}-{quote(part.pattern.replace('/', '.'), safe='.').replace('%2A', 'rest')}"


def saved_parts(where: Path, saved: dict[str, Any], space: Any) -> list[DictPart]:
    """The parts of a manifest, whose children are put into their order."""
    with damage_in(f"{where}: storages"):
        order = saved["options"]["order"]
        saved["children"] = {pattern: saved["children"][pattern] for pattern in order}
        for child in saved["children"].values():
            if "/" in check_name(where, child["path"]):
                raise ValueError(f"path {child['path']!r}")
        return divide(space, saved["children"])


Undo = Callable[[], Any]


def do_to_all(
    storages: Sequence[SpaceStorage],
    commits: Commits | None,
    do: Callable[[Any, int], Any],
    undo: Callable[[Any], Undo],
) -> None:
    """Do something to every storage, with its number; if one fails, undo it in those before.

    `undo(storage)` is asked before the change for what takes it back. Storages below one roof commit after the last.
    """
    done: list[Undo] = []
    owner = commits.owner if commits is not None else None
    if commits is not None and owner is None:
        commits.owner = _nobody  # a storage must not commit before the last has written
    try:
        for number, storage in enumerate(storages):
            back = undo(storage)
            do(storage, number)
            done.append(back)
    except BaseException:
        with interrupts.deferred():  # a second Ctrl-C would leave half of it
            for back in reversed(done):
                back()
        raise
    finally:
        if commits is not None:
            commits.owner = owner
    if commits is not None and owner is None:
        commits.settle()


def _nobody(stored: int) -> dict[str, Any]:
    return {}


def undo_set(storage: SpaceStorage, rows: Ints) -> Undo:
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
