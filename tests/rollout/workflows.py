"""Workflows that runners in other processes find by their import path; they spoil their process in some way."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import recollect.rollout as rr


def _experience() -> rr.Experience:
    return rr.Experience(tokens=[1, 2], prompt_length=1, logprobs=[-0.5], reward=1.0)


def leaves_a_child(task: Any, models: Any) -> Any:
    """Start a process and say which; then never end, or die and leave it behind."""
    child = subprocess.Popen(["sleep", "600"])
    Path(task.data["path"]).write_text(str(child.pid))
    if task.data["dies"]:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)


def dies_in_its_third_run(task: Any, models: Any) -> Any:
    """Say which run this is, wait to be let go, and die once in the third."""
    folder = Path(task.data["path"])
    with (folder / "runs").open("a") as file:
        file.write(f"{task.run_id} {os.getpid()}\n")
    while not (folder / "go").exists():
        time.sleep(0.001)
    if task.run_id == 2 and not (folder / "died").exists():
        (folder / "died").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return _experience()


def reports_pid(task: Any, models: Any) -> Any:
    """Measure in which process this runs."""
    return rr.Result(metrics={"pid": float(os.getpid())})


async def waits_for_ever(task: Any, models: Any) -> Any:
    await asyncio.get_running_loop().create_future()
