"""RemoteReplay: the worker's side. What is added goes to the manager once, whatever happens on the way."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import isfinite
from multiprocessing import util
from os import getpid
from time import monotonic, perf_counter
from types import TracebackType
from typing import Any, Self

import numpy as np

from recollect import _core
from recollect.errors import ClosedError, DeadlineError, EmptyError, FrameError, PeerDiedError, RecollectError
from recollect.remote import requests
from recollect.remote.backends import carrier_of, check_backend
from recollect.remote.carriers.base import Carrier
from recollect.remote.items import Packed, item_space, rewards_ok
from recollect.remote.messages import DATA_TAG, Exit, Failed, Items, Sample
from recollect.remote.ranks import HOST
from recollect.remote.session import Entry, Session, as_error
from recollect.remote.wire import cut_items, decode, encode

MODES = ("sync", "async_score", "async_comm")
_GOODBYE_S = 5.0
_LOOK_S = 0.25  # how often a manager's process is looked at where the carrier does not see it die

_open_clients: dict[tuple[int, int], RemoteReplay] = {}
_registered = 0


@dataclass(frozen=True, slots=True)
class ClientStats:
    """Items: offered = kept + rejected + passed + filtered + dropped + lost + pending. Sends, bytes and seconds."""

    offered: int
    kept: int
    rejected: int
    passed: int
    filtered: int
    dropped: int
    lost: int
    pending: int
    forgotten: int
    reasons: dict[str, int]
    sent: int
    skipped: int
    forced: int
    retried: int
    stray: int
    nbytes: int
    encode_s: float
    send_s: float
    wait_s: float


class RemoteReplay:
    """Adds containers to a manager's buffer and draws from it, over any carrier.

    `mode`: `"sync"` waits for each answer; `"async_score"` lets `window` containers be outstanding; `"async_comm"` does
    not even wait for the carrier. `baseline_filtering` leaves out items below the baseline; `send_every` adds make one
    container; `scoring_only` sends fields without steps, to be scored. `when_down="drop"` lets training go on without
    a manager.

    Ownership: what `add` takes is copied; what it returns is the caller's. The carrier stays the caller's.
    Concurrency: threads take turns. One client per carrier end and manager.

    Example:
        >>> import numpy as np
        >>> from recollect.remote import LocalCarrier, RemoteReplay, ReplayBufferManager
        >>> space = {"x": ((2,), "float32"), "log_reward": ((), "float32")}
        >>> ends = LocalCarrier.group(2)
        >>> manager = ReplayBufferManager(space, 1, 1, communication_backend=ends[1]).start()
        >>> with RemoteReplay(space, 1, ends[0]) as replay:
        ...     replay.add({"x": np.zeros((3, 2), "float32"), "log_reward": np.arange(3, dtype="float32")})
        ...     replay.sample(5)["x"].shape
        {'score': inf, 'baseline_log_reward': 0.0}
        (5, 2)
        >>> manager.close(), ends[0].close(), ends[1].close()
        (None, None, None)
    """

    def __init__(
        self,
        env: Any,
        manager_rank: int,
        communication_backend: Any = "mpi",
        *,
        mode: str = "sync",
        window: int = 4,
        send_every: int = 1,
        baseline_filtering: bool = False,
        refresh_after: int = 10,
        scoring_only: bool = False,
        deadline: float = 30.0,
        retry_s: float = 5.0,
        reconnect_s: float = 30.0,
        when_down: str = "raise",
    ) -> None:
        """Prepare a client; the carrier is opened, and the manager greeted, at the first use."""
        check_backend(communication_backend)
        if mode not in MODES:
            raise ValueError(f"mode: must be one of {list(MODES)}, got {mode!r}")
        if when_down not in ("raise", "drop"):
            raise ValueError(f"when_down: must be 'raise' or 'drop', got {when_down!r}")
        whole: dict[str, Any] = {"window": window, "send_every": send_every, "refresh_after": refresh_after}
        for name, value in whole.items():
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}: must be an int of at least 1, got {value!r}")
        seconds: dict[str, Any] = {"deadline": deadline, "retry_s": retry_s, "reconnect_s": reconnect_s}
        for name, value in seconds.items():
            if (
                not isinstance(value, int | float)
                or not isfinite(value)
                or value < 0
                or (name == "retry_s" and not value)
            ):
                raise ValueError(f"{name}: must be a finite number of seconds, got {value!r}")
        self._items = None if env is None else item_space(env, needs_length=False)
        if baseline_filtering and self._items is not None and not self._items.has_log_reward:
            raise ValueError(f"baseline_filtering: needs items with a log_reward, got {self._items.space}")
        self.manager_rank, self.communication_backend = manager_rank, communication_backend
        self.mode, self.window, self.send_every = mode, window, send_every
        self.baseline_filtering, self.refresh_after, self.scoring_only = (
            baseline_filtering,
            refresh_after,
            scoring_only,
        )
        self.deadline, self.retry_s, self.reconnect_s, self.when_down = (
            deadline,
            retry_s,
            reconnect_s,
            when_down,
        )
        self._lock = threading.RLock()
        self._carrier: Carrier | None = None
        self._session = Session(self._items, -1)
        self._waiting: list[Packed] = []  # adds of a container that is not full yet
        self._n_adds = self._skipped_in_a_row = 0
        self._handles: list[Any] = []
        self._down_since: float | None = None
        self._next_retry = 0.0
        self._counts = {"sent": 0, "skipped": 0, "forced": 0, "nbytes": 0}
        self._seconds = {"encode": 0.0, "send": 0.0, "wait": 0.0}
        self._is_closed = False

    # -- what it is

    @property
    def baseline(self) -> float | None:
        """The newest baseline that the manager sent, None before."""
        return self._session.baseline

    def stats(self) -> ClientStats:
        """Return a frozen record of what was offered, by which door it left, and what it cost."""
        with self._lock:
            s, doors = self._session, self._session.doors
            pending = s.n_pending + sum(packed.n for packed in self._waiting)
            return ClientStats(
                doors.offered, doors.kept, doors.rejected, doors.passed, doors.filtered, doors.dropped, doors.lost,
                pending, s.forgotten, dict(doors.reasons), self._counts["sent"], self._counts["skipped"],
                self._counts["forced"], s.retried, s.stray, self._counts["nbytes"], self._seconds["encode"],
                self._seconds["send"], self._seconds["wait"],
            )  # fmt: skip

    # -- adding

    def add(self, container: Any) -> dict[str, float] | None:
        """Send a container, and return scores as the mode says; None if there are none yet.

        SchemaError: nothing was taken. PeerDiedError, DeadlineError: `.accepted` says whether it waits here.
        """
        with self._lock:
            self._check_open()
            try:
                self._connect()
            except (PeerDiedError, DeadlineError) as error:
                return self._not_taken(container, error)
            packed = self._checked(container)
            self._n_adds += 1
            if packed.n:
                self._waiting.append(packed)
            if self._n_adds % self.send_every:
                return None
            return self._send_waiting()

    def _not_taken(self, container: Any, error: RecollectError) -> dict[str, float] | None:
        error.accepted = False  # type: ignore[attr-defined]
        if self.when_down == "raise":
            raise error
        n = self._items.encode(container).n if self._items is not None else _length(container)
        self._session.doors.offered += n
        self._session.doors.dropped += n
        return None

    def _checked(self, container: Any) -> Packed:
        """Pack a container, and take out what the manager would not keep."""
        items, doors = self._session.items, self._session.doors
        if items is None:
            raise ClosedError("RemoteReplay: the space of the manager is not known")
        start = perf_counter()
        packed = items.encode(container)
        doors.offered += packed.n
        allowed, n_fine = np.ones(packed.n, bool), packed.n
        if packed.log_rewards is not None:
            allowed = rewards_ok(packed.log_rewards)
            n_fine = int(np.count_nonzero(allowed))
            doors.reject("bad_value", packed.n - n_fine)
        if packed.lengths is not None and items.max_length:
            allowed &= packed.lengths <= items.max_length
            doors.reject("too_long", n_fine - int(np.count_nonzero(allowed)))
        if self.baseline_filtering:
            allowed = self._above_baseline(packed, allowed)
        if np.count_nonzero(allowed) < packed.n:
            packed = packed.take(np.flatnonzero(allowed))
        if self.scoring_only:
            packed = packed.without_steps()
        self._seconds["encode"] += perf_counter() - start
        return packed

    def _above_baseline(self, packed: Packed, allowed: Any) -> Any:
        baseline = self.baseline
        if packed.log_rewards is None:
            raise ValueError("baseline_filtering: needs items with a log_reward, got none")
        if baseline is None or not isfinite(baseline) or not allowed.any():
            return allowed
        high = allowed & (packed.log_rewards >= baseline)
        if not high.any():
            self._skipped_in_a_row += 1
            if self._skipped_in_a_row >= self.refresh_after:
                self._skipped_in_a_row = 0
                self._counts["forced"] += 1
                return allowed
            self._counts["skipped"] += 1
        else:
            self._skipped_in_a_row = 0
        self._session.doors.filtered += int(allowed.sum() - high.sum())
        return high

    def _send_waiting(self) -> dict[str, float] | None:
        """Make one container of what waits, and send it as the mode says."""
        if not self._waiting:
            return None
        oldest = answer = error = None
        n_open = len(self._session.entries)
        most = self._session.max_window if self.mode == "sync" else min(self.window, self._session.max_window)
        try:
            if n_open >= most:
                oldest = self._session.oldest()
                self._until(lambda: oldest is None or oldest.answer is not None or None, "an answer")
        except (PeerDiedError, DeadlineError) as failure:
            return self._down(failure, accepted=False)
        if oldest is not None:
            try:
                answer = self._session.hand_out(oldest)
            except Exception as failure:
                error = failure
        entry = self._put()
        try:
            self._send(entry.parts, wait=self.mode != "async_comm")
            if self.mode == "sync":
                self._until(lambda: entry.answer is not None or None, "its answer")
        except (PeerDiedError, DeadlineError) as failure:
            return self._down(failure, accepted=True)
        if error is not None:
            raise error
        return self._session.hand_out(entry) if self.mode == "sync" else answer

    def _put(self) -> Entry:
        packed = Packed.concat(self._waiting)
        start = perf_counter()
        try:
            entry = self._session.put(packed)
        except FrameError:
            self._waiting.clear()
            self._session.doors.offered -= packed.n
            raise
        self._waiting.clear()
        self._seconds["encode"] += perf_counter() - start
        self._counts["sent"] += 1
        return entry

    def _down(self, error: RecollectError, accepted: bool) -> dict[str, float] | None:
        """The manager is not to be had: raise, or drop what has no answer."""
        error.accepted = accepted  # type: ignore[attr-defined]
        n_here = sum(packed.n for packed in self._waiting)
        if self.when_down == "drop":
            self._session.give_up("dropped")
            self._session.doors.dropped += n_here
            self._waiting.clear()
            return None
        if not accepted:
            self._session.doors.offered -= n_here
            self._waiting.clear()
        raise error

    # -- waiting for the manager

    def _connect(self) -> None:
        """Open the carrier and greet the manager, if that is not done."""
        if self._carrier is None:
            carrier = carrier_of(self.communication_backend)
            key = (id(carrier), self.manager_rank)
            if _open_clients.get(key) not in (None, self):
                raise RuntimeError(
                    f"rank {self.manager_rank}: has a client on this carrier already; close it first"
                )
            _open_clients[key] = self
            _close_at_exit()
            self._carrier = carrier
            self._session.rank, self._session.max_frame = carrier.rank, carrier.max_frame
        if not self._session.is_ready:
            self._until(lambda: True if self._session.is_ready else None, "its welcome")

    def _until(self, ready: Callable[[], Any], what: str) -> Any:
        """Receive until `ready()`; greet, send again and connect again as needed."""
        start = monotonic()
        end = start + self.deadline
        try:
            while True:
                found = ready()
                if found is not None:
                    return found
                if self._session.failure is not None:
                    failure, self._session.failure = self._session.failure, None
                    raise failure
                now = monotonic()
                if now >= end:
                    raise DeadlineError(
                        f"rank {self.manager_rank}: waited {self.deadline:g} s for {what}; is the manager running?"
                    )
                try:
                    self._say_what_is_due(now)
                    self._receive(max(0.0, min(end, self._next_retry) - now))
                except PeerDiedError as error:
                    self._reconnect(error)
        finally:
            self._seconds["wait"] += monotonic() - start

    def _say_what_is_due(self, now: float) -> None:
        if now < self._next_retry:
            return
        self._next_retry = now + self.retry_s
        if not self._session.is_ready:
            self._send(self._session.greet(), wait=True)
            return
        for parts in self._session.unanswered():
            self._send(parts, wait=True)

    def _receive(self, timeout: float) -> None:
        """Take one message, if one comes in time."""
        carrier = self._carrier
        if carrier is None:
            return
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
            frames = self._session.hear(message, body)
        except FrameError:
            self._session.malformed += 1
            return
        for parts in frames:
            self._send(parts, wait=True)
        if frames:
            self._next_retry = monotonic() + self.retry_s

    def _look_at_manager(self) -> None:
        manager = self._session.manager
        if manager is not None and manager[0] == HOST and manager[1] and not _core.is_alive(manager[1]):
            raise PeerDiedError(f"rank {self.manager_rank}: the manager's process is gone")

    def _reconnect(self, error: PeerDiedError) -> None:
        """Connect again for `reconnect_s`, then raise."""
        now = monotonic()
        self._down_since = now if self._down_since is None else self._down_since
        reconnect = getattr(self._carrier, "reconnect", None)
        left = self._down_since + self.reconnect_s - now
        self._session.is_ready = False
        if reconnect is None or left < 0:
            if self.when_down == "raise":
                self._down_since = None  # the next call tries again
            n = self._session.n_pending
            raise PeerDiedError(
                f"rank {self.manager_rank}: the manager is gone; {n} items wait here"
            ) from error
        try:
            reconnect(self.manager_rank, min(max(left, 0.0), 0.5))
        except (PeerDiedError, DeadlineError, OSError):
            return
        self._next_retry = 0.0

    def _send(self, parts: list[Any], wait: bool) -> None:
        carrier = self._carrier
        if carrier is None:
            return
        start = perf_counter()
        self._counts["nbytes"] += sum(map(len, parts))  # all of them bytes
        try:
            if wait:
                carrier.send(self.manager_rank, DATA_TAG, parts, self.deadline)
            else:
                self._handles = [handle for handle in self._handles if not _is_over(handle)]
                self._handles.append(carrier.isend(self.manager_rank, DATA_TAG, parts))
        except PeerDiedError as error:
            self._reconnect(error)
        finally:
            self._seconds["send"] += perf_counter() - start
        if self._next_retry < start:
            self._next_retry = monotonic() + self.retry_s

    # -- answers, drawing, metadata

    def flush(self) -> list[dict[str, float]]:
        """Send what waits, wait for all answers, and return those not handed out yet, in order."""
        with self._lock:
            self._check_open()
            return self._flush()

    def _flush(self) -> list[dict[str, float]]:
        if self._waiting:
            self._connect()
            most = self._session.max_window
            self._until(lambda: True if self._session.n_unanswered < most else None, "room in its window")
            self._send(self._put().parts, wait=True)
        scores: list[dict[str, float]] = []
        while (entry := self._session.oldest()) is not None:
            self._until(partial(_answered, entry), "the last answers")
            try:
                scores.append(self._session.hand_out(entry))
            except Exception as error:
                error.scores = scores  # type: ignore[attr-defined]
                raise
        return scores

    def sample(self, n: Any, *, by: str = "uniform", replace: bool = True) -> Any:
        """Draw n items from the manager's buffer: a block, or Trajectories. Pending adds are not waited for."""
        if isinstance(n, bool) or not isinstance(n, int | np.integer) or n < 0:
            raise ValueError(f"n: must be an int of at least 0, got {n!r}")
        if by not in ("uniform", "log_reward"):
            raise ValueError(f"by: must be 'uniform' or 'log_reward', got {by!r}")
        with self._lock:
            self._check_open()
            self._connect()
            parts = self._asked(lambda request: encode(Sample(request, int(n), by, replace)))  # type: ignore[arg-type]
            items = self._session.items
            if items is None:
                raise EmptyError("sample: the space of the manager is not known")
            packed = []
            for message, body in parts:
                if message.layout != items.id:
                    raise FrameError("sample: items must have the layout of this client, got others")
                rows, lengths, fields = cut_items(message, body, items.shapes)
                packed.append(Packed(message.n, rows, lengths, fields))
            return items.decode(Packed.concat(packed))

    def _asked(self, make: Callable[[int], list[Any]]) -> list[tuple[Items, memoryview]]:
        """Send a request, again with a new number when no answer comes, until all parts of one are here."""
        session = self._session
        state = {"request": 0, "again": 0.0}

        def whole() -> list[tuple[Items, memoryview]] | None:
            now = monotonic()
            if session.is_ready and now >= state["again"]:
                session.expected.pop(int(state["request"]), None)
                state["request"], state["again"] = session.new_request(), now + self.retry_s
                session.expected[int(state["request"])] = []
                self._send(make(int(state["request"])), wait=True)
            got = session.expected.get(int(state["request"]), [])
            for message, _ in got:
                if isinstance(message, Failed):
                    raise as_error(message)
            items = {m.part: (m, body) for m, body in got if isinstance(m, Items)}
            if items and len(items) == next(iter(items.values()))[0].n_parts:
                return [items[part] for part in sorted(items)]
            self._next_retry = min(self._next_retry, state["again"])
            return None

        try:
            found: list[tuple[Items, memoryview]] = self._until(whole, "drawn items")
            return found
        finally:
            session.expected.pop(int(state["request"]), None)

    def metadata(self) -> dict[str, Any]:
        """Ask the manager how it is."""
        with self._lock:
            self._check_open()
            self._connect()
            if self._carrier is None:
                return {}
            return requests.get_metadata(self._carrier, self.manager_rank, self.deadline, self.retry_s)

    # -- ending

    def close(self) -> list[dict[str, float]]:
        """Deliver what waits, say Exit, and return the last answers; may be called twice.

        Past `deadline`: DeadlineError with `.undelivered`; those items are `lost`, and Exit is sent all the same.
        """
        with self._lock:
            if self._is_closed:
                return []
            try:
                scores = self._flush() if self._carrier is not None or self._waiting else []
            except (PeerDiedError, DeadlineError) as error:
                error.undelivered = self._lose()  # type: ignore[union-attr]
                raise
            finally:
                self._exit()
            return scores

    def _lose(self) -> int:
        n = sum(packed.n for packed in self._waiting)
        self._session.doors.lost += n
        self._waiting.clear()
        self._undelivered = n + self._session.n_pending
        self._known_as = self._session.writer  # giving up makes a new writer, of whom the manager never heard
        self._session.give_up("lost")
        return self._undelivered

    _undelivered = 0
    _known_as: bytes | None = None

    def _exit(self, wait_s: float = _GOODBYE_S) -> None:
        """Say Exit until Goodbye comes, for a moment; whatever happens, this client is closed."""
        self._is_closed = True
        carrier, session = self._carrier, self._session
        if carrier is None:
            return
        _open_clients.pop((id(carrier), self.manager_rank), None)
        if session.manager is None:
            return
        request, parts = session.leave()
        if self._undelivered:
            parts = encode(Exit(request, self._known_as or session.writer, self._undelivered, "deadline"))
        session.expected[request] = []
        end, again = monotonic() + min(wait_s, max(self.deadline, 1.0)), 0.0
        try:
            while not session.expected[request] and (now := monotonic()) < end:
                if now >= again:
                    again = now + min(self.retry_s, 1.0)
                    carrier.send(self.manager_rank, DATA_TAG, parts, max(0.0, end - now))
                self._receive(max(0.0, min(end, again) - now))
        except (PeerDiedError, DeadlineError, ClosedError, OSError, ValueError):
            return

    def _check_open(self) -> None:
        if self._is_closed:
            raise ClosedError("RemoteReplay: was closed; make another")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except Exception:
            if error is None:
                raise  # otherwise the error that ended the block is the one to see

    def __repr__(self) -> str:
        return f"RemoteReplay(manager_rank={self.manager_rank}, mode={self.mode!r})"


def close_open_client(carrier: Carrier, manager_rank: int) -> bool:
    """Close the client that is open on this carrier for this manager; False if there is none."""
    client = _open_clients.get((id(carrier), manager_rank))
    if client is None:
        return False
    client.close()
    return True


def _close_at_exit() -> None:
    """Have what was never closed say Exit when this process ends, forked children included."""
    global _registered
    if _registered != getpid():
        _registered = getpid()
        util.Finalize(None, _exit_all, exitpriority=100)


def _exit_all() -> None:
    for client in list(_open_clients.values()):
        if client._carrier is not None and not getattr(client._carrier, "is_closed", False):
            client._lose()
            client._exit(1.0)


def _is_over(handle: Any) -> bool:
    try:
        return bool(handle.is_complete())
    except (PeerDiedError, ClosedError, DeadlineError):
        return True


def _answered(entry: Entry) -> bool | None:
    return True if entry.answer is not None else None


def _length(container: Any) -> int:
    if isinstance(container, dict):
        return _length(next(iter(container.values()))) if container else 0
    return len(container) if hasattr(container, "__len__") else 1
