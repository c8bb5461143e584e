"""Runners in the coordinator's own loop: a place each for one asyncio task; a sync workflow takes a thread.

What cannot be killed is fenced: a thread, or a task that ignores its cancel, goes on, but its results are refused,
its next model call raises, and its place is given to another. As many of them as there are runners, and no work
starts any more.

An asyncio task serves its place for as long as one attempt follows another there: to make a task and to go once
context the loop for each would cost a quarter of a small attempt. Each still has its own context, and after a turn of
2 ms others in the loop come first.
"""

from __future__ import annotations

import asyncio
from collections import deque
from functools import partial
from time import perf_counter
from typing import Any

from recollect.rollout.models.replicas import Models
from recollect.rollout.runners.base import RunnerContext
from recollect.rollout.runners.execute import execute
from recollect.rollout.tasks import AttemptSpec, RunOutcome

DEFAULT_SIZE = 256
TURN_S = 0.002  # attempts that never wait follow each other that long before the loop sees to anything else
AT_ONCE = 8  # attempts that are let in together; more might find the turn over and wait again


class Place:
    """An attempt at its place."""

    __slots__ = ("fenced", "is_started", "is_unwanted", "models", "number", "spec", "task", "workflow")

    def __init__(self, spec: AttemptSpec, workflow: Any, models: Models, number: int) -> None:
        self.spec, self.workflow, self.models, self.number = spec, workflow, models, number
        self.fenced = self.is_started = self.is_unwanted = False
        self.task: asyncio.Task[None]


class LocalPool:
    """Attempts as asyncio tasks.

    Concurrency: one event loop. Ownership: models, threads and plan are the coordinator's.
    """

    def __init__(self, context: RunnerContext) -> None:
        self.context = context
        self.size = context.config.runners or DEFAULT_SIZE
        self.places: dict[int, Place] = {}
        self.free = list(range(self.size - 1, -1, -1))
        self.fenced: set[Place] = set()
        self._loop = asyncio.get_running_loop()
        self._vacant = -1  # the place whose task asks for its next attempt right now
        self._next: Place | None = None
        self._turn_ends = 0.0
        self._waiting: deque[asyncio.Future[None]] = deque()  # for a turn

    @property
    def n_fenced(self) -> int:
        return len(self.fenced)

    async def start(self) -> None:
        """Nothing to start."""

    def n_free(self) -> int:
        return 0 if len(self.fenced) >= self.size else len(self.free)

    def n_alive(self) -> int:
        return self.size

    def launch(self, spec: AttemptSpec, workflow: Any, avoid: int) -> int:
        number = self.free.pop()
        if number == avoid and self.free:
            number, other = self.free.pop(), number
            self.free.append(other)
        models = Models(self.context.models, self.context.tell)
        place = Place(spec, workflow, models, number)
        self.places[spec.attempt_id] = place
        if number == self._vacant:
            self._vacant, self._next = -1, place
        else:
            place.task = self._loop.create_task(self._serve(place))
        return number

    async def _serve(self, place: Place | None) -> None:
        """Work at a place until nothing follows there."""
        task: Any = asyncio.current_task()
        while place is not None:
            place.task = task
            error = ""
            try:
                if perf_counter() >= self._turn_ends:
                    await self._next_turn()
                if not place.is_unwanted:
                    await self._work(place)
            except asyncio.CancelledError:
                pass  # told to stop, and it did
            except Exception as raised:
                error = repr(raised)
            place = self._ended(place, error)
            if (
                place is not None and task.cancelling()
            ):  # what is left of a cancel is not meant for the next one
                place.task = self._loop.create_task(self._serve(place))
                return

    async def _work(self, place: Place) -> None:
        place.is_started = True
        context = self.context
        await execute(
            place.spec, place.workflow, place.models, context.plan, context.threads, context.lag,
            partial(self._report, place),
        )  # fmt: skip

    async def _next_turn(self) -> None:
        mine: asyncio.Future[None] = self._loop.create_future()
        if not self._waiting:
            self._loop.call_soon(self._new_turn)
        self._waiting.append(mine)
        await mine

    def _new_turn(self) -> None:
        self._turn_ends = perf_counter() + TURN_S
        self._let_in()

    def _let_in(self) -> None:
        for _ in range(min(AT_ONCE, len(self._waiting))):
            first = self._waiting.popleft()
            if not first.done():  # else told to stop meanwhile
                first.set_result(None)
        if self._waiting:
            is_over = perf_counter() >= self._turn_ends
            self._loop.call_soon(self._new_turn if is_over else self._let_in)

    def _report(self, place: Place, outcome: RunOutcome) -> None:
        if not place.fenced:
            self.context.reports.run_ended(place.spec.attempt_id, outcome)

    def _ended(self, place: Place, error: str) -> Place | None:
        """Say that an attempt has ended; return the next at its place, if there is one."""
        place.models.release()
        if place.fenced:
            self.fenced.discard(place)
            self.context.reports.runners_changed()
            return None
        self._vacate(place)
        self._vacant = place.number
        try:
            self.context.reports.attempt_ended(place.spec.attempt_id, error)
        except BaseException:
            if self._next is not None:  # it was given this place, and this task ends here
                self._next.task = self._loop.create_task(self._serve(self._next))
            raise
        finally:
            self._vacant, following, self._next = -1, self._next, None
        return following

    def _vacate(self, place: Place) -> None:
        del self.places[place.spec.attempt_id]
        self.free.append(place.number)

    def cancel(self, attempt_id: int) -> None:
        place = self.places.get(attempt_id)
        if place is None:
            return
        if not place.workflow.is_async and not place.models.fenced:
            # The thread cannot be interrupted; its model call can, and the next one is refused. The task goes on
            # to wait for the thread, so that the attempt ends when its code does.
            place.models.fence()
            return
        if place.is_started:
            place.task.cancel()
        else:
            place.is_unwanted = True

    def kill(self, attempt_id: int) -> None:
        place = self.places.get(attempt_id)
        if place is None:
            return
        place.fenced = place.models.fenced = True
        self.fenced.add(place)
        self._vacate(place)
        self.context.reports.attempt_ended(attempt_id)

    def synced(self) -> None:
        """The models are those that were synced."""

    def doing(self, attempt_id: int) -> str | None:
        place = self.places.get(attempt_id)
        return None if place is None else place.models.doing

    async def close(self) -> None:
        """Cancel what is left; a fenced thread ends when its code does."""
        tasks = [place.task for place in (*self.places.values(), *self.fenced)]
        for place in (*self.places.values(), *self.fenced):
            place.fenced = place.models.fenced = True
            place.task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=0.5)
