"""VideoStorage: a video file per segment, for frames and depth images of episodes."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

from recollect import _core
from recollect.errors import FormatError, SegmentOpenError
from recollect.files import file_crc, write_at
from recollect.indexing import normalize
from recollect.spaces import Layout
from recollect.storage.contract import Segments
from recollect.storage.filed.base import AppendStorage, Array, Ints, Keys, from_saved
from recollect.storage.filed.chunks import CACHE_NBYTES, ChunkCache, check_sizes, chunk_ends
from recollect.storage.filed.commits import FLUSH, SEGMENT, Commits, StorageDirectory
from recollect.storage.filed.image import check_frames
from recollect.storage.filed.video_file import check_codec, read_video, write_video

_CHUNK_NBYTES = 4 << 20
_OPEN_NBYTES = 4 << 20  # frames of an open segment that wait in memory


@dataclass(frozen=True, slots=True)
class Clip:
    """One file, of whose frames the first `n` count."""

    name: str
    n: int


class OpenFrames:
    """The frames of an open segment: the newest few in memory, those before them in a file without a name.

    A frame that is not committed may be taken back, and an encoder cannot; so they wait as they came.

    Ownership: of the file, which is gone with `close()`, or with the process.
    Concurrency: the storage's lock is held in every call.
    """

    def __init__(
        self, directory: StorageDirectory, name: str, dtype: np.dtype[Any], shape: tuple[int, ...]
    ) -> None:
        self._fd, self._n_filed = -1, 0
        self._newest: list[Array] = []
        self._home, self._name, self._dtype, self._shape = directory, name, dtype, shape
        self._frame_nbytes = int(np.prod(shape)) * dtype.itemsize
        self._most = max(1, _OPEN_NBYTES // max(self._frame_nbytes, 1))  # frames in memory

    def __len__(self) -> int:
        return self._n_filed + len(self._newest)

    def __iter__(self) -> Iterator[Array]:
        for k in range(self._n_filed):
            yield self._read(k)
        yield from self._newest

    def add(self, frames: Array) -> None:
        """Add frames [n, ...]; if it raises, `cut` takes back those that were added."""
        for start in range(0, len(frames), self._most):
            self._newest += list(frames[start : start + self._most].copy())
            if len(self._newest) >= self._most:
                self._file_newest()

    def cut(self, n: int) -> None:
        """Keep the first n frames at most."""
        del self._newest[max(0, n - self._n_filed) :]
        self._n_filed = min(self._n_filed, n)
        if not len(self):
            self.close()

    def close(self) -> None:
        """Give up the file; may be called twice."""
        fd, self._fd = self._fd, -1
        self._n_filed, self._newest = 0, []
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        self.close()

    def _file_newest(self) -> None:
        if self._fd < 0:
            self._fd = self._home.make_scratch(self._home.new_name(self._name, ".raw"))
        for k, frame in enumerate(self._newest, self._n_filed):
            _core.fault_point()
            write_at(self._fd, frame.data.cast("B"), k * self._frame_nbytes)
        self._n_filed, self._newest = self._n_filed + len(self._newest), []

    def _read(self, k: int) -> Array:
        frame = np.empty(self._shape, self._dtype)
        view, at = frame.data.cast("B"), k * self._frame_nbytes
        while view:
            done = os.preadv(self._fd, [view], at)
            if not done:
                raise OSError(errno.EIO, f"{self._home.path}: lost frames of the open segment")
            view, at = view[done:], at + done
        return frame


class VideoStorage(AppendStorage):
    """A file per segment: uint8 frames HxW, HxWx1 or HxWx3, uint16 depth; exact unless a lossy `codec=` is named.

    Frames of the open segment wait in memory and, past 4 MiB, in a file without a name in the same directory. They are
    there to be read when `mark_segment_end()` has written them.
    Frames are decoded a few at a time from the keyframe before them, and the last `cache_nbytes` are kept.

    Ownership: the files stay; `close()` ends the open segment and commits.
    Concurrency: one writer; readers, in any process, see the last commit when they load.

    >>> import numpy as np, recollect as rc, tempfile
    >>> path = tempfile.mkdtemp() + "/frames"
    >>> with rc.ReplayBuffer.create("video", ((8, 8, 3), "uint8"), cache_path=path) as buf:
    ...     buf.extend(np.arange(5 * 192, dtype="uint16").astype("uint8").reshape(5, 8, 8, 3))
    >>> rc.ReplayBuffer.load_from(path).get_segments()
    [(0, 5)]
    """

    load_options = ("cache_nbytes",)
    short_name = "video"
    create_options = ("codec", "codec_options", "cache_nbytes")
    requires = ("av", "video")
    commits_from = SEGMENT
    is_cut_by_segment = True

    def __init__(self, commits: Commits, prefix: str, space: Any, *, codec: str = "ffv1",
                 codec_options: dict[str, str] | None = None, cache_nbytes: int = CACHE_NBYTES, cast: bool = False,
                 max_lengths: dict[str, int] | None = None) -> None:  # fmt: skip
        self._av = self.need()
        super().__init__(commits, prefix, space, cast=cast, max_lengths=max_lengths)
        self._dtype, self._shape = check_frames(
            self.single_instance_space, type(self).__name__, deep_channel=True
        )
        check_codec(self._av, codec, self._dtype)
        self.codec, self.codec_options = codec, {str(k): str(v) for k, v in (codec_options or {}).items()}
        self.chunk_rows = max(1, min(64, _CHUNK_NBYTES // self.layout.row_nbytes))
        self._clips: list[Clip] = []
        self._ends, self._chunk_ends = self._counted([])  # of clips, and of the chunks within
        self._checked: set[str] = set()  # clips whose checksum was found right
        self._pending = self._no_frames()
        self._cut: Clip | None = None  # the open segment as far as it was flushed
        self._ending: Clip | None = None  # the open segment, written whole but not yet ended
        self._cache = ChunkCache(self.layout, self.chunk_rows, cache_nbytes, self._load)

    @classmethod
    def under(cls, commits: Commits, prefix: str, space: Any, capacity: int | None, **options: Any) -> Self:
        return cls(commits, prefix, space, **options)

    @classmethod
    def reopen(cls, commits: Commits, prefix: str, saved: dict[str, Any], space: Any, capacity: int | None,
               length: int, **options: Any) -> Self:  # fmt: skip
        def make(known: dict[str, Any]) -> Any:
            kept = {k: v for k, v in known.items() if k != "contents"}
            storage = cls(commits, prefix, space, **{**kept, **options})
            storage._clips = [Clip(str(name), int(n)) for name, n in known["contents"]]
            check_sizes([clip.n for clip in storage._clips], "clips")
            storage._ends, storage._chunk_ends = storage._counted(storage._clips)
            return storage

        storage: Self = from_saved(commits.directory.path, saved, make)
        for clip in storage._clips:
            nbytes = commits.directory.about(clip.name)["bytes"]
            if clip.n > nbytes:  # every frame takes some
                raise FormatError(
                    f"{commits.directory.path}: {clip.name}: cannot hold {clip.n} frames in {nbytes} bytes; "
                    "it is damaged"
                )
        storage._truncate(length)
        return storage

    def options(self) -> dict[str, Any]:
        return {**super().options(), "codec": self.codec, "codec_options": self.codec_options}

    def contents(self) -> Any:
        return [[clip.name, clip.n] for clip in (*self._clips, *([self._cut] if self._cut else []))]

    # -- frames in

    def _written(self) -> int:
        return self._visible_length() + len(self._pending)

    def _visible_length(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def stored_length(self) -> int:
        return self._visible_length() + (self._cut.n if self._cut else 0)

    @property
    def pending_segment_length(self) -> int:
        return len(self._pending)

    @property
    def has_open_segment(self) -> bool:
        return len(self._pending) > 0

    def _add(self, arrays: list[Array], n: int) -> None:
        self._pending.add(arrays[0])

    def _no_frames(self) -> OpenFrames:
        return OpenFrames(self.directory, f"{self.prefix}open-", self._dtype, self._shape)

    def _truncate(self, length: int) -> None:
        seen = self._visible_length()
        self._pending.cut(max(0, length - seen))
        self._forget_cut(length - seen)
        if length >= seen:
            return
        first = int(np.searchsorted(self._ends, length, side="right"))
        start = int(self._ends[first - 1]) if first else 0
        kept = self._clips[:first]
        if length > start:
            kept.append(Clip(self._clips[first].name, length - start))
        gone = self._clips[len(kept) :]
        ends, chunk_ends = self._counted(kept)
        self._cache.clear()
        self._clips, self._ends, self._chunk_ends = kept, ends, chunk_ends
        for clip in gone:
            self.directory.drop(clip.name)

    def _forget_cut(self, longest: int) -> None:
        cut = self._cut
        if cut is not None and cut.n > longest:
            self._cut = None
            self.directory.drop(cut.name)

    def _counted(self, clips: list[Clip]) -> tuple[Ints, Ints]:
        """Where clips end, and the chunks within."""
        ends = np.cumsum(np.array([clip.n for clip in clips], np.int64))
        return ends, chunk_ends(ends, self.chunk_rows, str(self.directory.path))

    def _write_clip(self) -> Clip:
        name = self.directory.new_name(f"{self.prefix}segment-", ".mkv")
        with self.directory.writing(name) as path:
            try:
                write_video(
                    self._av, path, self._pending, self._dtype, self._shape,
                    self.codec, self.codec_options, self.chunk_rows,
                )  # fmt: skip
            except self._av.error.FFmpegError as error:
                if isinstance(error, OSError):
                    raise OSError(error.errno, f"{path}: {error.strerror}") from error
                raise ValueError(
                    f"codec: {self.codec!r} cannot write these frames ({error}); choose another"
                ) from error
        return Clip(name, len(self._pending))

    # -- segments: first the file, which may fail, then the change, which may not

    def prepare_segment_end(self) -> None:
        """Write the file of the open segment."""
        self._check_mutable("mark_segment_end")
        if self._ending is not None and self._ending.n != len(self._pending):
            self.cancel_segment_end()  # an interrupt left it, and more frames have come
        if len(self._pending) and self._ending is None:
            self._ending = self._write_clip()

    def cancel_segment_end(self) -> None:
        """Take back what `prepare_segment_end` wrote."""
        if self._ending is not None:
            self.directory.drop(self._ending.name)
            self._ending = None

    def finish_segment_end(self) -> None:
        """End the open segment, whose file is written."""
        ending = self._ending
        if ending is not None:
            self._forget_cut(-1)
            clips, none = [*self._clips, ending], self._no_frames()
            ends, chunk_ends = self._counted(clips)
            written = self._pending
            self._clips, self._ends, self._chunk_ends, self._pending, self._ending = (
                clips,
                ends,
                chunk_ends,
                none,
                None,
            )
            written.close()

    def mark_segment_start(self, row: int) -> None:
        if row != self._written():
            raise ValueError(
                f"mark_segment_start: must be row {self._written()}, where the next sample goes, got {row}"
            )
        self.mark_segment_end()

    def mark_segment_end(self) -> None:
        with self._commits.lock:
            self.prepare_segment_end()
            ended = self._ending is not None
            self.finish_segment_end()
            if ended:
                self._commits.due(SEGMENT)

    def abort_segment(self) -> None:
        with self._commits.lock:
            self._check_mutable("abort_segment")
            self._truncate(self._visible_length())

    def get_segments(self) -> Segments | None:
        ends = self._ends.tolist()
        return list(zip([0, *ends], ends))

    def write_out(self, urgency: int) -> None:
        """Save an open segment too, as far as it goes, when everything is to be saved."""
        if urgency < FLUSH or not len(self._pending) or (self._cut and self._cut.n == len(self._pending)):
            return
        clip = self._write_clip()
        old, self._cut = self._cut, clip
        if old is not None:
            self.directory.drop(old.name)

    # -- frames out

    def _visible(self, index: Any) -> int | Ints:
        try:
            return normalize(index, self._visible_length())
        except IndexError:
            normalize(index, self._written())
            raise SegmentOpenError(
                f"VideoStorage: rows from {self._visible_length()} on are of an open segment, got {index!r}; "
                "call mark_segment_end() first"
            ) from None

    def _read(self, rows: Ints, keys: Keys) -> tuple[Layout, list[Array]]:
        return self._cache.gather(self._chunk_ends, rows)

    def _load(self, number: int) -> tuple[Layout, list[Array]]:
        ends = self._chunk_ends
        first, end = int(ends[number - 1]) if number else 0, int(ends[number])
        k = int(np.searchsorted(self._ends, first, side="right"))
        start = int(self._ends[k - 1]) if k else 0
        path = self._checked_path(self._clips[k].name)
        return self.layout, [read_video(self._av, path, first - start, end - first, self._dtype, self._shape)]

    def _checked_path(self, name: str) -> Path:
        """The file of a clip; its checksum is checked once, since a decoder makes a picture of anything."""
        with self.directory.open_file(name) as f:
            if name not in self._checked and file_crc(f) != self.directory.about(name)["crc32c"]:
                raise FormatError(
                    f"{self.directory.path}: {name}: its checksum does not match; it is damaged"
                )
        self._checked.add(name)
        return self.directory.path / self.directory.base / name

    def chunk_ends(self) -> Any:
        return self._chunk_ends

    def chunk_window(self) -> int:
        return max(1, min(64, self._cache.n_slots // 2))

    def checks_reads(self) -> bool:
        return True

    def expect(self, rows: Any, nested_keys: Any = ()) -> None:
        with self._commits.lock:
            if not (self._closed or self.is_mutable):  # who writes may drop what a thread reads
                self._cache.expect(self._chunk_ends, rows)

    def _release(self) -> None:
        self._cache.close()
        self._pending.close()
