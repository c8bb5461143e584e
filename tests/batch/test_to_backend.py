"""ToBackendOrDeviceBatch: torch and jax outside, whatever is inside."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
from tests.batch.make import batch, block, numbers, sample

import recollect as rc
from recollect.batch import ToBackendOrDeviceBatch
from recollect.sampling import IndexStream
from recollect.testing.batches import ListBatch

torch = pytest.importorskip("torch")


class TestOutwards:
    def test_data_and_metadata_are_tensors(self) -> None:
        source = batch(4, metadata=[{"w": i} for i in range(4)])
        view = ToBackendOrDeviceBatch(source, "torch")
        data, metadata = view.get_at_with_metadata([2, 0])
        assert torch.equal(data["id"], torch.tensor([2, 0]))
        assert data["obs"]["image"].dtype == torch.uint8
        assert metadata is not None
        assert torch.equal(metadata["w"], torch.tensor([2, 0]))
        assert view[1]["id"].item() == 1
        assert isinstance(view.get_flattened_at(1), torch.Tensor)
        assert view.backend.name == "torch"
        assert str(view.device) == "cpu"

    def test_draws_columns_and_places_too(self) -> None:
        view = ToBackendOrDeviceBatch(batch(9), "torch")
        assert view.draw_at(IndexStream(0), 3)["id"].tolist() == IndexStream(0).indices(9, 3).tolist()
        assert isinstance(view.get_column("id").draw_at(IndexStream(0), 3), torch.Tensor)
        found = view.get_located(view.locate([5]))
        assert found is not None
        assert found[0]["id"].tolist() == [5]

    def test_hand_over_is_free_and_the_callers_own(self) -> None:
        given: list[Any] = []

        class Keeps(ListBatch):
            def get_at(self, idx: Any) -> Any:
                given.append(super().get_at(idx))
                return given[-1]

        view = ToBackendOrDeviceBatch(Keeps(((2,), "float32"), np.ones((3, 2), np.float32)), "torch")
        tensor = view[[0, 1]]
        assert tensor.data_ptr() == given[-1].ctypes.data
        tensor.fill_(7)
        assert view[[0, 1]].tolist() == [[1, 1], [1, 1]]

    def test_no_backend_keeps_the_sources(self) -> None:
        view = ToBackendOrDeviceBatch(numbers(3))
        assert isinstance(view[:], np.ndarray)
        moved = ToBackendOrDeviceBatch(ToBackendOrDeviceBatch(numbers(3), "torch"), device="cpu")
        assert isinstance(moved[:], torch.Tensor)
        assert moved.backend.name == "torch"

    def test_the_device_is_asked_for(self) -> None:
        view = ToBackendOrDeviceBatch(numbers(3), "torch", "meta")
        assert view[:].device.type == "meta"
        assert str(view.device) == "meta"
        assert str(ToBackendOrDeviceBatch(view).device) == "meta"
        assert str(ToBackendOrDeviceBatch(view, "numpy").device) == "cpu"

    def test_back_to_numpy(self) -> None:
        view = ToBackendOrDeviceBatch(ToBackendOrDeviceBatch(numbers(3), "torch"), "numpy")
        assert isinstance(view[:], np.ndarray)

    def test_jax(self) -> None:
        jax = pytest.importorskip("jax")
        source = ListBatch({"x": ((2,), "float32")}, [{"x": [i, i]} for i in range(3)])
        view = ToBackendOrDeviceBatch(source, "jax")
        assert isinstance(view[[1]]["x"], jax.Array)
        assert view[jax.numpy.array([2, 0])]["x"].tolist() == [[2, 2], [0, 0]]
        view.append({"x": jax.numpy.array([9.0, 9.0])})
        assert source[-1]["x"].tolist() == [9, 9]


@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_a_view_is_sent_to_other_processes_with_its_device(backend: str) -> None:
    pytest.importorskip(backend)
    space = {"x": ((2,), "float32")}
    with rc.ReplayBuffer.create("shared", space, capacity=4, multiprocessing=True) as buffer:
        buffer.append({"x": np.ones(2, np.float32)})
        view = ToBackendOrDeviceBatch(buffer, backend)
        other = pickle.loads(pickle.dumps(view))
        assert other.device == view.device and type(other[0]["x"]) is type(view[0]["x"])
        other.batch.close()


class TestInwards:
    def test_indices_and_values_of_any_backend(self) -> None:
        source = batch(3, segments=[])
        view = ToBackendOrDeviceBatch(source, "torch")
        view.append(ToBackendOrDeviceBatch(batch(1, start=3), "torch")[0])
        source.mark_segment_end()
        view.extend(block([4, 5]))
        view[torch.tensor([0, 1])] = ToBackendOrDeviceBatch(batch(2, start=10), "torch")[:]
        view[torch.tensor(2)] = sample(12)
        flat = ToBackendOrDeviceBatch(batch(3, start=20), "torch")
        view.append_flattened(flat.get_flattened_at(0))
        source.mark_segment_end()
        view.extend_flattened(flat.get_flattened_at([1, 2]))
        view.set_flattened_at(0, flat.get_flattened_at(2))
        view.remove_at(torch.tensor([1]))
        assert source[:]["id"].tolist() == [22, 12, 3, 4, 5, 20, 21, 22]
        assert view.is_mutable

    def test_values_arrive_in_the_sources_backend(self) -> None:
        seen: list[Any] = []

        class Sees(ListBatch):
            def extend(self, value: Any, ends: Any = None) -> None:
                seen.append(value)
                super().extend(value, ends)

        ToBackendOrDeviceBatch(Sees(((), "int64")), "torch").extend(torch.arange(3))
        assert isinstance(seen[0], np.ndarray)
