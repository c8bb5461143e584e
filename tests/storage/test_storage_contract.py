"""Every storage of the package keeps the contract of SpaceStorage, and so can one of yours."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from gymnasium import spaces

import recollect as rc
from recollect.backends.numpy import NumpyBackend
from recollect.errors import ClosedError, FormatError, ReadOnlyError
from recollect.indexing import normalize
from recollect.spaces import as_space, first_difference, space_from_json, space_to_json
from recollect.storage import ToBackendOrDeviceStorage
from recollect.storage.rows.base import encode_at
from recollect.testing import StorageContract


class TestMemory(StorageContract):
    cls = rc.MemoryStorage


class TestShared(StorageContract):
    cls = rc.SharedMemoryStorage
    allows_unbounded = False
    crosses_processes = True


class TestMemmap(StorageContract):
    cls = rc.MemmapStorage
    crosses_processes = True

    def create_arguments(self, tmp_path: Path) -> dict[str, Any]:
        return {"cache_path": tmp_path}


class OverTorch(StorageContract):
    cls = ToBackendOrDeviceStorage
    backend: ClassVar[str] = "torch"

    @pytest.fixture(autouse=True)
    def _needs_the_package(self) -> None:
        pytest.importorskip(self.backend)

    def create_arguments(self, tmp_path: Path) -> dict[str, Any]:
        return {"backend": self.backend}

    def load_arguments(self) -> dict[str, Any]:
        return {"backend": self.backend}


class TestTorch(OverTorch):
    pass


@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_every_read_is_of_the_backend(backend: str) -> None:
    pytest.importorskip(backend)
    with ToBackendOrDeviceStorage.create({"x": ((2,), "float32")}, capacity=3, backend=backend) as storage:
        storage.set([0, 1], {"x": np.ones((2, 2), np.float32)})
        one, several = storage.get(0)["x"], storage.get([0, 1])["x"]
        for read in (one, several, storage.get_flattened([0]), storage.get_column("x", [0, 1])):
            assert type(read).__module__.startswith(backend), type(read)


def test_reads_are_on_the_device_and_a_handle_keeps_it() -> None:
    pytest.importorskip("torch")
    where: Any = {"inner": "shared", "backend": "torch", "device": "meta"}
    with ToBackendOrDeviceStorage.create({"x": ((2,), "float32")}, capacity=3, **where) as storage:
        assert storage.get(0)["x"].device == storage.device == storage.get_flattened([0]).device
        assert storage.device.type == "meta"
        with pickle.loads(pickle.dumps(storage)) as other:
            assert other.device == storage.device


class OwnBackend(NumpyBackend):
    """A backend of yours."""

    @property
    def name(self) -> str:
        return "own"


@pytest.mark.parametrize("backend", ["jax", OwnBackend()], ids=["jax", "own"])
def test_a_handle_keeps_any_backend(backend: Any) -> None:
    if backend == "jax":
        pytest.importorskip("jax")
    where: Any = {"inner": "shared", "backend": backend}
    with (
        ToBackendOrDeviceStorage.create({"x": ((2,), "float32")}, capacity=3, **where) as storage,
        pickle.loads(pickle.dumps(storage)) as other,
    ):
        assert (other.backend.name, other.device) == (storage.backend.name, storage.device)
        assert type(other.get(0)["x"]) is type(storage.get(0)["x"])


def test_a_twin_outlives_the_storage_it_was_made_of() -> None:
    with rc.SharedMemoryStorage.create({"x": ((), "int64")}, capacity=3) as storage:
        storage.set(0, {"x": 7})
        with pickle.loads(pickle.dumps(storage)) as twin:
            storage.close()
            with pytest.raises(ClosedError):
                storage.get(0)
            with pytest.raises(ClosedError):
                storage.set(0, {"x": 1})
            assert twin.get(0)["x"] == 7


def test_segments_of_a_ring_are_told_by_row() -> None:
    with rc.MemoryStorage.create({"x": ((), "int64")}, capacity=4) as storage:
        for n in range(6):
            storage.append({"x": n})
            if n % 3 == 2:
                storage.mark_segment_end()
        assert storage.get_segments() == [(0, 2), (2, 3), (3, 4)], "the last is in rows 3, 0 and 1"


class TestSharedAsTorch(OverTorch):
    allows_unbounded = False
    crosses_processes = True

    def create_arguments(self, tmp_path: Path) -> dict[str, Any]:
        return {"backend": "torch", "inner": "shared"}

    def load_arguments(self) -> dict[str, Any]:
        return {"backend": "torch", "inner": "shared"}


class ListStorage(rc.SpaceStorage):
    """The smallest storage there can be: a list of samples, saved as JSON."""

    def __init__(self, space: Any, rows: list[Any], capacity: int | None, is_mutable: bool = True) -> None:
        super().__init__(space)
        self.rows, self.capacity, self.is_mutable = rows, capacity, is_mutable
        self._closed = False

    @classmethod
    def create(cls, single_instance_space: Any, *args: Any, capacity: int | None, cache_path: Any = None,
               multiprocessing: bool = False) -> ListStorage:  # fmt: skip
        space = as_space(single_instance_space)
        return cls(space, [space.sample() for _ in range(capacity or 0)], capacity)

    @classmethod
    def load_from(cls, path: Any, single_instance_space: Any, *, capacity: int | None = None, read_only: bool = True,
                  multiprocessing: bool = False) -> ListStorage:  # fmt: skip
        try:
            saved = json.loads(Path(path, "rows.json").read_text())
        except OSError as error:
            raise FormatError(f"{path}: {error}") from None
        space = as_space(single_instance_space)
        difference = first_difference(space, space_from_json(saved["space"]))
        if difference:
            raise ValueError(f"{path}: another space: {difference}")
        if capacity not in (None, saved["capacity"]):
            raise ValueError(f"{path}: capacity must be {saved['capacity']}, got {capacity}")
        storage = cls(space, [], saved["capacity"], not read_only)
        storage.rows = [
            storage.layout.unflatten_one(np.array(row, storage.layout.flat_dtype)) for row in saved["rows"]
        ]
        return storage

    def _open(self) -> None:
        if self._closed:
            raise ClosedError("closed")

    def _writable(self) -> None:
        self._open()
        if not self.is_mutable:
            raise ReadOnlyError("read-only")

    def __len__(self) -> int:
        return len(self.rows)

    def get(self, index: Any) -> Any:
        self._open()
        at = normalize(index, len(self))
        if isinstance(at, int):
            return self.layout.decode_one([a.copy() for a in self.layout.encode_one(self.rows[at])])
        columns = [np.zeros((len(at), *f.shape), f.dtype) for f in self.layout.fields]
        for i, row in enumerate(at):
            for column, value in zip(columns, self.layout.encode_one(self.rows[row])):
                column[i] = value
        return self.layout.decode_batch(columns, len(at))

    def set(self, index: Any, value: Any) -> None:
        self._writable()
        rows, arrays = encode_at(self.layout, normalize(index, len(self)), value, False)
        for i, row in enumerate(rows.tolist()):
            self.rows[row] = self.layout.decode_one([np.array(a[i]) for a in arrays])

    def append(self, value: Any) -> None:
        raise ReadOnlyError("no cursor")

    def extend_length(self, length: int) -> None:
        if length < 0:
            raise ValueError("length: must be at least 0")
        if self.capacity is None:
            self._writable()
            self.rows += [self.single_instance_space.sample() for _ in range(length)]

    def shrink_length(self, length: int) -> None:
        if not 0 <= length <= (len(self) if self.capacity is None else length):
            raise ValueError("length: must be between 0 and the rows there are")
        if self.capacity is None:
            self._writable()
            del self.rows[len(self) - length :]

    def clear(self) -> None:
        self._writable()
        super().clear()

    def dumps(self, path: Any) -> None:
        Path(path).mkdir(parents=True, exist_ok=True)
        rows = [self.layout.flatten_one(row).tolist() for row in self.rows]
        saved = {"space": space_to_json(self.single_instance_space), "capacity": self.capacity, "rows": rows}
        Path(path, "rows.json").write_text(json.dumps(saved))

    def close(self) -> None:
        self._closed = True


rc.register_storage("contract-list", ListStorage)


class TestList(StorageContract):
    cls = ListStorage
    can_append = False
    keeps_segments = False


def test_a_storage_of_yours_in_a_replay_buffer(tmp_path: Path) -> None:
    """Written, dumped, and loaded by the name it was registered with."""
    space = {"x": ((), "int64")}
    with rc.ReplayBuffer.create("contract-list", space, capacity=4, maintain_segment_metadata=True) as buffer:
        for n in range(6):
            buffer.append({"x": n})
            if n == 4:
                buffer.mark_segment_end()
        buffer.mark_segment_end()
        buffer.dumps(tmp_path / "dump")
        with rc.ReplayBuffer.load_from(tmp_path / "dump") as loaded:
            assert loaded[...]["x"].tolist() == [2, 3, 4, 5]
            assert loaded.get_segments() == buffer.get_segments() == [(0, 3), (3, 4)]


def test_register_refuses_taken_names_and_other_things() -> None:
    with pytest.raises(ValueError, match="taken"):
        rc.register_storage("memory", ListStorage)
    with pytest.raises(ValueError, match="taken"):
        rc.register_storage("contract-list", rc.MemoryStorage)
    with pytest.raises(TypeError, match="SpaceStorage"):
        rc.register_storage("x", dict)  # type: ignore[arg-type]
    rc.register_storage("contract-list", ListStorage)  # again is nothing new


@pytest.mark.parametrize("cls", [rc.MemoryStorage, rc.SharedMemoryStorage])
def test_row_storages_read_text_and_sequences_by_row(cls: Any) -> None:
    tokens = spaces.Sequence(spaces.Box(0, 9, (), np.int64), stack=True)
    space = spaces.Dict({"note": spaces.Text(8), "tokens": tokens})
    with cls.create(space, capacity=3, max_lengths={"tokens": 4}) as storage:
        for row, n in enumerate((1, 3, 0)):
            storage.set(row, {"note": "a" * n, "tokens": np.arange(n)})
        one, two = storage.get(1), storage.get([2, 0])
        assert (one["note"], one["tokens"].tolist()) == ("aaa", [0, 1, 2])
        assert (two["note"], [t.tolist() for t in two["tokens"]]) == (("", "a"), [[], [0]])
        assert storage.get_column("note", [0, 1]) == ("a", "aaa")


def test_a_storage_of_your_own_must_give_three_methods() -> None:
    assert rc.SpaceStorage.__abstractmethods__ == {"get", "set", "dumps"}

    class Least(rc.SpaceStorage):
        def get(self, index: Any) -> Any: ...
        def set(self, index: Any, value: Any) -> None: ...
        def dumps(self, path: Any) -> None: ...

    made = Least(spaces.Box(0, 1, (2,)))
    with pytest.raises(NotImplementedError, match="__len__"):
        len(made)
    made.capacity = 3
    assert len(made) == 3
    for call in (lambda: Least.create(made.single_instance_space, capacity=3),
                 lambda: Least.load_from("x", made.single_instance_space)):  # fmt: skip
        with pytest.raises(NotImplementedError, match="Least: must have its own"):
            call()
