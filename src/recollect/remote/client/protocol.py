"""The protocol of a client, without a carrier. Containers go in, frames come out; it knows what has no answer yet.

A container is stored once per (writer, seq), in order, however often it is sent: so whatever has no answer may be
sent again at any time. A new connection begins with Hello; the manager's Welcome says what it already has.
"""

from __future__ import annotations

import secrets
import warnings
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

from recollect import _core, errors
from recollect.errors import FrameError, RemoteError, SchemaError, ScoringError
from recollect.remote.frame import MAX_FRAME, encode
from recollect.remote.items.packed import PackedItems
from recollect.remote.items.space import ItemSpace, item_space, space_of_text
from recollect.remote.messages import (
    PROTOCOL,
    AnyMessage,
    Data,
    Exit,
    Failed,
    Goodbye,
    Hello,
    Items,
    Metadata,
    Scores,
    Welcome,
)
from recollect.remote.ranks import HOST

Parts = list[Any]


@dataclass(slots=True)
class SentContainer:
    """A container that was given, until its answer is handed out."""

    seq: int
    request: int
    packed: PackedItems | None
    parts: Parts
    n: int
    answer: dict[str, float] | Exception | None = None

    def has_answer(self) -> bool | None:
        """True once there is one, None before: what a wait asks."""
        return True if self.answer is not None else None


@dataclass(slots=True)
class Doors:
    """By which door every item left: offered is the sum of the others."""

    offered: int = 0
    kept: int = 0
    rejected: int = 0
    passed: int = 0
    filtered: int = 0
    dropped: int = 0
    lost: int = 0
    reasons: dict[str, int] = field(default_factory=dict)

    def reject(self, reason: str, n: int) -> None:
        if n:
            self.rejected += n
            self.reasons[reason] = self.reasons.get(reason, 0) + n


class ClientProtocol:
    """The protocol of one client. Concurrency: one thread at a time."""

    def __init__(
        self, items: ItemSpace | None, rank: int, max_frame: int = MAX_FRAME, role: str = "worker"
    ) -> None:
        self.items, self.rank, self.role, self.max_frame = items, rank, role, max_frame
        self.writer = secrets.token_bytes(16)
        self.entries: OrderedDict[int, SentContainer] = OrderedDict()
        self.is_ready = False  # Welcome has come, and nothing happened since
        self.failure: Exception | None = None  # why there was no Welcome
        self.max_window = 1
        self.baseline: float | None = None
        self.manager: tuple[str, int] | None = None  # host and process of the manager
        self.doors = Doors()
        self.stray = self.forgotten = self.retried = self.malformed = 0
        self.expected: dict[int, list[tuple[AnyMessage, memoryview]]] = {}
        self._by_request: dict[int, int] = {}
        self.next_seq, self.acked = 1, 0
        self._acked_items: dict[int, int] = {}
        self._request = secrets.randbits(40) << 20
        self.hello_request = 0
        self._warned = False

    def new_request(self) -> int:
        self._request += 1
        return self._request

    def count_stray(self) -> None:
        """Count an answer that no request waits for."""
        self.stray += 1

    # -- the connection

    def greet(self) -> Parts:
        """Say Hello, at first and whenever the connection or the manager is new."""
        self.is_ready, self.failure = False, None
        self.hello_request = self.new_request()
        space = self.items.text if self.items is not None else ""
        role: Any = self.role
        return encode(
            Hello(
                self.hello_request,
                role,
                self.writer,
                self.rank,
                HOST,
                _core.own_word(),
                PROTOCOL,
                space,
            )
        )

    def _on_welcome(self, welcome: Welcome) -> list[Parts]:
        if not self.is_greeted_by(welcome):
            self.stray += 1
            return []
        self._adopt(welcome)
        if welcome.last_seq < self.acked:
            self._start_again(welcome.last_seq)
            return [self.greet()]
        self.is_ready = True
        return self.unanswered()

    def _adopt(self, welcome: Welcome) -> None:
        self.max_window, self.baseline = max(1, welcome.max_window), welcome.baseline
        self.manager = (welcome.host, welcome.process)
        if self.items is None:
            self.items = item_space(space_of_text(welcome.space), welcome.max_length or None)
        elif self.items.is_trajectory:
            self.items.max_length = welcome.max_length

    def _start_again(self, known: int) -> None:
        """The manager is back without what it had acknowledged: say so once, and go on as a new writer."""
        lost = sum(n for seq, n in self._acked_items.items() if seq > known)
        self.forgotten += lost
        if not self._warned:
            self._warned = True
            text = (
                f"the manager came back without {lost} items that it had acknowledged; give it a checkpoint"
            )
            warnings.warn(f"rank {self.rank}: {text}", RuntimeWarning, stacklevel=4)
        self.renumber()

    def renumber(self) -> None:
        """Become a new writer; what has no answer gets new numbers, and what has one keeps its place."""
        entries = list(self.entries.values())
        self.writer = secrets.token_bytes(16)
        self.entries, self._by_request = OrderedDict(), {}
        self.next_seq, self.acked, self._acked_items = 1, 0, {}
        answered = [e for e in entries if e.answer is not None]
        for n, entry in enumerate(answered):
            self.entries[n - len(answered)] = entry  # before all others, in order
        for entry in entries:
            if entry.answer is None and entry.packed is not None:
                self._enter(entry.packed, entry)

    # -- containers

    def put(self, packed: PackedItems) -> SentContainer:
        """Take a container; FrameError if it can never be sent."""
        return self._enter(packed, None)

    def _enter(self, packed: PackedItems, entry: SentContainer | None) -> SentContainer:
        if self.items is None:
            raise RemoteError("client: no space is known yet; wait for the manager")
        seq, request = self.next_seq, self.new_request()
        head = Data(request, self.writer, seq, self.items.id, packed.n, len(packed.rows), packed.scoring_only)
        parts = encode(head, packed.blocks(), max_frame=self.max_frame, first_crc=packed.rows_crc)
        if entry is None:
            entry = SentContainer(seq, request, packed, parts, packed.n)
        else:
            entry.seq, entry.request, entry.parts = seq, request, parts
        self.next_seq += 1
        self.entries[seq] = entry
        self._by_request[request] = seq
        return entry

    def unanswered(self, first: int = 0) -> list[Parts]:
        """Frames of all containers without an answer, from a seq on, in order."""
        found = [e.parts for e in self.entries.values() if e.answer is None and e.seq >= first]
        self.retried += len(found)
        return found

    @property
    def n_unanswered(self) -> int:
        return sum(entry.answer is None for entry in self.entries.values())

    @property
    def n_pending(self) -> int:
        """Items without an answer."""
        return sum(entry.n for entry in self.entries.values() if entry.answer is None)

    def oldest(self) -> SentContainer | None:
        """The container whose answer is handed out next."""
        return next(iter(self.entries.values()), None)

    def hand_out(self, entry: SentContainer) -> dict[str, float]:
        """Give an answer away, once; raises if it is an error."""
        for seq, held in self.entries.items():
            if held is entry:
                del self.entries[seq]
                break
        answer = entry.answer
        if isinstance(answer, Exception):
            raise answer
        return answer or {}

    def give_up(self, door: str) -> int:
        """Let everything without an answer leave by a door, and go on as a new writer."""
        gone = [seq for seq, entry in self.entries.items() if entry.answer is None]
        n = sum(self.entries.pop(seq).n for seq in gone)
        setattr(self.doors, door, getattr(self.doors, door) + n)
        self.renumber()
        self.is_ready = False
        return n

    # -- over a restart

    def resume(self, writer: bytes, next_seq: int, acked: int, sent: list[tuple[int, PackedItems]]) -> None:
        """Go on as a writer of an earlier process, with what it had sent and had no answer to."""
        self.writer, self.acked = writer, acked
        for seq, packed in sent:
            self.next_seq = seq
            self._enter(packed, None)
        self.next_seq = next_seq

    def sent(self) -> list[tuple[int, PackedItems]]:
        """What has no answer, by seq."""
        return [
            (seq, e.packed) for seq, e in self.entries.items() if e.answer is None and e.packed is not None
        ]

    def settle(self, last_seq: int) -> int:
        """Forget containers up to a seq that the manager says it has; return their items."""
        known = [seq for seq, entry in self.entries.items() if entry.answer is None and seq <= last_seq]
        gone = [self.entries.pop(seq) for seq in known]
        for entry in gone:
            self._by_request.pop(entry.request, None)
        self.acked = max(self.acked, min(last_seq, self.next_seq - 1))
        return sum(entry.n for entry in gone)

    def pass_over(self) -> None:
        """Leave out a number that the manager has already."""
        self.acked = self.next_seq
        self.next_seq += 1

    def is_greeted_by(self, welcome: Welcome) -> bool:
        """Whether it answers the newest Hello."""
        return welcome.request == self.hello_request

    # -- messages

    def receive(self, message: AnyMessage, body: memoryview) -> list[Parts]:
        """Take a message from the manager; return the frames that it asks for."""
        match message:
            case Welcome():
                return self._on_welcome(message)
            case Scores():
                return self._on_scores(message)
            case Failed():
                return self._on_failed(message, body)
            case Items() | Metadata() | Goodbye():
                self._on_reply(message, body)
            case _:
                self.stray += 1
        return []

    def _on_reply(self, message: AnyMessage, body: memoryview) -> None:
        if message.request in self.expected:
            self.expected[message.request].append((message, body))
        else:
            self.stray += 1

    def _on_scores(self, message: Scores) -> list[Parts]:
        entry = self._asked(message.request)
        if entry is None:
            return []
        rejected = sum(message.rejected.values())
        if message.kept + message.passed + rejected != entry.n:
            raise FrameError(f"scores: must account for {entry.n} items, got others; the manager is faulty")
        self.doors.kept += message.kept
        self.doors.passed += message.passed
        for reason, n in message.rejected.items():
            self.doors.reject(reason, n)
        self._answered(entry, message.scores)
        if "baseline_log_reward" in message.scores:
            self.baseline = message.scores["baseline_log_reward"]
        return []

    def _asked(self, request: int) -> SentContainer | None:
        seq = self._by_request.get(request)
        entry = None if seq is None else self.entries.get(seq)
        if entry is None or entry.answer is not None:
            self.stray += 1
            return None
        return entry

    def _answered(self, entry: SentContainer, answer: dict[str, float] | Exception) -> None:
        entry.answer, entry.packed, entry.parts = answer, None, []
        self._by_request.pop(entry.request, None)
        if entry.seq > self.acked:
            self.acked = entry.seq
        self._acked_items[entry.seq] = entry.n
        while len(self._acked_items) > 4 * self.max_window + 1024:
            oldest = min(self._acked_items)
            base = self._acked_items.pop(oldest)
            following = min(self._acked_items)
            self._acked_items[following] += base  # what is forgotten then is still counted

    def _on_failed(self, failed: Failed, body: memoryview) -> list[Parts]:
        if failed.request == self.hello_request:
            self.failure = as_error(failed)
            return []
        if failed.request in self.expected:
            self._on_reply(failed, body)
            return []
        if failed.error == "UnknownWriter":
            return [self.greet()] if self.is_ready else []
        if failed.error == "Gap":
            return self._on_gap(failed)
        entry = self._asked(failed.request)
        if entry is None:
            return []
        error = as_error(failed)
        if isinstance(error, RemoteError):
            error.seq, error.kept = entry.seq, failed.kept
        if isinstance(error, ScoringError):
            self.doors.kept += failed.kept
            self.doors.reject("scoring", entry.n - failed.kept)
            self._answered(entry, error)
            return []
        # Refused: it was not stored, and those after it wait for it in vain.
        self.doors.lost += entry.n
        entry.answer, entry.packed, entry.parts = error, None, []
        self.renumber()
        return [self.greet()]

    def _on_gap(self, failed: Failed) -> list[Parts]:
        if failed.request not in self._by_request or not self.is_ready:
            self.stray += 1
            return []
        return self.unanswered(failed.expected)

    # -- leaving

    def leave(self, reason: str = "") -> tuple[int, Parts]:
        """Say Exit, with the count of what could not be delivered."""
        request = self.new_request()
        return request, encode(Exit(request, self.writer, self.n_pending, reason))


def as_error(failed: Failed) -> Exception:
    """The error that a Failed stands for; names that it may not have become RemoteError."""
    kinds: dict[str, type[Exception]] = {
        "SchemaError": SchemaError,
        "EmptyError": errors.EmptyError,
        "ClosedError": errors.ClosedError,
        "BudgetError": errors.BudgetError,
        "FrameError": errors.FrameError,
        "ScoringError": ScoringError,
        "ValueError": ValueError,
    }
    kind = kinds.get(failed.error, RemoteError)
    return kind(failed.text if kind is not RemoteError else f"manager: {failed.text}")
