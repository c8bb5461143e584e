"""The context: what the steps of a batch's life share, from its submission to its end.

The steps are functions of a context, one module each, in `batch/`; the coordinator opens and closes what a context
works with.

Concurrency: all of it belongs to the coordinator's event loop.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from recollect.rollout.batch.records import BatchRecord, EndedBatch, Submission
from recollect.rollout.batch.state import BatchId, BatchState, copied
from recollect.rollout.config import Config
from recollect.rollout.experience.space import plan_of
from recollect.rollout.stats import QueueStats, RunDoors, RunnerPoolStats, Stats

if TYPE_CHECKING:
    from recollect.rollout.event_loop import Clock, Threads
    from recollect.rollout.events import EventHub, Observer
    from recollect.rollout.experience.pipeline import Pipeline
    from recollect.rollout.experience.sinks import ExperienceSink
    from recollect.rollout.journal.journal import Journal
    from recollect.rollout.models.replicas import ModelPool
    from recollect.rollout.runners.execute import LoopLag
    from recollect.rollout.scheduler import Scheduler


class RolloutContext:
    """What a coordinator knows; the second half exists while it is open."""

    def __init__(
        self, config: Config, rollout: Sequence[Any], auxiliary: list[list[Any]], clock: Clock | None
    ) -> None:
        self.config, self.given_clock = config, clock
        self.rollout_models, self.auxiliary_models = list(rollout), auxiliary
        space = config.space if config.space is not None else getattr(config.sink, "single_space", None)
        self.plan = plan_of(space, _lengths_of(config))
        self.is_open = False
        self.batches: dict[BatchId, BatchRecord] = {}
        self.carriers: list[BatchRecord] = []  # tasks that outlived the cut of their batch
        self.history: OrderedDict[BatchId, EndedBatch] = OrderedDict()
        self.waiting: list[Submission] = []
        self.other_passes: dict[asyncio.Task[Any], bool] = {}  # of payloads; whether the commit has begun
        self.doors = RunDoors()
        self.n_batches = self.next_group = 0
        self.k = 0  # train batches admitted, aborted ones taken out
        self.first_version: int | None = None
        self.version = 0
        self.payloads_refused = self.stale_dropped = 0
        self.sink: ExperienceSink | None = None
        self.sink_is_ours = False
        self.journal: Journal | None = None

    loop: asyncio.AbstractEventLoop
    thread: int
    clock: Clock
    threads: Threads
    hub: EventHub
    lag: LoopLag
    observer: Observer
    models: ModelPool
    scheduler: Scheduler
    pipeline: Pipeline

    def state_of(self, batch_id: BatchId) -> BatchState:
        """Return a copy of what is known of a live or remembered batch."""
        batch = self.batches.get(batch_id)
        if batch is not None:
            return copied(batch.state)
        if batch_id in self.history:
            return copied(self.history[batch_id].state)
        raise KeyError(f"batch_id: must be of a live or remembered batch, got {batch_id!r}")

    def stats(self) -> Stats:
        """Return one moment: doors, attempts, runners, queue, bytes, models."""
        scheduler, pool = self.scheduler, self.scheduler.pool
        admitted = [batch for batch in self.batches.values() if batch.admitted]
        live = sum(batch.n_runs for batch in (*admitted, *self.carriers))
        return Stats(
            runs=replace(self.doors, live=live),
            attempts=replace(scheduler.doors, running=len(scheduler.attempts)),
            runners=RunnerPoolStats(
                self.config.runner, pool.size, pool.n_alive(), pool.n_free(), pool.n_fenced
            ),
            queue=QueueStats(len(self.waiting), len(self.batches), scheduler.n_queued),
            staged_nbytes=scheduler.staged_nbytes,
            models=self.models.stats(),
            loop_lag_s=self.lag.seconds,
            loop_lag_in=self.lag.name,
            payloads_refused=self.payloads_refused + getattr(pool, "n_refused", 0),
            model_version=self.version,
            stale_dropped=self.stale_dropped,
        )


def _lengths_of(config: Config) -> dict[str, int] | None:
    """The greatest lengths that a given buffer has room for, if its space is ours."""
    rows = getattr(getattr(config.sink, "inner_storage", None), "rows", None)
    return dict(rows.layout.max_lengths) if rows is not None else None
