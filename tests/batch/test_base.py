"""BatchBase: what it refuses, what it derives, and its hooks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.batch.make import batch, block, numbers, sample

from recollect.batch import BatchBase, BatchStats, Location
from recollect.batch import boundaries as boundaries_module
from recollect.errors import ContentionError, EmptyError, ReadOnlyError, SchemaError
from recollect.sampling import IndexStream
from recollect.testing.batch_contract import equal
from recollect.testing.batches import ListBatch


class Plain(BatchBase):
    """Numbers that never move."""

    def __init__(self, n: int, segments: Any = None, metadata_space: Any = None) -> None:
        super().__init__(((), "int64"), metadata_space)
        self.n = n
        self._pairs = segments

    def __len__(self) -> int:
        return self.n

    def get_at(self, idx: Any) -> Any:
        from recollect.indexing import normalize

        return np.arange(self.n)[normalize(idx, self.n)]

    def get_segments(self) -> Any:
        return self._pairs


class TestConstruction:
    def test_no_getter_is_a_type_error(self) -> None:
        class Nothing(BatchBase):
            def __init__(self) -> None:  # not even super().__init__
                pass

            def __len__(self) -> int:
                return 0

        with pytest.raises(TypeError, match="Nothing: must define get_at or get_flattened_at"):
            Nothing()

    def test_no_length_is_a_type_error(self) -> None:
        class NoLength(BatchBase):
            def get_at(self, idx: Any) -> Any:
                return None

        with pytest.raises(TypeError):
            NoLength(((), "int64"))  # type: ignore[abstract]

    def test_metadata_space_needs_a_getter(self) -> None:
        with pytest.raises(TypeError, match="get_at_with_metadata"):
            Plain(3, metadata_space={"x": ((), "int64")})

    def test_metadata_space_is_a_dict(self) -> None:
        with pytest.raises(TypeError, match="Dict"):
            ListBatch(((), "int64"), metadata_space=((), "int64"))

    def test_short_forms_are_spaces(self) -> None:
        assert Plain(1).single_space.shape == ()
        assert Plain(1).single_metadata_space is None


class TestDefaults:
    def test_writers_are_read_only_and_name_a_remedy(self) -> None:
        plain = Plain(3)
        writes = [
            lambda: plain.append(0),
            lambda: plain.extend([0]),
            lambda: plain.set_at(0, 0),
            lambda: plain.remove_at(0),
            lambda: plain.append_flattened([0]),
            lambda: plain.extend_flattened([[0]]),
            lambda: plain.set_flattened_at(0, [0]),
            lambda: plain.extend_from(Plain(1)),
        ]
        for write in writes:
            with pytest.raises(ReadOnlyError, match="Plain: .*ReplayBuffer"):
                write()
        assert not plain.is_mutable
        assert numbers(1).is_mutable

    def test_stats(self) -> None:
        assert Plain(3).stats() == BatchStats("Plain", 3, False)
        assert numbers(2).get_slice([0]).stats().sources == (BatchStats("ListBatch", 2, True),)

    def test_backend_and_device(self) -> None:
        assert Plain(1).backend.name == "numpy"
        assert Plain(1).device == "cpu"

    def test_text_has_no_flattened_form(self) -> None:
        from gymnasium import spaces

        texts = ListBatch(spaces.Dict({"t": spaces.Text(3)}), [{"t": "a"}])
        with pytest.raises(TypeError, match="^t: "):
            texts.get_flattened_at(0)

    def test_a_plain_string_is_one_key(self) -> None:
        assert batch(2).get_column("id")[:].tolist() == [0, 1]

    def test_check_set_at_checks_and_changes_nothing(self) -> None:
        b = batch(3)
        b._check_set_at([0, 1], block([7, 8]))
        b._check_set_at(0, sample(7))
        with pytest.raises(SchemaError):
            b._check_set_at([0, 1], block([7]))
        with pytest.raises(SchemaError):
            b._check_set_at(0, {"id": 1})
        with pytest.raises(ReadOnlyError):
            Plain(3)._check_set_at(0, 1)
        with pytest.raises(ReadOnlyError):
            Plain(3)._check_remove_at(0)
        assert equal(b[:], block([0, 1, 2]))


class TestIteration:
    def test_only_what_exists_at_the_start(self) -> None:
        b = numbers(3)
        seen = []
        for x in b:
            seen.append(int(x))
            if len(seen) < 9:
                b.append(100)
        assert seen == [0, 1, 2]

    def test_overwritten_samples_are_left_out(self) -> None:
        ring = numbers(5, capacity=5)
        seen = []
        for x in ring:
            seen.append(int(x))
            if len(seen) == 1:
                ring.extend([90, 91, 92])  # evicts 0, 1, 2
        assert seen == [0, 3, 4]

    def test_changed_samples_are_left_out(self) -> None:
        b = numbers(4)
        it = iter(b)
        assert next(it) == 0
        b[2] = 77
        assert [int(x) for x in it] == [1, 3]

    def test_removed_samples_are_left_out(self) -> None:
        b = numbers(5)
        it = iter(b)
        next(it)
        b.remove_at([1, 3])
        assert [int(x) for x in it] == [2, 4]

    def test_a_source_without_places_that_shrinks(self) -> None:
        plain = Plain(4)
        it = iter(plain)
        next(it)
        plain.n = 2
        assert [int(x) for x in it] == [1]

    def test_an_error_of_the_source_is_not_swallowed(self) -> None:
        class Broken(Plain):
            def get_at(self, idx: Any) -> Any:
                raise IndexError("broken")

        with pytest.raises(IndexError, match="broken"):
            list(Broken(3))

    def test_samples_are_as_single_reads(self) -> None:
        b = batch(2)
        assert equal(list(b), [b[0], b[1]])


class TestDraws:
    def test_draws_what_the_stream_says(self) -> None:
        b = numbers(50)
        assert b.draw_at(IndexStream(3), 20).tolist() == IndexStream(3).indices(50, 20).tolist()
        drawn = batch(50).draw_column_at(("obs", "pos"), IndexStream(3), 20)
        assert drawn[:, 0].tolist() == IndexStream(3).indices(50, 20).tolist()

    def test_nothing_to_draw_from(self) -> None:
        with pytest.raises(EmptyError, match="ListBatch"):
            numbers(0).draw_at(IndexStream(0), 1)
        with pytest.raises(EmptyError):
            batch(0).draw_column_at(("id",), IndexStream(0), 1)

    def test_drawn_again_if_the_source_shrank(self) -> None:
        class Shrinking(Plain):
            def get_at(self, idx: Any) -> Any:
                self.n = 2 if self.n == 1000 else self.n
                return super().get_at(idx)

        source = Shrinking(1000)
        assert set(source.draw_at(IndexStream(0), 30).tolist()) <= {0, 1}

    def test_another_index_error_is_raised(self) -> None:
        class Broken(Plain):
            def get_at(self, idx: Any) -> Any:
                raise IndexError("broken")

        with pytest.raises(IndexError, match="broken"):
            Broken(3).draw_at(IndexStream(0), 1)


class TestPlaces:
    def test_a_plain_batch_is_its_own_place(self) -> None:
        place = Plain(6, segments=[(1, 3), (3, 5)]).locate([0, 1, 2, 4, 5])
        assert place.row.tolist() == [0, 1, 2, 4, 5]
        assert place.generation.tolist() == [0] * 5
        assert place.segment.tolist()[1:4] == [0, 0, 1]
        assert len(set(place.segment.tolist())) == 4  # samples in no segment are alone
        assert place.segment[0] < -1
        assert place.step.tolist() == [-1, 0, 1, 1, -1]

    def test_unknown_boundaries(self) -> None:
        place = Plain(3).locate(...)
        assert place.segment.tolist() == [-1] * 3
        assert place.step.tolist() == [-1] * 3

    def test_current_while_the_row_is_there(self) -> None:
        plain = Plain(3)
        place = plain.locate([0, 2])
        plain.n = 2
        assert plain.is_current(place).tolist() == [True, False]
        assert plain.relocate(place).tolist() == [0, -1]
        assert plain.get_located(place) is None

    def test_no_other_generation_is_current(self) -> None:
        assert Plain(3).is_current(Location.of([0, 1], [0, 1])).tolist() == [True, False]

    def test_an_integer_gives_scalars(self) -> None:
        place = Plain(3, segments=[(0, 3)]).locate(-1)
        assert (place.row, place.segment, place.step) == (2, 0, 2)
        assert np.ndim(place.row) == 0

    def test_a_ring_must_relocate_itself(self) -> None:
        class Ring(Plain):
            def locate(self, idx: Any) -> Location:
                return super().locate(idx)

        with pytest.raises(NotImplementedError, match="relocate"):
            Ring(3).relocate(Plain(3).locate([0]))

    def test_located_reads_look_again(self) -> None:
        class Restless(ListBatch):
            moves = 3

            def get_at(self, idx: Any) -> Any:
                data = super().get_at(idx)
                if self.moves:
                    self.moves -= 1
                    self.append(0)  # evicts, so the data is of other samples than asked for
                    data = super().get_at(idx)
                return data

        source = Restless(((), "int64"), range(10), capacity=10)
        place = source.locate([5, 7])
        found = source.get_located(place)
        assert found is not None
        assert found[0].tolist() == [5, 7]

    def test_reads_that_are_always_lapped_end(self, monkeypatch: pytest.MonkeyPatch) -> None:
        class Lapped(ListBatch):
            def get_at(self, idx: Any) -> Any:
                self._items.insert(0, self._items.pop())
                return super().get_at(idx)

        monkeypatch.setattr(boundaries_module, "CONTENTION_S", 0.01)
        source = Lapped(((), "int64"), range(4))
        with pytest.raises(ContentionError, match="lapped"):
            source.get_located(source.locate([0]))


def test_location_keeps_hints() -> None:
    place = numbers(4).locate([3, 1])
    assert place.take([1]).index is not None
    assert place.take([1]).index.tolist() == [1]  # type: ignore[union-attr]
    assert len(place) == 2
    assert place.at([8, 9]).index.tolist() == [8, 9]  # type: ignore[union-attr]
