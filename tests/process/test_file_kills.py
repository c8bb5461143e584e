"""Writers of file storages killed at every write, sync and rename: the last commit opens whole, and writing goes on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.process.killing import killed_at, steps

import recollect as rc

pytestmark = pytest.mark.process

ROWS: dict[str, Any] = {"id": ((), "int64"), "words": ((3,), "float64")}
FRAME: Any = ((4, 6, 3), "uint8")


def rows(first: int, n: int) -> Any:
    ids = np.arange(first, first + n)
    return {"id": ids, "words": ids[:, None] * np.array([1.0, -2.0, 0.5])}


def frames(first: int, n: int) -> Any:
    ids = np.arange(first, first + n).reshape(-1, 1, 1, 1)
    pixel = np.arange(72).reshape(4, 6, 3)
    return np.where(pixel == 0, ids, (ids * 37 + pixel * 11) % 251).astype(np.uint8)


def both(first: int, n: int) -> Any:
    return {"image": frames(first, n), **rows(first, n)}


KINDS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "parquet": (ROWS, rows, {"piece_size": 4}),
    "hdf5": (ROWS, rows, {}),
    "hdf5 ring": (ROWS, rows, {"capacity": 12}),
    "image": (FRAME, frames, {}),
    "image ring": (FRAME, frames, {"capacity": 12}),
    "video": (FRAME, frames, {}),
    "dict": (
        {"image": FRAME, **ROWS},
        both,
        {"storages": {"image": "video", "*": ("parquet", {"piece_size": 4})}},
    ),
    "flattened": (ROWS, rows, {"inner": "parquet", "piece_size": 4}),
}


def create(kind: str, path: Path, **more: Any) -> rc.ReplayBuffer:
    space, _, options = KINDS[kind]
    return rc.ReplayBuffer.create(
        kind.split()[0], space, cache_path=path, maintain_segment_metadata=True, **{**options, **more}
    )


def block(kind: str, first: int, n: int) -> Any:
    return KINDS[kind][1](first, n)


def ids(kind: str, data: Any) -> list[int]:
    """The ids of samples, each of them whole."""
    found = data[:, 0, 0, 0] if KINDS[kind][0] is FRAME else data["id"]
    numbers = [int(i) for i in found]
    for got, want in zip(_leaves(data), _leaves_of(kind, numbers), strict=True):
        assert np.array_equal(got, want)
    return numbers


def _leaves(data: Any) -> list[Any]:
    return [data[key] for key in sorted(data)] if isinstance(data, dict) else [data]


def _leaves_of(kind: str, numbers: list[int]) -> list[Any]:
    parts = [_leaves(block(kind, i, 1)) for i in numbers]
    return [np.concatenate(leaf) for leaf in zip(*parts)] if parts else _leaves(block(kind, 0, 0))


def state(kind: str, path: Path) -> Any:
    """What a new reader finds, every checksum checked."""
    with rc.ReplayBuffer.load_from(path, verify=True) as buffer:
        return ids(kind, buffer[...]), buffer.get_segments()


def check_tidy(kind: str, path: Path) -> None:
    """Only what the manifest names is there (rows of images are named by index files)."""
    manifest = json.loads((path / "manifest.json").read_text())
    there = {str(f.relative_to(path)) for f in path.rglob("*") if f.is_file()}
    extra = there - {"manifest.json", *manifest["files"]}
    if kind.startswith("image"):
        assert all("/row-" in name for name in extra) and len(extra) == manifest["count"], extra
    else:
        assert not extra


def write_more(kind: str, path: Path) -> None:
    """Open for writing, add segments, end with `close()`; in rings some rows are overwritten."""
    with rc.ReplayBuffer.load_from(path, read_only=False) as buffer:
        buffer.extend(block(kind, 100, 5), ends=np.isin(np.arange(5), [2, 4]))
        for i in (105, 106):
            sample = block(kind, i, 1)
            buffer.append({k: v[0] for k, v in sample.items()} if isinstance(sample, dict) else sample[0])
        buffer.mark_segment_end()


SOAK = pytest.mark.soak
FEW = ["parquet", "hdf5 ring", "image ring", "dict"]  # the dict is of video and Parquet


@pytest.mark.parametrize("kind", [k if k in FEW else pytest.param(k, marks=SOAK) for k in KINDS])
def test_writer_killed_at_every_step(kind: str, tmp_path: Path) -> None:
    """Whatever is found is a state that was committed; the next writer goes on from it and leaves nothing behind."""
    ring = 12 if "ring" in kind else 10**6
    old = [*range(9)]
    allowed = [[*old, *range(100, 100 + n)] for n in (0, 5, 7)]
    if kind in ("parquet", "flattened"):
        allowed.append([*old, 100, 101, 102])  # a full piece
    allowed = [found[-ring:] for found in allowed]
    seen = []
    for step in steps():
        path = tmp_path / f"live-{step}"
        with create(kind, path) as buffer:
            buffer.extend(block(kind, 0, 9), ends=np.isin(np.arange(9), [3, 8]))
        killed = killed_at(step, lambda: write_more(kind, path))  # noqa: B023
        found, segments = state(kind, path)
        assert found in allowed, f"step {step}"
        assert [i for a, b in segments or () for i in range(a, b)] == list(range(len(found)))
        seen.append(len(found) if ring > 100 else found[-1])
        with rc.ReplayBuffer.load_from(path, read_only=False) as again:
            again.extend(block(kind, 50, 2))
        assert state(kind, path)[0] == [*found, 50, 51][-ring:]
        check_tidy(kind, path)
        if not killed:
            break
    assert step >= 8, f"only {step} steps: are the fault points still there?"
    assert seen == sorted(seen) and len(set(seen)) >= 2, "commits come one after the other"


@pytest.mark.parametrize("over", [pytest.param("nothing", marks=SOAK), "an older dump"])
@pytest.mark.parametrize("kind", ["parquet", pytest.param("image ring", marks=SOAK), "dict"])
def test_dump_killed_at_every_step(kind: str, over: str, tmp_path: Path) -> None:
    with create(kind, tmp_path / "old") as old, create(kind, tmp_path / "new") as new:
        old.extend(block(kind, 0, 6))
        new.extend(block(kind, 60, 9), ends=np.isin(np.arange(9), [3, 8]))
        will_be = [*range(60, 69)]
        new.storage.flush()
        for step in steps():
            path = tmp_path / f"dump-{step}"
            if over != "nothing":
                old.dumps(path)
            killed = killed_at(step, lambda: new.dumps(path))  # noqa: B023
            if rc.ReplayBuffer.is_loadable_from(path):
                assert state(kind, path)[0] in (([*range(6)], will_be) if over != "nothing" else (will_be,))
            else:
                assert over == "nothing"
            new.dumps(path)
            assert state(kind, path)[0] == will_be
            check_tidy(kind, path)
            if not killed:
                break
        assert step >= 8


@pytest.mark.parametrize("kind", ["parquet", "hdf5 ring"])
def test_create_over_a_dump_killed_at_every_step(kind: str, tmp_path: Path) -> None:
    """`overwrite=True` keeps the old data until the new buffer is there."""
    for step in steps():
        path = tmp_path / f"live-{step}"
        with create(kind, path) as buffer:
            buffer.extend(block(kind, 0, 9))
        killed = killed_at(step, lambda: create(kind, path, overwrite=True))  # noqa: B023
        found = state(kind, path)[0]
        assert found in ([*range(9)], [])
        if not killed:
            break
    assert step >= 4 and found == []
