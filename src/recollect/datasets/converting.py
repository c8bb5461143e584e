"""Copy whatever is at a path into another form, so that a killed copy goes on where it was.

The copy grows in `NAME.partial` beside its place, in a storage that commits as it goes, and is renamed at the end. A
copy is a prefix of its source: to go on, what follows the last whole segment is cut off and written again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np
from gymnasium import spaces

from recollect.batch import BatchBase
from recollect.datasets.lerobot_meta import read_json
from recollect.errors import FormatError
from recollect.files import OwnedDirectory, make_directory, remove_empty, replace_file, sync_directory
from recollect.files.directory import NAME as WRITER
from recollect.replay import ReplayBuffer
from recollect.replay.plain import PlainEngine
from recollect.spaces import compile_layout
from recollect.spaces.json import canonical, space_to_json
from recollect.spaces.tree import leaf_paths, path_name
from recollect.storage.columns import longest
from recollect.storage.dump import remove_dump
from recollect.storage.live import live_of

RECORD = "convert.json"
TARGETS = ("memory", "memmap", "hdf5", "parquet", "image", "video", "dict", "lerobot")
FLUSH_S = 5.0  # how much work a kill may cost
PIECE_NBYTES = (
    4 << 20
)  # of a Parquet file: large enough to be read fast, small enough to keep several decoded


def convert(source: BatchBase, path: str | Path, target: str, *, origin: str = "", chunk_size: int = 1024,
            progress: Callable[[int], Any] | None = None, **options: Any) -> int:  # fmt: skip
    """Copy a batch to `path` as a storage of this short name or as "lerobot"; return how many samples were there.

    `origin` says where the source is from: a half-made copy of another is refused. `options` go to the storage, or to
    `to_lerobot`. For "dict" pictures are video (exact) and the rest is Parquet.
    """
    path, tell = Path(path), progress or (lambda n: None)
    if target not in TARGETS:
        raise ValueError(f"target: must be one of {list(TARGETS)}, got {target!r}")
    if not len(source):
        raise FormatError(f"{origin or 'source'}: must hold samples, got none")
    if path.exists():
        raise FileExistsError(f"{path}: is there already; remove it or choose another path")
    if target == "lerobot":
        from recollect.datasets.lerobot_writer import to_lerobot

        to_lerobot(source, path, chunk_size=chunk_size, progress=tell, **options)
        return len(source)
    return _into_storage(source, path, target, origin, chunk_size, tell, options)


def _into_storage(source: BatchBase, path: Path, target: str, origin: str, chunk_size: int, tell: Any,
                  options: dict[str, Any]) -> int:  # fmt: skip
    stage = path.with_name(path.name + ".partial")
    segments = source.get_segments()
    record = {"origin": origin, "target": target, "length": len(source), "tracked": segments is not None,
              "space": canonical(space_to_json(source.single_space)),
              "options": sorted(map(str, options.items()))}  # fmt: skip
    begun = _begun(stage, record)  # which may be empty, hence false
    with _begin(stage, record, source, target, options) if begun is None else begun as buffer:
        bounds = [(0, len(source))] if segments is None else segments
        done = _cut_to_whole(buffer, bounds, segments is not None)
        tell(done)
        _copy(source, buffer, bounds, done, segments is not None, chunk_size, tell)
        if target == "memory":
            buffer.dumps(path)
    if target == "memory":
        remove_dump(stage, [RECORD])
    else:
        os.rename(stage, path)
        sync_directory(path.parent)
        (path / RECORD).unlink()
    return done


def _begun(stage: Path, record: dict[str, Any]) -> ReplayBuffer | None:
    """What a killed copy left, None if nothing that can be used."""
    if not os.path.lexists(stage / RECORD):
        if stage.is_dir() and any(stage.iterdir()) and not (stage / WRITER).exists():
            raise FileExistsError(
                f"{stage}: must be new or a half-made copy, got another directory; remove it or choose another path"
            )
        return None
    found = read_json(stage / RECORD)
    if found != record:
        differs = sorted(key for key in record if found.get(key) != record[key])
        raise FormatError(
            f"{stage}: is the half-made copy of something else ({differs} differ); remove it first"
        )
    return ReplayBuffer.load_from(stage, read_only=False) if (stage / "manifest.json").exists() else None


def _begin(stage: Path, record: dict[str, Any], source: BatchBase, target: str, options: Any) -> ReplayBuffer:
    args: tuple[Any, ...] = ()
    most = getattr(getattr(source, "storage", None), "layout", None)
    if most is not None and most.max_lengths and target in ("memory", "memmap", "hdf5"):
        options = {"max_lengths": dict(most.max_lengths), **options}
    if target == "dict":
        args = (_patterns(source.single_space),)
    if target == "parquet":
        options = {"piece_size": _piece_size(source.single_space), **options}
    made = make_directory(stage)
    with OwnedDirectory.take(stage) as owned:  # its record first: without one, a directory is not ours
        replace_file(
            stage / RECORD,
            lambda f: f.write(json.dumps(record).encode()),
            note=lambda name: owned.note([name]),
        )
        owned.forget()
    try:
        return ReplayBuffer.create("memmap" if target == "memory" else target, source.single_space, *args,
                                   cache_path=stage, capacity=None, maintain_segment_metadata=record["tracked"],
                                   **options)  # fmt: skip
    except BaseException:
        (stage / RECORD).unlink(missing_ok=True)
        remove_empty(made)
        raise


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
        if isinstance(buffer.engine, PlainEngine):
            buffer.engine.truncate(keep)
        else:
            buffer.remove_at(np.arange(keep, n))
    return keep


def _copy(source: BatchBase, buffer: ReplayBuffer, bounds: list[tuple[int, int]], done: int, tracked: bool,
          chunk_size: int, tell: Any) -> None:  # fmt: skip
    flushed, live = monotonic(), live_of(buffer.inner_storage)
    if live is not None:
        live.waits_for_flush = True  # a commit for each episode would take longer than the copy
    for first, end, closes in _parts(bounds, done, chunk_size):
        block = source.get_at(np.arange(first, end))
        if tracked:
            buffer._extend_part(block, closes)
        else:
            buffer.extend(block)
        tell(end - first)
        if live is not None and (closes or not tracked) and monotonic() - flushed > FLUSH_S:
            buffer.inner_storage.flush()
            flushed = monotonic()


def _parts(bounds: list[tuple[int, int]], done: int, chunk_size: int) -> Iterator[tuple[int, int, bool]]:
    for start, end in bounds:
        for first in range(max(start, done), end, chunk_size):
            last = min(first + chunk_size, end)
            yield first, last, last == end
