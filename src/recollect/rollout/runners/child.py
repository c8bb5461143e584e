"""The far side of a runner: one attempt at a time, in a process or actor of its own."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from recollect.errors import ModelError
from recollect.rollout.event_loop import Threads
from recollect.rollout.experience.space import plan_of
from recollect.rollout.models.base import from_wire
from recollect.rollout.models.openai import OpenAIModel
from recollect.rollout.models.replicas import ModelPool, Models
from recollect.rollout.runners import messages
from recollect.rollout.runners.execute import LoopLag, execute
from recollect.rollout.tasks import AttemptSpec, RunOutcome, find_workflow, import_modules
from recollect.spaces import Layout
from recollect.system.processes import die_with_parent
from recollect.text import encoded, told, told_briefly

LENGTH = struct.Struct("<I")
PR_SET_PDEATHSIG = 1


class RemoteModel:
    """A model that lives with the coordinator: each call travels back to it."""

    def __init__(self, call: Callable[..., Any], role: int) -> None:
        self._call, self.role = call, role
        self.version = 0

    async def generate(self, prompt: Any, *, n: int = 1, **sampling: Any) -> Any:
        return await self._call(
            self, "generate", [prompt if isinstance(prompt, str) else list(prompt)], sampling | {"n": n}
        )

    async def chat(self, messages: Any, *, n: int = 1, **sampling: Any) -> Any:
        return await self._call(self, "chat", [list(messages)], sampling | {"n": n})

    async def logprobs(self, tokens: Any, prompt_length: int = 0) -> Any:
        return await self._call(self, "logprobs", [[int(t) for t in tokens], int(prompt_length)], {})


class RunnerSession:
    """Receives messages, runs attempts, sends outcomes; `send` takes bytes and never waits long.

    Concurrency: one event loop.
    """

    def __init__(self, send: Callable[[bytes], None]) -> None:
        self.send_bytes = send
        self.loop = asyncio.get_running_loop()
        self.threads, self.lag = Threads(self.loop, "runner"), LoopLag()
        self.attempts: dict[int, tuple[asyncio.Task[None], Models, bool]] = {}
        self.calls: dict[int, tuple[asyncio.Future[Any], RemoteModel]] = {}
        self.n_calls = 0
        self.current = 0

    def send(self, message: messages.RunnerMessage) -> None:
        self.send_bytes(messages.encode(message))

    def receive(self, data: bytes) -> None:
        """Act on one message."""
        try:
            message = messages.decode_down(data)
        except (ValueError, RecursionError) as error:  # whoever waits for it would wait for ever
            self.send(messages.Broken(f"it was sent a malformed message ({told_briefly(error)})"))
            return
        if isinstance(message, messages.Start):
            self._start(message.spec)
        elif isinstance(message, messages.Cancel):
            self._cancel(message.attempt_id)
        elif isinstance(message, messages.Answer):
            self._answer(message)
        elif isinstance(message, messages.Synced):
            self._serve(message.versions)
        else:
            self._set_up(message)

    def _set_up(self, setup: messages.Setup) -> None:
        try:
            layout = Layout.from_json(setup.layout)
            self.plan = plan_of(layout.space, dict(layout.max_lengths))
            import_modules(setup.modules)
            rollout = [
                RemoteModel(self.call, -1) if h is None else OpenAIModel.from_handle(h) for h in setup.rollout
            ]
            auxiliary = [
                [RemoteModel(self.call, role)] if any(h is None for h in handles)
                else [OpenAIModel.from_handle(h) for h in handles if h is not None]
                for role, handles in enumerate(setup.auxiliary)
            ]  # fmt: skip
            self.pool = ModelPool(rollout, auxiliary, setup.names, time.monotonic, setup.rest_s)
        except BaseException as error:
            self.send(messages.Broken(told(error)))
            return
        self.send(messages.Ready())

    def _serve(self, versions: list[int]) -> None:
        """Rollout models serve these versions now, or newer ones of which their answers told."""
        for replica, version in zip(self.pool.rollout.replicas, versions):
            replica.model.version = max(replica.model.version, version)

    def _start(self, spec: AttemptSpec) -> None:
        self._serve([spec.version] * len(self.pool.rollout.replicas))
        models = Models(self.pool)
        if spec.rollout >= 0:
            models.use(spec.rollout)
        try:
            flow = find_workflow(spec.workflow)
        except Exception as error:
            text = f"{told_briefly(error)}; name its module in workflow_modules"
            self.send(messages.Ran(spec.attempt_id, None, True, text))
            return
        task = self.loop.create_task(self._run(spec, flow, models))
        self.attempts[spec.attempt_id] = (task, models, flow.is_async)

    async def _run(self, spec: AttemptSpec, flow: Any, models: Models) -> None:
        self.current = spec.attempt_id
        held: list[RunOutcome] = []  # the last outcome goes with the end of the attempt

        def report(outcome: RunOutcome) -> None:
            if held:
                self.send(messages.Ran(spec.attempt_id, held.pop()))
            held.append(outcome)

        error = ""
        try:
            await execute(spec, flow, models, self.plan, self.threads, self.lag, report)
        except asyncio.CancelledError:
            pass
        except BaseException as raised:
            error = told(raised)
        del self.attempts[spec.attempt_id]
        try:
            self.send(messages.Ran(spec.attempt_id, held[0] if held else None, True, error))
        except Exception as raised:  # an attempt whose end is not told would keep this runner for good
            self.send(messages.Ran(spec.attempt_id, None, True, told(raised)))

    def _cancel(self, attempt_id: int) -> None:
        found = self.attempts.get(attempt_id)
        if found is None:
            return
        task, models, is_async = found
        if is_async:
            # After its first step: a task that never began would not say that it ended.
            self.loop.call_soon(task.cancel)
        else:
            models.fence()

    # -- calls that travel back

    async def call(self, model: RemoteModel, method: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
        self.n_calls += 1
        ident, future = self.n_calls, self.loop.create_future()
        self.calls[ident] = (future, model)
        try:
            packed = encoded(msgspec.msgpack.encode, (args, kwargs))
            self.send(messages.ModelCall(ident, self.current, model.role, method, packed))
            return await future
        except asyncio.CancelledError:
            self.send(messages.Uncall(ident))
            raise
        finally:
            self.calls.pop(ident, None)

    def _answer(self, answer: messages.Answer) -> None:
        future, model = self.calls.get(answer.call_id, (None, None))
        if future is None or model is None or future.done():
            return
        if answer.error is not None:
            future.set_exception(ModelError(answer.error))
        elif answer.logprobs is not None:
            future.set_result(np.frombuffer(answer.logprobs, np.float32).copy())
        else:
            found = [from_wire(g) for g in answer.generations or ()]
            model.version = max([model.version, *(g.version for g in found)])
            future.set_result(found)


# -- a process at the end of a socket


def main(fd: int) -> None:
    """Serve a socket until it is closed. The kernel kills this process when its parent dies."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is the coordinator's to handle
    asyncio.run(_serve(socket.socket(fileno=fd)))
    sys.stdout.flush()
    os._exit(0)  # a thread that goes on must not keep the process


async def _serve(sock: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    closed = loop.create_future()
    sock.setblocking(False)
    transport, link = await loop.create_connection(lambda: MessageSocket(None, closed), sock=sock)
    session = RunnerSession(lambda data: transport.write(LENGTH.pack(len(data)) + data))
    link.receive = session.receive
    link.flush()
    await closed


class MessageSocket(asyncio.Protocol):
    """Length-prefixed messages over a stream."""

    def __init__(self, receive: Callable[[bytes], None] | None, closed: asyncio.Future[None]) -> None:
        self.receive, self.closed = receive, closed
        self.buffer = bytearray()

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        self.flush()

    def flush(self) -> None:
        at = 0
        while self.receive is not None and len(self.buffer) - at >= LENGTH.size:
            (size,) = LENGTH.unpack_from(self.buffer, at)
            end = at + LENGTH.size + size
            if len(self.buffer) < end:
                break
            self.receive(bytes(self.buffer[at + LENGTH.size : end]))
            at = end
        if at:
            del self.buffer[:at]

    def connection_lost(self, error: Exception | None) -> None:
        if not self.closed.done():
            self.closed.set_result(None)
