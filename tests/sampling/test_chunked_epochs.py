"""Epochs over storages that are read in chunks: each sample once, each chunk once, repeatable, resumable."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import recollect as rc

N, PIECE = 1000, 16
SPACE = {"id": ((), "int64"), "x": ((3,), "float32")}


def rows(first: int, n: int) -> Any:
    ids = np.arange(first, first + n)
    return {"id": ids, "x": np.repeat(ids[:, None], 3, 1).astype(np.float32)}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    with rc.ReplayBuffer.create("parquet", SPACE, cache_path=tmp_path, piece_size=PIECE) as buffer:
        buffer.extend(rows(0, N))
    return tmp_path


def load(path: Path, pieces: int = 8) -> rc.ReplayBuffer:
    """A buffer that keeps so many pieces decoded; half of them are the window of a shuffled epoch."""
    return rc.ReplayBuffer.load_from(path, cache_nbytes=pieces * PIECE * 20)


def epoch(sampler: Any) -> list[int]:
    return [i for batch in sampler.epoch_iter() for i in batch["id"].tolist()]


def decoded(buffer: rc.ReplayBuffer) -> int:
    storage: Any = buffer.storage
    return int(storage._caches[()].decoded)


def test_each_sample_once_and_each_chunk_once(path: Path) -> None:
    with load(path) as buffer:
        order = epoch(rc.StepSampler(buffer, 10, seed=3))
        assert sorted(order) == [*range(N)]
        assert decoded(buffer) == -(-N // PIECE), "every piece was decoded once"


def test_reading_in_index_order_of_a_plain_shuffle_would_decode_again_and_again(path: Path) -> None:
    """The check above can fail: a permutation of all samples touches every piece all the time."""
    with load(path) as buffer:
        for at in np.random.default_rng(0).permutation(N).reshape(-1, 10):
            buffer[at]
        assert decoded(buffer) > 5 * N // PIECE


def test_it_is_a_shuffle_of_chunks_and_within_a_window_of_them(path: Path) -> None:
    with load(path) as buffer:
        order = np.array(epoch(rc.StepSampler(buffer, 10, seed=3)))
        window = 4 * PIECE
        chunks = [np.unique(part // PIECE) for part in np.split(order[: N // window * window], N // window)]
        assert np.mean([len(c) for c in chunks]) < 7, "about a window of pieces at a time"
        assert any(np.ptp(c) > 20 for c in chunks), "pieces come from all over"
        assert (np.diff(order) == 1).mean() < 0.1, "neighbours are not together"


def test_equal_seeds_give_equal_epochs_and_other_seeds_others(path: Path) -> None:
    with load(path) as buffer:
        found = [epoch(rc.StepSampler(buffer, size, seed=s)) for s, size in ((1, 10), (1, 33), (2, 10))]
        assert found[0] == found[1] != found[2]
        sampler = rc.StepSampler(buffer, 10, seed=1)
        assert epoch(sampler) == found[0] != epoch(sampler)


def test_an_epoch_goes_on_where_its_state_was_saved(path: Path) -> None:
    with load(path) as buffer:
        sampler = rc.StepSampler(buffer, 10, seed=5)
        whole = epoch(sampler)
        sampler.manual_seed(5)
        batches = sampler.epoch_iter()
        first = [i for _ in range(31) for i in next(batches)["id"].tolist()]
        state = sampler.state_dict()
    with load(path, pieces=4) as buffer:  # another cache, after a restart
        again = rc.StepSampler(buffer, 10, seed=99)
        again.load_state_dict(state)
        assert first + epoch(again) == whole


@pytest.mark.parametrize("view", ["slice", "column", "frames", "combined", "transformed"])
def test_views_pass_the_chunks_on(view: str, path: Path, tmp_path: Path) -> None:
    with load(path, pieces=12) as buffer:
        views: dict[str, Any] = {
            "slice": lambda: buffer.get_slice(slice(100, 900, 2)),
            "column": lambda: buffer.get_column("id"),
            "frames": lambda: rc.FrameStackedBatch(buffer.get_column("id"), prefetch_horizon=1),
            "combined": lambda: rc.CombinedBatch([buffer, memory()]),
            "transformed": lambda: rc.TransformedBatch(buffer, lambda data: {"id": data["id"]}),
        }
        batch = views[view]()
        found = []
        for data in rc.StepSampler(batch, 10, seed=0).epoch_iter():
            ids = data["id"] if isinstance(data, dict) else data
            found += (ids[:, -1] if view == "frames" else ids).tolist()
        expected = {"slice": range(100, 900, 2), "combined": [*range(N), *range(5000, 5050)]}.get(
            view, range(N)
        )
        assert sorted(found) == sorted(expected)
        storage: Any = buffer.storage
        assert max(cache.decoded for cache in storage._caches.values()) <= 2 * (N // PIECE + 1), (
            "a frame's neighbour may be in another piece"
        )


def memory() -> rc.ReplayBuffer:
    buffer = rc.ReplayBuffer.create("memory", SPACE, capacity=50)
    buffer.extend(rows(5000, 50))
    return buffer


@pytest.mark.parametrize("kind", ["hdf5", "video"])
def test_the_other_chunked_storages(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"recollect.storage.filed.{kind}._CHUNK_NBYTES", 200)
    space: Any = SPACE if kind == "hdf5" else ((4, 4), "uint8")
    given = (
        rows(0, 90)
        if kind == "hdf5"
        else np.arange(90, dtype=np.uint8)[:, None, None].repeat(4, 1).repeat(4, 2)
    )
    with rc.ReplayBuffer.create(kind, space, cache_path=tmp_path, cache_nbytes=900) as buffer:
        buffer.extend(given)
        storage: Any = buffer.storage
        n_chunks = len(storage.chunk_ends())
        assert n_chunks > 6
        found = []
        for data in rc.StepSampler(buffer, 7, seed=0).epoch_iter():
            found += (data["id"] if kind == "hdf5" else data[:, 0, 0]).tolist()
        assert sorted(found) == [*range(90)] != found
        cache = storage._caches[()] if kind == "hdf5" else storage._cache
        assert cache.decoded == n_chunks


def test_samples_that_are_not_in_a_file_yet_come_too(tmp_path: Path) -> None:
    with rc.ReplayBuffer.create("parquet", SPACE, cache_path=tmp_path, piece_size=PIECE) as buffer:
        buffer.extend(rows(0, 2 * PIECE + 5))
        sampler = rc.StepSampler(buffer, 7, seed=0)
        assert sorted(epoch(sampler)) == [*range(2 * PIECE + 5)]
        batches = sampler.epoch_iter()
        first = next(batches)["id"].tolist()
        buffer.extend(rows(900, PIECE))  # what was in memory is in a file now
        rest = [i for batch in batches for i in batch["id"].tolist()]
        assert sorted(first + rest) == [*range(2 * PIECE + 5)]


# -- chunks that are decoded beside the reads


def cache_of(buffer: rc.ReplayBuffer) -> Any:
    storage: Any = buffer.storage
    return storage._cache(())


def test_an_epoch_has_the_next_window_decoded_beside_the_reads(path: Path) -> None:
    with load(path) as buffer:
        cache = cache_of(buffer)
        batches = iter(rc.StepSampler(buffer, 10, seed=3).epoch_iter())
        next(batches)
        held = 2 * buffer.storage.chunk_window()
        assert cache.decoded == held, "this window and the next were asked for"
        assert sum(len(b["id"]) for b in batches) == N - 10
        assert cache.decoded == -(-N // PIECE) and not cache._coming


def test_a_damaged_chunk_that_was_expected_raises_when_it_is_read_and_only_then(path: Path) -> None:
    with load(path) as buffer:
        file = path / "storage" / buffer.storage._pieces[1].name  # type: ignore[attr-defined]
        whole = file.read_bytes()
        file.write_bytes(bytes(len(whole)))
        buffer._expect(np.array([0, PIECE]))
        assert buffer[0]["id"] == 0
        for _ in range(2):
            with pytest.raises(rc.FormatError, match=file.name):
                buffer[PIECE]
        file.write_bytes(whole)
        assert buffer[PIECE]["id"] == PIECE


@pytest.mark.process
def test_a_forked_child_decodes_what_its_parent_expected_itself(path: Path) -> None:
    import os

    with load(path) as buffer:
        buffer._expect(np.arange(0, 4 * PIECE, PIECE))
        child = os.fork()
        if not child:
            found = buffer[np.arange(4 * PIECE)]["id"].tolist() == [*range(4 * PIECE)]
            os._exit(0 if found else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert buffer[np.arange(4 * PIECE)]["id"].tolist() == [*range(4 * PIECE)]


def test_more_than_can_be_held_is_not_expected(path: Path) -> None:
    with load(path, pieces=4) as buffer:
        buffer._expect(np.arange(0, N, PIECE))
        assert cache_of(buffer).decoded == 0
        buffer._expect(np.array([0, PIECE]))
        buffer._expect(np.array([2 * PIECE, 3 * PIECE, 4 * PIECE]))  # pushes out one of the first
        assert buffer[np.arange(N)]["id"].tolist() == [*range(N)]


def test_closing_with_chunks_under_way_leaves_no_thread(path: Path) -> None:
    import threading

    before = threading.active_count()
    with load(path) as buffer:
        buffer._expect(np.arange(0, 4 * PIECE, PIECE))
    assert threading.active_count() == before


# -- batches that are read several at a time


class Counted(rc.SubIndexedBatch):
    """Passes everything on, and remembers how many samples each read asked for."""

    def __init__(self, batch: Any, ahead: int | None = None) -> None:
        super().__init__(batch, ...)
        self.reads: list[int] = []
        self.ahead = ahead

    def _reads_ahead(self) -> int:
        return super()._reads_ahead() if self.ahead is None else self.ahead

    def _read(self, idx: Any, *args: Any) -> Any:
        self.reads.append(len(idx))
        return super()._read(idx, *args)


@pytest.mark.parametrize("flat", [False, True])
def test_batches_are_the_same_whether_read_one_by_one_or_several_at_a_time(path: Path, flat: bool) -> None:
    with load(path) as buffer:
        seen = []
        for ahead in (0, None):
            source = Counted(buffer, ahead)
            sampler = rc.StepSampler(source, 7, seed=1)
            batches = [*(sampler.epoch_flat_iter() if flat else sampler.epoch_iter())]
            seen.append([b.tolist() if flat else [b["id"].tolist(), b["x"].tolist()] for b in batches])
            assert (max(source.reads) == 7) == (ahead == 0)
            assert sum(source.reads) < N + 8 * len(source.reads)
        assert seen[0] == seen[1] and len(seen[0]) == -(-N // 7)


def test_a_batch_is_its_owners_also_if_it_was_read_with_others(path: Path) -> None:
    with load(path) as buffer:
        first, second = (b for _, b in zip(range(2), rc.StepSampler(buffer, 5, seed=0).epoch_iter()))
        kept = second["x"].tolist()
        first["x"][:] = -1
        assert second["x"].tolist() == kept and first["x"].flags.writeable
        assert (buffer[:]["x"] >= 0).all()


def test_a_short_last_batch_comes_or_is_dropped_also_of_a_block(path: Path) -> None:
    with load(path) as buffer:
        sampler = rc.StepSampler(buffer, 30, seed=0)
        assert [len(b["id"]) for b in sampler.epoch_iter()] == [30] * 33 + [10]
        assert [len(b["id"]) for b in sampler.epoch_iter(drop_last=True)] == [30] * 33


def test_a_transformation_sees_batches_and_no_blocks(path: Path) -> None:
    sizes = []

    def look(data: Any) -> Any:
        sizes.append(len(data["id"]))
        return data

    with load(path) as buffer:
        view = rc.TransformedBatch(buffer, look)
        sizes.clear()
        for _ in rc.StepSampler(view, 50, seed=0).epoch_iter():
            pass
    assert sizes == [50] * 20


def test_a_buffer_that_is_written_is_read_batch_by_batch(tmp_path: Path) -> None:
    with rc.ReplayBuffer.create("parquet", SPACE, cache_path=tmp_path, piece_size=PIECE) as buffer:
        buffer.extend(rows(0, 60))
        source = Counted(buffer)
        assert sum(len(b["id"]) for b in rc.StepSampler(source, 4, seed=0).epoch_iter()) == 60
        assert not source.reads, "rows and generations are asked for instead"
