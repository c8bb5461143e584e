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
from recollect.rollout.event_loop import Threads
from recollect.rollout.experience.experience import Experience
from recollect.rollout.experience.payload import encode
from recollect.rollout.experience.space import ExperiencePlan
from recollect.rollout.models.replicas import Models
from recollect.rollout.tasks import AttemptSpec, GiveUp, Result, RunOutcome, Work, Workflow, as_result
from recollect.text import safe, told

TRACEBACK_CHARS = 8_000


class LoopLag:
    """The longest time that a step of a workflow kept the loop, and which workflow that was."""

    __slots__ = ("name", "seconds")

    def __init__(self) -> None:
        self.seconds, self.name = 0.0, ""


Report = Callable[[RunOutcome], None]
_decode_data = msgspec.msgpack.Decoder().decode
EMPTY_DATA = msgspec.msgpack.encode(({}, {}))


async def execute(
    spec: AttemptSpec,
    flow: Workflow,
    models: Models,
    plan: ExperiencePlan,
    threads: Threads,
    lag: LoopLag,
    report: Report,
) -> None:
    """Run all runs of the attempt, one after another, or at once if the workflow is grouped."""
    if flow.grouped:
        await _execute_group(spec, flow, models, plan, threads, lag, report)
        return
    for run_id, seed in zip(spec.run_ids, spec.seeds):
        start = time.perf_counter()
        models.versions.clear()
        work = _work(spec, run_id, (run_id,), seed, (seed,))
        try:
            if flow.is_async:
                returned = await _timed(flow.function(work, models), lag, flow.name)
            else:
                returned = await _call(flow, work, models, threads, lag)
            outcome = _outcome(spec, run_id, returned, models, plan)
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
    spec: AttemptSpec,
    flow: Workflow,
    models: Models,
    plan: ExperiencePlan,
    threads: Threads,
    lag: LoopLag,
    report: Report,
) -> None:
    start = time.perf_counter()
    work = _work(spec, spec.run_ids[0], spec.run_ids, spec.seeds[0], spec.seeds)
    try:
        returned = await _call(flow, work, models, threads, lag)
        if not isinstance(returned, list | tuple) or len(returned) != len(spec.run_ids):
            raise TypeError(
                f"workflow {flow.name}: must return one result per run, {len(spec.run_ids)}, got "
                f"{len(returned) if isinstance(returned, list | tuple) else type(returned).__name__}"
            )
        outcomes = []
        for run_id, one in zip(spec.run_ids, returned):
            try:
                outcomes.append(_outcome(spec, run_id, one, models, plan))
            except Exception as error:
                outcomes.append(failure(run_id, error))
    except (Exception, SystemExit) as error:
        outcomes = [failure(run_id, error) for run_id in spec.run_ids]
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        outcomes = [failure(run_id, error) for run_id in spec.run_ids]
    seconds = (time.perf_counter() - start) / len(spec.run_ids)
    for outcome in outcomes:
        outcome.seconds = seconds
        report(outcome)


def _work(
    spec: AttemptSpec, run_id: int, run_ids: tuple[int, ...], seed: int, seeds: tuple[int, ...]
) -> Work:
    data, args = ({}, {}) if spec.data == EMPTY_DATA else _decode_data(spec.data)
    return Work(
        workflow=spec.workflow, data=data, args=args, repeat_times=spec.repeat_times, task_id=spec.task_id,
        batch_id=spec.batch_id, is_eval=spec.is_eval, run_id=run_id, run_ids=run_ids, attempt=spec.number, seed=seed,
        seeds=seeds,
    )  # fmt: skip


async def _call(flow: Workflow, work: Work, models: Models, threads: Threads, lag: LoopLag) -> Any:
    if flow.is_async:
        return await _timed(flow.function(work, models), lag, flow.name)
    models.loop = asyncio.get_running_loop()
    return await threads.call(flow.function, work, models)


@types.coroutine
def _timed(coroutine: Any, lag: LoopLag, name: str) -> Generator[Any, Any, Any]:
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


def failure(run_id: int, error: BaseException) -> RunOutcome:
    """Return the outcome of a run that raised; GiveUp and a value off its space are final."""
    text = told(error)
    if len(text) > TRACEBACK_CHARS:
        text = text[:2_000] + "\n...\n" + text[-TRACEBACK_CHARS + 2_000 :]
    return RunOutcome(run_id, False, 0.0, error=text, final=isinstance(error, GiveUp | SchemaError))


def _outcome(
    spec: AttemptSpec, run_id: int, returned: Any, models: Models, plan: ExperiencePlan
) -> RunOutcome:
    result = as_result(returned)
    rows: list[Experience] = result.experiences
    metrics, bad = _metrics(result, rows)
    if spec.is_eval:
        if not rows and not result.metrics and bad == 0:
            raise ValueError("workflow: must return metrics or experience in eval, got nothing")
        outcome = RunOutcome(run_id, True, 0.0, metrics, bad)
        if rows:
            _about(outcome, rows)
        return outcome
    if not rows:
        raise ValueError(
            "workflow: must return experience in train, got nothing; raise rr.GiveUp to fail the run"
        )
    versions = models.versions
    oldest = min(versions) if versions else spec.version
    payload = encode(
        rows, space=plan, batch_id=spec.batch_id, task_id=spec.task_id, group_id=spec.group_id, run_id=run_id,
        attempt=spec.number, model_version=oldest, version_drift=(max(versions) - oldest) if versions else 0,
    )  # fmt: skip
    outcome = RunOutcome(run_id, True, 0.0, metrics, bad, payload, len(rows))
    outcome.version = min(int(row.leaves.get("model_version", oldest)) for row in rows)
    _about(outcome, rows)
    return outcome


def _about(outcome: RunOutcome, rows: list[Experience]) -> None:
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
