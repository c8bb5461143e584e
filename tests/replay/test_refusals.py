"""What a buffer refuses: the named error, with the leaf's path, nothing changed, and counted as rejected."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.replay.make import KINDS, ROW_KINDS, block, create, sample

import recollect
from recollect.errors import DtypeError, MissingLeafError, ReadOnlyError, SchemaError, SegmentOpenError
from recollect.replay import ReplayBuffer

SPACE = {
    "obs": {"image": ((2, 2), "uint8"), "pos": ((3,), "float32")},
    "n": ((), "int8"),
    "flag": ((), "bool"),
}
ROOT = Path(__file__).parents[2]


def good(n: int | None = None) -> dict[str, Any]:
    lead = () if n is None else (n,)
    return {
        "obs": {"image": np.ones((*lead, 2, 2), np.uint8), "pos": np.ones((*lead, 3), np.float32)},
        "n": np.ones(lead, np.int8),
        "flag": np.ones(lead, bool),
    }


def with_leaf(value: dict[str, Any], path: str, leaf: Any) -> dict[str, Any]:
    changed = {**value, "obs": dict(value["obs"])}
    at, last = (changed["obs"], path[4:]) if path.startswith("obs/") else (changed, path)
    if leaf is None:
        del at[last]
    else:
        at[last] = leaf
    return changed


@dataclass(frozen=True)
class Refusal:
    name: str
    value: Any
    error: type[Exception]
    text: str  # part of the message
    n: int = 1  # how many samples are refused


f32 = np.float32
ONE = [
    Refusal("missing leaf", with_leaf(good(), "obs/pos", None), MissingLeafError, "obs/pos"),
    Refusal("missing branch", {"n": np.int8(1), "flag": True}, MissingLeafError, "obs"),
    Refusal("unknown key", {**good(), "extra": 1}, SchemaError, "extra"),
    Refusal("unknown nested key", with_leaf(good(), "obs/zzz", 1), SchemaError, "zzz"),
    Refusal("wrong dtype", with_leaf(good(), "obs/pos", np.ones(3)), DtypeError, "obs/pos"),
    Refusal("other kind", with_leaf(good(), "obs/image", np.ones((2, 2), f32)), DtypeError, "obs/image"),
    Refusal("signed for unsigned", with_leaf(good(), "obs/image", np.ones((2, 2), np.int8)), DtypeError, "obs/image"),
    Refusal("wrong shape", with_leaf(good(), "obs/pos", np.ones(4, f32)), SchemaError, "obs/pos"),
    Refusal("batch axis", good(1), SchemaError, "image"),
    Refusal("number too large", with_leaf(good(), "n", 200), SchemaError, "n:"),
    Refusal("float for an int", with_leaf(good(), "n", 1.0), DtypeError, "n:"),
    Refusal("bool for an int", with_leaf(good(), "n", True), DtypeError, "n:"),
    Refusal("int for a bool", with_leaf(good(), "flag", 1), DtypeError, "flag"),
    Refusal("string", with_leaf(good(), "n", "1"), SchemaError, "n:"),
    Refusal("none", with_leaf(good(), "obs/pos", [None] * 3), SchemaError, "obs/pos"),
    Refusal("not a dict", [1, 2], SchemaError, ""),
    Refusal("nothing", None, SchemaError, ""),
]  # fmt: skip
MANY = [
    Refusal("missing leaf", with_leaf(good(3), "n", None), MissingLeafError, "n", 3),
    Refusal("missing first leaf", with_leaf(good(3), "obs/image", None), MissingLeafError, "obs/image", 3),
    Refusal("unknown key", {**good(3), "extra": np.ones(3)}, SchemaError, "extra", 3),
    Refusal("unequal lengths", with_leaf(good(3), "flag", np.ones(2, bool)), SchemaError, "flag", 3),
    Refusal("wrong dtype", with_leaf(good(3), "obs/pos", np.ones((3, 3))), DtypeError, "obs/pos", 3),
    Refusal("wrong shape", with_leaf(good(3), "obs/pos", np.ones((3, 4), f32)), SchemaError, "obs/pos", 3),
    Refusal("no batch axis", with_leaf(good(3), "obs/pos", np.ones(3, f32)), SchemaError, "obs/pos", 3),
    Refusal("one number too large", with_leaf(good(3), "n", [1, 2, 300]), SchemaError, "n:", 3),
    Refusal("one of another kind", with_leaf(good(3), "n", [1, 2.5, 3]), SchemaError, "n:", 3),
    Refusal("not a dict", "abc", SchemaError, "", 1),
    Refusal("nothing", None, SchemaError, "", 1),
]
INDICES: list[tuple[Any, type[Exception]]] = [
    (3, IndexError), (-4, IndexError), ([0, 3], IndexError), (np.array([True, False]), IndexError),
    (True, TypeError), (1.0, TypeError), ("0", TypeError), (None, TypeError), ([[0]], TypeError),
]  # fmt: skip


def state_of(buffer: ReplayBuffer) -> Any:
    """Everything that a refused call must leave alone."""
    place = buffer.locate(...)
    return (
        len(buffer), buffer.get_flattened_at(...).tobytes(), buffer.get_segments(), buffer.open_segment, buffer.offset,
        place.row.tolist(), place.generation.tolist(), place.segment.tolist(), place.step.tolist(),
    )  # fmt: skip


def problem(what: str, call: Callable[[], Any], error: type[Exception], text: str = "") -> list[str]:
    """One sentence if the call does not raise what it should. No assert here: this also runs under -O."""
    try:
        call()
    except Exception as raised:
        if not isinstance(raised, error):
            return [f"{what}: {type(raised).__name__} instead of {error.__name__} ({raised})"]
        return [] if text in str(raised) else [f"{what}: {raised!s} does not say {text!r}"]
    return [f"{what}: nothing was raised"]


def problems(kind: str, directory: Path | str) -> list[str]:
    """All that is wrong with what a buffer of this kind refuses."""
    found: list[str] = []
    with create(kind, SPACE, directory=directory, capacity=4, maintain_segment_metadata=True) as buffer:
        buffer.extend(good(2))
        buffer.append(good())  # an open segment
        before, rejected = state_of(buffer), 0

        def refused(what: str, call: Callable[[], Any], error: type[Exception], text: str, n: int) -> None:
            nonlocal rejected
            rejected += n
            found.extend(problem(what, call, error, text))
            if state_of(buffer) != before:
                found.append(f"{what}: something changed")
            if buffer.stats().rejected != rejected:
                found.append(f"{what}: {buffer.stats().rejected} rejected in all, not {rejected}")
                rejected = buffer.stats().rejected

        for r in ONE:
            refused(f"append {r.name}", lambda v=r.value: buffer.append(v), r.error, r.text, 1)
            refused(f"set_at(0) {r.name}", lambda v=r.value: buffer.set_at(0, v), r.error, r.text, 0)
        refused("extend while open", lambda: buffer.extend(good(2)), SegmentOpenError, "mark_segment_end", 2)
        refused("remove open", lambda: buffer.remove_at(2), SegmentOpenError, "mark_segment_end", 0)
        refused(
            "dumps while open",
            lambda: buffer.dumps(Path(directory) / "no"),
            SegmentOpenError,
            "cut_open=True",
            0,
        )
        buffer.mark_segment_end()
        before = state_of(buffer)
        for r in MANY:
            refused(f"extend {r.name}", lambda v=r.value: buffer.extend(v), r.error, r.text, r.n)
            refused(
                f"set_at([0, 1, 2]) {r.name}",
                lambda v=r.value: buffer.set_at([0, 1, 2], v),
                r.error,
                r.text,
                0,
            )
        refused("set_at length", lambda: buffer.set_at([0, 1], good(3)), SchemaError, "length", 0)
        for ends in ([True], np.ones(3, np.int64), np.ones((3, 1), bool)):
            refused(f"ends {ends}", lambda e=ends: buffer.extend(good(3), ends=e), ValueError, "ends", 3)
        refused("ends of nothing", lambda: buffer.extend(good(0), ends=[True]), ValueError, "ends", 0)
        for index, error in INDICES:
            for verb in ("get_at", "remove_at", "locate", "get_flattened_at", "get_packed_at"):
                if kind in ROW_KINDS or verb != "get_packed_at":
                    refused(f"{verb}({index!r})", lambda v=verb, i=index: getattr(buffer, v)(i), error, "", 0)
            refused(f"set_at({index!r})", lambda i=index: buffer.set_at(i, good()), error, "", 0)
        stats = buffer.stats()
        if stats.offered != stats.live + stats.evicted + stats.removed + stats.rejected + stats.dropped:
            found.append(f"counts do not add up: {stats}")
        buffer.append(good())  # and it still works
        if len(buffer) != 4:
            found.append("append after refusals did not add a sample")
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_refused_calls_raise_the_named_error_and_change_nothing(kind: str, tmp_path: Path) -> None:
    assert problems(kind, tmp_path) == []


@pytest.mark.process
def test_the_same_without_asserts(tmp_path: Path) -> None:
    code = (
        "import sys; from tests.replay.test_refusals import problems; from tests.replay.make import KINDS;"
        f"found = [p for kind in KINDS for p in problems(kind, {str(tmp_path)!r} + '/' + kind)];"
        "print(*found, sep='\\n'); sys.exit(bool(found) or not sys.flags.optimize)"
    )
    path = f"{ROOT}:{Path(recollect.__file__).parents[1]}"
    done = subprocess.run(
        [sys.executable, "-O", "-c", code], env={"PYTHONPATH": path}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_lane_handle_counts_what_it_refuses() -> None:
    with create("memory", directory="", maintain_segment_metadata=True) as buffer, buffer.on_lane(0) as lane:
        with pytest.raises(MissingLeafError, match="y"):
            lane.append({"x": 1})
        with pytest.raises(MissingLeafError, match="y"):
            lane.extend({"x": np.arange(3)})
        lane.append(sample(0))
        with pytest.raises(SegmentOpenError):
            lane.extend(block([1, 2]))
        assert (buffer.stats().rejected, buffer.stats().offered) == (6, 7)


def test_ends_need_segments() -> None:
    with create("memory", directory="") as buffer:
        with pytest.raises(ValueError, match="maintain_segment_metadata=True"):
            buffer.extend(block([1, 2]), ends=[False, True])
        with buffer.on_lane(0) as lane, pytest.raises(ValueError, match="maintain_segment_metadata=True"):
            lane.extend(block([1, 2]), ends=[False, True])
        assert len(buffer) == 0 and buffer.stats().rejected == 4


@pytest.mark.parametrize("kind", KINDS)
def test_a_buffer_opened_for_reading_refuses_every_write(kind: str, tmp_path: Path) -> None:
    with create(kind, directory=tmp_path, maintain_segment_metadata=True) as buffer:
        buffer.extend(block([1, 2, 3]))
        buffer.dumps(tmp_path / "dump")
    places = [tmp_path / "dump", *tmp_path.glob("live-*")]
    for path in places:
        with ReplayBuffer.load_from(path) as loaded:
            assert not loaded.is_mutable
            before = (len(loaded), loaded.get_segments(), loaded[:]["x"].tolist())
            writes: list[Callable[[], Any]] = [
                lambda: loaded.append(sample(4)),
                lambda: loaded.extend(block([4])),
                lambda: loaded.append({"x": 1}),
                lambda: loaded.extend({"x": np.arange(2)}),
                lambda: loaded.set_at(0, sample(4)),
                lambda: loaded.remove_at(0),
                lambda: loaded.clear(),
                lambda: loaded.append_flattened(np.zeros(3)),
            ]
            for write in writes:
                with pytest.raises(ReadOnlyError, match="read_only=False"):
                    write()
            assert (len(loaded), loaded.get_segments(), loaded[:]["x"].tolist()) == before


def test_cast_allows_casts_within_a_kind() -> None:
    with create("memory", SPACE, directory="", cast=True, capacity=4) as buffer:
        buffer.append(with_leaf(with_leaf(good(), "obs/pos", np.full(3, 0.1)), "n", np.int64(-3)))
        buffer.extend(with_leaf(good(2), "n", np.array([5, 6])))
        buffer.set_at(-1, with_leaf(good(), "n", np.int64(7)))
        assert buffer[...]["n"].tolist() == [-3, 5, 7] and buffer[0]["obs"]["pos"].dtype == np.float32
        for leaf, value in (("n", np.int64(200)), ("n", np.float64(1)), ("obs/image", np.full((2, 2), -1))):
            with pytest.raises(SchemaError, match=leaf):
                buffer.append(with_leaf(good(), leaf, value))
        assert len(buffer) == 3 and buffer.stats().rejected == 3


def test_create_refuses_what_cannot_be(tmp_path: Path) -> None:
    def refused(error: type[Exception], text: str, storage: Any = "memory", **kwargs: Any) -> None:
        with pytest.raises(error, match=text):
            ReplayBuffer.create(storage, SPACE, **{"capacity": 6, **kwargs})

    for capacity in (0, -1, 1.5, True, "3"):
        refused(ValueError, "capacity", capacity=capacity)
    for lanes in (0, 4, -1):
        refused(ValueError, "num_lanes", num_lanes=lanes)
    refused(ValueError, "num_lanes", capacity=None, num_lanes=2)
    refused(ValueError, "SharedMemoryStorage", multiprocessing=True)
    refused(ValueError, "SharedMemoryStorage", storage="test-list", multiprocessing=True)
    refused(ValueError, "test-list|ListStorage", storage="test-list", num_lanes=2)
    refused(ValueError, "dumps", cache_path=tmp_path / "x")
    refused(ValueError, "cache_path", storage="memmap")
    refused(ValueError, "capacity", storage="shared", capacity=None)
    refused(TypeError, "unheard", unheard=1)
    refused(ValueError, "memory", storage="unheard of")
    refused(ValueError, "evict", evict="newest")
    refused(ValueError, "evict_key", evict_key="n")
    refused(ValueError, "evict_key", evict="lowest", evict_key="obs/pos")
    refused(ValueError, "segments", evict="lowest", evict_key="n", maintain_segment_metadata=True)
    refused(ValueError, "lane", evict="lowest", evict_key="n", num_lanes=2)
    refused(ValueError, "capacity", evict="lowest", evict_key="n", capacity=None)
    refused(TypeError, "limiter", limiter=3)
    with create("memmap", SPACE, directory=tmp_path):
        path = next(tmp_path.glob("live-*"))
        with pytest.raises(FileExistsError, match="overwrite=True"):
            ReplayBuffer.create("memmap", SPACE, capacity=4, cache_path=path)


@pytest.mark.parametrize("given", [(), (100,), (SPACE, 100), (ReplayBuffer, "storage")])
def test_a_constructor_without_a_storage_names_create(given: tuple[Any, ...]) -> None:
    with pytest.raises(TypeError, match=r"ReplayBuffer\.create\(rc\.MemoryStorage, space, capacity="):
        ReplayBuffer(*given)


def test_a_capacity_for_the_constructor_names_create() -> None:
    with pytest.raises(TypeError, match=r"ReplayBuffer\.create\("):
        ReplayBuffer(capacity=100)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("sample", r"rc\.StepSampler\(batch, batch_size\)\.sample\(\)"),
        ("add", r"append\(sample\)"),
        ("push", "extend"),
    ],
)
def test_names_of_other_libraries_tell_what_is_called_so_here(name: str, remedy: str) -> None:
    with create("memory", directory="") as buffer:
        for batch in (buffer, buffer.get_column("x")):
            assert not hasattr(batch, name)
            with pytest.raises(AttributeError, match=remedy):
                getattr(batch, name)
        sampler = recollect.StepSampler(buffer, 2)
        with pytest.raises(recollect.EmptyError):
            sampler.sample()


def test_other_missing_names_and_errors_of_properties_are_pythons_own() -> None:
    class Broken(recollect.BatchBase):
        __len__ = get_at = lambda self, idx=0: 0  # type: ignore[assignment]

        @property
        def is_mutable(self) -> bool:
            return self.nowhere  # type: ignore[attr-defined, no-any-return]

    with pytest.raises(AttributeError, match="'Broken' object has no attribute 'nowhere'"):
        Broken(SPACE).is_mutable
