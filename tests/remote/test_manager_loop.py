"""The manager's loop over a carrier that does as it is told: answers on their way, silence, and the end."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from tests.remote.make import PLAIN, SAMPLE, samples

from recollect.errors import (
    ClosedError,
    DeadlineError,
    FrameError,
    PeerDiedError,
)
from recollect.remote import (
    Checkpoint,
    Limits,
    ReplayBufferManager,
    Shards,
)
from recollect.remote.frame import decode, encode
from recollect.remote.manager.protocol import Reply
from recollect.remote.messages import Exit, Goodbye, Items, Sample

INF = float("inf")


def manager(env: Any = SAMPLE, n: int | None = 1, **kw: Any) -> ReplayBufferManager:
    return ReplayBufferManager(env, 1, n, **kw)


class Handle:
    """A send that completes when it is told to."""

    def __init__(self) -> None:
        self.is_done = False

    def is_complete(self) -> bool:
        return self.is_done


class Lazy:
    """A carrier whose sends complete when they are told to."""

    rank, size, max_frame, is_closed = 1, None, 1 << 20, False

    def __init__(self) -> None:
        self.sent: list[tuple[str, int]] = []
        self.handles: list[Handle] = []
        self.frames: list[tuple[int, int, memoryview]] = []

    def send(self, dest: int, tag: int, parts: Any, timeout: float = 30.0) -> None:
        self.sent.append(("send", dest))

    def isend(self, dest: int, tag: int, parts: Any) -> Any:
        self.sent.append(("isend", dest))
        self.handles.append(Handle())
        return self.handles[-1]

    def recv(self, source: int = -1, tag: int = -1, timeout: float = 30.0) -> Any:
        if not self.frames:
            raise DeadlineError("nothing")
        return self.frames.pop(0)

    def alive(self) -> frozenset[int]:
        return frozenset()

    def close(self) -> None:
        pass


def test_the_pages_hooks_receive_answer_and_prune() -> None:
    carrier = Lazy()
    m = manager(n=None, communication_backend=carrier)
    frame = memoryview(b"".join(encode(Exit(1, bytes(16), 0, ""))))
    carrier.frames = [(4, 0, frame)] * 3
    rank, message, nbytes = m._recv_object()
    assert (rank, type(message.message), nbytes) == (4, Exit, frame.nbytes)
    m._handle_message_async(rank, message, nbytes)
    m._handle_message_sync(*m._recv_object())
    assert carrier.sent == [("isend", 4), ("send", 4)] and len(m._pending_sends) == 1
    assert m.stats().pending_sends == 1
    carrier.handles[0].is_done = True
    m._prune_completed_sends()
    assert m._pending_sends == []
    m._handle_message_async(*m._recv_object())
    carrier.handles[1].is_done = True
    m._loop.answer([], is_async=True)  # pruned at every message
    assert m._pending_sends == []
    with pytest.raises(DeadlineError):
        m._recv_object()


@pytest.mark.parametrize("error", [PeerDiedError, ClosedError, DeadlineError])
def test_an_answer_that_can_never_be_sent_is_forgotten(error: type[Exception]) -> None:
    carrier = Lazy()
    m = manager(n=None, communication_backend=carrier)
    m._loop.answer([Reply(4, 0, [b"x"]), Reply(5, 0, [b"y"])], is_async=True)
    assert len(m._pending_sends) == 2

    def gone() -> bool:
        raise error("rank 4: is gone")

    carrier.handles[0].is_complete = gone  # type: ignore[method-assign]
    m._prune_completed_sends()
    assert [pending.dest for pending in m._pending_sends] == [5]


@pytest.mark.parametrize("error", [FrameError, ValueError, PeerDiedError, DeadlineError])
@pytest.mark.parametrize("is_async", [True, False])
def test_an_answer_that_a_carrier_refuses_is_counted_and_the_next_one_sent(
    error: type[Exception], is_async: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    carrier = Lazy()
    m = manager(n=None, communication_backend=carrier)

    def refuse(dest: int, *args: Any) -> Any:
        if dest == 4:
            raise error("no")
        carrier.sent.append(("sent", dest))
        return Handle()

    monkeypatch.setattr(carrier, "isend" if is_async else "send", refuse)
    m._loop.answer([Reply(4, 0, [b"x"]), Reply(5, 0, [b"y"])], is_async)
    assert carrier.sent == [("sent", 5)] and m.stats().unsent == 1


@pytest.mark.parametrize("n", [0, None])
def test_what_is_over_before_it_begins_takes_no_message(n: int | None) -> None:
    carrier = Lazy()
    carrier.frames = [(4, 0, memoryview(b"".join(encode(Exit(1, bytes(16), 0, "")))))]
    m = manager(n=n, communication_backend=carrier)
    if n is None:
        m.stop()
    m.run()
    assert len(carrier.frames) == 1 and not m.is_running
    m.close()


def test_while_the_last_answers_leave_who_speaks_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    carrier = Lazy()
    m = manager(n=None, communication_backend=carrier, limits=Limits(drain_s=10.0))
    m._loop.answer([Reply(4, 0, [b"x"])], is_async=True)
    carrier.frames = [(5, 0, memoryview(b"".join(encode(Exit(1, bytes(16), 0, "")))))]
    isend = carrier.isend

    def noted(dest: int, tag: int, parts: Any) -> Any:
        handle = isend(dest, tag, parts)
        for one in carrier.handles:
            one.is_done = True
        return handle

    monkeypatch.setattr(carrier, "isend", noted)
    m.stop()
    m.run()
    assert carrier.sent == [("isend", 4), ("isend", 5)] and m._pending_sends == []
    m.close()


def test_where_no_death_is_seen_nobody_is_answered_after_the_end() -> None:
    """Over MPI a rank ends by finalising it: no thread may still be in it."""
    carrier = Lazy()
    carrier.sees_death = False  # type: ignore[attr-defined]
    m = manager(n=0, communication_backend=carrier)
    m.run()
    assert m._loop._late_thread is None
    m.close()


@pytest.mark.parametrize("next_step", ["run", "close"])
def test_who_answers_late_has_ended_before_the_manager_goes_on(
    next_step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    carrier, at_work, goes_on = Lazy(), threading.Event(), threading.Event()
    seen: list[bool] = []

    def recv(*args: Any, **kw: Any) -> Any:
        at_work.set()
        seen.append(goes_on.wait(0.2))
        raise ClosedError("closed")

    m = manager(n=None, communication_backend=carrier)
    m._workers.admit(0, "elsewhere", 0, 0.0)
    m.stop()
    m.run()
    monkeypatch.setattr(carrier, "recv", recv)
    assert at_work.wait(10)
    monkeypatch.setattr(m._workers, "begin", lambda now: goes_on.set())
    monkeypatch.setattr(m._protocol, "close", goes_on.set)
    getattr(m, next_step)()
    assert goes_on.is_set() and seen == [False]
    monkeypatch.undo()
    m.close()


@pytest.mark.parametrize("error", [PeerDiedError, DeadlineError, ValueError])
def test_another_manager_that_is_not_there_stops_nobody(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    carrier, asked = Lazy(), []
    m = manager(n=None, communication_backend=carrier, shards=Shards((0, 1, 2)))

    def refuse(dest: int, *args: Any) -> Any:
        asked.append(dest)
        raise error("no")

    monkeypatch.setattr(carrier, "isend", refuse)
    m._loop._tick(100.0)
    assert asked == [0, 2]


def test_a_carrier_that_is_closed_is_no_failure_of_the_manager(monkeypatch: pytest.MonkeyPatch) -> None:
    carrier, tried = Lazy(), threading.Event()

    def closed(*args: Any, **kw: Any) -> Any:
        tried.set()
        raise ClosedError("closed")

    monkeypatch.setattr(carrier, "recv", closed)
    m = manager(n=None, communication_backend=carrier).start()
    assert tried.wait(10)
    m.close()
    assert not m.is_running


def test_a_frame_larger_than_the_carrier_should_give_is_refused() -> None:
    carrier = Lazy()
    m = manager(n=None, communication_backend=carrier)
    most = memoryview(b"".join(encode(Exit(1, bytes(16), 0, ""))))
    for max_frame, is_refused in ((most.nbytes, False), (most.nbytes - 1, True)):
        carrier.max_frame, carrier.frames = max_frame, [(4, 0, most)]
        _, received, _ = m._recv_object()
        assert (received.error is not None) == is_refused and (received.message is None) == is_refused


@pytest.mark.parametrize("is_taken", [True, False])
def test_at_the_end_answers_get_a_moment(monkeypatch: pytest.MonkeyPatch, is_taken: bool) -> None:
    carrier, now = Lazy(), [0.0]
    m = manager(n=None, communication_backend=carrier, limits=Limits(drain_s=5.0))

    def nothing(*args: Any, timeout: float, **kw: Any) -> Any:
        now[0] += max(timeout, 0.01)
        carrier.handles[0].is_done = is_taken and now[0] > 2.0
        raise DeadlineError("nothing")

    monkeypatch.setattr("recollect.remote.manager.loop.monotonic", lambda: now[0])
    carrier.recv = nothing  # type: ignore[method-assign]
    m._loop.answer([Reply(0, 0, [b""])], is_async=True)
    m._loop._finish(carrier, True)
    m._loop.is_closed.set()
    assert now[0] == pytest.approx(2.0 if is_taken else 5.0, abs=0.2)


def test_silence_counts_from_the_last_message_where_no_death_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("recollect.remote.manager.loop.monotonic", lambda: now[0])
    carrier = Lazy()
    carrier.sees_death = False  # type: ignore[attr-defined]
    m = manager(n=2, communication_backend=carrier, limits=Limits(silence_s=5.0))
    m._workers.admit(0, "elsewhere", 0, 0.0)
    for now[0] in (4.0, 8.0):
        carrier.frames = [(0, 0, memoryview(b"".join(encode(Goodbye(1)))))]
        m._handle_message_async(*m._recv_object())
        m._loop._tick(now[0])
        assert m.exit_counter == 0
    m._loop._tick(13.1)
    assert m.exit_counter == 1


def test_answers_that_a_worker_does_not_take_are_bounded_and_others_are_not_held_up() -> None:
    class Stuck:
        def is_complete(self) -> bool:
            return False

    class Never:
        def isend(self, dest: int, tag: int, parts: Any) -> Any:
            return Stuck()

    m = manager(limits=Limits(max_window=4))
    for _ in range(20):
        m._loop._answer_soon(Never(), Reply(0, 0, []))  # type: ignore[arg-type]
    assert len(m._pending_sends) == 5 and m._loop.unsent == 15
    m._loop._answer_soon(Never(), Reply(3, 0, []))  # type: ignore[arg-type]
    assert len(m._pending_sends) == 6


@pytest.mark.parametrize("power_safe", [False, True])
def test_who_does_not_take_its_items_is_given_no_more_and_others_are_served(
    tmp_path: Path, power_safe: bool
) -> None:
    """Each draw would cost its memory and the time of all; also if one sync of the log serves all at hand."""
    carrier = Lazy()
    checkpoint = Checkpoint(tmp_path, power_safe=power_safe)
    with manager(PLAIN, None, communication_backend=carrier, checkpoint=checkpoint) as m:
        m.add(samples([1]))
        many, few = (
            memoryview(b"".join(encode(Sample(1, n, "uniform", True)))) for n in (carrier.max_frame // 4, 2)
        )
        carrier.frames = [(0, 0, many)] * 5 + [(5, 0, few)]
        while carrier.frames:
            m._loop._serve(m._recv_object, m._handle_message_async, True)
        n_parts = 3  # of an answer that is twice as large as a frame
        assert carrier.sent == [("isend", 0)] * n_parts + [("isend", 5)] and m.stats().unsent == 4
        for handle in carrier.handles:
            handle.is_done = True
        carrier.frames = [(0, 0, many)]
        m._loop._serve(m._recv_object, m._handle_message_async, True)
        assert len(carrier.sent) == 2 * n_parts + 1


def test_a_draw_is_sent_whole_however_many_parts_it_has() -> None:
    """Of one that lacks a part nothing could be used, and the next answer would lack it too."""
    carrier, drawn = Lazy(), []

    def isend(dest: int, tag: int, parts: Any) -> Handle:
        drawn.append(decode(b"".join(parts))[0])
        return Handle()

    carrier.max_frame, carrier.isend = 1 << 14, isend  # type: ignore[method-assign]
    with manager(PLAIN, None, communication_backend=carrier, limits=Limits(max_window=4, drain_s=0.0)) as m:
        m.add(samples([1]))
        sample, leave = Sample(1, 100_000, "uniform", True), Exit(2, bytes(16), 0, "")
        carrier.frames = [(0, 0, memoryview(b"".join(encode(message)))) for message in (sample, leave)]
        while carrier.frames:
            m._loop._serve(m._recv_object, m._handle_message_async, True)
        *items, goodbye = drawn
        assert sum(message.n for message in items if isinstance(message, Items)) == 100_000
        assert isinstance(goodbye, Goodbye) and len(items) > 40 and m.stats().unsent == 0
