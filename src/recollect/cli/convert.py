"""`recollect convert`: a dump or data set into another form."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from recollect.cli import with_flags
from recollect.cli.terminal import bar
from recollect.text import printable


@dataclass
class Convert:
    """Copy any dump or data set into any storage, or into a LeRobot v3.0 data set; episodes stay episodes.

    The copy grows beside its place, in DST.partial, and is renamed when it is whole. Killed, even with SIGKILL, the
    same command goes on where it was.

    Example: recollect convert lerobot/pusht runs/pusht --to parquet
    """

    src: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="SRC")]
    """A dump of Recollect or UniEnv, a data set of LeRobot, Minari or Hugging Face, or the id of one: lerobot/pusht."""
    dst: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="DST")]
    """Where the copy goes; must not exist."""
    to: Literal["memory", "memmap", "hdf5", "parquet", "image", "video", "dict", "lerobot"] = "parquet"
    """A storage by its short name (dict: exact video for pictures, Parquet for the rest), or lerobot."""
    fps: float | None = None
    """Frames a second, for lerobot; a LeRobot source has its own, and another only relabels its frames."""
    task: str | None = None
    """The task of all episodes in words, for lerobot; a LeRobot source has its own."""
    video_codec: str | None = None
    """Write pictures as video of this codec, for lerobot; without one they are exact PNG."""
    chunk: int = 1024
    """Samples copied at a time."""
    split: str | None = None
    """Which split of a Hugging Face data set."""
    json: bool = False
    """Print one JSON object at the end instead of a line."""

    def run(self) -> None:
        """Copy and report."""
        from recollect.datasets.convert import convert
        from recollect.datasets.hub import located
        from recollect.datasets.open import open_dataset

        options: dict[str, Any] = {"chunk_size": self.chunk}
        if self.to == "lerobot":
            options |= {"fps": self.fps, "tasks": self.task, "video_codec": self.video_codec}
        src = located(self.src)
        batch = open_dataset(src, split=self.split)
        with batch:  # type: ignore[attr-defined]
            n, segments = len(batch), batch.get_segments()
            try:
                with _warnings_as_lines(self), bar("copying", n, self.json) as advance:
                    convert(batch, self.dst, self.to, origin=str(src.resolve()), progress=advance, **options)
            except (FileExistsError, ValueError, TypeError) as error:
                sys.exit(f"recollect convert: {error}")
        count = None if segments is None else len(segments)
        report = {"src": str(self.src), "dst": str(self.dst), "to": self.to, "samples": n, "segments": count}
        if self.json:
            sys.stdout.write(json.dumps(report, indent=2) + "\n")
        else:
            told = "" if count is None else f" in {count:,} segments"
            sys.stdout.write(f"{n:,} samples{told} are now in {printable(self.dst)} ({self.to})\n")


@contextmanager
def _warnings_as_lines(command: Convert) -> Iterator[None]:
    """Print what the user should know as a line, without the place in our code."""
    with warnings.catch_warnings():
        warnings.simplefilter("always", UserWarning)
        warnings.showwarning = lambda message, *place, **more: print(
            printable(with_flags(f"recollect convert: {message}", [command])), file=sys.stderr
        )
        yield
