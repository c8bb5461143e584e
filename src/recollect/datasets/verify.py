"""Check whatever is at a path: which files are damaged, and which samples can still be read.

Dumps and the LeRobot sets that we write name the size and checksum of every file, so that one flipped byte is found
wherever it is. Data sets of others have none: there all samples are read, and what cannot be decoded is found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from recollect.datasets.hub import located
from recollect.datasets.lerobot.meta import CHECKSUMS, check_sum, read_checksums
from recollect.datasets.open import kind_of, open_dataset
from recollect.errors import FormatError, RecollectError
from recollect.replay import ReplayBuffer
from recollect.storage.filed.base import DirectoryStorage
from recollect.storage.manifest import MANIFEST, check_files, read_manifest

FORMATS = ("recollect.replay", "recollect.storage")
Runs = list[list[int]]
Advance = Callable[[int], Any]
Bar = Callable[[str, int], Any]  # what, total: a context that gives `Advance`


@contextmanager
def no_bar(what: str, total: int) -> Iterator[Advance]:
    """Show no progress."""
    yield lambda n: None


def verify(path: str | Path, *, split: str | None = None, bar: Bar = no_bar) -> dict[str, Any]:
    """Say what is damaged at a path: a record of plain values.

    `damaged` has a `file` (relative to the path) and the `problem` for each; `readable` are runs of samples that were
    read and are as they were written, `unsure` runs that can be read from a file whose checksum does not match.
    `leaves` has the runs in which single leaves can be read, where those are more than of whole samples; what is in a
    damaged file may be wrong. `unchecked` are files without a checksum. `ok` is True when nothing is damaged.

    >>> import numpy as np, recollect as rc, tempfile
    >>> from recollect.datasets.verify import verify
    >>> path = tempfile.mkdtemp() + "/run"
    >>> buf = rc.ReplayBuffer.create("memory", ((), "float32"), capacity=4)
    >>> buf.extend(np.ones(3, "float32")); buf.dumps(path)
    >>> verify(path)["ok"], verify(path)["readable"]
    (True, [[0, 3]])
    """
    path = located(path)
    kind = kind_of(path)
    report: dict[str, Any] = {"path": str(path), "kind": kind, "files": 0, "samples": None, "damaged": [],
                              "readable": [], "unsure": [], "leaves": {}, "unchecked": [], "reason": None}  # fmt: skip
    named = _named_files(path, kind, report)
    if named is not None:
        report["files"] = len(named)
        _check_named(path, kind, named, report["damaged"], bar)
    if not (kind == "recollect" and named is None):
        _check_samples(path, kind, named is not None, split, report, bar)
    for found in report["damaged"]:  # whose place is told already
        for place in (path / found["file"], path.absolute() / found["file"]):
            found["problem"] = found["problem"].removeprefix(f"{place}: ")
    report["ok"] = not report["damaged"]
    return report


def _named_files(path: Path, kind: str, report: dict[str, Any]) -> dict[str, Any] | None:
    """Size and checksum of each file, None if there are none that can be trusted."""
    try:
        if kind == "recollect":
            manifest = read_manifest(path, FORMATS)
            report["samples"] = int(manifest["count"])
            if manifest["live"]:
                report["unchecked"] = _others(path, {MANIFEST, *manifest["files"]})
            named: dict[str, Any] = manifest["files"]
            return named
        if kind == "lerobot" and (path / CHECKSUMS).is_file():
            found = read_checksums(path)
            report["unchecked"] = _others(path, {CHECKSUMS, *found})
            return found
    except RecollectError as error:
        name = MANIFEST if kind == "recollect" else CHECKSUMS
        report["damaged"].append({"file": name, "problem": str(error)})
        report["reason"] = str(error)
        return None if kind == "recollect" else {}
    report["unchecked"] = _others(path, set())
    return None


def _others(path: Path, known: set[str]) -> list[str]:
    every = (str(f.relative_to(path)) for f in path.rglob("*") if f.is_file())
    return sorted(name for name in every if name not in known)


def _check_named(
    path: Path, kind: str, named: dict[str, Any], damaged: list[dict[str, str]], bar: Bar
) -> None:
    with bar("checking", len(named)) as advance:
        for name, about in named.items():
            try:
                if kind == "lerobot":
                    check_sum(path, name, about)
                else:
                    check_files(path, {"files": {name: about}}, verify=True)
            except (RecollectError, OSError) as error:
                damaged.append({"file": name, "problem": str(error)})
            advance(1)


def _check_samples(path: Path, kind: str, has_checksums: bool, split: str | None, report: dict[str, Any],
                   bar: Bar) -> None:  # fmt: skip
    """Read what no checksum vouches for, and after damage all that can be read."""
    damaged = report["damaged"]
    try:
        batch: Any = _opened(path, kind, split, bool(damaged))
    except (RecollectError, OSError, ValueError) as error:
        if not damaged:
            damaged.append({"file": _file_in(path, str(error)), "problem": str(error)})
        report["reason"] = str(error)
        return
    with batch:
        report["samples"] = len(batch)
        storage = getattr(batch, "inner_storage", None)
        if not damaged and isinstance(storage, DirectoryStorage):  # files that the storage's own files name
            damaged += [{"file": name, "problem": problem} for name, problem in storage.damages()]
        if has_checksums and not damaged:
            report["readable"] = [[0, len(batch)]] if len(batch) else []
            return
        problems: dict[str, None] = {}
        with bar("reading", len(batch)) as advance:
            good = readable(batch, problems, advance)
        if not damaged:
            damaged += [{"file": _file_in(path, problem), "problem": problem} for problem in problems]
        report["readable"], report["unsure"] = _divided(good, _doubtful(batch, damaged))
        if _count(good) < len(batch):
            report["leaves"] = _readable_leaves(batch, _count(good), bar)


def _count(runs: Runs) -> int:
    return sum(b - a for a, b in runs)


def _readable_leaves(batch: Any, n_whole: int, bar: Bar) -> dict[str, Runs]:
    """The runs of each top-level leaf of which more can be read than of whole samples."""
    found = {}
    keys = list(getattr(batch.single_space, "spaces", ()))
    for key in keys if len(keys) > 1 else ():
        with bar(f"reading {key}", len(batch)) as advance:
            runs = readable(batch.get_column(key), {}, advance)
        if _count(runs) > n_whole:
            found[key] = runs
    return found


def _opened(path: Path, kind: str, split: str | None, is_damaged: bool) -> Any:
    if (
        kind == "recollect"
        and is_damaged
        and read_manifest(path, FORMATS)["storage"]["name"] in ("memory", "shared")
    ):
        return ReplayBuffer.load_from(path, storage="memmap")  # which maps rows and does not check them
    if kind == "lerobot" and is_damaged:
        from recollect.datasets.lerobot.dataset import open_unchecked

        return open_unchecked(path.absolute())
    return open_dataset(path, split=split)


def _doubtful(batch: Any, damaged: list[dict[str, str]]) -> Runs:
    """The samples that a damaged file may have given wrong values without an error."""
    files = {found["file"] for found in damaged}
    whole = [[0, len(batch)]]
    if hasattr(batch, "files_of"):
        parts = zip(batch.get_segments() or (), batch.files_of())
        return [[*run] for run, names in parts if not files.isdisjoint(names)]
    storage = getattr(batch, "inner_storage", None)
    return [] if not damaged or storage is None or storage.checks_reads() else whole


def _divided(good: Runs, doubtful: Runs) -> tuple[Runs, Runs]:
    """Runs that are sure, and those that are not."""
    if not good:
        return [], []
    is_good = np.zeros(good[-1][1] + 1, np.int8)
    for a, b in good:
        is_good[a:b] = 1
    for a, b in doubtful:
        is_good[a:b] *= 2
    return _runs(is_good == 1), _runs(is_good == 2)


def _runs(mask: Any) -> Runs:
    edges = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]]).astype(np.int8)))
    return [[int(a), int(b)] for a, b in zip(edges[::2], edges[1::2])]


def _file_in(path: Path, problem: str) -> str:
    """The file that a problem is about: errors begin with it."""
    place = problem.split(": ")[0]
    try:
        return str(Path(place).absolute().relative_to(path.absolute()))
    except ValueError:
        return place


def readable(batch: Any, problems: dict[str, None], advance: Advance, chunk: int = 256) -> Runs:
    """The runs of samples that can be read; what is wrong with the others goes to `problems`."""
    good: Runs = []
    todo = [(a, min(a + chunk, len(batch))) for a in range(0, len(batch), chunk)][::-1]
    while todo:
        a, b = todo.pop()
        try:
            batch.get_at(np.arange(a, b))
        except Exception as error:  # whatever a decoder makes of damaged bytes
            if b - a > 1:  # halves: the bad ones are few
                middle = (a + b) // 2
                todo += [(middle, b), (a, middle)]
                continue
            problems[str(error) if isinstance(error, FormatError) else repr(error)] = None
        else:
            if good and good[-1][1] == a:
                good[-1][1] = b
            else:
                good.append([a, b])
        advance(b - a)
    return good
