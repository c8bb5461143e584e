"""ReplayBufferManager: the rank that stores what workers send, scores it, and says what is worth sending."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterable
from contextlib import suppress
from time import monotonic
from typing import Any, NamedTuple, Self

import numpy as np

from recollect.errors import ClosedError, DeadlineError, FrameError, PeerDiedError
from recollect.remote import requests
from recollect.remote.backends import carrier_of, check_backend
from recollect.remote.baseline import STRATEGIES
from recollect.remote.carriers.base import Carrier
from recollect.remote.desk import Desk, Reply
from recollect.remote.diversity import Diversity
from recollect.remote.items import item_space
from recollect.remote.messages import DATA_TAG, AnyMessage, Exit, Failed
from recollect.remote.ranks import RankBook
from recollect.remote.records import Checkpoint, Limits, ManagerStats, Shards
from recollect.remote.scoring import BASELINE, Scoring
from recollect.remote.timing import Timing
from recollect.remote.wire import decode, encode
from recollect.replay import ReplayBuffer

_TICK_S = 0.1
_MOST_MALFORMED = 16
_AT_HAND = 64


class Received(NamedTuple):
    """What came: the message, the body of its frame, and the frame; or what is wrong with it."""

    message: AnyMessage | None
    body: memoryview
    frame: memoryview
    error: FrameError | None = None


class _Pending(NamedTuple):
    handle: Any
    dest: int

    def is_complete(self) -> bool:
        """Whether it is sent, or can never be."""
        try:
            return bool(self.handle.is_complete())
        except (PeerDiedError, ClosedError, DeadlineError):
            return True


class ReplayBufferManager:
    """Receives containers on the manager rank, stores and scores them, and replies with scores.

    Each answer holds `baseline_log_reward`, so that workers with `baseline_filtering` can leave out what would be
    evicted at once. Under `baseline_strategy` `"min"` and `"percentile"` it is read from the buffer once that is full;
    under `"ema"`, and before, it is a running average of batch minima.

    Ownership: owns its buffer; a carrier that was passed in stays the caller's.
    Concurrency: `run` in one thread; `add`, `sample`, `stats`, `stop` from any; samplers may read `buffer` meanwhile.

    Example:
        >>> import numpy as np
        >>> from recollect.remote import ReplayBufferManager
        >>> space = {"x": ((2,), "float32"), "log_reward": ((), "float32")}
        >>> manager = ReplayBufferManager(space, rank=1, num_training_ranks=1, capacity=2)
        >>> rewards = np.array([0.0, 1.0, 2.0], "float32")
        >>> manager.add({"x": np.zeros((3, 2), "float32"), "log_reward": rewards})
        {'score': inf, 'baseline_log_reward': 1.0}
        >>> manager.stats().evicted
        1
    """

    def __init__(
        self,
        env: Any,
        rank: int,
        num_training_ranks: int | None,
        scoring_function: Scoring | None = None,
        diverse_replay_buffer: bool = False,
        capacity: int = 10000,
        remote_manager_rank: int | None = None,
        communication_backend: Any = "mpi",
        timing: bool = False,
        store_locally: bool = True,
        baseline_strategy: str = "min",
        baseline_percentile: float = 0.1,
        baseline_ema_alpha: float = 0.1,
        *,
        evict: str | None = None,
        max_length: int | None = None,
        storage: str = "memory",
        worker_ranks: Iterable[int] | None = None,
        diversity: Diversity | None = None,
        shards: Shards | None = None,
        checkpoint: Checkpoint | None = None,
        limits: Limits | None = None,
        seed: int | None = None,
    ) -> None:
        """Make the buffer; the carrier is opened when it is first needed."""
        limits = Limits() if limits is None else limits
        workers = None if worker_ranks is None else [int(r) for r in worker_ranks]
        _check(rank, num_training_ranks, baseline_strategy, baseline_percentile, baseline_ema_alpha, capacity,
               remote_manager_rank, workers, storage, shards)  # fmt: skip
        check_backend(communication_backend)
        self.rank, self.num_training_ranks = rank, num_training_ranks
        self.diverse_replay_buffer, self.capacity = diverse_replay_buffer, capacity
        self.remote_manager_rank, self.communication_backend = remote_manager_rank, communication_backend
        self.timing, self.store_locally, self.limits = timing, store_locally, limits
        self.baseline_strategy, self.baseline_percentile = baseline_strategy, baseline_percentile
        self.baseline_ema_alpha = baseline_ema_alpha
        self.is_running = True
        self._lock = threading.RLock()
        self._timing = Timing(timing)
        self._pending_sends: list[_Pending] = []
        self._unsent = 0
        self._carrier: Carrier | None = None
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._stopping = False
        self._book = RankBook(num_training_ranks, workers, limits)
        self._in_a_row: dict[int, int] = {}
        self._shut_out: set[int] = set()
        self._next_tick = 0.0
        self._undertaker: threading.Thread | None = None
        self._done = threading.Event()
        self._custom_scoring = scoring_function
        self.scoring_function: Scoring = scoring_function or self.default_scoring_function
        rule = (diversity or Diversity()) if diverse_replay_buffer else None
        self._desk = Desk(
            self, item_space(env, max_length), capacity, evict, storage, rule, shards, checkpoint, seed
        )
        self._desk.open()

    # -- what it is

    @property
    def buffer(self) -> ReplayBuffer | None:
        """The buffer, None with `store_locally=False`."""
        return self._desk.buffer if self.store_locally else None

    @property
    def exit_counter(self) -> int:
        """How many ranks have left."""
        return self._book.n_left

    @property
    def _baseline_ema(self) -> float | None:
        return self._desk.ema

    @property
    def _comm_stats(self) -> dict[int, dict[str, Any]]:
        return self._desk.comm_stats()

    @property
    def _timing_data(self) -> dict[str, list[float]]:
        return self._timing.recent()

    def default_scoring_function(self, obj: Any, sender_rank: int = -1) -> dict[str, float]:
        """The score of everything if no function is given."""
        return {"score": float("inf")}

    # -- without a carrier

    def add(self, container: Any, sender_rank: int = -1) -> dict[str, float]:
        """Store and score a container, and return its scores with the baseline, as for a worker."""
        with self._lock:
            self._check_open()
            return self._desk.add_here(container, sender_rank)

    def sample(self, n: int, *, by: str = "uniform", replace: bool = True) -> Any:
        """Draw n items: a block, or Trajectories. `by="log_reward"`: P ∝ exp(log_reward), never -inf."""
        with self._lock:
            self._check_open()
            return self._desk.items.decode(self._desk.draw(n, by, replace))

    def stats(self) -> ManagerStats:
        """Return a frozen record of what came, what is here, and by which door the rest left."""
        with self._lock:
            return self._desk.stats(len(self._pending_sends), self._unsent, self._timing.phases())

    def _check_open(self) -> None:
        if self._done.is_set():
            raise ClosedError("ReplayBufferManager: was closed; make another")

    # -- hooks and the page's other names

    def _compute_metadata(self) -> dict[str, Any]:
        """What `get_metadata` returns; override it to add plain values."""
        return self._desk.metadata()

    def _inject_baseline_log_reward(self, score_dict: dict[str, float], incoming: Any) -> None:
        """Update the average of batch minima, and write `baseline_log_reward` into the dict, if there is one."""
        value = self._desk.next_baseline(getattr(incoming, "log_rewards", None))
        if value is None:
            score_dict.pop(BASELINE, None)
            return
        score_dict[BASELINE] = value[1]
        if value[0] is not None:
            score_dict["baseline_epoch"] = float(value[0])

    def _recv_object(self) -> tuple[int, Received, int]:
        """Wait a moment for the next message: (rank, message, bytes); DeadlineError if none came."""
        carrier = self._open_carrier()
        left = max(0.0, min(self._next_tick - monotonic(), _TICK_S))
        with self._timing.phase("recv"):
            rank, _, frame = carrier.recv(timeout=left)
        return rank, self._opened(frame, carrier), frame.nbytes

    def _opened(self, frame: memoryview, carrier: Carrier) -> Received:
        try:
            message, _, body = decode(frame, max_frame=carrier.max_frame)
        except FrameError as error:
            return Received(None, frame[:0], frame, error)
        return Received(message, body, frame)

    def _handle_message_async(self, sender_rank: int, msg: Received, msg_data_len: int = 0) -> None:
        """Handle a message, and answer by `isend`: a worker that does not read delays nobody."""
        self._answer(self._handle(sender_rank, msg, msg_data_len), is_async=True)

    def _handle_message_sync(self, sender_rank: int, msg: Received, msg_data_len: int = 0) -> None:
        """Handle a message, and answer by `send`; after `send_s` that answer is dropped and counted."""
        self._answer(self._handle(sender_rank, msg, msg_data_len), is_async=False)

    def _prune_completed_sends(self) -> None:
        """Forget answers that are sent."""
        self._pending_sends = [pending for pending in self._pending_sends if not pending.is_complete()]

    def _print_timing_summary(self) -> None:
        """Print what came from whom, and how long each kind of work took."""
        import sys

        sys.stdout.write(self._timing.summary(self.stats()) + "\n")

    @staticmethod
    def get_metadata(manager_rank: int, backend: Any, *, timeout: float = 30.0) -> dict[str, Any]:
        """Ask a manager how it is, from any rank."""
        return requests.get_metadata(carrier_of(backend), manager_rank, timeout)

    @staticmethod
    def send_termination_signal(manager_rank: int, backend: Any) -> None:
        """Tell a manager that this rank leaves, after flushing a client that is open here."""
        from recollect.remote.client import close_open_client

        carrier = carrier_of(backend)
        if close_open_client(carrier, manager_rank):
            return
        message = Exit(secrets.randbits(48), bytes(16), 0, "termination signal")
        carrier.send(manager_rank, DATA_TAG, encode(message))

    # -- handling

    def _handle(self, sender: int, received: Received, nbytes: int = 0) -> list[Reply]:
        """Do what a message asks, and return the answers; nothing that a peer sends raises here."""
        with self._lock:
            if sender in self._shut_out:
                return []
            if received.error is not None or received.message is None:
                return self._malformed(sender, received)
            self._book.heard(sender, monotonic())
            try:
                replies = self._desk.handle(sender, received.message, received.body, received.frame)
            except FrameError as error:
                return self._malformed(sender, received._replace(error=error))
            self._in_a_row.pop(sender, None)
            return replies

    def _malformed(self, sender: int, received: Received) -> list[Reply]:
        self._desk.count_malformed(sender)
        self._in_a_row[sender] = self._in_a_row.get(sender, 0) + 1
        for_ever = self._in_a_row[sender] >= _MOST_MALFORMED
        if for_ever:
            self._shut_out.add(sender)
        refuse = getattr(self._carrier, "refuse", None)
        if refuse is not None:
            refuse(sender, for_ever)
        if received.message is None or for_ever:
            return []
        text = str(received.error)[:60_000]
        return [Reply(sender, DATA_TAG, encode(Failed(received.message.request, "FrameError", text)))]

    def _answer(self, replies: list[Reply], is_async: bool) -> None:
        self._desk.commit()
        self._prune_completed_sends()
        carrier = self._open_carrier()
        with self._timing.phase("send"):
            for reply in replies:
                try:
                    if is_async:
                        self._answer_soon(carrier, reply)
                    else:
                        carrier.send(reply.dest, reply.tag, reply.parts, self.limits.send_s)
                except (PeerDiedError, DeadlineError, FrameError, ValueError):
                    self._unsent += 1  # if the client lives, it will ask again
        self._desk.after_answers(carrier)

    def _answer_soon(self, carrier: Carrier, reply: Reply) -> None:
        if sum(p.dest == reply.dest for p in self._pending_sends) > self.limits.max_window:
            self._unsent += 1
            return
        handle = carrier.isend(reply.dest, reply.tag, reply.parts)
        pending = _Pending(handle, reply.dest)
        if not pending.is_complete():
            self._pending_sends.append(pending)

    # -- running

    def _open_carrier(self) -> Carrier:
        if self._carrier is None:
            self._carrier = carrier_of(self.communication_backend)
        return self._carrier

    def run(self, async_send: bool = True) -> ManagerStats:
        """Serve until every worker has left, or `stop()`; return `stats()`.

        `async_send=True` answers by `isend`, False by `send`.
        """
        self._check_open()
        self._stop_undertaker()
        carrier = self._open_carrier()
        self._book.begin(monotonic())
        self.is_running = not (self._book.is_over or self._stopping)
        try:
            while self.is_running:
                self._serve(async_send)
            self._finish(carrier, async_send)
        except ClosedError:
            if not getattr(carrier, "is_closed", False):
                raise
        finally:
            self.is_running = False
        if self.timing:
            self._print_timing_summary()
        if not self._book.anybody and self.num_training_ranks and not self._stopping:
            raise DeadlineError(f"run: no worker came within {self.limits.join_s:g} s; are they started?")
        return self.stats()

    def _serve(self, async_send: bool) -> None:
        """Handle what comes within a moment, and look after what is due."""
        handle = self._handle_message_async if async_send else self._handle_message_sync
        try:
            first = self._recv_object()
        except DeadlineError:
            pass
        else:
            if self._desk.waits_for_disk:
                self._serve_together(first, async_send)
            else:
                handle(*first)
        now = monotonic()
        if now >= self._next_tick:
            self._next_tick = now + _TICK_S
            self._tick(now, async_send)
        if self._book.is_over or self._stopping:
            self.is_running = False

    def _serve_together(self, first: tuple[int, Received, int], async_send: bool) -> None:
        """Handle all messages at hand, sync the log once, then answer."""
        replies = self._handle(*first)
        carrier = self._open_carrier()
        for _ in range(_AT_HAND - 1):
            try:
                rank, _, frame = carrier.recv(timeout=0.0)
            except DeadlineError:
                break
            replies += self._handle(rank, self._opened(frame, carrier), frame.nbytes)
        self._answer(replies, async_send)

    def _tick(self, now: float, async_send: bool) -> None:
        carrier = self._open_carrier()
        self._prune_completed_sends()
        with self._lock:
            self._book.tick(now, carrier.alive(), getattr(carrier, "sees_death", True))
            replies = self._desk.tick(now)
        for reply in replies:  # to other managers, who may not be there
            with suppress(PeerDiedError, DeadlineError, ValueError):
                carrier.isend(reply.dest, reply.tag, reply.parts)
        self._desk.after_answers(carrier)

    def _finish(self, carrier: Carrier, async_send: bool) -> None:
        """Let the last answers out, flush what is forwarded, write a checkpoint."""
        end = monotonic() + self.limits.drain_s
        self._desk.finish_forwarding(carrier, end)
        while self._pending_sends and monotonic() < end:
            with suppress(DeadlineError):
                rank, _, frame = carrier.recv(timeout=min(0.05, max(0.0, end - monotonic())))
                self._answer(self._late(rank, frame), async_send)
            self._prune_completed_sends()
        with self._lock:
            self._desk.dump()
        if getattr(carrier, "sees_death", True):
            self._undertaker = threading.Thread(
                target=self._answer_late, args=(carrier,), name="recollect-late", daemon=True
            )
            self._undertaker.start()

    def _late(self, rank: int, frame: memoryview) -> list[Reply]:
        """The answer to one who comes too late: duplicates get their answer, all others ClosedError."""
        received = self._opened(frame, self._open_carrier())
        if received.message is None:
            return []
        with self._lock:
            return self._desk.late(rank, received.message)

    def _answer_late(self, carrier: Carrier) -> None:
        """After the end, while the process lives, this manager's own workers hear that it has ended."""
        ranks = sorted(self._book.workers)
        while not self._done.wait(0.05) and not self.is_running:
            try:
                for rank in ranks:
                    with suppress(DeadlineError, PeerDiedError):
                        _, _, frame = carrier.recv(rank, DATA_TAG, timeout=0.0)
                        for reply in self._late(rank, frame):
                            carrier.isend(reply.dest, reply.tag, reply.parts)
            except (ClosedError, OSError, RuntimeError):
                return

    def _stop_undertaker(self) -> None:
        if self._undertaker is not None:
            self.is_running = True
            self._undertaker.join(2.0)
            self._undertaker = None

    def start(self, async_send: bool = True) -> Self:
        """Run in a thread of this process."""
        self._check_open()
        if self._thread is not None and self._thread.is_alive():
            raise RuntimeError("start: already running; call stop() first")
        self._open_carrier()

        def work() -> None:
            try:
                self.run(async_send)
            except BaseException as error:
                self._failure = error

        self._thread = threading.Thread(target=work, name="recollect-manager", daemon=True)
        self._thread.start()
        return self

    def stop(self) -> None:
        """End the loop after the message at hand; does not wait."""
        self._stopping = True

    def close(self) -> None:
        """Stop, wait for the end, and release the buffer; may be called twice. Raises what `start` ended with."""
        if self._done.is_set():
            return
        self.stop()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(self.limits.drain_s + 30.0)
        self._done.set()
        if self._undertaker is not None and self._undertaker is not threading.current_thread():
            self._undertaker.join(2.0)
        with self._lock:
            self._desk.close()
        failure, self._failure = self._failure, None
        if failure is not None and not isinstance(failure, ClosedError):
            raise failure

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"ReplayBufferManager(rank={self.rank}, capacity={self.capacity}, {self._desk.items.space})"


def _check(rank: Any, n: Any, strategy: Any, percentile: Any, alpha: Any, capacity: Any, remote: Any,
           workers: list[int] | None, storage: str, shards: Shards | None) -> None:  # fmt: skip
    if strategy not in STRATEGIES:
        raise ValueError(f"baseline_strategy: must be one of {list(STRATEGIES)}, got {strategy!r}")
    if not isinstance(percentile, int | float) or not 0 <= percentile <= 1:
        raise ValueError(f"baseline_percentile: must be in [0, 1], got {percentile!r}")
    if not isinstance(alpha, int | float) or not 0 < alpha <= 1:
        raise ValueError(f"baseline_ema_alpha: must be in (0, 1], got {alpha!r}")
    if isinstance(capacity, bool) or not isinstance(capacity, int | np.integer) or capacity < 1:
        raise ValueError(f"capacity: must be at least 1, got {capacity!r}")
    if storage not in ("memory", "shared"):
        raise ValueError(f"storage: must be 'memory' or 'shared', got {storage!r}")
    for name, value in (("rank", rank), ("num_training_ranks", 0 if n is None else n)):
        if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 0:
            raise ValueError(f"{name}: must be an int of at least 0, got {value!r}")
    if remote is not None and (not isinstance(remote, int) or remote < 0 or remote == rank):
        raise ValueError(f"remote_manager_rank: must be another rank, got {remote!r}")
    if workers is not None and (
        rank in workers or len(set(workers)) != len(workers) or min(workers, default=0) < 0
    ):
        raise ValueError(f"worker_ranks: must be different ranks other than {rank}, got {workers}")
    if workers is not None and n is not None and n > len(workers):
        raise ValueError(f"num_training_ranks: must be at most the {len(workers)} worker_ranks, got {n}")
    if shards is not None and rank not in shards.manager_ranks:
        raise ValueError(f"shards: manager_ranks must hold this rank, {rank}, got {shards.manager_ranks}")
