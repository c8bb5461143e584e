"""SequenceSampler: uniform draws, epochs, resuming, spaces, refusals. Windows themselves: tests/boundaries."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from tests.replay.make import create

import recollect as rc

X = {"x": ((), "int64")}


def buffer(lengths: list[int], kind: str = "memory", **kwargs: Any) -> rc.ReplayBuffer:
    kwargs = {"capacity": sum(lengths), "directory": ".", "maintain_segment_metadata": True} | kwargs
    made = create(kind, X, **kwargs)
    ends = np.zeros(sum(lengths), np.bool_)
    ends[np.cumsum(lengths) - 1] = True
    made.extend({"x": np.arange(1, len(ends) + 1)}, ends=ends)
    return made


def chi_square(counts: Any) -> float:
    counts = np.asarray(counts, float)
    return float(((counts - counts.mean()) ** 2 / counts.mean()).sum())


class TestDraws:
    @pytest.mark.parametrize("pad", [False, True])
    @pytest.mark.parametrize(
        ("lengths", "length"),
        [([40, 10, 7, 3, 20], 5), ([1] * 400 + [9] + [2] * 300, 9)],  # the second: one start in a thousand
        ids=["common", "rare"],
    )
    def test_every_window_is_as_likely(self, lengths: list[int], length: int, pad: bool) -> None:
        data = buffer(lengths)
        sampler = rc.SequenceSampler(data, 256, length, pad=pad, seed=3)
        short = sum(n < length for n in lengths)
        windows = sum(max(n - length + 1, 0) for n in lengths) + short * pad
        drawn = np.concatenate(
            [sampler.sample_with_metadata()[0]["x"][:, 0] for _ in range(40 if pad else 20)]
        )
        values, counts = np.unique(drawn, return_counts=True)
        assert len(values) == windows
        # Chi-square has mean k and deviation sqrt(2 k); a wrong sampler is dozens of deviations off.
        k = windows - 1
        assert chi_square(counts) < k + 6 * np.sqrt(2 * k) + 1

    @pytest.mark.parametrize(("lengths", "length"), [([6, 2, 9, 1], 3), ([1] * 300 + [6], 4)])
    @pytest.mark.parametrize("pad", [False, True])
    def test_a_storage_of_ones_own_draws_the_same(self, lengths: list[int], length: int, pad: bool) -> None:
        a, b = (
            rc.SequenceSampler(buffer(lengths, kind), 8, length, 1, pad, seed=5)
            for kind in ("memory", "test-list")
        )
        for _ in range(4):
            np.testing.assert_array_equal(a.sample()["x"], b.sample()["x"])
        np.testing.assert_array_equal(a.sample_index(), b.sample_index())

    def test_equal_seeds_draw_alike_and_others_do_not(self) -> None:
        data = buffer([50, 50])
        one, two, other = (rc.SequenceSampler(data, 16, 5, seed=s) for s in (1, 1, 2))
        first = one.sample()["x"]
        np.testing.assert_array_equal(first, two.sample()["x"])
        assert not np.array_equal(first, other.sample()["x"])
        one.manual_seed(1)
        np.testing.assert_array_equal(first, one.sample_flat()[..., 0])

    def test_sample_index_draws_where_windows_begin(self) -> None:
        data = buffer([10, 10])
        index = rc.SequenceSampler(data, 64, 10, seed=0).sample_index()
        assert set(index.tolist()) == {0, 10}

    def test_out_is_filled(self) -> None:
        sampler = rc.SequenceSampler(buffer([20]), 4, 3, 2, seed=0)
        out = {"x": np.empty((4, 5), np.int64)}
        assert sampler.sample(out=out) is out
        again = rc.SequenceSampler(sampler.data, 4, 3, 2, seed=0)
        np.testing.assert_array_equal(out["x"], again.sample()["x"])
        with pytest.raises(rc.SchemaError, match="out must be"):
            sampler.sample(out={"x": np.empty((4, 4), np.int64)})

    def test_no_window_is_an_empty_error(self) -> None:
        data = buffer([3, 3])
        with pytest.raises(rc.EmptyError, match="4 samples in a row"):
            rc.SequenceSampler(data, 2, 4).sample()
        assert rc.SequenceSampler(data, 2, 4, pad=True).sample()["x"].shape == (2, 4)
        data.clear()
        with pytest.raises(rc.EmptyError):
            rc.SequenceSampler(data, 2, 1).sample()
        with pytest.raises(rc.EmptyError):
            rc.SequenceSampler(data, 2, 1, pad=True).sample_index()

    def test_an_open_segment_counts_as_far_as_it_is_committed(self) -> None:
        data = create("memory", X, directory=".", capacity=8, maintain_segment_metadata=True)
        sampler = rc.SequenceSampler(data, 8, 2, seed=0)
        data.append({"x": 1})
        with pytest.raises(rc.EmptyError):
            sampler.sample()
        data.append({"x": 2})
        assert np.unique(sampler.sample()["x"], axis=0).tolist() == [[1, 2]]

    def test_metadata_names_segment_step_and_mask(self) -> None:
        data = buffer([3, 4])
        sampler = rc.SequenceSampler(data, 32, 2, burn_in=2, seed=0)
        batch, meta = sampler.sample_with_metadata()
        assert meta is not None and list(meta) == ["segment", "step", "valid_mask"]
        index = np.array([np.flatnonzero(data[:]["x"] == x)[0] for x in batch["x"][:, 2]])
        place = data.locate(index)
        np.testing.assert_array_equal(meta["segment"], place.segment)
        np.testing.assert_array_equal(meta["step"], place.step)
        np.testing.assert_array_equal(meta["valid_mask"], batch["x"] != 0)
        assert sampler.sampled_space.contains(batch)
        assert sampler.sampled_metadata_space is not None
        assert sampler.sampled_metadata_space.contains(meta)


class TestEpochs:
    def test_each_window_once_and_the_last_batch_short(self) -> None:
        sampler = rc.SequenceSampler(buffer([4, 5]), 4, 3, seed=0)
        sizes = [len(b["x"]) for b in sampler.epoch_iter()]
        assert sizes == [4, 1]
        assert [len(b["x"]) for b in sampler.epoch_iter(drop_last=True)] == [4]

    def test_windows_overwritten_or_cut_before_their_turn_are_skipped(self) -> None:
        data = buffer([10], capacity=10)
        sampler = rc.SequenceSampler(data, 1, 3, seed=0)
        epoch = sampler.epoch_iter()
        seen = [int(next(epoch)["x"][0, 0])]
        data.remove_at(
            [7]
        )  # the eight windows lose the three with sample 8; the first rows stay where they are
        seen += [int(batch["x"][0, 0]) for batch in epoch]
        assert len(seen) + sampler.skipped == 8
        assert len(set(seen)) == len(seen)
        assert not {6, 7, 8} & set(seen[1:])
        assert {1, 2, 3, 4, 5} <= set(seen)

    def test_an_empty_source_is_an_empty_epoch(self) -> None:
        assert list(rc.SequenceSampler(buffer([2, 2]), 4, 3).epoch_iter()) == []


class TestResuming:
    @pytest.mark.parametrize("in_epoch", [False, True])
    @pytest.mark.parametrize("lengths", [[30, 40], [1] * 300 + [6]], ids=["common", "rare"])
    def test_bit_for_bit_from_a_dump(self, lengths: list[int], in_epoch: bool, tmp_path: Path) -> None:
        data = buffer(lengths)
        sampler = rc.SequenceSampler(data, 4, 3, 1, seed=9)
        sampler.sample()
        epoch = sampler.epoch_iter_with_metadata() if in_epoch else iter(())
        next(epoch, None)
        data.dumps(tmp_path / "dump")
        state = sampler.state_dict()
        wanted = [*epoch, *(sampler.sample_with_metadata() for _ in range(3))]
        resumed = rc.SequenceSampler(rc.ReplayBuffer.load_from(tmp_path / "dump"), 4, 3, 1)
        resumed.load_state_dict(state)
        found = [*(resumed.epoch_iter_with_metadata() if in_epoch else ())]
        found += [resumed.sample_with_metadata() for _ in range(3)]
        assert len(found) == len(wanted)
        for (a, ma), (b, mb) in zip(found, wanted):
            np.testing.assert_array_equal(a["x"], b["x"])
            np.testing.assert_array_equal(ma["valid_mask"], mb["valid_mask"])
            np.testing.assert_array_equal(ma["segment"], mb["segment"])

    @pytest.mark.parametrize("other", [{"length": 4}, {"burn_in": 2}, {"pad": True}, {"batch_size": 5}])
    def test_another_configuration_is_refused(self, other: dict[str, Any]) -> None:
        data = buffer([9])
        state = rc.SequenceSampler(data, 4, 3).state_dict()
        with pytest.raises(ValueError, match=next(iter(other))):
            rc.SequenceSampler(data, **({"batch_size": 4, "length": 3} | other)).load_state_dict(state)


class TestSpacesAndBackends:
    SPACE = spaces.Dict(
        {
            "img": spaces.Box(0, 255, (2, 2), np.uint8),
            "pair": spaces.Tuple((spaces.Discrete(9), spaces.Text(5, charset="abc"))),
            "words": spaces.Sequence(spaces.Box(-1, 1, (2,), np.float32), stack=True),
        }
    )

    def test_any_nested_space(self) -> None:
        data = rc.ReplayBuffer.create(
            rc.MemoryStorage, self.SPACE, capacity=9, maintain_segment_metadata=True, max_lengths={"words": 3}
        )
        for i in range(1, 6):
            words = np.full((i % 3, 2), 0.5, np.float32)
            data.append({"img": np.full((2, 2), i, np.uint8), "pair": (i, "a" * i), "words": words})
        sampler = rc.SequenceSampler(data, 3, 5, burn_in=1, seed=0)
        batch = sampler.sample()
        assert batch["img"].shape == (3, 6, 2, 2)
        assert batch["img"][0, :, 0, 0].tolist() == [0, 1, 2, 3, 4, 5]
        assert batch["pair"][0][0].tolist() == [0, 1, 2, 3, 4, 5]
        # Text and Sequence leaves have no array: T tuples of B, as gymnasium batches a tuple of T.
        assert [frame[0] for frame in batch["pair"][1]] == ["", "a", "aa", "aaa", "aaaa", "aaaaa"]
        assert [len(frame[0]) for frame in batch["words"]] == [0, 1, 2, 0, 1, 2]

    def test_flat(self) -> None:
        data = rc.ReplayBuffer.create(
            rc.MemoryStorage,
            {"a": ((2,), "float32"), "b": ((), "float32")},
            capacity=9,
            maintain_segment_metadata=True,
        )
        data.extend({"a": np.ones((4, 2), "f4"), "b": np.full(4, 2, "f4")})
        flat, meta = rc.SequenceSampler(data, 2, 4, burn_in=1, seed=0).sample_flat_with_metadata()
        assert flat.shape == (2, 5, 3)
        assert flat[0].tolist() == [[0, 0, 0]] + [[1, 1, 2]] * 4
        assert meta is not None and meta["valid_mask"][0].tolist() == [False] + [True] * 4

    @pytest.mark.parametrize("backend", ["torch", "jax"])
    def test_zeros_stay_zeros_on_other_backends_and_through_transformations(self, backend: str) -> None:
        pytest.importorskip(backend)
        data = rc.ReplayBuffer.create(
            rc.MemoryStorage, {"x": ((), "float32")}, capacity=9, maintain_segment_metadata=True
        )
        data.extend({"x": np.arange(1, 4, dtype="f4")})
        plus = rc.TransformedBatch(data, lambda batch: {"x": batch["x"] + np.float32(10)})
        view = rc.ToBackendOrDeviceBatch(plus, backend)
        batch, meta = rc.SequenceSampler(view, 2, 4, burn_in=1, pad=True, seed=0).sample_with_metadata()
        assert meta is not None
        assert view.backend.is_array(batch["x"]) and view.backend.is_array(meta["valid_mask"])
        assert meta["segment"].tolist() == data.locate([0, 0]).segment.tolist()
        assert np.asarray(batch["x"])[0].tolist() == [0, 11, 12, 13, 0]

    def test_a_column(self) -> None:
        column = buffer([9]).get_column("x")
        assert rc.SequenceSampler(column, 4, 9, seed=0).sample().tolist() == [list(range(1, 10))] * 4

    def test_over_a_stack(self) -> None:
        stack = rc.FrameStackedBatch(buffer([4, 4]).get_column("x"), 1)
        found = rc.SequenceSampler(stack, 16, 4, seed=0).sample()
        assert found.shape == (16, 4, 2)
        assert {tuple(w) for w in found[:, :, 1].tolist()} == {(1, 2, 3, 4), (5, 6, 7, 8)}
        assert found[found[:, 0, 1] == 5][0].tolist() == [[5, 5], [5, 6], [6, 7], [7, 8]]

    def test_device(self) -> None:
        pytest.importorskip("torch")
        view = rc.ToBackendOrDeviceBatch(buffer([9]), "torch")
        batch = rc.SequenceSampler(view, 2, 3, seed=0, device="meta").sample()
        assert batch["x"].device.type == "meta"


class TestRefusals:
    def test_an_untracked_source_is_refused_by_all_who_need_segments(self) -> None:
        data = rc.ReplayBuffer.create(rc.MemoryStorage, {"x": ((), "int64")}, capacity=4)
        for make in (
            lambda: rc.SequenceSampler(data, 2, 2),
            lambda: rc.SequenceSampler(data.get_column("x"), 2, 2),
            lambda: rc.NStepBatch(data, 2, 0.9),
            lambda: rc.HindsightSampler(data, 2, lambda a, d, i: a),
        ):
            with pytest.raises(ValueError, match="maintain_segment_metadata=True"):
                make()

    @pytest.mark.parametrize(
        ("wrong", "error"),
        [({"length": 0}, ValueError), ({"length": 2.0}, TypeError), ({"length": True}, TypeError),
         ({"burn_in": -1}, ValueError), ({"batch_size": 0}, ValueError)],
    )  # fmt: skip
    def test_wrong_arguments(self, wrong: dict[str, Any], error: type[Exception]) -> None:
        with pytest.raises(error, match=next(iter(wrong))):
            rc.SequenceSampler(buffer([4]), **({"batch_size": 2, "length": 2} | wrong))

    def test_a_closed_buffer_says_so(self) -> None:
        data = buffer([4])
        sampler = rc.SequenceSampler(data, 2, 2)
        data.close()
        with pytest.raises(rc.ClosedError):
            sampler.sample()


def test_windows_that_few_starts_have_are_as_likely_as_each_other() -> None:
    """So rare that hardly a draw finds one by trying: it is chosen among all of them, not the first of them."""
    buffer = rc.ReplayBuffer.create(
        rc.MemoryStorage, ((), "int64"), capacity=6015, maintain_segment_metadata=True
    )
    for _ in range(3):
        buffer.extend(np.zeros(2000, np.int64), ends=np.ones(2000, np.bool_))
        buffer.extend(np.ones(5, np.int64))
    found = rc.SequenceSampler(buffer, 600, 5, seed=0)
    starts, counts = np.unique(found.sample_index(), return_counts=True)
    assert starts.tolist() == [2000, 4005, 6010]
    _, meta = found.sample_with_metadata()
    assert meta is not None
    for n in (counts, np.unique(meta["segment"], return_counts=True)[1]):
        assert len(n) == 3 and ((n - 200) ** 2 / 200).sum() < 20
