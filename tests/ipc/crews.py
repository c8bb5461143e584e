"""What the tests of runners run in collectors, and a runner that does what a test tells it to.

At the top of a module of its own: spawned collectors import it by name.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from tests.timing import Stopwatch

import recollect as rc
from recollect import _core
from recollect.memory.ring import Ring

SLOT = {"n": ((), "int64")}


class Told(rc.ipc.AsyncRunner):
    """A runner whose `learn` is a function of the test's."""

    work: Callable[[Told], Any] = staticmethod(lambda runner: None)
    saved = 0

    def learn(self, max_iterations: int, save_interval: int = 50, log_dir: str = "logs") -> Any:
        return self.work(self)

    def on_interrupt(self) -> None:
        self._check_open()  # there is still everything to save
        self.saved += 1


def runner(**kwargs: Any) -> Told:
    """A runner whose collectors start quickly; `start_method="spawn"` is the product's own default."""
    given = {"device": "cpu", "num_envs": 4, "start_method": "forkserver", "env_cfg_overrides": {}, **kwargs}
    return Told("CartPole-v1", rl_cfg={}, **given)


class Say:
    """A ring by which collectors say numbers to the test; each has its lane."""

    def __init__(self, ring: Ring) -> None:
        self.ring = ring

    @classmethod
    def create(cls, n: int = 1) -> Say:
        return cls(Ring.create(SLOT, 64, n, policy="drop_oldest"))

    def __call__(self, number: int) -> None:
        self.ring.claim(5.0)["n"][...] = number
        self.ring.commit(number)

    def hear(self, timeout: float = 200.0) -> int:
        number = int(self.ring.take(timeout).values["n"])
        self.ring.release()
        return number

    def watch(self, look: Callable[[], bool] | None) -> None:
        self.ring.watch(look)

    def on_lane(self, lane: int) -> Say:
        return Say(self.ring.on_lane(lane))

    def close(self) -> None:
        self.ring.close()

    def cleanup(self) -> None:
        self.ring.cleanup()


def wait_until(
    ready: Callable[[], bool], timeout_s: float, look: Callable[[], Any] = lambda: None
) -> Stopwatch:
    """Wait until `ready()`; what cannot wake us (the end of somebody else's process) is looked at by turns."""
    watch, never = Stopwatch(), threading.Event()
    while not ready():
        look()
        assert watch.wall_s < timeout_s, f"not within {timeout_s} s"
        never.wait(0.002)  # the processors are for those we wait for
    return watch


def is_gone(pid: int) -> bool:
    return _core.process_word(pid) == 0


def sleeps_in(thread: threading.Thread, function: str) -> bool:
    """Whether what a thread now does is called by `function`, or is it."""
    frame = sys._current_frames().get(thread.ident or 0)
    return frame is not None and frame.f_code.co_name == function


# -- collectors


def tell_who(ctx: Any, say: Say) -> None:
    for number in (ctx.lane, ctx.num_envs, ctx.seed, os.getpid(), os.getpgrp()):
        say(number)
    assert ctx.device == "cpu"


def tell_by_pipe(ctx: Any, send: Any) -> None:
    send.send(ctx.lane)


def step_until_stopped(ctx: Any, say: Say | None = None) -> None:
    if say is not None:
        say(os.getpid())
    while not ctx.stopping():
        ctx.beat("env_step", env_steps=ctx.num_envs)
        ctx.permit(0.001)  # a short rest that stop ends


def make_and_step_env(ctx: Any, say: Say) -> None:
    env = ctx.make_env()
    obs, _ = env.reset(seed=ctx.seed)
    env.step(env.action_space.sample())
    env.close()
    say(len(obs))


def raise_at_once(ctx: Any) -> None:
    raise KeyError("no such sensor")


def raise_after_rows(ctx: Any, say: Say) -> None:
    say(ctx.seed)
    ctx.beat(env_steps=1)
    raise ValueError("the simulator gave up")


def die_by(ctx: Any, number: int) -> None:
    ctx.beat(env_steps=1)
    os.kill(os.getpid(), number)


def die_once(ctx: Any, say: Say, flag: str) -> None:
    """Killed at the first life; the second one steps on."""
    say(ctx.seed)
    ctx.beat(env_steps=10)
    if not Path(flag).exists():
        Path(flag).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    step_until_stopped(ctx)


def start_worker(say: Say) -> None:
    """A worker process of an environment, which does not end by itself."""
    say(subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"]).pid)


def with_children(ctx: Any, say: Say) -> None:
    start_worker(say)
    say(os.getpid())
    step_until_stopped(ctx)


def never_return(ctx: Any, say: Say) -> None:
    """Lane 0, with a worker, in native code that never lets go of the GIL, lane 1 deaf to everything."""
    import ctypes

    if ctx.lane == 1:
        ignore_everything(ctx, say)
    start_worker(say)
    say(os.getpid())
    ctypes.PyDLL(None).pause()


def ignore_everything(ctx: Any, say: Say) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    say(os.getpid())
    while True:
        signal.pause()


def get_stuck(ctx: Any, say: Say) -> None:
    ctx.beat("env_step", env_steps=1)
    say(os.getpid())
    signal.pause()


def wait_in_a_ring_by_name(ctx: Any, name: str, say: Say, flag: str) -> None:
    with Ring.attach(name) as ring:
        say(os.getpid())
        try:
            ring.take(600.0)
        except rc.ClosedError:
            Path(flag).touch()
            raise


def follow_permits(ctx: Any, say: Say) -> None:
    while not ctx.stopping():
        permit = ctx.permit(1.0)
        if permit is None:
            continue
        for _ in range(permit.steps):
            ctx.beat("env_step", env_steps=1)
        say(permit.version)


def follow_permits_slow_to_return(ctx: Any, say: Say, gate: Any, flag: str) -> None:
    """As follow_permits, but once `flag` exists a new life begins only when the gate has opened: it imports."""
    if Path(flag).exists():
        ctx.beat("import")
        gate.wait_newer(1, 60.0)
    follow_permits(ctx, say)


def fill_ring(ctx: Any, ring: Any) -> None:
    number = 0
    while not ctx.stopping():
        views = ring.claim()
        views["n"][...] = number
        ring.commit(number)
        ctx.beat(rollouts=1)
        number += 1


def fill_after_death(ctx: Any, ring: Any, flag: str) -> None:
    """Killed with a claimed slot; in the second life it writes."""
    views = ring.claim()
    ctx.beat(env_steps=1)
    if not Path(flag).exists():
        Path(flag).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    views["n"][...] = 1
    ring.commit(1)
    step_until_stopped(ctx)


def add_without_a_beat(ctx: Any, given: Any) -> None:
    buffer, x, no = given["buffer"], np.zeros((1, 1), "float32"), np.zeros(1, bool)
    while not ctx.stopping():
        if isinstance(buffer, rc.ReplayBuffer):
            buffer.append(1)
        else:
            buffer.add(x, x, np.zeros(1), x, no, no)


def fill_once(ctx: Any, ring: Any) -> None:
    """Write one value and return."""
    ring.claim()["n"][...] = 1
    ring.commit(1)


def publish_once(ctx: Any, sync: Any) -> None:
    sync.write_weights({"w": np.ones(1, "float32")})


def publish_after_death(ctx: Any, sync: Any, flag: str) -> None:
    """Write, and be killed; in the second life write again."""
    publish_once(ctx, sync)
    ctx.beat(env_steps=1)
    if not Path(flag).exists():
        Path(flag).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    step_until_stopped(ctx)


def raise_but_linger(ctx: Any) -> None:
    """A thread of its own keeps the process from exiting."""
    threading.Thread(target=signal.pause).start()
    raise ValueError("the simulator gave up")


class Unloadable:
    """Pickles well, and cannot be unpickled."""

    def __reduce__(self) -> Any:
        return _fail, ()


def _fail() -> None:
    raise ImportError("this cannot be loaded")


def be_learner(collector: str, orphan_grace_s: float, forks: bool = False) -> None:
    """The main of a learner that a test kills: prints what its collectors say, then does nothing.

    With `forks` it first prints the pid of a fork that holds all it has, among that the pipes to its collectors.
    """
    with runner(num_collectors=2, start_method="spawn") as learner:
        learner.orphan_grace_s = orphan_grace_s
        say = learner.own(Say.create(2))
        learner.start_collectors(globals()[collector], {"say": say})
        if forks:
            forked = os.fork()
            if not forked:
                signal.pause()
            print(forked, flush=True)
        while True:
            print(say.hear(600.0), flush=True)


def wait_for_weights(ctx: Any, sync: Any, say: Say) -> None:
    ctx.beat(env_steps=1)
    say(os.getpid())
    sync.wait_newer(sync.version, 60.0)
