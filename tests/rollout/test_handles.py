"""A coordinator in a thread of its own: calls that block, calls that are awaited, and its end."""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import threading
from typing import Any

import pytest
from tests.rollout.make import (
    ListSink,
    config,
    good,
    run,
)

import recollect.rollout as rr
from recollect.errors import (
    ClosedError,
)


def test_the_local_handle_blocks_or_is_awaited() -> None:
    with rr.RolloutCoordinator.get_local(config(sink="queue"), [rr.ScriptedModel(["5"])]) as h:
        h.submit_batch(batch_id=1, tasks=[rr.Task(good)], batch_type="train")
        assert h.finalize_train_batch(1, timeout=10)["ok_task_count"] == 1

        async def other() -> Any:
            await h.submit_batch.remote(batch_id=2, tasks=[rr.Task(good)], batch_type="train")
            return await h.finalize_train_batch.remote(2, timeout=10)

        assert run(other())["ok_task_count"] == 1
        assert h.stats().runs.delivered == 2 and h.config.runners == 4
        assert len(run(h.sink.get(2))) == 2
    with pytest.raises(ClosedError):
        h.stats()


def test_a_handle_is_awaited_without_holding_up_its_caller_and_closed_once() -> None:
    h = rr.RolloutCoordinator.get_local(config(sink="queue", max_batches=1, name="awaited"), [])
    h.prepare()
    h.submit_batch(batch_id=1, tasks=[rr.Task(good)], batch_type="train")

    async def other() -> Any:
        second = h.submit_batch.remote(batch_id=2, tasks=[rr.Task(good)], batch_type="train")

        async def awaited() -> None:
            await second

        waits = asyncio.create_task(awaited())
        await asyncio.sleep(0)
        assert not waits.done()
        await h.finalize_train_batch.remote(1, timeout=10)
        await waits
        return await h.finalize_train_batch.remote(2, timeout=10)

    assert run(other())["ok_task_count"] == 1
    assert h.model_version == 0 and h.batches() == [] and h.sync_weights(3) == 3 == h.model_version
    for missing in ("no_such_call", "_check", "__len__"):
        with pytest.raises(AttributeError, match=f"^coordinator has no '{missing}'"):
            getattr(h, missing)
    h.close()
    h.close()
    assert "awaited-coordinator" not in {thread.name for thread in threading.enumerate()}
    with pytest.raises(ClosedError):
        h.stats()


def test_a_handle_whose_prepare_fails_is_closed() -> None:
    made = config(sink=ListSink(), journal="/nonexistent/dir/j", name="fails")
    h = rr.RolloutCoordinator.get_local(made, [])
    with pytest.raises(FileNotFoundError, match="journal"), h:
        raise AssertionError("it was entered")
    assert "fails-coordinator" not in {thread.name for thread in threading.enumerate()}
    with pytest.raises(ClosedError):
        h.stats()


def test_a_call_that_outlives_its_coordinator_is_cancelled() -> None:
    asked = threading.Event()

    class Hangs(rr.ScriptedModel):
        async def sync(self, version: int | None = None) -> int:
            asked.set()
            return await asyncio.get_running_loop().create_future()  # type: ignore[no-any-return]

    h = rr.RolloutCoordinator.get_local(config(sink="queue", name="outlived"), [Hangs(["x"])])
    h.prepare()
    left = h.sync_weights.remote()
    assert asked.wait(20)
    h.close()
    with pytest.raises(concurrent.futures.CancelledError):
        left.result(20.0)
    assert "outlived-coordinator" not in {thread.name for thread in threading.enumerate()}


def test_a_handle_that_cannot_be_made_leaves_no_loop(recwarn: pytest.WarningsRecorder) -> None:
    gc.collect()
    recwarn.clear()  # what tests before this one left
    with pytest.raises(TypeError, match="config"):
        rr.RolloutCoordinator.get_local({}, [])
    gc.collect()
    assert [str(warning.message) for warning in recwarn] == []
