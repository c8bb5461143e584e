"""The collectors of a runner as processes: started, looked after, started again, and ended with all they started."""

from __future__ import annotations

import logging
import multiprocessing
import os
import select
import signal
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from time import monotonic, monotonic_ns
from typing import Any

from recollect import interrupts
from recollect.errors import CollectorDiedError, DeadlineError
from recollect.ipc.collector_error import (
    ErrorReceiver,
    ExceptionWrapper,
    create_error_pipe,
    format_collector_death,
)
from recollect.ipc.runner.collector import CollectorJob, run_collector
from recollect.ipc.runner.control import Control, Counted, Counters
from recollect.system.processes import end_descriptor, has_ended

JOIN_S, TERM_S, KILL_S = 10.0, 5.0, 5.0  # the patience of close()
REPORTED_S = 0.5  # a collector that has reported its exception has this long to exit
WINDOW_S = 600.0  # restarts are counted over this long
FIRST_DELAY_S, MOST_DELAY_S = 0.5, 30.0
_log = logging.getLogger("recollect")


@dataclass(frozen=True, slots=True)
class Death:
    """How a collector ended."""

    lane: int
    exitcode: int | None
    wrapper: ExceptionWrapper | None

    @property
    def signal_name(self) -> str | None:
        """The signal that ended it, if one did."""
        try:
            return signal.Signals(-(self.exitcode or 0)).name
        except ValueError:
            return None

    @property
    def report(self) -> str:
        """The collector's traceback, or what its exit code means."""
        return format_collector_death(self.exitcode, self.wrapper.traceback_text if self.wrapper else None)

    def error(self, advice: str) -> CollectorDiedError:
        """The error to raise, from the collector's own exception if it had one."""
        error = CollectorDiedError(
            f"collector {self.lane}: must live, got a dead process; {advice}\n{self.report}"
        )
        error.lane, error.exitcode, error.signal = self.lane, self.exitcode, self.signal_name
        error.report = self.report
        if self.wrapper is not None:
            try:
                self.wrapper.reraise()
            except BaseException as own:
                error.__cause__ = own
        return error


class EndWatch:
    """Tells when a process has ended, whatever its own children inherited, and before anybody reaps it.

    Ownership: a descriptor that nobody closed goes with this object.
    """

    def __init__(self, process: Any) -> None:
        self._pid: int | None = None  # to be looked at: its children may hold the other end of a pipe
        try:
            fd = end_descriptor(process.pid)
        except OSError:
            fd = None
        if fd is None:
            fd, self._pid = os.dup(process.sentinel), process.pid
        self._poll = select.poll()
        self._poll.register(fd, select.POLLIN)
        self.close = weakref.finalize(self, os.close, fd)

    def wait(self, timeout_s: float) -> bool:
        """Wait for the end of the process; False if it has not come in time."""
        if self._pid is None:
            return bool(self._poll.poll(timeout_s * 1000))
        ends, nap_s = monotonic() + timeout_s, 0.001
        while not self._poll.poll(min(max(0.0, ends - monotonic()), nap_s) * 1000) and not has_ended(
            self._pid
        ):
            if monotonic() >= ends:
                return False
            nap_s = min(2 * nap_s, 0.02)
        return True


@dataclass(slots=True)
class Member:
    """One lane: its process, if there is one, and what became of those before."""

    lane: int
    counters: Counters
    process: Any = None
    ending: EndWatch | None = None
    alive: Any = None  # the end of this pipe tells the collector that the learner is gone
    errors: ErrorReceiver | None = None
    reported: ExceptionWrapper | None = None  # what came by it
    started_ns: int = 0
    steps_before: int = 0
    rows_before: int = 0  # what its lane had when it was started
    n_rows: int = 0  # what it had when that was last looked at
    looked_ns: int = 0  # when that was
    rows_ns: int = 0  # when it was seen to have grown
    restarts: int = 0
    recent: list[float] = field(default_factory=list)  # when it was started again
    due: float | None = None  # when it will be
    n_deaths: int = 0
    death: Death | None = None  # one that is not mended
    advice: str = ""
    is_told: bool = False
    last: Counted | None = None  # once it is over

    @property
    def is_running(self) -> bool:
        return self.process is not None

    def counted(self) -> Counted:
        """The lane's running totals; the last ones when it is over."""
        return self.last or self.counters.read()


class Crew:
    """Processes of a runner's collectors; the one place that starts and ends them.

    Ownership: each collector leads a process group, which ends with it. A crew that is dropped lets go of the pipes,
    whereupon its collectors end by themselves.
    Concurrency: from any thread of the process that made it.
    """

    def __init__(self, n: int, *, make_job: Callable[[int, int, Control, Counters], tuple[CollectorJob, list[Any]]],
                 restart: str, max_restarts: int, start_method: str, deadline: float,
                 count_rows: Callable[[int, int], int]) -> None:  # fmt: skip
        self._context: Any = multiprocessing.get_context(start_method)
        self._make_job, self._count_rows = make_job, count_rows
        self._restarts_on_death, self._max_restarts, self._deadline = (
            restart == "on_death",
            max_restarts,
            deadline,
        )
        self._lock = threading.RLock()
        self._is_closed = self._is_ended = False
        self.control = Control.create(n)
        self.members = [Member(k, Counters()) for k in range(n)]

    # -- starting

    def start(self) -> None:
        """Start every lane; if one cannot be started, none is left running."""
        try:
            for member in self.members:
                self._start(member)
        except BaseException:
            self.close()
            raise

    def _start(self, m: Member) -> None:
        m.steps_before = m.counters.read().n_steps
        self.control.join(m.lane)
        job, bound = self._make_job(m.lane, m.restarts, self.control, m.counters)
        theirs, m.alive = self._context.Pipe(duplex=False)
        m.errors, send = create_error_pipe()
        name = f"recollect-collector-{m.lane}"
        process = self._context.Process(
            target=run_collector, args=(job, theirs, send), name=name, daemon=False
        )
        try:
            with interrupts.held_back(self._context.get_start_method()):
                process.start()
                m.process, m.started_ns, m.ending, m.due = process, monotonic_ns(), _ending_of(process), None
                m.rows_before = m.n_rows = self._count_rows(m.lane, process.pid)
                m.rows_ns = m.looked_ns = 0
        except BaseException:
            if m.process is None:  # else it runs, and only an interrupt is raised
                m.alive.close()
                m.errors.close()
            raise
        finally:
            theirs.close()
            send.close()
            for resource in bound:
                resource.close()

    # -- looking after them

    def check(self) -> bool:
        """Restart who is due, raise for who is dead or stuck; True while somebody works or will again."""
        with self._lock:
            if self._is_closed:
                return False
            for m in self.members:
                self._look_at(m)
            for m in self.members:
                if m.death is not None:
                    m.is_told = True
                    raise m.death.error(m.advice)
            return any(m.is_running or m.due is not None for m in self.members)

    def _look_at(self, m: Member) -> None:
        if m.process is not None:
            if not _has_ended(m):
                self._check_progress(m)
                return
            with interrupts.deferred():
                self._bury(m)
        if m.due is not None and monotonic() >= m.due:
            with interrupts.deferred():
                m.recent.append(monotonic())
                m.restarts += 1
                self._start(m)

    def _bury(self, m: Member) -> None:
        """Take note of how a collector ended, and end what it started."""
        pid = m.process.pid if m.process is not None else 0
        death = self._ended(m)
        if death.exitcode == 0 and death.wrapper is None:  # it has done what it had to
            _log.warning("collector %d returned; nothing more will come from it", m.lane)
            return
        m.n_deaths += 1
        m.recent = [t for t in m.recent if monotonic() - t < WINDOW_S]
        if not self._restarts_on_death:
            m.death, m.advice = death, "see its report, or pass restart='on_death' (--restart on_death)"
        elif death.wrapper is not None and not self._has_started(m, pid):
            m.death, m.advice = death, "it raised before its first row and would again; see its report"
        elif len(m.recent) >= self._max_restarts:
            m.death, m.advice = (
                death,
                f"it was started again {len(m.recent)} times in 10 minutes; see its report",
            )
        else:
            delay = min(MOST_DELAY_S, FIRST_DELAY_S * 2 ** len(m.recent))
            m.due = monotonic() + delay
            _log.warning("collector %d died and starts again in %g s: %s", m.lane, delay, death.report)

    def _has_started(self, m: Member, pid: int) -> bool:
        return m.counters.read().n_steps > 0 or self._count_rows(m.lane, pid) > 0

    def _ended(self, m: Member) -> Death:
        """Reap the process of a member: its group, its exit code, its report."""
        wrapper = _report_of(m)
        kill_group(m.process.pid, signal.SIGKILL)  # before it is reaped: until then its number is its own
        m.process.join(KILL_S)
        exitcode = m.process.exitcode
        if wrapper is not None and exitcode == -signal.SIGKILL:
            exitcode = 1  # by us, while it was on its way out
        if exitcode is not None:
            m.process.close()
        for part in (m.ending, m.alive, m.errors):
            if part is not None:
                part.close()
        m.process, m.alive, m.errors, m.ending, m.reported = None, None, None, None, None
        return Death(m.lane, exitcode, wrapper)

    def _check_progress(self, m: Member) -> None:
        control, lane = self.control, m.lane
        if control.has_permits(lane) and control.has_done(lane) and control.is_ready(lane):
            return  # it waits for leave to go on
        last_ns = max(m.started_ns, *control.times_ns(lane))
        now = monotonic_ns()
        if now - max(last_ns, m.looked_ns) > self._deadline / 4 * 1e9:
            m.looked_ns, n_rows = now, self._count_rows(lane, m.process.pid)
            if n_rows != m.n_rows:  # the learner sees them, whether the collector beats or not
                m.n_rows, m.rows_ns = n_rows, now
        age_s = (now - max(last_ns, m.rows_ns)) / 1e9
        if age_s <= self._deadline:
            return
        counted = m.counters.read()
        has_begun = counted.n_steps > m.steps_before or m.n_rows != m.rows_before
        limit = self._deadline * (1 if has_begun else 10)
        if age_s > limit:
            beat_s = (monotonic_ns() - counted.beat_ns) / 1e9 if counted.beat_ns else age_s
            raise DeadlineError(
                f"collector {lane}: must make progress within {limit:g} s, got none: its last beat was {beat_s:.1f} s "
                f"ago in phase {counted.phase!r}; look at process {m.process.pid}, or raise deadline"
            )

    # -- permits

    def is_counted_on(self, lane: int) -> bool:
        """Whether the lane gets permits: it lives, and if it was started again it has said that it is ready."""
        m = self.members[lane]
        return m.is_running and (m.restarts == 0 or self.control.is_ready(lane))

    def grant(self, version: int, steps: int) -> None:
        """Give every lane that is counted on its next permit.

        A replacement imports for seconds: a permit that it cannot use yet would stop the learner and the other lanes.
        """
        with self._lock:
            for m in self.members:
                if self.is_counted_on(m.lane):
                    self.control.grant(m.lane, version, steps)

    def all_live(self, done: Callable[[int], bool]) -> bool:
        """Whether `done(lane)` holds for every live lane; a dead one counts as done."""
        return all(not m.is_running or done(m.lane) for m in self.members)

    # -- the end

    @property
    def is_ended(self) -> bool:
        """Whether `close` has done all."""
        return self._is_ended

    def close(self) -> None:
        """Tell all to stop and wait; after 10 s SIGTERM to their groups, after 5 more SIGKILL. May be called twice."""
        with self._lock:
            if self._is_ended:
                return
            self._is_closed = True  # from here on an interrupted call can be made again
            self.control.stop()
            interrupt = self._end_all()
            with interrupts.deferred():
                for m in self.members:
                    self._close_member(m)
                self.control.close()
                self._is_ended = True
        if interrupt is not None:
            raise interrupt

    def _end_all(self) -> KeyboardInterrupt | None:
        steps = ((None, JOIN_S), (signal.SIGTERM, TERM_S), (signal.SIGKILL, KILL_S))
        interrupt = None
        for number, patience in steps:
            left = [m for m in self.members if m.process is not None and not _has_ended(m, False)]
            try:
                if number is not None:
                    for m in left:
                        kill_group(m.process.pid, number)
                if interrupt is None or number == signal.SIGKILL:
                    _wait_for_ends(left, patience)
            except KeyboardInterrupt as error:  # somebody is in a hurry
                interrupt = error
        return interrupt

    def _close_member(self, m: Member) -> None:
        death, told = m.death, m.is_told
        if m.process is not None:
            ended = self._ended(m)
            if ended.wrapper is not None or ended.exitcode not in (0, -signal.SIGTERM, -signal.SIGKILL):
                death, told = ended, False
                m.n_deaths += 1
        m.last = m.counters.read()
        m.counters.cleanup()
        if death is not None and not told:
            m.is_told = True
            _log.error("collector %d died: %s", m.lane, death.report)


def _ending_of(process: Any) -> EndWatch:
    """What tells its end; a process that nobody could look after, for want of a descriptor, is ended."""
    try:
        return EndWatch(process)
    except OSError:
        kill_group(process.pid, signal.SIGKILL)
        process.join(KILL_S)
        raise


def kill_group(pid: int, number: int) -> None:
    """Send a signal to the group that a collector leads; to itself alone if it does not lead one yet."""
    try:
        leads = os.getpgid(pid) == pid
    except ProcessLookupError:
        leads = True  # it is gone; what it started may not be
    with suppress(ProcessLookupError, PermissionError):
        if leads:
            os.killpg(pid, number)
        else:
            os.kill(pid, number)


def _has_ended(m: Member, reported: bool = True) -> bool:
    """Whether the process is gone; one that reported an exception gets a moment, then counts as gone."""
    if m.ending is None or m.ending.wait(0.0):
        return True
    if not reported or _report_of(m) is None:
        return False
    m.ending.wait(REPORTED_S)
    return True


def _report_of(m: Member) -> ExceptionWrapper | None:
    """The exception that a collector reported; that its pipe has ended, as at any exit, is no report."""
    if m.reported is None and m.errors is not None:
        with suppress(EOFError, OSError):
            if m.errors.poll():
                m.reported = m.errors.recv()
    return m.reported


def _wait_for_ends(members: list[Member], timeout_s: float) -> None:
    end = monotonic() + timeout_s
    for m in members:
        if m.ending is not None:
            m.ending.wait(max(0.0, end - monotonic()))
