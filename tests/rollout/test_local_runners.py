"""Runners in the coordinator's loop: turns, contexts, and fences for code that ignores its cancel."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import gc
import threading
from typing import Any

import pytest
from tests.rollout.make import check_doors, coordinator, experience, good, pool_context, run, settle

import recollect.rollout as rr
from recollect.errors import (
    ClosedError,
)
from recollect.rollout.runners.execute import EMPTY_DATA
from recollect.rollout.runners.local import LocalPool
from recollect.rollout.tasks import AttemptSpec, Workflow

LAST_TASK: contextvars.ContextVar[Any] = contextvars.ContextVar("LAST_TASK", default=None)


def test_fenced_runners_stop_the_work_and_are_named() -> None:
    release = threading.Event()

    def stuck(task: Any, models: Any) -> Any:
        release.wait(20)
        return experience()

    async def main() -> None:
        async with coordinator(runners=1, attempt_timeout_s=5.0, cancel_grace_s=1.0) as c:
            await c.submit_batch(batch_id=1, tasks=[rr.Task(stuck), rr.Task(good)], batch_type="train")
            await settle(c)
            c.clock.advance(5.0)
            await settle(c)
            c.clock.advance(1.0)
            await settle(c)
            assert 'runner="process"' in str(c.why_waiting(1)) and c.stats().runners.free == 0
            release.set()
            result = await c.finalize_train_batch(1, timeout=20)
            assert (result["ok_task_count"], result["failed_task_count"]) == (1, 1)
            check_doors(c)

    run(main())


def test_a_fenced_attempts_next_model_call_raises() -> None:
    caught: list[BaseException] = []

    async def stubborn(task: Any, models: Any) -> Any:
        future = asyncio.get_running_loop().create_future()
        held.append(future)
        while not future.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.shield(future)
        try:
            await models.rollout.generate("x")
        except BaseException as error:
            caught.append(error)
            raise

    held: list[Any] = []

    async def main() -> None:
        model = rr.ScriptedModel(["y"])
        async with coordinator(models=[model], attempt_timeout_s=5.0, cancel_grace_s=1.0) as c:
            await c.submit_batch(batch_id=1, tasks=[rr.Task(stubborn)], batch_type="train")
            await settle(c)
            c.clock.advance(5.0)
            await settle(c)
            c.clock.advance(1.0)
            held[0].set_result(None)
            await settle(c)
            assert isinstance(caught[0], ClosedError) and model.n_calls == 0

    run(main())


def test_a_sync_workflow_in_a_model_call_ends_at_its_limit_and_is_not_fenced() -> None:
    async def main() -> None:
        errors = []

        def asks(task: Any, models: Any) -> Any:
            for _ in range(2):
                try:
                    models.rollout.generate("?")
                except ClosedError as error:
                    errors.append(str(error))
            return experience()

        model = rr.ScriptedModel(["x"], failures={0: "hang"})
        async with coordinator([model], attempt_timeout_s=5.0, runners=1) as c:
            await c.submit_batch(batch_id=1, tasks=[rr.Task(asks), rr.Task(good)], batch_type="train")
            while not model.n_calls:
                await asyncio.sleep(0)
            c.clock.advance(5.0)
            while c.stats().attempts.timed_out < 1:
                await asyncio.sleep(0)
            await settle(c)
            assert len(errors) == 2 and "cancelled during the call" in errors[0] and "given up" in errors[1]
            assert model.n_calls == 1 and c.stats().runners.fenced == 0
            assert (await c.finalize_train_batch(1))["ok_task_count"] == 1

    run(main())


def test_each_attempt_has_its_own_context_and_leaves_no_cancel_behind() -> None:
    seen: list[Any] = []

    async def marks(task: Any, models: Any) -> Any:
        seen.append(LAST_TASK.get())
        LAST_TASK.set(task.task_id)
        if task.task_id == 1:
            with pytest.raises(asyncio.CancelledError):
                await asyncio.get_running_loop().create_future()
        else:
            await asyncio.sleep(0)
        return experience()

    async def main() -> None:
        async with coordinator(runners=1, attempt_timeout_s=5.0) as c:
            await c.submit_batch(batch_id=1, tasks=[rr.Task(marks) for _ in range(4)], batch_type="train")
            await settle(c)
            c.clock.advance(
                5.0
            )  # task 1 swallows its cancel and returns: too late, and without effect on the others
            result = await c.finalize_train_batch(1, timeout=10)
            assert (result["ok_task_count"], result["failed_task_count"]) == (3, 1)
            assert seen == [None] * 4
            check_doors(c)

    run(main())


def test_much_small_work_leaves_turns_of_the_loop_to_others() -> None:
    async def main() -> None:
        async with coordinator(runners=1) as c:
            await c.submit_batch(batch_id=1, tasks=[rr.Task(good) for _ in range(1000)], batch_type="train")
            turns = 0
            while c.stats().attempts.good < 1000:
                turns += 1
                await asyncio.sleep(0)
            assert turns > 5

    run(main())


def test_a_place_stays_usable_when_the_end_of_its_attempt_cannot_be_handled() -> None:
    """The attempt that was given its place is made all the same."""

    async def flow(task: Any, models: Any) -> Any:
        return rr.Result(metrics={"x": 1.0})

    async def main() -> None:
        heard: list[str] = []
        asyncio.get_running_loop().set_exception_handler(
            lambda _, about: heard.append(str(about["exception"]))
        )
        ended: list[int] = []
        context = pool_context(runners=1)
        pool = LocalPool(context)

        def launch(attempt_id: int) -> None:
            spec = AttemptSpec(attempt_id, "w", EMPTY_DATA, 1, 0, "e", True, (0,), 1, (0,), 0, 0)
            assert pool.launch(spec, Workflow("w", flow, True, False), -1) == 0

        def attempt_ended(attempt_id: int, error: str = "") -> None:
            ended.append(attempt_id)
            if attempt_id == 1:
                launch(2)
                raise OSError("no space left")

        context.reports.attempt_ended = attempt_ended  # type: ignore[method-assign]
        context.reports.run_ended = lambda *_: None  # type: ignore[method-assign]
        launch(1)
        while len(ended) < 2:
            await asyncio.sleep(0)
        gc.collect()
        assert ended == [1, 2] and pool.n_free() == 1 and heard == ["no space left"]

    run(main(), 20)
