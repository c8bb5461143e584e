"""LeRobot data sets, versions 2.0, 2.1 and 3.0, read from their files; the package `lerobot` is not needed."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium import Space, spaces

from recollect.batch import BatchBase
from recollect.datasets.batch import DatasetBatch
from recollect.datasets.columns import check_size, number_space, numbers, pictures, text_space
from recollect.datasets.lerobot.meta import (
    INFO,
    OWN,
    TASKS,
    Episode,
    Meta,
    below,
    check_sums,
    episode_files,
    read_meta,
    read_table,
)
from recollect.datasets.lerobot.video import frames_at
from recollect.errors import FormatError
from recollect.files.record import damage_in
from recollect.spaces.tree import make_dict

Array = np.ndarray[Any, Any]


def from_lerobot(
    path: str | PathLike[str], *, features: Sequence[str] | None = None, verify: bool = False
) -> LeRobotBatch:
    """Show a LeRobot data set as a read-only batch, a leaf per feature, its episodes as segments.

    Pictures and frames of videos are uint8 `(H, W, C)`. The features that LeRobot fills in (timestamp, index, ...) are
    scalars; `batch.tasks[task_index]` is the task in words. `features` chooses some: what is not read costs nothing.

    The metadata of a set that Recollect wrote are compared with their checksums; with `verify` so are the files that
    the features are read from, which costs one read. FormatError names the file that is not as it was written.
    """
    place = Path(path).absolute()
    check_sums(place)
    batch = open_unchecked(place, features)
    if verify:
        batch.check_files()
    return batch


def open_unchecked(path: Path, features: Sequence[str] | None = None) -> LeRobotBatch:
    """Open a data set whatever the checksums of its files say."""
    meta = read_meta(path, features)
    unknown = [name for name in features or () if name not in meta.features]
    if unknown:
        raise KeyError(f"features: must be among {sorted(meta.features)}, got {unknown}")
    found, left_out = [], {}
    for name in meta.features if features is None else features:
        kind = _space_of(meta, name)
        if isinstance(kind, str):
            left_out[name] = kind
        else:
            found.append((name, kind))
    if not found:
        raise FormatError(f"{path}: must have a feature that is a leaf, got none of {left_out}")
    return LeRobotBatch(meta, make_dict(found), left_out)


class LeRobotBatch(DatasetBatch):
    """A LeRobot data set; see `from_lerobot`. `meta` is what it says of itself, `tasks` its tasks by index.

    Ownership, Concurrency: as DatasetBatch.
    """

    def __init__(self, meta: Meta, space: Any, left_out: dict[str, str]) -> None:
        self.meta = meta
        super().__init__(space, [episode.length for episode in meta.episodes], left_out=left_out)

    @property
    def tasks(self) -> dict[int, str]:
        """The tasks in words, by `task_index`."""
        return dict(self.meta.tasks)

    def files_of(self) -> list[list[str]]:
        """The files that each episode is read from, those that tell what is where included."""
        common = [INFO, TASKS, *(str(f.relative_to(self.meta.path)) for f in episode_files(self.meta.path))]
        return [[*common, e.data, *(name for name, _ in e.videos.values())] for e in self.meta.episodes]

    def words_at(self, first: int, end: int) -> list[str]:
        """The task in words of the rows `[first, end)` of one episode, whatever features were chosen."""
        number = int(np.searchsorted(self._ends, first, side="right"))
        episode, start = self.meta.episodes[number], int(self._ends[number - 1]) if number else 0
        if "task_index" not in self.meta.features:
            return [episode.tasks[0] if episode.tasks else ""] * (end - first)
        import pyarrow as pa

        column = self._episode_column(episode, "task_index").slice(first - start, end - first)
        index = numbers(pa, column, (), np.int64, f"{self.meta.path / episode.data}: task_index")
        return [self.meta.tasks.get(int(i), "") for i in index]

    def check_files(self) -> None:
        """Compare the files that are read from with the checksums that Recollect wrote; FormatError names the first.

        A set of others has none, and nothing is compared.
        """
        keys, every = set(self.single_space.spaces), self.meta.episodes  # type: ignore[attr-defined]
        videos = {name for e in every for key, (name, _) in e.videos.items() if key in keys}
        check_sums(self.meta.path, {e.data for e in every} | videos)

    def _load(self, key: str, episode: int, first: int, end: int) -> Any:
        import pyarrow as pa

        where = self.meta.episodes[episode]
        space, kind = self.single_space[key], self.meta.features[key]["dtype"]  # type: ignore[index]
        if kind == "video":
            return self._frames(key, where, first, end, space.shape or ())
        column = self._episode_column(where, key).slice(first, end - first)
        name = f"{self.meta.path / where.data}: {key}"
        if kind == "image":
            return pictures(column.to_pylist(), space.shape or (), self.meta.path, name)
        if isinstance(space, spaces.Text):
            return tuple(column.to_pylist())
        return numbers(pa, column, space.shape or (), space.dtype, name)

    def _frames(self, key: str, episode: Episode, first: int, end: int, shape: tuple[int, ...]) -> Array:
        import pyarrow as pa

        file, start = episode.videos[key]
        column = self._episode_column(episode, "timestamp").slice(first, end - first)
        times = numbers(pa, column, (), np.float64, f"{self.meta.path / episode.data}: timestamp")
        return frames_at(below(self.meta.path, file), start + times, self.meta.fps, shape)

    # -- columns of data files; the last few are kept

    def _open(self) -> None:
        super()._open()
        self._file_column: Any = lru_cache(32)(self._read_column)
        self._file_episodes: Any = lru_cache(8)(self._read_episodes)

    def __getstate__(self) -> dict[str, Any]:
        kept = super().__getstate__()
        return {k: v for k, v in kept.items() if k not in ("_file_column", "_file_episodes")}

    def _read_column(self, name: str, key: str) -> Any:
        table = read_table(below(self.meta.path, name), [key])
        if key not in table.column_names:
            raise FormatError(
                f"{self.meta.path / name}: must have the column {key!r}, got none; it is damaged"
            )
        return table.column(key)

    def _read_episodes(self, name: str) -> Array:
        import pyarrow as pa

        column = self._file_column(name, "episode_index")
        return numbers(pa, column, (), np.int64, f"{self.meta.path / name}: episode_index")

    def _episode_column(self, episode: Episode, key: str) -> Any:
        """The rows of an episode in its file."""
        column = self._file_column(episode.data, key)
        rows = np.flatnonzero(self._file_episodes(episode.data) == episode.number)
        if len(rows) != episode.length or (len(rows) and rows[-1] - rows[0] + 1 != len(rows)):
            raise FormatError(
                f"{self.meta.path / episode.data}: must hold {episode.length} rows of episode {episode.number} side by "
                f"side, got {len(rows)}; it is damaged"
            )
        return column.slice(int(rows[0]) if len(rows) else 0, len(rows))


def check_source(batch: BatchBase) -> None:
    """Check what a copy is made of: one of damaged files would have checksums that match."""
    if isinstance(batch, LeRobotBatch):
        batch.check_files()


def _space_of(meta: Meta, name: str) -> Space[Any] | str:
    """The space of a feature, or why it has none."""
    about = meta.features[name]
    with damage_in(f"{meta.path}: {name}"):
        return _space_about(meta, name, about)


def _space_about(meta: Meta, name: str, about: dict[str, Any]) -> Space[Any] | str:
    kind, shape = str(about["dtype"]), tuple(int(n) for n in about.get("shape") or ())
    if kind in ("image", "video"):
        if _is_depth(about):
            return "is a video of quantised depth"
        found = _picture_shape(meta, name, shape, about.get("names"))
        check_size(found, 1, f"{meta.path}: {name}")
        return spaces.Box(0, 255, found, np.uint8)
    if kind == "string":
        files = sorted({episode.data for episode in meta.episodes})
        return text_space(
            {
                s
                for file in files
                for s in read_table(below(meta.path, file), [name], objects=True)[name].to_pylist()
            }
        )
    try:
        dtype = np.dtype(kind)
    except TypeError:
        return f"is of dtype {kind!r}"
    if name not in OWN:
        check_size(shape, dtype.itemsize, f"{meta.path}: {name}")
    return number_space(() if name in OWN else shape, dtype)


def _picture_shape(meta: Meta, name: str, shape: tuple[int, ...], names: Any) -> tuple[int, ...]:
    """(H, W, C): some data sets say (C, H, W)."""
    if len(shape) != 3:
        raise FormatError(f"{meta.path}: {name} must have the shape (H, W, C) or (C, H, W), got {shape}")
    first = str(names[0]) if isinstance(names, list | tuple) and names else ""
    channels_first = first.startswith("channel") if first else shape[0] in (1, 3) and shape[2] not in (1, 3)
    return (*shape[1:], shape[0]) if channels_first else shape


def _is_depth(about: dict[str, Any]) -> bool:
    said = {**(about.get("video_info") or {}), **(about.get("info") or {})}
    return bool(said.get("is_depth_map") or said.get("video.is_depth_map"))
