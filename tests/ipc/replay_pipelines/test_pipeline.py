"""The pipeline's promises: hot and cold, wrong ticks, floors, headroom, seeds, errors that pass, closing."""

from __future__ import annotations

import csv
import inspect
import itertools
import threading
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from tests.ipc.crews import sleeps_in, wait_until
from tests.ipc.replay_pipelines.make import (
    A,
    N,
    O,
    Pipeline,
    add,
    buffer,
    drawn_ids,
    ids,
    pipeline,
    transitions,
)
from tests.timing import Stopwatch

import recollect as rc
from recollect.errors import (
    ClosedError,
    ContentionError,
    DeadlineError,
    EmptyError,
    PeerDiedError,
    PrepareError,
    WrongTickError,
)
from recollect.ipc.replay_pipelines import (
    ReplayPipeline,
    ReplayTickMetadata,
    cpu_pinned_double_buffer,
    packer,
    packing,
)
from recollect.ipc.replay_pipelines.base import sample_seed
from recollect.sampling.stream import mix

# -- against a model


class Machine(RuleBasedStateMachine):
    """Random calls against a few lines that say what is hot, what is cold and what each call must do."""

    def __init__(self) -> None:
        super().__init__()
        self.buf = buffer(20, capacity=64)
        self.pipe = pipeline(self.buf, base_seed=5)
        self.hot: int | None = None
        self.cold: int | None = None
        self.batch: dict[str, Any] = {}
        self.seen: list[int] = []
        self.started = self.ticks = 0
        self.floors: dict[int, int] = {}

    ticks_ = st.integers(0, 3)

    @rule(n=st.integers(1, 10))
    def add(self, n: int) -> None:
        add(self.buf, n)

    @rule(tick=ticks_, headroom=st.integers(0, 30), behind=st.integers(0, 5))
    def start(self, tick: int, headroom: int, behind: int) -> None:
        if tick in (self.hot, self.cold):
            assert self.pipe.start_prepare(tick, N) is False
        elif self.cold is not None:
            with pytest.raises(WrongTickError, match=f"tick {tick}: .* tick {self.cold} is"):
                self.pipe.start_prepare(tick, N)
        else:
            floor = self.buf.ptr - behind
            assert self.pipe.start_prepare(tick, N, floor, headroom=headroom) is True
            self.cold, self.floors[tick] = tick, self.buf.ptr
            self.started += 1

    @rule(tick=ticks_)
    def sample(self, tick: int) -> None:
        wrong = self.hot if self.hot is not None else self.cold
        if wrong is not None and wrong != tick:
            with pytest.raises(WrongTickError, match=f"tick {wrong} is"):
                self.pipe.sample_large_batch(tick, N)
            return
        batch = self.pipe.sample_large_batch(tick, N)
        if self.hot is not None:
            assert all(np.shares_memory(batch[k], self.batch[k]) for k in batch)
            return
        if self.cold is None:
            self.started, self.floors[tick] = self.started + 1, self.buf.ptr
        self.hot, self.cold, self.batch, self.ticks = tick, None, batch, self.ticks + 1
        meta = self.pipe.metadata
        assert isinstance(meta, ReplayTickMetadata)
        assert meta.snapshot_ptr == self.floors[tick]  # taken at once, whatever was added since
        assert (meta.tick_id, meta.sample_seed, meta.batch_gpu_slot) == (tick, sample_seed(5, tick), None)
        self.seen = ids(batch)
        if self.pipe.stats().redrawn == 0:
            assert self.seen == drawn_ids(meta)

    @rule()
    def after(self) -> None:
        self.pipe.after_tick()
        self.hot = None

    @rule(tick=ticks_)
    def ready(self, tick: int) -> None:
        found = self.pipe.batch_ready(tick, N)
        if tick not in (self.hot, self.cold):
            assert found is False
        if tick == self.hot:
            assert found is True

    @rule(tick=ticks_)
    def wait(self, tick: int) -> None:
        if tick != self.hot and self.cold not in (None, tick):
            with pytest.raises(WrongTickError):
                self.pipe.wait_until_ready(tick, N)
            return
        if tick != self.hot and self.cold is None:
            self.cold, self.floors[tick], self.started = tick, self.buf.ptr, self.started + 1
        assert self.pipe.wait_until_ready(tick, N) is True
        assert self.pipe.batch_ready(tick, N) is True

    @rule()
    def wait_any(self) -> None:
        self.pipe.wait_ready()
        if self.cold is not None:
            assert self.pipe.batch_ready(self.cold, N)

    @invariant()
    def hot_stays_and_counts_add_up(self) -> None:
        stats = self.pipe.stats()
        assert stats.ticks == stats.hits + stats.misses == self.ticks
        assert stats.started == self.started == stats.ticks + stats.failed + (self.cold is not None)
        if self.hot is not None:
            assert ids(self.batch) == self.seen
            assert self.pipe.metadata is not None and self.pipe.metadata.tick_id == self.hot
        else:
            assert self.pipe.metadata is None

    def teardown(self) -> None:
        self.pipe.close()
        self.buf.cleanup()


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=25, stateful_step_count=30, deadline=None)


# -- what it is


def test_it_is_a_replay_pipeline_and_any_class_with_the_calls_is_one() -> None:
    with buffer(4) as buf, pipeline(buf) as pipe:
        assert isinstance(pipe, ReplayPipeline)
        assert not isinstance(buf, ReplayPipeline)


def test_the_defaults() -> None:
    given = inspect.signature(Pipeline.__init__).parameters.values()
    assert {p.name: p.default for p in given if p.kind is p.KEYWORD_ONLY and p.default is not p.empty} == {
        "base_seed": 0, "trace_recorder": None, "trace_cuda_events": True, "verbose": False,
        "verbose_output_dir": None, "collector_pack_request_queue": None, "collector_pack_ready_queue": None,
        "collector_pack_shared_slots": None, "deadline": 60.0, "transfer": None,
    }  # fmt: skip


def test_times_are_microseconds(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0]

    def clock() -> int:
        now[0] += 3000
        return now[0]

    with buffer(40) as buf, pipeline(buf) as pipe:
        for module in (packing, cpu_pinned_double_buffer):
            monkeypatch.setattr(module, "monotonic_ns", clock)
        pipe.sample_large_batch(0, N)
        stats = pipe.stats()
        assert (stats.pack_us, stats.wait_us) == (3.0, 9.0)  # it waited for its own packing


def test_metadata_is_frozen() -> None:
    meta = ReplayTickMetadata(1, 2, 3, 4, 5)
    assert meta.batch_host_slot is None and meta.batch_gpu_slot is None
    with pytest.raises(AttributeError):
        meta.tick_id = 2  # type: ignore[misc]


@pytest.mark.parametrize("device", ["numpy", "cpu"])
def test_fields_are_those_of_sample_and_share_one_slot(device: str) -> None:
    with rc.ipc.ReplayBuffer(64, O, A, device, critic_dim=5, dtypes={"actions": "int64"}) as buf:
        block = transitions(range(40)) | {
            "critic": np.ones((40, 5), "f4"),
            "next_critic": np.zeros((40, 5), "f4"),
        }
        block["actions"] = np.arange(80).reshape(40, 2)
        buf.add(**block)
        with pipeline(buf, device=device) as pipe:
            batch, meta = pipe.sample_large_batch(3, N), pipe.metadata
            assert meta is not None
            expected = buf.sample(N, seed=meta.sample_seed)
            assert list(batch) == list(expected)
            for name, value in expected.items():
                assert batch[name].dtype == value.dtype and batch[name].shape == value.shape, name
                assert np.array_equal(np.asarray(batch[name]), np.asarray(value)), name
                assert type(batch[name]) is type(value)


def test_two_slots_alternate_and_the_hot_one_does_not_change_while_the_next_is_packed() -> None:
    with buffer(40) as buf, pipeline(buf) as pipe:
        slots, waited = [], 0.0
        for t in range(6):
            batch = pipe.sample_large_batch(t, N)
            waited = waited or pipe.stats().wait_us  # of the first one, which nobody had started
            kept = ids(batch)
            add(buf, 7)
            assert pipe.start_prepare(t + 1, N)
            assert pipe.wait_until_ready(t + 1, N) and pipe.batch_ready(t + 1, N) and pipe.batch_ready(t, N)
            assert ids(batch) == kept
            assert pipe.metadata is not None
            slots.append(pipe.metadata.batch_host_slot)
            pipe.after_tick()
        assert slots == [0, 1] * 3
        stats = pipe.stats()
        assert (stats.ticks, stats.hits, stats.misses, stats.redrawn) == (6, 5, 1, 0)
        assert stats.wait_us == waited > 0 and stats.pack_us > 0 and stats.copy_us == 0


def test_what_a_learner_does_with_the_dict_of_a_batch_is_its_own_affair() -> None:
    with buffer(40) as buf, pipeline(buf) as pipe:
        for t in range(4):  # each slot twice
            for batch in (pipe.sample_large_batch(t, N), pipe.sample_large_batch(t, N)):
                ids(batch)
                batch.clear()
            pipe.after_tick()


def test_a_tick_is_started_once() -> None:
    with buffer(40) as buf, pipeline(buf) as pipe:
        pipe.sample_large_batch(0, N)
        assert not pipe.start_prepare(0, N)  # hot
        assert pipe.start_prepare(1, N)
        assert not pipe.start_prepare(1, N)  # pending, or ready
        assert not pipe.start_prepare(0, N)
        assert pipe.stats().started == 2


def test_a_tick_that_nobody_started_is_packed_by_who_asks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would only wait for the packer's thread: two wake-ups saved."""
    real, threads = packing.pack, list[int]()

    def pack(*args: Any) -> Any:
        threads.append(threading.get_ident())
        return real(*args)

    monkeypatch.setattr(packing, "pack", pack)
    with buffer(40) as buf, pipeline(buf) as pipe:
        pipe.sample_large_batch(0, N)
        pipe.after_tick()
        pipe.start_prepare(1, N)
        pipe.wait_ready()
    assert threads == [threading.get_ident(), pipe._packer._thread.ident]


def test_whoever_packs_waits_for_a_copy_until_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    waits, times = list[float](), itertools.count(100, 3)
    with buffer(40) as buf, pipeline(buf) as pipe, monkeypatch.context() as patch:
        patch.setattr(packer, "monotonic", lambda: next(times))
        patch.setattr(pipe._transfer, "synchronize_ready", lambda slot, timeout: waits.append(timeout))
        pipe.sample_large_batch(0, N)
        pipe.start_prepare(1, N)
        assert pipe._cold is not None
        pipe._cold.done.get(timeout=20)
    assert waits == [17.0, 17.0]  # of the 20 seconds, 3 after each tick began


# -- seeds and snapshots


@given(st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1))
def test_the_seed_of_a_tick_is_the_finaliser_of_both_numbers(base: int, tick: int) -> None:
    assert sample_seed(base, tick) == mix(base * 2**32 + tick)


@given(st.sets(st.tuples(st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1)), max_size=50))
def test_no_two_pairs_share_a_seed(pairs: set[tuple[int, int]]) -> None:
    assert len({sample_seed(*pair) for pair in pairs}) == len(pairs)


def test_the_same_seed_tick_and_snapshot_give_the_same_batch_whatever_else_happens() -> None:
    found = []
    for noise in (0, 1):
        with buffer(64, capacity=64) as buf, pipeline(buf, base_seed=9) as pipe:
            if noise:
                np.random.random(10)  # noqa: NPY002
                buf.sample(10)
            pipe.start_prepare(4, N, headroom=20)
            add(buf, 10 * (noise + 1))  # both within the headroom
            found.append((ids(pipe.sample_large_batch(4, N)), pipe.metadata))
            assert pipe.stats().redrawn == 0
    assert found[0] == found[1]
    with buffer(64, capacity=64) as buf, pipeline(buf, base_seed=10) as pipe:
        pipe.start_prepare(4, N, headroom=20)
        assert ids(pipe.sample_large_batch(4, N)) != found[0][0]


def test_rows_lost_for_want_of_headroom_are_drawn_again_and_counted(tmp_path: Path) -> None:
    told = {"sample_count": 512, "verbose_output_dir": tmp_path}
    with buffer(64, capacity=64) as buf, pipeline(buf, **told) as pipe:
        gate = _Gate(pipe)
        pipe.start_prepare(0, 512)
        add(buf, 30)
        gate.open()
        assert min(ids(pipe.sample_large_batch(0, 512))) >= 30
        assert pipe.metadata is not None and pipe.metadata.snapshot_ptr == 64
        redrawn = pipe.stats().redrawn
        assert 0 < redrawn < 512
        pipe.after_tick()
        pipe.sample_large_batch(1, 512)
        assert pipe.stats().redrawn == redrawn
    with open(tmp_path / "pack_fields.csv", newline="") as file:
        assert [int(row["redrawn"]) for row in csv.DictReader(file)] == [redrawn, 0]  # of each tick


@pytest.mark.parametrize("headroom", [0, 4])
def test_if_nothing_of_a_snapshot_is_left_the_metadata_is_of_the_next(headroom: int) -> None:
    with buffer(16, capacity=16) as buf, pipeline(buf) as pipe:
        gate = _Gate(pipe)
        pipe.start_prepare(0, N, headroom=headroom)
        add(buf, 16)
        gate.open()
        assert min(ids(pipe.sample_large_batch(0, N))) >= 16
        meta = pipe.metadata
        assert meta is not None and (meta.snapshot_ptr, meta.snapshot_size) == (32, 16 - headroom)


def test_a_snapshot_counts_the_rows_of_all_lanes() -> None:
    with buffer(capacity=64, num_lanes=2) as buf, pipeline(buf) as pipe:
        for lane, n in ((0, 3), (1, 40)):  # of lane 1 the newest 32 are left
            with buf.on_lane(lane) as writer:
                writer.add(**transitions(range(n)))
        pipe.sample_large_batch(0, N)
        assert pipe.metadata is not None
        assert (pipe.metadata.snapshot_ptr, pipe.metadata.snapshot_size) == (43, 35)


def test_a_batch_may_be_larger_than_the_buffer() -> None:
    with buffer(2) as buf, pipeline(buf, sample_count=500) as pipe:
        assert set(ids(pipe.sample_large_batch(0, 500))) == {0, 1}


class _Gate:
    """Holds the packer before it begins with a tick, until `open()`."""

    def __init__(self, pipe: Pipeline) -> None:
        self.event, wait = threading.Event(), pipe._transfer.synchronize_ready

        def synchronize(slot: int, timeout: float) -> None:
            assert self.event.wait(20)
            wait(slot, timeout)

        pipe._transfer.synchronize_ready = synchronize  # type: ignore[method-assign]
        self.open = self.event.set


# -- the floor


def test_a_snapshot_waits_for_its_floor_and_is_taken_as_soon_as_it_is_reached(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with buffer(10) as buf, pipeline(buf) as pipe:
        assert pipe.start_prepare(0, N, 30)
        assert not pipe.wait_until_ready(0, N, timeout=0.02)  # the tick stays pending
        with monkeypatch.context() as patch:
            patch.setattr(pipe, "_wait", lambda *args: pytest.fail("it waited"))
            assert not pipe.batch_ready(0, N)
        add(buf, 19)
        assert not pipe.wait_until_ready(0, N, timeout=0.02)
        add(buf, 1)
        assert pipe.wait_until_ready(0, N)
        batch = pipe.sample_large_batch(0, N)
        assert pipe.metadata is not None and pipe.metadata.snapshot_ptr == 30
        assert ids(batch) == drawn_ids(pipe.metadata)
        assert pipe.stats().started == 1 and pipe.stats().failed == 0


def test_a_snapshot_below_the_floor_is_taken_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The count of rows may be off for a moment: while a lane is changed in place."""
    real, early = packing.wait_for_rows, iter([packing.REACHED])

    def wait(*args: Any) -> int:
        found = next(early, None)
        return real(*args) if found is None else found

    monkeypatch.setattr(packing, "wait_for_rows", wait)
    with buffer(10) as buf, pipeline(buf) as pipe:
        pipe.start_prepare(0, N, 11)
        assert not pipe.wait_until_ready(0, N, timeout=0.05)
        add(buf, 1)
        pipe.sample_large_batch(0, N)
        assert pipe.metadata is not None and pipe.metadata.snapshot_ptr == 11


def test_a_snapshot_that_waited_for_its_floor_leaves_the_headroom_too() -> None:
    with buffer(63, capacity=64) as buf, pipeline(buf) as pipe:
        pipe.start_prepare(0, N, 64, headroom=20)
        add(buf, 1)
        pipe.sample_large_batch(0, N)
        assert pipe.metadata is not None and pipe.metadata.snapshot_size == 44


def test_the_packer_wakes_with_the_row_it_waits_for() -> None:
    """Not at the end of a 100 ms slice."""
    with buffer(10) as buf, pipeline(buf) as pipe:
        took = []
        for t in range(5):
            pipe.start_prepare(t, N, buf.ptr + 1)
            pipe.wait_until_ready(t, N, timeout=0.01)
            start = Stopwatch()
            add(buf, 1)
            pipe.sample_large_batch(t, N)
            took.append(start.s)
            pipe.after_tick()
        assert min(took) < 0.05


def test_a_floor_that_is_not_reached_is_a_deadline_error_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_pinned_double_buffer, "_GRACE_S", 20.0)  # the packer says so, however late
    with buffer(10) as buf, pipeline(buf, deadline=0.05) as pipe:
        pipe.start_prepare(1, N, 11)
        with pytest.raises(DeadlineError, match="tick 1: needs 11 rows in 0.05 s, there are 10"):
            pipe.sample_large_batch(1, N)
        assert pipe.stats().failed == 1
        assert len(pipe.sample_large_batch(1, N)["obs"]) == N  # the same tick again, and it works


# -- errors do not poison


def fail(pipe: Pipeline, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """Make the next pack fail, and wait until it has."""
    with monkeypatch.context() as patch:
        patch.setattr(packing, "pack", lambda *a: (_ for _ in ()).throw(error))
        pipe.start_prepare(1, N)
        assert pipe._cold is not None
        pipe._cold.done.get(timeout=20)
        assert pipe._cold.state == "failed"


CALLS: dict[str, Any] = {
    "start_prepare, same": lambda p: p.start_prepare(1, N),
    "start_prepare, other": lambda p: p.start_prepare(2, N),
    "batch_ready": lambda p: p.batch_ready(1, N),
    "wait_ready": lambda p: p.wait_ready(),
    "wait_until_ready": lambda p: p.wait_until_ready(2, N),
    "sample_large_batch": lambda p: p.sample_large_batch(1, N),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_failed_tick_is_told_once_by_the_next_call(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with buffer(40) as buf, pipeline(buf) as pipe:
        cause = ContentionError("lapped")
        fail(pipe, monkeypatch, cause)
        pipe.after_tick()  # says nothing
        with pytest.raises(PrepareError, match="tick 1: .*ContentionError: lapped") as caught:
            CALLS[call](pipe)
        assert caught.value.__cause__ is cause
        again = CALLS[call](pipe)
        assert again is True or again is False or again is None or len(again["obs"]) == N
        pipe.wait_ready()
        tick = 2 if pipe._cold is not None and pipe._cold.tick == 2 else 1
        assert len(pipe.sample_large_batch(tick, N)["obs"]) == N


def test_a_failed_tick_leaves_the_hot_batch_alone_and_close_says_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with buffer(40) as buf, pipeline(buf) as pipe:
        batch = pipe.sample_large_batch(0, N)
        seen = ids(batch)
        fail(pipe, monkeypatch, ContentionError("lapped"))
        assert ids(batch) == seen
        pipe.close()
        assert ids(batch) == seen


def test_an_interrupt_while_the_learner_packs_passes_through(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*args: Any) -> None:
        raise KeyboardInterrupt

    with buffer(40) as buf, pipeline(buf) as pipe:
        with monkeypatch.context() as patch:
            patch.setattr(packing, "pack", interrupted)
            with pytest.raises(KeyboardInterrupt):
                pipe.sample_large_batch(0, N)
        assert len(pipe.sample_large_batch(0, N)["obs"]) == N


@pytest.mark.parametrize("headroom", [0, 3])
def test_nothing_to_draw_from_is_an_empty_error_as_itself(headroom: int) -> None:
    with buffer(0) as buf, pipeline(buf) as pipe:
        pipe.start_prepare(0, N, headroom=headroom)
        with pytest.raises(EmptyError, match="no rows to draw from"):
            pipe.wait_ready()
        add(buf, 4)
        assert len(pipe.sample_large_batch(0, N)["obs"]) == N


# -- refusals


@pytest.mark.parametrize("n", [N - 1, N + 1, 0, True, None])
@pytest.mark.parametrize("call", ["start_prepare", "batch_ready", "wait_until_ready", "sample_large_batch"])
def test_another_sample_count_is_refused(call: str, n: Any) -> None:
    with buffer(4) as buf, pipeline(buf) as pipe:
        with pytest.raises(ValueError, match=r"sample_count: must be the 32 of the constructor"):
            getattr(pipe, call)(0, n)
        assert pipe.stats().started == 0


def test_true_is_no_count() -> None:
    said = "sample_count: must be the 1 of the constructor, got True"
    with (
        buffer(4) as buf,
        pipeline(buf, sample_count=1) as pipe,
        pytest.raises(ValueError, match=said),
    ):
        pipe.start_prepare(0, True)


@pytest.mark.parametrize("tick", [-1, 2**32, 1.5, True, "1"])
def test_ticks_and_seeds_are_32_bit(tick: Any) -> None:
    with buffer(4) as buf, pipeline(buf) as pipe:
        with pytest.raises(ValueError, match="tick_id: must be an int in"):
            pipe.start_prepare(tick, N)
        with pytest.raises(ValueError, match="base_seed: must be an int in"):
            pipeline(buf, base_seed=tick)


@pytest.mark.parametrize(
    ("kwargs", "match"),
    [
        ({"headroom": 64}, "headroom: must be below the 64 rows of a lane, got 64"),
        ({"headroom": -1}, "headroom"),
        ({"min_snapshot_ptr": -1}, "min_snapshot_ptr"),
        ({"min_snapshot_ptr": 2.0}, "min_snapshot_ptr"),
    ],
)
def test_bad_floors_and_headrooms_are_refused(kwargs: dict[str, Any], match: str) -> None:
    with buffer(4) as buf, pipeline(buf) as pipe:
        with pytest.raises(ValueError, match=match):
            pipe.start_prepare(0, N, **kwargs)
        assert pipe.stats().started == 0


def test_headroom_is_rows_of_a_lane() -> None:
    with buffer(capacity=64, num_lanes=2) as buf, pipeline(buf) as pipe:
        with pytest.raises(ValueError, match="headroom: must be below the 32 rows of a lane, got 32"):
            pipe.start_prepare(0, N, 1, headroom=32)
        assert pipe.start_prepare(0, N, 1, headroom=31)


@pytest.mark.parametrize("timeout", [-1.0, float("nan"), float("inf")])
def test_endless_waits_are_refused(timeout: float) -> None:
    with buffer(4) as buf, pipeline(buf) as pipe:
        with pytest.raises(ValueError, match="timeout"):
            pipe.wait_until_ready(0, N, timeout=timeout)
        with pytest.raises(ValueError, match="timeout"):
            pipeline(buf, deadline=timeout)


@pytest.mark.parametrize("given", [None, 3, [1], np.zeros(3)])
def test_what_is_no_replay_buffer_is_refused(given: Any) -> None:
    said = f"replay_buffer: must be a recollect.ipc.ReplayBuffer, got .*{type(given).__name__}"
    with pytest.raises(TypeError, match=said):
        pipeline(given)


def test_an_unknown_device_is_refused() -> None:
    with buffer(4) as buf:
        for device, match in (
            ("cuda:0", "one that torch has here"),
            ("meta", "must be numpy, cpu"),
            ("abc", "torch knows"),
        ):
            with pytest.raises(ValueError, match=match):
                pipeline(buf, device=device)


# -- waiting and closing


@pytest.mark.parametrize("wait", ["sample_large_batch", "wait_ready"])
def test_a_wait_that_takes_too_long_leaves_the_tick_pending(wait: str) -> None:
    with buffer(40) as buf, pipeline(buf, deadline=0.02) as pipe:
        gate = _Gate(pipe)
        pipe.start_prepare(0, N)
        with pytest.raises(
            DeadlineError, match="tick 0: must be packed in 0.02 s, it is not; it stays pending"
        ):
            getattr(pipe, wait)(*(() if wait == "wait_ready" else (0, N)))
        with pytest.raises(WrongTickError, match="tick 0 is pending"):
            pipe.start_prepare(1, N)
        gate.open()
        assert pipe._cold is not None
        pipe._cold.done.get(timeout=20)
        assert len(pipe.sample_large_batch(0, N)["obs"]) == N
        assert pipe.stats().started == 1 and pipe.stats().failed == 0


@pytest.mark.parametrize("wait", ["sample_large_batch", "wait_until_ready", "wait_ready"])
def test_close_wakes_whoever_waits(wait: str) -> None:
    took = [seconds_to_close(wait) for _ in range(5)]
    # The packer was woken too, not joined at the end of its slice.
    assert median(closed for closed, _ in took) < 0.09 and median(heard for _, heard in took) < 0.09


def seconds_to_close(wait: str) -> tuple[float, float]:
    """Seconds until a pipeline was closed, and until one who waits for a batch heard of it."""
    with buffer(4) as buf:
        pipe = pipeline(buf)
        pipe.start_prepare(0, N, 5)
        errors: list[Any] = []

        def run() -> None:
            try:
                getattr(pipe, wait)(*(() if wait == "wait_ready" else (0, N)))
            except Exception as error:
                errors.append((error, start.s))

        thread = threading.Thread(target=run)
        thread.start()
        wait_until(lambda: sleeps_in(thread, "_rings"), 20.0)
        start = Stopwatch()
        pipe.close()
        closed_s = start.s
        thread.join(10)
        ((error, heard_s),) = errors
        assert isinstance(error, ClosedError)
        return closed_s, heard_s


def test_close_wakes_whoever_waits_for_a_packer_that_hangs() -> None:
    with buffer(4) as buf:
        pipe = pipeline(buf)
        gate = _Gate(pipe)
        pipe.start_prepare(0, N)
        woken = threading.Event()

        def run() -> None:
            with pytest.raises(ClosedError):
                pipe.wait_ready()
            woken.set()

        waiter, closer = threading.Thread(target=run), threading.Thread(target=pipe.close)
        waiter.start()
        wait_until(lambda: sleeps_in(waiter, "_rings"), 20.0)
        closer.start()
        assert woken.wait(9.0)  # the packer itself has ten seconds
        gate.open()
        for thread in (waiter, closer):
            thread.join(20)


def test_a_batch_that_was_taken_is_given_out_though_another_thread_closes() -> None:
    """Or ClosedError is raised; `close()` must not come in between."""
    with buffer(40) as buf:
        pipe = pipeline(buf)
        lock, mine = pipe._lock, threading.current_thread()

        class Closing:
            acquire, release = lock.acquire, lock.release

            def __enter__(self) -> None:
                lock.acquire()

            def __exit__(self, *error: object) -> None:
                lock.release()
                if threading.current_thread() is mine:
                    pipe._lock = lock
                    closer = threading.Thread(target=pipe.close)
                    closer.start()
                    closer.join(20)

        pipe._lock = Closing()  # type: ignore[assignment]
        assert len(pipe.sample_large_batch(0, N)["obs"]) == N
        with pytest.raises(ClosedError):
            pipe.sample_large_batch(0, N)


def test_after_close_every_call_raises_and_close_may_be_repeated() -> None:
    with buffer(40) as buf:
        pipe = pipeline(buf)
        batch = pipe.sample_large_batch(0, N)
        seen = ids(batch)
        pipe.close()
        pipe.close()
        for call in (*CALLS.values(), lambda p: p.after_tick()):
            with pytest.raises(ClosedError):
                call(pipe)
        assert ids(batch) == seen  # old bytes, not a crash
        assert not pipe._packer._thread.is_alive()


def test_closing_the_buffer_ends_a_tick_that_waits_for_rows() -> None:
    buf = buffer(4)
    with pipeline(buf) as pipe:
        pipe.start_prepare(0, N, 5)
        pipe.wait_until_ready(0, N, timeout=0.01)
        buf.cleanup()
        with pytest.raises(ClosedError):
            pipe.wait_ready()


def test_a_forgotten_pipeline_ends_its_thread() -> None:
    with buffer(4) as buf:
        pipe = pipeline(buf)
        pipe.sample_large_batch(0, N)
        thread = pipe._packer._thread
        assert thread.daemon  # the end of an interpreter does not wait for it
        del pipe
        thread.join(10)
        assert not thread.is_alive()


def test_a_watch_is_called_while_a_call_waits_and_may_end_it() -> None:
    with buffer(4) as buf, pipeline(buf) as pipe:
        pipe.start_prepare(0, N, 5)
        pipe.watch(lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            pipe.wait_ready()
        pipe.watch(lambda: add(buf, 1))
        assert len(pipe.sample_large_batch(0, N)["obs"]) == N
        stats = pipe.stats()
        assert (stats.hits, stats.misses) == (
            0,
            1,
        ) and stats.wait_us > 0  # it had been started, but not packed


def test_rows_of_collectors_that_died_since_are_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last one added what the tick waits for, and was gone before anybody looked."""
    with buffer(10) as buf, pipeline(buf) as pipe:
        real, waits = packing.wait_for_rows, list[int]()

        def wait(*args: Any) -> int:
            waits.append(1)
            if len(waits) > 1:
                return real(*args)
            add(buf, 1)
            return packing.TIMED_OUT

        monkeypatch.setattr(packing, "wait_for_rows", wait)
        monkeypatch.setattr(packer._core, "writers_gone", lambda memory: True)
        pipe.start_prepare(0, N, 11)
        assert len(pipe.sample_large_batch(0, N)["obs"]) == N


def test_while_somebody_watches_dead_collectors_are_for_him_to_judge(monkeypatch: pytest.MonkeyPatch) -> None:
    real, waits = packing.wait_for_rows, list[float]()

    def wait(*args: Any) -> int:
        waits.append(args[3])
        return packing.TIMED_OUT if len(waits) == 1 else real(*args)

    monkeypatch.setattr(packing, "wait_for_rows", wait)
    monkeypatch.setattr(packer._core, "writers_gone", lambda memory: True)
    with buffer(10) as buf, pipeline(buf) as pipe:
        pipe.watch(lambda: add(buf, 1))
        pipe.start_prepare(0, N, 11)
        assert len(pipe.sample_large_batch(0, N)["obs"]) == N
    assert all(0 < s <= 0.1 for s in waits)  # who watches nobody is told of the dead within a second


def test_once_nobody_watches_dead_collectors_are_an_error_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with buffer(10) as buf, pipeline(buf) as pipe:
        monkeypatch.setattr(packer._core, "writers_gone", lambda memory: True)
        pipe.watch(lambda: True)
        pipe.watch(None)
        pipe.start_prepare(0, N, 11)
        with pytest.raises(PeerDiedError, match="every collector is gone"):
            pipe.wait_ready()


def test_a_packer_that_does_not_end_is_said_and_keeps_its_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    with buffer(10) as buf:
        pipe = pipeline(buf)
        with monkeypatch.context() as patch:
            patch.setattr(pipe._packer, "stop", lambda timeout: False)
            with pytest.raises(DeadlineError, match="close: the packer must end within 10 s"):
                pipe.close()
        assert pipe._slots.slot(0).shape[0] == N
        pipe.close()
        with pytest.raises(ClosedError):
            pipe._slots.slot(0)


@pytest.mark.parametrize("packed_s", [3.0, 30.0])
def test_packing_and_copying_share_one_deadline(packed_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    with buffer(10) as buf, pipeline(buf) as pipe:
        pipe.start_prepare(0, N)
        pipe.wait_ready()
        now, left, waits = [100.0], list[float](), list[Any]()

        def wait(job: Any, timeout: float | None) -> bool:
            now[0] += packed_s
            waits.append(timeout)
            return True

        monkeypatch.setattr(cpu_pinned_double_buffer, "monotonic", lambda: now[0])
        monkeypatch.setattr(pipe, "_wait", wait)
        with monkeypatch.context() as patch:
            patch.setattr(cpu_pinned_double_buffer, "SLICE_S", 60.0)
            patch.setattr(pipe._transfer, "synchronize_ready", lambda slot, timeout: left.append(timeout))
            pipe.wait_ready()
            pipe.wait_until_ready(0, N)
            pipe.wait_until_ready(0, N, timeout=5.0)
        assert left == ([17.0, 17.0, 2.0] if packed_s < 5 else [0.0, 0.0, 0.0])
        assert waits == [None, None, 5.0]  # None: a tick that fails at the same moment says why


def test_a_tick_that_fails_at_its_deadline_has_a_moment_to_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    job, waits = packer.PackJob(0, 0, 0, 0, 0, 20.0, None, end=120.0), list[float]()

    def get(timeout: float) -> None:
        waits.append(timeout)
        job.state = packer.READY

    job.done = cast(Any, SimpleNamespace(get=get))
    monkeypatch.setattr(cpu_pinned_double_buffer, "monotonic", lambda: 100.0)
    with buffer(4) as buf, pipeline(buf) as pipe, pipe._lock:
        assert pipe._wait(job, None)
    assert waits == [20.25]


def test_collectors_write_while_ticks_go_by() -> None:
    """A writer at full speed, three lanes: every batch is whole, from the snapshot or newer."""
    with buffer(capacity=96, num_lanes=3) as buf, pipeline(buf, sample_count=256) as pipe:
        stop, lanes = threading.Event(), [buf.on_lane(k) for k in range(3)]

        def write(k: int) -> None:
            n = 0
            while not stop.is_set():
                lanes[k].add(**transitions(range(n % 100_000, n % 100_000 + 5)))
                n += 5

        threads = [threading.Thread(target=write, args=(k,)) for k in range(3)]
        for thread in threads:
            thread.start()
        try:
            pipe.start_prepare(0, 256, 30)
            for t in range(25):
                batch = pipe.sample_large_batch(t, 256)
                pipe.start_prepare(t + 1, 256, headroom=5)
                ids(batch)
                pipe.after_tick()
        finally:
            stop.set()
            for thread in threads:
                thread.join()
            for lane in lanes:
                lane.close()
