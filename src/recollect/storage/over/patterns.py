"""Which storage holds which leaves: the patterns of a DictStorage."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Any
from urllib.parse import quote

from gymnasium import Space, spaces

from recollect.files import check_name
from recollect.files.record import damage_in
from recollect.spaces import space_at
from recollect.spaces.tree import Path, children, leaf_paths, make_dict, path_name

REST = "*"


@dataclass(frozen=True, slots=True)
class Part:
    """The leaves of one child: a node of the space by itself, or several leaves as a flat Dict by name."""

    pattern: str
    paths: tuple[Path, ...]
    node: Path | None  # None: a flat Dict
    space: Space[Any]

    def pick(self, data: Any) -> Any:
        """Take the child's value out of a sample or block."""
        if self.node is not None:
            return _at(data, self.node)
        return {path_name(path): _at(data, path) for path in self.paths}

    def whole_name(self, name: str) -> str:
        """The name in the whole of what the child calls `name`."""
        if not self.node:
            return name
        return path_name(self.node) if name == "value" else f"{path_name(self.node)}/{name}"

    def leaves(self, data: Any) -> dict[Path, Any]:
        """The child's leaves, by their path in the whole."""
        if self.node is None:
            return {path: data[path_name(path)] for path in self.paths}
        return {path: _at(data, path[len(self.node) :]) for path in self.paths}


def divide(space: Space[Any], patterns: Any) -> list[Part]:
    """Give each leaf to the most exact pattern; a leaf or a pattern left over raises ValueError."""
    if not patterns or not isinstance(patterns, Mapping):
        raise ValueError(
            f"storages: must be a dict of patterns, as {{'obs/image': VideoStorage, '*': …}}, got {patterns!r}"
        )
    paths = [path for path, _ in leaf_paths(space)]
    taken: dict[str, list[Path]] = {pattern: [] for pattern in patterns}
    for path in paths:
        fitting = [pattern for pattern in patterns if _exactness(pattern, path) >= 0]
        if not fitting:
            raise ValueError(
                f"storages: {path_name(path)} must be in one of {list(patterns)}, got none; add '*'"
            )
        taken[max(fitting, key=lambda pattern: _exactness(pattern, path))].append(path)
    unused = [pattern for pattern, found in taken.items() if not found]
    if unused:
        names = [path_name(path) for path in paths]
        raise ValueError(
            f"storages: every pattern must fit a leaf of {names} that no other takes, got {unused}"
        )
    return [_part(space, pattern, tuple(found)) for pattern, found in taken.items()]


def _exactness(pattern: str, path: Path) -> int:
    """How well a pattern fits a leaf, -1 if it does not: the deeper and the plainer, the better."""
    parts, names = pattern.split("/"), [str(key) for key in path]
    if pattern == path_name(path) or (parts[-1] != REST and names[: len(parts)] == parts):
        return 2 * len(parts) + 1
    if parts[-1] == REST and names[: len(parts) - 1] == parts[:-1] and len(names) >= len(parts):
        return 2 * (len(parts) - 1)
    return 0 if pattern == REST else -1


def _part(space: Space[Any], pattern: str, paths: tuple[Path, ...]) -> Part:
    node = paths[0][: len(pattern.split("/"))] if pattern != "value" else ()
    whole = {path for path, _ in leaf_paths(space) if path[: len(node)] == node}
    if pattern.split("/")[-1] != REST and whole == set(paths):
        return Part(pattern, paths, node, space_at(space, node))
    flat = make_dict((path_name(path), space_at(space, path)) for path in paths)
    return Part(pattern, paths, None, flat)


def _at(data: Any, path: Path) -> Any:
    for key in path:
        data = data[key]
    return data


def join(space: Any, path: tuple[Any, ...], leaves: Mapping[Any, Any]) -> Any:
    """Put leaves, by their path, together to a value of a space."""
    if isinstance(space, spaces.Dict):
        return {key: join(child, (*path, key), leaves) for key, child in children(space)}
    if isinstance(space, spaces.Tuple):
        return tuple([join(child, (*path, key), leaves) for key, child in children(space)])
    return leaves[path]


def directory_of(number: int, part: Part) -> str:
    """A child's directory: its number, and its pattern for people to read."""
    return f"{number}-{quote(part.pattern.replace('/', '.'), safe='.').replace('%2A', 'rest')}"


def saved_parts(where: FilePath, saved: dict[str, Any], space: Any) -> list[Part]:
    """The parts of a manifest, whose children are put into their order."""
    with damage_in(f"{where}: storages"):
        order = saved["options"]["order"]
        saved["children"] = {pattern: saved["children"][pattern] for pattern in order}
        for child in saved["children"].values():
            if "/" in check_name(where, child["path"]):
                raise ValueError(f"path {child['path']!r}")
        return divide(space, saved["children"])
