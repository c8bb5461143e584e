"""MemmapStorage: rows in one mapped file, beyond memory and beyond the life of the process."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self

from recollect.errors import FormatError
from recollect.files import OwnedDirectory, has_name, make_directory, make_inside, remove_empty
from recollect.memory.rows import Rows
from recollect.spaces import Layout
from recollect.storage.contract import PathName
from recollect.storage.dump import DumpWriter, check_owned, claim_live, last_manifest, remove_unnamed
from recollect.storage.filed.commits import refuse_dump
from recollect.storage.manifest import FORMATS, STORAGE, read_manifest, stored_layout
from recollect.storage.rows.base import RowStorage, open_live
from recollect.storage.rows.dump import Saved, copy_rows, open_rows, windows_of

_LIVE = re.compile(r"live-([0-9]{1,15})\.bin")
_TURN_S = 10.0  # for another process that commits in the same directory


class MemmapStorage(RowStorage):
    """One file of header, stamps and rows, live at its `cache_path`: each commit is there for whoever opens it next.

    It survives `kill -9` with no repair step; against power loss there is `dumps`. The disk space is taken at once
    (`sparse=True`: as rows are written), so a full disk is an error at `create` (`sparse=True`: SIGBUS at a write).

    Ownership: the file stays; `close()` unmaps it.
    Concurrency: as shared memory, between processes of one machine.

    >>> import recollect as rc, tempfile
    >>> path = tempfile.mkdtemp() + "/replay"
    >>> storage = rc.MemmapStorage.create({"x": ((), "int64")}, capacity=4, cache_path=path)
    >>> storage.set(0, {"x": 7})
    >>> storage.get(0)["x"].item()
    7
    """

    short_name = "memmap"
    create_options = ("sparse",)
    is_multiprocessing_safe = True
    needs_path = True
    commit = 0  # the number of the dump that was loaded
    live_as: tuple[str, dict[str, Any]] = ("recollect.storage", {})

    @classmethod
    def create(
        cls,
        single_instance_space: Any,
        *args: Any,
        cache_path: PathName | None = None,
        live_as: tuple[str, dict[str, Any]] = ("recollect.storage", {}),
        **kwargs: Any,
    ) -> Self:
        """Make a new file below the directory `cache_path`; one that holds a dump is refused unless `overwrite`.

        `live_as` is what its manifest says it is: a buffer's, when a buffer makes it, so that one commit makes both.
        """
        if cache_path is None:
            raise ValueError(f"cache_path: {cls.__name__} needs the directory of its file, got None")
        path = Path(cache_path).absolute()  # this process may change its directory
        refuse_dump(path, bool(kwargs.get("overwrite")))
        with owned_directory(path) as owned:
            refuse_dump(path, bool(kwargs.get("overwrite")))
            claim_live(owned, check_owned(owned))
            storage = super().create(single_instance_space, *args, cache_path=path, owned=owned, **kwargs)
            storage.live_as = live_as
            storage._begin_live(owned)
        return storage

    @classmethod
    def _make_rows(
        cls,
        layout: Layout,
        capacity: int | None,
        num_lanes: int,
        segments: bool,
        cache_path: PathName | None,
        overwrite: bool,
        **kwargs: Any,
    ) -> Rows:
        sparse, owned = kwargs.pop("sparse", False), kwargs.pop("owned")
        if kwargs:
            raise TypeError(f"{cls.__name__}.create: unknown arguments {sorted(kwargs)}")
        return _new_file(owned, layout, capacity, num_lanes, segments, sparse)

    @classmethod
    def from_dump(
        cls,
        path: Path,
        manifest: dict[str, Any],
        space: Any,
        *,
        read_only: bool,
        verify: bool,
        cast: bool = False,
    ) -> Self:
        layout = stored_layout(path, manifest)
        if manifest.get("live"):
            rows = open_live(path, manifest, layout, writable=not read_only)
        elif read_only:
            rows = open_rows(path, manifest, layout, verify=verify)
        else:
            return cls._thawed(path, manifest, layout, space, cast)
        return cls._over(path, manifest, rows, space, cast, not read_only)

    @classmethod
    def _thawed(cls, path: Path, manifest: dict[str, Any], layout: Layout, space: Any, cast: bool) -> Self:
        """Make a live file of a dump; the dump stays the committed state until the new manifest is written."""
        with owned_directory(path) as owned:
            if check_owned(owned).get("commit") != manifest["commit"]:
                raise FormatError(f"{path}: was replaced meanwhile; load again")
            storage = cls._over(path, manifest, _thaw(owned, manifest, layout), space, cast, True)
            storage._begin_live(owned)
        return storage

    @classmethod
    def _over(
        cls, path: Path, manifest: dict[str, Any], rows: Rows, space: Any, cast: bool, is_mutable: bool
    ) -> Self:
        storage = cls(rows, space, capacity=manifest["capacity"], cast=cast, is_mutable=is_mutable)
        storage.cache_filename = str(path)
        storage.commit = manifest["commit"]
        extra: dict[str, Any] = {key: manifest[key] for key in ("evict", "limiter") if key in manifest}
        storage.live_as = (manifest["format"], extra)
        return storage

    def _begin_live(self, owned: OwnedDirectory) -> None:
        """Write the first manifest of a live file, or take the file back."""
        try:
            self.write_live(owned)
        except BaseException:
            self.close()
            raise

    def write_live(self, owned: OwnedDirectory | None = None) -> None:
        """Commit a manifest that says: the counters are in the file itself."""
        format_name, extra = self.live_as
        # Several processes may use the file: they take turns.
        path = Path(str(self.cache_filename))
        with DumpWriter(path, owned, live=self.file_name, wait_s=_TURN_S) as writer:
            if owned is None and not (
                writer.replaces_live and self.rows.is_at(path / STORAGE / self.file_name)
            ):
                raise FormatError(
                    f"{path}: was replaced meanwhile, got dumps() of the buffer before; load again"
                )
            writer.keep.add(f"{STORAGE}/{self.file_name}")
            record = self.record(Saved(windows_of(self.rows), [] if self.rows.geometry.tagged else None))
            writer.finish({**record, **extra, "live": True, "format": format_name})

    def is_live_at(self, path: PathName) -> bool:
        """Whether `path` is the directory that this storage lives in."""
        return (
            self.cache_filename is not None
            and self.is_mutable
            and Path(path).resolve() == Path(self.cache_filename).resolve()
        )

    @property
    def file_name(self) -> str:
        """The live file's name below `storage/`."""
        return Path(str(self.rows.path)).name

    def options(self) -> dict[str, Any]:
        return {**super().options(), **({"file": self.file_name} if self.rows.path else {})}

    def dumps(self, path: PathName) -> None:
        if self.is_live_at(path):
            self.rows.sync()
            self.write_live()
        else:
            super().dumps(path)

    def __reduce__(self) -> Any:
        if self.rows.is_shared:
            return super().__reduce__()
        return _reopen, (type(self), str(self.cache_filename), self.commit, self.cast)


def _reopen(cls: type[MemmapStorage], path: str, commit: int, cast: bool) -> MemmapStorage:
    """Open in another process the same dump that was loaded for reading in this one."""
    manifest = read_manifest(Path(path), FORMATS)
    if manifest["commit"] != commit:
        raise FormatError(
            f"{path}: was commit {commit}, got {manifest['commit']}; it was replaced: load again"
        )
    space = stored_layout(Path(path), manifest).space
    return cls.from_dump(Path(path), manifest, space, read_only=True, verify=False, cast=cast)


@contextmanager
def owned_directory(path: Path) -> Iterator[OwnedDirectory]:
    """Own a directory, made if need be, for as long as something is made in it; what fails is taken back."""
    made = make_directory(path)
    try:
        with OwnedDirectory.take(path) as owned:
            try:
                made += [] if has_name(path, STORAGE) else [path / STORAGE]
                yield owned
            except BaseException:
                if owned.is_held:
                    with suppress(OSError):  # what cannot be told or removed now, the next writer removes
                        remove_unnamed(owned, last_manifest(path))
                raise
    except BaseException:
        remove_empty(made)
        raise


def _new_file(
    owned: OwnedDirectory, layout: Layout, capacity: int | None, num_lanes: int, segments: bool, sparse: bool
) -> Rows:
    make_inside(owned.path, STORAGE)
    place = owned.path / STORAGE
    found = (_LIVE.fullmatch(name) for name in os.listdir(place))
    number = 1 + max((int(match[1]) for match in found if match is not None), default=0)
    owned.note_new(f"{STORAGE}/live-{number}.bin")
    return Rows.in_file(place / f"live-{number}.bin", layout, capacity, num_lanes, segments, sparse)


def _thaw(owned: OwnedDirectory, manifest: dict[str, Any], layout: Layout) -> Rows:
    source = open_rows(owned.path, manifest, layout, verify=True)  # every row is read anyway
    try:
        g = source.geometry
        rows = _new_file(owned, layout, manifest["capacity"], g.n_lanes, g.tagged, False)
        try:
            copy_rows(source, rows)
        except BaseException:
            rows.close()
            raise
    finally:
        source.close()
    return rows
