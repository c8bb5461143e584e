"""Runners outside the coordinator's process: what processes and Ray actors have in common.

A runner has one attempt at a time. It is started, said to be ready, and replaced when it dies or is killed. Starting
again backs off; after five failures in a row and with no runner left, finalizers are told why.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from recollect.errors import FormatError, WorkerDiedError
from recollect.rollout.event_loop import Timer
from recollect.rollout.experience.payload import decode
from recollect.rollout.models.base import to_wire
from recollect.rollout.models.replicas import BoundModel, Models
from recollect.rollout.runners import messages
from recollect.rollout.runners.base import RunnerContext
from recollect.rollout.tasks import AttemptSpec, RunOutcome
from recollect.text import told_briefly


class RemoteRunner(ABC):
    """One runner elsewhere: the attempt that it has, and the model calls of that attempt.

    `on_message` and `on_death` get the runner, and the bytes it sent or the reason of its end.
    """

    def __init__(
        self,
        number: int,
        on_message: Callable[[RemoteRunner, bytes], None],
        on_death: Callable[[RemoteRunner, str], None],
    ) -> None:
        self.number = number
        self._on_message, self._on_death = on_message, on_death
        self.is_ready = self.is_dead = self.is_killed = False
        self.attempt_id: int | None = None
        self.models: Models | None = None
        self.calls: dict[int, asyncio.Task[None]] = {}

    @abstractmethod
    def send(self, data: bytes) -> None:
        """Send a message; one to a dead runner is dropped."""

    @abstractmethod
    def kill(self) -> None:
        """End it now; `died` follows."""

    @abstractmethod
    async def closed(self) -> None:
        """Let go of everything, once it is dead."""

    def received(self, data: bytes) -> None:
        """Pass on a message that the runner sent."""
        self._on_message(self, data)

    def died(self, why: str) -> None:
        """Pass on that the runner is dead."""
        self._on_death(self, why)

    def begin_call(self, call: messages.ModelCall) -> None:
        """Ask a model on behalf of the attempt."""
        self.calls[call.call_id] = asyncio.get_running_loop().create_task(self._call(call))

    def cancel_call(self, call_id: int) -> None:
        """Cancel a model call that the attempt no longer waits for."""
        call = self.calls.pop(call_id, None)
        if call is not None:
            call.cancel()

    async def _call(self, call: messages.ModelCall) -> None:
        answer = messages.Answer(call.call_id)
        try:
            args, kwargs = msgspec.msgpack.decode(call.args)
            models = self.models
            if models is None or call.attempt_id != self.attempt_id:
                raise FormatError("the attempt is over")
            bound: BoundModel = models.rollout if call.role < 0 else models.auxiliary[call.role]
            if call.method not in ("generate", "chat", "logprobs"):
                raise FormatError(f"no model call {call.method!r}")
            found = await getattr(bound, call.method)(*args, **kwargs)
            if call.method == "logprobs":
                answer.logprobs = np.asarray(found, np.float32).tobytes()
            else:
                answer.generations = [to_wire(g) for g in found]
            data = messages.encode(answer)
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            data = messages.encode(messages.Answer(call.call_id, error=told_briefly(error)))
        self.calls.pop(call.call_id, None)
        self.send(data)

    def release(self) -> None:
        """The attempt is over: its calls too."""
        for call in self.calls.values():
            call.cancel()
        self.calls.clear()
        if self.models is not None:
            self.models.release()
        self.models, self.attempt_id = None, None


class RemotePool(ABC):
    """A fixed number of runners elsewhere.

    Ownership: owns the runners and ends them in `close()`. Concurrency: one event loop.
    """

    failed_starts = 5  # in a row, after which finalizers are told
    start_s = 60.0  # in which a runner must be ready
    pause_s, pause_max_s = 0.1, 30.0  # before the first and between the later starts

    def __init__(self, context: RunnerContext, size: int) -> None:
        self.context, self.size = context, size
        self.runners: dict[int, RemoteRunner] = {}
        self.by_attempt: dict[int, RemoteRunner] = {}
        self.n_fenced = self.n_refused = 0
        self.n_failed_starts = 0
        self.cause = ""
        self.is_closed = False
        self._timers: dict[int, Timer] = {}
        self._starting: set[asyncio.Task[None]] = set()
        self._first: asyncio.Future[None] | None = None
        plan, config = context.plan, context.config
        rollout = [getattr(r.model, "handle", None) for r in context.models.rollout.replicas]
        auxiliary = [
            [getattr(r.model, "handle", None) for r in role.replicas] for role in context.models.auxiliary
        ]
        names = [role.name for role in context.models.auxiliary]
        self._setup = messages.encode(
            messages.Setup(
                plan.layout.to_json(),
                list(config.workflow_modules),
                rollout,
                auxiliary,
                names,
                config.retry_backoff_max_s,
            )
        )

    @abstractmethod
    async def make_runner(self, number: int) -> RemoteRunner:
        """Start a runner; it says Ready by itself once it was sent its setup."""

    # -- life

    async def start(self) -> None:
        self._first = asyncio.get_running_loop().create_future()
        for number in range(self.size):
            self._begin(number)
        await self._first

    def _begin(self, number: int) -> None:
        if not self.is_closed:
            task = asyncio.get_running_loop().create_task(self._make(number))
            self._starting.add(task)
            task.add_done_callback(self._starting.discard)

    async def _make(self, number: int) -> None:
        try:
            runner = await self.make_runner(number)
        except Exception as error:
            self.cause = told_briefly(error)
            self._start_failed(number)
            return
        self.runners[number] = runner
        if self.is_closed:
            runner.kill()
            return
        runner.send(self._setup)
        self._call_later(runner.number, self.start_s, self._check_start, runner)

    def _check_start(self, runner: RemoteRunner) -> None:
        if not runner.is_ready and not runner.is_dead and not self.is_closed:
            self._kill_for(runner, f"it was not ready within {self.start_s:g} s")

    # -- what the runners send

    def received(self, runner: RemoteRunner, data: bytes) -> None:
        """Act on one message of a runner."""
        try:
            message = messages.decode_up(data)
        except (ValueError, RecursionError) as error:  # text that is not UTF-8 is no MsgspecError
            self.n_refused += 1
            self._kill_for(runner, f"it sent a malformed message ({error})")
            return
        if isinstance(message, messages.Ran):
            self._ran(runner, message)
        elif isinstance(message, messages.ModelCall):
            runner.begin_call(message)
        elif isinstance(message, messages.Uncall):
            runner.cancel_call(message.call_id)
        elif isinstance(message, messages.Ready):
            self._ready(runner)
        else:
            self._kill_for(runner, message.why)

    def _kill_for(self, runner: RemoteRunner, why: str) -> None:
        self.cause = why
        runner.kill()

    def _ready(self, runner: RemoteRunner) -> None:
        runner.is_ready = True
        self._cancel_timer(runner.number)
        self.n_failed_starts = 0
        if self._first is not None and not self._first.done():
            self._first.set_result(None)
        self.context.reports.runners_changed()

    def died(self, runner: RemoteRunner, why: str) -> None:
        """A runner is gone: report the attempt that it had, and start another."""
        if runner.is_dead:
            return
        runner.is_dead = True
        self.runners.pop(runner.number, None)
        attempt_id, was_ready = runner.attempt_id, runner.is_ready
        runner.release()
        if attempt_id is not None:
            self.by_attempt.pop(attempt_id, None)
        if self.is_closed:
            return
        if was_ready:
            self._begin(runner.number)
            if runner.is_killed and attempt_id is not None:
                self.context.reports.attempt_ended(attempt_id)
            else:
                self.context.reports.runner_lost(runner.number, attempt_id, why)
        else:
            self.cause = self.cause or why
            self._start_failed(runner.number)

    def _start_failed(self, number: int) -> None:
        self.n_failed_starts += 1
        pause = min(self.pause_s * 2 ** (self.n_failed_starts - 1), self.pause_max_s)
        if self.n_failed_starts >= self.failed_starts and not self.n_alive():
            if self._first is not None and not self._first.done():
                self._first.set_exception(WorkerDiedError(f"runners: none could be started; {self.cause}"))
                return
            self.context.reports.runners_broken(self.cause)
        self._call_later(number, pause, self._begin, number)

    def _call_later(self, number: int, seconds: float, callback: Callable[..., None], *args: Any) -> None:
        """Each runner waits for one thing at a time: to be started again, or to be ready."""
        self._cancel_timer(number)
        clock = self.context.clock
        self._timers[number] = clock.call_at(clock.time() + seconds, callback, *args)

    def _cancel_timer(self, number: int) -> None:
        timer = self._timers.pop(number, None)
        if timer is not None:
            timer.cancel()

    def n_alive(self) -> int:
        return sum(runner.is_ready for runner in self.runners.values())

    def n_free(self) -> int:
        return sum(r.is_ready and r.attempt_id is None for r in self.runners.values())

    # -- attempts

    def launch(self, spec: AttemptSpec, workflow: Any, avoid: int) -> int:
        free = [r for r in self.runners.values() if r.is_ready and r.attempt_id is None]
        runner = next((r for r in free if r.number != avoid), free[0])
        runner.attempt_id = spec.attempt_id
        self.by_attempt[spec.attempt_id] = runner
        models = runner.models = Models(self.context.models, self.context.tell)
        spec.rollout = models.choose()
        runner.send(messages.encode(messages.Start(spec)))
        return runner.number

    def _ran(self, runner: RemoteRunner, message: messages.Ran) -> None:
        if message.attempt_id != runner.attempt_id:
            return
        reports = self.context.reports
        if message.outcome is not None:
            reports.run_ended(message.attempt_id, self._checked(message.outcome))
        if message.last:
            runner.release()
            self.by_attempt.pop(message.attempt_id, None)
            reports.attempt_ended(message.attempt_id, message.error)

    def _checked(self, outcome: RunOutcome) -> RunOutcome:
        """A payload is decoded on arrival; a malformed one is a failed run."""
        if outcome.payload is None:
            return outcome
        try:
            decode(outcome.payload, space=self.context.plan)
        except FormatError as error:
            self.n_refused += 1
            return RunOutcome(outcome.run_id, False, outcome.seconds, error=f"FormatError: {error}")
        return outcome

    def cancel(self, attempt_id: int) -> None:
        runner = self.by_attempt.get(attempt_id)
        if runner is not None:
            runner.send(messages.encode(messages.Cancel(attempt_id)))

    def kill(self, attempt_id: int) -> None:
        runner = self.by_attempt.get(attempt_id)
        if runner is not None:
            runner.is_killed = True
            runner.kill()

    def synced(self) -> None:
        """Tell the runners what the rollout models serve now: some have opened them anew."""
        versions = [int(replica.model.version) for replica in self.context.models.rollout.replicas]
        for runner in self.runners.values():
            if runner.is_ready:
                runner.send(messages.encode(messages.Synced(versions)))

    def doing(self, attempt_id: int) -> str | None:
        runner = self.by_attempt.get(attempt_id)
        return None if runner is None or runner.models is None else runner.models.doing

    async def close(self) -> None:
        self.is_closed = True
        for number in list(self._timers):
            self._cancel_timer(number)
        for task in list(self._starting):
            task.cancel()
        if self._starting:
            await asyncio.wait(list(self._starting), timeout=2.0)
        runners = list(self.runners.values())
        for runner in runners:
            runner.release()
            runner.kill()
        for runner in runners:
            await runner.closed()
        self.runners.clear()
