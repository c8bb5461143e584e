"""SubItemBatch: one nested field, and nothing else is read."""

from __future__ import annotations

import numpy as np
import pytest
from gymnasium import spaces
from tests.batch.make import SPACE, Counting, batch, sample

from recollect.batch import SubItemBatch
from recollect.errors import ReadOnlyError
from recollect.sampling import IndexStream, StepSampler
from recollect.testing.batches import ListBatch


def counting() -> Counting:
    return Counting(SPACE, [sample(i) for i in range(6)])


@pytest.mark.parametrize("keys", ["nope", ("obs", "nope"), ("id", "x"), ("obs", 0), (0,)])
def test_an_unknown_key_is_a_key_error_at_construction(keys: object) -> None:
    with pytest.raises(KeyError, match="keys here are"):
        SubItemBatch(batch(2), keys)  # type: ignore[arg-type]


def test_integer_keys_of_a_tuple() -> None:
    space = spaces.Tuple([spaces.Discrete(9), spaces.Dict({"x": spaces.Box(0, 9, (2,))})])
    rows = [(i, {"x": np.full(2, i, np.float32)}) for i in range(4)]
    pairs = ListBatch(space, rows)
    assert SubItemBatch(pairs, 0)[:].tolist() == [0, 1, 2, 3]
    assert SubItemBatch(pairs, (1, "x"))[2].tolist() == [2, 2]
    assert SubItemBatch(pairs, [1])[[3]]["x"].tolist() == [[3, 3]]


def test_only_the_field_is_read() -> None:
    source = counting()
    view = source.get_column("obs").get_column("pos")
    view[[0, 1]], view[2], view.get_flattened_at([3]), view.draw_at(IndexStream(0), 4)
    StepSampler(view, 3, seed=0).sample()
    assert source.columns == [("obs", "pos")] * 5


def test_metadata_comes_along() -> None:
    source = batch(3, metadata=[{"w": i} for i in range(3)])
    view = source.get_column(("obs", "pos"))
    data, metadata = view.get_at_with_metadata([2, 0])
    assert data[:, 0].tolist() == [2, 0]
    assert metadata is not None
    assert metadata["w"].tolist() == [2, 0]
    flat, metadata = view.get_flattened_at_with_metadata(1)
    assert flat.tolist() == [1, -1]
    assert metadata is not None
    assert metadata["w"] == 1


def test_is_live_and_keeps_segments() -> None:
    source = batch(2, segments=[(0, 2)])
    view = source.get_column("id")
    source.append(sample(2))
    source.mark_segment_end()
    assert view[:].tolist() == [0, 1, 2]
    assert view.get_segments() == [(0, 2), (2, 3)]


def test_is_read_only_and_names_the_source() -> None:
    view = batch(2).get_column("id")
    for write in (lambda: view.set_at(0, 1), lambda: view.append(1), lambda: view.remove_at(0)):
        with pytest.raises(ReadOnlyError, match="SubItemBatch.*ListBatch"):
            write()
    assert not view.is_mutable
    with pytest.raises(ReadOnlyError, match="change the ListBatch"):
        batch(0).get_column("id").append(1)
    with pytest.raises(TypeError, match="must be a BatchBase"):
        SubItemBatch([1], "id")  # type: ignore[arg-type]
