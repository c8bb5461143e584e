"""The data side of the viewer: episodes with their returns, curves that lose no spike, pictures, words."""

from __future__ import annotations

import io
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.datasets import sets

import recollect as rc
from recollect.observe.view.catalogue import Catalogue, open_catalogue
from recollect.observe.view.episodes import Filter
from recollect.observe.view.leaves import leaves_of
from recollect.observe.view.pictures import as_pixels, png
from recollect.observe.view.series import series

SPACE = {
    "obs": ((3,), "float32"),
    "reward": ((), "float32"),
    "terminated": ((), "bool"),
    "truncated": ((), "bool"),
}
LENGTHS = (3, 1, 5, 4)


def recorded(lengths: tuple[int, ...] = LENGTHS, **more: Any) -> rc.ReplayBuffer:
    """Episode e pays e + 1 a step; even ones terminate, odd ones are truncated, the last is cut off."""
    n = sum(lengths)
    ends = np.zeros(n, bool)
    ends[np.cumsum(lengths) - 1] = True
    episode = np.repeat(np.arange(len(lengths)), lengths)
    flagged = ends & (episode < len(lengths) - 1)
    buf = rc.ReplayBuffer.create("memory", SPACE, capacity=n, maintain_segment_metadata=True, **more)
    buf.extend(
        {
            "obs": np.arange(3 * n, dtype="float32").reshape(n, 3),
            "reward": (episode + 1).astype("float32"),
            "terminated": flagged & (episode % 2 == 0),
            "truncated": flagged & (episode % 2 == 1),
        },
        ends=ends,
    )
    return buf


@pytest.fixture
def catalogue() -> Any:
    with Catalogue(recorded()) as found:
        found.list.finish()
        yield found


def numbers(found: dict[str, Any], key: str = "episode") -> list[Any]:
    return [row[key] for row in found["rows"]]


def test_episodes_have_length_return_and_end(catalogue: Catalogue) -> None:
    found = catalogue.episodes()
    assert numbers(found, "length") == list(LENGTHS)
    assert numbers(found, "return") == [3.0, 2.0, 15.0, 16.0]
    assert numbers(found, "end") == ["terminated", "truncated", "terminated", "cut"]
    assert found["count"] == 4 and found["progress"] == 1.0 and not found["problem"]


def test_episodes_are_filtered_sorted_and_given_in_pages(catalogue: Catalogue) -> None:
    assert numbers(catalogue.episodes(Filter(sort="return", descending=True))) == [3, 2, 0, 1]
    assert numbers(catalogue.episodes(Filter(sort="length"))) == [1, 0, 3, 2]
    assert numbers(catalogue.episodes(Filter(min_length=3, max_length=4))) == [0, 3]
    assert numbers(catalogue.episodes(Filter(min_return=2.5, max_return=15))) == [0, 2]
    assert numbers(catalogue.episodes(Filter(end="truncated"))) == [1]
    page = catalogue.episodes(offset=1, limit=2)
    assert numbers(page) == [1, 2] and page["count"] == 4


def test_returns_span_the_blocks_of_the_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("recollect.observe.view.episodes._PASS_ROWS", 2)
    with Catalogue(recorded()) as catalogue:
        catalogue.list.finish()
        assert numbers(catalogue.episodes(), "return") == [3.0, 2.0, 15.0, 16.0]
        assert numbers(catalogue.episodes(), "end") == ["terminated", "truncated", "terminated", "cut"]


def test_a_set_without_boundaries_is_cut_into_runs() -> None:
    buf = rc.ReplayBuffer.create("memory", {"reward": ((), "float32")}, capacity=3000)
    buf.extend({"reward": np.ones(2500, "float32")})
    with Catalogue(buf) as catalogue:
        catalogue.list.finish()
        assert not catalogue.list.are_real and catalogue.about()["reward"] is None
        assert numbers(catalogue.episodes(), "length") == [1000, 1000, 500]
        assert numbers(catalogue.episodes(), "return") == [None] * 3


def test_a_flag_called_dones_counts_limits_too() -> None:
    space = {"rewards": ((), "float32"), "dones": ((), "float32"), "truncated": ((), "float32")}
    buf = rc.ReplayBuffer.create("memory", space, capacity=8, maintain_segment_metadata=True)
    done, cut = np.array([[0, 1, 0, 1, 0], [0, 0, 0, 1, 0]], "float32")
    reward = np.array([1, 2, 3, 4, np.nan], "float32")
    buf.extend({"rewards": reward, "dones": done, "truncated": cut}, ends=np.array([0, 1, 0, 1, 1], bool))
    with Catalogue(buf) as catalogue:
        catalogue.list.finish()
        found = catalogue.episodes()
    assert numbers(found, "end") == ["terminated", "truncated", "cut"]
    assert numbers(found, "return") == [3.0, 7.0, None]  # what is not a number has no sum


def test_a_lone_flag_called_done_does_not_say_terminated() -> None:
    space = {"next.done": ((), "bool")}
    buf = rc.ReplayBuffer.create("memory", space, capacity=8, maintain_segment_metadata=True)
    buf.extend({"next.done": np.array([0, 1, 0], bool)}, ends=np.array([0, 1, 1], bool))
    with Catalogue(buf) as catalogue:
        catalogue.list.finish()
        assert numbers(catalogue.episodes(), "end") == ["done", "cut"]


def test_an_episode_that_no_limit_cut_is_not_called_cut_where_no_leaf_could_say_that_it_ended() -> None:
    """Rollouts have `truncated` alone."""
    cut = np.array([0, 1, 0, 0], bool)
    space = {"reward": ((), "float32"), "truncated": ((), "bool")}
    buf = rc.ReplayBuffer.create("memory", space, capacity=4, maintain_segment_metadata=True)
    buf.extend({"reward": np.ones(4, "float32"), "truncated": cut}, ends=np.array([0, 1, 0, 1], bool))
    with Catalogue(buf) as catalogue:
        catalogue.list.finish()
        assert numbers(catalogue.episodes(), "end") == ["truncated", ""]


def test_an_empty_set_has_no_episodes() -> None:
    with Catalogue(
        rc.ReplayBuffer.create("memory", SPACE, capacity=4, maintain_segment_metadata=True)
    ) as empty:
        assert empty.episodes()["count"] == 0
        with pytest.raises(IndexError, match="one of the 0, got 0"):
            empty.curves(0, "obs")


def test_curves_of_one_episode_are_exact_when_they_fit(catalogue: Catalogue) -> None:
    found = catalogue.curves(2, "obs")
    assert found["exact"] and found["steps"] == [0, 1, 2, 3, 4]
    assert found["names"] == ["[0]", "[1]", "[2]"]
    assert found["values"][1] == [13.0, 16.0, 19.0, 22.0, 25.0]
    assert catalogue.curves(2, "obs", first=1, end=3)["values"][0] == [15.0, 18.0]
    assert catalogue.curves(0, "terminated")["values"] == [[0, 0, 1]]


def test_a_downsampled_curve_loses_no_spike() -> None:
    values = np.zeros((10_000, 1), np.float32)
    values[7777] = 9.0
    values[1234] = -4.0
    for block_nbytes in (1, 4096):
        steps, found, exact = series(lambda a, b: values[a:b], 0, 10_000, 50, block_nbytes)
        assert not exact and len(steps) == len(found) == 100
        assert found.max() == 9.0 and found.min() == -4.0
        assert (np.diff(steps) > 0).all()
        assert abs(int(steps[found[:, 0].argmax()]) - 7777) <= 200


def test_downsampling_agrees_with_a_plain_loop() -> None:
    rng = np.random.default_rng(0)
    values = rng.normal(size=(997, 2))
    values[rng.random((997, 2)) < 0.3] = np.nan
    _, found, _ = series(lambda a, b: values[a:b], 3, 997, 31, row_nbytes=1 << 20)
    edges = [3 + i * 994 // 31 for i in range(32)]
    for pixel, (a, b) in enumerate(pairwise(edges)):
        np.testing.assert_array_equal(found[2 * pixel], np.nanmin(values[a:b], axis=0))
        np.testing.assert_array_equal(found[2 * pixel + 1], np.nanmax(values[a:b], axis=0))


def test_values_that_are_not_finite_have_no_point() -> None:
    buf = rc.ReplayBuffer.create("memory", ((), "float32"), capacity=3, maintain_segment_metadata=True)
    buf.extend(np.array([1.5, np.nan, np.inf], "float32"))
    with Catalogue(buf) as catalogue:
        assert catalogue.curves(0, "value")["values"] == [[1.5, None, None]]


def test_a_wide_leaf_is_shown_32_components_at_a_time() -> None:
    buf = rc.ReplayBuffer.create("memory", ((5, 8), "int64"), capacity=2, maintain_segment_metadata=True)
    buf.extend(np.arange(80).reshape(2, 5, 8))
    with Catalogue(buf) as catalogue:
        first = catalogue.curves(0, "value")
        assert len(first["values"]) == 32 and first["of"] == 40
        rest = catalogue.curves(0, "value", component=32)
        assert rest["names"][0] == "[4, 0]" and rest["values"][0] == [32, 72] and len(rest["values"]) == 8


def test_a_step_is_told_in_words(catalogue: Catalogue) -> None:
    assert catalogue.step(1, 0) == {
        "obs": "[9, 10, 11]", "reward": "2.0", "terminated": "False", "truncated": "True",
    }  # fmt: skip
    with pytest.raises(IndexError, match="one of the 1, got 1"):
        catalogue.step(1, 1)


def test_a_leaf_that_is_not_there_is_refused(catalogue: Catalogue) -> None:
    for name in ("../../etc/passwd", "image", ""):
        with pytest.raises(KeyError, match="must be one of"):
            catalogue.curves(0, name)
    with pytest.raises(KeyError, match="must be one of"):
        catalogue.frame(0, 0, "obs")


def test_reward_may_be_named() -> None:
    buf = rc.ReplayBuffer.create(
        "memory", {"x": {"score": ((), "int64")}}, capacity=4, maintain_segment_metadata=True
    )
    buf.extend({"x": {"score": np.array([2, 3])}})
    with Catalogue(buf, reward="x/score") as catalogue:
        catalogue.list.finish()
        assert numbers(catalogue.episodes(), "return") == [5.0]
    with pytest.raises(ValueError, match=r"one of \['x/score'\], got 'reward'"):
        Catalogue(buf, reward="reward")


def test_an_episode_of_a_live_ring_is_found_where_it_moved_to() -> None:
    buf = recorded((2, 2, 2))
    with Catalogue(buf) as catalogue:
        catalogue.list.finish()
        buf.append(
            {"obs": np.full(3, 100, "float32"), "reward": 0.0, "terminated": False, "truncated": False}
        )
        assert catalogue.curves(2, "obs")["values"][0] == [12.0, 15.0]
        with pytest.raises(IndexError, match="overwritten"):
            catalogue.curves(0, "obs")


@pytest.mark.parametrize(
    ("shape", "dtype", "shown"),
    [
        ((64, 48, 3), "uint8", "picture"),
        ((3, 64, 48), "uint8", "picture"),
        ((4, 84, 84), "uint8", "picture"),
        ((84, 84), "uint8", "picture"),
        ((48, 64), "uint16", "picture"),
        ((3, 48, 64), "float32", "picture"),
        ((84, 84), "float32", "curves"),
        ((4, 4), "uint8", "curves"),
        ((17,), "uint8", "curves"),
    ],
)
def test_which_leaves_are_pictures(shape: tuple[int, ...], dtype: str, shown: str) -> None:
    assert leaves_of(rc.as_space((shape, dtype)))[0].shown == shown


@pytest.mark.parametrize("shape", [(9, 12), (9, 12, 3), (9, 12, 1), (3, 9, 12), (4, 9, 12)])
def test_png_is_exact(shape: tuple[int, ...]) -> None:
    image = pytest.importorskip("PIL.Image")
    value = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    with image.open(io.BytesIO(png(value))) as opened:
        np.testing.assert_array_equal(np.asarray(opened), as_pixels(value))
    if shape == (4, 9, 12):
        np.testing.assert_array_equal(as_pixels(value)[:, 24:36], value[2])
    if shape == (3, 9, 12):
        np.testing.assert_array_equal(as_pixels(value), np.moveaxis(value, 0, 2))


def test_depth_is_stretched_over_the_greys() -> None:
    depth = np.array([[100, 600], [1100, 100]], np.uint16).repeat(8, 0).repeat(8, 1)
    pixels = as_pixels(depth)
    assert pixels.dtype == np.uint8 and pixels[0, 0] == 0 and pixels[8, 0] == 255 and pixels[0, 8] == 128


@pytest.mark.parametrize("version", ["v2.1", "v3.0"])
def test_a_lerobot_set_is_shown_in_its_own_words(version: str, tmp_path: Path) -> None:
    root = sets.lerobot_v3(tmp_path / "s") if version == "v3.0" else sets.lerobot_v2(tmp_path / "s", version)
    about = json.loads((root / "meta/info.json").read_text())
    about["features"]["action"]["names"] = {"motors": ["pan", "lift"]}
    about["features"]["observation.grid"]["names"] = ["three", "are", "wrong"]
    (root / "meta/info.json").write_text(json.dumps(about))
    with open_catalogue(root) as catalogue:
        catalogue.list.finish()
        found = catalogue.about()
        assert (found["fps"], found["tasks"]) == (sets.FPS, sets.TASKS)
        curves = [leaf["name"] for leaf in found["leaves"] if leaf["shown"] == "curves"]
        assert curves == [
            "observation.state",
            "observation.grid",
            "action",
            "next.done",
        ]  # no column that only counts
        assert catalogue.curves(0, "observation.state")["names"] == ["x", "y", "z"]
        assert catalogue.curves(0, "action")["names"] == ["pan", "lift"]
        assert catalogue.curves(0, "observation.grid")["names"][1] == "[0, 1]"
        step = catalogue.step(1, 0)
        pan, lift = sets.numbers(1)["action"][0]
        assert step["action"] == f"pan {pan:.6g}, lift {lift:.6g}"
        assert step["task_index"] == "1: déjà vu" and step["frame_index"] == "0"
        assert numbers(catalogue.episodes(), "task") == [sets.TASKS[k] for k in (0, 1, 0)]
        assert numbers(catalogue.episodes(Filter(task="CUBE"))) == [0, 2]
        with pytest.raises(KeyError, match="leaf: must be one of"):
            catalogue.curves(0, "frame_index")


@pytest.mark.parametrize("storage", ["memory", "memmap", "hdf5", "parquet"])
def test_every_kind_of_set_opens(storage: str, tmp_path: Path) -> None:
    source = recorded()
    if storage == "memory":
        source.dumps(tmp_path / "run")
    else:
        capacity = None if storage == "parquet" else 32
        with rc.ReplayBuffer.create(
            storage, SPACE, capacity=capacity, cache_path=tmp_path / "run", maintain_segment_metadata=True
        ) as buf:
            buf.extend_from(source)
            if storage == "hdf5":
                buf.dumps(tmp_path / "run")
    with open_catalogue(tmp_path / "run") as catalogue:
        catalogue.list.finish()
        assert numbers(catalogue.episodes(), "return") == [3.0, 2.0, 15.0, 16.0], catalogue.list.problem
        assert catalogue.curves(3, "obs")["values"][2][-1] == 38.0
        assert catalogue.name == "run"


def test_packed_rows_are_mapped_and_not_copied(tmp_path: Path) -> None:
    recorded().dumps(tmp_path / "run")
    with open_catalogue(tmp_path / "run") as catalogue:
        assert catalogue.batch.inner_storage.short_name == "memmap"  # type: ignore[attr-defined]


def test_a_pass_that_fails_says_so_and_the_list_stays() -> None:
    class Broken(rc.BatchBase):
        def __init__(self) -> None:
            super().__init__({"reward": ((), "float32")})

        def __len__(self) -> int:
            return 3

        def get_at(self, idx: Any) -> Any:
            raise rc.FormatError("rows-1.bin: is damaged")

        def get_segments(self) -> list[tuple[int, int]]:
            return [(0, 3)]

    with Catalogue(Broken()) as catalogue:
        catalogue.list.finish()
        found = catalogue.episodes()
        assert "rows-1.bin: is damaged" in found["problem"] and numbers(found, "length") == [3]
