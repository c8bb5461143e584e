"""Valid artefacts of every kind, and how each is read: what the fuzzer damages."""

from __future__ import annotations

import asyncio
import json
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import numpy as np
from gymnasium import spaces
from tests.fuzz.files import dataset_files, dump_files, put_rollout
from tests.fuzz.logs import logs
from tests.fuzz.mutations import LINKS, garbled, mutated, places
from tests.fuzz.records import records, states
from tests.fuzz.trees import trees

import recollect as rc
from recollect.files.record import canonical_json

Case = Callable[[Random], str]


def _signed(record: Any) -> bytes:
    """The record as if its writer had written it: with the right checksum, where it can have one."""
    from recollect import _core

    record = {k: v for k, v in record.items() if k != "crc32c"} if isinstance(record, dict) else record
    try:
        body = canonical_json(record)
        crc = f"{_core.crc32c(body.encode()):08x}"
        return (
            canonical_json({**record, "crc32c": crc}).encode() if isinstance(record, dict) else body.encode()
        )
    except (
        ValueError,
        RecursionError,
    ):  # a lone surrogate, NaN, or too many levels: no writer could have signed it
        return _text(record)


class JsonFile:
    """A JSON file that is damaged, signed again if it was, read by `load`, and put back.

    A signed file whose bytes were changed must be refused, and one that says what it said must load as it did.
    """

    def __init__(self, file: Path, load: Callable[[], Any], *, signed: bool, lines: bool = False) -> None:
        self.file, self.load, self.signed, self.lines = file, load, signed, lines
        self.data = file.read_bytes()
        self.value = [json.loads(x) for x in self.data.splitlines()] if lines else json.loads(self.data)
        self.value = {k: v for k, v in self.value.items() if k != "crc32c"} if signed else self.value
        self.paths = places(self.value)
        self.seen = load()
        for folder in (file.parent, file.parent / "storage", file.parent.parent / "data"):
            put_links(folder)

    def __call__(self, random: Random) -> str:
        kind, value = random.random(), None
        if kind < 0.15:
            new, about = garbled(self.data, random), "bytes"
        elif kind < 0.18 and isinstance(self.value, dict) and self.value:
            new, about = _doubled(self.data, mutated(self.value, random, self.paths), random), "doubled"
        else:
            value = mutated(self.value, random, self.paths)
            about = repr(value)[:3000] if len(self.data) < 5000 else "value"
            if self.signed:
                new = _signed(value)
            elif self.lines and isinstance(value, list):
                new = b"\n".join(_text(x) for x in value)
            else:
                new = _text(value)
        try:
            self.file.write_bytes(new)
            found = self.load()
            assert value is not None or not self.signed or new == self.data, (
                f"{about} loaded, checksum or not"
            )
            assert new != self.data or found == self.seen, f"{found} is not {self.seen}"
        finally:
            self.file.write_bytes(self.data)
        return about


def put_links(folder: Path) -> None:
    """Links that a damaged record may name."""
    for name, target in LINKS.items():
        if folder.is_dir() and not (folder / name).is_symlink():
            (folder / name).symlink_to(target)


def _doubled(data: bytes, other: Any, random: Random) -> bytes:
    """The text of an object that has one of its keys twice, first with another value."""
    if not isinstance(other, dict) or not other:
        return data
    key = random.choice(list(other))
    return b"{" + _text({key: other[key]}).strip()[1:-1] + b"," + data.lstrip()[1:]


def _text(value: Any) -> bytes:
    try:
        return json.dumps(value).encode()
    except RecursionError:
        return b"[" * 5000


def _touch(path: Path, read_only: bool = True) -> str:
    """Load a dump, look at everything in it, and tell it."""
    rc.ReplayBuffer.get_space_from_path(path)
    with rc.ReplayBuffer.load_from(path, read_only=read_only) as buf:
        n = len(buf)
        rows = [buf[0], buf[n - 1], buf[np.arange(min(n, 3))]] if n else []
        return f"{n} {rows} {buf.get_segments()} {buf.limiter}"


SPACE = {"x": ((2,), "float32"), "k": spaces.Discrete(3), "t": spaces.Text(4, charset="abcü")}
FRAMES = ((4, 4, 3), "uint8")


def _rows(n: int) -> Any:
    return {"x": np.ones((n, 2), "float32"), "k": np.arange(n) % 3, "t": ["ab", "", "ü", "abca"][:n]}


def manifests(home: Path) -> list[Case]:
    """Dumps of every storage."""
    found: list[Case] = []

    def dump(name: str, buf: Any, rows: Any, read_only: bool = True) -> None:
        path = home / name
        buf.extend(rows)
        if buf.get_segments() is not None and hasattr(buf, "mark_segment_end"):
            buf.mark_segment_end()
        if not (path / "manifest.json").exists():
            buf.dumps(path)
        buf.close()
        found.append(JsonFile(path / "manifest.json", lambda: _touch(path, read_only), signed=True))

    make = rc.ReplayBuffer.create
    dump("memory", make("memory", SPACE, capacity=8, maintain_segment_metadata=True), _rows(4))
    dump("unbounded", make("memory", SPACE), _rows(4))
    dump("thawed", make("memory", SPACE, capacity=8), _rows(4), read_only=False)
    dump(
        "no_bytes",
        make("memory", {"x": ((0,), "float32")}, capacity=None),
        {"x": np.zeros((3, 0), "float32")},
    )
    dump("lowest", make("memory", {"x": ((), "float32")}, capacity=4, evict="lowest", evict_key="x"),
         {"x": np.arange(3, dtype="float32")})  # fmt: skip
    limiter = rc.RateLimiter(4.0, min_size=1, band=100.0)
    dump("limited", make("memory", SPACE, capacity=8, limiter=limiter), _rows(4), read_only=False)
    dump("memmap", make("memmap", SPACE, capacity=8, cache_path=home / "memmap"), _rows(4))
    sequence = {"s": spaces.Sequence(spaces.Box(0, 1, (2,)))}
    dump(
        "sequence",
        make("memory", sequence, capacity=4, max_lengths={"s": 3}),
        {"s": [np.zeros((1, 2), "float32")]},
    )
    for kind in ("hdf5", "parquet"):
        dump(kind, make(kind, SPACE, cache_path=home / kind, maintain_segment_metadata=True), _rows(4))
    dump("hdf5_ring", make("hdf5", SPACE, capacity=4, cache_path=home / "hdf5_ring"), _rows(4))
    dump(
        "image", make("image", FRAMES, capacity=4, cache_path=home / "image"), np.zeros((3, 4, 4, 3), "uint8")
    )
    dump(
        "image_grows", make("image", FRAMES, cache_path=home / "image_grows"), np.zeros((3, 4, 4, 3), "uint8")
    )
    video = ((16, 16, 3), "uint8")
    dump("video", make("video", video, cache_path=home / "video"), np.zeros((3, 16, 16, 3), "uint8"))
    storages = {"x": "parquet", "*": "hdf5"}
    dump("dict", make("dict", SPACE, cache_path=home / "dict", storages=storages), _rows(4))
    dump("dict_parts", make("dict", SPACE, capacity=8, storages={"x": "memory", "*": "memory"}), _rows(4))
    flat = {"x": ((2,), "float32"), "k": ((), "int16")}
    dump("flattened", make("flattened", flat, cache_path=home / "flattened", inner="parquet"),
         {"x": np.ones((3, 2), "float32"), "k": np.ones(3, "int16")})  # fmt: skip
    from recollect.batch import CastTransformation

    dump("transformed", make("transformed", {"x": ((2,), "float32")}, capacity=8,
         transformation=CastTransformation({"*": "float16"})), {"x": np.ones((3, 2), "float32")})  # fmt: skip
    return found


def spaces_json(home: Path) -> list[Case]:
    """The descriptions of all spaces, and of their layouts."""
    from recollect.spaces import Layout, compile_layout, space_from_json, space_to_json
    from recollect.testing.spaces import CATALOGUE

    values = [space_to_json(s) for s in CATALOGUE.values()]
    every = [(value, places(value)) for value in values]
    layout = compile_layout(SPACE).to_json()
    paths = places(layout)

    def space(random: Random) -> str:
        value = mutated(*_pick(random.choice(every), random))
        found = space_from_json(value)
        space_from_json(space_to_json(found))
        return repr(value)[:300]

    def of_layout(random: Random) -> str:
        value = mutated(layout, random, paths)
        Layout.from_json(value)
        return repr(value)[:300]

    return [space, space, space, of_layout]


def _pick(pair: tuple[Any, Any], random: Random) -> tuple[Any, Random, Any]:
    return pair[0], random, pair[1]


def learners(home: Path) -> list[Case]:
    """A checkpoint of a learner."""
    import gymnasium

    from recollect.files.record import damage_in
    from recollect.learners.checkpoint import load_checkpoint, save_checkpoint
    from recollect.learners.config import SACConfig
    from recollect.learners.environment import spaces_of
    from recollect.learners.run import check_state
    from recollect.learners.sac_learner import SACLearner

    env = gymnasium.make_vec("Pendulum-v1", 1)
    learner = SACLearner(spaces_of(env), SACConfig(hidden_dims=(4,)) if False else SACConfig(), "cpu", 0)
    env.close()
    state = {"algorithm": "sac", "iteration": 3, "learner": learner.get_state_dict(), "n": float("nan"), "t": (1, "x"),
             "p": {1: 2, "$x": np.arange(3)}}  # fmt: skip
    path = save_checkpoint(home / "model_3", state)

    def load() -> None:
        found = load_checkpoint(path)
        with damage_in(path):
            check_state(learner.get_state_dict(), found["learner"])
            learner.load_state_dict(found["learner"])

    return [JsonFile(path / "manifest.json", load, signed=True)]


def journals(home: Path) -> list[Case]:
    """The rows of a rollout journal, decoded, changed and encoded again."""
    from recollect.rollout.config import Config
    from recollect.rollout.journal.format import read_ending
    from recollect.rollout.journal.journal import Journal

    path = home / "journal.db"
    batch = ["b", "train", None, None, "c", 1, [["w", b"\x92\x80\x80", 2, 0, None, 1, 3, 0, False],
               ["w", b"\x92\x80\x80", 1, "y", 2.0, 1, 4, 1, False]], {}, 2, False]  # fmt: skip
    cut = [[0, 1], 0, 0, []]
    outcome = [0, True, 0.5, {"a": 1.0}, 0, b"abc", 1, 1.0, 2, 0, "", False]
    ending = ["e", "eval", 2, [[0, ["ok", 1, None, 1, 0.5]]], None, "finished", {"a": 1}, None]
    from recollect.rollout.batch.state import BatchLifecycleState, BatchState
    from recollect.rollout.journal.format import saved_ending

    state = BatchState("e", "eval", 2)
    state.state = list(BatchLifecycleState)[-1]
    ending = msgspec.msgpack.decode(saved_ending(state, None))
    record = {
        "meta": {"format": 1, "layout": "h", "next_group": 3, "k": 2, "first_version": 1},
        "batch": batch,
        "cut": cut,
        "ending": ending,
        "runs": [[1, 0, 0, outcome], [1, 1, 0, outcome]],
    }
    paths = places(record)
    read_ending(msgspec.msgpack.encode(ending))

    class _Scheduler:
        def stage_bytes(self, batch: Any, n: int) -> None: ...
        def finish(self, task: Any) -> None: ...
        def add(self, batch: Any) -> None: ...

    class _Clock:
        def time(self) -> float:
            return 0.0

    from types import SimpleNamespace

    from recollect.rollout.journal.restore import restore

    rc.rollout.workflow("w")(lambda work, models: None) if hasattr(rc.rollout, "workflow") else None
    config = Config()

    async def load() -> None:
        journal = await Journal.open(str(path), config, "h")
        try:
            context = SimpleNamespace(
                n_batches=0, config=config, scheduler=_Scheduler(), next_group=0, k=0, first_version=0, history={},
                clock=_Clock(), carriers=[], batches={}, doors=SimpleNamespace(submitted=0),
            )  # fmt: skip
            restore(context, journal)
        finally:
            await journal.close()

    def packed(value: Any) -> Any:
        try:
            return msgspec.msgpack.encode(value)
        except (TypeError, ValueError, OverflowError, RecursionError, UnicodeEncodeError):
            return b"\xc1"

    def case(random: Random) -> str:
        value = mutated(record, random, paths)
        if not isinstance(value, dict) or not {"meta", "batch", "cut", "ending", "runs"} <= set(value):
            return "skipped"
        damage = random.random() < 0.1
        for extra in ("", "-wal", "-shm"):
            Path(str(path) + extra).unlink(missing_ok=True)
        db = sqlite3.connect(path)
        from recollect.rollout.journal.journal import TABLES

        db.executescript("pragma synchronous=off; pragma journal_mode=memory;" + TABLES)
        meta = value["meta"] if isinstance(value["meta"], dict) else {}
        for key, one in meta.items():
            if isinstance(one, list | dict | bool):
                one = json.dumps(str(one)[:50])
            with suppress(OverflowError, UnicodeEncodeError, sqlite3.Error):
                db.execute("insert into meta values (?, ?)", (key, one))
        row = [packed(value[name]) for name in ("batch", "cut", "ending")]
        if damage:
            row = [garbled(x, random) for x in row]
        db.execute("insert into batches values (1, ?, ?, null)", row[:2])
        db.execute("insert into batches values (2, null, null, ?)", row[2:])
        for run in value["runs"] if isinstance(value["runs"], list) else []:
            try:
                serial, position, ident, outcome = run
                db.execute(
                    "insert or replace into runs values (?, ?, ?, ?)",
                    (serial, position, ident, packed(outcome)),
                )
            except (OverflowError, TypeError, ValueError, sqlite3.Error):
                pass
        db.commit()
        db.close()
        try:
            asyncio.run(load())
        except ValueError as error:  # the documented answer to a workflow that is not known here
            if not str(error).startswith("workflow: "):
                raise
        return repr(value)[:400]

    return [case]


def datasets(home: Path) -> list[Case]:
    """The metadata of LeRobot, Minari and Hugging Face data sets."""
    from recollect.datasets import open_dataset, to_lerobot
    from recollect.datasets.rollouts import from_rollout

    buf = rc.ReplayBuffer.create("memory", {"x": ((2,), "float32"), "y": ((2, 3), "int64")}, capacity=8,
                                 maintain_segment_metadata=True)  # fmt: skip
    buf.extend({"x": np.ones((6, 2), "float32"), "y": np.ones((6, 2, 3), "int64")})
    buf.mark_segment_end()
    to_lerobot(buf, home / "lerobot", fps=10, tasks="")
    found: list[Case] = []

    def touch(path: Path) -> str:
        batch = open_dataset(path)
        return f"{len(batch)} {batch[0]} {batch[len(batch) - 1]}"

    from recollect.datasets.lerobot.meta import CHECKSUMS, read_checksums

    bare = shutil.copytree(home / "lerobot", home / "lerobot_bare")
    (bare / CHECKSUMS).unlink(missing_ok=True)  # as a set of others: what is behind the checksums is tried
    found.append(JsonFile(bare / "meta/info.json", lambda: touch(bare), signed=False))

    if (home / "lerobot" / CHECKSUMS).exists():
        found.append(
            JsonFile(home / "lerobot" / CHECKSUMS, lambda: read_checksums(home / "lerobot"), signed=True)
        )
    _lerobot_2(home / "old")
    for name in ("info.json", "episodes.jsonl", "tasks.jsonl"):
        file = home / "old/meta" / name
        found.append(JsonFile(file, lambda: touch(home / "old"), signed=False, lines=name.endswith("l")))
    for kind in ("hdf5", "arrow"):
        _minari(home / kind, kind)
        found.append(
            JsonFile(home / kind / "data/metadata.json", lambda k=kind: touch(home / k), signed=False)
        )
    found.append(JsonFile(home / "arrow/data/0/metadata.json", lambda: touch(home / "arrow"), signed=False))
    import pyarrow as pa

    (home / "hf").mkdir()
    table = pa.table({"a": [1, 2, 3], "s": ["x", "y", "z"]})
    with pa.OSFile(str(home / "hf/data.arrow"), "wb") as f, pa.ipc.new_stream(f, table.schema) as w:
        w.write_table(table)
    (home / "hf/state.json").write_text(json.dumps({"_data_files": [{"filename": "data.arrow"}]}))
    found.append(JsonFile(home / "hf/state.json", lambda: touch(home / "hf"), signed=False))
    put_rollout(home / "rollout", "jsonl")
    rollout = partial(from_rollout, home / "rollout")
    files = sorted((home / "rollout").iterdir())
    found.extend(JsonFile(f, lambda: repr(rollout()[:]), signed=False, lines=True) for f in files)
    return found


def _lerobot_2(path: Path) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    (path / "meta").mkdir(parents=True)
    (path / "data/chunk-000").mkdir(parents=True)
    info = {"codebase_version": "v2.1", "fps": 10, "chunks_size": 1000, "total_episodes": 1, "robot_type": None,
            "data_path": "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet",
            "video_path": None, "features": {"x": {"dtype": "float32", "shape": [2], "names": None},
            "episode_index": {"dtype": "int64", "shape": [1], "names": None}}}  # fmt: skip
    (path / "meta/info.json").write_text(json.dumps(info))
    (path / "meta/episodes.jsonl").write_text(json.dumps({"episode_index": 0, "length": 3, "tasks": ["t"]}))
    (path / "meta/tasks.jsonl").write_text(json.dumps({"task_index": 0, "task": "t"}))
    x = pa.FixedSizeListArray.from_arrays(pa.array(np.ones(6, "float32")), 2)
    parquet.write_table(
        pa.table({"x": x, "episode_index": [0, 0, 0]}), path / "data/chunk-000/episode_000000.parquet"
    )


def _minari(path: Path, kind: str) -> None:
    import h5py
    import pyarrow as pa

    data = path / "data"
    data.mkdir(parents=True)
    box = json.dumps({"type": "Box", "dtype": "float32", "shape": [2], "low": [0.0, 0.0], "high": [1.0, 1.0]})
    meta = {"data_format": kind, "total_episodes": 1, "observation_space": json.loads(box) if kind == "arrow" else box,
            "action_space": {"type": "Discrete", "n": 3, "start": 0, "dtype": "int64"}}  # fmt: skip
    (data / "metadata.json").write_text(json.dumps(meta))
    columns = {"observations": np.ones((4, 2), "float32"), "actions": np.zeros(3, "int64"), "rewards": np.ones(3),
               "terminations": np.zeros(3, bool), "truncations": np.zeros(3, bool)}  # fmt: skip
    if kind == "hdf5":
        with h5py.File(data / "main_data.hdf5", "w") as f:
            group = f.create_group("episode_0")
            group.attrs["total_steps"] = 3
            for name, value in columns.items():
                group[name] = value
        return
    (data / "0").mkdir()
    (data / "0/metadata.json").write_text(json.dumps({"total_steps": 3}))
    padded = {"observations": pa.FixedSizeListArray.from_arrays(pa.array(np.ones(8, "float32")), 2)}
    padded |= {k: pa.array(np.append(v, v[:1])) for k, v in columns.items() if k != "observations"}
    with pa.OSFile(str(data / "0/data.arrow"), "wb") as f:
        table = pa.table(padded)
        with pa.ipc.new_file(f, table.schema) as w:
            w.write_table(table)


def frames(home: Path) -> list[Case]:
    """The messages between managers and workers, changed as values and as bytes, and what a manager does with them."""
    from recollect.remote import frame as wire
    from recollect.remote import messages as m

    ident = bytes(16)
    every = [
        m.Hello(1, "worker", ident, 1, "h", 5, 1, ""), m.Welcome(1, ident, 0, 64, None, "{}", 0, "h", 5),
        m.Data(1, ident, 1, ident, 2, 2, False), m.Scores(1, {"a": 1.0}, 1, 0, {"x": 1}),
        m.Sample(1, 3, "uniform", True), m.Items(1, ident, 2, 2, 0, 1), m.GetMetadata(1),
        m.Metadata(1, {"a": [1, {"b": 2}]}), m.Exit(1, ident, 0, ""), m.Goodbye(1),
        m.Sync(1, 0, "summary", None, 2, False, None, 1), m.Failed(1, "e", "t"),
    ]  # fmt: skip
    block = np.ones((2, 8), np.uint8)
    whole = [
        (msgspec.msgpack.decode(msgspec.msgpack.encode(x)), isinstance(x, m.Data | m.Items | m.Sync))
        for x in every
    ]
    kinds = [wire.Shapes(8), wire.Shapes(0), wire.Shapes(4, 4, True), wire.Shapes(0, 0, True)]

    def case(random: Random) -> str:
        value, has_blocks = random.choice(whole)
        blocks = [block] if has_blocks and random.random() < 0.8 else []
        value = mutated(value, random, places(value))
        try:
            head = msgspec.msgpack.encode(value)
        except (TypeError, ValueError, OverflowError, RecursionError, UnicodeEncodeError):
            head = b"\xc1"
        frame = wire.joined(wire.encode(every[6], blocks))
        body = frame[-16:] if blocks else b""
        lead = bytes(-(32 + len(head)) % 64) if blocks else b""
        from recollect import _core

        prefix = wire.PREFIX.pack(
            wire.MAGIC, 1, 0, len(head), _core.crc32c(head), len(body), _core.crc32c(body), 0
        )
        data = prefix + head + lead + body
        if random.random() < 0.2:
            data = garbled(data, random)
        message, _, rest = wire.decode(data)
        if isinstance(message, m.Data | m.Items):
            wire.cut_items(message, rest, random.choice(kinds))
        elif isinstance(message, m.Sync):
            wire.cut_values(message, rest)
        return repr(value)[:300]

    return [case]


FAMILIES: dict[str, Callable[[Path], list[Case]]] = {
    "manifests": manifests, "spaces": spaces_json, "learners": learners, "journals": journals, "datasets": datasets,
    "frames": frames, "logs": logs, "dump_files": dump_files, "dataset_files": dataset_files,
    "trees": trees, "records": records, "states": states,
}  # fmt: skip
