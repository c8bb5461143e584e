"""torch map-style data sets: a batch as one, and one as a batch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from recollect import interrupts
from recollect.backends import move
from recollect.batch import BatchBase
from recollect.batch.structure import fill, unbatch
from recollect.datasets.batch import need
from recollect.errors import FormatError, class_name
from recollect.indexing import normalize
from recollect.spaces import as_numpy, as_space, compile_layout


def as_torch_dataset(batch: BatchBase) -> Any:
    """Return a `torch.utils.data.Dataset` over a batch; its samples are tensors.

    `__getitem__` takes ints; `__getitems__`, which a DataLoader calls, reads a batch at once and gives it collated, and
    the loader leaves it as it is. (Samples that are no dict come as a list of samples, unless a loader is given
    `collate_fn=dataset.collate`.)

    >>> import numpy as np, recollect as rc
    >>> buf = rc.ReplayBuffer.create("memory", {"x": ((2,), "float32")}, capacity=8)
    >>> buf.extend({"x": np.ones((5, 2), "float32")})
    >>> data = rc.datasets.as_torch_dataset(buf)
    >>> len(data), data[0]["x"].shape, data.__getitems__([0, 4])["x"].shape
    (5, torch.Size([2]), torch.Size([2, 2]))
    >>> import torch
    >>> [batch["x"].shape for batch in torch.utils.data.DataLoader(data, batch_size=4)]
    [torch.Size([4, 2]), torch.Size([1, 2])]
    """
    need("torch", "torch", "as_torch_dataset")
    if not isinstance(batch, BatchBase):
        raise TypeError(f"as_torch_dataset: must be a batch, got {class_name(batch)}; see from_torch")
    return _torch_dataset_class()(batch)


_made: list[type] = []


def _torch_dataset_class() -> Any:
    if not _made:
        interrupts.import_whole("torch")
        import torch

        class TorchDataset(_BatchDataset, torch.utils.data.Dataset):  # type: ignore[misc]
            """A batch as a map-style data set."""

            def __reduce__(self) -> Any:
                return as_torch_dataset, (self.batch,)

        _made.append(TorchDataset)
    return _made[0]


class _FirstOfCollated:
    """What torch's default collate function finds first in a batch that is collated: it leaves that as it is."""


class Collated(dict[str, Any]):
    """A batch of dicts, read and collated at once, that torch's default collate function leaves as it is."""

    def __init__(self, data: dict[str, Any]) -> None:
        from torch.utils.data._utils.collate import default_collate_fn_map

        default_collate_fn_map[_FirstOfCollated] = lambda batch, **_: dict(batch)
        super().__init__(data)

    def __missing__(self, key: Any) -> Any:
        if key == 0:  # the first sample, for torch to see of which class it is
            return _FirstOfCollated()
        raise KeyError(key)


class _Samples(list[Any]):
    """Samples that are no dicts, and the batch that they are of."""

    def __init__(self, samples: Iterable[Any], collated: Any) -> None:
        super().__init__(samples)
        self.collated = collated


class _BatchDataset:
    """What a batch is to a DataLoader.

    Ownership: does not own the batch. Concurrency: workers get it by fork, or pickled as the batch allows.
    """

    def __init__(self, batch: BatchBase) -> None:
        self.batch = batch

    def __len__(self) -> int:
        return len(self.batch)

    def __getitem__(self, index: int) -> Any:
        if not isinstance(normalize(index, len(self.batch)), int):
            raise TypeError(f"index: must be an int, got {index!r}; __getitems__ takes several")
        return move(self.batch.get_at(index), "torch")

    def __getitems__(self, indices: list[int]) -> Any:
        data = move(self.batch.get_at(np.asarray(indices, np.int64)), "torch")
        if isinstance(data, dict):
            return Collated(data)
        return _Samples((unbatch(self.batch.single_space, data, i) for i in range(len(indices))), data)

    @staticmethod
    def collate(data: Any) -> Any:
        """Take the batch that `__getitems__` made."""
        return data.collated if isinstance(data, _Samples) else dict(data)


def from_torch(dataset: Any, *, space: Any = None) -> BatchBase:
    """Show a map-style torch data set as a read-only batch.

    The space is that of its first sample unless one is given. Every sample must fit it: a data set of pictures of
    several sizes does not. Nothing is kept: each read calls the data set.

    >>> import torch, recollect as rc
    >>> data = torch.utils.data.TensorDataset(torch.arange(6.0).reshape(3, 2), torch.arange(3))
    >>> rc.datasets.from_torch(data)[-1]
    (array([4., 5.], dtype=float32), array(2))
    """
    if not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
        raise TypeError(
            f"from_torch: must have __len__ and __getitem__, got {type(dataset).__name__}; an iterable data set has no "
            "indices: extend a ReplayBuffer while you iterate over it"
        )
    if not len(dataset):
        raise FormatError(f"from_torch: must hold samples, got an empty {type(dataset).__name__}")
    return TorchBatch(dataset, _plain(dataset[0]) if space is None else space)


class TorchBatch(BatchBase):
    """A map-style data set as a batch; see `from_torch`."""

    def __init__(self, dataset: Any, space: Any) -> None:
        super().__init__(as_space(space))
        self._dataset = dataset
        self._own_layout = compile_layout(self.single_space)

    def __len__(self) -> int:
        return len(self._dataset)

    def get_at(self, idx: Any, *, out: Any = None) -> Any:
        data = self._read_at(idx)
        return data if out is None else fill(out, data)

    def _read_at(self, idx: Any) -> Any:
        found = normalize(idx, len(self))
        layout = self._own_layout
        if isinstance(found, int):
            return layout.decode_one([a.copy() for a in layout.encode_one(_plain(self._dataset[found]))])
        samples = [layout.encode_one(_plain(self._dataset[int(i)])) for i in found]
        arrays = [
            np.stack([s[k] for s in samples]) if samples else np.empty((0, *field.shape), field.dtype)
            for k, field in enumerate(layout.fields)
        ]
        return layout.decode_batch(arrays, len(samples))


def _plain(sample: Any) -> Any:
    """Tensors as numpy arrays, lists as tuples; other values as they are."""
    if isinstance(sample, dict):
        return {key: _plain(value) for key, value in sample.items()}
    if isinstance(sample, tuple | list):
        return tuple(_plain(value) for value in sample)
    return sample if isinstance(sample, str) else as_numpy(sample)
