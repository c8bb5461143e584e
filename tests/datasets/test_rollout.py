"""Files of a rollout's sink, opened as a data set."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import recollect as rc
import recollect.rollout as rr
from recollect.datasets import open_dataset
from recollect.datasets.convert import convert
from recollect.datasets.open import kind_of
from recollect.datasets.verify import verify


def answer(prompt: str, text: str, **more: Any) -> rr.Experience:
    before, after = prompt.encode(), text.encode()
    g = rr.Generation(text, tokens=list(before + after), prompt_length=len(before), logprobs=[-1.0] * len(after),
                      prompt=prompt)  # fmt: skip
    return g.experience(**more)


def written(path: Path, format: str) -> Path:
    sink = rr.FileSink(path, format)
    for batch, n_steps in ((2, 1), (10, 2)):
        runs = [
            rr.encode([answer(f"{batch} and\n{step}?", "x" * (step + 1), reward=float(batch), metrics={"m": 0.5},
                              info={"judge": "fine"} if batch == 2 else None) for step in range(n_steps)],
                      batch_id=batch, task_id="t", group_id=batch, run_id=run)
            for run in range(2)
        ]  # fmt: skip
        sink.write(rr.Experiences.concat([rr.decode(run) for run in runs]), f"job/{batch}")
    return path


@pytest.mark.parametrize("format", ["jsonl", "parquet"])
def test_runs_are_segments_and_words_are_leaves(tmp_path: Path, format: str) -> None:
    if format == "parquet":
        pytest.importorskip("pyarrow")
    path = written(tmp_path / "out", format)
    assert kind_of(path) == "rollout" and verify(path)["ok"]
    batch: Any = open_dataset(path)
    assert batch.get_segments() == [(0, 1), (1, 2), (2, 4), (4, 6)]  # batch 2 before batch 10
    rows = batch[:]
    assert rows["prompt"] == ("2 and\n0?",) * 2 + ("10 and\n0?", "10 and\n1?") * 2
    assert rows["answer"] == ("x", "x", "x", "xx", "x", "xx") and rows["task_id"] == ("t",) * 6
    assert rows["reward"].tolist() == [2.0] * 2 + [10.0] * 4 and rows["metrics"]["m"].tolist() == [0.5] * 6
    assert rows["info"] == ('{"judge": "fine"}',) * 2 + ("",) * 4
    assert bytes(rows["tokens"][3].tolist()).decode() == "10 and\n1?xx" and batch.left_out == {}
    assert batch[3]["answer"] == "xx" and batch.get_column("answer")[3] == "xx"
    convert(batch, tmp_path / "copy", "memory")
    with rc.ReplayBuffer.load_from(tmp_path / "copy") as copy:
        assert copy.get_segments() == batch.get_segments() and copy[3]["answer"] == "xx"
        np.testing.assert_array_equal(copy[3]["tokens"], batch[3]["tokens"])


@pytest.mark.parametrize("format", ["jsonl", "parquet"])
def test_a_damaged_file_is_named(tmp_path: Path, format: str) -> None:
    if format == "parquet":
        pytest.importorskip("pyarrow")
    path = written(tmp_path / "out", format)
    last = sorted(path.glob(f"*2.{format}"))[0]
    data = last.read_bytes()
    last.write_bytes(data[:-9])
    first = sorted(path.glob(f"*10.{format}"))[0]
    first.rename(path / f"a-0.{format}")  # a whole one comes first
    with pytest.raises(rc.FormatError, match=f"{last.name}: must .*damaged"):
        open_dataset(path)
    report = verify(path)
    assert not report["ok"] and last.name in report["damaged"][0]["file"]


def test_other_files_are_no_rollout(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "hello"}\n')
    with pytest.raises(rc.FormatError, match="files of recollect rollout, got no dump"):
        open_dataset(tmp_path)


def test_of_long_words_the_beginning_is_kept() -> None:
    row = answer("p" * 100_000, "é" * 100_000, info={"answer": "mine"})
    assert row.info == {"prompt": "p" * 3999 + "…", "answer": "mine"}
    widest = answer("𝕡" * 5_000, "𝕒" * 5_000, reward=0.0)
    alone = rr.Experience(tokens=[1], prompt_length=1, logprobs=[], reward=0.0, info=widest.info)
    assert rr.decode(rr.encode([alone])).info == (widest.info,)  # the bound of info leaves room for both
