"""A picture or a video whose header says another size than the metadata is refused before it is decoded."""

from __future__ import annotations

import json
import os
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest

import recollect as rc
from recollect import _core
from recollect.datasets import from_lerobot, open_dataset, to_lerobot
from recollect.errors import FormatError
from recollect.files.record import read_json, signed_json

pytest.importorskip("PIL")
pytest.importorskip("av")
FRAMES = np.arange(3 * 16 * 32 * 3, dtype=np.uint32).astype("uint8").reshape(3, 16, 32, 3)


def header(height: int, width: int) -> bytes:
    """A PNG of nothing but its header."""
    parts = (b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0), b"IDAT")
    chunks = (struct.pack(">I", len(p) - 4) + p + struct.pack(">I", zlib.crc32(p)) for p in parts)
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def replaced(path: Path, file: Path, data: bytes) -> None:
    """Put other data into a file of a dump, as if its writer had."""
    file.write_bytes(data)
    manifest = read_json(path / "manifest.json")
    manifest.pop("crc32c")
    about = manifest["files"].get(str(file.relative_to(path)))
    if about is not None:
        about.update(bytes=len(data), crc32c=f"{_core.crc32c(data):08x}")
    (path / "manifest.json").write_text(signed_json(manifest))


def resized(data: bytes, height: int, width: int) -> bytes:
    """A Matroska file of 256 x 512 that says other numbers; its codec, ffv1, says none of its own."""
    old = b"\xb0\x82\x02\x00\xba\x82\x01\x00"
    assert data.count(old) == 1
    return data.replace(old, struct.pack(">2sH2sH", b"\xb0\x82", width, b"\xba\x82", height))


SIZES = [(50_000, 50_000), (12_000, 12_000), (32, 16)]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_an_image_of_another_size_is_refused_by_its_header(tmp_path: Path, size: tuple[int, int]) -> None:
    with rc.ReplayBuffer.create("image", ((16, 32, 3), "uint8"), cache_path=tmp_path) as buf:
        buf.extend(FRAMES)
    data = header(*size)
    [row] = tmp_path.glob("storage/row-1-*.png")
    [index] = tmp_path.glob("storage/index-0-*.bin")
    row.write_bytes(data)
    entries = bytearray(index.read_bytes())
    struct.pack_into("<qI", entries, 24 + 8, len(data), _core.crc32c(data))
    replaced(tmp_path, index, bytes(entries))
    with rc.ReplayBuffer.load_from(tmp_path) as buf:
        np.testing.assert_array_equal(buf[0], FRAMES[0])
        with pytest.raises(FormatError, match=f"{size[0]} x {size[1]}"):
            buf[1]


def test_an_image_file_of_any_length_is_refused_before_it_is_read(tmp_path: Path) -> None:
    with rc.ReplayBuffer.create("image", ((16, 32, 3), "uint8"), cache_path=tmp_path) as buf:
        buf.extend(FRAMES)
    [row] = tmp_path.glob("storage/row-1-*.png")
    os.truncate(row, 1 << 40)  # a hole, which takes no disk
    with rc.ReplayBuffer.load_from(tmp_path) as buf, pytest.raises(FormatError, match="checksum"):
        buf[1]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("has_bytes", [True, False])
@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_a_picture_of_another_size_is_refused_by_its_header(
    tmp_path: Path, size: tuple[int, int], has_bytes: bool
) -> None:
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet
    from tests.fuzz.artefacts import _lerobot_2

    (tmp_path / "x.png").write_bytes(header(*size))
    _lerobot_2(tmp_path)
    column = [{"bytes": header(*size) if has_bytes else None, "path": "x.png"}] * 3
    table = pa.table({"x": column, "episode_index": [0, 0, 0]})
    parquet.write_table(table, tmp_path / "data/chunk-000/episode_000000.parquet")
    info = read_json(tmp_path / "meta/info.json")
    info["features"]["x"] = {"dtype": "image", "shape": [16, 32, 3], "names": None}
    (tmp_path / "meta/info.json").write_text(json.dumps(info))
    batch = from_lerobot(tmp_path)
    with pytest.raises(FormatError, match=f"{size[0]} x {size[1]}|pixels"):
        batch[1]


@pytest.mark.parametrize("size", SIZES[:2])
@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_a_first_picture_says_the_size_of_all_if_it_is_a_sample(
    tmp_path: Path, size: tuple[int, int]
) -> None:
    pa = pytest.importorskip("pyarrow")
    table = pa.table({"x": [{"bytes": header(*size), "path": None}] * 2})
    with pa.OSFile(str(tmp_path / "data.arrow"), "wb") as f, pa.ipc.new_stream(f, table.schema) as w:
        w.write_table(table)
    (tmp_path / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data.arrow"}]}))
    with pytest.raises(FormatError, match="at most|pixels"):
        open_dataset(tmp_path)


def made_video(path: Path) -> Path:
    with rc.ReplayBuffer.create("video", ((256, 512, 3), "uint8"), cache_path=path) as buf:
        buf.extend(np.zeros((3, 256, 512, 3), "uint8"))
    [file] = path.glob("storage/*.mkv")
    return file


@pytest.mark.parametrize("size", [(16_000, 16_000), (512, 256), (255, 512)])
def test_a_video_of_another_size_is_refused_by_its_header(tmp_path: Path, size: tuple[int, int]) -> None:
    file = made_video(tmp_path / "video")
    data = resized(file.read_bytes(), *size)
    replaced(tmp_path / "video", file, data)
    with (
        rc.ReplayBuffer.load_from(tmp_path / "video") as buf,
        pytest.raises(FormatError, match=f"got (larger ones|{size[0]} x {size[1]})"),
    ):
        buf[0]


def as_lerobot(path: Path) -> Path:
    """A LeRobot data set of one camera; returns the file of its video."""
    space = {"observation.images.top": ((256, 512, 3), "uint8")}
    with rc.ReplayBuffer.create("memory", space, capacity=4, maintain_segment_metadata=True) as buf:
        buf.extend({"observation.images.top": np.zeros((3, 256, 512, 3), "uint8")})
        buf.mark_segment_end()
        to_lerobot(buf, path, fps=25, tasks="", video_codec="h264")
    [file] = path.glob("videos/**/*.mp4")
    assert from_lerobot(path)[0]["observation.images.top"].shape == (256, 512, 3)
    return file


@pytest.mark.parametrize("size", [(16_000, 16_000), (512, 256), (255, 512)])
def test_a_lerobot_video_of_another_size_is_refused_by_its_header(
    tmp_path: Path, size: tuple[int, int]
) -> None:
    file = as_lerobot(tmp_path / "set")
    file.write_bytes(resized(made_video(tmp_path / "video").read_bytes(), *size))
    with pytest.raises(FormatError, match=f"got (larger ones|{size[0]} x {size[1]})"):
        from_lerobot(tmp_path / "set")[0]


def test_a_video_leads_to_no_other(tmp_path: Path) -> None:
    file = as_lerobot(tmp_path / "set")
    file.rename(file.with_name("secret.mp4"))
    file.write_text("ffconcat version 1.0\nfile secret.mp4\n")
    with pytest.raises(FormatError, match="must be a video"):
        from_lerobot(tmp_path / "set")[0]


def test_a_video_that_has_one_frame_twice_lacks_another(tmp_path: Path) -> None:
    file = made_video(tmp_path)
    data = file.read_bytes()
    for old, new in ((b"\x81\x00\x28\x80", b"\x81\x00\x00\x80"),):  # the time of the second of 3, in ms
        assert data.count(old) == 1
        data = data.replace(old, new)
    replaced(tmp_path, file, data)
    with rc.ReplayBuffer.load_from(tmp_path) as buf, pytest.raises(FormatError, match="got 2 of them"):
        buf[1]


def test_images_are_read_whatever_their_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from PIL import Image

    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 16 * 16 - 1)  # half of what is written here
    with rc.ReplayBuffer.create("image", ((16, 32, 3), "uint8"), cache_path=tmp_path) as buf:
        buf.extend(FRAMES)
        np.testing.assert_array_equal(buf[:], FRAMES)
