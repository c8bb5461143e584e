"""Checkpoints: a directory that appears whole or not at all, and that is read without unpickling anything.

    model_120/manifest.json    format, sizes, crc32c, and the state as JSON
    model_120/tensors.bin      the raw bytes of all tensors
    model_120/replay/          the replay buffer's own dump, if it was asked for

It is written to a temporary sibling, synced, and renamed. A process killed at any step leaves the checkpoint of that
name as it was before, or the new one; what it leaves beside them the next save removes.
"""

from __future__ import annotations

import copy
import errno
import os
import re
import secrets
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from recollect import _core, interrupts
from recollect.errors import FormatError, LaneBusyError
from recollect.files import (
    OwnedDirectory,
    exchange_directories,
    make_directory,
    move_directory,
    remove_empty,
    sync_directory,
    sync_file,
)
from recollect.files.directory import NAME
from recollect.files.names import files_below
from recollect.files.record import FileAbout, as_kind, brief, damage_in, read_bytes, read_signed, signed_json
from recollect.storage.dump import last_manifest, named_files
from recollect.storage.manifest import STORAGE
from recollect.system import is_portable

FORMAT, FORMAT_VERSION = "recollect.checkpoint", 1
MANIFEST, TENSORS, REPLAY = "manifest.json", "tensors.bin", "replay"
_UNIQUE = r"-\d+-[0-9a-f]{8}"  # a process and a number, at the end of the names of directories that are ours


class CheckpointFiles(msgspec.Struct, forbid_unknown_fields=True, rename={"tensors": TENSORS}):
    """The files of a checkpoint."""

    tensors: FileAbout


class CheckpointRecord(msgspec.Struct, forbid_unknown_fields=True):
    """What the manifest of a checkpoint must say."""

    format: str
    format_version: int
    files: CheckpointFiles
    state: dict[str, Any]
    replay: bool


def save_checkpoint(
    path: Path, state: Mapping[str, Any], *, dump_replay: Callable[[Path], None] | None = None
) -> Path:
    """Write `state` (and the replay, by `dump_replay(directory)`) as the checkpoint `path`, replacing an older one.

    TypeError names what cannot be saved, before anything is written.
    """
    from recollect.learners.state_json import Encoder

    path = Path(path)
    encoder = Encoder()
    tree = encoder.encode(dict(state))
    _check_ours(path)
    make_directory(path.parent)
    _sweep(path)
    owned: OwnedDirectory | None = None
    is_placed = False
    try:
        with interrupts.deferred():  # it is locked
            owned = _new_stage(path)
        temporary = owned.path
        owned.note([TENSORS, f"{REPLAY}/", MANIFEST])
        _core.fault_point()
        crc = _write(temporary / TENSORS, encoder.blocks)
        about = {TENSORS: {"bytes": encoder.nbytes, "crc32c": crc}}
        if dump_replay is not None:
            dump_replay(temporary / REPLAY)
        body = {
            "format": FORMAT, "format_version": FORMAT_VERSION, "files": about, "state": tree,
            "replay": dump_replay is not None,
        }  # fmt: skip
        _write(temporary / MANIFEST, [signed_json(body).encode()])
        sync_directory(temporary)
        _core.fault_point()
        with interrupts.deferred():  # from here on it is the checkpoint, and nothing to be removed
            _put_in_place(temporary, path)
            is_placed = True
            owned.moved_to(path)
            with suppress(OSError):  # another save of this name took its place just now, and removes it
                owned.forget()
            owned.release()
    except BaseException:
        if owned is not None and not is_placed:
            _remove(owned)
        raise
    _sweep(path)
    return path


def _new_stage(path: Path) -> OwnedDirectory:
    """Make and lock a new directory beside a checkpoint; again if another save swept it while it was empty."""
    while True:
        temporary = path.parent / f".{path.name}.tmp-{os.getpid()}-{secrets.token_hex(4)}"
        temporary.mkdir()
        with suppress(FileNotFoundError, LaneBusyError):
            return OwnedDirectory.take(temporary)


def _check_ours(path: Path) -> None:
    """Raise FileExistsError for a path that holds anything but a checkpoint: it would be removed with it."""
    while (looked_at := _identity(path)) is not None:
        found: set[str] = {"no directory"}
        with suppress(FileNotFoundError, NotADirectoryError):
            found = {"no directory"} if path.is_symlink() else set(os.listdir(path))
        if REPLAY in found:
            found = found - {REPLAY} | {f"{REPLAY}/{name}" for name in files_below(path / REPLAY)}
        others = sorted(found - _names(path))
        if not others and (not found or _is_checkpoint(path)):
            return
        if (
            _identity(path) == looked_at
        ):  # else another save took its place just now, and removed what was seen
            raise FileExistsError(
                f"{path}: must be new or a checkpoint, got {brief(others) if others else 'another manifest'}; choose "
                "another path"
            )


def _names(path: Path) -> set[str]:
    """The files that are a checkpoint's own: those of its replay its manifest names."""
    replay = path / REPLAY
    below = (MANIFEST, NAME, *named_files(replay, last_manifest(replay)))
    return {MANIFEST, TENSORS, NAME, *(f"{REPLAY}/{name}" for name in below)}


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


def _is_checkpoint(path: Path) -> bool:
    try:
        return bool(_manifest(path))
    except (FormatError, OSError):
        return False


def _remove(owned: OwnedDirectory) -> None:
    """Remove what was noted in a directory of ours, and the directory unless something else is in it."""
    try:
        if owned.is_held:
            owned.remove_noted(())
    finally:
        owned.release()
    remove_empty([owned.path, owned.path / REPLAY, owned.path / REPLAY / STORAGE])


def _write(file: Path, blocks: list[Any]) -> str:
    crc = 0
    with open(file, "wb") as f:
        _core.fault_point()
        for block in blocks:
            f.write(block)
            crc = _core.crc32c(block, crc)
        sync_file(f)
    return f"{crc:08x}"


def _put_in_place(temporary: Path, path: Path) -> None:
    """One rename; an older checkpoint of that name changes places with the new one in one step."""
    try:
        move_directory(temporary, path)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
    else:
        return
    _check_ours(path)
    if is_portable():
        _replace(temporary, path)
    else:
        exchange_directories(temporary, path)


def _replace(temporary: Path, path: Path) -> None:
    """Put the old one aside, under a name by which it is found should this process be killed just then."""
    while True:
        with suppress(FileNotFoundError):
            os.rename(path, path.parent / f".{path.name}.old-{os.getpid()}-{secrets.token_hex(4)}")
        _core.fault_point()
        try:
            return move_directory(temporary, path)
        except OSError as error:  # a reader missed it, and put the old one back
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise


def _put_back(path: Path) -> bool:
    """Give a checkpoint its name again that a killed save has put aside; whether there was one."""
    aside = re.compile(rf"\.{re.escape(path.name)}\.old{_UNIQUE}")
    with suppress(OSError):
        for name in os.listdir(path.parent):
            if aside.fullmatch(name) and not os.path.lexists(path):
                os.rename(path.parent / name, path)
                return True
    return False


def _sweep(path: Path) -> None:
    """Remove what replaced checkpoints, killed saves of this name and killed removals left behind.

    Such a directory has a name that only we give, and our list, or is a checkpoint that was moved there; a live process
    holds its own.
    """
    ours = re.compile(rf"\.({re.escape(path.name)}\.(tmp|old)|removed-.+){_UNIQUE}")
    for name in os.listdir(path.parent):
        old = path.parent / name
        if ours.fullmatch(name) is None or old.is_symlink() or not old.is_dir():
            continue
        with suppress(LaneBusyError, FormatError, OSError), interrupts.deferred():
            found = set(files_below(old))  # none: a removal was killed before its last step
            if found and NAME not in found and not _is_checkpoint(old):
                continue
            owned = OwnedDirectory.take(old)
            if _is_checkpoint(old):
                owned.note(sorted(_names(old) - {NAME}))
            _remove(owned)


def remove_checkpoint(path: Path) -> None:
    """Remove a checkpoint, which is there whole until it is gone; nothing happens if there is none."""
    path = Path(path)
    _check_ours(path)
    gone = path.parent / f".removed-{path.name}-{os.getpid()}-{secrets.token_hex(4)}"
    with suppress(FileNotFoundError, LaneBusyError), interrupts.deferred():  # another save sweeps it
        move_directory(path, gone)
        owned = OwnedDirectory.take(gone)
        owned.note(sorted(_names(gone) - {NAME}))
        _remove(owned)


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Return the state of a checkpoint; FormatError says what is wrong with it. Sizes and checksums are verified."""
    from recollect.learners.state_json import decode

    path = Path(path)
    manifest = _manifest(path)
    about = manifest.files.tensors
    try:
        data = read_bytes(path / TENSORS, most=about.bytes)
    except FileNotFoundError:
        raise FormatError(f"{path / TENSORS}: is gone; the checkpoint is damaged") from None
    if len(data) != about.bytes:
        raise FormatError(
            f"{path / TENSORS}: must have {about.bytes} bytes, got {len(data)}; it is truncated"
        )
    if f"{_core.crc32c(data):08x}" != about.crc32c:
        raise FormatError(f"{path / TENSORS}: its checksum does not match; it is damaged")
    with damage_in(path / MANIFEST):
        state = decode(manifest.state, np.frombuffer(data, np.uint8))
    if not isinstance(state, dict):
        raise FormatError(f"{path / MANIFEST}: state cannot be {type(state).__name__}; it is damaged")
    return state


def replay_path(path: Path) -> Path | None:
    """Return where a checkpoint keeps its replay, None if it has none."""
    return Path(path) / REPLAY if _manifest(Path(path)).replay else None


def _manifest(path: Path) -> CheckpointRecord:
    file = path / MANIFEST
    try:
        return as_kind(read_signed(file, (FORMAT,), FORMAT_VERSION), CheckpointRecord, file)
    except (FileNotFoundError, NotADirectoryError):
        if _put_back(path):
            return _manifest(path)
        raise FormatError(f"{path}: must hold {MANIFEST}, got none; it is no checkpoint") from None


def load_optimizer(name: str, optimizer: Any, found: Any) -> None:
    """Give an optimizer the state that a checkpoint has; FormatError unless it is one of these very parameters."""
    groups = optimizer.state_dict()["param_groups"]
    with damage_in(f"{name} of the checkpoint"):
        check_alike(name, groups, found["param_groups"])
        shapes = [tuple(p.shape) for group in optimizer.param_groups for p in group["params"]]
        for place, entry in found["state"].items():
            own = [x for x in entry.values() if tuple(x.shape) not in ((), shapes[place])]
            if place < 0 or own or not {"step", "exp_avg", "exp_avg_sq"} <= set(entry):
                raise FormatError(f"{name}: its state cannot be of parameter {place}; it is damaged")
        optimizer.load_state_dict(copy.deepcopy(found))  # torch would keep the tensors


def check_alike(name: str, wanted: Any, found: Any) -> None:
    """Raise FormatError naming the first part of a state that is missing, or of another kind, size or shape."""
    if isinstance(wanted, dict) and isinstance(found, dict) and wanted.keys() == found.keys():
        for key, child in wanted.items():
            check_alike(f"{name}.{key}", child, found[key])
    elif isinstance(wanted, list | tuple) and isinstance(found, list | tuple) and len(wanted) == len(found):
        for place, pair in enumerate(zip(wanted, found)):
            check_alike(f"{name}.{place}", *pair)
    elif hasattr(wanted, "shape") and tuple(wanted.shape) == tuple(getattr(found, "shape", (-1,))):
        return
    elif isinstance(wanted, bool | str) or wanted is None:
        if type(found) is not type(wanted):
            raise FormatError(f"{name}: must be a {type(wanted).__name__}, got {brief(found)}; it is damaged")
    elif not (isinstance(wanted, int | float) and type(found) in (int, float)):
        raise FormatError(f"{name}: must be as {brief(wanted)}, got {brief(found)}; it is damaged")


def check_shapes(name: str, wanted: Mapping[str, Any], found: Mapping[str, Any]) -> None:
    """Raise FormatError naming the first parameter of a network that a checkpoint lacks or has in another shape."""
    for key, x in wanted.items():
        if key not in found:
            raise FormatError(f"{name}.{key}: is not in the checkpoint; it is of another network")
        if tuple(getattr(found[key], "shape", (-1,))) != tuple(x.shape):
            raise FormatError(
                f"{name}.{key}: shape must be {tuple(x.shape)}, got {tuple(getattr(found[key], 'shape', ()))} "
                "in the checkpoint; resume with the layout and hidden sizes it was made with"
            )
    for key in found:
        if key not in wanted:
            raise FormatError(
                f"{name}.{key}: is in the checkpoint but not in the network; it is of another one"
            )
