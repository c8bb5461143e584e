"""Buffers of numbered samples over the row storages, for the tests of dumps."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import recollect as rc
from recollect import _core
from recollect.files.record import canonical_json

SPACE = {"id": ((), "int64"), "words": ((3,), "float64")}
KINDS = ("memory", "shared", "memmap")


def block(first: int, n: int) -> dict[str, Any]:
    """Samples `first` to `first + n`, whose leaves tell whether they belong together."""
    ids = np.arange(first, first + n)
    return {"id": ids, "words": ids[:, None] * np.array([1.0, -2.0, 0.5])}


def sample(number: int) -> dict[str, Any]:
    return {key: value[0] for key, value in block(number, 1).items()}


def ids(data: Any) -> list[int]:
    """The numbers of samples that were read, each of them whole."""
    assert np.array_equal(data["words"], data["id"][:, None] * np.array([1.0, -2.0, 0.5]))
    return [int(i) for i in data["id"]]


def make(kind: str, tmp_path: Path, **kwargs: Any) -> rc.ReplayBuffer:
    """A ring of 12 in segments, gone round: samples 3 to 14 from row 3 on, the oldest segment clipped at its head."""
    kwargs = {"capacity": 12, "maintain_segment_metadata": True, **kwargs}
    if kind == "memmap":
        kwargs.setdefault("cache_path", tmp_path / "live")
    buffer = rc.ReplayBuffer.create(kind, SPACE, **kwargs)
    for start in (0, 5, 10):
        buffer.extend(block(start, 5))
    return buffer


def contents(buffer: rc.ReplayBuffer) -> Any:
    """All that a dump must keep."""
    where = buffer.locate(...)
    place = [a.tolist() for a in (where.row, where.generation, where.segment, where.step)]
    return ids(buffer[...]), buffer.get_segments(), place, buffer.offset, buffer.capacity


def manifest_of(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((path / "manifest.json").read_text())
    return found


def forge(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change a manifest and give it a checksum that fits."""
    manifest = manifest_of(path)
    change(manifest)
    manifest.pop("crc32c", None)
    manifest["crc32c"] = f"{_core.crc32c(canonical_json(manifest).encode()):08x}"
    (path / "manifest.json").write_text(canonical_json(manifest))


def files_under(path: Path) -> set[str]:
    return {str(f.relative_to(path)) for f in path.rglob("*")} if path.exists() else set()
