"""Ctrl-C at every point of a call in turn, and what must hold afterwards.

`interrupted(call, n, at)` runs a call and interrupts it at its n-th point. There are two kinds of points:

- "signal": where CPython 3.11 runs signal handlers: as a function begins, after a call, at a jump backwards. The signal
  is pending when the interpreter arrives there, as a real one is, in every Python frame that the call runs.
- "line": before every line of this package. Some of these no signal can reach. Those that only leave a `with` block, or
  the end of a `try` inside of it, are left out: an exception there comes from no signal, and nothing could guard it.
"""

from __future__ import annotations

import dis
import os
import signal
import sys
import threading
from _thread import interrupt_main
from collections.abc import Callable
from functools import cache, partial
from types import CodeType, FrameType
from typing import Any

import recollect

HERE = os.path.dirname(recollect.__file__)
POINTS = ("signal", "line")
_ASKS = {
    dis.opmap[name] for name in ("CALL", "CALL_FUNCTION_EX", "RESUME", "JUMP_BACKWARD") if name in dis.opmap
} | {code for name, code in dis.opmap.items() if "JUMP_BACKWARD_IF" in name}


def interrupted(
    call: Callable[[], Any], n: int, at: str = "signal", number: signal.Signals = signal.SIGINT
) -> bool:
    """Run a call, interrupted at its n-th point by Ctrl-C or another signal; False if it was over before."""
    tracer = _Signals(n, number) if at == "signal" else _Lines(n)
    try:
        try:
            sys.settrace(tracer)
            call()
        finally:
            sys.settrace(None)
            _arrive()
    except KeyboardInterrupt:
        pass
    return tracer.n < 0


def _arrive() -> None:
    """Let a signal that is still pending come."""


class _Lines:
    def __init__(self, n: int) -> None:
        self.n = n

    def __call__(self, frame: FrameType, event: str, arg: Any) -> Any:
        if not frame.f_code.co_filename.startswith(HERE):
            return None
        return self.step

    def step(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "line" and frame.f_lasti not in _exits(frame.f_code):
            self.n -= 1
            if self.n == -1:
                raise KeyboardInterrupt
        return self.step


class _Signals:
    def __init__(self, n: int, number: signal.Signals) -> None:
        self.n = n
        # Called by unpacking: after that, unlike after a call, the interpreter runs no signal handlers.
        self._trip = map(interrupt_main, (number,))

    def __call__(self, frame: FrameType, event: str, arg: Any) -> Any:
        if frame.f_code.co_filename.startswith("<frozen") or frame.f_code is _END:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self.step

    def step(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "opcode" and frame.f_code.co_code[frame.f_lasti] in _ASKS:
            self.n -= 1
            if self.n == -1:
                (_,) = self._trip
        return self.step


_END = interrupted.__code__


@cache
def _exits(code: CodeType) -> frozenset[int]:
    """Where nothing is left of a `with` block but to leave it."""
    steps = list(dis.get_instructions(code))
    found = set()
    guarded = [range(e.start, e.end) for e in dis._parse_exception_table(code)]  # type: ignore[attr-defined]
    for k, step in enumerate(steps):
        if step.opname == "NOP" and k and not any(step.offset in some for some in guarded):
            found.add(
                step.offset
            )  # the end of a `try` within: no handler guards it, and no signal comes there
        for at, later in enumerate(steps[k : k + 8], k):
            ahead = steps[at : at + 4]
            if later.opname == "WITH_EXCEPT_START" or (
                [s.opname for s in ahead] == ["LOAD_CONST"] * 3 + ["PRECALL"]
                and all(s.argval is None for s in ahead[:3])
            ):
                found.add(step.offset)
            if later.opname in ("PRECALL", "CALL_FUNCTION_EX") or later.opname.startswith("STORE"):
                break
    return frozenset(found)


class Hang(AssertionError):
    """Something waits that should not."""


def apart(call: Callable[[], Any], seconds: float = 100.0) -> Any:
    """Run a call in a thread of its own, which finds every lock that was left taken."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append((call(), None))
        except BaseException as error:
            found.append((None, error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if not found:
        frame = sys._current_frames().get(thread.ident or 0)
        where = "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"
        raise Hang(f"still waiting after {seconds:g} s, at {where}")
    value, error = found[0]
    if error is not None:
        raise error
    return value


class Case:
    """A call of an object and what can be seen of it; subclasses give `make`, `call` and `look`."""

    name = ""

    def make(self) -> Any:
        raise NotImplementedError

    def call(self, thing: Any) -> Any:
        raise NotImplementedError

    def look(self, thing: Any) -> Any:
        """What there is, as something that can be compared."""
        raise NotImplementedError

    def saved(self, thing: Any) -> Any:
        """Close it, and look at what is left, if anything is."""
        thing.close()

    def run(self, at: str, first: int = 0, step: int = 1, most: int | None = None) -> int:
        """Interrupt the call at every `step`-th point; return how many were tried."""
        thing = self.make()
        seen = [self.look(thing)]
        for _ in range(2):
            self.call(thing)
            seen.append(self.look(thing))
        last = self.saved(thing)
        is_saved = last is not None
        if is_saved:
            assert last == seen[-1], (self.name, last, seen[-1])
        n, tried = first, 0
        while most is None or tried < most:
            thing = self.make()
            came = interrupted(partial(self.call, thing), n, at)
            self.verify(thing, seen, f"{self.name}, {at} {n}", is_saved)
            if not came:
                break
            n, tried = n + step, tried + 1
        return tried

    def verify(self, thing: Any, seen: list[Any], where: str, is_saved: bool) -> None:
        found = apart(lambda: self.look(thing))
        if found not in seen[:2]:
            raise AssertionError(f"{where}: neither before nor after\n{found}\n{seen[0]}\n{seen[1]}")
        k = 1 if found == seen[1] else 0
        apart(lambda: self.call(thing))
        found = apart(lambda: self.look(thing))
        if found != seen[k + 1]:
            raise AssertionError(f"{where}: the next call went wrong\n{found}\n{seen[k + 1]}")
        left = apart(lambda: self.saved(thing))
        if is_saved and left != found:
            raise AssertionError(f"{where}: what is left differs\n{left}\n{found}")
