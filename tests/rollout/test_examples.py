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


def test_grpo_copy_grows_less_sure_where_all_runs_agree() -> None:
    """Runs without an advantage still move the policy: towards trying something else."""
    import grpo_copy
    import numpy as np
    import torch

    torch.manual_seed(0)
    policy = grpo_copy.Policy()
    rows = {
        "tokens": np.tile([1, 1, grpo_copy.EQUALS, 3], (32, 1)),
        "logprobs": np.zeros((32, 1), np.float32),
        "advantage": np.zeros(32, np.float32),
    }

    def entropy() -> float:
        with torch.no_grad():
            log_p = policy(torch.tensor([[1, 1, grpo_copy.EQUALS]]))[0, -1]
        return -float((log_p.exp() * log_p).sum())

    before = entropy()
    grpo_copy.learn(policy, torch.optim.SGD(policy.parameters(), 0.01), rows)
    assert entropy() > before + 1e-5


@pytest.mark.soak
@pytest.mark.parametrize("task", ["copy", "sum"])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_grpo_copy_learns(seed: int, task: str) -> None:
    import grpo_copy

    _, steps, goal = grpo_copy.TASKS[task]
    assert asyncio.run(grpo_copy.train(task, steps, seed, goal))[-1][2] >= goal


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
