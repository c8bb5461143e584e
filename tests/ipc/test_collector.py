"""The first and last things that a collector's process does, done here one by one."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from multiprocessing import Pipe
from types import SimpleNamespace
from typing import Any, cast

import pytest

import recollect as rc
from recollect.ipc.runner import collector
from recollect.ipc.runner.collector import CollectorContext, CollectorJob
from recollect.ipc.runner.control import Control, Counters
from recollect.system import is_portable

pytestmark = pytest.mark.usefixtures("leaves_nothing")


def job(control: str = "", counters: str = "", learner: int = 0, fn: Any = None) -> CollectorJob:
    call = SimpleNamespace(unpack=lambda: (fn, None, {}))
    return CollectorJob(0, 2, 7, "cpu", 1, 3.0, control, counters, learner, cast(Any, call))


@pytest.fixture
def control() -> Iterator[Control]:
    made = Control.create(1)
    yield made
    made.close()


# -- joining


@pytest.mark.parametrize("gone", ["the learner", "its memory"])
def test_one_that_comes_too_late_has_nothing_to_do(
    gone: str, control: Control, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The learner was killed while this process imported."""
    monkeypatch.setattr(collector._core, "watch_orphan", lambda *args: pytest.fail("it joined"))
    name = control.name
    if gone == "its memory":
        control.close()
    here, there = Pipe(duplex=False)
    assert collector._joined(job(name, learner=0), here) is None
    here.close()
    there.close()


def test_one_that_comes_in_time_watches_the_learner_by_two_descriptors(
    control: Control, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched: list[Any] = []
    monkeypatch.setattr(collector._core, "watch_orphan", lambda *args: watched.append(args))
    here, there = Pipe(duplex=False)
    joined = collector._joined(job(control.name, learner=collector._core.process_word(os.getpid())), here)
    assert joined is not None
    ((fds, looked_at, _, stop_at, wake_at, grace_s),) = watched
    learner = collector._core.own_word()
    assert fds[0] == here.fileno() and (len(fds), looked_at) == ((1, learner) if is_portable() else (2, 0))
    assert (stop_at, wake_at, grace_s) == (control.stop_at, control.wake_at, 5.0)
    for fd in fds[1:]:
        os.close(fd)
    joined.close()
    here.close()
    there.close()


# -- working


@pytest.fixture
def work(control: Control, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Runs a function as a collector does."""
    monkeypatch.setattr(collector, "_set_threads", lambda n: None)
    counters = Counters()
    yield lambda fn: collector._work(job(counters=counters.name, fn=fn), control)
    counters.cleanup()


def test_one_that_returns_has_done_its_permit(control: Control, work: Callable[..., None]) -> None:
    control.grant(0, 1, 1)
    work(lambda ctx: ctx.permit(0.0))
    assert control.has_taken(0) and control.has_done(0)


def test_torch_that_came_with_the_arguments_is_told_its_threads(
    control: Control, work: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Any] = []
    monkeypatch.setattr(collector, "_set_threads", told.append)
    work(lambda ctx: told.append("works"))
    assert told == [1, "works"]


def test_it_beats_before_it_begins(work: Callable[..., None]) -> None:
    """So that one that hangs in its first call is seen to."""
    seen: list[Any] = []
    work(lambda ctx: seen.append(ctx._counters.read()))
    assert (seen[0].phase, seen[0].n_beats, seen[0].n_steps) == ("start", 1, 0)


def test_one_that_comes_too_late_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[Any] = []
    monkeypatch.setattr(collector, "_lead_own_group", lambda: 17)
    monkeypatch.setattr(collector, "_set_threads", lambda n: None)
    monkeypatch.setattr(collector, "_joined", lambda job, alive: None)
    monkeypatch.setattr(collector, "_work", lambda job, control: pytest.fail("it worked"))
    monkeypatch.setattr(collector, "_end_own_group", lambda *args: ended.append(args))
    collector.run_collector(job(learner=5), None, cast(Any, None))
    assert ended == [(17, 5)]


def test_every_library_with_threads_of_its_own_is_told_their_number(monkeypatch: pytest.MonkeyPatch) -> None:
    names, told = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), list[int]()
    for name in names:
        monkeypatch.setenv(name, "64")
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(set_num_threads=told.append))
    collector._set_threads(3)
    assert [os.environ[name] for name in names] == ["3"] * 3 and told == [3]


@pytest.mark.parametrize("stops", [True, False])
def test_a_closed_object_is_an_error_unless_it_is_time_to_stop(
    stops: bool, control: Control, work: Callable[..., None]
) -> None:
    def closed(ctx: Any) -> None:
        if stops:
            control.stop()
        raise rc.ClosedError("ring: was closed")

    if stops:
        work(closed)
    else:
        with pytest.raises(rc.ClosedError, match="ring: was closed"):
            work(closed)


def test_a_look_from_a_wait_ends_it_when_it_is_time_to_stop_and_is_progress(control: Control) -> None:
    ctx = CollectorContext(job(), cast(Any, None), control, cast(Any, None))
    assert ctx.look() is True and control.times_ns(0)[0] > 0
    control.stop()
    with pytest.raises(rc.ClosedError, match="is stopping"):
        ctx.look()


def test_without_a_timeout_a_permit_is_waited_for_as_long_as_the_runner_says() -> None:
    words = SimpleNamespace(finish=lambda lane: None, take=lambda lane, seconds, on_take: seconds)
    ctx = CollectorContext(job(), cast(Any, None), cast(Any, words), cast(Any, None))
    assert (ctx.permit(), ctx.permit(0.5)) == (3.0, 0.5)


# -- groups and signals


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """What is done to process groups; nothing is. SIGINT is as before when the test is over."""
    noted: list[Any] = []
    for name in ("setpgid", "killpg"):
        monkeypatch.setattr(os, name, lambda *args, name=name: noted.append((name, *args)))
    handler = signal.getsignal(signal.SIGINT)
    yield noted
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # drops what was not heard
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    signal.signal(signal.SIGINT, handler)


def test_what_was_pressed_while_it_started_is_dropped_and_later_heard(calls: list[Any]) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    signal.pthread_kill(threading.get_ident(), signal.SIGINT)  # to no other thread, which may not block it
    assert collector._lead_own_group() == os.getpgrp()
    assert calls == [("setpgid", 0, 0)]
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_at_its_end_it_goes_home_and_ends_the_group_it_led(calls: list[Any]) -> None:
    collector._end_own_group(17, 0)
    assert calls == [("setpgid", 0, 17), ("killpg", os.getpid(), signal.SIGKILL)]
    assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN  # nobody interrupts that


@pytest.mark.parametrize("lives", [True, False])
def test_without_a_home_it_goes_with_its_group_if_the_learner_is_dead(
    lives: bool, calls: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else that is the learner's to do."""

    def refused(pid: int, group: int) -> None:
        raise PermissionError("no such group in this session")

    monkeypatch.setattr(os, "setpgid", refused)
    collector._end_own_group(17, collector._core.process_word(os.getpid()) if lives else 0)
    assert calls == ([] if lives else [("killpg", 0, signal.SIGKILL)])
