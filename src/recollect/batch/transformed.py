"""TransformedBatch: another batch, seen through a transformation."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
from gymnasium import spaces

from recollect.backends import copied, move
from recollect.batch.base import BatchBase, Draws
from recollect.batch.boundaries import Ask, Found, counted
from recollect.batch.structure import Keys, as_batch, checked_batch, has_no_array, map_leaves, pick, unbatch
from recollect.batch.view import Read, View, as_source
from recollect.errors import class_name
from recollect.indexing import is_single, normalize
from recollect.spaces import as_space, batch_space
from recollect.spaces.transformation import CallableTransformation, DataTransformation

Transforms = DataTransformation | Callable[[Any], Any]


class TransformedBatch(View):
    """`batch` with every sample transformed when it is read.

    `set_at`, `append` and `extend` go through the inverse; without one they raise ReadOnlyError. A plain
    callable on batches is accepted: it has no inverse, and its space is found by calling it once, on the
    first sample (on zeros if there is none). `metadata_transformation` is None when the source has no
    metadata.

    Ownership: owns nothing; the transformation gets the caller's own copy.
    Concurrency: as the batch it views, if the transformation allows it.

    Example:
        >>> import numpy as np, recollect as rc
        >>> buf = rc.ReplayBuffer.create(rc.MemoryStorage, {"image": ((2, 2), "uint8")}, capacity=4)
        >>> buf.append({"image": np.full((2, 2), 255, "uint8")})
        >>> scaled = rc.TransformedBatch(buf, lambda batch: {"image": batch["image"] / np.float32(255)})
        >>> scaled[0]["image"].dtype, scaled.single_space["image"].shape
        (dtype('float32'), (2, 2))
    """

    def __init__(
        self, batch: BatchBase, transformation: Transforms, metadata_transformation: Transforms | None = None
    ) -> None:
        """View `batch` through `transformation`, and its metadata through `metadata_transformation`."""
        self.batch = as_source(batch)
        self.transformation = self._adopt(transformation, False)
        self.metadata_transformation: DataTransformation | None = None
        metadata_space: Any = batch.single_metadata_space
        if metadata_transformation is not None and metadata_space is not None:
            self.metadata_transformation = self._adopt(metadata_transformation, True)
            metadata_space = as_space(
                self.metadata_transformation.get_target_space_from_source(metadata_space)
            )
        target = as_space(self.transformation.get_target_space_from_source(batch.single_space))
        super().__init__(batch, target, metadata_space)

    def _adopt(self, transformation: Transforms, metadata: bool) -> DataTransformation:
        if isinstance(transformation, DataTransformation):
            return transformation
        if not callable(transformation):
            kind = class_name(transformation)
            raise TypeError(f"transformation: must be a DataTransformation or callable, got {kind}; pass one")
        return CallableTransformation(transformation, self._example(metadata))

    def _example(self, metadata: bool) -> Any:
        source = self.batch
        with suppress(IndexError):  # it is empty, or was emptied just now
            return source._read([0], metadata=metadata)[metadata]
        space = source.single_metadata_space if metadata else source.single_space
        if space is None:
            raise TypeError(
                "metadata: must exist to be transformed, got a source without; drop the transformation"
            )
        zeros = map_leaves(_zeros, batch_space(space, 1))
        return move(zeros, source.backend, source.device)

    @property
    def is_mutable(self) -> bool:
        return self.batch.is_mutable

    # Reads

    def _read(self, idx: Any, keys: Keys = (), flat: bool = False, metadata: bool = False) -> Read:
        if not is_single(idx):
            return self._outward(self.batch._read(idx, (), False, metadata), keys, flat)
        one = counted(self.batch, idx, lambda index: self.batch._read(np.array([index]), (), False, metadata))
        data, found = self._forward(one)
        if found is not None and self.single_metadata_space is not None:
            found = unbatch(self.single_metadata_space, found, 0)
        data = pick(unbatch(self.single_space, data, 0), keys)
        return self._flatten(data, True, keys) if flat else data, found

    def get_located(
        self, location: Any, keys: Keys = (), flat: bool = False, metadata: bool = False
    ) -> Read | None:
        found = self.batch.get_located(location, (), False, metadata)
        return None if found is None else self._outward(found, keys, flat)

    def _read_frames(self, ask: Ask, keys: Keys = (), flat: bool = False) -> Found | None:
        found = self.batch._read_frames(ask)
        return None if found is None else (self._outward((found[0], None), keys, flat)[0], *found[1:])

    def draw_column_at(self, keys: Keys, stream: Draws, n: int) -> Any:
        return pick(self.draw_at(stream, n), keys)

    def _outward(self, found: Read, keys: Keys, flat: bool) -> Read:
        data, metadata = self._forward(found)
        data = pick(data, keys)
        return self._flatten(data, False, keys) if flat else data, metadata

    def _forward(self, found: Read) -> Read:
        data, metadata = found
        data = self.transformation.transform(self.batch.single_space, data)
        if metadata is not None and self.metadata_transformation is not None:
            space = self.batch.single_metadata_space
            metadata = self.metadata_transformation.transform(space, metadata)  # type: ignore[arg-type]
        return data, metadata

    # Writes

    def append(self, value: Any) -> None:
        """Append to the source, through the inverse."""
        self.batch.append(self._one_back(value, "append"))

    def extend(self, value: Any) -> None:
        """Extend the source, through the inverse."""
        self.batch.extend(self._many_back(value, "extend"))

    def set_at(self, idx: Any, value: Any) -> None:
        """Overwrite in the source, through the inverse."""
        index = normalize(idx, len(self.batch))
        self.batch.set_at(index, self._back(index, value, "set_at"))

    def remove_at(self, idx: Any) -> None:
        """Remove from the source."""
        self.batch.remove_at(idx)

    def append_flattened(self, value: Any) -> None:
        """Append a transformed vector to the source, through the inverse."""
        self._inverse("append_flattened")
        BatchBase.append_flattened(self, value)

    def extend_flattened(self, value: Any) -> None:
        """Extend the source by transformed vectors, through the inverse."""
        self._inverse("extend_flattened")
        BatchBase.extend_flattened(self, value)

    def set_flattened_at(self, idx: Any, value: Any) -> None:
        """Overwrite in the source by transformed vectors, through the inverse."""
        self._inverse("set_flattened_at")
        BatchBase.set_flattened_at(self, idx, value)

    def _inverse(self, verb: str) -> DataTransformation:
        transformation = self.transformation
        back = None
        if transformation.has_inverse and self.batch.is_mutable:
            back = transformation.direction_inverse(self.batch.single_space)
        if back is None:
            raise self._read_only(verb)
        return back

    def _back(self, index: int | Any, value: Any, verb: str) -> Any:
        return self._one_back(value, verb) if isinstance(index, int) else self._many_back(value, verb)

    def _one_back(self, value: Any, verb: str) -> Any:
        back = self._inverse(verb)
        block = self._backward(back, as_batch(self.single_space, self._layout, value))
        return unbatch(self.batch.single_space, block, 0)

    def _many_back(self, value: Any, verb: str) -> Any:
        back = self._inverse(verb)
        return self._backward(back, checked_batch(self.single_space, self._layout, value)[1])

    def _backward(self, back: DataTransformation, block: Any) -> Any:
        # It may change what it gets, and what it gets may be the caller's.
        return back.transform(self.single_space, move(copied(block), self.backend, self.device))

    def _written(self) -> BatchBase:
        return self.batch._written()

    def _extend_part(self, block: Any, closes: bool) -> None:
        self.batch._extend_part(self._many_back(block, "extend"), closes)

    def _check_set_at(self, idx: Any, value: Any) -> None:
        index = normalize(idx, len(self.batch))
        self.batch._check_set_at(index, self._back(index, value, "set_at"))

    def _check_remove_at(self, idx: Any) -> None:
        self.batch._check_remove_at(idx)


def _zeros(space: Any) -> Any:
    if has_no_array(space):
        return "" if isinstance(space, spaces.Text) else ()
    return np.zeros(space.shape, space.dtype)
