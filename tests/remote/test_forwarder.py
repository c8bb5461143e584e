"""What a manager passes on to another: each container once, in order, over lost frames and restarts of both."""

from __future__ import annotations

import itertools
import tempfile
import threading
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.remote.make import SAMPLE, manager_protocol, samples

from recollect.remote import Checkpoint
from recollect.remote.carriers.base import check_rank
from recollect.remote.frame import MAX_FRAME, decode, joined
from recollect.remote.items.packed import PackedItems
from recollect.remote.items.space import item_space
from recollect.remote.manager.forwarder import Forwarder
from recollect.remote.manager.protocol import ManagerProtocol
from recollect.remote.messages import Welcome
from recollect.testing.carrier_contract import SOON

FIRST, LAST = 1, 2


class Sent:
    """A carrier that keeps what is sent, until the test delivers or drops it."""

    rank, size, max_frame = FIRST, None, MAX_FRAME

    def __init__(self) -> None:
        self.frames: list[bytes] = []

    def isend(self, dest: int, tag: int, parts: list[Any]) -> Any:
        check_rank(dest, None)
        self.frames.append(joined(parts))
        return self

    def is_complete(self) -> bool:
        return True


class Pair:
    """Two managers and what travels between them. The clock of the first moves two seconds at every look."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.ids = itertools.count()
        self.kept: list[int] = []
        self.last = self._make(LAST, resume=False)
        self.first = self._make(FIRST, resume=False)

    def _make(self, rank: int, resume: bool) -> ManagerProtocol:
        other = LAST if rank == FIRST else None
        save = Checkpoint(self.place / str(rank), resume=resume)
        return manager_protocol(SAMPLE, rank, checkpoint=save, forward_to=other)

    def add(self, n: int = 2) -> None:
        ids = list(itertools.islice(self.ids, n))
        self.first.add_local(samples(ids, np.zeros(n)), -1)
        self.kept += ids

    def look(self, answers: bool = True) -> bool:
        """Let the first manager send; the last answers, unless the answers are lost. Whether anything moved."""
        sent = Sent()
        forwarder = self.first.forwarder
        assert forwarder is not None
        forwarder.work(sent)
        for frame in sent.frames:
            self._deliver(self.last, FIRST, frame, answers)
        return bool(sent.frames)

    def _deliver(self, to: ManagerProtocol, sender: int, frame: bytes, answers: bool) -> None:
        message, _, body = decode(frame)
        for reply in to.handle(sender, message, body, memoryview(frame)):
            if answers:
                self._deliver(self.first, LAST, joined(reply.parts), False)

    def empty_last(self) -> None:
        """The last manager comes back with nothing of what it had."""
        self.last.close()
        (self.place / str(LAST)).rename(self.place / "old")
        self.last = self._make(LAST, resume=False)

    def restart(self, rank: int) -> None:
        """As after a kill: what is on disk is all there is."""
        name = "first" if rank == FIRST else "last"
        getattr(self, name).close()
        setattr(self, name, self._make(rank, resume=True))

    def look_until_quiet(self) -> None:
        for _ in range(10_000):
            if not self.look():
                return
        raise AssertionError("it never came to an end")

    def settle(self) -> None:
        self.look_until_quiet()
        assert self.last.state.buffer[:]["id"].tolist() == self.kept
        doors = self.first.forwarder.stats()
        assert doors.offered == len(self.kept) == doors.kept + doors.arrived + doors.rejected
        assert doors.lost == doors.pending == 0

    def close(self) -> None:
        self.first.close()
        self.last.close()


@pytest.fixture(autouse=True)
def _a_clock_that_is_always_due_and_no_syncing(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = itertools.count(10, 2)
    monkeypatch.setattr("recollect.remote.manager.forwarder.monotonic", lambda: float(next(ticks)))
    monkeypatch.setattr("os.fsync", lambda fd: None)  # processes are killed here, not machines


steps = st.lists(
    st.sampled_from(["add", "add", "look", "lose answers", "dump", "kill first", "kill last"]), max_size=14
)


@settings(max_examples=settings.default.max_examples // 5, deadline=None)
@given(steps)
def test_each_container_arrives_once_over_any_restarts(todo: list[str]) -> None:
    with tempfile.TemporaryDirectory() as place:
        pair = Pair(Path(place))
        for step in [*todo, "add"]:
            match step:
                case "add":
                    pair.add()
                case "look" | "lose answers":
                    pair.look(answers=step == "look")
                case "dump":
                    pair.first.checkpoint.dump()
                case _:
                    pair.restart(FIRST if step == "kill first" else LAST)
        pair.settle()
        pair.close()


def test_a_long_log_is_passed_on_whole_and_what_arrived_is_not_sent_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More than the window that has answers, and more than a manager without a log would queue."""
    monkeypatch.setattr("recollect.remote.manager.forwarder.MOST_QUEUED", 50)
    pair = Pair(tmp_path)
    for _ in range(100):
        pair.add(1)
        pair.look()
    for _ in range(60):
        pair.add(1)
    pair.restart(FIRST)
    before = pair.last.state.counts["duplicates"]
    pair.settle()
    assert pair.first.forwarder.stats().arrived == 100 and pair.last.state.counts["duplicates"] == before
    pair.close()


def test_what_a_power_loss_took_from_the_log_takes_nothing_else_with_it(tmp_path: Path) -> None:
    """The other manager has more numbers than are left here; what comes next must not pass for those."""
    pair = Pair(tmp_path)
    pair.add(1)
    log = pair.first.checkpoint.log
    assert log is not None
    kept = log.path.stat().st_size
    pair.add(1)
    pair.add(1)
    pair.look_until_quiet()
    with open(log.path, "r+b") as f:
        f.truncate(kept)
    pair.restart(FIRST)
    pair.add(1)
    pair.look_until_quiet()
    assert pair.last.state.buffer[:]["id"].tolist() == [0, 1, 2, 3]
    pair.close()


@pytest.mark.parametrize("answers", [True, False])
def test_a_manager_that_lost_what_had_arrived_before_a_restart_gets_what_follows(
    tmp_path: Path, answers: bool
) -> None:
    pair = Pair(tmp_path)
    pair.add()
    pair.look()
    pair.look(answers)
    if not answers:  # then the dump has what was sent, else the log what is queued
        pair.first.checkpoint.dump()
    pair.restart(FIRST)
    pair.look_until_quiet()
    pair.empty_last()
    pair.add()
    with pytest.warns(RuntimeWarning, match="came back without"):
        pair.look_until_quiet()
    assert pair.last.state.buffer[:]["id"].tolist() == [2, 3]
    pair.close()


def test_a_new_name_is_on_disk_before_anything_is_stored_under_it(tmp_path: Path) -> None:
    """The last manager comes back empty, so the first begins anew; killed then, it must not begin anew again."""
    pair = Pair(tmp_path)
    pair.add()
    pair.look_until_quiet()
    pair.empty_last()
    pair.add()
    with pytest.warns(RuntimeWarning, match="came back without 2 items"):
        pair.look_until_quiet()
    pair.restart(FIRST)
    pair.add()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pair.look_until_quiet()
    assert pair.last.state.buffer[:]["id"].tolist() == [2, 3, 4, 5]
    pair.close()


def test_stats_count_items_once_while_another_thread_sends_them() -> None:
    forwarder, sent = Forwarder(item_space(SAMPLE), FIRST, LAST), Sent()
    forwarder.take(item_space(SAMPLE).encode(samples([9], np.zeros(1))))
    forwarder.work(sent)
    hello = decode(sent.frames.pop())[0]
    welcome = Welcome(hello.request, bytes(16), 0, 8, None, item_space(SAMPLE).text, 0, "host", 0)
    assert forwarder.receive(LAST, welcome)
    forwarder.work(sent)  # the first item is sent, and pending
    sent.frames.clear()
    begun, is_sent = threading.Event(), threading.Event()
    packed = item_space(SAMPLE).encode(samples([0, 1], np.zeros(2)))

    class Seen(PackedItems):
        @property
        def n(self) -> int:  # type: ignore[override]
            if threading.current_thread() is threading.main_thread():
                begun.set()
                is_sent.wait(0.1)  # in vain while it is asked
            return 2

        @n.setter
        def n(self, n: int) -> None:
            pass

    def send() -> None:
        assert begun.wait(SOON)
        forwarder.work(sent)
        is_sent.set()

    for _ in range(2):
        forwarder.take(Seen(2, packed.rows, packed.lengths, packed.fields))
    begun.clear()
    is_sent.clear()
    thread = threading.Thread(target=send, daemon=True)
    thread.start()
    assert forwarder.stats().pending == 5
    assert is_sent.wait(SOON) and sent.frames
    thread.join(SOON)
