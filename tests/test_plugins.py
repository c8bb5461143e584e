"""Storages, carriers and data sets of another package, installed into a directory of its own, and the pytest plugin."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib import import_module, invalidate_caches
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import recollect as rc

ROOT = Path(__file__).parents[1]
MODULE = '''
import numpy as np
import recollect as rc
from recollect.remote import LocalCarrier

class Stored(rc.MemoryStorage):
    """A storage of another package."""

def carrier():
    return LocalCarrier.group(1)[0]

def opened(path):
    file = path / "numbers.npy"
    if not file.is_file():
        return None
    numbers = np.load(file)
    buf = rc.ReplayBuffer.create("memory", ((), "int64"), capacity=len(numbers))
    buf.extend(numbers)
    return buf

def wrong(path=None):
    return 7

def failing(path=None):
    raise ZeroDivisionError("at work")
'''


def install(place: Path, package: str, points: dict[str, dict[str, str]], source: str = MODULE) -> None:
    """Put a package into a directory as an installer does: its module, and metadata that say what it gives."""
    place.mkdir(exist_ok=True)
    (place / f"{package}.py").write_text(source)
    info = place / f"{package}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    lines = []
    for group, entries in points.items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in entries.items())]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")


@pytest.fixture
def add(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Any:
    """Install a package whose name is this test's own; its entry points are `name: function`, by group."""
    place = tmp_path / "site"
    monkeypatch.syspath_prepend(str(place))

    def add_package(group: str, name: str, function: str, package: str = "", source: str = MODULE) -> str:
        package = package or f"other_{abs(hash(request.node.name))}"
        install(place, package, {f"recollect.{group}": {name: f"{package}:{function}"}}, source)
        invalidate_caches()
        return package

    return add_package


def test_a_storage_of_another_package_is_found_by_name_and_in_its_dumps(add: Any, tmp_path: Path) -> None:
    package = add("storages", "stored-elsewhere", "Stored")
    assert package not in sys.modules
    buf = rc.ReplayBuffer.create("stored-elsewhere", ((), "int64"), capacity=4)
    assert type(buf.inner_storage) is import_module(package).Stored
    buf.extend(np.arange(3))
    buf.dumps(tmp_path / "run")
    loaded = rc.ReplayBuffer.load_from(tmp_path / "run")
    assert type(loaded.inner_storage) is import_module(package).Stored and loaded[:].tolist() == [0, 1, 2]


def test_a_name_that_is_known_looks_for_no_package(add: Any) -> None:
    package = add("storages", "memory", "Stored")
    assert type(rc.ReplayBuffer.create("memory", ((), "int64"), capacity=4).inner_storage) is rc.MemoryStorage
    assert package not in sys.modules
    with pytest.raises(ValueError, match="one of .*'memmap', 'memory'.* got 'nobody'"):
        rc.ReplayBuffer.create("nobody", ((), "int64"), capacity=4)


def test_a_carrier_of_another_package_is_found_by_name(add: Any) -> None:
    from recollect.remote.carriers.by_name import carrier_of, check_backend

    package = add("carriers", "pigeon", "carrier")
    check_backend("pigeon")
    assert package not in sys.modules  # to check a name opens nothing
    carrier = carrier_of("pigeon")
    assert carrier.rank == 0 and carrier_of("pigeon") is carrier  # one in a process
    carrier.close()
    with pytest.raises(ValueError, match="'ray', 'pigeon'. or a carrier, got 'dove'"):
        check_backend("dove")


def test_a_data_set_of_another_package_is_opened_where_it_is(add: Any, tmp_path: Path) -> None:
    package = add("datasets", "numbers", "opened")
    ours = rc.ReplayBuffer.create("memory", ((), "int64"), capacity=4)
    ours.extend(np.arange(2))
    ours.dumps(tmp_path / "ours")
    assert len(rc.datasets.open_dataset(tmp_path / "ours")) == 2 and package not in sys.modules
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    np.save(theirs / "numbers.npy", np.arange(5))
    assert rc.datasets.open_dataset(theirs)[:].tolist() == [0, 1, 2, 3, 4]
    (theirs / "numbers.npy").unlink()
    with pytest.raises(rc.FormatError, match="must hold manifest.json"):
        rc.datasets.open_dataset(theirs)


@pytest.mark.parametrize(
    ("function", "source", "problem"),
    [
        ("failing", MODULE, "ZeroDivisionError: at work"),
        ("wrong", MODULE, "which is no"),
        ("absent", MODULE, "AttributeError"),
        ("opened", "import nothing_of_this_name", "ModuleNotFoundError"),
    ],
)
@pytest.mark.parametrize("group", ["storages", "carriers", "datasets"])
def test_what_fails_is_told_with_its_package(
    add: Any, tmp_path: Path, group: str, function: str, source: str, problem: str
) -> None:
    from recollect.remote.carriers.by_name import carrier_of

    name = f"{group}-{function}"
    package = add(group, name, function, source=source)
    if group == "storages" and function == "failing":
        problem = "which is no SpaceStorage class"
    uses: dict[str, Any] = {
        "storages": lambda: rc.ReplayBuffer.create(name, ((), "int64"), capacity=4),
        "carriers": lambda: carrier_of(name),
        "datasets": lambda: rc.datasets.open_dataset(tmp_path),
    }
    with pytest.raises(
        rc.RecollectError, match=f"{name}' of the package {package} must work, got .*{problem}"
    ):
        uses[group]()


def test_a_name_of_two_packages_is_refused(add: Any) -> None:
    add("storages", "twice", "Stored", "first_of_two")
    add("storages", "twice", "Stored", "second_of_two")
    with pytest.raises(
        rc.RecollectError, match="got .'first_of_two', 'second_of_two'.; uninstall all but one"
    ):
        rc.ReplayBuffer.create("twice", ((), "int64"), capacity=4)


def test_pytest_loads_the_plugin_by_itself_and_nothing_heavy_with_it(tmp_path: Path) -> None:
    """As an installer would have written it, in a run of its own that has no conftest."""
    install(tmp_path / "site", "plugged", {"pytest11": {"recollect": "recollect.testing.plugin"}}, "")
    (tmp_path / "test_mine.py").write_text(
        "import os, sys\n"
        "LOADED = [name for name in ('torch', 'jax', 'numpy', 'gymnasium') if name in sys.modules]\n"
        "def test_light(): assert LOADED == []\n"
        "def test_clean(leaves_nothing): pass\n"
        "def test_clock(fake_clock): assert fake_clock is not None\n"
        "def test_leaky(leaves_nothing): os.open('/dev/null', os.O_RDONLY)\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:hypothesispytest",
         "-p", "no:xdist", "-p", "no:timeout", "--rootdir", str(tmp_path), "test_mine.py"],
        cwd=tmp_path, capture_output=True, text=True, timeout=120,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": f"{tmp_path / 'site'}:{ROOT / 'src'}"},
    )  # fmt: skip
    assert re.search(r"^4 passed.* 1 error", done.stdout, re.MULTILINE), done.stdout + done.stderr
    assert "left behind: descriptor" in done.stdout


def test_the_project_gives_the_plugin() -> None:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["pytest11"] == {"recollect": "recollect.testing.plugin"}
    assert import_module("recollect.testing.plugin") is not None
