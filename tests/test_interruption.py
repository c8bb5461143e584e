"""A Ctrl-C at any point of a call leaves an object that works, and all samples that were acknowledged."""

from __future__ import annotations

import asyncio
import json
import signal
import threading
from contextlib import suppress
from functools import partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium
import numpy as np
import pytest
from tests.interruption import POINTS, Case, apart, interrupted

import recollect as rc
from recollect._core import Condition
from recollect.interrupts import deferred
from recollect.ipc.replay_pipelines.base import sample_seed
from recollect.ipc.replay_pipelines.cpu_pinned_double_buffer import (
    CPUPinnedDoubleBufferReplayPipeline as Pipeline,
)
from recollect.ipc.replay_pipelines.packing import make_collector_pack, serve_pack_requests
from recollect.learners import checkpoint
from recollect.learners.checkpoint import load_checkpoint, remove_checkpoint, save_checkpoint
from recollect.rollout import FileSink, QueueSink, ReplaySink, experience_buffer
from recollect.rollout.handles import LocalHandle
from recollect.testing.fake_device import FakeDevice
from recollect.testing.sink_contract import _rows

FRAME = ((4, 4, 3), "uint8")
BOTH = {"image": FRAME, "x": ((), "int64")}
KINDS: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "parquet": ("parquet", {"x": ((), "int64")}, {"piece_size": 4}),
    "image": ("image", FRAME, {"piece_size": 4}),
    "video": ("video", FRAME, {}),
    "dict": ("dict", BOTH, {"storages": {"image": "video", "*": ("parquet", {"piece_size": 4})}}),
    "hdf5": ("hdf5", {"x": ((), "int64")}, {}),
    "memory": ("memory", {"x": ((), "int64")}, {"capacity": 64, "maintain_segment_metadata": True}),
}

# Python itself drops what a signal handler raises while a weak reference is called back, and only warns of it.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


def values(space: Any, first: int, n: int) -> Any:
    numbers = np.arange(first, first + n)
    frames = np.tile(numbers.astype("uint8")[:, None, None, None], (1, 4, 4, 3))
    if space is FRAME:
        return frames
    return {"x": numbers, "image": frames} if "image" in space else {"x": numbers}


def one(space: Any, value: int) -> Any:
    block = values(space, value, 1)
    return block[0] if space is FRAME else {name: leaf[0] for name, leaf in block.items()}


class Buffer(Case):
    """A call of a buffer of five samples; what it shows afterwards, what it says of itself, and what it saved."""

    def __init__(self, kind: str, verb: str, directory: Path) -> None:
        self.name, self.verb, self.directory = f"{kind}.{verb}", verb, directory
        self.storage, self.space, self.options = KINDS[kind]
        self.numbers = count()
        self.path = directory

    def make(self) -> rc.ReplayBuffer:
        self.path = self.directory / str(next(self.numbers))
        where = {} if self.storage == "memory" else {"cache_path": self.path}
        buffer = rc.ReplayBuffer.create(self.storage, self.space, **self.options, **where)
        buffer.extend(values(self.space, 0, 5))
        return buffer

    def call(self, buffer: rc.ReplayBuffer) -> None:
        n = buffer.stats().live
        if self.verb == "append":
            buffer.append(one(self.space, n))
        elif self.verb == "extend":
            buffer.extend(values(self.space, n, 6))
        elif self.verb == "clear":
            buffer.clear()
        elif self.verb == "flush":
            buffer.storage.flush()
        else:
            buffer.set_at([0, 2], values(self.space, 100, 2))

    def look(self, buffer: rc.ReplayBuffer) -> Any:
        shown = buffer.get_at(np.arange(len(buffer))) if len(buffer) else None
        leaves = shown if isinstance(shown, dict) else {"": shown}
        read = {name: None if leaf is None else leaf.tolist() for name, leaf in leaves.items()}
        return read, buffer.get_segments(), buffer.stats().live, buffer.stats().removed

    def saved(self, buffer: rc.ReplayBuffer) -> Any:
        live = buffer.stats().live
        buffer.close()
        if self.storage != "memory":
            with rc.ReplayBuffer.load_from(self.path) as loaded:
                assert len(loaded) == live


VERBS = [  # and how many points are left out for each that is tried, in the short run
    ("parquet", "append", 97), ("parquet", "extend", 331), ("parquet", "clear", 29), ("image", "append", 131),
    ("image", "extend", 531), ("image", "set_at", 251), ("image", "clear", 43), ("video", "append", 71),
    ("video", "extend", 631), ("dict", "append", 401), ("dict", "extend", 1009), ("memory", "append", 1),
    ("memory", "extend", 1), ("hdf5", "append", 149), ("hdf5", "set_at", 151), ("hdf5", "flush", 101),
]  # fmt: skip
# HDF5 calls defer the signal, so only where one can come may an exception be raised.
RUNS = [(*verb, at) for verb in VERBS for at in POINTS if at == "signal" or verb[0] != "hdf5"]


@pytest.mark.parametrize(("kind", "verb", "step", "at"), RUNS)
def test_a_buffer_goes_on_after_an_interrupt_anywhere_in_a_call(
    kind: str, verb: str, step: int, at: str, tmp_path: Path
) -> None:
    pytest.importorskip(
        {"parquet": "pyarrow", "image": "PIL", "video": "av", "dict": "av", "hdf5": "h5py"}.get(kind, "numpy")
    )
    assert Buffer(kind, verb, tmp_path).run(at, step=step) > 0


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("kind", "verb", "at"), [(kind, verb, at) for kind, verb, _, at in RUNS])
def test_a_buffer_goes_on_after_an_interrupt_at_every_point_of_a_call(
    kind: str, verb: str, at: str, tmp_path: Path
) -> None:
    assert Buffer(kind, verb, tmp_path).run(at) > 0


def test_an_hdf5_buffer_is_read_on_after_an_interrupt_at_the_end_of_a_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("h5py")
    from recollect.storage.filed.hdf5_file import HDF5File

    close = HDF5File.close

    def interrupted_close(file: HDF5File) -> None:
        close(file)
        signal.raise_signal(signal.SIGINT)

    buffer = rc.ReplayBuffer.create("hdf5", {"x": ((), "int64")}, cache_path=tmp_path / "rows")
    buffer.extend({"x": np.arange(5)})
    monkeypatch.setattr(HDF5File, "close", interrupted_close)
    with pytest.raises(KeyboardInterrupt):
        buffer.storage.flush()
    monkeypatch.undo()
    assert buffer.get_at(np.arange(5))["x"].tolist() == list(range(5))
    buffer.append({"x": 5})
    buffer.close()
    with rc.ReplayBuffer.load_from(tmp_path / "rows") as loaded:
        assert loaded.get_at(np.arange(6))["x"].tolist() == list(range(6))


class Kept(Case):
    """A call of a buffer over memory with two episodes, in lanes or not; what a dump of it would hold."""

    def __init__(self, kind: str, verb: str, directory: Path) -> None:
        self.name, self.kind, self.verb, self.directory = f"{kind}.{verb}", kind, verb, directory
        self.numbers = count()

    def make(self) -> rc.ReplayBuffer:
        self.path = self.directory / str(next(self.numbers))
        storage = "memory" if self.kind == "lanes" else self.kind
        options: dict[str, Any] = {"capacity": 64, "maintain_segment_metadata": True}
        if self.kind == "lanes":
            options["num_lanes"] = 2
        if self.kind == "memmap":
            options["cache_path"] = self.path
        buffer = rc.ReplayBuffer.create(storage, {"x": ((), "int64")}, **options)
        if self.kind == "lanes":
            buffer.extend_lanes({"x": np.arange(2)}, [0, 1], ends=[True, True])
        else:
            buffer.extend({"x": np.arange(5)}, ends=[False, True, False, True, True])
        return buffer

    def call(self, buffer: rc.ReplayBuffer) -> None:
        n = buffer.stats().live + buffer.stats().removed
        match self.verb:
            case "append":
                buffer.append({"x": n})
            case "extend":
                buffer.extend({"x": np.arange(n, n + 3)}, ends=[True, False, True])
            case "remove_at":
                buffer.remove_at(1)
            case "set_at":
                buffer.set_at([0, 1], {"x": np.array([90 + n, 91 + n])})
            case "mark":
                buffer.mark_segment_end()
            case "clear":
                buffer.clear()
            case "extend_lanes":
                buffer.extend_lanes({"x": np.arange(n, n + 2)}, [0, 1], ends=[True, False])
            case "on_lane":
                with buffer.on_lane(1) as lane:
                    lane.append({"x": n})
            case "dumps":
                buffer.dumps(self.directory / "dump", cut_open=True)

    def look(self, buffer: rc.ReplayBuffer) -> Any:
        rows = buffer.get_at(np.arange(len(buffer)))["x"].tolist() if len(buffer) else []
        return rows, np.asarray(buffer.get_segments()).tolist(), buffer.stats().live

    def saved(self, buffer: rc.ReplayBuffer) -> Any:
        rows = self.look(buffer)[0]
        if self.verb != "dumps":
            buffer.dumps(self.directory / "dump", cut_open=True)
        buffer.close()
        with rc.ReplayBuffer.load_from(self.directory / "dump") as loaded:
            assert self.look(loaded)[0] == rows
        return None


KEPT = [
    (kind, verb)
    for kind in ("memory", "shared", "memmap")
    for verb in ("append", "extend", "remove_at", "set_at", "mark", "clear", "dumps")
] + [("lanes", "extend_lanes"), ("lanes", "on_lane")]


@pytest.mark.parametrize(("kind", "verb"), KEPT)
def test_a_buffer_over_memory_goes_on_after_an_interrupt_anywhere(
    kind: str, verb: str, tmp_path: Path
) -> None:
    assert Kept(kind, verb, tmp_path).run("signal", step=401 if verb == "dumps" else 5) > 0


class Added(Case):
    """Rows of a collector."""

    name = "ipc.ReplayBuffer.add"

    def make(self) -> Any:
        buffer = rc.ipc.ReplayBuffer(64, 1, 1, "numpy")
        self.call(buffer)
        return buffer

    def call(self, buffer: Any) -> None:
        x, no = np.full((2, 1), buffer.size, "float32"), np.zeros(2, bool)
        buffer.add(x, x, x[:, 0], x, no, no)
        buffer.sample(2, seed=0)

    def look(self, buffer: Any) -> Any:
        return buffer.size, buffer.ptr, buffer.newest(buffer.size)["obs"].tolist()

    def saved(self, buffer: Any) -> Any:
        buffer.cleanup()


class Written(Case):
    """A slot of a ring, written; `Read`: read."""

    name = "ipc.RolloutRingBuffer.write"

    def make(self) -> Any:
        return rc.ipc.RolloutRingBuffer(2, 3, 4, 1, num_slots=8)

    def call(self, ring: Any) -> None:
        for array in ring.write_buffer.values():
            array[...] = 1 + ring.available()
        ring.signal_write_done(version=3)

    def look(self, ring: Any) -> Any:
        views = ring.read_numpy_views()["obs"].copy().tolist() if ring.available() else None
        return ring.available(), views

    def saved(self, ring: Any) -> Any:
        ring.cleanup()


class Read(Written):
    name = "ipc.RolloutRingBuffer.read"

    def make(self) -> Any:
        ring = super().make()
        for _ in range(4):
            super().call(ring)
        return ring

    def call(self, ring: Any) -> None:
        assert ring.wait_for_data(20.0)
        ring.read_numpy_views()
        ring.advance_read()


class Weights(Case):
    name = "ipc.SharedWeightSync.write_weights"

    def make(self) -> Any:
        return rc.ipc.SharedWeightSync.from_state_dict(
            {"a": np.zeros(3, "float32"), "b": np.zeros(2, "int64")}
        )

    def call(self, sync: Any) -> None:
        n = sync.version + 1
        sync.write_weights({"a": np.full(3, n, "float32"), "b": np.full(2, n)})

    def look(self, sync: Any) -> Any:
        mine = {"a": np.zeros(3, "float32"), "b": np.zeros(2, "int64")}
        return sync.read_weights_into(mine), mine["a"].tolist(), mine["b"].tolist()

    def saved(self, sync: Any) -> Any:
        sync.cleanup()


class Statistics(Case):
    name = "ipc.SharedObsNormStats.put"

    def make(self) -> Any:
        stats = rc.ipc.SharedObsNormStats(None)
        stats.put((np.zeros(3), np.ones(3)))
        return stats

    def call(self, stats: Any) -> None:
        n = stats.version
        stats.put((np.full(3, float(n)), np.ones(3)))

    def look(self, stats: Any) -> Any:
        found = stats.latest()
        return stats.version, found[0].tolist(), found[1].tolist()

    def saved(self, stats: Any) -> Any:
        stats.cleanup()


@pytest.mark.parametrize("case", [Added, Written, Read, Weights, Statistics])
def test_what_processes_share_is_as_before_or_after_an_interrupted_call(case: type[Case]) -> None:
    assert case().run("signal", step=2) > 5


def drawn(sampler: Any) -> None:
    """What a sampler can be asked for."""
    sampler.sample()
    sampler.sample_with_metadata()
    sampler.sample_index()
    for _ in sampler.epoch_iter():
        pass
    sampler.manual_seed(1)
    sampler.load_state_dict(sampler.state_dict())


SAMPLERS = {
    "step": lambda buffer: rc.StepSampler(buffer, 4, seed=0),
    "once": lambda buffer: rc.StepSampler(buffer, 4, seed=0, replace=False),
    "prioritized": lambda buffer: rc.PrioritizedSampler(buffer, 4, seed=0),
    "sequence": lambda buffer: rc.SequenceSampler(buffer, 4, 2, seed=0),
}


@pytest.mark.parametrize("at", POINTS)
@pytest.mark.parametrize("kind", SAMPLERS)
def test_a_sampler_can_be_used_after_an_interrupt_anywhere_in_a_call(kind: str, at: str) -> None:
    buffer = rc.ReplayBuffer.create(
        "memory", {"x": ((), "int64")}, capacity=16, maintain_segment_metadata=True
    )
    buffer.extend({"x": np.arange(10)})
    sampler = SAMPLERS[kind](buffer)
    drawn(sampler)
    n = 0
    while interrupted(lambda: drawn(sampler), n, at):
        apart(lambda: drawn(sampler))
        n += 7
    assert n > 100


LIMITS: dict[str, tuple[Any, tuple[int, int]]] = {  # the call, and the rows written and drawn after it
    "sample": (lambda buffer, sampler: sampler.sample(), (4, 8)),
    "epoch": (lambda buffer, sampler: list(sampler.epoch_iter()), (4, 8)),
    "append": (lambda buffer, sampler: buffer.append(7), (5, 4)),
    "extend": (lambda buffer, sampler: buffer.extend(np.arange(3)), (7, 4)),
}


@pytest.mark.parametrize("verb", LIMITS)
def test_a_limiter_counts_a_call_once_or_not_at_all_after_an_interrupt(verb: str) -> None:
    call, after = LIMITS[verb]
    n, came = 0, True
    while came:
        limiter = rc.RateLimiter(samples_per_insert=2, min_size=1, band=12, deadline=1.0)
        buffer = rc.ReplayBuffer.create("memory", ((), "int64"), capacity=100, limiter=limiter)
        sampler = rc.StepSampler(buffer, 4, seed=0)
        buffer.extend(np.arange(4))
        sampler.sample()
        came = interrupted(lambda b=buffer, s=sampler: call(b, s), n)  # type: ignore[misc]
        found = limiter.inserts, limiter.samples
        assert found in ((4, 4), after) and limiter.stats().waiting == 0, n
        rest = (12 - found[0] * 2 + found[1]) // 2
        assert limiter.can_insert(rest) and not limiter.can_insert(rest + 1), n
        n += 1
    assert n > 10


def test_a_limiter_has_no_waiter_left_after_an_interrupt_of_a_wait() -> None:
    limiter = rc.RateLimiter(samples_per_insert=1, min_size=1, band=4, deadline=1e-4)
    buffer = rc.ReplayBuffer.create("memory", ((), "int64"), capacity=100, limiter=limiter)
    buffer.extend(np.arange(4))

    def wait() -> None:
        with suppress(rc.DeadlineError):
            buffer.extend(np.arange(2))

    n = 0
    while interrupted(wait, n):
        assert (limiter.stats().waiting, limiter.inserts) == (0, 4), n
        n += 1
    assert n > 30


def test_a_sampler_of_workers_goes_on_in_its_order_after_an_interrupt_anywhere() -> None:
    with rc.ReplayBuffer.create("shared", {"x": ((), "int64")}, capacity=64, multiprocessing=True) as buffer:
        buffer.extend({"x": np.arange(50)})

        def make() -> Any:
            return rc.MultiprocessingSampler(rc.StepSampler(buffer, 4, seed=3), 1, ctx="fork")

        with make() as sampler:
            expected = [sampler.sample()["x"].tolist() for _ in range(5)]
        n, came = 0, True
        while came:
            with make() as sampler:
                sampler.sample()
                came = interrupted(sampler.sample_with_metadata, n)
                found = apart(lambda s=sampler: [s.sample()["x"].tolist() for _ in range(3)])  # type: ignore[misc]
                assert found in (expected[1:4], expected[2:5]), n
            n += 6
        n, came = 0, True
        while came:
            sampler = make()
            sampler.sample()
            (pid,) = sampler.stats().pids
            came = interrupted(sampler.close, n)
            apart(sampler.close)
            assert not Path(f"/proc/{pid}").exists(), n
            n += 13


def test_a_condition_is_free_after_an_interrupt_anywhere() -> None:
    condition = Condition()

    def enter() -> None:
        with condition:
            condition.wait(0.0)
            condition.notify_all()

    n = 0
    while interrupted(enter, n, "signal"):
        assert not condition.is_held
        n += 1
    assert n > 2


def test_a_condition_wakes_those_who_wait_and_refuses_who_did_not_enter() -> None:
    condition, woken = Condition(), []

    def wait() -> None:
        with condition:
            woken.append(condition.wait(60.0))

    threads = [threading.Thread(target=wait) for _ in range(3)]
    for thread in threads:
        thread.start()
    while condition.n_waiting < 3:
        threading.Event().wait(0.001)
    with condition, condition:
        condition.notify_all()
    for thread in threads:
        thread.join(60.0)
    assert woken == [True] * 3 and not condition.is_held
    with pytest.raises(RuntimeError, match="entered by this thread"):
        condition.notify_all()


def two_ends(kind: str) -> tuple[Any, Any]:
    """Two ends, of which the first knows the second."""
    if kind == "local":
        a, b = rc.remote.LocalCarrier.group(2)
        return a, b
    b = rc.remote.TcpCarrier.serve(1)
    assert b.address is not None
    return rc.remote.TcpCarrier.join([b.address], token=b.token, rank=0), b


def used(kind: str, at: str, step: int, verb: str) -> int:
    """Interrupt two ends; both can be used and closed, and no frame comes torn, twice or out of order."""
    n, came = 0, True
    while came:
        a, b = two_ends(kind)
        if verb != "open":
            a.send(1, 0, [b"0"])
            b.recv(timeout=20.0)

        def call(a: Any = a, b: Any = b) -> None:
            if verb == "close":
                a.close()
                return
            for k in (b"1", b"2" * 3000, b"3"):
                a.send(1, 0, [k])
            b.recv(timeout=20.0)

        came = interrupted(call, n, at)
        found = [b""]
        if verb != "close":
            apart(lambda a=a: a.send(1, 0, [b"4"]))  # type: ignore[misc]
            while found[-1] != b"4":
                found.append(bytes(apart(lambda b=b: b.recv(timeout=20.0))[2][:1]))  # type: ignore[misc]
        # A frame may be lost on its way to the caller of recv, those that were not sent are missing at the end.
        assert found[1:-1] in [[b"1", b"2", b"3"][i:j] for i in (0, 1) for j in range(4)], (n, found)
        apart(a.close)
        apart(b.close)
        with pytest.raises(rc.errors.ClosedError):
            a.send(1, 0, [b"5"])
        assert a._epoll is None and not a._links, n
        n += step
    return n


@pytest.mark.parametrize("verb", ["open", "use", "close"])
@pytest.mark.parametrize("kind", ["local", "tcp"])
def test_a_carrier_can_be_used_and_closed_after_an_interrupt_anywhere(kind: str, verb: str) -> None:
    assert used(kind, "signal", 9, verb) > 20


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("verb", ["open", "use", "close"])
@pytest.mark.parametrize("kind", ["local", "tcp"])
def test_a_carrier_can_be_used_and_closed_after_an_interrupt_at_every_point(kind: str, verb: str) -> None:
    assert used(kind, "signal", 1, verb) > 20


class _Counts:
    """A coordinator as far as its handle is concerned."""

    def __init__(self, config: Any, models: Any, auxiliary: Any) -> None:
        self.n = self.n_ended = 0

    async def prepare(self) -> None:
        await asyncio.sleep(0)

    async def shutdown(self) -> None:
        await asyncio.sleep(0)
        self.n_ended += 1

    async def add(self) -> int:
        self.n += 1
        return self.n


def test_a_coordinator_in_a_thread_whose_making_is_interrupted_leaves_no_thread() -> None:
    n, n_raised, came = 0, 0, True
    while came:
        before, raised = threading.active_count(), []
        handle = object.__new__(LocalHandle)

        def make(handle: LocalHandle = handle, raised: list[int] = raised) -> None:
            try:
                LocalHandle.__init__(handle, _Counts, SimpleNamespace(name="interrupted"), None)
            except KeyboardInterrupt:
                raised.append(1)
                raise

        came = interrupted(make, n)
        if not raised:
            apart(handle.close)
        assert threading.active_count() == before, n
        n, n_raised = n + 1, n_raised + len(raised)
    assert n_raised > 20


def test_a_coordinator_in_a_thread_answers_after_an_interrupt_anywhere_in_a_call() -> None:
    n, came = 0, True
    while came:
        handle = LocalHandle(_Counts, SimpleNamespace(name="interrupted"), None)
        came = interrupted(lambda h=handle: h.add(), n)  # type: ignore[misc]
        assert apart(lambda h=handle: h.add.remote().result(20.0)) in (1, 2), n  # type: ignore[misc]
        apart(handle.close)
        n += 1
    assert n > 30


class _World(gymnasium.Env[Any, Any]):
    """Counts its steps from 1000 times the number of its episode."""

    observation_space, action_space = (
        gymnasium.spaces.Box(-1e6, 1e6, (1,), np.float64),
        gymnasium.spaces.Discrete(2),
    )
    at = episode = n_closed = 0

    def close(self) -> None:
        self.n_closed += 1

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        self.episode += 1
        self.at = 1000 * self.episode
        return np.array([self.at], np.float64), {}

    def step(self, action: Any) -> Any:
        self.at += 1
        return np.array([self.at], np.float64), 1.0, False, False, {}


class _Worlds(gymnasium.vector.SyncVectorEnv):
    """Two worlds with calls in two parts."""

    pending: Any = None

    def __init__(self) -> None:
        super().__init__([_World, _World], autoreset_mode=gymnasium.vector.AutoresetMode.DISABLED)
        self.envs[1].episode = 100  # type: ignore[attr-defined]
        self.n_closed = 0

    def step_async(self, actions: Any) -> None:
        if self.pending is not None:
            raise gymnasium.error.AlreadyPendingCallError("under way", "step")
        self.pending = actions

    def step_wait(self) -> Any:
        if self.pending is None or isinstance(self.pending, str):
            raise gymnasium.error.NoAsyncCallError("nothing is under way", "step")
        actions, self.pending = self.pending, None
        return self.step(actions)

    def reset_async(self, seed: Any = None, options: Any = None) -> None:
        self.pending = "reset"

    def reset_wait(self) -> Any:
        return self.reset()

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        self.pending = None
        return super().reset(seed=seed, options=options)

    def close_extras(self, **kwargs: Any) -> None:
        self.n_closed += 1


def in_parts(wrapper: Any) -> None:
    for _ in range(2):
        wrapper.step_async(np.zeros(2, int))
        wrapper.step_wait()
    wrapper.reset_async()
    wrapper.reset_wait()


class Collection:
    """A wrapper of two worlds, with buffers of a layout, and other buffers to change to."""

    def __init__(self, layout: str) -> None:
        self.env = _World() if layout == "single" else _Worlds()
        space = rc.transition_space(self.env)
        lanes = {"lanes": 2}.get(layout, 1)

        def make() -> list[rc.ReplayBuffer]:
            return [
                rc.ReplayBuffer.create(
                    "memory", space, capacity=50, maintain_segment_metadata=True, num_lanes=lanes
                )
                for _ in range({"per_env": 2}.get(layout, 1))
            ]

        self.buffers, self.others = make(), make()
        self.action: Any = 0 if layout == "single" else np.zeros(2, int)
        self.wrapper: Any = None

    def wrap(self) -> None:
        self.wrapper = rc.ReplayBufferCollectionWrapper(self.env, self.buffers)

    def change(self) -> None:
        self.wrapper.set_replay_buffers(self.others, finalize_old_segments=True)

    def step(self) -> None:
        self.wrapper.step(self.action)

    def check(self, n: int) -> None:
        """Each row is a true transition, there once, and no segment spans a gap."""
        for buffer in self.buffers + self.others:
            rows = buffer.get_at(np.arange(len(buffer))) if len(buffer) else {"obs": np.zeros((0, 1))}
            if len(buffer):
                assert (rows["next_obs"] == rows["obs"] + 1).all(), n
                assert len(np.unique(rows["obs"])) == len(buffer), n
            for start, end in buffer.get_segments() or ():
                assert (np.diff(rows["obs"][start:end, 0]) == 1).all(), n


def collected(layout: str, verb: str, step: int) -> int:
    n, came = 0, True
    while came:
        one = Collection(layout)
        if verb != "wrap":
            one.wrap()
            one.wrapper.reset()
            one.step()
        call = {
            "wrap": one.wrap, "step": one.step, "reset": lambda o=one: o.wrapper.reset(), "change": one.change,
            "parts": lambda o=one: in_parts(o.wrapper), "close": lambda o=one: o.wrapper.close(),
        }[verb]  # fmt: skip
        came = interrupted(call, n)

        def go_on(one: Collection = one, n: int = n) -> None:
            if verb == "wrap":
                one.wrap()
            elif verb != "close":
                with suppress(rc.errors.ResetNeeded):
                    one.step()
            if verb == "change":
                one.change()
            if verb == "parts":
                with suppress(gymnasium.error.NoAsyncCallError):
                    one.wrapper.step_wait()
            if verb != "close":
                one.wrapper.reset()
                one.step()
                if verb == "parts":
                    in_parts(one.wrapper)
            one.wrapper.close()
            one.wrapper.close()
            assert sum(map(len, one.buffers + one.others)) >= (1 if verb == "wrap" else 2) - (
                verb == "close"
            ), n
            assert one.env.n_closed >= 1, n
            for buffer in one.buffers + one.others:
                for lane in range(2 if layout == "lanes" else 1):
                    with buffer.on_lane(lane):  # nobody holds it any more
                        pass

        apart(go_on)
        one.check(n)
        n += step
    return n


VERBS_OF_WRAPPERS = [
    (layout, verb)
    for layout in ("single", "lanes", "per_env")
    for verb in ("wrap", "step", "reset", "parts", "change", "close")
    if (layout, verb) != ("single", "parts")
]


@pytest.mark.parametrize(("layout", "verb"), VERBS_OF_WRAPPERS)
def test_a_collection_wrapper_records_no_false_transition_after_an_interrupt(layout: str, verb: str) -> None:
    assert collected(layout, verb, {"wrap": 331, "change": 331, "parts": 31, "close": 1}.get(verb, 7)) > 10


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("layout", "verb"), VERBS_OF_WRAPPERS)
def test_a_collection_wrapper_records_no_false_transition_after_an_interrupt_at_every_point(
    layout: str, verb: str
) -> None:
    assert collected(layout, verb, {"wrap": 5, "change": 5}.get(verb, 1)) > 10  # most of it is not ours


def test_a_queue_gives_all_rows_once_after_an_interrupt_of_a_get() -> None:
    n, came = 0, True
    while came:
        sink, loop = QueueSink(10), asyncio.new_event_loop()
        sink.write(_rows(1, 2), "c-g1-1")
        sink.write(_rows(2, 2), "c-g2-2")
        came = interrupted(lambda s=sink, on=loop: on.run_until_complete(s.get(3, 20.0)), n)  # type: ignore[misc]
        loop.close()
        left = apart(lambda s=sink: asyncio.run(s.get(len(s), 20.0)).group_id.tolist())  # type: ignore[misc]
        assert left in ([1, 1, 2, 2], [2]), n
        n += 11
    assert n > 100


SINKS: dict[str, Any] = {
    "queue": lambda path: QueueSink(10),
    "replay": lambda path: ReplaySink(experience_buffer("memory", capacity=50, max_tokens=8)),
    "jsonl": lambda path: FileSink(path, "jsonl"),
}


@pytest.mark.parametrize("kind", SINKS)
def test_a_sink_holds_what_it_says_after_an_interrupt_of_a_write(kind: str, tmp_path: Path) -> None:
    n, came = 0, True
    while came:
        sink, path = SINKS[kind](tmp_path / str(n)), tmp_path / str(n)
        sink.write(_rows(1, 2), "first")
        came = interrupted(lambda s=sink: s.write(_rows(2, 2), "second"), n)  # type: ignore[misc]

        def go_on(sink: Any = sink) -> None:
            if not sink.holds("second"):
                sink.write(_rows(2, 2), "second")
            sink.write(_rows(3, 1), "third")
            sink.close()

        apart(go_on)
        if kind == "queue":
            found = asyncio.run(sink.get(len(sink), 20.0)).group_id.tolist()
        elif kind == "replay":
            found = sink.buffer.get_column_at(("group_id",), slice(None)).tolist()
        else:
            lines = [line for file in sorted(path.glob("*.jsonl")) for line in file.read_text().splitlines()]
            found = [json.loads(line)["group_id"] for line in lines]
        assert found == [1, 1, 2, 2, 3], (n, found)
        n += {"queue": 3, "replay": 17, "jsonl": 41}[kind]
    assert n > 100


def test_who_waits_for_a_queue_hears_of_its_rows_after_an_interrupt_of_a_write() -> None:
    n, came = 0, True
    while came:
        sink, found = QueueSink(10), []

        def take(sink: QueueSink = sink, found: list[Any] = found) -> None:
            found.append(asyncio.run(sink.get(2, 20.0)).group_id.tolist())

        threads = [threading.Thread(target=take, daemon=True) for _ in range(2)]
        for thread in threads:
            thread.start()
        while len(sink._waiting) < 2:
            threading.Event().wait(0.001)
        came = interrupted(lambda s=sink: s.write(_rows(1, 4), "first"), n)  # type: ignore[misc]
        if not sink.holds("first"):
            apart(lambda s=sink: s.write(_rows(1, 4), "first"))  # type: ignore[misc]
        for thread in threads:
            thread.join(20.0)
        assert found == [[1, 1], [1, 1]], n
        n += 37
    assert n > 100


def filled() -> Any:
    buffer = rc.ipc.ReplayBuffer(1000, 3, 2, "numpy")
    obs, no = np.arange(24, dtype="float32").reshape(8, 3), np.zeros(8, bool)
    buffer.add(obs, np.zeros((8, 2), "float32"), np.arange(8.0), obs, no, no)
    return buffer


class _Device(FakeDevice):
    """A device that does each thing whole, as one of metal does."""

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if name not in ("queue_wait", "queue_record", "queue_copy", "look", "run_until", "read"):
            return found

        def whole(*args: Any) -> Any:
            with deferred():
                return found(*args)

        return whole


def piped(kind: str, step: int) -> int:
    """Interrupt a pipeline; the call can be made again, and each tick has the batch that it has without."""
    buffer = filled()
    expected = [buffer.sample(16, seed=sample_seed(0, tick))["obs"].tolist() for tick in range(3)]
    n, came = 0, True
    while came:
        device = _Device(n) if kind == "device" else None
        pipe = Pipeline(buffer, device="numpy", sample_count=16, deadline=20.0, transfer=device)
        found: dict[int, Any] = {}

        def take(tick: int, pipe: Any = pipe, device: Any = device, found: dict[int, Any] = found) -> None:
            obs = pipe.sample_large_batch(tick, 16)["obs"]
            found[tick] = obs.copy() if device is None else device.read(obs)

        calls = [
            partial(take, 0), partial(pipe.start_prepare, 1, 16), pipe.wait_ready, pipe.after_tick,
            partial(take, 1), partial(pipe.start_prepare, 2, 16), partial(pipe.wait_until_ready, 2, 16),
            pipe.after_tick, partial(take, 2), pipe.after_tick, pipe.stats, pipe.close,
        ]  # fmt: skip
        done = 0

        def drive(calls: list[Any] = calls) -> None:
            nonlocal done
            while done < len(calls):
                calls[done]()
                done += 1

        came = interrupted(drive, n)
        if device is None:
            apart(drive)
        else:
            drive()  # in this thread: the device would not know that another one comes after it
        stats = pipe.stats()
        assert (stats.started, stats.ticks, stats.failed) == (3, 3, 0), n
        if device is not None:
            device.finish()
            device.check()
        rows = [found[tick] if device is None else found[tick].value for tick in range(3)]
        assert [np.asarray(some).tolist() for some in rows] == expected, n
        n += step
    buffer.cleanup()
    return n


@pytest.mark.parametrize("kind", ["in_place", "device"])
def test_a_pipeline_gives_the_same_batches_after_an_interrupt(kind: str) -> None:
    assert piped(kind, 23) > 500


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", ["in_place", "device"])
def test_a_pipeline_gives_the_same_batches_after_an_interrupt_at_every_point(kind: str) -> None:
    assert piped(kind, 1) > 500


def test_a_collector_that_is_interrupted_packs_what_it_was_asked_for() -> None:
    buffer = filled()
    n, came = 0, True
    while came:
        request, ready, slots = make_collector_pack(buffer, 16)
        pipe = Pipeline(
            buffer, device="numpy", sample_count=16, deadline=20.0, collector_pack_request_queue=request,
            collector_pack_ready_queue=ready, collector_pack_shared_slots=slots,
        )  # fmt: skip
        pipe.start_prepare(0, 16)
        pipe.wait_asked()

        def serve(request: Any = request, ready: Any = ready, slots: Any = slots) -> int:
            return serve_pack_requests(buffer, request, ready, slots)

        came = interrupted(serve, n)
        apart(serve)
        assert len(apart(lambda p=pipe: p.sample_large_batch(0, 16))["obs"]) == 16, n  # type: ignore[misc]
        apart(pipe.close)
        slots.cleanup()
        n += 3
    buffer.cleanup()
    assert n > 50


def checkpointed(verb: str, directory: Path, step: int) -> int:
    """Interrupt a save or a removal of a checkpoint; one is there whole, and nothing stays beside it or locked."""
    with rc.ReplayBuffer.create("memory", {"x": ((), "int64")}, capacity=8) as replay:
        replay.extend({"x": np.arange(5)})
        n, came = 0, True
        while came:
            path = directory / str(n) / "model"
            save_checkpoint(path, {"v": 1, "a": np.arange(3)})

            def save(path: Path = path) -> None:
                save_checkpoint(path, {"v": 2, "a": np.arange(4)}, dump_replay=replay.dumps)

            came = interrupted(save if verb == "save" else partial(remove_checkpoint, path), n)
            if path.exists() or verb == "save":
                assert load_checkpoint(path)["v"] in (1, 2), n
            if verb == "remove":
                apart(partial(remove_checkpoint, path))
                assert not path.exists(), n
            apart(save)
            assert load_checkpoint(path)["v"] == 2, n
            assert [p.name for p in path.parent.iterdir()] == ["model"], n
            assert sorted(p.name for p in path.iterdir()) == ["manifest.json", "replay", "tensors.bin"], n
            n += step
    return n


@pytest.mark.parametrize(("verb", "step"), [("save", 997), ("remove", 61)])
def test_a_checkpoint_is_there_whole_after_an_interrupt(verb: str, step: int, tmp_path: Path) -> None:
    assert checkpointed(verb, tmp_path, step) > 200


def test_a_save_that_is_interrupted_right_after_its_commit_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, put_in_place = tmp_path / "model", checkpoint._put_in_place
    save_checkpoint(path, {"v": 1})

    def put(temporary: Path, place: Path) -> None:
        put_in_place(temporary, place)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(checkpoint, "_put_in_place", put)
    with pytest.raises(KeyboardInterrupt):
        save_checkpoint(path, {"v": 2})
    monkeypatch.undo()
    assert load_checkpoint(path)["v"] == 2
    save_checkpoint(path, {"v": 3})
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("verb", ["save", "remove"])
def test_a_checkpoint_is_there_whole_after_an_interrupt_at_every_point(verb: str, tmp_path: Path) -> None:
    assert checkpointed(verb, tmp_path, 1) > 200


@pytest.mark.parametrize("verb", ["publish", "close"])
def test_a_beacon_shows_a_whole_history_and_goes_out_after_an_interrupt(verb: str) -> None:
    n, came = 0, True
    while came:
        kind = f"interrupted-{verb}-{n}"
        beacon = rc.observe.Beacon(kind, "title")
        beacon.publish({"x": 1.0})

        def call(beacon: Any = beacon) -> None:
            if verb == "publish":
                beacon.publish({"x": 2.0, "y": 3.0})
            else:
                beacon.close()

        came = interrupted(call, n)
        if verb == "publish":
            apart(lambda b=beacon: b.publish({"x": 4.0, "y": 5.0}))  # type: ignore[misc]
            job = rc.observe.find_jobs(kind)[-1]
            shown = job.snapshot()
            assert shown is not None and shown.figures["x"] == 4.0, n
            assert {len(some) for some in shown.history.values.values()} == {len(shown.history.at)}, n
            job.close()
        apart(beacon.close)
        assert not rc.observe.find_jobs(kind), n
        n += 5 if verb == "publish" else 1
    assert n > 20


class _Passed:
    """An event of a device that has passed."""

    def query(self) -> bool:
        return True

    def elapsed_time(self, later: Any) -> float:
        return 1.0


def test_a_span_of_a_trace_is_recorded_once_after_an_interrupt(tmp_path: Path) -> None:
    n, came = 0, True
    while came:
        trace = rc.observe.TraceRecorder(tmp_path / f"{n}.json")
        for name in ("a", "b"):
            trace.add_slice(name, "train", 1, 2)
        trace.add_cuda_pending_span("span", _Passed(), _Passed())
        came = interrupted(lambda t=trace: t.add_counter("n", 1, 2.0) or t.flush(), n)  # type: ignore[misc, func-returns-value]
        apart(trace.close)
        events = [e["name"] for e in json.loads(trace.path.read_text())["traceEvents"] if e["ph"] == "X"]
        assert events == ["a", "b", "span"], n
        n += 3
    assert n > 50


def test_a_trace_is_whole_after_an_interrupt_of_its_close(tmp_path: Path) -> None:
    n, came = 0, True
    while came:
        trace = rc.observe.TraceRecorder(tmp_path / f"{n}.json")
        trace.add_slice("update", "train", 1, 2)
        came = interrupted(trace.close, n)
        apart(trace.close)
        events = json.loads(trace.path.read_text())["traceEvents"]
        assert [e["name"] for e in events if e["ph"] == "X"] == ["update"], n
        n += 7
    assert n > 50


def test_a_manager_gives_up_its_directory_after_an_interrupt_of_its_close(tmp_path: Path) -> None:
    space = {"x": ((), "int64"), "log_reward": ((), "float32")}
    n, came = 0, True
    while came:

        def make(resume: bool, path: Path = tmp_path / str(n)) -> Any:
            saved = rc.remote.Checkpoint(path, resume=resume)
            return rc.remote.ReplayBufferManager(space, 1, 1, capacity=9, checkpoint=saved)

        manager = make(False)
        manager.add({"x": np.arange(3), "log_reward": np.zeros(3, "float32")})
        came = interrupted(manager.close, n)
        apart(manager.close)
        with make(True) as again:
            assert len(again.buffer) == 3, n
        n += 7
    assert n > 20


@pytest.mark.parametrize("verb", ["close", "with"])
def test_a_coordinator_in_a_thread_is_shut_down_though_its_end_is_interrupted(verb: str) -> None:
    def use(handle: LocalHandle) -> None:
        if verb == "close":
            handle.close()
        else:
            with handle:
                pass

    n, came = 0, True
    while came:
        handle = LocalHandle(_Counts, SimpleNamespace(name="interrupted"), None)
        before = threading.active_count()
        came = interrupted(lambda h=handle: use(h), n)  # type: ignore[misc]
        apart(handle.close)  # goes on where the first one was cut short
        assert handle._coordinator.n_ended == 1, n
        assert threading.active_count() == before - 1, n
        n += 1
    assert n > 30


ITEMS = {"x": ((), "int64"), "log_reward": ((), "float32")}


def items(first: int, n: int = 3) -> dict[str, Any]:
    return {"x": np.arange(first, first + n), "log_reward": np.zeros(n, "float32")}


class ManagerAdd(Case):
    """An add to a manager with a checkpoint, and what a restart finds."""

    name = "manager.add"

    def __init__(self, directory: Path) -> None:
        self.directory, self.numbers = directory, count()

    def make(self) -> Any:
        return self._open(self.directory / str(next(self.numbers)), resume=False)

    def _open(self, path: Path, resume: bool) -> Any:
        self.path = path
        checkpoint = rc.remote.Checkpoint(path, resume=resume)
        manager = rc.remote.ReplayBufferManager(ITEMS, 1, 1, capacity=99, checkpoint=checkpoint)
        if not resume:
            manager.add(items(0))
        return manager

    def call(self, manager: Any) -> None:
        manager.add(items(len(manager.buffer)))

    def look(self, manager: Any) -> Any:
        stats = manager.stats()
        return (
            manager.buffer.get_at(np.arange(len(manager.buffer)))["x"].tolist(),
            stats.offered,
            stats.containers,
        )

    def saved(self, manager: Any) -> Any:
        manager.close()
        with self._open(self.path, resume=True) as again:
            return self.look(again)


def test_a_restart_finds_what_a_manager_held_after_an_interrupt_of_an_add(tmp_path: Path) -> None:
    assert ManagerAdd(tmp_path).run("signal", step=7) > 20


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_a_restart_finds_what_a_manager_held_after_an_interrupt_at_every_point(tmp_path: Path) -> None:
    assert ManagerAdd(tmp_path).run("signal") > 100


def served(step: int, directory: Path, most: int = 1 << 20) -> int:
    """Interrupt a manager that serves a worker; it serves on, and each item is there once, also after a restart."""
    n, came = 0, True
    while came and n < most:
        ends = rc.remote.LocalCarrier.group(2)
        path = directory / str(n)

        def make(resume: bool, path: Path = path, end: Any = ends[1]) -> Any:
            checkpoint = rc.remote.Checkpoint(path, resume=resume)
            return rc.remote.ReplayBufferManager(
                ITEMS, 1, 1, communication_backend=end, capacity=99, checkpoint=checkpoint
            )

        told: list[Any] = []

        def work(end: Any = ends[0], told: list[Any] = told) -> None:
            with rc.remote.RemoteReplay(ITEMS, 1, end, deadline=20.0, retry_s=0.05) as replay:
                for k in range(3):
                    with suppress(rc.errors.ScoringError):
                        replay.add(items(3 * k))
            told.append(replay.stats())

        manager = make(False)
        worker = threading.Thread(target=work, daemon=True)
        worker.start()
        came = interrupted(manager.run, n)
        if came:
            apart(manager.run)
        worker.join(20.0)
        assert told and (told[0].offered, told[0].kept) == (9, 9), n
        assert manager.stats().offered == 9, n
        apart(manager.close)
        with make(True) as again:
            assert again.buffer.get_at(np.arange(len(again.buffer)))["x"].tolist() == list(range(9)), n
        for end in ends:
            end.close()
        n += step
    return n


CLIENTS: dict[str, dict[str, Any]] = {
    "sync": {},
    "async_score": {"mode": "async_score", "window": 2},
    "async_comm": {"mode": "async_comm", "window": 2},
    "every": {"send_every": 2},
}


def offered(kind: str, verb: str, carrier: str, step: int) -> int:
    """Interrupt a client; it can be used and closed, and each item that it counts is with the manager, once."""
    n, came = 0, True
    while came:
        here, there = two_ends(carrier)
        manager = rc.remote.ReplayBufferManager(ITEMS, 1, 1, communication_backend=there, capacity=99).start()
        replay = rc.remote.RemoteReplay(ITEMS, 1, here, deadline=20.0, retry_s=0.5, **CLIENTS[kind])
        replay.add(items(0))
        replay.add(items(3))
        done = 0

        def call(replay: Any = replay) -> None:
            nonlocal done
            if verb == "close":
                replay.close()
                return
            for k in (1, 2, 3):
                replay.add(items(10 * k))
                done = k
            replay.flush()
            replay.sample(4)

        came = interrupted(call, n)

        def go_on(replay: Any = replay) -> None:
            if verb != "close":
                replay.add(items(50))
                assert len(replay.sample(4)["x"]) == 4
            replay.close()
            replay.close()

        apart(go_on)
        stats = replay.stats()
        apart(manager.close)
        apart(here.close)
        apart(there.close)
        assert manager.stats().exit_counter == 1, n
        assert (stats.pending, stats.lost, stats.dropped, stats.offered) == (0, 0, 0, stats.kept), (n, stats)
        assert manager.stats().offered == stats.kept, n
        least = 6 if verb == "close" else 9 + 3 * done
        assert stats.kept in (least, least if done == 3 or verb == "close" else least + 3), (n, stats, done)
        n += step
    return n


OFFERS = [
    (kind, verb, carrier)
    for kind in CLIENTS
    for verb in ("add", "close")
    for carrier in ("local", "tcp")
    if carrier == "local" or kind in ("sync", "async_comm")
]


@pytest.mark.parametrize(("kind", "verb", "carrier"), OFFERS)
def test_a_client_that_is_interrupted_counts_and_delivers_each_item_once(
    kind: str, verb: str, carrier: str
) -> None:
    assert offered(kind, verb, carrier, 101 if verb == "add" else 19) > 100


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("kind", "verb", "carrier"), OFFERS)
def test_a_client_that_is_interrupted_at_every_point_delivers_each_item_once(
    kind: str, verb: str, carrier: str
) -> None:
    assert offered(kind, verb, carrier, 1) > 100


def test_a_manager_that_is_interrupted_serves_on_and_keeps_each_item_once(tmp_path: Path) -> None:
    assert served(61, tmp_path) > 500
    assert served(1, tmp_path / "begin", most=30) == 30


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_a_manager_that_is_interrupted_at_every_point_keeps_each_item_once(tmp_path: Path) -> None:
    assert served(1, tmp_path) > 500


@pytest.mark.parametrize("read_only", [True, False])
def test_a_buffer_that_is_being_opened_leaves_no_file_open(read_only: bool, tmp_path: Path) -> None:
    """Neither is one closed twice: the second time it may be another thread's. The fixture of all tests looks."""
    x = {"x": ((), "int64")}
    with rc.ReplayBuffer.create("memmap", x, capacity=8, cache_path=tmp_path / "d") as buffer:
        buffer.extend({"x": np.arange(5)})
    opened: list[Any] = []
    n = 0
    with pytest.MonkeyPatch.context() as patch:
        wrong: list[Any] = []
        patch.setattr("sys.unraisablehook", lambda what: wrong.append(what.exc_value))
        while interrupted(
            lambda: opened.append(rc.ReplayBuffer.load_from(tmp_path / "d", read_only=read_only)), n
        ):
            for buffer in opened:
                buffer.close()
            opened.clear()
            n += 1
        opened[0].close()
        assert [error for error in wrong if not isinstance(error, KeyboardInterrupt)] == []
