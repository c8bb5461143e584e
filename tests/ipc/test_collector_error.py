"""Errors of collectors arrive as they were, whatever they are; sending never blocks; deaths are explained."""

from __future__ import annotations

import fcntl
import json
import multiprocessing
import os
import queue
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

import recollect as rc
from recollect.ipc import collector_error as ce
from recollect.ipc.collector_error import (
    LIMIT,
    CollectorTraceback,
    ExceptionWrapper,
    collector_error_guard,
    create_error_pipe,
    format_collector_death,
)


class Mine(Exception):
    """Of a module that is loaded on both sides."""


class Picky(Exception):
    def __init__(self, a: int, b: int) -> None:
        super().__init__(a, b)


class Unpicklable(Exception):
    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.lock = threading.Lock()


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def wrapped(error: BaseException, where: str = "collector 3") -> ExceptionWrapper:
    """As it arrives on the other side."""
    try:
        raise error
    except BaseException:
        return ExceptionWrapper.from_bytes(ExceptionWrapper(where).to_bytes())


@pytest.mark.parametrize(
    "error",
    [TypeError("wrong"), KeyError("name"), ValueError(""), Mine("x"), Unpicklable("y"), rc.EmptyError("none"),
     KeyboardInterrupt("stop"), OSError("disk"), rc.MissingLeafError("obs: is needed"), FloatingPointError("é\n☃")],
    ids=lambda e: type(e).__name__,
)  # fmt: skip
def test_the_same_type_and_text_are_raised(error: BaseException) -> None:
    with pytest.raises(type(error)) as found:
        wrapped(error).reraise()
    assert type(found.value) is type(error) and str(found.value) == str(error)
    assert isinstance(found.value.__cause__, CollectorTraceback)
    assert "in wrapped" in str(found.value.__cause__) and "raised in collector 3" in found.value.__notes__


def local_error() -> BaseException:
    class Local(Exception):
        pass

    return Local("here")


@pytest.mark.parametrize(
    ("error", "name", "text"),
    [
        (local_error(), "Local", "here"),
        (Picky(1, 2), "Picky", r"\(1, 2\)"),
        (UnicodeDecodeError("utf8", b"x", 0, 1, "bad"), "UnicodeDecodeError", "bad"),
        (ExceptionGroup("two", [ValueError("a")]), "ExceptionGroup", "two"),
    ],
)
def test_what_cannot_be_made_again_is_a_collector_error(error: BaseException, name: str, text: str) -> None:
    with pytest.raises(rc.CollectorError, match=text) as found:
        wrapped(error).reraise()
    assert found.value.type_name.endswith(name) and found.value.__cause__ is not None


def test_an_exception_that_cannot_be_printed_arrives() -> None:
    wrapper = wrapped(Unprintable())
    assert "cannot be printed" in wrapper.message
    with pytest.raises(Unprintable):
        wrapper.reraise()


def test_nothing_is_imported_and_no_other_object_is_called() -> None:
    for name in (
        "antigravity.Error",
        "os.system",
        "builtins.print",
        "builtins.int",
        "builtins.str",
        "no_such.Thing",
        "",
        "x",
    ):
        wrapper = wrapped(ValueError("echo hello"))
        wrapper.type_name = name
        with pytest.raises(rc.CollectorError):
            wrapper.reraise()
    import sys

    assert "antigravity" not in sys.modules


def test_notes_and_causes_arrive() -> None:
    error = ValueError("outer")
    error.add_note("look at lane 2")
    error.__cause__ = KeyError("inner")
    with pytest.raises(ValueError) as found:
        wrapped(error).reraise()
    assert "look at lane 2" in found.value.__notes__ and "inner" in str(found.value.__cause__)


class Unlisted:
    def __str__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize("notes", [None, 3, [Unlisted()]])
def test_notes_that_cannot_be_printed_stop_no_report(notes: Any) -> None:
    error = ValueError("outer")
    error.__notes__ = notes
    conn, event = Recorder(), threading.Event()
    with pytest.raises(ValueError) as found, collector_error_guard(conn, None, event, "lane 2"):
        raise error
    assert found.value is error and event.is_set()
    assert conn.sent[0].message == "outer" and "cannot be printed" in conn.sent[0].notes[0]


def test_made_outside_of_except() -> None:
    with pytest.raises(RuntimeError, match="inside `except`"):
        ExceptionWrapper("x")


# -- the pipe


@pytest.mark.process
def test_a_huge_error_is_cut_in_the_middle_and_sending_never_blocks() -> None:
    receive, send = create_error_pipe()
    text = "begin" + "\x01é" * 500_000 + "end"
    try:
        raise ValueError(text)
    except ValueError:
        wrapper = ExceptionWrapper("w" * 10_000)
    assert len(wrapper.to_bytes()) <= LIMIT == 60 * 1024
    assert send.send(wrapper) is True
    more = [send.send(wrapper) for _ in range(50)]  # nobody reads
    assert not any(more[-10:])
    found = receive.recv()
    assert (
        found.message.startswith("begin") and found.message.endswith("end") and "bytes cut" in found.message
    )
    assert "ValueError" in found.traceback_text[-200:] or found.traceback_text.rstrip().endswith("end")
    send.close()
    while receive.poll():
        try:
            receive.recv()
        except EOFError:
            break
    receive.close()


def test_a_report_is_cut_to_what_the_pipe_still_takes() -> None:
    receive, send = create_error_pipe()
    fcntl.fcntl(send.fileno(), fcntl.F_SETPIPE_SZ, 16384)
    try:
        raise ValueError("x" * 50_000)
    except ValueError:
        wrapper = ExceptionWrapper("here")
    sender = threading.Thread(target=send.send, args=(wrapper,), daemon=True)
    sender.start()
    sender.join(5)
    blocked = sender.is_alive()
    assert "bytes cut" in receive.recv().message
    sender.join(5)
    assert not blocked
    receive.close()
    send.close()


class Other(Exception):
    def __new__(cls, *args: Any) -> Any:
        return KeyError(*args)


def test_a_type_that_makes_others_is_not_taken_for_itself() -> None:
    wrapper = ExceptionWrapper.__new__(ExceptionWrapper)
    wrapper.__dict__.update(
        type_name=f"{__name__}.Other", message="m", traceback_text="t", where="w", notes=()
    )
    with pytest.raises(rc.CollectorError, match="Other: m"):
        wrapper.reraise()


def test_what_arrives_is_text_and_garbage_is_said() -> None:
    json.loads(wrapped(ValueError("x")).to_bytes())
    for data in (b"\x80\x04junk", b"[]", b"{}", b""):
        with pytest.raises(rc.CollectorError, match="cannot be read"):
            ExceptionWrapper.from_bytes(data).reraise()


def fail(send: Any, event: Any) -> None:
    with collector_error_guard(send, None, event, "lane 1"):
        raise Unpicklable("boom")


@pytest.mark.process
def test_from_a_spawned_process(capfd: pytest.CaptureFixture[str]) -> None:
    context: Any = multiprocessing.get_context("spawn")
    receive, send = create_error_pipe()
    event = context.Event()
    child = context.Process(target=fail, args=(send, event))
    child.start()
    send.close()
    assert receive.poll(40) and event.wait(40)
    with pytest.raises(Exception, match="boom") as found:
        receive.recv().reraise()
    assert type(found.value).__name__ in ("Unpicklable", "CollectorError")
    with pytest.raises(EOFError):
        receive.recv()
    child.join(40)
    assert child.exitcode == 1
    child.close()
    receive.close()
    del event
    capfd.readouterr()


# -- the guard


class Recorder:
    def __init__(self, fails: bool = False) -> None:
        self.sent: list[ExceptionWrapper] = []
        self.fails = fails

    def send(self, wrapper: ExceptionWrapper) -> None:
        if self.fails:
            raise BrokenPipeError
        self.sent.append(wrapper)


@pytest.mark.parametrize("error", [ValueError("a"), KeyboardInterrupt(), SystemExit(3), GeneratorExit()])
@pytest.mark.parametrize("fails", [False, True])
def test_the_guard_reports_stops_and_re_raises(error: BaseException, fails: bool) -> None:
    conn, event = Recorder(fails), threading.Event()
    with pytest.raises(type(error)) as found, collector_error_guard(conn, queue.Queue(), event, "lane 2"):
        raise error
    assert found.value is error and event.is_set()
    assert [w.where for w in conn.sent] == ([] if fails else ["lane 2"])


@pytest.mark.parametrize("code", [None, 0])
def test_a_clean_exit_passes(code: Any) -> None:
    conn, event = Recorder(), threading.Event()
    with pytest.raises(SystemExit), collector_error_guard(conn, None, event, "x"):
        raise SystemExit(code)
    with collector_error_guard(conn, None, event, "x"):
        pass
    assert not conn.sent and not event.is_set()


def test_everything_may_be_none() -> None:
    with pytest.raises(ZeroDivisionError), collector_error_guard(None, None, None, "x"):
        1 / 0


def test_the_queue_does_not_hold_up_the_exit() -> None:
    class Queue:
        cancelled = False

        def cancel_join_thread(self) -> None:
            self.cancelled = True

    q = Queue()
    with pytest.raises(ValueError), collector_error_guard(None, q, None, "x"):
        raise ValueError
    assert q.cancelled


# -- deaths


@pytest.mark.parametrize(
    ("exitcode", "words"),
    [
        (-9, "SIGKILL out of memory free"),
        (137, "SIGKILL out of memory"),
        (-7, "SIGBUS shrank disk is full"),
        (135, "SIGBUS"),
        (-11, "SIGSEGV native stderr"),
        (139, "SIGSEGV native"),
        (-6, "SIGABRT native"),
        (-4, "SIGILL native"),
        (-15, "SIGTERM"),
        (1, "exit code 1"),
        (0, "exit code 0"),
        (128, "exit code 128"),
        (255, "exit code 255"),
        (-64, "SIGRTMAX"),
    ],
)
def test_exit_codes_are_explained(exitcode: int, words: str) -> None:
    text = format_collector_death(exitcode, None)
    for word in words.split():
        assert word in text
    assert format_collector_death(exitcode, "") == text
    assert format_collector_death(exitcode, "Traceback: x") == "Traceback: x"


def test_a_collector_that_lives() -> None:
    assert "not ended" in format_collector_death(None, None)


def test_the_kernels_count_of_kills(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "memory.events").write_text("low 0\noom 3\noom_kill 2\n")
    (tmp_path / "cgroup").write_text("0::/job\n")
    assert ce._oom_kills(tmp_path, tmp_path / "cgroup") == 2
    assert ce._oom_kills(tmp_path, tmp_path / "none") is None
    (tmp_path / "memory" / "job").mkdir(parents=True)  # a cgroup of the first kind
    (tmp_path / "memory" / "job" / "memory.oom_control").write_text("under_oom 0\noom_kill 4\n")
    (tmp_path / "cgroup").write_text("5:memory:/job\n")
    assert ce._oom_kills(tmp_path, tmp_path / "cgroup") == 4
    monkeypatch.setattr(ce, "_oom_kills", lambda: 2)
    assert "2 kills for memory" in format_collector_death(-signal.SIGKILL, None)


def test_a_real_death_is_explained() -> None:
    pid = os.fork()
    if pid == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert "SIGKILL" in format_collector_death(code, None)
