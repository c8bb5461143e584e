"""One attempt, wherever it runs: call the workflow for each of its runs and say how each ended.

Shared by the coordinator's own loop and by runners in other processes, so that all kinds behave alike.
"""

from __future__ import annotations

import asyncio
import math
import time
import types
from collections.abc import Callable, Generator
from contextlib import suppress
from contextvars import copy_context
from typing import Any

import msgspec

from recollect.errors import SchemaError
from recollect.rollout.batch.state import BatchId
from recollect.rollout.experience.experience import Experience
from recollect.rollout.experience.payload import encode
from recollect.rollout.experience.space import Plan
from recollect.rollout.models.replicas import Models
from recollect.rollout.tasks import GiveUp, Result, Work, Workflow, as_result
from recollect.rollout.threads import Threads
from recollect.text import safe, told

TRACEBACK_CHARS = 8_000


class Job(msgspec.Struct, array_like=True):
    """An attempt as it is sent to a runner."""

    attempt_id: int
    workflow: str
    data: bytes  # msgpack of (data, args)
    repeat_times: int
    task_id: BatchId
    batch_id: BatchId
    is_eval: bool
    run_ids: tuple[int, ...]
    number: int
    seeds: tuple[int, ...]
    group_id: int
    version: int
    rollout: int = -1  # the rollout replica chosen for it


class Outcome(msgspec.Struct, array_like=True):
    """How a run ended."""

    run_id: int
    ok: bool
    seconds: float
    metrics: dict[str, float] = {}
    bad_metrics: int = 0
    payload: bytes | None = None
    n: int = 0
    reward: float | None = None
    response_length: int | None = None
    version: int = 0
    error: str = ""
    final: bool = False  # another attempt would not help


class Lag:
    """The longest time that a step of a workflow kept the loop, and which workflow that was."""

    __slots__ = ("name", "seconds")

    def __init__(self) -> None:
        self.seconds, self.name = 0.0, ""


Report = Callable[[Outcome], None]
_decode_data = msgspec.msgpack.Decoder().decode
EMPTY_DATA = msgspec.msgpack.encode(({}, {}))


async def execute(
    job: Job, flow: Workflow, models: Models, plan: Plan, threads: Threads, lag: Lag, report: Report
) -> None:
    """Run all runs of the attempt, one after another, or at once if the workflow is grouped."""
    if flow.grouped:
        await _execute_group(job, flow, models, plan, threads, lag, report)
        return
    for run_id, seed in zip(job.run_ids, job.seeds):
        start = time.perf_counter()
        models.versions.clear()
        work = _work(job, run_id, (run_id,), seed, (seed,))
        try:
            if flow.is_async:
                returned = await _timed(flow.function(work, models), lag, flow.name)
            else:
                returned = await _call(flow, work, models, threads, lag)
            outcome = _outcome(job, run_id, returned, models, plan)
        except Exception as error:
            outcome = failure(run_id, error)
        except SystemExit as error:
            outcome = failure(run_id, error)
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            outcome = failure(run_id, error)  # the workflow's own doing
        outcome.seconds = time.perf_counter() - start
        report(outcome)


async def _execute_group(
    job: Job, flow: Workflow, models: Models, plan: Plan, threads: Threads, lag: Lag, report: Report
) -> None:
    start = time.perf_counter()
    work = _work(job, job.run_ids[0], job.run_ids, job.seeds[0], job.seeds)
    try:
        returned = await _call(flow, work, models, threads, lag)
        if not isinstance(returned, list | tuple) or len(returned) != len(job.run_ids):
            raise TypeError(
                f"workflow {flow.name}: must return one result per run, {len(job.run_ids)}, got "
                f"{len(returned) if isinstance(returned, list | tuple) else type(returned).__name__}"
            )
        outcomes = []
        for run_id, one in zip(job.run_ids, returned):
            try:
                outcomes.append(_outcome(job, run_id, one, models, plan))
            except Exception as error:
                outcomes.append(failure(run_id, error))
    except (Exception, SystemExit) as error:
        outcomes = [failure(run_id, error) for run_id in job.run_ids]
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        outcomes = [failure(run_id, error) for run_id in job.run_ids]
    seconds = (time.perf_counter() - start) / len(job.run_ids)
    for outcome in outcomes:
        outcome.seconds = seconds
        report(outcome)


def _work(job: Job, run_id: int, run_ids: tuple[int, ...], seed: int, seeds: tuple[int, ...]) -> Work:
    data, args = ({}, {}) if job.data == EMPTY_DATA else _decode_data(job.data)
    return Work(
        workflow=job.workflow, data=data, args=args, repeat_times=job.repeat_times, task_id=job.task_id,
        batch_id=job.batch_id, is_eval=job.is_eval, run_id=run_id, run_ids=run_ids, attempt=job.number, seed=seed,
        seeds=seeds,
    )  # fmt: skip


async def _call(flow: Workflow, work: Work, models: Models, threads: Threads, lag: Lag) -> Any:
    if flow.is_async:
        return await _timed(flow.function(work, models), lag, flow.name)
    models.loop = asyncio.get_running_loop()
    return await threads.call(flow.function, work, models)


@types.coroutine
def _timed(coroutine: Any, lag: Lag, name: str) -> Generator[Any, Any, Any]:
    """Drive a coroutine step by step, in a context of its own; one that blocks the loop is known by name."""
    clock, run = time.perf_counter, copy_context().run
    send, throw = coroutine.send, coroutine.throw
    value: Any = None
    error: BaseException | None = None
    while True:
        start = clock()
        try:
            if error is None:
                waits_on = run(send, value)
            else:
                given, error = error, None
                waits_on = run(throw, given)
        except StopIteration as stop:
            return stop.value
        finally:
            spent = clock() - start
            if spent > lag.seconds:
                lag.seconds, lag.name = spent, name
        try:
            value = yield waits_on
        except BaseException as raised:
            error = raised


def failure(run_id: int, error: BaseException) -> Outcome:
    """Return the outcome of a run that raised; GiveUp and a value off its space are final."""
    text = told(error)
    if len(text) > TRACEBACK_CHARS:
        text = text[:2_000] + "\n...\n" + text[-TRACEBACK_CHARS + 2_000 :]
    return Outcome(run_id, False, 0.0, error=text, final=isinstance(error, GiveUp | SchemaError))


def _outcome(job: Job, run_id: int, returned: Any, models: Models, plan: Plan) -> Outcome:
    result = as_result(returned)
    rows: list[Experience] = result.experiences
    metrics, bad = _metrics(result, rows)
    if job.is_eval:
        if not rows and not result.metrics and bad == 0:
            raise ValueError("workflow: must return metrics or experience in eval, got nothing")
        outcome = Outcome(run_id, True, 0.0, metrics, bad)
        if rows:
            _about(outcome, rows)
        return outcome
    if not rows:
        raise ValueError(
            "workflow: must return experience in train, got nothing; raise rr.GiveUp to fail the run"
        )
    versions = models.versions
    oldest = min(versions) if versions else job.version
    payload = encode(
        rows, space=plan, batch_id=job.batch_id, task_id=job.task_id, group_id=job.group_id, run_id=run_id,
        attempt=job.number, model_version=oldest, version_drift=(max(versions) - oldest) if versions else 0,
    )  # fmt: skip
    outcome = Outcome(run_id, True, 0.0, metrics, bad, payload, len(rows))
    outcome.version = min(int(row.leaves.get("model_version", oldest)) for row in rows)
    _about(outcome, rows)
    return outcome


def _about(outcome: Outcome, rows: list[Experience]) -> None:
    """The run's last reward and the length of its responses, where it has them."""
    reward = rows[-1].leaves.get("reward")
    if reward is not None and math.isfinite(float(reward)):
        outcome.reward = float(reward)
    lengths = [len(row.leaves["tokens"]) - int(row.leaves.get("prompt_length", 0)) for row in rows
               if row.leaves.get("tokens") is not None]  # fmt: skip
    if lengths:
        outcome.response_length = sum(lengths)


def _metrics(result: Result, rows: list[Experience]) -> tuple[dict[str, float], int]:
    """The run's numbers; of its experiences' own, the mean over steps. What is no finite number is counted."""
    metrics: dict[str, float] = {}
    bad = 0
    given = {**_means(rows), **result.metrics} if rows else result.metrics
    for name, value in given.items():
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if math.isfinite(number):
            metrics[safe(str(name))] = number
        else:
            bad += 1
    return metrics, bad


def _means(rows: list[Experience]) -> dict[str, float]:
    given: dict[str, list[Any]] = {}
    for row in rows:
        for name, value in row.metrics.items():
            given.setdefault(name, []).append(value)
    means = dict.fromkeys(given, math.nan)
    for name, values in given.items():
        with suppress(TypeError, ValueError, OverflowError):
            means[name] = math.fsum(map(float, values)) / len(values)
    return means
