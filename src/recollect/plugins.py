"""What other packages add: storages, carriers and data sets, by entry points, looked for only when a name is not known.

A package says in its metadata what it gives (`docs/howto/extend.md`). Nothing of it is imported before somebody asks.
"""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from typing import Any

from recollect.errors import RecollectError

STORAGES, CARRIERS, DATASETS = "recollect.storages", "recollect.carriers", "recollect.datasets"


def names(group: str) -> list[str]:
    """The names that installed packages give in a group; none of them is imported."""
    return sorted({point.name for point in entry_points(group=group)})


def find(group: str, name: str) -> Any:
    """Load what a package gives under a name, None if none does; RecollectError names the package that fails."""
    points = {point.value: point for point in entry_points(group=group, name=name)}
    if len(points) > 1:
        packages = sorted(package_of(point) for point in points.values())
        raise RecollectError(
            f"{group}: {name!r} must be given by one package, got {packages}; uninstall all but one"
        )
    return next((_load(group, point) for point in points.values()), None)


def call(group: str, name: str, *arguments: Any) -> Any:
    """Call what a package gives under a name; RecollectError names the package if that fails."""
    function = find(group, name)
    try:
        return function(*arguments)
    except RecollectError:
        raise
    except Exception as error:
        raise failure(group, name, f"{type(error).__name__}: {error}") from error


def _load(group: str, point: EntryPoint) -> Any:
    try:
        return point.load()
    except Exception as error:
        raise failure(group, point.name, f"{type(error).__name__}: {error}") from error


def failure(group: str, name: str, problem: str) -> RecollectError:
    """The error of something that a package gives and that does not work."""
    packages = sorted({package_of(point) for point in entry_points(group=group, name=name)})
    whose = " and ".join(packages)
    return RecollectError(
        f"{group}: {name!r} of the package {whose} must work, got {problem}; update {whose} or uninstall it"
    )


def package_of(point: EntryPoint) -> str:
    """The name of the package that an entry point is of."""
    return "unknown" if point.dist is None else str(point.dist.name)
