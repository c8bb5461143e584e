"""StepSampler: uniform draws, epochs, seeds and state."""

from __future__ import annotations

import json
import pickle
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from tests.batch.make import Counting, batch, block, numbers

from recollect.batch import (
    BatchBase,
    CombinedBatch,
    DataTransformation,
    FrameStackedBatch,
    Location,
    ToBackendOrDeviceBatch,
    TransformedBatch,
)
from recollect.batch import boundaries as boundaries_module
from recollect.errors import ContentionError, EmptyError, ReadOnlyError
from recollect.sampling import BatchSampler, IndexStream, StepSampler
from recollect.sampling import epoch as epoch_module
from recollect.testing.batch_contract import equal
from recollect.testing.batches import ListBatch

torch = pytest.importorskip("torch")


def epoch_of(sampler: BatchSampler, **kwargs: Any) -> list[list[int]]:
    return [np.asarray(b).tolist() for b in sampler.epoch_iter(**kwargs)]


def flat(batches: list[list[int]]) -> list[int]:
    return [x for b in batches for x in b]


class TestSample:
    def test_is_uniform_with_replacement(self) -> None:
        sampler = StepSampler(numbers(10), 100, seed=0)
        counts = np.bincount(np.concatenate([sampler.sample() for _ in range(200)]), minlength=10)
        assert abs(counts - 2_000).max() < 250

    def test_may_be_larger_than_the_source(self) -> None:
        assert StepSampler(numbers(2), 9, seed=0).sample().shape == (9,)

    def test_all_forms_draw_the_same_indices(self) -> None:
        source = batch(30, metadata=[{"w": i} for i in range(30)])

        def make() -> StepSampler:
            return StepSampler(source, 8, seed=5)

        index = make().sample_index()
        assert index.tolist() == IndexStream(5).indices(30, 8).tolist()
        assert make().sample()["id"].tolist() == index.tolist()
        assert np.array_equal(make().sample_flat(), source.get_flattened_at(index))
        data, metadata = make().sample_with_metadata()
        assert data["id"].tolist() == index.tolist()
        assert metadata is not None
        assert metadata["w"].tolist() == index.tolist()
        vectors, metadata = make().sample_flat_with_metadata()
        assert np.array_equal(vectors, source.get_flattened_at(index))
        assert metadata is not None
        assert metadata["w"].tolist() == index.tolist()

    def test_forms_share_one_stream(self) -> None:
        sampler, stream = StepSampler(numbers(99), 4, seed=5), IndexStream(5)
        got = [
            sampler.sample(),
            sampler.sample_flat()[:, 0],
            sampler.sample_index(),
            sampler.sample_with_metadata()[0],
        ]
        assert [x.tolist() for x in got] == [stream.indices(99, 4).tolist() for _ in got]

    def test_without_metadata_it_is_none(self) -> None:
        assert StepSampler(numbers(3), 2).sample_with_metadata()[1] is None

    def test_over_what_exists_now(self) -> None:
        source = numbers(1)
        sampler = StepSampler(source, 50, seed=0)
        assert set(sampler.sample().tolist()) == {0}
        source.extend([1, 2, 3])
        assert set(sampler.sample().tolist()) == {0, 1, 2, 3}

    def test_over_what_exists_now_in_every_form(self) -> None:
        source = numbers(1)
        sampler, without = StepSampler(source, 50, seed=0), StepSampler(source, 1, seed=0, replace=False)
        forms: list[Callable[[], Any]] = [
            sampler.sample_index,
            sampler.sample_flat,
            lambda: sampler.sample_with_metadata()[0],
            lambda: sampler.sample_flat_with_metadata()[0],
            lambda: np.concatenate([without.sample() for _ in range(50)]),
        ]
        assert [set(form().ravel().tolist()) for form in forms] == [{0}] * 5
        source.extend([1, 2, 3])
        assert [set(form().ravel().tolist()) for form in forms] == [{0, 1, 2, 3}] * 5

    def test_making_one_reads_nothing(self) -> None:
        source = Counting(((), "int64"), range(3))
        StepSampler(source, 2, seed=0)
        assert source.gathers == []

    def test_one_gather_each(self) -> None:
        source = Counting(((), "int64"), range(30))
        sampler = StepSampler(source, 7, seed=0)
        sampler.sample(), sampler.sample_flat(), sampler.sample_with_metadata()
        assert source.gathers == [7, 7, 7]
        sampler.sample_index()
        assert len(source.gathers) == 3

    @pytest.mark.parametrize("replace", [True, False])
    def test_empty_is_an_error(self, replace: bool) -> None:
        sampler = StepSampler(numbers(0), 1, replace=replace)
        draws: list[Callable[[], Any]] = [
            sampler.sample,
            sampler.sample_flat,
            sampler.sample_with_metadata,
            sampler.sample_flat_with_metadata,
            sampler.sample_index,
        ]
        for draw in draws:
            with pytest.raises(EmptyError, match="ListBatch"):
                draw()

    def test_the_source_draws(self) -> None:
        class Native(ListBatch):
            def draw_at(self, stream: Any, n: int) -> Any:
                return "drawn", stream.counter, n

        sampler = StepSampler(Native(((), "int64"), [1]), 3, seed=0)
        assert sampler.sample() == ("drawn", 0, 3)

    def test_drawn_again_if_the_source_shrinks(self) -> None:
        class Shrinking(ListBatch):
            def get_at(self, idx: Any) -> Any:
                if len(self) > 2:
                    self._items = self._items[:2]
                return super().get_at(idx)

        for replace in (True, False):
            sampler = StepSampler(Shrinking(((), "int64"), range(500)), 2, seed=0, replace=replace)
            assert set(sampler.sample().tolist()) <= {0, 1}
        sampler = StepSampler(Shrinking(((), "int64"), range(500)), 9, seed=0)
        assert set(sampler.sample_flat().ravel().tolist()) <= {0, 1}

    def test_other_index_errors_are_raised(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(boundaries_module, "CONTENTION_S", 0.01)

        class Broken(ListBatch):
            def get_at(self, idx: Any) -> Any:
                raise IndexError("broken")

        for replace in (True, False):
            sampler = StepSampler(Broken(((), "int64"), range(5)), 2, replace=replace)
            for draw in (sampler.sample, sampler.sample_flat):
                with pytest.raises(IndexError, match="broken"):
                    draw()

    def test_into_the_callers_arrays(self) -> None:
        out = {
            "obs": {"pos": np.zeros((4, 2), np.float32), "image": np.zeros((4, 2, 2), np.uint8)},
            "id": np.zeros(4, np.int64),
        }
        sampler, again = StepSampler(batch(9), 4, seed=1), StepSampler(batch(9), 4, seed=1)
        assert sampler.sample(out=out) is out
        assert equal(out, again.sample())
        with pytest.raises(ValueError, match="^id: out must be"):
            sampler.sample(out={"id": np.zeros(3, np.int64)})


class TestWithoutReplacement:
    def test_has_no_duplicates(self) -> None:
        for n in (3, 9, 10):
            sampler = StepSampler(numbers(10), n, seed=0, replace=False)
            for _ in range(20):
                assert len(set(sampler.sample().tolist())) == n
                assert len(set(sampler.sample_index().tolist())) == n
                assert len(set(sampler.sample_flat().ravel().tolist())) == n

    def test_too_few_is_an_error(self) -> None:
        sampler = StepSampler(numbers(4), 5, replace=False)
        for draw in (sampler.sample, sampler.sample_index, sampler.sample_with_metadata):
            with pytest.raises(ValueError, match="at most 4"):
                draw()

    def test_is_reproducible(self) -> None:
        a, b = (StepSampler(numbers(50), 8, seed=3, replace=False) for _ in range(2))
        assert [a.sample().tolist() for _ in range(3)] == [b.sample_index().tolist() for _ in range(3)]


class TestArguments:
    @pytest.mark.parametrize(
        ("size", "error"), [(0, ValueError), (-1, ValueError), (1.5, TypeError), (True, TypeError)]
    )
    def test_batch_size(self, size: Any, error: type[Exception]) -> None:
        with pytest.raises(error, match="batch_size"):
            StepSampler(numbers(3), size)

    def test_spaces_are_batched(self) -> None:
        sampler = StepSampler(batch(3, metadata=[{"w": i} for i in range(3)]), 5)
        assert sampler.single_space is sampler.data.single_space
        assert sampler.sampled_space["obs"]["pos"].shape == (5, 2)  # type: ignore[index]
        assert sampler.sampled_space.contains(sampler.sample())
        assert isinstance(sampler.sampled_metadata_space, spaces.Dict)
        assert sampler.sampled_metadata_space["w"].shape == (5,)
        assert StepSampler(numbers(1), 2).sampled_metadata_space is None

    def test_device_moves_the_result(self) -> None:
        source = ToBackendOrDeviceBatch(batch(9, metadata=[{"w": i} for i in range(9)]), "torch")
        sampler = StepSampler(source, 4, seed=0, device="meta")
        data, metadata = sampler.sample_with_metadata()
        assert data["id"].device.type == "meta"
        assert metadata is not None
        assert metadata["w"].device.type == "meta"
        assert sampler.sample()["id"].device.type == "meta"
        assert sampler.sample_flat().device.type == "meta"
        assert next(sampler.epoch_iter())["id"].device.type == "meta"
        assert sampler[0]["id"].device.type == "meta"
        without = StepSampler(source, 4, seed=0, device="meta", replace=False)
        assert without.sample()["id"].device.type == "meta"
        assert str(sampler.device) == "meta"
        assert sampler.data is source

    def test_equal_seeds_give_equal_indices_on_every_backend(self) -> None:
        views = [numbers(40), ToBackendOrDeviceBatch(numbers(40), "torch")]
        views.append(FrameStackedBatch(numbers(40), 1))
        for view in views:
            sampler = StepSampler(view, 6, seed=9)
            assert sampler.sample_index().tolist() == IndexStream(9).indices(40, 6).tolist()
        anchors = StepSampler(views[2], 6, seed=9).sample()[:, -1]
        assert anchors.tolist() == StepSampler(views[1], 6, seed=9).sample().tolist()
        moved = StepSampler(views[1], 6, seed=9, device="cpu")
        assert moved.sample().tolist() == anchors.tolist()
        away = StepSampler(views[1], 6, seed=9, device="meta")
        assert away.sample_index().tolist() == anchors.tolist()  # of the source's samples 0 to 39

    def test_only_batches(self) -> None:
        sampler = StepSampler(numbers(1), 1)
        with pytest.raises(TypeError, match="must be a BatchBase"):
            sampler.data = [1]  # type: ignore[assignment]
        with pytest.raises(TypeError, match="must be a BatchBase"):
            StepSampler([1], 1)  # type: ignore[arg-type]


class TestAsABatch:
    def test_getters_pass_on_and_len_counts_the_source(self) -> None:
        source = batch(5, segments=[(0, 5)])
        sampler = StepSampler(source, 2)
        assert len(sampler) == 5
        assert equal(sampler[3], source[3])
        assert equal(sampler.get_flattened_at([1]), source.get_flattened_at([1]))
        assert sampler.get_segments() == [(0, 5)]
        assert sampler.locate(2).row == source.locate(2).row

    def test_is_read_only(self) -> None:
        sampler = StepSampler(numbers(3), 2)
        for write in (lambda: sampler.append(1), lambda: sampler.set_at(0, 1), lambda: sampler.remove_at(0)):
            with pytest.raises(ReadOnlyError, match="StepSampler.*ListBatch"):
                write()
        assert not sampler.is_mutable

    def test_stats(self) -> None:
        sampler = StepSampler(numbers(5), 2, seed=0)
        sampler.sample(), sampler.sample_flat(), list(sampler)
        stats = sampler.stats()
        assert (stats.kind, stats.length, stats.batch_size, stats.batches) == ("StepSampler", 5, 2, 5)
        assert stats.source.kind == "ListBatch"
        with pytest.raises(AttributeError):
            stats.batches = 0

    def test_data_can_be_exchanged(self) -> None:
        sampler = StepSampler(numbers(5), 2, seed=0)
        sampler.data = numbers(5, start=100)
        assert sampler.sample().min() >= 100


class TestEpoch:
    def test_every_sample_once_in_a_fresh_permutation(self) -> None:
        sampler = StepSampler(numbers(20), 6, seed=0)
        one, two = epoch_of(sampler), epoch_of(sampler)
        assert [len(b) for b in one] == [6, 6, 6, 2]
        for run in (one, two):
            assert sorted(flat(run)) == list(range(20))
        assert one != two
        assert flat(one) != list(range(20))
        assert epoch_of(StepSampler(numbers(20), 6, seed=0)) == one

    def test_iter_is_one(self) -> None:
        sampler = StepSampler(numbers(7), 3, seed=0)
        assert sorted(int(x) for b in sampler for x in b) == list(range(7))

    @pytest.mark.parametrize(("n", "sizes"), [(7, [3, 3]), (6, [3, 3]), (2, [])])
    def test_drop_last(self, n: int, sizes: list[int]) -> None:
        sampler = StepSampler(batch(n), 3, seed=0)
        runs = [sampler.epoch_iter, sampler.epoch_iter_with_metadata]
        flat_runs = [sampler.epoch_flat_iter, sampler.epoch_flat_iter_with_metadata]
        assert [len(b["id"]) for b in runs[0](drop_last=True)] == sizes
        assert [len(b["id"]) for b, _ in runs[1](drop_last=True)] == sizes
        assert [len(b) for b in flat_runs[0](drop_last=True)] == sizes
        assert [len(b) for b, _ in flat_runs[1](drop_last=True)] == sizes

    def test_all_forms_are_the_same_samples(self) -> None:
        source = batch(7, metadata=[{"w": i} for i in range(7)])

        def make() -> StepSampler:
            return StepSampler(source, 3, seed=2)

        ids = [b["id"].tolist() for b in make().epoch_iter()]
        with_metadata = list(make().epoch_iter_with_metadata())
        assert [b["id"].tolist() for b, _ in with_metadata] == ids
        assert [m["w"].tolist() for _, m in with_metadata if m] == ids
        assert [b[:, -1].tolist() for b in make().epoch_flat_iter()] == ids
        both = list(make().epoch_flat_iter_with_metadata())
        assert [b[:, -1].tolist() for b, _ in both] == ids
        assert [m["w"].tolist() for _, m in both if m] == ids

    def test_of_nothing_is_empty(self) -> None:
        assert list(StepSampler(numbers(0), 3)) == []
        assert list(StepSampler(CombinedBatch([numbers(0)]), 3)) == []

    def test_the_set_is_fixed_at_the_first_next(self) -> None:
        source = numbers(4)
        it = StepSampler(source, 2, seed=0).epoch_iter()
        source.append(4)
        first = next(it).tolist()
        source.append(5)
        assert sorted(first + [int(x) for b in it for x in b]) == [0, 1, 2, 3, 4]

    def test_overwritten_samples_are_skipped_and_counted(self) -> None:
        ring = numbers(10, capacity=10)
        sampler = StepSampler(ring, 3, seed=1)
        it = sampler.epoch_iter()
        seen = next(it).tolist()
        ring.extend([90, 91, 92])  # evicts 0, 1, 2
        rest = [b.tolist() for b in it]
        lost = sorted({0, 1, 2} - set(seen))
        assert lost
        assert sorted(seen + flat(rest)) == sorted(set(range(10)) - set(lost))
        assert all(len(b) == 3 for b in rest[:-1])  # others fill the gaps
        assert sampler.skipped == sampler.stats().skipped == len(lost)

    def test_a_sample_set_anew_is_skipped(self) -> None:
        source = numbers(6)
        sampler = StepSampler(source, 2, seed=1)
        it = sampler.epoch_iter()
        seen = next(it).tolist()
        victim = min(set(range(6)) - set(seen))
        source[victim] = 99
        assert sorted(seen + [int(x) for b in it for x in b]) == sorted(set(range(6)) - {victim})

    def test_over_a_moving_ring_each_is_read_as_it_was(self) -> None:
        ring = numbers(12, capacity=12, segments=[(0, 12)])
        views: list[BatchBase] = [
            ring,
            ring.get_slice(...),
            ToBackendOrDeviceBatch(ring, "torch"),
            TransformedBatch(ring, lambda x: x + 0),
            CombinedBatch([numbers(0), ring]),
            FrameStackedBatch(ring, 0),
            ring.get_slice(range(12)),
        ]
        samplers = [StepSampler(view, 5, seed=3) for view in views]
        its = [sampler.epoch_iter() for sampler in samplers]
        seen = [np.asarray(next(it)).ravel().tolist() for it in its]
        ring.extend([100, 101, 102, 103])
        for sampler, it, got in zip(samplers, its, seen):
            rest = [int(x) for b in it for x in np.asarray(b).ravel()]
            assert sorted(got + rest) == sorted(set(got) | set(range(4, 12)))
            assert sampler.skipped == 12 - len(got + rest)

    def test_a_source_without_places_that_shrinks(self) -> None:
        from tests.batch.test_base import Plain

        source = Plain(10)
        sampler = StepSampler(source, 2, seed=0)
        it = sampler.epoch_iter()
        seen = next(it).tolist()
        source.n = 5
        rest = [int(x) for b in it for x in b]
        assert sorted(set(seen) | set(range(5))) == sorted(seen + rest)
        assert sampler.skipped == 10 - len(seen + rest)

    def test_it_may_shrink_while_it_starts(self) -> None:
        class Shrinking(ListBatch):
            def locate(self, idx: Any) -> Location:
                self._items = self._items[:4]
                return super().locate(idx)

        sampler = StepSampler(Shrinking(((), "int64"), range(9)), 2, seed=0)
        assert sorted(int(x) for b in sampler for x in b) == [0, 1, 2, 3]

    def test_another_error_while_it_starts_is_raised(self) -> None:
        class Broken(ListBatch):
            def locate(self, idx: Any) -> Location:
                raise IndexError("broken")

        with pytest.raises(IndexError, match="broken"):
            list(StepSampler(Broken(((), "int64"), range(9)), 2))

    def test_a_race_is_run_again(self) -> None:
        class Late(ListBatch):
            late = 3

            def get_located(self, *args: Any, **named: Any) -> Any:
                self.late -= 1
                return None if self.late >= 0 else super().get_located(*args, **named)

        sampler = StepSampler(Late(((), "int64"), range(5)), 2, seed=0)
        assert sorted(int(x) for b in sampler for x in b) == list(range(5))
        assert sampler.skipped == 0

    def test_positions_of_a_view_that_are_gone_are_no_part_of_it(self) -> None:
        source = numbers(6)
        view = source.get_slice([0, 5, 3])
        source.remove_at([1, 2])
        assert sorted(int(x) for b in StepSampler(view, 2, seed=0) for x in b) == [0, 5]

    def test_a_stack_whose_view_lost_sight_of_it_is_skipped(self) -> None:
        ring = numbers(6, capacity=6)
        sampler = StepSampler(FrameStackedBatch(ring.get_slice([2, 3, 4, 5]), 1), 1, seed=0)
        it = sampler.epoch_iter()
        seen = [next(it)[0].tolist()]
        ring.extend([6, 7])  # position 2 shows 4 now, and so on
        seen += [b[0].tolist() for b in it]
        assert all(b in ([2, 2], [2, 3], [3, 4], [4, 5], [4, 4]) for b in seen)
        assert sampler.skipped == 4 - len(seen)

    def test_an_endless_race_ends(self, monkeypatch: pytest.MonkeyPatch) -> None:
        class Lapped(ListBatch):
            def get_located(self, *args: Any, **named: Any) -> Any:
                return None

        monkeypatch.setattr(epoch_module, "CONTENTION_S", 0.01)
        with pytest.raises(ContentionError):
            list(StepSampler(Lapped(((), "int64"), range(5)), 2))

    def test_interleaved_epochs(self) -> None:
        sampler = StepSampler(numbers(6), 2, seed=0)
        a, b = sampler.epoch_iter(), sampler.epoch_iter()
        seen: tuple[list[int], list[int]] = ([], [])
        for x, y in zip(a, b):
            seen[0].extend(x.tolist())
            seen[1].extend(y.tolist())
        assert sorted(seen[0]) == sorted(seen[1]) == list(range(6))


class Noise(DataTransformation):
    """Adds random numbers; restarts and resumes."""

    def __init__(self) -> None:
        self.manual_seed(0)

    def manual_seed(self, seed: int) -> None:
        self.seed = seed
        self.rng = np.random.default_rng(seed)

    def get_target_space_from_source(self, space: Any) -> Any:
        return ((), "float64")

    def transform(self, space: Any, data: Any) -> Any:
        return data + self.rng.random(len(data))

    def state_dict(self) -> Any:
        return {"state": self.rng.bit_generator.state}

    def load_state_dict(self, state: Any) -> None:
        self.rng.bit_generator.state = state["state"]


class TestSeeds:
    def test_manual_seed_restarts_both_streams(self) -> None:
        noise = Noise()
        view = FrameStackedBatch(TransformedBatch(numbers(20), noise), 1)
        sampler = StepSampler(view, 4, seed=1)
        first = [sampler.sample().tolist() for _ in range(3)], sampler.rng.random(3).tolist()
        assert sampler.sample().tolist() != first[0][0]
        sampler.manual_seed(1)
        assert ([sampler.sample().tolist() for _ in range(3)], sampler.rng.random(3).tolist()) == first
        sampler.manual_seed(2)
        assert sampler.sample().tolist() != first[0][0]
        assert sampler.rng.random(3).tolist() != first[1]

    def test_each_transformation_has_its_own_seed(self) -> None:
        one, two = Noise(), Noise()
        view = TransformedBatch(TransformedBatch(numbers(3), one), two)
        StepSampler(CombinedBatch([view, TransformedBatch(numbers(3), two)]), 2, seed=5)
        assert one.seed != two.seed
        assert 0 <= one.seed < 2**63

    def test_without_a_seed_nothing_is_restarted_and_draws_differ(self) -> None:
        noise = Noise()
        noise.manual_seed(77)
        a, b = (StepSampler(TransformedBatch(numbers(10**4), noise), 8) for _ in range(2))
        assert noise.seed == 77
        assert a.sample_index().tolist() != b.sample_index().tolist()
        assert a.rng.random() != b.rng.random()

    def test_a_seed_forgets_a_resumed_epoch(self) -> None:
        sampler = StepSampler(numbers(6), 2, seed=0)
        it = sampler.epoch_iter()
        next(it)
        sampler.load_state_dict(sampler.state_dict())
        sampler.manual_seed(0)
        assert len(list(sampler)) == 3


class TestState:
    def make(self, seed: int | None = 4, **kwargs: Any) -> StepSampler:
        return StepSampler(TransformedBatch(numbers(23, segments=[(0, 23)]), Noise()), 5, seed=seed, **kwargs)

    @pytest.mark.parametrize("replace", [True, False])
    def test_resumes_bit_for_bit(self, replace: bool) -> None:
        one, two = self.make(replace=replace), self.make(None, replace=replace)
        for _ in range(3):
            one.sample()
        state = one.state_dict()
        two.load_state_dict(state)
        assert [one.sample().tolist() for _ in range(4)] == [two.sample().tolist() for _ in range(4)]
        assert one.rng.random(4).tolist() == two.rng.random(4).tolist()
        assert [b.tolist() for b in one] == [b.tolist() for b in two]
        assert two.stats().batches == one.stats().batches

    @pytest.mark.parametrize("delivered", [0, 1, 3, 5])
    def test_inside_an_epoch(self, delivered: int) -> None:
        one, two = self.make(), self.make(None)
        it = one.epoch_iter()
        for _ in range(delivered):
            next(it)
        state = one.state_dict()
        two.load_state_dict(state)
        assert [b.tolist() for b in two.epoch_iter()] == [b.tolist() for b in it]
        assert [b.tolist() for b in two.epoch_iter()] == [b.tolist() for b in one.epoch_iter()]

    def test_of_a_resumed_epoch_not_yet_begun(self) -> None:
        one, two, three = self.make(), self.make(None), self.make(None)
        it = one.epoch_iter()
        next(it)
        two.load_state_dict(one.state_dict())
        three.load_state_dict(two.state_dict())
        assert [b.tolist() for b in three.epoch_iter()] == [b.tolist() for b in it]

    def test_of_an_abandoned_epoch(self) -> None:
        one, two = self.make(), self.make(None)
        for _ in one.epoch_iter():
            break
        two.load_state_dict(one.state_dict())
        assert one.state_dict()["epoch"] is None
        assert [b.tolist() for b in two.epoch_iter()] == [b.tolist() for b in one.epoch_iter()]

    def test_over_a_source_without_places(self) -> None:
        from tests.batch.test_base import Plain

        one, two = (StepSampler(Plain(9), 2, seed=s) for s in (1, 2))
        it = one.epoch_iter()
        next(it)
        two.load_state_dict(one.state_dict())
        assert [b.tolist() for b in two] == [b.tolist() for b in it]

    def test_the_rest_skips_what_was_overwritten_meanwhile(self) -> None:
        ring = numbers(8, capacity=8)
        one = StepSampler(ring, 2, seed=1)
        it = one.epoch_iter()
        seen = next(it).tolist()
        state = one.state_dict()
        ring.extend([90, 91])
        two = StepSampler(ring, 2)
        two.load_state_dict(state)
        rest = [int(x) for b in two for x in b]
        assert sorted(set(seen) | set(rest) | {0, 1}) == list(range(8))
        assert two.skipped == 8 - len(seen + rest)

    def test_is_plain_numbers_strings_and_arrays(self) -> None:
        one = self.make()
        it = one.epoch_iter()
        next(it)

        def plain(x: Any) -> bool:
            if isinstance(x, dict):
                return all(isinstance(k, str) and plain(v) for k, v in x.items())
            if isinstance(x, list):
                return all(map(plain, x))
            return x is None or isinstance(x, bool | int | float | str | np.ndarray)

        state = one.state_dict()
        assert plain(state)
        texts = json.loads(json.dumps(state, default=lambda a: a.tolist()))
        two = self.make(None)
        texts["rng"] = state["rng"]
        two.load_state_dict(texts)
        assert [b.tolist() for b in two] == [b.tolist() for b in it]

    def test_does_not_change_later(self) -> None:
        one = self.make()
        state = pickle.dumps(one.state_dict())
        kept = one.state_dict()
        one.sample(), one.rng.random(9), list(one)
        assert pickle.dumps(kept) == state

    @pytest.mark.parametrize("other", [{"batch_size": 6}, {"replace": False}, {"kind": "PrioritizedSampler"}])
    def test_of_another_configuration_is_an_error(self, other: dict[str, Any]) -> None:
        one = self.make()
        before = one.state_dict()
        with pytest.raises(ValueError, match=next(iter(other))):
            one.load_state_dict({**before, **other})
        assert one.state_dict()["stream"] == before["stream"]

    def test_pickles(self) -> None:
        one = StepSampler(numbers(30), 4, seed=1)
        one.sample()
        two = pickle.loads(pickle.dumps(one))
        assert two.sample().tolist() == one.sample().tolist()
        assert two.sample_index().tolist() == one.sample_index().tolist()
        without = pickle.loads(pickle.dumps(StepSampler(numbers(30), 30, seed=1, replace=False)))
        assert sorted(without.sample().tolist()) == list(range(30))


class TestOneThread:
    def run_beside(
        self, call: Callable[[StepSampler], Any], hold: Callable[[StepSampler], Any]
    ) -> Exception | None:
        """Run `hold` in a thread that stops in the middle of a read, and `call` beside it."""
        inside, go_on = threading.Event(), threading.Event()

        class Stops(ListBatch):
            def get_at(self, idx: Any) -> Any:
                if threading.current_thread() is worker:
                    inside.set()
                    assert go_on.wait(10)
                return super().get_at(idx)

        sampler = StepSampler(Stops(((), "int64"), range(5)), 2, seed=0)
        worker = threading.Thread(target=hold, args=(sampler,))
        worker.start()
        assert inside.wait(10)
        caught: Exception | None = None
        try:
            call(sampler)
        except Exception as error:
            caught = error
        go_on.set()
        worker.join(10)
        sampler.sample()  # free again
        return caught

    @pytest.mark.parametrize(
        "call",
        [
            lambda s: s.sample(),
            lambda s: s.sample_flat(),
            lambda s: s.sample_index(),
            lambda s: next(s.epoch_iter()),
            lambda s: s.manual_seed(1),
            lambda s: s.load_state_dict(s.state_dict()),
        ],
    )
    @pytest.mark.parametrize("hold", [lambda s: s.sample(), lambda s: s.sample_flat(), lambda s: list(s)])
    def test_a_second_is_an_error(self, call: Any, hold: Any) -> None:
        error = self.run_beside(call, hold)
        assert isinstance(error, RuntimeError)
        assert "one thread at a time" in str(error)

    def test_getters_are_free(self) -> None:
        assert self.run_beside(lambda s: s[0], lambda s: s.sample()) is None

    def test_an_error_leaves_it_free(self) -> None:
        sampler = StepSampler(numbers(0), 2)
        for draw in (sampler.sample, sampler.sample_flat, sampler.sample_index, sampler.sample):
            with pytest.raises(EmptyError):
                draw()

    def test_may_draw_inside_its_epoch(self) -> None:
        sampler = StepSampler(numbers(6), 2, seed=0)
        assert len([sampler.sample() for _ in sampler]) == 3


class TestHotPath:
    def test_is_one_python_call_on_top_of_the_source(self) -> None:
        sampler = StepSampler(numbers(3), 3, seed=0)
        sampler._next = divmod  # type: ignore[assignment]  # a builtin of two arguments for a native draw
        sampler._stream = 7  # type: ignore[assignment]
        calls: list[str] = []

        def watch(frame: Any, event: str, arg: Any) -> None:
            if event == "call":
                calls.append(frame.f_code.co_name)

        sys.setprofile(watch)
        try:
            sampler.sample()
        finally:
            sys.setprofile(None)
        assert calls == ["sample"]


class TestBase:
    def test_a_subclass_says_how(self) -> None:
        class Newest(BatchSampler):
            def __init__(self, data: BatchBase, batch_size: int) -> None:
                super().__init__(data.single_space, data.single_metadata_space, batch_size)
                self.data = data

            def _draw_index(self) -> Any:
                return np.arange(len(self) - self.batch_size, len(self))

        source = batch(9, metadata=[{"w": i} for i in range(9)])
        sampler = Newest(source, 3)
        assert sampler.sample()["id"].tolist() == [6, 7, 8]
        assert sampler.sample_index().tolist() == [6, 7, 8]
        assert sampler.sample_flat().shape == (3, 7)
        metadata = sampler.sample_with_metadata()[1]
        assert metadata is not None
        assert metadata["w"].tolist() == [6, 7, 8]
        assert sorted(int(i) for b in sampler.epoch_iter() for i in b["id"]) == list(range(9))
        sampler.manual_seed(3)
        again = Newest(source, 3)
        again.load_state_dict(sampler.state_dict())
        out = block([0, 0, 0])
        assert again.sample(out=out) is out
        assert out["id"].tolist() == [6, 7, 8]
        assert pickle.loads(pickle.dumps(StepSampler(source, 3))).batch_size == 3

    def test_needs_a_source_and_a_way_to_draw(self) -> None:
        sampler = BatchSampler(((), "int64"), None, 2)
        assert sampler.batch_size == 2
        assert BatchSampler(((), "int64")).batch_size == 1
        with pytest.raises(RuntimeError, match="data must be assigned"):
            len(sampler)
        with pytest.raises(RuntimeError, match="data must be assigned"):
            sampler.data
        with pytest.raises(RuntimeError, match="data must be assigned"):
            sampler.device
        assert pickle.loads(pickle.dumps(sampler)).batch_size == 2
        with pytest.raises(AttributeError, match="no attribute 'typo'"):
            sampler.typo
        sampler.data = numbers(3)
        with pytest.raises(NotImplementedError, match="_draw_index"):
            sampler.sample()
