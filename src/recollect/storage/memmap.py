"""MemmapStorage: rows in one mapped file, beyond memory and beyond the life of the process."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self

from recollect.errors import FormatError
from recollect.memory.rows import Rows
from recollect.spaces import Layout
from recollect.storage.base import PathName
from recollect.storage.dump import MANIFEST, STORAGE, DumpWriter, make_directory, read_manifest, remove_empty
from recollect.storage.row_dump import Saved, copy_rows, open_rows, windows_of
from recollect.storage.rows import FORMATS, RowStorage, open_live, stored_layout


class MemmapStorage(RowStorage):
    """One file of header, stamps and rows, live at its `cache_path`: each commit is there for whoever opens it next.

    It survives `kill -9` with no repair step; against power loss there is `dumps`. The disk space is taken at once
    (`sparse=True`: as rows are written), so a full disk is an error at `create`.

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
        storage = super().create(single_instance_space, *args, cache_path=cache_path, **kwargs)
        storage.live_as = live_as
        try:
            storage.write_live()
        except BaseException:
            storage._give_up()
            raise
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
        sparse = kwargs.pop("sparse", False)
        if kwargs:
            raise TypeError(f"{cls.__name__}.create: unknown arguments {sorted(kwargs)}")
        if cache_path is None:
            raise ValueError(f"cache_path: {cls.__name__} needs the directory of its file, got None")
        path = Path(cache_path)
        if (path / MANIFEST).exists() and not overwrite:
            raise FileExistsError(
                f"{path}: holds a dump already; load it with load_from, or pass overwrite=True"
            )
        return _new_file(path, layout, capacity, num_lanes, segments, sparse)

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
        live = bool(manifest.get("live"))
        if live:
            rows = open_live(path, manifest, layout, writable=not read_only)
        elif read_only:
            rows = open_rows(path, manifest, layout, verify=verify)
        else:
            rows = _thaw(path, manifest, layout)
        storage = cls(rows, space, capacity=manifest["capacity"], cast=cast, is_mutable=not read_only)
        storage.cache_filename = str(path)
        storage.commit = manifest["commit"]
        extra: dict[str, Any] = {key: manifest[key] for key in ("evict", "limiter") if key in manifest}
        storage.live_as = (manifest["format"], extra)
        if not live and not read_only:
            try:
                storage.write_live()
            except BaseException:
                storage._give_up()
                raise
        return storage

    def write_live(self) -> None:
        """Commit a manifest that says: the counters are in the file itself."""
        format_name, extra = self.live_as
        with DumpWriter(Path(str(self.cache_filename))) as writer:
            writer.keep.add(f"{STORAGE}/{self.file_name}")
            record = self.record(Saved(windows_of(self.rows), [] if self.rows.geometry.tagged else None))
            writer.finish({**record, **extra, "live": True, "format": format_name})

    def _give_up(self) -> None:
        """Take back a file that no manifest names yet."""
        file = Path(str(self.rows.path))
        self.close()
        file.unlink(missing_ok=True)
        remove_empty([file.parent])

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


def _new_file(
    path: Path, layout: Layout, capacity: int | None, num_lanes: int, segments: bool, sparse: bool
) -> Rows:
    made = make_directory(path / STORAGE)
    number = 1 + max(
        (int(f.stem[5:]) for f in (path / STORAGE).glob("live-*.bin") if f.stem[5:].isdigit()), default=0
    )
    file = path / STORAGE / f"live-{number}.bin"
    try:
        return Rows.in_file(file, layout, capacity, num_lanes, segments, sparse)
    except BaseException:
        remove_empty(made)
        raise


def _thaw(path: Path, manifest: dict[str, Any], layout: Layout) -> Rows:
    """Make a live file of a dump; the dump stays the committed state until the new manifest is written."""
    source = open_rows(path, manifest, layout, verify=True)  # every row is read anyway
    try:
        g = source.geometry
        rows = _new_file(path, layout, manifest["capacity"], g.n_lanes, g.tagged, False)
        try:
            copy_rows(source, rows)
        except BaseException:
            file = Path(str(rows.path))
            rows.close()
            file.unlink()
            raise
    finally:
        source.close()
    return rows
