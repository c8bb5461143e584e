"""The dump of packed rows: what memory, shared and memmap storages all write, and load as one another.

`rows-<commit>.bin` has the packed rows at their physical place, `stamps-<commit>.bin` their generations; lanes and
segments stand in the manifest.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from recollect.errors import ContentionError, FormatError
from recollect.memory.rows import Rows, packed_codec
from recollect.spaces import Layout
from recollect.storage.dump import STORAGE, DumpWriter, check_files

_CHUNK_NBYTES = 1 << 22
_TRIES = 8
Ints = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, slots=True)
class LaneWindow:
    """The live samples of one lane: `count` from row `start + offset` on, round the lane's `capacity` rows."""

    start: int
    capacity: int | None
    count: int
    offset: int

    def rows(self) -> list[tuple[int, int]]:
        """The physical rows, as one or two half-open ranges."""
        first, end = self.start + self.offset, self.start + self.offset + self.count
        top = end if self.capacity is None else self.start + self.capacity
        return [r for r in ((first, min(end, top)), (self.start, self.start + end - top)) if r[1] > r[0]]


def windows_of(rows: Rows) -> list[LaneWindow]:
    """What each lane shows now."""
    return [_window(rows, k, low, cursor) for k, (low, cursor, _) in enumerate(rows.native.windows())]


def _window(rows: Rows, lane: int, low: int, cursor: int) -> LaneWindow:
    g = rows.geometry
    if g.capacity is None:
        return LaneWindow(0, None, cursor - low, low)
    run = g.capacity // g.n_lanes
    return LaneWindow(lane * run, run, cursor - low, low % run)


def write_rows(writer: DumpWriter, rows: Rows, segments: Any = None) -> list[LaneWindow]:
    """Write the rows that outlive the copying, beside live writers; return the windows that were saved."""
    for _ in range(_TRIES):
        before = rows.native.windows()
        top = _write_files(
            writer, rows, [_window(rows, k, low, end) for k, (low, end, _) in enumerate(before)]
        )
        after = rows.native.windows()
        if all(a[2] == b[2] for a, b in zip(before, after)):
            break
    else:
        raise ContentionError(
            "dumps: samples were overwritten in place or removed during every try; pause that"
        )
    kept = [_window(rows, k, max(b[0], a[0]), max(b[1], a[0])) for k, (b, a) in enumerate(zip(before, after))]
    return [w if w.count and max(end for _, end in w.rows()) <= top else _none_of(w) for w in kept]


def _none_of(window: LaneWindow) -> LaneWindow:
    return LaneWindow(window.start, window.capacity, 0, 0)


def _write_files(writer: DumpWriter, rows: Rows, windows: list[LaneWindow]) -> int:
    ranges = [r for w in windows for r in w.rows()]
    top = max((end for _, end in ranges), default=0)
    size = rows.geometry.row_nbytes
    with writer.file(f"rows-{writer.commit}.bin") as f:
        os.ftruncate(f.fileno(), top * size)
        for first, _, block in _blocks(rows, ranges):
            f.seek(first * size)
            f.write(block.data)
    with writer.file(f"stamps-{writer.commit}.bin") as f:
        generations = rows.native.generations(0, top)
        live = np.zeros(top, bool)
        for first, end in ranges:
            live[first:end] = True
        f.write(np.where(live, generations, 0).astype("<i8").data)
    return top


def _blocks(rows: Rows, ranges: list[tuple[int, int]]) -> Iterator[tuple[int, int, Any]]:
    size = rows.geometry.row_nbytes
    codec, step = packed_codec(size), max(1, _CHUNK_NBYTES // max(size, 1))
    for start, end in ranges:
        for first in range(start, end, step):
            last = min(first + step, end)
            yield first, last, rows.native.read_rows(codec, np.arange(first, last))


def segments_record(rows: Rows, windows: list[LaneWindow]) -> list[list[int]] | None:
    """The segments as the manifest has them, clipped to the windows that were saved; an open one as ending there."""
    if not rows.geometry.tagged:
        return None
    ids, lanes, _, lengths, firsts, steps = (a.tolist() for a in rows.native.segments())
    found = list(zip(ids, lanes, firsts, lengths, steps))
    found += _open_segments(rows)
    kept = []
    for ident, lane, first, length, step in found:
        w = windows[lane]
        run = w.capacity
        place = first - w.start - w.offset if run is None else (first - w.start - w.offset) % run
        if place + length > w.count and place >= w.count and run is not None:
            place -= run  # its head was overwritten since: it lies before the window
        head = max(0, -place)
        length = min(place + length, w.count) - max(place, 0)
        if length > 0:
            row = (
                w.start + (w.offset + max(place, 0))
                if run is None
                else w.start + (w.offset + max(place, 0)) % run
            )
            kept.append((lane, max(place, 0), [ident, lane, row, length, step + head]))
    return [record for *_, record in sorted(kept)]


def _open_segments(rows: Rows) -> list[tuple[int, int, int, int, int]]:
    out = []
    for lane in range(rows.geometry.n_lanes):
        found = rows.native.open_segment(lane)
        if found is not None:
            start, end, ident = found
            row, _, _, step = rows.native.locate(np.array([start]))
            out.append((ident, lane, int(row[0]), end - start, int(step[0])))
    return out


# -- reading


def open_rows(path: Path, manifest: dict[str, Any], layout: Layout, *, verify: bool) -> Rows:
    """Map the rows of a dump for reading, without copying them."""
    check_files(path, manifest, verify=verify)
    try:
        windows = [LaneWindow(w["start"], w["capacity"], w["count"], w["offset"]) for w in manifest["lanes"]]
        capacity = manifest["capacity"]
        commit = manifest["commit"]
        segments = manifest["segments"]
        if manifest["layout_hash"] != layout.hash:
            raise FormatError(f"{path}: its layout hash is not that of its space; it is damaged")
        held = capacity or max(windows[0].count + windows[0].offset, 1)
        rows = Rows.in_mapped_file(
            path / STORAGE / f"rows-{commit}.bin", layout, held, len(windows), segments is not None
        )
    except (KeyError, TypeError, IndexError) as error:
        raise FormatError(f"{path}: its manifest lacks or garbles {error}; it is damaged") from None
    except FileNotFoundError as error:
        raise FormatError(f"{error.filename}: is gone; the dump was replaced meanwhile: load again") from None
    try:
        stamps = np.fromfile(path / STORAGE / f"stamps-{commit}.bin", "<i8").astype(np.int64)
        rows.native.set_generations(0, stamps)
        _set_windows(rows, windows)
        _set_segments(rows, segments, manifest.get("segment_counter", 0))
        rows.native.freeze()
    except FileNotFoundError as error:
        rows.close()
        raise FormatError(f"{error.filename}: is gone; the dump was replaced meanwhile: load again") from None
    except BaseException:
        rows.close()
        raise
    return rows


def copy_rows(source: Rows, target: Rows) -> None:
    """Copy rows, generations, windows and segments of a quiet source to a new target of the same layout."""
    windows = windows_of(source)
    ranges = [r for w in windows for r in w.rows()]
    target.native.reserve_rows(max((end for _, end in ranges), default=0))
    codec = packed_codec(source.geometry.row_nbytes)
    for first, last, block in _blocks(source, ranges):
        target.native.overwrite_rows(codec, np.arange(first, last), [block])
        target.native.set_generations(first, source.native.generations(first, last - first))
    _set_windows(target, windows)
    _set_segments(target, segments_record(source, windows), source.native.segment_counter())


def _set_windows(rows: Rows, windows: list[LaneWindow]) -> None:
    for lane, w in enumerate(windows):
        rows.native.set_window(lane, w.offset, w.offset + w.count)


def _set_segments(rows: Rows, segments: list[list[int]] | None, counter: int) -> None:
    if not rows.geometry.tagged:
        return
    for ident, _, first, length, clipped in segments or ():
        rows.native.set_tags(first, length, ident, clipped)
    rows.native.set_segment_counter(counter)
