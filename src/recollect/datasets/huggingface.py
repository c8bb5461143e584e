"""Hugging Face data sets: a `datasets.Dataset`, or the directory that its `save_to_disk` wrote.

A directory is read by pyarrow alone, memory-mapped; the package `datasets` is not needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium import spaces

from recollect.datasets.batch import DatasetBatch, need
from recollect.datasets.columns import (
    checked_table,
    is_list,
    is_picture,
    number_space,
    numbers,
    picture,
    pictures,
    text_space,
)
from recollect.errors import FormatError, class_name
from recollect.files.record import as_kind, read_json
from recollect.spaces.tree import make_dict


def from_huggingface(
    source: Any, *, split: str | None = None, columns: Sequence[str] | None = None, episode: str | None = None
) -> DatasetBatch:
    """Show a Hugging Face data set as a read-only batch, a leaf per column.

    `source` is a `datasets.Dataset`, or a directory of `save_to_disk`; of several splits name one. Numbers, lists of
    one length, strings and pictures of one size are leaves; the rest is in `left_out`. `episode` names a column whose
    runs of equal values are segments.
    """
    tables = (
        _Saved(_directory(Path(source).absolute(), split))
        if isinstance(source, str | Path)
        else _Live(source, split)
    )
    pa = need("pyarrow", "parquet", "from_huggingface")
    if not len(tables):
        raise FormatError(f"{tables.name}: must hold rows, got none")
    names = tables.names()
    unknown = [name for name in (*(columns or ()), *([episode] if episode else ())) if name not in names]
    if unknown:
        raise KeyError(f"columns: must be among {names}, got {unknown}")
    found, left_out = [], {}
    for name in names if columns is None else columns:
        kind = _space_of(pa, tables, name)
        if isinstance(kind, str):
            left_out[name] = kind
        else:
            found.append((name, kind))
    if not found:
        raise FormatError(f"{tables.name}: must have a column that is a leaf, got none of {left_out}")
    lengths = [len(tables)] if episode is None else _runs(tables, episode)
    return _HuggingFaceBatch(tables, make_dict(found), lengths, episode is not None, left_out)


class _Saved:
    """Rows of a directory of `save_to_disk`."""

    def __init__(self, path: Path) -> None:
        self.name, self._path, self._table = str(path), path, None
        self.table()

    def table(self) -> Any:
        if self._table is None:
            pa = need("pyarrow", "parquet", "from_huggingface")
            state = _json(self._path / "state.json")
            if state.get("_indices_files") or state.get("_indices_data_files"):
                raise FormatError(
                    f"{self.name}: its rows are chosen by an index; save dataset.flatten_indices()"
                )
            parts = []
            for entry in as_kind(state.get("_data_files") or [], list[dict[str, Any]], self.name):
                file = self._path / (Path(str(entry.get("filename"))).name or "?")
                try:
                    if not file.is_file():  # a name may be too long to ask
                        raise FormatError(f"{file}: must be an Arrow stream, got nothing; it is damaged")
                    parts.append(checked_table(pa.ipc.open_stream(pa.memory_map(str(file))).read_all()))
                except FormatError:
                    raise
                except (pa.ArrowException, OSError, ValueError) as error:  # a name may be no UTF-8
                    raise FormatError(
                        f"{file}: must be an Arrow stream, got {error}; it is damaged"
                    ) from None
            if not parts:
                raise FormatError(f"{self.name}: must name data files, got none")
            self._table = pa.concat_tables(parts)
        return self._table

    def names(self) -> list[str]:
        return list(self.table().column_names)

    def __len__(self) -> int:
        return int(self.table().num_rows)

    def column(self, name: str, first: int, end: int) -> Any:
        return self.table().column(name).slice(first, end - first)

    def __getstate__(self) -> Any:
        return {"name": self.name, "_path": self._path, "_table": None}


class _Live:
    """Rows of a `datasets.Dataset`, chosen by its own indices if it has any."""

    def __init__(self, dataset: Any, split: str | None) -> None:
        if isinstance(dataset, dict):  # a DatasetDict
            dataset = _one_split(dataset, split, type(dataset).__name__)
        if not hasattr(dataset, "with_format"):
            raise TypeError(
                f"from_huggingface: must be a datasets.Dataset or a path, got {class_name(dataset)}"
            )
        self.name = f"{type(dataset).__name__}"
        self._dataset = dataset.with_format("arrow")

    def names(self) -> list[str]:
        return list(self._dataset.column_names)

    def __len__(self) -> int:
        return len(self._dataset)

    def column(self, name: str, first: int, end: int) -> Any:
        return self._dataset.select_columns([name])[first:end].column(name)


class _HuggingFaceBatch(DatasetBatch):
    """See `from_huggingface`."""

    def __init__(
        self, tables: Any, space: Any, lengths: list[int], has_episodes: bool, left_out: Any
    ) -> None:
        self._tables = tables
        self._starts = np.concatenate([[0], np.cumsum(lengths)])
        super().__init__(space, lengths, has_episodes=has_episodes, left_out=left_out)

    def _load(self, key: str, episode: int, first: int, end: int) -> Any:
        pa = need("pyarrow", "parquet", "from_huggingface")
        at = int(self._starts[episode])
        column = self._tables.column(key, at + first, at + end)
        space, where = self.single_space[key], f"{self._tables.name}: {key}"  # type: ignore[index]
        if isinstance(space, spaces.Text):
            return tuple(column.to_pylist())
        if is_picture(pa, column.type):
            return pictures(column.to_pylist(), space.shape, None, where)
        return numbers(pa, column, space.shape, space.dtype, where)


def _space_of(pa: Any, tables: Any, name: str) -> Any:
    """The space of a column, or why it has none."""
    column = tables.column(name, 0, len(tables))
    kind, first = column.type, column.slice(0, 1).to_pylist()[0]
    if column.null_count:
        return f"{column.null_count} rows have no value"
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return text_space(set(column.unique().to_pylist()))
    if is_picture(pa, kind):
        return spaces.Box(0, 255, picture(first, None, None, name).shape, np.uint8)
    shape = np.shape(first)
    while isinstance(kind, pa.BaseExtensionType) or is_list(pa, kind):
        if isinstance(kind, pa.BaseExtensionType):
            kind = kind.storage_type
        else:
            kind = kind.value_type
    if not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)):
        return f"is {column.type}, which no leaf can be"
    if shape and not _is_even(pa, column):
        return "has rows of several lengths"
    return number_space(shape, np.bool_ if pa.types.is_boolean(kind) else kind.to_pandas_dtype())


def _is_even(pa: Any, column: Any) -> bool:
    """Whether all lists of a column, at each level, are of one length."""
    from pyarrow import compute

    array = column.combine_chunks() if column.num_chunks != 1 else column.chunk(0)
    while isinstance(array.type, pa.BaseExtensionType) or is_list(pa, array.type):
        if isinstance(array.type, pa.BaseExtensionType):
            array = array.storage
            continue
        spread = compute.min_max(compute.list_value_length(array)).as_py()
        if spread["min"] != spread["max"]:
            return False
        array = array.flatten()
    return True


def _runs(tables: Any, name: str) -> list[int]:
    """The lengths of runs of equal values."""
    from pyarrow import compute

    column = tables.column(name, 0, len(tables))
    codes = compute.index_in(column, value_set=column.unique()).to_numpy()
    cuts = np.flatnonzero(np.diff(codes)) + 1
    return [int(n) for n in np.diff(np.concatenate([[0], cuts, [len(codes)]]))]


def _directory(path: Path, split: str | None) -> Path:
    if (path / "state.json").is_file():
        return path
    names = (
        _json(path / "dataset_dict.json").get("splits") if (path / "dataset_dict.json").is_file() else None
    )
    if not names:
        raise FormatError(
            f"{path}: must hold state.json or dataset_dict.json, got neither; save_to_disk writes them"
        )
    names = as_kind(names, list[str], path)
    return path / Path(_one_split({name: name for name in names}, split, str(path))).name


def _one_split(there: Any, split: str | None, where: str) -> Any:
    if split is None and len(there) == 1:
        return next(iter(there.values()))
    if split not in there:
        raise ValueError(f"split: must be one of {sorted(there)} of {where}, got {split!r}")
    return there[split]


def _json(path: Path) -> dict[str, Any]:
    try:
        return read_json(path)
    except OSError as error:
        raise FormatError(f"{path}: must be JSON, got {error}; it is damaged or foreign") from None
