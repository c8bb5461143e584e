"""WrapperStorage: another storage, with values changed on their way in and out; what three storages share."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, Self

from recollect.errors import FormatError
from recollect.indexing import normalize
from recollect.spaces import as_space
from recollect.storage.base import PathName, Segments, SpaceStorage
from recollect.storage.dump import read_manifest
from recollect.storage.files import FiledStorage, check_capacity, checked_space, make_live, reopen_child
from recollect.storage.live import FORMATS, Live, dump_storage, live_of
from recollect.storage.registry import find_storage, find_stored

INNER = "inner"


class WrapperStorage(FiledStorage):
    """A storage over `inner`, of which a subclass changes the space and the values.

    A subclass gives `inner_space`, `wrap` and, where it has keywords of its own, `own_options`, `own`, `own_from`; and
    `_inward`, `_outward` for blocks.

    Ownership: owns `inner`, and closes it.
    Concurrency: as `inner`.
    """

    own_options: ClassVar[tuple[str, ...]] = ()
    inner: SpaceStorage

    def __init__(self, space: Any, inner: SpaceStorage) -> None:
        SpaceStorage.__init__(self, space)
        self.inner, self.live = inner, live_of(inner)
        self.cache_filename = inner.cache_filename
        self.capacity, self.is_mutable = inner.capacity, inner.is_mutable
        self.is_multiprocessing_safe = inner.is_multiprocessing_safe
        self.is_append_only, self.is_cut_by_segment = inner.is_append_only, inner.is_cut_by_segment
        self.commits_from = inner.commits_from
        if self.live is not None and self.live.root is inner:
            self.live.root = self

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

    # -- making

    @classmethod
    def create(
        cls,
        single_instance_space: Any,
        *args: Any,
        capacity: int | None = None,
        cache_path: PathName | None = None,
        multiprocessing: bool = False,
        inner: Any = "memory",
        overwrite: bool = False,
        owned: bool = False,
        **options: Any,
    ) -> Self:
        """Make the inner storage (`inner`: a class or short name; further keywords are its own) and wrap it."""
        inner_cls = find_storage(inner)
        options |= cls._taken({}, args)
        if issubclass(inner_cls, FiledStorage) and cache_path is not None:
            check_capacity(inner_cls, capacity)
            made: Self = make_live(
                cls, single_instance_space, capacity, cache_path, overwrite, owned, inner=inner, **options
            )
            return made
        space = as_space(single_instance_space)
        own = cls._taken(options)
        if overwrite:
            options["overwrite"] = True
        made_inner = inner_cls.create(
            cls.inner_space(space, own), capacity=capacity, cache_path=cache_path, multiprocessing=multiprocessing,
            **options,
        )  # fmt: skip
        return cls.wrap(space, made_inner, own)

    @classmethod
    def _taken(cls, options: dict[str, Any], args: tuple[Any, ...] = ()) -> dict[str, Any]:
        """Take this storage's own keywords out of those given."""
        if len(args) > len(cls.own_options):
            raise TypeError(f"{cls.__name__}.create: takes {cls.own_options} after the space, got {args!r}")
        own = dict(zip(cls.own_options, args))
        return own | {name: options.pop(name) for name in cls.own_options if name in options}

    @classmethod
    def under(cls, live: Live, prefix: str, space: Any, capacity: int | None, *, inner: Any = "memory",
              **options: Any) -> Self:  # fmt: skip
        inner_cls = find_storage(inner)
        if not issubclass(inner_cls, FiledStorage):
            raise ValueError(
                f"inner: {inner_cls.__name__} keeps no files; leave out cache_path and use dumps(path)"
            )
        own = cls._taken(options)
        inner_cls.need()
        made = inner_cls.under(live, prefix, cls.inner_space(space, own), capacity, **options)
        return cls.wrap(space, made, own)

    @classmethod
    def reopen(cls, live: Live, prefix: str, saved: dict[str, Any], space: Any, capacity: int | None,
               length: int, **options: Any) -> Self:  # fmt: skip
        own = cls._read_own(live.home.path, saved)
        inner = saved["children"][INNER]
        made = reopen_child(live, prefix, inner, cls.inner_space(space, own), capacity, length)
        return cls.wrap(space, made, own)

    @classmethod
    def _read_own(cls, where: Path, saved: dict[str, Any]) -> dict[str, Any]:
        try:
            saved["children"][INNER]["name"]
            return cls.own_from(saved["options"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            if isinstance(error, FormatError):
                raise
            raise FormatError(f"{where}: its storage is garbled ({error!r}); it is damaged") from None

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
        """Open what `dumps` wrote, or a directory at its last commit; keywords go to an inner row storage."""
        path = Path(path)
        manifest = read_manifest(path, FORMATS)
        if manifest["storage"]["name"] != cls.short_name:
            raise FormatError(
                f"{path}: must be a dump of {cls.__name__}, got {manifest['storage']['name']!r}; "
                "load it with that storage"
            )
        own = cls._read_own(path, manifest["storage"])
        saved = manifest["storage"]["children"][INNER]
        inner_cls = find_stored(saved["name"], str(path))
        if issubclass(inner_cls, FiledStorage) and "path" not in saved:
            return super().load_from(
                path, single_instance_space, capacity=capacity, read_only=read_only, multiprocessing=multiprocessing,
                verify=verify, **options,
            )  # fmt: skip
        space = checked_space(path, manifest, single_instance_space, capacity)
        return cls._over_parts(path, manifest, space, own, read_only, multiprocessing=multiprocessing,
                               verify=verify, **options)  # fmt: skip

    @classmethod
    def _over_parts(cls, path: Path, manifest: dict[str, Any], space: Any, own: dict[str, Any], read_only: bool,
                    **options: Any) -> Self:  # fmt: skip
        """Load an inner storage that was dumped as a directory of its own."""
        saved = manifest["storage"]["children"][INNER]
        inner_cls = find_storage(options.pop("inner", None) or find_stored(saved["name"], str(path)))
        inner = inner_cls.load_from(
            path / manifest["storage_path_relative"] / INNER,
            cls.inner_space(space, own),
            read_only=read_only,
            **options,
        )
        return cls.wrap(space, inner, own)

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
        own = cls._read_own(path, manifest["storage"])
        if "path" in manifest["storage"]["children"][INNER]:
            return cls._over_parts(path, manifest, space, own, read_only, verify=verify, **options)
        return super().from_manifest(path, manifest, space, read_only=read_only, verify=verify, **options)

    # -- files

    def describe(self) -> dict[str, Any]:
        inner = self.inner.describe() if self.live is not None else _by_name(self.inner)
        return {"name": self.short_name, "options": self.own(), "children": {INNER: inner}}

    def save_parts(self, path: Path) -> None:
        self.inner.dumps(path / INNER)

    def stored_length(self) -> int:
        return self.inner.stored_length()

    def write_out(self, urgency: int) -> None:
        self.inner.write_out(urgency)

    def more_files(self) -> list[str]:
        return self.inner.more_files()

    def verify(self) -> None:
        if isinstance(self.inner, FiledStorage):
            self.inner.verify()

    def dumps(self, path: PathName) -> None:
        dump_storage(self, path)

    def flush(self) -> None:
        self.inner.flush()

    def settle(self) -> None:
        self.inner.settle()

    # -- rows

    def __len__(self) -> int:
        return len(self.inner)

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

    def extend_length(self, length: int) -> None:
        self.inner.extend_length(length)

    def shrink_length(self, length: int) -> None:
        self.inner.shrink_length(length)

    def clear(self) -> None:
        self.inner.clear()

    # -- segments and chunks

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

    def chunk_ends(self) -> Any:
        return self.inner.chunk_ends()

    def chunk_window(self) -> int:
        return self.inner.chunk_window()

    def expect(self, rows: Any, nested_keys: Any = ()) -> None:
        self.inner.expect(rows)

    # -- life

    def close(self) -> None:
        self.inner.close()

    def __reduce__(self) -> Any:
        if self.live is not None or not self.is_multiprocessing_safe:
            return super().__reduce__()
        return _rewrap, (type(self), self.single_instance_space, self.inner, self.own())


def _rewrap(
    cls: type[WrapperStorage], space: Any, inner: SpaceStorage, saved: dict[str, Any]
) -> WrapperStorage:
    return cls.wrap(space, inner, cls.own_from(saved))


def _by_name(inner: SpaceStorage) -> dict[str, Any]:
    """How an inner storage that dumps itself is described: by its name and its directory."""
    return {"name": inner.short_name, "options": {}, "children": {}, "path": INNER}
