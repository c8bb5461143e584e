"""A relative path means the place where it was given, wherever the process goes afterwards."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.collect.worlds import Counting, tracked_for
from tests.datasets.sets import minari_hdf5
from tests.process.test_file_kills import KINDS, block, create, ids, state
from tests.remote.scripted import ScriptedCarrier
from tests.rollout.test_experience import batch

import recollect as rc
import recollect.rollout as rr
from recollect.datasets import from_lerobot, from_minari
from recollect.datasets.lerobot.writer import LeRobotWriter
from recollect.remote import Checkpoint, ReplayBufferManager
from recollect.rollout.events import RolloutTrace

Go = Callable[[str], Path]


@pytest.fixture
def go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Go:
    """Go to a directory; what is done there with a relative path must not touch another."""

    def to(name: str) -> Path:
        place = tmp_path / name
        place.mkdir(exist_ok=True)
        monkeypatch.chdir(place)
        return place

    return to


@pytest.mark.parametrize("kind", [*KINDS, "memmap"])
def test_a_storage_commits_closes_and_reads_where_it_was_made(kind: str, go: Go) -> None:
    there, like = go("a"), "parquet" if kind == "memmap" else kind
    made: Any = (
        rc.ReplayBuffer.create("memmap", KINDS["parquet"][0], capacity=20, cache_path="data",
                               maintain_segment_metadata=True)
        if kind == "memmap" else create(kind, Path("data"))
    )  # fmt: skip
    made.extend(block(like, 0, 5), ends=np.arange(5) == 4)
    elsewhere = go("b")
    made.extend(block(like, 5, 3), ends=np.arange(3) == 2)
    if kind == "memmap":
        made.dumps(there / "data")  # its own directory
    else:
        made.storage.flush()
    assert state(like, there / "data")[0] == [*range(8)]
    made.extend(block(like, 8, 2), ends=np.arange(2) == 1)
    made.close()
    go("a")
    again, writer = rc.ReplayBuffer.load_from("data"), rc.ReplayBuffer.load_from("data", read_only=False)
    go("b")
    assert ids(like, again[...]) == [*range(10)]
    writer.extend(block(like, 10, 1), ends=np.array([True]))
    again.close()
    writer.close()
    assert state(like, there / "data")[0] == [*range(11)]
    assert not list(elsewhere.iterdir())


def test_a_manager_saves_where_it_was_opened(go: Go) -> None:
    def manager(resume: bool) -> ReplayBufferManager:
        return ReplayBufferManager(
            {"id": ((), "int64")}, 1, 1, capacity=9, checkpoint=Checkpoint("m", resume=resume),
            communication_backend=ScriptedCarrier(1),
        )  # fmt: skip

    go("a")
    with manager(False) as first:
        first.add({"id": np.array([0])})
        elsewhere = go("b")
        first.stop()
        first.run()  # it ends with a dump
        first.add({"id": np.array([1])})
    assert not list(elsewhere.iterdir())
    go("a")
    with manager(True) as again:
        assert again.buffer[:]["id"].tolist() == [0, 1]


def test_sinks_traces_and_dumps_of_a_wrapper_stay_in_their_place(go: Go) -> None:
    there = go("a")
    sink, trace = rr.FileSink("out", "jsonl"), RolloutTrace(Path("trace.json"))
    env = Counting(longest=2)
    wrapped = rc.ReplayBufferCollectionWrapper(env, tracked_for(env), dump_on_episode_end=True, dump_path="d")
    elsewhere = go("b")
    sink.write(batch((1.0, 2.0)), "c-g0-0")
    trace.close()
    wrapped.reset()
    is_over = False
    while not is_over:
        _, _, ended, cut, _ = wrapped.step(env.action_space.sample())
        is_over = bool(ended or cut)
    assert (there / "out" / "c-g0-0.jsonl").is_file() and sink.holds("c-g0-0")
    assert len(json.loads((there / "trace.json").read_text())["traceEvents"]) == 1
    assert (there / "d").is_dir()
    assert not list(elsewhere.iterdir())


def test_data_sets_are_written_and_read_where_they_are(go: Go) -> None:
    there = go("a")
    space = rc.as_space({"n": ((), "int64")})
    writer = LeRobotWriter("made", space, fps=5, commit_rows=1)
    elsewhere = go("b")
    writer.add({"n": np.arange(4)}, ["t"] * 4)
    writer.end_episode()
    writer.finish()
    writer.close()
    go("a")
    opened = [from_lerobot("made"), from_minari(minari_hdf5(there).relative_to(there))]
    go("b")
    assert opened[0][:]["n"].reshape(-1).tolist() == [0, 1, 2, 3]
    assert len(opened[1][:]["reward"]) == len(opened[1])
    assert not list(elsewhere.iterdir())
