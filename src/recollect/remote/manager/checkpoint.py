"""Saving: a manager's checkpoint. It goes on from what is there, logs every container, and dumps now and then."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import Any

from recollect import interrupts
from recollect.errors import RemoteError
from recollect.files import OwnedDirectory, make_directory
from recollect.files.record import damage_in
from recollect.remote.config import Checkpoint
from recollect.remote.frame import MOST_FRAME, decode
from recollect.remote.manager import log as saved
from recollect.remote.manager.forwarder import Forwarder
from recollect.remote.manager.peers import Writers
from recollect.remote.manager.state import Shelf
from recollect.remote.messages import Data
from recollect.storage.dump import check_owned

Repeat = Callable[[int, Data, memoryview], None]


class Saving:
    """The dump and the log of one manager; without a checkpoint nothing is ever written.

    A dump that fails loses nothing, for the log goes on: it is counted, warned of, and tried again at its next time.
    Only where a restart would not read the log at hand, nothing is logged or answered before a dump was written.

    Ownership: owns the log and the directory. Concurrency: the manager's lock is held in every call.
    """

    def __init__(
        self, shelf: Shelf, writers: Writers, checkpoint: Checkpoint | None, forwarder: Forwarder | None
    ) -> None:
        self.shelf, self.writers, self.checkpoint, self.forwarder = shelf, writers, checkpoint, forwarder
        self.config = _config(shelf)
        # At once: this process may change its directory.
        self._path = None if checkpoint is None else Path(checkpoint.path).absolute()
        self.log: saved.Log | None = None
        self._owned: OwnedDirectory | None = None
        self.n_failed = 0  # dumps that could not be written
        self.n_damaged = 0  # places of the log, in this process, that held no record
        self._dumped_at = 0.0  # or tried in vain
        self._forwards_as: bytes | None = None  # in the dump
        self._log_is_over = False  # a restart would not read it, or not all of it
        self._warned = False

    def open(self, repeat: Repeat) -> None:
        """Make the buffer, or take it from the checkpoint and `repeat` the work of its log."""
        path = self._path
        if path is not None:
            make_directory(path)
            self._owned = OwnedDirectory.take(path)  # two managers would overwrite each other
        try:
            self._open(path, repeat)
        except BaseException:
            self.close()
            raise

    def _open(self, path: Path | None, repeat: Repeat) -> None:
        if self.checkpoint is None or path is None or not saved.exists(path):
            if self._owned is not None:
                check_owned(self._owned)  # a foreign storage/ is refused before anything is made
            self.shelf.adopt(self.shelf.fresh())
            self.dump()
        elif self.checkpoint.resume:
            self._restore(path, repeat)
        else:
            raise FileExistsError(
                f"{path}: holds a checkpoint; pass resume=True to go on, or choose another path"
            )

    # -- out

    @property
    def waits_for_disk(self) -> bool:
        """Whether what was logged must be on disk before answers leave."""
        return self.checkpoint is not None and self.checkpoint.power_safe

    def write(self, sender: int, frame: Any) -> None:
        """Log a container; it outlives this process once this returns. OSError: it is not logged."""
        if self.log is None:
            return
        if self._log_is_over or self.log.is_torn:
            self.dump()
        self.log.write(sender, frame)

    def write_through(self, sender: int, frame: Any) -> None:
        """Log a container, on disk if a power loss must not undo it. OSError: it is not logged."""
        self.write(sender, frame)
        if self.log is not None and self.waits_for_disk:
            try:
                self.log.sync()
            except BaseException:
                self._log_is_over = True
                self.log.take_back()
                raise

    def commit(self) -> None:
        """What was logged must be on disk before answers leave, if a power loss must not undo it.

        OSError: it is not there. Another sync may say that it is when it is not, so a dump has to be.
        """
        if self.log is None or not self.waits_for_disk:
            return
        if not self._log_is_over:
            try:
                self.log.sync()
            except OSError:
                self._log_is_over = True
        if self._log_is_over:
            self.dump()

    def tick(self, now: float) -> None:
        """Dump, if it is time."""
        if self.checkpoint is not None and now - self._dumped_at >= self.checkpoint.every_s:
            self.try_dump()

    def follow_forwarder(self) -> None:
        """Dump when it goes on under another name, before anything is stored under it: numbers begin anew."""
        if self.checkpoint is None or self.forwarder is None or self._log_is_over:
            return
        if self.forwarder.writer != self._forwards_as:
            self._log_is_over = True
            self.try_dump()

    def try_dump(self) -> None:
        """Dump; if the disk does not let it, say so and go on."""
        try:
            self.dump()
        except OSError as error:
            self._dumped_at = monotonic()
            if not self._warned:
                self._warned = True
                warnings.warn(
                    f"checkpoint: a dump cannot be written ({error}); it is tried again, and the last one and its "
                    "log stay; free the disk", RuntimeWarning, stacklevel=2,
                )  # fmt: skip

    def dump(self) -> None:
        """Write everything, and begin a new log. OSError: it is counted, and nothing that was saved is lost."""
        if self._path is None:
            return
        path, old = self._path, self.log
        try:
            with self.shelf.manager._timing.phase("dump"):
                self.log = saved.write(self.shelf.buffer, path, self._state(), old, self._owned)
        except BaseException:
            with interrupts.deferred():
                self.n_failed += 1
                # It may have failed behind its commit: then a restart takes that one, and looks for another log.
                self._log_is_over |= old is not None and not saved.is_followed_by(path, old)
            raise
        if old is not None:
            with suppress(OSError):  # nobody reads it any more
                old.remove()
        self._dumped_at, self._log_is_over, self._warned = monotonic(), False, False
        self._forwards_as = None if self.forwarder is None else self.forwarder.writer

    def _state(self) -> saved.State:
        shelf, function = self.shelf, self.shelf.manager.scoring_function
        scoring = function.state_dict() if hasattr(function, "state_dict") else None
        writers = [
            (i, w.rank, w.last_seq, w.kept_answers(), w.has_left) for i, w in self.writers.by_id.items()
        ]
        generator = {k: int(v) for k, v in shelf.stream.state_dict().items()}
        return saved.State(
            saved.VERSION, self.config, writers, shelf.ema, dict(shelf.counts), dict(shelf.rejected), generator,
            scoring, {str(rank): dict(about) for rank, about in shelf.senders.items()},
            None if self.forwarder is None else self.forwarder.state(),
        )  # fmt: skip

    # -- in

    def _restore(self, path: Path, repeat: Repeat) -> None:
        buffer, state, log = saved.read(path, self.shelf.items.space, self.shelf.storage)
        try:
            if self._owned is not None:
                check_owned(self._owned)  # removes what a killed manager left
            self._check_config(path, state.config)
            self.shelf.adopt(buffer)
            with damage_in(path):
                self._load(state)
            function = self.shelf.manager.scoring_function
            if state.scoring is not None and hasattr(function, "load_state_dict"):
                function.load_state_dict(state.scoring)
            self._repeat_all(log, repeat)
            if self.forwarder is not None:
                self.forwarder.log_is_repeated()
        except BaseException:
            log.close()
            buffer.close()
            raise
        self.log = log
        self._dumped_at = monotonic()
        if self.n_damaged:
            self._tell_damage(log)

    def _repeat_all(self, log: saved.Log, repeat: Repeat) -> None:
        """Do the work of a log again, each container once, also behind damage and in whatever order they are."""
        done: set[tuple[bytes, int]] = set()
        n_twice = 0
        dumped = {writer: record.last_seq for writer, record in self.writers.by_id.items()}
        for sender, frame in log.records():
            message, _, body = decode(frame, max_frame=MOST_FRAME)
            if not isinstance(message, Data):
                raise RemoteError(f"{log.path}: must hold containers, got something else; it is damaged")
            number = (message.writer, message.seq)
            if number in done or message.seq <= dumped.get(message.writer, 0):
                n_twice += 1
                continue
            done.add(number)
            known = self.writers.get(message.writer)
            before = 0 if known is None else known.last_seq
            repeat(sender, message, body)
            record = self.writers.get(message.writer)
            if record is not None:
                record.last_seq = max(before, message.seq)
        self.n_damaged = len(log.damages) + n_twice
        log.go_on(self.n_damaged > 0)

    def _tell_damage(self, log: saved.Log) -> None:
        """Say what was lost, and begin a new log, so that the damaged one can be kept as it is."""
        lost = sum(end - first for first, end in log.damages)
        found = (
            f"is damaged in {self.n_damaged} places ({lost} bytes, from byte {log.damages[0][0]} on); the containers "
            "there are lost, all others were kept"
            if log.damages
            else f"holds {self.n_damaged} containers twice; each was taken once"
        )
        kept = f"damaged-{log.path.name}"
        warnings.warn(
            f"{log.path}: {found}; the file is kept as {kept}; check the disk", RuntimeWarning, stacklevel=2
        )
        self.try_dump()

    def _check_config(self, path: Path, config: dict[str, Any]) -> None:
        for name, value in self.config.items():
            if config.get(name) != value:
                raise ValueError(
                    f"{path}: {name} must be as in the checkpoint, {config.get(name)!r}, got {value!r}; "
                    "choose another path"
                )

    def _load(self, state: saved.State) -> None:
        shelf = self.shelf
        for writer, rank, last_seq, _, has_left in state.writers:
            record = self.writers.enter(writer, rank)
            record.last_seq, record.has_left = last_seq, has_left
        # Entering a writer ends the answers of earlier ones of its rank, so they are put back afterwards.
        for writer, _, _, answers, _ in state.writers:
            self.writers.by_id[writer].answers.update(answers)
        shelf.ema = state.ema
        shelf.counts.update({k: v for k, v in state.counts.items() if k in shelf.counts})
        shelf.rejected.update(state.rejected)
        shelf.senders.update({int(rank): dict(about) for rank, about in state.senders.items()})
        shelf.stream.load_state_dict(state.generator)
        if self.forwarder is not None:
            self.forwarder.resume(state.forward)
            self._forwards_as = None if state.forward is None else state.forward.writer

    def close(self) -> None:
        """Give up the log and the directory."""
        if self.log is not None:
            self.log.close()
            self.log = None
        if self._owned is not None:
            self._owned.release()


def _config(shelf: Shelf) -> dict[str, Any]:
    """What must be the same for a checkpoint to fit."""
    manager, items, rule = shelf.manager, shelf.items, shelf.diversity
    diverse = None if rule is None else [rule.key, float(rule.cutoff), float(rule.p)]
    return {
        "space": items.text, "max_length": items.max_length, "capacity": int(manager.capacity),
        "evict": shelf.evict, "store_locally": bool(manager.store_locally),
        "diverse": diverse, "strategy": manager.baseline_strategy,
        "percentile": float(manager.baseline_percentile), "alpha": float(manager.baseline_ema_alpha),
    }  # fmt: skip
