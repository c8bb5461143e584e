"""What a manager resumes from, its log, its state and its manifest: damaged as bytes, and signed but wrong."""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import numpy as np
from tests.fuzz.mutations import garbled, mutated, places
from tests.remote.make import MAX_LENGTH, grid, paths

from recollect import _core
from recollect.files.record import read_json, signed_json
from recollect.remote import Checkpoint, ReplayBufferManager
from recollect.remote import frame as wire
from recollect.remote.manager.checkpoint import record_head

SPACE = {"id": ((), "int64"), "text": ((8,), "uint8")}
N = 4


def _opened(path: Path, resume: bool, kind: str) -> ReplayBufferManager:
    about = Checkpoint(path, resume=resume)
    if kind == "items":
        return ReplayBufferManager(SPACE, 1, 1, capacity=50, checkpoint=about)
    return ReplayBufferManager(grid(), 1, 1, capacity=50, max_length=MAX_LENGTH, checkpoint=about)


def _item(i: int, kind: str) -> Any:
    n = 1 + i % 3
    if kind == "items":
        return {"id": np.full(n, i), "text": np.full((n, 8), i, np.uint8)}
    return paths(np.full(n, i), np.full(n, 0.5))


def _packed(value: Any) -> bytes:
    try:
        return msgspec.msgpack.encode(value)
    except (TypeError, ValueError, OverflowError, RecursionError, UnicodeEncodeError):
        return b"\xc1"


class Resumed:
    """A checkpoint with a log of N records. Damage as bytes must be survived; what is signed but wrong may be refused.

    After each case the directory is made anew from memory.
    """

    def __init__(self, home: Path, kind: str) -> None:
        self.home, self.kind = home / kind, kind
        m = _opened(self.home, False, kind)
        (log,) = self.home.glob("log-*.bin")
        ends = [0]
        for i in range(N):
            m.add(_item(i, kind))
            ends.append(log.stat().st_size)
        data = log.read_bytes()
        m.close()  # as a kill would
        self.records = [data[a:b] for a, b in pairwise(ends)]
        self.log = log.name
        self.files = {
            str(f.relative_to(self.home)): f.read_bytes() for f in self.home.rglob("*") if f.is_file()
        }
        manifest = read_json(self.home / "manifest.json")
        self.manifest = {k: v for k, v in manifest.items() if k != "crc32c"}
        (self.state_name,) = (name for name in self.files if "/manager-" in name)
        self.state = msgspec.msgpack.decode(self.files[self.state_name])
        self.state_paths = places(self.state)
        self.data_paths = [(i,) for i in range(8)]

    def _put(self, changes: dict[str, bytes]) -> None:
        shutil.rmtree(self.home)
        for name, data in {**self.files, **changes}.items():
            (self.home / name).parent.mkdir(parents=True, exist_ok=True)
            (self.home / name).write_bytes(data)

    def _resume(self, changes: dict[str, bytes]) -> list[int]:
        self._put(changes)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            m = _opened(self.home, True, self.kind)
        try:
            m.stats()
            m.add(_item(0, self.kind))
            found = m.buffer[:]
            return [int(x) for x in np.ravel(found["id"])] if self.kind == "items" else [len(m.buffer)]
        finally:
            m.close()

    def __call__(self, random: Random) -> str:
        kind = random.random()
        if kind < 0.4:
            return self._bytes(random)
        if kind < 0.75:
            return self._frames(random)
        return self._state(random)

    def _bytes(self, random: Random) -> str:
        """Whatever happens to the bytes of one record, the others are kept."""
        at = random.randrange(N)
        broken = garbled(self.records[at], random)
        junk = random.choice((b"", b"RLOG" * 3, bytes(random.randrange(1, 99)), random.randbytes(40)))
        pieces = [*self.records[:at], broken, junk, *self.records[at + 1 :]]
        found = self._resume({self.log: b"".join(pieces)})
        if self.kind == "items":
            want = [i for i in range(N) for _ in range(1 + i % 3)]
            lost = [i for i in want if i != at] + [0]
            assert found in (lost, [*want, 0]), f"{found} of a log that lost {at}"
        return "bytes"

    def _frames(self, random: Random) -> str:
        """A record with the right checksums that says something else."""
        at = random.randrange(N)
        frame = self.records[at][20:]
        n_head = wire.PREFIX.unpack_from(frame)[3]
        body_at = 32 + n_head + -(32 + n_head) % 64
        value = msgspec.msgpack.decode(frame[32 : 32 + n_head])
        head, body = _packed(mutated(value, random, self.data_paths)), frame[body_at:]
        if random.random() < 0.4:
            head = frame[32 : 32 + n_head] if random.random() < 0.5 else head
            body = garbled(body, random)
        lead = bytes(-(32 + len(head)) % 64) if body else b""
        numbers = [wire.MAGIC, 1, 0, len(head), _core.crc32c(head), len(body), _core.crc32c(body), 0]
        if random.random() < 0.1:
            numbers[random.choice((2, 3, 5))] = random.choice((0, 1, 2**16 - 1, 2**31))
        with suppress(Exception):
            frame = wire.PREFIX.pack(*numbers) + head + lead + body
        sender = random.choice((0, 1, 2, -1, -2, 2**31, 2**62, -(2**63)))
        forged = record_head(frame, sender) + frame
        self._resume({self.log: b"".join([*self.records[:at], forged, *self.records[at + 1 :]])})
        return "frames"

    def _state(self, random: Random) -> str:
        """A state with the right checksums that says something else."""
        value = mutated(self.state, random, self.state_paths)
        data = _packed(value) if random.random() < 0.85 else garbled(self.files[self.state_name], random)
        files = dict(self.manifest["files"])
        files[self.state_name] = {"bytes": len(data), "crc32c": f"{_core.crc32c(data):08x}"}
        manifest = signed_json({**self.manifest, "files": files}).encode()
        try:
            self._resume({self.state_name: data, "manifest.json": manifest})
        except ValueError as error:  # the documented answer to a checkpoint of another manager
            if "must be as in the checkpoint" not in str(error):
                raise
        return repr(value)[:300]


def logs(home: Path) -> list[Callable[[Random], str]]:
    """Checkpoints of managers of items and of trajectories."""
    os.fsync = os.fdatasync = lambda fd: None  # type: ignore[assignment]
    return [Resumed(home, "items"), Resumed(home, "trajectories")]
