"""Priorities over native rows, without the sampler above them."""

from __future__ import annotations

from typing import Any

import numpy as np
from tests.core.make import codec_of, index_of, make_rows

from recollect import _core

CODEC = codec_of("int64")


def priorities_of(rows: _core.Rows) -> Any:
    """Each sample has as much mass as priority."""
    return _core.Priorities(rows.share(), 1.0, 0.0)


def test_samples_that_a_state_does_not_know_are_new_though_they_were_seen_before() -> None:
    rows = make_rows(8, 8)
    rows.extend(CODEC, np.arange(5))
    priorities = priorities_of(rows)
    assert priorities.total() == 5.0
    row, generation, *_ = rows.locate(index_of(0, 1))
    priorities.restore(row, generation, np.array([3.0, 4.0]), 2.0)
    assert priorities.total() == 3.0 + 4.0 + 3 * 2.0


def test_a_row_that_a_removal_left_behind_is_no_sample() -> None:
    """Its generation is still that of the sample that was there."""
    rows = make_rows(8, 8)
    rows.extend(CODEC, np.arange(3))
    priorities = priorities_of(rows)
    row, generation, *_ = rows.locate(index_of(0, 1, 2))
    rows.remove(index_of(2))
    assert priorities.update(row, generation, np.full(3, 5.0)) == 2
    assert priorities.total() == 10.0


def test_rows_that_are_not_there_are_dropped() -> None:
    rows = make_rows(8, 8, n_lanes=2)
    rows.extend(CODEC, np.arange(3))
    priorities = priorities_of(rows)
    gone = index_of(-1, 8, 100, 2**40, -(2**40))
    assert priorities.update(gone, np.zeros(5, np.int64), np.full(5, 9.0)) == 0
    assert priorities.total() == 3.0
