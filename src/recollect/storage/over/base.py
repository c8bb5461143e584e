"""WrapperStorage: another storage, with values changed on their way in and out; what three storages share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self

from recollect.files.record import damage_in
from recollect.indexing import normalize
from recollect.spaces import Layout, as_space, compile_layout
from recollect.storage.contract import PathName, Segments, SpaceStorage
from recollect.storage.filed.base import DirectoryStorage, check_capacity, open_part, reopen_child
from recollect.storage.filed.columns import sequence_names
from recollect.storage.filed.commits import Commits, commits_of, dump_storage
from recollect.storage.registry import find_storage, find_stored


class ForwardingStorage(SpaceStorage):
    """A storage over `inner`; a subclass says what happens to the values.

    Ownership: owns `inner`, and closes it.
    Concurrency: as `inner`.
    """

    inner: SpaceStorage

    def _forward_to(self, inner: SpaceStorage) -> None:
        """Take over what `inner` is."""
        self.inner = inner
        self.capacity, self.cache_filename = inner.capacity, inner.cache_filename
        self.is_mutable, self.is_multiprocessing_safe = inner.is_mutable, inner.is_multiprocessing_safe
        self.is_append_only, self.is_cut_by_segment = inner.is_append_only, inner.is_cut_by_segment
        self.commits_from, self.cast = inner.commits_from, inner.cast

    def __len__(self) -> int:
        return len(self.inner)

    def extend_length(self, length: int) -> None:
        self.inner.extend_length(length)

    def shrink_length(self, length: int) -> None:
        self.inner.shrink_length(length)

    def cut_to(self, length: int) -> None:
        self.inner.cut_to(length)

    def clear(self) -> None:
        self.inner.clear()

    # -- segments

    def mark_segment_start(self, row: int) -> None:
        self.inner.mark_segment_start(row)

    def mark_segment_end(self) -> None:
        self.inner.mark_segment_end()

    def prepare_segment_end(self) -> None:
        self.inner.prepare_segment_end()

    def cancel_segment_end(self) -> None:
        self.inner.cancel_segment_end()

    def finish_segment_end(self) -> None:
        self.inner.finish_segment_end()

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

    # -- chunks

    def chunk_ends(self) -> Any:
        return self.inner.chunk_ends()

    def chunk_window(self) -> int:
        return self.inner.chunk_window()

    def expect(self, rows: Any, nested_keys: Any = ()) -> None:
        self.inner.expect(rows)  # the keys may be others inside

    # -- files

    def stored_length(self) -> int:
        return self.inner.stored_length()

    def write_out(self, urgency: int) -> None:
        self.inner.write_out(urgency)

    def checks_reads(self) -> bool:
        return self.inner.checks_reads()

    def more_files(self) -> dict[str, dict[str, Any]]:
        return self.inner.more_files()

    def settle(self) -> None:
        self.inner.settle()

    def flush(self) -> None:
        self.inner.flush()

    def close(self) -> None:
        self.inner.close()


INNER = "inner"


class WrapperStorage(ForwardingStorage, DirectoryStorage):
    """A storage over `inner`, of which a subclass changes the space and the values.

    A subclass gives `inner_space`, `wrap` and, where it has keywords of its own, `positional`, `own`, `own_from`; and
    `_inward`, `_outward` for blocks.

    Ownership: owns `inner`, and closes it.
    Concurrency: as `inner`.
    """

    def __init__(self, space: Any, inner: SpaceStorage, max_lengths: dict[str, int] | None = None) -> None:
        SpaceStorage.__init__(self, space)
        self._layout = compile_layout(self.single_instance_space, max_lengths)
        self._forward_to(inner)
        self.commits = commits_of(inner)
        if self.commits is not None and self.commits.root is inner:
            self.commits.root = self

    # -- what a subclass gives

    @classmethod
    def inner_space(cls, space: Any, own: dict[str, Any]) -> Any:
        """The space that the inner storage has."""
        raise NotImplementedError

    @classmethod
    def wrap(cls, space: Any, inner: SpaceStorage, own: dict[str, Any]) -> Self:
        """Make one over a storage of the inner space."""
        raise NotImplementedError

    def own(self) -> dict[str, Any]:
        """What a manifest should remember, as JSON values; `own_from` reads it."""
        return {}

    @classmethod
    def own_from(cls, saved: dict[str, Any]) -> dict[str, Any]:
        """The keywords that `own` wrote."""
        return {}

    def _inward(self, block: Any, n: int) -> Any:
        raise NotImplementedError

    def _outward(self, block: Any, n: int) -> Any:
        raise NotImplementedError

    # -- making: `inner` is a class or short name, and keywords that are not one's own are those of it

    @classmethod
    def is_filed(cls, cache_path: PathName | None, options: dict[str, Any]) -> bool:
        return cache_path is not None and issubclass(
            find_storage(options.get(INNER, "memory")), DirectoryStorage
        )

    @classmethod
    def in_memory(cls, space: Any, capacity: int | None, cache_path: PathName | None, multiprocessing: bool,
                  *, inner: Any = "memory", **options: Any) -> Self:  # fmt: skip
        own, below = cls._divided(space, options)
        made = find_storage(inner).create(
            below, capacity=capacity, cache_path=cache_path, multiprocessing=multiprocessing, **options
        )
        return cls.wrap(space, made, own)

    @classmethod
    def _divided(cls, space: Any, options: dict[str, Any]) -> tuple[dict[str, Any], Any]:
        """Take this storage's own keywords out of those given; return them and the inner space.

        `max_lengths` are of both: each takes those of its own Sequences, and what nobody knows the inner refuses.
        """
        own = {name: options.pop(name) for name in cls.positional if name in options}
        inner = cls.inner_space(space, own)
        most = options.pop("max_lengths", None) or {}
        outside, inside = sequence_names(as_space(space)), sequence_names(as_space(inner))
        lengths = {k: n for k, n in most.items() if k in outside}
        below = {k: n for k, n in most.items() if k in inside or k not in outside}
        options |= {"max_lengths": below} if below else {}
        return own | ({"max_lengths": lengths} if lengths else {}), inner

    @classmethod
    def under(cls, commits: Commits, prefix: str, space: Any, capacity: int | None, *, inner: Any = "memory",
              **options: Any) -> Self:  # fmt: skip
        inner_cls = find_storage(inner)
        if not issubclass(inner_cls, DirectoryStorage):
            raise ValueError(
                f"inner: {inner_cls.__name__} keeps no files; leave out cache_path and use dumps(path)"
            )
        own, below = cls._divided(space, options)
        check_capacity(inner_cls, capacity)
        inner_cls.need()
        made = inner_cls.under(commits, prefix, below, capacity, **options)
        return cls.wrap(space, made, own)

    @classmethod
    def reopen(cls, commits: Commits, prefix: str, saved: dict[str, Any], space: Any, capacity: int | None,
               length: int, **options: Any) -> Self:  # fmt: skip
        own = cls._read_own(commits.directory.path, saved)
        inner = saved["children"][INNER]
        made = reopen_child(commits, prefix, inner, cls.inner_space(space, own), capacity, length)
        return cls.wrap(space, made, own)

    @classmethod
    def _read_own(cls, where: Path, saved: dict[str, Any]) -> dict[str, Any]:
        with damage_in(f"{where}: storage"):
            saved["children"][INNER]["name"]
            return cls.own_from(saved["options"]) | _lengths(saved["options"].get("max_lengths"))

    @classmethod
    def is_in_parts(cls, path: Path, saved: dict[str, Any]) -> bool:
        cls._read_own(path, saved)
        return "path" in saved["children"][INNER]

    @classmethod
    def over_parts(cls, path: Path, manifest: dict[str, Any], space: Any, **options: Any) -> Self:
        own = cls._read_own(path, manifest["storage"])
        saved = manifest["storage"]["children"][INNER]
        inner_cls = find_storage(options.pop(INNER, None) or find_stored(saved["name"], str(path)))
        below = f"{manifest['storage_path_relative']}/{INNER}"
        return cls.wrap(space, open_part(inner_cls, path, below, cls.inner_space(space, own), **options), own)

    # -- files

    def describe(self) -> dict[str, Any]:
        inner = self.inner.describe() if self.commits is not None else _by_name(self.inner)
        return {"name": self.short_name, "options": self._saved(), "children": {INNER: inner}}

    def _saved(self) -> dict[str, Any]:
        return self.own() | _lengths(self.layout.max_lengths)

    def save_parts(self, path: Path) -> None:
        self.inner.dumps(path / INNER)

    def damages(self) -> Iterator[tuple[str, str]]:
        return self.inner.damages() if isinstance(self.inner, DirectoryStorage) else iter(())

    def dumps(self, path: PathName) -> None:
        dump_storage(self, path)

    # -- rows

    @property
    def layout(self) -> Layout:
        return self._layout

    def get(self, index: Any) -> Any:
        try:
            found = normalize(index, len(self.inner))
        except IndexError:
            self.inner.get(index)  # it may say more: that a segment is open
            raise
        if isinstance(found, int):
            block = self._outward(self.inner.get([found]), 1)
            return self.layout.decode_one([a[0] for a in self.layout.encode_batch(block)[1]])
        return self._outward(self.inner.get(found), len(found))

    def set(self, index: Any, value: Any) -> None:
        found = normalize(index, len(self.inner) + self.inner.pending_segment_length)
        if isinstance(found, int):
            self.inner.set([found], self._inward(self.checked_one(value), 1))
            return
        n, block = self.checked_batch(value)
        self.inner.set(found, self._inward(block, n))

    def append(self, value: Any) -> None:
        block = self._inward(self.checked_one(value), 1)
        layout = self.inner.layout
        self.inner.append(layout.decode_one([a[0] for a in layout.encode_batch(block)[1]]))

    def __reduce__(self) -> Any:
        if self.commits is not None or not self.is_multiprocessing_safe:
            return super().__reduce__()
        return _rewrap, (type(self), self.single_instance_space, self.inner, self._saved())


def _rewrap(
    cls: type[WrapperStorage], space: Any, inner: SpaceStorage, saved: dict[str, Any]
) -> WrapperStorage:
    return cls.wrap(space, inner, cls.own_from(saved) | _lengths(saved.get("max_lengths")))


def _lengths(most: Mapping[str, int] | None) -> dict[str, Any]:
    return {"max_lengths": dict(most)} if most else {}


def _by_name(inner: SpaceStorage) -> dict[str, Any]:
    """How an inner storage that dumps itself is described: by its name and its directory."""
    return {"name": inner.short_name, "options": {}, "children": {}, "path": INNER}
