"""Coordinators, gates and sinks for the tests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import recollect.rollout as rr
from recollect.errors import ClosedError
from recollect.testing import FakeClock


def run(main: Coroutine[Any, Any, Any], seconds: float = 200.0) -> Any:
    """Run a test's coroutine; what hangs fails."""

    async def limited() -> Any:
        async with asyncio.timeout(seconds):
            return await main

    return asyncio.run(limited())


def experience(reward: float = 1.0, n: int = 3, **leaves: Any) -> rr.Experience:
    return rr.Experience(
        tokens=list(range(n + 1)), prompt_length=1, logprobs=[-0.5] * n, reward=reward, **leaves
    )


class ListSink:
    """Keeps what it is given; can be told to raise before or after it has written."""

    def __init__(self) -> None:
        self.parts: dict[str, rr.Experiences] = {}
        self.fail: str | None = None
        self.closed = False

    def write(self, x: rr.Experiences, commit_id: str) -> None:
        if self.fail == "before":
            raise OSError("disk full")
        if commit_id in self.parts:
            raise AssertionError(f"{commit_id} was written twice")
        self.parts[commit_id] = x
        if self.fail == "after":
            raise OSError("lost the answer")

    def holds(self, commit_id: str) -> bool:
        return commit_id in self.parts

    def close(self) -> None:
        self.closed = True

    @property
    def uids(self) -> list[tuple[int, int, int]]:
        return [uid for x in self.parts.values() for uid in x.uids.tolist()]


class Gates:
    """A workflow whose runs end when the test says so."""

    def __init__(self) -> None:
        self.waiting: dict[tuple[Any, Any, int], asyncio.Future[Any]] = {}
        self.started: list[tuple[Any, Any, int, int]] = []
        self.ignores_cancel = False

    async def __call__(self, task: Any, models: Any) -> Any:
        key = (task.batch_id, task.task_id, task.run_id)
        self.started.append((*key, task.attempt))
        while True:
            future = self.waiting[key] = asyncio.get_running_loop().create_future()
            try:
                return await future
            except asyncio.CancelledError:
                if not self.ignores_cancel:
                    raise
            finally:
                if self.waiting.get(key) is future:
                    del self.waiting[key]

    def end(self, key: tuple[Any, Any, int], outcome: Any = None) -> None:
        future = self.waiting[key]
        if isinstance(outcome, BaseException):
            future.set_exception(outcome)
        else:
            future.set_result(experience() if outcome is None else outcome)

    def let_go(self) -> None:
        """A test has failed: nothing of it may hold up the end."""
        self.ignores_cancel = False
        for future in list(self.waiting.values()):
            future.cancel()


async def settle(c: Any, rounds: int = 12) -> None:
    """Let everything happen that needs no time to pass; passes run in threads and are waited for."""
    loop = asyncio.get_running_loop()
    end = loop.time() + 10.0
    while loop.time() < end:
        for _ in range(rounds):
            await asyncio.sleep(0)
        if not is_open(c) or not any(
            c.batch_state(ident).state is rr.BatchLifecycleState.FINALIZING for ident in c.batches()
        ):
            return
        await asyncio.sleep(0.0005)


def is_open(c: Any) -> bool:
    """Whether a coordinator is between `prepare` and `shutdown`."""
    try:
        c.batches()
    except ClosedError:
        return False
    return True


def inner(c: Any) -> Any:
    """What the steps of a batch share: for the state machines, which compare it with their model in every turn."""
    return c._context


def config(**fields: Any) -> rr.Config:
    return rr.Config(**{"retry_backoff_s": 0.0, "runners": 4, "max_retries": 0} | fields)


@asynccontextmanager
async def coordinator(models: Any = (), auxiliary: Any = None, **fields: Any) -> AsyncIterator[Any]:
    """A coordinator on a fake clock: `c.clock`, `c.gates`, `c.list_sink`."""
    clock = FakeClock()
    sink = fields.pop("sink") if "sink" in fields else ListSink()
    made: Any = rr.RolloutCoordinator(config(sink=sink, **fields), models, auxiliary, clock=clock)
    made.clock, made.gates, made.list_sink = clock, Gates(), sink
    async with made:
        try:
            yield made
        except BaseException:
            made.gates.let_go()
            raise


def check_doors(c: Any) -> None:
    """Every run and every attempt left by exactly one door."""
    stats = c.stats()
    runs, attempts = stats.runs, stats.attempts
    left = runs.delivered + runs.filtered + runs.unused + runs.failed + runs.cancelled
    assert runs.submitted == left + runs.live, runs
    ended = attempts.good + attempts.failed + attempts.timed_out + attempts.cancelled + attempts.lost
    assert attempts.started == ended + attempts.running, attempts
    assert min(runs.live, runs.cancelled, attempts.running, stats.staged_nbytes, stats.queue.queued_runs) >= 0
