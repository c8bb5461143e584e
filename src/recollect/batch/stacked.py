"""SliceStackedBatch and FrameStackedBatch: each sample together with its neighbours in time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium import Space, spaces

from recollect import checks
from recollect.backends import move
from recollect.batch.base import BatchBase, Draws
from recollect.batch.boundaries import Ask, Boundaries, Frames, Lapped, again_and_again, as_labels, counted
from recollect.batch.frames import fold, frame, no_end_between, same_id, show, split_keys, stand_ins
from recollect.batch.location import Bools, Ints, Location
from recollect.batch.structure import Key, Keys, pick, select, unbatch
from recollect.batch.view import Read, View, as_source
from recollect.indexing import is_single, positions
from recollect.spaces import as_numpy, as_space, batch_space, space_at
from recollect.spaces.tree import as_keys, make_dict, path_name

MASK = "slice_valid_mask"
MaskFunction = Callable[["SliceStackedBatch", Any, Any, dict[str, Any]], Any]
Reader = Callable[[Ints, Keys, bool], Read]


class SliceStackedBatch(View):
    """Each sample of `batch` with those at `fixed_offset` from it, as `(B, T, ...)`; offset 0 is the anchor.

    A frame is valid when it is inside the batch, in the anchor's segment (if segments are known), and
    `get_valid_mask_function(self, expanded_idx, data, metadata)` says so; the anchor always is. The function gets
    positions as `expand_index` gives them. Metadata has the `slice_valid_mask`. With `fill_invalid_data` an invalid
    frame shows the nearest valid one on the anchor's side; without, foreign frames stay as read, and the edge row
    stands in outside the batch. `stack_metadata` stacks the source's metadata too (a filled frame brings its own
    along); else it is the anchor's. A stack of Text is a tuple of T, batched as gymnasium batches a tuple.

    Offsets may also be given per key, `{"action": range(50), "obs": [-1, 0]}`, nested as the space is, in any order
    and with or without 0. Then `action` is `(B, 50, ...)`, its mask arrives beside it as `action_valid_mask`, a field
    that is not named is the anchor's alone, `(B, ...)`, and no field is read where it is not shown. `fixed_offset` is
    all offsets from the first to the last, so that an episode's edge repeats also where offsets leave a gap.

    Ownership: owns nothing. Read-only; write to the batch it views.
    Concurrency: as the batch it views; a call sees one moment, mask and frames alike.

    Example:
        >>> import numpy as np, recollect as rc
        >>> buf = rc.ReplayBuffer.create(
        ...     rc.MemoryStorage, ((), "int64"), capacity=8, maintain_segment_metadata=True)
        >>> buf.extend(np.arange(3)); buf.extend(np.arange(10, 13))
        >>> data, meta = rc.SliceStackedBatch(buf, [-2, 0, 1]).get_at_with_metadata([2, 4])
        >>> data.tolist(), meta["slice_valid_mask"].tolist()
        ([[0, 2, 2], [11, 11, 12]], [[True, True, False], [False, True, True]])

        >>> buf = rc.ReplayBuffer.create(
        ...     rc.MemoryStorage, {"obs": ((), "int64"), "action": ((), "int64")}, capacity=8,
        ...     maintain_segment_metadata=True)
        >>> buf.extend({"obs": np.arange(3), "action": np.arange(10, 13)})
        >>> chunk = rc.SliceStackedBatch(buf, {"action": range(3)})[1]
        >>> chunk["obs"].tolist(), chunk["action"].tolist(), chunk["action_valid_mask"].tolist()
        (1, [11, 12, 12], [True, True, False])
    """

    def __init__(
        self,
        batch: BatchBase,
        fixed_offset: Any,
        get_valid_mask_function: MaskFunction | None = None,
        fill_invalid_data: bool = True,
        stack_metadata: bool = False,
    ) -> None:
        """Stack the samples of `batch` at strictly increasing offsets, 0 among them, or each key at its own."""
        self.batch = as_source(batch)
        self._fields: Fields | None = None
        if isinstance(fixed_offset, Mapping):
            self._check_per_key(stack_metadata)
            offsets, fixed_offset = fixed_offset, span_of_keys(fixed_offset)
            self._fields = fields_of(batch.single_space, offsets, int(fixed_offset[0]))
        self.fixed_offset: Ints = _checked_offsets(fixed_offset)
        self.anchor = int(np.flatnonzero(self.fixed_offset == 0)[0])
        self.get_valid_mask_function = get_valid_mask_function
        self.fill_invalid_data = fill_invalid_data
        self.stack_metadata = stack_metadata
        # An EpisodeMask needs the skipped rows located too, at the same moment as the frames.
        self._span = self.fixed_offset
        if isinstance(get_valid_mask_function, EpisodeMask):
            get_valid_mask_function.check(batch)
            self._span = span_of(self.fixed_offset)
        self._columns = np.searchsorted(self._span, self.fixed_offset)
        fields, n = self._fields, len(self.fixed_offset)
        space = batch_space(batch.single_space, n) if fields is None else space_of(batch.single_space, fields)
        super().__init__(batch, space, self._metadata_space())

    def _check_per_key(self, stack_metadata: bool) -> None:
        if not isinstance(self.batch.single_space, spaces.Dict):
            kind = type(self.batch.single_space).__name__
            raise TypeError(f"fixed_offset: per key must be of a Dict, got a {kind}; give a list of offsets")
        if stack_metadata:
            raise ValueError(
                "stack_metadata: must be False with offsets per key, got True; metadata are the anchor's"
            )

    def _metadata_space(self) -> spaces.Dict:
        n = len(self.fixed_offset)
        source = self.batch.single_metadata_space
        parts: dict[str, Space[Any]] = {} if source is None else dict(source.spaces)
        if self.stack_metadata:
            parts = {key: batch_space(part, n) for key, part in parts.items()}
        parts[MASK] = as_space(((n,), "bool"))
        return make_dict(parts.items())

    # Positions and masks

    def expand_index(self, index: Any) -> Any:
        """Return the positions `(B, T)` of the frames of each index; the edge row stands in outside the batch."""
        return self._as_index(positions(index, len(self.batch))[:, None] + self.fixed_offset)

    def _as_index(self, expanded: Ints) -> Any:
        # Clipped, since a read at a negative position is one of the newest rows.
        inside = np.clip(expanded, 0, max(len(self.batch) - 1, 0))
        return as_labels(self, {"index": inside})["index"]

    def get_valid_mask(self, expanded_idx: Any, data: Any, metadata: dict[str, Any] | None) -> Any:
        """Return which of the frames `(B, T)` at `expanded_idx` are valid; the others are what was read."""
        # The anchors alone tell where the frames would be: an edge row that stands in is not one of them.
        anchors = np.asarray(as_numpy(expanded_idx), np.int64)[:, self.anchor]
        expanded = anchors[:, None] + self.fixed_offset
        n = len(self.batch)
        inside = (expanded >= 0) & (expanded < n)
        if not len(expanded):
            return move(inside, self.backend, self.device)
        place = self.batch.locate(np.clip(expanded, 0, n - 1).ravel())
        return move(self._judge(Frames(expanded, inside, place), data, metadata), self.backend, self.device)

    def get_valid_mask_flattened(self, expanded_idx: Any, data: Any, metadata: dict[str, Any] | None) -> Any:
        """Return the same mask for flattened data `(B, T, D)`."""
        flat = as_numpy(data)
        layout = self.batch._flat_layout
        frames = layout.unflatten_batch(flat.reshape(-1, flat.shape[-1]))
        return self.get_valid_mask(
            expanded_idx, fold(self.batch.single_space, frames, *flat.shape[:2]), metadata
        )

    def _judge(self, frames: Frames, data: Any, metadata: Any) -> Bools:
        valid = frames.valid(self.anchor)
        if self.get_valid_mask_function is not None:
            metadata = {} if metadata is None else metadata
            said = self.get_valid_mask_function(self, self._as_index(frames.expanded), data, metadata)
            valid = valid & self._as_mask(said, valid.shape)
        valid[:, self.anchor] = True
        return valid

    def _as_mask(self, said: Any, shape: tuple[int, ...]) -> Bools:
        mask = as_numpy(said)
        if mask.shape != shape or mask.dtype != np.bool_:
            got = f"{mask.dtype} {mask.shape}"
            raise ValueError(
                f"get_valid_mask_function: must return bool {shape}, got {got}; one flag per frame"
            )
        return np.asarray(mask)

    def fill_data_with_stack_mask(self, space: Space[Any] | None, data: Any, valid_mask: Any) -> Any:
        """Return new data `(B, T, ...)`: an invalid frame shows the nearest valid one on the anchor's side.

        `space` is that of one sample of the source, or None if `data` is one array.
        """
        mask = np.array(as_numpy(valid_mask), np.bool_)
        mask[:, self.anchor] = True
        if space is not None and space == self.single_space:
            space = self.batch.single_space
        return show(space, data, stand_ins(mask, self.anchor))

    @staticmethod
    def get_valid_mask_function_with_episodeid_key(
        episode_id_key: Key = "episode_id", is_in_metadata: bool = False
    ) -> EpisodeMask:
        """Make a mask function: valid when every row from the frame to the anchor has the anchor's id."""
        return EpisodeMask(as_keys(episode_id_key), is_in_metadata, same_id)

    @staticmethod
    def get_valid_mask_function_with_episode_end_key(
        episode_end_key: Key = "episode_end", is_in_metadata: bool = False
    ) -> EpisodeMask:
        """Make a mask function by a flag on each episode's last row.

        Valid when no row from the earlier of frame and anchor up to, not including, the later has the flag.
        """
        return EpisodeMask(as_keys(episode_end_key), is_in_metadata, no_end_between)

    # Reads

    def _read(self, idx: Any, keys: Keys = (), flat: bool = False, metadata: bool = False) -> Read:
        single = is_single(idx)
        if self._is_plain and not single:
            found = self._read_plain(Ask(self.fixed_offset, idx), keys, flat, metadata)
        else:
            found = counted(
                self.batch, idx, lambda index: self._read_at(np.atleast_1d(index), keys, flat, metadata)
            )
        if found is None:
            raise self._contention()
        return self._first(found, keys, flat) if single else found

    def _read_at(self, anchors: Ints, keys: Keys, flat: bool, metadata: bool) -> Read | None:
        if self._is_plain:
            return self._read_plain(Ask(self.fixed_offset, anchors), keys, flat, metadata)
        return again_and_again(
            self, lambda: self._gather(self._runs.frames(anchors, self._span), keys, flat, metadata)
        )

    @property
    def _is_plain(self) -> bool:
        """Whether boundaries alone decide what is shown: then the source may read stacks in one go."""
        return (
            self.fill_invalid_data
            and self._fields is None
            and self.get_valid_mask_function is None
            and self.batch.single_metadata_space is None
            and type(self).get_valid_mask is SliceStackedBatch.get_valid_mask
        )

    def _read_plain(self, ask: Ask, keys: Keys, flat: bool, metadata: bool) -> Read | None:
        read, rest = split_keys(self.batch.single_space, keys)
        found = self.batch._read_frames(ask, read, flat)
        if found is None:
            return None
        space = None if flat else space_at(self.batch.single_space, read)
        data = pick(fold(space, found[0], *found[1].shape), rest)
        return data, self._label(None, found[1]) if metadata else None

    @property
    def _runs(self) -> Boundaries:
        return self.batch._boundaries()

    def _first(self, found: Read, keys: Keys, flat: bool) -> Read:
        data, metadata = found
        data = data[0] if flat else unbatch(space_at(self.single_space, keys), data, 0)
        if metadata is not None and self.single_metadata_space is not None:
            metadata = unbatch(self.single_metadata_space, metadata, 0)
        return data, metadata

    def _gather(self, frames: Frames, keys: Keys, flat: bool, metadata: bool) -> Read:
        """Read the frames; Lapped if any was overwritten since they were located."""
        if self._looks_at_data:
            return self._gather_all(frames, keys, flat, metadata)
        valid = self._mask_by_places(frames)
        # The stand-ins are known before anything is read, so filling costs no second copy.
        rows = self._shown(valid)
        if self._fields is not None:
            return self._show_fields(valid, rows, keys, flat, metadata, self._located_reader(frames))
        read, rest = split_keys(self.batch.single_space, keys)
        found = self.batch.get_located(frames.place.take(rows), read, flat, metadata)
        if found is None:
            raise Lapped
        space = None if flat else space_at(self.batch.single_space, read)
        data = pick(fold(space, found[0], *valid.shape), rest)
        return data, self._label(found[1], valid) if metadata else None

    def _mask_by_places(self, frames: Frames) -> Bools:
        valid = frames.valid(int(self._columns[self.anchor]), self._columns)
        if isinstance(self.get_valid_mask_function, EpisodeMask):
            column = self.get_valid_mask_function.read(self.batch, frames.place)
            if column is None:
                raise Lapped
            valid &= self.get_valid_mask_function.judge(self.fixed_offset, column, len(valid))
        valid[:, self.anchor] = True
        return valid

    def _gather_all(self, frames: Frames, keys: Keys, flat: bool, metadata: bool) -> Read:
        """Read the frames as they are, ask the mask function, then fill."""
        source = self.batch
        found = source.get_located(frames.place, (), False, True)
        if found is None:
            raise Lapped
        data, meta = found
        valid = self._mask_by_data(frames, data, meta)
        if self._fields is not None:
            reader = self._selecting_reader(data, meta)
            return self._show_fields(valid, self._shown(valid), keys, flat, metadata, reader)
        if self.fill_invalid_data:
            rows = self._shown(valid)
            data = select(source.single_space, data, rows)
            if meta is not None and source.single_metadata_space is not None:
                meta = select(source.single_metadata_space, meta, rows)
        read, rest = split_keys(self.batch.single_space, keys)
        data = pick(data, read)
        if flat:
            data = source._flatten(data, False, read)
        space = None if flat else space_at(source.single_space, read)
        data = pick(fold(space, data, *valid.shape), rest)
        return data, self._label(meta, valid) if metadata else None

    def _located_reader(self, frames: Frames) -> Reader:
        def read(rows: Ints, keys: Keys, metadata: bool) -> Read:
            found = self.batch.get_located(frames.place.take(rows), keys, False, metadata)
            if found is None:
                raise Lapped
            return found

        return read

    def _selecting_reader(self, data: Any, meta: Any) -> Reader:
        space, about = self.batch.single_space, self.batch.single_metadata_space

        def read(rows: Ints, keys: Keys, metadata: bool) -> Read:
            labels = select(about, meta, rows) if metadata and about is not None else None
            return select(space_at(space, keys), pick(data, keys), rows), labels

        return read

    def _show_fields(
        self, valid: Bools, rows: Ints, keys: Keys, flat: bool, metadata: bool, read: Reader
    ) -> Read:
        """Read each field at its own offsets; `rows` are those to show, over the whole span."""
        over_span = rows.reshape(valid.shape)
        anchors = over_span[:, self.anchor]

        def show_field(field: Any, within: Keys) -> Any:
            if isinstance(field, FieldMask):
                return as_labels(self, {MASK: valid[:, field.columns]})[MASK]
            if not isinstance(field, SpanField):
                return {key: show_field(child, within) for key, child in field.items()}
            keys, rest = split_keys(self.batch.single_space, field.keys + within)
            if field.columns is None:
                return read(anchors, keys, False)[0]
            at = over_span[:, field.columns]
            data = read(at.ravel(), keys, False)[0]
            return pick(fold(space_at(self.batch.single_space, keys), data, *at.shape), rest)

        data = show_field(*descend(self._fields or {}, keys))
        if flat:
            data = self._flatten(data, False, keys)
        if not metadata:
            return data, None
        labels = None
        if self.batch.single_metadata_space is not None:
            labels = read(anchors, (), True)[1]
        return data, {**(labels or {}), **as_labels(self, {MASK: valid})}

    def _mask_by_data(self, frames: Frames, data: Any, meta: Any) -> Bools:
        shape = frames.expanded.shape
        stacks = fold(self.batch.single_space, data, *shape)
        folded = {} if meta is None else fold(self.batch.single_metadata_space, meta, *shape)
        if type(self).get_valid_mask is SliceStackedBatch.get_valid_mask:
            return self._judge(frames, stacks, folded)
        said = self.get_valid_mask(self._as_index(frames.expanded), stacks, folded)
        valid = self._as_mask(said, shape).copy()
        valid[:, self.anchor] = True
        return valid

    @property
    def _looks_at_data(self) -> bool:
        """Whether the mask depends on the frames that were read, or a subclass decides it."""
        if type(self).get_valid_mask is not SliceStackedBatch.get_valid_mask:
            return True
        function = self.get_valid_mask_function
        return function is not None and not isinstance(function, EpisodeMask)

    def _shown(self, valid: Bools) -> Ints:
        """Return which of the located rows (B * S) to show as frames (B * T)."""
        columns = np.broadcast_to(self._columns, valid.shape)
        edge = ~valid.all(axis=1)
        if self.fill_invalid_data and edge.any():  # most stacks of long episodes are whole
            columns = columns.copy()
            columns[edge] = self._columns[stand_ins(valid[edge], self.anchor)]
        return (np.arange(len(valid))[:, None] * len(self._span) + columns).ravel()

    def _label(self, rows: dict[str, Any] | None, valid: Bools) -> dict[str, Any]:
        """Return the metadata of stacks, given that of their frames (B * T) and the mask."""
        space = self.batch.single_metadata_space
        metadata: dict[str, Any] = {}
        if rows is not None and space is not None:
            metadata = fold(space, rows, *valid.shape)
            if not self.stack_metadata:
                metadata = frame(space, metadata, self.anchor)
        return {**metadata, **as_labels(self, {MASK: valid})}

    # Draws and places

    def draw_at(self, stream: Draws, n: int) -> Any:
        return self.draw_column_at((), stream, n)

    def draw_column_at(self, keys: Keys, stream: Draws, n: int) -> Any:
        if not self._is_plain:
            return BatchBase.draw_column_at(self, keys, stream, n)
        ask = Ask(self.fixed_offset, stream=stream, n=n, labelled=False)  # type: ignore[arg-type]
        found = self._read_plain(ask, keys, False, False)
        if found is None:
            raise self._empty()
        return found[0]

    def is_current(self, location: Location) -> Bools:
        # An anchor that its neighbours cannot be found for is as good as gone.
        return np.asarray(self.batch.relocate(location) >= 0)

    def get_located(
        self, location: Location, keys: Keys = (), flat: bool = False, metadata: bool = False
    ) -> Read | None:
        if self._is_plain:
            return self._read_plain(Ask(self.fixed_offset, place=location), keys, flat, metadata)

        def attempt() -> Read | None:
            frames = self._runs.frames_round(location, self._span, int(self._columns[self.anchor]))
            return None if frames is None else self._gather(frames, keys, flat, metadata)

        return again_and_again(self, attempt)


class FrameStackedBatch(SliceStackedBatch):
    """Each sample with the `prefetch_horizon` before it and the `postfetch_horizon` after it.

    Offsets are -prefetch to +postfetch, the anchor is at position `prefetch`, T is their sum plus one. For
    the other arguments, ownership and concurrency see SliceStackedBatch.

    Example:
        >>> import numpy as np, recollect as rc
        >>> buf = rc.ReplayBuffer.create(rc.MemoryStorage, ((), "int64"), capacity=8)
        >>> buf.extend(np.arange(5))
        >>> rc.FrameStackedBatch(buf, prefetch_horizon=3)[[1, 4]].tolist()
        [[0, 0, 0, 1], [1, 2, 3, 4]]
    """

    def __init__(
        self,
        batch: BatchBase,
        prefetch_horizon: int = 0,
        postfetch_horizon: int = 0,
        get_valid_mask_function: MaskFunction | None = None,
        fill_invalid_data: bool = True,
        stack_metadata: bool = False,
    ) -> None:
        """Stack the samples of `batch` in a window round each."""
        for name, horizon in (
            ("prefetch_horizon", prefetch_horizon),
            ("postfetch_horizon", postfetch_horizon),
        ):
            checks.count(name, horizon, 0, advice="give a number of frames")
        self.prefetch_horizon = prefetch_horizon
        self.postfetch_horizon = postfetch_horizon
        offsets = np.arange(-prefetch_horizon, postfetch_horizon + 1)
        super().__init__(batch, offsets, get_valid_mask_function, fill_invalid_data, stack_metadata)


def _checked_offsets(fixed_offset: Any) -> Ints:
    offsets = as_numpy(fixed_offset)
    if offsets.ndim != 1 or offsets.dtype.kind not in "iu":
        got = f"{offsets.dtype} {offsets.shape}"
        raise ValueError(f"fixed_offset: must be 1-D integers, got {got}; for example [-2, -1, 0]")
    offsets = offsets.astype(np.int64)
    if (np.diff(offsets) <= 0).any() or 0 not in offsets:
        raise ValueError(
            f"fixed_offset: must increase strictly, with 0, got {offsets.tolist()}; for example [-2, -1, 0]"
        )
    offsets.flags.writeable = False
    return offsets


def span_of(offsets: Ints) -> Ints:
    """Return all offsets from the first to the last, without gaps."""
    return np.arange(offsets[0], offsets[-1] + 1)


@dataclass(frozen=True, slots=True)
class EpisodeMask:
    """A mask function that looks at one column over the whole span, also at the rows that offsets skip."""

    key: Keys
    is_in_metadata: bool
    rule: Callable[[Any, int], Bools]

    def __call__(
        self, stack: SliceStackedBatch, expanded_idx: Any, data: Any = None, metadata: Any = None
    ) -> Bools:
        """Return the mask `(B, T)` of positions `(B, T)`, reading the column there."""
        anchors = np.asarray(as_numpy(expanded_idx), np.int64)[:, stack.anchor]
        rows = anchors[:, None] + span_of(stack.fixed_offset)
        last = max(len(stack.batch) - 1, 0)
        found = stack.batch._read(np.clip(rows, 0, last).ravel(), *self._form())
        return self.judge(stack.fixed_offset, found, len(anchors))

    def check(self, batch: BatchBase) -> None:
        """Raise KeyError unless the column is there."""
        space = batch.single_metadata_space if self.is_in_metadata else batch.single_space
        space_at(spaces.Dict({}) if space is None else space, self.key)

    def read(self, batch: BatchBase, place: Location) -> Read | None:
        """Read the column at located samples; None if any of them is gone."""
        return batch.get_located(place, *self._form())

    def judge(self, offsets: Ints, found: Read, n: int) -> Bools:
        """Return the mask `(n, T)`, given the column over the span of n anchors."""
        column = as_numpy(pick(found[1], self.key) if self.is_in_metadata else found[0])
        rows = column.reshape(n, len(span_of(offsets)), *column.shape[1:])
        return self.rule(rows, int(-offsets[0]))[:, offsets - offsets[0]]

    def _form(self) -> tuple[Keys, bool, bool]:
        return ((), False, True) if self.is_in_metadata else (self.key, False, False)


MASK_OF = "{}_valid_mask"


@dataclass(frozen=True, slots=True)
class SpanField:
    """A field of a sample and the columns of the span that it shows; None is the anchor, without an axis of time."""

    keys: Keys
    columns: Ints | None


@dataclass(frozen=True, slots=True)
class FieldMask:
    """Which of the frames that a field shows are valid."""

    columns: Ints


Fields = dict[Key, Any]
"""A SpanField or FieldMask for each leaf of what is shown, nested as the space is."""


def span_of_keys(offsets: Mapping[str, Any], keys: Keys = ()) -> Ints:
    """Return all offsets from the first to the last of any key, without gaps, and the anchor's 0."""
    every = [0, *_walk(offsets, keys)]
    return np.arange(min(every), max(every) + 1)


def _walk(offsets: Mapping[str, Any], keys: Keys) -> Iterator[int]:
    for key, found in offsets.items():
        if isinstance(found, Mapping):
            yield from _walk(found, (*keys, key))
        else:
            yield from _checked(found, (*keys, key)).tolist()


def _checked(found: Any, keys: Keys) -> Ints:
    name = f"fixed_offset {path_name(keys)!r}"
    try:
        offsets = as_numpy(list(found) if isinstance(found, range) else found)
    except (TypeError, ValueError):
        offsets = np.empty((0, 0))
    if offsets.ndim != 1 or offsets.dtype.kind not in "iu" or not len(offsets):
        raise ValueError(f"{name}: must be 1-D integers, got {found!r}; for example [-2, -1, 0] or range(50)")
    return offsets.astype(np.int64)


def fields_of(space: Space[Any], offsets: Mapping[str, Any], first: int, keys: Keys = ()) -> Fields:
    """Return what to show of samples of `space`, given the offsets of its keys and the first one of the span."""
    for key in offsets:
        space_at(space, (key,))  # KeyError names those there are
    fields: Fields = {}
    for key, child in space.spaces.items():  # type: ignore[attr-defined]
        here, found = (*keys, key), offsets.get(key)
        if isinstance(found, Mapping) and isinstance(child, spaces.Dict):
            fields[key] = fields_of(child, found, first, here)
        else:
            fields[key] = SpanField(here, None if found is None else _checked(found, here) - first)
    return fields | _masks_of(fields, keys)


def _masks_of(fields: Fields, keys: Keys) -> Fields:
    masks: Fields = {}
    for key, field in fields.items():
        if isinstance(field, SpanField) and field.columns is not None:
            name = MASK_OF.format(key)
            if name in fields:
                raise ValueError(
                    f"fixed_offset {path_name((*keys, key))!r}: its mask must have the name {name!r} for itself, got a "
                    "field of that name; rename the field"
                )
            masks[name] = FieldMask(field.columns)
    return masks


def space_of(space: Space[Any], fields: Fields) -> spaces.Dict:
    """Return the space of what `fields` show of a sample of `space`."""

    def part(key: Key, field: Any) -> Space[Any]:
        if isinstance(field, FieldMask):
            return as_space(((len(field.columns),), "bool"))
        child = space_at(space, (key,))
        if isinstance(field, SpanField):
            return child if field.columns is None else batch_space(child, len(field.columns))
        return space_of(child, field)

    return make_dict((str(key), part(key, field)) for key, field in fields.items())


def descend(fields: Fields, keys: Keys) -> tuple[Any, Keys]:
    """Return the fields under `keys`, and the keys that lead on inside one of them."""
    node: Any = fields
    while keys and isinstance(node, dict):
        node, keys = node[keys[0]], keys[1:]
    return node, keys
