"""Events for listeners, and slices of time in a trace."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from tests.rollout.make import (
    coordinator,
    end,
    experience,
    good,
    run,
    settle,
    tasks,
)

import recollect.rollout as rr
from recollect.errors import (
    ClosedError,
)
from recollect.rollout.events import EventHub


def test_events_say_what_when_and_of_which_run() -> None:
    async def main() -> None:
        async with coordinator(max_retries=1, retry_backoff_s=0.0) as c:
            stream, other = c.events(1), c.events()
            c.clock.advance(3.0)
            await c.submit_batch(batch_id=2, tasks=[], batch_type="train")
            await c.submit_batch(batch_id=1, tasks=tasks(c, 1, task_id="t"), batch_type="train")
            await settle(c)
            c.clock.advance(4.0)
            await end(c, (1, "t", 0), outcome=ValueError("why"))
            await end(c, (1, "t", 0))
            await c.finalize_train_batch(1)
            await c.abort_batch(2, reason="no more")
            await c.shutdown()
            found = [event async for event in stream]
            kinds = ["submitted", "admitted", "started", "failed", "retried", "started", "finished", "cut"]
            assert [event.kind for event in found] == [*kinds, "delivered", "finalized"]
            assert {event.batch_id for event in found} == {1}
            assert [event.time_s for event in found] == [3.0] * 3 + [7.0] * 7
            assert [(e.task_id, e.run_id) for e in found[:4]] == [(None, None)] * 2 + [("t", 0)] * 2
            details = {event.kind: event.detail for event in found}
            assert "ValueError: why" in details["failed"] and details["retried"] == "in 0.00 s"
            assert details["started"].startswith("attempt 2 on runner") and details["cut"] == "1 tasks"
            assert details["delivered"] == "1 experiences"
            everything = [event async for event in other]
            assert [e.batch_id for e in everything[:4]] == [2, 2, 1, 1]
            assert everything[-1].kind == "aborted" and everything[-1].detail == "no more"

    run(main())


def test_events_reach_listeners_and_a_slow_one_loses_the_oldest() -> None:
    async def main() -> None:
        async with coordinator() as c:
            stream = c.events(1)
            await c.submit_batch(batch_id=1, tasks=[rr.Task(good)], batch_type="train")
            await c.finalize_train_batch(1)
            kinds = [(await anext(stream)).kind for _ in range(7)]
            assert kinds == ["submitted", "admitted", "started", "finished", "cut", "delivered", "finalized"]
            every = c.events()
            await c.submit_batch(batch_id=2, tasks=[rr.Task(good) for _ in range(1000)], batch_type="train")
            await c.finalize_train_batch(2)
            assert (await anext(every)).missed > 0
            await stream.aclose()
            await every.aclose()

    run(main())


def test_shutdown_ends_the_iteration_of_listeners() -> None:
    async def main() -> None:
        async with coordinator() as c:
            streams = [c.events(), c.events(1)]
            waiting = [asyncio.ensure_future(anext(stream, None)) for stream in streams]
            await asyncio.sleep(0)
            assert not any(waits.done() for waits in waiting)
            await c.shutdown()
            async with asyncio.timeout(5.0):
                assert await asyncio.gather(*waiting) == [None, None]

    run(main())


def test_a_slow_listener_gets_the_newest_events_and_once_the_number_it_missed() -> None:
    async def main() -> None:
        async with coordinator() as c:
            stream = c.events()
            waits = asyncio.create_task(anext(stream))
            await asyncio.sleep(0)
            assert not waits.done()
            await c.sync_weights(1)
            assert (await waits).detail == "version 1"
            for version in range(2, 1030):
                await c.sync_weights(version)
            first, second = await anext(stream), await anext(stream)
            assert (first.detail, first.missed) == ("version 6", 4) and (second.detail, second.missed) == (
                "version 7",
                0,
            )
            await stream.aclose()

    run(main())


def test_a_listener_that_is_closed_is_forgotten() -> None:
    async def main() -> None:
        hub = EventHub()
        stream: Any = hub.listen(None)
        hub.emit("kind", 1.0)
        assert (await anext(stream)).kind == "kind" and len(hub.listeners) == 1
        await stream.aclose()
        assert not hub.listeners

    run(main())


def test_retries_limits_and_syncs_are_events() -> None:
    async def slow_then_bad(task: Any, models: Any) -> Any:
        if task.attempt == 1:
            await asyncio.get_running_loop().create_future()
        raise ValueError("bad")

    async def main() -> None:
        async with coordinator(max_retries=1, attempt_timeout_s=5.0) as c:
            stream = c.events()
            await c.submit_batch(batch_id=1, tasks=[rr.Task(slow_then_bad)], batch_type="train")
            await settle(c)
            c.clock.advance(5.0)
            await settle(c)
            await c.sync_weights()
            await c.abort_batch(1, reason="enough")
            await c.shutdown()
            kinds = [event.kind async for event in stream]
            wanted = [
                "submitted",
                "admitted",
                "started",
                "timed_out",
                "retried",
                "started",
                "failed",
                "synced",
            ]
            assert kinds == [*wanted, "aborted"]
            with pytest.raises(ClosedError):
                c.events()

    run(main())


def test_a_trace_has_every_kind_of_slice(tmp_path: Any) -> None:
    path = tmp_path / "trace.json"

    async def asks(task: Any, models: Any) -> Any:
        await models.rollout.generate("?")
        if task.attempt == 1:
            await asyncio.get_running_loop().create_future()
        return experience()

    async def main() -> None:
        fields = {"max_retries": 1, "retry_backoff_s": 1.0, "attempt_timeout_s": 5.0, "trace": str(path)}
        async with coordinator([rr.ScriptedModel(["x"])], **fields) as c:
            await c.submit_batch(batch_id=1, tasks=[rr.Task(asks)], batch_type="train")
            await settle(c)
            c.clock.advance(5.0)
            await settle(c)
            c.clock.advance(1.3)
            await c.finalize_train_batch(1, timeout=10)
            many = [
                rr.Task(good, repeat_times=520)
            ]  # more slices than are kept in memory: they are written in parts
            await c.submit_batch(batch_id=2, tasks=many, batch_type="train")
            await c.finalize_train_batch(2, timeout=10)

    run(main())
    slices = [e for e in json.loads(path.read_text())["traceEvents"] if e["ph"] == "X"]
    kinds = ("admission", "queue", "attempt", "model_call", "backoff", "grace", "pass", "sink")
    assert {e["name"] for e in slices} == {f"rollout/{kind}" for kind in kinds}
    assert next(e["dur"] for e in slices if e["name"] == "rollout/attempt") == 5e6
    assert all(e["dur"] >= 0 for e in slices) and len(slices) > 1024
