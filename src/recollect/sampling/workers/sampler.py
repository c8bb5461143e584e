"""MultiprocessingSampler: another sampler, drawn from by worker processes ahead of time."""

from __future__ import annotations

import multiprocessing
import weakref
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.context import BaseContext
from typing import Any, Self

import numpy as np

from recollect import checks, interrupts
from recollect.backends import move
from recollect.batch.location import Location
from recollect.batch.structure import check_fills, fill
from recollect.batch.view import Read
from recollect.errors import ClosedError, WorkerDiedError, WorkerError, class_name
from recollect.sampling.base import BatchSampler, SamplerStats, counted_in
from recollect.sampling.stream import IndexStream, Ints
from recollect.sampling.workers.messages import DRAW, WorkRequest, key_of
from recollect.sampling.workers.planned import Gathers, Item, PlannedEpoch
from recollect.sampling.workers.pool import LOOK_S, Pool, check_shared
from recollect.sampling.workers.slots import EMPTY, Format


@dataclass(frozen=True, slots=True)
class WorkersStats(SamplerStats):
    """What a MultiprocessingSampler is and has done; `undelivered` batches lie ready in its ring."""

    n_workers: int
    n_buffers: int
    pids: tuple[int, ...]
    undelivered: int


class MultiprocessingSampler(BatchSampler):
    """Draws as `sampler` does, in `n_workers` processes that gather and transform ahead of the caller.

    Batch k comes from worker k mod `n_workers`; its draw number j is a function of (seed, worker, j), and so is the
    randomness of transformations that have `manual_seed`. Batches arrive in order, so the same seed and number of
    workers give the same batches. Epochs come in permutation order. `n_buffers` slots (rounded up to a multiple of
    `n_workers`, two each at least) hold what is done and not yet asked for. Processes start with the first draw.

    `ctx` is a multiprocessing context (None: Python's default), `doze_time` how often a worker looks whether its
    parent lives where the kernel cannot tell it, `deadline` the most seconds any wait takes, `max_lengths` the
    greatest lengths of Sequence leaves that no storage knows. A worker that raises (WorkerError) or dies
    (WorkerDiedError) closes the sampler.

    Ownership: owns its workers and a ring of shared slots until `close()`; a batch is one copy, the caller's own.
    Concurrency: one thread at a time; workers read the live source, which must be shared.

    Example:
        >>> import numpy as np, recollect as rc
        >>> buf = rc.ReplayBuffer.create("shared", {"obs": ((3,), "float32")}, capacity=100, multiprocessing=True)
        >>> buf.extend({"obs": np.ones((50, 3), "float32")})
        >>> with rc.MultiprocessingSampler(rc.StepSampler(buf, 16, seed=0), n_workers=2) as sampler:
        ...     sampler.sample()["obs"].shape, [len(b["obs"]) for b in sampler.epoch_iter()]
        ((16, 3), [16, 16, 16, 2])
    """

    def __init__(
        self,
        sampler: BatchSampler,
        n_workers: int = 4,
        n_buffers: int = 8,
        ctx: BaseContext | str | None = None,
        doze_time: float = 0.005,
        daemon: bool | None = None,
        *,
        deadline: float = 60.0,
        max_lengths: Mapping[str, int] | None = None,
    ) -> None:
        """Check everything, start nothing."""
        given: Any = sampler
        if not isinstance(given, BatchSampler) or isinstance(given, MultiprocessingSampler):
            kind = class_name(given)
            raise TypeError(
                f"sampler: must be a BatchSampler of this process, got {kind}; wrap a StepSampler"
            )
        self.n_workers = checks.count("n_workers", n_workers)
        self._n_slots = max(2, -(-checks.count("n_buffers", n_buffers) // self.n_workers))
        self._context: Any = multiprocessing.get_context(ctx) if ctx is None or isinstance(ctx, str) else ctx
        self._doze_s = checks.seconds(
            "doze_time", doze_time, above=True, advice="pass how often to look for the parent"
        )
        self._daemon = True if daemon is None else bool(daemon)
        self.deadline = checks.seconds("deadline", deadline)
        super().__init__(sampler.single_space, sampler.single_metadata_space, sampler.batch_size)
        self.sampler = sampler
        self._data, self.batch, self._limiter = sampler._data, sampler.batch, sampler._limiter
        check_shared(sampler, self._context.get_start_method())
        self._form = Format(sampler, max_lengths)
        self._stream = IndexStream(sampler._stream.seed)
        self._number = 0  # of the next draw
        self._wants_metadata = False  # once asked for, it is always sent
        self._draws: Gathers | None = None  # of a sampler that draws here
        self._given: deque[Item] = deque()  # of a restored state, to be gathered first
        self._closed = False
        self._forget()
        batch = self.batch
        self._moves_to = None if batch.backend.name == "numpy" else (batch.backend, batch.device)
        self._is_plain = self._moves_to is None and self._form.data.layout.is_fixed and self._limiter is None

    def _forget(self) -> None:
        """Have no workers (any more)."""
        self._pool: Pool | None = None
        self._drawing_run = -1  # the run in which workers draw by themselves
        self._fetch: Any = None
        self._end: Any = None

    def _unpicklable(self) -> tuple[str, ...]:
        # A copy has the same configuration and place in the stream, and workers of its own once it draws.
        return (
            *super()._unpicklable(),
            "_pool",
            "_drawing_run",
            "_fetch",
            "_end",
            "_draws",
            "_epoch",
            "_resumed",
        )

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._epoch = self._resumed = self._draws = None
        self._forget()

    # Workers

    @property
    def n_buffers(self) -> int:
        """How many batches may lie ready."""
        return self._n_slots * self.n_workers

    def stats(self) -> Any:
        """Return a frozen record of what was drawn, and of the workers."""
        pool, name = self._pool, type(self).__name__
        common = (name, len(self), self.batch_size, self._batches, self.skipped, self._data.stats())
        pids = () if pool is None else tuple([process.pid for process in pool.processes])
        undelivered = 0 if pool is None else pool.ring.available()
        return WorkersStats(*common, self.n_workers, self.n_buffers, pids, undelivered)

    def _workers(self) -> Pool:
        if self._closed:
            raise ClosedError("MultiprocessingSampler: was closed; make another")
        if self._pool is None:
            with interrupts.deferred():
                self._pool = Pool(self.sampler, self._form, self.n_workers, self._n_slots, self._context,
                                  self._doze_s, self._daemon, self.deadline)  # fmt: skip
                self._fetch = self._pool.ring.native.fetch
                self._end = weakref.finalize(self, self._pool.close)
        return self._pool

    def _abandon(self) -> None:
        """Let the workers rest; that one of them raised is noticed here too."""
        if self._pool is not None:
            try:
                self._pool.abandon()
            except WorkerError:
                self.close()
                raise

    def close(self) -> None:
        """End the workers, within 2 s whatever they do. Twice does no harm; draws raise ClosedError from now on."""
        with interrupts.deferred():
            self._closed = True
            end = self._end
            self._forget()
            if end is not None:
                end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Draws

    def sample(self, *, out: Any = None) -> Any:
        """Return the next batch, copied into the arrays `out` if they are given."""
        # The hot path: a batch that lies ready costs one native call.
        with self._turn:
            pool, run = self._pool, self._drawing_run
            if self._is_plain and pool is not None and run == pool.run:
                self._drawing_run = (
                    -1
                )  # until the batch is counted: what comes between makes the workers begin again
                found = self._fetch(self._number % self.n_workers, LOOK_S, pool.run, pool.data, None, out)
                if type(found) is tuple and found[0] == 0:
                    self._number, self._drawing_run = self._number + 1, run
                    self._turn.batches += 1
                    return found[2]
                self._drawing_run = run
                if type(found) is tuple:  # an error or the like, and it is taken: say what it is
                    self._refuse(pool, found)
            if out is not None and self._is_plain:  # before the batch is taken, so that none is lost
                check_fills(out, self._blank())
            data = self._next(False, False)[0]
        return data if out is None else fill(out, data)

    def _blank(self) -> Any:
        """A batch of zeros, as the samples of a fixed layout come out of a slot."""
        layout, n = self._form.data.layout, self.batch_size
        arrays = [np.broadcast_to(np.zeros((), f.dtype), (n, *f.shape)) for f in layout.fields]
        return layout.decode_batch(arrays, n)

    def _sample(self, flat: bool, metadata: bool) -> Read:
        with self._turn:
            return self._next(flat, metadata)

    def _next(self, flat: bool, metadata: bool) -> Read:
        pool = self._workers()
        draw = self._drawn_here if self.sampler.draws_in_parent else self._drawn
        try:
            with self._drawing(self.batch_size):
                data, found, labels, n = draw(pool, metadata)
        except (WorkerError, WorkerDiedError):
            self.close()
            raise
        self._batches += 1
        if not metadata:
            found = labels = None
        return self._outward_all(data, found, labels, n, flat)

    def _drawn(self, pool: Pool, metadata: bool) -> tuple[Any, Any, Any, int]:
        """The next batch that a worker drew by itself."""
        metadata = metadata and self._form.metadata is not None
        if self._drawing_run != pool.run or (metadata and not self._wants_metadata):
            self._wants_metadata |= metadata
            self._start_drawing(pool)
        run, self._drawing_run = self._drawing_run, -1  # as in `sample`
        try:
            found = pool.fetch(self._number % self.n_workers, metadata)
        except Exception:  # it may still come
            self._drawing_run = run
            raise
        if found[0] != 0:
            self._refuse(pool, found)
        self._number, self._drawing_run = self._number + 1, run
        _, (n, *_), data, about = found
        return data, about, None, n

    def _start_drawing(self, pool: Pool) -> None:
        if not len(self._data):
            raise self._data._empty()
        run, seed, n = pool.begin(), self._stream.seed, self.n_workers
        for k in range(n):
            first = (self._number - k + n - 1) // n
            pool.send(k, WorkRequest(DRAW, run, key_of(seed, k), first, self._wants_metadata))
        self._drawing_run = run

    def _refuse(self, pool: Pool, found: Any) -> None:
        """Raise what came in place of a batch: the source was empty, or the worker raised."""
        if found[0] == EMPTY:
            self._drawing_run = -1
            self._abandon()
            raise self._data._empty()
        self.close()
        raise pool._error(self._number % self.n_workers, found)

    def _drawn_here(self, pool: Pool, metadata: bool) -> tuple[Any, Any, Any, int]:
        """The next batch whose samples the sampler chose in this process."""
        if self._draws is None:
            key = key_of(self._stream.seed, 0)
            self._draws = Gathers(self._choose, self._choose_again, key, self._number)
        found = self._draws.fetch(pool, metadata and self._form.metadata is not None)
        if found is None:
            raise self._data._empty()
        self._number += 1
        return found

    def _choose(self) -> Item:
        if self._given:
            return self._given.popleft()
        location, metadata = self.sampler._draw_places()
        return Item(_places_of(location), metadata)

    def _choose_again(self, items: list[Item]) -> list[Item]:
        return [self._choose(), *items[1:]]

    def sample_index(self) -> Ints:
        """Draw the indices of the next batch, and gather nothing: it is passed over."""
        with self._turn:
            self._check_open()
            stream, k = self.sampler._stream, self._number % self.n_workers
            stream.key, stream.counter = key_of(self._stream.seed, k), self._number // self.n_workers << 32
            with self._drawing(self.batch_size):
                index = self.sampler._draw_index()
            self._number += 1
            self._drawing_run = -1  # what lies ready is one batch behind
            return index

    def _outward_all(self, data: Any, metadata: Any, labels: Any, n: int, flat: bool) -> Read:
        """What was copied out of a slot, in the form and on the device that the caller wants.

        `labels` are the metadata that only this process knows: the worker's of these names are not to be believed.
        """
        data = self._form.data.read(data, n)
        if metadata is not None and self._form.metadata is not None:
            metadata = self._form.metadata.read(metadata, n)
            metadata = {name: value for name, value in metadata.items() if name not in (labels or ())}
        if flat:
            data = self._flatten(data, False)
        elif self._moves_to is not None:
            data = move(data, *self._moves_to)
        if metadata is not None and self._moves_to is not None:
            metadata = move(metadata, *self._moves_to)
        return data, metadata if labels is None else {**(metadata or {}), **labels}

    # Epochs

    def _run_epoch(self, drop_last: bool, flat: bool, metadata: bool) -> Any:
        if not self._can_plan():
            self._check_open()
            return self.sampler._run_epoch(drop_last, flat, metadata)
        return super()._run_epoch(drop_last, flat, metadata)

    def _can_plan(self) -> bool:
        """Whether the sampler's epochs are those of every sampler; one with its own makes them in this process."""
        cls = type(self.sampler)
        names = ("_run_epoch", "_begin_epoch", "_next_of")
        return all(getattr(cls, name) is getattr(BatchSampler, name) for name in names)

    def _begin_epoch(self) -> Any:
        with self._turn:
            self._check_open()
            epoch: Any = self._resumed or PlannedEpoch.start(
                self.sampler._epoch_batch, self._stream, self.batch_size
            )
            self._epoch, self._resumed = epoch, None
            return epoch

    def _next_of(self, epoch: Any, drop_last: bool, flat: bool, metadata: bool) -> Read | None:
        with self._turn:
            epoch.drop_last = drop_last
            before, size = epoch.skipped, epoch.next_size()
            metadata = metadata and self._form.metadata is not None
            pool = self._workers()
            try:
                with self._drawing(size) as admission:
                    found = epoch.line.fetch(pool, metadata)
                    if admission is not None:
                        admission.keep(found[3] if found else 0)
            except (WorkerError, WorkerDiedError):
                self.close()
                raise
            finally:
                self._skipped += epoch.skipped - before
            data, about, chosen, n = found or (None, None, None, 0)
            if found is None:
                return None
            self._batches += 1
            labels = self.sampler._labels_at(epoch.places(chosen)) if metadata else None
            return self._outward_all(data, about, labels, n, flat)

    def _end_epoch(self, epoch: Any) -> None:
        super()._end_epoch(epoch)
        if self._pool is not None and epoch.line.is_on(self._pool):  # abandoned
            self._abandon()

    # Seeds and state

    def _seed(self, seed: int) -> None:
        self._check_open()
        self.sampler._seed(seed)
        self._stream = IndexStream(seed)
        self._rng, self._rng_seed = None, self._stream.seed
        self._restart(0)

    def _restart(self, number: int) -> None:
        """Go on with draw `number`; what is in flight is dropped."""
        self._number, self._drawing_run = number, -1
        self._epoch = self._resumed = self._draws = None
        self._given.clear()
        self._abandon()

    def state_dict(self) -> dict[str, Any]:
        """Return plain numbers, strings and arrays; what lies ready and was not delivered does not count."""
        epoch: Any = self._epoch or self._resumed
        under_way = [] if self._draws is None else [*self._draws.items]
        pending = [{"places": item.places, "metadata": item.kept} for item in (*under_way, *self._given)]
        return {
            **self._configuration(),
            "stream": self._stream.state_dict(),
            "number": self._number,
            "epoch": None if epoch is None else epoch.state_dict(),
            "sampler": self.sampler.state_dict(),
            "pending": pending,
            "batches": self._batches,
            "skipped": self.skipped,
        }

    def _load(self, state: dict[str, Any]) -> None:
        self._check_open()
        epoch = state["epoch"]
        resumed: Any = None
        if epoch is not None:
            resumed = PlannedEpoch.restore(self.sampler._epoch_batch, epoch, self.batch_size)
        stream, number = IndexStream.restored(state["stream"]), int(state["number"])
        given = deque(Item(self._checked_places(p["places"]), p["metadata"]) for p in state["pending"])
        batches, skipped = counted_in(state)
        self.sampler.load_state_dict(state["sampler"])
        self._stream = stream
        self._restart(number)
        self._resumed, self._given = resumed, given
        self._batches, self._skipped = batches, skipped

    def _checked_places(self, places: dict[str, Any]) -> dict[str, Any]:
        found = {name: np.asarray(array, np.int64) for name, array in places.items()}
        if "index" not in found or any(a.ndim != 1 or len(a) > self.batch_size for a in found.values()):
            raise ValueError(
                f"pending: places must be at most {self.batch_size} a batch; the state is damaged"
            )
        return found

    def _configuration(self) -> dict[str, Any]:
        inner = {f"sampler_{name}": value for name, value in self.sampler._configuration().items()}
        return {**super()._configuration(), **inner, "n_workers": self.n_workers}

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("MultiprocessingSampler: was closed; make another")


def _places_of(location: Location) -> dict[str, Any]:
    index = location.row if location.index is None else location.index
    places = {"index": index, "row": location.row, "generation": location.generation}
    return {name: np.asarray(array, np.int64) for name, array in places.items()}
