"""What a rollout's file sink wrote, as a read-only batch: a run is a segment, and its words are leaves.

A file has one row for each step of a run, in columns; `info` and `metrics` are JSON. The words of prompt and answer,
which are in `info`, become leaves of their own, and so does each metric. Sequences keep their own lengths in memory.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import numpy as np
from gymnasium import Space, spaces

from recollect.batch import BatchBase
from recollect.batch.structure import Keys, pick
from recollect.datasets.batch import need
from recollect.datasets.columns import text_space
from recollect.errors import FormatError, RecollectError
from recollect.files import check_plain
from recollect.files.record import damage_in, read_bytes
from recollect.indexing import normalize
from recollect.spaces import as_space
from recollect.spaces.tree import make_dict
from recollect.storage.filed.parquet_table import read_parquet_table

STAMPS = ("group_id", "run_id", "step")
WORDS = ("prompt", "answer")
SUFFIXES = (".parquet", ".jsonl")
_TIMES = (
    12  # bytes of objects that a byte of a line makes: a token of two digits and a comma is one of 28 to 36
)
Array = np.ndarray[Any, Any]
Rows = list[dict[str, Any]]


def is_rollout(path: Path) -> bool:
    """Whether a directory holds files of a rollout's sink, by the first of them."""
    with suppress(OSError, FormatError):
        files = _files(path)
        return bool(files) and set(STAMPS) <= set(_first_names(files[0]))
    return False


def from_rollout(path: str | Path) -> RolloutBatch:
    """Read all files of a rollout's sink, oldest batch first; FormatError names one that is damaged."""
    rows = [row for file in _files(Path(path).absolute()) for row in _rows(file)]
    if not rows:
        raise FormatError(f"{path}: must hold rows, got none")
    with damage_in(path):
        return RolloutBatch(*_columns(rows, str(path)))


class RolloutBatch(BatchBase):
    """Experience of files: leaves of one form as arrays, sequences and texts each of their own length.

    Ownership: holds all rows in memory; what a read returns is the caller's own.
    Concurrency: any thread.
    """

    def __init__(self, columns: dict[str, tuple[Space[Any], Any]], left_out: dict[str, str]) -> None:
        super().__init__(make_dict((name, space) for name, (space, _) in columns.items()))
        self._values = {name: values for name, (_, values) in columns.items()}
        self.left_out = left_out
        group, run = self._values["group_id"], self._values["run_id"]
        self._ends = np.append(
            np.flatnonzero((group[1:] != group[:-1]) | (run[1:] != run[:-1])) + 1, len(group)
        )

    def __len__(self) -> int:
        return len(self._values["group_id"])

    def get_segments(self) -> list[tuple[int, int]]:
        ends = self._ends.tolist()
        return list(zip([0, *ends[:-1]], ends))

    @property
    def max_lengths(self) -> dict[str, int]:
        """The greatest length of each sequence."""
        return {
            name: max(1, *map(len, values))
            for name, values in self._values.items()
            if isinstance(values, list)
        }

    def get_at(self, idx: Any) -> Any:
        index = normalize(idx, len(self))
        return {name: _taken(values, index) for name, values in self._values.items()}

    def get_column_at(self, keys: Keys, idx: Any) -> Any:
        if not keys:
            return self.get_at(idx)
        return pick(_taken(self._values[str(keys[0])], normalize(idx, len(self))), keys[1:])

    def close(self) -> None:
        """Nothing is open; may be called twice."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _taken(values: Any, index: Any) -> Any:
    if isinstance(values, dict):
        return {name: _taken(part, index) for name, part in values.items()}
    if isinstance(values, np.ndarray):
        return np.array(values[index])
    if isinstance(index, int):
        return _own(values[index])
    return tuple([_own(values[i]) for i in index])


def _own(value: Any) -> Any:
    return value.copy() if isinstance(value, np.ndarray) else value


# -- files


def _files(path: Path) -> list[Path]:
    plain = (file for file in path.iterdir() if file.is_file())  # a FIFO would hold up the reader
    found = [file for file in plain if file.suffix in SUFFIXES and not file.name.startswith(".")]
    return sorted(
        found, key=lambda file: [(not p.isdigit(), int(p) if p.isdigit() else p) for p in _parts(file)]
    )


def _parts(file: Path) -> list[str]:
    return [part for part in re.split(r"(\d+)", file.name) if part]


def _first_names(file: Path) -> Sequence[str]:
    if file.suffix == ".jsonl":
        with file.open("rb") as f:
            line = f.readline(1 << 26)
        return list(_parsed(line, file)) if line else ()
    parquet = need("pyarrow.parquet", "parquet", "files of a rollout")
    names: list[str] = _read_parquet(file, lambda: parquet.read_schema(str(file)).names)
    return names


def _rows(file: Path) -> Rows:
    if file.suffix == ".jsonl":
        lines = read_bytes(file, most=1 << 40, follow=True, times=_TIMES).splitlines()
        rows = [_parsed(line, file) for line in lines if line.strip()]
    else:
        rows = _read_parquet(file, lambda: read_parquet_table(str(file), file, objects=True).to_pylist())
    for row in rows:
        missing = [name for name in STAMPS if not isinstance(row.get(name), int)]
        if missing:
            raise FormatError(f"{file}: must have {missing} in every row, got a row without; it is damaged")
    return rows


def _parsed(line: bytes, file: Path) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{file}: must have JSON in every line, got {error}; it is damaged") from None
    if not isinstance(row, dict):
        raise FormatError(
            f"{file}: must have an object in every line, got {type(row).__name__}; it is damaged"
        )
    return row


def _read_parquet(file: Path, read: Callable[[], Any]) -> Any:
    pa = need("pyarrow", "parquet", "files of a rollout")
    try:
        check_plain(file)
        return read()
    except RecollectError:
        raise
    except (pa.ArrowException, OSError, ValueError) as error:
        raise FormatError(f"{file}: must be a Parquet file, got {error}; it is missing or damaged") from None


# -- columns


def _columns(rows: Rows, where: str) -> tuple[dict[str, tuple[Space[Any], Any]], dict[str, str]]:
    infos = [_object(row.pop("info", None)) for row in rows]
    metrics = [_object(row.pop("metrics", None)) for row in rows]
    columns: dict[str, tuple[Space[Any], Any]] = {}
    left_out: dict[str, str] = {}
    for name in WORDS:
        texts = [info.pop(name, "") for info in infos]
        if any(texts):
            columns[name] = _texts([text if isinstance(text, str) else json.dumps(text) for text in texts])
    for name in dict.fromkeys(name for row in rows for name in row):
        found = _column([row.get(name) for row in rows])
        if isinstance(found, str):
            left_out[name] = found
        else:
            columns[name] = found
    if any(metrics):
        columns["metrics"] = _metrics(metrics)
    if any(infos):
        columns["info"] = _texts([json.dumps(info, ensure_ascii=False) if info else "" for info in infos])
    if not set(STAMPS) <= set(columns):
        raise FormatError(f"{where}: must have a number for each of {STAMPS} in every row; it is damaged")
    return columns, left_out


def _object(text: Any) -> dict[str, Any]:
    try:
        found = json.loads(text) if text else {}
    except (TypeError, ValueError, RecursionError):
        return {"text": str(text)}
    return found if isinstance(found, dict) else {"value": found}


def _texts(texts: list[str]) -> tuple[Space[Any], Any]:
    return text_space(set(texts)), tuple(texts)


def _metrics(metrics: list[dict[str, Any]]) -> tuple[Space[Any], Any]:
    names = sorted({name for own in metrics for name, x in own.items() if isinstance(x, int | float)})
    values = {name: np.array([_number(own.get(name)) for own in metrics]) for name in names}
    return make_dict((name, as_space(((), "float64"))) for name in names), values


def _number(x: Any) -> float:
    return float(x) if isinstance(x, int | float) else float("nan")


def _column(values: list[Any]) -> tuple[Space[Any], Any] | str:
    """The space and the values of a column, or why it is no leaf."""
    if all(value is None or isinstance(value, str) for value in values):
        return _texts([value or "" for value in values])
    if any(value is None for value in values):
        return "has rows without a value"
    try:
        arrays = [np.asarray(value) for value in values]
    except ValueError:
        return "has lists of several lengths within a row"
    if any(array.dtype.kind not in "bifu" for array in arrays if array.size):
        return "is neither number nor text"
    dtype = np.result_type(*{array.dtype for array in arrays if array.size} or {np.dtype(np.float64)})
    if len({array.shape for array in arrays}) == 1 and arrays[0].ndim != 1:
        return as_space((arrays[0].shape, dtype)), np.stack(arrays).astype(dtype)
    if {array.ndim for array in arrays} != {1}:
        return "has rows of several shapes"
    element = as_space(((), dtype))
    return spaces.Sequence(element, stack=True), [array.astype(dtype) for array in arrays]
