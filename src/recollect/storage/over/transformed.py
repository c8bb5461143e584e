"""TransformedStorage: samples kept in another form, for example compressed."""

from __future__ import annotations

from typing import Any, Self

from recollect.backends import copied
from recollect.errors import class_name
from recollect.files.record import damage_in
from recollect.spaces import as_space
from recollect.spaces.transformation import (
    DataTransformation,
    transformation_from_json,
    transformation_to_json,
)
from recollect.storage.contract import SpaceStorage
from recollect.storage.over.base import WrapperStorage


class TransformedStorage(WrapperStorage):
    """Stores `transformation(sample)` and returns its inverse; saved as registered name and JSON arguments.

    Ownership: owns `inner`, and closes it.
    Concurrency: as `inner`.

    >>> import recollect as rc
    >>> from recollect.batch import CastTransformation
    >>> half = CastTransformation({"*": "float16"})
    >>> storage = rc.TransformedStorage.create({"x": ((2,), "float32")}, half, capacity=4)
    >>> storage.set(0, {"x": [1.0, 2.0]})
    >>> storage.get(0)["x"].dtype, storage.inner.get(0)["x"].dtype
    (dtype('float32'), dtype('float16'))
    """

    short_name = "transformed"
    positional = ("transformation",)

    def __init__(self, space: Any, inner: SpaceStorage, transformation: DataTransformation,
                 max_lengths: dict[str, int] | None = None) -> None:  # fmt: skip
        """Keep samples of `space` in `inner`, whose space must be the transformed one."""
        super().__init__(space, inner, max_lengths)
        self.transformation = transformation
        inverse = transformation.direction_inverse(self.single_instance_space)
        if inverse is None:
            raise ValueError(
                f"transformation: {type(transformation).__name__} must have an inverse to be stored, got none"
            )
        self._inverse = inverse

    @classmethod
    def inner_space(cls, space: Any, own: dict[str, Any]) -> Any:
        transformation = _of(own)
        if not transformation.has_inverse:
            raise ValueError(
                f"transformation: {type(transformation).__name__} must have an inverse to be stored, got none"
            )
        return as_space(transformation.get_target_space_from_source(space))

    @classmethod
    def wrap(cls, space: Any, inner: SpaceStorage, own: dict[str, Any]) -> Self:
        return cls(space, inner, _of(own), own.get("max_lengths"))

    def own(self) -> dict[str, Any]:
        return {"transformation": transformation_to_json(self.transformation)}

    @classmethod
    def own_from(cls, saved: dict[str, Any]) -> dict[str, Any]:
        with damage_in("transformation"):
            return {"transformation": transformation_from_json(saved["transformation"])}

    def _inward(self, block: Any, n: int) -> Any:
        # It may change what it gets, and what it gets may be the caller's.
        return self.transformation.transform(self.single_instance_space, copied(block))

    def _outward(self, block: Any, n: int) -> Any:
        return self._inverse.transform(self.inner.single_instance_space, block)


def _of(own: dict[str, Any]) -> DataTransformation:
    found = own.get("transformation")
    if not isinstance(found, DataTransformation):
        raise TypeError(f"transformation: must be a DataTransformation, got {class_name(found)}")
    return found
