"""What `import recollect` costs and loads, seen from a fresh process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

FRESH = """
import json, sys, time
before = set(sys.modules)
start = time.process_time()
{statement}
spent = time.process_time() - start
loaded = {{m.partition(".")[0] for m in set(sys.modules) - before}}
print(json.dumps([spent, sorted(loaded - set(sys.stdlib_module_names))]))
"""

EVERY_NAME = "import recollect\nfor name in recollect.__all__: getattr(recollect, name)"
EVERY_IPC_MODULE = """import importlib, pkgutil, recollect.ipc
for _, name, _ in pkgutil.walk_packages(recollect.ipc.__path__, "recollect.ipc."):
    if not name.endswith("_torch"): importlib.import_module(name)"""  # that one is loaded when a device asks for it
HARD = "import numpy, gymnasium, msgspec"


def fresh(statement: str, **env: str) -> tuple[float, set[str]]:
    """CPU seconds and third-party top-level modules of `statement` in a process of its own."""
    code = FRESH.format(statement=statement)
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    seconds, modules = json.loads(done.stdout)
    return seconds, set(modules)


# The names are loaded when they are first used; all of them together may cost a little more than the package.
@pytest.mark.parametrize(
    ("statement", "limit"), [("import recollect", 0.35), (EVERY_NAME, 0.6)], ids=["package", "every name"]
)
def test_import_is_cheap(statement: str, limit: float, tmp_path: Path) -> None:
    # As users have it: the modules are compiled already. The first of five compiles them, and the best counts,
    # since the machine may be busy with others. (An empty PYTHONDONTWRITEBYTECODE is as good as none.)
    compiled = {"PYTHONPYCACHEPREFIX": str(tmp_path), "PYTHONDONTWRITEBYTECODE": ""}
    assert min(fresh(statement, **compiled)[0] for _ in range(5)) < limit


@pytest.mark.parametrize(
    "statement",
    ["import recollect", EVERY_NAME, EVERY_IPC_MODULE],
    ids=["package", "every name", "every module of ipc"],
)
def test_import_loads_only_the_hard_dependencies(statement: str) -> None:
    _, theirs = fresh(HARD)
    _, ours = fresh(statement)
    assert not ours & {"torch", "jax", "jaxlib", "ray", "mpi4py"}
    # What numpy, gymnasium and msgspec load themselves is theirs to answer for.
    assert ours - theirs <= {"recollect"}


def test_measuring_sees_a_heavy_import() -> None:
    """The check above can fail: a module beyond the three is seen."""
    _, theirs = fresh(HARD)
    _, more = fresh(f"{HARD}\nimport pytest")
    assert "pytest" in more - theirs
