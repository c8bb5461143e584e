"""ImageStorage: an image file per row, for data sets that people look at and other programs read."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from typing import Any, Self

import numpy as np

from recollect import _core, checks
from recollect.budget import check_fits
from recollect.errors import FormatError
from recollect.files import seal_file
from recollect.indexing import normalize
from recollect.spaces import Layout
from recollect.spaces.tree import array_form
from recollect.storage.filed.base import Array, ColumnStorage, Ints, Keys, from_saved
from recollect.storage.filed.commits import PIECE, Commits
from recollect.storage.rows.base import encode_at

_ENTRY = np.dtype([("generation", "<i8"), ("bytes", "<i8"), ("crc32c", "<u4"), ("pad", "<u4")])
_BLOCK = 1024  # rows in one index file
_DEEP = ("png", "tiff")  # formats that hold 16 bits


class ImageStorage(ColumnStorage):
    """A file per row: uint8 images HxW, HxWx1 or HxWx3, or uint16 HxW; PNG, exact, unless a lossy `format=` is named.

    Each write of a row is a new file, named by row and generation; a commit (a thousand writes, the end of a segment,
    `flush()`) names the new ones in index files of 1,024 rows each, and deletes the old.

    Ownership: the files stay; `close()` commits.
    Concurrency: one writer; readers, in any process, see the last commit when they load.

    >>> import numpy as np, recollect as rc, tempfile
    >>> path = tempfile.mkdtemp() + "/frames"
    >>> with rc.ReplayBuffer.create("image", ((4, 4, 3), "uint8"), capacity=8, cache_path=path) as buf:
    ...     buf.append(np.full((4, 4, 3), 7, "uint8"))
    >>> rc.ReplayBuffer.load_from(path)[0].max().item()
    7
    """

    short_name = "image"
    create_options = ("format", "quality", "piece_size")
    requires = ("PIL.Image", "images")
    commits_from = PIECE

    def __init__(self, commits: Commits, prefix: str, space: Any, capacity: int | None, *, format: Any = "png",
                 quality: int | None = None, piece_size: Any = 1024, cast: bool = False,
                 max_lengths: dict[str, int] | None = None) -> None:  # fmt: skip
        self._pil = self.need()
        super().__init__(commits, prefix, space, capacity, cast, max_lengths)
        self._dtype, self._shape = check_frames(
            self.single_instance_space, type(self).__name__, deep_channel=False
        )
        self._pil.init()
        known = self._pil.SAVE.keys() & self._pil.OPEN.keys()
        if not isinstance(format, str) or format.upper() not in known:
            raise ValueError(
                f"format: must be one that Pillow writes and reads, as 'png' or 'jpeg', got {format!r}"
            )
        if self._dtype == np.uint16 and format.lower() not in _DEEP:
            raise ValueError(f"format: uint16 needs one of {list(_DEEP)}, got {format!r}")
        checks.count("piece_size", piece_size, most=(1 << 31) - 1)
        self.format, self.quality, self.piece_size = format.lower(), quality, piece_size
        self._entries = _no_entries(capacity or 0)
        self._length = capacity or 0
        self._index: dict[int, str] = {}  # block of rows -> its committed index file
        self._unsynced: dict[str, int] = {}  # files since the last commit, and their rows
        self._changed: set[int] = set()  # blocks whose index file is out of date
        self._newest = 0  # generations go on, whatever is dropped

    @classmethod
    def under(cls, commits: Commits, prefix: str, space: Any, capacity: int | None, **options: Any) -> Self:
        return cls(commits, prefix, space, capacity, **options)

    @classmethod
    def reopen(cls, commits: Commits, prefix: str, saved: dict[str, Any], space: Any, capacity: int | None,
               length: int, **options: Any) -> Self:  # fmt: skip
        def make(known: dict[str, Any]) -> Any:
            kept = {k: v for k, v in known.items() if k != "contents"}
            storage = cls(commits, prefix, space, capacity, **{**kept, **options})
            storage._length = int(known["contents"]["length"])
            storage._newest = int(known["contents"]["newest"])
            index = known["contents"]["index"]
            if capacity is None and storage._length > _BLOCK * len(index):
                raise ValueError(f"{storage._length} rows in {len(index)} index files")
            storage._entries = _no_entries(storage._length)
            for number, name in index:
                storage._read_index(int(number), str(name))
            return storage

        storage: Self = from_saved(commits.directory.path, saved, make)
        if capacity is None:
            storage._length = min(storage._length, length)
            storage._entries = storage._entries[: storage._length].copy()
        return storage

    def options(self) -> dict[str, Any]:
        own = {"format": self.format, "quality": self.quality, "piece_size": self.piece_size}
        return {**super().options(), **own}

    def contents(self) -> Any:
        index = [[number, name] for number, name in sorted(self._index.items())]
        return {"length": self._length, "newest": self._newest, "index": index}

    def __len__(self) -> int:
        return self._length + self._reserved

    def _written(self) -> int:
        return self._length

    # -- index files

    def _read_index(self, number: int, name: str) -> None:
        crc = self.directory.about(name)["crc32c"]
        with self.directory.open_file(name) as f:
            data = f.read()
        if f"{_core.crc32c(data):08x}" != crc:
            raise FormatError(f"{self.directory.path}: {name}: its checksum does not match; it is damaged")
        found = np.frombuffer(data, _ENTRY)
        first = number * _BLOCK
        self._entries[first : first + _BLOCK] = found[: len(self._entries) - first]
        self._index[number] = name

    def write_out(self, urgency: int) -> None:
        blocks = {row // _BLOCK for row in self._unsynced.values()}
        blocks |= self._changed
        for name in self._unsynced:
            about = seal_file(self.directory.place(name))
            row, generation = _numbers(name)
            if row < self._length and self._entries[row]["generation"] == generation:
                self._entries[row]["bytes"], self._entries[row]["crc32c"] = (
                    about["bytes"],
                    int(about["crc32c"], 16),
                )
        for number in sorted(blocks):
            self._write_index(number)
        self._unsynced.clear()
        self._unsaved = 0

    def _write_index(self, number: int) -> None:
        old = self._index.get(number)
        part = self._entries[number * _BLOCK : (number + 1) * _BLOCK]
        if part["generation"].any():
            name = self.directory.new_name(f"{self.prefix}index-{number}-", ".bin")
            with self.directory.writing(name), self.directory.make(name) as f:
                f.write(part.tobytes())
            self._index[number] = name
        else:
            self._index.pop(number, None)
        if old is not None:
            self.directory.drop(old)
        self._changed.discard(number)

    # -- rows

    def _name(self, row: int, generation: int) -> str:
        return f"{self.prefix}row-{row}-{generation}.{self.format}"

    def _read(self, rows: Ints, keys: Keys) -> tuple[Layout, list[Array]]:
        out = np.empty((len(rows), *self._shape), self._dtype)
        for i, row in enumerate(rows.tolist()):
            out[i] = self._decode(row)
        return self.layout, [out]

    def _decode(self, row: int) -> Array:
        entry = self._entries[row]
        if not entry["generation"]:
            raise FormatError(
                f"{self.directory.path}: row {row} must have a file, got none; it was never written"
            )
        name = self._name(row, int(entry["generation"]))
        with self.directory.open_file(name) as f:
            is_whole = entry["bytes"] in (0, os.fstat(f.fileno()).st_size)  # 0: not committed yet
            data = f.read() if is_whole else b""
        if not is_whole or (entry["bytes"] and _core.crc32c(data) != entry["crc32c"]):
            raise FormatError(f"{self.directory.path}: {name}: its checksum does not match; it is damaged")
        make, _ = self._pil.OPEN[self.format.upper()]  # what the storage was given it reads, of any size
        with image_damage(f"{self.directory.path}: {name}"), make(BytesIO(data)) as image:
            check_side(image, self._shape)
            found = np.asarray(image)
        if found.dtype != self._dtype or found.size != int(np.prod(self._shape)):
            raise FormatError(
                f"{self.directory.path}: {name}: must be {self._dtype}{self._shape}, got {found.dtype}{found.shape}"
            )
        return found.reshape(self._shape)

    def _encode(self, frame: Array) -> bytes:
        image = self._pil.fromarray(frame[..., 0] if frame.ndim == 3 and frame.shape[2] == 1 else frame)
        buffer = BytesIO()
        more = {} if self.quality is None else {"quality": self.quality}
        if self.format == "png":
            more["compress_level"] = 1  # three times as fast as the usual 6, for files a little larger
        image.save(buffer, self.format.upper(), **more)
        return buffer.getvalue()

    def set(self, index: Any, value: Any) -> None:
        with self._commits.lock:
            self._check_mutable("set")
            rows, (frames,) = encode_at(self.layout, normalize(index, len(self)), value, self.cast)
            last = {row: i for i, row in enumerate(rows.tolist())}
            written: list[tuple[int, str]] = []
            self._newest += 1
            while any(self.directory.has(self._name(row, self._newest)) for row in last):
                self._newest += 1  # a file of another program has that name
            self.directory.note_new([self._name(row, self._newest) for row in last])
            try:
                for row, i in last.items():
                    name, data = self._name(row, self._newest), self._encode(frames[i])
                    _core.fault_point()
                    with self.directory.make(name) as f:
                        written.append((row, name))
                        f.write(data)
            except BaseException:
                for _, name in written:
                    self.directory.take_back(name)
                raise
            self._reach(max(last, default=-1) + 1)
            for row, name in written:
                self._forget(row)
                self._unsynced[name] = row  # first: of an entry that is there the next commit must know
                self._entries[row] = (self._newest, 0, 0, 0)
            self._wrote(len(written), self.piece_size)

    def _forget(self, row: int) -> None:
        """Give up a row's file: at once if no commit names it, else after the next."""
        generation = int(self._entries[row]["generation"])
        if not generation:
            return
        name = self._name(row, generation)
        if self._unsynced.pop(name, None) is not None:
            self.directory.take_back(name)
        else:
            self.directory.drop_later(name)
        self._entries[row] = (0, 0, 0, 0)
        self._changed.add(row // _BLOCK)

    def _reach(self, end: int) -> None:
        """Count reserved rows that were written now."""
        new = max(0, end - self._length)
        if end > len(self._entries):
            more = np.zeros(max(end, 2 * len(self._entries), 64) - len(self._entries), _ENTRY)
            self._entries = np.concatenate([self._entries, more])
        self._length, self._reserved = self._length + new, self._reserved - new

    def _truncate(self, length: int) -> None:
        end, self._length = self._length, length
        for row in range(length, end):
            self._forget(row)

    def clear(self) -> None:
        with self._commits.lock:
            self._check_mutable("clear")
            for row in np.flatnonzero(self._entries["generation"]).tolist():
                self._forget(row)
            self._cursor = self._reserved = 0
            if self.capacity is None:
                self._length = 0

    # -- checks and dumps

    def more_files(self) -> dict[str, dict[str, Any]]:
        found = {}
        for row, (generation, nbytes, crc, _) in enumerate(self._entries[: self._length].tolist()):
            if generation:
                found[self._name(row, generation)] = {"bytes": nbytes, "crc32c": f"{crc:08x}"}
        return found

    def checks_reads(self) -> bool:
        return True

    def damages(self) -> Iterator[tuple[str, str]]:
        for row in np.flatnonzero(self._entries["generation"][: self._length]).tolist():
            try:
                self._decode(row)
            except FormatError as error:
                name = self._name(row, int(self._entries[row]["generation"]))
                yield f"{self.directory.base}/{name}", str(error)


@contextmanager
def image_damage(where: str) -> Iterator[None]:
    """Raise FormatError for whatever Pillow raises within: of a damaged file that may be nearly anything."""
    try:
        yield
    except (FormatError, MemoryError):
        raise
    except Exception as error:
        raise FormatError(f"{where}: must be an image, got {error!r}; it is damaged") from None


def check_side(image: Any, shape: tuple[int, ...]) -> None:
    """Raise ValueError if an image's header says another size, before memory is taken for the pixels."""
    if image.size != (shape[1], shape[0]):
        raise ValueError(f"{image.height} x {image.width} where {shape[0]} x {shape[1]} is said")


def _numbers(name: str) -> tuple[int, int]:
    row, generation = os.path.basename(name).split(".")[0].split("-")[1:]
    return int(row), int(generation)


def _no_entries(n: int) -> Array:
    """So many entries of generation 0, which have no file; BudgetError if memory has no room for them."""
    if n > _BLOCK:
        check_fits(n * _ENTRY.itemsize, f"{n} images", "choose a smaller capacity, or they are damaged")
    return np.zeros(n, _ENTRY)


def check_frames(space: Any, kind: str, *, deep_channel: bool) -> tuple[np.dtype[Any], tuple[int, ...]]:
    """The dtype and shape of a space of images; ValueError for any other space."""
    from gymnasium import spaces

    rule = "a Box of uint8 HxW, HxWx1 or HxWx3, or uint16 HxW"
    if not isinstance(space, spaces.Box):
        raise ValueError(f"space: {kind} must have {rule}, got {space}; keep other leaves in a DictStorage")
    dtype, shape = array_form(space)
    is_frame = len(shape) == 2 or (len(shape) == 3 and shape[2] in (1, 3))
    is_deep = len(shape) == 2 or (deep_channel and len(shape) == 3 and shape[2] == 1)
    fits = (dtype == np.uint8 and is_frame) or (dtype == np.uint16 and is_deep)
    if not fits or not all(shape):
        raise ValueError(
            f"space: {kind} must have {rule}, got {dtype}{shape}; keep other leaves in a DictStorage"
        )
    return dtype, shape
