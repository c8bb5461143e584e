"""Copies to a device in any legal order: right bytes, and every wait and record is needed."""

from __future__ import annotations

import gc
import json
import re
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests.ipc.crews import sleeps_in, wait_until
from tests.ipc.replay_pipelines.make import N, Pipeline, add, buffer, drawn_ids, ids, pipeline

from recollect.errors import ClosedError, DeadlineError, PrepareError
from recollect.ipc.replay_pipelines import TransferBackend, cpu_pinned_double_buffer, native_h2d, transfer
from recollect.ipc.replay_pipelines.transfer import StreamTransfer, make_transfer
from recollect.testing import FakeDevice
from recollect.testing.fake_device import FakeEvent, FakeRead, FakeStream, read_all

SEEDS = range(20)
TICKS = 7


def cuda() -> bool:
    torch = pytest.importorskip("torch")
    return bool(torch.cuda.is_available())


def run(
    device: Any, ticks: int = TICKS, prefetch: bool = True, between: Callable[[Pipeline], None] | None = None
) -> None:
    """A learner's loop that queues a read of every batch and looks at none of them until the end."""
    with buffer(40, capacity=64) as buf, pipeline(buf, device="fake", transfer=device, deadline=5.0) as pipe:
        queued: list[tuple[list[int], dict[str, FakeRead]]] = []
        for t in range(ticks):
            batch = pipe.sample_large_batch(t, N)
            assert pipe.metadata is not None and pipe.metadata.batch_gpu_slot == t % 2
            if prefetch:
                pipe.start_prepare(t + 1, N, headroom=10)
            queued.append((drawn_ids(pipe.metadata), read_all(device, batch)))
            add(buf, 3)
            if between is not None:
                between(pipe)
            pipe.after_tick()
        device.check()
        for expected, reads in queued:
            assert ids({name: read.value for name, read in reads.items()}) == expected
        assert pipe.stats().redrawn == 0


@pytest.mark.parametrize("prefetch", [True, False])
@pytest.mark.parametrize("seed", SEEDS)
def test_every_legal_order_gives_the_right_batches(seed: int, prefetch: bool) -> None:
    run(FakeDevice(seed), prefetch=prefetch)


def test_a_fake_device_takes_its_streams_in_random_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeDevice, "_run_some", nothing)

    def order(seed: int) -> tuple[str, ...]:
        device, ran = FakeDevice(seed), list[str]()
        for stream in [device.compute, device.new_stream()] * 10:
            device._queue(stream, lambda clock, name=stream.name: ran.append(name))  # type: ignore[misc]
        device.finish()
        return tuple(ran)

    assert len({order(seed) for seed in range(5)}) == 5
    assert order(3) == order(3)  # the seed says which


def test_on_a_fake_device_what_is_queued_may_run_at_once_and_may_wait() -> None:
    waiting = set()
    for seed in range(30):
        device = FakeDevice(seed)
        device._queue(device.compute, lambda clock: None)
        waiting.add(len(device.compute.queue))
    assert waiting == {0, 1}


def test_a_fake_device_that_is_only_asked_gets_on_too(monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice(0)
    submitted(device, monkeypatch)
    monkeypatch.undo()
    wait_until(lambda: device.ready_query(0), 20.0)
    device.close()


def copies_first(device: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing runs by itself, and then the learner's work last, as far as that is legal."""
    monkeypatch.setattr(device, "_run_some", nothing)
    monkeypatch.setattr(device._random, "choice", lambda able: able[-1])


def test_on_a_fake_device_a_wait_is_for_what_was_recorded_by_then(monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice(0)
    submitted(device, monkeypatch)
    copies_first(device, monkeypatch)
    device.wait_current_stream_for_ready(0)
    device.submit_h2d(0)
    device.read(device._blocks[0])
    with pytest.raises(AssertionError, match="device slot 0: read by read 0 while copy 0 may still write it"):
        device.close()


def test_on_a_fake_device_bytes_move_when_the_copy_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice(0)
    submitted(device, monkeypatch)
    device._host[0][...] = 7  # too late for a pipeline, in time for the copy
    device.finish()
    assert (device._blocks[0] == 7).all()
    device.close()


def test_on_a_fake_device_each_thread_waits_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice(0)
    submitted(device, monkeypatch)
    waits = threading.Thread(target=device.synchronize_ready, args=(0, 20.0))
    waits.start()
    waits.join(20)
    device.clear_ready(0)
    with pytest.raises(
        AssertionError, match="host slot 0: written by the packer while copy 0 may still use it"
    ):
        device.close()


def test_a_fake_device_times_only_what_has_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice(0)
    submitted(device, monkeypatch)
    device._started[0].elapsed_time(device._copied[0])
    with pytest.raises(AssertionError, match="event started 0: timed, .*; event copied 0: timed, "):
        device.close()


@pytest.mark.parametrize("seed", range(5))
def test_waiting_on_the_host_is_legal_too(seed: int) -> None:
    def between(pipe: Pipeline) -> None:
        assert pipe._cold is not None
        assert pipe.wait_until_ready(pipe._cold.tick, N) and pipe.batch_ready(pipe._cold.tick, N)
        pipe.wait_ready()

    run(FakeDevice(seed), between=between)


def test_copy_times_are_told() -> None:
    device = FakeDevice(0)
    with buffer(40) as buf, pipeline(buf, device="fake", transfer=device) as pipe:
        for t in range(4):
            read_all(device, pipe.sample_large_batch(t, N))
            pipe.after_tick()
        assert pipe.stats().copy_us > 0


# -- every wait and every record is needed


def nothing(*args: Any) -> None: ...


class Dropping(FakeDevice):
    """A device on which one kind of wait or record is not made."""

    def __init__(self, seed: int, call: str, name: str) -> None:
        super().__init__(seed)
        self.dropped = (call, name)

    def queue_wait(self, stream: FakeStream, event: FakeEvent) -> None:
        if self.dropped != ("wait", event.name.split()[0]):
            super().queue_wait(stream, event)

    def queue_record(self, stream: FakeStream, event: FakeEvent) -> None:
        if self.dropped != ("record", event.name.split()[0]):
            super().queue_record(stream, event)


def caught(device: FakeDevice) -> str:
    """What is said of a broken pipeline; empty if nothing is."""
    try:
        run(device)
    except (AssertionError, PrepareError, DeadlineError) as error:
        return str(error)
    return ""


DROPPED = {
    ("wait", "released"): "device slot .: written by copy . while read . may still use it",
    ("record", "released"): "event released .: .* never recorded",
    ("wait", "copied"): "device slot .: (read by read . while copy . may still write it|written by copy)",
    ("record", "copied"): "event copied .: .* never recorded",
    ("record", "started"): "event started .: timed, but it has not passed",
}


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("call", "name"), DROPPED)
def test_dropping_any_wait_or_record_of_the_backend_is_found(call: str, name: str, seed: int) -> None:
    told = caught(Dropping(seed, call, name))
    assert re.search(DROPPED[call, name], told), told


PIPELINE_CALLS = ["submit_h2d", "synchronize_ready", "wait_current_stream_for_ready", "record_release"]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("call", PIPELINE_CALLS)
def test_dropping_any_call_of_the_pipeline_is_found(
    call: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = FakeDevice(seed)
    monkeypatch.setattr(device, call, nothing)
    assert caught(device)


# Each way in which a pipeline can be wrong, by itself: what a fake device says of it, in either order of running.
WRONG: dict[str, tuple[Callable[[FakeDevice, Any], Any], str]] = {
    "a device slot written before its readers are done": (
        lambda device, block: (
            device.wait_current_stream_for_ready(0),
            device.read(block),
            device.submit_h2d(0),
        ),
        "device slot 0: (written by copy 0 while read 0 may still use|read by read 0 while copy 0 may still write) it",
    ),
    "a device slot written after some of its readers only": (
        lambda device, block: (
            device.wait_current_stream_for_ready(0),
            device.read(block),
            device.record_release(0),
            device.read(block),
            device.submit_h2d(0),
        ),
        "device slot 0: (written by copy 0 while read 0 may still use|read by read 0 while copy 0 may still write) it",
    ),
    "a read before its copy": (
        lambda device, block: device.read(block),
        "device slot 0: (read by read 0 while copy 0 may still write|written by copy 0 while read 0 may still use) it",
    ),
    "a host slot packed again before its copy": (
        lambda device, block: device.clear_ready(0),
        "host slot 0: (written by the packer while copy 0 may|read by copy 0 while the packer may) still",
    ),
    "a question about an event never recorded": (
        lambda device, block: device.new_event("x").query(),
        "event x: asked for, but it was never recorded",
    ),
}


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("wrong", WRONG)
def test_a_fake_device_finds(wrong: str, seed: int) -> None:
    device = FakeDevice(seed)
    device.register_host_slots([np.zeros((2, 4), np.uint8)])
    (block,) = device.allocate_device_slots(1)
    device.clear_ready(0)
    device.submit_h2d(0)
    do, said = WRONG[wrong]
    do(device, block)
    with pytest.raises(AssertionError, match=f"^{said}"):
        device.close()


def test_a_record_at_allocation_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice(0)
    with monkeypatch.context() as patch:
        patch.setattr(FakeEvent, "record", nothing)
        device.register_host_slots([np.zeros((2, 4), np.uint8)])
        device.allocate_device_slots(1)
    device.submit_h2d(0)
    for ends in (device.check, device.close):
        with pytest.raises(
            AssertionError, match="event released 0: side 1 waits for it, but it was never recorded"
        ):
            ends()


def test_a_first_copy_waits_for_what_was_queued_before_its_memory_was_had(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An allocator may give out what queued work still uses."""
    device, ran = FakeDevice(0), list[str]()
    copies_first(device, monkeypatch)
    device._queue(device.compute, lambda clock: ran.append("earlier work"))

    def queue_copy(to: Any, source: Any, stream: FakeStream) -> None:
        device._queue(stream, lambda clock: ran.append("copy"))

    monkeypatch.setattr(device, "queue_copy", queue_copy)
    device.register_host_slots([np.zeros((2, 4), np.uint8)])
    device.allocate_device_slots(1)
    device.submit_h2d(0)
    device.close()
    assert ran == ["earlier work", "copy"]


def test_each_tick_is_copied_once() -> None:
    device = FakeDevice(0)
    with buffer(40) as buf, pipeline(buf, device="fake", transfer=device) as pipe:
        for t in range(4):
            pipe.sample_large_batch(t, N)
            pipe.after_tick()
        assert [event.recorded for event in device._copied] == [2, 2]


# -- one backend


@contextmanager
def hanging(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A device that does nothing meanwhile."""
    goes_on = threading.Event()
    with monkeypatch.context() as patch:
        patch.setattr(FakeEvent, "query", lambda self: False)
        patch.setattr(FakeEvent, "synchronize", lambda self: goes_on.wait(20))
        try:
            yield
        finally:
            goes_on.set()


def test_a_copy_that_never_ends_is_a_deadline_error_and_does_not_poison(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cpu_pinned_double_buffer, "_GRACE_S", 20.0)  # the packer says so, however late
    device = FakeDevice(0)
    with buffer(40) as buf, pipeline(buf, device="fake", transfer=device, deadline=0.05) as pipe:
        for t in range(2):
            pipe.sample_large_batch(t, N)
            pipe.after_tick()
        with hanging(monkeypatch):
            assert not pipe.batch_ready(1, N)
            pipe.start_prepare(2, N)
            with pytest.raises(DeadlineError, match="slot 0: its copy must finish in .* does fake hang"):
                pipe.wait_ready()
        assert pipe.wait_until_ready(2, N, timeout=200)


WAITS: dict[str, Callable[[Pipeline], object]] = {
    "wait_ready": lambda pipe: pipe.wait_ready(),
    "wait_until_ready": lambda pipe: pipe.wait_until_ready(0, N),
}


@contextmanager
def hanging_tick(monkeypatch: pytest.MonkeyPatch, deadline: float) -> Iterator[Pipeline]:
    """A pipeline whose tick 0 is packed, while its copy hangs."""
    device = FakeDevice(0)
    with buffer(40) as buf, pipeline(buf, device="fake", transfer=device, deadline=deadline) as pipe:
        with hanging(monkeypatch):
            pipe.start_prepare(0, N)
            assert pipe._cold is not None
            pipe._cold.done.get(timeout=20)
            yield pipe
        with suppress(DeadlineError):
            pipe.close()


@pytest.mark.parametrize("wait", WAITS)
def test_close_wakes_whoever_waits_for_a_copy_that_hangs(wait: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with hanging_tick(monkeypatch, 20.0) as pipe:
        monkeypatch.setattr(cpu_pinned_double_buffer, "SLICE_S", 20.0)  # only waking it can be so fast
        ended: SimpleQueue[Any] = SimpleQueue()

        def run() -> None:
            try:
                ended.put(WAITS[wait](pipe))
            except Exception as error:
                ended.put(error)

        waiter, closer = threading.Thread(target=run), threading.Thread(target=pipe.close)
        waiter.start()
        wait_until(lambda: sleeps_in(waiter, "wait"), 20.0)
        closer.start()
        assert isinstance(ended.get(timeout=10), ClosedError)
    for thread in (waiter, closer):
        thread.join(20)


@pytest.mark.parametrize("wait", WAITS)
def test_a_close_that_whoever_waits_for_a_copy_has_just_missed_is_heard_at_the_next_look(
    wait: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with hanging_tick(monkeypatch, 20.0) as pipe:
        calls: list[int] = []

        def closed_meanwhile(slot: int, timeout: float) -> None:
            calls.append(slot)
            pipe._closed = True
            raise DeadlineError("late")

        with monkeypatch.context() as patch:
            patch.setattr(pipe._transfer, "synchronize_ready", closed_meanwhile)
            with pytest.raises(ClosedError):
                WAITS[wait](pipe)
        assert calls == [0]


@pytest.mark.parametrize("wait", WAITS)
def test_who_waits_for_a_copy_that_hangs_looks_after_others(
    wait: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with hanging_tick(monkeypatch, 300.0) as pipe:  # longer than a test may take
        pipe.watch(lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            WAITS[wait](pipe)


def test_a_copy_that_outlasts_the_deadline_is_told_with_its_tick_and_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with hanging_tick(monkeypatch, 0.15) as pipe:
        assert not pipe.wait_until_ready(0, N, timeout=0.0)
        assert not pipe.wait_until_ready(0, N)
        with pytest.raises(
            DeadlineError, match="tick 0: must be copied in 0.15 s, it is not; does fake hang"
        ):
            pipe.wait_ready()
        assert isinstance(pipe._transfer, FakeDevice) and pipe._transfer._waiter is not None
        assert not pipe._transfer._waiter._waits  # those that gave up are forgotten


def test_a_close_that_a_hanging_copy_stopped_may_be_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice(0)
    with buffer(40) as buf:
        pipe = pipeline(buf, device="fake", transfer=device, deadline=0.02)
        pipe.sample_large_batch(0, N)
        with hanging(monkeypatch), pytest.raises(DeadlineError, match="slot 0: its copy must finish"):
            pipe.close()
        assert device._host  # the device may still be reading it
        pipe.close()
        assert not device._host
        with pytest.raises(ClosedError):
            pipe._slots.slot(0)


def submitted(device: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """Queue a copy on a device of which nothing runs by itself."""
    device.register_host_slots([np.zeros((2, 4), np.uint8)])
    device.allocate_device_slots(1)
    monkeypatch.setattr(device, "_run_some", nothing)
    device.submit_h2d(0)


def test_a_wait_for_a_copy_is_one_wait_of_its_event(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing polls, and nobody sleeps for a while and looks again."""
    device, calls = FakeDevice(0), list[str]()
    submitted(device, monkeypatch)

    def note(name: str) -> None:
        real = getattr(FakeEvent, name)
        monkeypatch.setattr(FakeEvent, name, lambda event: (calls.append(name), real(event))[1])

    note("query")
    note("synchronize")
    device.synchronize_ready(0, 20.0)
    assert calls == ["query", "synchronize", "query"]
    device.synchronize_ready(0, 20.0)
    assert calls == ["query", "synchronize", "query", "query"]  # it is known to have finished
    device.close()


def test_waits_for_an_event_share_one_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be recorded again while one waits."""
    device, now, waits = FakeDevice(0), [100.0], list[float]()
    submitted(device, monkeypatch)
    waiter, passed = device._waiter, iter([False, False, False, True])

    def wait(event: Any, timeout: float) -> bool:
        waits.append(timeout)
        now[0] += 2.0
        return True

    with monkeypatch.context() as patch:
        patch.setattr(transfer, "monotonic", lambda: now[0])
        patch.setattr(FakeEvent, "query", lambda self: next(passed))
        patch.setattr(FakeEvent, "elapsed_time", lambda self, later: 0.0)
        device._waiter = SimpleNamespace(wait=wait)  # type: ignore[assignment]
        device.synchronize_ready(0, 3.0)
        device._waiter = waiter
    assert waits == [3.0, 1.0, 0.0]
    device.close()


def test_a_copy_is_timed_from_its_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice(0)
    submitted(device, monkeypatch)
    assert device._side is not device.current_stream()  # the learner's work does not wait for it
    device.synchronize_ready(0, 20.0)
    assert device.copy_us(0) == 2000.0  # the copy and the mark behind it, a millisecond each
    device.clear_ready(0)
    monkeypatch.setattr(FakeEvent, "query", lambda self: pytest.fail("what was copied counts no longer"))
    device.synchronize_ready(0, 20.0)
    device.close()


def test_what_the_wait_of_an_event_raises_is_raised_by_who_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice(0)
    submitted(device, monkeypatch)
    with monkeypatch.context() as patch:
        patch.setattr(FakeEvent, "synchronize", lambda self: 1 / 0)
        for _ in range(2):
            with pytest.raises(ZeroDivisionError):
                device.synchronize_ready(0, 20.0)
    device.synchronize_ready(0, 20.0)
    device.close()


def test_who_waits_for_events_keeps_no_device_and_ends_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for closes in (True, False):
        device = FakeDevice(0)
        submitted(device, monkeypatch)
        device.synchronize_ready(0, 20.0)
        assert device._waiter is not None
        waiter, gone = device._waiter.thread, weakref.ref(device)
        assert waiter.daemon  # a device that hangs keeps no interpreter
        if closes:
            device.close()
        else:
            monkeypatch.undo()
            del device
            gc.collect()
            assert gone() is None
        waiter.join(20)
        assert not waiter.is_alive()


def test_wait_ready_waits_for_the_copy_too(monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice(0)
    with buffer(40) as buf, pipeline(buf, device="fake", transfer=device) as pipe:
        monkeypatch.setattr(device, "_run_some", nothing)  # nothing runs by itself
        pipe.start_prepare(0, N)
        pipe.wait_ready()
        assert pipe.batch_ready(0, N)


def test_a_copy_under_way_is_not_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice(0)
    with buffer(40) as buf, pipeline(buf, device="fake", transfer=device) as pipe:
        with monkeypatch.context() as patch:
            patch.setattr(device, "_run_some", nothing)  # nothing runs by itself
            pipe.start_prepare(0, N)
            with hanging(patch):
                assert not pipe.wait_until_ready(0, N, timeout=0.02)
            batch = pipe.sample_large_batch(0, N)  # the host does not wait for it
            assert not pipe.batch_ready(0, N) and pipe.stats().hits == 1
            assert not batch["obs"].any()
        device.finish()
        assert pipe.batch_ready(0, N)
        assert pipe.metadata is not None and ids(batch) == drawn_ids(pipe.metadata)
        with monkeypatch.context() as patch:
            patch.setattr(device, "_run_some", nothing)
            pipe.start_prepare(1, N)
            assert pipe._cold is not None
            pipe._cold.done.get(timeout=20)
            assert pipe.batch_ready(0, N) and not pipe.batch_ready(1, N)


def test_a_failed_copy_does_not_poison(monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice(0)
    with buffer(40) as buf, pipeline(buf, device="fake", transfer=device) as pipe:
        with monkeypatch.context() as patch:
            patch.setattr(device, "queue_copy", lambda *a: 1 / 0)
            with pytest.raises(PrepareError, match="ZeroDivisionError"):
                pipe.sample_large_batch(0, N)
        work = read_all(device, pipe.sample_large_batch(0, N))
        device.check()
        assert pipe.metadata is not None
        assert ids({k: r.value for k, r in work.items()}) == drawn_ids(pipe.metadata)


@pytest.mark.parametrize("wait", [None, "wait_ready", "wait_until_ready"])
def test_on_mps_the_learners_thread_copies_when_it_first_waits(wait: str | None) -> None:
    pytest.importorskip("torch")
    from recollect.ipc.replay_pipelines.transfer_torch import MpsTransfer

    threads: list[int] = []

    class Noting(MpsTransfer):
        def submit_h2d(self, slot: int) -> None:
            threads.append(threading.get_ident())
            super().submit_h2d(slot)

    slices: list[str] = []
    recorder = SimpleNamespace(add_slice=lambda name, *args: slices.append(name), add_counter=nothing)
    with buffer(40) as buf, pipeline(buf, transfer=Noting("cpu"), trace_recorder=recorder) as pipe:
        for t in range(3):
            pipe.start_prepare(t, N)
            assert pipe._cold is not None
            pipe._cold.done.get(timeout=20)
            assert len(threads) == t and not pipe.batch_ready(t, N)  # packed, and not yet copied
            if wait is not None:
                getattr(pipe, wait)(*(() if wait == "wait_ready" else (t, N)))
                assert len(threads) == t + 1 and pipe.batch_ready(t, N)
            batch = pipe.sample_large_batch(t, N)
            assert pipe.metadata is not None and ids(batch) == drawn_ids(pipe.metadata)
            assert pipe.batch_ready(t, N) and pipe.wait_until_ready(t, N)
            pipe.after_tick()
        assert threads == [threading.get_ident()] * 3  # once each
        assert slices.count("replay_pipeline/batch_h2d_submit") == 3
        told = pipe.transfer_manifest
        assert (told["device_family"], told["h2d_submitter"]) == ("mps", "torch_copy_main_thread")
        assert (told["host_memory_kind"], told["supports_async_submit"]) == ("shared", False)


# -- the manifest


KEYS = {
    "backend", "device", "device_family", "host_memory_kind", "host_pinned", "direct_pinned_shared",
    "supports_async_submit", "supports_timing_events", "h2d_submitter", "ring_depth", "pack_executor",
    "sample_count", "row_bytes", "native_h2d",
}  # fmt: skip


@pytest.mark.parametrize(("device", "family"), [("numpy", "cpu"), ("cpu", "cpu")])
def test_the_manifest_on_the_host(device: str, family: str) -> None:
    with buffer(4) as buf, pipeline(buf, device=device) as pipe:
        manifest = pipe.transfer_manifest
        assert set(manifest) == KEYS and json.loads(json.dumps(manifest)) == manifest
        expected = {
            "device": device, "device_family": family, "host_memory_kind": "shared", "h2d_submitter": "in_place",
            "ring_depth": 2, "pack_executor": "learner_thread", "sample_count": N, "row_bytes": buf.row_nbytes,
            "host_pinned": False, "direct_pinned_shared": False, "native_h2d": native_h2d.get_diagnostic(),
            "backend": "InPlaceTransfer", "supports_async_submit": False, "supports_timing_events": False,
        }  # fmt: skip
        assert expected.items() <= manifest.items() and pipe.h2d_submitter == "in_place"
        manifest["device"] = "changed"
        pipe.sample_large_batch(0, N)
        assert pipe.transfer_manifest["device"] == device


def test_backends_have_the_calls() -> None:
    assert isinstance(FakeDevice(0), TransferBackend) and isinstance(FakeDevice(0), StreamTransfer)
    for device in ("numpy", "cpu"):
        assert isinstance(make_transfer(device), TransferBackend)


# -- the cuda backend, as far as a machine without one can tell


class FakeRuntime:
    """torch.cuda and its runtime, as far as CudaTransfer uses them."""

    def __init__(self, refuses: int) -> None:
        self.refuses, self.registered, self.calls = refuses, list[int](), 0
        self.nbytes, self.synchronized_with, self.active = list[int](), 0, None

    def cudart(self) -> FakeRuntime:
        return self

    def cudaHostRegister(self, at: int, nbytes: int, flags: int) -> int:
        self.calls += 1
        if self.calls >= self.refuses:
            return 1
        self.registered.append(at)
        self.nbytes.append(nbytes)
        return 0

    def cudaHostUnregister(self, at: int) -> int:
        self.registered.remove(at)
        return 0

    def synchronize(self, device: str) -> None:
        self.synchronized_with = len(self.registered)

    def Event(self, **kwargs: Any) -> Any:
        return kwargs

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        self.active = stream
        yield
        self.active = None


@pytest.mark.parametrize(("refuses", "kind"), [(9, "shared_registered"), (2, "shared"), (1, "shared")])
def test_host_slots_are_pinned_where_they_lie_or_the_manifest_says_not(
    refuses: int, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Without a driver private pinned memory is refused as well: pageable memory is what is left."""
    pytest.importorskip("torch")
    from recollect.ipc.replay_pipelines.transfer_torch import CudaTransfer

    if cuda():
        pytest.skip("there is a driver")
    runtime = FakeRuntime(refuses)
    transfer = CudaTransfer("cuda:0", runtime)
    slots = [np.zeros((4, 8), np.uint8) for _ in range(2)]
    transfer.register_host_slots(slots)
    told = transfer.describe()
    assert told["host_memory_kind"] == kind and told["host_pinned"] is told["direct_pinned_shared"] is (
        refuses == 9
    )
    assert told["h2d_submitter"] == "torch_copy_stream"
    assert runtime.registered == ([s.ctypes.data for s in slots] if refuses == 9 else [])  # not half of them
    assert told["supports_async_submit"] is (
        refuses == 9
    )  # from pageable memory the driver copies while we wait
    assert (
        ("refused to pin" in caplog.text) is ("copied from pageable memory" in caplog.text) is (refuses != 9)
    )
    assert told["supports_timing_events"] is True
    if refuses == 9:
        assert runtime.nbytes == [32, 32]
    transfer.close()
    assert runtime.registered == []
    assert runtime.synchronized_with == (2 if refuses == 9 else 0)  # before they were given back


def test_copies_are_queued_on_the_side_stream_and_who_waits_for_one_sleeps() -> None:
    pytest.importorskip("torch")
    from recollect.ipc.replay_pipelines.transfer_torch import CudaTransfer, TorchStreamTransfer

    runtime, copies = FakeRuntime(9), list[Any]()
    device = CudaTransfer("cuda:0", runtime)
    assert device.new_event("copied 0") == {"enable_timing": True, "blocking": True}
    assert device.new_event("released 0") == {"enable_timing": False, "blocking": True}

    class Block:
        def copy_(self, source: Any, non_blocking: bool = False) -> None:
            copies.append((runtime.active, source, non_blocking))

    TorchStreamTransfer.queue_copy(device, Block(), "rows", "side")
    assert copies == [("side", "rows", True)] and runtime.active is None


@pytest.mark.parametrize(("refuses", "submitter"), [(9, "native"), (1, "torch_copy_stream")])
def test_pinned_memory_is_copied_by_the_runtime_itself_where_that_was_found(
    refuses: int, submitter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    from recollect.ipc.replay_pipelines.transfer_torch import CudaTransfer, TorchStreamTransfer

    if cuda():
        pytest.skip("there is a driver")
    calls: list[str] = []
    monkeypatch.setattr(native_h2d, "_found", [(nothing, "a fake")])
    monkeypatch.setattr(native_h2d, "submit_h2d", lambda *args: calls.append("native"))
    monkeypatch.setattr(TorchStreamTransfer, "queue_copy", lambda *args: calls.append("torch_copy_stream"))
    device = CudaTransfer("cuda:0", FakeRuntime(refuses))
    device.register_host_slots([np.zeros((4, 8), np.uint8) for _ in range(2)])
    device.queue_copy(None, None, None)
    assert calls == [device.describe()["h2d_submitter"]] == [submitter]
    device.close()


def test_what_may_not_be_pinned_goes_through_private_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    from recollect.ipc.replay_pipelines.transfer_torch import CudaTransfer

    empty, sent = torch.empty, list[Any]()
    monkeypatch.setattr(torch, "empty", lambda *args, pin_memory, **kwargs: empty(*args, **kwargs))
    monkeypatch.setattr(StreamTransfer, "submit_h2d", lambda self, slot: sent.append(self._host[slot]))
    device, slots = CudaTransfer("cuda:0", FakeRuntime(1)), [np.zeros((4, 8), np.uint8) for _ in range(2)]
    device.register_host_slots(slots)
    told = device.describe()
    assert (told["host_memory_kind"], told["host_pinned"], told["direct_pinned_shared"]) == (
        "private_pinned", True, False,
    )  # fmt: skip
    slots[1][...] = 7
    device.submit_h2d(1)
    assert (sent[0] == 7).all() and sent[0].data_ptr() != slots[1].ctypes.data
    device.close()


def test_streams_events_and_memory_are_of_the_device_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    from recollect.ipc.replay_pipelines.transfer_torch import XpuTransfer

    module = SimpleNamespace(
        Stream=lambda device: ("side", device), current_stream=lambda device: ("current", device),
        Event=lambda enable_timing: enable_timing,
    )  # fmt: skip
    monkeypatch.setattr(torch, "xpu", module)
    device = XpuTransfer("meta:1")
    assert (device.new_stream(), device.current_stream()) == (("side", "meta:1"), ("current", "meta:1"))
    assert [device.new_event(f"{name} 0") for name in ("started", "copied", "released")] == [
        True,
        True,
        False,
    ]
    block = device.new_block(np.zeros((4, 8), np.uint8))
    assert (block.device.type, block.shape, block.dtype) == ("meta", (4, 8), torch.uint8)


def test_each_device_has_its_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    if cuda():
        pytest.skip("there is a driver")
    from recollect.ipc.replay_pipelines import transfer_torch

    monkeypatch.setattr(native_h2d, "_found", [(None, "none here")])
    for name, kind in (("cuda", "CudaTransfer"), ("xpu", "XpuTransfer"), ("mps", "MpsTransfer")):
        monkeypatch.setattr(getattr(torch, name), "is_available", lambda: True)
        made = transfer_torch.make(torch.device(name, 0))
        assert (type(made).__name__, made.describe()["device_family"]) == (kind, name)


def test_the_manifest_on_xpu() -> None:
    pytest.importorskip("torch")
    from recollect.ipc.replay_pipelines.transfer_torch import XpuTransfer

    expected = {
        "device": "xpu:0", "device_family": "xpu", "host_memory_kind": "shared", "host_pinned": False,
        "h2d_submitter": "torch_xpu_copy_stream", "supports_async_submit": True, "supports_timing_events": True,
    }  # fmt: skip
    assert expected.items() <= XpuTransfer("xpu:0").describe().items()


@pytest.mark.parametrize("prefetch", [True, False])
def test_a_real_device_gives_the_right_batches(prefetch: bool) -> None:
    if not cuda():
        pytest.skip("there is no CUDA device")
    with buffer(40) as buf, pipeline(buf, device="cuda") as pipe:
        queued = []
        for t in range(50):
            batch = pipe.sample_large_batch(t, N)
            if prefetch:
                pipe.start_prepare(t + 1, N, headroom=10)
            assert pipe.metadata is not None
            queued.append((drawn_ids(pipe.metadata), {k: v.clone() for k, v in batch.items()}))
            add(buf, 3)
            pipe.after_tick()
        for expected, copied in queued:
            assert ids({k: v.cpu() for k, v in copied.items()}) == expected
