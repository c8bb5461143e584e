"""One camera's video of a LeRobot data set: many episodes one after another in a file."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from recollect.errors import FormatError
from recollect.storage.filed.video_file import check_codec, opened_video, pixel_format, pixels

Array = np.ndarray[Any, Any]


class CameraFile:
    """Encodes frames into one MP4, a keyframe every second one, as LeRobot does, so that any frame is near.

    Ownership: the file is whole once `close()` has returned. Concurrency: one thread.
    """

    def __init__(
        self, path: Path, fps: float, shape: tuple[int, ...], codec: str, options: dict[str, str]
    ) -> None:
        import av

        check_codec(av, codec, np.dtype(np.uint8))
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path, self.n_frames, self._av = path, 0, av
        self._given = "gray" if shape[2] == 1 else "rgb24"
        self._rate = Fraction(fps).limit_denominator(1001)
        self._container = av.open(str(path), "w", format="mp4")
        self._stream = self._container.add_stream(codec, rate=self._rate, options=options)
        self._stream.width, self._stream.height = shape[1], shape[0]
        even = shape[0] % 2 == 0 and shape[1] % 2 == 0
        self._stream.pix_fmt = "yuv420p" if even else "yuv444p"  # half the colour resolution needs even sides
        self._stream.codec_context.gop_size = 2
        self._stream.codec_context.max_b_frames = 0

    def add(self, frames: Array) -> None:
        """Encode frames `[n, H, W, C]` after those there are."""
        for frame in frames:
            plane = frame[..., 0] if frame.shape[2] == 1 else frame
            image = self._av.VideoFrame.from_ndarray(np.ascontiguousarray(plane), format=self._given)
            image.pts, image.time_base = self.n_frames, 1 / self._rate
            self._container.mux(self._stream.encode(image.reformat(format=self._stream.pix_fmt)))
            self.n_frames += 1

    @property
    def nbytes(self) -> int:
        """How much is on disk by now."""
        return self.path.stat().st_size if self.path.exists() else 0

    def about(self) -> dict[str, Any]:
        """What `info.json` says of the video."""
        return {
            "video.height": self._stream.height, "video.width": self._stream.width,
            "video.codec": self._stream.codec_context.codec.canonical_name, "video.pix_fmt": self._stream.pix_fmt,
            "video.is_depth_map": False, "video.fps": float(self._rate),
            "video.channels": 1 if self._given == "gray" else 3, "has_audio": False,
        }  # fmt: skip

    def close(self) -> None:
        """Write what the encoder holds back and finish the file."""
        if self._container is not None:
            if self.n_frames:
                self._container.mux(self._stream.encode(None))
            self._container.close()
            self._container = None


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
