"""Saved, killed and resumed runs go on as if they had never stopped: rows, draws, priorities, epochs, limits."""

from __future__ import annotations

import os
import pickle
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import recollect as rc

pytestmark = pytest.mark.process
SPACE = {"x": ((), "int64"), "y": ((3,), "float32")}


class Run:
    """A learner and its data in one: each tick writes, draws, learns; all of it a function of the tick."""

    def __init__(self, buffer: rc.ReplayBuffer, kind: str, seed: int | None) -> None:
        self.buffer, self.log = buffer, []
        cls: Any = {"step": rc.StepSampler, "prioritized": rc.PrioritizedSampler}[kind]
        self.sampler = cls(buffer, 5, seed=seed)
        self.epoch: Any = None
        self.log: list[Any] = []

    def tick(self, t: int) -> None:
        x = np.arange(3 * t, 3 * t + 3)
        limiter = self.buffer.limiter
        if limiter is None or limiter.can_insert(3):
            self.buffer.extend({"x": x, "y": np.repeat(x[:, None], 3, 1).astype("float32")})
        if limiter is None or limiter.can_sample(5):
            data, meta = self.sampler.sample_with_metadata()
            self.log.append((t, data["x"].tolist(), {k: v.tolist() for k, v in (meta or {}).items()}))
            if meta is not None:
                self.sampler.update_priorities(meta, np.abs(np.sin(data["x"] + t)) * 10.0 ** (t % 7 - 3))
        if limiter is not None:
            self.log.append((limiter.stats(), limiter.why_blocked()))
        if t % 8 == 4 or self.epoch is not None:
            self.epoch = self.epoch or self.sampler.epoch_iter()
            if limiter is None or limiter.can_sample(5):
                batch = next(self.epoch, None)
                self.log.append(None if batch is None else batch["x"].tolist())
                if batch is None:
                    self.epoch = None

    def save(self, path: Path) -> None:
        self.buffer.dumps(path / "replay")
        state = {"sampler": self.sampler.state_dict(), "in_epoch": self.epoch is not None}
        (path / "state").write_bytes(pickle.dumps(state))

    @classmethod
    def load(cls, path: Path, kind: str) -> Run:
        buffer = rc.ReplayBuffer.load_from(path / "replay", read_only=False)
        run, state = cls(buffer, kind, None), pickle.loads((path / "state").read_bytes())
        run.sampler.load_state_dict(state["sampler"])
        run.epoch = run.sampler.epoch_iter() if state["in_epoch"] else None
        return run


def make(storage: str, path: Path, with_limiter: bool) -> rc.ReplayBuffer:
    limiter = rc.RateLimiter(1.7, 6, 24, deadline=0.1) if with_limiter else None
    place = {"cache_path": path} if storage == "memmap" else {}
    return rc.ReplayBuffer.create(storage, SPACE, capacity=40, limiter=limiter, **place)


@pytest.mark.parametrize("with_limiter", [False, True])
@pytest.mark.parametrize("kind", ["step", "prioritized"])
@pytest.mark.parametrize("storage", ["memory", "shared", "memmap"])
def test_resumed_is_never_stopped(storage: str, kind: str, with_limiter: bool, tmp_path: Path) -> None:
    with make(storage, tmp_path / "never", with_limiter) as buffer:
        never = Run(buffer, kind, 7)
        for t in range(60):
            never.tick(t)
    log: list[Any] = []
    for part in range(3):  # stopped twice, the second time in a run that was resumed itself
        first, last = 20 * part, 20 * part + 20
        ready, told = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                if part == 0:
                    run = Run(make(storage, tmp_path / "live", with_limiter), kind, 7)
                else:
                    run = Run.load(tmp_path, kind)
                for t in range(first, last):
                    run.tick(t)
                run.save(tmp_path)
                (tmp_path / f"log-{part}").write_bytes(pickle.dumps(run.log))
                os.write(told, b"x")
                # What it does after it has saved is lost with it. (Not where the dump is a live file: that keeps it.)
                for t in range(last, last + (0 if storage == "memmap" else 3)):
                    run.tick(t)
            finally:
                os.kill(os.getpid(), signal.SIGKILL)
        os.close(told)
        assert os.read(ready, 1) == b"x"
        _, status = os.waitpid(pid, 0)
        assert os.WTERMSIG(status) == signal.SIGKILL
        os.close(ready)
        log += pickle.loads((tmp_path / f"log-{part}").read_bytes())
    assert log == never.log
    assert any(entry is None for entry in log)  # an epoch has come to its end
    assert len(log) > 60
