"""The manifest of a dump: what it must say, whether its files are there, and which space and layout it describes."""

from __future__ import annotations

import os
import stat
from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from recollect.errors import FormatError
from recollect.files import OwnedDirectory, check_name, file_crc, has_name, open_named, replace_file
from recollect.files.record import (
    Count,
    FileAbout,
    Positive,
    as_kind,
    damage_in,
    read_json,
    read_signed,
    signed_json,
)
from recollect.spaces import Layout, as_space, compile_layout, first_difference, space_from_json
from recollect.spaces.json import MOST_NBYTES

MANIFEST = "manifest.json"
FORMAT_VERSION = 1
FORMATS = ("recollect.storage", "recollect.replay")
STORAGE = "storage"


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


# -- the space of its rows


def checked_space(path: Path, manifest: dict[str, Any], space: Any, capacity: int | None) -> Any:
    """The caller's space, if it and the capacity are those stored."""
    space = as_space(space)
    difference = first_difference(space, stored_layout(path, manifest).space)
    if difference:
        raise ValueError(f"{path}: the space must equal the stored one, got a difference at {difference}")
    if capacity is not None and capacity != manifest["capacity"]:
        raise ValueError(f"{path}: capacity must be the stored {manifest['capacity']}, got {capacity}")
    return space


def stored_cast(manifest: dict[str, Any]) -> bool:
    """Whether a storage that a manifest describes was created with `cast=True`."""
    return bool(manifest["storage"].get("options", {}).get("cast"))


def stored_layout(path: Path, manifest: dict[str, Any]) -> Layout:
    """The layout that a manifest describes."""
    with damage_in(f"{path / MANIFEST}: space"):
        return compile_layout(stored_space(path, manifest), manifest.get("max_lengths") or None)


def stored_space(path: Path, manifest: dict[str, Any]) -> Any:
    """The space that a manifest describes: no larger than its files speak for, or than any may be."""
    with damage_in(f"{path / MANIFEST}: space"):
        try:
            return space_from_json(manifest["space"])
        except FormatError as error:
            held = held_nbytes(path)
            if held <= MOST_NBYTES:
                raise FormatError(f"{path / MANIFEST}: {error}") from None
            return space_from_json(manifest["space"], held)
