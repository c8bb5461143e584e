"""View: what every batch over another batch has in common.

One layer more than contract → implementation, so that each view says only how it differs: where its indices
are in the source, what happens to the data on its way out, and which writes it passes on.
"""

from __future__ import annotations

from typing import Any

from recollect.backends import Backend
from recollect.batch.base import BatchBase, Draws
from recollect.batch.boundaries import Boundaries
from recollect.batch.location import Bools, Ints, Location, Segments
from recollect.batch.structure import Keys, fill
from recollect.errors import class_name

Read = tuple[Any, "dict[str, Any] | None"]


class ReadsOnce(BatchBase):
    """A batch whose reads are all one `_read`, which a subclass gives."""

    def get_at(self, idx: Any, *, out: Any = None) -> Any:
        """Fetch samples in their structured form, into `out` if it is given."""
        data = self._read(idx)[0]
        return data if out is None else fill(out, data)

    def get_flattened_at(self, idx: Any) -> Any:
        return self._read(idx, flat=True)[0]

    def get_at_with_metadata(self, idx: Any) -> Read:
        return self._read(idx, metadata=True)

    def get_flattened_at_with_metadata(self, idx: Any) -> Read:
        return self._read(idx, flat=True, metadata=True)

    def get_column_at(self, keys: Keys, idx: Any) -> Any:
        return self._read(idx, keys)[0]


class View(ReadsOnce):
    """A lazy, live, read-only window on `batch` with the same indices; subclasses change what differs.

    Ownership: owns nothing; never closes what it views.
    Concurrency: as the batch it views.
    """

    batch: BatchBase

    def __init__(self, batch: BatchBase, *spaces: Any) -> None:
        """View `batch`; `spaces` are those of a sample and of its metadata, if they are not the source's."""
        self.batch = as_source(batch)
        super().__init__(*(spaces or (batch.single_space, batch.single_metadata_space)))

    # What a subclass changes

    def _outward(self, found: Read, keys: Keys, flat: bool) -> Read:
        """Turn what the source returned into what the caller gets."""
        return found

    # What it is

    def __len__(self) -> int:
        return len(self.batch)

    @property
    def backend(self) -> Backend:
        return self.batch.backend

    @property
    def device(self) -> Any:
        return self.batch.device

    @property
    def is_mutable(self) -> bool:
        return False

    def get_segments(self) -> Segments | None:
        return self.batch.get_segments()

    def _sources(self) -> tuple[BatchBase, ...]:
        return (self.batch,)

    # Reads

    def _read(self, idx: Any, keys: Keys = (), flat: bool = False, metadata: bool = False) -> Read:
        return self._outward(self.batch._read(idx, keys, flat, metadata), keys, flat)

    def get_located(
        self, location: Location, keys: Keys = (), flat: bool = False, metadata: bool = False
    ) -> Read | None:
        found = self.batch.get_located(location, keys, flat, metadata)
        return None if found is None else self._outward(found, keys, flat)

    def draw_at(self, stream: Draws, n: int) -> Any:
        return self._outward((self.batch.draw_at(stream, n), None), (), False)[0]

    def draw_column_at(self, keys: Keys, stream: Draws, n: int) -> Any:
        return self._outward((self.batch.draw_column_at(keys, stream, n), None), keys, False)[0]

    def _pick(self, stream: Draws, size: int, n: int) -> Ints:
        same = type(self).__len__ is View.__len__  # and so the same indices
        return self.batch._pick(stream, size, n) if same else super()._pick(stream, size, n)

    # Places

    @property
    def _moves(self) -> bool:
        return self.batch._moves

    def _existing(self) -> Any:
        return self.batch._existing()

    def _boundaries(self) -> Boundaries:
        return self.batch._boundaries()

    def _chunks(self) -> Any:
        return self.batch._chunks()

    def _expect(self, idx: Ints, keys: Keys = ()) -> None:
        self.batch._expect(idx)

    def locate(self, idx: Any) -> Location:
        return self.batch.locate(idx)

    def is_current(self, location: Location) -> Bools:
        return self.batch.is_current(location)

    def relocate(self, location: Location) -> Ints:
        return self.batch.relocate(location)


def as_source(batch: Any) -> BatchBase:
    """Return `batch`, or raise TypeError if it is none."""
    if not isinstance(batch, BatchBase):
        raise TypeError(f"batch: must be a BatchBase, got {class_name(batch)}; put it into a ReplayBuffer")
    return batch
