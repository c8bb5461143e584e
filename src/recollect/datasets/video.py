"""Frames of a video by their time, as data sets of robots keep them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from recollect.errors import FormatError

Array = np.ndarray[Any, Any]


def frames_at(path: Path, times: Array, fps: float, shape: tuple[int, ...]) -> Array:
    """Return the frames nearest to ascending `times` (in seconds); FormatError if one is not there.

    Decodes from the keyframe before the first. A frame must lie within half a frame's time of where it should.
    """
    import av

    if not path.is_file():
        raise FormatError(
            f"{path}: must exist, got nothing there; the data set is damaged or not fully downloaded"
        )
    out = np.empty((len(times), *shape), np.uint8)
    try:
        with av.open(str(path), "r") as container:
            stream = container.streams.video[0]
            stream.thread_type = "NONE"  # chunks are decoded side by side already
            half = 0.5 / fps
            container.seek(max(0, int((times[0] - half) / stream.time_base)), stream=stream, backward=True)
            found = 0
            for frame in container.decode(stream):
                if frame.pts is None:
                    continue
                at = float(frame.pts * frame.time_base)
                while found < len(times) and abs(times[found] - at) <= half:
                    out[found] = _pixels(frame, shape, path)
                    found += 1
                if found == len(times) or at > times[-1] + half:
                    break
    except (av.error.FFmpegError, IndexError) as error:
        raise FormatError(f"{path}: must be a video, got {error}; it is damaged") from None
    if found < len(times):
        raise FormatError(
            f"{path}: must have a frame at {times[found]:.3f} s, got none; it is damaged or another rate"
        )
    return out


def _pixels(frame: Any, shape: tuple[int, ...], path: Path) -> Array:
    if (frame.height, frame.width) != shape[:2]:
        raise FormatError(f"{path}: must have frames of {shape}, got {frame.height} x {frame.width}")
    pixels: Array = frame.to_ndarray(format="gray" if shape[2] == 1 else "rgb24")
    return pixels.reshape(shape)
