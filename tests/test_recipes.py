"""Each recipe in examples/ reaches the outcome that it asserts, and is short enough to read."""

from __future__ import annotations

import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
ROOT = Path(__file__).parents[1]
RECIPES = {
    "dqn_cartpole": "mean of the last 20 returns",
    "dqn_frames": "balls caught of the last 100",
    "ppo_cartpole": "mean length in the last rollout",
    "r2d2_memory": "right answers in the last 50 episodes",
    "sac_prioritized_nstep": "mean of the last 5 returns",
    "her_bit_flip": "success in the last 100 episodes",
}


@pytest.fixture(autouse=True)
def _same_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("name", RECIPES)
def test_recipe_reaches_its_outcome(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(ROOT / "examples" / f"{name}.py"), run_name="__main__")
    assert RECIPES[name] in capsys.readouterr().out


@pytest.mark.process
def test_actor_learner_reaches_its_outcome(leaves_nothing: None) -> None:
    """By itself: its actors are spawned and import the file again."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "actor_learner.py")],
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    assert "mean length of the last episodes" in done.stdout and done.stderr == ""


def test_recipes_are_short_and_shown() -> None:
    page = (ROOT / "docs" / "howto" / "recipes.md").read_text()
    for name in [*RECIPES, "actor_learner"]:
        assert len((ROOT / "examples" / f"{name}.py").read_text().splitlines()) < 150, name
        assert f"../../examples/{name}.py" in page, name
