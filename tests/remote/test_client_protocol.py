"""A client without a carrier, frame by frame: what it sends again, what it drops and counts, and what it refuses."""

from __future__ import annotations

import gc
import os
import tracemalloc
from typing import Any

import pytest
from tests.remote.make import PLAIN, grid, samples

from recollect import _core, errors
from recollect.errors import FrameError
from recollect.remote.client.protocol import ClientProtocol, as_error
from recollect.remote.frame import decode
from recollect.remote.items.space import item_space
from recollect.remote.messages import (
    PROTOCOL,
    Exit,
    Failed,
    GetMetadata,
    Goodbye,
    Hello,
    Items,
    Scores,
    Welcome,
)
from recollect.remote.ranks import HOST


@pytest.fixture
def session() -> ClientProtocol:
    made = ClientProtocol(item_space(PLAIN), 0)
    made.greet()
    text = made.items.text if made.items else ""
    made.receive(Welcome(made.hello_request, bytes(16), 0, 8, None, text, 0, "host", 1), memoryview(b""))
    return made


def test_after_a_gap_a_client_sends_again_from_there(session: ClientProtocol) -> None:
    assert session.items is not None
    entries = [session.put(session.items.encode(samples([i]))) for i in range(4)]
    gap = Failed(entries[3].request, "Gap", "", expected=3)
    assert session.receive(gap, memoryview(b"")) == [entries[2].parts, entries[3].parts]
    assert [decode(b"".join(e.parts))[0].seq for e in entries] == [1, 2, 3, 4]


def test_answers_that_a_client_does_not_wait_for_are_counted(session: ClientProtocol) -> None:
    old = Welcome(session.hello_request - 1, bytes(16), 99, 8, 5.0, "", 0, "host", 1)
    for n, message in enumerate(
        (Goodbye(1), Items(1, bytes(16), 0, 0, 0, 1), old, GetMetadata(1), Failed(1, "Gap", "", expected=2)),
        1,
    ):
        assert session.receive(message, memoryview(b"")) == [] and session.stray == n
    assert session.baseline is None and session.is_ready


def test_hello_names_the_writer_its_rank_and_its_process(session: ClientProtocol) -> None:
    (hello, _, _), (again, _, _) = (decode(b"".join(session.greet())) for _ in range(2))
    assert session.items is not None and isinstance(hello, Hello)
    assert (hello.role, hello.writer, hello.rank) == ("worker", session.writer, 0)
    assert (hello.host, hello.process) == (HOST, _core.process_word(os.getpid()))
    assert (hello.protocol, hello.space) == (PROTOCOL, session.items.text)
    assert again.writer == hello.writer and again.request != hello.request


def test_no_two_clients_have_a_number_in_common() -> None:
    """An answer to one that was closed may still be on its way to the next on the same end."""
    first, second = (ClientProtocol(item_space(PLAIN), 0) for _ in range(2))
    numbers = [{session.new_request() for _ in range(1000)} for session in (first, second)]
    assert numbers[0].isdisjoint(numbers[1]) and first.writer != second.writer


def test_a_client_may_always_have_one_container_outstanding(session: ClientProtocol) -> None:
    session.greet()
    session.receive(Welcome(session.hello_request, bytes(16), 0, 0, None, "", 0, "host", 1), memoryview(b""))
    assert session.max_window == 1


def test_a_new_greeting_forgets_the_refusal_of_the_one_before(session: ClientProtocol) -> None:
    session.greet()
    session.receive(Failed(session.hello_request, "SchemaError", "another space"), memoryview(b""))
    assert isinstance(session.failure, errors.SchemaError) and not session.is_ready
    session.greet()
    assert session.failure is None


def test_a_welcome_says_how_long_a_trajectory_may_be() -> None:
    session = ClientProtocol(item_space(grid(), needs_length=False), 0)
    session.greet()
    assert session.items is not None and session.items.max_length == 0
    welcome = Welcome(session.hello_request, bytes(16), 0, 8, None, session.items.text, 5, "host", 1)
    session.receive(welcome, memoryview(b""))
    assert session.items.max_length == 5


def test_scores_that_do_not_account_for_all_items_are_refused(session: ClientProtocol) -> None:
    assert session.items is not None
    entry = session.put(session.items.encode(samples([1, 2])))
    with pytest.raises(FrameError, match="account for 2 items"):
        session.receive(Scores(entry.request, {}, 1, 0, {}), memoryview(b""))
    assert entry.answer is None and session.doors.kept == 0


def test_what_a_manager_forgot_is_counted_whole_though_little_is_remembered() -> None:
    session = ClientProtocol(item_space(PLAIN), 0)

    def welcome(last_seq: int) -> list[Any]:
        session.greet()
        text = session.items.text if session.items else ""
        message = Welcome(session.hello_request, bytes(16), last_seq, 8, None, text, 0, "host", 1)
        return session.receive(message, memoryview(b""))

    def held_nbytes() -> int:
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    welcome(0)
    tracemalloc.start()
    for i in range(3000):
        if i == 1500:
            half = held_nbytes()
        entry = session.put(session.items.encode(samples([i, i])))
        session.receive(Scores(entry.request, {}, 2, 0, {}), memoryview(b""))
        session.hand_out(entry)
    assert held_nbytes() < 1.3 * half  # and not twice as much
    tracemalloc.stop()
    with pytest.warns(RuntimeWarning, match="6000 items"):
        welcome(0)
    assert session.forgotten == 6000


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("SchemaError", errors.SchemaError), ("EmptyError", errors.EmptyError), ("ClosedError", errors.ClosedError),
        ("FrameError", errors.FrameError), ("ScoringError", errors.ScoringError), ("ValueError", ValueError),
        ("RemoteError", errors.RemoteError), ("KeyboardInterrupt", errors.RemoteError),
    ],
)  # fmt: skip
def test_an_error_arrives_as_itself_or_as_one_of_the_manager(name: str, kind: type[Exception]) -> None:
    error = as_error(Failed(1, name, "the text"))
    assert type(error) is kind
    assert str(error) == ("manager: the text" if kind is errors.RemoteError else "the text")


def test_answers_keep_their_order_over_a_manager_that_forgot_them(session: ClientProtocol) -> None:
    assert session.items is not None
    entries = [session.put(session.items.encode(samples([i]))) for i in range(4)]
    old = session.writer
    for entry in entries[:2]:
        session.receive(Scores(entry.request, {"score": float(entry.seq)}, 1, 0, {}), memoryview(b""))

    def welcome() -> list[Any]:
        message = Welcome(session.hello_request, bytes(16), 0, 8, None, "", 0, "host", 1)
        return session.receive(message, memoryview(b""))

    session.greet()
    with pytest.warns(RuntimeWarning, match="rank 0: the manager came back without 2 items"):
        (hello,) = welcome()
    assert decode(b"".join(hello))[0].writer == session.writer != old and session.forgotten == 2
    again = [decode(b"".join(parts))[0] for parts in welcome()]
    assert [(data.writer, data.seq) for data in again] == [(session.writer, 1), (session.writer, 2)]
    assert session.retried == 2
    for entry in entries[2:]:
        session.receive(Scores(entry.request, {"score": 7.0}, 1, 0, {}), memoryview(b""))
    handed = []
    while (oldest := session.oldest()) is not None:
        handed.append(session.hand_out(oldest)["score"])
    assert handed == [1.0, 2.0, 7.0, 7.0] and session.doors.kept == 4


def heard(session: ClientProtocol, last_seq: int) -> list[Any]:
    """Greet again; the manager says which seq it has last."""
    session.greet()
    message = Welcome(session.hello_request, bytes(16), last_seq, 8, None, "", 0, "host", 1)
    return session.receive(message, memoryview(b""))


def put(session: ClientProtocol, n: int) -> Any:
    assert session.items is not None
    return session.put(session.items.encode(samples(range(n))))


def test_only_what_a_manager_has_no_more_is_forgotten_and_told_once(session: ClientProtocol) -> None:
    for n in (1, 2, 4):
        session.receive(Scores(put(session, n).request, {}, n, 0, {}), memoryview(b""))
    with pytest.warns(RuntimeWarning, match="without 6 items"):
        heard(session, 1)
    assert session.forgotten == 6
    heard(session, 0)
    session.receive(Scores(put(session, 8).request, {}, 8, 0, {}), memoryview(b""))
    heard(session, 0)  # a second warning would be an error here
    assert session.forgotten == 14


def test_answers_out_of_order_leave_nothing_forgotten(session: ClientProtocol) -> None:
    entries = [put(session, 1), put(session, 1)]
    for entry in reversed(entries):
        session.receive(Scores(entry.request, {}, 1, 0, {}), memoryview(b""))
    with pytest.warns(RuntimeWarning, match="without 1 items"):
        heard(session, 1)


def test_a_client_that_gave_up_greets_as_another_writer_before_it_sends(session: ClientProtocol) -> None:
    old = session.writer
    put(session, 3)
    assert session.give_up("dropped") == 3 == session.doors.dropped
    assert not session.is_ready and session.writer != old and not session.entries


def test_a_manager_that_does_not_know_a_writer_is_greeted_once(session: ClientProtocol) -> None:
    requests = [put(session, 1).request for _ in range(2)]
    unknown = [session.receive(Failed(r, "UnknownWriter", ""), memoryview(b"")) for r in requests]
    assert [len(frames) for frames in unknown] == [1, 0]
    gap = Failed(requests[1], "Gap", "", expected=1)
    assert session.receive(gap, memoryview(b"")) == [] and session.stray == 1  # the Welcome brings them
    welcome = Welcome(session.hello_request, bytes(16), 0, 8, None, "", 0, "host", 1)
    assert len(session.receive(welcome, memoryview(b""))) == 2


def test_a_container_that_was_refused_makes_another_writer_of_those_after_it(session: ClientProtocol) -> None:
    old = session.writer
    refused, after = put(session, 2), put(session, 1)
    (hello,) = session.receive(Failed(refused.request, "RemoteError", "no", kept=1), memoryview(b""))
    assert session.doors.lost == 2 and decode(b"".join(hello))[0].writer == session.writer != old
    with pytest.raises(errors.RemoteError) as raised:
        session.hand_out(refused)
    assert (raised.value.seq, raised.value.kept) == (1, 1)
    assert (after.seq, decode(b"".join(after.parts))[0].writer) == (1, session.writer)


def test_what_a_manager_says_it_has_is_settled(session: ClientProtocol) -> None:
    entries = [put(session, n) for n in (1, 2, 4)]
    assert session.settle(2) == 3 and (session.acked, session.n_pending) == (2, 4)
    assert [entry.request for entry in session.entries.values()] == [entries[2].request]
    assert session.settle(99) == 4  # of what it says it has beyond that, nothing is known here
    assert (session.acked, session.n_pending) == (3, 0)


@pytest.mark.parametrize("sent", [[], [5, 6]])
def test_a_resumed_writer_goes_on_counting(session: ClientProtocol, sent: list[int]) -> None:
    assert session.items is not None
    packed = session.items.encode(samples([1]))
    session.resume(bytes(16), 7, 4, [(seq, packed) for seq in sent])
    assert list(session.entries) == sent and put(session, 1).seq == 7
    datas = [decode(b"".join(parts))[0] for parts in session.unanswered()]
    assert [(data.writer, data.seq) for data in datas] == [(bytes(16), seq) for seq in [*sent, 7]]


def test_exit_counts_the_items_without_an_answer(session: ClientProtocol) -> None:
    put(session, 2)
    put(session, 3)
    request, parts = session.leave("it ends")
    assert decode(b"".join(parts))[0] == Exit(request, session.writer, 5, "it ends")
