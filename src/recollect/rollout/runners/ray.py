"""Runners as Ray actors, on any machine of the cluster: the same messages, carried by Ray.

Down: a call of the actor per message. Up: one streaming call that lasts as long as the actor; when it breaks, the actor
is dead.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

from recollect.errors import MissingExtraError
from recollect.rollout.runners.base import RunnerContext
from recollect.rollout.runners.child import RunnerSession
from recollect.rollout.runners.remote import RemotePool, RemoteRunner


def need_ray() -> Any:
    """Return the ray module, connected; MissingExtraError if it is not installed."""
    try:
        import ray
    except ImportError:
        raise MissingExtraError('ray: is not installed; pip install "recollect[ray]"') from None
    if not ray.is_initialized():
        ray.init(log_to_driver=False)
    return ray


class RunnerActor:
    """The far side of a runner, in a Ray actor; its loop is Ray's."""

    def __init__(self) -> None:
        self.outbox: asyncio.Queue[bytes] | None = None
        self.session: RunnerSession | None = None

    def _open(self) -> RunnerSession:
        if self.session is None:
            self.outbox = asyncio.Queue()
            self.session = RunnerSession(self.outbox.put_nowait)
        return self.session

    async def receive(self, data: bytes) -> None:
        """Take one message."""
        self._open().receive(data)

    async def messages(self) -> AsyncIterator[bytes]:
        """Yield what is sent back, for ever."""
        self._open()
        while self.outbox is not None:
            yield await self.outbox.get()


class RayRunner(RemoteRunner):
    """A Ray actor."""

    def __init__(self, number: int, on_message: Any, on_death: Any, ray: Any, actor: Any) -> None:
        super().__init__(number, on_message, on_death)
        self.ray, self.actor = ray, actor
        self.listening = asyncio.get_running_loop().create_task(self._listen())

    async def _listen(self) -> None:
        why = "its stream ended"
        try:
            async for reference in self.actor.messages.options(num_returns="streaming").remote():
                self.received(await reference)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            why = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"
        self.died(f"Ray actor: {why}")

    def send(self, data: bytes) -> None:
        if not self.is_dead:
            with contextlib.suppress(self.ray.exceptions.RayError):
                self.actor.receive.remote(data)

    def kill(self) -> None:
        with contextlib.suppress(self.ray.exceptions.RayError, ValueError):
            self.ray.kill(self.actor, no_restart=True)

    async def closed(self) -> None:
        await asyncio.wait([self.listening], timeout=3.0)
        self.listening.cancel()


class RayPool(RemotePool):
    """Runners as Ray actors, one per CPU of the cluster unless the config says otherwise."""

    def __init__(self, context: RunnerContext) -> None:
        self.ray = need_ray()
        size = context.config.runners or max(1, int(self.ray.cluster_resources().get("CPU", 1)))
        super().__init__(context, size)

    async def make_runner(self, number: int) -> RemoteRunner:
        options = {"max_concurrency": 1000, "max_restarts": 0} | dict(self.context.config.ray_options)
        actor = self.ray.remote(RunnerActor).options(**options).remote()
        return RayRunner(number, self.received, self.died, self.ray, actor)
