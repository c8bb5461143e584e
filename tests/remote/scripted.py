"""A carrier whose peers are the test: frames come when a test gives them, and answers stay here to be looked at."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from tests.remote.make import PLAIN, samples

from recollect.errors import ClosedError, DeadlineError
from recollect.remote import ReplayBufferManager
from recollect.remote.frame import MAX_FRAME, decode, encode, joined
from recollect.remote.items.space import item_space
from recollect.remote.manager.protocol import ManagerProtocol
from recollect.remote.messages import DATA_TAG, AnyMessage, Data, Hello
from recollect.testing.carrier_contract import SOON

ITEMS = item_space(PLAIN)


class ScriptedSend:
    """A send that completes when it is told to."""

    def __init__(self, is_done: bool) -> None:
        self.is_done = is_done
        self.error: Exception | None = None

    def is_complete(self) -> bool:
        if self.error is not None:
            raise self.error
        return self.is_done

    def wait(self, timeout: float = 30.0) -> None:
        """Nothing to wait for."""


class ScriptedCarrier:
    """One end, of any rank; `give` lets a frame come, `exchange` also waits until its receiver asks for the next one.

    `sent` holds (how, dest, tag, message) of each frame that was sent, in order. With `holds` sends stay under way.
    `on_send` is called with each destination, and may raise.
    """

    def __init__(self, rank: int = 9, *, max_frame: int = MAX_FRAME, sees_death: bool = True) -> None:
        self.rank, self.size, self.max_frame, self.sees_death = rank, None, max_frame, sees_death
        self.is_closed = self.holds = False
        self.present: frozenset[int] = frozenset()
        self.on_send: Callable[[int], None] = lambda dest: None
        self.sent: list[tuple[str, int, int, AnyMessage]] = []
        self.handles: list[ScriptedSend] = []
        self._frames: deque[tuple[int, int, memoryview]] = deque()
        self._asked = threading.Condition()
        self._is_idle = False  # the receiver has handled all that came

    # -- the carrier

    def send(self, dest: int, tag: int, parts: Any, timeout: float = 30.0) -> None:
        self._send("send", dest, tag, parts)

    def isend(self, dest: int, tag: int, parts: Any) -> ScriptedSend:
        self._send("isend", dest, tag, parts)
        self.handles.append(ScriptedSend(not self.holds))
        return self.handles[-1]

    def _send(self, how: str, dest: int, tag: int, parts: Any) -> None:
        self.on_send(dest)
        self.sent.append((how, dest, tag, decode(joined(parts))[0]))

    def recv(self, source: int = -1, tag: int = -1, timeout: float = 30.0) -> tuple[int, int, memoryview]:
        with self._asked:
            is_all = timeout > 0 or source >= 0  # else more is looked for before what came is answered
            found = self._asked.wait_for(lambda: self._take(source, tag, is_all), timeout)
            if self.is_closed:
                raise ClosedError("closed")
            if not found:
                raise DeadlineError("nothing")
            return found

    def _take(self, source: int, tag: int, is_all: bool) -> Any:
        if self.is_closed:
            return True
        for frame in self._frames:
            if source in (-1, frame[0]) and tag in (-1, frame[1]):
                self._frames.remove(frame)
                self._is_idle = False
                return frame
        self._is_idle = is_all and not self._frames
        self._asked.notify_all()
        return None

    def alive(self) -> frozenset[int]:
        return self.present | {self.rank}

    def close(self) -> None:
        """Let the loop over this carrier end at once, as a kill would: nothing more is answered or saved."""
        with self._asked:
            self.is_closed = True
            self._asked.notify_all()

    # -- for tests

    def give(self, source: int, frame: Any, tag: int = DATA_TAG) -> None:
        """Let a frame come."""
        with self._asked:
            self._frames.append((source, tag, memoryview(bytes(frame))))
            self._is_idle = False
            self._asked.notify_all()

    def exchange(self, source: int, frame: Any) -> list[tuple[int, AnyMessage]]:
        """Let a frame come, wait until it was handled, and return (tag, message) of each answer to its sender."""
        first = len(self.sent)
        self.give(source, frame)
        self.settle()
        return [(tag, message) for _, dest, tag, message in self.sent[first:] if dest == source]

    def settle(self) -> None:
        """Wait until all that came was handled."""
        with self._asked:
            if not self._asked.wait_for(lambda: self._is_idle or self.is_closed, SOON):
                raise AssertionError("nothing receives here")


class Peer:
    """One rank that speaks by frames: to a started manager over its scripted carrier, or to a protocol without one."""

    def __init__(
        self, to: ReplayBufferManager | ManagerProtocol, rank: int = 0, writer: bytes = bytes(range(16))
    ) -> None:
        self.rank, self.writer = rank, writer
        self._exchange = (
            partial(handled, to) if isinstance(to, ManagerProtocol) else to.communication_backend.exchange
        )

    def say(self, message: AnyMessage, blocks: Any = ()) -> list[tuple[int, Any]]:
        """The (tag, message) of each answer."""
        return self.send(joined(encode(message, blocks)))

    def send(self, frame: bytes) -> list[tuple[int, Any]]:
        found: list[tuple[int, Any]] = self._exchange(self.rank, frame)
        return found

    def hello(self, role: Any = "worker", **kw: Any) -> Any:
        given = {"rank": self.rank, "protocol": 1, "space": "", **kw}
        ((tag, answer),) = self.say(
            Hello(7, role, self.writer, given["rank"], "host", 0, given["protocol"], given["space"])
        )
        assert tag == DATA_TAG and answer.request == 7
        return answer

    def data(self, seq: int, ids: Any, layout: bytes = ITEMS.id) -> list[Any]:
        """Send items as container number `seq`; return its answers."""
        packed = ITEMS.encode(samples(ids))
        head = Data(100 + seq, self.writer, seq, layout, packed.n, len(packed.rows), False)
        return [answer for _, answer in self.say(head, packed.blocks())]


def handled(protocol: ManagerProtocol, rank: int, frame: bytes) -> list[tuple[int, Any]]:
    """The (tag, message) of each answer of a protocol to a frame."""
    message, _, body = decode(frame)
    replies = protocol.handle(rank, message, body, memoryview(frame))
    assert all(reply.dest == rank for reply in replies)
    return [(reply.tag, decode(joined(reply.parts))[0]) for reply in replies]
