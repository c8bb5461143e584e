"""The files of dumps and data sets: their bytes damaged, and damaged bytes whose checksums were made anew."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from gymnasium import spaces
from tests.fuzz.mutations import garbled

import recollect as rc
from recollect import _core
from recollect.datasets import open_dataset, to_lerobot
from recollect.datasets.lerobot.meta import CHECKSUMS
from recollect.files.record import read_json, signed_json

SPACE = {"x": ((2,), "float32"), "k": spaces.Discrete(3), "t": spaces.Text(4, charset="abcü")}
FRAMES = np.arange(6 * 16 * 16 * 3).astype("uint8").reshape(6, 16, 16, 3)


def rows(n: int) -> Any:
    return {"x": np.arange(2.0 * n, dtype="float32").reshape(n, 2), "k": np.arange(n) % 3,
            "t": [["ab", "", "ü", "abca"][i % 4] for i in range(n)]}  # fmt: skip


def told(path: Path, **options: Any) -> str:
    """All samples of a dump, in words."""
    with rc.ReplayBuffer.load_from(path, **options) as buf:
        found = repr(buf[:])
        for key in getattr(buf.single_space, "spaces", ()):
            buf.get_column_at((key,), slice(0, len(buf)))  # read without the rest of its file
        return f"{found} {buf.get_segments()}"


def thawed(path: Path) -> str:
    """All samples of a dump that is opened for writing, one more included."""
    with rc.ReplayBuffer.load_from(path, read_only=False) as buf:
        with suppress(rc.SchemaError):  # a row that was forged may be none of the space
            buf.append(buf[0])
        return repr(buf[:])


class DumpFile:
    """A file of a dump. What is damaged must be refused where checksums are looked at, or be without effect.

    With the checksums made anew it may give other rows. After each case the directory is made anew.
    """

    def __init__(self, path: Path, name: str, *, checks_reads: bool) -> None:
        self.path, self.name, self.checks_reads = path, name, checks_reads
        self.file = path / name
        self.files = {str(f.relative_to(path)): f.read_bytes() for f in path.rglob("*") if f.is_file()}
        self.data = self.files[name]
        self.seen = told(path)
        self.manifest = read_json(path / "manifest.json")
        self.manifest.pop("crc32c")
        self.is_live = bool(self.manifest["live"])  # its rows may change, so they have no checksum

    def __call__(self, random: Random) -> str:
        new = garbled(self.data, random)
        kind = random.random()
        if kind < 0.4 and len(new) != len(self.data):  # a wrong size is always seen
            new = (new + self.data[len(new) :])[: len(self.data)]
        changes = {self.name: new}
        if kind >= 0.4:
            self._sign(changes)
        self._put(changes)
        try:
            if kind < 0.2:
                assert told(self.path, verify=True) == self.seen or self.is_live, (
                    "other rows, checksum or not"
                )
            elif kind < 0.4:
                assert told(self.path) == self.seen or not self.checks_reads, "other rows"
            elif kind < 0.8:
                told(self.path)
            else:
                thawed(self.path)
        except rc.ReadOnlyError:
            pass  # this kind is not opened for writing
        finally:
            self._put({})
        return "as damaged" if kind < 0.4 else "signed"

    def _sign(self, changes: dict[str, bytes]) -> None:
        files = {k: dict(v) for k, v in self.manifest["files"].items()}
        if "/row-" in self.name:  # an index file names it
            row, generation = map(int, Path(self.name).stem.split("-")[1:])
            [index] = (name for name in files if "/index-" in name)
            entries = bytearray(self.files[index])
            new = changes[self.name]
            words = np.frombuffer(entries, np.dtype("<i8,<i8,<u4,<u4"))
            assert words[row][0] == generation
            words[row] = (generation, len(new), _core.crc32c(new), 0)
            changes[index] = bytes(entries)
        for name, data in changes.items():
            if name in files:
                files[name] = {"bytes": len(data), "crc32c": f"{_core.crc32c(data):08x}"}
        changes["manifest.json"] = signed_json({**self.manifest, "files": files}).encode()

    def _put(self, changes: dict[str, bytes]) -> None:
        wanted = {**self.files, **changes}
        for f in list(self.path.rglob("*")):
            if f.is_file() and str(f.relative_to(self.path)) not in wanted:
                f.unlink()
        for name, data in wanted.items():
            (self.path / name).write_bytes(data)


class PlainFile:
    """A file without a checksum: it is read or refused."""

    def __init__(self, file: Path, read: Callable[[], Any]) -> None:
        self.file, self.read, self.data = file, read, file.read_bytes()
        read()

    def __call__(self, random: Random) -> str:
        self.file.write_bytes(garbled(self.data, random))
        try:
            self.read()
        finally:
            self.file.write_bytes(self.data)
        return "plain"


def dump_files(home: Path) -> list[Callable[[Random], str]]:
    """Files of dumps of every storage."""
    os.fsync = os.fdatasync = lambda fd: None  # type: ignore[assignment]
    found: list[Callable[[Random], str]] = []
    make = rc.ReplayBuffer.create

    def add(name: str, buf: Any, data: Any, checks_reads: bool = True) -> None:
        path = home / name
        buf.extend(data)
        if hasattr(buf, "mark_segment_end"):
            buf.mark_segment_end()
        if not (path / "manifest.json").exists():
            buf.dumps(path)
        buf.close()
        names = sorted(str(f.relative_to(path)) for f in path.rglob("*") if f.is_file())
        names = [x for x in names if x != "manifest.json"]
        assert names
        found.extend(DumpFile(path, x, checks_reads=checks_reads) for x in names[:4])

    add("memory", make("memory", SPACE, capacity=8, maintain_segment_metadata=True), rows(4))
    add("lowest", make("memory", {"x": ((), "float32")}, capacity=4, evict="lowest", evict_key="x"),
        {"x": np.arange(3, dtype="float32")})  # fmt: skip
    add("live", make("memmap", SPACE, capacity=8, cache_path=home / "live"), rows(4), checks_reads=False)
    buf = make("memmap", SPACE, capacity=8, cache_path=home / "memmap", maintain_segment_metadata=True)
    buf.extend(rows(4))
    buf.dumps(home / "frozen")
    add("frozen", buf, rows(4), checks_reads=False)
    for compression in (None, "gzip"):
        path = home / f"hdf5-{compression}"
        add(path.name, make("hdf5", SPACE, cache_path=path, compression=compression), rows(40))
    for compression in ("none", "zstd"):
        path = home / f"parquet-{compression}"
        space = {**SPACE, "s": spaces.Sequence(spaces.Box(0, 1, (2,)))}
        data = {**rows(8), "s": [np.zeros((i % 3, 2), "float32") for i in range(8)]}
        add(path.name, make("parquet", space, cache_path=path, compression=compression), data)
    for kind in ("png", "jpeg", "tiff", "webp", "bmp", "gif"):
        path = home / kind
        picture = ((16, 16), "uint8") if kind == "gif" else ((16, 16, 3), "uint8")
        data = FRAMES[..., 0] if kind == "gif" else FRAMES
        add(kind, make("image", picture, capacity=8, cache_path=path, format=kind), data[:3])
    deep = ((16, 16), "uint16")
    add(
        "deep",
        make("image", deep, cache_path=home / "deep"),
        np.arange(512).reshape(2, 16, 16).astype("uint16"),
    )
    for codec in ("ffv1", "h264"):
        path = home / codec
        add(codec, make("video", ((16, 16, 3), "uint8"), cache_path=path, codec=codec), FRAMES)
    return found


def put_rollout(path: Path, form: str) -> None:
    """Two files of a rollout's sink."""
    import recollect.rollout as rr

    sink = rr.FileSink(path, form)
    for batch in (2, 10):
        g = rr.Generation("xy", tokens=[1, 2, 3], prompt_length=1, logprobs=[-1.0] * 2, prompt="p")
        run = rr.encode([g.experience(reward=1.0, metrics={"m": 0.5}, info={"judge": "fine"})], batch_id=batch,
                        task_id="t", group_id=batch, run_id=0)  # fmt: skip
        sink.write(rr.Experiences.concat([rr.decode(run)] * 2), f"job/{batch}")


def dataset_files(home: Path) -> list[Callable[[Random], str]]:
    """Files of LeRobot, Minari and Hugging Face data sets, which have no checksums that a reader looks at."""
    import pyarrow as pa
    from pyarrow import parquet
    from tests.fuzz.artefacts import _minari

    found: list[Callable[[Random], str]] = []

    def touch(path: Path) -> str:
        from recollect.datasets import minari

        minari._arrow_table.cache_clear()
        batch = open_dataset(path)
        return repr(batch[:])

    space = {"x": ((2,), "float32"), "image": ((16, 16, 3), "uint8")}
    buf = rc.ReplayBuffer.create("memory", space, capacity=8, maintain_segment_metadata=True)
    buf.extend({"x": np.ones((6, 2), "float32"), "image": FRAMES})
    buf.mark_segment_end()
    for name, codec in (("pictures", None), ("video", "h264"), ("av1", "libsvtav1")):
        path = home / name
        to_lerobot(buf, path, fps=10, tasks="", video_codec=codec)
        (path / CHECKSUMS).unlink()  # as a set of others: what is behind the checksums is tried
        files = [f for f in path.rglob("*") if f.suffix in (".parquet", ".mp4") and "stats" not in f.name]
        found.extend(PlainFile(f, partial(touch, path)) for f in sorted(files))
    for kind in ("hdf5", "arrow"):
        path = home / kind
        _minari(path, kind)
        [file] = [f for f in path.rglob("*") if f.suffix in (".hdf5", ".arrow")]
        found.append(PlainFile(file, partial(touch, path)))
    shutil.copytree(home / "arrow", home / "minari_parquet")
    data = home / "minari_parquet/data"
    meta = json.loads((data / "metadata.json").read_text())
    (data / "metadata.json").write_text(json.dumps({**meta, "data_format": "parquet"}))
    with pa.memory_map(str(data / "0/data.arrow")) as f:
        parquet.write_table(pa.ipc.open_file(f).read_all(), data / "0/data.parquet")
    (data / "0/data.arrow").unlink()
    found.append(PlainFile(data / "0/data.parquet", partial(touch, home / "minari_parquet")))
    for form in ("jsonl", "parquet"):
        path = home / form
        put_rollout(path, form)
        found.extend(PlainFile(f, partial(touch, path)) for f in sorted(path.iterdir()))
    path = home / "hf"
    path.mkdir()
    table = pa.table(
        {"a": [1, 2, 3], "s": ["x", "yy", "z"], "v": [[1.0, 2.0]] * 3, "l": [["a"], ["b"], ["c"]]}
    )
    with pa.OSFile(str(path / "data.arrow"), "wb") as f, pa.ipc.new_stream(f, table.schema) as w:
        w.write_table(table)
    (path / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data.arrow"}]}))
    found.append(PlainFile(path / "data.arrow", partial(touch, path)))
    return found
