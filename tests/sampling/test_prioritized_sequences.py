"""PrioritizedSampler over SequenceSampler: a priority for every sequence, whatever happens to the buffer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.replay.make import SPACE, block, create, sample

import recollect as rc
from recollect.testing.batches import ListBatch

ALPHA, EPS = 0.7, 0.01
Key = tuple[int, int]


def tracked(lengths: list[int], capacity: int = 64) -> rc.ReplayBuffer:
    """Episodes of some lengths, whose samples count from 1."""
    buffer = rc.ReplayBuffer.create("memory", SPACE, capacity=capacity, maintain_segment_metadata=True)
    first = 1
    for n in lengths:
        buffer.extend(block(list(range(first, first + n))))
        first += n
    return buffer


def over(
    data: rc.BatchBase, n: int = 8, length: int = 3, seed: int = 0, **kwargs: Any
) -> rc.PrioritizedSampler:
    sequences = rc.SequenceSampler(data, 1, length, **kwargs)
    return rc.PrioritizedSampler(sequences, n, alpha=ALPHA, eps=EPS, seed=seed)


def everything(sampler: rc.BatchSampler) -> tuple[Any, dict[str, Any]]:
    """All sequences and their metadata, by their first samples."""
    found = list(sampler.epoch_iter_with_metadata())
    if not found:
        return np.zeros((0, 0)), {}
    x = np.concatenate([np.asarray(batch["x"]) for batch, _ in found])
    meta = {key: np.concatenate([np.asarray(m[key]) for _, m in found]) for key in found[0][1] or {}}
    order = np.lexsort((meta["step"], meta["segment"]))
    return x[order], {key: value[order] for key, value in meta.items()}


class Changes:
    """What may happen to a buffer, at random."""

    def __init__(self, buffer: rc.ReplayBuffer, lanes: int, seed: int) -> None:
        self.buffer, self.rng, self.next = buffer, np.random.default_rng(seed), 1
        self.writers: list[Any] = [buffer.on_lane(k) for k in range(lanes)] if lanes > 1 else [buffer]

    def numbers(self, n: int) -> list[int]:
        self.next += n
        return list(range(self.next - n, self.next))

    def happen(self) -> None:
        writer = self.writers[self.rng.integers(len(self.writers))]
        kind = self.rng.choice(
            ["append"] * 8 + ["end"] * 3 + ["extend"] * 4 + ["set", "remove", "remove", "clear"]
        )
        held = len(self.buffer)
        if kind == "append":
            for number in self.numbers(int(self.rng.integers(1, 4))):
                writer.append(sample(number))
        elif kind == "end":
            writer.mark_segment_end()
        elif kind == "extend":
            writer.mark_segment_end()
            writer.extend(block(self.numbers(int(self.rng.integers(1, 12)))))
        elif kind == "set" and held:
            self.buffer[self.rng.choice(held, 1)] = block(self.numbers(1))
        elif kind == "remove" and held:
            for each in self.writers:
                each.mark_segment_end()
            self.buffer.remove_at(self.rng.choice(held, min(held, 2), replace=False))
        elif kind == "clear" and self.rng.random() < 0.2:
            self.buffer.clear()


@pytest.mark.parametrize("pad", [False, True])
@pytest.mark.parametrize(("kind", "lanes", "capacity"), [
    ("memory", 1, 17), ("memory", 3, 30), ("memory", 1, None), ("test-list", 1, 17)])  # fmt: skip
def test_priorities_are_of_the_sequences_there_are(
    kind: str, lanes: int, capacity: int | None, pad: bool, tmp_path: Path
) -> None:
    """Beside a dict of priorities: all the mass is on sequences, and each has its own, or when new the largest."""
    more = {"num_lanes": lanes} if lanes > 1 else {}
    buffer = create(kind, directory=tmp_path, capacity=capacity, maintain_segment_metadata=True, **more)
    changes = Changes(buffer, lanes, seed=lanes + pad)
    plain, sampler = rc.SequenceSampler(buffer, 5, 3, pad=pad), over(buffer, 6, 3, pad=pad)
    known: dict[Key, float] = {}
    for _ in range(150):
        changes.happen()
        expected, _ = everything(plain)
        x, meta = everything(sampler)
        np.testing.assert_array_equal(x, expected)
        if not len(x):
            known = {}
            with pytest.raises(rc.EmptyError, match=r"must hold (3 samples in a row|samples of a segment)"):
                sampler.sample()
            continue
        keys = list(zip(meta["row"].tolist(), meta["generation"].tolist(), strict=True))
        known = {key: known.get(key, sampler.stats().top) for key in keys}
        masses = (np.array(list(known.values())) + EPS) ** ALPHA
        np.testing.assert_allclose(meta["probability"], masses / masses.sum(), rtol=1e-5)
        drawn, found = sampler.sample_with_metadata()
        assert {tuple(row) for row in drawn["x"].tolist()} <= {tuple(row) for row in expected.tolist()}
        values = changes.rng.uniform(0, 3, len(drawn["x"]))
        assert found is not None and sampler.update_priorities(found, values) == len(values)
        places = zip(found["row"].tolist(), found["generation"].tolist(), strict=True)
        known |= dict(zip(places, values.tolist(), strict=True))


def test_the_sequence_with_the_priority_is_drawn_and_late_values_are_dropped() -> None:
    buffer = tracked([6, 2, 5], capacity=16)
    sampler = over(buffer, 7, burn_in=1)
    batch, meta = everything(sampler)
    assert batch[:, 1].tolist() == [1, 2, 3, 4, 9, 10, 11] and meta["valid_mask"].shape == (7, 4)
    sampler = rc.PrioritizedSampler(rc.SequenceSampler(buffer, 1, 3, burn_in=1), 7, eps=0.0, seed=0)
    assert sampler.update_priorities(meta, batch[:, 1] == 10) == 7
    drawn, labels = sampler.sample_with_metadata()
    assert (drawn["x"] == [9, 10, 11, 12]).all() and (labels["weight"] == 1).all()
    assert (np.asarray(sampler.sample_index()) == 9).all()
    buffer.extend(block(list(range(20, 26))))  # the first three samples are gone
    assert sampler.update_priorities(meta, np.ones(7)) == 4
    assert sampler.stats().late == 3


def test_a_place_at_which_no_sequence_begins_is_shown_without_weight() -> None:
    sampler = over(tracked([4]))
    batch, meta = sampler.get_at_with_metadata([0, 3])
    assert batch["x"].tolist() == [[1, 2, 3], [4, 0, 0]]
    assert meta["probability"].tolist() == [0.5, 0.0] and meta["weight"].tolist() == [1.0, 0.0]
    assert sampler.update_priorities(meta, [2.0, 2.0]) == 1


def returned(batch: Any) -> Any:
    return batch


SOURCES: dict[str, Callable[[rc.ReplayBuffer], rc.BatchBase]] = {
    "a buffer": lambda b: rc.SequenceSampler(b, 1, 3),
    "a live slice": lambda b: rc.SequenceSampler(b.get_slice(...), 1, 3),
    "a frozen slice": lambda b: rc.SequenceSampler(b.get_slice(slice(1, None)), 1, 3),
    "a transformation outside": lambda b: rc.TransformedBatch(rc.SequenceSampler(b, 1, 3), returned),
    "a transformation inside": lambda b: rc.SequenceSampler(rc.TransformedBatch(b, returned), 1, 3),
    "no buffer": lambda b: rc.SequenceSampler(ListBatch(b.single_space, list(b), b.get_segments()), 1, 3),
}


@pytest.mark.parametrize("name", SOURCES)
def test_through_views_and_a_saved_state(name: str) -> None:
    data = SOURCES[name](tracked([5, 2, 4]))
    sampler = rc.PrioritizedSampler(data, 4, seed=1)
    first = [1, 2, 3, 8, 9][name == "a frozen slice" :]
    assert sorted(b for x in sampler.epoch_iter() for b in x["x"][:, 0].tolist()) == first
    _, meta = sampler.sample_with_metadata()
    sampler.update_priorities(meta, [0.1, 5.0, 0.1, 0.1])
    again = rc.PrioritizedSampler(data, 4)
    again.load_state_dict(sampler.state_dict())
    for _ in range(3):
        a, b = sampler.sample(), again.sample()
        np.testing.assert_array_equal(a["x"], b["x"])
        assert set(a["x"][:, 0].tolist()) <= set(first)
