"""One camera's video of a LeRobot data set: many episodes one after another in a file."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from recollect.storage.filed.video_file import check_codec

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
