"""A batch is the caller's own: its arrays are filled again only when nobody can have any part of it."""

from __future__ import annotations

import sys
import sysconfig
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import recollect as rc
from recollect import _core

COUNTS_ARE_EXACT = sys.version_info < (3, 14) and not sysconfig.get_config_var("Py_GIL_DISABLED")
needs_exact_counts = pytest.mark.skipif(
    not COUNTS_ARE_EXACT, reason="references are not all counted from CPython 3.14 on"
)
SPACE = {
    "obs": ((3,), "float32"),
    "nested": {"a": ((), "int64"), "b": ((2,), "uint8")},
    "pair": (((), "bool"), ((4,), "float64")),
}


@pytest.fixture(params=[rc.StepSampler, rc.PrioritizedSampler])
def sampler(request: pytest.FixtureRequest) -> rc.BatchSampler:
    buf = rc.ReplayBuffer.create(rc.MemoryStorage, SPACE, capacity=1000)
    n = np.arange(1000)
    obs = np.repeat(n[:, None], 3, 1).astype("float32")
    nested = {"a": n, "b": np.repeat(n[:, None] % 256, 2, 1).astype("uint8")}
    buf.extend({"obs": obs, "nested": nested, "pair": (n % 2 == 1, np.repeat(n[:, None] * 1.0, 4, 1))})
    made: rc.BatchSampler = request.param(buf, 16, seed=0)
    return made


def leaves(batch: Any) -> list[Any]:
    return [batch["obs"], batch["nested"]["a"], batch["nested"]["b"], *batch["pair"]]


def check(batch: Any) -> None:
    """The batch is as the space says, and its rows are whole."""
    assert list(batch) == list(SPACE) and list(batch["nested"]) == ["a", "b"]
    shapes = [
        ((16, 3), "float32"),
        ((16,), "int64"),
        ((16, 2), "uint8"),
        ((16,), "bool"),
        ((16, 4), "float64"),
    ]
    assert [(a.shape, a.dtype.name) for a in leaves(batch)] == shapes
    assert all(a.flags.writeable and a.flags.c_contiguous for a in leaves(batch))
    n = batch["nested"]["a"]
    for a in leaves(batch):
        expected = n % 2 == 1 if a.dtype == bool else n.astype(a.dtype)
        np.testing.assert_array_equal(
            a, expected.reshape(16, *[1] * (a.ndim - 1)) * np.ones(a.shape, a.dtype)
        )


def addresses(batch: Any) -> list[int]:
    return [a.ctypes.data for a in leaves(batch)]


@needs_exact_counts
def test_a_dropped_batch_is_filled_again(sampler: rc.BatchSampler) -> None:
    first = addresses(sampler.sample())
    assert all(addresses(sampler.sample()) == first for _ in range(5))


@needs_exact_counts
def test_a_loop_that_has_the_last_batch_uses_two(sampler: rc.BatchSampler) -> None:
    seen, batch = set(), None
    for _ in range(10):
        batch = sampler.sample()
        check(batch)
        seen.add(tuple(addresses(batch)))
    assert len(seen) == 2


@pytest.fixture
def made_anew() -> Iterator[None]:
    """As in CPython 3.14, where references are not all counted."""
    before = _core.fill_again(False)
    yield
    _core.fill_again(before)


def test_where_references_are_not_all_counted_no_batch_is_filled_again(
    sampler: rc.BatchSampler, made_anew: None
) -> None:
    references = []
    for _ in range(4):
        batch = sampler.sample()
        check(batch)
        references += map(weakref.ref, leaves(batch))
        del batch
    assert all(reference() is None for reference in references)


def test_counts_that_are_not_exact_are_not_relied_on() -> None:
    before = _core.fill_again(True)
    assert before == COUNTS_ARE_EXACT
    assert _core.fill_again(before) == COUNTS_ARE_EXACT


KEEP: dict[str, Callable[[Any], Any]] = {
    "the batch": lambda b: b,
    "one array": lambda b: b["obs"],
    "a nested array": lambda b: b["nested"]["b"],
    "a nested dict": lambda b: b["nested"],
    "a tuple": lambda b: b["pair"],
    "an array of a tuple": lambda b: b["pair"][1],
    "a view": lambda b: b["obs"][2:5],
    "a memoryview": lambda b: memoryview(b["obs"]),
    "values": lambda b: b["nested"].values(),
    "a weak reference": lambda b: weakref.ref(b["obs"]),
    "a tensor": lambda b: pytest.importorskip("torch").from_numpy(b["obs"]),
}


def contents(kept: Any) -> list[Any]:
    """Copies of all the numbers that can be seen through what was kept."""
    if isinstance(kept, weakref.ref):
        return contents([] if kept() is None else kept())
    if isinstance(kept, dict):
        return contents(list(kept.values()))
    if isinstance(kept, list | tuple | type({}.values())):
        return [x for part in kept for x in contents(part)]
    return [kept.numpy().copy() if hasattr(kept, "numpy") else np.array(kept)]


@pytest.mark.parametrize("keep", KEEP.values(), ids=KEEP)
def test_what_somebody_has_never_changes(sampler: rc.BatchSampler, keep: Callable[[Any], Any]) -> None:
    batch = sampler.sample()
    kept = keep(batch)
    before = contents(kept)
    assert before
    del batch
    for _ in range(4):
        check(sampler.sample())
    for old, new in zip(before, contents(kept)):
        np.testing.assert_array_equal(old, new)


CHANGE: dict[str, Callable[[Any], Any]] = {
    "a key more": lambda b: b.update(extra=1),
    "a key less": lambda b: b.pop("obs") is None,
    "another order": lambda b: b.update(obs=b.pop("obs")),
    "another array": lambda b: b.update(obs=np.zeros((16, 3), "float32")),
    "a view of it": lambda b: b.update(obs=b["obs"][:]),
    "a nested key more": lambda b: b["nested"].update(extra=1),
    "another nested dict": lambda b: b.update(nested={"a": b["nested"]["a"], "b": b["nested"]["b"]}),
    "another tuple": lambda b: b.update(pair=(b["pair"][0], b["pair"][1])),
    "a list": lambda b: b.update(pair=list(b["pair"])),
    "another shape": lambda b: setattr(b["obs"], "shape", (3, 16)),
    "another dtype": lambda b: setattr(b["obs"], "dtype", "int32"),
    "read-only": lambda b: b["obs"].setflags(write=False),
    "nothing but values": lambda b: b["obs"].fill(-1),
}


@pytest.mark.parametrize("change", CHANGE.values(), ids=CHANGE)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # numpy means to end assigning shapes and dtypes
def test_a_changed_batch_does_not_come_back_changed(
    sampler: rc.BatchSampler, change: Callable[[Any], Any]
) -> None:
    change(sampler.sample())
    for _ in range(4):
        check(sampler.sample())


def test_an_array_put_into_a_batch_is_not_written(sampler: rc.BatchSampler) -> None:
    memory = bytearray(16 * 3 * 4)
    sampler.sample()["obs"] = np.frombuffer(memory, "float32").reshape(16, 3)
    for _ in range(4):
        check(sampler.sample())
    assert not any(memory)


def test_the_array_that_a_view_took_the_place_of_is_not_written(sampler: rc.BatchSampler) -> None:
    batch = sampler.sample()
    mine, before = batch["obs"], batch["obs"].copy()
    batch["obs"] = mine[:]
    del batch
    for _ in range(4):
        check(sampler.sample())
    np.testing.assert_array_equal(mine, before)


ONE_ARRAY: dict[str, Callable[[Any], Any]] = {
    "the batch": lambda b: b,
    "a view": lambda b: b[2:5],
    "a weak reference": weakref.ref,
}


@pytest.fixture(params=[rc.StepSampler, rc.PrioritizedSampler])
def of_one_array(request: pytest.FixtureRequest) -> Any:
    buf = rc.ReplayBuffer.create(rc.MemoryStorage, ((3,), "float32"), capacity=1000)
    buf.extend(np.repeat(np.arange(1000)[:, None], 3, 1).astype("float32"))
    return request.param(buf, 16, seed=0)


@needs_exact_counts
def test_a_dropped_batch_that_is_one_array_is_filled_again_too(of_one_array: Any) -> None:
    first = of_one_array.sample().ctypes.data
    assert all(of_one_array.sample().ctypes.data == first for _ in range(5))


@pytest.mark.parametrize("keep", ONE_ARRAY.values(), ids=ONE_ARRAY)
def test_a_batch_that_is_one_array_never_changes_either(
    of_one_array: Any, keep: Callable[[Any], Any]
) -> None:
    sampler = of_one_array
    kept = keep(sampler.sample())
    before = contents(kept)
    seen = [sampler.sample() for _ in range(4)]
    for old, new in zip(before, contents(kept)):
        np.testing.assert_array_equal(old, new)
    assert len({a.ctypes.data for a in seen}) == 4, "each is another"
    assert len({tuple(a[:, 0].tolist()) for a in seen}) == 4


def test_labels_that_somebody_has_never_change() -> None:
    buf = rc.ReplayBuffer.create(rc.MemoryStorage, {"x": ((), "int64")}, capacity=100)
    buf.extend({"x": np.arange(100)})
    sampler = rc.PrioritizedSampler(buf, 8, seed=0)
    kept = [sampler.sample_with_metadata() for _ in range(4)]
    for batch, meta in kept:
        np.testing.assert_array_equal(buf.storage.get(meta["row"])["x"], batch["x"])  # type: ignore[index]
    one = sampler.sample_with_metadata()[1]["weight"]  # type: ignore[index]
    before = one.copy()
    sampler.update_priorities(kept[0][1], np.arange(8.0))  # type: ignore[arg-type]
    for _ in range(4):
        sampler.sample_with_metadata()
    np.testing.assert_array_equal(one, before)


def test_another_batch_size_is_another_batch(sampler: rc.BatchSampler) -> None:
    sampler.sample()
    sampler.batch_size = 5
    assert sampler.sample()["obs"].shape == (5, 3)


def test_the_same_draws_whoever_keeps_them() -> None:
    def drawn(keep: bool) -> list[Any]:
        buf = rc.ReplayBuffer.create(rc.MemoryStorage, {"x": ((), "int64")}, capacity=100)
        buf.extend({"x": np.arange(100)})
        sampler, kept = rc.StepSampler(buf, 8, seed=3), []
        for _ in range(6):
            batch = sampler.sample()
            kept.append(batch if keep else {"x": batch["x"].tolist()})
        return [list(map(int, b["x"])) for b in kept]

    assert drawn(True) == drawn(False)


def test_large_batches_are_not_held_on_to() -> None:
    buf = rc.ReplayBuffer.create(rc.MemoryStorage, {"x": ((1 << 18,), "uint8")}, capacity=4)
    buf.extend({"x": np.zeros((4, 1 << 18), "uint8")})
    small, large = rc.StepSampler(buf, 4, seed=0), rc.StepSampler(buf, 5, seed=0)
    references = []
    for sampler in (small, large):
        batch = sampler.sample()
        references.append(weakref.ref(batch["x"]))
        del batch
    assert (references[0]() is not None) == COUNTS_ARE_EXACT
    assert references[1]() is None
