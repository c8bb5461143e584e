"""What a runner does for its collectors beside starting them: cores, devices, lanes, delays, owned pipelines."""

from __future__ import annotations

import os
import signal
import subprocess
from dataclasses import FrozenInstanceError, fields, is_dataclass
from time import monotonic_ns
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import numpy as np
import pytest
import torch
from tests.ipc import crews
from tests.ipc.crews import Say, runner, wait_until
from tests.means import needs_linux

import recollect as rc
from recollect.ipc import async_runner
from recollect.ipc.collector_error import ExceptionWrapper, create_error_pipe
from recollect.ipc.replay_pipelines import CPUPinnedDoubleBufferReplayPipeline, make_collector_pack
from recollect.ipc.runner import collector, control
from recollect.ipc.runner import processes as crew
from recollect.ipc.runner.control import Counters
from recollect.ipc.runner.processes import Crew, Death
from recollect.learners.episodes import EpisodeBoard

pytestmark = [pytest.mark.process, pytest.mark.timeout(90)]


class Clock:
    """Time as the test says."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(crew, "monotonic", found)
    return found


def dying_crew(max_restarts: int, has_rows: bool = True) -> tuple[Crew, Any]:
    """A crew whose one collector has just been killed; `_bury` decides what follows."""
    made = Crew(
        1, make_job=lambda *_: pytest.fail("started"), restart="on_death", max_restarts=max_restarts,
        start_method="spawn", deadline=60.0, count_rows=lambda lane, pid: int(has_rows),
    )  # fmt: skip
    made._ended = lambda m: Death(m.lane, -signal.SIGKILL, None)  # type: ignore[method-assign]
    return made, made.members[0]


def bury(made: Crew, member: Any, clock: Clock) -> float | None:
    """Let it die again; seconds until it is started again, None if it is not."""
    made._bury(member)
    if member.due is None:
        return None
    delay: float = member.due - clock.now
    member.recent.append(clock.now)
    member.due = None
    return delay


def a_report() -> ExceptionWrapper:
    """What a collector tells of its own exception."""
    try:
        raise ValueError("the simulator gave up")
    except ValueError:
        return ExceptionWrapper("collector 0")


class Lingering:
    """The end of a process that has not come."""

    def __init__(self) -> None:
        self.waited: list[float] = []

    def wait(self, timeout_s: float) -> bool:
        self.waited.append(timeout_s)
        return False


def test_a_collector_on_its_way_out_is_not_taken_for_one_that_reported() -> None:
    """Its pipe ends early in the end of an interpreter, which takes its time on a busy machine."""
    receive, send = create_error_pipe()
    ending = Lingering()
    member = crew.Member(0, Counters(), ending=ending, errors=receive)  # type: ignore[arg-type]
    assert not crew._has_ended(member)
    send.send(a_report())
    assert crew._has_ended(member)
    assert ending.waited == [0.0, 0.0, 0.5]  # one that has reported has a moment to exit by itself
    assert member.reported is not None and "gave up" in member.reported.traceback_text
    member.reported = None
    send.close()
    assert not crew._has_ended(member)
    receive.close()
    member.counters.cleanup()


def test_one_that_returned_is_named_and_is_no_death(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    made, member = dying_crew(max_restarts=9)
    made._ended = lambda m: Death(m.lane, 0, None)  # type: ignore[method-assign]
    assert bury(made, member, clock) is None
    assert (member.death, member.n_deaths) == (None, 0)
    assert "collector 0 returned; nothing more will come from it" in caplog.text
    made.close()


class TestDelays:
    def test_they_double_up_to_half_a_minute(self, clock: Clock) -> None:
        made, member = dying_crew(max_restarts=9)
        assert [bury(made, member, clock) for _ in range(8)] == [0.5, 1, 2, 4, 8, 16, 30, 30]
        made.close()

    def test_restarts_are_counted_over_ten_minutes(self, clock: Clock) -> None:
        made, member = dying_crew(max_restarts=2)
        assert bury(made, member, clock) == 0.5
        clock.now += 300
        assert bury(made, member, clock) == 1.0
        clock.now += 299
        assert bury(made, member, clock) is None and member.death is not None
        member.death = None
        clock.now += 2  # the first of them is forgotten
        assert bury(made, member, clock) == 1.0
        made.close()

    @pytest.mark.parametrize("has_rows", [True, False])
    def test_one_that_raised_is_started_again_once_its_lane_has_rows(
        self, has_rows: bool, clock: Clock
    ) -> None:
        made, member = dying_crew(max_restarts=1, has_rows=has_rows)
        made._ended = lambda m: Death(m.lane, 1, a_report())  # type: ignore[method-assign]
        assert bury(made, member, clock) == (0.5 if has_rows else None)
        made.close()

    def test_one_that_raised_is_dead_whatever_its_exit_code(self, clock: Clock) -> None:
        """What an environment runs at exit may end the process its own way."""
        made, member = dying_crew(max_restarts=0)
        made._ended = lambda m: Death(m.lane, 0, a_report())  # type: ignore[method-assign]
        assert bury(made, member, clock) is None
        assert member.death is not None and member.n_deaths == 1
        made.close()

    def test_it_is_not_started_before_its_time(self, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
        still = StillCrew(monkeypatch)
        (member,) = still.crew.members
        still.crew.start()
        still.crew._bury(member)
        clock.now += 0.49
        assert still.crew.check() and not member.is_running  # it will be
        clock.now += 0.02
        assert still.crew.check() and member.is_running
        assert (member.restarts, member.recent, member.due) == (1, [clock.now], None)
        still.crew.close()

    def test_who_is_due_is_started_though_another_is_dead_for_good(
        self, clock: Clock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        still = StillCrew(monkeypatch, n=2)
        dead, due = still.crew.members
        still.crew.start()
        still.crew._bury(due)
        still.crew._max_restarts = 0
        still.crew._bury(dead)
        clock.now += 1.0
        with pytest.raises(rc.CollectorDiedError, match="collector 0"):
            still.crew.check()
        assert due.is_running and not dead.is_running
        still.crew.close()

    def test_one_killed_before_its_first_row_is_started_again(self, clock: Clock) -> None:
        """Only an exception of its own would come again."""
        made, member = dying_crew(max_restarts=1, has_rows=False)
        assert bury(made, member, clock) == 0.5
        made.close()


class Still:
    """A process that nobody started and that never ends."""

    pid, exitcode = 0, -signal.SIGKILL
    fails_at = 0
    is_closed = False
    masks: ClassVar[list[set[signal.Signals]]] = []

    def __init__(self, args: Any, **kwargs: Any) -> None:
        self.args = args

    def start(self) -> None:
        self.masks.append(signal.pthread_sigmask(signal.SIG_BLOCK, []))
        if len(self.masks) == self.fails_at:
            raise OSError("no more processes")

    def join(self, timeout: float) -> None: ...

    def close(self) -> None:
        self.is_closed = True


class Noted(Lingering):
    """Notes how long the end of a process was waited for."""

    def __init__(self, events: list[Any], interrupts: int = 0) -> None:
        super().__init__()
        self.events, self.interrupts = events, interrupts

    def wait(self, timeout_s: float) -> bool:
        if timeout_s:
            self.events.append(timeout_s)
            if len(self.events) == self.interrupts:
                raise KeyboardInterrupt
        return False

    def close(self) -> None: ...


class StillCrew:
    """A crew of processes that do nothing, and what it does to end them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, n: int = 1, **process: Any) -> None:
        self.events: list[Any] = []
        self.process = type("OneStill", (Still,), {"masks": [], **process})
        self.bound: list[Any] = []
        self.n_rows = 1
        self.crew = Crew(
            n, make_job=lambda *_: (cast(Any, None), self.bound), restart="on_death", max_restarts=9,
            start_method="spawn", deadline=60.0, count_rows=lambda lane, pid: self.n_rows,
        )  # fmt: skip
        real = self.crew._context
        self.crew._context = SimpleNamespace(
            Pipe=real.Pipe, Process=self.process, get_start_method=lambda: "spawn"
        )
        monkeypatch.setattr(
            crew, "EndWatch", lambda process: Noted(self.events, getattr(process, "hurry", 0))
        )
        monkeypatch.setattr(crew, "kill_group", lambda pid, number: self.events.append(number))


class TestEnding:
    @pytest.mark.parametrize("exitcode", [0, -signal.SIGTERM, -signal.SIGKILL])
    def test_ten_seconds_then_sigterm_then_five_then_sigkill(
        self, exitcode: int, clock: Clock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        still = StillCrew(monkeypatch, exitcode=exitcode)
        still.crew.start()
        for _ in range(2):  # the second time there is nothing to do
            still.crew.close()
        assert still.crew.members[0].n_deaths == 0 and not caplog.records  # it did not die: it was ended
        with pytest.raises(rc.ClosedError):
            still.crew.members[0].counters.read()  # their memory is given back
        with pytest.raises(RuntimeError, match="control: was closed"):
            _ = still.crew.control.name
        # the last one is for what it may have started
        assert still.events == [10.0, signal.SIGTERM, 5.0, signal.SIGKILL, 5.0, signal.SIGKILL]

    def test_who_has_returned_is_neither_waited_for_nor_signalled(
        self, clock: Clock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        still = StillCrew(monkeypatch, n=2)
        still.crew.start()
        monkeypatch.setattr(still.crew.members[0].ending, "wait", lambda timeout_s: True)
        still.crew.close()
        assert still.events[:5] == [10.0, signal.SIGTERM, 5.0, signal.SIGKILL, 5.0]  # each once

    def test_an_end_is_seen_whoever_holds_what_the_process_had(self) -> None:
        """What an environment forked has the end of every pipe of its collector."""
        here, there = os.pipe()
        process = subprocess.Popen(["true"])
        before = set(os.listdir("/proc/self/fd"))
        ending = crew.EndWatch(SimpleNamespace(pid=process.pid, sentinel=here))
        assert ending.wait(20.0) and process.returncode is None  # and nobody has reaped it
        process.wait(20)
        ending.close()
        assert set(os.listdir("/proc/self/fd")) == before
        os.close(here)
        os.close(there)

    def test_without_process_descriptors_the_end_of_its_pipe_is_its_end(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refused(pid: int) -> int:
            raise OSError("no such call")

        monkeypatch.setattr(os, "pidfd_open", refused)
        here, there = os.pipe()
        ending = crew.EndWatch(SimpleNamespace(pid=1, sentinel=here))
        assert not ending.wait(0.0)
        os.close(there)
        assert ending.wait(20.0)
        ending.close()
        os.close(here)

    def test_ctrl_c_meanwhile_hurries_and_is_raised(
        self, clock: Clock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        still = StillCrew(monkeypatch, hurry=1)
        still.crew.start()
        with pytest.raises(KeyboardInterrupt):
            still.crew.close()
        assert still.events == [10.0, signal.SIGTERM, signal.SIGKILL, 5.0, signal.SIGKILL]
        assert not any(m.is_running for m in still.crew.members)

    def test_if_one_cannot_be_started_none_is_left(
        self, clock: Clock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        still = StillCrew(monkeypatch, n=2, fails_at=2)
        with pytest.raises(OSError, match="no more processes"):
            still.crew.start()
        assert signal.SIGKILL in still.events and not still.crew.members[0].is_running

    def test_ten_seconds_are_for_all_of_them(self, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
        still = StillCrew(monkeypatch, n=2)
        still.crew.start()
        first, second = (m.ending for m in still.crew.members)

        def wait(timeout_s: float) -> bool:
            clock.now += timeout_s / 2
            return Noted.wait(cast(Any, first), timeout_s)

        monkeypatch.setattr(first, "wait", wait)
        still.crew.close()
        waits = [x for x in still.events if isinstance(x, float)]
        assert first is not second and waits == [10.0, 5.0, 5.0, 2.5, 5.0, 2.5]

    @pytest.mark.parametrize("exitcode", [1, None])
    def test_a_process_is_given_up_once_it_has_ended(
        self, exitcode: int | None, clock: Clock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """One that even SIGKILL did not end in time has to stay."""
        still = StillCrew(monkeypatch, exitcode=exitcode)
        still.crew.start()
        (member,) = still.crew.members
        process, alive, errors = member.process, member.alive, member.errors
        still.crew._bury(member)
        assert not member.is_running and process.is_closed is (exitcode is not None)
        assert alive.closed and errors is not None and errors._connection.closed
        still.crew.close()

    def test_a_group_is_killed_while_its_number_is_still_its_own(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Once the leader is reaped, another process may get it."""
        still = StillCrew(monkeypatch)
        still.process.join = lambda self, timeout: still.events.append("reaped")
        still.crew.start()
        still.crew._bury(still.crew.members[0])
        assert still.events == [signal.SIGKILL, "reaped"]
        still.crew.close()

    @pytest.mark.parametrize("exitcode", [0, -signal.SIGTERM])
    def test_what_one_reported_while_it_was_ended_is_told(
        self, exitcode: int, clock: Clock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        still = StillCrew(monkeypatch, exitcode=exitcode)
        still.crew.start()
        (member,) = still.crew.members
        member.reported = a_report()
        still.crew.close()
        assert member.n_deaths == 1 and "the simulator gave up" in caplog.text

    @pytest.mark.parametrize("fails_at", [0, 1])
    def test_the_learner_keeps_no_end_of_its_collectors(
        self, fails_at: int, clock: Clock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        closed, started = list[str](), list[Any]()
        still = StillCrew(monkeypatch, fails_at=fails_at)
        still.bound.append(SimpleNamespace(close=lambda: closed.append("bound")))
        real = still.process.start
        still.process.start = lambda self: (started.append(self), real(self))[1]
        (member,) = still.crew.members
        if fails_at:
            with pytest.raises(OSError, match="no more processes"):
                still.crew.start()
            assert member.alive.closed and member.errors is not None and member.errors._connection.closed
        else:
            still.crew.start()
            assert not member.alive.closed
        ((_, theirs, send),) = (process.args for process in started)
        assert theirs.closed and send._connection.closed and closed == ["bound"]
        still.crew.close()

    def test_once_closed_it_tells_of_no_death_again(self, clock: Clock) -> None:
        made, member = dying_crew(max_restarts=0)
        assert bury(made, member, clock) is None and member.death is not None
        made.close()
        assert made.check() is False

    @pytest.mark.parametrize("leads", [True, False, None])
    def test_signals_go_to_the_group(self, leads: bool | None, monkeypatch: pytest.MonkeyPatch) -> None:
        """Unless it does not lead one yet: that would be the learner's. One that is gone may have left a group."""
        sent: list[Any] = []

        def group_of(pid: int) -> int:
            if leads is None:
                raise ProcessLookupError
            return pid if leads else pid - 1

        monkeypatch.setattr(os, "getpgid", group_of)
        for name in ("kill", "killpg"):
            monkeypatch.setattr(os, name, lambda pid, number, name=name: sent.append((name, pid, number)))
        crew.kill_group(7, signal.SIGTERM)
        assert sent == [("kill" if leads is False else "killpg", 7, signal.SIGTERM)]


def test_ctrl_c_is_held_back_while_a_collector_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is in the learner's group until it leads one of its own."""
    still = StillCrew(monkeypatch)
    still.crew.start()
    assert [signal.SIGINT in mask for mask in still.process.masks] == [True]
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])
    still.crew.close()


def test_a_restarted_collector_has_ten_times_the_deadline_again(monkeypatch: pytest.MonkeyPatch) -> None:
    still = StillCrew(monkeypatch)
    (member,) = still.crew.members
    member.counters.add({"env_steps": 5})  # in an earlier life
    now = monotonic_ns()
    monkeypatch.setattr(crew, "monotonic_ns", lambda: now)
    still.crew.start()
    now += 599 * 10**9
    still.crew.check()
    now += 2 * 10**9
    with pytest.raises(rc.DeadlineError, match="within 600 s"):
        still.crew.check()
    still.crew.close()


def test_one_that_never_beat_is_silent_since_it_was_started(monkeypatch: pytest.MonkeyPatch) -> None:
    still, now = StillCrew(monkeypatch), [monotonic_ns()]
    monkeypatch.setattr(crew, "monotonic_ns", lambda: now[0])
    still.crew.start()
    now[0] += 601 * 10**9
    with pytest.raises(rc.DeadlineError, match="its last beat was 601.0 s ago"):
        still.crew.check()
    still.crew.close()


class TestWork:
    """One that has work and shows no progress is stuck; the limit here is that of a collector without a step."""

    LIMIT_NS = 600 * 10**9

    @pytest.fixture
    def now(self, monkeypatch: pytest.MonkeyPatch) -> list[int]:
        found = [monotonic_ns()]
        for module in (crew, control):
            monkeypatch.setattr(module, "monotonic_ns", lambda: found[0])
        return found

    def test_running_free_it_always_has(self, now: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
        still = StillCrew(monkeypatch)
        still.crew.start()
        assert still.crew.control.take(0, 0.0) is None  # it has asked, and nobody gives permits
        now[0] += self.LIMIT_NS + 1
        with pytest.raises(rc.DeadlineError, match="collector 0"):
            still.crew.check()
        still.crew.close()

    def test_rows_are_progress_without_a_beat(self, now: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
        still, minute = StillCrew(monkeypatch), 60 * 10**9
        still.crew.start()
        for _ in range(40):
            now[0] += minute
            still.n_rows += 1
            still.crew.check()
        now[0] += minute
        still.crew.check()
        now[0] += 1
        with pytest.raises(rc.DeadlineError, match="collector 0: must make progress within 60 s"):
            still.crew.check()
        still.crew.close()

    @pytest.mark.parametrize("kind", ["owned", "given", "rows"])
    def test_a_collector_that_only_adds_rows_is_not_stuck(self, kind: str, now: list[int]) -> None:
        buffer: Any = rc.ipc.ReplayBuffer(8, 1, 1, "numpy")
        if kind == "rows":
            buffer.close()
            buffer = rc.ReplayBuffer.create("shared", ((), "int64"), capacity=8, multiprocessing=True)
        with buffer, runner() as it:
            if kind == "owned":
                it.own(buffer)
            it.start_collectors(crews.add_without_a_beat, {"given": {"buffer": buffer}})
            for _ in range(12):
                before = buffer.stats().offered
                wait_until(lambda before=before: buffer.stats().offered > before, 40.0)  # type: ignore[misc]
                now[0] += 59 * 10**9
                it.check_collectors()

    def test_with_a_permit_it_has_from_when_that_was_given(
        self, now: list[int], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        still = StillCrew(monkeypatch)
        still.crew.start()
        words = still.crew.control
        still.crew.grant(1, 1)
        assert words.take(0, 0.0)
        words.finish(0)
        now[0] += 2 * self.LIMIT_NS
        still.crew.check()  # it waits for leave to go on
        still.crew.grant(2, 1)
        now[0] += self.LIMIT_NS
        still.crew.check()
        assert words.take(0, 0.0)
        now[0] += self.LIMIT_NS
        still.crew.check()
        now[0] += 1
        with pytest.raises(rc.DeadlineError, match="collector 0"):
            still.crew.check()
        still.crew.close()


def test_rows_that_the_learner_added_first_keep_no_lane_from_a_collector() -> None:
    with runner() as it:
        buffer, x, no = (
            it.own(rc.ipc.ReplayBuffer(8, 1, 1, "numpy")),
            np.ones((1, 1), "f4"),
            np.zeros(1, bool),
        )
        buffer.add(x, x, np.ones(1), x, no, no)
        it.start_collectors(crews.add_without_a_beat, {"given": {"buffer": buffer}})
        wait_until(lambda: buffer.stats().offered > 1, 40.0, it.check_collectors)
        assert buffer.stats().lanes[0].writer_pid == it.stats().lanes[0].pid


def test_the_age_of_a_beat_is_in_seconds_and_none_before_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    member = crew.Member(0, Counters())
    assert async_runner._stats_of(member).beat_age_s is None
    member.counters.add({}, "reset")
    beat_ns = member.counters.read().beat_ns
    monkeypatch.setattr(async_runner, "monotonic_ns", lambda: beat_ns + 2_500_000_000)
    assert async_runner._stats_of(member).beat_age_s == 2.5
    member.counters.cleanup()


def test_a_lane_that_died_with_its_permit_counts_as_done(monkeypatch: pytest.MonkeyPatch) -> None:
    still = StillCrew(monkeypatch, n=2)
    still.crew.start()
    still.crew.grant(1, 1)
    control, dead = still.crew.control, still.crew.members[0]
    assert control.take(1, 1.0)
    control.finish(1)
    assert not still.crew.all_live(control.has_done)
    still.crew._bury(dead)
    assert still.crew.all_live(control.has_done)
    still.crew.close()


def tell_threads(ctx: Any, say: Say) -> None:
    import torch

    say(torch.get_num_threads())
    say(int(os.environ["OMP_NUM_THREADS"]))


class TestCores:
    @needs_linux
    def test_collectors_have_theirs_and_the_learner_the_others(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
        before = torch.get_num_threads()
        with runner(num_collectors=2, collector_threads=3) as it:
            say = it.own(Say.create(2))
            it.start_collectors(tell_threads, {"say": say})
            assert torch.get_num_threads() == 8 - 2 * 3
            assert [say.hear() for _ in range(4)] == [3, 3, 3, 3]
        assert torch.get_num_threads() == before

    def test_the_learner_has_one_core_at_least(
        self, no_crew: list[Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        told: list[int] = []
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
        monkeypatch.setattr(torch, "get_num_threads", lambda: 6)
        monkeypatch.setattr(torch, "set_num_threads", told.append)
        with runner(num_collectors=2, collector_threads=3) as it:
            it.start_collectors(crews.raise_at_once, {})
            assert told == [1]
        assert told == [1, 6]  # as before

    @pytest.mark.parametrize("first", ["cuda", "xpu", "mps", "cpu"])
    def test_the_first_device_that_exists(self, first: str, monkeypatch: pytest.MonkeyPatch) -> None:
        there = ["cuda", "xpu", "mps", "cpu"]
        there = there[there.index(first) :]
        for name, module in (("cuda", torch.cuda), ("xpu", torch.xpu), ("mps", torch.backends.mps)):
            monkeypatch.setattr(module, "is_available", lambda name=name: name in there)
        assert async_runner.best_device() == first

    def test_without_torch_it_is_numpy(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(async_runner.importlib.util, "find_spec", lambda name: None)
        assert async_runner.best_device() == "numpy"

    def test_without_a_word_it_is_the_first_for_the_learner_and_the_cpu_for_collectors(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(async_runner, "best_device", lambda: "xpu")
        it = runner(device=None)
        assert (it.device, it.collector_device) == ("xpu", "cpu")
        assert runner(device="numpy").device == "numpy"

    def test_what_a_collector_is_started_with(self, no_crew: list[Any]) -> None:
        given = {"sim_backend": "isaac", "env_cfg_overrides": {"speed": 2}}
        with runner(
            num_collectors=2, collector_device="numpy", collector_threads=3, deadline=7.0, **given
        ) as it:
            it.start_collectors(crews.raise_at_once, {})
        (job,) = no_crew
        assert (job.lane, job.num_envs, job.seed) == (1, 2, async_runner.lane_seed(0, 1, 0))
        assert (job.device, job.threads, job.deadline, job.orphan_grace_s) == ("numpy", 3, 7.0, 5.0)
        fn, env, kwargs = job.call._value
        assert (fn, kwargs) == (crews.raise_at_once, {})
        assert (env.env_name, env.overrides, env.sim_backend) == ("CartPole-v1", {"speed": 2}, "isaac")

    def test_they_are_started_once_and_nothing_is_left_to_do_at_exit(
        self, no_crew: list[Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        to_do: list[Any] = []
        monkeypatch.setattr(async_runner.atexit, "register", to_do.append)
        monkeypatch.setattr(async_runner.atexit, "unregister", to_do.remove)
        with runner() as it:
            it.start_collectors(crews.raise_at_once, {})
            with pytest.raises(RuntimeError, match="they run already"):
                it.start_collectors(crews.raise_at_once, {})
            assert len(to_do) == 1 == len(no_crew)
        assert not to_do

    def test_a_start_that_failed_may_be_repeated(
        self, no_crew: list[Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with runner() as it:
            with monkeypatch.context() as patch:
                patch.setattr(async_runner.Crew, "start", lambda self: 1 / 0)
                with pytest.raises(ZeroDivisionError):
                    it.start_collectors(crews.raise_at_once, {})
            it.start_collectors(crews.raise_at_once, {})
        assert len(no_crew) == 2


@pytest.fixture
def no_crew(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Runners start nothing; the job of lane 1 is noted."""
    made: list[Any] = []

    class NoCrew:
        members: ClassVar[list[Any]] = []

        def __init__(self, n: int, *, make_job: Any, **kwargs: Any) -> None:
            named = SimpleNamespace(name="handle")
            made.append(make_job(1, 0, named, named)[0])

        def start(self) -> None: ...

        def close(self) -> None: ...

    monkeypatch.setattr(async_runner, "Crew", NoCrew)
    return made


def say_lane_and_make_workers(ctx: Any, parts: Any) -> None:
    env = ctx.make_env()  # with processes of its own, which a daemon may not have
    obs, _ = env.reset(seed=ctx.seed)
    env.close()
    parts["deep"][0][0](100 * ctx.lane + len(obs))


def test_resources_anywhere_in_the_arguments_are_bound_and_environments_may_have_workers() -> None:
    overrides = {"vectorization_mode": "async"}
    with runner(env_cfg_overrides=overrides, num_envs=4, num_collectors=2) as it:
        say = it.own(Say.create(2))
        it.start_collectors(say_lane_and_make_workers, {"parts": {"deep": [(say,)]}})
        heard = {}
        for _ in range(2):
            taken = say.ring.take(60.0)
            heard[taken.lane] = int(taken.values["n"])
            say.ring.release()
        assert heard == {0: 2, 1: 102}
        wait_until(lambda: it.stats().alive == 0, 30, it.check_collectors)


def test_what_was_bound_for_a_collector_is_told_to_be_closed_and_classes_are_no_resources() -> None:
    say, bound = Say.create(2), list[Any]()
    found = async_runner._on_lane({"say": say, "kind": Say, "n": 3}, 1, bound)
    assert bound == [found["say"]] and found["say"] is not say
    assert (found["kind"], found["n"]) == (Say, 3)
    assert collector._watchable({"a": ([say], Say), "n": 3}) == [say]
    found["say"].close()
    say.cleanup()


def test_before_collectors_run_a_wait_goes_on() -> None:
    looks: list[Any] = []
    with runner() as it:
        it.own(SimpleNamespace(watch=looks.append, close=lambda: None))
        assert looks[0]() is True


def test_a_wait_for_a_batch_tells_of_a_dead_collector() -> None:
    with runner() as it:
        buf = it.own(rc.ipc.ReplayBuffer(64, 2, 1, "numpy"))
        pipe = it.own(CPUPinnedDoubleBufferReplayPipeline(buf, device="numpy", sample_count=4))
        it.start_collectors(crews.die_by, {"number": signal.SIGKILL})
        pipe.start_prepare(1, 4, min_snapshot_ptr=10)
        with pytest.raises(rc.CollectorDiedError, match="SIGKILL"):
            pipe.wait_ready()


def records() -> dict[str, Any]:
    """One of everything that counts."""
    buf = rc.ipc.ReplayBuffer(8, 2, 1, "numpy")
    return {
        "weights": rc.ipc.SharedWeightSync({"w": (2,)}), "statistics": rc.ipc.SharedObsNormStats(),
        "ring": rc.ipc.RolloutRingBuffer(2, 2, 2, 1), "replay": buf, "slots": make_collector_pack(buf, 4)[2],
        "pipeline": CPUPinnedDoubleBufferReplayPipeline(buf, device="numpy", sample_count=4), "runner": runner(),
    }  # fmt: skip


def test_every_object_counts_in_a_frozen_record() -> None:
    objects = records()
    for name, thing in objects.items():
        record = thing.stats()
        assert is_dataclass(record), name
        with pytest.raises((FrozenInstanceError, AttributeError)):
            setattr(record, fields(record)[0].name, 1)
    for name in ("pipeline", "slots", "replay", "ring", "statistics", "weights", "runner"):
        (getattr(objects[name], "cleanup", None) or objects[name].close)()


def test_a_board_reports_lanes_apart() -> None:
    with EpisodeBoard(2) as board:
        lane = board.on_lane(1)
        report = lane.mine()
        report.totals["env_steps"] = 5.0
        lane.publish(report)
        assert [r and r.totals["env_steps"] for r in board.read()] == [None, 5.0]
        lane.close()
    assert np.isfinite(report.totals["env_steps"])


def test_who_looks_at_permits_while_they_are_closed_hears_of_it() -> None:
    words = control.Control.create(1)

    def done() -> bool:
        words.close()
        return words.has_done(0)

    with pytest.raises(rc.ClosedError, match="was closed"):
        words.wait_for(done, lambda: None, 5.0, "a chunk")
