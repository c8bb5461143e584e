"""AsyncRunner: one learner, several collector processes, and everything that can go wrong between them."""

from __future__ import annotations

import atexit
import functools
import importlib.util
import logging
import os
import secrets
import sys
import weakref
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass
from difflib import get_close_matches
from time import monotonic_ns
from typing import Any, ClassVar, Self, TypeVar

from recollect import _core, checks, interrupts
from recollect.errors import ClosedError
from recollect.ipc.replay_buffer import ReplayBuffer as PackedBuffer
from recollect.ipc.runner.collector import (
    ORPHAN_GRACE_S,
    CollectorContext,
    CollectorJob,
    EnvSpec,
    PickledCall,
)
from recollect.ipc.runner.control import Control, Counters
from recollect.ipc.runner.processes import Crew, Member
from recollect.replay import ReplayBuffer
from recollect.sampling.stream import mix
from recollect.system.processes import usable_cores

__all__ = ["AsyncRunner", "CollectorContext", "CollectorStats", "RunnerStats"]
START_METHODS = ("spawn", "forkserver")
RESTARTS = ("never", "on_death")
_Resource = TypeVar("_Resource")
_log = logging.getLogger("recollect")


@dataclass(frozen=True, slots=True)
class CollectorStats:
    """One lane: its process, what became of those before, and the running totals that they counted."""

    lane: int
    pid: int | None
    restarts: int
    deaths: int
    phase: str
    beat_age_s: float | None
    counters: dict[str, float]


@dataclass(frozen=True, slots=True)
class RunnerStats:
    """A runner: the sums over its lanes, and each of them."""

    alive: int
    restarts: int
    deaths: int
    counters: dict[str, float]
    lanes: tuple[CollectorStats, ...]


class AsyncRunner(ABC):
    """Base of asynchronous learners: owns shared memory and collector processes, and ends both whatever happens.

    A subclass writes `learn`: it makes its resources with `own(...)`, starts `fn(ctx, **kwargs)` in `num_collectors`
    processes with `start_collectors(fn, kwargs)`, and waits on its resources. A wait on an owned resource raises
    within a second when a collector has died, from the collector's own exception, or starts it again as `restart`
    says. With permits (`grant_permits`, `wait_permits_done`) collectors run in step with the learner.

    Ownership: `close()` ends the collectors, each with the group it leads, then the resources in reverse order. It
    runs at exit too. If the learner is killed, collectors end by themselves.
    Concurrency: the thread that made it; `check_collectors` from any thread.

    >>> import recollect as rc
    >>> class Idle(rc.ipc.AsyncRunner):
    ...     def learn(self, max_iterations, save_interval=50, log_dir="logs"):
    ...         return None
    >>> with Idle("CartPole-v1", {}, {}, device="cpu", num_envs=8, num_collectors=2) as runner:
    ...     runner.learn(1)
    ...     runner.envs_per_collector
    4
    """

    config_type: ClassVar[Any] = None  # a dataclass that `rl_cfg` is read into, if a subclass has one
    orphan_grace_s: float = (
        ORPHAN_GRACE_S  # after the learner's death a collector has this long to end by itself
    )

    def __init__(
        self,
        env_name: Any,
        env_cfg_overrides: Mapping[str, Any] | None,
        rl_cfg: Any,
        *,
        device: Any = None,
        collector_device: Any = None,
        sim_backend: str = "mujoco",
        num_envs: int = 4096,
        num_collectors: int = 1,
        restart: str = "never",
        max_restarts: int = 3,
        start_method: str = "spawn",
        collector_threads: int = 1,
        seed: int = 0,
        deadline: float = 60.0,
    ) -> None:
        """Check the arguments; nothing is started.

        `num_envs` is the total over `num_collectors`. `env_name` is a gymnasium id or a picklable factory
        `f(num_envs, sim_backend, **env_cfg_overrides)`. `deadline`: seconds without progress after which a collector
        counts as stuck (ten times that before its first step).
        """
        for label, n, least in (
            ("num_collectors", num_collectors, 1),
            ("num_envs", num_envs, 1),
            ("collector_threads", collector_threads, 1),
            ("max_restarts", max_restarts, 0),
            ("seed", seed, 0),
        ):
            checks.count(label, n, least)
        if num_envs % num_collectors:
            raise ValueError(f"num_envs: must divide by num_collectors {num_collectors}, got {num_envs}")
        checks.choice("restart", restart, RESTARTS)
        checks.choice("start_method", start_method, START_METHODS)
        if not isinstance(env_name, str) and not callable(env_name):
            raise ValueError(f"env_name: must be a gymnasium id or a factory, got {env_name!r}")
        self.env_name, self.sim_backend = env_name, sim_backend
        self.env_cfg_overrides = _checked_overrides(env_cfg_overrides)
        self.rl_cfg = read_config(type(self).config_type, rl_cfg)
        self.deadline = checks.seconds("deadline", deadline)
        self.device = best_device() if device is None else str(device)
        self.collector_device = "cpu" if collector_device is None else str(collector_device)
        self.num_envs, self.num_collectors, self.seed = int(num_envs), int(num_collectors), int(seed)
        self.restart, self.max_restarts, self.start_method = restart, int(max_restarts), start_method
        self.collector_threads = int(collector_threads)
        self._resources: list[Any] = []
        self._given: list[Any] = []  # to collectors, owned or not
        self._crew: Crew | None = None
        self._last_crew: Crew | None = None
        self._is_closed = self._is_closing = False
        self._pid = os.getpid()
        self._threads_before: int | None = None
        self._at_exit = functools.partial(_close_at_exit, weakref.ref(self))

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "learn" in cls.__dict__:
            cls.learn = _guarded(cls.__dict__["learn"])  # type: ignore[method-assign]

    @abstractmethod
    def learn(self, max_iterations: int, save_interval: int = 50, log_dir: str = "logs") -> None:
        """Train. On Ctrl-C `on_interrupt()` is called, the runner closed, and KeyboardInterrupt goes on."""

    def on_interrupt(self) -> None:
        """Called when Ctrl-C ends `learn`, before the runner is closed: the place to write a checkpoint."""

    @property
    def envs_per_collector(self) -> int:
        """How many environments each collector has."""
        return self.num_envs // self.num_collectors

    # -- resources

    def own(self, resource: _Resource) -> _Resource:
        """Close `resource` with this runner, and let its waits look after the collectors; returns it.

        A resource with a method `watch(look)` has `look` called in its waits, at least every half second: it raises
        when a collector has died, and tells whether any is alive or will be started again.
        """
        self._check_open()
        self._resources.append(resource)
        if hasattr(resource, "watch"):
            resource.watch(self._look)
        return resource

    def _look(self) -> bool:
        return self._crew is None or self._crew.check()

    def _count_rows(self, lane: int, pid: int) -> int:
        """What resources have got from this lane, or from this process by another one."""
        n = 0
        for resource in (*self._resources, *self._given):
            with suppress(ClosedError):  # by the learner, which has done with it
                n += _rows_of(resource, lane, pid)
        return n

    # -- collectors

    def start_collectors(self, fn: Callable[..., Any], kwargs: Mapping[str, Any]) -> None:
        """Start `fn(ctx, **kwargs)` in every collector; resources in `kwargs` arrive bound to the collector's lane.

        A `recollect.ReplayBuffer` arrives as it is: the first write takes a free lane, `on_lane(i)` a certain one. A
        collector's lane in which this process has added rows becomes the collector's.
        """
        self._check_open()
        if self._crew is not None:
            raise RuntimeError("start_collectors: they run already; call stop_collectors() first")
        seed, self._given = _first_seed(self.seed), _with_stats(kwargs)
        for resource in self._given:
            if isinstance(resource, PackedBuffer):
                resource._give_up_lane_below(self.num_collectors)
        env = EnvSpec(self.env_name, self.env_cfg_overrides, self.sim_backend)

        def make_job(
            lane: int, restarts: int, control: Control, counters: Counters
        ) -> tuple[CollectorJob, list[Any]]:
            bound: list[Any] = []
            call = PickledCall(fn, env, {name: _on_lane(x, lane, bound) for name, x in kwargs.items()})
            return CollectorJob(
                lane, self.envs_per_collector, lane_seed(seed, lane, restarts), self.collector_device,
                self.collector_threads, self.deadline, control.name, counters.name,
                _core.own_word(), call, self.orphan_grace_s,
            ), bound  # fmt: skip

        crew = Crew(
            self.num_collectors, make_job=make_job, restart=self.restart, max_restarts=self.max_restarts,
            start_method=self.start_method, deadline=self.deadline, count_rows=self._count_rows,
        )  # fmt: skip
        atexit.register(self._at_exit)
        self._crew = crew  # first: an interrupt after the start must find it
        try:
            crew.start()
        except BaseException:
            self.stop_collectors()
            raise
        self._share_cores()

    def check_collectors(self) -> None:
        """Start dead collectors again, or raise: CollectorDiedError for a dead one, DeadlineError for a stuck one."""
        self._check_open()
        if self._crew is not None:
            self._crew.check()

    def stop_collectors(self) -> None:
        """End the collectors; their counters stay. Nothing happens if there are none."""
        crew = self._crew
        if crew is not None:
            self._last_crew, is_over = crew, True
            try:
                crew.close()
            except KeyboardInterrupt:
                is_over = crew.is_ended  # if not, the next call goes on
                raise
            finally:
                if is_over:
                    atexit.unregister(self._at_exit)
                    self._give_back_cores()
                    self._crew = None

    # -- permits

    def grant_permits(self, version: int = 0, steps: int = 1, *, timeout: float | None = None) -> None:
        """Let live collectors make `steps` steps with the weights of `version`, once they took their last permit.

        One that was started again gets its first permit when it is ready, having asked for one.
        """
        self.wait_permits_taken(timeout)
        self._running().grant(version, steps)

    def wait_permits_wanted(self, timeout: float | None = None) -> None:
        """Wait until some collector can use a permit: none can while all of them are dead or being started again."""
        lanes = range(self.num_collectors)
        self._wait_permits("wanted", lambda crew: any(map(crew.is_counted_on, lanes)), timeout)

    def wait_permits_taken(self, timeout: float | None = None) -> None:
        """Wait until every live collector has taken the last permit; a dead lane counts as done."""
        self._wait_permits("taken", lambda crew: crew.all_live(crew.control.has_taken), timeout)

    def wait_permits_done(self, timeout: float | None = None) -> None:
        """Wait until every live collector has used up the last permit; a dead lane counts as done."""
        self._wait_permits("done", lambda crew: crew.all_live(crew.control.has_done), timeout)

    def _wait_permits(self, what: str, ready: Callable[[Crew], bool], timeout: float | None) -> None:
        crew = self._running()
        seconds = checks.timeout(
            timeout, 10 * self.deadline + 60
        )  # a stuck collector is an error before that
        crew.control.wait_for(lambda: ready(crew), crew.check, seconds, f"permits: {what} by collectors")

    def _running(self) -> Crew:
        self._check_open()
        if self._crew is None:
            raise RuntimeError("permits: need collectors, got none; call start_collectors() first")
        return self._crew

    # -- what happened

    def stats(self) -> RunnerStats:
        """Return a frozen record: who lives, who died, and the running totals that collectors counted."""
        crew = self._crew or self._last_crew
        lanes = tuple(_stats_of(m) for m in crew.members) if crew is not None else ()
        totals: Counter[str] = Counter()
        for lane in lanes:
            totals.update(lane.counters)  # floats add up as well
        return RunnerStats(
            sum(lane.pid is not None for lane in lanes), sum(lane.restarts for lane in lanes),
            sum(lane.deaths for lane in lanes), dict(totals), lanes,
        )  # fmt: skip

    # -- the end

    def close(self) -> None:
        """End the collectors, then the resources in reverse order. May be called twice.

        Collectors have 10 s to return, then SIGTERM and 5 s, then SIGKILL. Errors of resources are raised when all
        are closed.
        """
        if os.getpid() != self._pid or self._is_closing:
            return
        try:
            self._is_closed = self._is_closing = True
            self._close_all()
        finally:
            self._is_closing = False

    def _close_all(self) -> None:
        """Close what is still open; an interrupted call can be made again."""
        errors: list[BaseException] = []
        try:
            self.stop_collectors()
        except BaseException as error:
            if self._crew is not None:  # an interrupt: the next call goes on
                raise
            errors.append(error)
        while self._resources:
            resource = self._resources[-1]
            try:
                (resource.cleanup if hasattr(resource, "cleanup") else resource.close)()
            except KeyboardInterrupt as error:  # it may not be closed yet
                errors.append(error)
                continue
            except BaseException as error:
                errors.append(error)
            self._resources.pop()
        if errors:
            for other in errors[1:]:
                errors[0].add_note(f"and while closing: {other!r}")
            raise errors[0]

    def _end_interrupted(self) -> None:
        try:
            self.on_interrupt()
        except Exception:  # the interrupt goes on, and so does the end of the collectors
            _log.exception("interrupted, and what was to be saved was not")
        finally:
            self.close()

    def __enter__(self) -> Self:
        self._check_open()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._is_closed:
            raise ClosedError("runner: was closed; make another one")

    # -- cores

    def _share_cores(self) -> None:
        """Collectors have their threads; the learner's torch gets the other cores."""
        torch: Any = sys.modules.get("torch")
        if torch is not None:
            cores = usable_cores() - self.num_collectors * self.collector_threads
            self._threads_before = torch.get_num_threads()
            torch.set_num_threads(max(1, cores))

    def _give_back_cores(self) -> None:
        before, self._threads_before = self._threads_before, None
        if before is not None:
            sys.modules["torch"].set_num_threads(before)


def _first_seed(seed: Any) -> int:
    """The seed that lanes are seeded from; None, as a subclass may have set it, means another one at each start."""
    if seed is None:
        return secrets.randbits(63)
    checks.count("seed", seed, 0)
    return int(seed)


def lane_seed(seed: int, lane: int, restarts: int) -> int:
    """The seed of a lane's collector; a restarted one has another, and so does every lane. Below 2**31."""
    return mix(mix(mix(seed) + lane + 1) + restarts) >> 33


def best_device() -> str:
    """The first of cuda, xpu, mps and cpu that exists; numpy without torch."""
    if importlib.util.find_spec("torch") is None:
        return "numpy"
    torch: Any = interrupts.import_whole("torch")
    if torch.cuda.is_available():
        return "cuda"
    if hasattr(torch, "xpu") and torch.xpu.is_available():
        return "xpu"
    return "mps" if torch.backends.mps.is_available() else "cpu"


def read_config(kind: Any, given: Any) -> Any:
    """Return `given` as a record of `kind`, or as a dict; an unknown key is an error that names the nearest one."""
    if kind is None or isinstance(given, kind):
        return dict(given) if isinstance(given, Mapping) else given
    if not isinstance(given, Mapping) or not (isinstance(kind, type) and is_dataclass(kind)):
        raise ValueError(f"rl_cfg: must be a mapping or a {kind.__name__}, got {type(given).__name__}")
    known = [f.name for f in fields(kind)]
    for key in given:
        if key not in known:
            near = get_close_matches(str(key), known, n=1, cutoff=0.0)
            raise ValueError(
                f"rl_cfg: must have keys of {kind.__name__}, got {key!r}; did you mean {near[0]!r}?"
            )
    return kind(**given)


def _on_lane(value: Any, lane: int, bound: list[Any]) -> Any:
    """The value with every resource in it bound to a lane; what was bound is to be closed."""
    if isinstance(value, dict):
        return {key: _on_lane(x, lane, bound) for key, x in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_on_lane(x, lane, bound) for x in value)
    if isinstance(value, ReplayBuffer):
        return value  # a lane of it belongs to the process that asks for it
    if hasattr(value, "on_lane") and not isinstance(value, type):
        bound.append(value.on_lane(lane))
        return bound[-1]
    return value


def _with_stats(value: Any) -> list[Any]:
    """Everything in the arguments of a collector that can tell what it got."""
    if isinstance(value, Mapping):
        return [found for x in value.values() for found in _with_stats(x)]
    if isinstance(value, list | tuple):
        return [found for x in value for found in _with_stats(x)]
    return [value] if hasattr(value, "stats") and not isinstance(value, type) else []


def _rows_of(resource: Any, lane: int, pid: int) -> int:
    """How many rows a resource has from a lane, or from a process by another one."""
    if isinstance(resource, ReplayBuffer):
        native = resource.engine.native
        if native is None:
            return 0
        return sum(
            w[1] for k, w in enumerate(native.windows()) if pid and _core.pid_of(native.owner(k)) == pid
        )
    found = getattr(resource.stats(), "lanes", ()) if hasattr(resource, "stats") else ()
    return sum(
        getattr(x, name, 0)
        for k, x in enumerate(found) if k == lane or getattr(x, "writer_pid", None) == pid
        for name in ("written", "ptr")
    )  # fmt: skip


def _stats_of(m: Member) -> CollectorStats:
    counted = m.counted()
    age_s = (monotonic_ns() - counted.beat_ns) / 1e9 if counted.beat_ns else None
    pid = m.process.pid if m.process is not None else None
    return CollectorStats(m.lane, pid, m.restarts, m.n_deaths, counted.phase, age_s, counted.totals)


def _guarded(learn: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(learn)
    def guarded(self: AsyncRunner, *args: Any, **kwargs: Any) -> Any:
        self._check_open()
        try:
            return learn(self, *args, **kwargs)
        except KeyboardInterrupt:
            if not self._is_closed:  # an overridden learn may have called this one
                self._end_interrupted()
            raise

    return guarded


def _close_at_exit(runner: weakref.ref[AsyncRunner]) -> None:
    found = runner()
    if found is not None:
        found.close()


def _checked_overrides(overrides: Any) -> dict[str, Any]:
    if overrides is None:
        return {}
    if not isinstance(overrides, Mapping) or not all(isinstance(key, str) for key in overrides):
        raise ValueError(f"env_cfg_overrides: must be a mapping of keyword arguments, got {overrides!r}")
    return dict(overrides)
