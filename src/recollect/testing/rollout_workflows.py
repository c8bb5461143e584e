"""Workflows for the runner suite; runners elsewhere import this module by name."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from typing import Any

import recollect.rollout as rr

PREFIX = "recollect.testing."


def _experience(reward: float = 1.0) -> rr.Experience:
    return rr.Experience(tokens=[1, 2, 3], prompt_length=1, logprobs=[-0.5, -0.5], reward=reward)


@rr.workflow(PREFIX + "good")
async def good(task: Any, models: Any) -> Any:
    """Reward is the run's number; the seed comes back as a metric."""
    return rr.Result(
        _experience(float(task.run_id)), {"seed": float(task.seed % 2**40), "data": task.data.get("x", 0)}
    )


@rr.workflow(PREFIX + "good_sync")
def good_sync(task: Any, models: Any) -> Any:
    """The same without async."""
    return _experience(float(task.run_id))


@rr.workflow(PREFIX + "asks")
async def asks(task: Any, models: Any) -> Any:
    """Asks the rollout model and a judge."""
    [g] = await models.rollout.generate("2+3=")
    [v] = await models["judge"].chat([{"role": "user", "content": g.text}])
    return g.experience(reward=float(v.text))


@rr.workflow(PREFIX + "asks_sync")
def asks_sync(task: Any, models: Any) -> Any:
    """The same without async."""
    [g] = models.rollout.generate("2+3=")
    [v] = models["judge"].chat([{"role": "user", "content": g.text}])
    return g.experience(reward=float(v.text))


@rr.workflow(PREFIX + "flaky")
async def flaky(task: Any, models: Any) -> Any:
    """Odd runs fail in their first attempt."""
    if task.run_id % 2 and task.attempt == 1:
        raise OSError("the first attempt of an odd run")
    return _experience(float(task.attempt))


@rr.workflow(PREFIX + "bad")
async def bad(task: Any, models: Any) -> Any:
    """Always raises."""
    raise ValueError(f"broken task {task.task_id}")


@rr.workflow(PREFIX + "gives_up")
async def gives_up(task: Any, models: Any) -> Any:
    """Fails for good."""
    raise rr.GiveUp("no use")


@rr.workflow(PREFIX + "off_space")
async def off_space(task: Any, models: Any) -> Any:
    """Returns what does not fit the space."""
    return rr.Experience(tokens=[1.5], prompt_length=0, logprobs=[0.0])


@rr.workflow(PREFIX + "hangs")
async def hangs(task: Any, models: Any) -> Any:
    """Never ends, but obeys its cancel."""
    await asyncio.get_running_loop().create_future()


@rr.workflow(PREFIX + "ignores_cancel")
async def ignores_cancel(task: Any, models: Any) -> Any:
    """Goes on for a second whatever it is told."""
    end = time.monotonic() + 1.0
    while time.monotonic() < end:
        try:
            await asyncio.sleep(0.01)
        except asyncio.CancelledError:
            continue
    return _experience()


@rr.workflow(PREFIX + "blocks")
def blocks(task: Any, models: Any) -> Any:
    """Sleeps in a thread for a second, which nothing can interrupt but the death of its process."""
    time.sleep(1.0)
    return _experience()


@rr.workflow(PREFIX + "dies")
async def dies(task: Any, models: Any) -> Any:
    """Kills its process."""
    os.kill(os.getpid(), signal.SIGKILL)


@rr.workflow(PREFIX + "dies_once")
async def dies_once(task: Any, models: Any) -> Any:
    """Kills its process unless the file it is given is there."""
    try:
        os.close(os.open(task.data["path"], os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return _experience()
    return os.kill(os.getpid(), signal.SIGKILL)


@rr.workflow(PREFIX + "group", grouped=True)
async def group(task: Any, models: Any) -> Any:
    """One call for all runs."""
    return [_experience(float(run_id)) for run_id in task.run_ids]


@rr.workflow(PREFIX + "cut_error")
def cut_error(task: Any, models: Any) -> Any:
    """Raises with text that was cut inside a character."""
    raise ValueError("the model said \ud83d")


@rr.workflow(PREFIX + "cut_names")
def cut_names(task: Any, models: Any) -> Any:
    """Gives such text as the name of a metric and in the notes of a step."""
    step = _experience()
    step.info["said"], step.metrics["step \ud83d"] = "half \ud83d", 1.0
    return rr.Result([step], {"run \ud83d": 2.0})
