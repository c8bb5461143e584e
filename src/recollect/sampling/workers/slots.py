"""How a batch lies in a slot of a ring: one block per field of its packed row, data first, then metadata.

Text and Sequence leaves have fields of their greatest size, so every batch of up to `most` samples fits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from gymnasium import Space

from recollect import _core
from recollect.backends import move
from recollect.batch.base import BatchBase
from recollect.memory.ring import Ring, Views
from recollect.memory.rows import codec_of
from recollect.spaces import Layout, compile_layout
from recollect.spaces.tree import path_name, sequence_paths

Array = np.ndarray[Any, Any]

# What a slot holds; the first of its info words is the run it belongs to, then this, the rows (or bytes), the number.
DATA, ERROR, EMPTY, GONE = 0, 1, 2, 3
TEXT_NBYTES = 8192  # at least: of a worker's traceback


class SlotPart:
    """Data or metadata of a batch: its layout, and its fields under names of its own in the slot."""

    def __init__(self, space: Space[Any], prefix: str, most: int, lengths: Mapping[str, int]) -> None:
        self.layout: Layout = compile_layout(space, lengths)
        self.most = most
        self.names = [f"{prefix}{i}" for i in range(len(self.layout.fields))]

    def blocks_space(self) -> dict[str, Any]:
        """The short form of the blocks in one slot."""
        pairs = zip(self.names, self.layout.fields)
        return {name: ((self.most, *f.shape), f.dtype) for name, f in pairs}

    def blocks(self, ring: Ring) -> _core.Blocks:
        """What copies a batch out of a slot of `ring`."""
        at = {f.name: f.offset for f in ring.layout.fields}
        offsets = [at[name] for name in self.names]
        return _core.Blocks(codec_of(self.layout), offsets, self.most, ring.slot_nbytes)

    def nested(self, views: Views) -> Any:
        """Full blocks as a batch of the space, to be filled in place; None if its sizes vary."""
        if not self.layout.is_fixed:
            return None
        return self.layout.decode_batch([views[name] for name in self.names], self.most)

    def write(self, batch: Any, views: Views) -> int:
        """Check a batch (of any backend), copy it into the blocks, and return how many samples it has."""
        n, arrays = self.layout.encode_batch(move(batch, "numpy"))
        if n > self.most:
            raise ValueError(f"batch: must have at most {self.most} samples, got {n}; raise batch_size")
        for name, array in zip(self.names, arrays):
            views[name][:n] = array
        return n

    def read(self, found: Any, n: int) -> Any:
        """What `blocks` copied, as a batch of the space."""
        return found if self.layout.is_fixed else self.layout.decode_batch(found, n)


class Format:
    """The slots of one sampler: where data and metadata of its batches lie."""

    def __init__(self, sampler: Any, max_lengths: Mapping[str, int] | None) -> None:
        most = sampler.batch_size
        self.data = SlotPart(
            sampler.single_space, "d", most, _lengths(sampler, sampler.single_space, max_lengths)
        )
        self.metadata: SlotPart | None = None
        if sampler.single_metadata_space is not None:
            space = sampler.single_metadata_space
            self.metadata = SlotPart(space, "m", most, _lengths(sampler, space, max_lengths))

    def make_ring(self, num_slots: int, num_lanes: int) -> Ring:
        """A ring of slots for such batches, one lane for each worker."""
        slot = self.data.blocks_space()
        if self.metadata is not None:
            slot |= self.metadata.blocks_space()
        return Ring.create(
            slot, num_slots, num_lanes, least_nbytes=TEXT_NBYTES, wake_free=max(2, num_slots // 2)
        )


def _lengths(sampler: BatchBase, space: Space[Any], given: Mapping[str, int] | None) -> dict[str, int]:
    """The greatest length of each Sequence: as given, else as a storage below says for a leaf of that name."""
    names = [path_name(path) for path in sequence_paths(space)]
    known = dict(given or {})
    for storage_lengths in _stored_lengths(sampler):
        for name in names:
            if name in storage_lengths:
                known.setdefault(name, storage_lengths[name])
    return {name: known[name] for name in names if name in known}


def _stored_lengths(batch: BatchBase) -> Iterator[Mapping[str, int]]:
    layout = getattr(getattr(batch, "inner_storage", None), "layout", None)
    if isinstance(layout, Layout):
        yield layout.max_lengths
    for source in batch._sources():
        yield from _stored_lengths(source)
