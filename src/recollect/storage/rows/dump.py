"""The dump of packed rows: what memory, shared and memmap storages all write, and load as one another.

`rows-<commit>.bin` has the packed rows at their physical place, `stamps-<commit>.bin` their generations; lanes and
segments stand in the manifest.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from recollect import _core
from recollect.budget import check_fits
from recollect.errors import ContentionError, FormatError
from recollect.files.record import damage_in
from recollect.memory.rows import Rows, packed_codec
from recollect.spaces import Layout
from recollect.storage.dump import DumpWriter
from recollect.storage.manifest import MANIFEST, STORAGE, check_files

_CHUNK_NBYTES = 1 << 22
_TRIES = 8
Ints = np.ndarray[Any, np.dtype[np.int64]]
Copied = TypeVar("Copied")
Found = tuple[int, int, int, int, int, int]


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


@dataclass(frozen=True, slots=True)
class Saved:
    """What a dump holds: the window of each lane, and the segments as the manifest has them."""

    windows: list[LaneWindow]
    segments: list[list[int]] | None


def write_rows(writer: DumpWriter, rows: Rows) -> Saved:
    """Write the rows that outlive the copying, beside live writers; return what was saved."""
    (top, segments), kept = _beside_writers(
        rows, lambda windows: (_write_files(writer, rows, _live_ranges(rows, windows)), _all_segments(rows))
    )
    windows = [w if w.count and max(end for _, end in w.rows()) <= top else _none_of(w) for w in kept]
    return Saved(windows, segments_record(windows, segments))


def _beside_writers(rows: Rows, copy: Callable[[list[Any]], Copied]) -> tuple[Copied, list[LaneWindow]]:
    """Do `copy(windows)`, again if rows changed in place; return its result and the samples that outlived it.

    The windows are looked at again last of all: what they still show was there, unchanged, all the time.
    """
    for _ in range(_TRIES):
        rows.native.count()  # waits until no change in place is under way, and ends that of a dead writer
        before = rows.native.windows()
        _core.fault_point()
        try:
            copied = copy(before)
        except (
            ContentionError
        ):  # a writer began to overwrite one of these rows and was stopped or killed in it
            continue
        after = rows.native.windows()
        if all(a[2] == b[2] and a[2] % 2 == 0 for a, b in zip(before, after)):
            both = enumerate(zip(before, after))
            return copied, [_window(rows, k, max(b[0], a[0]), max(b[1], a[0])) for k, (b, a) in both]
    raise ContentionError("dumps: samples were overwritten in place or removed during every try; pause that")


def _none_of(window: LaneWindow) -> LaneWindow:
    return LaneWindow(window.start, window.capacity, 0, 0)


def _live_ranges(rows: Rows, windows: list[Any]) -> list[tuple[int, int]]:
    """The rows that windows show. Where the cursor was never used, rows were set by number: all that were written."""
    if any(cursor for _, cursor, _ in windows):
        return [r for k, (low, end, _) in enumerate(windows) for r in _window(rows, k, low, end).rows()]
    top = 0
    for first, n in _parts(rows.geometry.capacity or 0, 8):
        written = np.flatnonzero(rows.native.generations(first, n))
        top = first + int(written[-1]) + 1 if len(written) else top
    return [(0, top)] if top else []


def _parts(n_rows: int, row_nbytes: int) -> Iterator[tuple[int, int]]:
    """`(first, n)` of parts that take no more than a chunk of memory each."""
    step = max(1, _CHUNK_NBYTES // max(row_nbytes, 1))
    for first in range(0, n_rows, step):
        yield first, min(step, n_rows - first)


def _write_files(writer: DumpWriter, rows: Rows, ranges: list[tuple[int, int]]) -> int:
    top = max((end for _, end in ranges), default=0)
    size = rows.geometry.row_nbytes
    with writer.file(f"rows-{writer.commit}.bin") as f:
        os.ftruncate(f.fileno(), top * size)
        for first, _, block in _blocks(rows, ranges):
            f.seek(first * size)
            f.write(block.data)
            _core.fault_point()
    with writer.file(f"stamps-{writer.commit}.bin") as f:
        os.ftruncate(f.fileno(), top * 8)
        for start, end in ranges:
            for first, n in _parts(end - start, 8):
                f.seek((start + first) * 8)
                f.write(rows.native.generations(start + first, n).astype("<i8").data)
    return top


def _blocks(rows: Rows, ranges: list[tuple[int, int]]) -> Iterator[tuple[int, int, Any]]:
    size = rows.geometry.row_nbytes
    codec = packed_codec(size)
    for start, end in ranges:
        for first, n in _parts(end - start, size):
            last = start + first + n
            yield start + first, last, rows.native.read_rows(codec, np.arange(start + first, last))


def segments_record(windows: list[LaneWindow], found: list[Found] | None) -> list[list[int]] | None:
    """The segments as the manifest has them, clipped to the windows that were saved."""
    if found is None:
        return None
    kept = []
    for ident, lane, first, length, step, earlier in found:
        w = windows[lane]
        run = w.capacity
        place = first - w.start - w.offset if run is None else (first - w.start - w.offset) % run
        if place >= w.count and run is not None:
            place -= run  # its head was overwritten since: it lies before the window, or all of it is newer
        if place + length > 0:
            place, length, step = place - earlier, length + earlier, step - earlier
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


def _all_segments(rows: Rows) -> list[Found] | None:
    """All segments: `(id, lane, first row, length, step, earlier)`; an open one as ending at its last sample.

    The open ones first: one that is closed meanwhile is found again, and one that is opened is newer than the dump.
    """
    if not rows.geometry.tagged:
        return None
    _core.fault_point()
    found = {s[0]: s for k in range(rows.geometry.n_lanes) if (s := _open_segment(rows, k)) is not None}
    _core.fault_point()
    ids, lanes, _, lengths, firsts, steps = (a.tolist() for a in rows.native.segments())
    for segment in zip(ids, lanes, firsts, lengths, steps, [0] * len(ids)):
        found[segment[0]] = segment
    return list(found.values())


def _open_segment(rows: Rows, lane: int) -> Found | None:
    """The open segment of a lane. `earlier` samples before its first row are its own too, as far as they live.

    Between finding and locating it, samples may have been evicted: what is located lies that much later in it.
    """
    while (found := rows.native.open_segment(lane)) is not None:
        start, end, ident = found
        _core.fault_point()
        try:
            row, _, segment, step = rows.native.locate(np.array([start, end - 1]))
        except IndexError:  # samples were removed since; the caller will notice
            continue
        if (segment == ident).all():
            return int(ident), lane, int(row[0]), end - start, int(step[0]), int(step[0])
    return None


# -- reading


def open_rows(path: Path, manifest: dict[str, Any], layout: Layout, *, verify: bool) -> Rows:
    """Map the rows of a dump for reading, without copying them."""
    with _gone_in(path), damage_in(path / MANIFEST):
        commit = int(manifest["commit"])
        others = [
            f"{STORAGE}/stamps-{commit}.bin",
            *[f"{STORAGE}/orders-{commit}.bin"] * has_orders(manifest),
        ]
        windows = [LaneWindow(w["start"], w["capacity"], w["count"], w["offset"]) for w in manifest["lanes"]]
        capacity = manifest["capacity"]
        segments = manifest["segments"]
        if manifest["layout_hash"] != layout.hash:
            raise FormatError(f"{path}: its layout hash is not that of its space; it is damaged")
        sizes = [manifest["files"][name]["bytes"] for name in (f"{STORAGE}/rows-{commit}.bin", *others)]
        # Every row that is shown has a stamp; rows of no bytes have nothing else that says how many there are.
        n_rows = min(sizes[1] // 8, sizes[0] // layout.row_nbytes if layout.row_nbytes else sizes[1] // 8)
        _check_windows(path, windows, capacity, n_rows)  # before a file of holes is read whole
        _core.fault_point()
        check_files(path, manifest, verify=verify, read_whole=others)
        held = capacity or max(windows[0].count + windows[0].offset, 1)
        tagged = segments is not None or has_orders(manifest)
        words = 8 * held * (3 if tagged else 1)
        check_fits(words, f"{path}: capacity", "free memory, or it is damaged", when=" to be loaded")
        rows = Rows.in_mapped_file(path / STORAGE / f"rows-{commit}.bin", layout, held, len(windows), tagged)
    try:
        with _gone_in(path), damage_in(path / MANIFEST):
            _core.fault_point()
            _set_stamps(rows, path / STORAGE / f"stamps-{commit}.bin", held)
            _core.fault_point()
            _set_windows(rows, windows)
            _set_segments(rows, segments, manifest.get("segment_counter", 0))
            if has_orders(manifest):
                _set_orders(rows, path / STORAGE / f"orders-{commit}.bin")
            rows.native.freeze()
    except BaseException:
        rows.close()
        raise
    return rows


@contextmanager
def _gone_in(path: Path) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise FormatError(f"{error.filename}: is gone; the dump was replaced meanwhile: load again") from None


def _check_windows(path: Path, windows: list[LaneWindow], capacity: int | None, n_rows: int) -> None:
    """Raise for lanes that are no equal parts of the capacity, or show rows that the file does not have."""
    run = None if capacity is None else capacity // max(len(windows), 1)
    for k, w in enumerate(windows):
        fits = (w.start, w.capacity) == (k * (run or 0), run) and w.count >= 0 <= w.offset
        fits = fits and (w.count <= run and w.offset < run if run else len(windows) == 1)
        if not fits or max((end for _, end in w.rows()), default=0) > n_rows:
            raise FormatError(
                f"{path / MANIFEST}: lane {k} cannot be in {n_rows} rows, got {w}; it is damaged"
            )


def _set_stamps(rows: Rows, file: Path, n_rows: int) -> None:
    with open(file, "rb") as f:
        n = os.fstat(f.fileno()).st_size // 8
        if n > n_rows:
            raise FormatError(f"{file}: must have at most {n_rows} stamps, got {n}; it is damaged")
        for first, part in _parts(n, 8):
            rows.native.set_generations(first, np.fromfile(f, "<i8", part).astype(np.int64))


def copy_rows(source: Rows, target: Rows) -> None:
    """Copy what outlives the copying, with generations and segments, to a new target of the same layout."""
    codec = packed_codec(source.geometry.row_nbytes)

    def copy(windows: list[Any]) -> None:
        ranges = _live_ranges(source, windows)
        top = max((end for _, end in ranges), default=0)
        target.native.reserve_rows(top)
        for first, last, block in _blocks(source, ranges):
            target.native.overwrite_rows(codec, np.arange(first, last), [block])
            target.native.set_generations(first, source.native.generations(first, last - first))
        _core.fault_point()
        if source.geometry.tagged:
            _copy_tags(source, target, source.geometry.capacity or top)

    _, windows = _beside_writers(source, copy)
    _set_windows(target, windows)


def _copy_tags(source: Rows, target: Rows, top: int) -> None:
    count = source.native.count()
    part = count if source.is_shared else 1 << 16  # what others may write is looked at once
    for start in range(0, count, part):
        row, _, segment, step = source.native.locate(np.arange(start, min(start + part, count)))
        cuts = np.flatnonzero((np.diff(row) != 1) | (np.diff(segment) != 0) | (np.diff(step) != 1)) + 1
        for first, last in zip([0, *cuts.tolist()], [*cuts.tolist(), len(row)]):
            if row[last - 1] < top:
                target.native.set_tags(int(row[first]), last - first, int(segment[first]), int(step[first]))
    target.native.set_segment_counter(source.native.segment_counter())


def has_orders(manifest: dict[str, Any]) -> bool:
    """Whether each row has its order of arrival (evict="lowest") in the place of a step."""
    return bool((manifest.get("evict") or {}).get("by") == "lowest")


def write_orders(writer: DumpWriter, rows: Rows, count: int) -> None:
    """Write the order of arrival of the `count` samples that were saved."""
    with writer.file(f"orders-{writer.commit}.bin") as f:
        f.write(rows.native.locate(np.arange(count))[3].astype("<i8").data)


def _set_orders(rows: Rows, file: Path) -> None:
    orders = np.fromfile(file, "<i8")
    if len(orders) != rows.native.count():
        raise FormatError(
            f"{file}: must have {rows.native.count()} numbers, got {len(orders)}; it is damaged"
        )
    at = rows.native.locate(np.arange(len(orders)))[0]
    for row, order in zip(at.tolist(), orders.tolist()):
        rows.native.set_tags(row, 1, 1, order)


def _set_windows(rows: Rows, windows: list[LaneWindow]) -> None:
    for lane, w in enumerate(windows):
        rows.native.set_window(lane, w.offset, w.offset + w.count)


def _set_segments(rows: Rows, segments: list[list[int]] | None, counter: int) -> None:
    if not rows.geometry.tagged:
        return
    for ident, _, first, length, clipped in segments or ():
        rows.native.set_tags(first, length, ident, clipped)
    rows.native.set_segment_counter(counter)
