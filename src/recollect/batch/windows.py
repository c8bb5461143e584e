"""WindowBatch: the sequence that begins at each sample of a batch; what SequenceSampler draws from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium import Space, spaces

from recollect.backends import move
from recollect.batch.base import BatchBase
from recollect.batch.boundaries import Ask, Found, Stream, Wanted, as_labels, counted
from recollect.batch.frames import fold, split_keys
from recollect.batch.location import Bools, Ints, Location
from recollect.batch.structure import Keys, empty_batch, has_no_array, map_leaves, pick, unbatch
from recollect.batch.view import Read, View, as_source
from recollect.errors import EmptyError
from recollect.indexing import is_single
from recollect.spaces import as_numpy, as_space, batch_space, space_at


class WindowBatch(View):
    """For each sample the `length` samples from it on, with `burn_in` before them, as `(B, burn_in + length, ...)`.

    What is not in the sample's segment is zeros, and False in the metadata's `valid_mask`; `segment` and `step` are
    the sample's. Any index may be read; only those at which `length` samples are in one segment (or, with `pad`,
    all of a shorter one) begin a window, and draws and epochs are over these.

    Ownership: owns nothing. Read-only; write to the batch it views.
    Concurrency: as the batch it views; a call sees one moment.
    """

    def __init__(self, batch: BatchBase, length: int, burn_in: int, pad: bool) -> None:
        """View `batch` as windows."""
        self.batch = as_source(batch)
        self.wanted = Wanted(length, pad)
        self.burn_in = burn_in
        self._offsets: Ints = np.arange(-burn_in, length)
        n = len(self._offsets)
        metadata = as_space({"segment": ((), "int64"), "step": ((), "int64"), "valid_mask": ((n,), "bool")})
        super().__init__(batch, batch_space(batch.single_space, n), metadata)

    def draw(self, stream: Stream, n: int, flat: bool, metadata: bool) -> Read:
        """Draw `n` windows, uniform over all there are; EmptyError if there is none."""
        return self._drawn(stream, n, (), flat, metadata)

    def _drawn(self, stream: Stream, n: int, keys: Keys, flat: bool, metadata: bool) -> Read:
        ask = Ask(self._offsets, stream=stream, n=n, wanted=self.wanted, labelled=metadata)
        found = self._frames(ask, keys, flat)
        if found is None:
            raise self._empty()
        return self._dress(found, keys, flat, metadata)

    def _frames(self, ask: Ask, keys: Keys, flat: bool) -> Found | None:
        return self.batch._read_frames(ask, self._within(keys), flat)

    def draw_starts(self, stream: Stream, n: int) -> Location:
        """Draw where `n` windows begin."""
        place = self.batch._boundaries().draw(stream, n, self.wanted)
        if place is None:
            raise self._empty()
        return place

    def _empty(self) -> EmptyError:
        length, held = self.wanted.length, len(self.batch)
        if self.wanted.pad:
            rule = "must hold samples of a segment to draw from"
        else:
            rule = f"must hold {length} samples in a row of one segment"
        return EmptyError(
            f"windows: {rule}, got {held} samples without; append more or ask for a shorter length"
        )

    # Reads

    def _read(self, idx: Any, keys: Keys = (), flat: bool = False, metadata: bool = False) -> Read:
        single = is_single(idx)

        def read(at: Any) -> Found | None:
            return self._frames(Ask(self._offsets, at), keys, flat)

        found = counted(self.batch, idx, lambda index: read([index])) if single else read(idx)
        if found is None:
            raise self._contention()
        data, meta = self._dress(found, keys, flat, metadata)
        if not single:
            return data, meta
        if meta is not None and self.single_metadata_space is not None:
            meta = unbatch(self.single_metadata_space, meta, 0)
        return data[0] if flat else unbatch(space_at(self.single_space, keys), data, 0), meta

    def get_located(
        self, location: Location, keys: Keys = (), flat: bool = False, metadata: bool = False
    ) -> Read | None:
        found = self._frames(Ask(self._offsets, place=location), keys, flat)
        if found is None:
            return None
        if not found[1][:, self.burn_in :].all() and not self.is_current(location).all():
            return None
        return self._dress(found, keys, flat, metadata)

    def _within(self, keys: Keys) -> Keys:
        return split_keys(self.batch.single_space, keys)[0]

    def _dress(self, found: Found, keys: Keys, flat: bool, metadata: bool) -> Read:
        """Blank what is not valid, fold the frames into windows and add the metadata."""
        data, valid, segment, step = found
        read, rest = split_keys(self.batch.single_space, keys)
        space = None if flat else space_at(self.batch.single_space, read)
        if not valid.all():
            data = self._blank(space, data, ~valid.ravel())
        data = pick(fold(space, data, *valid.shape), rest)
        if not metadata:
            return data, None
        return data, as_labels(self, {"segment": segment, "step": step, "valid_mask": valid})

    def _blank(self, space: Space[Any] | None, data: Any, gone: Bools) -> Any:
        def leaf(leaf_space: Space[Any] | None, x: Any) -> Any:
            if leaf_space is not None and has_no_array(leaf_space):
                nothing = _nothing(leaf_space)
                return tuple([nothing if no else item for item, no in zip(x, gone)])
            if self.backend.name in ("numpy", "torch"):  # the read's own copy
                x[move(gone, self.backend, self.device)] = 0
                return x
            array = np.array(as_numpy(x))
            array[gone] = 0
            return move(array, self.backend, self.device)

        return leaf(None, data) if space is None else map_leaves(leaf, space, data)

    # Places

    def _existing(self) -> Any:
        return self._located()[0]

    def _located(self) -> tuple[Sequence[int] | Ints, Location | None]:
        place = self.batch._boundaries().starts(self.wanted)
        order = np.zeros(0, np.int64) if place.index is None else place.index
        return order, place if self._moves and len(order) else None

    def is_current(self, location: Location) -> Bools:
        """Tell at which places a window still begins."""
        index = self.batch.relocate(location)
        there = np.flatnonzero(index >= 0)
        current = np.zeros(len(index), np.bool_)
        if len(there):
            ends = np.array([-1, 0, self.wanted.length - 1])
            frames = self.batch._boundaries().frames_round(location.take(there), ends, 1)
            if frames is not None:
                before, _, last = frames.valid(1).T
                current[there] = last | (self.wanted.pad & ~before)
        return current

    def draw_at(self, stream: Any, n: int) -> Any:
        return self.draw(stream, n, False, False)[0]

    def draw_column_at(self, keys: Keys, stream: Any, n: int) -> Any:
        return self._drawn(stream, n, keys, False, False)[0]

    def _pick(self, stream: Any, size: int, n: int) -> Ints:
        return np.asarray(self.draw_starts(stream, n).index)


def _nothing(space: Space[Any]) -> Any:
    if isinstance(space, spaces.Sequence):
        return empty_batch(space.feature_space) if space.stack else ()
    return ""
