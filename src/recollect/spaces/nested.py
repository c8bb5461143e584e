"""Between a nested sample and the flat list of its leaf values, compiled once per space.

A template is the plan of a sample: `("dict", ((key, node), ...))`, `("tuple", (node, ...))` or `("leaf", i)`.
The functions made here know every key in advance, so a step costs one lookup per leaf and no search.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any

from recollect.errors import MissingLeafError, SchemaError, class_name
from recollect.spaces.tree import Path, path_name, subject

Template = tuple[Any, ...]
Picker = Callable[[Any, list[Any]], None]
Builder = Callable[[Sequence[Any]], Any]
Fetch = Callable[[Any], Sequence[Any]]


def compile_pick(template: Template, path: Path = ()) -> Picker:
    """Return `pick(sample, out)`, which appends a sample's leaf values to `out` in order."""
    kind = template[0]
    if kind == "leaf":
        return _pick_leaf
    keys, nodes = _parts(template)
    fetch = _fetch_dict(keys, path) if kind == "dict" else _fetch_tuple(len(nodes), path)
    if all(node[0] == "leaf" for node in nodes):
        return lambda sample, out: out.extend(fetch(sample))
    pickers = [compile_pick(node, (*path, key)) for key, node in zip(keys, nodes, strict=True)]

    def pick(sample: Any, out: list[Any]) -> None:
        for picker, value in zip(pickers, fetch(sample), strict=True):
            picker(value, out)

    return pick


def compile_build(template: Template) -> Builder:
    """Return `build(values)`, which puts leaf values, in leaf order, back into a sample."""
    kind, body = template
    if kind == "leaf":
        return itemgetter(body)
    keys, nodes = _parts(template)
    if kind == "dict" and nodes and all(node[0] == "leaf" for node in nodes):
        first = nodes[0][1]
        leaves = slice(first, first + len(nodes))
        return lambda values: dict(zip(keys, values[leaves], strict=True))
    builders = [compile_build(node) for node in nodes]
    if kind == "dict":
        pairs = list(zip(keys, builders, strict=True))
        return lambda values: {key: build(values) for key, build in pairs}
    return lambda values: tuple([build(values) for build in builders])


def _parts(template: Template) -> tuple[tuple[str | int, ...], tuple[Template, ...]]:
    kind, body = template
    if kind == "dict":
        return tuple(key for key, _ in body), tuple(node for _, node in body)
    return tuple(range(len(body))), body


def _pick_leaf(sample: Any, out: list[Any]) -> None:
    out.append(sample)


def _fetch_dict(keys: tuple[Any, ...], path: Path) -> Fetch:
    get = _getter(keys)
    n = len(keys)

    def fetch(sample: Any) -> Sequence[Any]:
        if (type(sample) is dict or isinstance(sample, Mapping)) and len(sample) == n:
            try:
                return get(sample)
            except KeyError:
                pass
        raise _dict_error(sample, keys, path)

    return fetch


def _getter(keys: tuple[Any, ...]) -> Fetch:
    if len(keys) > 1:
        return itemgetter(*keys)
    return lambda sample: [sample[key] for key in keys]


def _fetch_tuple(n: int, path: Path) -> Fetch:
    def fetch(sample: Any) -> Sequence[Any]:
        if isinstance(sample, tuple | list) and len(sample) == n:
            return sample
        raise _tuple_error(sample, n, path)

    return fetch


def _dict_error(sample: Any, keys: tuple[Any, ...], path: Path) -> SchemaError:
    if not isinstance(sample, Mapping):
        given = class_name(sample)
        return SchemaError(
            f"{subject(path)}: must be a dict with keys {list(keys)}, got {given}; pass a dict, "
            "of arrays (n, ...) for several samples"
        )
    missing = [key for key in keys if key not in sample]
    if missing:
        return MissingLeafError(
            f"{path_name((*path, missing[0]))}: must be given, got keys {list(sample)}; add it to the value"
        )
    extra = next((key for key in sample if key not in keys), None)
    return SchemaError(
        f"{path_name((*path, str(extra)))}: key must be one of {list(keys)}, got {extra!r} beside them; "
        "drop it or add it to the space"
    )


def _tuple_error(sample: Any, n: int, path: Path) -> SchemaError:
    if not isinstance(sample, tuple | list):
        return SchemaError(f"{subject(path)}: must be a tuple of {n}, got {class_name(sample)}; pass a tuple")
    given = f"got a tuple of {len(sample)}"
    if len(sample) < n:
        return MissingLeafError(
            f"{path_name((*path, len(sample)))}: must be given, {given}; add it to the value"
        )
    return SchemaError(f"{path_name((*path, n))}: must not be given, {given}; drop it")
