"""A client's protocol over a carrier: it greets, sends, receives, retries and connects again; each wait is bounded."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from math import inf
from time import monotonic, perf_counter, sleep
from typing import Any

from recollect import _core, interrupts
from recollect.errors import ClosedError, DeadlineError, FrameError, PeerDiedError
from recollect.remote.carriers.base import Carrier, check_timeout, is_over
from recollect.remote.client.protocol import ClientProtocol, as_error
from recollect.remote.frame import decode, encode
from recollect.remote.items.space import ItemSpace
from recollect.remote.messages import DATA_TAG, METADATA_TAG, Exit, Failed, GetMetadata, Items, Metadata
from recollect.remote.ranks import is_seen

_LOOK_S = 0.25  # how often a manager's process is looked at where the carrier does not see it die
_PAUSE_S = 0.02  # between two tries to connect again
Drawn = list[tuple[Items, memoryview]]


class Connection:
    """A worker's connection to its manager. Concurrency: one thread at a time."""

    def __init__(
        self, items: ItemSpace | None, manager_rank: int, *, deadline: float, retry_s: float, reconnect_s: float,
        gives_up: bool,
    ) -> None:  # fmt: skip
        self.protocol = ClientProtocol(items, -1)
        self.manager_rank, self.deadline = manager_rank, deadline
        self.retry_s, self.reconnect_s = retry_s, reconnect_s
        self.gives_up = gives_up  # a manager that stayed away is not waited for again
        self.carrier: Carrier | None = None
        self.nbytes = 0
        self.send_s = self.wait_s = 0.0
        self._handles: list[Any] = []
        self._down_since: float | None = None
        self.next_retry = 0.0
        self._next_ask = inf  # when a request without an answer is made again

    def open(self, carrier: Carrier) -> None:
        """Use a carrier from now on."""
        self.carrier = carrier
        self.protocol.rank, self.protocol.max_frame = carrier.rank, carrier.max_frame

    def greet(self) -> None:
        """Wait until the manager has welcomed this client, if it has not."""
        if not self.protocol.is_ready:
            self.until(lambda: True if self.protocol.is_ready else None, "its welcome")

    # -- waiting

    def until(self, ready: Callable[[], Any], what: str) -> Any:
        """Receive until `ready()` is not None; greet, send again and connect again as needed."""
        start = monotonic()
        end = start + self.deadline
        try:
            while True:
                try:
                    found = ready()
                    if found is not None:
                        return found
                    now = monotonic()
                    self._check(now, end, what)
                    self._say_what_is_due(now)
                    self.receive(max(0.0, min(end, self.next_retry, self._next_ask) - now))
                except PeerDiedError as error:
                    self._reconnect(error)
        finally:
            self.wait_s += monotonic() - start

    def _check(self, now: float, end: float, what: str) -> None:
        """Raise if the manager refused this client, or the time is up."""
        if self.protocol.failure is not None:
            failure, self.protocol.failure = self.protocol.failure, None
            raise failure
        if now >= end:
            raise DeadlineError(
                f"rank {self.manager_rank}: waited {self.deadline:g} s for {what}; is the manager running?"
            )

    def _say_what_is_due(self, now: float) -> None:
        if now < self.next_retry:
            return
        self.next_retry = now + self.retry_s
        frames = self.protocol.unanswered() if self.protocol.is_ready else [self.protocol.greet()]
        for parts in frames:
            self._send(parts)

    def receive(self, timeout: float) -> None:
        """Take one message, if one comes in time."""
        carrier = self._opened()
        if not getattr(carrier, "sees_death", True):
            self._look_at_manager()
            timeout = min(timeout, _LOOK_S)
        try:
            _, _, frame = carrier.recv(self.manager_rank, DATA_TAG, timeout)
        except DeadlineError:
            return
        self._down_since = None
        try:
            message, _, body = decode(frame, max_frame=carrier.max_frame)
            with interrupts.deferred():  # an answer is counted once, also if it comes again
                frames = self.protocol.receive(message, body)
        except FrameError:
            self.protocol.malformed += 1
            return
        for parts in frames:
            self._send(parts)
        if frames:
            self.next_retry = monotonic() + self.retry_s

    def _opened(self) -> Carrier:
        if self.carrier is None:
            raise ClosedError("RemoteReplay: has no carrier yet; add or sample first")
        return self.carrier

    # -- a manager that is gone

    def _look_at_manager(self) -> None:
        manager = self.protocol.manager
        if manager is not None and is_seen(*manager) and manager[1] and _core.is_dead(manager[1]):
            raise PeerDiedError(f"rank {self.manager_rank}: the manager's process is gone")

    def _reconnect(self, error: PeerDiedError) -> None:
        """Connect again for `reconnect_s`, then raise."""
        now = monotonic()
        self._down_since = now if self._down_since is None else self._down_since
        reconnect = getattr(self.carrier, "reconnect", None)
        left = self._down_since + self.reconnect_s - now
        self.protocol.is_ready = False
        if reconnect is None or left < 0:
            if not self.gives_up:
                self._down_since = None  # the next call tries again
            n = self.protocol.n_pending
            raise PeerDiedError(
                f"rank {self.manager_rank}: the manager is gone; {n} items wait here"
            ) from error
        try:
            reconnect(self.manager_rank, min(max(left, 0.0), 0.5))
        except (PeerDiedError, DeadlineError, OSError):
            sleep(_PAUSE_S)  # a refusal comes at once
            return
        self.next_retry = 0.0

    # -- sending

    def send(self, parts: list[Any], wait: bool = True) -> None:
        """Send a frame, or connect again if the manager is gone; without `wait` the carrier takes it when it can."""
        try:
            self._send(parts, wait)
        except PeerDiedError as error:
            self._reconnect(error)

    def _send(self, parts: list[Any], wait: bool = True) -> None:
        carrier, start = self._opened(), perf_counter()
        self.nbytes += sum(map(len, parts))  # all of them bytes
        try:
            if wait:
                carrier.send(self.manager_rank, DATA_TAG, parts, self.deadline)
            else:
                self._handles = [handle for handle in self._handles if not is_over(handle)]
                self._handles.append(carrier.isend(self.manager_rank, DATA_TAG, parts))
        finally:
            self.send_s += perf_counter() - start
        if self.next_retry < start:
            self.next_retry = monotonic() + self.retry_s

    def ask(self, make: Callable[[int], list[Any]]) -> Drawn:
        """Send a request, again with a new number when no answer comes, until all parts of one are here.

        All of them are waited for: over a slow line the first may be answered after the second was sent.
        """
        protocol, again = self.protocol, 0.0
        asked: list[int] = []

        def whole() -> Drawn | None:
            nonlocal again
            now = monotonic()
            if protocol.is_ready and now >= again:
                request, again = protocol.new_request(), now + self.retry_s
                protocol.expected[request] = []
                asked.append(request)
                self._send(make(request))
            self._next_ask = again if protocol.is_ready else inf
            found = (_all_parts(protocol.expected[request]) for request in asked)
            return next((parts for parts in found if parts is not None), None)

        try:
            drawn: Drawn = self.until(whole, "drawn items")
            return drawn
        finally:
            self._next_ask = inf
            for request in asked:
                protocol.expected.pop(request, None)

    def leave(self, undelivered: int, known_as: bytes, wait_s: float) -> None:
        """Say Exit until Goodbye comes, for a moment at most; nothing is raised."""
        carrier, protocol = self.carrier, self.protocol
        if carrier is None or protocol.manager is None:
            return
        request = protocol.new_request()
        reason = "deadline" if undelivered else ""
        parts = encode(Exit(request, known_as, undelivered, reason))
        protocol.expected[request] = []
        end, again = monotonic() + min(wait_s, max(self.deadline, 1.0)), 0.0
        try:
            while not protocol.expected[request] and (now := monotonic()) < end:
                if now >= again:
                    again = now + min(self.retry_s, 1.0)
                    carrier.send(self.manager_rank, DATA_TAG, parts, max(0.0, end - now))
                self.receive(max(0.0, min(end, again) - now))
        except (PeerDiedError, DeadlineError, ClosedError, OSError, ValueError):
            return


def _all_parts(got: list[tuple[Any, memoryview]]) -> Drawn | None:
    """Drawn items whose parts are all here, in order; raises if the manager answered that it failed."""
    for message, _ in got:
        if isinstance(message, Failed):
            raise as_error(message)
    items = {m.part: (m, body) for m, body in got if isinstance(m, Items)}
    if items and len(items) == next(iter(items.values()))[0].n_parts:
        return [items[part] for part in sorted(items)]
    return None


def get_metadata(
    carrier: Carrier, manager_rank: int, timeout: float, retry_s: float = 5.0,
    count_stray: Callable[[], None] = lambda: None,
) -> dict[str, Any]:  # fmt: skip
    """Ask a manager for its metadata; answers to older requests are dropped and counted."""
    end = monotonic() + check_timeout(timeout)
    request = secrets.randbits(60)
    frame = encode(GetMetadata(request))
    while True:
        left = end - monotonic()
        if left < 0:
            raise DeadlineError(f"metadata of rank {manager_rank}: no answer within {timeout:g} s")
        carrier.send(manager_rank, DATA_TAG, frame, max(left, 0.0))
        again = min(end, monotonic() + retry_s)
        while (left := again - monotonic()) > 0:
            try:
                _, _, answer = carrier.recv(manager_rank, METADATA_TAG, left)
                message, _, _ = decode(answer, max_frame=carrier.max_frame)
            except DeadlineError:
                break
            except FrameError:
                continue
            if message.request != request:
                count_stray()
                continue
            if isinstance(message, Failed):
                raise as_error(message)
            if isinstance(message, Metadata):
                return message.values
