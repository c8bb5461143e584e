"""Batches packed by a collector, and what becomes of a tick when that collector is killed, stopped or restarted."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest
from tests.ipc.replay_pipelines.make import N, Pipeline, add, buffer, drawn_ids, ids, pipeline
from tests.process.actor import Actor
from tests.timing import Stopwatch

from recollect.errors import (
    ClosedError,
    DeadlineError,
    EmptyError,
    LaneBusyError,
    PeerDiedError,
    PrepareError,
)
from recollect.ipc.replay_buffer import ReplayBuffer
from recollect.ipc.replay_pipelines import make_collector_pack, packer, packing, serve_pack_requests
from recollect.ipc.replay_pipelines import slots as slots_module
from recollect.ipc.replay_pipelines.slots import PackSlots, Wakeup

pytestmark = pytest.mark.process


class Collector(Actor):
    """A process that adds rows, packs when told, and dies where it is told."""

    def __init__(self, buf: ReplayBuffer, request: Any, ready: Any, slots: PackSlots) -> None:
        def die_packing() -> None:
            def half(*args: Any) -> None:
                slots.slot(args[2])[: N // 2] = 255
                os.kill(os.getpid(), signal.SIGKILL)

            packing.pack = half  # type: ignore[assignment]
            serve_pack_requests(buf, request, ready, slots, 20.0)

        super().__init__(
            add=lambda n: add(buf, n),
            serve=lambda timeout=0.0: serve_pack_requests(buf, request, ready, slots, timeout),
            enlist=lambda: slots.enlist(),
            leave=lambda: slots.close(),
            die_packing=die_packing,
        )


@pytest.fixture
def setting() -> Iterator[tuple[ReplayBuffer, tuple[Wakeup, Wakeup, PackSlots]]]:
    buf = buffer(40)
    buf.release_lane()
    pack = make_collector_pack(buf, N)
    yield buf, pack
    pack[2].cleanup()
    buf.cleanup()


def packed_by(buf: ReplayBuffer, pack: Any, **kwargs: Any) -> Pipeline:
    return pipeline(
        buf, collector_pack_request_queue=pack[0], collector_pack_ready_queue=pack[1],
        collector_pack_shared_slots=pack[2], **kwargs,
    )  # fmt: skip


def taken(pipe: Pipeline, tick: int) -> None:
    """The batch of a tick is what its metadata says."""
    batch = pipe.sample_large_batch(tick, N)
    assert pipe.metadata is not None and ids(batch) == drawn_ids(pipe.metadata)
    pipe.after_tick()


def look_never(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who waits is woken, and does not find out by itself."""
    for module in (slots_module, packing, packer):
        monkeypatch.setattr(module, "SLICE_S", 25.0)


def test_a_collector_packs(setting: Any) -> None:
    buf, pack = setting
    collector = Collector(buf, *pack)
    with packed_by(buf, pack) as pipe:
        assert pipe.transfer_manifest["pack_executor"] == "collector"
        assert collector.do("serve") == 0  # nothing asked yet, and no wait
        for t in range(4):
            pipe.start_prepare(t, N, buf.ptr + 2)
            assert collector.do("serve") == 0  # the rows are not there yet: it stays open
            collector.do("add", 2)
            assert collector.do("serve", 20.0) == 1
            assert collector.do("serve") == 0
            taken(pipe, t)
        assert pipe.stats().takeovers == 0
    collector.kill()


def test_serving_without_a_timeout_never_waits(setting: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    buf, pack = setting
    monkeypatch.setattr(packing, "_sleep", lambda *args: pytest.fail("waited"))
    assert serve_pack_requests(buf, *pack) == 0


def test_a_packing_collector_leaves_the_headroom_asked_for(setting: Any) -> None:
    buf, pack = setting
    add(buf, 24)  # now it is full
    pack[2].ask(7, 20, 0, 0)
    assert serve_pack_requests(buf, *pack) == 1
    assert pack[2].result().snapshot_size == 44


def test_a_waiting_collector_is_woken_by_the_request(setting: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    look_never(monkeypatch)
    buf, pack = setting
    collector = Collector(buf, *pack)
    with packed_by(buf, pack) as pipe:
        for t in range(5):
            collector.tell("serve", 30.0)
            taken(pipe, t)
            assert collector.answer() == 1
    collector.kill()


@pytest.mark.parametrize("when", ["before its first call", "idle", "packing"])
def test_the_learner_takes_over_from_a_killed_collector(setting: Any, when: str) -> None:
    buf, pack = setting
    collector = Collector(buf, *pack)
    collector.do("add", 3)
    with packed_by(buf, pack) as pipe:
        if when == "idle":
            collector.do("enlist")
        pipe.start_prepare(0, N)
        if when == "packing":
            collector.tell("die_packing")
            os.waitpid(collector.pid, 0)
            collector.pipe.close()
        else:
            collector.kill()
        start = Stopwatch()
        taken(pipe, 0)
        assert start.s < 1.0
        assert pipe.stats().takeovers == 1 and pipe.stats().ticks == 1
        taken(pipe, 1)  # and every later one, until somebody packs again
        assert pipe.stats().takeovers == 2
        again = Collector(buf, *pack)
        pipe.start_prepare(2, N)
        assert again.do("serve", 0.3) in (0, 1)  # 0: the learner was faster, the request is not packed twice
        taken(pipe, 2)
        pipe.start_prepare(3, N)
        assert again.do("serve", 5.0) == 1
        taken(pipe, 3)
        again.kill()


def test_a_new_collector_packs_what_a_killed_one_had_taken(setting: Any) -> None:
    buf, pack = setting
    slots = pack[2]
    number = slots.ask(7, 0, 0, 1)
    first = Collector(buf, *pack)
    first.tell("die_packing")
    os.waitpid(first.pid, 0)
    first.pipe.close()
    assert slots.stats().state == "taken"
    second = Collector(buf, *pack)
    assert second.do("serve") == 1
    assert slots.claim() == (number, 3) and slots.result().snapshot_ptr == 40
    assert not slots.take_over(number)
    second.kill()


def test_a_collector_that_leaves_is_taken_over_from_at_once(setting: Any) -> None:
    buf, pack = setting
    collector = Collector(buf, *pack)
    with packed_by(buf, pack) as pipe:
        collector.do("serve")
        pipe.start_prepare(0, N)
        collector.do("leave")
        taken(pipe, 0)
        assert pipe.stats().takeovers == 1
    collector.kill()


def test_a_stopped_collector_ends_at_the_deadline_and_its_slot_is_not_touched_until_it_is_done(
    setting: Any,
) -> None:
    buf, pack = setting
    collector = Collector(buf, *pack)
    with packed_by(buf, pack, deadline=0.2) as pipe:
        collector.do("enlist")
        os.kill(collector.pid, signal.SIGSTOP)
        with pytest.raises(DeadlineError, match="tick 0: the collector must pack it in 0.2 s"):
            pipe.sample_large_batch(0, N)
        assert pack[2].stats().state == "free"  # withdrawn
        assert pack[2].ask(1, 0, 0, 0) and pack[2].take(
            pack[2].claim()[0]
        )  # as if it had been stopped in the middle
        with pytest.raises(DeadlineError):
            pipe.sample_large_batch(0, N)
        assert pack[2].stats().state == "taken"
        pack[2].fail(pack[2].claim()[0], EmptyError("done"))
        os.kill(collector.pid, signal.SIGCONT)
        pipe.start_prepare(0, N)
        assert collector.do("serve", 5.0) == 1
        taken(pipe, 0)
    collector.kill()


@pytest.mark.parametrize("by_collector", [True, False])
def test_rows_that_no_live_collector_will_add_are_a_peer_died_error_within_a_second(
    setting: Any, by_collector: bool
) -> None:
    buf, pack = setting
    collector = Collector(buf, *pack)
    collector.do("add", 1)
    with packed_by(buf, pack) if by_collector else pipeline(buf) as pipe:
        pipe.start_prepare(0, N, buf.ptr + 1)
        assert not pipe.wait_until_ready(0, N, timeout=0.15)
        collector.kill()
        start = Stopwatch()
        with pytest.raises(
            PeerDiedError, match="tick 0: needs 42 rows, there are 41 and every collector is gone"
        ):
            pipe.wait_ready()
        assert start.s < 1.0
        taken(pipe, 0)  # with what is there


def test_where_somebody_watches_dead_collectors_are_his_affair(setting: Any) -> None:
    """A runner may start them again."""
    buf, pack = setting
    collector = Collector(buf, *pack)
    collector.do("add", 1)
    with pipeline(buf) as pipe:
        pipe.watch(lambda: True)
        pipe.start_prepare(0, N, buf.ptr + 1)
        collector.kill()
        assert not pipe.wait_until_ready(0, N, timeout=0.4)
        add(buf, 1)
        taken(pipe, 0)


def test_what_goes_wrong_in_the_collector_is_raised_in_the_learner(setting: Any) -> None:
    _, _ = setting
    with buffer(0) as buf:
        pack = make_collector_pack(buf, N)
        collector = Collector(buf, *pack)
        with packed_by(buf, pack) as pipe:
            pipe.start_prepare(0, N)
            collector.do("serve", 5.0)
            with pytest.raises(EmptyError, match="no rows to draw from"):
                pipe.wait_ready()
            pipe.start_prepare(0, N)
            number, _ = pack[2].claim()
            end = time.monotonic() + 10
            while pack[2].claim()[0] == number or not pack[2].take(pack[2].claim()[0]):
                assert time.monotonic() < end
                number = min(number, pack[2].claim()[0] - 1)
            pack[2].fail(pack[2].claim()[0], ZeroDivisionError("by zero"))
            pack[1].put(None)
            with pytest.raises(PrepareError, match="by zero"):
                pipe.wait_ready()
        collector.kill()
        pack[2].cleanup()


def test_one_process_packs(setting: Any) -> None:
    buf, pack = setting
    first, second = Collector(buf, *pack), Collector(buf, *pack)
    first.do("serve")
    with pytest.raises(LaneBusyError, match=f"process {first.pid} does"):
        second.do("serve")
    first.kill()
    assert second.do("serve") == 0
    assert pack[2].stats().packer_pid == second.pid
    second.kill()


def test_any_queue_will_do(setting: Any) -> None:
    buf, (_, _, slots) = setting
    context = multiprocessing.get_context("fork")
    request, ready = context.Queue(), context.Queue()
    collector = Collector(buf, request, ready, slots)
    with packed_by(buf, (request, ready, slots)) as pipe:
        for t in range(3):
            pipe.start_prepare(t, N)
            assert collector.do("serve", 5.0) == 1
            taken(pipe, t)
        collector.kill()
        taken(pipe, 3)
        assert pipe.stats().takeovers == 1
    for q in (request, ready):
        q.close()
        q.join_thread()


def test_closing_does_not_wait_for_the_collector(setting: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    look_never(monkeypatch)
    buf, pack = setting
    collector = Collector(buf, *pack)
    collector.do("enlist")
    pipe = packed_by(buf, pack)
    pipe.start_prepare(0, N)
    assert not pipe.wait_until_ready(0, N, timeout=0.02)
    start = Stopwatch()
    pipe.close()
    assert start.s < 1.0
    assert collector.do("serve") == 0  # the request was withdrawn
    pack[2].cleanup()
    with pytest.raises(ClosedError):
        collector.do("serve")
    collector.kill()


def spawned(buf: ReplayBuffer, request: Wakeup, ready: Wakeup, slots: PackSlots) -> None:
    served = 0
    while served < 3:
        served += serve_pack_requests(buf, request, ready, slots, 1.0)


def test_handles_are_small_and_reach_a_spawned_collector(setting: Any) -> None:
    buf, pack = setting
    assert all(len(pickle.dumps(x)) < 300 for x in pack)
    process = multiprocessing.get_context("spawn").Process(target=spawned, args=(buf, *pack))
    process.start()
    try:
        with packed_by(buf, pack, deadline=30.0) as pipe:
            for t in range(3):
                taken(pipe, t)
            assert pipe.stats().takeovers == 0
        process.join(20)
        assert process.exitcode == 0
    finally:
        process.kill()
        process.join()
        process.close()


@pytest.mark.parametrize("given", [(0,), (1,), (2,), (0, 1), (1, 2)])
def test_some_of_the_three_are_refused(setting: Any, given: tuple[int, ...]) -> None:
    buf, pack = setting
    with pytest.raises(ValueError, match=f"all three or none, got {len(given)} of them"):
        packed_by(buf, [x if i in given else None for i, x in enumerate(pack)])


def test_slots_of_another_size_are_refused(setting: Any) -> None:
    buf, pack = setting
    with pytest.raises(ValueError, match=f"must be for {N + 1} rows of .* got {N} of"):
        packed_by(buf, pack, sample_count=N + 1)
