"""`recollect inspect`: what is in a dump or data set."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import tyro

from recollect.cli.progress import bar


@dataclass
class Inspect:
    """Say what is at a path: its space, counts, sizes, segments, and the range of each leaf.

    The path is a dump or live directory of Recollect, or a data set of LeRobot, Minari or Hugging Face.

    Example: recollect inspect runs/rates
    """

    path: Annotated[Path, tyro.conf.Positional]
    """The directory to look at."""
    ranges: bool = True
    """Read all samples for the range of each leaf; --no-ranges reads none."""
    split: str | None = None
    """Which split of a Hugging Face data set."""
    json: bool = False
    """Print one JSON object instead of tables."""

    def run(self) -> None:
        """Look and report."""
        from recollect.datasets.opening import kind_of, open_dataset

        batch: Any = open_dataset(self.path, split=self.split)
        with batch:
            report = {"path": str(self.path), "kind": kind_of(self.path), **describe(batch)}
            report["files"] = _files(self.path)
            if self.ranges:
                with bar("reading", len(batch), self.json) as advance:
                    found = ranges(batch, advance)
                for leaf in report["leaves"]:
                    leaf |= found.get(leaf["name"], {})
        if self.json:
            sys.stdout.write(json.dumps(report, indent=2) + "\n")
        else:
            from recollect.cli.data_tables import show_inspection

            show_inspection(report)


def describe(batch: Any) -> dict[str, Any]:
    """What can be said without reading samples."""
    from recollect.spaces.tree import leaf_paths, node_kind, path_name

    segments = batch.get_segments()
    storage = getattr(batch, "inner_storage", None)
    leaves = []
    for path, leaf in leaf_paths(batch.single_space):
        shape = None if leaf.shape is None else list(leaf.shape)
        dtype = str(leaf.dtype) if leaf.dtype is not None else "str"
        leaves.append(
            {"name": path_name(path) or "value", "kind": node_kind(leaf), "dtype": dtype, "shape": shape}
        )
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
