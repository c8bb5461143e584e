"""Minari data sets, read from their files by h5py or pyarrow; the package `minari` is not needed.

An episode of T steps has T + 1 observations; here it is T transitions, as `transition_space` names them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import lru_cache
from itertools import islice
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium import Space, spaces

from recollect.datasets.batch import DatasetBatch, need
from recollect.datasets.columns import check_size, checked_table, number_space, numbers
from recollect.datasets.hub import minari_home
from recollect.errors import FormatError
from recollect.files import check_plain
from recollect.files.record import damage_in, parse_json, read_json
from recollect.spaces import as_space
from recollect.spaces.tree import make_dict
from recollect.storage.filed.hdf5_file import own_node
from recollect.storage.filed.parquet_table import read_parquet_table

_MAIN = "main_data.hdf5"
_STEPS = {"reward": "rewards", "terminated": "terminations", "truncated": "truncations"}
_OF = {"obs": "observations", "next_obs": "observations", "action": "actions", **_STEPS}


def from_minari(source: Any, *, observation_space: Any = None, action_space: Any = None) -> DatasetBatch:
    """Show a Minari data set as a read-only batch of transitions, its episodes as segments.

    `source` is the directory of a data set, its id below `$MINARI_DATASETS_PATH` (else `~/.minari/datasets`), or a
    `minari.MinariDataset`, of which only the episodes that it was filtered to are shown. The `infos` are in `left_out`.

    Old data sets do not say their spaces, only which environment has them. Making it would run whatever the file names,
    so the spaces must be given then, as those of the environment: `observation_space=env.observation_space`, and so on.
    """
    episodes = None
    if hasattr(source, "storage") and hasattr(source, "episode_indices"):
        episodes = [int(i) for i in source.episode_indices]
        source = source.storage.data_path
    path = _find(source)
    meta = _metadata(path)
    kind = str(meta.get("data_format", "hdf5"))
    files: Any = _Hdf5(path) if kind == "hdf5" else _Arrow(path, kind)
    with damage_in(path):
        lengths = files.lengths(int(meta.get("total_episodes", -1)))
    chosen = sorted(lengths) if episodes is None else episodes
    if not any(lengths.get(i) for i in chosen):
        raise FormatError(f"{path}: must hold episodes, got none")
    obs = _space(path, meta, "observation_space", observation_space)
    action = _space(path, meta, "action_space", action_space)
    flag = number_space((), np.bool_)
    with damage_in(path):
        reward = number_space((), files.reward_dtype(chosen[0]))
    space = make_dict([("obs", obs), ("action", action), ("reward", reward), ("next_obs", obs), ("terminated", flag),
                       ("truncated", flag)])  # fmt: skip
    return _MinariBatch(files, space, chosen, [lengths[i] for i in chosen])


class _MinariBatch(DatasetBatch):
    """See `from_minari`."""

    def __init__(self, files: Any, space: Any, numbers_of: list[int], lengths: list[int]) -> None:
        self._files, self._numbers = files, numbers_of
        super().__init__(space, lengths, left_out={"infos": "are dicts of any form"})

    def _load(self, key: str, episode: int, first: int, end: int) -> Any:
        shift = 1 if key == "next_obs" else 0
        space = self.single_space[key]  # type: ignore[index]
        return self._files.read(self._numbers[episode], _OF[key], space, first + shift, end + shift)


class _Hdf5:
    """`main_data.hdf5`: a group per episode."""

    def __init__(self, path: Path) -> None:
        self.file = path / _MAIN
        self._h5 = need("h5py", "hdf5", "from_minari").File

    @contextmanager
    def _opened(self) -> Iterator[Any]:
        """The file; whatever the library says of it while it is read, it is damaged."""
        try:
            check_plain(self.file)
            with damage_in(self.file), self._h5(self.file, "r") as f:
                yield f
        except OSError as error:
            raise FormatError(
                f"{self.file}: must be an HDF5 file, got {error}; it is missing or damaged"
            ) from None

    def lengths(self, total: int) -> dict[int, int]:
        with self._opened() as f:
            found = {}
            for name in f:
                if name.startswith("episode_"):
                    there = len(own_node(f, f"{name}/rewards", self.file))
                    found[int(name[8:])] = steps = int(f[name].attrs.get("total_steps", there))
                    if steps > there:
                        raise FormatError(
                            f"{self.file}: {name} must hold {steps} steps, got {there}; it is damaged"
                        )
        _check_total(self.file, total, found)
        return found

    def reward_dtype(self, episode: int) -> Any:
        with self._opened() as f:
            return own_node(f, f"episode_{episode}/rewards", self.file).dtype

    def read(self, episode: int, name: str, space: Space[Any], first: int, end: int) -> Any:
        at = f"episode_{episode}/{name}"
        with self._opened() as f, damage_in(f"{self.file}: {at}"):
            return _hdf5_value(f, at, space, slice(first, end), self.file)


def _check_total(where: Path, total: int, found: Collection[int]) -> None:
    missing = list(islice((i for i in range(min(total, len(found) + 5)) if i not in found), 5))
    if missing:
        raise FormatError(f"{where}: must hold {total} episodes, lacks {missing}; it is damaged")


def _hdf5_value(f: Any, name: str, space: Space[Any], rows: slice, where: Path) -> Any:
    if isinstance(space, spaces.Dict):
        return {
            key: _hdf5_value(f, f"{name}/{key}", child, rows, where) for key, child in space.spaces.items()
        }
    if isinstance(space, spaces.Tuple):
        parts = enumerate(space.spaces)
        return tuple(_hdf5_value(f, f"{name}/_index_{i}", child, rows, where) for i, child in parts)
    node = own_node(f, name, where)
    _check_rows(node, space, rows.stop)  # a dataset may declare any shape and hold none of it
    if isinstance(space, spaces.Text):
        return tuple(s.decode("utf-8") if isinstance(s, bytes) else str(s) for s in node[rows])
    found = np.asarray(node[rows])
    return found.reshape(len(found), *(space.shape or ())).astype(space.dtype, copy=False)


def _check_rows(node: Any, space: Space[Any], end: int) -> None:
    shape = () if isinstance(space, spaces.Text) else space.shape or ()
    kinds = "SUO" if isinstance(space, spaces.Text) else "biuf"
    if len(node) < end or prod(node.shape[1:]) != prod(shape) or node.dtype.kind not in kinds:
        raise ValueError(f"{node.dtype} of shape {node.shape} for {end} rows of {shape}")
    check_size((1,), node.dtype.itemsize, node.name)


class _Arrow:
    """A directory per episode, whose rows are padded by one."""

    def __init__(self, path: Path, kind: str) -> None:
        if kind not in ("arrow", "parquet"):
            raise FormatError(f"{path}: data_format must be hdf5, arrow or parquet, got {kind!r}")
        self.path, self.kind = path, kind
        need("pyarrow", "parquet", "from_minari")

    def lengths(self, total: int) -> dict[int, int]:
        found = {int(d.name): d for d in self.path.iterdir() if d.is_dir() and d.name.isdigit()}
        _check_total(self.path, total, found)
        return {i: int(_json(d / "metadata.json")["total_steps"]) for i, d in found.items()}

    def reward_dtype(self, episode: int) -> Any:
        return np.dtype(
            _arrow_table(self.path / str(episode), self.kind).column("rewards").type.to_pandas_dtype()
        )

    def read(self, episode: int, name: str, space: Space[Any], first: int, end: int) -> Any:
        pa = need("pyarrow", "parquet", "from_minari")
        where = self.path / str(episode)
        with damage_in(f"{where}: {name}"):
            column = _arrow_table(where, self.kind).column(name).slice(first, end - first)
            return _arrow_value(pa, column.combine_chunks(), space, f"{where}: {name}")


@lru_cache(maxsize=4)
def _arrow_table(where: Path, kind: str) -> Any:
    import pyarrow as pa

    try:
        files = [f for f in sorted(where.iterdir()) if f.name != "metadata.json"]
        return pa.concat_tables([_read_arrow(pa, file, kind) for file in files])
    except (pa.ArrowException, OSError) as error:
        raise FormatError(f"{where}: cannot be read ({error}); it is damaged") from None


def _read_arrow(pa: Any, file: Path, kind: str) -> Any:
    # Not by pyarrow.dataset: it works on the rows of a damaged file before anybody can validate them.
    check_plain(file)
    with pa.OSFile(str(file)) as f:
        found = read_parquet_table(f, file) if kind == "parquet" else pa.ipc.open_file(f).read_all()
    return checked_table(found)


def _arrow_value(pa: Any, column: Any, space: Space[Any], where: str) -> Any:
    if isinstance(column, pa.ChunkedArray):
        column = pa.concat_arrays(column.chunks)
    if isinstance(space, spaces.Dict):
        return {key: _arrow_value(pa, column.field(key), child, where) for key, child in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(
            _arrow_value(pa, column.field(str(i)), child, where) for i, child in enumerate(space.spaces)
        )
    if isinstance(space, spaces.Text):
        return tuple(column.to_pylist())
    return numbers(pa, column, space.shape or (), space.dtype, where)


def _find(source: Any) -> Path:
    """The directory with the data: as given, its `data`, or that of an id."""
    for path in (Path(source).absolute(), minari_home() / str(source)):
        for place in (path, path / "data"):
            if (place / _MAIN).is_file() or (place / "metadata.json").is_file():
                return place
    raise FormatError(
        f"{source}: must hold data/metadata.json or data/{_MAIN}, got neither; it is no Minari data set"
    )


def _metadata(path: Path) -> dict[str, Any]:
    if (path / "metadata.json").is_file():
        return _json(path / "metadata.json")
    with _Hdf5(path)._opened() as f:  # before Minari 0.5 they were attributes of the file
        return {
            key: value.item() if isinstance(value, np.generic) else value for key, value in f.attrs.items()
        }


def _json(path: Path) -> dict[str, Any]:
    try:
        return read_json(path)
    except OSError as error:
        raise FormatError(f"{path}: must be JSON, got {error}; it is damaged") from None


def _space(path: Path, meta: dict[str, Any], name: str, given: Any) -> Space[Any]:
    if given is not None:
        return as_space(given)
    if name not in meta:
        raise FormatError(
            f"{path}: must say its {name}, got none; give that of its environment, "
            f"from_minari(path, {name}=env.{name})"
        )
    with damage_in(f"{path}: {name}"):
        return _from_json(meta[name])


def _from_json(obj: Any) -> Space[Any]:
    """The space that Minari wrote as JSON."""
    obj = parse_json(obj, "space") if isinstance(obj, str | bytes) else obj
    kind = obj["type"]
    if kind == "Dict":
        return make_dict([(key, _from_json(child)) for key, child in obj["subspaces"].items()])
    if kind == "Tuple":
        return spaces.Tuple([_from_json(child) for child in obj["subspaces"]])
    if kind == "Discrete":
        return spaces.Discrete(int(obj["n"]), start=int(obj.get("start", 0)))
    if kind == "Text":
        return spaces.Text(obj["max_length"], min_length=obj.get("min_length", 1), charset=obj["charset"])
    if kind == "MultiDiscrete":
        return spaces.MultiDiscrete(np.array(obj["nvec"]), dtype=obj.get("dtype", "int64"))
    if kind == "MultiBinary":
        return spaces.MultiBinary(obj["n"])
    if kind != "Box":
        raise ValueError(f"type must be one that has rows, got {kind!r}")
    dtype = np.dtype(obj["dtype"])
    shape = tuple(int(n) for n in obj["shape"])
    check_size(shape, dtype.itemsize, "space")
    low, high = (np.array(obj[side]).astype(dtype) for side in ("low", "high"))
    return spaces.Box(low, high, shape, dtype.type)
