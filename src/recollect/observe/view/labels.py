"""What a set says of its own data in words: names of components, tasks, steps a second, columns that only count."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from recollect.batch import BatchBase


@dataclass(frozen=True, slots=True)
class Labels:
    """Names of the components of a leaf, leaves that only number the rows, and the task of each episode."""

    components: dict[str, list[str]] = field(default_factory=dict)
    counting: tuple[str, ...] = ()
    fps: float | None = None
    tasks: list[str] = field(default_factory=list)
    task_of: dict[int, str] = field(default_factory=dict)
    """The text of each `task_index`."""


def labels_of(batch: BatchBase) -> Labels:
    """What there is: a LeRobot set has all of it, others nothing."""
    from recollect.datasets.lerobot.dataset import LeRobotBatch
    from recollect.datasets.lerobot.meta import OWN

    if not isinstance(batch, LeRobotBatch):
        return Labels()
    meta = batch.meta
    components = {name: component_names(about.get("names")) for name, about in meta.features.items()}
    tasks = [" · ".join(map(str, episode.tasks)) for episode in meta.episodes]
    return Labels(components, OWN, meta.fps if meta.fps > 0 else None, tasks, batch.tasks)


def component_names(names: Any) -> list[str]:
    """The `names` of a LeRobot feature as one list: sets have them as lists, or grouped, or with their places.

    >>> component_names({"motors": ["pan", "lift"]}), component_names({"y": 1, "x": 0}), component_names(None)
    (['pan', 'lift'], ['x', 'y'], [])
    """
    if isinstance(names, str):
        return [names]
    if isinstance(names, dict) and names and all(isinstance(place, int) for place in names.values()):
        return [str(name) for name in sorted(names, key=lambda name: names[name])]
    parts = names.values() if isinstance(names, dict) else names if isinstance(names, list | tuple) else ()
    return [name for part in parts for name in component_names(part)]
