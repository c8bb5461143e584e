"""Desk: a manager without a carrier. Messages go in, answers come out; this is where everything is decided.

The order of work for Data: validate, store (with a checkpoint the log first), score, baseline, reply, count.
"""

from __future__ import annotations

import secrets
from collections import Counter
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from recollect import _core
from recollect.errors import EmptyError, RemoteError, SchemaError, ScoringError
from recollect.remote import checkpoint as saved
from recollect.remote.agreement import Agreement, Summary
from recollect.remote.baseline import from_buffer, next_ema
from recollect.remote.diversity import Diversity
from recollect.remote.forwarding import Forwarder
from recollect.remote.items import ItemSpace, Packed, text_difference
from recollect.remote.messages import (
    DATA_TAG,
    METADATA_TAG,
    PROTOCOL,
    AnyMessage,
    Data,
    Exit,
    Failed,
    GetMetadata,
    Goodbye,
    Hello,
    Items,
    Metadata,
    Sample,
    Scores,
    Sync,
    Welcome,
)
from recollect.remote.ranks import HOST
from recollect.remote.records import Checkpoint, ManagerStats, Sender, Shards
from recollect.remote.scoring import Scored, call_scoring
from recollect.remote.store import Outcome, Store, make_buffer
from recollect.remote.trajectories import Array
from recollect.remote.wire import MAX_FRAME, cut_items, cut_values, encode, joined
from recollect.remote.writers import Writer, Writers
from recollect.sampling.stream import IndexStream

if TYPE_CHECKING:
    from recollect.remote.manager import ReplayBufferManager

HERE = bytes(16)  # the writer of `add`
_COUNTS = ("offered", "evicted", "removed", "passed", "containers", "duplicates", "stray", "malformed",
           "scoring_errors")  # fmt: skip


class Reply(NamedTuple):
    """A frame to be sent."""

    dest: int
    tag: int
    parts: list[Any]


class Desk:
    """What a manager knows and does. Concurrency: the manager's lock is held in every call."""

    def __init__(
        self,
        manager: ReplayBufferManager,
        items: ItemSpace,
        capacity: int,
        evict: str | None,
        storage: str,
        diversity: Diversity | None,
        shards: Shards | None,
        checkpoint: Checkpoint | None,
        seed: int | None,
    ) -> None:
        self.manager, self.items, self.diversity = manager, items, diversity
        self.incarnation = secrets.token_bytes(16)
        self.writers = Writers()
        self.ema: float | None = None
        self.counts = dict.fromkeys(_COUNTS, 0)
        self.rejected: Counter[str] = Counter()
        self.senders: dict[int, dict[str, int]] = {}
        self.stream = IndexStream(seed)
        self._floats = np.random.default_rng(seed)
        self._last_baseline: float | None = None
        evict = evict or ("lowest" if items.has_log_reward else "oldest")
        _check_items(items, evict, diversity, manager)
        self.config = _config(items, capacity, evict, manager)
        self.agreement = None
        if shards is not None:
            self.agreement = Agreement(
                manager.rank, shards, manager.baseline_strategy, manager.baseline_percentile
            )
        self.forwarder: Forwarder | None = None
        if manager.remote_manager_rank is not None:
            self.forwarder = Forwarder(items, manager.rank, manager.remote_manager_rank)
        self.checkpoint = checkpoint
        self.log: saved.Log | None = None
        self._kind = (capacity if manager.store_locally else 1, evict, storage)

    def open(self) -> None:
        """Make the buffer, or take it from the checkpoint and repeat the work of its log."""
        capacity, evict, storage = self._kind
        if self.checkpoint is None:
            self._adopt(make_buffer(self.items, capacity, evict, storage))
        else:
            self._restore(self.checkpoint, lambda: make_buffer(self.items, capacity, evict, storage), storage)

    def _adopt(self, buffer: Any) -> None:
        self.buffer = buffer
        self.store = Store(self.items, buffer, self.diversity)

    # -- messages

    def handle(self, sender: int, message: AnyMessage, body: memoryview, frame: memoryview) -> list[Reply]:
        """Do what a message asks. FrameError for blocks that do not fit; everything else is an answer."""
        about = self._about(sender)
        about["requests"] += 1
        about["nbytes"] += frame.nbytes
        match message:
            case Data():
                return self._on_data(sender, message, body, frame)
            case Hello():
                return self._on_hello(sender, message)
            case Sample():
                return self._on_sample(sender, message)
            case GetMetadata():
                return self._on_metadata(sender, message)
            case Exit():
                return self._on_exit(sender, message)
            case Sync():
                values = cut_values(message, body)
                if self.agreement is None or not self.agreement.hear(sender, message, values, monotonic()):
                    self.counts["stray"] += 1
            case _:
                self._on_answer(sender, message)
        return []

    def _on_answer(self, sender: int, message: AnyMessage) -> None:
        if self.forwarder is None or not self.forwarder.hear(sender, message):
            self.counts["stray"] += 1

    def _about(self, sender: int) -> dict[str, int]:
        if sender not in self.senders:
            self.senders[sender] = {"requests": 0, "items": 0, "nbytes": 0, "malformed": 0, "undelivered": 0}
        return self.senders[sender]

    def count_malformed(self, sender: int) -> None:
        self.counts["malformed"] += 1
        self._about(sender)["malformed"] += 1

    def _failed(
        self, sender: int, request: int, error: BaseException | str, text: str = "", **more: int
    ) -> list[Reply]:
        name = error if isinstance(error, str) else type(error).__name__
        text = text or str(error)
        return [Reply(sender, DATA_TAG, encode(Failed(request, name, text[:60_000], **more)))]

    def _on_hello(self, sender: int, hello: Hello) -> list[Reply]:
        if hello.protocol != PROTOCOL or hello.rank not in (-1, sender):
            why = f"protocol {PROTOCOL} and your own rank {sender}"
            return self._failed(sender, hello.request, "RemoteError", f"hello: must give {why}, got others")
        difference = text_difference(self.items.text, hello.space) if hello.space else None
        if difference is not None:
            text = f"space: must equal the manager's, got a difference at {difference}; give both one env"
            return self._failed(sender, hello.request, "SchemaError", text)
        writer = self.writers.get(hello.writer)
        if writer is not None and writer.rank != sender:
            return self._failed(sender, hello.request, "RemoteError", "writer: belongs to another rank")
        if hello.role == "worker" and not (writer is not None and writer.has_left):
            why_not = self.manager._book.admit(sender, hello.host, hello.process, monotonic())
            if why_not is not None:
                return self._failed(sender, hello.request, "RemoteError", f"rank {sender}: {why_not}")
        writer = self.writers.enter(hello.writer, sender)
        writer.gap_told = -1
        welcome = Welcome(
            hello.request, self.incarnation, writer.last_seq, self.manager.limits.max_window, self.baseline(),
            self.items.text, self.items.max_length, HOST, _core.process_word(_pid()),
        )  # fmt: skip
        return [Reply(sender, DATA_TAG, encode(welcome))]

    def _on_data(self, sender: int, data: Data, body: memoryview, frame: memoryview) -> list[Reply]:
        writer = self.writers.get(data.writer)
        if writer is None or (writer.rank == sender and not self.manager._book.allows(sender)):
            # New here, or known from a checkpoint alone: Hello decides whether it is a worker of this manager.
            return self._failed(sender, data.request, "UnknownWriter", "say Hello first")
        if writer.rank != sender:
            text = f"rank {sender}: is not a worker of this manager"
            return self._failed(sender, data.request, "RemoteError", text)
        if data.seq <= writer.last_seq:
            self.counts["duplicates"] += 1
            answer = writer.answers.get(data.seq)
            return [] if answer is None else [Reply(sender, DATA_TAG, [answer])]
        if data.seq != writer.last_seq + 1:
            if writer.gap_told == writer.last_seq:
                return []  # said already; should it be lost, the client sends again by itself
            writer.gap_told = writer.last_seq
            return self._failed(sender, data.request, "Gap", "send again", expected=writer.last_seq + 1)
        if data.layout != self.items.id:
            return self._failed(
                sender, data.request, "SchemaError", "container: its layout is not the manager's"
            )
        with self.manager._timing.phase("validate"):
            packed = self._unpacked(data, body)
        if self.log is not None:
            try:
                self.log.write(sender, frame)
            except OSError as error:
                text = f"checkpoint: the log cannot be written ({error}); free the disk"
                return self._failed(sender, data.request, "RemoteError", text)
        answer = self._answer(sender, data, packed, writer)
        return [Reply(sender, DATA_TAG, [answer])]

    def _unpacked(self, data: Data, body: memoryview) -> Packed:
        rows, lengths, fields = cut_items(data, body, self.items.shapes)
        packed = Packed(data.n, rows, lengths, fields, scoring_only=data.scoring_only)
        packed.log_rewards = self.items.rewards_of(packed)
        return packed

    def _answer(self, sender: int, data: Data, packed: Packed, writer: Writer) -> bytes:
        outcome = self._kept(packed, sender)
        message: Scores | Failed
        try:
            scores = self._scored(packed, outcome, sender)
        except ScoringError as error:
            message = Failed(data.request, "ScoringError", str(error)[:60_000], kept=int(outcome.kept.sum()))
        else:
            rejected = {reason: n for reason, n in outcome.rejected.items() if n}
            # An item that a later one of its container displaced was kept, and then evicted.
            kept = packed.n - sum(rejected.values()) - outcome.passed
            message = Scores(data.request, scores, kept, outcome.passed, rejected)
        answer = joined(encode(message))
        writer.remember(data.seq, answer, self.manager.limits.max_window)
        if self.forwarder is not None:
            self.forwarder.take(
                packed if not self.manager.store_locally else packed.take(np.flatnonzero(outcome.kept))
            )
        return answer

    # -- the work on one container

    def _kept(self, packed: Packed, sender: int) -> Outcome:
        with self.manager._timing.phase("store"):
            if self.manager.store_locally and not packed.scoring_only:
                outcome = self.store.add(packed)
            else:
                outcome = _passed(packed)
        self.counts["offered"] += packed.n
        self.counts["containers"] += 1
        for door in ("evicted", "removed", "passed"):
            self.counts[door] += getattr(outcome, door)
        self.rejected.update(outcome.rejected)
        self._about(sender)["items"] += packed.n
        return outcome

    def _scored(self, packed: Packed, outcome: Outcome, sender: int) -> dict[str, float]:
        scored = Scored(self.items, packed, outcome.kept, outcome.row)
        with self.manager._timing.phase("score"):
            try:
                scores = call_scoring(self.manager.scoring_function, scored, sender)
            except ScoringError:
                self.counts["scoring_errors"] += 1
                raise
        with self.manager._timing.phase("baseline"):
            self.manager._inject_baseline_log_reward(scores, packed)
        return scores

    def add_here(self, container: Any, sender: int) -> dict[str, float]:
        """Do for a container given in this process what Data does."""
        try:
            packed = self.items.encode(container)
        except SchemaError:
            n = len(container) if hasattr(container, "__len__") and not isinstance(container, dict) else 1
            self.counts["offered"] += n
            self.rejected["schema"] += n
            raise
        writer = self.writers.enter(HERE, -1)
        if self.log is not None:
            self.log.write(
                sender, joined(encode(self._as_data(packed, writer.last_seq + 1), packed.blocks()))
            )
            self.commit()
        writer.last_seq += 1
        outcome = self._kept(packed, sender)
        if self.forwarder is not None:
            self.forwarder.take(
                packed if not self.manager.store_locally else packed.take(np.flatnonzero(outcome.kept))
            )
        try:
            return self._scored(packed, outcome, sender)
        except ScoringError as error:
            error.kept = int(outcome.kept.sum())
            raise

    def _as_data(self, packed: Packed, seq: int) -> Data:
        return Data(0, HERE, seq, self.items.id, packed.n, len(packed.rows), packed.scoring_only)

    # -- baseline

    def is_full(self) -> bool:
        return self.manager.store_locally and len(self.buffer) == self.buffer.capacity

    def next_baseline(self, log_rewards: Any) -> tuple[int | None, float] | None:
        """Take a batch into the average; return (epoch, baseline), None if there is none yet."""
        self.ema = next_ema(self.ema, log_rewards, self.manager.baseline_ema_alpha)
        agreed = None if self.agreement is None else self.agreement.current(monotonic())
        if agreed is not None and agreed[1] is not None:
            self._last_baseline = agreed[1]
            return agreed[0], agreed[1]
        value = self._own_baseline()
        self._last_baseline = value
        return None if value is None else (None, value)

    def _own_baseline(self) -> float | None:
        manager = self.manager
        ranking = self.store.ranking if manager.store_locally else None
        found = from_buffer(manager.baseline_strategy, manager.baseline_percentile, ranking, self.is_full())
        return self.ema if found is None else found

    def baseline(self) -> float | None:
        """The baseline as the next answer would have it, without a batch."""
        agreed = None if self.agreement is None else self.agreement.current(monotonic())
        return agreed[1] if agreed is not None and agreed[1] is not None else self._own_baseline()

    def summary(self) -> Summary:
        """What other managers need to know of this shard."""
        ranking = self.store.ranking if self.manager.store_locally else None
        values = np.empty(0)
        if ranking is not None and self.manager.baseline_strategy == "percentile":
            values = ranking.finite()
        lowest = None if ranking is None else ranking.lowest()
        return Summary(lowest, self.is_full(), self.ema, self.counts["containers"], values)

    # -- the other requests

    def draw(self, n: Any, by: str, replace: bool) -> Packed:
        """Draw n items; EmptyError if none can be drawn."""
        if isinstance(n, bool) or not isinstance(n, int | np.integer) or n < 0:
            raise ValueError(f"n: must be an int of at least 0, got {n!r}")
        if by not in ("uniform", "log_reward"):
            raise ValueError(f"by: must be 'uniform' or 'log_reward', got {by!r}")
        if not self.manager.store_locally:
            raise EmptyError("sample: this manager stores nothing; ask the one it forwards to")
        return self.store.read(self._drawn(int(n), by, replace))

    def _drawn(self, n: int, by: str, replace: bool) -> Array:
        if by == "uniform":
            size = len(self.store)
            _check_drawable(n, size, replace)
            return self.stream.indices(size, n) if replace else self.stream.choice(size, n)
        if self.store.ranking is None:
            raise ValueError("by: 'log_reward' needs items that have one; draw uniformly")
        index, mass = self.store.weights()
        _check_drawable(n, len(index), replace)
        if replace:
            at = np.searchsorted(mass, self._floats.random(n) * (mass[-1] if n else 1.0), side="right")
            return index[np.minimum(at, len(index) - 1)]
        # The largest of log weight + Gumbel noise are a draw without replacement, one after the other.
        weight = np.log(np.maximum(np.diff(mass, prepend=0.0), np.finfo(float).tiny))
        return index[np.argsort(-(weight + self._floats.gumbel(size=len(index))), kind="stable")[:n]]

    def _on_sample(self, sender: int, message: Sample) -> list[Reply]:
        try:
            packed = self.draw(message.n, message.by, message.replace)
        except (EmptyError, ValueError, MemoryError) as error:
            return self._failed(sender, message.request, error)
        carrier = self.manager._carrier
        most = (MAX_FRAME if carrier is None else carrier.max_frame) - 4096
        per_item = max(1, packed.nbytes // max(packed.n, 1))
        n_parts = 1 + packed.nbytes // most if packed.nbytes > most else 1
        step = max(1, min(-(-packed.n // n_parts), most // (2 * per_item) if n_parts > 1 else packed.n) or 1)
        starts = list(range(0, max(packed.n, 1), step))
        replies = []
        for part, first in enumerate(starts):
            some = packed if len(starts) == 1 else packed.take(np.arange(first, min(first + step, packed.n)))
            head = Items(message.request, self.items.id, some.n, len(some.rows), part, len(starts))
            replies.append(Reply(sender, DATA_TAG, encode(head, some.blocks(), max_frame=most + 4096)))
        return replies

    def _on_metadata(self, sender: int, message: GetMetadata) -> list[Reply]:
        try:
            values = self.manager._compute_metadata()
            frame = encode(Metadata(message.request, values), tag=METADATA_TAG)
        except Exception as error:
            text = f"_compute_metadata: raised {error!r}; return plain values by name"
            frame = encode(Failed(message.request, "RemoteError", text[:60_000]), tag=METADATA_TAG)
        return [Reply(sender, METADATA_TAG, frame)]

    def metadata(self) -> dict[str, Any]:
        """Plain values about what is here and who was here."""
        ranking = self.store.ranking if self.manager.store_locally else None
        finite = ranking.values[np.isfinite(ranking.values)] if ranking is not None else np.empty(0)
        some = len(finite) > 0
        return {
            "length": len(self.buffer) if self.manager.store_locally else 0,
            "capacity": self.manager.capacity,
            "log_reward_min": float(finite.min()) if some else None,
            "log_reward_max": float(finite.max()) if some else None,
            "log_reward_mean": float(finite.mean()) if some else None,
            "baseline_log_reward": self.baseline(),
            "n_requests": {str(rank): about["requests"] for rank, about in self.senders.items()},
            "n_items": {str(rank): about["items"] for rank, about in self.senders.items()},
            "n_present": self.manager._book.n_present,
            "n_left": self.manager._book.n_left,
        }

    def _on_exit(self, sender: int, message: Exit) -> list[Reply]:
        writer = self.writers.get(message.writer)
        if writer is not None and writer.rank == sender and not writer.has_left:
            writer.has_left = True
            self._about(sender)["undelivered"] += message.undelivered
        if writer is None or writer.rank == sender:
            self.manager._book.leave(sender)
        return [Reply(sender, DATA_TAG, encode(Goodbye(message.request)))]

    def late(self, sender: int, message: AnyMessage) -> list[Reply]:
        """Answer after the end: what was stored has its answer, an Exit its Goodbye, all else ClosedError."""
        match message:
            case Data():
                writer = self.writers.get(message.writer)
                answer = (
                    writer.answers.get(message.seq) if writer is not None and writer.rank == sender else None
                )
                if answer is not None:
                    self.counts["duplicates"] += 1
                    return [Reply(sender, DATA_TAG, [answer])]
            case Exit():
                return self._on_exit(sender, message)
            case GetMetadata():
                failed = Failed(message.request, "ClosedError", "the manager has ended")
                return [Reply(sender, METADATA_TAG, encode(failed, tag=METADATA_TAG))]
            case Hello() | Sample():
                pass
            case _:
                return []
        return self._failed(
            sender, message.request, "ClosedError", "the manager has ended; nothing was stored"
        )

    # -- time

    def tick(self, now: float) -> list[Reply]:
        """What is due: agreement with other managers, and a dump."""
        if self.checkpoint is not None and now - self._dumped_at >= self.checkpoint.every_s:
            self.dump()
        if self.agreement is None:
            return []
        sync = self.agreement.tick(now, self.summary())
        return [Reply(dest, DATA_TAG, encode(message, [values])) for dest, message, values in sync]

    def after_answers(self, carrier: Any) -> None:
        """Forward what was kept, after its answer."""
        if self.forwarder is not None:
            self.forwarder.work(carrier)

    def finish_forwarding(self, carrier: Any, end: float) -> None:
        if self.forwarder is not None:
            self.forwarder.finish(carrier, end)

    # -- stats

    def comm_stats(self) -> dict[int, dict[str, Any]]:
        states = self.manager._book.states()
        return {rank: {**about, "state": states.get(rank, "")} for rank, about in self.senders.items()}

    def stats(self, pending_sends: int, unsent: int, phases: Any) -> ManagerStats:
        live = self._closed_live
        if live is None:
            live = len(self.buffer) if self.manager.store_locally else 0
        senders = {rank: Sender(**about) for rank, about in self.comm_stats().items()}
        forwarded = None if self.forwarder is None else self.forwarder.stats()
        baseline = self._last_baseline if self._closed_live is not None else self.baseline()
        return ManagerStats(
            live=live, rejected=dict(self.rejected), pending_sends=pending_sends, unsent=unsent, baseline=baseline,
            exit_counter=self.manager._book.n_left, senders=senders, phases=phases, forwarded=forwarded, **self.counts,
        )  # fmt: skip

    # -- checkpoint

    _dumped_at = 0.0
    _closed_live: int | None = None

    @property
    def waits_for_disk(self) -> bool:
        return self.checkpoint is not None and self.checkpoint.power_safe

    def commit(self) -> None:
        """What was logged must be on disk before answers leave, if a power loss must not undo it."""
        if self.log is not None and self.waits_for_disk:
            self.log.sync()

    def dump(self) -> None:
        """Write everything, and begin a new log."""
        if self.checkpoint is None or self.buffer is None:
            return
        with self.manager._timing.phase("dump"):
            old, self.log = self.log, saved.write(self.buffer, Path(self.checkpoint.path), self._state())
        if old is not None:
            old.close()
        self._dumped_at = monotonic()

    def _state(self) -> saved.State:
        function = self.manager.scoring_function
        scoring = function.state_dict() if hasattr(function, "state_dict") else None
        writers = [
            (i, w.rank, w.last_seq, list(w.answers.items()), w.has_left)
            for i, w in self.writers.by_id.items()
        ]
        generator = {k: int(v) for k, v in self.stream.state_dict().items()}
        return saved.State(
            saved.VERSION, self.config, writers, self.ema, dict(self.counts), dict(self.rejected), generator,
            scoring, {str(rank): dict(about) for rank, about in self.senders.items()},
        )  # fmt: skip

    def _restore(self, checkpoint: Checkpoint, make: Any, storage: str) -> None:
        path = Path(checkpoint.path)
        if not saved.exists(path):
            self._adopt(make())
            self.dump()
            return
        if not checkpoint.resume:
            raise FileExistsError(
                f"{path}: holds a checkpoint; pass resume=True to go on, or choose another path"
            )
        buffer, state, log = saved.read(path, self.items.space, storage)
        try:
            self._check_config(path, state.config)
            self._adopt(buffer)
            self._load(state)
            for sender, frame in log.records():
                self._repeat(sender, frame)
        except BaseException:
            log.close()
            buffer.close()
            raise
        self.log = log
        self._dumped_at = monotonic()

    def _check_config(self, path: Path, config: dict[str, Any]) -> None:
        for name, value in self.config.items():
            if config.get(name) != value:
                raise ValueError(
                    f"{path}: {name} must be as in the checkpoint, {config.get(name)!r}, got {value!r}; "
                    "choose another path"
                )

    def _load(self, state: saved.State) -> None:
        for writer, rank, last_seq, answers, has_left in state.writers:
            record = self.writers.enter(writer, rank)
            record.last_seq, record.has_left = last_seq, has_left
            record.answers.update(answers)
        # Entering a writer ends the answers of earlier ones of its rank, so they are put back afterwards.
        for writer, _, _, answers, _ in state.writers:
            self.writers.by_id[writer].answers.update(answers)
        self.ema = state.ema
        self.counts.update({k: v for k, v in state.counts.items() if k in self.counts})
        self.rejected.update(state.rejected)
        self.senders = {int(rank): dict(about) for rank, about in state.senders.items()}
        self.stream.load_state_dict(state.generator)
        function = self.manager.scoring_function
        if state.scoring is not None and hasattr(function, "load_state_dict"):
            function.load_state_dict(state.scoring)

    def _repeat(self, sender: int, frame: bytes) -> None:
        """Do the work of a logged container again."""
        from recollect.remote.wire import MOST_FRAME, decode

        message, _, body = decode(frame, max_frame=MOST_FRAME)
        if not isinstance(message, Data):
            raise RemoteError("checkpoint: its log must hold containers, got something else; it is damaged")
        packed = self._unpacked(message, body)
        writer = self.writers.enter(message.writer, -1 if message.writer == HERE else sender)
        if message.writer == HERE:
            writer.last_seq += 1
            outcome = self._kept(packed, sender)
            with suppress(ScoringError):
                self._scored(packed, outcome, sender)
        else:
            self._answer(sender, message, packed, writer)

    def close(self) -> None:
        """Give up the buffer and the log."""
        if self._closed_live is None:
            self._last_baseline = self.baseline()
            self._closed_live = len(self.buffer) if self.manager.store_locally else 0
            self.buffer.close()
        if self.log is not None:
            self.log.close()
            self.log = None


def _pid() -> int:
    import os

    return os.getpid()


def _passed(packed: Packed) -> Outcome:
    outcome = Outcome(np.zeros(packed.n, bool), np.full(packed.n, -1))
    outcome.passed = packed.n
    return outcome


def _check_drawable(n: int, size: int, replace: bool) -> None:
    if n and not size:
        raise EmptyError("sample: nothing can be drawn, the buffer holds no such item; add some first")
    if not replace and n > size:
        raise ValueError(
            f"n: must be at most {size} without replacement, got {n}; draw with replacement or fewer"
        )


def _check_items(items: ItemSpace, evict: str, diversity: Diversity | None, manager: Any) -> None:
    if evict not in ("lowest", "oldest"):
        raise ValueError(f"evict: must be 'lowest', 'oldest' or None, got {evict!r}")
    if evict == "lowest" and not items.has_log_reward:
        raise ValueError(f"evict: 'lowest' needs items with a log_reward, got {items.space}")
    if diversity is not None:
        layout = items.fields.layout if items.is_trajectory and items.fields else items.rows.layout
        names = [leaf.name for leaf in layout.leaves if leaf.kind not in ("text", "sequence")]
        if diversity.key not in names or (items.is_trajectory and items.fields is None):
            raise ValueError(
                f"diversity: key must be a leaf of the items, one of {names}, got {diversity.key!r}"
            )


def _config(items: ItemSpace, capacity: int, evict: str, manager: Any) -> dict[str, Any]:
    return {
        "space": items.text, "max_length": items.max_length, "capacity": int(capacity), "evict": evict,
        "store_locally": bool(manager.store_locally), "diverse": bool(manager.diverse_replay_buffer),
        "strategy": manager.baseline_strategy, "percentile": float(manager.baseline_percentile),
        "alpha": float(manager.baseline_ema_alpha),
    }  # fmt: skip
