"""A coordinator for callers elsewhere: in a thread of its own, or as a named Ray actor."""

from __future__ import annotations

import asyncio
import concurrent.futures
import inspect
import math
import threading
from collections.abc import Callable, Generator
from time import monotonic
from typing import Any, Self

from recollect import interrupts
from recollect._core import Condition
from recollect.errors import ClosedError
from recollect.rollout.config import Config
from recollect.rollout.models.openai import OpenAIHandle, OpenAIModel
from recollect.rollout.runners.ray import need_ray


class PendingCall:
    """A call under way in the coordinator's thread: `await` it in any loop, or ask for its `result`."""

    # A Ctrl-C inside of a Future can leave its lock taken, and then the coordinator's thread would wait for ever. So
    # the Future is touched only while Ctrl-C is deferred, and waits are on a condition of our own.
    def __init__(self, future: concurrent.futures.Future[Any]) -> None:
        self._future, self._changed, self._is_done = future, Condition(), False
        future.add_done_callback(self._wake)

    def _wake(self, future: concurrent.futures.Future[Any]) -> None:
        with self._changed:
            self._is_done = True
            self._changed.notify_all()

    @property
    def is_done(self) -> bool:
        """Whether it has a result or an error."""
        return self._is_done

    def __await__(self) -> Generator[Any, None, Any]:
        return asyncio.wrap_future(self._future).__await__()

    def result(self, timeout: float | None = None) -> Any:
        """Block until it is done."""
        end = math.inf if timeout is None else monotonic() + timeout
        with self._changed:
            while not self._is_done and (left := end - monotonic()) > 0:
                self._changed.wait(min(left, 60.0))
        with interrupts.deferred():
            return self._future.result(0.0)


class HandleMethod:
    """A method of the coordinator: called it blocks, by `.remote(...)` it can be awaited."""

    def __init__(self, submit: Callable[[str, Any, Any], concurrent.futures.Future[Any]], name: str) -> None:
        self._submit, self._name = submit, name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.remote(*args, **kwargs).result()

    def remote(self, *args: Any, **kwargs: Any) -> PendingCall:
        """Start the call and return at once."""
        with interrupts.deferred():
            return PendingCall(self._submit(self._name, args, kwargs))


class LocalHandle:
    """A coordinator that any thread and any loop may call.

    Ownership: owns the thread, its loop and the coordinator; `close()` ends all three.
    Concurrency: any thread.
    """

    def __init__(self, cls: Any, config: Any, models: Any, auxiliary: Any = None) -> None:
        self._coordinator = cls(config, models, auxiliary)
        self._lock = threading.Lock()  # taken only while Ctrl-C is deferred
        self._ending: PendingCall | None = None  # the shutdown, once `close` was called
        self._is_closed = False  # and a call of `close` has told how it ended
        self._thread: threading.Thread | None = None
        try:
            with interrupts.deferred():
                self._loop = asyncio.new_event_loop()
                name = f"{config.name}-coordinator"
                self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
                self._thread.start()
        except BaseException:  # nobody has it, and could close it
            if self._thread is not None and self._thread.ident is not None:
                self.close()
            raise

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
            left = asyncio.all_tasks(self._loop)  # of calls of other threads, which would wait for ever
            for task in left:
                task.cancel()
            if left:
                self._loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        finally:
            self._loop.close()

    def _submit(self, name: str, args: Any, kwargs: Any) -> concurrent.futures.Future[Any]:
        with self._lock:
            if self._ending is not None:
                raise ClosedError("coordinator: the handle was closed; make another with get_local")
            return self._call(name, args, kwargs)

    def _call(self, name: str, args: Any, kwargs: Any) -> concurrent.futures.Future[Any]:
        async def call() -> Any:
            found = getattr(self._coordinator, name)
            if callable(found):
                found = found(*args, **kwargs)
            return await found if inspect.isawaitable(found) else found

        return asyncio.run_coroutine_threadsafe(call(), self._loop)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or not hasattr(type(self._coordinator), name):
            raise AttributeError(f"coordinator has no {name!r}")
        if isinstance(getattr(type(self._coordinator), name), property):
            return getattr(self._coordinator, name)
        return HandleMethod(self._submit, name)

    def close(self) -> None:
        """Shut down and end the thread; may be called twice.

        A Ctrl-C meanwhile does not stop the shutdown: it goes on in the thread, and the next call waits for it.
        """
        with interrupts.deferred():
            ending = self._end()
        if self._is_closed:
            return
        try:
            ending.result()
        finally:
            with interrupts.deferred():
                if ending.is_done and self._thread is not None:
                    self._is_closed = True
                    self._thread.join(10.0)

    def _end(self) -> PendingCall:
        """Have the coordinator shut down, once, and its loop stop when that is done."""
        with self._lock:
            if self._ending is None:
                shutdown = self._call("shutdown", (), {})
                self._ending = PendingCall(shutdown)
                shutdown.add_done_callback(lambda _: self._loop.call_soon_threadsafe(self._loop.stop))
            return self._ending

    def __enter__(self) -> Self:
        try:
            HandleMethod(self._submit, "prepare")()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


ASYNC = (
    "prepare", "shutdown", "submit_batch", "finalize_train_batch", "finalize_eval_batch", "abort_batch",
    "process_experiences", "sync_weights",
)  # fmt: skip
PLAIN = ("batches", "batch_state", "stats", "why_waiting")


class CoordinatorActor:
    """A coordinator behind Ray: each method is the coordinator's own, in the actor's loop."""

    def __init__(self, cls: Any, config: Config, models: list[Any], auxiliary: list[list[Any]]) -> None:
        self.config = config
        opened = [_opened(spec) for spec in models]
        self.inner = cls(config, opened, [[_opened(spec) for spec in specs] for specs in auxiliary])

    async def difference(self, config: Config) -> str | None:
        """The first field in which another config differs."""
        for name in config.__struct_fields__:
            if _plain(getattr(config, name)) != _plain(getattr(self.config, name)):
                return name
        return None

    async def model_version(self) -> int:
        """The lowest version that the rollout models serve."""
        return int(self.inner.model_version)

    async def get(self, n: int, timeout: float = 60.0, min_version: int | None = None) -> Any:
        """Take n rows out of a queue sink, as samples of the space."""
        x = await self.inner.sink.get(n, timeout, min_version)
        return x.get_at(slice(None))


def _delegate(name: str) -> Any:
    async def method(self: CoordinatorActor, *args: Any, **kwargs: Any) -> Any:
        found = getattr(self.inner, name)(*args, **kwargs)
        return await found if name in ASYNC else found

    method.__name__ = name
    return method


for _name in (*ASYNC, *PLAIN):
    setattr(CoordinatorActor, _name, _delegate(_name))


def _plain(value: Any) -> Any:
    """A value that compares equal in two processes: functions by name, objects by type and contents."""
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    if callable(value) or type(value).__module__.partition(".")[0] not in ("builtins", "recollect"):
        return getattr(value, "__qualname__", repr(type(value)))
    return value


def _sent(model: Any) -> Any:
    """A model as it goes to the actor: its handle, or the factory that makes it there."""
    handle = getattr(model, "handle", None)
    if handle is not None:
        return handle
    if callable(model):
        return model
    raise TypeError(
        f"models: must have a handle or be factories called over there, got {type(model).__name__}; "
        "pass a function that returns the model"
    )


def _opened(spec: Any) -> Any:
    return OpenAIModel.from_handle(spec) if isinstance(spec, OpenAIHandle) else spec()


def get_actor(cls: Any, config: Config, models: list[Any], auxiliary: list[Any] | None) -> Any:
    """Return the actor `config.name` of this namespace, or make it; ValueError if it has another config."""
    sent = [_sent(model) for model in models]
    roles = [[_sent(model) for model in role] for role in auxiliary or ()]
    ray = need_ray()
    options = {"name": config.name, "get_if_exists": True, "max_concurrency": 1000, "num_cpus": 0}
    actor = ray.remote(CoordinatorActor).options(**options).remote(cls, config, sent, roles)
    field = ray.get(actor.difference.remote(config), timeout=60.0)
    if field is not None:
        raise ValueError(
            f"config: the actor {config.name!r} is there with another {field}; use that or another name"
        )
    return actor
