"""Shared memory has no name in /dev/shm, so a killed process can leave none there."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.process

# Runs where /dev/shm is empty and nobody else can make a name: a file system of this process and its children alone.
PROGRAM = """
import json, multiprocessing, os, signal
import numpy as np
import recollect as rc
from recollect.ipc import SharedObsNormStats, SharedWeightSync

def write_and_die(buffer, weights):
    with buffer.on_lane(1) as lane:
        lane.append({"x": 1.0})
        weights.write_weights({"w": np.ones(3, "float32")})
        os.kill(os.getpid(), signal.SIGKILL)

if __name__ == "__main__":
    seen = set()
    for method in ("fork", "spawn"):
        buffer = rc.ReplayBuffer.create("shared", {"x": ((), "float32")}, capacity=8, multiprocessing=True, num_lanes=2)
        weights = SharedWeightSync({"w": (3,)})
        stats = SharedObsNormStats(4)
        child = multiprocessing.get_context(method).Process(target=write_and_die, args=(buffer, weights))
        child.start()
        child.join(60)
        assert child.exitcode == -signal.SIGKILL, child.exitcode
        assert len(buffer) == 1
        seen.update(name for name in os.listdir("/dev/shm") if not name.startswith("sem."))
        for one in (buffer, weights, stats):
            one.close()
    print(json.dumps(sorted(seen | set(os.listdir("/dev/shm")))))
"""


def test_a_killed_process_leaves_no_name(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    alone = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs tmpfs /dev/shm && exec "$@"', "sh"]
    try:
        tried = subprocess.run([*alone, "true"], capture_output=True)
    except FileNotFoundError:
        pytest.skip("needs the program unshare")
    if tried.returncode:
        pytest.skip("may not mount a /dev/shm of its own here")
    done = subprocess.run([*alone, sys.executable, str(program)], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == []
