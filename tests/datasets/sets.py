"""Small data sets in the official layouts, written with pyarrow, h5py and av alone (not by our own writer)."""

from __future__ import annotations

import io
import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import h5py
import numpy as np
import pyarrow as pa
from PIL import Image
from pyarrow import parquet

FPS = 10
LENGTHS = (4, 1, 6)
SIZE = (16, 24, 3)
TASKS = ["pick the cube", "déjà vu"]


def frames(episode: int, camera: int = 0) -> Any:
    """Plain colours that survive a lossy codec: frame t of an episode has its own grey."""
    n = LENGTHS[episode]
    grey = (20 + 10 * np.arange(n) + 60 * episode + 5 * camera).astype(np.uint8)
    return np.broadcast_to(grey[:, None, None, None], (n, *SIZE)).copy()


def numbers(episode: int) -> dict[str, Any]:
    n = LENGTHS[episode]
    rng = np.random.default_rng(episode)
    return {
        "observation.state": rng.normal(size=(n, 3)).astype(np.float32),
        "observation.grid": rng.integers(0, 9, (n, 2, 2)),
        "action": rng.normal(size=(n, 2)).astype(np.float32),
        "next.done": np.arange(n) == n - 1,
    }


def own(episode: int) -> dict[str, Any]:
    n, first = LENGTHS[episode], sum(LENGTHS[:episode])
    return {
        "timestamp": (np.arange(n) / FPS).astype(np.float32),
        "frame_index": np.arange(n),
        "episode_index": np.full(n, episode),
        "index": first + np.arange(n),
        "task_index": np.full(n, episode % 2),
    }


def png(frame: Any) -> bytes:
    out = io.BytesIO()
    Image.fromarray(frame).save(out, "PNG")
    return out.getvalue()


def table(episode: int, pictures: bool) -> Any:
    d = numbers(episode)
    columns = {
        "observation.state": pa.FixedSizeListArray.from_arrays(pa.array(d["observation.state"].ravel()), 3),
        "observation.grid": pa.array(d["observation.grid"].tolist(), pa.list_(pa.list_(pa.int64()))),
        "action": pa.array(d["action"].tolist(), pa.list_(pa.float32())),
        "next.done": pa.array(d["next.done"]),
        "language_events": pa.array([[{"text": "hm"}]] * LENGTHS[episode]),
    }
    if pictures:
        items = [{"bytes": png(f), "path": f"frame_{i:06d}.png"} for i, f in enumerate(frames(episode))]
        columns["observation.images.wrist"] = pa.array(
            items, pa.struct([("bytes", pa.binary()), ("path", pa.string())])
        )
    return pa.table(columns | {k: pa.array(v) for k, v in own(episode).items()})


def write_mp4(path: Path, every: list[Any], fps: int = FPS) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(path), "w") as container:
        stream = container.add_stream("h264", rate=fps)
        stream.width, stream.height, stream.pix_fmt = SIZE[1], SIZE[0], "yuv420p"
        stream.codec_context.gop_size = 2
        for i, frame in enumerate(np.concatenate(every)):
            image = av.VideoFrame.from_ndarray(frame, format="rgb24")
            image.pts, image.time_base = i, Fraction(1, fps)
            container.mux(stream.encode(image))
        container.mux(stream.encode(None))


def features(channels_first: bool = False) -> dict[str, Any]:
    shape, names = [*SIZE], ["height", "width", "channels"]
    if channels_first:
        shape, names = [SIZE[2], *SIZE[:2]], ["channels", "height", "width"]
    return {
        "observation.state": {"dtype": "float32", "shape": [3], "names": ["x", "y", "z"]},
        "observation.grid": {"dtype": "int64", "shape": [2, 2], "names": None},
        "action": {"dtype": "float32", "shape": [2], "names": None},
        "next.done": {"dtype": "bool", "shape": [1], "names": None},
        "language_events": {"dtype": "language", "shape": [1], "names": None},
        "observation.images.wrist": {"dtype": "image", "shape": shape, "names": names},
        "observation.images.top": {"dtype": "video", "shape": shape, "names": names},
        "timestamp": {"dtype": "float32", "shape": [1], "names": None},
        **{k: {"dtype": "int64", "shape": [1], "names": None} for k in
           ("frame_index", "episode_index", "index", "task_index")},
    }  # fmt: skip


def put(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def info(version: str, **more: Any) -> str:
    return json.dumps({
        "codebase_version": version, "robot_type": "so100", "total_episodes": len(LENGTHS),
        "total_frames": sum(LENGTHS), "total_tasks": 2, "chunks_size": 2, "fps": FPS, **more,
    })  # fmt: skip


def lerobot_v2(root: Path, version: str) -> Path:
    """v2.0 and v2.1: a Parquet file and a video per episode, JSON lines of metadata; two episodes a chunk."""
    data = "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet"
    video = "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4"
    put(
        root / "meta/info.json",
        info(version, data_path=data, video_path=video, features=features(version == "v2.0")),
    )
    episodes = [{"episode_index": e, "tasks": [TASKS[e % 2]], "length": n} for e, n in enumerate(LENGTHS)]
    put(root / "meta/episodes.jsonl", "".join(json.dumps(e) + "\n" for e in episodes))
    tasks = [{"task_index": i, "task": t} for i, t in enumerate(TASKS)]
    put(root / "meta/tasks.jsonl", "".join(json.dumps(t, ensure_ascii=False) + "\n" for t in tasks))
    put(root / ("meta/stats.json" if version == "v2.0" else "meta/episodes_stats.jsonl"), "{}")
    for e in range(len(LENGTHS)):
        at = {"episode_chunk": e // 2, "episode_index": e}
        file = root / data.format(**at)
        file.parent.mkdir(parents=True, exist_ok=True)
        parquet.write_table(table(e, True), file)
        write_mp4(root / video.format(video_key="observation.images.top", **at), [frames(e, 1)])
    return root


def lerobot_v3(root: Path) -> Path:
    """v3.0: episodes 0 and 1 in one data file and one video, 2 in the next; metadata in Parquet."""
    data = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
    video = "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"
    key = "observation.images.top"
    put(root / "meta/info.json", info("v3.0", data_path=data, video_path=video, features=features()))
    rows = []
    for e, n in enumerate(LENGTHS):
        first = sum(LENGTHS[:e])
        rows.append({
            "episode_index": e, "tasks": [TASKS[e % 2]], "length": n, "data/chunk_index": 0, "data/file_index": e // 2,
            "dataset_from_index": first, "dataset_to_index": first + n, f"videos/{key}/chunk_index": 0,
            f"videos/{key}/file_index": e // 2, f"videos/{key}/from_timestamp": LENGTHS[0] / FPS if e == 1 else 0.0,
            f"videos/{key}/to_timestamp": 0.0, "stats/action/min": [0.0, 0.0],
        })  # fmt: skip
    for number, some in enumerate((rows[:2], rows[2:])):  # chunked episode metadata
        file = root / f"meta/episodes/chunk-000/file-{number:03d}.parquet"
        file.parent.mkdir(parents=True, exist_ok=True)
        parquet.write_table(pa.Table.from_pylist(some), file)
    parquet.write_table(
        pa.table({"task_index": [0, 1], "__index_level_0__": TASKS}), root / "meta/tasks.parquet"
    )
    for number, some in enumerate(((0, 1), (2,))):
        file = root / data.format(chunk_index=0, file_index=number)
        file.parent.mkdir(parents=True, exist_ok=True)
        parquet.write_table(pa.concat_tables([table(e, True) for e in some]), file)
        write_mp4(
            root / video.format(video_key=key, chunk_index=0, file_index=number), [frames(e, 1) for e in some]
        )
    return root


LEROBOT = {
    "v2.0": lambda root: lerobot_v2(root, "v2.0"),
    "v2.1": lambda root: lerobot_v2(root, "v2.1"),
    "v3.0": lerobot_v3,
}

# -- Minari

BOX = {"type": "Box", "dtype": "float32", "shape": [2], "low": [-1.0, -1.0], "high": [1.0, 1.0]}
OBS = {"type": "Dict", "subspaces": {"pos": BOX, "pair": {"type": "Tuple", "subspaces": [
    {"type": "Discrete", "dtype": "int64", "start": 0, "n": 5},
    {"type": "Text", "max_length": 4, "min_length": 0, "charset": "abc"}]}}}  # fmt: skip


def minari_episode(e: int) -> dict[str, Any]:
    n = LENGTHS[e]
    return {
        "pos": (np.arange((n + 1) * 2).reshape(-1, 2) / 100 + e / 10).astype(np.float32),
        "number": np.arange(n + 1) % 5,
        "text": ["abc"[: i % 4] for i in range(n + 1)],
        "actions": np.arange(n) % 3,
        "rewards": np.arange(n) + 0.5,
        "terminations": np.arange(n) == n - 1,
        "truncations": np.zeros(n, bool),
    }


def minari_meta(path: Path, kind: str) -> None:
    put(path / "metadata.json", json.dumps({
        "total_episodes": len(LENGTHS), "total_steps": sum(LENGTHS), "data_format": kind, "dataset_id": "toy/x-v0",
        "observation_space": json.dumps(OBS),
        "action_space": json.dumps({"type": "Discrete", "dtype": "int64", "start": 0, "n": 3}),
    }))  # fmt: skip


def minari_hdf5(root: Path) -> Path:
    path = root / "data"
    minari_meta(path, "hdf5")
    with h5py.File(path / "main_data.hdf5", "w") as f:
        for e in range(len(LENGTHS)):
            d, group = minari_episode(e), f.create_group(f"episode_{e}")
            group.attrs["id"], group.attrs["total_steps"] = e, LENGTHS[e]
            group["observations/pos"] = d["pos"]
            group["observations/pair/_index_0"] = d["number"]
            group.create_dataset(
                "observations/pair/_index_1", data=d["text"], dtype=h5py.string_dtype("utf-8")
            )
            for name in ("actions", "rewards", "terminations", "truncations"):
                group[name] = d[name]
    return root


def minari_arrow(root: Path, kind: str = "arrow") -> Path:
    path = root / "data"
    minari_meta(path, kind)
    for e, n in enumerate(LENGTHS):
        d = minari_episode(e)
        pair = pa.StructArray.from_arrays(
            [pa.array(d["number"], pa.int32()), pa.array(d["text"])], ["0", "1"]
        )
        pos = pa.FixedSizeListArray.from_arrays(pa.array(d["pos"].ravel()), 2)
        padded = {k: np.pad(d[k], (0, 1)) for k in ("actions", "rewards", "terminations", "truncations")}
        columns = {"observations": pa.StructArray.from_arrays([pos, pair], ["pos", "pair"]),
                   "actions": pa.array(padded.pop("actions"), pa.int32())}  # fmt: skip
        columns |= {k: pa.array(v) for k, v in padded.items()}
        put(path / str(e) / "metadata.json", json.dumps({"id": e, "total_steps": n}))
        if kind == "parquet":
            parquet.write_table(pa.table(columns), path / str(e) / "part-0.parquet")
        else:
            with pa.ipc.new_file(str(path / str(e) / "part-0.arrow"), pa.table(columns).schema) as writer:
                writer.write_table(pa.table(columns))
    return root


def without_episodes(root: Path) -> None:
    """Leave a version 3.0 set its columns and no row that tells of an episode."""
    for file in (root / "meta/episodes").rglob("*.parquet"):
        parquet.write_table(parquet.read_table(file).slice(0, 0), file)


# -- Hugging Face


def huggingface(root: Path) -> Path:
    """What `save_to_disk` writes: Arrow streams, and a state that names them."""
    whole = pa.concat_tables([table(e, True) for e in range(len(LENGTHS))])
    whole = whole.append_column("ragged", pa.array([[1.0] * (i % 3) for i in range(len(whole))]))
    whole = whole.append_column("word", pa.array([f"w{i}" for i in range(len(whole))]))
    root.mkdir(parents=True)
    names = []
    for i, (a, b) in enumerate(((0, 5), (5, len(whole)))):
        names.append({"filename": f"data-{i:05d}-of-00002.arrow"})
        with pa.ipc.new_stream(str(root / names[-1]["filename"]), whole.schema) as writer:
            writer.write_table(whole.slice(a, b - a))
    put(root / "state.json", json.dumps({"_data_files": names, "_fingerprint": "x", "_indices_files": None}))
    put(root / "dataset_info.json", json.dumps({"features": {}}))
    return root
