"""A dump directory: files under new names, one manifest that names them, replaced by a rename.

The rename of the manifest is the commit. Before it, the old manifest and all its files are untouched; after it, the
new ones are on disk. So a process killed, or a machine that lost power, at any step leaves one whole dump. What a
killed dump leaves behind no manifest names, and the next commit deletes it.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal, Self

import msgspec
import numpy as np
from msgspec import Meta

from recollect import _core
from recollect.errors import BudgetError, FormatError
from recollect.files.record import Count, FileAbout, Positive, as_kind, read_json, read_signed, signed_json

MANIFEST = "manifest.json"
TEMPORARY = f".{MANIFEST}.tmp"
FORMAT_VERSION = 1
STORAGE = "storage"
About = dict[str, Any]  # size and checksum of a file
_PART = 1 << 22


class DumpWriter:
    """Writes one commit of a dump directory; a context that takes back what it wrote if it fails.

    Ownership: the files that the manifest does not name are deleted, below `storage/` only.
    Concurrency: one writer per directory; readers of the old commit are told to load again.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.directories = make_directory(path / STORAGE)
        _core.fault_point()
        self.commit = last_commit(path) + 1
        self.files: dict[str, About] = {}
        self.keep: set[str] = set()  # live files, which have no entry
        self._made: list[Path] = []
        self._synced: set[Path] = set()  # directories with new names
        self._same: set[str] = set()  # files of the last dump that no manifest names, and that stay
        self._last: dict[str, Any] | None = None  # the manifest that this commit replaces

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        """Free the disk of what a failed commit wrote; the old one is still there, whole."""
        if kind is not None and last_commit(self.path) != self.commit:
            for file in (*self._made, self.path / TEMPORARY):
                file.unlink(missing_ok=True)
            shutil.rmtree(self.path / STORAGE / f"part-{self.commit}", ignore_errors=True)
            remove_empty(self.directories)

    @contextmanager
    def file(self, name: str) -> Iterator[BinaryIO]:
        """Write a new file below `storage/`; its size and checksum go to the manifest."""
        full = self.path / STORAGE / name
        self._made.append(full)
        with open(full, "w+b") as f:
            _core.fault_point()
            yield f
            f.flush()
            _core.fault_point()
            os.fsync(f.fileno())
            _core.fault_point()
            f.seek(0)
            self.files[f"{STORAGE}/{name}"] = {"bytes": os.fstat(f.fileno()).st_size, "crc32c": file_crc(f)}

    def adopt(self, name: str) -> None:
        """Name a file that was written by other means (and sync it)."""
        base, full = self.path / STORAGE, self.path / STORAGE / name
        self._synced.update(place for place in full.parents if place.is_relative_to(base))
        with open(full, "rb+") as f:
            os.fsync(f.fileno())
            _core.fault_point()
            self.files[f"{STORAGE}/{name}"] = {"bytes": os.fstat(f.fileno()).st_size, "crc32c": file_crc(f)}

    def adopt_all(self, base: str) -> None:
        """Name all files that were written by other means below a directory, or as one file of that name."""
        place = self.path / base
        files = [place] if place.is_file() else sorted(f for f in place.rglob("*") if f.is_file())
        for file in files:
            self.adopt(str(file.relative_to(self.path / STORAGE)))

    def base_for(self, names: Mapping[str, About], more: Mapping[str, About]) -> str:
        """The directory for files of these names: that of the last dump, if they are the same files or new there.

        `more` are those that named files name: whether they are the same, only what they hold can tell.
        """
        old = self._old()
        base = str(old.get("storage_path_relative", STORAGE))
        there = old.get("files", {})
        for name, about in names.items():
            if there.get(f"{base}/{name}") not in (None, about):
                return f"{STORAGE}/part-{self.commit}"
        for name, about in more.items():
            if (self.path / base / name).exists() and not self._has_synced(f"{base}/{name}", about):
                return f"{STORAGE}/part-{self.commit}"
        return base if old else STORAGE

    def _has_synced(self, name: str, about: About) -> bool:
        with open(self.path / name, "rb") as f:
            if {"bytes": os.fstat(f.fileno()).st_size, "crc32c": file_crc(f)} != about:
                return False
            os.fsync(f.fileno())  # a killed dump may have left it
        self._same.add(name)
        return True

    def copy(self, source: Path, name: str, about: About, named: bool = True) -> None:
        """Take over an immutable file, unless the last dump has it; its checksum is checked on the way.

        Unless `named`, it is another file that names it, not the manifest.
        """
        full = self.path / name
        if named:
            self.files[name] = about
        else:
            self.keep.add(name)
        if name in self._same or (self._old().get("files", {}).get(name) == about and _has_size(full, about)):
            return
        self.directories += make_directory(full.parent)
        self._synced.add(full.parent)
        self._made.append(full)
        with open_named(source.parent, source.name) as f, open(full, "w+b") as copy:
            _core.fault_point()
            shutil.copyfileobj(f, copy, _PART)
            copy.flush()
            _core.fault_point()
            os.fsync(copy.fileno())
            found = {"bytes": os.fstat(copy.fileno()).st_size, "crc32c": file_crc(copy)}
        if found != about:
            raise FormatError(f"{source}: its checksum does not match; it is damaged")

    def _old(self) -> dict[str, Any]:
        if self._last is None:
            self._last = peek_manifest(self.path)
        return self._last

    def finish(self, manifest: dict[str, Any]) -> None:
        """Commit: sync and rename the manifest, sync the directory, delete what is no longer named."""
        for directory in sorted({self.path / STORAGE, *self._synced}):
            sync_directory(directory)
        _core.fault_point()
        write_manifest(self.path, {**manifest, "commit": self.commit, "files": self.files})
        self._sweep()

    def _sweep(self) -> None:
        named = {self.path / name for name in (*self.files, *self.keep)}
        for root, dirs, names in os.walk(self.path / STORAGE, topdown=False):
            for name in names:
                if Path(root, name) not in named:
                    _core.fault_point()
                    Path(root, name).unlink(missing_ok=True)
            for name in dirs:
                if not os.listdir(Path(root, name)):
                    Path(root, name).rmdir()


def make_directory(path: Path) -> list[Path]:
    """Make a directory and its parents, and return the new ones, innermost last.

    Each new name is synced, so that a power loss cannot take it back.
    """
    if path.is_dir():
        return []
    made = make_directory(path.parent)
    try:
        path.mkdir(exist_ok=True)
        sync_directory(path.parent)
    except BaseException:
        remove_empty(made)
        raise
    return [*made, path]


def remove_empty(directories: list[Path]) -> None:
    """Take back what `make_directory` made, as far as nobody put anything there."""
    for path in reversed(directories):
        with suppress(OSError):
            path.rmdir()


def write_manifest(path: Path, manifest: dict[str, Any]) -> None:
    """Replace the manifest of a directory in one step."""
    text = signed_json({"format_version": FORMAT_VERSION, **manifest})
    temporary = path / TEMPORARY
    with open(temporary, "w", encoding="utf-8") as f:
        _core.fault_point()
        f.write(text)
        f.flush()
        _core.fault_point()
        os.fsync(f.fileno())
    _core.fault_point()
    os.replace(temporary, path / MANIFEST)
    _core.fault_point()
    sync_directory(path)
    _core.fault_point()


class LaneRecord(msgspec.Struct):
    """One lane, as a manifest has it."""

    start: Count
    capacity: Positive | None
    count: Count
    offset: Count


class StorageRecord(msgspec.Struct):
    """A storage, as a manifest has it; what its options may be, it knows itself."""

    name: str
    options: dict[str, Any]
    children: dict[str, StorageRecord] = {}


class EvictRecord(msgspec.Struct):
    """What goes first, as a manifest has it."""

    by: Literal["oldest", "lowest"]
    key: str | None = None


class ManifestRecord(msgspec.Struct):
    """What a manifest must say, whatever storage it is of."""

    format: str
    commit: Count
    live: bool
    storage: StorageRecord
    space: dict[str, Any]
    layout_hash: str
    count: Count
    offset: Count
    capacity: Positive | None
    lanes: Annotated[list[LaneRecord], Meta(min_length=1)]
    segments: list[tuple[Count, Count, Count, Positive, Count]] | None
    files: dict[str, FileAbout]
    storage_path_relative: str = STORAGE
    evict: EvictRecord | None = None
    segment_counter: Count = 0
    max_lengths: dict[str, Positive] | None = None


def read_manifest(path: Path, formats: tuple[str, ...]) -> dict[str, Any]:
    """Read and check the manifest of a directory; FormatError says what is wrong with it."""
    file = path / MANIFEST
    try:
        manifest = read_signed(file, formats, FORMAT_VERSION)
    except (FileNotFoundError, NotADirectoryError):
        raise FormatError(f"{path}: must hold {MANIFEST}, got none; it is no dump") from None
    except OSError as error:
        raise FormatError(f"{file}: must be a plain file, got {error}; it is damaged or foreign") from None
    record = as_kind(manifest, ManifestRecord, file)
    if record.format == "recollect.replay" and record.evict is None:
        raise FormatError(f"{file}: must say what goes first, got no evict; it is damaged")
    if record.evict is not None and record.evict.by == "lowest" and record.evict.key is None:
        raise FormatError(f"{file}: evict must have a key, got none; it is damaged")
    count = sum(lane.count for lane in record.lanes)
    if count != record.count:
        raise FormatError(
            f"{file}: count must be {count}, that of all lanes, got {record.count}; it is damaged"
        )
    manifest.setdefault("storage_path_relative", record.storage_path_relative)
    return manifest


def peek_manifest(path: Path) -> dict[str, Any]:
    """What the manifest of a directory says, unchecked; nothing if there is none that can be read."""
    try:
        return read_json(path / MANIFEST, follow=False)
    except (OSError, FormatError, BudgetError):
        return {}


def check_files(
    path: Path, manifest: dict[str, Any], *, verify: bool, read_whole: Collection[str] = ()
) -> None:
    """Check the sizes of all named files, and the checksums of those `read_whole`, or with `verify` of all."""
    for name, about in manifest["files"].items():
        nbytes = _size_of(path, name)
        if nbytes != about["bytes"]:
            raise FormatError(
                f"{path / name}: must have {about['bytes']} bytes, got {nbytes}; it is truncated"
            )
        if verify or name in read_whole:
            with open_named(path, name) as f:
                if file_crc(f) != about["crc32c"]:
                    raise FormatError(f"{path / name}: its checksum does not match; it is damaged")


def _size_of(path: Path, name: str) -> int:
    # Not by open_named: there may be thousands, and to resolve each path takes longer than to ask for its size.
    if ".." in name.split("/") or name.startswith("/"):
        raise FormatError(f"{path}: names a file outside itself, {name!r}; it is damaged or forged")
    try:
        found = os.stat(f"{path}/{name}")
    except (FileNotFoundError, NotADirectoryError):
        raise FormatError(
            f"{path / name}: is gone; the dump was replaced or damaged meanwhile: load again"
        ) from None
    except (OSError, ValueError) as error:
        raise FormatError(f"{path}: cannot look at {name[:200]!r} ({error}); it is damaged") from None
    if not stat.S_ISREG(found.st_mode):
        raise FormatError(f"{path / name}: must be a plain file, got something else; it is damaged or forged")
    return found.st_size


def _has_size(file: Path, about: About) -> bool:
    try:
        return bool(file.stat().st_size == about["bytes"])
    except OSError:
        return False


def open_named(path: Path, name: str, mode: str = "rb") -> BinaryIO:
    """Open a file that a manifest names; if a newer commit deleted it meanwhile, say so."""
    target = (path / name).resolve()
    if not target.is_relative_to(path.resolve()):
        raise FormatError(f"{path}: names a file outside itself, {name!r}; it is damaged or forged")
    try:
        return open(target, mode)  # type: ignore[return-value]
    except FileNotFoundError:
        raise FormatError(
            f"{target}: is gone; the dump was replaced or damaged meanwhile: load again"
        ) from None


def last_commit(path: Path) -> int:
    """Return the number of the newest commit, 0 if there is none that can be read."""
    found = peek_manifest(path).get("commit")
    return found if isinstance(found, int) and 0 < found < 1 << 62 else 0


def refuse_live(path: Path) -> None:
    """Raise FileExistsError for a directory that another buffer lives in: a dump would delete its file."""
    if peek_manifest(path).get("live"):
        raise FileExistsError(
            f"{path}: must not be where another buffer lives, got dumps() there; dump to another directory or delete "
            "this one"
        )


def held_nbytes(path: Path) -> int:
    """The bytes that all plain files of a dump have together."""
    return sum(f.stat().st_size for f in (path / STORAGE).rglob("*") if f.is_file())


def file_crc(f: BinaryIO) -> str:
    """Return the crc32c of a whole file as 8 hex digits."""
    crc, part = 0, np.empty(_PART, np.uint8)
    f.seek(0)
    while n := f.readinto(part):  # type: ignore[attr-defined]
        crc = _core.crc32c(part[:n], crc)
    return f"{crc:08x}"


def sync_directory(path: Path) -> None:
    """Make the names in a directory survive a power loss."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
