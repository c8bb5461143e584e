"""Catalogue: all that a page asks about a set: its episodes, the curves and pictures of one, one step in words.

Nothing is read before it is asked for, and nothing is read whole: a list comes in pages, a curve in pixels.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self

import numpy as np

from recollect.batch import BatchBase
from recollect.observe.view.episodes import Episodes, Filter, read
from recollect.observe.view.labels import labels_of
from recollect.observe.view.leaves import ShownLeaf, leaves_of
from recollect.observe.view.pictures import film_strip, png
from recollect.observe.view.series import plain, series

Array = np.ndarray[Any, Any]
_MOST_CURVES = 32
_STRIP_FRAMES = 12
_MOST_TASKS = 100


class Catalogue:
    """A set as a page shows it.

    Ownership: closes the batch that it was given.
    Concurrency: any thread may ask; reads of one batch take turns where the batch says so. An episode that live
    writers overwrote since is an IndexError that says so.

    >>> import numpy as np, recollect as rc
    >>> buf = rc.ReplayBuffer.create("memory", {"reward": ((), "float32")}, capacity=8, maintain_segment_metadata=True)
    >>> buf.extend({"reward": np.ones(5, "float32")}, ends=np.array([0, 1, 0, 0, 1], bool))
    >>> with Catalogue(buf) as catalogue:
    ...     catalogue.list.finish()
    ...     [(row["length"], row["return"]) for row in catalogue.episodes()["rows"]]
    [(2, 2.0), (3, 3.0)]
    """

    def __init__(self, batch: BatchBase, *, name: str = "", reward: str | None = None) -> None:
        """Show the episodes that `batch` holds now; `reward` names the leaf that is summed to returns."""
        self.batch, self.name = batch, name
        self.labels = labels_of(batch)
        self.leaves = leaves_of(batch.single_space, self.labels)
        self.list = Episodes(batch, self.leaves, reward, self.labels.tasks)

    def about(self) -> dict[str, Any]:
        """The set as a whole, without reading samples."""
        return {
            "name": self.name,
            "samples": self.list.n_samples,
            "episodes": len(self.list),
            "has_episodes": self.list.are_real,
            "fps": self.labels.fps,
            "tasks": list(dict.fromkeys(filter(None, self.list.tasks)))[:_MOST_TASKS],
            "reward": None if self.list.reward is None else self.list.reward.name,
            "leaves": [
                {"name": leaf.name, "kind": leaf.kind, "dtype": leaf.dtype, "shape": list(leaf.shape),
                 "shown": leaf.shown, "whole": leaf.is_whole, "values": leaf.n_values}
                for leaf in self.leaves
            ],
        }  # fmt: skip

    def episodes(self, wanted: Filter | None = None, offset: int = 0, limit: int = 200) -> dict[str, Any]:
        """One page of the list: its `rows`, the `count` of all that fit, and the `progress` of the returns."""
        return self.list.listed(wanted or Filter(), offset, limit)

    # -- one episode

    def curves(self, episode: int, name: str, *, width: int = 800, first: int = 0, end: int | None = None,
               component: int = 0) -> dict[str, Any]:  # fmt: skip
        """A leaf of numbers over the steps `[first, end)` of an episode, in at most `width` pixels.

        Of an array at most 32 components, from `component` on; `names` says which.
        """
        leaf, start = self._leaf(name, "curves"), self.list.start(episode)
        length = int(self.list.lengths[episode])
        end = length if end is None else min(end, length)
        component = min(max(component, 0), max(leaf.n_values - 1, 0))
        last = min(component + _MOST_CURVES, leaf.n_values)

        def values_of(a: int, b: int) -> Array:
            return read(self.batch, leaf, start + a, start + b)[:, component:last]

        first = min(max(0, first), end)
        steps, values, exact = series(values_of, first, end, max(width, 1), leaf.nbytes)
        names = [_component_name(leaf, i) for i in range(component, last)]
        return {"steps": steps.tolist(), "values": [plain(v) for v in values.T], "names": names, "exact": exact,
                "first": component, "of": leaf.n_values, "length": length}  # fmt: skip

    def step(self, episode: int, step: int) -> dict[str, str]:
        """One step in words: the value of each leaf but pictures."""
        index = self.list.index(episode, step)
        told = [leaf for leaf in self.leaves if leaf.shown != "picture"]
        return {leaf.name: self._told(leaf, self.batch.get_column_at(leaf.path, index)) for leaf in told}

    def _told(self, leaf: ShownLeaf, value: Any) -> str:
        if leaf.components:
            values = np.asarray(value).reshape(-1).tolist()
            return ", ".join(f"{name} {_number(x)}" for name, x in zip(leaf.components, values))
        words = _words(value)
        if leaf.last_word == "task_index" and (task := self.labels.task_of.get(int(np.asarray(value)))):
            return f"{words}: {task}"
        return words

    def frame(self, episode: int, step: int, name: str) -> bytes:
        """A picture leaf at one step, as PNG."""
        leaf = self._leaf(name, "picture")
        return png(np.asarray(self.batch.get_column_at(leaf.path, self.list.index(episode, step))))

    def strip(self, episode: int, name: str) -> bytes:
        """Up to 12 frames from the first to the last of an episode, evenly spread, side by side as one PNG."""
        leaf, start = self._leaf(name, "picture"), self.list.start(episode)
        length = int(self.list.lengths[episode])
        steps = np.linspace(0, length - 1, min(_STRIP_FRAMES, length)).round().astype(np.int64)
        return film_strip(np.asarray(self.batch.get_column_at(leaf.path, start + steps)))

    def _leaf(self, name: str, shown: str) -> ShownLeaf:
        there = {leaf.name: leaf for leaf in self.leaves if leaf.shown == shown}
        if name not in there:
            raise KeyError(f"leaf: must be one of {list(there)}, got {name!r}")
        return there[name]

    def close(self) -> None:
        """End the pass over the returns and close the batch; may be called twice."""
        self.list.stop()
        close = getattr(self.batch, "close", None)
        if close is not None:
            close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def open_catalogue(path: str | Path, *, split: str | None = None, reward: str | None = None) -> Catalogue:
    """Open what `recollect inspect` opens; packed rows are mapped where they lie, and read when they are shown."""
    from recollect.datasets.hub import located
    from recollect.datasets.open import kind_of, open_dataset

    path = located(path)
    batch: BatchBase
    if kind_of(path) == "recollect" and _has_packed_rows(path):
        from recollect.replay import ReplayBuffer

        batch = ReplayBuffer.load_from(path, storage="memmap")
    else:
        batch = open_dataset(path, split=split)
    try:
        return Catalogue(batch, name=path.resolve().name, reward=reward)
    except BaseException:
        getattr(batch, "close", lambda: None)()
        raise


def _has_packed_rows(path: Path) -> bool:
    from recollect.replay.snapshot import peek

    manifest = peek(path)
    return manifest is not None and manifest["storage"]["name"] in ("memory", "shared", "memmap")


def _component_name(leaf: ShownLeaf, flat: int) -> str:
    if leaf.components:
        return leaf.components[flat]
    return "[" + ", ".join(map(str, np.unravel_index(flat, leaf.shape))) + "]" if leaf.shape else ""


def _number(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _words(value: Any) -> str:
    if isinstance(value, np.ndarray) and value.ndim:
        text = np.array2string(value, threshold=64, separator=", ", formatter={"float_kind": "{:.6g}".format})
        return " ".join(text.split())
    return str(value[()] if isinstance(value, np.ndarray) else value)
