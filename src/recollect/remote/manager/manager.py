"""ReplayBufferManager: the rank that stores what workers send, scores it, and says what is worth sending."""

from __future__ import annotations

import secrets
import sys
import threading
from collections.abc import Iterable
from time import monotonic
from typing import Any, Self

from recollect import interrupts
from recollect.errors import ClosedError, DeadlineError
from recollect.remote.carriers.by_name import carrier_of, check_backend
from recollect.remote.client.client import close_open_client
from recollect.remote.client.connection import get_metadata
from recollect.remote.config import Checkpoint, Limits, Shards, check_settings
from recollect.remote.frame import encode
from recollect.remote.items.space import ItemSpace, item_space
from recollect.remote.manager.baseline import Baseline, SharedBaseline
from recollect.remote.manager.checkpoint import ManagerCheckpoint
from recollect.remote.manager.diversity import Diversity
from recollect.remote.manager.forwarder import Forwarder
from recollect.remote.manager.loop import ManagerLoop, PendingAnswer, Received
from recollect.remote.manager.peers import Workers, Writers
from recollect.remote.manager.protocol import ManagerProtocol
from recollect.remote.manager.scoring import Scoring, checked_scoring
from recollect.remote.manager.state import BufferSettings, Hooks, ManagerState
from recollect.remote.messages import DATA_TAG, Exit
from recollect.remote.stats import ManagerStats, Timing
from recollect.replay import ReplayBuffer

_END_S = 30.0  # for the message at hand, beside what answers get


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
        check_settings(rank, num_training_ranks, baseline_strategy, baseline_percentile, baseline_ema_alpha, capacity,
                       remote_manager_rank, workers, storage, shards)  # fmt: skip
        check_backend(communication_backend)
        self.rank, self.num_training_ranks = rank, num_training_ranks
        self.diverse_replay_buffer, self.capacity = diverse_replay_buffer, capacity
        self.remote_manager_rank, self.communication_backend = remote_manager_rank, communication_backend
        self.timing, self.store_locally, self.limits = timing, store_locally, limits
        self.baseline_strategy, self.baseline_percentile = baseline_strategy, baseline_percentile
        self.baseline_ema_alpha = baseline_ema_alpha
        self.scoring_function: Scoring = self.default_scoring_function
        if scoring_function is not None:  # an object of no length is one too
            self.scoring_function = checked_scoring(scoring_function)
        self._lock = threading.RLock()
        self._timing = Timing(timing)
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._is_ended = False
        self._runner: threading.Thread | None = None  # the thread that is in `run`
        self._ended = threading.Event()
        self._ended.set()
        rule = (diversity or Diversity()) if diverse_replay_buffer else None
        items = item_space(env, max_length)
        self._workers = Workers(num_training_ranks, workers, limits)
        self._state = self._new_state(items, evict, storage, rule, shards, seed)
        forwarder = None
        if remote_manager_rank is not None:
            forwarder = Forwarder(items, rank, remote_manager_rank, is_bounded=checkpoint is None)
        saved = ManagerCheckpoint(self._state, Writers(), checkpoint, forwarder)
        self._protocol = ManagerProtocol(
            self._state, self._workers, limits, saved, forwarder, lambda: self._compute_metadata()
        )
        self._loop = ManagerLoop(self._protocol, communication_backend, limits, self._timing, self._lock)
        self._protocol.open()

    def _new_state(
        self, items: ItemSpace, evict: str | None, storage: str, rule: Diversity | None, shards: Shards | None,
        seed: int | None,
    ) -> ManagerState:  # fmt: skip
        evict = evict or ("lowest" if items.has_log_reward else "oldest")
        settings = BufferSettings(self.capacity, evict, storage, self.store_locally, rule)
        strategy, percentile = self.baseline_strategy, self.baseline_percentile
        shared = None if shards is None else SharedBaseline(self.rank, shards, strategy, percentile)
        baseline = Baseline(strategy, percentile, self.baseline_ema_alpha, shared)
        # Looked up at each use: a user may set the function, and override the method.
        hooks = Hooks(
            lambda: self.scoring_function,
            lambda scores, packed: self._inject_baseline_log_reward(scores, packed),
        )
        return ManagerState(items, settings, baseline, self._workers, self._timing, hooks, seed)

    # -- what it is

    @property
    def buffer(self) -> ReplayBuffer | None:
        """The buffer, None with `store_locally=False`."""
        return self._state.buffer if self.store_locally else None

    @property
    def is_running(self) -> bool:
        """Whether it serves or may serve; set it to False to end the loop, as by `stop()`, and to True to run again."""
        return self._loop.is_running

    @is_running.setter
    def is_running(self, value: bool) -> None:
        self._loop.is_stopping = not value
        self._loop.is_running = bool(value)

    @property
    def exit_counter(self) -> int:
        """How many ranks have left."""
        with self._lock:
            return self._workers.n_left

    @property
    def _baseline_ema(self) -> float | None:
        return self._state.baseline.ema

    @property
    def _comm_stats(self) -> dict[int, dict[str, Any]]:
        with self._lock:
            return self._state.senders.with_states()

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
            return self._protocol.add_local(container, sender_rank)

    def sample(self, n: int, *, by: str = "uniform", replace: bool = True) -> Any:
        """Draw n items: a block, or Trajectories. `by="log_reward"`: P ∝ exp(log_reward), never -inf."""
        with self._lock:
            self._check_open()
            return self._state.items.decode(self._state.draw(n, by, replace))

    def stats(self) -> ManagerStats:
        """Return a frozen record of what came, what is here, and by which door the rest left."""
        with self._lock:
            return self._protocol.stats(
                pending_sends=len(self._loop.pending),
                unsent=self._loop.unsent,
                phases=self._timing.phases(),
            )

    def _check_open(self) -> None:
        if self._loop.is_closed.is_set():
            raise ClosedError("ReplayBufferManager: was closed; make another")

    # -- hooks and the page's other names

    def _compute_metadata(self) -> dict[str, Any]:
        """What `get_metadata` returns; override it to add plain values."""
        return self._state.metadata()

    def _inject_baseline_log_reward(self, score_dict: dict[str, float], incoming: Any) -> None:
        """Update the average of batch minima, and write `baseline_log_reward` into the dict, if there is one."""
        self._state.inject_baseline(score_dict, getattr(incoming, "log_rewards", None))

    @property
    def _pending_sends(self) -> list[PendingAnswer]:
        return self._loop.pending

    def _recv_object(self) -> tuple[int, Received, int]:
        """Wait a moment for the next message: (rank, message, bytes); DeadlineError if none came."""
        return self._loop.recv()

    def _handle_message_async(self, sender_rank: int, msg: Received, msg_data_len: int = 0) -> None:
        """Handle a message, and answer by `isend`: a worker that does not read delays no other."""
        self._loop.answer(self._loop.handle(sender_rank, msg), is_async=True)

    def _handle_message_sync(self, sender_rank: int, msg: Received, msg_data_len: int = 0) -> None:
        """Handle a message, and answer by `send`; after `send_s` that answer is dropped and counted."""
        self._loop.answer(self._loop.handle(sender_rank, msg), is_async=False)

    def _prune_completed_sends(self) -> None:
        """Forget answers that are sent."""
        self._loop.prune()

    def _print_timing_summary(self) -> None:
        """Print what came from which rank, and how long each kind of work took."""
        sys.stdout.write(self._timing.summary(self.stats()) + "\n")

    @staticmethod
    def get_metadata(manager_rank: int, backend: Any, *, timeout: float = 30.0) -> dict[str, Any]:
        """Ask a manager how it is, from any rank."""
        return get_metadata(carrier_of(backend), manager_rank, timeout)

    @staticmethod
    def send_termination_signal(manager_rank: int, backend: Any) -> None:
        """Tell a manager that this rank leaves, after flushing a client that is open here."""
        carrier = carrier_of(backend)
        if close_open_client(carrier, manager_rank):
            return
        message = Exit(secrets.randbits(48), bytes(16), 0, "termination signal")
        carrier.send(manager_rank, DATA_TAG, encode(message))

    # -- running

    def run(self, async_send: bool = True) -> ManagerStats:
        """Serve until every worker has left, or `stop()`; return `stats()`.

        `async_send=True` answers by `isend`, False by `send`.
        """
        self._check_open()
        try:
            with interrupts.deferred():  # an Event's own lock would stay taken
                self._ended.clear()
                self._runner = threading.current_thread()
            handle = self._handle_message_async if async_send else self._handle_message_sync
            self._loop.run(self._recv_object, handle, async_send)
        finally:
            try:
                with interrupts.deferred():
                    self._set_ended()
            except KeyboardInterrupt:  # perhaps too early
                self._set_ended()
                raise
        if self.timing:
            self._print_timing_summary()
        if self._workers.none_came and self.num_training_ranks and not self._loop.is_stopping:
            raise DeadlineError(f"run: no worker came within {self.limits.join_s:g} s; are they started?")
        return self.stats()

    def _set_ended(self) -> None:
        self._runner = None
        self._ended.set()

    def start(self, async_send: bool = True) -> Self:
        """Run in a thread of this process."""
        self._check_open()
        if self._thread is not None and self._thread.is_alive():
            raise RuntimeError("start: already running; call stop() first")
        _ = self._loop.carrier  # opened in this thread, so that the caller sees what is wrong

        def work() -> None:
            try:
                self.run(async_send)
            except BaseException as error:
                self._failure = error

        self._thread = threading.Thread(target=work, name=f"recollect-manager-{self.rank}", daemon=True)
        self._thread.start()
        return self

    def stop(self) -> None:
        """End the loop after the message at hand; does not wait."""
        self._loop.is_stopping = True

    def close(self) -> None:
        """Stop, wait for the end, and release the buffer; may be called twice. Raises what `start` ended with.

        DeadlineError if it does not end, as while a scoring function hangs: the next call tries again.
        """
        if self._is_ended:
            return
        self.stop()
        self._await_end(self.limits.drain_s + _END_S)
        with interrupts.deferred():
            self._loop.is_closed.set()
        self._loop.close()
        with interrupts.deferred(), self._lock:  # each descriptor is closed once
            self._protocol.close()
        self._is_ended = True  # last: a call that was cut short goes on when it is made again
        failure, self._failure = self._failure, None
        if failure is not None and not isinstance(failure, ClosedError):
            raise failure

    def _await_end(self, seconds: float) -> None:
        """Wait until no thread serves any more, but this one."""
        me, end = threading.current_thread(), monotonic() + seconds
        if self._thread is not None and self._thread is not me:
            self._thread.join(seconds)
        if self._runner is not me and not self._ended.wait(max(0.0, end - monotonic())):
            raise DeadlineError(
                f"close: the manager must end within {seconds:g} s, it did not; does its scoring function hang?"
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"ReplayBufferManager(rank={self.rank}, capacity={self.capacity}, {self._state.items.space})"
