"""RolloutCoordinator: batches of tasks in, experience out, with every outcome accounted for.

The steps of a batch's life are functions in `batch/`; this module has the public calls, and starts and stops what the
steps work with. All of it lives in one event loop; what may block runs in threads and comes back as a future.
"""

from __future__ import annotations

import asyncio
import threading
import time
import warnings
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any, Self

from recollect.errors import ClosedError, FormatError, class_name
from recollect.rollout.batch import abort, finalize, submit
from recollect.rollout.batch.deliver import pass_payloads, stop_passes
from recollect.rollout.batch.end import count_doors, end, forget, tell_finalizers
from recollect.rollout.batch.finalize import Waiting, why_waiting
from recollect.rollout.batch.state import BatchId, BatchLifecycleState, BatchState, BatchType, check_id
from recollect.rollout.config import Config
from recollect.rollout.context import RolloutContext
from recollect.rollout.event_loop import Clock, LoopClock, Threads
from recollect.rollout.events import Event, EventHub, Observer, RolloutTrace
from recollect.rollout.experience.payload import decode
from recollect.rollout.experience.pipeline import Pipeline
from recollect.rollout.experience.sinks import QueueSink, ReplaySink, is_queue, make_sink
from recollect.rollout.experience.space import ExperiencePlan
from recollect.rollout.models.replicas import ModelPool
from recollect.rollout.runners.base import RunnerContext, make_pool
from recollect.rollout.runners.execute import LoopLag
from recollect.rollout.scheduler import Scheduler
from recollect.rollout.stats import Stats
from recollect.rollout.tasks import Task

GROUPS_PER_MS = 2**20  # ids of groups that a coordinator may use in a millisecond


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
            raise TypeError(f"config: must be a rr.Config, got {class_name(config)}")
        _check_list("rollout_model", rollout_model, "models", "pass [model], or [] for none")
        if auxiliary_models is not None:
            _check_list("auxiliary_models", auxiliary_models, "lists of models", "pass a list for each role")
            for number, models in enumerate(auxiliary_models):
                _check_list(f"auxiliary_models[{number}]", models, "models", "pass a list for each role")
        auxiliary = [list(models) for models in auxiliary_models or ()]
        if len(config.auxiliary_names) > len(auxiliary):
            raise ValueError(
                f"auxiliary_names: must name lists of auxiliary_models, got {len(config.auxiliary_names)} names "
                f"for {len(auxiliary)} lists"
            )
        if any(not models for models in auxiliary):
            raise ValueError("auxiliary_models: each role must have at least one model, got an empty list")
        if config.journal is not None and is_queue(config.sink):
            warnings.warn(
                "sink: must outlive the process where there is a journal, got a queue, whose rows are gone once it is "
                'killed, though their batch is recorded as finalized; use sink={"kind": "file", "path": ...}, or '
                '{"kind": "replay", "storage": "memmap", ...}', RuntimeWarning, stacklevel=2,
            )  # fmt: skip
        self._context = RolloutContext(config, rollout_model, auxiliary, clock)
        self._starting: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None

    # -- starting and stopping

    async def prepare(self) -> None:
        """Open journal and sink and start the runners; does nothing while it is running."""
        if self._closing is not None:
            await asyncio.shield(self._closing)
        if self._context.is_open:
            self._check()
            return
        loop = asyncio.get_running_loop()
        if self._starting is None:
            self._starting = loop.create_task(_start(self._context))
            self._starting.add_done_callback(self._started)
        elif self._starting.get_loop() is not loop:
            raise _wrong_loop()
        await asyncio.shield(self._starting)

    def _started(self, starting: asyncio.Task[None]) -> None:
        self._starting = None
        if not starting.cancelled():
            starting.exception()  # its callers may all have been cancelled

    async def shutdown(self) -> None:
        """Wake every waiter with ClosedError, stop all work, and close what the config made."""
        if self._starting is not None:
            await asyncio.wait([self._starting])
        if not self._context.is_open and self._closing is None:
            return
        if self._closing is None:
            self._check()
            self._closing = self._context.loop.create_task(_stop(self._context))
            self._closing.add_done_callback(self._stopped)
        closing = self._closing
        try:
            await asyncio.shield(closing)
        except asyncio.CancelledError:
            if (
                not closing.done()
            ):  # asyncio.run would cancel it next, at Ctrl-C, and the journal would stay locked
                await asyncio.wait([closing])
            raise

    def _stopped(self, closing: asyncio.Task[None]) -> None:
        self._closing = None
        if not closing.cancelled():
            closing.exception()  # nobody may be left to hear of it

    async def __aenter__(self) -> Self:
        try:
            await self.prepare()
        except asyncio.CancelledError:
            await self.shutdown()
            raise
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.shutdown()

    def _check(self) -> RolloutContext:
        """Return the context if it is open and the call comes from its loop."""
        context = self._context
        if not context.is_open:
            raise ClosedError(
                "coordinator: must be prepared, got a call before prepare() or after shutdown()"
            )
        try:
            here = asyncio.get_running_loop()
        except RuntimeError:
            here = None
        if here is not context.loop and (here is not None or threading.get_ident() != context.thread):
            raise _wrong_loop()
        return context

    # -- batches

    async def submit_batch(
        self,
        *,
        batch_id: BatchId,
        tasks: list[Task],
        batch_type: BatchType,
        min_wait_num: int | None = None,
        priority: int | None = None,
    ) -> None:
        """Register a batch and return once it is admitted; a refused one leaves no trace.

        With a journal it is recorded then. OSError: it could not be, and it was aborted; it may be submitted again.
        """
        context = self._check()
        batch = await submit.submit(context, batch_id, tasks, batch_type, min_wait_num, priority)
        await abort.abort_unless_recorded(context, batch)

    async def finalize_train_batch(
        self, batch_id: int | str, *, timeout: float | None = None, below_min: str | None = None
    ) -> dict[str, Any]:
        """Wait for a train batch, deliver it, and return its counts and metrics."""
        return await finalize.finalize(self._check(), batch_id, "train", timeout, below_min)

    async def finalize_eval_batch(
        self, batch_id: int | str, *, timeout: float | None = None, below_min: str | None = None
    ) -> dict[str, Any]:
        """Wait for an eval batch and return its counts and metrics."""
        return await finalize.finalize(self._check(), batch_id, "eval", timeout, below_min)

    async def abort_batch(
        self, batch_id: BatchId, *, reason: str, keep_partial_results: bool = False
    ) -> None:
        """Stop a batch; with `keep_partial_results` the good tasks finished by now are delivered first."""
        context = self._check()
        check_id(batch_id)
        if type(reason) is not str or not reason:
            raise ValueError(f"reason: must be a non-empty str, got {reason!r}")
        submit.forget_cancelled(context)
        batch = context.batches.get(batch_id)
        if batch is not None:
            await abort.abort(context, batch, reason, keep_partial_results)

    # -- weights

    async def sync_weights(self, version: int | None = None) -> int:
        """Load the newest weights into all rollout models; return the lowest version they serve."""
        context = self._check()
        if version is not None:
            if isinstance(version, bool) or not isinstance(version, int):
                raise TypeError(f"version: must be an int or None, got {version!r}")
            if version < context.version:
                raise ValueError(f"version: must not go back from {context.version}, got {version}")
        lowest = context.version + 1 if version is None else version
        if context.rollout_models:
            found = await asyncio.gather(*[model.sync(version) for model in context.rollout_models])
            lowest = min(map(int, found))
        if lowest < context.version:
            raise ValueError(
                f"version: must not go back from {context.version}, got {lowest} from a model's sync"
            )
        context.version = lowest
        context.scheduler.pool.synced()
        context.observer.event_of("synced", detail=f"version {lowest}")
        submit.admit(context)
        return lowest

    @property
    def model_version(self) -> int:
        """The lowest version that the rollout models serve."""
        return self._context.version

    # -- other code's payloads

    async def process_experiences(self, payloads: list[bytes]) -> dict[str, float]:
        """Run payloads of other code through one pass; all are checked before any is used."""
        context = self._check()
        if not payloads:
            return {}
        given = list(payloads)
        try:
            await context.threads.call(_check_payloads, given, context.plan)
        except FormatError:
            context.payloads_refused += 1
            raise
        return await pass_payloads(self._check(), given)

    # -- seeing

    @property
    def config(self) -> Config:
        """What it was told."""
        return self._context.config

    @property
    def sink(self) -> Any:
        """Where experience goes: the queue, the file sink, the given sink, or the given buffer."""
        sink = self._context.sink
        return sink.buffer if isinstance(sink, ReplaySink) else sink

    def batches(self) -> list[BatchId]:
        """The ids of live batches, in the order of submission."""
        return list(self._check().batches)

    def batch_state(self, batch_id: BatchId) -> BatchState:
        """Return a copy of what is known of a live or remembered batch."""
        check_id(batch_id)
        return self._context.state_of(batch_id)

    def why_waiting(self, batch_id: BatchId) -> Waiting | None:
        """Say why a batch is not done; None when it is done or unknown."""
        context = self._check()
        batch = context.batches.get(batch_id)
        if batch is None:
            return None
        return why_waiting(
            batch, context.scheduler, context.pipeline.stage_of(batch.commit_id), context.clock.time()
        )

    def stats(self) -> Stats:
        """Return one moment: doors, attempts, runners, queue, bytes, models."""
        return self._check().stats()

    def events(self, batch_id: BatchId | None = None) -> AsyncIterator[Event]:
        """Iterate over what happens from now on, of one batch or of all."""
        return self._check().hub.listen(batch_id)

    # -- other places

    @classmethod
    def get_actor(cls, config: Config, models: list[Any], auxiliary_models: list[Any]) -> Any:
        """Return the Ray actor `config.name` of this namespace, or make it."""
        from recollect.rollout.handles import get_actor

        return get_actor(cls, config, models, auxiliary_models)

    @classmethod
    def get_local(cls, config: Config, models: list[Any], auxiliary_models: list[Any] | None = None) -> Any:
        """Return the same in a thread of its own: `h.submit_batch(...)` blocks, `.remote(...)` can be awaited."""
        from recollect.rollout.handles import LocalHandle

        return LocalHandle(cls, config, models, auxiliary_models)


# -- what `prepare` starts, and in which order `shutdown` ends it


async def _start(context: RolloutContext) -> None:
    """Open journal and sink and start the runners; a failure undoes everything."""
    _set_up(context)
    had_sink = context.sink is not None
    try:
        if context.config.journal is not None:
            from recollect.rollout.journal.journal import Journal

            path = str(context.config.journal)
            context.journal = await Journal.open(path, context.config, context.plan.layout.hash)
        context.scheduler = _scheduler(context)
        _set_counters(context)
        _open_sink(context)
        await _start_runners(context)
    except BaseException:
        if not had_sink and context.sink is not None:
            if context.sink_is_ours:
                context.sink.close()
            context.sink = None
        if context.journal is not None:
            await context.journal.close()
        context.threads.close()
        raise
    context.is_open = True
    context.scheduler.is_paused = False  # only now: which batch goes first is known when all are back
    context.scheduler.dispatch()


def _set_up(context: RolloutContext) -> None:
    config = context.config
    context.loop, context.thread = asyncio.get_running_loop(), threading.get_ident()
    context.clock = context.given_clock or LoopClock(context.loop)
    context.threads = Threads(context.loop, config.name)
    context.hub, context.lag, context.journal = EventHub(), LoopLag(), None
    trace = None if config.trace is None else RolloutTrace(Path(config.trace))
    context.observer = Observer(context.clock, context.hub, trace)
    context.models = ModelPool(
        context.rollout_models, context.auxiliary_models, config.auxiliary_names, context.clock.time,
        config.retry_backoff_max_s,
    )  # fmt: skip


def _scheduler(context: RolloutContext) -> Scheduler:
    return Scheduler(
        context.config, context.clock, context.observer, context.journal,
        version=context.models.version if context.rollout_models else lambda: context.version,
        task_ended=partial(finalize.task_ended, context), room_made=partial(submit.room_made, context),
        runners_broken=partial(finalize.runners_broken, context),
    )  # fmt: skip


def _set_counters(context: RolloutContext) -> None:
    context.version = max(context.version, context.models.version())
    if context.first_version is None:
        context.first_version = context.version
    # No group id is used twice, by this process or one before it.
    context.next_group = max(context.next_group, int(time.time() * 1000) * GROUPS_PER_MS)


def _open_sink(context: RolloutContext) -> None:
    if isinstance(context.sink, QueueSink) and context.sink_is_ours:
        context.sink.reopen()
    elif context.sink is None or context.sink_is_ours:
        context.sink, context.sink_is_ours = make_sink(context.config.sink, context.plan)
    context.pipeline = Pipeline(context.config, context.plan, context.sink, context.threads, context.clock)


async def _start_runners(context: RolloutContext) -> None:
    """Start them, and bring back the work that a journal has for them."""
    tell = context.observer.model_call if context.observer.trace is not None else None
    for_runners = RunnerContext(
        context.scheduler,
        context.config,
        context.models,
        context.plan,
        context.threads,
        context.lag,
        context.clock,
        tell,
    )
    pool = context.scheduler.pool = make_pool(for_runners)
    try:
        await pool.start()
        if context.journal is not None:
            from recollect.rollout.journal.restore import restore

            restore(context, context.journal)
    except BaseException:
        await pool.close()
        raise


async def _stop(context: RolloutContext) -> None:
    """Wake every waiter with ClosedError, stop all work, and close what the config made.

    Each step is taken, also where one before it raised or was cancelled.
    """
    scheduler = context.scheduler
    async with AsyncExitStack() as steps:  # the last one first
        steps.callback(context.threads.close)
        if context.observer.trace is not None:
            steps.callback(context.observer.trace.close)
        if context.sink_is_ours and context.sink is not None:
            steps.callback(context.sink.close)
        if context.journal is not None:
            steps.push_async_callback(context.journal.close)
        steps.push_async_callback(_stop_work, context)
        steps.push_async_callback(stop_passes, context)
        context.is_open = False
        closed = ClosedError("coordinator: was shut down; call prepare() to start again")
        for sub in list(context.waiting):
            submit.withdraw(context, sub, closed)
        for batch in list(context.batches.values()):
            tell_finalizers(batch, closed)
        context.hub.close()
        scheduler.is_paused = True
        if context.journal is not None and scheduler.attempts:
            await _drain(scheduler, context.config.drain_s)


async def _drain(scheduler: Scheduler, seconds: float) -> None:
    """With a journal, what runs may finish into it."""
    waiting = asyncio.ensure_future(scheduler.stopped(list(scheduler.attempts.values())))
    await asyncio.wait([waiting], timeout=seconds)
    waiting.cancel()


async def _stop_work(context: RolloutContext) -> None:
    scheduler = context.scheduler
    live = [*context.batches.values(), *context.carriers]
    running = [attempt for batch in live for attempt in scheduler.drop_work(batch)]
    running += [attempt for attempt in scheduler.attempts.values() if attempt not in running]
    for batch in list(context.batches.values()):
        if context.journal is None:
            end(context, batch, BatchLifecycleState.ABORTED, reason="shutdown")
        else:
            forget(context, batch)
    for carrier in context.carriers:
        if context.journal is None:
            count_doors(context.doors, carrier, delivered=False)
        else:
            context.doors.submitted -= carrier.n_runs  # live again after the next prepare
        scheduler.stage_bytes(carrier, -carrier.staged_nbytes)
    context.carriers.clear()
    stopping = asyncio.ensure_future(scheduler.stopped(running))
    try:
        await asyncio.wait([stopping], timeout=context.config.cancel_grace_s + 1)
    finally:
        scheduler.kill_all()
        try:
            await scheduler.pool.close()
        finally:
            scheduler.deadlines.close()
            stopping.cancel()


# -- checks


def _check_list(name: str, given: Any, what: str, remedy: str) -> None:
    if not isinstance(given, list | tuple):
        raise TypeError(f"{name}: must be a list of {what}, got {class_name(given)}; {remedy}")


def _wrong_loop() -> RuntimeError:
    return RuntimeError(
        "coordinator: lives in the event loop of prepare(), got a call from another; use RolloutCoordinator.get_local"
    )


def _check_payloads(payloads: list[bytes], plan: ExperiencePlan) -> None:
    for position, payload in enumerate(payloads):
        try:
            decode(payload, space=plan)
        except (FormatError, TypeError) as error:
            raise FormatError(f"payloads[{position}]: {error}") from None
