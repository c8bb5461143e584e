"""Frames to a video file and back, by PyAV: exact with ffv1, and any frame can be reached from a keyframe near it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from recollect.errors import FormatError

Array = np.ndarray[Any, Any]
FPS = 25  # 40 ms a frame: exact in the milliseconds that Matroska counts in
_BLOCK = 256  # what a decoder may round the sides of a frame up by
_PIXELS = {"uint8-1": "gray", "uint8-3": "rgb24", "uint16-1": "gray16le"}
# What ffv1 stores without loss.
_LOSSLESS = {"gray": "gray", "rgb24": "bgr0", "gray16le": "gray16le"}


def pixel_format(dtype: np.dtype[Any], shape: tuple[int, ...]) -> str:
    """How one frame is handed to the encoder."""
    return _PIXELS[f"{dtype}-{shape[2] if len(shape) == 3 else 1}"]


def check_codec(av: Any, codec: Any, dtype: np.dtype[Any]) -> None:
    """Raise ValueError for a codec that cannot be written, or not with 16 bits."""
    try:
        found = av.codec.Codec(codec, "w")
    except (av.error.FFmpegError, TypeError, ValueError):
        raise ValueError(
            f"codec: must be one that FFmpeg writes, as 'ffv1' or 'h264', got {codec!r}"
        ) from None
    if found.type != "video" or (dtype == np.uint16 and codec != "ffv1"):
        raise ValueError(f"codec: must be a video codec, for uint16 'ffv1', got {codec!r}")


def write_video(
    av: Any, path: Path, frames: Iterable[Array], dtype: np.dtype[Any], shape: tuple[int, ...],
    codec: str, options: dict[str, str], gop: int,
) -> None:  # fmt: skip
    """Write frames `[H, W]` or `[H, W, C]` as they come, with a keyframe every `gop`."""
    given = pixel_format(dtype, shape)
    height, width = shape[:2]
    with av.open(str(path), "w", format="matroska") as container:
        stream = container.add_stream(codec, rate=FPS, options=options)
        stream.width, stream.height = width, height
        stream.pix_fmt = _stored_format(codec, given, height, width)
        stream.codec_context.gop_size = 1 if codec == "ffv1" else gop
        stream.codec_context.max_b_frames = 0
        for number, frame in enumerate(frames):
            plane = frame[..., 0] if frame.ndim == 3 and frame.shape[2] == 1 else frame
            image = av.VideoFrame.from_ndarray(np.ascontiguousarray(plane), format=given)
            image.pts, image.time_base = number, Fraction(1, FPS)
            container.mux(stream.encode(image.reformat(format=stream.pix_fmt)))
        container.mux(stream.encode(None))


def _stored_format(codec: str, given: str, height: int, width: int) -> str:
    if codec == "ffv1":
        return _LOSSLESS[given]
    # Half the colour resolution needs even sides.
    return "yuv420p" if height % 2 == 0 and width % 2 == 0 else "yuv444p"


@contextmanager
def opened_video(av: Any, path: Path, shape: tuple[int, ...], formats: str) -> Iterator[tuple[Any, Any]]:
    """Open a video of frames of this shape, in a container of these formats; gives the container and the stream.

    FormatError before memory is taken if its header says another size; a frame that is larger than the header says
    is an error of FFmpeg. No other file is opened, whatever this one names.
    """
    height, width = shape[:2]
    most = {"max_pixels": str((height + _BLOCK) * (width + _BLOCK))}
    alone = {"protocol_whitelist": "file", "format_whitelist": formats}
    with av.open(str(path), "r", options={**most, **alone}) as container:
        stream = container.streams.video[0]
        codec = stream.codec_context
        if codec is None:
            raise FormatError(f"{path}: must be of a codec that FFmpeg knows, got another; it is damaged")
        found = codec.height, codec.width
        if found != (height, width):
            size = f"{found[0]} x {found[1]}" if all(found) else "larger ones"  # FFmpeg makes those 0 x 0
            raise FormatError(f"{path}: must have frames of {shape}, got {size}; it is damaged")
        codec.options = most
        stream.thread_type = "NONE"  # chunks are decoded side by side already
        yield container, stream


def read_video(
    av: Any, path: Path, first: int, n: int, dtype: np.dtype[Any], shape: tuple[int, ...]
) -> Array:
    """Return frames `first` to `first + n`; FormatError if the file does not have them."""
    out = np.empty((n, *shape), dtype)
    wanted, found = pixel_format(dtype, shape), np.zeros(n, bool)
    try:
        with opened_video(av, path, shape, "matroska,webm") as (container, stream):
            if first:
                container.seek(round(first / FPS / stream.time_base), stream=stream, backward=True)
            for frame in container.decode(stream):
                number = round(float(frame.pts * frame.time_base) * FPS) - first
                if 0 <= number < n:
                    out[number] = pixels(frame, wanted, shape, path)
                    found[number] = True
                if number >= n - 1:
                    break
    except FormatError:
        raise
    except (av.error.FFmpegError, IndexError, ValueError, TypeError) as error:
        raise FormatError(f"{path}: must be a video of {dtype}{shape}, got {error}; it is damaged") from None
    if not found.all():
        raise FormatError(
            f"{path}: must have frames {first} to {first + n}, got {np.count_nonzero(found)} of them; it is damaged"
        )
    return out


def pixels(frame: Any, wanted: str, shape: tuple[int, ...], path: Path) -> Array:
    """The pixels of a frame that was decoded; FormatError if it has another shape."""
    if (frame.height, frame.width) != shape[:2]:
        raise FormatError(
            f"{path}: must have frames of {shape}, got {frame.height} x {frame.width}; it is damaged"
        )
    found: Array = frame.to_ndarray(format=wanted)
    return found.reshape(shape)
