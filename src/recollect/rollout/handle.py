"""A coordinator in a thread of its own, for scripts without an event loop and code written for an actor."""

from __future__ import annotations

import asyncio
import concurrent.futures
import inspect
import math
import threading
from collections.abc import Generator
from time import monotonic
from typing import Any, Self

from recollect import interrupts
from recollect._core import Condition
from recollect.errors import ClosedError


class Pending:
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


class Method:
    """A method of the coordinator: called it blocks, by `.remote(...)` it can be awaited."""

    def __init__(self, handle: LocalHandle, name: str) -> None:
        self._handle, self._name = handle, name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.remote(*args, **kwargs).result()

    def remote(self, *args: Any, **kwargs: Any) -> Pending:
        """Start the call and return at once."""
        with interrupts.deferred():
            return Pending(self._handle._submit(self._name, args, kwargs))


class LocalHandle:
    """A coordinator that any thread and any loop may call.

    Ownership: owns the thread, its loop and the coordinator; `close()` ends all three.
    Concurrency: any thread.
    """

    def __init__(self, cls: Any, config: Any, models: Any, auxiliary: Any = None) -> None:
        self._coordinator = cls(config, models, auxiliary)
        self._lock = threading.Lock()  # taken only while Ctrl-C is deferred
        self._ending: Pending | None = None  # the shutdown, once `close` was called
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
            left = asyncio.all_tasks(self._loop)  # calls of other threads, who would wait for ever
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
        return Method(self, name)

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

    def _end(self) -> Pending:
        """Have the coordinator shut down, once, and its loop stop when that is done."""
        with self._lock:
            if self._ending is None:
                shutdown = self._call("shutdown", (), {})
                self._ending = Pending(shutdown)
                shutdown.add_done_callback(lambda _: self._loop.call_soon_threadsafe(self._loop.stop))
            return self._ending

    def __enter__(self) -> Self:
        try:
            Method(self, "prepare")()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
