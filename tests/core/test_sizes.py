"""Sizes that are products: one that overflows is an error before memory is taken."""

from __future__ import annotations

import numpy as np
import pytest
from tests.core.make import codec_of, make_rows
from tests.process.killing import in_child

import recollect as rc
from recollect import _core


@pytest.mark.parametrize("n", [2**64 // 24 + 2001, 2**60, 2**62, 2**63 + 5, 2**64 - 1])
def test_a_batch_whose_size_overflows_is_a_memory_error(n: int) -> None:
    def ask() -> None:
        space = {"a": ((), "float64"), "b": ((), "float64"), "c": ((), "float64")}
        buffer = rc.ReplayBuffer.create("memory", space, capacity=100, maintain_segment_metadata=True)
        buffer.extend({k: np.zeros(50) for k in "abc"})
        for sampler in (
            rc.StepSampler(buffer, n),
            rc.PrioritizedSampler(buffer, n),
            rc.SequenceSampler(buffer, n, length=2),
        ):
            with pytest.raises((MemoryError, ValueError)):
                sampler.sample()
            with pytest.raises((MemoryError, ValueError, OverflowError)):
                sampler.sample_with_metadata()

    in_child(ask)


@pytest.mark.parametrize("n", [2**61 + 1, 2**63, 2**64 - 4096, 2**64 - 1])
def test_rows_trees_and_mappings_of_such_sizes_are_refused(n: int) -> None:
    def ask() -> None:
        rows, codec = make_rows(8, 16), codec_of(np.int64)
        rows.append(codec, np.int64(1))
        with pytest.raises(MemoryError):
            rows.draw(codec, _core.Stream(), n)
        for tree in (_core.SumTree, _core.MinTree):
            with pytest.raises(MemoryError):
                tree(n)
        with pytest.raises((MemoryError, OSError)):
            _core.Mapping(-1, 0, n, True)

    in_child(ask)
