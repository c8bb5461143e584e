"""VideoStorage: a video file per segment, for frames and depth images of episodes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

from recollect.errors import FormatError, SegmentOpenError
from recollect.indexing import normalize
from recollect.spaces import Layout
from recollect.storage.appending import AppendStorage
from recollect.storage.base import Segments
from recollect.storage.chunks import CACHE_NBYTES, ChunkCache, check_sizes, chunk_ends
from recollect.storage.columnar import Array, Keys, from_saved
from recollect.storage.dump import file_crc
from recollect.storage.files import Ints
from recollect.storage.frames import check_codec, read_video, write_video
from recollect.storage.image import check_frames
from recollect.storage.live import FLUSH, SEGMENT, Live

_CHUNK_NBYTES = 4 << 20


@dataclass(slots=True)
class Clip:
    """One file, of whose frames the first `n` count."""

    name: str
    n: int


class VideoStorage(AppendStorage):
    """A file per segment: uint8 frames HxW, HxWx1 or HxWx3, uint16 depth; exact unless a lossy `codec=` is named.

    Frames of the open segment wait in memory, and are there to be read when `mark_segment_end()` has written them.
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
    requires = ("av", "video")
    commits_from = SEGMENT
    is_cut_by_segment = True

    def __init__(self, live: Live, prefix: str, space: Any, *, codec: str = "ffv1",
                 codec_options: dict[str, str] | None = None, cache_nbytes: int = CACHE_NBYTES, cast: bool = False,
                 max_lengths: dict[str, int] | None = None) -> None:  # fmt: skip
        self._av = self.need()
        super().__init__(live, prefix, space, cast=cast, max_lengths=max_lengths)
        self._dtype, self._shape = check_frames(
            self.single_instance_space, type(self).__name__, deep_channel=True
        )
        check_codec(self._av, codec, self._dtype)
        self.codec, self.codec_options = codec, {str(k): str(v) for k, v in (codec_options or {}).items()}
        self.chunk_rows = max(1, min(64, _CHUNK_NBYTES // self.layout.row_nbytes))
        self._clips: list[Clip] = []
        self._ends = self._chunk_ends = np.zeros(0, np.int64)  # of clips, and of the chunks within
        self._checked: set[str] = set()  # clips whose checksum was found right
        self._pending: list[Array] = []
        self._cut: Clip | None = None  # the open segment as far as it was flushed
        self._ending: Clip | None = None  # the open segment, written whole but not yet ended
        self._cache = ChunkCache(self.layout, self.chunk_rows, cache_nbytes, self._load)

    @classmethod
    def under(cls, live: Live, prefix: str, space: Any, capacity: int | None, **options: Any) -> Self:
        return cls(live, prefix, space, **options)

    @classmethod
    def reopen(cls, live: Live, prefix: str, saved: dict[str, Any], space: Any, capacity: int | None,
               length: int, **options: Any) -> Self:  # fmt: skip
        def make(known: dict[str, Any]) -> Any:
            kept = {k: v for k, v in known.items() if k != "contents"}
            storage = cls(live, prefix, space, **{**kept, **options})
            storage._clips = [Clip(str(name), int(n)) for name, n in known["contents"]]
            check_sizes([clip.n for clip in storage._clips], "clips")
            storage._recount()
            return storage

        storage: Self = from_saved(live.home.path, saved, make)
        for clip in storage._clips:
            nbytes = live.home.about(clip.name)["bytes"]
            if clip.n > nbytes:  # every frame takes some
                raise FormatError(
                    f"{live.home.path}: {clip.name}: cannot hold {clip.n} frames in {nbytes} bytes; it is damaged"
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
        return bool(self._pending)

    def _add(self, arrays: list[Array], n: int) -> None:
        self._pending += list(arrays[0].copy())

    def _truncate(self, length: int) -> None:
        seen = self._visible_length()
        del self._pending[max(0, length - seen) :]
        self._forget_cut(length - seen)
        if length >= seen:
            return
        first = int(np.searchsorted(self._ends, length, side="right"))
        start = int(self._ends[first - 1]) if first else 0
        keep = first + (length > start)
        for clip in self._clips[keep:]:
            self.home.drop(clip.name)
        del self._clips[keep:]
        if length > start:
            self._clips[-1].n = length - start
        self._recount()
        self._cache.clear()

    def _forget_cut(self, longest: int) -> None:
        if self._cut is not None and self._cut.n > longest:
            self.home.drop(self._cut.name)
            self._cut = None

    def _recount(self) -> None:
        self._ends = np.cumsum(np.array([clip.n for clip in self._clips], np.int64))
        self._chunk_ends = chunk_ends(self._ends, self.chunk_rows, str(self.home.path))

    def _write_clip(self) -> Clip:
        name = self.home.new_name(f"{self.prefix}segment-", ".mkv")
        with self.home.writing(name) as path:
            try:
                write_video(self._av, path, self._pending, self.codec, self.codec_options, self.chunk_rows)
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
        if self._pending and self._ending is None:
            self._ending = self._write_clip()

    def cancel_segment_end(self) -> None:
        """Take back what `prepare_segment_end` wrote."""
        if self._ending is not None:
            self.home.drop(self._ending.name)
            self._ending = None

    def finish_segment_end(self) -> None:
        """End the open segment, whose file is written."""
        if self._ending is not None:
            self._forget_cut(-1)
            self._clips.append(self._ending)
            self._pending, self._ending = [], None
            self._recount()

    def mark_segment_start(self, row: int) -> None:
        if row != self._written():
            raise ValueError(
                f"mark_segment_start: must be row {self._written()}, where the next sample goes, got {row}"
            )
        self.mark_segment_end()

    def mark_segment_end(self) -> None:
        with self._live.lock:
            self.prepare_segment_end()
            ended = self._ending is not None
            self.finish_segment_end()
            if ended:
                self._live.due(SEGMENT)

    def abort_segment(self) -> None:
        with self._live.lock:
            self._check_mutable("abort_segment")
            self._truncate(self._visible_length())

    def get_segments(self) -> Segments | None:
        ends = self._ends.tolist()
        return list(zip([0, *ends], ends))

    def write_out(self, urgency: int) -> None:
        """Save an open segment too, as far as it goes, when everything is to be saved."""
        if urgency < FLUSH or not self._pending or (self._cut and self._cut.n == len(self._pending)):
            return
        clip = self._write_clip()
        self._forget_cut(-1)
        self._cut = clip

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
        with self.home.open_file(name) as f:
            if name not in self._checked and file_crc(f) != self.home.about(name)["crc32c"]:
                raise FormatError(f"{self.home.path}: {name}: its checksum does not match; it is damaged")
        self._checked.add(name)
        return self.home.path / self.home.base / name

    def chunk_ends(self) -> Any:
        return self._chunk_ends

    def chunk_window(self) -> int:
        return max(1, min(64, self._cache.n_slots // 2))

    def checks_reads(self) -> bool:
        return True

    def expect(self, rows: Any, nested_keys: Any = ()) -> None:
        with self._live.lock:
            if not (self._closed or self.is_mutable):  # who writes may drop what a thread reads
                self._cache.expect(self._chunk_ends, rows)

    def _release(self) -> None:
        self._cache.close()
        self._pending = []
