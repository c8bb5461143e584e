"""RemoteReplay: the worker's side. What is added goes to the manager once, whatever happens on the way."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from math import isfinite
from multiprocessing import util
from time import perf_counter
from types import TracebackType
from typing import Any, Self

import numpy as np

from recollect import interrupts
from recollect.errors import ClosedError, DeadlineError, EmptyError, FrameError, PeerDiedError, RecollectError
from recollect.remote.carriers.base import Carrier
from recollect.remote.carriers.by_name import carrier_of, check_backend
from recollect.remote.client.connection import Connection, get_metadata
from recollect.remote.client.protocol import ClientProtocol, SentContainer
from recollect.remote.config import check_client, check_draw
from recollect.remote.frame import check_drawn, cut_items, encode
from recollect.remote.items.packed import PackedItems, storable
from recollect.remote.items.space import item_space
from recollect.remote.messages import Sample
from recollect.remote.stats import ClientStats

_GOODBYE_S = 5.0
_HEAD_NBYTES = 512  # the most that a frame has beside its items


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
        counts = {"window": window, "send_every": send_every, "refresh_after": refresh_after}
        seconds = {"deadline": deadline, "retry_s": retry_s, "reconnect_s": reconnect_s}
        check_client(mode, when_down, counts, seconds)
        items = None if env is None else item_space(env, needs_length=False)
        if baseline_filtering and items is not None and not items.has_log_reward:
            raise ValueError(f"baseline_filtering: needs items with a log_reward, got {items.space}")
        self.manager_rank, self.communication_backend = manager_rank, communication_backend
        self.mode, self.window, self.send_every = mode, window, send_every
        self.baseline_filtering, self.refresh_after = baseline_filtering, refresh_after
        self.scoring_only, self.deadline, self.when_down = scoring_only, deadline, when_down
        self._lock = threading.RLock()
        self._connection = Connection(items, manager_rank, **seconds, gives_up=when_down == "drop")
        self._waiting: list[PackedItems] = []  # adds of a container that is not full yet
        self._n_adds = self._skipped_in_a_row = 0
        self._counts = {"sent": 0, "skipped": 0, "forced": 0}
        self._encode_s = 0.0
        self._undelivered = 0
        self._known_as: bytes | None = None  # the writer whose end is to be told
        self._is_closed = False

    @property
    def _protocol(self) -> ClientProtocol:
        return self._connection.protocol

    # -- what it is

    @property
    def baseline(self) -> float | None:
        """The newest baseline that the manager sent, None before."""
        return self._protocol.baseline

    def stats(self) -> ClientStats:
        """Return a frozen record of what was offered, by which door it left, and what it cost."""
        with self._lock:
            s, doors = self._protocol, self._protocol.doors
            pending = s.n_pending + sum(packed.n for packed in self._waiting)
            return ClientStats(
                doors.offered, doors.kept, doors.rejected, doors.passed, doors.filtered, doors.dropped, doors.lost,
                pending, s.forgotten, dict(doors.reasons), self._counts["sent"], self._counts["skipped"],
                self._counts["forced"], s.retried, s.stray, self._connection.nbytes, self._encode_s,
                self._connection.send_s, self._connection.wait_s,
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
            with (
                interrupts.deferred()
            ):  # counted and taken at once; an interrupt from here on leaves it waiting
                packed = self._fitting(self._checked(container))
                self._n_adds += 1
                if packed.n:
                    self._waiting.append(packed)
            if self._n_adds % self.send_every:
                return None
            return self._send_waiting(packed.n)

    def _not_taken(self, container: Any, error: RecollectError) -> dict[str, float] | None:
        error.accepted = False  # type: ignore[attr-defined]
        if self.when_down == "raise":
            raise error
        items = self._protocol.items
        n = items.encode(container).n if items is not None else _length(container)
        with interrupts.deferred():
            self._protocol.doors.offered += n
            self._protocol.doors.dropped += n
            self._drop_all()
        return None

    def _drop_all(self) -> None:
        """The manager stayed away: what has no answer is dropped, and training goes on."""
        with interrupts.deferred():
            self._protocol.give_up("dropped")
            self._protocol.doors.dropped += sum(packed.n for packed in self._waiting)
            self._waiting.clear()

    def _checked(self, container: Any) -> PackedItems:
        """Pack a container, and take out what the manager would not keep."""
        items, doors = self._protocol.items, self._protocol.doors
        if items is None:
            raise ClosedError("RemoteReplay: the space of the manager is not known")
        start = perf_counter()
        packed = items.encode(container)
        doors.offered += packed.n
        allowed = storable(packed, items.max_length, doors.reject)
        if self.baseline_filtering:
            allowed = self._above_baseline(packed, np.ones(packed.n, bool) if allowed is None else allowed)
        if allowed is not None and np.count_nonzero(allowed) < packed.n:
            packed = packed.take(np.flatnonzero(allowed))
        if self.scoring_only:
            packed = packed.without_steps()
        self._encode_s += perf_counter() - start
        return packed

    def _fitting(self, packed: PackedItems) -> PackedItems:
        """Refuse what would not fit a frame, together with what waits; FrameError: nothing was taken."""
        most = self._protocol.max_frame - _HEAD_NBYTES
        total = packed.nbytes + sum(waiting.nbytes for waiting in self._waiting)
        if total > most:
            self._protocol.doors.offered -= packed.n
            raise FrameError(
                f"container: must fit a frame of {most + _HEAD_NBYTES} bytes, got {total + _HEAD_NBYTES} with what "
                "waits; send fewer items at once, or raise max_frame of the carrier"
            )
        return packed

    def _above_baseline(self, packed: PackedItems, allowed: Any) -> Any:
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
        self._protocol.doors.filtered += int(allowed.sum() - high.sum())
        return high

    def _send_waiting(self, n_last: int) -> dict[str, float] | None:
        """Make one container of what waits, `n_last` items of the last add, and send it as the mode says."""
        if not self._waiting:
            return None
        try:
            oldest = self._room()
        except (PeerDiedError, DeadlineError) as failure:
            return self._down(failure, accepted=False, n_last=n_last)
        entry, answer, error = self._put(), None, None
        if oldest is not None:
            try:
                answer = self._protocol.hand_out(oldest)
            except Exception as failure:
                error = failure
        try:
            self._connection.send(entry.parts, wait=self.mode != "async_comm")
            if self.mode == "sync":
                self._connection.until(entry.has_answer, "its answer")
        except (PeerDiedError, DeadlineError) as failure:
            return self._down(failure, accepted=True)
        if error is not None:
            raise error
        return self._protocol.hand_out(entry) if self.mode == "sync" else answer

    def _room(self) -> SentContainer | None:
        """Wait until one more container may be outstanding; return the oldest if its answer is to be handed out."""
        protocol, most = self._protocol, self._protocol.max_window
        oldest = None if self.mode == "sync" else protocol.oldest()
        if oldest is not None and len(protocol.entries) >= min(self.window, most):
            self._connection.until(oldest.has_answer, "an answer")
            return oldest
        if protocol.n_unanswered >= most:
            self._connection.until(
                lambda: True if protocol.n_unanswered < most else None, "room in its window"
            )
        return None

    def _put(self) -> SentContainer:
        with interrupts.deferred():  # it waits here or there, not in both
            packed = PackedItems.concat(self._waiting)
            start = perf_counter()
            entry = self._protocol.put(packed)
            self._waiting.clear()
            self._encode_s += perf_counter() - start
            self._counts["sent"] += 1
        return entry

    def _down(self, error: RecollectError, accepted: bool, n_last: int = 0) -> dict[str, float] | None:
        """The manager is not to be had: raise, or drop what has no answer."""
        error.accepted = accepted  # type: ignore[attr-defined]
        if self.when_down == "drop":
            self._drop_all()
            return None
        if not accepted:  # this one is given back; those before it were taken, and wait
            with interrupts.deferred():
                if n_last:
                    self._protocol.doors.offered -= self._waiting.pop().n
                self._n_adds -= 1
        raise error

    def _connect(self) -> None:
        """Open the carrier and greet the manager, if that is not done."""
        if self._connection.carrier is None:
            carrier = carrier_of(self.communication_backend)
            register_open(self, carrier, self._abandon)
            self._connection.open(carrier)
        self._connection.greet()

    # -- answers, drawing, metadata

    def flush(self) -> list[dict[str, float]]:
        """Send what waits, wait for all answers, and return those not handed out yet, in order."""
        with self._lock:
            self._check_open()
            return self._flush()

    def _flush(self) -> list[dict[str, float]]:
        if self._waiting:
            self._connect()
            most = self._protocol.max_window
            self._connection.until(
                lambda: True if self._protocol.n_unanswered < most else None, "room in its window"
            )
            self._connection.send(self._put().parts)
        scores: list[dict[str, float]] = []
        while (entry := self._protocol.oldest()) is not None:
            self._connection.until(entry.has_answer, "the last answers")
            try:
                scores.append(self._protocol.hand_out(entry))
            except Exception as error:
                error.scores = scores  # type: ignore[attr-defined]
                raise
        return scores

    def sample(self, n: Any, *, by: str = "uniform", replace: bool = True) -> Any:
        """Draw n items from the manager's buffer: a block, or Trajectories. Pending adds are not waited for."""
        check_draw(n, by)
        with self._lock:
            self._check_open()
            self._connect()
            if self._protocol.items is not None:
                check_drawn(int(n), self._protocol.items.shapes)
            parts = self._connection.ask(lambda request: encode(Sample(request, int(n), by, replace)))  # type: ignore[arg-type]
            items = self._protocol.items
            if items is None:
                raise EmptyError("sample: the space of the manager is not known")
            packed = []
            for message, body in parts:
                if message.layout != items.id:
                    raise FrameError("sample: items must have the layout of this client, got others")
                rows, lengths, fields = cut_items(message, body, items.shapes)
                packed.append(PackedItems(message.n, rows, lengths, fields))
            if sum(part.n for part in packed) != n:
                raise FrameError(
                    f"sample: the manager must send {n} items, got {sum(part.n for part in packed)}"
                )
            return items.decode(PackedItems.concat(packed))

    def metadata(self) -> dict[str, Any]:
        """Ask the manager how it is."""
        with self._lock:
            self._check_open()
            self._connect()
            connection, protocol = self._connection, self._protocol
            if connection.carrier is None:
                return {}
            return get_metadata(
                connection.carrier, self.manager_rank, self.deadline, connection.retry_s, protocol.count_stray
            )

    # -- ending

    def close(self) -> list[dict[str, float]]:
        """Deliver what waits, say Exit, and return the last answers; may be called twice.

        Past `deadline`: DeadlineError with `.undelivered`; those items are `lost`, and Exit is sent all the same.
        """
        with self._lock:
            if self._is_closed:
                return []
            # Giving up makes a new writer, which the manager does not know.
            self._known_as = self._known_as or self._protocol.writer
            try:
                scores = self._flush_all()
            except Exception as error:
                error.undelivered = self._lose()  # type: ignore[attr-defined]
                self._exit()
                raise
            self._exit()
            return scores

    def _flush_all(self) -> list[dict[str, float]]:
        """Deliver everything, also when some answers are errors; then raise the first of these."""
        scores: list[dict[str, float]] = []
        failure: Exception | None = None
        while True:
            try:
                scores += self._flush()
                break
            except Exception as error:
                if not hasattr(error, "scores"):
                    raise
                scores += error.scores
                failure = failure or error
        if failure is not None:
            failure.scores = scores  # type: ignore[attr-defined]
            raise failure
        return scores

    def _lose(self) -> int:
        with interrupts.deferred():
            n = sum(packed.n for packed in self._waiting)
            self._protocol.doors.lost += n
            self._waiting.clear()
            self._undelivered = n + self._protocol.give_up("lost")
        return self._undelivered

    def _exit(self, wait_s: float = _GOODBYE_S) -> None:
        """Say Exit, for a moment; whatever happens, this client is closed, but for Ctrl-C: then `close` goes on."""
        try:
            self._is_closed = True
            forget_open(self)
            if self._connection.carrier is not None:
                known_as = self._known_as
                if known_as is None or (self._protocol.writer != known_as and not self._undelivered):
                    known_as = self._protocol.writer
                self._connection.leave(self._undelivered, known_as, wait_s)
        except KeyboardInterrupt:
            self._is_closed = False
            raise

    def _abandon(self) -> None:
        """The process ends before this was closed: send Exit, with what could not be delivered."""
        if self._connection.carrier is not None:
            self._known_as = self._known_as or self._protocol.writer
            self._lose()
            self._exit(1.0)

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


def _length(container: Any) -> int:
    if isinstance(container, dict):
        return _length(next(iter(container.values()))) if container else 0
    return len(container) if hasattr(container, "__len__") else 1


# -- open clients: one per carrier end and manager; one that is never closed says Exit when its process ends

_open: dict[tuple[int, int], tuple[Carrier, RemoteReplay, Callable[[], None]]] = {}
_known: dict[tuple[int, int], Callable[[], Any]] = {}  # by which a client here has spoken
_registered = 0
os.register_at_fork(after_in_child=_known.clear)
os.register_at_fork(after_in_child=_open.clear)  # they are the parent's, and say nothing when a child ends

# Carriers may have no hash, so both are found by id. An id is given again once its object is gone: what is open keeps
# its carrier, and what is known is compared with the carrier itself, and goes with it.


def register_open(client: RemoteReplay, carrier: Carrier, abandon: Callable[[], None]) -> None:
    """Note an open client; RuntimeError if its place is taken."""
    key = (id(carrier), client.manager_rank)
    if _open.get(key, (carrier, client, abandon))[1] is not client:
        raise RuntimeError(
            f"rank {client.manager_rank}: has a client on this carrier already; close it first"
        )
    _open[key] = carrier, client, abandon
    _known[key] = _reference(carrier, key)
    _close_at_exit()


def _reference(carrier: Carrier, key: tuple[int, int]) -> Callable[[], Any]:
    def forget(gone: Any) -> None:
        if _known.get(key) is gone:
            del _known[key]

    try:
        return weakref.ref(carrier, forget)
    except TypeError:  # a class without room for weak references: kept, so that its id is not given again
        return lambda: carrier


def forget_open(client: RemoteReplay) -> None:
    """Forget a client that was closed, also one that a Ctrl-C kept from opening its carrier."""
    for key, (_, found, _) in list(_open.items()):  # a list at once: other threads enter and leave meanwhile
        if found is client:
            _open.pop(key, None)


def was_used(carrier: Carrier, manager_rank: int) -> bool:
    """Whether a client of this process was ever open on this carrier for this manager."""
    found = _known.get((id(carrier), manager_rank))
    return found is not None and found() is carrier


def close_open_client(carrier: Carrier, manager_rank: int) -> bool:
    """Close the client that is open on this carrier for this manager; False if there is none."""
    found = _open.get((id(carrier), manager_rank))
    if found is None:
        return False
    found[1].close()
    return True


def _close_at_exit() -> None:
    """Have what was never closed say Exit when this process ends, forked children included."""
    global _registered
    if _registered != os.getpid():
        _registered = os.getpid()
        util.Finalize(None, _exit_all, exitpriority=100)


def _exit_all() -> None:
    for _, _, abandon in list(_open.values()):
        abandon()
