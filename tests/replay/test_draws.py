"""`draw_at`: the indices of the stream, uniform, one native call."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
from tests.meanwhile import at_every_moment, at_moment
from tests.replay.make import KINDS, block, create, numbers, sample

from recollect.batch import FrameStackedBatch
from recollect.errors import EmptyError
from recollect.sampling import IndexStream, StepSampler


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n_held", [1, 5, 8, 21])
def test_draws_are_the_indices_of_the_stream(kind: str, n_held: int, tmp_path: Path) -> None:
    with create(kind, directory=tmp_path, capacity=8) as buffer:
        for v in range(n_held):
            buffer.extend(block([v]))
        drawn, twin = IndexStream(7), IndexStream(7)
        for n in (0, 1, 3, 100):
            index = twin.indices(len(buffer), n)
            expected = buffer[index]
            got = buffer.draw_at(drawn, n)
            assert got["x"].tolist() == expected["x"].tolist() and got["y"].tolist() == expected["y"].tolist()
            assert drawn.counter == twin.counter
        index = twin.indices(len(buffer), 9)
        assert buffer.draw_column_at(("y",), drawn, 9).tolist() == buffer[index]["y"].tolist()
        assert drawn.state_dict() == twin.state_dict()


@pytest.mark.parametrize("kind", ["memory", "shared", "memmap"])
def test_draws_cover_all_lanes(kind: str, tmp_path: Path) -> None:
    with create(kind, directory=tmp_path, capacity=9, num_lanes=3) as buffer:
        for k, n in enumerate((5, 0, 2)):
            with buffer.on_lane(k) as lane:
                lane.extend(block([10 * k + i for i in range(n)]))
        assert numbers(buffer) == [2, 3, 4, 20, 21]
        index = IndexStream(3).indices(5, 200)
        assert buffer.draw_at(IndexStream(3), 200)["x"].tolist() == buffer[index]["x"].tolist()
        assert set(buffer.draw_at(IndexStream(3), 200)["x"].tolist()) == {2, 3, 4, 20, 21}


@pytest.mark.parametrize("n_held", [3, 1_000])
def test_draws_are_uniform(n_held: int) -> None:
    with create("memory", directory="", capacity=1_000) as buffer:
        buffer.extend(block(list(range(n_held + 400))))  # round the end of the ring
        buffer.remove_at(range(len(buffer) - n_held))
        n = 200 * n_held
        counts = np.bincount(buffer.draw_at(IndexStream(12345), n)["x"] - 400, minlength=n_held)
        assert len(counts) == n_held
        chi_square = float(((counts - 200) ** 2 / 200).sum())
        freedom = n_held - 1
        # Within 4 sigma of its mean, both ways: too even is not random either.
        assert abs(chi_square - freedom) < 4 * np.sqrt(2 * freedom)
        pairs = buffer.draw_at(IndexStream(6), n)["x"] * n_held + buffer.draw_at(IndexStream(7), n)["x"]
        assert len(set(pairs.tolist())) > (8 if n_held == 3 else 150_000)


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_to_draw_from(kind: str, tmp_path: Path) -> None:
    with create(kind, directory=tmp_path) as buffer:
        stream = IndexStream(0)
        for n in (0, 4):
            with pytest.raises(EmptyError, match="append"):
                buffer.draw_at(stream, n)
            with pytest.raises(EmptyError):
                buffer.draw_column_at(("x",), stream, n)
        buffer.extend(block([1]))
        buffer.clear()
        with pytest.raises(EmptyError):
            buffer.draw_at(stream, 1)
        assert stream.counter == 0


def test_a_shared_buffer_draws_the_same_everywhere() -> None:
    with create("shared", directory="", capacity=50) as buffer, pickle.loads(pickle.dumps(buffer)) as twin:
        buffer.extend(block(list(range(70))))
        assert (
            buffer.draw_at(IndexStream(1), 64)["x"].tolist() == twin.draw_at(IndexStream(1), 64)["x"].tolist()
        )


def test_only_what_was_overwritten_meanwhile_is_drawn_again() -> None:
    """Twice, and by more in the later lanes: a sample that stays has another index after each time."""
    with create("memory", directory="", capacity=60, num_lanes=3) as buffer:
        lanes = [buffer.on_lane(k) for k in range(3)]
        for k, lane in enumerate(lanes):
            for i in range(20):
                lane.extend(block([1000 * k + i]))

        def overwrite() -> None:
            for k, lane in enumerate(lanes):
                for _ in range(2 + 3 * k):
                    lane.extend(block([9999]))

        drawn = buffer.draw_at(IndexStream(5), 200)["x"].tolist()
        with at_moment(
            2, overwrite, times=2
        ) as meanwhile:  # after the copy, and after the first drawing again
            again = buffer.draw_at(IndexStream(5), 200)["x"].tolist()
        left = set(numbers(buffer))
        assert meanwhile.happened and len(left) == 60 - 30 + 1
        assert set(again) <= left - {9999}
        pairs = [(a, b) for a, b in zip(drawn, again, strict=True) if a in left]
        assert 0 < len(pairs) < 200 and all(a == b for a, b in pairs)


def test_what_is_drawn_again_is_uniform_over_what_is_left() -> None:
    with create("memory", directory="", capacity=1_000) as buffer:
        buffer.extend(block(list(range(1_000))))
        drawn = buffer.draw_at(IndexStream(5), 4_000)["x"]
        with at_moment(0, lambda: buffer.extend(block([9999] * 500))) as meanwhile:  # after the copy
            again = buffer.draw_at(IndexStream(5), 4_000)["x"]
        assert meanwhile.happened
        gone = drawn < 500
        np.testing.assert_array_equal(again[~gone], drawn[~gone])
        counts, _ = np.histogram(again[gone], 5, (500, 1_000))
        assert counts.sum() == gone.sum() > 1_900
        assert abs(counts - gone.sum() / 5).max() < 90  # five standard deviations


def test_only_stacks_that_lost_a_frame_meanwhile_are_drawn_again() -> None:
    with create("memory", directory="", capacity=100) as buffer:
        buffer.extend(block(list(range(99))))
        buffer.append(sample(99))
        stacks = FrameStackedBatch(buffer, prefetch_horizon=3)
        with at_every_moment(lambda: None) as moments:
            drawn = StepSampler(stacks, 200, seed=5).sample()["x"]
        after_copy = len(moments) - 3  # then come two round the labels
        with at_moment(after_copy, lambda: buffer.extend(block([9999] * 40))) as meanwhile:
            again = StepSampler(stacks, 200, seed=5).sample()["x"]
        assert meanwhile.happened and again.min() >= 40 and again.max() < 100
        stay = drawn.min(axis=1) >= 40
        assert 0 < stay.sum() < 200
        np.testing.assert_array_equal(again[stay], drawn[stay])
