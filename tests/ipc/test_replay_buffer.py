"""ipc.ReplayBuffer: the packed transition face of the ring; every refusal, patched rows, lanes, devices, files."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from tests.meanwhile import at_every_moment
from tests.process.killing import in_child, killed_at, steps

import recollect as rc
from recollect.ipc.replay_buffer import ReplayBuffer
from recollect.ipc.shared_buffer import SharedBufferBase

KEYS = ["obs", "next_obs", "actions", "rewards", "dones", "truncated"]
O, A, C = 3, 2, 4


def rows(ids: Any, critic: bool = False, **changes: Any) -> dict[str, Any]:
    """Transitions whose every field tells the id of the row."""
    x = np.asarray(ids, np.float32)
    done = x % 5 == 4
    made = {
        "obs": np.repeat(x[:, None], O, 1), "actions": np.repeat(x[:, None] + 0.25, A, 1), "rewards": x.copy(),
        "next_obs": np.repeat(x[:, None] + 1, O, 1), "dones": done, "truncated": done & (x % 10 == 9),
    }  # fmt: skip
    if critic:
        made |= {"critic": np.repeat(x[:, None], C, 1), "next_critic": np.repeat(x[:, None] + 1, C, 1)}
    return made | changes


def check(batch: dict[str, Any]) -> list[int]:
    """The ids of a batch whose fields all belong together."""
    x = np.asarray(batch["rewards"])
    expected = rows(x, "critic" in batch)
    for name, value in batch.items():
        assert np.array_equal(np.asarray(value), expected[name].astype(np.float32)), name
    return [int(i) for i in x]


def make(capacity: int = 8, device: Any = "numpy", **kwargs: Any) -> ReplayBuffer:
    return ReplayBuffer(capacity, O, A, device, **kwargs)


def held(buf: ReplayBuffer) -> list[int]:
    return check(buf._ring[...]) if buf.size else []


# -- against a model


class Machine(RuleBasedStateMachine):
    """Two lanes against two lists."""

    def __init__(self) -> None:
        super().__init__()
        self.buf = make(12, num_lanes=2, seed=1)
        self.lanes = [self.buf.on_lane(k) for k in range(2)]
        self.model: list[list[int]] = [[], []]
        self.n, self.rejected, self.added = 0, 0, 0

    @rule(lane=st.integers(0, 1), n=st.integers(0, 15), terminal=st.booleans())
    def add(self, lane: int, n: int, terminal: bool) -> None:
        ids = list(range(self.n, self.n + n))
        self.n += n
        block = rows(ids)
        if terminal:
            true_next = block["next_obs"].copy()
            mask = np.asarray(ids, float) % 3 == 0
            block["next_obs"][mask] = -1
            block |= {"terminal_mask": mask, "terminal_next_obs": true_next}
        self.lanes[lane].add(**block)
        self.model[lane] = (self.model[lane] + ids)[-6:]
        self.added += n

    @rule(n=st.integers(1, 5))
    def refuse(self, n: int) -> None:
        with pytest.raises(rc.SchemaError):
            self.buf.add(**rows(range(n), dones=np.full(n, 2.0)))
        self.rejected += n

    @rule(n=st.integers(1, 20))
    def sample(self, n: int) -> None:
        there = [*self.model[0], *self.model[1]]
        if not there:
            with pytest.raises(rc.EmptyError):
                self.buf.sample(n)
            return
        found = check(self.buf.sample(n))
        assert len(found) == n and set(found) <= set(there)

    @invariant()
    def counts_add_up(self) -> None:
        s = self.buf.stats()
        there = len(self.model[0]) + len(self.model[1])
        assert (
            (self.buf.ptr, self.buf.size, len(self.buf))
            == (self.added, there, there)
            == (s.ptr, s.size, s.size)
        )
        assert s.offered == s.size + s.evicted + s.dropped + s.rejected and s.rejected == self.rejected
        assert sum(lane.ptr for lane in s.lanes) == s.ptr and sum(lane.size for lane in s.lanes) == s.size
        assert all(lane.ptr == lane.size + lane.evicted + lane.dropped for lane in s.lanes)
        assert held(self.buf) == [*self.model[0], *self.model[1]]

    def teardown(self) -> None:
        for b in (*self.lanes, self.buf):
            b.cleanup()


TestMachine = Machine.TestCase


def test_stats_are_a_frozen_record() -> None:
    with make() as buf:
        for stats in (buf.stats(), buf.stats().lanes[0]):
            with pytest.raises(AttributeError):
                stats.size = 1  # type: ignore[misc, union-attr]


# -- the row


def test_the_row_is_packed_and_in_order() -> None:
    with ReplayBuffer(16, 48, 12, "numpy") as buf:
        assert [f.name for f in buf.layout.fields] == KEYS and buf.row_nbytes == 448
        assert isinstance(buf, SharedBufferBase) and type(buf.ptr) is int and type(buf.size) is int
    with ReplayBuffer(16, 48, 12, "numpy", critic_dim=5) as buf:
        assert buf.row_nbytes == -(-4 * (2 * 48 + 12 + 3 + 10) // 8) * 8
        assert buf.nbytes == os.fstat(buf._open().fd).st_size
    with ReplayBuffer(
        16, 48, 12, "numpy", dtypes={"obs": "uint8", "next_obs": "uint8", "dones": bool}
    ) as buf:
        assert {f.name: f.dtype.name for f in buf.layout.fields}["obs"] == "uint8" and buf.row_nbytes < 200


@pytest.mark.parametrize(
    ("kwargs", "text"),
    [
        ({"capacity": 0}, "capacity"),
        ({"capacity": True}, "capacity"),
        ({"capacity": 9, "num_lanes": 2}, "divide"),
        ({"num_lanes": 0}, "num_lanes"),
        ({"lane": 1}, "lane"),
        ({"lane": -1}, "lane"),
        ({"device": 3}, "device"),
        ({"critic_dim": -1}, "critic_dim"),
        ({"dtypes": {"x": "f4"}}, "dtypes"),
        ({"seed": -1}, "seed"),
    ],
)
def test_bad_constructions(kwargs: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        make(**kwargs)
    for dims in ((0, 1), (1, 0), (1.5, 1)):
        with pytest.raises(ValueError, match="_dim"):
            ReplayBuffer(4, *dims, "numpy")  # type: ignore[arg-type]


def test_accepted_and_changing_nothing() -> None:
    with ReplayBuffer(8, O, A, "numpy", True, 0, True) as buf:
        buf.add(**rows(range(4)))
        assert held(buf) == [0, 1, 2, 3]


# -- adding


BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "flag value": ({"dones": np.float32([0, 2, 0, 0])}, rc.SchemaError, "dones: must be 0 or 1, got 2.0 in row 1"),
    "flag between": ({"dones": np.float32([0, 0, 0.5, 0])}, rc.SchemaError, "dones: must be 0 or 1, got 0.5 in row 2"),
    "flag below": ({"dones": np.array([0, 0, 0, -1])}, rc.SchemaError, "dones: must be 0 or 1, got -1 in row 3"),
    "flag nan": ({"dones": np.float32([0, np.nan, 0, 0])}, rc.SchemaError, "dones: must be 0 or 1"),
    "truncated, not done": ({"truncated": np.array([False, True, False, False])}, rc.SchemaError, "row 1 truncated"),
    "flag shape": ({"dones": np.zeros((4, 1), bool)}, rc.SchemaError, r"dones: shape must be \(4,\)"),
    "length": ({"actions": np.zeros((3, A), "f4")}, rc.SchemaError, r"actions: shape must be \(4, 2\), got \(3, 2\)"),
    "one row": (
        {"obs": np.zeros(O, "f4"), "next_obs": np.zeros(O, "f4")},
        rc.SchemaError,
        "; for a single row, add an axis",
    ),
    "width": ({"next_obs": np.zeros((4, O + 1), "f4")}, rc.SchemaError, "next_obs: shape"),
    "rewards shape": ({"rewards": np.zeros((4, 1), "f4")}, rc.SchemaError, "rewards: shape"),
    "dtype": ({"obs": np.zeros((4, O))}, rc.DtypeError, "obs: dtype must be float32, got float64; convert it"),
    "reward too large": ({"rewards": np.array([0, 1e300, 0, 0])}, rc.SchemaError, "rewards: values must fit"),
    "int rewards": ({"rewards": np.zeros(4, int)}, rc.DtypeError, "rewards: dtype"),
    "no array": ({"actions": [[0.0] * A] * 4}, rc.SchemaError, "actions: must be an array"),
    "no obs": ({"obs": None}, rc.SchemaError, "obs: must be an array"),
    "mask dtype": ({"terminal_mask": np.zeros(4, "f4")}, rc.SchemaError, "terminal_mask: must be bool"),
    "mask length": ({"terminal_mask": np.zeros(3, bool)}, rc.SchemaError, "terminal_mask: must be bool"),
    "mask without obs": ({"terminal_mask": np.ones(4, bool)}, rc.SchemaError, "terminal_next_obs: is needed"),
    "obs without mask": ({"terminal_next_obs": np.zeros((4, O), "f4")}, rc.SchemaError, "needs a terminal_mask"),
    "terminal width": ({"terminal_mask": np.zeros(4, bool), "terminal_next_obs": np.zeros((2, O), "f4")},
                       rc.SchemaError, "terminal_next_obs: shape"),
    "critic": ({"critic": np.zeros((4, C), "f4")}, rc.SchemaError, "critic: must be None"),
    "next_critic": ({"next_critic": np.zeros((4, C), "f4")}, rc.SchemaError, "next_critic: must be None"),
    "terminal critic": ({"terminal_mask": np.zeros(4, bool), "terminal_next_critic": np.zeros((4, C), "f4")},
                        rc.SchemaError, "terminal_next_critic: must be None"),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD)
def test_a_refused_block_changes_nothing(what: str) -> None:
    changes, error, text = BAD[what]
    with make() as buf:
        buf.add(**rows([0, 1]))
        with pytest.raises(error, match=text):
            buf.add(**(rows(range(4)) | changes))
        assert held(buf) == [0, 1] and buf.ptr == 2


@pytest.mark.parametrize("missing", ["critic", "next_critic"])
def test_critic_is_needed_where_it_has_a_size(missing: str) -> None:
    with make(critic_dim=C) as buf:
        with pytest.raises(rc.SchemaError, match=f"{missing}: is needed"):
            buf.add(**(rows(range(4), True) | {missing: None}))
        mask, t = np.ones(4, bool), np.zeros((4, O), "f4")
        with pytest.raises(rc.SchemaError, match="terminal_next_critic: is needed"):
            buf.add(**rows(range(4), True), terminal_mask=mask, terminal_next_obs=t)
        buf.add(**rows(range(4), True))
        assert held(buf) == [0, 1, 2, 3]


@pytest.mark.parametrize("dtype", [bool, "f4", "f8", "i8", "u1"])
def test_flags_of_any_dtype(dtype: Any) -> None:
    with make(12) as buf:
        block = rows(range(10))
        buf.add(**(block | {k: block[k].astype(dtype) for k in ("dones", "truncated")}))
        assert held(buf) == list(range(10))


def test_rewards_may_narrow_and_others_with_cast() -> None:
    with make() as buf:
        buf.add(**(rows(range(3)) | {"rewards": np.arange(3.0)}))
        with pytest.raises(
            rc.DtypeError, match="it is of another kind: convert it$"
        ):  # a cast would not help
            buf.add(**(rows(range(3)) | {"obs": np.zeros((3, O), int)}))
        assert held(buf) == [0, 1, 2]
    with make(cast=True) as buf:
        buf.add(**{k: v.astype("f8") if v.dtype == np.float32 else v for k, v in rows(range(3)).items()})
        with pytest.raises(rc.DtypeError, match="another kind"):
            buf.add(**(rows(range(3)) | {"obs": np.zeros((3, O), int)}))
        assert held(buf) == [0, 1, 2]
        for n, again in enumerate((buf.on_lane(0), pickle.loads(pickle.dumps(buf))), 3):
            again.add(**(rows([n]) | {"obs": np.full((1, O), n, "f8")}))
            again.close()
        assert held(buf) == [0, 1, 2, 3, 4]


def test_a_cast_of_integers_that_do_not_fit_is_refused() -> None:
    with make(cast=True, dtypes={"actions": "int8"}) as buf:
        actions = np.array([[1, 2], [3, 300]])
        with pytest.raises(rc.SchemaError, match="actions: values must fit int8, got int64"):
            buf.add(**(rows(range(2)) | {"actions": actions}))
        assert buf.ptr == 0
        buf.add(**(rows(range(2)) | {"actions": actions % 100}))
        assert buf._ring[...]["actions"].tolist() == [[1, 2], [3, 0]]


def test_tensors_and_strided_arrays() -> None:
    torch = pytest.importorskip("torch")
    with make() as buf:
        buf.add(**{k: torch.from_numpy(v) for k, v in rows(range(3)).items()})
        wide = np.repeat(rows(range(3, 6))["obs"], 2, axis=1)[:, ::2]
        buf.add(**(rows(range(3, 6)) | {"obs": wide}))
        assert held(buf) == [0, 1, 2, 3, 4, 5]


def test_nothing_and_too_much() -> None:
    with make(8, num_lanes=2, lane=1) as buf:
        buf.add(**rows([]))
        assert (buf.ptr, buf.size) == (0, 0)
        with pytest.raises(rc.SchemaError):
            buf.add(**(rows([]) | {"actions": np.zeros((0, A + 1), "f4")}))
        buf.add(**rows(range(11)))  # a lane has 4 rows
        assert (buf.ptr, held(buf)) == (11, [7, 8, 9, 10])


@pytest.mark.parametrize("start", range(9))
def test_no_reader_sees_an_unpatched_row_across_the_wrap(start: int) -> None:
    with make(8, critic_dim=C) as buf:
        if start:
            buf.add(**rows(range(100, 100 + start), True))
        block = rows(range(6), True)
        mask = np.array([True, False, True, True, False, True])
        given = {f"terminal_{k}": block[k].copy() for k in ("next_obs", "next_critic")}
        for k in ("next_obs", "next_critic"):
            block[k][mask] = -7
        kept = {k: v.copy() for k, v in block.items()}
        buf.add(**block, terminal_mask=mask, **given)
        assert held(buf)[-6:] == [0, 1, 2, 3, 4, 5]
        assert all(np.array_equal(kept[k], block[k]) for k in block)  # the caller's arrays are as they were


def test_no_reader_sees_an_unpatched_row_at_full_speed() -> None:
    """Every row is given with a wrong next_obs and its true one; a sampler in another thread sees only true ones."""
    with make(64, seed=3) as buf:
        mask = np.ones(48, bool)
        stop = threading.Event()
        errors: list[BaseException] = []

        def look() -> None:
            with pickle.loads(pickle.dumps(buf)) as mine:
                while not stop.is_set():
                    try:
                        check(mine.sample(32))
                    except rc.EmptyError:
                        pass
                    except BaseException as error:
                        errors.append(error)
                        return

        thread = threading.Thread(target=look)
        thread.start()
        for k in range(300):
            block = rows(range(k, k + 48))
            true_next = block["next_obs"].copy()
            block["next_obs"][:] = -1
            buf.add(**block, terminal_mask=mask, terminal_next_obs=true_next)
        stop.set()
        thread.join()
        assert not errors and buf.ptr == 300 * 48


# -- sampling


def test_shapes_and_dtypes_of_a_batch() -> None:
    torch = pytest.importorskip("torch")
    for device, kind in (("numpy", np.ndarray), ("cpu", torch.Tensor), (torch.device("cpu"), torch.Tensor)):
        with make(device=device) as buf:
            buf.add(**rows(range(6)))
            batch = buf.sample(20)  # more than there are
            assert list(batch) == KEYS and all(isinstance(x, kind) for x in batch.values())
            assert [tuple(batch[k].shape) for k in KEYS] == [(20, O), (20, O), (20, A), (20,), (20,), (20,)]
            assert device == "numpy" or all(x.is_contiguous() for x in batch.values())
            check({k: np.asarray(v) for k, v in batch.items()})


@pytest.mark.parametrize("device", ["numpy", "cpu"])
def test_the_newest_rows_of_a_lane_come_oldest_first(device: str) -> None:
    with make(8, device, num_lanes=2) as buf:
        one, other = buf.on_lane(0), buf.on_lane(1)
        with pytest.raises(rc.EmptyError, match="newest"):
            one.newest(1)
        for n in range(11):
            one.add(**rows([n]))
            assert check(one.newest(3)) == list(range(max(0, n - 2), n + 1))
        other.add(**rows([20, 21]))
        assert check(other.newest(9)) == [20, 21] and check(buf.newest(2, lane=0)) == [9, 10]
        assert check(buf.newest(9, lane=0)) == [7, 8, 9, 10]  # all that it has
        with pytest.raises(ValueError, match="lane: must be in .0, 2. where there are several, got None"):
            buf.newest(2)
        for bad in (0, -1, True, 1.5):
            with pytest.raises(ValueError, match="must be an int of at least 1"):
                one.newest(bad)  # type: ignore[arg-type]
        one.close()
        other.close()


def test_the_newest_rows_are_those_at_one_moment() -> None:
    with make(64) as buf:
        stop = threading.Event()

        def write() -> None:
            n = 0
            while not stop.is_set():
                buf.add(**rows([n % 4096]))
                n += 1

        thread = threading.Thread(target=write)
        buf.add(**rows([0]))
        thread.start()
        try:
            for _ in range(300):
                found = check(buf.newest(8))
                assert all((b - a) % 4096 == 1 for a, b in pairwise(found)) or found[:2] == [0, 0]
        finally:
            stop.set()
            thread.join()


def test_draws_are_uniform_and_repeatable_and_touch_no_global_generator() -> None:
    with make(64, seed=5) as a, make(64, seed=5) as b:
        for buf in (a, b):
            buf.add(**rows(range(64)))
        before = np.random.get_state()[1].copy()  # noqa: NPY002
        first, second = (check(a.sample(500)) for _ in range(2))
        assert first == check(b.sample(500)) and second == check(b.sample(500)) and first != second
        seeded = check(a.sample(50, seed=9))
        assert seeded == check(a.sample(50, seed=9))
        assert check(a.sample(500)) == check(b.sample(500))  # a seeded draw does not move the generator
        assert seeded == check(b.sample(50, seed=9))
        assert np.array_equal(before, np.random.get_state()[1])  # noqa: NPY002
        counts = np.bincount(check(a.sample(64_000)), minlength=64)
        assert ((counts - 1000) ** 2 / 1000).sum() < 120  # chi square, 63 degrees of freedom


def test_bad_draws() -> None:
    with make() as buf:
        with pytest.raises(rc.EmptyError):
            buf.sample(1)
        buf.add(**rows([0]))
        for n in (0, -1, 1.5, True, "3"):
            with pytest.raises(ValueError, match="batch_size"):
                buf.sample(n)  # type: ignore[arg-type]
        for n in (10**12, 10**30):
            with pytest.raises(
                rc.BudgetError, match=f"batch_size {n}: needs .* TiB, .* available; draw fewer"
            ):
                buf.sample(n)
        for out in ({}, buf.sample(3), {**buf.sample(4), "x": np.zeros(4)}):
            with pytest.raises(ValueError, match="out"):
                buf.sample(4, out=out)


@pytest.mark.parametrize("device", ["numpy", "cpu"])
def test_a_refused_draw_does_not_move_the_generator(device: str) -> None:
    with make(64, device, seed=1) as buf, make(64, device, seed=1) as twin:
        with pytest.raises(rc.EmptyError):
            buf.sample(3)
        for b in (buf, twin):
            b.add(**rows(range(64)))
        for refused in ((-1, None), (True, None), (4, {})):
            with pytest.raises(ValueError):
                buf.sample(refused[0], out=refused[1])
        for _ in range(2):
            assert check(buf.sample(20)) == check(twin.sample(20))


def test_a_reader_that_is_lapped_again_and_again_gives_up() -> None:
    with make(4) as buf:
        buf.add(**rows(range(4)))
        start = time.monotonic()
        with at_every_moment(lambda: buf.add(**rows(range(4)))), pytest.raises(rc.ContentionError):
            buf.sample(2)
        assert time.monotonic() - start >= 0.9
        check(buf.sample(2))


def test_out_is_filled() -> None:
    torch = pytest.importorskip("torch")
    for device in ("numpy", "cpu"):
        with make(device=device, seed=1) as buf, make(device=device, seed=1) as twin:
            for b in (buf, twin):
                b.add(**rows(range(6)))
            out = buf.sample(5)
            kept = out["obs"]
            twin.sample(5)
            assert buf.sample(5, out=out) is out and out["obs"] is kept
            assert check({k: np.asarray(v) for k, v in out.items()}) == check(
                {k: np.asarray(v) for k, v in twin.sample(5).items()}
            )
    del torch


def test_other_devices_get_one_transfer_and_views_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    from recollect.backends.torch import TorchBackend

    moved: list[Any] = []

    def from_numpy(self: Any, array: Any, device: Any = None) -> Any:
        moved.append(device)
        return torch.from_numpy(array)

    monkeypatch.setattr(TorchBackend, "as_device", lambda self, device: torch.device("cuda:0"))
    monkeypatch.setattr(TorchBackend, "from_numpy", from_numpy)
    with make(device="cuda", critic_dim=C, seed=1, dtypes={"dones": "bool"}) as buf:
        buf.add(**rows(range(6), True))
        batch = buf.sample(7)
        assert moved == ["cuda"] and batch["dones"].dtype == torch.bool
        assert len({x.untyped_storage().data_ptr() for x in batch.values()}) == 1
        ids = check({k: v.float().numpy() for k, v in batch.items()})
        out = {k: torch.zeros_like(v) for k, v in batch.items()}
        assert buf.sample(7, out=out) is out and len(set(ids)) > 1
        with pytest.raises(ValueError, match="out"):
            buf.sample(6, out=out)


def test_bootstrap_mask() -> None:
    """[1, 1, 0] for running, timed out and terminated, from what is stored."""
    with make() as buf:
        flags = {"dones": np.array([0, 1, 1]), "truncated": np.array([0, 1, 0])}
        buf.add(**(rows(range(3)) | flags))
        data = buf._ring[...]
        assert (1 - data["dones"] * (1 - data["truncated"])).tolist() == [1, 1, 0]


def test_missing_torch_is_said_when_it_is_needed() -> None:
    script = (
        "import sys; sys.modules['torch'] = None\nimport numpy as np, recollect as rc\n"
        "b = rc.ipc.ReplayBuffer(4, 1, 1, 'cpu'); f = np.zeros(1, bool); x = np.zeros((1, 1), 'f4')\n"
        "b.add(x, x, np.zeros(1), x, f, f)\n"
        "try: b.sample(1)\nexcept rc.MissingExtraError as e: print(e)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=40, check=True
    )
    assert 'pip install "recollect[torch]"' in done.stdout


# -- lanes and processes


@pytest.mark.process
def test_lanes_between_processes() -> None:
    with make(8, num_lanes=2) as buf:
        buf.add(**rows([0, 1]))  # the learner prefills lane 0
        assert buf.stats().lanes[0].writer_pid == os.getpid()
        handle = pickle.dumps(buf.on_lane(0))
        assert len(handle) < 300

        def busy() -> None:
            says = (
                rf"lane 0 is taken: held by process {os.getppid()}; .*num_lanes=.* release_lane\(\) or close"
            )
            with pytest.raises(rc.LaneBusyError, match=says):
                pickle.loads(handle).add(**rows([9]))
            pickle.loads(pickle.dumps(buf)).add(**rows([5]))  # the first free lane

        in_child(busy)
        assert held(buf) == [0, 1, 5]
        buf.release_lane()
        in_child(lambda: pickle.loads(handle).add(**rows([2, 3])))
        assert held(buf) == [0, 1, 2, 3, 5]
        for number in (2, -1, None):
            with pytest.raises(ValueError, match="lane"):
                buf.on_lane(number)  # type: ignore[arg-type]


def test_a_handle_stays_small_whatever_the_dtypes_and_sizes() -> None:
    names = "obs next_obs actions rewards dones truncated critic next_critic".split()
    kinds = "bfloat16 float8_e4m3fn float8_e5m2 float16 uint16 uint8 float64 bfloat16".split()
    with make(num_lanes=2, critic_dim=C, dtypes=dict(zip(names, kinds))) as buf:
        lane = buf.on_lane(1)
        assert lane.layout == buf.layout and [f.dtype.name for f in lane.layout.fields] == kinds
        numbers = buf.name.split("-")[2:9]  # pid, descriptor, capacity, lanes, three sizes
        more = sum(most - len(n) for most, n in zip((7, 6, 12, 4, 6, 6, 6), numbers))
        assert len(pickle.dumps(lane)) + more < 300
        lane.close()


@pytest.mark.process
def test_attach_by_name_from_an_unrelated_process() -> None:
    script = (
        "import sys, recollect as rc; b = rc.ipc.ReplayBuffer.attach(sys.argv[1], 'numpy', seed=0);"
        "print(b.ptr, b.size, sorted(set(b.sample(50)['rewards'].tolist())))"
    )
    with make(critic_dim=C, dtypes={"obs": "float64", "next_obs": "float64", "dones": "bool", "truncated": "int8",
                                    "actions": "float16", "critic": "bfloat16", "next_critic": "bfloat16"}, num_lanes=2,
              cast=True) as buf:  # fmt: skip
        buf.add(**rows(range(3)), critic=np.zeros((3, C), "f4"), next_critic=np.zeros((3, C), "f4"))
        assert len(pickle.dumps(buf)) < 300
        done = subprocess.run(
            [sys.executable, "-c", script, buf.name], capture_output=True, text=True, timeout=40, check=True
        )
        assert done.stdout.strip() == "3 3 [0.0, 1.0, 2.0]"
        for text in ("", "recollect-replay-1-2", buf.name.replace("replay", "other"), None):
            with pytest.raises(rc.AttachError):
                ReplayBuffer.attach(text, "numpy")  # type: ignore[arg-type]
        for place, wrong in ((5, "1"), (6, "9"), (4, "16")):  # lanes, obs_dim, capacity
            other = buf.name.split("-")
            other[place] = wrong
            with pytest.raises(rc.AttachError, match="must be"):
                ReplayBuffer.attach("-".join(other), "numpy")


@pytest.mark.process
def test_a_collector_killed_at_every_step() -> None:
    with make(8) as buf:
        in_child(lambda: buf.add(**rows(range(6))))
        mask = np.array([True, False, True])
        for step in steps():
            ids = [10 * step + 10, 10 * step + 11, 10 * step + 12]
            block = rows(ids)
            true_next = block["next_obs"].copy()
            block["next_obs"][mask] = -1
            block |= {"terminal_mask": mask, "terminal_next_obs": true_next}
            killed = killed_at(step, lambda block=block: buf.add(**block))
            found = held(buf)
            assert set(check(buf.sample(64))) <= set(found)
            if not killed:
                assert found[-3:] == ids
                break


@pytest.mark.process
def test_closing() -> None:
    buf = make()
    other = pickle.loads(pickle.dumps(buf))
    buf.add(**rows([0, 1]))
    batch = other.sample(4)

    in_child(buf.cleanup)  # a child did not make it: there it only detaches
    assert other.size == 2
    buf.cleanup()
    buf.cleanup()
    check(batch)
    for b in (buf, other):
        for call in (lambda: b.ptr, lambda: b.size, lambda: b.sample(1), lambda: b.add(**rows([1])), b.stats,  # noqa: B023
                     lambda: b.on_lane(0), b.release_lane, lambda: b.dumps("x"), lambda: pickle.dumps(b),  # noqa: B023
                     lambda: b.name, lambda: b.nbytes):  # noqa: B023  # fmt: skip
            with pytest.raises(rc.ClosedError):
                call()
    other.close()
    other.close()


# -- files


@pytest.mark.process
def test_each_environment_of_a_lane_has_its_own_segments(tmp_path: Path) -> None:
    with make(60, num_lanes=2, envs_per_lane=3) as buf:
        assert len(pickle.dumps(buf)) < 300
        lane = pickle.loads(pickle.dumps(buf.on_lane(1)))
        for t in range(8):  # ids tell environment and step; an episode ends when the id is 4 modulo 5
            lane.add(**rows([t, 100 + t]), envs=np.array([0, 1]))
        lane.mark_segment_end([1])
        lane.add(**rows([108, 208]), envs=np.array([1, 2]), ends=[False, True])
        buf.add(**rows([300, 301]))  # of no environment: one segment
        assert [x.ptr for x in buf.stats().lanes] == [2, 18]
        assert set(check(buf.sample(500, seed=0))) == {*range(8), *range(100, 109), 208, 300, 301}
        buf.dumps(tmp_path / "d")
        with pytest.raises(ValueError, match="newest: rows of 3 environments"):
            buf.newest(2, lane=0)
        for wrong, text in (
            ({"envs": np.array([3])}, r"envs: must be in \[0, 3\), got 3 to 3"),
            ({"envs": np.array([0, 1])}, "envs: must be 1 whole numbers"),
            ({"envs": np.array([0]), "ends": [True, False]}, "ends: shape"),
        ):
            with pytest.raises(ValueError, match=text):
                lane.add(**rows([1]), **wrong)
        lane.close()
    with rc.ReplayBuffer.load_from(tmp_path / "d") as saved:
        segments = saved.get_segments()
        found = [saved[a:b]["rewards"].astype(int).tolist() for a, b in segments or ()]
    wanted = [
        [0, 1, 2, 3, 4],
        [5, 6, 7],
        [100, 101, 102, 103, 104],
        [105, 106, 107],
        [108],
        [208],
        [300, 301],
    ]
    assert sorted(found) == wanted
    with ReplayBuffer.load_from(tmp_path / "d") as again, pickle.loads(pickle.dumps(again)) as other:
        assert (again.num_lanes, other.size) == (6, 20)
    with make() as plain, pytest.raises(ValueError, match="create it with envs_per_lane"):
        plain.add(**rows([1]), envs=np.array([0]))


@pytest.mark.process
def test_dumps_and_load_from(tmp_path: Path) -> None:
    with make(8, num_lanes=2, critic_dim=C) as buf:
        buf.on_lane(1).add(**rows(range(6), True))
        buf.dumps(tmp_path / "d")
        buf.dumps(tmp_path / "d")
    with ReplayBuffer.load_from(tmp_path / "d", "numpy", lane=0) as again:
        assert (again.num_lanes, again.critic_dim, again.capacity) == (2, C, 8)
        assert held(again) == [2, 3, 4, 5] and again.ptr == 4
        again.add(**rows([7], True))
        with pickle.loads(pickle.dumps(again)) as other:
            assert held(other) == [7, 2, 3, 4, 5]
            again.cleanup()  # who loads it is its owner
            with pytest.raises(rc.ClosedError):
                other.size
    with rc.ReplayBuffer.create("memory", {"x": ((), "float32")}, capacity=4) as plain:
        plain.append({"x": 1.0})
        plain.dumps(tmp_path / "p")
    with pytest.raises(rc.FormatError, match="must hold transitions"):
        ReplayBuffer.load_from(tmp_path / "p")
