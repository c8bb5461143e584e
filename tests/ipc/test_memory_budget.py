"""Budgets: estimates equal the bytes of the segments made; warnings once; errors before anything is allocated."""

from __future__ import annotations

import os
import warnings
from typing import Any

import numpy as np
import pytest

import recollect as rc
from recollect.ipc import memory_budget as budget
from recollect.ipc.replay_pipelines import make_collector_pack


@pytest.mark.parametrize(("lanes", "critic"), [(1, 0), (4, 0), (2, 7), (32, 5)])
def test_the_replay_estimate_equals_the_segment(lanes: int, critic: int) -> None:
    est = budget.estimate_offpolicy_bytes(32, 101, 17, 6, critic, 256, 4, num_lanes=lanes)
    with rc.ipc.ReplayBuffer(32 * 101, 17, 6, "numpy", critic_dim=critic, num_lanes=lanes) as buf:
        assert est["replay_buffer"] == os.fstat(buf._open().fd).st_size == buf.nbytes
        assert est["row_bytes"] == buf.row_nbytes


@pytest.mark.parametrize(("batch", "updates"), [(256, 4), (1, 1), (333, 3)])
def test_the_slots_estimate_equals_the_segment(batch: int, updates: int) -> None:
    est = budget.estimate_offpolicy_bytes(32, 101, 17, 6, 0, batch, updates)
    with rc.ipc.ReplayBuffer(32 * 101, 17, 6, "numpy") as buf:
        slots = make_collector_pack(buf, batch * updates)[2]
        assert est["double_buffer_slots"] == os.fstat(slots._open().fd).st_size == slots.nbytes
        slots.cleanup()


@pytest.mark.parametrize("n_params", [1, 8, 200])
def test_the_weights_estimate_equals_the_segment(n_params: int) -> None:
    values = {f"layers.{i}.weight": np.zeros((33, i + 1), "f4") for i in range(n_params)}
    shapes = {k: v.shape for k, v in values.items()}
    nbytes = sum(v.nbytes for v in values.values())
    with rc.ipc.SharedWeightSync.from_state_dict(values) as sync:
        size = os.fstat(sync._box.segment().fd).st_size
    for estimate in (
        lambda **kw: budget.estimate_offpolicy_bytes(1, 8, 1, 1, 0, 1, 1, **kw),
        lambda **kw: budget.estimate_appo_bytes(1, 8, 1, 1, 0, **kw),
    ):
        assert estimate(param_shapes=shapes)["weights"] == size
        if n_params < 60:  # names and shapes fit a page
            assert estimate(param_bytes=nbytes)["weights"] == size
        assert estimate()["weights"] == 0


def test_offpolicy_by_hand() -> None:
    est = budget.estimate_offpolicy_bytes(
        4, 250, 48, 12, 3, 256, 4, num_lanes=2, device="cuda:0", param_bytes=5000
    )
    row, c, n = 4 * (96 + 12 + 3 + 6) + 4, 1000, 1024
    assert est["row_bytes"] == row == 472
    assert est["replay_buffer"] == 4096 + 8192 + -(-row * c // 4096) * 4096
    assert est["double_buffer_slots"] == 4096 + 4096 + 2 * (-(-row * n // 4096) * 4096)
    assert est["weights"] == 4096 + 4096 + 3 * 8192
    assert est["total"] == est["replay_buffer"] + est["double_buffer_slots"] + est["weights"]
    assert est["device_slots"] == 2 * row * n and est["peak"] == est["total"] + 16 * n
    for device in ("cpu", "numpy"):
        assert budget.estimate_offpolicy_bytes(4, 250, 48, 12, 3, 256, 4, device=device)["device_slots"] == 0


def test_appo_by_hand() -> None:
    est = budget.estimate_appo_bytes(
        8, 3, (2, 5), 3, 4, 5, num_lanes=2, staging=2, finals=True, fields={"valid": ((), "bool")}
    )
    n, t = 4, 3
    sizes = [4 * n * t * 10, 4 * n * t * 3, *[4 * n * t] * 4, 4 * n * 10, 4 * n * t * 4, 4 * n * 4, n * t,
             4 * n * t * 10, 8 * n * t, 8, 4 * n * t * 4]  # fmt: skip
    slot = sum(-(-size // 64) * 64 for size in sizes)
    assert est["slot_bytes"] == slot
    assert est["ring_buffer"] == 4096 + 4096 + 2 * 5 * (-(-slot // 4096) * 4096)
    with rc.ipc.RolloutRingBuffer(
        4, 3, (2, 5), 3, critic_dim=4, num_slots=5, num_lanes=2, finals=True, fields={"valid": ((), "bool")}
    ) as ring:
        assert ring.nbytes == est["ring_buffer"]
    assert est["staging_pool"] == 2 * 2 * slot and est["total"] == est["ring_buffer"]
    assert est["peak"] == est["total"] + est["staging_pool"]


def test_all_results_are_ints_and_the_breakdown_says_them() -> None:
    for est in (
        budget.estimate_offpolicy_bytes(4, 250, 48, 12, 3, 256, 4),
        budget.estimate_appo_bytes(8, 24, 48, 12, 0),
    ):
        text = est.pop("breakdown")
        assert all(type(n) is int for n in est.values())
        assert all(name in text and f"{n:,}" in text for name, n in est.items())
        assert "not counted: networks" in text


@pytest.mark.parametrize(
    "wrong", [{"num_envs": 0}, {"batch_size": 1.5}, {"critic_dim": -1}, {"num_lanes": 3}]
)
def test_bad_numbers(wrong: dict[str, Any]) -> None:
    good = {"num_envs": 4, "replay_buffer_n": 10, "obs_dim": 1, "action_dim": 1, "critic_dim": 0, "batch_size": 1,
            "updates_per_step": 1}  # fmt: skip
    with pytest.raises(ValueError, match=next(iter(wrong))):
        budget.estimate_offpolicy_bytes(**(good | wrong))
    with pytest.raises(ValueError, match="num_lanes"):
        budget.estimate_appo_bytes(8, 2, 1, 1, 0, num_lanes=3)


# -- available memory


def test_available() -> None:
    free = budget.get_available_memory_bytes()
    assert free is not None and 0 < free < 1 << 50
    shared = budget.get_shared_memory_available_bytes()
    assert shared is not None and shared > 0
    mount = os.statvfs("/dev/shm")
    assert (
        abs(budget.get_shared_memory_available_bytes("/dev/shm") - mount.f_bavail * mount.f_frsize) < 1 << 28
    )  # type: ignore[operator]
    assert budget.get_shared_memory_available_bytes("/no/such/place") is None


@pytest.fixture
def thousand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "available_nbytes", lambda: 1000)
    monkeypatch.setattr(budget, "_warned", set())
    monkeypatch.delenv(budget.MUTE, raising=False)


@pytest.mark.usefixtures("thousand")
def test_warns_once_per_label(monkeypatch: pytest.MonkeyPatch) -> None:
    budget.warn_if_over_budget(np.int64(800), "sac")
    with pytest.warns(ResourceWarning, match="sac: must fit in 80% of the 1000 B available, got 801 B"):
        budget.warn_if_over_budget({"peak": 801, "total": 1}, "sac")
    budget.warn_if_over_budget(900, "sac")  # warnings are errors: a second one would raise
    with pytest.warns(ResourceWarning, match="other"):
        budget.warn_if_over_budget(501, "other", fraction=0.5)
    monkeypatch.setenv(budget.MUTE, "1")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        budget.warn_if_over_budget(10_000, "muted")


@pytest.mark.usefixtures("thousand")
def test_raises_and_cannot_be_muted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(budget.MUTE, "1")
    budget.raise_if_shared_memory_over_budget({"peak": 10_000, "total": 800}, "sac")
    est = {"peak": 0, "total": 801, "breakdown": "the parts"}
    with pytest.raises(rc.BudgetError, match="sac: .*nothing was allocated\nthe parts"):
        budget.raise_if_shared_memory_over_budget(est, "sac")
    with pytest.raises(MemoryError):
        budget.raise_if_shared_memory_over_budget(1 << 60, "sac", path="/")
    monkeypatch.setattr(budget, "available_nbytes", lambda: None)
    budget.raise_if_shared_memory_over_budget(1 << 60, "sac")
    budget.warn_if_over_budget(1 << 60, "unknown")


@pytest.mark.parametrize(
    ("est", "fraction"), [({}, 0.8), ("x", 0.8), (-1, 0.8), (1, 0), (1, 1.5), (1, float("nan"))]
)
def test_bad_arguments(est: Any, fraction: float) -> None:
    for check in (budget.warn_if_over_budget, budget.raise_if_shared_memory_over_budget):
        with pytest.raises(ValueError, match="est|fraction"):
            check(est, "x", fraction)
