"""A small Parquet file that says that there is much takes no memory, whoever reads it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tests.datasets.test_rollout import written
from tests.fuzz.artefacts import _minari

import recollect as rc
from recollect import budget
from recollect.datasets import open_dataset, to_lerobot
from recollect.datasets.minari import _arrow_table
from recollect.datasets.rollouts import from_rollout
from recollect.errors import BudgetError, FormatError
from recollect.storage.filed import parquet_table

pa = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

READ = """
import resource, sys
from pathlib import Path
from recollect.datasets.rollouts import from_rollout
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
import pyarrow.parquet, recollect.storage.filed.parquet_table
resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 30), resource.RLIM_INFINITY))
try:
    from_rollout(sys.argv[1])
except MemoryError as error:
    # Not ru_maxrss, which counts what the parent had when it forked.
    most = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))
    print(type(error).__name__, most < 700_000)
"""


@pytest.mark.parametrize("kind", ["numbers", "texts"])
def test_one_value_a_million_times_is_refused_before_it_takes_memory(tmp_path: Path, kind: str) -> None:
    n = 4_000_000 if kind == "numbers" else 3_000
    columns = {name: np.zeros(n, "int64") for name in ("group_id", "run_id", "step")}
    table = pa.table(columns)
    if kind == "texts":
        text = pa.DictionaryArray.from_arrays(pa.array(np.zeros(n, "int32")), pa.array(["x" * (1 << 20)]))
        table = table.append_column("text", text)
    (tmp_path / "out").mkdir()
    parquet.write_table(table, tmp_path / "out/x.parquet", compression="zstd", store_schema=False)
    assert (tmp_path / "out/x.parquet").stat().st_size < 1 << 18
    done = subprocess.run([sys.executable, "-c", READ, str(tmp_path / "out")], capture_output=True, text=True,
                          timeout=200, env={**os.environ, "OPENBLAS_NUM_THREADS": "1"})  # fmt: skip
    assert done.stdout == "BudgetError True\n", done.stdout + done.stderr[-2000:]


def stored(path: Path) -> None:
    rc.ReplayBuffer.load_from(path)[:]


def dumped(path: Path) -> None:
    with rc.ReplayBuffer.create("parquet", {"x": ((), "int64")}, cache_path=path) as buf:
        buf.extend({"x": np.arange(400)})


def lerobot(path: Path) -> None:
    with rc.ReplayBuffer.create(
        "memory", {"x": ((), "int64")}, capacity=400, maintain_segment_metadata=True
    ) as buf:
        buf.extend({"x": np.arange(400)})
        buf.mark_segment_end()
        to_lerobot(buf, path, fps=10, tasks="")


def minari(path: Path) -> None:
    _minari(path, "arrow")
    data = path / "data"
    meta = json.loads((data / "metadata.json").read_text())
    (data / "metadata.json").write_text(json.dumps({**meta, "data_format": "parquet"}))
    with pa.memory_map(str(data / "0/data.arrow")) as f:
        parquet.write_table(pa.ipc.open_file(f).read_all(), data / "0/data.parquet")
    (data / "0/data.arrow").unlink()


def opened(path: Path) -> None:
    _arrow_table.cache_clear()
    open_dataset(path)[:]


@pytest.mark.parametrize(("make", "read"), [(dumped, stored), (lerobot, opened), (minari, opened)])
def test_whoever_reads_parquet_looks_before(
    make: Callable[[Path], None],
    read: Callable[[Path], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    make(tmp_path / "data")
    monkeypatch.setattr(parquet_table, "_SMALL_NBYTES", 0)
    read(tmp_path / "data")
    monkeypatch.setattr(budget, "_system_nbytes", lambda: 16)
    with pytest.raises(BudgetError, match=r"rows: needs .* to be read"):
        read(tmp_path / "data")


def test_rows_read_in_parts_are_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = pa.table({"n": np.arange(500), "t": ["ab" * (i % 7) for i in range(500)], "l": [[1, 2]] * 500})
    parquet.write_table(table, tmp_path / "x.parquet", row_group_size=90)
    monkeypatch.setattr(parquet_table, "_SMALL_NBYTES", 0)
    monkeypatch.setattr(budget, "_system_nbytes", lambda: 40_000)
    found = parquet_table.read_parquet_table(tmp_path / "x.parquet", "x")
    assert found.to_pydict() == table.to_pydict() and found.column(0).num_chunks > 10
    chosen = parquet_table.read_parquet_table(tmp_path / "x.parquet", "x", columns=["t"])
    assert chosen.to_pydict() == {"t": table["t"].to_pylist()}


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_a_damaged_file_of_a_rollout_is_a_format_error(tmp_path: Path, form: str) -> None:
    path = written(tmp_path / "out", form)
    file = sorted(path.glob(f"*.{form}"))[0]
    data = file.read_bytes()
    footer = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    if form == "jsonl":
        row = json.loads(data.splitlines()[0])
        broken = [
            data[:-9],
            data.replace(b"group_id", b"\xff"),
            b"[" * 9000,
            json.dumps({**row, "step": "0"}).encode(),
        ]
        broken += [json.dumps({**row, "group_id": 1 << 70}).encode(),
                   json.dumps({**row, "metrics": json.dumps({"m": 10**400})}).encode()]  # fmt: skip
    else:
        broken = [
            data[: len(data) // 2],
            data[:footer] + b"\xff" * 8 + data[footer + 8 :],
            data[:-9] + b"\xff" * 9,
        ]
    for new in broken:
        file.write_bytes(new)
        with pytest.raises(FormatError, match="out"):
            from_rollout(path)
