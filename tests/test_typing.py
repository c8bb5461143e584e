"""What a type checker sees of an installed package: every public name, and what is wrong in a program that uses it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import recollect

pytest.importorskip("mypy")

PACKAGES = (
    "recollect recollect.backends recollect.batch recollect.collect recollect.datasets recollect.files "
    "recollect.ipc recollect.ipc.replay_pipelines recollect.learners recollect.observe recollect.observe.web "
    "recollect.remote recollect.replay recollect.rollout recollect.sampling recollect.spaces recollect.storage "
    "recollect.testing"
).split()

# The checker of one who has installed none of the optional packages: theirs are large, and not the subject.
SETTINGS = """
[mypy]
strict = true
[mypy-torch.*,jax.*,jaxlib.*,ray.*,mpi4py.*,h5py.*,pyarrow.*,av.*,PIL.*,httpx.*,tyro.*,rich.*,pytest.*,hypothesis.*]
follow_imports = skip
[mypy-starlette.*,uvicorn.*,matplotlib.*,stable_baselines3.*,torchrl.*,tensordict.*,gfn.*,ml_dtypes.*,tqdm.*]
follow_imports = skip
"""

# A line that ends with `# wrong` must be the line of an error, and no other.
USE = """
from typing import assert_type

import recollect as rc
from recollect.ipc import SharedWeightSync
from recollect.ipc.replay_pipelines import ReplayTickMetadata
from recollect.remote import RemoteReplay, Trajectories, launch
from recollect.rollout import Result, RolloutCoordinator, Task, workflow

space = rc.as_space({"obs": ((17,), "float32"), "action": 3})
buffer = rc.ReplayBuffer.create(rc.MemoryStorage, space, capacity=100)
assert_type(buffer, rc.ReplayBuffer)
sampler = rc.StepSampler(buffer, 4, seed=0)
assert_type(sampler, rc.StepSampler)
assert_type(rc.datasets.open_dataset("here"), rc.BatchBase)

def use(replay: RemoteReplay, weights: SharedWeightSync, coordinator: RolloutCoordinator) -> None:
    replay.close()
    weights.close()
    replay.cloze()  # wrong
    weights.cloze()  # wrong
    coordinator.cloze()  # wrong

rc.StepSampler(buffer, 4, sead=0)  # wrong
rc.ReplayBufer  # wrong
rc.datasets.open_dataste  # wrong
rc.testing.StorageContrat  # wrong
rc.learners.sacc  # wrong
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of the user's own; its second check reads what the first one learnt."""
    return tmp_path_factory.mktemp("user")


def checked(place: Path, text: str) -> tuple[int, str]:
    """Run the type checker over a file there."""
    (place / "mypy.ini").write_text(SETTINGS)
    (place / "used.py").write_text(text)
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--cache-dir", str(place / "cache"), "used.py"],
        cwd=place,
        env=os.environ | {"PYTHONPATH": str(Path(recollect.__file__).parents[1])},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def test_a_type_checker_sees_every_public_name(place: Path) -> None:
    lines = []
    for package in PACKAGES:
        names = getattr(import_module(package), "__all__", ())
        lines += [f"from {package} import {name} as {package.replace('.', '_')}_{name}" for name in names]
    code, said = checked(place, "\n".join(lines))
    assert code == 0, said


def test_a_type_checker_finds_what_a_user_got_wrong(place: Path) -> None:
    _, said = checked(place, USE)
    found = {int(at) for at in re.findall(r"^used\.py:(\d+): error", said, re.MULTILINE)}
    assert found == {i for i, line in enumerate(USE.splitlines(), 1) if line.endswith("# wrong")}, said
