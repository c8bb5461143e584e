"""CombinedBatch: several batches end to end."""

from __future__ import annotations

import gc
import pickle
import threading
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st
from tests.batch.make import Counting, batch, block, numbers, sample
from tests.process.actor import Actor
from tests.replay import make as _registers_test_list  # noqa: F401

from recollect.batch import (
    BatchBase,
    CastTransformation,
    CombinedBatch,
    FrameStackedBatch,
    ToBackendOrDeviceBatch,
    TransformedBatch,
)
from recollect.batch import combined as combined_module
from recollect.errors import LaneBusyError, ReadOnlyError, SchemaError, SegmentOpenError
from recollect.indexing import normalize
from recollect.replay import ReplayBuffer
from recollect.spaces import as_space
from recollect.testing.batch_contract import equal
from recollect.testing.batches import ListBatch

torch = pytest.importorskip("torch")


class TestConstruction:
    def test_at_least_one(self) -> None:
        with pytest.raises(ValueError, match="at least one"):
            CombinedBatch([])

    def test_equal_spaces_naming_member_and_leaf(self) -> None:
        other = ListBatch({"obs": {"pos": ((2,), "float32"), "image": ((2, 2), "int8")}, "id": ((), "int64")})
        with pytest.raises(ValueError, match=r"batches\[1\].*obs/image.*dtype"):
            CombinedBatch([batch(1), other])

    def test_equal_backends(self) -> None:
        with pytest.raises(ValueError, match=r"batches\[1\].*torch"):
            CombinedBatch([numbers(1), ToBackendOrDeviceBatch(numbers(1), "torch")])

    def test_equal_metadata(self) -> None:
        with pytest.raises(ValueError, match=r"batches\[1\].*metadata"):
            CombinedBatch([numbers(1), numbers(1, metadata=[{"w": 1}])])
        with pytest.raises(ValueError, match=r"batches\[1\].*w: "):
            CombinedBatch([numbers(1, metadata=[{"w": 1.0}]), numbers(1, metadata=[{"w": 1}])])

    def test_combined_members_count_by_their_samples_only(self) -> None:
        both = CombinedBatch([numbers(1), CombinedBatch([numbers(1), numbers(1), numbers(1)])])
        metadata = both.get_at_with_metadata([3, 0])[1]
        assert metadata is not None
        assert metadata["batch_index"].tolist() == [1, 0]

    def test_only_batches(self) -> None:
        with pytest.raises(TypeError, match=r"batches\[0\]"):
            CombinedBatch([[1, 2]])  # type: ignore[list-item]


class TestReads:
    @given(st.lists(st.integers(0, 4), min_size=1, max_size=4), st.booleans(), st.data())
    def test_are_those_of_the_lists_joined(self, sizes: list[int], pool: bool, data: st.DataObject) -> None:
        parts = [batch(n, start=10 * k) for k, n in enumerate(sizes)]
        both = CombinedBatch(parts, use_thread_pool=pool)
        model = [10 * k + i for k, n in enumerate(sizes) for i in range(n)]
        members = [k for k, n in enumerate(sizes) for _ in range(n)]
        assert len(both) == len(model)
        at = data.draw(st.lists(st.integers(-len(model), len(model) - 1), max_size=9)) if model else []
        got, metadata = both.get_at_with_metadata(at)
        assert got["id"].tolist() == [model[i] for i in at]
        assert got["obs"]["pos"][:, 0].tolist() == [model[i] for i in at]
        assert metadata is not None
        assert metadata["batch_index"].tolist() == [members[i] for i in at]
        assert both.get_flattened_at(at).shape == (len(at), 7)
        for i in at:
            assert both[i]["id"] == model[i]

    def test_one_gather_per_touched_member(self) -> None:
        parts = [Counting(((), "int64"), range(10 * k, 10 * k + 5)) for k in range(3)]
        both = CombinedBatch(parts)
        assert both[[14 - 2, 0, 10, 4, 11, 1]].tolist() == [22, 0, 20, 4, 21, 1]
        assert [part.gathers for part in parts] == [[3], [], [3]]
        both.get_located(both.locate([0, 12, 1]))
        assert [part.gathers for part in parts] == [[3, 2], [], [3, 1]]

    def test_lengths_are_read_at_each_call(self) -> None:
        first, second = numbers(2), numbers(2, start=10)
        both = CombinedBatch([first, second])
        first.append(5)
        assert both[:].tolist() == [0, 1, 5, 10, 11]

    def test_metadata_is_kept(self) -> None:
        parts = [numbers(2, start=10 * k, metadata=[{"w": 10 * k}, {"w": 10 * k + 1}]) for k in range(2)]
        both = CombinedBatch(parts)
        metadata = both.get_at_with_metadata([3, 0, 2])[1]
        assert metadata is not None
        assert {k: v.tolist() for k, v in metadata.items()} == {"w": [11, 0, 10], "batch_index": [1, 0, 1]}
        single = both.get_at_with_metadata(2)[1]
        assert single is not None
        assert (single["w"], single["batch_index"]) == (10, 1)
        assert list(both.single_metadata_space) == ["w", "batch_index"]  # type: ignore[arg-type]

    def test_text(self) -> None:
        space = spaces.Dict({"t": spaces.Text(3)})
        parts = [ListBatch(space, [{"t": "a"}, {"t": "b"}]), ListBatch(space, [{"t": "c"}])]
        assert CombinedBatch(parts)[[2, 0, 1, 2]]["t"] == ("c", "a", "b", "c")

    @pytest.mark.parametrize("backend", ["torch", "jax"])
    def test_other_backends(self, backend: str) -> None:
        pytest.importorskip(backend)
        parts = [ListBatch(((), "int32"), [10 * k, 10 * k + 1]) for k in range(2)]
        both = CombinedBatch([ToBackendOrDeviceBatch(part, backend) for part in parts])
        assert both[[3, 0, 2]].tolist() == [11, 0, 10]
        assert both.backend.name == backend

    def test_a_backend_of_ones_own(self) -> None:
        from recollect.backends import get_backend

        class Wrapped:
            """Torch under another name: the arrays are joined through numpy."""

            name = "mine"

            def __getattr__(self, name: str) -> Any:
                return getattr(get_backend("torch"), name)

        class Mine(ListBatch):
            backend = Wrapped()  # type: ignore[assignment]

            def get_at(self, idx: Any) -> Any:
                return torch.as_tensor(super().get_at(idx))

        both = CombinedBatch([Mine(((), "int64"), [1, 2]), Mine(((), "int64"), [3])])
        assert both[[2, 0]].tolist() == [3, 1]
        assert isinstance(both[[2, 0]], torch.Tensor)

    def test_device_moves_the_result(self) -> None:
        parts = [ToBackendOrDeviceBatch(numbers(2), "torch") for _ in range(2)]
        both = CombinedBatch(parts, device="meta")
        data, metadata = both.get_at_with_metadata([0, 3])
        assert data.device.type == "meta"
        assert metadata is not None
        assert metadata["batch_index"].device.type == "meta"
        assert both[0].device.type == "meta"
        assert str(both.device) == "meta"


class TestThreadPool:
    def test_is_made_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        made = []
        real = combined_module.ThreadPoolExecutor

        def make(*args: Any, **kwargs: Any) -> Any:
            made.append(args)
            return real(*args, **kwargs)

        monkeypatch.setattr(combined_module, "ThreadPoolExecutor", make)
        both = CombinedBatch([numbers(3), numbers(3)], use_thread_pool=True)
        assert made == []
        for _ in range(5):
            both[[0, 5]]
        assert len(made) == 1

    def test_reads_members_at_the_same_time(self) -> None:
        meet = threading.Barrier(2, timeout=10)

        class Waits(ListBatch):
            def get_at(self, idx: Any) -> Any:
                meet.wait()
                return super().get_at(idx)

        parts = [Waits(((), "int64"), [1]), Waits(((), "int64"), [2])]
        assert CombinedBatch(parts, use_thread_pool=True)[[1, 0]].tolist() == [2, 1]

    def test_ends_with_the_view(self) -> None:
        before = set(threading.enumerate())
        both = CombinedBatch([numbers(3), numbers(3)], use_thread_pool=True)
        both[[0, 5]]
        threads = set(threading.enumerate()) - before
        assert threads
        del both
        gc.collect()
        for thread in threads:
            thread.join(timeout=10)
        assert not any(thread.is_alive() for thread in threads)

    def test_pickles_without_its_threads(self) -> None:
        both = CombinedBatch([numbers(3), numbers(3)], use_thread_pool=True)
        both[[0, 5]]
        assert pickle.loads(pickle.dumps(both))[[0, 5]].tolist() == [0, 2]


class Picky(ListBatch):
    """Refuses to be changed at one index, as a buffer refuses its open segment."""

    def _check_set_at(self, idx: Any, value: Any) -> None:
        super()._check_set_at(idx, value)
        if 1 in np.atleast_1d(idx):
            raise SegmentOpenError("no")

    def _check_remove_at(self, idx: Any) -> None:
        if 1 in np.atleast_1d(idx):
            raise SegmentOpenError("no")


class OnlyGrows(BatchBase):
    """A batch of the user's own that has no writer but `append`."""

    def __init__(self) -> None:
        super().__init__(as_space(((), "int64")))

    def __len__(self) -> int:
        return 1

    def get_at(self, idx: Any) -> Any:
        return np.arange(1)[normalize(idx, 1)]

    def append(self, value: Any) -> None:
        raise NotImplementedError


TRACKED: dict[str, Any] = {"capacity": 4, "maintain_segment_metadata": True}
REFUSING = [  # kind, how it is made, what removal of the newest raises, what writing NaN raises
    ("memory", TRACKED, SegmentOpenError, None),
    ("test-list", TRACKED, SegmentOpenError, None),
    ("parquet", {}, ReadOnlyError, ReadOnlyError),
    ("memory", {"capacity": 4, "evict": "lowest", "evict_key": "x"}, None, SchemaError),
]


class TestWrites:
    def test_set_at_in_all_members(self) -> None:
        a, b = batch(2), batch(2, start=10)
        both = CombinedBatch([a, b])
        both[[3, 0, 3]] = block([70, 80, 90])
        both[1] = sample(60)
        both.set_flattened_at([2], batch(1, start=50).get_flattened_at([0]))
        assert a[:]["id"].tolist() == [80, 60]
        assert b[:]["id"].tolist() == [50, 90]

    def test_set_at_is_checked_everywhere_first(self) -> None:
        a, b = ListBatch(((), "int64"), range(2)), Picky(((), "int64"), range(2))
        with pytest.raises(SegmentOpenError):
            CombinedBatch([a, b])[[0, 3]] = [7, 8]
        with pytest.raises(ReadOnlyError):
            CombinedBatch([a, batch(2).get_column("id")])[[0, 3]] = [7, 8]
        with pytest.raises(SchemaError):
            CombinedBatch([a, b])[[0, 2]] = [7, 8, 9]
        with pytest.raises(SchemaError):
            CombinedBatch([a, b])[[0, 2]] = [7.5, 8.5]
        with pytest.raises(SchemaError):
            CombinedBatch([a, b])[0] = 7.5
        assert a[:].tolist() == [0, 1]

    def test_remove_at_is_checked_everywhere_first(self) -> None:
        a, b = numbers(3), Picky(((), "int64"), range(3))
        both = CombinedBatch([a, b])
        with pytest.raises(SegmentOpenError):
            both.remove_at([0, 4])
        with pytest.raises(ReadOnlyError):
            CombinedBatch([a, batch(2).get_column("id")]).remove_at([0, 3])
        assert len(a) == 3
        both.remove_at([2, 3, 0])
        assert a[:].tolist() == [1]
        assert b[:].tolist() == [1, 2]

    @pytest.mark.parametrize(("kind", "kwargs", "removal", "write"), REFUSING)
    def test_a_buffer_that_refuses_refuses_before_others_change(
        self, kind: str, kwargs: dict[str, Any], removal: Any, write: Any, tmp_path: Path
    ) -> None:
        space = {"x": ((), "float32")}
        a = ListBatch(space, [{"x": np.float32(i)} for i in range(2)])
        path = tmp_path if kind == "parquet" else None
        with ReplayBuffer.create(kind, space, cache_path=path, **kwargs) as b:
            b.extend({"x": np.zeros(2, np.float32)})
            b.append({"x": 1.0})  # opens a segment, where they are tracked
            both = CombinedBatch([a, b])
            with pytest.raises(removal) if removal else nullcontext():
                both.remove_at([0, -1] if removal else [])
            with pytest.raises(write) if write else nullcontext():
                both[[0, 2] if write else []] = {"x": np.array([7, np.nan] if write else [], np.float32)}
            assert a[:]["x"].tolist() == [0, 1] and len(b) == 3
            if kind != "parquet":
                both[[0, -1]] = {"x": np.array([7, 8], np.float32)}
                both.remove_at([1, 2])
                assert a[:]["x"].tolist() == [7] and b[:]["x"].tolist() == [0, 8]

    def test_a_member_without_this_writer_refuses_before_others_change(self) -> None:
        a = numbers(2)
        both = CombinedBatch([a, OnlyGrows()])
        assert both.is_mutable
        with pytest.raises(ReadOnlyError):
            both.remove_at([0, 2])
        with pytest.raises(ReadOnlyError):
            both[[0, 2]] = [7, 8]
        assert a[:].tolist() == [0, 1]

    def test_a_lane_of_another_process_is_refused_before_others_change(self) -> None:
        a, b = (
            numbers(2),
            ReplayBuffer.create("shared", ((), "int64"), capacity=8, num_lanes=2, multiprocessing=True),
        )
        with b:
            actor = Actor(append=b.append)
            try:
                actor.do("append", 5)
                with b.on_lane(1) as own:
                    own.append(6)
                    both = CombinedBatch([a, b])
                    for refused in (lambda: both.remove_at([0, 2]), lambda: both.set_at([0, 2], [7, 8])):
                        with pytest.raises(LaneBusyError, match=str(actor.pid)):
                            refused()
                    assert a[:].tolist() == [0, 1]
                    both[[0, 3]] = [7, 8]
                    both.remove_at([0, 3])
                    assert a[:].tolist() == [1] and b[:].tolist() == [5]
            finally:
                actor.kill()

    def test_checks_reach_members_of_members(self) -> None:
        a, inner = numbers(2), CombinedBatch([numbers(1), Picky(((), "int64"), range(2))])
        with pytest.raises(SegmentOpenError):
            CombinedBatch([a, inner])[[0, 4]] = [7, 8]
        with pytest.raises(SegmentOpenError):
            CombinedBatch([a, inner]).remove_at([0, 4])
        assert a[:].tolist() == [0, 1]

    @pytest.mark.parametrize("wrap", ["slice", "live", "torch", "transformed"])
    def test_checks_reach_through_views(self, wrap: str) -> None:
        views: dict[str, Any] = {
            "slice": lambda b: b.get_slice([0, 1]),
            "live": lambda b: b.get_slice(...),
            "torch": lambda b: ToBackendOrDeviceBatch(ToBackendOrDeviceBatch(b, "torch"), "numpy"),
            "transformed": lambda b: TransformedBatch(b, CastTransformation({})),
        }
        a, b = numbers(2), Picky(((), "int64"), range(3))
        both = CombinedBatch([a, views[wrap](b)])
        with pytest.raises(SegmentOpenError):
            both[[0, 3]] = [7, 8]
        assert a[:].tolist() == [0, 1]
        both[[0, 2]] = [7, 8]
        assert b[0] == 8
        with pytest.raises((SegmentOpenError, ReadOnlyError)):
            both.remove_at([0, 3])
        assert len(a) == 2

    def test_append_and_extend_go_to_the_last(self) -> None:
        a, b = batch(1), batch(1, start=10, segments=[])
        both = CombinedBatch([a, b])
        both.append(sample(11))
        b.mark_segment_end()
        both.extend(block([12, 13]))
        both.append_flattened(a.get_flattened_at(0))
        b.mark_segment_end()
        both.extend_flattened(a.get_flattened_at([0]))
        assert b[:]["id"].tolist() == [10, 11, 12, 13, 0, 0]
        assert len(a) == 1


class TestSegments:
    def test_a_member_without_is_one(self) -> None:
        parts = [numbers(3), numbers(0), numbers(4, segments=[(0, 1), (1, 4)]), numbers(2)]
        both = CombinedBatch(parts)
        assert both.get_segments() == [(0, 3), (3, 4), (4, 7), (7, 9)]
        place = both.locate(slice(None))
        assert len(set(place.segment.tolist())) == 4
        assert place.step.tolist() == [0, 1, 2, 0, 0, 1, 2, 0, 1]

    def test_no_window_crosses_members(self) -> None:
        stack = FrameStackedBatch(CombinedBatch([numbers(3), numbers(3, start=10)]), 2, 1)
        assert stack[:].tolist()[2:5] == [[0, 1, 2, 2], [10, 10, 10, 11], [10, 10, 11, 12]]

    def test_samples_in_no_segment_stay_alone(self) -> None:
        both = CombinedBatch([numbers(3, segments=[(0, 1)]), numbers(3, segments=[(2, 3)])])
        ids = both.locate(slice(None)).segment.tolist()
        assert len(set(ids)) == 6
        assert [i < -1 for i in ids] == [False, True, True, True, True, False]


class TestPlaces:
    def test_are_found_again_when_lengths_have_changed(self) -> None:
        first, second = numbers(3, capacity=3), numbers(3, start=10)
        both = CombinedBatch([first, second])
        place = both.locate([4, 0, 2, 5])
        first.append(3)  # evicts 0
        second.remove_at([0])
        assert both.relocate(place).tolist() == [3, -1, 1, 4]
        assert both.is_current(place).tolist() == [True, False, True, True]
        assert both.get_located(place) is None
        kept = both.get_located(place.take([0, 2, 3]), (), False, True)
        assert kept is not None
        assert kept[0].tolist() == [11, 2, 12]
        assert kept[1] is not None
        assert kept[1]["batch_index"].tolist() == [1, 0, 1]

    def test_scalars_and_empty(self) -> None:
        both = CombinedBatch([numbers(3), numbers(3, start=10)])
        assert both.is_current(both.locate(4))
        empty = both.get_located(both.locate([]))
        assert empty is not None
        assert empty[0].tolist() == []

    def test_a_sub_index_member_keeps_its_hints(self) -> None:
        both = CombinedBatch([numbers(2), numbers(9).get_slice([5, 6, 5])])
        assert both.relocate(both.locate([4, 2])).tolist() == [4, 2]
        place = both.locate([4, 3])
        both.batches[0].remove_at([0])  # the hints are one too high now
        assert both.relocate(place).tolist() == [3, 2]


def test_stats_has_the_members() -> None:
    stats = CombinedBatch([numbers(2), numbers(3)]).stats()
    assert stats.length == 5
    assert [source.length for source in stats.sources] == [2, 3]


def test_samples_of_equal_members_are_equal() -> None:
    both = CombinedBatch([batch(2), batch(2)])
    assert equal(both[0], both[2])
