"""Runners as processes: each is spawned with one end of a socket pair and leads a process group of its own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from typing import Any

from recollect.rollout.runners.base import RunnerContext
from recollect.rollout.runners.child import LENGTH, MessageSocket
from recollect.rollout.runners.remote import RemotePool, RemoteRunner
from recollect.system.processes import end_descriptor, has_ended, usable_cores

_LOOK_S = 0.02  # between looks at a process whose end nothing tells
PROGRAM = "from recollect.rollout.runners.child import main; main({fd})"


class ProcessRunner(RemoteRunner):
    """A spawned process. Its death is seen whatever it was doing."""

    def __init__(self, number: int, on_message: Any, on_death: Any) -> None:
        super().__init__(number, on_message, on_death)
        self.process: subprocess.Popen[bytes]
        self.transport: asyncio.Transport
        self._loop = asyncio.get_running_loop()
        self._gone: asyncio.Future[None] = self._loop.create_future()

    async def start(self) -> None:
        ours, theirs = socket.socketpair()
        try:
            env = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
            self.process = subprocess.Popen(
                [sys.executable, "-c", PROGRAM.format(fd=theirs.fileno())],
                pass_fds=[theirs.fileno()], start_new_session=True, env=env,
            )  # fmt: skip
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        try:
            self._watch()
        except OSError:  # its death could not be seen
            ours.close()
            self.kill()
            self.process.wait()
            raise
        ours.setblocking(False)
        closed: asyncio.Future[None] = self._loop.create_future()
        try:
            made: Any = await self._loop.create_connection(
                lambda: MessageSocket(self.received, closed), sock=ours
            )
        except BaseException:
            self._unwatch()
            ours.close()
            self.kill()
            self.process.wait()
            raise
        self.transport = made[0]

    def send(self, data: bytes) -> None:
        if not self.is_dead and not self.transport.is_closing():
            self.transport.write(LENGTH.pack(len(data)) + data)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def _watch(self) -> None:
        """Call `_exited` once the process has ended; OSError if that cannot be told."""
        self._looking: asyncio.TimerHandle | None = None
        self._end = end_descriptor(self.process.pid)
        if self._end is not None:
            self._loop.add_reader(self._end, self._exited)
        else:
            self._look()

    def _look(self) -> None:
        if has_ended(self.process.pid) or (not hasattr(os, "waitid") and self.process.poll() is not None):
            self._exited()
        else:
            self._looking = self._loop.call_later(_LOOK_S, self._look)

    def _unwatch(self) -> None:
        if self._end is not None:
            self._loop.remove_reader(self._end)
            os.close(self._end)
        elif self._looking is not None:
            self._looking.cancel()

    def _exited(self) -> None:
        self._unwatch()
        self.kill()  # what it left in its group
        code = self.process.wait()
        # What it sent before it died is still in the socket: read it first.
        self._loop.call_soon(self._buried, code)

    def _buried(self, code: int) -> None:
        self.transport.abort()
        if not self._gone.done():
            self._gone.set_result(None)
        self.died(f"process {self.process.pid} ended with {_meaning(code)}")

    async def closed(self) -> None:
        await asyncio.wait([self._gone], timeout=5.0)


def _meaning(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"status {code}"


class ProcessPool(RemotePool):
    """Runners as processes, one per CPU unless the config says otherwise."""

    def __init__(self, context: RunnerContext) -> None:
        super().__init__(context, context.config.runners or usable_cores())

    async def make_runner(self, number: int) -> RemoteRunner:
        runner = ProcessRunner(number, self.received, self.died)
        await runner.start()
        return runner
