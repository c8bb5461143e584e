"""LeRobotDataset against rows gathered by hand, and against LeRobot's own class where that is installed."""

from __future__ import annotations

import pickle
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("pyarrow")
pytest.importorskip("av")
sets = pytest.importorskip("tests.datasets.sets")

import recollect as rc  # noqa: E402
from recollect.adapters.lerobot import LeRobotDataset  # noqa: E402

TOP, WRIST = "observation.images.top", "observation.images.wrist"
DELTAS = {"action": [0.0, 0.1, 0.5], "observation.state": [-0.2, -0.1], TOP: [-0.1, 0.0], "next.done": [0.0]}


def column(key: str) -> Any:
    """A column of the whole set, as it was written."""
    pictures = {WRIST: 0, TOP: 1}
    if key in pictures:
        return np.concatenate([sets.frames(e, pictures[key]) for e in range(3)])
    return np.concatenate([{**sets.numbers(e), **sets.own(e)}[key] for e in range(3)])


def by_hand(key: str, row: int, seconds: list[float]) -> tuple[Any, list[bool]]:
    """The rows of a key round a row of the set; outside its episode the episode's edge."""
    ends = np.cumsum(sets.LENGTHS)
    episode = int(np.searchsorted(ends, row, side="right"))
    first, end = int(ends[episode] - sets.LENGTHS[episode]), int(ends[episode])
    at = [row + round(s * sets.FPS) for s in seconds]
    return column(key)[np.clip(at, first, end - 1)], [not first <= i < end for i in at]


@pytest.fixture(params=sets.LEROBOT)
def root(request: Any, tmp_path: Path) -> Path:
    return Path(sets.LEROBOT[request.param](tmp_path / "set"))


@pytest.mark.parametrize("episodes", [None, [2, 0]])
def test_equal_to_gathering_by_hand(root: Path, episodes: list[int] | None) -> None:
    data = LeRobotDataset("me/set", root, episodes, delta_timestamps=DELTAS)
    rows = list(range(11)) if episodes is None else [*range(4), *range(5, 11)]
    assert len(data) == data.num_frames == len(rows) and data.num_episodes == (2 if episodes else 3)
    assert data.absolute_to_relative_idx == (episodes and {row: i for i, row in enumerate(rows)})
    for i, row in enumerate(rows):
        item = data[i]
        for key in ("action", "observation.state", "next.done"):
            want, pad = by_hand(key, row, DELTAS[key])
            assert item[key].numpy().tolist() == want.tolist() and item[f"{key}_is_pad"].tolist() == pad
        frames, pad = by_hand(TOP, row, DELTAS[TOP])
        assert item[TOP].shape == (2, 3, *sets.SIZE[:2]) and item[f"{TOP}_is_pad"].tolist() == pad
        assert np.abs(item[TOP].movedim(1, -1).numpy() * 255 - frames).max() < 4  # the codec is lossy
        assert np.array_equal(item[WRIST].numpy(), column(WRIST)[row].transpose(2, 0, 1) / np.float32(255))
        assert item["index"].item() == row and item["index"].shape == ()
        assert item["task"] == sets.TASKS[int(item["task_index"])]
    data.close()


def test_a_loader_and_batches_read_the_same_items(root: Path) -> None:
    data = LeRobotDataset("me/set", root, delta_timestamps=DELTAS)
    items = [data[i] for i in range(11)]
    want = torch.utils.data.default_collate(items[8:])
    calls: list[int] = []
    read = data._read
    data._read = lambda index: calls.append(len(index)) or read(index)  # type: ignore[method-assign, func-returns-value]
    for batches in (torch.utils.data.DataLoader(data, batch_size=4), data.batches(4, shuffle=False)):
        calls.clear()
        *_, last = batches
        assert calls == [4, 4, 3] and last.keys() == want.keys()
        for key, value in want.items():
            assert last[key] == value if key == "task" else torch.equal(last[key], value)
    shuffled = torch.cat([batch["index"] for batch in data.batches(4, seed=1)])
    assert sorted(shuffled.tolist()) == list(range(11)) != shuffled.tolist()
    assert [len(batch["task"]) for batch in data.batches(4, drop_last=True)] == [4, 4]
    assert [item["index"].item() for item in data[-2:]] == [9, 10]
    data.close()


@pytest.mark.process
def test_a_loader_with_spawned_workers_reads_the_same(tmp_path: Path) -> None:
    root = next(iter(sets.LEROBOT.values()))(tmp_path / "set")
    data = LeRobotDataset("me/set", root, delta_timestamps=DELTAS)
    loader = torch.utils.data.DataLoader(data, 1, num_workers=1, multiprocessing_context="spawn", timeout=120)
    for one, two in zip(torch.utils.data.DataLoader(data, 1), loader, strict=True):
        assert_same(one, two)
    data.close()


KILLED = """
import os, signal, sys, torch
from recollect.adapters.lerobot import LeRobotDataset
data = LeRobotDataset("me/set", sys.argv[1])
batches = iter(torch.utils.data.DataLoader(data, 1, num_workers=1, timeout=60))
next(batches)
try:
    os.kill(batches._workers[0].pid, signal.SIGKILL)
    list(batches)
except Exception:  # by torch's handler of SIGCHLD, at any line, or of a batch that lay in the worker's memory
    os._exit(7)
"""


@pytest.mark.process
def test_a_loader_ends_with_an_error_when_its_worker_is_killed(tmp_path: Path) -> None:
    root = next(iter(sets.LEROBOT.values()))(tmp_path / "set")
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(root)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 7, done.stdout + done.stderr


def test_chosen_features_leave_the_pictures_undecoded(root: Path) -> None:
    whole = LeRobotDataset("me/set", root, delta_timestamps={"action": [0.0, 0.1]})
    kept = whole[3]
    whole.close()
    shutil.rmtree(root / "videos")
    data = LeRobotDataset("me/set", root, delta_timestamps={"action": [0.0, 0.1]}, features=["action"])
    own = ["timestamp", "frame_index", "episode_index", "index", "task_index"]
    assert sorted(data.features) == sorted(["action", *own]) and not data.meta.camera_keys
    for one in (data, pickle.loads(pickle.dumps(data))):
        item = one[3]
        assert sorted(item) == sorted([*data.features, "action_is_pad", "task"])
        assert torch.equal(item["action"], kept["action"]) and item["task"] == kept["task"]
        one.close()
    with pytest.raises(KeyError, match="must be among"):
        LeRobotDataset("me/set", root, features=["nope"])


def test_steps_in_the_place_of_seconds_are_told_of(root: Path) -> None:
    with pytest.warns(UserWarning, match=r"'action': 2 s is further than the longest episode, 0\.6 s"):
        LeRobotDataset("me/set", root, delta_timestamps={"action": range(3)}).close()  # type: ignore[dict-item]


def test_create_says_how_a_set_is_made() -> None:
    with pytest.raises(AttributeError, match=r"record into a ReplayBuffer.*to_lerobot\("):
        LeRobotDataset.create("me/set", 30, {})


def test_what_a_training_loop_asks_of_it(root: Path) -> None:
    data = LeRobotDataset("me/set", root, episode_filter=lambda episode: episode["length"] > 1)
    assert (data.episodes, data.num_episodes, data.fps) == ([0, 2], 2, sets.FPS)
    assert data.meta.camera_keys == [WRIST, TOP] and data.meta.tasks == dict(enumerate(sets.TASKS))
    assert data.features["action"]["shape"] == (2,) and list(data.left_out) == ["language_events"]
    assert "language_events" not in data.features
    assert data.meta.episodes["dataset_to_index"] == [4, 5, 11]
    flipped = LeRobotDataset("me/set", root, image_transforms=lambda x: x.flip(-1), return_uint8=True)
    assert flipped[0][TOP].dtype == torch.uint8 and torch.equal(flipped[0][WRIST], data[0][WRIST].flip(-1))
    again = pickle.loads(pickle.dumps(data))
    assert len(again) == 10 and torch.equal(again[-1]["action"], data[-1]["action"])
    for one in (data, flipped, again):
        one.close()


def test_refused(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="multiples of 1/10 s, got .0.25."):
        LeRobotDataset("me/set", root, delta_timestamps={"action": [0.25]})
    with pytest.raises(KeyError, match="actions"):
        LeRobotDataset("me/set", root, delta_timestamps={"actions": [0.0]})
    for episodes in ([], [3], [-1]):
        with pytest.raises(ValueError, match="some of the 3"):
            LeRobotDataset("me/set", root, episodes)
    monkeypatch.setenv("HF_LEROBOT_HOME", str(root.parent))
    assert len(LeRobotDataset("set")) == 11
    snapshot = root.parent / "hub" / "datasets--me--kept" / "snapshots" / "1f2e"  # as LeRobot 0.6 keeps it
    shutil.copytree(root, snapshot)
    assert len(LeRobotDataset("me/kept")) == 11
    with pytest.raises(FileNotFoundError, match="hf download me/other --repo-type dataset"):
        LeRobotDataset("me/other", root.parent)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)  # as if it were not installed
    with pytest.raises(
        rc.MissingExtraError, match=f"hf download me/other .* --local-dir {root.parent}/me/other"
    ):
        LeRobotDataset("me/other")
    with pytest.raises(TypeError, match="an int or a slice"):
        LeRobotDataset("set")[[1, 2]]


# -- against LeRobot's own writer and reader

FEATURES = {
    "observation.state": {"dtype": "float32", "shape": (3,), "names": ["a", "b", "c"]},
    "observation.wide": {"dtype": "float64", "shape": (2,), "names": None},
    "observation.count": {"dtype": "int32", "shape": (2,), "names": None},
    "observation.grid": {"dtype": "float32", "shape": (2, 2), "names": None},
    "observation.images.top": {"dtype": "video", "shape": (64, 96, 3), "names": ["height", "width", "channels"]},
    "observation.images.wrist": {"dtype": "image", "shape": (8, 12, 3), "names": ["height", "width", "channels"]},
    "next.reward": {"dtype": "float32", "shape": (1,), "names": None},
    "next.done": {"dtype": "bool", "shape": (1,), "names": None},
    "note": {"dtype": "string", "shape": (1,), "names": None},
    "action": {"dtype": "float32", "shape": (2,), "names": None},
}  # fmt: skip


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Four episodes that LeRobot wrote, and its class."""
    module = pytest.importorskip("lerobot.datasets.lerobot_dataset")
    root = tmp_path_factory.mktemp("lerobot") / "set"
    theirs = module.LeRobotDataset.create("me/set", fps=10, features=FEATURES, root=root)
    rng = np.random.default_rng(0)
    for episode, n in enumerate((7, 2, 12, 5)):
        for t in range(n):
            row = {key: rng.normal(size=about["shape"]).astype(about["dtype"])
                   for key, about in FEATURES.items() if about["dtype"].startswith("float")}  # fmt: skip
            row |= {
                "observation.count": rng.integers(0, 9, 2).astype(np.int32),
                TOP: rng.integers(0, 255, (64, 96, 3)).astype(np.uint8),
                WRIST: rng.integers(0, 255, (8, 12, 3)).astype(np.uint8),
                "next.done": np.array([t == n - 1]),
                "note": f"{episode} {t}",
                "task": ("pick the cube", "déjà vu")[episode % 2],
            }
            theirs.add_frame(row)
        theirs.save_episode()
    theirs.finalize()
    return root, module.LeRobotDataset


CHUNK = [i / 10 for i in range(50)]


@pytest.mark.filterwarnings("ignore")  # LeRobot's own
@pytest.mark.parametrize(
    "deltas",
    [
        None,
        {"action": CHUNK},
        {"action": CHUNK, "observation.state": [-0.1, 0.0], TOP: [-0.1, 0.0], WRIST: [-0.3, 0.0]},
        {
            "action": [-0.5, 0.3],
            TOP: [0.0],
            WRIST: [0.0],
            "next.reward": [0.1, 0.2],
            "observation.grid": [0.2],
        },
        {"observation.wide": [0.2, -0.2, 0.0], "observation.count": [-1.0], "frame_index": [0.0, 0.1]},
    ],
    ids=["none", "chunk", "history", "gaps", "any order"],
)
@pytest.mark.parametrize("episodes", [None, [2, 0]])
@pytest.mark.parametrize("return_uint8", [False, True])
def test_equal_to_lerobot(written: Any, deltas: Any, episodes: Any, return_uint8: bool) -> None:
    root, theirs = written
    given = {"episodes": episodes, "delta_timestamps": deltas, "return_uint8": return_uint8}
    one = theirs("me/set", root=root, video_backend="pyav", **given)
    two = LeRobotDataset("me/set", root=root, **given)
    assert (len(two), two.num_frames, two.num_episodes) == (len(one), one.num_frames, one.num_episodes)
    assert two.absolute_to_relative_idx == one.absolute_to_relative_idx
    for i in range(len(one)):
        assert_same(one[i], two[i])
    for a, b in zip(*(torch.utils.data.DataLoader(data, batch_size=7) for data in (one, two)), strict=True):
        assert_same(a, b)
    two.close()


def assert_same(one: dict[str, Any], two: dict[str, Any]) -> None:
    assert two.keys() == one.keys()
    for key, value in one.items():
        if isinstance(value, torch.Tensor):
            assert (two[key].dtype, two[key].shape) == (value.dtype, value.shape), key
            assert torch.equal(two[key], value), key
        else:
            assert two[key] == value, key


@pytest.mark.filterwarnings("ignore")
def test_metadata_equal_to_lerobots(written: Any) -> None:
    root, theirs = written
    one, two = theirs("me/set", root=root), LeRobotDataset("me/set", root=root)
    assert (two.fps, two.meta.camera_keys) == (one.fps, one.meta.camera_keys)
    assert {k: (v["dtype"], v["shape"]) for k, v in two.features.items()} == {
        k: (v["dtype"], tuple(v["shape"])) for k, v in one.features.items()
    }
    assert two.meta.tasks == {int(row.task_index): row.name for _, row in one.meta.tasks.iterrows()}
    assert two.meta.stats.keys() == one.meta.stats.keys()
    for key, stats in one.meta.stats.items():
        assert two.meta.stats[key].keys() == stats.keys()
        for name, value in stats.items():
            np.testing.assert_array_equal(two.meta.stats[key][name], value)
    for key, values in two.meta.episodes.items():
        assert list(one.meta.episodes[key]) == values
    two.close()
