"""A dump directory: files under new names, one manifest that names them, replaced by a rename.

The rename of the manifest is the commit. Before it, the old manifest and all its files are untouched; after it, the
new ones are on disk. So a process killed, or a machine that lost power, at any step leaves one whole dump. What a
killed dump leaves behind no manifest names, and the next commit deletes it.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal, Self

import msgspec
import numpy as np
from msgspec import Meta

from recollect import _core, interrupts
from recollect.errors import FormatError, MissingExtraError
from recollect.files import (
    OwnedDirectory,
    check_name,
    has_name,
    make_directory,
    make_inside,
    open_named,
    remove_empty,
    replace_file,
    sync_directory,
)
from recollect.files.record import Count, FileAbout, Positive, as_kind, read_json, read_signed, signed_json

MANIFEST = "manifest.json"
FORMAT_VERSION = 1
STORAGE = "storage"
DUMPS = ("recollect.storage", "recollect.replay")
About = dict[str, Any]  # size and checksum of a file
_PART = 1 << 22
_NUMBERED = re.compile(r"(?!live-)[^-]+-(\d{1,15})\.bin|part-(\d{1,15})")


class DumpWriter:
    """Writes one commit of a dump directory; a context that takes back what it wrote if it fails.

    Ownership: the directory is locked until the end, unless `owned` came with it, and deleted are only files that the
    old manifest named or that a writer of ours noted.
    Concurrency: one writer per directory, a second raises LaneBusyError; readers of the old commit are told to load
    again.
    """

    def __init__(
        self,
        path: Path,
        owned: OwnedDirectory | None = None,
        *,
        live: str | None = None,
        wait_s: float = 0.0,
    ) -> None:
        """Begin a commit; `live` is the file of a buffer that lives here. Another buffer's is refused."""
        self.path = path
        self._is_ours = owned is None
        self.directories = make_directory(path) if owned is None else []  # new ones
        try:
            self.owned = OwnedDirectory.take(path, wait_s=wait_s) if owned is None else owned
        except BaseException:
            remove_empty(self.directories)
            raise
        try:
            # The manifest that this commit replaces; who gave us the directory has looked at it already.
            self._last = check_owned(self.owned) if owned is None else last_manifest(path)
            if (
                owned is None
                and self._last.get("live")
                and self._last["storage"]["options"].get("file") != live
            ):
                raise FileExistsError(
                    f"{path}: must not be where another buffer lives, got dumps() there; dump to another directory "
                    "or delete this one"
                )
            self.directories += make_inside(path, STORAGE)
            _core.fault_point()
            numbers = (_last_number(path / STORAGE), _last_number(path))
            self.commit: int = 1 + max(self._last.get("commit", 0), *numbers)
        except BaseException:
            self._end(failed=True)
            raise
        self.files: dict[str, About] = {}
        self.keep: set[str] = set()  # live files, which have no entry
        self.log: str | None = None  # a file `<log>-<commit>.bin` follows this commit and goes with it
        self._synced: set[Path] = set()  # directories with new names
        self._same: set[str] = set()  # files of the last dump that no manifest names, and that stay

    @property
    def replaces_live(self) -> bool:
        """Whether a buffer lives here now."""
        return bool(self._last.get("live"))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        """Free the disk of what a failed commit wrote; the old one is still there, whole."""
        with interrupts.deferred():  # a second Ctrl-C would leave half of it
            failed = kind is not None and self.owned.is_held and is_committed(self.path, self.commit) is False
            try:
                if failed:
                    remove_unnamed(self.owned, self._last)
            finally:
                self._end(failed)

    def _end(self, failed: bool) -> None:
        if self._is_ours:
            self.owned.release()
        if failed:
            remove_empty(self.directories)

    @contextmanager
    def file(self, name: str) -> Iterator[BinaryIO]:
        """Write a new file below `storage/`; its size and checksum go to the manifest."""
        with self.owned.make(f"{STORAGE}/{name}") as f:
            _core.fault_point()
            yield f
            f.flush()
            _core.fault_point()
            os.fsync(f.fileno())
            _core.fault_point()
            f.seek(0)
            self.files[f"{STORAGE}/{name}"] = {"bytes": os.fstat(f.fileno()).st_size, "crc32c": file_crc(f)}

    def begin_part(self) -> str:
        """The name of a new directory, for files that are written by other means."""
        name = f"{STORAGE}/part-{self.commit}"
        self.owned.note_new(f"{name}/")
        return name

    def adopt(self, name: str) -> None:
        """Name a file that was written by other means (and sync it)."""
        base, full = self.path / STORAGE, self.path / STORAGE / name
        self._synced.update(place for place in full.parents if place.is_relative_to(base))
        with open_named(self.path, f"{STORAGE}/{name}", "rb+") as f:
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
        base = str(self._last.get("storage_path_relative", STORAGE))
        fits = all(self._is_same_or_new(f"{base}/{name}", about) for name, about in names.items())
        for name, about in more.items() if fits else ():
            fits = fits and (
                not has_name(self.path, f"{base}/{name}") or self._has_synced(f"{base}/{name}", about)
            )
        return base if fits else f"{STORAGE}/part-{self.commit}"

    def _is_same_or_new(self, name: str, about: About) -> bool:
        there = self._last.get("files", {}).get(name)
        if there is None:
            return not has_name(self.path, name)
        return bool(there == about) and _has_size(self.path / name, about)

    def _has_synced(self, name: str, about: About) -> bool:
        with open_named(self.path, name) as f:
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
        if name in self._same or self._last.get("files", {}).get(name) == about:
            return
        parent = name.rpartition("/")[0]
        if not full.parent.is_dir():
            self.directories += make_inside(self.path, parent)
        self._synced.add(full.parent)
        with open_named(source.parent, source.name) as f, self.owned.make(name) as copy:
            _core.fault_point()
            shutil.copyfileobj(f, copy, _PART)
            copy.flush()
            _core.fault_point()
            os.fsync(copy.fileno())
            found = {"bytes": os.fstat(copy.fileno()).st_size, "crc32c": file_crc(copy)}
        if found != about:
            raise FormatError(f"{source}: its checksum does not match; it is damaged")

    def finish(self, manifest: dict[str, Any]) -> None:
        """Commit: sync and rename the manifest, sync the directory, delete what is no longer named."""
        for directory in sorted({self.path / STORAGE, *self._synced}):
            sync_directory(directory)
        _core.fault_point()
        kept = {*self.files, *self.keep}
        if self.log is not None:
            manifest = {**manifest, "log": f"{self.log}-{self.commit}.bin"}
        self.owned.note(name for name in named_files(self.path, self._last) if name not in kept)
        with interrupts.deferred():  # the rename and what follows from it are one step
            write_manifest(self.path, {**manifest, "commit": self.commit, "files": self.files}, self.owned)
            _core.fault_point()
            with suppress(OSError):  # the commit stands; what stays on the list is removed by the next one
                self.owned.remove_noted(kept)


def check_owned(owned: OwnedDirectory) -> dict[str, Any]:
    """The manifest of a directory that is about to be written, {} if it has none; FileExistsError if it is not ours.

    What a killed writer left is removed first.
    """
    path = owned.path
    manifest: dict[str, Any] = {}
    if has_name(path, MANIFEST):
        try:
            manifest = read_manifest(path, DUMPS)
        except FormatError as error:
            raise FileExistsError(
                f"{path}: must be new or hold a dump of ours, got a {MANIFEST} that is none ({error}); "
                "choose another directory, or remove it"
            ) from None
    elif has_name(path, STORAGE) and not owned.left and _is_foreign(path / STORAGE):
        raise FileExistsError(
            f"{path}: must be new or hold a dump of ours, got a {STORAGE}/ without a {MANIFEST}; "
            "choose another directory, or remove it"
        )
    if owned.left:
        remove_unnamed(owned, manifest)
    return manifest


def claim_live(owned: OwnedDirectory, manifest: dict[str, Any]) -> None:
    """Say that what a manifest names is about to be replaced; LaneBusyError if a process still writes its rows."""
    file = manifest["storage"]["options"].get("file") if manifest.get("live") else None
    if isinstance(file, str):
        owned.claim(f"{manifest.get('storage_path_relative', STORAGE)}/{file}")


def remove_dump(path: Path, more: Collection[str] = ()) -> None:
    """Remove a dump, `more` files that were made beside it, and its directory if nothing else is in it."""
    with OwnedDirectory.take(path) as owned:
        manifest = check_owned(owned)
        claim_live(owned, manifest)
        owned.note([*named_files(path, manifest), *more, MANIFEST])
        owned.remove_noted(())
    remove_empty([path, path / STORAGE])


def last_manifest(path: Path) -> dict[str, Any]:
    """The manifest of a directory, {} if there is none, or a damaged one; OSError if that cannot be told now."""
    try:
        return read_manifest(path, DUMPS)
    except FormatError:
        return {}


def _is_foreign(place: Path) -> bool:
    """Whether something of this name is anything but a directory with none but empty directories in it.

    Those a writer leaves that is killed before its first file.
    """
    if place.is_symlink() or not place.is_dir():
        return True
    with os.scandir(place) as found:
        return any(_is_foreign(Path(entry.path)) for entry in found)


def _last_number(place: Path) -> int:
    """The greatest number of a commit in names of a directory, so that the next is that of no file there."""
    found = (_NUMBERED.fullmatch(name) for name in os.listdir(place))
    return max((int(match[1] or match[2]) for match in found if match is not None), default=0)


def remove_unnamed(owned: OwnedDirectory, manifest: dict[str, Any]) -> None:
    """Remove what was noted and does not belong to a manifest; if that cannot be told now, the next writer does it."""
    try:
        keep = _all_named(owned.path, manifest)
    except (FormatError, MissingExtraError, OSError):
        return
    owned.remove_noted({*keep})


def named_files(path: Path, manifest: dict[str, Any]) -> list[str]:
    """All files that belong to a manifest, as far as they can be told, to remove them: what cannot be read stays."""
    try:
        return _all_named(path, manifest)
    except (FormatError, MissingExtraError, OSError):
        return _named(path, manifest)


def _all_named(path: Path, manifest: dict[str, Any]) -> list[str]:
    """All files that belong to a manifest: those that it names, the live one, and those that named files name.

    Raises if the files that name others cannot be read.
    """
    names = _named(path, manifest)
    if manifest and _has_more(manifest["storage"]):
        names += _more_files(path, manifest, manifest.get("storage_path_relative", STORAGE))
    return names


def _named(path: Path, manifest: dict[str, Any]) -> list[str]:
    if not manifest:
        return []
    base, storage = manifest.get("storage_path_relative", STORAGE), manifest["storage"]
    names = list(manifest["files"])
    if isinstance(manifest.get("log"), str):
        names.append(check_name(path, manifest["log"]))
    if manifest.get("live") and isinstance(storage["options"].get("file"), str):
        names.append(f"{base}/{storage['options']['file']}")
    return names


def _has_more(storage: Any) -> bool:
    """Whether a storage, or one inside, has files that name others."""
    if not isinstance(storage, dict):
        return False
    inner = storage.get("children")
    return storage.get("name") == "image" or (isinstance(inner, dict) and any(map(_has_more, inner.values())))


def _more_files(path: Path, manifest: dict[str, Any], base: str) -> list[str]:
    from recollect.storage.files import FiledStorage
    from recollect.storage.registry import find_stored
    from recollect.storage.rows import stored_layout

    cls = find_stored(manifest["storage"]["name"], str(path))
    if not issubclass(cls, FiledStorage) or cls.is_in_parts(path, manifest["storage"]):
        return []
    space = stored_layout(path, manifest).space
    with cls.from_manifest(path, manifest, space, read_only=True, verify=False) as storage:
        return [f"{base}/{name}" for name in storage.more_files()]


def write_manifest(path: Path, manifest: dict[str, Any], owned: OwnedDirectory | None = None) -> None:
    """Replace the manifest of a directory in one step."""
    text = signed_json({"format_version": FORMAT_VERSION, **manifest})
    note = None if owned is None else lambda name: owned.note([name])
    replace_file(path / MANIFEST, lambda f: f.write(text.encode()), note=note)


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
    log: str = STORAGE
    evict: EvictRecord | None = None
    segment_counter: Count = 0
    max_lengths: dict[str, Positive] | None = None


def read_manifest(path: Path, formats: tuple[str, ...]) -> dict[str, Any]:
    """Read and check the manifest of a directory; FormatError says what is wrong with it."""
    file = path / MANIFEST
    try:
        manifest = read_signed(file, formats, FORMAT_VERSION)
    except (FileNotFoundError, NotADirectoryError):
        if not path.exists():
            raise FormatError(
                f"{path}: must be the directory of a dump, got a path at which nothing is"
            ) from None
        raise FormatError(f"{path}: must hold {MANIFEST}, got none; it is no dump") from None
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
    for name in (record.storage_path_relative, record.log, *record.files):
        check_name(path, name)
    manifest.setdefault("storage_path_relative", record.storage_path_relative)
    return manifest


def check_files(
    path: Path, manifest: dict[str, Any], *, verify: bool, read_whole: Collection[str] = ()
) -> None:
    """Check the sizes of all named files, and the checksums of those `read_whole`, or with `verify` of all."""
    real: set[str] = set()  # directories that are no links
    for name, about in manifest["files"].items():
        nbytes = _size_of(path, name, real)
        if nbytes != about["bytes"]:
            raise FormatError(
                f"{path / name}: must have {about['bytes']} bytes, got {nbytes}; "
                f"it is {'truncated' if nbytes < about['bytes'] else 'longer than it was written'}"
            )
        if verify or name in read_whole:
            with open_named(path, name) as f:
                if file_crc(f) != about["crc32c"]:
                    raise FormatError(f"{path / name}: its checksum does not match; it is damaged")


def _size_of(path: Path, name: str, real: set[str]) -> int:
    # Not by open_named: there may be thousands, and each directory is looked at once.
    parent = check_name(path, name).rpartition("/")[0]
    try:
        if parent not in real:
            has_name(path, name)  # raises for a link on the way
            real.add(parent)
        found = os.lstat(f"{path}/{name}")
    except FileNotFoundError:
        raise FormatError(
            f"{path / name}: is gone; the dump was replaced or damaged meanwhile: load again"
        ) from None
    if not stat.S_ISREG(found.st_mode):
        raise FormatError(f"{path / name}: must be a plain file, got a link or something else; it is forged")
    return found.st_size


def _has_size(file: Path, about: About) -> bool:
    try:
        return bool(file.lstat().st_size == about["bytes"])
    except OSError:
        return False


def is_committed(path: Path, number: int) -> bool | None:
    """Whether the newest commit has this number; None if that cannot be told, since the manifest cannot be read now."""
    try:
        return last_commit(path) == number
    except (OSError, MemoryError):
        return None


def last_commit(path: Path) -> int:
    """Return the number of the newest commit, 0 if there is none; what a damaged manifest says is not looked at."""
    try:
        found = read_json(path / MANIFEST, follow=False).get("commit")
    except (FileNotFoundError, NotADirectoryError, FormatError):
        return 0
    return found if type(found) is int and found > 0 else 0


def held_nbytes(path: Path) -> int:
    """The bytes that all plain files of a dump have together."""
    found = (os.lstat(f) for f in (path / STORAGE).rglob("*"))
    return sum(s.st_size for s in found if stat.S_ISREG(s.st_mode))


def file_crc(f: BinaryIO) -> str:
    """Return the crc32c of a whole file as 8 hex digits."""
    crc, part = 0, np.empty(_PART, np.uint8)
    f.seek(0)
    while n := f.readinto(part):  # type: ignore[attr-defined]
        crc = _core.crc32c(part[:n], crc)
    return f"{crc:08x}"
