"""Frames of a video by their time, as data sets of robots keep them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from recollect.errors import FormatError
from recollect.storage.frames import opened_video, pixel_format, pixels

Array = np.ndarray[Any, Any]
_FORMATS = "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi"


def frames_at(path: Path, times: Array, fps: float, shape: tuple[int, ...], dtype: Any = np.uint8) -> Array:
    """Return the frames nearest to ascending `times` (in seconds); FormatError if one is not there.

    Decodes from the keyframe before the first. A frame must lie within half a frame's time of where it should.
    """
    import av

    if not path.is_file():
        raise FormatError(
            f"{path}: must exist, got nothing there; the data set is damaged or not fully downloaded"
        )
    out, wanted = np.empty((len(times), *shape), dtype), pixel_format(np.dtype(dtype), shape)
    try:
        with opened_video(av, path, shape, _FORMATS) as (container, stream):
            half = 0.5 / fps
            container.seek(max(0, int((times[0] - half) / stream.time_base)), stream=stream, backward=True)
            found = 0
            for frame in container.decode(stream):
                if frame.pts is None:
                    continue
                at = float(frame.pts * frame.time_base)
                while found < len(times) and abs(times[found] - at) <= half:
                    out[found] = pixels(frame, wanted, shape, path)
                    found += 1
                if found == len(times) or at > times[-1] + half:
                    break
    except FormatError:
        raise
    except (av.error.FFmpegError, ArithmeticError, IndexError, TypeError, ValueError) as error:
        raise FormatError(f"{path}: must be a video, got {error}; it is damaged") from None
    if found < len(times):
        raise FormatError(
            f"{path}: must have a frame at {times[found]:.3f} s, got none; it is damaged or another rate"
        )
    return out
