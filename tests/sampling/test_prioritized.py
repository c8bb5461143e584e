"""PrioritizedSampler: what is drawn how often, weights, late updates, views, refusals."""

from __future__ import annotations

import json
import pickle
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.replay import make
from tests.replay.make import block, create

import recollect as rc
from recollect.batch import CastTransformation
from recollect.indexing import normalize
from recollect.sampling.priorities import AnyLedger, RowLedger
from recollect.testing.batches import ListBatch

KINDS = (*make.ROW_KINDS, "test-list", "moving", "plain")


class Growing(rc.BatchBase):
    """The least that a batch can be: it has a length and samples that never move."""

    def __init__(self, n: int) -> None:
        super().__init__(make.SPACE)
        self.n = n

    def __len__(self) -> int:
        return self.n

    def get_at(self, idx: Any) -> Any:
        index = normalize(idx, self.n)
        return make.sample(index) if isinstance(index, int) else block(index.tolist())

    def append(self, value: Any) -> None:
        self.n += 1


def source_of(kind: str, directory: Path, n: int = 10, **kwargs: Any) -> Any:
    """A batch of the numbers below n: a buffer of some storage, or no buffer at all."""
    if kind == "plain":
        return Growing(n)
    if kind == "moving":
        return ListBatch(make.SPACE, [make.sample(i) for i in range(n)])
    buffer = create(kind, directory=directory, **{"capacity": 16, **kwargs})
    buffer.extend(block(list(range(n))))
    return buffer


def all_of(sampler: rc.PrioritizedSampler) -> dict[str, Any]:
    """The labels of every sample, in index order."""
    meta = sampler.get_at_with_metadata(...)[1]
    assert meta is not None
    return meta


def set_all(sampler: rc.PrioritizedSampler, values: Any) -> None:
    values = np.asarray(values, np.float64)
    assert sampler.update_priorities(all_of(sampler), values) == len(values)


@pytest.mark.parametrize("kind", KINDS)
class TestLabels:
    def test_row_generation_probability_and_weight(self, kind: str, tmp_path: Path) -> None:
        source = source_of(kind, tmp_path)
        sampler = rc.PrioritizedSampler(source, 64, alpha=0.7, beta=0.5, eps=0.01, seed=0)
        priorities = np.linspace(0.1, 5.0, 10)
        set_all(sampler, priorities)
        data, meta = sampler.sample_with_metadata()
        mass = (priorities + 0.01) ** 0.7
        expected = mass / mass.sum()
        weight = (10 * expected) ** -0.5
        x = data["x"]
        assert meta is not None
        np.testing.assert_allclose(meta["probability"], expected[x], rtol=1e-6)
        np.testing.assert_allclose(meta["weight"], weight[x] / weight.max(), rtol=1e-6)
        place = source.locate(x)
        assert np.array_equal(meta["row"], place.row)
        assert np.array_equal(meta["generation"], place.generation)
        assert {k: v.dtype.name for k, v in meta.items()} == {
            "row": "int64", "generation": "int64", "probability": "float32", "weight": "float32",
        }  # fmt: skip
        assert sampler.sampled_metadata_space is not None
        assert all(sampler.sampled_metadata_space[k].shape == v.shape for k, v in meta.items())

    def test_one_draw_in_each_equal_part_of_the_mass(self, kind: str, tmp_path: Path) -> None:
        sampler = rc.PrioritizedSampler(source_of(kind, tmp_path), 100, alpha=1, eps=0, seed=1)
        priorities = np.array([0, 1, 2, 3, 4, 5, 6, 7, 8, 64.0])
        set_all(sampler, priorities)
        for _ in range(20):
            counts = np.bincount(sampler.sample()["x"], minlength=10)
            assert counts[0] == 0
            assert (
                abs(counts - priorities) <= 1
            ).all()  # 100 parts of a mass of 100: each off by its two edges

    def test_alpha_zero_is_uniform_whatever_the_priorities(self, kind: str, tmp_path: Path) -> None:
        sampler = rc.PrioritizedSampler(source_of(kind, tmp_path), 10, alpha=0, eps=0, seed=1)
        set_all(sampler, np.array([0, 1, 2, 3, 4, 5, 6, 7, 8, 1e9]))
        for _ in range(5):
            data, meta = sampler.sample_with_metadata()
            assert sorted(data["x"].tolist()) == list(range(10))
            assert meta is not None
            assert (meta["weight"] == 1).all()

    def test_beta_may_be_assigned(self, kind: str, tmp_path: Path) -> None:
        sampler = rc.PrioritizedSampler(source_of(kind, tmp_path), 8, seed=1)
        set_all(sampler, np.arange(10.0))
        sampler.beta = 0.0
        assert (all_of(sampler)["weight"] == 1).all()
        sampler.beta = 1.0
        weight = all_of(sampler)["weight"]
        assert weight[0] == 1
        assert (np.diff(weight) < 0).all()
        with pytest.raises(ValueError, match="beta: must be a finite number of at least 0, got -1"):
            sampler.beta = -1
        assert sampler.beta == 1

    def test_forms_share_one_stream_and_draw_the_same(self, kind: str, tmp_path: Path) -> None:
        source = source_of(kind, tmp_path)

        def made() -> rc.PrioritizedSampler:
            sampler = rc.PrioritizedSampler(source, 7, seed=5)
            set_all(sampler, np.arange(10.0))
            return sampler

        index = made().sample_index()
        x = source[index]["x"]
        assert np.array_equal(made().sample()["x"], x)
        assert np.array_equal(made().sample_flat(), source.get_flattened_at(index))
        assert np.array_equal(made().sample_with_metadata()[0]["x"], x)
        assert np.array_equal(made().sample_flat_with_metadata()[0], source.get_flattened_at(index))
        out = {"x": np.empty(7, np.int64), "y": np.empty((7, 2), np.float32)}
        assert made().sample(out=out) is out
        assert np.array_equal(out["x"], x)
        sampler, other = made(), made()
        got = [sampler.sample()["x"], source[sampler.sample_index()]["x"], sampler.sample()["x"]]
        assert [g.tolist() for g in got] == [other.sample()["x"].tolist() for _ in range(3)]
        assert len({tuple(g.tolist()) for g in got}) == 3

    def test_getters_and_epochs_have_the_labels_of_now(self, kind: str, tmp_path: Path) -> None:
        source = source_of(kind, tmp_path)
        sampler = rc.PrioritizedSampler(source, 4, seed=5)
        set_all(sampler, np.arange(10.0))
        labels = all_of(sampler)
        one, meta = sampler.get_at_with_metadata(-1)
        assert one["x"] == 9
        assert meta is not None
        assert all(meta[k] == labels[k][9] for k in labels)
        seen = []
        for data, found in sampler.epoch_iter_with_metadata():
            assert found is not None
            assert all(np.array_equal(found[k], labels[k][data["x"]]) for k in labels)
            seen += data["x"].tolist()
            assert sampler.update_priorities(found, np.ones(len(data["x"]))) == len(data["x"])
            labels = all_of(sampler)
        assert sorted(seen) == list(range(10))
        assert np.unique(labels["probability"]).size == 1

    def test_samplers_of_one_source_have_priorities_of_their_own(self, kind: str, tmp_path: Path) -> None:
        source = source_of(kind, tmp_path)
        a, b = (rc.PrioritizedSampler(source, 4, seed=5) for _ in range(2))
        set_all(a, np.arange(10.0))
        assert np.unique(all_of(b)["weight"]).tolist() == [1.0]
        assert (np.diff(all_of(a)["probability"]) > 0).all()


BUFFERS = (*make.ROW_KINDS, "test-list")


@pytest.mark.parametrize("kind", BUFFERS)
class TestNewGoneAndLate:
    def test_new_samples_have_the_largest_priority_so_far(self, kind: str, tmp_path: Path) -> None:
        """Not 1: new data would never be drawn beside large priorities (the pain of ray#11750)."""
        source = source_of(kind, tmp_path, 4)
        sampler = rc.PrioritizedSampler(source, 4, alpha=1, eps=0, seed=0)
        set_all(sampler, [1, 2, 30, 4])
        set_all(sampler, [1, 2, 3, 4])
        source.append(make.sample(4))
        np.testing.assert_allclose(all_of(sampler)["probability"], np.array([1, 2, 3, 4, 30]) / 40)

    def test_overwritten_samples_are_new(self, kind: str, tmp_path: Path) -> None:
        source = source_of(kind, tmp_path, 16)
        sampler = rc.PrioritizedSampler(source, 4, alpha=1, eps=0, seed=0)
        set_all(sampler, np.full(16, 0.5))
        source.extend(block([16, 17, 18]))  # over the three oldest
        source[4] = make.sample(99)
        expected = np.array([0.5] * 4 + [1.0] + [0.5] * 8 + [1.0] * 3)
        np.testing.assert_allclose(all_of(sampler)["probability"], expected / expected.sum(), rtol=1e-6)

    def test_late_updates_are_dropped_and_counted(self, kind: str, tmp_path: Path) -> None:
        source = source_of(kind, tmp_path, 16)
        sampler = rc.PrioritizedSampler(source, 16, alpha=0, seed=0)
        _, meta = sampler.sample_with_metadata()  # one of each
        assert meta is not None
        source.extend(block([16, 17, 18]))
        source[-1] = make.sample(7)
        source.remove_at([0])
        values = np.full(16, 9.0)
        values[:4] = 1e6  # the late ones: they must not raise the largest priority either
        assert sampler.update_priorities(meta, values) == 12
        assert sampler.update_priorities(meta, values) == 12
        stats = sampler.stats()
        assert (stats.applied, stats.late, stats.top) == (24, 8, 9.0)

    def test_gone_samples_are_never_drawn_and_have_no_mass(self, kind: str, tmp_path: Path) -> None:
        source = source_of(kind, tmp_path, 16)
        sampler = rc.PrioritizedSampler(source, 8, alpha=1, eps=0, seed=0)
        set_all(sampler, [1e6] * 8 + [1.0] * 8)
        source.remove_at(slice(0, 8))
        for _ in range(20):
            assert sampler.sample()["x"].min() >= 8
        assert sampler._ledger.total() == 8.0
        source.clear()
        with pytest.raises(rc.EmptyError, match="must hold samples to draw from, got none"):
            sampler.sample()
        source.append(make.sample(5))
        assert set(sampler.sample()["x"].tolist()) == {5}
        assert sampler._ledger.total() == 1e6

    def test_of_duplicates_the_last_value_wins(self, kind: str, tmp_path: Path) -> None:
        sampler = rc.PrioritizedSampler(source_of(kind, tmp_path, 2), 2, alpha=1, eps=0, seed=0)
        meta = {k: v[[0, 1, 0]] for k, v in all_of(sampler).items()}
        assert sampler.update_priorities(meta, [5.0, 1.0, 3.0]) == 3
        np.testing.assert_allclose(all_of(sampler)["probability"], [0.75, 0.25])

    def test_wrong_values_raise_and_none_is_applied(self, kind: str, tmp_path: Path) -> None:
        sampler = rc.PrioritizedSampler(source_of(kind, tmp_path, 3), 2, alpha=2, eps=0, seed=0)
        set_all(sampler, [1, 2, 3])
        meta, before = all_of(sampler), all_of(sampler)["probability"].tolist()
        for bad in (-1.0, -5e-324, np.nan, np.inf, -np.inf):
            with pytest.raises(
                ValueError, match="values: must be finite and not negative, got .* at 1; none"
            ):
                sampler.update_priorities(meta, [9.0, bad, 9.0])
        with pytest.raises(ValueError, match=r"values: must have a \(value \+ eps\)\*\*alpha below"):
            sampler.update_priorities(meta, [9.0, 1e300, 9.0])
        for wrong in ([1.0, 2.0], [[1.0], [2.0], [3.0]], ["a", "b", "c"]):
            with pytest.raises(ValueError, match="values: must be one number for each of 3 samples"):
                sampler.update_priorities(meta, wrong)
        with pytest.raises(KeyError, match="meta: must have 'generation'"):
            sampler.update_priorities({"row": meta["row"]}, [1.0, 2.0, 3.0])
        with pytest.raises(ValueError, match="meta: row must be 1-D integers"):
            sampler.update_priorities({**meta, "row": meta["row"] * 1.0}, [1.0, 2.0, 3.0])
        assert all_of(sampler)["probability"].tolist() == before
        assert sampler.stats().top == 3.0
        forged = {"row": np.array([-1, 10**9, 2**62]), "generation": np.array([1, 1, 1])}
        assert sampler.update_priorities(forged, [1.0, 2.0, 3.0]) == 0
        assert sampler.stats().late == 3


def test_zero_priorities_are_never_drawn_at_the_edges_of_floats() -> None:
    """Masses of all sizes, where running sums round, with zeros between, before and behind them."""
    rng = np.random.default_rng(0)
    for capacity in (1, 16, 17, 300, 5000):
        buffer = rc.ReplayBuffer.create("memory", ((), "int64"), capacity=capacity)
        buffer.extend(np.arange(capacity))
        sampler = rc.PrioritizedSampler(buffer, 512, alpha=1, eps=0, seed=3)
        for exponents in ((0, 1), (-300, -290), (-320, 200), (-17, 0), (0, 16)):
            values = 10.0 ** rng.uniform(*exponents, capacity)
            values[rng.random(capacity) < 0.7] = 0.0
            values[rng.integers(capacity)] = 10.0 ** exponents[1]
            set_all(sampler, values)
            for _ in range(20):
                assert (values[sampler.sample()] > 0).all()
        set_all(sampler, np.zeros(capacity))
        with pytest.raises(rc.EmptyError, match="must have a mass above zero"):
            sampler.sample()


def chi_square(counts: Any, expected: Any) -> float:
    return float(((counts - expected) ** 2 / expected).sum())


def test_a_million_draws_follow_the_priorities() -> None:
    n, batch = 1000, 1000
    buffer = rc.ReplayBuffer.create("memory", ((), "int64"), capacity=n)
    buffer.extend(np.arange(n))
    sampler = rc.PrioritizedSampler(buffer, batch, alpha=0.6, seed=11)
    priorities = np.random.default_rng(1).pareto(1.5, n)
    set_all(sampler, priorities)
    counts = sum(np.bincount(sampler.sample(), minlength=n) for _ in range(1000))
    mass = (priorities + 1e-6) ** 0.6
    # Stratified draws vary less than independent ones: well under the n - 1 of the latter, and never biased.
    assert chi_square(counts, 1e6 * mass / mass.sum()) < n
    # One draw a batch is an independent draw: there chi-square is as it should be.
    one = rc.PrioritizedSampler(buffer, 1, alpha=0.6, seed=12)
    one.load_state_dict({**sampler.state_dict(), "batch_size": 1, "stream": one._stream.state_dict()})
    counts = np.bincount([int(one.sample()[0]) for _ in range(50_000)], minlength=n)
    assert 800 < chi_square(counts, 5e4 * mass / mass.sum()) < 1200


def test_a_million_uniform_draws_are_uniform() -> None:
    buffer = rc.ReplayBuffer.create("memory", ((), "int64"), capacity=1000)
    buffer.extend(np.arange(1000))
    sampler = rc.StepSampler(buffer, 1000, seed=11)
    counts = sum(np.bincount(sampler.sample(), minlength=1000) for _ in range(1000))
    assert 820 < chi_square(counts, 1000.0) < 1190  # 999 degrees of freedom, four deviations each way


class TestSources:
    def test_views_of_rows_are_kept_up_natively(self, tmp_path: Path) -> None:
        source = source_of("memory", tmp_path)
        views = [
            rc.FrameStackedBatch(source, prefetch_horizon=2),
            rc.ToBackendOrDeviceBatch(source, "numpy"),
            rc.TransformedBatch(source, lambda b: {"x": b["x"] * 2}),
            rc.SubItemBatch(source, "x"),
            source.get_slice(...),
            rc.SubItemBatch(rc.TransformedBatch(source.get_slice(...), lambda b: {"x": b["x"] * 2}), "x"),
        ]
        for view in views:
            assert isinstance(rc.PrioritizedSampler(view, 4)._ledger, RowLedger)
        for other in (source.get_slice([1, 2, 3]), ListBatch(((), "int64"), [1])):
            assert isinstance(rc.PrioritizedSampler(other, 4)._ledger, AnyLedger)

    @pytest.mark.parametrize("kind", BUFFERS)
    def test_the_same_samples_are_drawn_through_every_view(self, kind: str, tmp_path: Path) -> None:
        source = source_of(kind, tmp_path)

        def draw(data: Any) -> Any:
            sampler = rc.PrioritizedSampler(data, 6, seed=3)
            set_all(sampler, np.arange(10.0))
            got, meta = sampler.sample_with_metadata()
            assert meta is not None
            return got, sampler.sample(), meta

        (first, second, meta) = draw(source)
        stacked, _, stack_meta = draw(rc.FrameStackedBatch(source, prefetch_horizon=1))
        assert np.array_equal(stacked["x"][:, 1], first["x"])
        assert set(stack_meta) == {*meta, "slice_valid_mask"}
        doubled = draw(rc.TransformedBatch(source, lambda b: {"x": b["x"] * 2}))
        assert np.array_equal(doubled[0]["x"], 2 * first["x"])
        assert np.array_equal(doubled[1]["x"], 2 * second["x"])
        column = draw(source.get_column("x"))
        assert np.array_equal(column[0], first["x"])
        whole = draw(source.get_slice(...))
        assert np.array_equal(whole[0]["y"], first["y"])
        for other in (stack_meta, doubled[2], column[2], whole[2]):
            assert all(np.array_equal(meta[k], other[k]) for k in meta)

    def test_a_part_of_a_ring(self, tmp_path: Path) -> None:
        source = source_of("memory", tmp_path, 16)
        sampler = rc.PrioritizedSampler(source.get_slice([3, 5, 3]), 6, alpha=1, eps=0, seed=0)
        assert sorted(sampler.sample()["x"].tolist()) == [3, 3, 3, 3, 5, 5]
        set_all(sampler, [1, 4, 1])
        assert sorted(sampler.sample()["x"].tolist()) == [3, 3, 5, 5, 5, 5]
        source.extend(block([16]))  # the positions now show others: 4, 6 and 4
        assert sorted(sampler.sample()["x"].tolist()) == [4, 4, 4, 4, 6, 6]

    def test_torch_gives_tensors_to_learn_with(self, tmp_path: Path) -> None:
        torch = pytest.importorskip("torch")
        source = source_of("memory", tmp_path)
        views = rc.ToBackendOrDeviceBatch(source, "torch")
        for sampler in (
            rc.PrioritizedSampler(views, 6, seed=3),
            rc.PrioritizedSampler(views, 6, 0.6, seed=3, device="cpu"),
        ):
            data, meta = sampler.sample_with_metadata()
            assert meta is not None
            assert data["y"].dtype == meta["weight"].dtype == meta["probability"].dtype == torch.float32
            assert isinstance(meta["row"], np.ndarray)
            loss = (data["y"].sum(1) * meta["weight"]).abs()
            assert sampler.update_priorities(meta, loss) == 6
            assert sampler.update_priorities({k: torch.as_tensor(v) for k, v in meta.items()}, loss) == 6

    def test_device_moves_the_result(self, tmp_path: Path) -> None:
        pytest.importorskip("torch")
        source = rc.ToBackendOrDeviceBatch(source_of("memory", tmp_path), "torch")
        sampler = rc.PrioritizedSampler(source, 6, seed=3, device="meta")
        data, meta = sampler.sample_with_metadata()
        assert meta is not None
        assert data["y"].device.type == meta["weight"].device.type == "meta"
        assert sampler.sample()["y"].device.type == "meta"
        assert isinstance(meta["row"], np.ndarray) and isinstance(meta["generation"], np.ndarray)

    def test_jax_never_narrows(self, tmp_path: Path) -> None:
        jax = pytest.importorskip("jax")
        space = {"y": ((2,), "float32")}
        buffer = rc.ReplayBuffer.create("memory", space, capacity=4)
        buffer.extend({"y": np.ones((4, 2), np.float32)})
        sampler = rc.PrioritizedSampler(rc.ToBackendOrDeviceBatch(buffer, "jax"), 6, seed=3)
        data, meta = sampler.sample_with_metadata()
        assert meta is not None
        assert isinstance(meta["weight"], jax.Array)
        assert meta["row"].dtype == np.int64
        assert sampler.update_priorities(meta, data["y"].sum(1)) == 6

    def test_text_and_sequences(self) -> None:
        from gymnasium import spaces

        space = spaces.Dict({"t": spaces.Text(8), "s": spaces.Sequence(spaces.Discrete(9))})
        buffer = rc.ReplayBuffer.create("memory", space, capacity=4, max_lengths={"s": 3})
        buffer.append({"t": "ab", "s": (1, 2)})
        assert rc.PrioritizedSampler(buffer, 2, seed=0).sample()["t"] == ("ab", "ab")

    def test_lanes_and_unbounded(self, tmp_path: Path) -> None:
        lanes = create("memory", directory=tmp_path, capacity=12, num_lanes=3)
        sampler = rc.PrioritizedSampler(lanes, 12, alpha=0, seed=0)
        with lanes.on_lane(1) as one, lanes.on_lane(2) as two:
            one.extend(block([10, 11, 12]))
            assert sorted(set(sampler.sample()["x"].tolist())) == [10, 11, 12]
            two.extend(block([20]))
            one.extend(block([13, 14]))
            assert sorted(set(sampler.sample()["x"].tolist())) == [11, 12, 13, 14, 20]
        endless = create("memory", directory=tmp_path, capacity=None)
        sampler = rc.PrioritizedSampler(endless, 64, alpha=1, eps=0, seed=0)
        endless.extend(block([0]))
        assert sampler.sample()["x"].max() == 0
        set_all(sampler, [2.0])
        endless.extend(block(list(range(1, 3000))))
        assert sampler._ledger.total() == 6000.0
        assert sampler.sample()["x"].max() > 2900

    def test_evict_lowest(self, tmp_path: Path) -> None:
        buffer = create("memory", directory=tmp_path, capacity=4, evict="lowest", evict_key="x")
        sampler = rc.PrioritizedSampler(buffer, 8, alpha=1, eps=0, seed=0)
        buffer.extend(block([5, 6, 7, 8]))
        set_all(sampler, [1.0, 0.0, 0.0, 0.0])
        assert set(sampler.sample()["x"].tolist()) == {5}
        buffer.append(make.sample(9))  # in the place of 5, and new
        assert set(sampler.sample()["x"].tolist()) == {9}
        buffer.append(make.sample(1))  # rejected
        assert set(sampler.sample()["x"].tolist()) == {9}

    def test_not_over_a_combined_batch(self, tmp_path: Path) -> None:
        a, b = source_of("memory", tmp_path), source_of("memory", tmp_path)
        both = rc.CombinedBatch([a, b])
        for data in (both, rc.FrameStackedBatch(both, 1), both.get_slice([0])):
            with pytest.raises(TypeError, match="got a CombinedBatch; make a sampler for each"):
                rc.PrioritizedSampler(data, 4)

    def test_wrong_arguments(self, tmp_path: Path) -> None:
        source = source_of("memory", tmp_path)
        for name in ("alpha", "beta", "eps"):
            for bad in (-0.1, float("nan"), float("inf")):
                with pytest.raises(ValueError, match=f"{name}: must be a finite number of at least 0"):
                    rc.PrioritizedSampler(source, 4, **{name: bad})
            with pytest.raises(TypeError, match=f"{name}: must be a finite number"):
                rc.PrioritizedSampler(source, 4, **{name: "1"})
        named = ListBatch(((), "int64"), [1], metadata=[{"row": 1}])
        with pytest.raises(ValueError, match=r"metadata must not be named \['row'\]"):
            rc.PrioritizedSampler(named, 4)

    def test_closed_with_its_buffer(self, tmp_path: Path) -> None:
        source = source_of("memory", tmp_path)
        sampler = rc.PrioritizedSampler(source, 4)
        sampler.sample()
        source.close()
        with pytest.raises(rc.ClosedError):
            sampler.sample()

    def test_one_thread_at_a_time(self, tmp_path: Path) -> None:
        sampler = rc.PrioritizedSampler(source_of("memory", tmp_path), 4)
        meta = all_of(sampler)
        entered, asked = threading.Event(), threading.Event()

        def hold() -> None:
            with sampler._turn:
                entered.set()
                asked.wait()

        thread = threading.Thread(target=hold)
        thread.start()
        entered.wait()
        try:
            with pytest.raises(RuntimeError, match="one thread at a time"):
                sampler.update_priorities(meta, np.ones(10))
            with pytest.raises(RuntimeError, match="one thread at a time"):
                sampler.sample()
        finally:
            asked.set()
            thread.join()


@pytest.mark.parametrize("kind", KINDS)
class TestState:
    def test_goes_on_bit_for_bit(self, kind: str, tmp_path: Path) -> None:
        source = source_of(kind, tmp_path, 10)
        a = rc.PrioritizedSampler(source, 7, seed=4)
        rng = np.random.default_rng(0)
        for _ in range(30):
            _, meta = a.sample_with_metadata()
            a.update_priorities(meta or {}, rng.random(7) * 10.0 ** rng.integers(-8, 8))
        epoch = a.epoch_iter()
        next(epoch)
        state = a.state_dict()
        json.dumps(state, default=lambda array: array.tolist())  # plain numbers, strings, arrays
        b = rc.PrioritizedSampler(source, 7, beta=0.9, seed=99)
        b.load_state_dict(pickle.loads(pickle.dumps(state)))
        assert b.beta == a.beta
        assert a._ledger.total().hex() == b._ledger.total().hex()
        assert np.array_equal(next(epoch)["x"], next(b.epoch_iter())["x"])
        for _ in range(20):
            (x, m), (y, w) = a.sample_with_metadata(), b.sample_with_metadata()
            assert np.array_equal(x["x"], y["x"])
            assert m is not None
            assert w is not None
            assert all(np.array_equal(m[k], w[k]) for k in m)
            values = rng.random(7)
            assert a.update_priorities(m, values) == b.update_priorities(w, values)
        assert a.stats() == b.stats()

    def test_another_configuration_is_refused(self, kind: str, tmp_path: Path) -> None:
        source = source_of(kind, tmp_path)
        state = rc.PrioritizedSampler(source, 7, seed=4).state_dict()
        for other in ({"alpha": 0.5}, {"eps": 0.5}, {"batch_size": 8}):
            sampler = rc.PrioritizedSampler(source, **{"batch_size": 7, **other})  # type: ignore[arg-type]
            with pytest.raises(ValueError, match=f"{next(iter(other))} must be"):
                sampler.load_state_dict(state)
        sampler = rc.PrioritizedSampler(source, 7, seed=4)
        set_all(sampler, np.arange(10.0))
        before = all_of(sampler)["probability"].tolist()
        for key, bad in (("mass", -state["priorities"]["mass"]), ("row", np.arange(3)), ("top", np.nan)):
            with pytest.raises(ValueError, match="state: .*damaged"):
                sampler.load_state_dict({**state, "priorities": {**state["priorities"], key: bad}})
        assert all_of(sampler)["probability"].tolist() == before

    def test_samples_that_a_state_does_not_know_are_new(self, kind: str, tmp_path: Path) -> None:
        source = source_of(kind, tmp_path, 4)
        sampler = rc.PrioritizedSampler(source, 7, alpha=1, eps=0, seed=4)
        set_all(sampler, [1, 2, 3, 4])
        state = sampler.state_dict()
        source.append(make.sample(4))
        if kind != "plain":
            source[0] = make.sample(9)
        other = rc.PrioritizedSampler(source, 7, alpha=1, eps=0)
        other.load_state_dict(state)
        mass = np.array([1 if kind == "plain" else 4, 2, 3, 4, 4])
        np.testing.assert_allclose(all_of(other)["probability"], mass / mass.sum(), rtol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_a_loaded_state_stays_the_callers(kind: str, tmp_path: Path) -> None:
    sampler = rc.PrioritizedSampler(source_of(kind, tmp_path), 8, seed=3)
    set_all(sampler, np.arange(10.0))
    state = sampler.state_dict()
    before = pickle.dumps(state)
    sampler.load_state_dict(state)
    set_all(sampler, np.ones(10))
    sampler.sample()
    assert pickle.dumps(state) == before


@pytest.mark.parametrize("kind", [rc.StepSampler, rc.PrioritizedSampler])
def test_a_state_is_for_the_views_that_it_was_made_with(kind: Any) -> None:
    space = dict.fromkeys(("obs", "reward", "next_obs"), ((), "float32")) | {"terminated": ((), "bool")}
    buffer = rc.ReplayBuffer.create("memory", space, capacity=20, maintain_segment_metadata=True)
    buffer.extend({name: np.zeros(20, dtype) for name, (_, dtype) in space.items()})
    one = kind(rc.NStepBatch(buffer, n=3, gamma=0.9), 8, seed=0)
    state = one.state_dict()
    for other in (kind(buffer, 8, seed=1), kind(rc.FrameStackedBatch(buffer, 1), 8, seed=1)):
        before = other.state_dict()["stream"]
        with pytest.raises(
            ValueError, match=r"data must be seen through \['NStepBatch'\] to load this state, got"
        ):
            other.load_state_dict(state)
        assert other.state_dict()["stream"] == before
    same = rc.TransformedBatch(buffer, CastTransformation({"obs": "float64"}))
    kind(buffer, 8).load_state_dict(kind(same, 8).state_dict())  # the same samples, with other values
    old = {key: value for key, value in state.items() if key != "views"}
    kind(rc.NStepBatch(buffer, n=3, gamma=0.9), 8).load_state_dict(old)


def test_a_pickled_sampler_has_its_priorities() -> None:
    with rc.ReplayBuffer.create("shared", ((), "int64"), capacity=8, multiprocessing=True) as buffer:
        buffer.extend(np.arange(8))
        sampler = rc.PrioritizedSampler(buffer, 4, seed=0)
        set_all(sampler, np.arange(8.0))
        copy = pickle.loads(pickle.dumps(sampler))
        for _ in range(5):
            assert np.array_equal(copy.sample(), sampler.sample())
        copy.data.close()


def test_priorities_outlive_growth_and_a_change_in_place() -> None:
    buffer = rc.ReplayBuffer.create(rc.MemoryStorage, ((), "int64"), capacity=None)
    buffer.extend(np.arange(10))
    sampler = rc.PrioritizedSampler(buffer, 8, alpha=1.0, eps=0.0, seed=0)
    set_all(sampler, np.arange(10.0))
    buffer.extend(np.arange(100_000))  # more rows than there was room for
    sampler.sample()
    buffer[3] = 7  # then every row is compared with what is known of it
    expected = np.full(100_010, 9.0)
    expected[:10] = [0, 1, 2, 9, 4, 5, 6, 7, 8, 9]
    np.testing.assert_allclose(all_of(sampler)["probability"], expected / expected.sum(), rtol=1e-6)
