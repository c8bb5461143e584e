"""An episode in several blocks: `ends` says where it ends, and nothing else does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.replay.make import KINDS

import recollect as rc

SPACE = {"x": ((), "int64"), "reward": ((), "float32"), "next_obs": ((), "int64"), "terminated": ((), "bool")}
FILES = ("parquet", "hdf5")


def rows(first: int, n: int) -> dict[str, Any]:
    x = np.arange(first, first + n)
    return {"x": x, "reward": x.astype("float32"), "next_obs": x + 1, "terminated": np.zeros(n, bool)}


def make(kind: str, path: Path, capacity: int | None = 64, **kwargs: Any) -> rc.ReplayBuffer:
    if kind in ("memmap", *FILES):
        kwargs["cache_path"] = path / kind
    if kind == "shared":
        kwargs["multiprocessing"] = True
    capacity = None if kind in FILES else capacity
    return rc.ReplayBuffer.create(kind, SPACE, capacity=capacity, maintain_segment_metadata=True, **kwargs)


def shown(buffer: rc.ReplayBuffer) -> list[Any]:
    """All that depends on where episodes begin and end."""
    place = buffer.locate(...)
    n_step = rc.NStepBatch(buffer, n=3, gamma=0.5)[...]
    sequences = rc.SequenceSampler(buffer, 100, length=4, seed=0).epoch_iter()
    return [
        buffer[...]["x"].tolist(),
        buffer.get_segments(),
        buffer.open_segment,
        place.segment.tolist(),
        place.step.tolist(),
        n_step["reward"].tolist(),
        n_step["next_obs"].tolist(),
        sorted(s for batch in sequences for s in batch["x"].tolist()),
    ]


@pytest.mark.parametrize("kind", [*KINDS, *FILES])
def test_two_blocks_of_one_episode_are_one_segment(kind: str, tmp_path: Path) -> None:
    with make(kind, tmp_path) as buffer:
        buffer.extend(rows(0, 3), ends=[False] * 3)
        buffer.extend(rows(3, 2), ends=[False, False])
        assert buffer.get_segments() == [] and buffer.open_segment == (0, 5)
        assert rc.NStepBatch(buffer, n=3, gamma=1.0)[2]["reward"] == 2 + 3 + 4
        with pytest.raises(rc.SegmentOpenError, match=r"without `ends`.*mark_segment_end\(\).*pass `ends`"):
            buffer.extend(rows(5, 1))
        buffer.extend(rows(5, 3), ends=[False, True, False])
        buffer.append({key: value[0] for key, value in rows(8, 1).items()})
        buffer.extend(rows(9, 1), ends=[True])
        assert buffer.get_segments() == [(0, 7), (7, 10)] and buffer.open_segment is None
        buffer.extend(rows(10, 2))  # a whole one
        assert buffer.get_segments() == [(0, 7), (7, 10), (10, 12)]


@pytest.mark.parametrize(("kind", "lanes"), [*[(kind, 1) for kind in KINDS], ("memory", 2), ("shared", 3)])
def test_blocks_are_what_single_samples_would_be(kind: str, lanes: int, tmp_path: Path) -> None:
    """Over rings that go round, by blocks of any length up to more than a whole ring."""
    rng = np.random.default_rng(lanes)
    more = {"num_lanes": lanes} if lanes > 1 else {}
    a, b = tmp_path / "a", tmp_path / "b"
    with make(kind, a, 9 * lanes, **more) as blocks, make(kind, b, 9 * lanes, **more) as singles:
        writers = [[buf.on_lane(k) if lanes > 1 else buf for k in range(lanes)] for buf in (blocks, singles)]
        first = 0
        for _ in range(60):
            n, k = int(rng.choice([1, 2, 3, 4, 5, 9, 13])), int(rng.integers(lanes))
            ends = rng.random(n) < 0.2
            writers[0][k].extend(rows(first, n), ends=ends)
            for i in range(n):
                writers[1][k].append({key: value[i] for key, value in rows(first, n).items()})
                if ends[i]:
                    writers[1][k].mark_segment_end()
            first += n
            if n < 9:  # a block of a whole ring begins at row 0, so its lane's rows are others
                assert shown(blocks) == shown(singles)


@pytest.mark.parametrize("kind", ["memory", "memmap", "test-list"])
def test_an_open_episode_is_saved_when_asked_for_and_goes_on(kind: str, tmp_path: Path) -> None:
    with make(kind, tmp_path) as buffer:
        buffer.extend(rows(0, 4), ends=[False, True, False, False])
        with pytest.raises(rc.SegmentOpenError, match="cut_open"):
            buffer.dumps(tmp_path / "dump")
        buffer.dumps(tmp_path / "dump", cut_open=True)
        buffer.extend(rows(4, 2), ends=[False, True])
        assert buffer.get_segments() == [(0, 2), (2, 6)]
    with rc.ReplayBuffer.load_from(tmp_path / "dump", read_only=False) as loaded:
        assert loaded.get_segments() == [(0, 2), (2, 4)] and loaded.open_segment is None
        loaded.extend(rows(10, 2), ends=[False, False])
        loaded.extend(rows(12, 1), ends=[True])
        assert loaded.get_segments() == [(0, 2), (2, 4), (4, 7)]


def test_an_episode_in_blocks_is_one_video(tmp_path: Path) -> None:
    pytest.importorskip("av")
    frames = np.arange(5, dtype=np.uint8)[:, None, None, None] * np.ones((8, 8, 3), np.uint8)
    space = ((8, 8, 3), "uint8")
    with rc.ReplayBuffer.create(
        "video", space, cache_path=tmp_path, maintain_segment_metadata=True
    ) as buffer:
        buffer.extend(frames[:2], ends=[False, False])
        assert len(buffer) == 0  # a video is there once its episode has ended
        buffer.extend(frames[2:], ends=[False, True, False])
        assert buffer.get_segments() == [(0, 4)] and len(list(tmp_path.rglob("*.mkv"))) == 1
        np.testing.assert_array_equal(buffer[:], frames[:4])


def test_a_segment_that_ends_inside_a_block_is_committed(tmp_path: Path) -> None:
    """As every ended segment in Parquet, though the block leaves the next one open."""
    with make("parquet", tmp_path) as buffer:
        buffer.extend(rows(0, 5), ends=np.arange(5) == 2)
        with rc.ReplayBuffer.load_from(tmp_path / "parquet") as reader:
            assert (0, 3) in reader.get_segments()
