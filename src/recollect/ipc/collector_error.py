"""What went wrong in a collector, told to the learner as text: no pickle, no waiting, nothing to import."""

from __future__ import annotations

import builtins
import fcntl
import json
import re
import signal
import struct
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import Pipe
from pathlib import Path
from typing import Any, NoReturn

from recollect import errors
from recollect.budget import available_nbytes, human_nbytes
from recollect.errors import CollectorError
from recollect.system import is_portable
from recollect.text import safe, told

LIMIT = 60 * 1024  # bytes of one report; a pipe holds 64 KiB, so an empty one takes it at once
_SHARES = {"where": 1024, "type_name": 1024, "message": 8192, "notes": 8192}


class CollectorTraceback(Exception):
    """The traceback of the collector, as text; the cause of what `reraise` raises."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return f"\n{self.text}"


class ExceptionWrapper:
    """The exception being handled, as text; make it inside `except`, `reraise` it in another process.

    >>> try:
    ...     int("x")
    ... except ValueError:
    ...     wrapper = ExceptionWrapper("collector 0")
    >>> wrapper.type_name, ExceptionWrapper.from_bytes(wrapper.to_bytes()).message
    ('builtins.ValueError', "invalid literal for int() with base 10: 'x'")
    """

    def __init__(self, where: str) -> None:
        error = sys.exc_info()[1]
        if error is None:
            raise RuntimeError("ExceptionWrapper: must be made inside `except`, got no exception")
        kind = type(error)
        self.where = str(where)
        self.type_name = f"{kind.__module__}.{kind.__qualname__}"
        self.message = _message_of(error)
        self.notes = _notes_of(error)
        self.traceback_text = told(error)

    def to_bytes(self, limit: int = LIMIT) -> bytes:
        """Return the report as JSON of at most `limit` bytes, long texts cut in the middle."""
        share = limit - 512
        while True:
            parts = {
                "where": _cut(self.where, min(share, _SHARES["where"])),
                "type_name": _cut(self.type_name, min(share, _SHARES["type_name"])),
                "message": _cut(self.message, min(share, _SHARES["message"])),
                "notes": _cut("\n".join(self.notes), min(share, _SHARES["notes"])).splitlines(),
                "traceback_text": _cut(self.traceback_text, share),
            }
            data = json.dumps(parts, ensure_ascii=False).encode()
            if len(data) <= limit:
                return data
            share = share * 3 // 4

    @staticmethod
    def from_bytes(data: bytes) -> ExceptionWrapper:
        """Return the report that `to_bytes` wrote; what is none becomes a report that says so."""
        wrapper = ExceptionWrapper.__new__(ExceptionWrapper)
        try:
            obj = json.loads(data)
            texts = [str(obj[k]) for k in ("where", "type_name", "message", "traceback_text")]
            wrapper.notes = [str(note) for note in obj["notes"]]
        except (ValueError, KeyError, TypeError):
            texts = ["collector", "unknown", "a report that cannot be read", data.decode("utf-8", "replace")]
            wrapper.notes = []
        wrapper.where, wrapper.type_name, wrapper.message, wrapper.traceback_text = texts
        return wrapper

    def reraise(self) -> NoReturn:
        """Raise the same type, if it is a built-in, ours or of a module already imported; else CollectorError."""
        error = self._rebuilt()
        for note in self.notes:
            error.add_note(note)
        error.add_note(f"raised in {self.where}")
        raise error from CollectorTraceback(self.traceback_text)

    def _rebuilt(self) -> BaseException:
        kind = _loaded_type(self.type_name)
        if kind is not None:
            with suppress(Exception):
                made = kind(self.message)
                if type(made) is kind:
                    return made
        error = CollectorError(f"{self.type_name}: {self.message}")
        error.type_name = self.type_name
        return error

    def __repr__(self) -> str:
        return f"ExceptionWrapper({self.where!r}, {self.type_name}: {self.message})"


class ErrorReceiver:
    """The learner's end of an error pipe: `recv` gives an ExceptionWrapper rebuilt from text."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    def poll(self, timeout: float = 0.0) -> bool:
        """Tell whether there is a report (or the end of the pipe) within `timeout` seconds."""
        return bool(self._connection.poll(timeout))

    def recv(self) -> ExceptionWrapper:
        """Return the next report; EOFError when every sender is gone."""
        return ExceptionWrapper.from_bytes(self._connection.recv_bytes())

    def fileno(self) -> int:
        return int(self._connection.fileno())

    def close(self) -> None:
        self._connection.close()


class ErrorSender:
    """A collector's end of an error pipe; sending never blocks."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    def send(self, wrapper: ExceptionWrapper) -> bool:
        """Send a report, cut to what the pipe takes at once; False if earlier ones leave no room."""
        room = _room_in(self._connection.fileno())
        if room < 4096:
            return False
        self._connection.send_bytes(wrapper.to_bytes(min(LIMIT, room - 64)))
        return True

    def fileno(self) -> int:
        return int(self._connection.fileno())

    def close(self) -> None:
        self._connection.close()


def create_error_pipe() -> tuple[ErrorReceiver, ErrorSender]:
    """Return (receive, send); both can be arguments of a process."""
    receive, send = Pipe(duplex=False)
    return ErrorReceiver(receive), ErrorSender(send)


@contextmanager
def collector_error_guard(error_conn: Any, metrics_queue: Any, stop_event: Any, label: str) -> Iterator[None]:
    """Report whatever leaves the block to the learner, tell everybody to stop, and let it go on.

    A clean SystemExit passes. `metrics_queue` is told not to hold up the exit of this process with what nobody will
    read; it and `stop_event` may be None.
    """
    try:
        yield
    except BaseException as error:
        if isinstance(error, SystemExit) and error.code in (None, 0):
            raise
        wrapper = ExceptionWrapper(label)
        if error_conn is not None:
            with suppress(OSError, ValueError):  # the learner is gone: nobody to tell
                error_conn.send(wrapper)
        if stop_event is not None:
            stop_event.set()
        if hasattr(metrics_queue, "cancel_join_thread"):
            metrics_queue.cancel_join_thread()
        raise


def format_collector_death(exitcode: int | None, traceback_text: str | None) -> str:
    """Say why a collector is gone: its traceback, or what its exit code means and what to look at."""
    if traceback_text:
        return traceback_text
    if exitcode is None:
        return "the collector has not ended"
    number = -exitcode if exitcode < 0 else exitcode - 128 if exitcode > 128 else 0
    try:
        name = signal.Signals(number).name
    except ValueError:
        return f"the collector ended with exit code {exitcode} and left no traceback; see its stderr"
    hint = _HINTS.get(name)
    return f"the collector was ended by {name} (exit code {exitcode})" + (f": {hint()}" if hint else "")


_NATIVE = (
    "native code crashed; its last words are on the collector's stderr, PYTHONFAULTHANDLER=1 adds the stack"
)
_HINTS: dict[str, Any] = {
    "SIGKILL": lambda: f"out of memory? {_memory_report()}; or somebody killed it",
    "SIGBUS": lambda: "a mapped file shrank or its disk is full; look at the disk of memory-mapped buffers",
    **dict.fromkeys(("SIGSEGV", "SIGABRT", "SIGILL"), lambda: _NATIVE),
}


def _memory_report() -> str:
    kills, free = _oom_kills(), available_nbytes()
    said = (
        "the kernel's count of kills is unknown"
        if kills is None
        else f"its cgroup counts {kills} kills for memory"
    )
    return said + ("" if free is None else f", {human_nbytes(free)} are free now")


def _oom_kills(root: Path = Path("/sys/fs/cgroup"), cgroup: Path = Path("/proc/self/cgroup")) -> int | None:
    try:
        for line in cgroup.read_text().splitlines():
            number, controllers, path = line.split(":", 2)
            v1 = "memory" in controllers.split(",")
            if number == "0" or v1:
                place = root / ("memory" if v1 else "") / path.lstrip("/")
                name = "memory.oom_control" if v1 else "memory.events"
                found = re.search(r"^oom_kill (\d+)", (place / name).read_text(), re.MULTILINE)
                if found:
                    return int(found[1])
    except (OSError, ValueError):
        pass
    return None


def _message_of(error: BaseException) -> str:
    if len(error.args) == 1 and isinstance(error.args[0], str):
        return error.args[0]
    try:
        return str(error)
    except Exception:
        return f"<{type(error).__name__} that cannot be printed>"


def _notes_of(error: BaseException) -> list[str]:
    try:
        return [str(note) for note in getattr(error, "__notes__", ())]
    except Exception:  # anything may have been put there
        return ["<notes that cannot be printed>"]


def _cut(text: str, limit: int) -> str:
    """At most `limit` bytes of text: its beginning, a mark, its end."""
    data = safe(text).encode()
    if len(data) <= limit:
        return data.decode()
    mark = f"\n... {len(data) - limit} bytes cut ...\n"
    half = max(0, limit - len(mark)) // 2
    return data[:half].decode("utf-8", "ignore") + mark + data[len(data) - half :].decode("utf-8", "ignore")


def _loaded_type(name: str) -> type[BaseException] | None:
    """The exception class of that name, if its module is loaded here already; nothing is ever imported."""
    parts = name.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        found: Any = {"builtins": builtins, "recollect.errors": errors}.get(
            ".".join(parts[:cut]), sys.modules.get(".".join(parts[:cut]))
        )
        if found is None:
            continue
        for part in parts[cut:]:
            found = getattr(found, part, None)
        if isinstance(found, type) and issubclass(found, BaseException):
            return found
        return None
    return None


_LEAST_PIPE = 16 << 10  # bytes that a pipe takes on any system


def _room_in(fd: int) -> int:
    """Bytes that the pipe takes without waiting; whole pages that hold something count as full."""
    try:
        size = _LEAST_PIPE if is_portable() else fcntl.fcntl(fd, fcntl.F_GETPIPE_SZ)
        waiting = struct.unpack("i", fcntl.ioctl(fd, termios.FIONREAD, b"\0" * 4))[0]
    except OSError:
        return LIMIT
    return size if waiting == 0 else max(0, size - 2 * (-(-waiting // 4096) * 4096))
