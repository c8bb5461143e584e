"""Processes that step an environment at random and record it, one lane of a shared buffer each."""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
from multiprocessing.connection import Connection, wait
from typing import Any, Self

from recollect.errors import WorkerDiedError, WorkerError


def record(buffer: Any, env_id: str, lane: int, seed: int, stop: Connection) -> None:
    """Record until `stop` has something to say, or its other end is gone."""
    import gymnasium

    env = gymnasium.make(env_id)
    env.action_space.seed(seed)
    with buffer.on_lane(lane) as rows:
        obs, _ = env.reset(seed=seed)
        while not stop.poll():
            action = env.action_space.sample()
            next_obs, reward, terminated, truncated, _ = env.step(action)
            rows.append(
                {
                    "obs": obs,
                    "action": action,
                    "reward": float(reward),
                    "next_obs": next_obs,
                    "terminated": bool(terminated),
                    "truncated": bool(truncated),
                }
            )
            obs = next_obs
            if terminated or truncated:
                rows.mark_segment_end()
                obs, _ = env.reset()
    env.close()


class Recorders:
    """The recording processes.

    Ownership: ends all of them at exit, whatever happens; when this process dies, they stop by themselves.
    Concurrency: one thread.
    """

    def __init__(self, buffer: Any, env_id: str, n: int, seed: int) -> None:
        self._args = (buffer, env_id, seed)
        self._context = mp.get_context("spawn")
        self._running: list[tuple[Any, Connection]] = []
        self.n_killed = 0
        for lane in range(n):
            self._running.append(self._start(lane))

    def _start(self, lane: int) -> tuple[Any, Connection]:
        buffer, env_id, seed = self._args
        theirs, ours = self._context.Pipe(duplex=False)
        process = self._context.Process(
            target=record,
            args=(buffer, env_id, lane, seed + lane + 1000 * self.n_killed, theirs),
            daemon=True,
        )
        process.start()
        theirs.close()
        return process, ours

    def wait_for_rows(self, n: int, timeout_s: float = 60.0) -> None:
        """Return when `n` samples are there; a recorder that fails to start is an error."""
        for _ in range(int(timeout_s / 0.05)):
            if len(self._args[0]) >= n:
                return
            if wait([process.sentinel for process, _ in self._running], timeout=0.05):
                self.check()
        raise WorkerError(f"recorders: no {n} samples within {timeout_s} s; try --env CartPole-v1")

    def check(self) -> None:
        """Raise if a recorder died that was not killed here."""
        for lane, (process, _) in enumerate(self._running):
            if process.exitcode is not None:
                raise WorkerDiedError(
                    f"recorder {lane}: ended with exit code {process.exitcode}; its message is above"
                )

    def kill_one(self) -> bool:
        """SIGKILL the first recorder and start another on its lane."""
        process, ours = self._running[0]
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        ours.close()
        self.n_killed += 1
        self._running[0] = self._start(0)
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for process, ours in self._running:
            if process.is_alive():
                ours.send(None)
        for process, ours in self._running:
            process.join(10.0)
            if process.is_alive():
                process.kill()
                process.join()
            ours.close()
