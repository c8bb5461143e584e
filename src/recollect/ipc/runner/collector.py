"""A collector's side of a runner: its context, and the first and last things its process does."""

from __future__ import annotations

import os
import pickle
import signal
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from typing import Any

from recollect import _core, checks, interrupts
from recollect.errors import AttachError, ClosedError
from recollect.ipc.collector_error import ErrorSender, collector_error_guard
from recollect.ipc.runner.control import Control, Counters, Permit
from recollect.memory.waiting import watched_process
from recollect.system import is_portable
from recollect.system.processes import end_descriptor

ORPHAN_GRACE_S = 5.0  # a collector without a learner has this long to end by itself


@dataclass(frozen=True, slots=True)
class EnvSpec:
    """How a collector makes its environments: a gymnasium id, or a picklable factory."""

    env_name: Any
    overrides: dict[str, Any]
    sim_backend: str

    def make(self, num_envs: int) -> Any:
        """Make `num_envs` environments as one VectorEnv."""
        if isinstance(self.env_name, str):
            import gymnasium

            return gymnasium.make_vec(self.env_name, num_envs=num_envs, **self.overrides)
        return self.env_name(num_envs, self.sim_backend, **self.overrides)


@dataclass(frozen=True, slots=True)
class CollectorJob:
    """What a collector is started with; `call` stays pickled until its errors can be reported."""

    lane: int
    num_envs: int
    seed: int
    device: str
    threads: int
    deadline: float
    control: str
    counters: str
    learner: int  # process_word
    call: PickledCall
    orphan_grace_s: float = ORPHAN_GRACE_S


class PickledCall:
    """A function and its arguments, pickled with whatever holds them, and unpickled when it is asked for."""

    def __init__(self, fn: Callable[..., Any], env: EnvSpec, kwargs: Mapping[str, Any]) -> None:
        self._value: Any = (fn, env, dict(kwargs))
        self._packed = b""

    def __getstate__(self) -> bytes:
        # Inside the pickling of a process, so that queues and pipes among the arguments know where they go.
        return bytes(ForkingPickler.dumps(self._value))

    def __setstate__(self, packed: bytes) -> None:
        self._packed = packed

    def unpack(self) -> tuple[Callable[..., Any], EnvSpec, dict[str, Any]]:
        """Import and attach what was sent."""
        fn, env, kwargs = pickle.loads(self._packed)
        return fn, env, kwargs


class CollectorContext:
    """What a collector's function gets first: who it is, and how it keeps in touch with the learner.

    `lane`, `num_envs`, `seed` and `device` are this collector's own. Call `beat` after each step: it is what the
    learner sees. A collector that has work, and neither beats nor adds rows for the runner's deadline, is taken for
    stuck.

    Ownership: the function owns what it makes with `make_env()`.
    Concurrency: one thread of the collector.
    """

    def __init__(self, job: CollectorJob, env: EnvSpec, control: Control, counters: Counters) -> None:
        self.lane, self.num_envs, self.seed, self.device = job.lane, job.num_envs, job.seed, job.device
        self._env, self._control, self._counters, self._deadline = env, control, counters, job.deadline

    def make_env(self) -> Any:
        """Make this collector's environments: `num_envs` of them in one VectorEnv."""
        return self._env.make(self.num_envs)

    def stopping(self) -> bool:
        """Tell whether to return: the runner closes, or the learner is gone."""
        return self._control.is_stopping

    def beat(self, phase: str | None = None, **counters: float) -> None:
        """Say that it goes on, and add to the running totals; `phase` is what it is about to do."""
        self._counters.add(counters, phase)
        self._control.touch(self.lane)

    def permit(
        self, timeout: float | None = None, *, on_take: Callable[[Permit], object] | None = None
    ) -> Permit | None:
        """Say that the last permit is used up, and wait for the next; None if none came in time, or when stopping.

        `timeout` None waits for the runner's deadline. `on_take(permit)` is called before the learner, which may then
        publish newer weights, sees that it was taken: the place to read those of the permit's version.
        """
        seconds = checks.timeout(timeout, self._deadline)
        self._control.finish(self.lane)
        return self._control.take(self.lane, seconds, on_take)

    def look(self) -> bool:
        """What waits on the learner's resources call: ends them when stopping, and shows that it is not stuck."""
        if self._control.is_stopping:
            raise ClosedError("runner: is stopping; return from the collector")
        self._control.touch(self.lane)
        return True


def run_collector(job: CollectorJob, alive: Any, errors: ErrorSender) -> None:
    """Be the process of a collector. `alive` is a pipe that ends with the learner."""
    group_before = _lead_own_group()
    _set_threads(job.threads)
    control = None
    try:
        with collector_error_guard(errors, None, None, f"collector {job.lane}"):
            control = _joined(job, alive)
            if control is not None:
                _work(job, control)
    finally:
        _end_own_group(group_before, job.learner)


def _joined(job: CollectorJob, alive: Any) -> Control | None:
    """The words shared with the learner; None if it is gone already."""
    try:
        control = Control.attach(job.control)
    except AttachError:
        return None
    fds, looked_at = [alive.fileno()], 0
    if _core.is_near(job.learner):  # elsewhere its number would be another process's
        # Tells the end of the learner even if its forks hold the pipe.
        fd = None
        with suppress(OSError):
            fd = end_descriptor(_core.pid_of(job.learner))
        if fd is not None:
            fds.append(fd)
        elif is_portable():
            looked_at = job.learner
    if _core.is_dead(job.learner):
        control.close()
        return None
    _core.watch_orphan(fds, looked_at, control.mapping, control.stop_at, control.wake_at, job.orphan_grace_s)
    return control


def _work(job: CollectorJob, control: Control) -> None:
    fn, env, kwargs = job.call.unpack()
    _set_threads(job.threads)  # torch may have come with the arguments
    ctx = CollectorContext(job, env, control, Counters.attach(job.counters))
    for resource in _watchable(kwargs):
        resource.watch(ctx.look)
    try:
        with watched_process(ctx.look):  # also what it attaches by name
            ctx.beat("start")
            fn(ctx, **kwargs)
    except ClosedError:
        if not control.is_stopping:
            raise
    finally:
        control.finish(job.lane)


def _watchable(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [r for v in value.values() for r in _watchable(v)]
    if isinstance(value, list | tuple):
        return [r for v in value for r in _watchable(v)]
    return [value] if hasattr(value, "watch") and not isinstance(value, type) else []


def _lead_own_group() -> int:
    """Ctrl-C in the terminal is for the learner. Until here SIGINT was blocked; what came meanwhile is dropped."""
    before = os.getpgrp()
    os.setpgid(0, 0)
    interrupts.drop_held_back()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    return before


def _end_own_group(group_before: int, learner: int) -> None:
    """End what the environments started and left.

    Not the learner's work alone: it may die at any moment, also between telling this process to stop and its end. To
    stay out of it, this process goes back to the group it came from; if that is gone, so is the learner.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        os.setpgid(0, group_before)
    except OSError:
        if _core.is_dead(learner):
            os.killpg(0, signal.SIGKILL)
        return
    with suppress(ProcessLookupError):
        os.killpg(os.getpid(), signal.SIGKILL)


def _set_threads(n: int) -> None:
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ[name] = str(n)
    torch: Any = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(n)
