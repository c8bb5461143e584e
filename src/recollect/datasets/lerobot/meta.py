"""What a LeRobot data set says of itself: its features, episodes, tasks and where their rows and frames are.

Versions 2.0 and 2.1 have a file per episode and JSON lines in `meta`; 3.0 has many episodes in a file and Parquet in
`meta`, so an episode knows its file, and where in the video it begins.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from string import Formatter
from typing import Any

from recollect.errors import FormatError, RecollectError, check_installed
from recollect.files import check_plain, file_crc, open_inside
from recollect.files.record import (
    FileAbout,
    as_kind,
    brief,
    check_signed,
    damage_in,
    parse_json,
    read_bytes,
)
from recollect.files.record import read_json as read_object
from recollect.storage.filed.parquet_table import read_parquet_table

VERSIONS = ("v2.0", "v2.1", "v3.0")
_SPEC = re.compile(r"0?[0-9]{0,2}d?")
OWN = (
    "timestamp",
    "frame_index",
    "episode_index",
    "index",
    "task_index",
)  # features that LeRobot fills in itself
INFO, TASKS, EPISODES = "meta/info.json", "meta/tasks.parquet", "meta/episodes"
CHECKSUMS = "meta/recollect-checksums.json"  # no part of the layout: other readers pass it over
_CHANGED = f"another program changed the set: then remove {CHECKSUMS}"
DATA_PATH = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
VIDEO_PATH = "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"
EPISODES_PATH = "meta/episodes/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"


@dataclass(frozen=True, slots=True)
class Episode:
    """Where one episode is: its data file, and per camera a video and the second at which it begins."""

    number: int
    length: int
    data: str
    videos: dict[str, tuple[str, float]] = field(default_factory=dict)
    tasks: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Meta:
    """The metadata of a data set."""

    path: Path
    version: str
    fps: float
    robot_type: str | None
    features: dict[str, dict[str, Any]]
    episodes: list[Episode]
    tasks: dict[int, str]


def packages_for(dtypes: Collection[Any]) -> list[str]:
    """The packages that features of these dtypes need."""
    return ["pyarrow", *(["av"] if "video" in dtypes else []), *(["PIL"] if "image" in dtypes else [])]


def read_meta(path: Path, chosen: Collection[str] | None = None) -> Meta:
    """Read and check the metadata of a data set; FormatError says what is wrong with it.

    MissingExtraError unless all packages are there that the chosen features need.
    """
    info = read_json(path / INFO)
    version = str(info.get("codebase_version"))
    if version not in VERSIONS:
        raise FormatError(f"{path / INFO}: codebase_version must be one of {list(VERSIONS)}, got {version!r}")
    with damage_in(f"{path}: metadata"):
        features = {str(key): dict(value) for key, value in info["features"].items()}
        dtypes = [value["dtype"] for key, value in features.items() if chosen is None or key in chosen]
        check_installed("from_lerobot", *packages_for(dtypes))
        cameras = [key for key, value in features.items() if value["dtype"] == "video"]
        _check_paths(path, info, cameras)
        read = _episodes_v3 if version == "v3.0" else _episodes_v2
        episodes = sorted(read(path, info, cameras), key=lambda e: e.number)
        tasks = _tasks_v3(path) if version == "v3.0" else _tasks_v2(path)
        fps = float(info["fps"])
    if not any(episode.length for episode in episodes):
        raise FormatError(f"{path}: must hold episodes, got none")
    total = info.get("total_episodes", len(episodes))
    if total != len(episodes):
        raise FormatError(
            f"{path}: must hold {total} episodes, got {len(episodes)}; it is damaged or unfinished"
        )
    return Meta(path, version, fps, info.get("robot_type"), features, episodes, tasks)


def _check_paths(path: Path, info: dict[str, Any], cameras: list[str]) -> None:
    """The metadata say where the data are, and the videos if there are any; None is for a set without them."""
    needed = {"data_path": "the data", **({"video_path": f"the video of {cameras[0]!r}"} if cameras else {})}
    for key, what in needed.items():
        if not isinstance(info.get(key), str):
            got = brief(info[key]) if key in info else "nothing"
            raise FormatError(f"{path / INFO}: {key} must say where {what} is, got {got}; it is damaged")


def below(path: Path, name: str) -> Path:
    """A file that the metadata name; it may be a link, as in the cache of the hub, but not lead out by its name."""
    if Path(name).is_absolute() or ".." in Path(name).parts:
        raise FormatError(f"{path}: names a file outside itself, {name!r}; it is damaged or forged")
    return path / name


def read_json(path: Path) -> dict[str, Any]:
    """Read an object; FormatError if there is none."""
    try:
        return read_object(path)
    except FileNotFoundError:
        raise FormatError(f"{path}: must exist, got nothing there; it is no LeRobot data set") from None
    except OSError as error:
        raise FormatError(f"{path}: must be JSON, got {error}; it is damaged") from None


def read_checksums(path: Path) -> dict[str, dict[str, Any]]:
    """Size and checksum of each file of a data set that we wrote; FormatError if the list itself is damaged."""
    file = path / CHECKSUMS
    try:
        data = read_bytes(file, follow=True)
    except OSError as error:
        raise FormatError(f"{file}: must be a list of checksums, got {error!r}; it is damaged") from None
    record = as_kind(parse_json(data, file), dict[str, Any], file)
    check_signed(file, data, record)
    files = record.get("files")
    as_kind(files, dict[str, FileAbout], file)
    return dict(files or {})


def check_sums(path: Path, names: Collection[str] = ()) -> None:
    """Compare the metadata files, and those of these names, with the checksums that we wrote.

    FormatError names the first that differs. A set of others has no checksums, and nothing is compared.
    """
    if not (path / CHECKSUMS).is_file():
        return
    for name, about in read_checksums(path).items():
        if name.startswith("meta/") or name in names:
            check_sum(path, name, about)


def check_sum(path: Path, name: str, about: dict[str, Any]) -> None:
    """Compare a file, or the one that a link of the hub's cache leads to, with its size and checksum."""
    try:
        with open_inside(path, name, follow=True) as f:
            nbytes = os.fstat(f.fileno()).st_size
            if nbytes != about["bytes"]:
                raise FormatError(
                    f"{path / name}: must have {about['bytes']} bytes, got {nbytes}; it is damaged, or {_CHANGED}"
                )
            if file_crc(f) != about["crc32c"]:
                raise FormatError(f"{path / name}: its checksum does not match; it is damaged, or {_CHANGED}")
    except FileNotFoundError:
        raise FormatError(
            f"{path / name}: is gone; the set is damaged, or was not copied or downloaded whole"
        ) from None


def _lines(path: Path) -> list[dict[str, Any]]:
    try:
        lines = read_bytes(path, follow=True).splitlines()
    except OSError as error:
        raise FormatError(f"{path}: must be JSON lines, got {error}; it is missing or damaged") from None
    return [as_kind(parse_json(line, path), dict[str, Any], path) for line in lines if line.strip()]


def file_name(template: Any, **values: Any) -> str:
    """The name that a template of the metadata gives; FormatError unless it only fills in these values, narrowly.

    A template comes from a file: a width in it would make a name of any length, and a field may reach anywhere.
    """
    for _, name, spec, conversion in Formatter().parse(str(template)):
        if name is not None and (name not in values or conversion or not _SPEC.fullmatch(spec or "")):
            raise FormatError(
                f"{brief(template)}: must fill in {sorted(values)} with at most 99 digits, got {brief(name)}; "
                "the metadata are damaged or forged"
            )
    return str(template).format(**values)


def read_table(file: Path, columns: list[str] | None = None, *, objects: bool = False) -> Any:
    """Read a Parquet file, to be made `objects` of Python or not; FormatError if it cannot be read."""
    import pyarrow as pa

    try:
        check_plain(file)
        return read_parquet_table(str(file), file, columns=columns, objects=objects)
    except RecollectError:
        raise
    except (pa.ArrowException, OSError, ValueError) as error:
        raise FormatError(f"{file}: must be a Parquet file, got {error}; it is missing or damaged") from None


def _episodes_v2(path: Path, info: dict[str, Any], cameras: list[str]) -> list[Episode]:
    found = []
    for line in _lines(path / "meta" / "episodes.jsonl"):
        number = int(line["episode_index"])
        at = {"episode_chunk": number // int(info["chunks_size"]), "episode_index": number}
        videos = {key: (file_name(info["video_path"], video_key=key, **at), 0.0) for key in cameras}
        found.append(
            Episode(
                number,
                int(line["length"]),
                file_name(info["data_path"], **at),
                videos,
                tuple(line.get("tasks", ())),
            )
        )
    return found


def episode_files(path: Path) -> list[Path]:
    """The files of version 3.0 that say where the episodes are."""
    return sorted((path / EPISODES).glob("*/*.parquet"))


def _episodes_v3(path: Path, info: dict[str, Any], cameras: list[str]) -> list[Episode]:
    files = episode_files(path)
    if not files:
        raise FormatError(
            f"{path / EPISODES}: must hold chunk-000/file-000.parquet, got nothing; it is damaged"
        )
    found = []
    for file in files:
        import pyarrow.parquet as pq

        names = (
            [n for n in pq.read_schema(str(file)).names if not n.startswith("stats/")]
            if _is_parquet(file)
            else None
        )
        for row in read_table(file, names, objects=True).to_pylist():
            data = file_name(
                info["data_path"], chunk_index=row["data/chunk_index"], file_index=row["data/file_index"]
            )
            videos = {}
            for key in cameras:
                at = {side: row[f"videos/{key}/{side}"] for side in ("chunk_index", "file_index")}
                name = file_name(info["video_path"], video_key=key, **at)
                videos[key] = (name, float(row[f"videos/{key}/from_timestamp"]))
            found.append(
                Episode(
                    int(row["episode_index"]), int(row["length"]), data, videos, tuple(row.get("tasks") or ())
                )
            )
    return found


def _is_parquet(file: Path) -> bool:
    import pyarrow as pa
    from pyarrow import parquet

    try:
        check_plain(file)
        parquet.read_schema(str(file))
    except (pa.ArrowException, OSError, ValueError):
        return False
    return True


def _tasks_v2(path: Path) -> dict[int, str]:
    return {int(line["task_index"]): str(line["task"]) for line in _lines(path / "meta" / "tasks.jsonl")}


def _tasks_v3(path: Path) -> dict[int, str]:
    table = read_table(path / TASKS, objects=True)
    name = "task" if "task" in table.column_names else "__index_level_0__"
    return {int(row["task_index"]): str(row[name]) for row in table.to_pylist()}
