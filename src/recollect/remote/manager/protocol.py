"""ManagerProtocol: a manager without a carrier. Messages go in, answers come out; this is where everything is decided.

The order of work for Data: validate, store (with a checkpoint the log first), score, baseline, reply, count.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from recollect import _core, interrupts
from recollect.errors import EmptyError, SchemaError, ScoringError
from recollect.remote.config import Limits
from recollect.remote.frame import (
    MAX_FRAME,
    MOST_DRAWN_NBYTES,
    MOST_FRAME,
    check_drawn,
    cut_items,
    cut_values,
    decode,
    encode,
    joined,
)
from recollect.remote.items.packed import PackedItems
from recollect.remote.items.space import text_difference
from recollect.remote.manager.peers import Workers, Writer, bounded_sum
from recollect.remote.manager.state import ManagerState
from recollect.remote.manager.store import Placement
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
    note,
)
from recollect.remote.ranks import HOST
from recollect.remote.stats import ManagerStats
from recollect.text import told_briefly

if TYPE_CHECKING:
    from recollect.remote.manager.checkpoint import ManagerCheckpoint
    from recollect.remote.manager.forwarder import Forwarder

LOCAL_WRITER = bytes(16)  # the writer of `add`
_UNSCORED = "scoring function: was interrupted; the items are kept, without scores"
_HEAD_NBYTES = 4096  # room in a frame for all but the items


class Reply(NamedTuple):
    """A frame to be sent."""

    dest: int
    tag: int
    parts: list[Any]
    is_drawn: bool = False  # items of a draw, of which no part may be left out


class ManagerProtocol:
    """What a manager answers to each message. Concurrency: the manager's lock is held in every call.

    `metadata` gives the plain values of GetMetadata, and may be overridden by a user.
    """

    def __init__(
        self, state: ManagerState, workers: Workers, limits: Limits, checkpoint: ManagerCheckpoint,
        forwarder: Forwarder | None, metadata: Callable[[], dict[str, Any]],
    ) -> None:  # fmt: skip
        self.state, self.items, self.workers, self.limits = state, state.items, workers, limits
        self.checkpoint, self.writers = checkpoint, checkpoint.writers
        self.forwarder, self._metadata = forwarder, metadata
        self.incarnation = secrets.token_bytes(16)

    def open(self) -> None:
        """Make the buffer, or take it from the checkpoint and repeat the work of its log."""
        self.checkpoint.open(self._repeat)

    def handle(
        self, sender: int, message: AnyMessage, body: memoryview, frame: memoryview, *, max_frame: int = MAX_FRAME,
        may_draw: bool = True,
    ) -> list[Reply]:  # fmt: skip
        """Do what a message asks. FrameError for blocks that do not fit; everything else is an answer.

        Answers are at most `max_frame` bytes. Unless the sender `may_draw`, its Sample has no answer: it asks again.
        """
        about = self.state.senders.about(sender)
        about["requests"] += 1
        about["nbytes"] += frame.nbytes
        match message:
            case Data():
                return self._on_data(sender, message, body, frame)
            case Hello():
                return self._on_hello(sender, message)
            case Sample():
                return self._on_sample(sender, message, max_frame) if may_draw else []
            case GetMetadata():
                return self._on_metadata(sender, message, max_frame)
            case Exit():
                return self._on_exit(sender, message)
            case Sync():
                self._on_sync(sender, message, body)
            case _:
                if self.forwarder is None or not self.forwarder.receive(sender, message):
                    self.state.counts["stray"] += 1
                self.checkpoint.follow_forwarder()
        return []

    def count_malformed(self, sender: int) -> None:
        self.state.counts["malformed"] += 1
        self.state.senders.about(sender)["malformed"] += 1

    # -- Hello, Exit, Sync

    def _on_hello(self, sender: int, hello: Hello) -> list[Reply]:
        writer = self.writers.get(hello.writer)
        why_not = self._why_not(sender, hello, writer)
        if why_not is not None:
            return [_failed(sender, hello.request, *why_not)]
        writer = self.writers.enter(hello.writer, sender)
        writer.gap_told = -1
        welcome = Welcome(
            hello.request, self.incarnation, writer.last_seq, self.limits.max_window,
            self.state.current_baseline(), self.items.text, self.items.max_length, HOST, _core.own_word(),
        )  # fmt: skip
        return [Reply(sender, DATA_TAG, encode(welcome))]

    def _why_not(self, sender: int, hello: Hello, writer: Writer | None) -> tuple[str, str] | None:
        """The error that refuses a Hello, and its text; None if it is welcome."""
        if hello.protocol != PROTOCOL or hello.rank != sender:
            why = f"protocol {PROTOCOL} and your own rank {sender}"
            return "RemoteError", f"hello: must give {why}, got others"
        difference = text_difference(self.items.text, hello.space) if hello.space else None
        if difference is not None:
            text = f"space: must equal the manager's, got a difference at {difference}; give both one env"
            return "SchemaError", text
        if writer is not None and writer.rank != sender:
            return "RemoteError", "writer: belongs to another rank"
        if hello.role == "worker" and not (writer is not None and writer.has_left):
            why_not = self.workers.admit(sender, hello.host, hello.process, monotonic())
            if why_not is not None:
                return "RemoteError", f"rank {sender}: {why_not}"
        return None

    def _on_exit(self, sender: int, message: Exit) -> list[Reply]:
        writer = self.writers.get(message.writer)
        if writer is not None and writer.rank == sender and not writer.has_left:
            writer.has_left = True
            about = self.state.senders.about(sender)
            about["undelivered"] = bounded_sum(about["undelivered"], message.undelivered)
        if writer is None or writer.rank == sender:
            self.workers.leave(sender)
        return [Reply(sender, DATA_TAG, encode(Goodbye(message.request)))]

    def _on_sync(self, sender: int, message: Sync, body: memoryview) -> None:
        values, shared = cut_values(message, body), self.state.baseline.shared
        if shared is None or not shared.receive(sender, message, values, monotonic()):
            self.state.counts["stray"] += 1

    # -- Data

    def _on_data(self, sender: int, data: Data, body: memoryview, frame: memoryview) -> list[Reply]:
        writer = self.writers.get(data.writer)
        if writer is None or (writer.rank == sender and not self.workers.allows(sender)):
            # New here, or known from a checkpoint alone: Hello decides whether it is a worker of this manager.
            return [_failed(sender, data.request, "UnknownWriter", "say Hello first")]
        if writer.rank != sender:
            text = f"rank {sender}: is not a worker of this manager"
            return [_failed(sender, data.request, "RemoteError", text)]
        if data.seq != writer.last_seq + 1:
            return self._duplicate_or_gap(sender, data, writer)
        if data.layout != self.items.id:
            text = "container: its layout is not the manager's"
            return [_failed(sender, data.request, "SchemaError", text)]
        with self.state.timing.phase("validate"):
            packed = self._unpacked(data, body)
        with interrupts.deferred():  # logged, kept and numbered at once: what is sent again is known
            try:
                self.checkpoint.write(sender, frame)
            except OSError as error:
                text = f"checkpoint: the log cannot be written ({error}); free the disk"
                return [_failed(sender, data.request, "RemoteError", text)]
            placement = self._take_in(sender, data, packed, writer)
        return [Reply(sender, DATA_TAG, [self._answer(sender, data, packed, placement, writer)])]

    def _duplicate_or_gap(self, sender: int, data: Data, writer: Writer) -> list[Reply]:
        """A container seen before gets its first answer again; after a gap the client is told where to go on."""
        if data.seq <= writer.last_seq:
            self.state.counts["duplicates"] += 1
            answer = writer.answer(data.seq)
            return [] if answer is None else [Reply(sender, DATA_TAG, [answer])]
        if writer.gap_told == writer.last_seq:
            return []  # said already; should it be lost, the client sends again by itself
        writer.gap_told = writer.last_seq
        return [_failed(sender, data.request, "Gap", "send again", expected=writer.last_seq + 1)]

    def _unpacked(self, data: Data, body: memoryview) -> PackedItems:
        rows, lengths, fields = cut_items(data, body, self.items.shapes)
        packed = PackedItems(data.n, rows, lengths, fields, scoring_only=data.scoring_only)
        packed.log_rewards = self.items.rewards_of(packed)
        return packed

    def _take_in(self, sender: int, data: Data, packed: PackedItems, writer: Writer) -> Placement:
        """Keep and forward a container that is next in turn. Until it is scored, its answer is that it was not."""
        placement = self.state.keep(packed, sender)
        writer.remember(data.seq, partial(_unscored, data.request, placement), self.limits.max_window)
        self._forward(packed, placement)
        return placement

    def _answer(
        self, sender: int, data: Data, packed: PackedItems, placement: Placement, writer: Writer
    ) -> bytes:
        """Score a container that was taken in; its answer is remembered."""
        message: Scores | Failed
        try:
            scores = self.state.score(packed, placement, sender)
        except ScoringError as error:
            message = Failed(data.request, "ScoringError", note(str(error)), kept=error.kept)
        else:
            rejected = {reason: n for reason, n in placement.rejected.items() if n}
            # An item that a later one of its container displaced was kept, and then evicted.
            kept = packed.n - sum(rejected.values()) - placement.passed
            message = Scores(data.request, scores, kept, placement.passed, rejected)
        answer = joined(encode(message))
        writer.remember(data.seq, answer, self.limits.max_window)
        return answer

    def _forward(self, packed: PackedItems, placement: Placement) -> None:
        if self.forwarder is not None:
            all_of_it = not self.state.settings.store_locally
            self.forwarder.take(packed if all_of_it else packed.take(np.flatnonzero(placement.kept)))

    def add_local(self, container: Any, sender: int) -> dict[str, float]:
        """Do for a container given in this process what Data does."""
        try:
            packed = self.items.encode(container)
        except SchemaError:
            n = len(container) if hasattr(container, "__len__") and not isinstance(container, dict) else 1
            self.state.counts["offered"] += n
            self.state.rejected["schema"] += n
            raise
        with interrupts.deferred():  # logged, numbered and kept at once: a restart finds what is here now
            writer = self.writers.enter(LOCAL_WRITER, -1)
            if self.checkpoint.log is not None:
                head = Data(
                    0, LOCAL_WRITER, writer.last_seq + 1, self.items.id, packed.n, len(packed.rows), packed.scoring_only
                )  # fmt: skip
                frame = joined(encode(head, packed.blocks(), max_frame=MOST_FRAME))
                self.checkpoint.write_through(sender, frame)
                writer.last_seq += 1
            placement = self._keep_local(packed, sender)
        return self.state.score(packed, placement, sender)

    def _keep_local(self, packed: PackedItems, sender: int) -> Placement:
        placement = self.state.keep(packed, sender)
        self._forward(packed, placement)
        return placement

    def _repeat(self, sender: int, data: Data, body: memoryview) -> None:
        """Do the work of a logged container again."""
        packed = self._unpacked(data, body)
        if data.writer == LOCAL_WRITER:
            with suppress(ScoringError):
                self.writers.enter(LOCAL_WRITER, -1)
                self.state.score(packed, self._keep_local(packed, sender), sender)
        else:
            writer = self.writers.enter(data.writer, sender)
            self._answer(sender, data, packed, self._take_in(sender, data, packed, writer), writer)

    # -- Sample, GetMetadata

    def _on_sample(self, sender: int, message: Sample, max_frame: int) -> list[Reply]:
        try:
            check_drawn(message.n, self.items.shapes)
            drawn = self.state.draw(message.n, message.by, message.replace, MOST_DRAWN_NBYTES)
            parts = _parts(drawn, max_frame - _HEAD_NBYTES)
            heads = [
                Items(message.request, self.items.id, some.n, len(some.rows), number, len(parts))
                for number, some in enumerate(parts)
            ]
            frames = [encode(h, p.blocks(), max_frame=max_frame) for h, p in zip(heads, parts)]
        except (EmptyError, ValueError, MemoryError) as error:
            return [_failed(sender, message.request, type(error).__name__, str(error))]
        return [Reply(sender, DATA_TAG, frame, is_drawn=True) for frame in frames]

    def _on_metadata(self, sender: int, message: GetMetadata, max_frame: int) -> list[Reply]:
        try:
            values = self._metadata()
            frame = encode(Metadata(message.request, values), tag=METADATA_TAG, max_frame=max_frame)
            decode(joined(frame), max_frame=max_frame)  # what no peer could read is an error, not an answer
        except Exception as error:
            text = f"_compute_metadata: raised {told_briefly(error)}; return plain values by name"
            frame = encode(Failed(message.request, "RemoteError", note(text)), tag=METADATA_TAG)
        return [Reply(sender, METADATA_TAG, frame)]

    # -- time

    def late(self, sender: int, message: AnyMessage) -> list[Reply]:
        """Answer after the end: what was stored has its answer, an Exit its Goodbye, all else ClosedError."""
        match message:
            case Data():
                writer = self.writers.get(message.writer)
                answer = None if writer is None or writer.rank != sender else writer.answer(message.seq)
                if answer is not None:
                    self.state.counts["duplicates"] += 1
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
        return [_failed(sender, message.request, "ClosedError", "the manager has ended; nothing was stored")]

    def tick(self, now: float) -> list[Reply]:
        """What is due: agreement with other managers, and a dump."""
        self.checkpoint.tick(now)
        shared = self.state.baseline.shared
        if shared is None:
            return []
        sync = shared.tick(now, self.state.shard_summary())
        return [Reply(dest, DATA_TAG, encode(message, [values])) for dest, message, values in sync]

    def stats(self, **more: Any) -> ManagerStats:
        forwarded = None if self.forwarder is None else self.forwarder.stats()
        return self.state.stats(
            forwarded=forwarded,
            dump_errors=self.checkpoint.n_failed,
            log_damages=self.checkpoint.n_damaged,
            **more,
        )

    def close(self) -> None:
        """Give up the buffer and the log."""
        self.state.close()
        self.checkpoint.close()


def _failed(sender: int, request: int, error: str, text: str, expected: int = 0) -> Reply:
    return Reply(sender, DATA_TAG, encode(Failed(request, error, note(text), expected=expected)))


def _unscored(request: int, placement: Placement) -> bytes:
    return joined(encode(Failed(request, "ScoringError", _UNSCORED, kept=int(placement.kept.sum()))))


def _parts(packed: PackedItems, most: int) -> list[PackedItems]:
    """Cut drawn items so that each part has at most so many bytes, or one item."""
    if packed.nbytes <= most:
        return [packed]
    ends = np.cumsum(packed.item_nbytes())
    parts, first = [], 0
    while first < packed.n:
        before = ends[first - 1] if first else 0
        stop = max(first + 1, int(np.searchsorted(ends, before + most, side="right")))
        parts.append(packed.take(np.arange(first, stop)))
        first = stop
    return parts
