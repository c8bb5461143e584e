"""RolloutCoordinator: batches of tasks in, experience out, with every outcome accounted for.

The state table of the contract is `state.MOVES`; every move goes through `state.move`. All of it lives in one event
loop; what may block runs in threads and comes back as a future.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from recollect.errors import (
    BatchAborted,
    ClosedError,
    DeadlineError,
    FormatError,
    PipelineError,
    WorkerDiedError,
)
from recollect.rollout import cutting, submission
from recollect.rollout.clock import Clock, LoopClock, checked_seconds
from recollect.rollout.config import Config
from recollect.rollout.ending import Ending
from recollect.rollout.events import Event, Hub
from recollect.rollout.execute import Lag, Outcome
from recollect.rollout.finalize import Finalizer, Waiting, verdict, why_waiting
from recollect.rollout.models.pool import ModelPool
from recollect.rollout.observe import Observer, QueueStats, RunDoors, RunnerStats, Stats, Trace
from recollect.rollout.payload import decode
from recollect.rollout.pipeline import Pipeline
from recollect.rollout.records import BatchRecord, TaskRecord
from recollect.rollout.runners.base import Surroundings
from recollect.rollout.runners.make import make_pool
from recollect.rollout.scheduler import Scheduler
from recollect.rollout.schema import plan_of
from recollect.rollout.sinks import QueueSink, ReplaySink, Sink, make_sink
from recollect.rollout.state import BatchId, BatchLifecycleState, BatchState, BatchType, copied, move
from recollect.rollout.tasks import Task
from recollect.rollout.threads import Threads

if TYPE_CHECKING:
    from recollect.rollout.journal import Journal

S = BatchLifecycleState
GROUPS_PER_MS = 2**20


class RolloutCoordinator:
    """Runs batches of tasks on runners and delivers what they made, exactly once, to a sink.

    Ownership: closes what the config made (journal, sink, runners), never a model or buffer that was given.
    Concurrency: lives in the event loop of `prepare()`; other threads use `get_local`.

    >>> import asyncio, recollect as rc, recollect.rollout as rr
    >>> async def add(task, models):
    ...     [g] = await models.rollout.generate(f"{task.data['a']}+{task.data['b']}=")
    ...     return g.experience(reward=float(g.text == "5"))
    >>> async def main():
    ...     async with rc.RolloutCoordinator(rr.Config(), [rr.ScriptedModel(["5", "6"])]) as c:
    ...         tasks = [rr.Task(add, {"a": 2, "b": 3}, repeat_times=4)]
    ...         await c.submit_batch(batch_id=1, tasks=tasks, batch_type="train")
    ...         result = await c.finalize_train_batch(1, timeout=30)
    ...         return result["metrics"]["rollout/reward/mean"], len(await c.sink.get(4))
    >>> asyncio.run(main())
    (0.5, 4)
    """

    def __init__(
        self,
        config: Config,
        rollout_model: Sequence[Any],
        auxiliary_models: Sequence[Sequence[Any]] | None = None,
        *,
        clock: Clock | None = None,
    ) -> None:
        """Check and keep; nothing is opened before `prepare`."""
        if not isinstance(config, Config):
            raise TypeError(f"config: must be a rr.Config, got {type(config).__name__}")
        auxiliary = [list(models) for models in auxiliary_models or ()]
        if len(config.auxiliary_names) > len(auxiliary):
            raise ValueError(
                f"auxiliary_names: must name lists of auxiliary_models, got {len(config.auxiliary_names)} names "
                f"for {len(auxiliary)} lists"
            )
        if any(not models for models in auxiliary):
            raise ValueError("auxiliary_models: each role must have at least one model, got an empty list")
        self._config, self._given_clock = config, clock
        self._rollout_models, self._auxiliary_models = list(rollout_model), auxiliary
        space = config.space if config.space is not None else getattr(config.sink, "single_space", None)
        self._plan = plan_of(space, _lengths_of(config))
        self._is_open = False
        self._starting: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None
        self._batches: dict[BatchId, BatchRecord] = {}
        self._history: OrderedDict[BatchId, Ending] = OrderedDict()
        self._carriers: list[BatchRecord] = []
        self._doors = RunDoors()
        self._admission: list[submission.Submission] = []
        self._serial = 0
        self._next_group = 0
        self._k = 0
        self._first_version: int | None = None
        self._version = 0
        self._payloads_refused = self._stale_dropped = 0
        self._sink: Sink | None = None

    # -- starting and stopping

    async def prepare(self) -> None:
        """Open journal and sink and start the runners; does nothing while it is running."""
        if self._closing is not None:
            await asyncio.shield(self._closing)
        if self._is_open:
            self._check()
            return
        if self._starting is None:
            self._starting = asyncio.get_running_loop().create_task(self._start())
        elif self._starting.get_loop() is not asyncio.get_running_loop():
            raise _wrong_loop()
        starting = self._starting
        try:
            await asyncio.shield(starting)
        finally:
            if starting.done() and self._starting is starting:
                self._starting = None

    async def _start(self) -> None:
        config = self._config
        self._loop, self._thread = asyncio.get_running_loop(), threading.get_ident()
        self._clock = self._given_clock or LoopClock(self._loop)
        self._threads = Threads(self._loop, config.name)
        self._hub, self._lag = Hub(), Lag()
        trace = None if config.trace is None else Trace(Path(config.trace))
        self._observer = Observer(self._clock, self._hub, trace)
        self._models = ModelPool(
            self._rollout_models, self._auxiliary_models, config.auxiliary_names, self._clock.time,
            config.retry_backoff_max_s,
        )  # fmt: skip
        self._scheduler = Scheduler(config, self._clock, self, self._observer)
        self._scheduler.version = self._models.version if self._rollout_models else lambda: self._version
        self._journal: Journal | None = None
        made_sink = False
        try:
            if config.journal is not None:
                from recollect.rollout.journal import Journal

                self._journal = await Journal.open(
                    str(config.journal), config, self._plan.layout.hash, self._threads
                )
            self._version = max(self._version, self._models.version())
            if self._first_version is None:
                self._first_version = self._version
            self._next_group = max(self._next_group, int(time.time() * 1000) * GROUPS_PER_MS)
            if self._sink is None:
                self._sink, self._sink_is_ours = make_sink(config.sink, self._plan)
                made_sink = True
            elif isinstance(self._sink, QueueSink) and self._sink_is_ours:
                self._sink.reopen()
            elif self._sink_is_ours:
                self._sink, _ = make_sink(config.sink, self._plan)
            self._pipeline = Pipeline(config, self._plan, self._sink, self._threads, self._clock)
            around = Surroundings(
                self._scheduler, config, self._models, self._plan, self._threads, self._lag, self._clock
            )
            pool = make_pool(around)
            self._scheduler.pool = pool
            try:
                await pool.start()
            except BaseException:
                await pool.close()
                raise
        except BaseException:
            if made_sink and self._sink is not None:
                if self._sink_is_ours:
                    self._sink.close()
                self._sink = None
            if self._journal is not None:
                await self._journal.close()
            self._threads.close()
            raise
        self._is_open = True
        self._scheduler.is_paused = False
        if self._journal is not None:
            self._restore(self._journal)

    async def shutdown(self) -> None:
        """Wake every waiter with ClosedError, stop all work, and close what the config made."""
        if self._starting is not None:
            await asyncio.wait([self._starting])
        if not self._is_open and self._closing is None:
            return
        if self._closing is None:
            self._check()
            self._closing = self._loop.create_task(self._stop())
        await asyncio.shield(self._closing)

    async def _stop(self) -> None:
        config, scheduler = self._config, self._scheduler
        try:
            self._is_open = False
            closed = ClosedError("coordinator: was shut down; call prepare() to start again")
            for sub in list(self._admission):
                self._withdraw(sub, closed)
            for batch in list(self._batches.values()):
                self._raise_in(batch, closed)
            self._hub.close()
            if self._journal is not None and scheduler.attempts:
                scheduler.is_paused = True
                await self._drain(config.drain_s)
            scheduler.is_paused = True
            await self._stop_passes()
            live = [*self._batches.values(), *self._carriers]
            running = [attempt for batch in live for attempt in scheduler.drop_work(batch)]
            running += [a for a in scheduler.attempts.values() if a not in running]
            for batch in list(self._batches.values()):
                if self._journal is None:
                    self._end(batch, S.ABORTED, reason="shutdown")
                else:
                    self._forget(batch)
            for carrier in self._carriers:
                self._doors.cancelled += carrier.n_runs
                scheduler.stage_bytes(carrier, -carrier.staged_nbytes)
            self._carriers.clear()
            stopping = asyncio.ensure_future(scheduler.stopped(running))
            await asyncio.wait([stopping], timeout=config.cancel_grace_s + 1)
            scheduler.kill_all()
            await scheduler.pool.close()
            scheduler.deadlines.close()
            if not stopping.done():
                stopping.cancel()
            if self._journal is not None:
                await self._journal.close()
            if self._sink_is_ours and self._sink is not None:
                self._sink.close()
            if self._observer.trace is not None:
                self._observer.trace.write()
        finally:
            self._threads.close()
            self._closing = None

    async def _drain(self, seconds: float) -> None:
        running = list(self._scheduler.attempts.values())
        waiting = asyncio.ensure_future(self._scheduler.stopped(running))
        await asyncio.wait([waiting], timeout=seconds)
        waiting.cancel()

    async def _stop_passes(self) -> None:
        """A commit that has begun is finished; any other pass is stopped."""
        passes = [batch for batch in self._batches.values() if batch.passing is not None]
        tasks = []
        for batch in passes:
            if batch.passing is not None:
                if not batch.committing:
                    batch.passing.cancel()
                tasks.append(batch.passing)
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=2.0)
            for task in late:
                task.cancel()
            if late:
                await asyncio.wait(late, timeout=0.5)

    async def __aenter__(self) -> Self:
        await self.prepare()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.shutdown()

    def _check(self) -> None:
        if not self._is_open:
            raise ClosedError(
                "coordinator: must be prepared, got a call before prepare() or after shutdown()"
            )
        try:
            here = asyncio.get_running_loop()
        except RuntimeError:
            here = None
        if here is not self._loop and (here is not None or threading.get_ident() != self._thread):
            raise _wrong_loop()

    # -- submitting

    async def submit_batch(
        self,
        *,
        batch_id: BatchId,
        tasks: list[Task],
        batch_type: BatchType,
        min_wait_num: int | None = None,
        priority: int | None = None,
    ) -> None:
        """Register a batch and return once it is admitted; a refused one leaves no trace."""
        self._check()
        submission.check_arguments(batch_id, tasks, batch_type, min_wait_num, priority)
        if batch_id in self._batches:
            raise ValueError(
                f"batch_id: must not be that of a live batch, got {batch_id!r}; finalize or abort it"
            )
        self._serial += 1
        batch = submission.make_batch(
            batch_id, tasks, batch_type, min_wait_num, priority, self._serial, self._config, self._next_group
        )
        self._next_group += len(tasks)
        batch.submitted_at = self._clock.time()
        batch.commit_id = (
            f"{self._config.name}-{batch_id}-g{self._next_group - len(tasks)}-{self._next_group - 1}"
        )
        self._batches[batch_id] = batch
        self._observer.event_of("submitted", batch_id)
        sub = submission.Submission(batch, self._loop.create_future())
        self._admission.append(sub)
        self._admit()
        if not sub.future.done():
            deadline = batch.submitted_at + self._config.submit_timeout_s
            if self._clock.time() >= deadline:
                self._refuse(sub)
            else:
                sub.timer = self._clock.call_at(deadline, self._refuse, sub)
        try:
            await sub.future
        except asyncio.CancelledError:
            if not batch.admitted:
                self._withdraw(sub, None)
            raise
        if self._journal is not None:
            await self._journal.flush()

    def _refuse(self, sub: submission.Submission) -> None:
        self._withdraw(sub, DeadlineError(f"batch {sub.batch.id!r}: not admitted: {sub.batch.not_admitted}"))

    def _withdraw(self, sub: submission.Submission, error: Exception | None) -> None:
        """Take a waiting submission back; nothing of it stays."""
        if sub in self._admission:
            self._admission.remove(sub)
        if sub.timer is not None:
            sub.timer.cancel()
        if self._batches.get(sub.batch.id) is sub.batch and not sub.batch.admitted:
            del self._batches[sub.batch.id]
            self._raise_in(
                sub.batch, error or KeyError(f"batch {sub.batch.id!r}: its submission was withdrawn")
            )
        if error is not None and not sub.future.done():
            sub.future.set_exception(error)

    def _admit(self) -> None:
        """Admit who waits, in order; one that capacity holds up holds up those behind it."""
        full = ""
        for sub in list(self._admission):
            live = [b for b in self._batches.values() if b.admitted]
            full = full or submission.no_room(sub.batch, live, self._scheduler.n_queued, self._config)
            sub.batch.not_admitted = full or self._too_early(sub.batch)
            if not sub.batch.not_admitted:
                self._admission.remove(sub)
                if sub.timer is not None:
                    sub.timer.cancel()
                self._enter(sub.batch)
                if not sub.future.done():
                    sub.future.set_result(None)

    def _too_early(self, batch: BatchRecord) -> str:
        """On-policy bounds: a train batch waits until the weights are new enough for it."""
        most = self._config.max_staleness
        if most is None or batch.is_eval:
            return ""
        needs = (self._first_version or 0) + self._k * self._config.versions_per_batch - most
        if needs <= self._version:
            return ""
        return f"max_staleness = {most} needs version {needs:g}, got {self._version}; call sync_weights"

    def _enter(self, batch: BatchRecord) -> None:
        batch.admitted = True
        self._history.pop(batch.id, None)
        if not batch.is_eval:
            batch.k, self._k = self._k, self._k + 1
        self._doors.submitted += batch.n_runs
        if self._journal is not None:
            self._journal.submitted(batch, self._next_group, self._k, self._first_version or 0)
        self._observer.event_of("admitted", batch.id)
        self._observer.slice("admission", batch.submitted_at, batch=str(batch.id))
        if batch.tasks:
            move(batch.state, S.RUNNING)
            self._scheduler.add(batch)
        self._look(batch)

    # -- finalizing

    async def finalize_train_batch(
        self, batch_id: int | str, *, timeout: float | None = None, below_min: str | None = None
    ) -> dict[str, Any]:
        """Wait for a train batch, deliver it, and return its counts and metrics."""
        return await self._finalize(batch_id, "train", timeout, below_min)

    async def finalize_eval_batch(
        self, batch_id: int | str, *, timeout: float | None = None, below_min: str | None = None
    ) -> dict[str, Any]:
        """Wait for an eval batch and return its counts and metrics."""
        return await self._finalize(batch_id, "eval", timeout, below_min)

    async def _finalize(
        self, batch_id: BatchId, kind: str, timeout: float | None, below_min: str | None
    ) -> dict[str, Any]:
        self._check()
        seconds = self._config.batch_timeout_s if timeout is None else checked_seconds(timeout)
        if below_min not in (None, "raise", "accept"):
            raise ValueError(f"below_min: must be 'raise' or 'accept', got {below_min!r}")
        submission.check_id(batch_id)
        batch = self._batches.get(batch_id)
        if batch is None:
            return self._ended_result(batch_id, kind)
        _check_kind(batch.state.batch_type, kind, batch_id)
        if batch.state.state is S.FINALIZING or batch.cut is not None:
            return await self._joined(self._pass_of(batch))
        deadline = self._clock.time() + seconds
        finalizer = Finalizer(self._loop.create_future(), deadline, below_min or self._config.below_min)
        batch.finalizers.add(finalizer)
        self._look(batch)
        if not finalizer.future.done():
            self._scheduler.dispatch()  # a batch being finalized may start work above the staging bound
        try:
            passing = await finalizer.future
        except DeadlineError as error:
            raise self._with_reasons(error, batch) from None
        finally:
            batch.finalizers.discard(finalizer)
            if finalizer.timer is not None:
                finalizer.timer.cancel()
        return await self._joined(passing)

    def _with_reasons(self, error: DeadlineError, batch: BatchRecord) -> DeadlineError:
        text = why_waiting(batch, self._scheduler, self._pipeline.stage, self._clock.time())
        told = DeadlineError(f"batch {batch.id!r}: {text}")
        told.finished, told.expected = error.finished, error.expected
        return told

    def _ended_result(self, batch_id: BatchId, kind: str) -> dict[str, Any]:
        ending = self._history.get(batch_id)
        if ending is None:
            raise KeyError(f"batch_id: must be of a live or remembered batch, got {batch_id!r}")
        _check_kind(ending.state.batch_type, kind, batch_id)
        if ending.state.state is S.ABORTED:
            raise BatchAborted(
                f"batch {batch_id!r}: was aborted: {ending.reason}",
                ending.reason or "",
                deepcopy(ending.state.final_result) if ending.state.final_result else None,
            )
        return deepcopy(ending.state.final_result or {})

    async def _joined(self, outcome: asyncio.Future[Any]) -> dict[str, Any]:
        """Wait for a pass that others wait for too; being cancelled here does not stop it."""
        try:
            result: dict[str, Any] = deepcopy(await asyncio.shield(outcome))
        except PipelineError as error:
            raise PipelineError(str(error)) from error.__cause__
        return result

    def _look(self, batch: BatchRecord) -> None:
        """Decide for everybody who waits for this batch."""
        if not batch.finalizers or batch.state.state is S.FINALIZING:
            return
        now = self._clock.time()
        for finalizer in list(batch.finalizers):
            if finalizer.future.done():
                continue
            decided = verdict(batch, finalizer, now)
            if decided.cut:
                self._pass_of(batch)
                return
            if decided.error is not None:
                finalizer.future.set_exception(decided.error)
            elif decided.at != finalizer.looks_at and decided.at is not None:
                if finalizer.timer is not None:
                    finalizer.timer.cancel()
                finalizer.looks_at = decided.at
                finalizer.timer = self._clock.call_at(decided.at, self._look_again, finalizer, batch)

    def _look_again(self, finalizer: Finalizer, batch: BatchRecord) -> None:
        finalizer.looks_at = None
        self._look(batch)

    def _raise_in(self, batch: BatchRecord, error: Exception) -> None:
        for finalizer in batch.finalizers:
            if not finalizer.future.done():
                finalizer.future.set_exception(error)

    # -- the pass

    def _pass_of(self, batch: BatchRecord, reason: str | None = None) -> asyncio.Future[Any]:
        """Return the outcome of the batch's pass, starting one if none is under way."""
        if batch.passing is None:
            if batch.cut is None:
                self._cut(batch, carries=reason is None)
            move(batch.state, S.FINALIZING)
            batch.outcome = self._loop.create_future()
            batch.outcome.add_done_callback(lambda future: future.cancelled() or future.exception())
            batch.passing = self._loop.create_task(self._run_pass(batch, batch.outcome, reason))
        outcome = batch.outcome
        if outcome is None:
            raise RuntimeError(f"batch {batch.id!r}: a pass without an outcome")
        if reason is None:
            for finalizer in batch.finalizers:
                if not finalizer.future.done():
                    finalizer.future.set_result(outcome)
        return outcome

    def _cut(self, batch: BatchRecord, carries: bool) -> None:
        """Fix which results count; stragglers are cancelled, or carried if they have started."""
        batch.cut = cutting.cut_of(batch, self._config, carries)
        carrier = cutting.carrier_of(batch, self._config) if batch.cut.carried else None
        self._scheduler.remove(batch)
        if carrier is not None:
            self._scheduler.n_queued -= carrier.n_queued  # add counts them again
            self._carriers.append(carrier)
        self._scheduler.drop_work(batch)
        if carrier is not None:
            self._scheduler.add(carrier)
        if not batch.is_eval:
            self._take_carried(batch)
        self._observer.event_of("cut", batch.id, detail=f"{len(batch.cut.tasks)} tasks")
        if self._journal is not None:
            self._journal.cut(batch)

    def _take_carried(self, batch: BatchRecord) -> None:
        """Tasks of earlier batches that have ended since join this one."""
        for carrier in list(self._carriers):
            for task in [task for task in carrier.tasks if task.status is not None]:
                carrier.tasks.remove(task)
                carrier.next_task = len(carrier.tasks)
                carrier.n_runs -= task.n_runs
                nbytes = sum(len(o.payload or b"") for o in task.good.values())
                self._scheduler.stage_bytes(carrier, -nbytes)
                if (
                    task.is_good(self._config.partial_results, self._config.min_group_size)
                    and batch.cut is not None
                ):
                    batch.cut.carried_in.append(task)
                    batch.n_runs += task.n_runs
                    self._scheduler.stage_bytes(batch, nbytes)
                else:
                    self._doors.failed += len(task.failed)
                    self._doors.unused += len(task.good)
            if not carrier.tasks:
                self._carriers.remove(carrier)
                self._scheduler.remove(carrier)

    async def _run_pass(self, batch: BatchRecord, outcome: asyncio.Future[Any], reason: str | None) -> None:
        start = self._clock.time()
        try:
            ending = await self._deliver(batch)
        except asyncio.CancelledError:
            self._back(batch)
            if not outcome.done():
                outcome.set_exception(ClosedError("coordinator: the pass was stopped by abort or shutdown"))
            raise
        except BaseException as error:
            failure = (
                error if isinstance(error, PipelineError) else PipelineError(f"pass: failed with {error!r}")
            )
            if failure is not error:
                failure.__cause__ = error
            batch.last_failure = str(failure)
            self._back(batch)
            if not outcome.done():
                outcome.set_exception(failure)
            return
        self._observer.slice("pass", start, batch=str(batch.id))
        batch.passing = None
        batch.committing = False
        self._observer.event_of("delivered", batch.id, detail=f"{ending['experience_count']} experiences")
        self._end(batch, S.FINALIZED if reason is None else S.ABORTED, ending, reason)
        if not outcome.done():
            outcome.set_result(ending)

    def _back(self, batch: BatchRecord) -> None:
        batch.passing = None
        batch.committing = False
        move(batch.state, S.RUNNING if batch.tasks else S.PENDING)

    async def _deliver(self, batch: BatchRecord) -> dict[str, Any]:
        cut = batch.cut
        if cut is None:
            raise RuntimeError(f"batch {batch.id!r}: has no cut")
        if batch.is_eval:
            return cutting.eval_result(batch, cut)
        payloads = cutting.payloads_of(cut)
        if self._journal is not None:
            await self._journal.flush()  # what is not recorded is not delivered

        def begin() -> None:
            batch.committing = batch.write_tried = True

        delivery = await self._pipeline.run(
            payloads, batch.commit_id, self._version, maybe_written=batch.write_tried, begin_commit=begin
        )
        self._stale_dropped += delivery.stale
        batch.delivery = delivery
        return cutting.train_result(batch, cut, delivery, self._version)

    # -- ending

    def _end(
        self, batch: BatchRecord, state: S, result: dict[str, Any] | None = None, reason: str | None = None
    ) -> None:
        """Move to an end, count every run by its door, and let go of the payloads."""
        move(batch.state, state)
        batch.state.final_result = result
        batch.reason = reason
        if batch.admitted:
            cutting.count_doors(self._doors, batch, delivered=result is not None)
            self._scheduler.remove(batch)
            self._scheduler.stage_bytes(batch, -batch.staged_nbytes)
            if state is S.ABORTED and not batch.is_eval:
                self._k -= 1
            if state is S.FINALIZED and not batch.is_eval:
                self._scheduler.complete(batch)
        self._batches.pop(batch.id, None)
        if self._config.history:
            self._history[batch.id] = Ending(batch.state, reason)
            self._history.move_to_end(batch.id)
            while len(self._history) > self._config.history:
                self._history.popitem(last=False)
        if self._journal is not None and batch.admitted:
            self._journal.ended(batch, reason, self._k)
        self._observer.event_of(
            "finalized" if state is S.FINALIZED else "aborted", batch.id, detail=reason or ""
        )
        if self._is_open:
            self._admit()
            self._scheduler.dispatch()

    def _forget(self, batch: BatchRecord) -> None:
        """At shutdown with a journal: it is kept there, and its runs are live again after the next prepare."""
        self._batches.pop(batch.id, None)
        self._scheduler.remove(batch)
        self._scheduler.stage_bytes(batch, -batch.staged_nbytes)
        if batch.admitted:
            self._doors.submitted -= batch.n_runs

    async def abort_batch(
        self, batch_id: BatchId, *, reason: str, keep_partial_results: bool = False
    ) -> None:
        """Stop a batch; with `keep_partial_results` the good tasks finished by now are delivered first."""
        self._check()
        submission.check_id(batch_id)
        if type(reason) is not str or not reason:
            raise ValueError(f"reason: must be a non-empty str, got {reason!r}")
        batch = self._batches.get(batch_id)
        if batch is None:
            return
        if batch.state.state is S.FINALIZING:
            if keep_partial_results or batch.committing:
                await self._abort_joins(batch, keep_partial_results)
                return
            passing = batch.passing
            if batch.outcome is not None and not batch.outcome.done():
                batch.outcome.set_exception(_aborted(batch, reason))
            if passing is not None:
                passing.cancel()
                await asyncio.wait([passing])
            if self._batches.get(batch_id) is not batch or batch.state.state is S.FINALIZING:
                return
        if not batch.admitted:
            self._abort_waiting(batch, reason)
            return
        if keep_partial_results and batch.tasks:
            await self._abort_keeping(batch, reason)
            return
        running = self._scheduler.drop_work(batch)
        error = _aborted(batch, reason)
        self._raise_in(batch, error)
        self._end(batch, S.ABORTED, reason=reason)
        await self._scheduler.stopped(running)

    def _abort_waiting(self, batch: BatchRecord, reason: str) -> None:
        sub = next(sub for sub in self._admission if sub.batch is batch)
        self._admission.remove(sub)
        if sub.timer is not None:
            sub.timer.cancel()
        error = _aborted(batch, reason)
        self._raise_in(batch, error)
        self._end(batch, S.ABORTED, reason=reason)
        sub.future.set_exception(error)

    async def _abort_joins(self, batch: BatchRecord, keeping: bool) -> None:
        if batch.outcome is None:
            return
        await asyncio.wait([batch.outcome])
        if keeping and batch.outcome.exception() is not None:
            await self._joined(batch.outcome)

    async def _abort_keeping(self, batch: BatchRecord, reason: str) -> None:
        self._raise_in(batch, _aborted(batch, reason))
        running = list(batch.running)
        outcome = self._pass_of(batch, reason)
        await self._joined(outcome)
        await self._scheduler.stopped(running)

    # -- what the scheduler says

    def task_ended(self, task: TaskRecord) -> None:
        batch = task.batch
        if self._journal is not None and task.failed:
            self._journal.failed(task)
        state = batch.state
        if batch.finalizers and (
            len(state.statuses) == state.expected_task_count or state.min_wait_num or not task.is_fine
        ):
            self._look(batch)

    def run_staged(self, task: TaskRecord, outcome: Outcome) -> None:
        if self._journal is not None:
            self._journal.run(task, outcome)

    def queue_shrank(self) -> None:
        if self._admission:
            self._admit()

    def runners_broken(self, why: str) -> None:
        for batch in self._batches.values():
            self._raise_in(batch, WorkerDiedError(f"runners: none could be started; {why}"))

    # -- weights

    async def sync_weights(self, version: int | None = None) -> int:
        """Load the newest weights into all rollout models; return the lowest version they serve."""
        self._check()
        if version is not None:
            if isinstance(version, bool) or not isinstance(version, int):
                raise TypeError(f"version: must be an int or None, got {version!r}")
            if version < self._version:
                raise ValueError(f"version: must not go back from {self._version}, got {version}")
        if self._rollout_models:
            async with asyncio.TaskGroup() as group:
                calls = [group.create_task(model.sync(version)) for model in self._rollout_models]
            lowest = min(int(call.result()) for call in calls)
        else:
            lowest = self._version + 1 if version is None else version
        if lowest < self._version:
            raise ValueError(
                f"version: must not go back from {self._version}, got {lowest} from a model's sync"
            )
        self._version = lowest
        self._observer.event_of("synced", detail=f"version {lowest}")
        self._admit()
        return lowest

    @property
    def model_version(self) -> int:
        """The lowest version that the rollout models serve."""
        return self._version

    # -- other code's payloads

    async def process_experiences(self, payloads: list[bytes]) -> dict[str, float]:
        """Run payloads of other code through one pass; all are checked before any is used."""
        self._check()
        if not payloads:
            return {}
        for position, payload in enumerate(payloads):
            try:
                decode(payload, space=self._plan)
            except (FormatError, TypeError) as error:
                self._payloads_refused += 1
                raise FormatError(f"payloads[{position}]: {error}") from None
        self._serial += 1
        commit_id = f"{self._config.name}-payloads-{self._serial}"
        delivery = await self._pipeline.run(list(payloads), commit_id, self._version)
        return delivery.metrics

    # -- seeing

    @property
    def config(self) -> Config:
        """What it was told."""
        return self._config

    @property
    def sink(self) -> Any:
        """Where experience goes: the queue, the file sink, the given sink, or the given buffer."""
        return self._sink.buffer if isinstance(self._sink, ReplaySink) else self._sink

    def batches(self) -> list[BatchId]:
        """The ids of live batches, in the order of submission."""
        self._check()
        return list(self._batches)

    def batch_state(self, batch_id: BatchId) -> BatchState:
        """Return a copy of what is known of a live or remembered batch."""
        submission.check_id(batch_id)
        batch = self._batches.get(batch_id)
        if batch is not None:
            return copied(batch.state)
        if batch_id in self._history:
            return copied(self._history[batch_id].state)
        raise KeyError(f"batch_id: must be of a live or remembered batch, got {batch_id!r}")

    def why_waiting(self, batch_id: BatchId) -> Waiting | None:
        """Say why a batch is not done; None when it is done or unknown."""
        self._check()
        batch = self._batches.get(batch_id)
        if batch is None:
            return None
        return why_waiting(batch, self._scheduler, self._pipeline.stage, self._clock.time())

    def stats(self) -> Stats:
        """Return one moment: doors, attempts, runners, queue, bytes, models."""
        self._check()
        scheduler, pool = self._scheduler, self._scheduler.pool
        live = sum(b.n_runs for b in self._batches.values() if b.admitted) + sum(
            c.n_runs for c in self._carriers
        )
        return Stats(
            runs=replace(self._doors, live=live),
            attempts=replace(scheduler.doors, running=len(scheduler.attempts)),
            runners=RunnerStats(self._config.runner, pool.size, pool.n_alive(), pool.n_free(), pool.n_fenced),
            queue=QueueStats(len(self._admission), len(self._batches), scheduler.n_queued),
            staged_nbytes=scheduler.staged_nbytes,
            models=self._models.stats(),
            loop_lag_s=self._lag.seconds,
            loop_lag_in=self._lag.name,
            payloads_refused=self._payloads_refused + getattr(pool, "n_refused", 0),
            model_version=self._version,
            stale_dropped=self._stale_dropped,
        )

    def events(self, batch_id: BatchId | None = None) -> AsyncIterator[Event]:
        """Iterate over what happens from now on, of one batch or of all."""
        self._check()
        return self._hub.listen(batch_id)

    # -- restart

    def _restore(self, journal: Journal) -> None:
        """Bring back what the journal holds: live batches with their finished runs, history, and counters."""
        from recollect.rollout.reviving import revive

        kept = journal.restored
        self._next_group = max(self._next_group, kept.next_group)
        self._k = max(self._k, kept.k)
        if kept.first_version is not None:
            self._first_version = kept.first_version
        for batch_id, ending in kept.history.items():
            self._history.setdefault(batch_id, ending)
        for kept_batch in kept.batches:
            self._serial += 1
            batch = revive(kept_batch, self._serial, self._config, self._scheduler, journal)
            batch.submitted_at = self._clock.time()
            self._batches[batch.id] = batch
            self._doors.submitted += batch.n_runs
            if batch.cut is None and batch.tasks:
                self._scheduler.add(batch)

    # -- other places

    @classmethod
    def get_actor(cls, config: Config, models: list[Any], auxiliary_models: list[Any]) -> Any:
        """Return the Ray actor `config.name` of this namespace, or make it."""
        from recollect.rollout.actor import get_actor

        return get_actor(cls, config, models, auxiliary_models)

    @classmethod
    def get_local(cls, config: Config, models: list[Any], auxiliary_models: list[Any] | None = None) -> Any:
        """Return the same in a thread of its own: `h.submit_batch(...)` blocks, `.remote(...)` can be awaited."""
        from recollect.rollout.handle import LocalHandle

        return LocalHandle(cls, config, models, auxiliary_models)


def _wrong_loop() -> RuntimeError:
    return RuntimeError(
        "coordinator: lives in the event loop of prepare(), got a call from another; use RolloutCoordinator.get_local"
    )


def _check_kind(have: str, want: str, batch_id: BatchId) -> None:
    if have != want:
        raise ValueError(f"batch_id: {batch_id!r} is of an {have} batch; call finalize_{have}_batch")


def _aborted(batch: BatchRecord, reason: str) -> BatchAborted:
    return BatchAborted(f"batch {batch.id!r}: was aborted: {reason}", reason)


def _lengths_of(config: Config) -> dict[str, int] | None:
    """The greatest lengths that a given buffer has room for, if its space is ours."""
    rows = getattr(getattr(config.sink, "inner_storage", None), "rows", None)
    return dict(rows.layout.max_lengths) if rows is not None else None
