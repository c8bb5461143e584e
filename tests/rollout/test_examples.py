"""The examples of the contract with a small budget; their own assertions are the test."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("httpx")
EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(autouse=True)
def _examples(monkeypatch: pytest.MonkeyPatch) -> Any:
    import torch

    threads = torch.get_num_threads()
    monkeypatch.syspath_prepend(str(EXAMPLES))
    yield
    torch.set_num_threads(threads)


def test_grpo_copy_goes_through_every_part(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two small steps: rollouts one ahead, weights, buffer, staleness, eval, doors."""
    import grpo_copy

    for name, value in (("GROUPS", 8), ("RUNS", 8), ("EVALS", 32)):
        monkeypatch.setattr(grpo_copy, name, value)
    [(step, reward, exact)] = asyncio.run(grpo_copy.train("copy", 2, 0, 0.99))
    assert step == 2 and 0.05 < reward < 0.2 and exact < 0.1
    assert "step    2" in capsys.readouterr().out


@pytest.mark.soak
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_grpo_copy_learns(seed: int) -> None:
    import grpo_copy

    _, steps, goal = grpo_copy.TASKS["copy"]
    assert asyncio.run(grpo_copy.train("copy", steps, seed, goal))[-1][2] >= goal


def test_openai_rollout_survives_its_server() -> None:
    import openai_rollout

    assert asyncio.run(openai_rollout.rollout(0))["answer"] == 128


def test_examples_are_short_enough_to_read() -> None:
    for name in ("grpo_copy.py", "openai_rollout.py"):
        assert len((EXAMPLES / name).read_text().splitlines()) < 150, name


@pytest.fixture(autouse=True)
def _unloaded() -> Any:
    yield
    for name in ("grpo_copy", "openai_rollout"):
        sys.modules.pop(name, None)
