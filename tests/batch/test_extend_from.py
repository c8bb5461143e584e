"""extend_from: everything, once, in chunks, with its segments."""

from __future__ import annotations

import sys
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.batch.make import Counting, batch, numbers

from recollect.batch import CastTransformation, CombinedBatch, ToBackendOrDeviceBatch, TransformedBatch
from recollect.errors import ContentionError, MissingExtraError, SchemaError, SegmentOpenError
from recollect.testing.batches import ListBatch


def pairs(cuts: list[int]) -> list[tuple[int, int]]:
    return [(a, b) for a, b in pairwise(cuts) if a < b]


class TestSegments:
    @given(st.integers(0, 12), st.sets(st.integers(0, 12)), st.integers(1, 14), st.booleans())
    def test_stay_segments_whatever_the_chunks(
        self, n: int, cuts: set[int], chunk: int, ends_open: bool
    ) -> None:
        edges = sorted({0, n} | {c for c in cuts if c < n})
        other = numbers(n, segments=pairs(edges))
        if ends_open:
            other.append(n)
        target = numbers(2, start=50, segments=[(0, 2)])
        target.extend_from(other, chunk_size=chunk)
        want = [(0, 2)] + [(a + 2, b + 2) for a, b in pairs(edges)] + ([(n + 2, n + 3)] if ends_open else [])
        assert target[2:].tolist() == list(range(n + ends_open))
        assert target.get_segments() == want
        assert target.open_segment is None

    def test_without_segments_the_call_is_one(self) -> None:
        target = numbers(0, segments=[])
        target.extend_from(numbers(20))
        target.extend_from(numbers(3), chunk_size=1)
        assert target.get_segments() == [(0, 20), (20, 23)]

    def test_of_a_source_without_places(self) -> None:
        from tests.batch.test_base import Plain

        target = numbers(0, segments=[])
        target.extend_from(Plain(9, segments=[(0, 4), (4, 7)]), chunk_size=2)
        assert target.get_segments() == [(0, 4), (4, 7), (7, 9)]  # what no segment holds is its own run

    def test_gaps_of_a_view_end_segments(self) -> None:
        target = numbers(0, segments=[])
        target.extend_from(numbers(8, segments=[(0, 8)]).get_slice([0, 1, 4, 5, 6]), chunk_size=2)
        assert target.get_segments() == [(0, 2), (2, 5)]

    @pytest.mark.parametrize("wrap", ["torch", "transformed", "live", "combined"])
    def test_through_views(self, wrap: str) -> None:
        source = batch(9, segments=[(0, 4), (4, 9)])
        target = batch(0, segments=[])
        views: dict[str, Any] = {
            "torch": lambda b: ToBackendOrDeviceBatch(b, "torch"),
            "transformed": lambda b: TransformedBatch(b, CastTransformation({"obs/image": "int32"})),
            "live": lambda b: b.get_slice(...),
            "combined": lambda b: CombinedBatch([batch(0), b]),
        }
        views[wrap](target).extend_from(views[wrap](source), chunk_size=3)
        assert target[:]["id"].tolist() == list(range(9))
        assert target.get_segments() == [(0, 4), (4, 9)]

    def test_an_open_segment_of_the_target_is_an_error(self) -> None:
        target = numbers(0, segments=[])
        target.append(1)
        with pytest.raises(SegmentOpenError):
            target.extend_from(numbers(3))
        assert target.open_segment == (0, 1)


class TestChunks:
    def test_bound_memory(self) -> None:
        other = Counting(((), "int64"), range(20), segments=[(0, 20)])
        numbers(0).extend_from(other, chunk_size=6)
        assert other.gathers == [6, 6, 6, 2]

    def test_default_is_eight(self) -> None:
        other = Counting(((), "int64"), range(20))
        numbers(0).extend_from(other)
        assert other.gathers == [8, 8, 4]

    @pytest.mark.parametrize("size", [0, -1])
    def test_must_be_positive(self, size: int) -> None:
        with pytest.raises(ValueError, match="chunk_size"):
            numbers(0).extend_from(numbers(1), chunk_size=size)

    def test_an_error_carries_what_was_copied(self) -> None:
        class Fails(ListBatch):
            def _extend_part(self, block: Any, closes: bool) -> None:
                if 5 in np.asarray(block):
                    raise SchemaError("no five")
                super()._extend_part(block, closes)

        target = Fails(((), "int64"), segments=[])
        with pytest.raises(SchemaError, match="no five") as caught:
            target.extend_from(numbers(9, segments=[(0, 9)]), chunk_size=2)
        assert caught.value.copied == 4  # type: ignore[attr-defined]
        assert target[:].tolist() == [0, 1, 2, 3]
        assert target.get_segments() == [(0, 4)]  # nothing is left open
        assert target.open_segment is None

    def test_another_space_is_refused_before_anything_changes(self) -> None:
        target = batch(2)
        with pytest.raises(SchemaError) as caught:
            target.extend_from(numbers(3))
        assert caught.value.copied == 0  # type: ignore[attr-defined]
        assert len(target) == 2


class TestWhatItCopies:
    def test_what_the_other_holds_at_the_start(self) -> None:
        other = numbers(6, segments=[(0, 6)])

        class Feeds(ListBatch):
            def _extend_part(self, block: Any, closes: bool) -> None:
                super()._extend_part(block, closes)
                other.append(99)

        target = Feeds(((), "int64"))
        target.extend_from(other, chunk_size=2)
        assert target[:].tolist() == list(range(6))

    def test_what_is_overwritten_meanwhile_is_left_out_and_ends_the_segment(self) -> None:
        other = numbers(8, segments=[(0, 8)], capacity=8)

        class Slow(ListBatch):
            def _extend_part(self, block: Any, closes: bool) -> None:
                super()._extend_part(block, closes)
                if len(self) == 2:
                    other[3] = 77  # the sample 3 is gone
                    other[6] = 78

        target = Slow(((), "int64"), segments=[])
        target.extend_from(other, chunk_size=2)
        assert target[:].tolist() == [0, 1, 2, 4, 5, 7]
        assert target.get_segments() == [(0, 3), (3, 5), (5, 6)]
        assert target.open_segment is None

    def test_when_the_rest_is_gone_nothing_is_left_open(self) -> None:
        other = numbers(6, segments=[(0, 6)], capacity=8)

        parts: list[tuple[int, bool]] = []

        class Slow(ListBatch):
            def _extend_part(self, block: Any, closes: bool) -> None:
                super()._extend_part(block, closes)
                parts.append((len(block), closes))
                if len(self) == 2:
                    other.extend(np.arange(90, 98))

        other.extend([6, 7])
        target = Slow(((), "int64"), segments=[])
        target.extend_from(other, chunk_size=2)
        assert target[:].tolist() == [0, 1]
        assert target.get_segments() == [(0, 2)]
        assert parts == [(2, False), (0, True)]

    def test_a_source_that_contradicts_itself_is_not_waited_for(self) -> None:
        class Lapped(ListBatch):
            def get_located(self, *args: Any, **named: Any) -> Any:
                return None

        with pytest.raises(ContentionError):
            numbers(0).extend_from(Lapped(((), "int64"), range(5)))

    def test_only_a_batch(self) -> None:
        with pytest.raises(TypeError, match="extend"):
            numbers(1).extend_from([1, 2])  # type: ignore[arg-type]


class TestOneself:
    def test_is_a_value_error_through_any_view(self) -> None:
        b = batch(3)
        others = [b, b.get_slice([0]), ToBackendOrDeviceBatch(b, "torch"), CombinedBatch([batch(1), b])]
        for other in others:
            with pytest.raises(ValueError, match="itself"):
                b.extend_from(other)
        with pytest.raises(ValueError, match="itself"):
            b.get_slice(...).extend_from(b)
        with pytest.raises(ValueError, match="itself"):
            CombinedBatch([batch(1), b]).extend_from(b)
        assert len(b) == 3

    def test_another_member_is_not_oneself(self) -> None:
        a, b = batch(2), batch(1)
        CombinedBatch([a, b]).extend_from(a)
        assert len(b) == 3

    def test_two_batches_over_the_same_rows_are_one(self) -> None:
        class Shares(ListBatch):
            token = object()

            def _identity(self) -> object:
                return self.token

        with pytest.raises(ValueError, match="itself"):
            Shares(((), "int64")).extend_from(Shares(((), "int64"), [1]))


class TestProgress:
    def test_a_bar_is_shown(self, capsys: pytest.CaptureFixture[str]) -> None:
        pytest.importorskip("tqdm")
        target = numbers(0)
        target.extend_from(numbers(20), tqdm=True)
        assert len(target) == 20
        assert "20/20" in capsys.readouterr().err

    def test_no_bar_by_default(self, capsys: pytest.CaptureFixture[str]) -> None:
        numbers(0).extend_from(numbers(20))
        assert capsys.readouterr().err == ""

    def test_without_the_package(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "tqdm", None)
        target = numbers(0)
        with pytest.raises(MissingExtraError, match=r'pip install "recollect\[progress\]"'):
            target.extend_from(numbers(2), tqdm=True)
        assert len(target) == 0
