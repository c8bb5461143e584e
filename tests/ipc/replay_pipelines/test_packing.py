"""Packing by a collector, here in the learner's process: requests, bells, takeovers, errors."""

from __future__ import annotations

import os
import pickle
import queue
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tests.ipc.crews import sleeps_in, wait_until
from tests.ipc.replay_pipelines.make import N, Pipeline, add, buffer, drawn_ids, ids, pipeline
from tests.process.actor import Actor

from recollect.errors import ClosedError, DeadlineError, EmptyError, PrepareError
from recollect.ipc.replay_buffer import ReplayBuffer
from recollect.ipc.replay_pipelines import make_collector_pack, packing, serve_pack_requests, slots
from recollect.ipc.replay_pipelines.slots import PackSlots, Wakeup

Setting = tuple[ReplayBuffer, tuple[Wakeup, Wakeup, PackSlots]]


@pytest.fixture
def setting() -> Iterator[Setting]:
    with buffer(64) as buf:
        pack = make_collector_pack(buf, N)
        yield buf, pack
        pack[2].cleanup()


def packed_by(buf: ReplayBuffer, pack: Any, **kwargs: Any) -> Pipeline:
    names = ("request_queue", "ready_queue", "shared_slots")
    return pipeline(buf, **{f"collector_pack_{k}": x for k, x in zip(names, pack)}, **kwargs)


def test_slots_serve_one_pipeline_after_another(setting: Setting) -> None:
    buf, pack = setting
    for _ in range(2):
        with packed_by(buf, pack) as pipe:
            pipe.start_prepare(0, N)
            assert serve_pack_requests(buf, *pack, 20.0) == 1
            batch = pipe.sample_large_batch(0, N)
            assert pipe.metadata is not None and ids(batch) == drawn_ids(pipe.metadata)
        assert pack[2].stats().state == "done"  # they are the caller's: no pipeline closes them


def test_close_wakes_whoever_waits_for_the_collector_to_pack(setting: Setting) -> None:
    buf, pack = setting
    pipe, errors = packed_by(buf, pack), list[Exception]()

    def run() -> None:
        try:
            pipe.sample_large_batch(0, N)  # nobody serves, and nobody started it
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        wait_until(lambda: sleeps_in(thread, "_rings"), 10.0)
    finally:
        pipe.close()
        thread.join(20)
    assert [type(error) for error in errors] == [ClosedError]


def test_a_pipeline_that_waits_for_rows_is_not_stopped_by_the_one_before(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    buf, pack = setting
    for _ in range(2):
        with packed_by(buf, pack) as pipe:
            monkeypatch.setattr(
                pipe._packer, "_collector_is_gone", lambda: True
            )  # so that its own thread waits
            pipe.start_prepare(0, N, buf.ptr + 1)
            assert not pipe.wait_until_ready(0, N, timeout=0.02)
            add(buf, 1)
            assert len(pipe.sample_large_batch(0, N)["obs"]) == N


def test_any_queue_will_do(setting: Setting) -> None:
    """What is put wakes the other side: a queue of another kind cannot be looked at by a word of the slots."""
    buf, (_, _, shared) = setting
    request, ready = queue.Queue[int](), queue.Queue[int]()
    with packed_by(buf, (request, ready, shared)) as pipe:
        pipe.start_prepare(0, N)
        assert request.get(timeout=20) == 1
        put, ready.put = ready.put, lambda number: (told.append(number), put(number))  # type: ignore[method-assign]
        told: list[int] = []
        assert serve_pack_requests(buf, request, ready, shared) == 1
        assert told == [1] and len(pipe.sample_large_batch(0, N)["obs"]) == N


@pytest.mark.parametrize("end", ["asked", "failed", "closed"])
def test_who_waits_until_the_collector_was_asked_goes_on_when_it_was_or_never_will_be(
    end: str, setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    buf, pack = setting
    ask, gate = pack[2].ask, threading.Event()

    def late(*args: Any) -> int | None:
        assert gate.wait(20) and end != "failed"
        return ask(*args)

    monkeypatch.setattr(pack[2], "ask", late)
    with packed_by(buf, pack, deadline=60.0) as pipe:
        pipe.start_prepare(0, N)
        errors: list[Exception] = []

        def run() -> None:
            try:
                pipe.wait_asked()
            except Exception as error:
                errors.append(error)

        waiter, closer = threading.Thread(target=run), threading.Thread(target=pipe.close)
        waiter.start()
        wait_until(lambda: sleeps_in(waiter, "_rings"), 10.0)
        if end == "closed":
            closer.start()
            waiter.join(9)  # the packer itself has ten seconds
            assert not waiter.is_alive()
        gate.set()
        waiter.join(20)
        assert not waiter.is_alive()
        assert [type(error) for error in errors] == ([ClosedError] if end == "closed" else [])
        if end == "asked":
            assert serve_pack_requests(buf, *pack) == 1  # at once, so before what comes next is added
        elif end == "failed":
            with pytest.raises(PrepareError):
                pipe.wait_ready()
        else:
            closer.join(20)
            with pytest.raises(ClosedError):
                pipe.wait_asked()


def test_who_waits_until_the_collector_was_asked_looks_after_others(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    buf, pack = setting
    ask, gate = pack[2].ask, threading.Event()
    monkeypatch.setattr(pack[2], "ask", lambda *args: ask(*args) if gate.wait(20) else None)
    with packed_by(buf, pack, deadline=60.0) as pipe:
        pipe.start_prepare(0, N)
        pipe.watch(lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            pipe.wait_asked()
        pipe.watch(gate.set)
        pipe.wait_asked()


def test_nobody_waits_for_a_collector_to_be_asked_where_the_learner_packs() -> None:
    with buffer(8) as buf, pipeline(buf) as pipe:
        pipe.wait_asked()  # nothing is pending
        pipe.start_prepare(0, N, buf.ptr + 1)
        assert pipe._cold is not None
        never = SimpleNamespace(get=lambda timeout: pytest.fail("waited"), put=lambda item: None)
        pipe._cold.asked = never  # type: ignore[assignment]
        pipe.wait_asked()
        add(buf, 1)
        pipe.wait_until_ready(0, N, timeout=200)


def test_before_anybody_packs_the_live_writers_are_waited_for(setting: Setting) -> None:
    buf, pack = setting
    with packed_by(buf, pack) as pipe:
        assert pack[2].packer_is_gone() is None and not pipe._packer._collector_is_gone()


def test_without_a_floor_the_collector_is_asked_for_all_that_was_there(setting: Setting) -> None:
    buf, pack = setting
    with packed_by(buf, pack) as pipe:
        pipe.start_prepare(0, N)
        wait_until(lambda: pack[2].request() is not None, 20.0)
        request = pack[2].request()
        assert request is not None and request.floor == buf.ptr
        assert serve_pack_requests(buf, *pack) == 1


def test_a_request_that_nobody_took_in_time_is_withdrawn(setting: Setting) -> None:
    buf, pack = setting
    with packed_by(buf, pack, deadline=0.02) as pipe:
        pipe.start_prepare(0, N)
        with pytest.raises(DeadlineError, match="the collector must pack it in 0.02 s"):
            pipe.wait_ready()
        assert pack[2].stats().state == "free" and serve_pack_requests(buf, *pack) == 0


def test_who_serves_sleeps_until_there_is_a_request(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    buf, pack = setting
    sleeps: list[float] = []

    def sleep(request: Any, seconds: float) -> None:
        sleeps.append(seconds)
        if len(sleeps) == 3:
            pack[2].ask(1, 0, 0, 0)

    monkeypatch.setattr(packing, "_sleep", sleep)
    assert serve_pack_requests(buf, *pack, 5.0) == 1
    assert len(sleeps) == 3 and all(0 < s <= 0.1 for s in sleeps)
    for timeout in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="timeout"):
            serve_pack_requests(buf, *pack, timeout)


def test_who_serves_sleeps_until_the_rows_are_there(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    buf, pack = setting
    real, waits = packing.wait_for_rows, list[float]()

    def wait(buffer: Any, shared: Any, floor: int, timeout: float) -> int:
        waits.append(timeout)
        if len(waits) == 3:
            add(buf, 1)
            return real(buffer, shared, floor, timeout)
        return packing.TIMED_OUT

    monkeypatch.setattr(packing, "wait_for_rows", wait)
    pack[2].ask(1, 0, buf.ptr + 1, 0)
    assert serve_pack_requests(buf, *pack, 5.0) == 1
    assert len(waits) == 3 and all(0 < s <= 0.1 for s in waits)


def test_a_request_that_was_withdrawn_meanwhile_is_not_packed(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    buf, pack = setting
    pack[2].ask(1, 0, 0, 0)
    monkeypatch.setattr(pack[2], "take", lambda number: not pack[2].cancel(number))
    monkeypatch.setattr(packing, "pack", lambda *args: pytest.fail("packed"))
    assert serve_pack_requests(buf, *pack) == 0 and pack[2].stats().state == "free"


def test_an_open_request_is_replaced_unless_it_is_taken_meanwhile(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = setting[1][2]
    assert (shared.ask(1, 0, 0, 0), shared.ask(2, 0, 0, 0)) == (1, 2)
    assert shared.take(2)
    monkeypatch.setattr(shared, "claim", lambda: (2, slots.OPEN))
    assert shared.ask(3, 0, 0, 0) is None
    monkeypatch.undo()
    assert shared.claim() == (2, slots.TAKEN)


def test_what_a_collector_has_taken_holds_up_the_next_request_until_it_is_done_or_dead(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = setting[1][2]
    shared.enlist()
    assert shared.ask(1, 0, 0, 0) == 1 and shared.take(1)
    assert shared.ask(2, 0, 0, 0) is None  # it may still write the slot
    assert shared.claim() == (1, slots.TAKEN)
    monkeypatch.setattr(shared, "packer_is_gone", lambda: True)
    assert shared.ask(2, 0, 0, 0) == 2
    assert not shared.take(1) and shared.take(2)


def test_a_fork_of_the_packing_process_is_another_process(setting: Setting) -> None:
    shared = setting[1][2]
    shared._enlisted = (os.getpid() + 1, 12345)  # as the fork sees what its parent was
    shared.enlist()
    assert shared.stats().packer_pid == os.getpid()
    other, word = slots._attach(shared.name), shared._enlisted[1]
    other._enlisted = (os.getpid() + 1, word)
    other.close()
    assert shared.stats().packer_pid == os.getpid()  # a fork that closes gives up nothing of its parent's


def test_errors_are_told_as_far_as_there_is_room(setting: Setting) -> None:
    shared = setting[1][2]
    for error in (ValueError("x" * 2000), KeyError("y")):
        number = shared.ask(1, 0, 0, 0)
        assert number is not None and shared.take(number)
        shared.fail(number, error)
        name, text = shared.error()
        assert name == type(error).__name__
        assert text == ("x" * (512 - len("ValueError\n")) if name == "ValueError" else "'y'")


def test_who_waits_at_a_bell_is_woken_when_the_owner_cleans_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slots, "SLICE_S", 30.0)
    with buffer(4) as buf:
        pack = make_collector_pack(buf, N)
        closed = list[int]()

        def wait(bell: Wakeup) -> None:
            with pytest.raises(ClosedError):
                bell.get(True, 30.0)
            closed.append(1)

        threads = [threading.Thread(target=wait, args=(bell,)) for bell in pack[:2]]
        for thread in threads:
            thread.start()
            wait_until(lambda thread=thread: sleeps_in(thread, "get"), 10.0)  # type: ignore[misc]
        pack[2].cleanup()
        for thread in threads:
            thread.join(10.0)
        assert closed == [1, 1]


@pytest.mark.process
def test_another_process_that_cleans_up_closes_for_itself_only(setting: Setting) -> None:
    _, (_, _, shared) = setting
    other = Actor(cleanup=lambda: shared.cleanup(), slot=lambda: shared.slot(0).shape)
    other.do("cleanup")
    with pytest.raises(ClosedError):
        other.do("slot")
    assert shared.slot(0).shape[0] == N
    other.kill()


def test_a_tick_that_is_taken_over_leaves_the_headroom_asked_for(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    buf, pack = setting
    with packed_by(buf, pack) as pipe:
        monkeypatch.setattr(pipe._packer, "_collector_is_gone", lambda: True)
        pipe.start_prepare(0, N, headroom=20)
        pipe.sample_large_batch(0, N)
        assert pipe.metadata is not None and pipe.metadata.snapshot_size == 44
        assert pipe.stats().takeovers == 1 and pack[2].stats().state == "learner"


@pytest.mark.parametrize(
    ("error", "raised_here", "told"),
    [
        (EmptyError("none"), False, EmptyError),
        (ClosedError("closed"), True, ClosedError),
        (ZeroDivisionError("a bug"), True, PrepareError),
    ],
)
def test_what_goes_wrong_is_told_to_the_learner_and_what_is_no_error_of_a_tick_is_raised_here_too(
    error: Exception, raised_here: bool, told: Any, setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    buf, pack = setting
    request, ready, shared = pack
    with packed_by(buf, pack) as pipe:
        pipe.start_prepare(0, N)
        rung = shared.mapping.load(slots.READY_AT)
        with monkeypatch.context() as patch:
            patch.setattr(packing, "pack", lambda *args: (_ for _ in ()).throw(error))
            if raised_here:
                with pytest.raises(type(error)):
                    serve_pack_requests(buf, request, ready, shared, 20.0)
            else:
                assert serve_pack_requests(buf, request, ready, shared, 20.0) == 1
        assert shared.mapping.load(slots.READY_AT) == rung + 1  # the learner is not left to look again
        with pytest.raises(told, match=str(error)):
            pipe.wait_ready()


def test_a_request_that_is_replaced_while_it_is_read_is_not_taken(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, (_, _, shared) = setting
    assert shared.ask(1, 0, 0, 0) == 1
    states = iter([(1, slots.OPEN), (2, slots.OPEN)])
    with monkeypatch.context() as patch:
        patch.setattr(shared, "claim", lambda: next(states))
        assert shared.request() is None  # the words may be of both
    found = shared.request()
    assert found is not None and (found.number, found.sample_seed) == (1, 1)


@pytest.mark.parametrize("which", [0, 1])
def test_a_bell_rings_once_for_who_has_heard_it(setting: Setting, which: int) -> None:
    bell = setting[1][which]
    for _ in range(2):
        with pytest.raises(queue.Empty):
            bell.get(False)
        with pytest.raises(queue.Empty):
            bell.get(True, 0.0)
        bell.put("anything")
        bell.put("anything")
        assert bell.get(True, 0.0) > 1
    with pytest.raises(ValueError, match="timeout"):
        bell.get(True, float("inf"))


def test_who_waits_at_a_bell_looks_round_ten_times_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    now, slept = [100.0], list[float]()

    def wait(at: int, seen: int, timeout: float) -> None:
        slept.append(timeout)
        now[0] += timeout

    monkeypatch.setattr(slots, "monotonic", lambda: now[0])
    words = SimpleNamespace(load=lambda at: 0, wait=wait)
    with pytest.raises(queue.Empty):
        Wakeup(cast(Any, SimpleNamespace(mapping=words)), 0).get(True, 0.25)
    assert slept == pytest.approx([0.1, 0.1, 0.05])


def test_a_packer_that_is_to_stop_does_not_wait_for_its_collector(setting: Setting) -> None:
    _, (_, ready, shared) = setting
    shared.stop()
    assert ready.get(True, 0.0)


@pytest.mark.parametrize("which", [0, 1])
def test_a_bell_arrives_elsewhere_as_the_one_it_is(setting: Setting, which: int) -> None:
    bell = setting[1][which]
    other = pickle.loads(pickle.dumps(bell))
    other.put("anything")
    assert bell.get(True, 0.0)
    other._slots.close()


def test_who_has_left_is_not_named_as_the_packer(setting: Setting) -> None:
    buf, pack = setting
    assert pack[2].stats().packer_pid is None
    serve_pack_requests(buf, *pack)
    other = slots._attach(pack[2].name)
    assert other.stats().packer_pid is not None
    rung = other.mapping.load(slots.READY_AT)
    pack[2].close()
    assert other.mapping.load(slots.READY_AT) == rung + 1  # the learner is not left to look again
    assert other.stats().packer_pid is None and other.packer_is_gone()
    add(buf, 1)
    other.close()
