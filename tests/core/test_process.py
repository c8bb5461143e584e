"""Waiting for a word of shared memory, and knowing processes by a word, between threads and processes."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.means import needs_linux

from recollect import _core
from recollect._core import Mapping, is_dead, own_word, pid_of, process_word
from recollect.system import is_portable

pytestmark = pytest.mark.process
LONG = 30.0  # seconds; nothing below takes them


def shared_words() -> Mapping:
    fd = os.memfd_create("test-process")
    try:
        os.ftruncate(fd, 4096)
        return Mapping(fd, 0, 4096, True)
    finally:
        os.close(fd)


@contextmanager
def child(work: Callable[[], bool]) -> Iterator[int]:
    """A forked child doing `work`; it must come to its end and return True."""
    pid = os.fork()
    if pid == 0:
        try:
            os._exit(0 if work() else 1)
        finally:
            os._exit(2)
    try:
        yield pid
    except BaseException:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        raise
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def wake_until_one_waits(mapping: Mapping, offset: int) -> None:
    """Return when somebody was really asleep on the word; the word is as before, so it sleeps again."""
    end = time.monotonic() + LONG
    while mapping.wake(offset) == 0 and not is_portable():  # a poll is not counted
        assert time.monotonic() < end, "nobody waits"
        os.sched_yield()


def test_a_wait_ends_at_its_deadline() -> None:
    mapping = shared_words()
    for timeout_s in (0.0, -1.0, 0.02):
        start = time.monotonic()
        assert mapping.wait(0, 0, timeout_s) is False
        assert timeout_s <= time.monotonic() - start < LONG
    assert mapping.wake(0) == 0


def test_a_word_that_has_changed_already_is_not_waited_for() -> None:
    mapping = shared_words()
    mapping.store(0, 7)
    assert mapping.wait(0, 0, LONG) is True
    mapping.store(0, 5 << 32)  # a wait looks at four bytes
    assert mapping.wait(0, 0, 0.0) is False and mapping.wait(4, 0, LONG) is True


def test_a_thread_is_woken_by_a_change_and_by_nothing_else() -> None:
    mapping = shared_words()
    answers: list[bool] = []
    waiter = threading.Thread(target=lambda: answers.append(mapping.wait(0, 0, LONG)))
    waiter.start()
    wake_until_one_waits(mapping, 0)  # it sleeps on, without the GIL: this thread runs
    wake_until_one_waits(mapping, 0)
    assert answers == []
    mapping.store(0, 1)
    mapping.wake(0)
    waiter.join(LONG)
    assert answers == [True]


@needs_linux
def test_as_many_wake_as_are_asked_to() -> None:
    mapping = shared_words()
    answers: list[bool] = []
    waiters = [threading.Thread(target=lambda: answers.append(mapping.wait(0, 0, LONG))) for _ in range(4)]
    for waiter in waiters:
        waiter.start()
    while mapping.wake(0) < 4:  # all asleep at one moment
        os.sched_yield()
    while mapping.wake(0, 2) < 2:
        os.sched_yield()
    assert mapping.wake(0, 0) in (0, 1)  # Linux wakes one at least
    mapping.store(0, 1)
    mapping.wake(0)
    for waiter in waiters:
        waiter.join(LONG)
    assert answers == [True] * 4


def test_a_process_waits_for_a_word_of_another() -> None:
    mapping = shared_words()
    with child(lambda: mapping.wait(64, 0, LONG) and mapping.load(64) == 9):
        wake_until_one_waits(mapping, 64)
        mapping.store(64, 9)
        mapping.wake(64)


def test_a_process_waits_until_its_deadline() -> None:
    mapping = shared_words()
    with child(lambda: not mapping.wait(64, 0, 0.02)):
        pass


def test_a_signal_ends_a_wait_early() -> None:
    mapping = shared_words()
    seen = threading.Event()
    done = threading.Event()
    main = threading.main_thread().ident
    assert main is not None

    def interrupt() -> None:
        while not done.wait(0.001):
            signal.pthread_kill(main, signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, lambda *_: seen.set())
    thread = threading.Thread(target=interrupt)
    try:
        thread.start()
        start = time.monotonic()
        assert mapping.wait(0, 0, LONG) is False
        assert time.monotonic() - start < LONG
        assert seen.wait(LONG)
    finally:
        done.set()
        thread.join()
        signal.signal(signal.SIGUSR1, before)


# -- who is alive


def test_this_process_has_a_word_of_its_own() -> None:
    word = process_word(os.getpid())
    assert word == own_word() and pid_of(word) == os.getpid() and word >> 32
    assert word == process_word(os.getpid()) and not is_dead(word)
    with child(lambda: process_word(os.getpid()) != word and not is_dead(word)):
        pass


def test_nobody() -> None:
    assert process_word(2**22 + 1) == 0  # above every pid
    assert is_dead(0) and is_dead(2**22 - 1)


def test_a_pid_that_was_given_to_another_process_is_not_that_process() -> None:
    word = process_word(os.getpid())
    assert is_dead(word + (1 << 32)) and is_dead(word ^ (1 << 40))


@needs_linux
def test_a_zombie_is_dead() -> None:
    hold, let_go = os.pipe()

    def work() -> bool:
        os.close(let_go)
        return os.read(hold, 1) == b""

    with child(work) as pid:
        os.close(hold)
        word = process_word(pid)
        assert not is_dead(word)
        os.close(let_go)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # ended, and not yet collected
        assert Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z"
        assert is_dead(word) and process_word(pid) == 0
    assert is_dead(word) and process_word(pid) == 0


def test_a_stopped_process_is_alive() -> None:
    mapping = shared_words()
    with child(lambda: mapping.wait(0, 0, LONG)) as pid:
        word = process_word(pid)
        os.kill(pid, signal.SIGSTOP)
        os.waitid(os.P_PID, pid, os.WSTOPPED)
        assert not is_dead(word)
        os.kill(pid, signal.SIGCONT)
        mapping.store(0, 1)
        mapping.wake(0)


def test_a_name_with_brackets_does_not_mislead() -> None:
    def work() -> bool:
        before = process_word(os.getpid())
        Path("/proc/self/comm").write_text(") Z 1 (2) 3")
        return process_word(os.getpid()) == before and not is_dead(before)

    with child(work):
        pass


# -- faults on purpose


def test_an_armed_process_is_killed_at_the_step() -> None:
    pid = os.fork()
    if pid == 0:
        _core.arm_fault(2)
        _core.fault_point()
        _core.fault_point()
        os.kill(os.getpid(), signal.SIGSTOP if _core.fault_countdown() == 0 else signal.SIGABRT)
        _core.fault_point()
        os._exit(0)
    os.waitid(os.P_PID, pid, os.WSTOPPED)  # two steps passed
    os.kill(pid, signal.SIGCONT)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL


def test_a_process_that_is_not_armed_passes() -> None:
    assert _core.fault_countdown() == -1
    _core.fault_point()
    assert _core.fault_countdown() == -1
