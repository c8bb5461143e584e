"""The manager's loop: answers that stay under way, carriers that refuse, silence, and the end."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from tests.remote.make import PLAIN, samples
from tests.remote.scripted import Peer, ScriptedCarrier

from recollect.errors import ClosedError, DeadlineError, FrameError, PeerDiedError
from recollect.remote import Checkpoint, Limits, ReplayBufferManager, Shards
from recollect.remote.frame import encode
from recollect.remote.messages import Exit, Goodbye, Items, Sample, Welcome
from recollect.testing.carrier_contract import SOON, eventually

EXIT = b"".join(encode(Exit(1, bytes(16), 0, "")))
_made: list[ReplayBufferManager] = []


@pytest.fixture(autouse=True)
def _managers_are_closed() -> Iterator[None]:
    yield
    while _made:
        m = _made.pop()
        m.communication_backend.close()
        m.close()


def manager(
    carrier: ScriptedCarrier, n: int | None = None, env: Any = PLAIN, **kw: Any
) -> ReplayBufferManager:
    m = ReplayBufferManager(env, carrier.rank, n, communication_backend=carrier, **kw)
    _made.append(m)
    return m


def sample(n: int) -> bytes:
    return b"".join(encode(Sample(1, n, "uniform", True)))


def test_the_hooks_of_the_page_receive_answer_and_prune() -> None:
    carrier = ScriptedCarrier()
    carrier.holds = True
    m = manager(carrier)
    for _ in range(3):
        carrier.give(4, EXIT)
    rank, message, nbytes = m._recv_object()
    assert (rank, type(message.message), nbytes) == (4, Exit, len(EXIT))
    m._handle_message_async(rank, message, nbytes)
    m._handle_message_sync(*m._recv_object())
    assert [how for how, *_ in carrier.sent] == ["isend", "send"] and len(m._pending_sends) == 1
    assert m.stats().pending_sends == 1
    carrier.handles[0].is_done = True
    m._prune_completed_sends()
    assert m._pending_sends == []
    m._handle_message_async(*m._recv_object())
    carrier.handles[1].is_done = True
    carrier.give(4, b"rubbish")
    m._handle_message_async(*m._recv_object())  # it prunes at every message
    assert m._pending_sends == []
    with pytest.raises(DeadlineError):
        m._recv_object()


@pytest.mark.parametrize("error", [PeerDiedError, ClosedError, DeadlineError])
def test_an_answer_that_can_never_be_sent_is_forgotten(error: type[Exception]) -> None:
    carrier = ScriptedCarrier()
    carrier.holds = True
    m = manager(carrier).start()
    for rank in (4, 5):
        carrier.exchange(rank, EXIT)
    assert m.stats().pending_sends == 2
    carrier.handles[0].error = error("rank 4: is gone")
    eventually(lambda: [pending.dest for pending in m._pending_sends] == [5])


@pytest.mark.parametrize("error", [FrameError, ValueError, PeerDiedError, DeadlineError])
@pytest.mark.parametrize("is_async", [True, False])
def test_an_answer_that_a_carrier_refuses_is_counted_and_the_next_one_sent(
    error: type[Exception], is_async: bool
) -> None:
    carrier = ScriptedCarrier()

    def refuse(dest: int) -> None:
        if dest == 4:
            raise error("no")

    carrier.on_send = refuse
    m = manager(carrier).start(async_send=is_async)
    assert carrier.exchange(4, EXIT) == [] and len(carrier.exchange(5, EXIT)) == 1
    assert m.stats().unsent == 1


@pytest.mark.parametrize("n", [0, None])
def test_a_manager_that_is_over_before_it_begins_takes_no_message(n: int | None) -> None:
    carrier = ScriptedCarrier()
    carrier.give(4, EXIT)
    m = manager(carrier, n)
    if n is None:
        m.stop()
    m.run()
    assert carrier.sent == [] and not m.is_running


def test_peers_that_speak_while_the_last_answers_leave_are_answered() -> None:
    carrier = ScriptedCarrier()
    carrier.holds = True
    m = manager(carrier, limits=Limits(drain_s=SOON)).start()
    carrier.exchange(4, EXIT)

    def let_go(dest: int) -> None:
        for handle in carrier.handles:
            handle.is_done = True
        carrier.holds = False

    carrier.on_send = let_go
    m.stop()
    carrier.exchange(5, EXIT)
    eventually(lambda: m.stats().pending_sends == 0)
    assert [dest for _, dest, *_ in carrier.sent] == [4, 5] and not m.is_running


def test_a_manager_where_no_death_is_seen_answers_nothing_after_its_end() -> None:
    """Over MPI a rank ends by finalising it: no thread may still be in it."""
    carrier = ScriptedCarrier(OWN, sees_death=False)
    m = manager(carrier, 1).start()
    peer = Peer(m)
    peer.hello()
    carrier.give(0, b"".join(encode(Exit(3, peer.writer, 0, ""))))
    eventually(lambda: not m.is_running)
    m.close()
    carrier.give(0, EXIT)
    assert [type(message) for *_, message in carrier.sent] == [Welcome, Goodbye] and late_threads() == []


OWN = 77  # the rank of managers whose threads are counted


def late_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == f"recollect-late-{OWN}"]


def test_the_thread_that_answers_late_has_ended_before_the_manager_runs_again_or_is_closed() -> None:
    m = manager(ScriptedCarrier(OWN)).start()
    peer = Peer(m)
    for next_step in ("run", "close"):
        assert isinstance(peer.hello(), Welcome) and late_threads() == []
        m.stop()
        eventually(late_threads)
        assert peer.hello().error == "ClosedError"
        if next_step == "run":
            m.is_running = True
            eventually(lambda: started(m))
    m.close()
    assert late_threads() == []


def started(m: ReplayBufferManager) -> bool:
    with suppress(RuntimeError):  # the thread of the run before is still about to end
        return bool(m.start())
    return False


@pytest.mark.parametrize("error", [PeerDiedError, DeadlineError, ValueError])
def test_another_manager_that_is_not_there_stops_nothing(error: type[Exception]) -> None:
    carrier, asked = ScriptedCarrier(1), []

    def refuse(dest: int) -> None:
        asked.append(dest)
        if dest in (0, 2):
            raise error("no")

    carrier.on_send = refuse
    manager(carrier, shards=Shards((0, 1, 2))).start()
    eventually(lambda: len(asked) >= 2)
    assert asked[:2] == [0, 2] and len(carrier.exchange(5, EXIT)) == 1


def test_a_carrier_that_is_closed_is_no_failure_of_the_manager() -> None:
    carrier = ScriptedCarrier()
    m = manager(carrier).start()
    carrier.close()
    m.close()
    assert not m.is_running


def test_a_frame_larger_than_the_carrier_should_give_is_refused() -> None:
    carrier = ScriptedCarrier()
    m = manager(carrier).start()
    for max_frame, n_malformed in ((len(EXIT), 0), (len(EXIT) - 1, 1)):
        carrier.max_frame = max_frame
        assert len(carrier.exchange(4, EXIT)) == 1 - n_malformed and m.stats().malformed == n_malformed


@pytest.mark.parametrize("is_taken", [True, False])
def test_at_the_end_answers_have_drain_s_to_leave(is_taken: bool) -> None:
    carrier = ScriptedCarrier()
    carrier.holds = True
    m = manager(carrier, limits=Limits(drain_s=SOON if is_taken else 0.05))
    with ThreadPoolExecutor(1) as beside:
        run = beside.submit(m.run)
        carrier.exchange(4, EXIT)
        m.stop()
        if is_taken:
            eventually(lambda: not m.is_running)
            assert not run.done()
            carrier.handles[0].is_done = True
        assert run.result(SOON).pending_sends == (0 if is_taken else 1)


def test_silence_counts_where_no_death_is_seen() -> None:
    m = manager(ScriptedCarrier(sees_death=False), 2, limits=Limits(silence_s=0.2)).start()
    Peer(m).hello()
    eventually(lambda: m.exit_counter == 1)
    assert m.stats().senders[0].state == "left"


def test_answers_that_a_worker_does_not_take_are_bounded_and_others_are_not_held_up() -> None:
    carrier = ScriptedCarrier()
    carrier.holds = True
    m = manager(carrier, limits=Limits(max_window=4, drain_s=0.0)).start()
    for _ in range(20):
        carrier.exchange(0, EXIT)
    assert (m.stats().pending_sends, m.stats().unsent) == (5, 15)
    carrier.exchange(3, EXIT)
    assert m.stats().pending_sends == 6


@pytest.mark.parametrize("power_safe", [False, True])
def test_a_peer_that_does_not_take_its_items_is_given_no_more_and_others_are_served(
    tmp_path: Path, power_safe: bool
) -> None:
    """Each draw would cost its memory and the time of all; also if one sync of the log serves all at hand."""
    carrier = ScriptedCarrier(max_frame=1 << 20)
    carrier.holds = True
    checkpoint = Checkpoint(tmp_path, power_safe=power_safe)
    m = manager(carrier, checkpoint=checkpoint, limits=Limits(drain_s=0.0))
    m.add(samples([1]))
    for _ in range(5):
        carrier.give(0, sample(carrier.max_frame // 4))
    carrier.give(5, sample(2))
    m.start()
    carrier.settle()
    n_parts = 3  # of an answer that is twice as large as a frame
    assert [dest for _, dest, *_ in carrier.sent].count(0) == n_parts and carrier.sent[-1][1] == 5
    assert m.stats().unsent == 4
    for handle in carrier.handles:
        handle.is_done = True
    assert len(carrier.exchange(0, sample(carrier.max_frame // 4))) == n_parts


def test_a_draw_is_sent_whole_however_many_parts_it_has() -> None:
    """Of one that lacks a part nothing could be used, and the next answer would lack it too."""
    carrier = ScriptedCarrier(max_frame=1 << 14)
    carrier.holds = True
    m = manager(carrier, limits=Limits(max_window=4, drain_s=0.0)).start()
    m.add(samples([1]))
    items = [message for _, message in carrier.exchange(0, sample(100_000))]
    assert sum(message.n for message in items if isinstance(message, Items)) == 100_000 and len(items) > 40
    ((_, goodbye),) = carrier.exchange(0, EXIT)
    assert isinstance(goodbye, Goodbye) and m.stats().unsent == 0
