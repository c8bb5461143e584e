"""A batch as a LeRobot data set, version 3.0, in the official layout; killed at any point, it goes on where it was.

It is written beside its place, in `NAME.partial`. Files are closed and named in a journal together, so what a killed
run leaves is whole episodes and perhaps files that the journal does not name. The last step is a rename.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from recollect import checks
from recollect.batch import BatchBase
from recollect.datasets.lerobot.dataset import LeRobotBatch, check_source
from recollect.datasets.lerobot.features import (
    OWN_DTYPES,
    Feature,
    features_of,
    schema_metadata,
    to_column,
)
from recollect.datasets.lerobot.meta import (
    CHECKSUMS,
    DATA_PATH,
    EPISODES_PATH,
    INFO,
    TASKS,
    VIDEO_PATH,
    packages_for,
    read_json,
)
from recollect.datasets.lerobot.statistics import Running
from recollect.datasets.lerobot.video import CameraFile
from recollect.datasets.stage import stage_of, take_stage
from recollect.errors import FormatError, SegmentOpenError, check_installed
from recollect.files import make_inside, move_directory, replace_file, seal_file
from recollect.files.record import signed_json
from recollect.replay import ReplayBuffer
from recollect.storage.filed.video_file import check_codec

JOURNAL = "journal.json"
CHUNKS_SIZE = 1000
DATA_MB, VIDEO_MB = 100, 200
_PANDAS = {"index_columns": ["task"], "column_indexes": [{"name": None, "field_name": None, "pandas_type": "unicode",
           "numpy_type": "object", "metadata": {"encoding": "UTF-8"}}], "columns": [
           {"name": "task_index", "field_name": "task_index", "pandas_type": "int64", "numpy_type": "int64",
            "metadata": None},
           {"name": "task", "field_name": "task", "pandas_type": "unicode", "numpy_type": "object", "metadata": None}],
           "creator": {"library": "pyarrow", "version": "17"}, "pandas_version": "2.2.0"}  # fmt: skip


def to_lerobot(
    batch: BatchBase, path: str | PathLike[str], *, fps: float | None = None,
    tasks: str | Sequence[str] | Mapping[int, str] | None = None, names: Mapping[str, Any] | None = None,
    robot_type: str | None = None, video_codec: str | None = None, codec_options: dict[str, str] | None = None,
    chunk_size: int = 256, commit_rows: int = 100_000, progress: Callable[[int], Any] | None = None,
) -> None:  # fmt: skip
    """Write a batch as a LeRobot v3.0 data set; segments are its episodes (without segments all is one).

    Leaves `(H, W, 1 or 3)` of uint8 are pictures: exact PNG, or with `video_codec` (as "libsvtav1", "h264") video.
    `tasks` is one text for all, one per episode, or a dict from the source's `task_index` to the text. `names` are
    those of the components, as `{"action": ["pan", "lift"]}`. A LeRobot source keeps its own tasks, names and `fps`,
    unless others are given; another `fps` only relabels the frames. Without tasks there is a UserWarning, and their
    text is empty; `tasks=""` says that this is meant. What a killed call wrote is taken up by the same call; every
    `commit_rows` rows files are closed for that.
    """
    meta = getattr(batch, "meta", None)
    rate: Any = fps if fps is not None else getattr(meta, "fps", None)
    checks.number("fps", rate, above=True, advice="pass fps=, frames a second")
    if isinstance(batch, ReplayBuffer) and batch.engine.has_open_segment():
        raise SegmentOpenError(
            "to_lerobot: must be of whole episodes, got an open one; call mark_segment_end() first"
        )
    segments = batch.get_segments()
    segments = [(0, len(batch))] if segments is None else segments
    segments = [(a, b) for a, b in segments if b > a]
    if not segments:
        raise FormatError(f"{path}: must be made of samples, got a batch of none")
    if not (tasks is None or isinstance(tasks, str | Mapping)) and len(tasks) != len(segments):
        raise ValueError(
            f"tasks: must be one text, or one for each of {len(segments)} episodes, got {len(tasks)}"
        )
    features = features_of(batch.single_space, video_codec is not None)
    named = {**_names_of(batch, features), **_checked_names(names or {}, features)}
    if isinstance(tasks, Mapping):
        _check_texts(batch, tasks)
    check_source(batch)
    _warn(batch, tasks, features)
    robot_type = robot_type or getattr(meta, "robot_type", None)
    writer = LeRobotWriter(path, batch.single_space, fps=rate, robot_type=robot_type, video_codec=video_codec,
                           codec_options=codec_options, commit_rows=commit_rows, names=named)  # fmt: skip
    try:
        done = writer.n_episodes
        if progress is not None and done:
            progress(sum(b - a for a, b in segments[:done]))
        for number, (start, end) in list(enumerate(segments))[done:]:
            for first in range(start, end, chunk_size):
                data = batch.get_at(np.arange(first, min(first + chunk_size, end)))
                n = min(first + chunk_size, end) - first
                writer.add(data, _words(batch, data, tasks, number, first, n))
                if progress is not None:
                    progress(n)
            writer.end_episode()
        writer.finish()
    finally:
        writer.close()


def _words(batch: Any, data: Any, tasks: Any, number: int, first: int, n: int) -> list[str]:
    """The task in words of the `n` rows from `first`."""
    if isinstance(tasks, Mapping):
        return [tasks[i] for i in np.ravel(data["task_index"]).tolist()]
    if tasks is None:
        return batch.words_at(first, first + n) if isinstance(batch, LeRobotBatch) else [""] * n
    return [tasks if isinstance(tasks, str) else tasks[number]] * n


def _check_texts(batch: Any, tasks: Mapping[int, str]) -> None:
    """Raise ValueError unless every row has a task of these."""
    if not _has_task_index(batch):
        raise ValueError("tasks: must be texts where the source has no task_index, got a dict; pass a list")
    missing = sorted(set(np.ravel(batch.get_column("task_index")[:]).tolist()) - tasks.keys())
    if missing:
        raise ValueError(f"tasks: must have the text of every task_index, got none of {missing}")


def _has_task_index(batch: Any) -> bool:
    return "task_index" in (getattr(batch.single_space, "spaces", None) or ())


def _names_of(batch: Any, features: list[Feature]) -> dict[str, Any]:
    """The names of components that a LeRobot source has."""
    about = batch.meta.features if isinstance(batch, LeRobotBatch) else {}
    return {f.name: about[f.name].get("names") for f in features if f.name in about and not f.is_picture}


def _checked_names(names: Mapping[str, Any], features: list[Feature]) -> dict[str, list[str]]:
    """The names that were given: one for each component of a leaf of one axis."""
    sizes = {f.name: f.shape[0] for f in features if len(f.shape) == 1 and f.dtype != "string"}
    for name, given in names.items():
        if name not in sizes:
            raise ValueError(
                f"names: must be of leaves of numbers with one axis, {sorted(sizes)}, got {name!r}"
            )
        if isinstance(given, str) or len(given) != sizes[name] or not all(isinstance(g, str) for g in given):
            raise ValueError(f"names: must be {sizes[name]} texts for {name!r}, got {given!r}")
    return {name: list(given) for name, given in names.items()}


def _warn(batch: Any, tasks: Any, features: list[Feature]) -> None:
    """Tell of what a reader of the set will miss."""
    if tasks is None and not isinstance(batch, LeRobotBatch):
        rest = (
            "the source has task_index but no texts; pass tasks=, one for all, or in Python a dict {task_index: text}"
            if _has_task_index(batch)
            else "policies that read the task get none; pass tasks="
        )
        warnings.warn(f"to_lerobot: the task of every frame is empty: {rest}", UserWarning, stacklevel=3)
    for f in features:
        if f.dtype == "uint8" and len(f.shape) == 3 and f.shape[0] in (1, 3):
            warnings.warn(
                f"to_lerobot: {f.name!r} of shape {f.shape} is written as numbers; for pictures put its channels last",
                UserWarning,
                stacklevel=3,
            )


class LeRobotWriter:
    """Writes episodes of one space; `add` rows, `end_episode`, and at last `finish`.

    Ownership: `NAME.partial` beside the path is this writer's; `finish()` renames it. Concurrency: one writer per path.
    """

    def __init__(self, path: str | PathLike[str], space: Any, *, fps: float, robot_type: str | None = None,
                 video_codec: str | None = None, codec_options: dict[str, str] | None = None,
                 commit_rows: int = 100_000, names: Mapping[str, Any] | None = None) -> None:  # fmt: skip
        """Begin a data set, or take up the one that a killed writer left."""
        self.path, self.fps = Path(path).absolute(), fps
        self.features = features_of(space, video_codec is not None)
        check_installed("to_lerobot", *packages_for([f.dtype for f in self.features]))
        self._pa = import_module("pyarrow")
        self._codec, self._options, self._names = video_codec, dict(codec_options or {}), dict(names or {})
        if any(f.dtype == "video" for f in self.features):
            check_codec(import_module("av"), video_codec, np.dtype(np.uint8))
        if os.path.lexists(self.path):
            raise FileExistsError(f"{self.path}: is there already; remove it or choose another path")
        self.stage = stage_of(self.path)
        self._commit_rows = commit_rows
        self._config = {"fps": fps, "robot_type": robot_type, "codec": video_codec, "options": self._options,
                        "names": self._names,
                        "features": [[f.name, f.dtype, list(f.shape)] for f in self.features]}  # fmt: skip
        self._writer: Any = None
        self._cameras: dict[str, CameraFile] = {}
        self._begin_episode()
        self._saved: dict[str, Any] = {"config": self._config, "episodes": [], "tasks": [], "stats": {},
                                       "files": {"data": 0}, "video_info": {}, "sums": {}}  # fmt: skip
        self._fresh: list[dict[str, Any]] = []  # episodes since the last commit
        self._data_nbytes = self._rows_in_files = 0
        self._resume()
        self._stats = {name: Running.restore(state) for name, state in self._saved["stats"].items()}

    # -- what a killed writer left

    def _resume(self) -> None:
        self._owned = take_stage(self.path, JOURNAL)
        try:
            journal = self.stage / JOURNAL
            if journal.exists():
                saved = read_json(journal)
                if saved["config"] != json.loads(json.dumps(self._config)):
                    raise FormatError(
                        f"{self.stage}: was begun with other settings; remove it, or pass the same again"
                    )
                self._saved = {"sums": {}, **saved}
            self._owned.remove_noted({JOURNAL, *self._saved.get("names", ())})
        except BaseException:
            self._owned.release()
            raise

    def _new(self, name: str) -> Path:
        """The path of a new file in the stage; should this process be killed, the next writer removes it."""
        self._owned.note_new(name)
        file = self.stage / name
        make_inside(self.stage, name.rpartition("/")[0])
        return file

    def _replace(self, name: str, text: str) -> None:
        """Write a file of the stage whole."""
        parent = name.rpartition("/")[0]
        if parent:
            make_inside(self.stage, parent)
        below = f"{parent}/" if parent else ""
        if name != JOURNAL:
            self._owned.note([name])
        replace_file(
            self.stage / name,
            lambda f: f.write(text.encode()),
            note=lambda new: self._owned.note([below + new]),
        )

    @property
    def n_episodes(self) -> int:
        """How many whole episodes there are."""
        return len(self._saved["episodes"]) + len(self._fresh)

    @property
    def n_frames(self) -> int:
        """How many rows the whole episodes have."""
        return sum(e["length"] for e in (*self._saved["episodes"], *self._fresh))

    # -- rows in

    def _begin_episode(self) -> None:
        self._length = 0
        self._episode_stats: dict[str, Running] = {}
        self._episode_tasks: list[str] = []
        self._video_start: dict[str, int] = {}

    def add(self, data: Any, tasks: list[str]) -> None:
        """Add rows of the open episode, with the task of each in words."""
        n, first = len(tasks), self._length
        at = self.n_frames + first
        for task in dict.fromkeys(tasks):
            if task not in self._saved["tasks"]:
                self._saved["tasks"].append(task)
            if task not in self._episode_tasks:
                self._episode_tasks.append(task)
        frame = np.arange(first, first + n)
        own: dict[str, Any] = {"timestamp": (frame / self.fps).astype(np.float32), "frame_index": frame,
               "episode_index": np.full(n, self.n_episodes), "index": at + np.arange(n),
               "task_index": np.array([self._saved["tasks"].index(t) for t in tasks], np.int64)}  # fmt: skip
        columns = {}
        for feature in self.features:
            rows = feature.pick(data)
            if feature.dtype == "video":
                self._film(feature, rows)
            else:
                columns[feature.name] = to_column(self._pa, feature, rows)
            self._note(feature.name, rows, feature)
        for name, values in own.items():
            columns[name] = self._pa.array(values, OWN_DTYPES[name])
            self._note(name, values[:, None], None)
        self._write(columns)
        self._length += n

    def _note(self, name: str, rows: Any, feature: Feature | None) -> None:
        if feature is not None and feature.dtype == "string":
            return
        if feature is not None and feature.shape == (1,):
            rows = np.reshape(rows, (-1, 1))
        is_picture = feature is not None and feature.is_picture
        self._episode_stats.setdefault(name, Running()).update(np.asarray(rows), is_picture)

    def _write(self, columns: dict[str, Any]) -> None:
        from pyarrow import parquet

        table = self._pa.table(columns).replace_schema_metadata(schema_metadata(self.features))
        if self._writer is None:
            file = self._new(_numbered(DATA_PATH, self._saved["files"]["data"]))
            self._writer = parquet.ParquetWriter(
                str(file), table.schema, compression="snappy", use_dictionary=True
            )
        self._writer.write_table(table)
        self._data_nbytes += table.nbytes

    def _film(self, feature: Feature, rows: Any) -> None:
        camera = self._cameras.get(feature.name)
        if camera is None:
            number = self._saved["files"].get(feature.name, 0)
            file = self._new(_numbered(VIDEO_PATH, number, video_key=feature.name))
            camera = CameraFile(file, self.fps, feature.shape, str(self._codec), self._options)
            self._cameras[feature.name] = camera
        self._video_start.setdefault(feature.name, camera.n_frames)
        camera.add(rows)

    def end_episode(self) -> None:
        """End the open episode; files that are full are closed."""
        if not self._length:
            return
        at = self.n_frames
        record = {"episode_index": self.n_episodes, "tasks": self._episode_tasks, "length": self._length,
                  **_place("data", self._saved["files"]["data"]),
                  "dataset_from_index": at, "dataset_to_index": at + self._length}  # fmt: skip
        for name, start in self._video_start.items():
            record |= _place(f"videos/{name}", self._saved["files"].get(name, 0))
            record[f"videos/{name}/from_timestamp"] = start / self.fps
            record[f"videos/{name}/to_timestamp"] = (start + self._length) / self.fps
        for name, stats in self._episode_stats.items():
            self._stats.setdefault(name, Running()).merge(stats)
            record |= {f"stats/{name}/{stat}": value for stat, value in stats.record().items()}
        self._rows_in_files += self._length
        self._fresh.append(record)
        self._begin_episode()
        full = self._data_nbytes >= DATA_MB << 20 or any(
            c.nbytes >= VIDEO_MB << 20 for c in self._cameras.values()
        )
        if full or self._rows_in_files >= self._commit_rows:
            self.commit()

    # -- commits

    def commit(self) -> None:
        """Close all files and name them in the journal: from here a killed writer goes on."""
        if not self._fresh:
            return
        saved = self._saved
        names = [*saved.get("names", ()), _numbered(DATA_PATH, saved["files"]["data"])]
        self._writer.close()
        self._writer = None
        saved["files"]["data"] += 1
        for name, camera in self._cameras.items():
            number = saved["files"].get(name, 0)
            saved["video_info"].setdefault(name, camera.about())
            camera.close()
            names.append(_numbered(VIDEO_PATH, number, video_key=name))
            saved["files"][name] = number + 1
        self._cameras = {}
        for name in names[len(saved.get("names", ())) :]:
            saved["sums"][name] = seal_file(self.stage / name)
        saved["episodes"] += self._fresh
        saved |= {"names": names, "stats": {name: s.state() for name, s in self._stats.items()}}
        self._fresh, self._data_nbytes, self._rows_in_files = [], 0, 0
        self._replace(JOURNAL, json.dumps(saved))
        self._owned.forget()

    def finish(self) -> None:
        """Write the metadata and rename the data set to its place."""
        self.end_episode()
        self.commit()
        self._write_episodes()
        self._write_tasks()
        stats = {name: s.record() for name, s in self._stats.items()}
        self._replace("meta/stats.json", json.dumps(stats, indent=4))
        self._replace(INFO, json.dumps(self._info(), indent=4, ensure_ascii=False))
        self._write_checksums()
        move_directory(self.stage, self.path)
        (self.path / JOURNAL).unlink()
        self._owned.moved_to(self.path)
        self._owned.forget()
        self._owned.release()

    def _write_episodes(self) -> None:
        from pyarrow import parquet

        rows = [{**e, **_place("meta/episodes", 0)} for e in self._saved["episodes"]]
        file = self._new(_numbered(EPISODES_PATH, 0))
        parquet.write_table(self._pa.Table.from_pylist(rows), str(file), compression="snappy")

    def _write_checksums(self) -> None:
        sums = dict(self._saved["sums"])
        for file in sorted((self.stage / "meta").rglob("*")):
            if file.is_file() and file != self.stage / CHECKSUMS:
                sums[str(file.relative_to(self.stage))] = seal_file(file)
        self._replace(CHECKSUMS, signed_json({"format": "recollect.checksums", "files": sums}))

    def _write_tasks(self) -> None:
        from pyarrow import parquet

        tasks = self._saved["tasks"]
        table = self._pa.table({"task_index": self._pa.array(range(len(tasks)), "int64"),
                                "task": self._pa.array(tasks, "string")})  # fmt: skip
        file = self._new(TASKS)
        parquet.write_table(table.replace_schema_metadata({"pandas": json.dumps(_PANDAS)}), str(file))

    def _info(self) -> dict[str, Any]:
        features = {f.name: f.about(self._names.get(f.name)) for f in self.features}
        for name, info in self._saved["video_info"].items():
            features[name]["info"] = info
        features |= {
            name: {"dtype": dtype, "shape": [1], "names": None} for name, dtype in OWN_DTYPES.items()
        }
        has_video = any(f.dtype == "video" for f in self.features)
        whole = int(self.fps) if float(self.fps).is_integer() else self.fps
        return {
            "codebase_version": "v3.0", "robot_type": self._config["robot_type"], "total_episodes": self.n_episodes,
            "total_frames": self.n_frames, "total_tasks": len(self._saved["tasks"]), "chunks_size": CHUNKS_SIZE,
            "data_files_size_in_mb": DATA_MB, "video_files_size_in_mb": VIDEO_MB, "fps": whole,
            "splits": {"train": f"0:{self.n_episodes}"}, "data_path": DATA_PATH,
            "video_path": VIDEO_PATH if has_video else None, "features": features,
        }  # fmt: skip

    def close(self) -> None:
        """Let go of the files; without `finish()` what was committed waits to be taken up."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        for camera in self._cameras.values():
            camera.close()
        self._cameras = {}
        self._owned.release()


def _numbered(template: str, number: int, **more: str) -> str:
    return template.format(chunk_index=number // CHUNKS_SIZE, file_index=number % CHUNKS_SIZE, **more)


def _place(prefix: str, number: int) -> dict[str, int]:
    return {f"{prefix}/chunk_index": number // CHUNKS_SIZE, f"{prefix}/file_index": number % CHUNKS_SIZE}
