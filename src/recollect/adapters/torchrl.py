"""TensorDicts in and out: a replay buffer for TorchRL's collectors, and a storage for TorchRL's own `ReplayBuffer`.

The first TensorDict says what a row is: its keys, nested ones too, with their shapes and dtypes.
"""

from __future__ import annotations

import multiprocessing
from typing import Any

import numpy as np

from recollect.backends import get_backend
from recollect.errors import EmptyError, MissingExtraError, SchemaError
from recollect.replay import ReplayBuffer
from recollect.sampling import PrioritizedSampler, StepSampler
from recollect.spaces import as_numpy
from recollect.storage import MemoryStorage, SpaceStorage

try:
    import torch
    from tensordict import TensorDict, is_non_tensor, is_tensor_collection
    from torchrl.data import LazyStackStorage, Storage
except ImportError as error:
    raise MissingExtraError(
        'recollect.adapters.torchrl: needs torchrl and tensordict; run pip install "recollect[torchrl]"'
    ) from error


class TorchRLReplayBuffer:
    """Takes and gives TensorDicts; for TorchRL's collectors and in place of its `TensorDictReplayBuffer`.

    A TensorDict of several batch dimensions is taken as one row for each of its elements. `storage` and further
    arguments are those of `rc.ReplayBuffer.create`. With `prioritized=True` a sample also has `priority_weight` and
    `index`, and `update_tensordict_priority` takes priorities from its `priority_key`. `data` is the `rc.ReplayBuffer`
    behind it, None before the first row; it keeps no episodes.

    Ownership: owns `data`; a sample is the caller's own.
    Concurrency: as `data`. It can be sent to other processes once it has rows in a storage that is shared.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> buffer = TorchRLReplayBuffer(100_000, batch_size=256)
        >>> buffer.extend(TensorDict({"obs": torch.zeros(50, 4), "next": {"reward": torch.ones(50)}}, batch_size=[50]))
        >>> buffer.sample()["next", "reward"].shape
        torch.Size([256])
    """

    def __init__(
        self,
        capacity: int,
        batch_size: int | None = None,
        *,
        prioritized: bool = False,
        alpha: float = 0.6,
        beta: float = 0.4,
        priority_key: str = "td_error",
        seed: int | None = None,
        storage: type[SpaceStorage] = MemoryStorage,
        **kwargs: Any,
    ) -> None:
        """Make an empty buffer; its memory is reserved when the first TensorDict comes."""
        self.batch_size, self.prioritized, self.priority_key = batch_size, prioritized, priority_key
        self._data: ReplayBuffer | None = None
        self._created_with = (storage, {"capacity": capacity, **kwargs})
        self._options = {"seed": seed, **({"alpha": alpha, "beta": beta} if prioritized else {})}
        self._sampler: Any = None

    @property
    def data(self) -> ReplayBuffer | None:
        """The rows, None before the first; assign a buffer that was loaded to go on with it."""
        return self._data

    @data.setter
    def data(self, data: ReplayBuffer) -> None:
        make: Any = PrioritizedSampler if self.prioritized else StepSampler
        self._sampler = make(data, self.batch_size or 1, **self._options)
        self._data = data

    def __len__(self) -> int:
        return 0 if self.data is None else len(self.data)

    @property
    def write_count(self) -> int:
        """How many rows were ever added; collectors ask for it."""
        return 0 if self.data is None else self.data.stats().offered

    def extend(self, td: Any) -> None:
        """Add a row for each element of `td`, whatever its batch dimensions."""
        rows = td if td.ndim == 1 else td.reshape(-1)
        self._made_for(rows).extend(_arrays(rows))

    def add(self, td: Any) -> None:
        """Add one row."""
        self.extend(td[None] if td.ndim == 0 else td)

    def sample(self, batch_size: int | None = None) -> Any:
        """Draw `batch_size` rows (by default that of the constructor) as a TensorDict, with replacement."""
        sampler, n = self._sampler, batch_size or self.batch_size
        if sampler is None:
            raise EmptyError("TorchRLReplayBuffer: must have a row to draw from, got none; extend it first")
        if n is None:
            raise ValueError("batch_size: must be given once, got None; pass it here or to the constructor")
        sampler.batch_size = n
        if not self.prioritized:
            return _tensordict(sampler.sample(), torch.Size((n,)))
        rows, meta = sampler.sample_with_metadata()
        found = _tensordict(rows, torch.Size((n,)))
        found["priority_weight"] = torch.from_numpy(meta["weight"].astype(np.float32))
        found["index"] = torch.from_numpy(np.stack([meta["row"], meta["generation"]], axis=1))
        return found

    def update_tensordict_priority(self, td: Any) -> None:
        """Give the rows of a sample the priorities in its `priority_key`; those overwritten meanwhile are left out."""
        if self.prioritized:
            row, generation = as_numpy(td["index"]).T
            meta = {"row": np.ascontiguousarray(row), "generation": np.ascontiguousarray(generation)}
            self._sampler.update_priorities(meta, as_numpy(td[self.priority_key]).reshape(len(row)))

    def empty(self) -> None:
        """Drop all rows."""
        if self.data is not None:
            self.data.clear()

    def _made_for(self, rows: Any) -> ReplayBuffer:
        if self.data is None:
            storage, kwargs = self._created_with
            made = ReplayBuffer.create(storage, _space(rows, 1), **kwargs)
            self.data = made
            return made
        return self.data

    def __getstate__(self) -> dict[str, Any]:
        if self.data is None:
            raise RuntimeError("TorchRLReplayBuffer: must have rows to be sent on, got none; extend it first")
        return vars(self)


class TorchRLStorage(LazyStackStorage):
    """Rows of a Recollect storage as the `storage` of a TorchRL `ReplayBuffer`, with any of TorchRL's samplers.

    `storage` and further arguments are those of `rc.ReplayBuffer.create`. One element is one row, as in TorchRL's
    `LazyTensorStorage` of one dimension. What is read is a copy, so changing it does not change the rows.

    Ownership: owns its rows; what is read is the caller's own.
    Concurrency: as the storage. It can be sent to other processes once it has rows in a storage that is shared.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl.data import ReplayBuffer
        >>> buffer = ReplayBuffer(storage=TorchRLStorage(100_000), batch_size=256)
        >>> index = buffer.extend(TensorDict({"obs": torch.zeros(50, 4)}, batch_size=[50]))
        >>> buffer.sample()["obs"].shape
        torch.Size([256, 4])
    """

    def __init__(self, max_size: int, *, storage: type[SpaceStorage] = MemoryStorage, **kwargs: Any) -> None:
        """Make an empty storage; its memory is reserved when the first row comes."""
        super().__init__(max_size)
        self._storage: SpaceStorage | None = None
        self._created_with = (storage, {"capacity": max_size, **kwargs})
        self._inner = torch.Size(())
        self._end = multiprocessing.Value("q", 0)

    @property
    def initialized(self) -> bool:
        """Whether it knows what a row is."""
        return self._storage is not None

    def __len__(self) -> int:
        return int(self._end.value)

    def set(self, cursor: Any, data: Any, *, set_cursor: bool = True) -> None:
        """Write one row at an int, or one for each of several indices."""
        if isinstance(data, list):
            data = torch.stack(data)
        rows = _rows(cursor, len(self))
        n_dims = 0 if isinstance(rows, int) else 1
        if self._storage is None:
            self._inner = data.batch_size[n_dims:]
            storage, kwargs = self._created_with
            self._storage = storage.create(_space(data, n_dims), **kwargs)
        self._storage.set(rows, _arrays(data))
        if n_dims == 0 or len(rows):
            with self._end.get_lock():
                self._end.value = max(self._end.value, int(np.max(rows)) + 1)
        if set_cursor:
            self._set_last_cursor(cursor)
        self._bump_mutation_revision()

    def get(self, index: Any) -> Any:
        """Read one row at an int, or a TensorDict of several."""
        if self._storage is None:
            raise EmptyError("TorchRLStorage: must have a row to read, got none; extend the buffer first")
        rows = _rows(index, len(self))
        if isinstance(rows, int):
            return _tensordict(self._storage.get(rows), self._inner)
        return _tensordict(self._storage.get(rows), torch.Size((len(rows), *self._inner)))

    def dumps(self, path: Any) -> None:
        """Save the rows, crash-safe; `rc.ReplayBuffer.load_from` reads them too."""
        if self._storage is not None:
            ReplayBuffer(self._storage, "storage", count=len(self)).dumps(path)

    def loads(self, path: Any) -> None:
        """Take the rows of a dump in place of these."""
        self.load_state_dict({"rows": ReplayBuffer.load_from(path, backend="torch")[:]})

    def state_dict(self) -> dict[str, Any]:
        """Return all rows as nested tensors."""
        return {"rows": self[:].to_dict() if len(self) else {}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the rows of `state_dict` in place of these."""
        self._empty()
        if rows := state_dict["rows"]:
            td = TensorDict(rows).auto_batch_size_(1 + len(self._inner))
            self.set(range(len(td)), td)

    def _contains_int(self, item: int) -> bool:
        return -len(self) <= item < len(self)

    def _empty(self) -> None:
        self._end.value = 0
        self._bump_mutation_revision()

    def __getstate__(self) -> dict[str, Any]:
        if self._storage is None:
            raise RuntimeError(
                "TorchRLStorage: must have rows to be sent on, got none; extend the buffer first"
            )
        state: dict[str, Any] = Storage.__getstate__(self)  # not that of lists, which refuses other processes
        return state

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self)} of {self.max_size} rows)"


def _rows(index: Any, n: int) -> Any:
    """Return an int, or an array of indices, for what TorchRL's writers and samplers pass."""
    if isinstance(index, tuple) and len(index) == 1:
        index = index[0]
    if isinstance(index, slice):
        return np.arange(n)[index]
    found = np.asarray(index)
    return int(found) if found.ndim == 0 else found


def _space(td: Any, n_dims: int) -> dict[str, Any]:
    """Return the short form of the space of one row; the first `n_dims` dimensions are those of the batch."""
    return {
        key: (tuple(value.shape[n_dims:]), str(value.dtype).removeprefix("torch."))
        if isinstance(value, torch.Tensor)
        else _space(value, n_dims)
        for key, value in td.items()
        if _is_kept(key, value)
    }


def _arrays(td: Any) -> dict[str, Any]:
    """Return nested arrays that share the memory of the tensors where they can."""
    found: dict[str, Any] = {}
    for key, value in td.items():
        if not isinstance(value, torch.Tensor):
            if _is_kept(key, value):
                found[key] = _arrays(value)
            continue
        try:
            found[key] = value.numpy()
        except (RuntimeError, TypeError):  # another device, a gradient, or a dtype that numpy does not know
            found[key] = as_numpy(value)
    return found


def _is_kept(key: str, value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return True
    if not is_tensor_collection(value) or is_non_tensor(value):
        raise SchemaError(
            f"{key}: must be a tensor, got {type(value).__name__}; exclude it or make it numbers"
        )
    return not value.is_empty()


def _tensordict(value: dict[str, Any], size: torch.Size) -> Any:
    """Return nested arrays as a TensorDict that shares their memory."""
    found: dict[str, Any] = {}
    for key, x in value.items():
        if isinstance(x, dict):
            found[key] = _tensordict(x, size)
        else:
            found[key] = torch.from_numpy(x) if x.dtype.kind != "V" else get_backend("torch").from_numpy(x)
    return TensorDict(found, batch_size=size)
