"""Coordinators, gates and sinks for the tests."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import recollect.rollout as rr
from recollect.errors import ClosedError
from recollect.rollout.event_loop import LoopClock, Threads
from recollect.rollout.experience.space import plan_of
from recollect.rollout.models.replicas import ModelPool
from recollect.rollout.runners.base import RunnerContext
from recollect.rollout.runners.execute import LoopLag
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


async def good(task: Any, models: Any) -> Any:
    """A workflow whose run ends at once, with its number as its reward."""
    return experience(reward=float(task.run_id))


def tasks(c: Any, n: int, **fields: Any) -> list[rr.Task]:
    """Tasks whose runs end when `c.gates` says so."""
    return [rr.Task(c.gates, **fields) for _ in range(n)]


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


async def until_set(event: threading.Event) -> None:
    """Wait for another thread without holding up the loop."""
    while not event.is_set():
        await asyncio.sleep(0)


def rows(*rewards: float, group: int = 1, n: int = 3) -> list[Any]:
    return [rr.decode(rr.encode([experience(r, n)], group_id=group, run_id=i)) for i, r in enumerate(rewards)]


def batch(*groups: tuple[float, ...]) -> Any:
    return rr.Experiences.concat([x for g, rewards in enumerate(groups) for x in rows(*rewards, group=g)])


async def bad(task: Any, models: Any) -> Any:
    raise ValueError(f"broken {task.task_id}")


async def end(c: Any, *keys: Any, outcome: Any = None) -> None:
    for key in keys:
        c.gates.end(key, outcome)
        await settle(c)


class Held(ListSink):
    """A sink whose write waits until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.gate = threading.Event(), threading.Event()

    def write(self, x: Any, commit_id: str) -> None:
        self.inside.set()
        self.gate.wait(20)
        super().write(x, commit_id)


class HeldOperator:
    """An operator that waits until it is let go, and is not afraid of nothing."""

    def __init__(self) -> None:
        self.inside, self.gate, self.fails = threading.Event(), threading.Event(), False
        self.n_calls = 0

    def __call__(self, x: Any) -> Any:
        self.n_calls += 1
        self.inside.set()
        self.gate.wait(20)
        if self.fails:
            raise OSError("as told")
        return x


async def takes_turns(task: Any, models: Any) -> Any:
    if task.run_id == 0 and task.attempt == 1:
        raise OSError("once")
    await asyncio.sleep(0)
    return experience()


async def begun(c: Any, ident: int, n_turns: int) -> asyncio.Task[Any]:
    """Submit a batch that takes some turns of the loop, wait for it, and let it come so far."""
    given = [rr.Task(takes_turns, repeat_times=2), rr.Task(takes_turns)]
    await c.submit_batch(batch_id=ident, tasks=given, batch_type="train")
    waits = asyncio.create_task(c.finalize_train_batch(ident, timeout=100))
    for _ in range(n_turns):
        await asyncio.sleep(0)
    return waits


def rows_of(c: Any, ident: int) -> int:
    """How many rows of a batch are in the sink."""
    return sum(
        x.task_of(group)[0] == ident for x in c.list_sink.parts.values() for group in x.group_id.tolist()
    )


def pool_context(**fields: Any) -> RunnerContext:
    """What a pool needs to be used without a coordinator."""
    loop = asyncio.get_running_loop()
    reports: Any = SimpleNamespace(runners_changed=lambda: None)
    models = ModelPool([], [], [], loop.time, 30.0)
    threads = Threads(loop, "test")
    return RunnerContext(reports, rr.Config(**fields), models, plan_of(), threads, LoopLag(), LoopClock(loop))
