"""A forked child that does what it is told, one piece of work after the other, until it is ended or killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from multiprocessing import Pipe
from typing import Any


class Actor:
    """Runs callables of the parent's memory (the child is a fork) and sends back what they return or raise."""

    def __init__(self, **work: Callable[..., Any]) -> None:
        self.pipe, theirs = Pipe()
        self.pid = os.fork()
        if self.pid == 0:
            self.pipe.close()  # so that it ends with its parent
            try:
                self._obey(theirs, work)
            finally:
                os._exit(0)
        theirs.close()

    def _obey(self, pipe: Any, work: dict[str, Callable[..., Any]]) -> None:
        while True:
            name, args = pipe.recv()
            try:
                pipe.send((True, work[name](*args)))
            except Exception as error:
                pipe.send((False, error))

    def tell(self, name: str, *args: Any) -> None:
        """Start a piece of work."""
        self.pipe.send((name, args))

    def answer(self, timeout_s: float = 200.0) -> Any:
        """What the piece of work returned; raises what it raised."""
        assert self.pipe.poll(timeout_s), "the child does not answer"
        good, found = self.pipe.recv()
        if not good:
            raise found
        return found

    def do(self, name: str, *args: Any) -> Any:
        self.tell(name, *args)
        return self.answer()

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        self.pipe.close()
