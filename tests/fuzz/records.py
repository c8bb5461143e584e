"""Small records: the list of a writer, the file and the state of a job that can be watched, traces, job files."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import numpy as np
from tests.fuzz.files import SPACE, rows, told
from tests.fuzz.mutations import SURROGATE, garbled, mutated, places

import recollect as rc
from recollect import _core
from recollect.errors import AttachError, RecollectError, SchemaError
from recollect.rollout.experience.frame import MAGIC, PREFIX, VERSION, aligned

Case = Callable[[Random], str]


class WriterList:
    """What a killed writer noted. Whatever it says, files of others and files of the dump stay, and the rows too."""

    def __init__(self, home: Path) -> None:
        self.path, self.victim = home / "owned", home / "victim"
        self.victim.mkdir()
        self.file = self.path / ".recollect-writer"
        with rc.ReplayBuffer.create("parquet", SPACE, cache_path=self.path) as buf:
            buf.extend(rows(4))
        self.files = {
            str(f.relative_to(self.path)): f.read_bytes() for f in self.path.rglob("*") if f.is_file()
        }
        self.seen = told(self.path)
        left = ["storage/part-7.parquet", "storage/new-3/", "storage/part-9.parquet"]
        self.data = b"recollect writer, process 1234567890\n" + b"".join(
            json.dumps(x).encode() + b"\n" for x in left
        )
        self.names: list[Any] = [
            "", ".", "..", "../victim/kept", "../victim/", "storage/../../victim/kept", str(self.victim / "kept"),
            "link", "link/kept", "link/", "storage/link/kept", "/", "//", "./manifest.json", "storage", "storage/..",
            "mine.txt/x", "\0", "n" * 300, SURROGATE, 3, None, [], ["x"], [[]], {}, True, "storage//", "x/./y",
            *self.files,
        ]  # fmt: skip

    def __call__(self, random: Random) -> str:
        (self.victim / "kept").write_text("kept")
        for link in (self.path / "link", self.path / "storage/link"):
            if not link.is_symlink():
                link.symlink_to(self.victim)
        (self.path / "mine.txt").write_text("mine")
        for name, data in self.files.items():
            (self.path / name).write_bytes(data)
        if random.random() < 0.5:
            text = garbled(self.data, random)
        else:
            chosen = [random.choice(self.names) for _ in range(random.randrange(1, 4))]
            text = self.data + b"".join(json.dumps(x).encode() + b"\n" for x in chosen)
        self.file.write_bytes(text)
        try:
            with rc.ReplayBuffer.load_from(self.path, read_only=False) as buf:
                buf.append(buf[0])
        finally:
            assert (self.victim / "kept").read_text() == "kept", "removed outside"
            assert (self.path / "mine.txt").read_text() == "mine", "removed another's"
            assert told(self.path).startswith(self.seen[:20])
            self.file.unlink(missing_ok=True)
        return repr(text)[:300]


class Watched:
    """The file by which a job is found, and the state that it shows."""

    def __init__(self, home: Path) -> None:
        from recollect.observe import Beacon

        os.environ["RECOLLECT_RUNTIME_DIR"] = str(home / "jobs")
        tables = {"collectors": [{"lane": 0, "rows": 128, "who": "x", "ok": True, "none": None}]}
        self.beacon = Beacon("fuzz", "a job", charts={"return": ["reward/*"], "k": ["a"]}, facts={"f": 1})
        self.beacon.publish({"reward/mean": -2.0, "a": 3.0, "iteration": 3.0}, tables)
        self.beacon.publish({"reward/mean": -1.0, "a": 4.0, "restarts": 1.0}, tables)
        [self.file] = (home / "jobs").glob("*.json")
        self.data = self.file.read_bytes()
        self.entry = json.loads(self.data)
        self.state = msgspec.msgpack.decode(msgspec.msgpack.encode(self.beacon.last))
        self.entry_paths, self.state_paths = places(self.entry), places(self.state)

    def __call__(self, random: Random) -> str:
        if random.random() < 0.5:
            return self._found(random)
        return self._seen(random)

    def _found(self, random: Random) -> str:
        from recollect.observe import find_jobs

        if random.random() < 0.3:
            new = garbled(self.data, random)
        else:
            new = json.dumps(mutated(self.entry, random, self.entry_paths)).encode()
        self.file.write_bytes(new)
        try:
            for job in find_jobs():
                with job, suppress(AttachError):
                    job.snapshot()
        finally:
            self.file.write_bytes(self.data)
        return repr(new)[:300]

    def _seen(self, random: Random) -> str:
        from rich.console import Console

        from recollect.cli.live import line, render
        from recollect.cli.top import _as_json
        from recollect.observe import find_jobs

        try:
            block = msgspec.msgpack.encode(mutated(self.state, random, self.state_paths))
        except (TypeError, ValueError, OverflowError, RecursionError):
            block = b"\xc1"
        if random.random() < 0.3:
            block = garbled(block, random)
        size = len(block) if random.random() < 0.8 else random.choice((0, 1, 2**20, 2**40, 2**63, 2**64 - 1))
        head = np.array([size], np.uint64).view(np.uint8)
        box: Any = self.beacon._box
        if len(block) <= 1 << 20:
            box.publish_at(
                [head, np.frombuffer(block, np.uint8)] if block else [head], [0, 8] if block else [0]
            )
        for job in find_jobs("fuzz"):
            with job, suppress(AttachError):
                seen = job.snapshot()
                if seen is not None:
                    line(seen)
                    Console(file=io.StringIO()).print(render(seen))
                    _as_json(seen)
        return "seen"


class Trace:
    """A trace that is being written; it ends as whole JSON, whatever a process that was killed left in it."""

    def __init__(self, home: Path) -> None:
        self.file = home / "trace.json"

    def __call__(self, random: Random) -> str:
        from recollect.observe import TraceRecorder

        trace = TraceRecorder(self.file)
        trace.add_slice("a", "b", 1000, 2000, {"tick": 1, "t": "ü"})
        trace.add_counter("c", 3000, 4.0)
        trace.flush()
        deep = b"[" * 100_000 + b"\n"
        more = random.choice(
            (b"", b"", deep, b'"\xff\xfe"\n', b"\xed\xa0\x80\n", b"9" * 5000 + b",\n", b"NaN,\n")
        )
        self.file.write_bytes(garbled(self.file.read_bytes(), random) + more)
        trace.add_counter("d", 5000, 6.0)
        trace.close()
        events = json.loads(self.file.read_text())["traceEvents"]
        assert not more or more.startswith(b'"') or events is not None
        return repr(more)[:50]


class JobFile:
    """The TOML file of a rollout job, and its tasks."""

    def __init__(self, home: Path) -> None:
        self.file, self.tasks = home / "job/job.toml", home / "job/tasks.jsonl"
        self.file.parent.mkdir()
        self.lines = b'{"question": "1 + 1", "answer": 2}\n{"question": "2 + 2", "answer": 4}\n'
        self.value: dict[str, Any] = {
            "rollout": {"runners": 2, "seed": 3, "sink": {"kind": "file", "path": "out"}, "name": "x",
                        "journal": "j.db", "workflow_modules": ["json"], "max_batches": 4},
            "models": [{"kind": "scripted", "script": ["a", "b"], "latency_s": 0.0}],
            "auxiliary": {"judge": [{"kind": "openai", "base_url": "http://127.0.0.1:1", "model": "m"}]},
            "train": {"tasks": "tasks.jsonl", "workflow": "json:dumps", "batch_size": 2, "steps": 3, "ahead": 1},
            "eval": {"tasks": "tasks.jsonl", "workflow": "json:dumps", "every": 2, "args": {"a": [1, 2.5, "x"]}},
        }  # fmt: skip
        self.paths = places(self.value)
        self.load()

    def load(self) -> Any:
        from recollect.rollout.job import RolloutJob

        if not self.file.exists():
            self.file.write_bytes(_toml(self.value).encode())
            self.tasks.write_bytes(self.lines)
        job = RolloutJob.from_toml(self.file)
        return job.train_tasks(0), job.eval_tasks()

    def __call__(self, random: Random) -> str:
        kind, value = random.random(), self.value
        text, lines = _toml(value).encode(), self.lines
        if kind < 0.25:
            text = garbled(text, random)
        elif kind < 0.4:
            lines = garbled(lines, random)
        else:
            value = mutated(value, random, self.paths)
            train = value.get("train") if isinstance(value, dict) else None
            size = train.get("batch_size") if isinstance(train, dict) else None
            if isinstance(size, int) and size > 1000:
                return "as many tasks as are asked for"
            text = _toml(value).encode("utf-8", "surrogatepass")
        self.file.write_bytes(text)
        self.tasks.write_bytes(lines)
        with suppress(SchemaError):
            self.load()
        return repr(value)[:400]


def _toml(value: Any) -> str:
    """A value as TOML, all of it in line; what TOML has not is text."""
    if not isinstance(value, dict):
        return _inline(value)
    return "".join(f"{json.dumps(str(k), ensure_ascii=False)} = {_inline(v)}\n" for k, v in value.items())


def _inline(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(str(k))} = {_inline(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_inline, value)) + "]" if len(repr(value)) < 1000 else "[" * 600
    if isinstance(value, float):
        return repr(value)
    return json.dumps(value if isinstance(value, bool | int) else str(value), ensure_ascii=False)


class Payload:
    """The experience that a runner sent, as bytes and with its checksums made anew."""

    def __init__(self) -> None:
        import recollect.rollout as rr

        row = rr.Experience(tokens=[1, 2, 3], prompt_length=2, logprobs=[-0.5], reward=1.0, info={"a": "ü"})
        self.data = rr.encode([row, row], batch_id="b", task_id=4, group_id=2, run_id=1)
        n = PREFIX.unpack_from(self.data)[3]
        self.head = msgspec.msgpack.decode(self.data[PREFIX.size : PREFIX.size + n])
        self.body = self.data[aligned(PREFIX.size + n) :]
        self.paths = places(self.head)

    def __call__(self, random: Random) -> str:
        import recollect.rollout as rr

        value, body, kind = self.head, self.body, random.random()
        if kind < 0.2:
            data = garbled(self.data, random)
        else:
            value = mutated(value, random, self.paths) if kind < 0.7 else value
            body = garbled(body, random) if kind > 0.6 else body
            try:
                head = msgspec.msgpack.encode(value)
            except (TypeError, ValueError, OverflowError, RecursionError):
                head = b"\xc1"
            head = garbled(head, random) if random.random() < 0.2 else head
            prefix = PREFIX.pack(
                MAGIC, VERSION, 0, len(head), len(body), _core.crc32c(head), _core.crc32c(body)
            )
            data = prefix + head + bytes(aligned(PREFIX.size + len(head)) - PREFIX.size - len(head)) + body
        found = rr.decode(data)
        for i in range(len(found)):
            repr(found[i])
        return repr(value)[:300]


def records(home: Path) -> list[Case]:
    """All of them."""
    os.fsync = os.fdatasync = lambda fd: None  # type: ignore[assignment]
    return [WriterList(home), Watched(home), Trace(home), JobFile(home), Payload()]


class SamplerState:
    """The state of a sampler: what is refused changes nothing, what is taken draws samples that are there."""

    def __init__(self, sampler: Any, is_mid_epoch: bool) -> None:
        self.sampler = sampler
        sampler.sample()
        if is_mid_epoch:
            self.epoch = sampler.epoch_iter()
            next(self.epoch)
        self.state = sampler.state_dict()
        self.plain = _plain(self.state)
        self.paths = places(self.plain)

    def __call__(self, random: Random) -> str:
        self.sampler.load_state_dict(self.state)
        before = repr(self.sampler.state_dict())
        value = _arrays(mutated(self.plain, random, self.paths))
        try:
            self.sampler.load_state_dict(value)
        except ValueError:
            assert repr(self.sampler.state_dict()) == before, (
                "a state that was refused has changed the sampler"
            )
            return "refused"
        try:
            for _ in range(2):
                self.sampler.sample()
            for _ in zip(range(5), self.sampler.epoch_iter()):
                pass
        except RecollectError:
            pass
        self.sampler.state_dict()
        return repr(value)[:300]


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, np.ndarray):
        return {"$array": str(value.dtype), "values": value.tolist()}
    return [_plain(v) for v in value] if isinstance(value, list | tuple) else value


def _arrays(value: Any) -> Any:
    if isinstance(value, dict):
        if "$array" in value and "values" in value:
            try:
                return np.array(value["values"], value["$array"])
            except (TypeError, ValueError, OverflowError, RecursionError, SyntaxError, MemoryError):
                return value["values"]
        return {k: _arrays(v) for k, v in value.items()}
    return [_arrays(v) for v in value] if isinstance(value, list) and len(repr(value)) < 1000 else value


def states(home: Path) -> list[Case]:
    """States of each sampler, within and outside of an epoch."""
    space = {"x": ((2,), "float32"), "reward": ((), "float32")}
    data = {"x": np.ones((20, 2), "float32"), "reward": np.ones(20, "float32")}
    memory = rc.ReplayBuffer.create("memory", space, capacity=32, maintain_segment_metadata=True)
    filed = rc.ReplayBuffer.create("parquet", space, cache_path=home / "parquet", piece_size=4)
    for buf in (memory, filed):
        buf.extend(data)
        if hasattr(buf, "mark_segment_end"):
            buf.mark_segment_end()
    found: list[Case] = []
    for source in (memory, filed):
        for is_mid in (False, True):
            found.append(SamplerState(rc.StepSampler(source, 4, seed=1), is_mid))
            found.append(SamplerState(rc.PrioritizedSampler(source, 4, seed=1), is_mid))
    found.append(SamplerState(rc.SequenceSampler(memory, 4, 3, seed=1), True))
    return found
