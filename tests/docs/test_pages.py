"""The Python blocks of the README and of every page of the documentation run, top to bottom."""

from __future__ import annotations

import codeop
import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
PASTED = ["README.md", "docs/tutorial.md", "docs/faq.md", "docs/howto/install.md"]
HAS_TORCH = importlib.util.find_spec("torch") is not None


def program(page: Path) -> str:
    """All blocks of a page as one program, each at its own line so that tracebacks point into the page."""
    text = page.read_text()
    lines: list[str] = []
    for block in BLOCK.finditer(text):
        if page.name == "README.md" and not HAS_TORCH and "torch" in block.group(1):
            continue  # a wheel is tried on the README's blocks without any extra
        start = text.count("\n", 0, block.start(1))
        lines += [""] * (start - len(lines)) + block.group(1).splitlines()
    return "\n".join(lines)


@pytest.mark.parametrize("page", [p for p in PAGES if BLOCK.search(p.read_text())], ids=lambda p: p.name)
def test_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(program(page), str(page), "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_local_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\((?!https?:|#)([^)#\s]+)", page.read_text())
    assert not [link for link in links if not (page.parent / link).exists()]


@pytest.mark.parametrize("name", [name for name in PASTED if (ROOT / name).exists()])
def test_blocks_can_be_pasted_into_python(name: str) -> None:
    """The prompt takes an empty line as the end of an indented block, and needs one before the next statement."""
    for block in BLOCK.finditer((ROOT / name).read_text()):
        entered: list[str] = []
        for line in [*block.group(1).splitlines(), ""]:
            entered.append(line)
            if codeop.compile_command("\n".join(entered), "<pasted>", "single") is not None:
                entered = []
        assert not entered, block.group(1)
