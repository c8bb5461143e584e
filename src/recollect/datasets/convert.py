"""Copy whatever is at a path into another form, so that a killed copy goes on where it was.

The copy grows in `NAME.partial/data` beside its place, in a storage that commits as it goes, and is renamed at the end.
A copy is a prefix of its source: to go on, what follows the last whole segment is cut off and written again.
`NAME.partial` is locked from the first step to the last.
"""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np
from gymnasium import spaces

from recollect import checks, interrupts
from recollect.batch import BatchBase
from recollect.datasets.lerobot.dataset import check_source
from recollect.datasets.stage import take_stage
from recollect.errors import FormatError, LaneBusyError
from recollect.files import OwnedDirectory, move_directory, remove_empty, remove_inside, replace_file
from recollect.files.record import read_json
from recollect.replay import ReplayBuffer
from recollect.spaces import compile_layout
from recollect.spaces.json import canonical, space_to_json
from recollect.spaces.tree import leaf_paths, path_name
from recollect.storage.filed.columns import longest
from recollect.storage.filed.commits import commits_of
from recollect.storage.manifest import MANIFEST

RECORD, DATA, DUMP = "convert.json", "data", "dump"  # what `NAME.partial` holds; DUMP only for "memory"
TARGETS = ("memory", "memmap", "hdf5", "parquet", "image", "video", "dict", "lerobot")
FLUSH_S = 5.0  # how much work a kill may cost
PIECE_NBYTES = (
    4 << 20
)  # of a Parquet file: large enough to be read fast, small enough to keep several decoded


def convert(source: BatchBase, path: str | Path, target: str, *, origin: str = "", chunk_size: int = 1024,
            progress: Callable[[int], Any] | None = None, **options: Any) -> int:  # fmt: skip
    """Copy a batch to `path` as a storage of this short name or as "lerobot"; return how many samples were there.

    The files of a LeRobot set that Recollect wrote are compared with their checksums first: a copy of damaged files
    would have checksums that match.

    `origin` says where the source is from: a half-made copy of another is refused. `options` go to the storage, or to
    `to_lerobot`. For "dict" pictures are video (exact) and the rest is Parquet.
    """
    path, tell = Path(path).absolute(), progress or (lambda n: None)
    checks.choice("target", target, TARGETS)
    checks.count("chunk_size", chunk_size)
    if not len(source):
        raise FormatError(f"{origin or 'source'}: must hold samples, got none")
    if os.path.lexists(path):
        raise FileExistsError(f"{path}: is there already; remove it or choose another path")
    if target == "lerobot":
        from recollect.datasets.lerobot.writer import to_lerobot

        to_lerobot(source, path, chunk_size=chunk_size, progress=tell, **options)
        return len(source)
    return _into_storage(source, path, target, origin, chunk_size, tell, options)


def _into_storage(source: BatchBase, path: Path, target: str, origin: str, chunk_size: int, tell: Any,
                  options: dict[str, Any]) -> int:  # fmt: skip
    check_source(source)
    segments = source.get_segments()
    record = {"origin": origin, "target": target, "length": len(source), "tracked": segments is not None,
              "space": canonical(space_to_json(source.single_space)),
              "options": sorted(map(str, options.items()))}  # fmt: skip
    owned = take_stage(path, RECORD)
    try:
        _check_same(owned.path, record)
    except BaseException:
        owned.release()
        raise
    whole, done = owned.path / (DUMP if target == "memory" else DATA), len(source)
    try:
        if target != "memory" or not (whole / MANIFEST).exists():
            with _closed_whole(_opened(owned, record, source, target, options)) as buffer:
                bounds = [(0, len(source))] if segments is None else segments
                done = _cut_to_whole(buffer, bounds, segments is not None)
                tell(done)
                _copy(source, buffer, bounds, done, segments is not None, chunk_size, tell)
                if target == "memory":
                    buffer.dumps(whole)
        if target == "memory":
            remove_inside(owned.path, f"{DATA}/")
        with interrupts.deferred():  # what is at its place leaves nothing beside it
            move_directory(whole, path)
            _let_go(owned)
    finally:
        _let_go(owned)
    return done


@contextmanager
def _closed_whole(buffer: ReplayBuffer) -> Iterator[ReplayBuffer]:
    """Close a buffer at the end; Ctrl-C meanwhile is raised then, or nobody could close it again."""
    try:
        yield buffer
    finally:
        with interrupts.deferred():
            buffer.close()


def _let_go(owned: OwnedDirectory) -> None:
    """Give the stage back, and remove it unless a part of a copy is in it; may be called twice."""
    if not owned.is_held:
        return
    with interrupts.deferred():
        with suppress(OSError):
            if not _has_part(owned.path):
                owned.note([RECORD])
                owned.remove_noted(())
        owned.release()
        remove_empty([owned.path])


def _has_part(stage: Path) -> bool:
    return any(os.path.lexists(stage / name / MANIFEST) for name in (DATA, DUMP))


def _check_same(stage: Path, record: dict[str, Any]) -> None:
    """Raise FormatError if a part of another copy is there."""
    if not os.path.lexists(stage / RECORD):
        return
    found = read_json(stage / RECORD, follow=False)
    if found != record and (_has_part(stage) or found.keys() != record.keys()):
        differs = sorted(key for key in record if found.get(key) != record[key])
        raise FormatError(
            f"{stage}: is the half-made copy of something else ({differs} differ); remove it first"
        )


def _opened(
    owned: OwnedDirectory, record: dict[str, Any], source: BatchBase, target: str, options: Any
) -> ReplayBuffer:
    """What a killed copy left, or a new one."""
    place = owned.path / DATA
    if (place / MANIFEST).exists():
        try:
            return ReplayBuffer.load_from(place, read_only=False)
        except LaneBusyError:
            gc.collect()  # the stage is ours, so it is what Ctrl-C left of a call of this process
            return ReplayBuffer.load_from(place, read_only=False)
    owned.remove_noted(())
    owned.note([f"{DATA}/", f"{DUMP}/"])
    replace_file(
        owned.path / RECORD,
        lambda f: f.write(json.dumps(record).encode()),
        note=lambda name: owned.note([name]),
    )
    return _begin(place, record, source, target, options)


def _begin(place: Path, record: dict[str, Any], source: BatchBase, target: str, options: Any) -> ReplayBuffer:
    args: tuple[Any, ...] = ()
    knows = getattr(getattr(source, "storage", None), "layout", source)
    most = getattr(knows, "max_lengths", None)
    if most and target in ("memory", "memmap", "hdf5"):
        options = {"max_lengths": dict(most), **options}
    if target == "dict":
        args = (_patterns(source.single_space),)
    if target == "parquet":
        options = {"piece_size": _piece_size(source.single_space), **options}
    return ReplayBuffer.create("memmap" if target == "memory" else target, source.single_space, *args,
                               cache_path=place, capacity=None, maintain_segment_metadata=record["tracked"],
                               **options)  # fmt: skip


def _piece_size(space: Any) -> int:
    """How many rows a Parquet file of a converted set has; a Sequence counts as one element."""
    most: dict[str, int] = {}
    longest(space, (), most)
    return max(64, min(65536, PIECE_NBYTES // max(1, compile_layout(space, most).row_nbytes)))


def _patterns(space: Any) -> dict[str, str]:
    """Video for pictures, Parquet for the rest."""
    found = {}
    for path, leaf in leaf_paths(space):
        shape: tuple[int, ...] = getattr(leaf, "shape", None) or ()
        if isinstance(leaf, spaces.Box) and leaf.dtype == np.uint8 and len(shape) == 3 and shape[2] in (1, 3):
            found[path_name(path)] = "video"
    return {**found, "*": "parquet"} if len(found) < len(list(leaf_paths(space))) else found


def _cut_to_whole(buffer: ReplayBuffer, bounds: list[tuple[int, int]], tracked: bool) -> int:
    """Drop what follows the last whole segment, and return how many samples stay."""
    n = len(buffer)
    keep = max((end for _, end in bounds if end <= n), default=0) if tracked else n
    if keep < n:
        buffer.engine.truncate(keep)
    return keep


def _copy(source: BatchBase, buffer: ReplayBuffer, bounds: list[tuple[int, int]], done: int, tracked: bool,
          chunk_size: int, tell: Any) -> None:  # fmt: skip
    flushed, commits = monotonic(), commits_of(buffer.inner_storage)
    if commits is not None:
        commits.waits_for_flush = True  # a commit for each episode would take longer than the copy
    for first, end, closes in _parts(bounds, done, chunk_size):
        block = source.get_at(np.arange(first, end))
        if tracked:
            buffer._extend_part(block, closes)
        else:
            buffer.extend(block)
        tell(end - first)
        if commits is not None and (closes or not tracked) and monotonic() - flushed > FLUSH_S:
            buffer.inner_storage.flush()
            flushed = monotonic()


def _parts(bounds: list[tuple[int, int]], done: int, chunk_size: int) -> Iterator[tuple[int, int, bool]]:
    for start, end in bounds:
        for first in range(max(start, done), end, chunk_size):
            last = min(first + chunk_size, end)
            yield first, last, last == end
