"""`recollect inspect`: what is in a dump or data set."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

from recollect.budget import human_nbytes
from recollect.cli.terminal import bar, words


@dataclass
class Inspect:
    """Say what is at a path: its space, counts, sizes, segments, and the range of each leaf.

    The path is a dump or live directory of Recollect, what `recollect rollout` wrote to files, or a data set of
    LeRobot, Minari, UniEnv or Hugging Face.

    Example: recollect inspect runs/demo/model_6000/replay
    """

    path: Annotated[Path, tyro.conf.Positional]
    """The directory to look at, or the id of a set of the Hugging Face Hub or of Minari."""
    ranges: bool = True
    """Read all samples for the range of each leaf; --no-ranges reads none."""
    split: str | None = None
    """Which split of a Hugging Face data set."""
    json: bool = False
    """Print one JSON object instead of tables."""

    def run(self) -> None:
        """Look and report."""
        from recollect.datasets.hub import located
        from recollect.datasets.open import kind_of, open_dataset

        path = located(self.path)
        batch: Any = open_dataset(path, split=self.split)
        with batch:
            report = {"path": str(self.path), "kind": kind_of(path), **describe(batch)}
            report["files"] = _files(path)
            if self.ranges:
                with bar("reading", len(batch), self.json) as advance:
                    found = ranges(batch, advance)
                for leaf in report["leaves"]:
                    leaf |= found.get(leaf["name"], {})
                report["first_texts"] = first_texts(batch)
        if self.json:
            sys.stdout.write(json.dumps(report, indent=2) + "\n")
        else:
            show_inspection(report)


def describe(batch: Any) -> dict[str, Any]:
    """What can be said without reading samples."""
    from recollect.spaces.tree import leaf_paths, node_kind, path_name

    segments = batch.get_segments()
    storage = getattr(batch, "inner_storage", None)
    leaves = []
    for path, leaf in leaf_paths(batch.single_space):
        shape, kind = None if leaf.shape is None else list(leaf.shape), node_kind(leaf)
        value = getattr(leaf, "feature_space", leaf)  # of a sequence, its elements
        dtype = "str" if kind == "text" or value.dtype is None else str(value.dtype)
        leaves.append({"name": path_name(path) or "value", "kind": kind, "dtype": dtype, "shape": shape})
    report: dict[str, Any] = {
        "storage": None if storage is None else storage.short_name,
        "samples": len(batch),
        "capacity": getattr(batch, "capacity", None),
        "leaves": leaves,
        "left_out": getattr(batch, "left_out", {}),
        "segments": None,
    }
    if segments is not None:
        lengths = np.array([b - a for a, b in segments], np.int64)
        some = (
            {"min": int(lengths.min()), "mean": float(lengths.mean()), "max": int(lengths.max())}
            if len(lengths)
            else {}
        )
        report["segments"] = {"count": len(lengths), **some}
    return report


def first_texts(batch: Any) -> dict[str, str]:
    """The texts of the first sample: a prompt and its answer, a task."""
    from recollect.spaces.tree import leaf_paths, node_kind, path_name

    named = [
        (path, path_name(path)) for path, leaf in leaf_paths(batch.single_space) if node_kind(leaf) == "text"
    ]
    return {name: str(batch.get_column_at(path, 0)) for path, name in named if len(batch)}


def ranges(batch: Any, advance: Any, chunk: int = 1024) -> dict[str, dict[str, Any]]:
    """The least and greatest value and the count of NaN of each leaf of numbers; of Text the lengths."""
    from recollect.batch.structure import pick
    from recollect.spaces.tree import leaf_paths, node_kind, path_name

    leaves = [
        (path, path_name(path) or "value", node_kind(leaf)) for path, leaf in leaf_paths(batch.single_space)
    ]
    found: dict[str, dict[str, Any]] = {}
    for first in range(0, len(batch), chunk):
        end = min(first + chunk, len(batch))
        data = batch.get_at(np.arange(first, end))
        for path, name, kind in leaves:
            value = pick(data, path)
            if kind in ("text", "sequence"):
                _note(found.setdefault(name, {}), np.array([len(item) for item in value]), "length_")
            elif np.size(value):
                _note(found.setdefault(name, {}), np.asarray(value), "")
        advance(end - first)
    return found


def _note(seen: dict[str, Any], values: Any, prefix: str) -> None:
    if values.dtype.kind == "f":
        seen["nan"] = seen.get("nan", 0) + int(np.isnan(values).sum())
        values = values[~np.isnan(values)]
    if values.size:
        low, high = values.min().item(), values.max().item()
        for side, value, of in ((f"{prefix}min", low, min), (f"{prefix}max", high, max)):
            plain = float(value) if not isinstance(value, bool | int) else value
            seen[side] = of(seen.get(side, plain), plain)


def _files(path: Path) -> dict[str, int]:
    sizes = [f.stat().st_size for f in path.rglob("*") if f.is_file()]
    return {"count": len(sizes), "bytes": sum(sizes)}


def show_inspection(report: dict[str, Any], console: Console | None = None) -> None:
    """Print what a directory holds."""
    console = console or Console()
    storage = f", storage {report['storage']}" if report["storage"] else ""
    told = (
        f": {report['kind']}{storage}, {report['samples']:,} samples, "
        f"{report['files']['count']:,} files of {human_nbytes(report['files']['bytes'])}"
    )
    console.print(words("\n", (report["path"], "bold"), told))
    segments = report["segments"]
    if segments is None:
        console.print("Segments: not known")
    elif segments["count"]:
        console.print(
            f"Segments: {segments['count']:,}, of {segments['min']:,} to {segments['max']:,} samples, "
            f"mean {segments['mean']:.1f}"
        )
    table = Table()
    for name in ("leaf", "kind", "dtype", "shape", "min", "max", "NaN"):
        table.add_column(name, justify="left" if name in ("leaf", "kind", "dtype") else "right")
    for leaf in report["leaves"]:
        shape = "×".join(map(str, leaf["shape"] or ())) or "scalar"
        low, high = (
            f"{leaf[f'length_{side}']} long" if f"length_{side}" in leaf else leaf.get(side, "")
            for side in ("min", "max")
        )
        table.add_row(
            words(leaf["name"]),
            leaf["kind"],
            words(leaf["dtype"]),
            shape,
            _short(low),
            _short(high),
            str(leaf.get("nan", "")),
        )
    console.print(table)
    for name, text in report.get("first_texts", {}).items():
        if text:
            console.print(words((f"{name} of the first sample: ", "bold"), _cut(text)))
    for name, why in report["left_out"].items():
        console.print(words(f"Left out: {name}, which {why}"))


def _cut(text: str, most: int = 500) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
