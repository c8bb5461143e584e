"""Any sequence of calls leaves a buffer as the list model says: samples, segments, places and counts."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.replay.make import ROW_KINDS, SPACE, ListStorage, block, create, sample
from tests.replay.model import Model, Sample

from recollect.batch import Location
from recollect.errors import MissingLeafError, SchemaError, SegmentOpenError
from recollect.replay import Lane, ReplayBuffer

TEXT = spaces.Dict({"x": spaces.Box(-(2**62), 2**62, (), np.int64), "t": spaces.Text(6, min_length=0)})
RAM_DISK = (
    "/dev/shm" if Path("/dev/shm").is_dir() else None
)  # dumps sync their files, thousands of times here
UNBOUNDED = ("memory", "memmap", "test-list")


class Machine(RuleBasedStateMachine):
    """One buffer and one model through the same calls; after each, everything that can be asked is compared."""

    kinds: tuple[str, ...] = ROW_KINDS
    tracked = True
    max_lanes = 1
    text = False
    capacities: Any = st.integers(1, 9)

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp(prefix="replay-machine-", dir=RAM_DISK))
        self.n_dumps = self.n_values = 0
        self.places: dict[tuple[int, int], Sample] = {}  # every (row, generation) there ever was
        self.idents: dict[int, int] = {}  # the model's segment -> the buffer's
        self.handles: dict[int, Lane] = {}
        self.default: int | None = None  # the lane that unnamed writes go to

    def teardown(self) -> None:
        if hasattr(self, "buffer"):
            self.buffer.close()
        shutil.rmtree(self.directory)

    @initialize(data=st.data())
    def start(self, data: Any) -> None:
        kind = data.draw(st.sampled_from(self.kinds), label="kind")
        lanes = data.draw(st.integers(1, self.max_lanes), label="lanes")
        run = data.draw(self.capacities, label="run")
        extra = {"num_lanes": lanes} if kind != "test-list" else {}
        self.kind, self.capacity = kind, None if run is None else run * lanes
        self.default = 0 if kind == "test-list" else None
        self.model = Model(run, self.tracked, lanes)
        self.buffer = create(
            kind, TEXT if self.text else SPACE, directory=self.directory, capacity=self.capacity,
            maintain_segment_metadata=self.tracked, **extra,
        )  # fmt: skip

    # -- values and lanes

    def fresh(self, n: int) -> list[int]:
        self.n_values += n
        return list(range(self.n_values - n, self.n_values))

    def one(self, v: int) -> Any:
        return {"x": v, "t": str(v)} if self.text else sample(v)

    def many(self, values: list[int]) -> Any:
        if self.text:
            return {"x": np.array(values, np.int64), "t": tuple(map(str, values))}
        return block(values)

    def lane(self, data: Any) -> tuple[int, Any]:
        """A lane number and the object that writes to it: the buffer itself, or a handle."""
        choice = data.draw(st.sampled_from([None, *sorted(self.handles)]), label="lane")
        return (self.next_default(), self.buffer) if choice is None else (choice, self.handles[choice])

    def next_default(self) -> int:
        """The lane of the next unnamed write: the one claimed before, else a free one, else one held by number."""
        if self.default is not None:
            return self.default
        return min(set(range(self.model.n_lanes)) - set(self.handles), default=0)

    def claimed(self, writer: Any, k: int) -> None:
        self.default = k if writer is self.buffer else self.default

    def may_extend(self, writer: Any, k: int, n: int) -> bool:
        """False (and checked) if a segment is open, which refuses a block."""
        if self.tracked or n:
            self.claimed(writer, k)
        if self.model.open[k] is None:
            return True
        with pytest.raises(SegmentOpenError, match="mark_segment_end"):
            writer.extend(self.many(self.fresh(n)))
        self.model.rejected += n
        self.model.offered += n
        return False

    # -- calls

    @rule(data=st.data())
    def append(self, data: Any) -> None:
        (k, writer), (v,) = self.lane(data), self.fresh(1)
        writer.append(self.one(v))
        self.claimed(writer, k)
        self.model.add(k, v, ends=False)

    @rule(data=st.data(), n=st.integers(0, 6))
    def extend(self, data: Any, n: int) -> None:
        k, writer = self.lane(data)
        if self.may_extend(writer, k, n):
            values = self.fresh(n)
            writer.extend(self.many(values))
            self.model.extend(k, values)

    @precondition(lambda self: self.tracked)
    @rule(data=st.data(), ends=st.lists(st.booleans(), max_size=24))
    def extend_with_ends(self, data: Any, ends: list[bool]) -> None:
        (k, writer), values = self.lane(data), self.fresh(len(ends))
        writer.extend(self.many(values), ends=np.array(ends, bool))
        if ends:
            self.claimed(writer, k)
        self.model.extend(k, values, ends)

    @precondition(lambda self: self.model.run is not None)
    @rule(data=st.data(), more=st.integers(0, 12))
    def extend_oversized(self, data: Any, more: int) -> None:
        k, writer = self.lane(data)
        n = self.model.run + more
        if self.may_extend(writer, k, n):
            values = self.fresh(n)
            writer.extend(self.many(values))
            self.model.extend(k, values)

    @rule(data=st.data(), n=st.integers(1, 5))
    def refuse(self, data: Any, n: int) -> None:
        k, writer = self.lane(data)
        wrong = self.many(self.fresh(n)) if n > 1 else self.one(*self.fresh(1))
        del wrong["t" if self.text else "y"]
        error = SegmentOpenError if n > 1 and self.model.open[k] is not None else MissingLeafError
        with pytest.raises(error):
            writer.extend(wrong) if n > 1 else writer.append(wrong)
        if n > 1 and self.tracked:
            self.claimed(writer, k)
        self.model.rejected += n
        self.model.offered += n

    @rule(data=st.data())
    def mark_segment_end(self, data: Any) -> None:
        k, writer = self.lane(data)
        writer.mark_segment_end()
        if writer is not self.buffer or k == self.default:
            self.model.open[k] = None

    @precondition(lambda self: self.model.all())
    @rule(data=st.data())
    def set_at(self, data: Any) -> None:
        n = len(self.model.all())
        if data.draw(st.booleans(), label="single"):
            index, values = data.draw(st.integers(-n, n - 1)), self.fresh(1)
            self.buffer.set_at(index, self.one(values[0]))
        else:
            index = data.draw(st.lists(st.integers(-n, n - 1), max_size=6))
            values = self.fresh(len(index))
            self.buffer.set_at(index, self.many(values))
        for i, v in zip(np.atleast_1d(np.array(index, int)), values):
            found = self.model.all()[i]
            found.value, found.place = v, None

    @precondition(lambda self: self.model.all())
    @rule(data=st.data())
    def set_wrong(self, data: Any) -> None:
        with pytest.raises(SchemaError):
            self.buffer.set_at([0, 0], self.many(self.fresh(3)))

    @rule(data=st.data())
    def remove_at(self, data: Any) -> None:
        n = len(self.model.all())
        index = data.draw(st.lists(st.integers(-n, n - 1), max_size=5) if n else st.just([]), label="index")
        self.remove(sorted({i % n for i in index}))

    @precondition(lambda self: self.model.all())
    @rule(data=st.data())
    def remove_at_an_end(self, data: Any) -> None:
        n = len(self.model.all())
        k = data.draw(st.integers(1, n), label="k")
        self.remove(list(range(k) if data.draw(st.booleans(), label="oldest") else range(n - k, n)))

    def remove(self, gone: list[int]) -> None:
        everything = self.model.all()
        if any(everything[i].segment in self.model.open for i in gone if self.tracked):
            with pytest.raises(SegmentOpenError, match="mark_segment_end"):
                self.buffer.remove_at(gone)
            return
        before = {s: s.place for s in everything}
        sizes = [len(lane) for lane in self.model.lanes]
        storage = self.buffer.inner_storage
        written = storage.n_written if isinstance(storage, ListStorage) else 0
        self.buffer.remove_at(gone)
        self.model.remove(set(gone))
        moved = self.adopt_places(before)
        if isinstance(storage, ListStorage):
            assert storage.n_written - written == sum(moved), "one pass"
        first = 0
        for k, size in enumerate(sizes):
            mine = [i - first for i in gone if first <= i < first + size]
            first += size
            if mine:
                assert moved[k] <= self.most_moves(mine, size), f"{moved[k]} rows were moved"

    def most_moves(self, gone: list[int], size: int) -> int:
        if gone == list(range(size - len(gone), size)):
            return 0
        if self.model.run is None:
            return size - gone[0]
        return 0 if gone == list(range(len(gone))) else min(size - gone[0], gone[-1] + 1)

    def adopt_places(self, before: dict[Sample, Any]) -> list[int]:
        """After a removal samples may have moved: take their new places, and count the moves of each lane."""
        location = self.buffer.locate(...)
        places = iter(zip(location.row.tolist(), location.generation.tolist()))
        moved = []
        for k, lane in enumerate(self.model.lanes):
            found = [next(places) for _ in lane]
            moved.append(sum(place != before[s] for s, place in zip(lane, found)))
            for s, place in zip(lane, found):
                s.place = place if place == before[s] else None
            if lane:
                self.model.starts[k] = found[0][0] - k * (self.model.run or 0)
            elif self.model.run is not None and k == 0:
                self.model.starts[0] = self.buffer.offset
            elif self.model.run is not None:
                low = self.buffer.inner_storage.rows.native.windows()[k][0]
                self.model.starts[k] = low % self.model.run
        return moved

    @rule()
    def clear(self) -> None:
        self.buffer.clear()
        self.model.clear()

    @rule(data=st.data(), sizes=st.lists(st.integers(1, 7), max_size=4), chunk_size=st.integers(1, 12))
    def extend_from(self, data: Any, sizes: list[int], chunk_size: int) -> None:
        k = self.next_default()
        source_tracked = data.draw(st.booleans(), label="source has segments")
        with create("memory", self.buffer.single_space, directory=self.directory, capacity=32,
                    maintain_segment_metadata=source_tracked) as other:  # fmt: skip
            blocks = [self.fresh(n) for n in sizes]
            for i, values in enumerate(blocks):
                if i == len(blocks) - 1:
                    for v in values:
                        other.append(self.one(v))
                else:
                    other.extend(self.many(values))
            if not source_tracked:
                blocks = [[v for values in blocks for v in values]] if blocks else []
            if blocks and self.model.open[k] is not None:
                with pytest.raises(SegmentOpenError) as caught:
                    self.buffer.extend_from(other, chunk_size)
                assert caught.value.copied == 0  # type: ignore[attr-defined]
                n = min(len(blocks[0]), chunk_size)
                self.model.rejected += n
                self.model.offered += n
                self.default = k
                return
            self.buffer.extend_from(other, chunk_size)
        for values in blocks:
            self.default = k
            for i, v in enumerate(values):
                self.model.add(k, v, ends=i == len(values) - 1)
            self.offset_after_chunks(k, len(values), chunk_size)

    def offset_after_chunks(self, k: int, n: int, chunk_size: int) -> None:
        """A chunk of at least the lane's capacity starts again at row 0; those after it go on from there."""
        run = self.model.run
        if run is None or min(n, chunk_size) < run:
            return
        last = n % chunk_size
        self.model.starts[k] = last % run if last < run else 0

    # -- lanes

    @precondition(lambda self: self.kind != "test-list")
    @rule(data=st.data())
    def on_lane(self, data: Any) -> None:
        k = data.draw(st.integers(0, self.model.n_lanes - 1), label="lane")
        if k in self.handles:
            self.handles.pop(k).close()
            self.model.open[k] = None
            self.default = None if self.default == k else self.default
        else:
            self.handles[k] = self.buffer.on_lane(k)

    # -- disk

    @rule(data=st.data())
    def dump_and_load(self, data: Any) -> None:
        self.n_dumps += 1
        path = self.directory / f"dump-{self.n_dumps}"
        cut = data.draw(st.booleans(), label="cut_open")
        if any(self.model.open) and not cut:
            with pytest.raises(SegmentOpenError, match="cut_open=True"):
                self.buffer.dumps(path)
            assert not (path / "manifest.json").exists()
            return
        self.buffer.dumps(path, cut_open=cut)
        if self.kind == "test-list":
            target = None
        else:
            kinds = [k for k in ROW_KINDS if self.capacity is not None or k in UNBOUNDED]
            target = data.draw(st.sampled_from(kinds), label="load as")
            self.kind = target
        self.buffer.close()
        self.buffer = ReplayBuffer.load_from(path, read_only=False, storage=target)
        m = self.model
        m.open, m.offered, m.evicted, m.removed, m.rejected = [None] * m.n_lanes, len(m.all()), 0, 0, 0
        m.starts = [start if lane or target is None else 0 for start, lane in zip(m.starts, m.lanes)]
        self.handles, self.default = {}, 0 if self.kind == "test-list" else None
        live = {s.place for s in m.all()}
        if self.kind == "test-list":  # it keeps no generations on disk
            live = set()
            for s in m.all():
                s.place = None
        self.places = {place: s for place, s in self.places.items() if place in live}

    # -- comparison

    @invariant()
    def all_is_as_the_model_says(self) -> None:
        if not hasattr(self, "buffer"):
            return
        buffer, model = self.buffer, self.model
        everything = model.all()
        assert len(buffer) == buffer.count == len(everything)
        data = buffer[:]
        assert data["x"].tolist() == [s.value for s in everything]
        if self.text:
            assert data["t"] == tuple(str(s.value) for s in everything)
        else:
            assert data["y"][:, 1].tolist() == [-s.value for s in everything]
        assert buffer.get_segments() == (model.segments() if self.tracked else None)
        at = self.default
        assert buffer.open_segment == (None if at is None else model.open_segment(at))
        for k, handle in self.handles.items():
            assert handle.open_segment == model.open_segment(k)
        self.compare_places()
        self.compare_counts()

    def compare_places(self) -> None:
        buffer, model, location = self.buffer, self.model, self.buffer.locate(...)
        rows = [model.row(k, i) for k, lane in enumerate(model.lanes) for i in range(len(lane))]
        assert location.row.tolist() == rows
        assert buffer.offset == model.starts[0]
        assert location.step.tolist() == [s.step for s in model.all()]
        for s, row, generation, ident in zip(
            model.all(), rows, location.generation.tolist(), location.segment.tolist()
        ):
            if s.place is None:
                assert (row, generation) not in self.places, "a generation was used twice"
                s.place = (row, generation)
                self.places[s.place] = s
            assert s.place == (row, generation)
            if not self.tracked:
                assert ident == -1
            elif s.segment not in self.idents:
                assert ident not in self.idents.values(), "a segment id was used twice"
                self.idents[s.segment] = ident
            assert not self.tracked or self.idents[s.segment] == ident
        if self.places:
            known = list(self.places)
            where = {s.place: i for i, s in enumerate(model.all())}
            seen = Location.of([row for row, _ in known], [generation for _, generation in known])
            assert buffer.relocate(seen).tolist() == [where.get(place, -1) for place in known]
            assert buffer.is_current(seen).tolist() == [place in where for place in known]

    def compare_counts(self) -> None:
        stats, model = self.buffer.stats(), self.model
        assert stats.live == stats.length == len(model.all())
        counted = (stats.offered, stats.evicted, stats.removed, stats.rejected, stats.dropped)
        assert counted == (model.offered, model.evicted, model.removed, model.rejected, 0)
        assert stats.offered == stats.live + stats.evicted + stats.removed + stats.rejected + stats.dropped


class Tracked(Machine):
    pass


class Untracked(Machine):
    tracked = False


class Lanes(Machine):
    max_lanes = 3
    capacities = st.integers(1, 5)


class Unbounded(Machine):
    kinds = ("memory", "memmap")
    capacities = st.none()


class Words(Machine):
    text = True


class Custom(Machine):
    kinds = ("test-list",)
    capacities = st.one_of(st.none(), st.integers(1, 9))


class CustomUntracked(Custom):
    tracked = False


TestTracked = Tracked.TestCase
TestUntracked = Untracked.TestCase
TestLanes = Lanes.TestCase
TestUnbounded = Unbounded.TestCase
TestWords = Words.TestCase
TestCustom = Custom.TestCase
TestCustomUntracked = CustomUntracked.TestCase
