"""Manifests and journals whose bytes were changed: what was written is read, or a FormatError says what is wrong."""

from __future__ import annotations

import asyncio
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.rollout.make import config, experience, run

import recollect as rc
import recollect.rollout as rr
from recollect.errors import FormatError
from recollect.rollout.experience.space import plan_of
from recollect.rollout.journal.journal import Journal

SOAK = pytest.mark.soak


def damaged(data: bytes, chance: random.Random) -> bytes:
    """The same bytes with a bit or more flipped, a piece cut off, taken out, repeated, moved or put in."""
    kind = chance.choice(("flip", "flips", "cut", "remove", "twice", "move", "insert", "fill"))
    a, b = sorted(chance.randrange(len(data) + 1) for _ in range(2))
    b = min(b, a + 400)
    if kind in ("flip", "flips"):
        found = bytearray(data)
        for _ in range(1 if kind == "flip" else 20):
            found[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        return bytes(found)
    to = chance.randrange(len(data) + 1)
    rest = data[:a] + data[b:]
    return {
        "cut": data[:a],
        "remove": rest,
        "twice": data[:to] + data[a:b] + data[to:],
        "move": rest[:to] + data[a:b] + rest[to:],
        "insert": data[:a] + chance.randbytes(30) + data[a:],
        "fill": data[:a] + bytes(b - a) + data[b:],
    }[kind]


def check_all(file: Path, n: int, check: Callable[[], Any]) -> int:
    """Damage a file in n ways, one after the other; return how often it could still be read."""
    data, n_read = file.read_bytes(), 0
    for seed in range(n):
        found = damaged(data, random.Random(seed))
        file.write_bytes(found)
        try:
            check()
            n_read += 1
        except FormatError:
            assert found != data
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
    file.write_bytes(data)
    check()
    return n_read


@pytest.mark.parametrize("n", [250, pytest.param(100_000, marks=SOAK)])
def test_a_damaged_manifest_is_told_from_a_whole_one(n: int, tmp_path: Path) -> None:
    path = tmp_path / "dump"
    with rc.ReplayBuffer.create(
        "memory", {"id": ((), "int64")}, capacity=9, maintain_segment_metadata=True
    ) as b:
        b.extend({"id": np.arange(7)}, ends=np.arange(7) % 3 == 0)
        b.mark_segment_end()
        b.dumps(path)

    def check() -> None:
        with rc.ReplayBuffer.load_from(path) as found:
            assert found[...]["id"].tolist() == [*range(7)]
            assert found.get_segments() == [(0, 1), (1, 4), (4, 7)]

    check_all(path / "manifest.json", n, check)


@rr.workflow("tests.damage.short")
async def short(task: Any, models: Any) -> Any:
    return experience(n=2)


@pytest.mark.parametrize("n", [120, pytest.param(20_000, marks=SOAK)])
def test_a_damaged_journal_opens_or_is_told(n: int, tmp_path: Path) -> None:
    """SQLite has no checksums, so what it holds may differ; it must be said in our words, and nothing may hang."""
    file, work = tmp_path / "j.sqlite", tmp_path / "work"
    about = config(journal=str(file), sink=str(tmp_path / "out"), drain_s=0.0)

    async def fill() -> str:
        async with rr.RolloutCoordinator(about, []) as c:
            for i in range(3):
                tasks = [rr.Task("tests.damage.short", repeat_times=2, data={"text": "x" * 300})] * 2
                await c.submit_batch(batch_id=i, tasks=tasks, batch_type="train")
            await c.finalize_train_batch(0, timeout=20)
            while c.stats().attempts.good < 12:
                await asyncio.sleep(0.001)
            return plan_of().layout.hash

    layout = run(fill())
    shutil.copy(file, work)

    async def opened() -> None:
        journal = await Journal.open(str(work), about, layout)
        await journal.close()

    def check() -> None:
        for more in ("-wal", "-shm", "-journal"):
            work.with_name(work.name + more).unlink(missing_ok=True)
        asyncio.run(opened())

    check_all(work, n, check)
