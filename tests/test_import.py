"""What `import recollect` costs and loads, seen from a fresh process."""

from __future__ import annotations

import json
import subprocess
import sys

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
HARD = "import numpy, gymnasium, msgspec"


def fresh(statement: str) -> tuple[float, set[str]]:
    """CPU seconds and third-party top-level modules of `statement` in a process of its own."""
    code = FRESH.format(statement=statement)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    seconds, modules = json.loads(done.stdout)
    return seconds, set(modules)


@pytest.mark.parametrize("statement", ["import recollect", EVERY_NAME], ids=["package", "every name"])
def test_import_is_cheap(statement: str) -> None:
    # Best of five: the first fills the disk cache and compiles, and the machine may be busy with others.
    assert min(fresh(statement)[0] for _ in range(5)) < 0.35


@pytest.mark.parametrize("statement", ["import recollect", EVERY_NAME], ids=["package", "every name"])
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
