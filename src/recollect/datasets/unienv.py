"""Dumps of UniEnv's ReplayBuffer, read from their files; the package `unienv` is not needed.

A dump is `metadata.json` (space, count, offset, segments, class of the storage) beside one storage. Its classes are
named there by their Python path; here only the last part is looked at, nothing is imported. What a sample is called:
a space that is no Dict becomes a Dict of one key, `data`, as UniEnv's own files name it.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium import Space, spaces

from recollect.datasets.batch import DatasetBatch, need
from recollect.datasets.columns import check_size, checked_table, numbers
from recollect.datasets.lerobot.video import frames_at
from recollect.errors import FormatError
from recollect.files import check_name, check_plain
from recollect.files.record import damage_in, read_bytes, read_json
from recollect.spaces.tree import make_dict
from recollect.storage.filed.hdf5_file import own_node
from recollect.storage.filed.image import check_side, image_damage

Array = np.ndarray[Any, Any]
Keys = tuple[str, ...]
_ONE = "data"


def is_unienv(path: Path) -> bool:
    """Whether a directory has the metadata of a dump of UniEnv."""
    try:
        meta = read_json(path / "metadata.json")
    except (OSError, FormatError):
        return False
    return meta.get("type") == "ReplayBuffer" and "single_instance_space" in meta and "storage_cls" in meta


def from_unienv(path: str | Path) -> DatasetBatch:
    """Show a dump of UniEnv's ReplayBuffer as a read-only batch: index 0 is the oldest sample, segments are segments.

    Reads HDF5Storage, ParquetStorage, PytorchTensorStorage, NPZStorage, ImageStorage, VideoStorage, and DictStorage,
    FlattenedStorage and ToBackendOrDeviceStorage of these. Copy into a buffer with `buf.extend_from(batch)`.
    """
    path = Path(path).absolute()
    if not is_unienv(path):
        raise FormatError(f"{path}: must hold metadata.json of a UniEnv ReplayBuffer, got none")
    meta = read_json(path / "metadata.json")
    with damage_in(path / "metadata.json"):
        space, capacity = _space(meta["single_instance_space"], "space"), meta.get("capacity")
        count, offset = int(meta["count"]), int(meta["offset"])
        capacity = None if capacity is None else int(capacity)
        if count < 0 or offset < 0 or (capacity is not None and not 0 <= count <= capacity >= offset):
            raise ValueError(f"{count} samples from {offset} of {capacity}")
        known = meta.get("physical_segments")
        pieces = [] if known is None else sorted(_pieces(known, offset, count, capacity))
        name = check_name(path, meta["storage_path_relative"])
    storage = _opened(str(meta["storage_cls"]), path / name, space, capacity)
    return _UniEnvBatch(storage, space, count, offset, capacity, None if known is None else pieces)


class _UniEnvBatch(DatasetBatch):
    """See `from_unienv`."""

    def __init__(self, storage: Any, space: Space[Any], count: int, offset: int, capacity: int | None,
                 segments: list[tuple[int, int]] | None) -> None:  # fmt: skip
        self._storage, self._offset, self._capacity, self._segments = storage, offset, capacity, segments
        self._is_one = not isinstance(space, spaces.Dict)
        edges = sorted({0, count, *(edge for piece in segments or () for edge in piece)})
        self._starts = edges[:-1]
        super().__init__(make_dict([(_ONE, space)]) if self._is_one else space, np.diff(edges).tolist())

    def get_segments(self) -> list[tuple[int, int]] | None:
        """The segments that the dump knows: rows between them are in none."""
        return None if self._segments is None else list(self._segments)

    def _load(self, key: str, episode: int, first: int, end: int) -> Any:
        space = self.single_space[key]  # type: ignore[index]
        keys = () if self._is_one else (key,)
        at = self._offset + self._starts[episode]
        return self._value(space, keys, list(_runs(at + first, at + end, self._capacity)))

    def _value(self, space: Space[Any], keys: Keys, runs: list[tuple[int, int]]) -> Any:
        if isinstance(space, spaces.Dict):
            return {key: self._value(child, (*keys, key), runs) for key, child in space.spaces.items()}
        parts = [self._storage.read(keys, space, first, end) for first, end in runs]
        if isinstance(space, spaces.Text):
            return tuple(text for part in parts for text in part)
        return np.concatenate([part.astype(space.dtype, copy=False) for part in parts])


def _runs(first: int, end: int, capacity: int | None) -> Iterator[tuple[int, int]]:
    """The rows that lie together on disk: a ring may wrap."""
    while first < end:
        start = first if capacity is None else first % capacity
        n = end - first if capacity is None else min(end - first, capacity - start)
        yield start, start + n
        first += n


def _pieces(known: Any, offset: int, count: int, capacity: int | None) -> Iterator[tuple[int, int]]:
    """Segments as half-open pairs of indices, of the rows that they have there: first and last, both included."""
    for first, last in known:
        start = int(first) - offset if capacity is None else (int(first) - offset) % capacity
        n = int(last) - int(first) if capacity is None else (int(last) - int(first)) % capacity
        if start < 0 or start + n >= count:
            raise ValueError(f"segment {first} to {last} of {count} samples")
        yield start, start + n + 1


def _space(obj: Any, where: str) -> Space[Any]:
    kind = obj["type"]
    if kind == "DictSpace":
        return make_dict([(str(k), _space(child, f"{where}/{k}")) for k, child in obj["spaces"].items()])
    if kind == "TextSpace":
        charset: dict[str, Any] = {} if obj.get("charset") is None else {"charset": str(obj["charset"])}
        return spaces.Text(int(obj["max_length"]), min_length=int(obj["min_length"]), **charset)
    if kind not in ("BoxSpace", "BinarySpace"):
        raise FormatError(f"{where}: must be of Box, Binary, Text or Dict spaces, got {kind}; leave it out")
    shape, dtype = tuple(int(n) for n in obj["shape"]), np.dtype(obj["dtype"] or "bool")
    check_size(shape, dtype.itemsize, where)
    if dtype == np.bool_ or kind == "BinarySpace":
        return spaces.Box(0, 1, shape, dtype.type)
    low, high = (np.broadcast_to(np.array(obj[side], dtype), shape) for side in ("low", "high"))
    return spaces.Box(low, high, shape, dtype.type)


# -- storages: each reads the rows [first, end) of one leaf


def _opened(named: str, path: Path, space: Space[Any], capacity: int | None) -> Any:
    """The reader of a storage, by the name of its class."""
    kind = named.rsplit(".", 1)[-1]
    if kind == "TransformedStorage" or kind not in _READERS:
        raise FormatError(
            f"{path}: must be of {', '.join(sorted(_READERS))}, got {kind}; "
            "copy it into one of these with UniEnv: buffer.extend_from(loaded)"
        )
    return _READERS[kind](path, space, capacity)


class _Hdf5:
    def __init__(self, path: Path, space: Space[Any], capacity: int | None) -> None:
        self.path = path

    def read(self, keys: Keys, space: Space[Any], first: int, end: int) -> Any:
        check_plain(self.path)
        h5py = need("h5py", "hdf5", "from_unienv")
        with damage_in(self.path), h5py.File(self.path, "r") as f:
            found = own_node(f, "/".join(keys or (_ONE,)), self.path)[first:end]
        if isinstance(space, spaces.Text):
            return [s.decode("utf-8") if isinstance(s, bytes) else str(s) for s in found]
        return np.asarray(found)


class _Memmap:
    def __init__(self, path: Path, space: Space[Any], capacity: int | None) -> None:
        self.path, self.capacity = path, capacity

    def read(self, keys: Keys, space: Space[Any], first: int, end: int) -> Array:
        check_plain(self.path)
        shape = (int(self.capacity or 0), *(space.shape or ()))
        with damage_in(self.path):
            rows: Array = np.memmap(self.path, np.dtype(space.dtype), "r", shape=shape)
            return np.array(rows[first:end])


class _Parquet:
    def __init__(self, path: Path, space: Space[Any], capacity: int | None) -> None:
        need("pyarrow", "parquet", "from_unienv")
        self.path = path
        with damage_in(path):
            self.piece = int(read_json(path / "_metadata.json")["piece_size"])
            if self.piece < 1:
                raise ValueError(f"piece_size {self.piece}")

    def read(self, keys: Keys, space: Space[Any], first: int, end: int) -> Any:
        pa = need("pyarrow", "parquet", "from_unienv")
        name, found = "/".join(keys or (_ONE,)), []
        with damage_in(f"{self.path}: {name}"):
            for piece in range(first // self.piece, -(-end // self.piece)):
                at = piece * self.piece
                rows = slice(max(first - at, 0), min(end - at, self.piece))
                column = _piece(self.path / f"part-{piece:06d}.parquet").column(name)
                found.append(column.slice(rows.start, rows.stop - rows.start))
            if isinstance(space, spaces.Text):
                return [str(text) for part in found for text in part.to_pylist()]
            where = f"{self.path}: {name}"
            return np.concatenate([numbers(pa, c, space.shape or (), space.dtype, where) for c in found])


@lru_cache(maxsize=8)
def _piece(file: Path) -> Any:
    from pyarrow import OSFile, parquet

    check_plain(file)
    with OSFile(str(file)) as f:
        return checked_table(parquet.ParquetFile(f).read())


class _Files:
    """A file per row; one that is missing was never written, and is damage."""

    def __init__(self, path: Path, space: Space[Any], capacity: int | None) -> None:
        self.path = path

    def read(self, keys: Keys, space: Space[Any], first: int, end: int) -> Array:
        out = np.empty((end - first, *(space.shape or ())), space.dtype)
        for row in range(first, end):
            out[row - first] = self.row(row, space)
        return out

    def row(self, row: int, space: Space[Any]) -> Array:
        file = self.path / f"{row}.npz"
        with damage_in(file):
            check_plain(file)
            with np.load(file, allow_pickle=False) as found:
                return np.asarray(found[_ONE])


class _Images(_Files):
    def __init__(self, path: Path, space: Space[Any], capacity: int | None) -> None:
        super().__init__(path, space, capacity)
        with damage_in(path):
            self.ending = check_name(path, str(read_json(path / "image_metadata.json")["format"]).lower())

    def row(self, row: int, space: Space[Any]) -> Array:
        import io

        image, file = need("PIL.Image", "images", "from_unienv"), self.path / f"{row}.{self.ending}"
        with damage_in(file), image_damage(str(file)), image.open(io.BytesIO(read_bytes(file))) as found:
            check_side(found, space.shape or ())
            return np.asarray(found.convert("RGB"))


class _Video:
    """A video per segment, named by its first and last row."""

    def __init__(self, path: Path, space: Space[Any], capacity: int | None) -> None:
        need("av", "video", "from_unienv")
        self.path, self.n_rows = path, capacity
        with damage_in(path):
            about = read_json(path / "video_metadata.json")
            self.fps, self.ending = float(about["fps"]), check_name(path, about["file_ext"])
            names = (f.stem.split("_") for f in path.glob(f"*_*.{self.ending}"))
            self.clips = sorted((int(a), int(b)) for a, b in names)

    def read(self, keys: Keys, space: Space[Any], first: int, end: int) -> Array:
        parts, shape = [], space.shape or ()
        while first < end:
            for start, last in self.clips:
                skip, n = self._place(first, start, last)
                if 0 <= skip < n:
                    break
            else:
                raise FormatError(f"{self.path}: must have a video of row {first}, got none; it is damaged")
            times = np.arange(skip, min(n, skip + end - first)) / self.fps
            file = self.path / f"{start}_{last}.{self.ending}"
            check_plain(file)
            parts.append(frames_at(file, times, self.fps, shape, np.dtype(space.dtype)))
            first += len(times)
        return np.concatenate(parts)

    def _place(self, row: int, start: int, last: int) -> tuple[int, int]:
        """Which frame of a clip a row is, and how many there are; a clip of a ring may go over its end."""
        if last >= start:
            return row - start, last - start + 1
        size = int(self.n_rows or 1)
        return (row - start) % size, (last - start) % size + 1


class _Dict:
    """A storage per key or pattern: an exact name comes before a star, a deeper star before one above it."""

    def __init__(self, path: Path, space: Space[Any], capacity: int | None) -> None:
        with damage_in(path):
            about = read_json(path / "dict_storage_metadata.json")
            self.separator = str(about["nested_separator"])
            self.children = {
                str(name): _opened(str(child["type"]), path / check_name(path, child["path"]),
                                   _child(space, str(name).split(self.separator)), capacity)
                for name, child in about["storage_map"].items()
            }  # fmt: skip

    def read(self, keys: Keys, space: Space[Any], first: int, end: int) -> Any:
        parents = range(len(keys))
        tries = [(self.separator.join(keys[: n + 1]), n + 1) for n in parents]
        tries += [(self.separator.join((*keys[:n], "*")), n) for n in reversed(parents)]
        for name, n in tries:
            if name in self.children:
                return self.children[name].read(keys[n:], space, first, end)
        raise FormatError(f"{self.separator.join(keys)}: must have a storage, got none; it is damaged")


def _child(space: Any, names: list[str]) -> Space[Any]:
    for name in names:
        space = space if name == "*" else space[name]
    return space  # type: ignore[no-any-return]


class _Flattened:
    """All leaves in one row of numbers, in the order of the space; only some storages of such rows know their dtype."""

    def __init__(self, path: Path, space: Space[Any], capacity: int | None) -> None:
        about = read_json(path / "flattened_metadata.json")
        self.columns: dict[Keys, slice] = {}
        dtypes, n = [], 0
        for keys, leaf in _leaves(space, ()):
            width = prod(leaf.shape or ())
            self.columns[keys], n = slice(n, n + width), n + width
            dtypes.append(np.dtype(np.int64) if leaf.dtype == np.bool_ else np.dtype(leaf.dtype))
        # As torch promotes: a float wins over any int.
        floats = [dtype for dtype in dtypes if dtype.kind == "f"]
        self.space = spaces.Box(-np.inf, np.inf, (n,), np.result_type(*(floats or dtypes)).type)
        with damage_in(path):
            inner = path / check_name(path, about["inner_storage_path"])
            self.inner = _opened(str(about["inner_storage_type"]), inner, self.space, capacity)

    def read(self, keys: Keys, space: Space[Any], first: int, end: int) -> Array:
        rows = self.inner.read((), self.space, first, end)[:, self.columns[keys]]
        return np.asarray(rows.reshape(len(rows), *(space.shape or ())))


def _leaves(space: Space[Any], keys: Keys) -> Iterator[tuple[Keys, Space[Any]]]:
    if isinstance(space, spaces.Dict):
        for key, child in space.spaces.items():
            yield from _leaves(child, (*keys, key))
    else:
        yield keys, space


def _converted(path: Path, space: Space[Any], capacity: int | None) -> Any:
    """What shows another backend outside: the storage inside has the same rows."""
    with damage_in(path):
        about = read_json(path / "backend_metadata.json")
        inner = path / check_name(path, about["inner_storage_path"])
        return _opened(str(about["inner_storage_type"]), inner, space, capacity)


_READERS: dict[str, Any] = {
    "HDF5Storage": _Hdf5,
    "ParquetStorage": _Parquet,
    "PytorchTensorStorage": _Memmap,
    "NPZStorage": _Files,
    "ImageStorage": _Images,
    "VideoStorage": _Video,
    "DictStorage": _Dict,
    "FlattenedStorage": _Flattened,
    "ToBackendOrDeviceStorage": _converted,
}
