"""LeRobot data sets of every version read right, and what we write is a v3.0 set in the official layout."""

from __future__ import annotations

import json
import pickle
import shutil
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pyarrow import parquet
from tests.datasets import sets

import recollect as rc
from recollect.datasets import DatasetBatch, from_lerobot, to_lerobot
from recollect.datasets.convert import convert
from recollect.datasets.lerobot.writer import LeRobotWriter
from recollect.errors import FormatError
from recollect.testing.batch_contract import BatchContract

BOUNDS = [(0, 4), (4, 5), (5, 11)]


@pytest.fixture(params=sets.LEROBOT)
def root(request: Any, tmp_path: Path) -> Path:
    return sets.LEROBOT[request.param](tmp_path / "set")


def expected(key: str) -> Any:
    parts = {**{k: [sets.numbers(e)[k] for e in range(3)] for k in sets.numbers(0)},
             **{k: [sets.own(e)[k] for e in range(3)] for k in sets.own(0)}}[key]  # fmt: skip
    return np.concatenate(parts)


def test_every_feature_of_every_version_is_read_right(root: Path) -> None:
    with from_lerobot(root) as data:
        assert len(data) == 11 and data.get_segments() == BOUNDS
        got = data[:]
        for key in ("observation.state", "observation.grid", "action", *sets.own(0)):
            np.testing.assert_array_equal(got[key], expected(key), err_msg=key)
            assert got[key].dtype == expected(key).dtype
        np.testing.assert_array_equal(got["next.done"][:, 0], expected("next.done"))
        np.testing.assert_array_equal(
            got["observation.images.wrist"], np.concatenate([sets.frames(e) for e in range(3)])
        )
        video = np.concatenate([sets.frames(e, 1) for e in range(3)])
        assert np.abs(got["observation.images.top"].astype(int) - video).max() <= 3  # h264, of plain colours
        assert data.tasks == dict(enumerate(sets.TASKS))
        assert list(data.left_out) == ["language_events"]


def test_episodes_come_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    root = sets.lerobot_v2(tmp_path / "set", "v2.1")
    lines = (root / "meta/episodes.jsonl").read_text().splitlines(keepends=True)
    sets.put(root / "meta/episodes.jsonl", "".join(lines[::-1]))
    with from_lerobot(root, features=["index"]) as data:
        assert data.get_segments() == BOUNDS and data[:]["index"].tolist() == list(range(11))


def test_random_access_reads_the_same_as_in_order(root: Path) -> None:
    with from_lerobot(root) as data:
        order = [10, 0, 4, 3, 10, 5]
        whole, some = data[:], data[order]
        for key, value in some.items():
            np.testing.assert_array_equal(value, whole[key][order], err_msg=key)
        again = pickle.loads(pickle.dumps(data))
        np.testing.assert_array_equal(
            again[-1]["observation.images.top"], whole["observation.images.top"][-1]
        )
        again.close()


def test_a_shuffled_epoch_and_windows_work(root: Path) -> None:
    with from_lerobot(root, features=["action", "index"]) as data:
        seen = np.concatenate([b["index"] for b in rc.StepSampler(data, 4, seed=0).epoch_iter()])
        assert sorted(seen) == list(range(11))
        windows = rc.SequenceSampler(data, 8, 4, seed=0).sample()["index"]
        assert {int(w[0]) for w in windows} <= {0, 5, 6, 7}
        assert (np.diff(windows, axis=1) == 1).all()


def test_a_chosen_column_decodes_no_video(root: Path) -> None:
    shutil.rmtree(root / "videos")
    with from_lerobot(root) as data:
        np.testing.assert_array_equal(data.get_column("action")[:], expected("action"))
        with pytest.raises(FormatError, match=r"mp4.*not fully downloaded"):
            data[0]


class Rows(DatasetBatch):
    """Numbers in episodes of two, so that every read crosses some."""

    def _load(self, key: str, episode: int, first: int, end: int) -> Any:
        at = 2 * episode + np.arange(first, end)
        return at if key == "i" else {"v": np.stack([at, -at], 1).astype(np.float32)}


class TestDatasetBatch(BatchContract):
    @pytest.fixture
    def make_batch(self) -> Any:
        space = {"i": ((), "int64"), "x": {"v": ((2,), "float32")}}
        return lambda n: Rows(space, [2] * (n // 2) + [1] * (n % 2))


# -- what is wrong is said


@pytest.mark.parametrize(
    ("break_it", "says"),
    [
        (lambda r: shutil.rmtree(r / "meta"), "no LeRobot data set"),
        (lambda r: sets.put(r / "meta/info.json", "{"), "must be JSON"),
        (lambda r: sets.put(r / "meta/info.json", sets.info("v1.6", features={})), "v2.0.*v1.6"),
        (lambda r: shutil.rmtree(r / "meta/episodes"), "must hold chunk-000"),
        (sets.without_episodes, "must hold episodes, got none"),
        (lambda r: (r / "meta/tasks.parquet").write_bytes(b"PAR1"), "tasks.parquet"),
        (lambda r: sets.put(r / "meta/info.json",
                            (r / "meta/info.json").read_text().replace('"total_episodes": 3', '"total_episodes": 4')),
         "must hold 4 episodes, got 3"),
        (lambda r: sets.put(r / "meta/info.json",
                            (r / "meta/info.json").read_text().replace('"data/chunk', '"../chunk')),
         "outside itself"),
        (lambda r: (r / "data/chunk-000/file-001.parquet").write_bytes(b"PAR1"), "file-001.parquet.*damaged"),
        (lambda r: shutil.copy(r / "data/chunk-000/file-000.parquet", r / "data/chunk-000/file-001.parquet"),
         "6 rows of episode 2 side by side, got 0"),
        (lambda r: sets.write_mp4(r / "videos/observation.images.top/chunk-000/file-001.mp4", [sets.frames(0)]),
         "frame at 0.400 s"),
    ],
)  # fmt: skip
def test_a_broken_set_is_a_format_error_that_names_the_file(tmp_path: Path, break_it: Any, says: str) -> None:
    root = sets.lerobot_v3(tmp_path / "set")
    break_it(root)
    with pytest.raises(FormatError, match=says):
        from_lerobot(root)[:]


@pytest.mark.parametrize("version", ["v2.0", "v2.1", "v3.0"])
@pytest.mark.parametrize("key", ["video_path", "data_path"])
def test_a_set_that_does_not_say_where_its_files_are_is_a_format_error(
    tmp_path: Path, version: str, key: str
) -> None:
    root = tmp_path / "set"
    sets.lerobot_v3(root) if version == "v3.0" else sets.lerobot_v2(root, version)
    file = root / "meta/info.json"
    about = json.loads(file.read_text())
    for found, got in (({}, "nothing"), ({key: None}, "None"), ({key: 5}, "5")):
        sets.put(file, json.dumps({k: v for k, v in about.items() if k != key} | found))
        with pytest.raises(
            FormatError, match=rf"info\.json: {key} must say where .*, got {got}; it is damaged"
        ):
            from_lerobot(root)


def test_nothing_there_is_a_format_error(tmp_path: Path) -> None:
    with pytest.raises(FormatError):
        from_lerobot(tmp_path)
    with pytest.raises(KeyError, match="must be among"):
        from_lerobot(sets.lerobot_v3(tmp_path / "set"), features=["nope"])


# -- out


@pytest.mark.parametrize("codec", [None, "h264"])
def test_what_is_written_is_a_v3_set(tmp_path: Path, codec: str | None) -> None:
    source = from_lerobot(sets.lerobot_v3(tmp_path / "old"))
    to_lerobot(source, tmp_path / "new", video_codec=codec, commit_rows=5)
    assert not (tmp_path / "new.partial").exists() and not (tmp_path / "new/journal.json").exists()
    info = json.loads((tmp_path / "new/meta/info.json").read_text())
    assert info["codebase_version"] == "v3.0" and info["total_frames"] == 11 and info["total_tasks"] == 2
    assert info["splits"] == {"train": "0:3"} and info["fps"] == 10 and info["robot_type"] == "so100"
    kind = "video" if codec else "image"
    assert info["features"]["observation.images.top"]["dtype"] == kind
    rows = parquet.read_table(tmp_path / "new/meta/episodes/chunk-000/file-000.parquet").to_pylist()
    assert [r["data/file_index"] for r in rows] == [0, 0, 1]
    assert [(r["dataset_from_index"], r["dataset_to_index"]) for r in rows] == BOUNDS
    assert [r["tasks"] for r in rows] == [[sets.TASKS[0]], [sets.TASKS[1]], [sets.TASKS[0]]]
    if codec:
        key = "videos/observation.images.top"
        assert [r[f"{key}/from_timestamp"] for r in rows] == pytest.approx([0, 0.4, 0])
        assert info["features"]["observation.images.top"]["info"]["video.codec"] == "h264"
    stats = json.loads((tmp_path / "new/meta/stats.json").read_text())
    state = expected("observation.state").astype(np.float64)
    for name, of in (("min", np.min), ("max", np.max), ("mean", np.mean), ("std", np.std)):
        np.testing.assert_allclose(stats["observation.state"][name], of(state, 0), rtol=1e-6)
        np.testing.assert_allclose(rows[2][f"stats/observation.state/{name}"], of(state[5:], 0), rtol=1e-6)
    pixels = np.concatenate([sets.frames(e) for e in range(3)]) / 255
    np.testing.assert_allclose(
        np.ravel(stats["observation.images.wrist"]["mean"]), pixels.mean((0, 1, 2)), rtol=1e-6
    )
    assert np.shape(stats["observation.images.wrist"]["std"]) == (3, 1, 1)
    with from_lerobot(tmp_path / "new") as again:
        assert again.get_segments() == BOUNDS and again.tasks == source.tasks
        old, new = source[:], again[:]
        for key, value in old.items():
            if codec and "images" in key:
                assert np.abs(new[key].astype(int) - value).max() <= 6
            else:
                np.testing.assert_array_equal(new[key], value, err_msg=key)


@pytest.mark.parametrize("what", ["data_path", "shape"])
def test_sizes_in_metadata_take_no_memory(tmp_path: Path, what: str) -> None:
    """A few digits of metadata name a path of 300 MB, or a row of 1.2 GB: they are refused before it is made."""
    root = sets.lerobot_v3(tmp_path)
    info = json.loads((root / "meta/info.json").read_text())
    if what == "data_path":
        info[what] = info[what].replace(":03d", ":0299999999d", 1)
    else:
        info["features"]["action"]["shape"] = [3 * 10**8]
    sets.put(root / "meta/info.json", json.dumps(info))
    tracemalloc.start()
    try:
        with pytest.raises(FormatError):
            from_lerobot(root)[:]
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 32 << 20


@pytest.mark.parametrize("target", ["lerobot", "memory", "memmap", "parquet"])
@pytest.mark.parametrize("foreign", ["file", "link", "storage"])
def test_a_half_made_copy_that_is_not_ours_is_refused(tmp_path: Path, target: str, foreign: str) -> None:
    source = from_lerobot(sets.lerobot_v3(tmp_path / "old"))
    stage, other = tmp_path / "new.partial", tmp_path / "other"
    other.mkdir()
    (other / "notes.txt").write_text("mine")
    if foreign == "link":
        stage.symlink_to(other)
    else:
        (stage / "storage").mkdir(parents=True)
        (stage / ("notes.txt" if foreign == "file" else "storage/rows-1.bin")).write_text("mine")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(FileExistsError, match="new.partial: must be new or a half-made"):
        convert(source, tmp_path / "new", target)
    assert sorted(tmp_path.rglob("*")) == before and (other / "notes.txt").read_text() == "mine"


def test_a_file_with_the_next_name_of_a_half_made_set_is_not_overwritten(tmp_path: Path) -> None:
    """Readers take all files of a data set, so the writer does not go round it: it says what to move away."""
    source = from_lerobot(sets.lerobot_v3(tmp_path / "old"))

    def die(n: int, left: list[int] = [7]) -> None:  # noqa: B006
        left[0] -= n
        if left[0] <= 0:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        to_lerobot(source, tmp_path / "new", commit_rows=1, chunk_size=2, progress=die, video_codec="h264")
    names = json.loads((tmp_path / "new.partial/journal.json").read_text())["names"]
    number = sum(name.startswith("data/") for name in names)
    foreign = tmp_path / f"new.partial/data/chunk-000/file-{number:03d}.parquet"
    foreign.unlink(missing_ok=True)
    noted = tmp_path / "new.partial/.recollect-writer"
    lines = noted.read_text().splitlines(keepends=True)
    noted.write_text("".join(line for line in lines if "data/" not in line))  # it is not the killed writer's
    foreign.write_text("mine")
    with pytest.raises(FileExistsError, match="move it away"):
        to_lerobot(source, tmp_path / "new", commit_rows=1, chunk_size=2, video_codec="h264")
    assert foreign.read_text() == "mine"
    foreign.unlink()
    to_lerobot(source, tmp_path / "new", commit_rows=1, chunk_size=2, video_codec="h264")
    assert len(from_lerobot(tmp_path / "new")) == len(source)


def test_a_killed_writer_is_taken_up_where_it_was(tmp_path: Path) -> None:
    source = from_lerobot(sets.lerobot_v3(tmp_path / "old"))

    class Killed(BaseException):
        pass

    def die(n: int, left: list[int] = [7]) -> None:  # noqa: B006
        left[0] -= n
        if left[0] <= 0:
            raise Killed

    with pytest.raises(Killed):
        to_lerobot(source, tmp_path / "new", commit_rows=1, chunk_size=2, progress=die, video_codec="h264")
    assert not (tmp_path / "new").exists()
    (tmp_path / "new.partial/data/chunk-000/file-007.parquet").write_bytes(b"half")
    seen: list[int] = []
    to_lerobot(
        source, tmp_path / "new", commit_rows=1, chunk_size=2, progress=seen.append, video_codec="h264"
    )
    assert seen[0] == 5 and sum(seen) == 11  # two episodes were there
    foreign = tmp_path / "new/data/chunk-000/file-007.parquet"
    assert foreign.read_bytes() == b"half"  # not ours: it stays
    foreign.unlink()
    to_lerobot(source, tmp_path / "whole", commit_rows=1, chunk_size=2, video_codec="h264")
    for name in ("meta/info.json", "meta/stats.json"):
        assert (tmp_path / "new" / name).read_text() == (tmp_path / "whole" / name).read_text()
    new, whole = from_lerobot(tmp_path / "new"), from_lerobot(tmp_path / "whole")
    for key, value in whole[:].items():
        np.testing.assert_array_equal(new[:][key], value, err_msg=key)


def test_other_settings_do_not_take_up_a_killed_writer(tmp_path: Path) -> None:
    space = {"x": ((), "float32"), "img": ((4, 4, 3), "uint8")}
    writer = LeRobotWriter(tmp_path / "a", rc.as_space(space), fps=5, commit_rows=1)
    writer.add({"x": np.ones(2, "float32"), "img": np.zeros((2, 4, 4, 3), "uint8")}, ["t", "t"])
    writer.end_episode()
    writer.close()
    with pytest.raises(FormatError, match="other settings"):
        LeRobotWriter(tmp_path / "a", rc.as_space(space), fps=6)


def test_buffers_with_nested_leaves_are_written_and_read(tmp_path: Path) -> None:
    space = {"obs": {"pos": ((2,), "float64"), "mode": ((), "int64")}, "reward": ((), "float32")}
    buf = rc.ReplayBuffer.create("memory", space, capacity=10, maintain_segment_metadata=True)
    for n in (3, 4):
        buf.extend(
            {
                "obs": {"pos": np.arange(2.0 * n).reshape(n, 2), "mode": np.arange(n)},
                "reward": np.ones(n, "float32"),
            }
        )
    to_lerobot(buf, tmp_path / "set", fps=20, tasks=["a", "b"])
    got = from_lerobot(tmp_path / "set")
    assert got.get_segments() == [(0, 3), (3, 7)] and got.tasks == {0: "a", 1: "b"}
    np.testing.assert_array_equal(got[:]["obs.pos"], buf[:]["obs"]["pos"])
    np.testing.assert_array_equal(got[:]["obs.mode"][:, 0], buf[:]["obs"]["mode"])
    with pytest.raises(FileExistsError):
        to_lerobot(buf, tmp_path / "set", fps=20, tasks="")
    with pytest.raises(ValueError, match="fps"):
        to_lerobot(buf, tmp_path / "other")
    with pytest.raises(ValueError, match="2 episodes, got 1"):
        to_lerobot(buf, tmp_path / "other", fps=20, tasks=["a"])


def test_an_open_episode_is_refused_and_not_left_out(tmp_path: Path) -> None:
    with rc.ReplayBuffer.create(
        "memory", {"x": ((2,), "float32")}, capacity=9, maintain_segment_metadata=True
    ) as buf:
        buf.extend({"x": np.ones((9, 2), "float32")}, ends=np.arange(9) == 3)
        with pytest.raises(rc.SegmentOpenError, match="whole episodes, got an open one"):
            to_lerobot(buf, tmp_path / "set", fps=10, tasks="")
        assert not list(tmp_path.iterdir())
        buf.mark_segment_end()
        to_lerobot(buf, tmp_path / "set", fps=10, tasks="")
    assert from_lerobot(tmp_path / "set").get_segments() == [(0, 4), (4, 9)]


# -- tasks and names


def test_a_set_of_chosen_features_keeps_its_tasks_and_names(tmp_path: Path) -> None:
    with from_lerobot(sets.lerobot_v3(tmp_path / "old"), features=["observation.state", "action"]) as source:
        to_lerobot(source, tmp_path / "new", names={"action": ["pan", "lift"]})
        to_lerobot(source, tmp_path / "given", tasks=["a", "b", "a"])
    with from_lerobot(tmp_path / "new") as new:
        assert [new.tasks[i] for i in new[:]["task_index"]] == [
            sets.TASKS[e % 2] for e in (0, 0, 0, 0, 1, *[2] * 6)
        ]
    about = json.loads((tmp_path / "new/meta/info.json").read_text())["features"]
    assert about["observation.state"]["names"] == ["x", "y", "z"] and about["action"]["names"] == [
        "pan",
        "lift",
    ]
    assert list(from_lerobot(tmp_path / "given").tasks.values()) == ["a", "b"]


def test_tasks_that_a_copy_lost_are_asked_for_and_can_be_given(tmp_path: Path) -> None:
    with from_lerobot(sets.lerobot_v3(tmp_path / "old"), features=["action", "task_index"]) as source:
        convert(source, tmp_path / "table", "parquet")
        tasks = source.tasks
    with rc.ReplayBuffer.load_from(tmp_path / "table") as table:
        with pytest.warns(UserWarning, match=r"empty: the source has task_index but no texts; pass tasks="):
            to_lerobot(table, tmp_path / "empty", fps=10)
        with pytest.raises(ValueError, match=r"text of every task_index, got none of \[1\]"):
            to_lerobot(table, tmp_path / "new", fps=10, tasks={0: "a"})
        to_lerobot(table, tmp_path / "new", fps=10, tasks=tasks)
    assert from_lerobot(tmp_path / "new").tasks == tasks and set(from_lerobot(tmp_path / "empty").tasks) == {
        0
    }


def test_what_a_reader_would_miss_is_told(tmp_path: Path) -> None:
    space = {"top": ((3, 8, 6), "uint8"), "state": ((2,), "float32")}
    with rc.ReplayBuffer.create("memory", space, capacity=4) as buf:
        buf.extend({"top": np.zeros((4, 3, 8, 6), "uint8"), "state": np.zeros((4, 2), "float32")})
        with pytest.warns(UserWarning, match="to_lerobot: ") as told:
            to_lerobot(buf, tmp_path / "set", fps=10)
        assert [str(one.message).split(": ")[1][:30] for one in told] == [
            "the task of every frame is emp", "'top' of shape (3, 8, 6) is wr"]  # fmt: skip
        for names in ({"nope": ["a", "b"]}, {"state": ["a"]}, {"state": "ab"}, {"top": ["a", "b", "c"]}):
            with pytest.raises(ValueError, match="names: must be"):
                to_lerobot(buf, tmp_path / "new", fps=10, tasks="", names=names)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["set"]


def test_a_codec_that_is_none_leaves_nothing_behind(tmp_path: Path) -> None:
    with from_lerobot(sets.lerobot_v3(tmp_path / "old")) as source, pytest.raises(ValueError, match="codec"):
        to_lerobot(source, tmp_path / "new", video_codec="nope")
    assert [p.name for p in tmp_path.iterdir()] == ["old"]
