"""Each recipe in examples/ reaches the outcome that it asserts, and is short enough to read."""

from __future__ import annotations

import ast
import contextlib
import io
import json
import pprint
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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
    "grpo_openai": "share of digits copied after",
    "grpo_openai --text": "share of digits copied after",
}


@pytest.fixture(autouse=True)
def _same_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("name", RECIPES)
def test_recipe_reaches_its_outcome(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if name.startswith("grpo_openai"):
        pytest.importorskip("httpx")
    file, *options = name.split()
    monkeypatch.setattr(sys, "argv", [file, *options])
    runpy.run_path(str(ROOT / "examples" / f"{file}.py"), run_name="__main__")
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
    for name in {*(name.split()[0] for name in RECIPES), "actor_learner"}:
        assert len((ROOT / "examples" / f"{name}.py").read_text().splitlines()) < 150, name
        assert f"../../examples/{name}.py" in page, name


def shown(value: Any) -> str:
    """What a notebook shows of a cell's last value: a dict of several entries has a line for each."""
    return pprint.pformat(value, sort_dicts=False)


def run_cell(source: str, names: dict[str, Any]) -> str:
    """What the cell prints, and what its last line is worth."""
    *body, last = ast.parse(source).body
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(ast.Module(body, []), "cell", "exec"), names)
        if not isinstance(last, ast.Expr):
            exec(compile(ast.Module([last], []), "cell", "exec"), names)
            return printed.getvalue()
        value = eval(compile(ast.Expression(last.value), "cell", "eval"), names)
    return printed.getvalue() + ("" if value is None else shown(value))


def test_cells_of_the_notebook_show_what_they_print_and_can_be_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    notebook = json.loads((ROOT / "examples" / "first_steps.ipynb").read_text())
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    names: dict[str, Any] = {}
    for cell in cells:
        written = [out.get("text") or out["data"]["text/plain"] for out in cell["outputs"]]
        told = "".join("".join(part) for part in written)
        assert run_cell("".join(cell["source"]), names).rstrip() == told.rstrip()
    for cell in [*cells[1:], *reversed(cells)]:  # out of order, as it happens
        run_cell("".join(cell["source"]), names)
