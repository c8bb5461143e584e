"""ForwardingStorage: what a storage over another passes on as it is: lengths, segments, chunks, files, life."""

from __future__ import annotations

from typing import Any

from recollect.storage.contract import Segments, SpaceStorage


class ForwardingStorage(SpaceStorage):
    """A storage over `inner`; a subclass says what happens to the values.

    Ownership: owns `inner`, and closes it.
    Concurrency: as `inner`.
    """

    inner: SpaceStorage

    def _forward_to(self, inner: SpaceStorage) -> None:
        """Take over what `inner` is."""
        self.inner = inner
        self.capacity, self.cache_filename = inner.capacity, inner.cache_filename
        self.is_mutable, self.is_multiprocessing_safe = inner.is_mutable, inner.is_multiprocessing_safe
        self.is_append_only, self.is_cut_by_segment = inner.is_append_only, inner.is_cut_by_segment
        self.commits_from, self.cast = inner.commits_from, inner.cast

    def __len__(self) -> int:
        return len(self.inner)

    def extend_length(self, length: int) -> None:
        self.inner.extend_length(length)

    def shrink_length(self, length: int) -> None:
        self.inner.shrink_length(length)

    def cut_to(self, length: int) -> None:
        self.inner.cut_to(length)

    def clear(self) -> None:
        self.inner.clear()

    # -- segments

    def mark_segment_start(self, row: int) -> None:
        self.inner.mark_segment_start(row)

    def mark_segment_end(self) -> None:
        self.inner.mark_segment_end()

    def prepare_segment_end(self) -> None:
        self.inner.prepare_segment_end()

    def cancel_segment_end(self) -> None:
        self.inner.cancel_segment_end()

    def finish_segment_end(self) -> None:
        self.inner.finish_segment_end()

    def abort_segment(self) -> None:
        self.inner.abort_segment()

    @property
    def has_open_segment(self) -> bool:
        return self.inner.has_open_segment

    @property
    def pending_segment_length(self) -> int:
        return self.inner.pending_segment_length

    def get_segments(self) -> Segments | None:
        return self.inner.get_segments()

    # -- chunks

    def chunk_ends(self) -> Any:
        return self.inner.chunk_ends()

    def chunk_window(self) -> int:
        return self.inner.chunk_window()

    def expect(self, rows: Any, nested_keys: Any = ()) -> None:
        self.inner.expect(rows)  # the keys may be others inside

    # -- files

    def stored_length(self) -> int:
        return self.inner.stored_length()

    def write_out(self, urgency: int) -> None:
        self.inner.write_out(urgency)

    def checks_reads(self) -> bool:
        return self.inner.checks_reads()

    def more_files(self) -> dict[str, dict[str, Any]]:
        return self.inner.more_files()

    def settle(self) -> None:
        self.inner.settle()

    def flush(self) -> None:
        self.inner.flush()

    def close(self) -> None:
        self.inner.close()
