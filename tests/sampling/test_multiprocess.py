"""MultiprocessingSampler: the same batches in the same order, whatever happens to its processes."""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from tests.batch.make import numbers
from tests.timing import Stopwatch

import recollect as rc
from recollect.sampling.workers import worker as worker_module
from recollect.sampling.workers.messages import key_of
from recollect.testing.batch_contract import equal

pytestmark = pytest.mark.process
SPACE = {"id": ((), "int64"), "obs": ((3,), "float32")}
METHODS = ["fork", "spawn"]


def block(first: int, n: int) -> dict[str, Any]:
    ids = np.arange(first, first + n)
    return {"id": ids, "obs": np.repeat(ids[:, None], 3, 1).astype(np.float32)}


@contextmanager
def buffer(n: int = 100, capacity: int | None = None, **kwargs: Any) -> Iterator[rc.ReplayBuffer]:
    with rc.ReplayBuffer.create(
        "shared", SPACE, capacity=capacity or max(n, 1), multiprocessing=True, **kwargs
    ) as b:
        if n:
            b.extend(block(0, n))
        yield b


def sampler_of(
    source: Any, size: int = 8, n: int = 2, seed: int | None = 0, **kwargs: Any
) -> rc.MultiprocessingSampler:
    return rc.MultiprocessingSampler(rc.StepSampler(source, size, seed=seed), n, **kwargs)


def ids(batches: Any) -> list[list[int]]:
    return [b["id"].tolist() for b in batches]


def flat(batches: list[list[int]]) -> list[int]:
    return [x for batch in batches for x in batch]


def some(sampler: rc.BatchSampler, n: int = 10) -> list[list[int]]:
    return ids(sampler.sample() for _ in range(n))


def until(condition: Callable[[], Any], timeout_s: float = 200.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "it never came true"
        os.sched_yield()


def pids(sampler: rc.MultiprocessingSampler) -> tuple[int, ...]:
    found = sampler.stats().pids
    assert found
    return tuple(found)


class Random(rc.DataTransformation):
    """Adds a random number to obs; `broken` and `slow` are ids at which it fails or takes its time."""

    cut = ""  # the end of what it says when it fails

    def __init__(self, fails_at: int = -1, naps_s: float = 0.0, seedless: bool = False) -> None:
        self.fails_at, self.naps_s, self.seedless = fails_at, naps_s, seedless
        self.rng = np.random.default_rng(0)

    def manual_seed(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)

    def get_target_space_from_source(self, space: Any) -> Any:
        return space

    def transform(self, space: Any, data: Any) -> Any:
        if self.naps_s:
            time.sleep(self.naps_s)
        if (data["id"] == self.fails_at).any():
            raise ArithmeticError(f"id {self.fails_at} is not to my taste{self.cut}")
        noise = np.random.random() if self.seedless else self.rng.random()  # noqa: NPY002
        return {**data, "obs": data["obs"] + np.float32(noise)}


class Slowing(Random):
    """Quick with its first batch, and then busy for half a minute."""

    def transform(self, space: Any, data: Any) -> Any:
        found = super().transform(space, data)
        self.naps_s = 30.0
        return found


class TestDraws:
    @pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
    def test_in_order_by_seed_and_worker(self, method: str) -> None:
        """Batch k is worker k mod n's, and draw j of a worker is a function of (seed, worker, j)."""
        with buffer() as b, sampler_of(b, ctx=multiprocessing.get_context(method)) as sampler:
            found = some(sampler, 20)
            for k, batch in enumerate(found):
                stream = rc.sampling.IndexStream(0)
                stream.key, stream.counter = key_of(0, k % 2), k // 2 << 32
                assert batch == stream.indices(100, 8).tolist()
            with sampler_of(b) as again:
                assert some(again, 20) == found
            with sampler_of(b, seed=1) as other, sampler_of(b, n=3) as three:
                assert some(other, 20) != found
                assert some(three, 20) != found

    def test_workers_are_independent(self) -> None:
        with buffer(1000) as b, sampler_of(b, 16, 3) as sampler:
            found = some(sampler, 60)
            assert len({tuple(x) for x in found}) == 60
            counts = np.bincount(np.concatenate(found), minlength=1000)
            assert counts.max() < 10

    def test_all_forms_share_the_stream(self) -> None:
        with buffer() as b, sampler_of(b) as sampler, sampler_of(b) as plain:
            want = some(plain, 9)
            got = [
                sampler.sample()["id"],
                sampler.sample_flat()[:, 0],
                sampler.sample_with_metadata()[0]["id"],
                sampler.sample_index(),
                sampler.sample_flat_with_metadata()[0][:, 0],
                sampler.sample()["id"],
                sampler.sample_index(),  # now the other worker is next
                sampler.sample()["id"],
                sampler.sample()["id"],
            ]
            assert [np.asarray(x).astype(int).tolist() for x in got] == want

    def test_batches_are_the_callers_own(self) -> None:
        with buffer() as b, sampler_of(b, n=1, n_buffers=2) as sampler:
            kept = [sampler.sample() for _ in range(8)]
            before = [batch["obs"].copy() for batch in kept]
            for _ in range(20):
                sampler.sample()
            for batch, obs in zip(kept, before):
                batch["obs"] += 0  # writable
                assert np.array_equal(batch["obs"], obs)

    def test_arrays_that_do_not_fit_cost_no_batch_where_none_lies_ready(self) -> None:
        small = {"id": np.empty(9, np.int64), "obs": np.empty((9, 3), np.float32)}
        with buffer() as b, sampler_of(b) as sampler, sampler_of(b) as plain:
            with pytest.raises(ValueError, match="out"):
                sampler.sample(out=small)  # the workers have not begun yet
            assert some(sampler, 2) == some(plain, 2)

    def test_into_the_callers_arrays(self) -> None:
        with buffer() as b, sampler_of(b) as sampler, sampler_of(b) as plain:
            want = some(plain, 3)
            out = {"id": np.empty(8, np.int64), "obs": np.empty((8, 3), np.float32)}
            assert sampler.sample(out=out) is out
            assert out["id"].tolist() == want[0]
            with pytest.raises(ValueError, match="out"):
                sampler.sample(out={"id": np.empty(9, np.int64), "obs": np.empty((9, 3), np.float32)})
            assert sampler.sample(out=out)["id"].tolist() == want[1]  # nothing was lost
            assert out["obs"][:, 0].tolist() == want[1]

    def test_reads_the_live_source(self) -> None:
        with buffer(4, capacity=8) as b, sampler_of(b, 64) as sampler:
            assert set(sampler.sample()["id"].tolist()) == {0, 1, 2, 3}
            b.extend(block(4, 4))
            until(lambda: set(sampler.sample()["id"].tolist()) == set(range(8)))

    def test_empty_is_an_error_that_passes(self) -> None:
        with buffer(0, capacity=8) as b, sampler_of(b, 4) as sampler:
            with pytest.raises(rc.EmptyError):
                sampler.sample()
            b.extend(block(0, 4))
            assert len(sampler.sample()["id"]) == 4
            b.clear()
            with pytest.raises(rc.EmptyError):
                for _ in range(100):
                    sampler.sample()
            b.extend(block(0, 4))
            assert len(sampler.sample()["id"]) == 4

    def test_nothing_starts_before_the_first_draw(self) -> None:
        with buffer() as b, sampler_of(b) as sampler:
            assert sampler.stats().pids == ()
            assert len(sampler) == 100 and sampler[3]["id"] == 3
            sampler.sample()
            assert len(pids(sampler)) == 2

    @pytest.mark.parametrize(("workers", "asked", "made"), [(2, 8, 8), (3, 8, 9), (2, 1, 4)])
    def test_as_many_slots_as_asked_for(self, workers: int, asked: int, made: int) -> None:
        """The same number for each worker, two at least."""
        with buffer() as b, sampler_of(b, n=workers, n_buffers=asked) as sampler:
            assert sampler.n_buffers == made
            if workers == 3:
                sampler.sample()
                until(lambda: sampler.stats().undelivered == made)

    @pytest.mark.parametrize(("daemon", "wanted"), [(None, True), (False, False)])
    def test_daemons(self, daemon: bool | None, wanted: bool) -> None:
        with buffer() as b, sampler_of(b, n=1, daemon=daemon) as sampler:
            sampler.sample()
            assert [p.daemon for p in multiprocessing.active_children()] == [wanted]

    def test_never_pickles_a_batch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with buffer() as b, sampler_of(b) as sampler:
            sampler.sample()

            def refuse(*_: Any, **__: Any) -> Any:
                raise AssertionError("pickled")

            monkeypatch.setattr(pickle, "loads", refuse)
            monkeypatch.setattr(multiprocessing.reduction.ForkingPickler, "loads", refuse)
            some(sampler)


class TestTransformations:
    @pytest.mark.parametrize("method", METHODS)
    def test_their_randomness_is_the_draws(self, method: str) -> None:
        with buffer() as b:
            view = rc.TransformedBatch(b, Random())
            with sampler_of(view, ctx=method) as one, sampler_of(view, n_buffers=16) as two:
                first = [one.sample()["obs"] for _ in range(12)]
                assert all(np.array_equal(a, two.sample()["obs"]) for a in first)
                one.manual_seed(0)
                assert np.array_equal(one.sample()["obs"], first[0])
            noise = {float(obs.sum()) for obs in first}
            assert len(noise) == 12

    def test_forked_workers_do_not_share_numpys_generator(self) -> None:
        """Pain: every forked loader augments its batches alike."""
        with buffer(1) as b, sampler_of(rc.TransformedBatch(b, Random(seedless=True)), 1, 4) as sampler:
            noise = [float(sampler.sample()["obs"][0, 0]) for _ in range(4)]
            assert len(set(noise)) == 4

    def test_of_torch_on_one_thread(self) -> None:
        torch = pytest.importorskip("torch")
        torch.ones(400, 400) @ torch.ones(400, 400)  # the parent's thread pool is up, as in a learner

        def work(batch: Any) -> Any:
            x = torch.ones(300, 300) @ torch.ones(300, 300)
            assert torch.get_num_threads() == 1
            return {**batch, "obs": batch["obs"] + x[0, 0]}

        with buffer() as b:
            threads = torch.get_num_threads()
            torch.set_num_threads(1)  # for the call that finds the space
            view = rc.TransformedBatch(rc.ToBackendOrDeviceBatch(b, "torch"), work)
            torch.set_num_threads(threads)
            with sampler_of(view) as sampler:
                batch = sampler.sample()
                assert isinstance(batch["obs"], torch.Tensor)
                assert (batch["obs"][:, 0] == batch["id"] + 300).all()
                assert isinstance(sampler.sample_flat(), torch.Tensor)

    def test_the_last_step_to_a_backend_is_the_parents(self) -> None:
        torch = pytest.importorskip("torch")
        with (
            buffer() as b,
            sampler_of(rc.ToBackendOrDeviceBatch(b, "torch")) as sampler,
            sampler_of(b) as plain,
        ):
            for batch, want in zip(
                (sampler.sample(), next(sampler.epoch_iter())), (plain.sample(), next(iter(plain)))
            ):
                assert isinstance(batch["id"], torch.Tensor)
                assert batch["id"].tolist() == want["id"].tolist()


class TestSpaces:
    def test_of_varying_sizes(self) -> None:
        space = spaces.Dict(
            {
                "text": spaces.Text(12, charset="abcäöü"),
                "seq": spaces.Sequence(spaces.Box(0, 1, (2,), np.float32)),
                "pair": spaces.Tuple((spaces.Discrete(5), spaces.MultiBinary(3))),
            }
        )
        rows = [space.sample() for _ in range(20)]
        lengths = {"seq": 40}
        rows = [r for r in rows if len(r["seq"]) <= 40]
        with rc.ReplayBuffer.create(
            "shared", space, capacity=20, multiprocessing=True, max_lengths=lengths
        ) as b:
            for row in rows:
                b.append(row)
            with sampler_of(b, 6) as sampler:
                for _ in range(4):
                    index = rc.sampling.IndexStream(0)
                    k = sampler._number
                    index.key, index.counter = key_of(0, k % 2), k // 2 << 32
                    assert equal(sampler.sample(), b[index.indices(len(b), 6)])
                found = [t for batch in sampler.epoch_iter() for t in batch["text"]]
                assert sorted(found) == sorted(r["text"] for r in rows)

    def test_a_sequence_without_a_length_is_refused(self) -> None:
        class Lists(rc.BatchBase):
            def __init__(self) -> None:
                super().__init__(spaces.Dict({"x": spaces.Sequence(spaces.Discrete(9))}))

            def __len__(self) -> int:
                return 3

            def get_at(self, idx: Any) -> Any:
                index = np.arange(3)[idx]
                return {"x": tuple([(int(i),) * int(i) for i in index])}

        with pytest.raises(ValueError, match="x: a Sequence needs its greatest length.*max_lengths"):
            sampler_of(Lists())
        with sampler_of(Lists(), 4, max_lengths={"x": 3}) as sampler:
            assert {len(x) for x in sampler.sample()["x"]} <= {0, 1, 2}

    def test_metadata(self) -> None:
        with buffer(40, maintain_segment_metadata=True) as b:
            view = rc.FrameStackedBatch(b, 1, 0)
            assert view.single_metadata_space is not None
            with sampler_of(view) as sampler, sampler_of(view) as again:
                data, about = sampler.sample_with_metadata()
                assert equal(data, again.sample())
                assert about is not None
                want = view.get_at_with_metadata(data["id"][:, -1])
                assert equal((data, about), want)
                flat, about = again.sample_flat_with_metadata()
                data, more = sampler.sample_with_metadata()
                assert equal(about, more) and np.array_equal(flat, view._flatten(data, False))
                for data, about in again.epoch_iter_with_metadata():
                    assert equal((data, about), view.get_at_with_metadata(data["id"][:, -1]))


class TestEpochs:
    @pytest.mark.parametrize("method", METHODS)
    def test_in_permutation_order(self, method: str) -> None:
        """The same order as in one process, the last batch short."""
        with buffer(50) as b, sampler_of(b, ctx=method) as sampler:
            want = ids(rc.StepSampler(b, 8, seed=0).epoch_iter())
            assert ids(sampler.epoch_iter()) == want
            assert [len(x) for x in want] == [8] * 6 + [2]
            again = ids(sampler)
            assert again != want and sorted(flat(again)) == list(range(50))
            assert [len(x) for x in ids(sampler.epoch_iter(drop_last=True))] == [8] * 6
            assert [x.shape for x in sampler.epoch_flat_iter()] == [(8, 4)] * 6 + [(2, 4)]

    def test_of_nothing(self) -> None:
        with buffer(0) as b, sampler_of(b) as sampler:
            assert list(sampler.epoch_iter()) == []

    def test_abandoned_frees_its_slots(self) -> None:
        with buffer(400) as b, sampler_of(b) as sampler:
            for n in range(12):  # more often than there are slots
                epoch = sampler.epoch_iter()
                for _ in range(1 + n % 3):
                    next(epoch)
                pool: Any = sampler._pool
                run = pool.run
                epoch.close()
                assert pool.run > run  # what it had asked for is void
            # Who was at a batch may still hand it over; the next draw lets it go.
            until(lambda: sampler.stats().undelivered <= sampler.n_workers)
            with sampler_of(b) as other:
                assert some(sampler, 4) == some(other, 4)  # draws know nothing of epochs

    def test_interleaved_with_draws_and_each_other(self) -> None:
        with buffer(50) as b, sampler_of(b) as sampler, sampler_of(b) as plain:
            want = [ids(plain.epoch_iter()), ids(plain.epoch_iter()), some(plain, 7)]
            one, got = sampler.epoch_iter(), [[], [], []]
            got[0] += ids([next(one)])
            two = sampler.epoch_iter()
            for _ in range(7):
                got[1] += ids([x for x in [next(two, None)] if x])
                got[2] += some(sampler, 1)
                got[0] += ids([x for x in [next(one, None)] if x])
            assert got == want

    def test_overwritten_samples_are_skipped_and_counted(self) -> None:
        with buffer(64) as b, sampler_of(b, 4, 2) as sampler:
            epoch = sampler.epoch_iter()
            found = ids([next(epoch)])  # and at most 8 of the 15 others are under way
            b.extend(block(100, 24))  # overwrites the 24 oldest
            found += ids(epoch)
            seen = flat(found)
            assert len(seen) == len(set(seen)) and set(range(24, 64)) <= set(seen) <= set(range(64))
            assert sampler.skipped == 64 - len(seen) > 0
            assert all(len(x) == 4 for x in found[:-1])

    def test_samples_that_go_while_under_way_are_chosen_again(self) -> None:
        """A worker finds them gone: the parent fills the batch with the next ones."""
        with buffer(64) as b, sampler_of(b, 8, 1, n_buffers=2) as sampler:
            sampler.manual_seed(0)
            list(sampler.epoch_iter())  # the worker is up, and rests
            (pid,), pool = pids(sampler), sampler._pool
            assert pool is not None
            with stopped(pid):
                found: list[list[int]] = []
                thread = threading.Thread(target=lambda: found.extend(ids(sampler.epoch_iter())))
                thread.start()
                until(lambda: pool.asked[0].available() >= 2)  # chosen, sent, and not gathered
                b.extend(block(100, 48))
            thread.join()
            seen = flat(found)
            assert sorted(seen) == list(range(48, 64))
            assert [len(x) for x in found] == [8, 8]
            assert sampler.skipped == 48


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)
    yield
    os.kill(pid, signal.SIGCONT)


class Chosen(rc.StepSampler):
    """Draws in the parent, as a sampler with priorities must."""

    draws_in_parent = True

    def _draw_places(self) -> Any:
        index = self._draw_index()
        return self._data.locate(index), {"weight": index / 100.0}


class TestDrawsInTheParent:
    def test_workers_gather(self) -> None:
        with buffer() as b, rc.MultiprocessingSampler(Chosen(b, 8, seed=0), 2) as sampler:
            plain = rc.StepSampler(b, 8, seed=0)
            for _ in range(10):
                data, about = sampler.sample_with_metadata()
                assert data["id"].tolist() == plain.sample_index().tolist()
                assert about is not None and about["weight"].tolist() == (data["id"] / 100).tolist()
            assert sampler.sample()["id"].tolist() == plain.sample_index().tolist()

    def test_drawn_again_when_gone(self) -> None:
        with buffer() as b, rc.MultiprocessingSampler(Chosen(b, 8, seed=0), 2) as sampler:
            sampler.sample()
            sampler.manual_seed(1)  # they rest
            with stopped(pids(sampler)[0]):
                found: list[int] = []
                thread = threading.Thread(target=lambda: found.extend(sampler.sample()["id"].tolist()))
                thread.start()
                pool = sampler._pool
                assert pool is not None
                until(lambda: pool.asked[0].available() >= 2)
                b.extend(block(100, 100))  # everything that is under way
            thread.join()
            assert len(found) == 8 and min(found) >= 100

    def test_state(self) -> None:
        with buffer() as b, rc.MultiprocessingSampler(Chosen(b, 8, seed=0), 2) as sampler:
            some(sampler, 5)
            state = sampler.state_dict()
            want = some(sampler, 12)
            with rc.MultiprocessingSampler(Chosen(b, 8, seed=3), 2) as other:
                other.load_state_dict(state)
                assert some(other, 12) == want


class TestState:
    def test_undelivered_batches_do_not_count(self) -> None:
        with buffer() as b:
            view = rc.TransformedBatch(b, Random())
            with sampler_of(view) as sampler, sampler_of(view, seed=9) as other:
                for n in (0, 3, 5):
                    some(sampler, n)
                    until(lambda: n == 0 or sampler.stats().undelivered > 2)  # noqa: B023
                    state = sampler.state_dict()
                    other.load_state_dict(state)
                    assert all(equal(sampler.sample(), other.sample()) for _ in range(7))

    @pytest.mark.parametrize("damage", [{"stream": {}}, {"number": "x"}, {"pending": [{"places": {"index": [0] * 99}}]},
                                        {"batches": None}, {"epoch": {"index": [0]}}])  # fmt: skip
    def test_a_damaged_one_changes_nothing(self, damage: dict[str, Any]) -> None:
        with buffer() as b, sampler_of(b) as sampler, sampler_of(b) as same, sampler_of(b, seed=9) as other:
            some(other, 3)
            some(sampler, 2)
            some(same, 2)
            with pytest.raises(ValueError, match="state must be"):
                sampler.load_state_dict({**other.state_dict(), **damage})
            assert all(equal(sampler.sample(), same.sample()) for _ in range(7))

    def test_inside_an_epoch(self) -> None:
        with buffer(60) as b, sampler_of(rc.TransformedBatch(b, Random())) as sampler:
            epoch = sampler.epoch_iter()
            next(epoch), next(epoch), sampler.sample()
            next(epoch)
            state = sampler.state_dict()
            rest = list(epoch)
            after = [sampler.sample() for _ in range(3)]
            with sampler_of(rc.TransformedBatch(b, Random()), seed=9) as other:
                other.load_state_dict(state)
                assert equal(list(other.epoch_iter()), rest)
                assert equal([other.sample() for _ in range(3)], after)

    def test_plain_values(self) -> None:
        with buffer(60) as b, sampler_of(b) as sampler:
            next(sampler.epoch_iter())
            some(sampler, 3)
            state = sampler.state_dict()
            assert equal(pickle.loads(pickle.dumps(state))["number"], 3)

    def test_of_another_configuration(self) -> None:
        with (
            buffer() as b,
            sampler_of(b) as sampler,
            sampler_of(b, n=3) as three,
            sampler_of(b, size=9) as nine,
        ):
            for other in (three, nine):
                with pytest.raises(ValueError, match="n_workers|batch_size"):
                    other.load_state_dict(sampler.state_dict())

    def test_manual_seed_drops_what_is_in_flight(self) -> None:
        with buffer() as b, sampler_of(b, seed=None) as sampler, sampler_of(b, seed=5) as plain:
            some(sampler, 3)
            sampler.manual_seed(5)
            want = [some(plain, 9), ids(plain.epoch_iter())]
            assert [some(sampler, 9), ids(sampler.epoch_iter())] == want
            sampler.manual_seed(5)
            assert some(sampler, 9) == want[0]

    def test_a_copy_goes_on_by_itself(self) -> None:
        with buffer() as b, sampler_of(b) as sampler:
            some(sampler, 3)
            with pickle.loads(pickle.dumps(sampler)) as copy:
                assert some(copy, 5) == some(sampler, 5)


class TestRefusals:
    def test_sources_that_cannot_be_shared(self) -> None:
        own = rc.ReplayBuffer.create("memory", SPACE, capacity=8)
        own.extend(block(0, 8))
        for source in (own, own.get_column("obs"), rc.CombinedBatch([own, own]), numbers(3)):
            with pytest.raises(ValueError, match="SharedMemoryStorage.*multiprocessing=True"):
                sampler_of(source)
        own.close()
        with (
            rc.ReplayBuffer.create("flattened", SPACE, inner="shared", capacity=8) as ring_of_one_process,
            pytest.raises(ValueError, match="FlattenedStorage.*SharedMemoryStorage"),
        ):
            sampler_of(ring_of_one_process, ctx="fork")

    def test_dumps_loaded_for_it(self, tmp_path: Path) -> None:
        with buffer(20) as b:
            b.dumps(tmp_path / "d")
        with (
            rc.ReplayBuffer.load_from(tmp_path / "d", multiprocessing=True) as loaded,
            sampler_of(loaded) as sampler,
        ):
            assert sorted(flat(ids(sampler.epoch_iter()))) == list(range(20))

    def test_what_cannot_be_pickled_to_a_spawned_worker(self) -> None:
        with buffer() as b:
            view = rc.TransformedBatch(b, lambda batch: batch)
            with pytest.raises(ValueError, match="picklable.*spawn.*top of a module"):
                sampler_of(view, ctx="spawn")
            with sampler_of(view, ctx="fork") as sampler:
                sampler.sample()

    @pytest.mark.parametrize(
        "wrong",
        [
            {"n_workers": 0},
            {"n_workers": 1.5},
            {"n_buffers": 0},
            {"doze_time": 0},
            {"deadline": float("inf")},
            {"ctx": "x"},
        ],
    )
    def test_arguments(self, wrong: dict[str, Any]) -> None:
        with buffer() as b, pytest.raises((ValueError, TypeError), match=f"{next(iter(wrong))}|context"):
            rc.MultiprocessingSampler(rc.StepSampler(b, 8), **wrong)

    def test_a_sampler_of_samplers(self) -> None:
        with buffer() as b, sampler_of(b) as sampler:
            for wrong in (b, sampler, None):
                with pytest.raises(TypeError, match="sampler"):
                    rc.MultiprocessingSampler(wrong)  # type: ignore[arg-type]


class TestDeaths:
    @pytest.mark.parametrize("method", METHODS)
    def test_a_worker_that_raises(self, method: str) -> None:
        with buffer(1000) as b:
            sampler = sampler_of(rc.TransformedBatch(b, Random(fails_at=3)), 100, ctx=method)
            with pytest.raises(
                rc.WorkerError, match="transform[\\s\\S]*ArithmeticError: id 3 is not to my taste"
            ):
                for _ in range(1000):
                    sampler.sample()
            with pytest.raises(rc.ClosedError):
                sampler.sample()

    def test_its_text_may_be_cut_inside_a_character(self) -> None:
        with buffer(50) as b:
            transformation = Random(fails_at=3)
            transformation.cut = "\ud83d"
            sampler = sampler_of(rc.TransformedBatch(b, transformation))
            with pytest.raises(rc.WorkerError, match=r"ArithmeticError: id 3 is not to my taste\\ud83d"):
                list(sampler.epoch_iter())

    def test_in_an_epoch(self) -> None:
        with buffer(50) as b:
            sampler = sampler_of(rc.TransformedBatch(b, Random(fails_at=3)))
            with pytest.raises(rc.WorkerError, match="ArithmeticError"):
                list(sampler.epoch_iter())
            assert sampler.stats().pids == ()

    @pytest.mark.parametrize("ends", ["manual_seed", "load_state_dict", "close"])
    def test_an_error_in_what_nobody_wants_any_more(self, ends: str) -> None:
        with buffer(50) as b:
            plain = rc.StepSampler(b, 1, seed=0)
            if ends == "close":  # of an epoch
                second = ids(plain.epoch_iter())[1][0]
            else:
                plain._stream.key, plain._stream.counter = key_of(0, 0), 1 << 32
                second = int(plain.sample_index()[0])
            sampler = sampler_of(rc.TransformedBatch(b, Random(fails_at=second)), 1, 1)
            epoch: Any = sampler.epoch_iter_with_metadata()
            next(epoch) if ends == "close" else sampler.sample()
            (pid,) = pids(sampler)
            until(lambda: not _exists(pid))
            calls: dict[str, Callable[[], None]] = {
                "manual_seed": lambda: sampler.manual_seed(0),
                "load_state_dict": lambda: sampler.load_state_dict(sampler.state_dict()),
                "close": epoch.close,
            }
            with pytest.raises(rc.WorkerError, match="ArithmeticError"):
                calls[ends]()
            assert sampler.stats().pids == ()
            with pytest.raises(rc.ClosedError):
                sampler.sample()

    def test_a_worker_that_cannot_begin(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def prepare(*_: Any) -> None:
            raise OSError("no way")

        monkeypatch.setattr(worker_module.Worker, "prepare", prepare)
        with buffer() as b:
            sampler = sampler_of(b)
            with pytest.raises(rc.WorkerError, match="no way"):
                sampler.sample()
            sampler.close()

    @pytest.mark.parametrize(
        ("method", "busy"), [("fork", False), ("fork", True), ("spawn", False), ("forkserver", True)]
    )
    def test_a_worker_that_is_killed(self, method: str, busy: bool) -> None:
        with buffer() as b:
            source = rc.TransformedBatch(b, Random(naps_s=0.02)) if busy else b
            sampler = sampler_of(source, ctx=method)
            sampler.sample()
            os.kill(pids(sampler)[1], signal.SIGKILL)
            start = Stopwatch()
            with pytest.raises(rc.WorkerDiedError, match="worker 1.*-9|worker 1.*exit code"):
                for _ in range(1000):
                    sampler.sample()
            assert start.s < 1.0
            with pytest.raises(rc.ClosedError):
                sampler.sample_flat()
            assert isinstance(rc.WorkerDiedError(), rc.PeerDiedError)

    def test_a_worker_that_is_killed_before_it_began(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(worker_module, "run", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        with buffer() as b:
            sampler = sampler_of(b)
            start = Stopwatch()
            with pytest.raises(rc.WorkerDiedError):
                sampler.sample()
            assert start.s < 1.5

    def test_a_worker_that_stalls(self) -> None:
        with buffer() as b, sampler_of(b, n=1) as sampler:
            sampler.sample()
            (pid,) = pids(sampler)
            os.kill(pid, signal.SIGSTOP)
            pool: Any = sampler._pool
            pool.deadline = 0.4
            look, looks = pool.check_alive, []
            pool.check_alive = lambda: looks.append(look())
            start = Stopwatch()
            with pytest.raises(rc.DeadlineError, match=f"0.4 s.*{pid}"):
                for _ in range(100):
                    sampler.sample()
            assert start.wall_s >= 0.35 and start.s < 1.5
            assert len(looks) <= 5  # it waits to be woken, and does not poll
            number = sampler.state_dict()["number"]
            pool.deadline = 60.0
            os.kill(pid, signal.SIGCONT)  # nothing is lost: it goes on where it was
            want = rc.sampling.IndexStream(0)
            want.key, want.counter = key_of(0, 0), number << 32
            assert sampler.sample()["id"].tolist() == want.indices(100, 8).tolist()
            os.kill(pid, signal.SIGSTOP)
            start = Stopwatch()
        assert start.s < 2.0  # closing does not wait for it

    @pytest.mark.parametrize("draw", ["sample", "sample_with_metadata"])
    def test_a_worker_sleeps_while_its_slots_are_full(self, draw: str) -> None:
        with buffer() as b, sampler_of(rc.FrameStackedBatch(b, 1), n=1) as sampler:
            getattr(sampler, draw)()
            until(lambda: sampler.stats().undelivered == sampler.n_buffers)
            (pid,) = pids(sampler)
            until(lambda: _state(pid) == "S")

    @pytest.mark.parametrize("how", ["fork", "spawn", "forkserver", "no pidfd"])
    def test_workers_of_a_dead_parent_are_gone(self, how: str, tmp_path: Path) -> None:
        """Idle ones, and those in the middle of a long transformation; also where only looking helps."""
        path = tmp_path / "parent.py"
        path.write_text(
            "from tests.sampling import test_multiprocess as t\n"
            f"if __name__ == '__main__':\n    t.die_with_workers({how!r})\n"
        )
        root = Path(__file__).parents[2]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), *sys.path])}
        command, errors = [sys.executable, str(path)], tmp_path / "errors"
        with (
            errors.open("w") as stderr,
            subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=stderr, text=True, env=environment
            ) as parent,
        ):
            assert parent.stdout is not None
            # Its line, not its end: the workers hold the pipe open as long as they live.
            workers = [int(pid) for pid in parent.stdout.readline().split()]
        assert workers, errors.read_text()
        start = Stopwatch()
        until(lambda: not any(_exists(pid) for pid in workers))
        assert start.s < 1.0

    def test_an_interrupt_is_the_parents(self) -> None:
        with buffer() as b, sampler_of(b) as sampler:
            sampler.sample()
            for pid in pids(sampler):
                os.kill(pid, signal.SIGINT)
            some(sampler, 30)


def die_with_workers(how: str) -> None:
    """Print the workers of a busy and of an idle sampler, and be killed."""
    method = "fork" if how == "no pidfd" else how
    with buffer() as b:
        samplers = [sampler_of(rc.TransformedBatch(b, Slowing()), n=1, ctx=method, doze_time=0.05)]
        if method != "spawn":  # which takes long to start
            samplers.append(sampler_of(b, n=1, ctx=method, doze_time=0.05))

        def draw() -> None:
            for sampler in samplers:
                sampler.sample()

        if how == "no pidfd":
            del os.pidfd_open
            thread = threading.Thread(target=draw)  # the kernel tells only the main thread's children
            thread.start()
            thread.join()
        else:
            draw()
        print(*[pid for sampler in samplers for pid in pids(sampler)], flush=True)
        os.kill(os.getpid(), signal.SIGKILL)


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]


def _exists(pid: int) -> bool:
    with suppress(OSError):
        return _state(pid) != "Z"
    return False


class TestTheEnd:
    @pytest.mark.parametrize("method", METHODS)
    def test_with_a_full_ring(self, method: str) -> None:
        with buffer() as b:
            sampler = sampler_of(b, ctx=method)
            sampler.sample()
            until(lambda: sampler.stats().undelivered == sampler.n_buffers)
            workers = pids(sampler)
            start = Stopwatch()
            sampler.close()
            assert start.s < 2.0
            assert not any(_exists(pid) for pid in workers)
            sampler.close()  # twice
            for call in (sampler.sample, sampler.sample_flat, sampler.sample_with_metadata, sampler.sample_index,
                         lambda: list(sampler.epoch_iter()), lambda: sampler.manual_seed(0)):  # fmt: skip
                with pytest.raises(rc.ClosedError):
                    call()

    def test_those_who_wait_for_a_slot_end_by_themselves(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("recollect.sampling.workers.pool.GRACE_S", 30.0)
        monkeypatch.setattr(
            "multiprocessing.process.BaseProcess.kill", lambda self: pytest.fail("it was told")
        )
        with buffer() as b:
            sampler = sampler_of(b)
            sampler.sample()
            until(lambda: sampler.stats().undelivered == sampler.n_buffers)
            sampler.close()

    def test_in_the_middle_of_a_long_transformation(self) -> None:
        with buffer() as b:
            sampler = sampler_of(rc.TransformedBatch(b, Random(naps_s=20.0)), deadline=0.05)
            with pytest.raises(rc.DeadlineError):
                sampler.sample()
            start = Stopwatch()
            sampler.close()
            assert start.s < 2.0

    def test_right_after_a_spawn(self) -> None:
        with buffer() as b:
            sampler = sampler_of(b, ctx="spawn", deadline=0.001)
            with pytest.raises(rc.DeadlineError):
                sampler.sample()
            start = Stopwatch()
            sampler.close()
            assert start.s < 2.0

    def test_forgotten(self) -> None:
        with buffer() as b:
            sampler = sampler_of(b)
            sampler.sample()
            workers = pids(sampler)
            del sampler
            gc.collect()
            assert not any(_exists(pid) for pid in workers)

    def test_inside_an_epoch(self) -> None:
        with buffer() as b:
            sampler = sampler_of(b)
            epoch = sampler.epoch_iter()
            next(epoch)
            sampler.close()
            with pytest.raises(rc.ClosedError):
                next(epoch)
            epoch.close()

    def test_a_forked_child_ends_nobody_elses_workers(self) -> None:
        with buffer() as b, sampler_of(b) as sampler:
            sampler.sample()
            pid = os.fork()
            if pid == 0:
                signal.alarm(10)  # never outlive the test
                sampler.close()
                os._exit(0)
            assert os.waitpid(pid, 0)[1] == 0
            some(sampler, 30)

    def test_from_a_thread_that_ends(self) -> None:
        """Workers belong to the process, not to the thread that drew first."""
        with buffer() as b, sampler_of(b) as sampler:
            thread = threading.Thread(target=sampler.sample)
            thread.start()
            thread.join()
            some(sampler, 40)

    def test_one_thread_at_a_time(self) -> None:
        with buffer() as b, sampler_of(rc.TransformedBatch(b, Random(naps_s=0.3))) as sampler:
            thread = threading.Thread(target=sampler.sample)
            thread.start()
            until(lambda: sampler._pool is not None)  # it is at it
            with pytest.raises(RuntimeError, match="one thread"):
                while thread.is_alive():
                    sampler.sample_index()
            thread.join()


class TestPriorities:
    def test_workers_gather_what_the_parent_draws(self) -> None:
        with buffer() as b:
            plain = rc.PrioritizedSampler(b, 16, seed=3)
            with rc.MultiprocessingSampler(rc.PrioritizedSampler(b, 16, seed=3), 2) as sampler:
                for _ in range(20):
                    data, about = sampler.sample_with_metadata()
                    same, label = plain.sample_with_metadata()
                    assert data["id"].tolist() == same["id"].tolist()
                    for name in ("row", "generation", "probability", "weight"):
                        assert np.array_equal(about[name], label[name])

    def test_priorities_reach_the_parents_tree(self) -> None:
        with buffer() as b:
            inner = rc.PrioritizedSampler(b, 32, seed=3, alpha=1.0, eps=0.0)
            with rc.MultiprocessingSampler(inner, 2) as sampler:
                everything = b.locate(...)
                values = np.zeros(len(b))
                values[7] = 1.0
                inner.update_priorities({"row": everything.row, "generation": everything.generation}, values)
                sampler.manual_seed(4)  # what was drawn before is dropped
                assert set(sampler.sample()["id"].tolist()) == {7}
