"""SharedObsNormStats: newest pair to every reader, once; the last good pair stays; and the one normalize."""

from __future__ import annotations

import multiprocessing
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.process.killing import in_child

import recollect as rc
from recollect.ipc.shared_obs_stats import SharedObsNormStats
from recollect.learners import normalize


def pair(n: float, dtype: Any = "float32", shape: Any = (3,)) -> tuple[Any, Any]:
    return np.full(shape, n, dtype), np.full(shape, n + 1, dtype)


def same(a: Any, b: Any) -> bool:
    return a is not None and all(x.dtype == y.dtype and np.array_equal(x, y) for x, y in zip(a, b))


@given(st.lists(st.sampled_from(["put", "get a", "get b", "latest"]), max_size=12))
def test_against_a_model(calls: list[str]) -> None:
    """Each reader gets every newest pair once, however many were put between."""
    with SharedObsNormStats(None) as stats:
        readers = {"a": pickle.loads(pickle.dumps(stats)), "b": pickle.loads(pickle.dumps(stats))}
        newest, returned = 0, {"a": 0, "b": 0}
        for call in calls:
            if call == "put":
                newest += 1
                stats.put(pair(newest))
            elif call == "latest":
                found = stats.latest()
                assert found is None if not newest else same(found, pair(newest))
            else:
                who = call[-1]
                found = readers[who].get()
                assert found is None if returned[who] == newest else same(found, pair(newest))
                returned[who] = newest
            assert stats.version == newest
        for reader in readers.values():
            reader.close()


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "bfloat16"])
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3, 4)])
def test_dtypes_and_shapes(dtype: str, shape: tuple[int, ...]) -> None:
    pytest.importorskip("ml_dtypes")
    with SharedObsNormStats(multiprocessing.get_context("spawn")) as stats:
        stats.put(pair(2, dtype, shape))
        found = stats.get()
        assert same(found, pair(2, dtype, shape)) and found[0].shape == shape
        assert (stats.stats().shape, stats.stats().dtype) == (shape, dtype)


def test_tensors_and_strided_arrays_are_taken() -> None:
    torch = pytest.importorskip("torch")
    with SharedObsNormStats(None) as stats:
        stats.put((torch.zeros(2), torch.ones(2)))
        stats.put((np.arange(4, dtype="f4")[::2], np.arange(4, dtype="f4")[::-2]))
        found = stats.get()
        assert found is not None and found[0].tolist() == [0, 2] and found[1].tolist() == [3, 1]


BAD: dict[str, tuple[Any, type[Exception], str]] = {
    "nan mean": (
        (np.float32([0, np.nan, 0]), np.ones(3, "f4")),
        rc.SchemaError,
        r"mean: .* got nan at \(1,\)",
    ),
    "inf std": (
        (np.zeros(3, "f4"), np.float32([1, 1, np.inf])),
        rc.SchemaError,
        "std: values must be finite",
    ),
    "negative std": (
        (np.zeros(3, "f4"), np.float32([1, -1, 0])),
        rc.SchemaError,
        "std: values must be at least 0",
    ),
    "another shape": (pair(1, shape=(4,)), rc.SchemaError, "mean: shape must be"),
    "another dtype": (pair(1, "float64"), rc.DtypeError, "mean: dtype must be float32"),
    "two shapes": ((np.zeros(3, "f4"), np.ones(4, "f4")), rc.SchemaError, "std: shape must be the mean's"),
    "two dtypes": ((np.zeros(3, "f4"), np.ones(3)), rc.DtypeError, "std: dtype must be the mean's"),
    "ints": ((np.zeros(3, int), np.ones(3, int)), rc.DtypeError, "mean: dtype must be a float"),
    "byte order": ((np.zeros(3, ">f4"), np.ones(3, ">f4")), rc.DtypeError, "of this machine"),
    "no pair": (np.zeros(3, "f4"), rc.SchemaError, "must be a pair"),
    "three": ((1, 2, 3), rc.SchemaError, "must be a pair"),
}


@pytest.mark.parametrize("what", BAD)
@pytest.mark.parametrize("by", ["the same object", "another"])
def test_the_last_good_pair_stays(what: str, by: str) -> None:
    bad, error, text = BAD[what]
    with SharedObsNormStats(None) as stats:
        stats.put(pair(5))
        with pickle.loads(pickle.dumps(stats)) as other:
            with pytest.raises(error, match=text):
                (stats if by == "the same object" else other).put(bad)
            assert stats.version == 1 and same(other.get(), pair(5))
            stats.put(pair(6))
            assert same(other.get(), pair(6))


def test_too_large() -> None:
    with SharedObsNormStats(None, max_bytes=24) as stats:
        stats.put(pair(1))
    with SharedObsNormStats(None, max_bytes=23) as stats:
        with pytest.raises(rc.SchemaError, match="at most 23 bytes, got 24; raise max_bytes"):
            stats.put(pair(1))
        assert stats.version == 0 and stats.get() is None
        stats.put(pair(1, "float16"))  # the refused one fixed nothing
    with pytest.raises(ValueError, match="max_bytes"):
        SharedObsNormStats(None, max_bytes=0)
    with SharedObsNormStats(None) as stats, pytest.raises(rc.SchemaError, match="at most 12 axes"):
        stats.put(pair(1, shape=(1,) * 13))


def test_untouched_pages_cost_nothing_and_the_handle_is_small() -> None:
    with SharedObsNormStats(None) as stats:
        assert stats.nbytes > 3 << 20 and len(pickle.dumps(stats)) < 300


@pytest.mark.process
def test_one_writer() -> None:
    with SharedObsNormStats(None) as stats:
        stats.put(pair(1))

        def refused() -> None:
            with pytest.raises(rc.LaneBusyError):
                stats.put(pair(2))
            assert same(stats.get(), pair(1))

        in_child(refused)
        stats.release_lane()
        in_child(lambda: stats.put(pair(2)))
        assert same(stats.get(), pair(2))


@pytest.mark.process
def test_closing() -> None:
    stats = SharedObsNormStats(None)
    other = pickle.loads(pickle.dumps(stats))
    stats.cleanup()
    for s in (stats, other):
        for call in (s.get, s.latest, s.stats, lambda: s.put(pair(1)), lambda: s.version):  # noqa: B023
            with pytest.raises(rc.ClosedError):
                call()
    other.close()


# -- normalize


def test_normalize() -> None:
    torch = pytest.importorskip("torch")
    obs = np.float32([[1.0, 5.0]])
    assert normalize(obs, None) is obs
    stats = np.float32([0.0, 1.0]), np.float32([0.49, 1.99])
    expected = (obs - stats[0]) / (stats[1] + np.float32(1e-2))
    found = normalize(obs, stats)
    assert np.array_equal(found, expected) and found.dtype == np.float32
    tensor = normalize(torch.from_numpy(obs), stats)
    assert tensor.dtype == torch.float32 and np.allclose(tensor.numpy(), expected)
    assert np.allclose(normalize(obs, stats, eps=1.0)[0, 0], 1 / 1.49)
    assert normalize(obs.astype(np.float64), stats).dtype == np.float64
