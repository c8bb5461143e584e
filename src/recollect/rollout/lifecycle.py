"""Opening and closing: what `prepare` starts, and in which order `shutdown` ends it."""

from __future__ import annotations

import asyncio
import threading
import time
from contextlib import AsyncExitStack
from pathlib import Path

from recollect.errors import ClosedError
from recollect.rollout.admission import withdraw
from recollect.rollout.clock import LoopClock
from recollect.rollout.cutting import count_doors
from recollect.rollout.desk import Desk
from recollect.rollout.ending import end, forget, raise_in
from recollect.rollout.events import Hub
from recollect.rollout.execute import Lag
from recollect.rollout.models.pool import ModelPool
from recollect.rollout.observe import Observer, Trace
from recollect.rollout.passing import stop_passes
from recollect.rollout.pipeline import Pipeline
from recollect.rollout.reports import Reports
from recollect.rollout.runners.base import Surroundings
from recollect.rollout.runners.make import make_pool
from recollect.rollout.scheduler import Scheduler
from recollect.rollout.sinks import QueueSink, make_sink
from recollect.rollout.state import BatchLifecycleState
from recollect.rollout.threads import Threads

GROUPS_PER_MS = 2**20


async def start(desk: Desk) -> None:
    """Open journal and sink and start the runners; a failure undoes everything."""
    _lay_out(desk)
    had_sink = desk.sink is not None
    try:
        if desk.config.journal is not None:
            from recollect.rollout.journal import Journal

            path = str(desk.config.journal)
            desk.journal = await Journal.open(path, desk.config, desk.plan.layout.hash)
        _set_counters(desk)
        _open_sink(desk)
        await _start_runners(desk)
    except BaseException:
        if not had_sink and desk.sink is not None:
            if desk.sink_is_ours:
                desk.sink.close()
            desk.sink = None
        if desk.journal is not None:
            await desk.journal.close()
        desk.threads.close()
        raise
    desk.is_open = True
    desk.scheduler.is_paused = False  # only now: which batch goes first is known when all are back
    desk.scheduler.dispatch()


def _lay_out(desk: Desk) -> None:
    config = desk.config
    desk.loop, desk.thread = asyncio.get_running_loop(), threading.get_ident()
    desk.clock = desk.given_clock or LoopClock(desk.loop)
    desk.threads = Threads(desk.loop, config.name)
    desk.hub, desk.lag, desk.journal = Hub(), Lag(), None
    trace = None if config.trace is None else Trace(Path(config.trace))
    desk.observer = Observer(desk.clock, desk.hub, trace)
    desk.models = ModelPool(
        desk.rollout_models, desk.auxiliary_models, config.auxiliary_names, desk.clock.time,
        config.retry_backoff_max_s,
    )  # fmt: skip
    desk.scheduler = Scheduler(config, desk.clock, Reports(desk), desk.observer)
    desk.scheduler.version = desk.models.version if desk.rollout_models else lambda: desk.version


def _set_counters(desk: Desk) -> None:
    desk.version = max(desk.version, desk.models.version())
    if desk.first_version is None:
        desk.first_version = desk.version
    # No group id is used twice, by this process or one before it.
    desk.next_group = max(desk.next_group, int(time.time() * 1000) * GROUPS_PER_MS)


def _open_sink(desk: Desk) -> None:
    if isinstance(desk.sink, QueueSink) and desk.sink_is_ours:
        desk.sink.reopen()
    elif desk.sink is None or desk.sink_is_ours:
        desk.sink, desk.sink_is_ours = make_sink(desk.config.sink, desk.plan)
    desk.pipeline = Pipeline(desk.config, desk.plan, desk.sink, desk.threads, desk.clock)


async def _start_runners(desk: Desk) -> None:
    """Start them, and bring back the work that a journal has for them."""
    tell = desk.observer.model_call if desk.observer.trace is not None else None
    around = Surroundings(
        desk.scheduler, desk.config, desk.models, desk.plan, desk.threads, desk.lag, desk.clock, tell
    )
    pool = desk.scheduler.pool = make_pool(around)
    try:
        await pool.start()
        if desk.journal is not None:
            from recollect.rollout.reviving import restore

            restore(desk, desk.journal)
    except BaseException:
        await pool.close()
        raise


async def stop(desk: Desk) -> None:
    """Wake every waiter with ClosedError, stop all work, and close what the config made.

    Each step is taken, also where one before it raised or was cancelled.
    """
    scheduler = desk.scheduler
    async with AsyncExitStack() as steps:  # the last one first
        steps.callback(desk.threads.close)
        if desk.observer.trace is not None:
            steps.callback(desk.observer.trace.close)
        if desk.sink_is_ours and desk.sink is not None:
            steps.callback(desk.sink.close)
        if desk.journal is not None:
            steps.push_async_callback(desk.journal.close)
        steps.push_async_callback(_stop_work, desk)
        steps.push_async_callback(stop_passes, desk)
        desk.is_open = False
        closed = ClosedError("coordinator: was shut down; call prepare() to start again")
        for sub in list(desk.waiting):
            withdraw(desk, sub, closed)
        for batch in list(desk.batches.values()):
            raise_in(batch, closed)
        desk.hub.close()
        scheduler.is_paused = True
        if desk.journal is not None and scheduler.attempts:
            await _drain(scheduler, desk.config.drain_s)


async def _drain(scheduler: Scheduler, seconds: float) -> None:
    """With a journal, what runs may finish into it."""
    waiting = asyncio.ensure_future(scheduler.stopped(list(scheduler.attempts.values())))
    await asyncio.wait([waiting], timeout=seconds)
    waiting.cancel()


async def _stop_work(desk: Desk) -> None:
    scheduler = desk.scheduler
    live = [*desk.batches.values(), *desk.carriers]
    running = [attempt for batch in live for attempt in scheduler.drop_work(batch)]
    running += [attempt for attempt in scheduler.attempts.values() if attempt not in running]
    for batch in list(desk.batches.values()):
        if desk.journal is None:
            end(desk, batch, BatchLifecycleState.ABORTED, reason="shutdown")
        else:
            forget(desk, batch)
    for carrier in desk.carriers:
        if desk.journal is None:
            count_doors(desk.doors, carrier, delivered=False)
        else:
            desk.doors.submitted -= carrier.n_runs  # live again after the next prepare
        scheduler.stage_bytes(carrier, -carrier.staged_nbytes)
    desk.carriers.clear()
    stopping = asyncio.ensure_future(scheduler.stopped(running))
    try:
        await asyncio.wait([stopping], timeout=desk.config.cancel_grace_s + 1)
    finally:
        scheduler.kill_all()
        try:
            await scheduler.pool.close()
        finally:
            scheduler.deadlines.close()
            stopping.cancel()
