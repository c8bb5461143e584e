"""The manager: what it keeps, scores, answers and counts, without and with a carrier."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from tests.remote.make import MAX_LENGTH, PLAIN, SAMPLE, assert_doors, grid, paths, samples

import recollect as rc
from recollect.errors import (
    ClosedError,
    DeadlineError,
    EmptyError,
    RemoteError,
    SchemaError,
    ScoringError,
)
from recollect.remote import (
    Checkpoint,
    Diversity,
    Limits,
    LocalCarrier,
    RemoteReplay,
    ReplayBufferManager,
    Shards,
    Trajectories,
)
from recollect.remote.frame import encode
from recollect.remote.manager import manager as managers
from recollect.remote.manager.baseline import Ranking
from recollect.remote.messages import Exit
from recollect.remote.stats import Timing
from recollect.testing.carrier_contract import eventually

INF = float("inf")


def manager(env: Any = SAMPLE, n: int | None = 1, **kw: Any) -> ReplayBufferManager:
    return ReplayBufferManager(env, 1, n, **kw)


# -- arguments


@pytest.mark.parametrize(
    "wrong",
    [
        {"baseline_strategy": "median"},
        {"baseline_percentile": 1.5},
        {"baseline_percentile": float("nan")},
        {"baseline_percentile": "0.1"},
        {"baseline_ema_alpha": 0.0},
        {"baseline_ema_alpha": 1.5},
        {"baseline_ema_alpha": "0.1"},
        {"capacity": 0},
        {"capacity": True},
        {"capacity": "10"},
        {"communication_backend": "carrier pigeon"},
        {"communication_backend": 7},
        {"remote_manager_rank": 1},
        {"remote_manager_rank": -1},
        {"remote_manager_rank": 2.5},
        {"worker_ranks": [1]},
        {"worker_ranks": [2, 2]},
        {"worker_ranks": [-1, 2]},
        {"storage": "memmap"},
        {"evict": "newest"},
        {"shards": Shards((2, 3))},
    ],
)
def test_wrong_arguments_are_named(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        manager(**wrong)


def test_defaults_are_those_of_the_page() -> None:
    import inspect

    got = inspect.signature(ReplayBufferManager.__init__).parameters
    page = """env rank num_training_ranks scoring_function diverse_replay_buffer capacity remote_manager_rank
        communication_backend timing store_locally baseline_strategy baseline_percentile baseline_ema_alpha"""
    assert list(got)[1:14] == page.split()
    defaults = {name: p.default for name, p in got.items()}
    assert (defaults["capacity"], defaults["communication_backend"], defaults["store_locally"]) == (
        10000,
        "mpi",
        True,
    )
    assert (defaults["baseline_strategy"], defaults["baseline_percentile"], defaults["baseline_ema_alpha"]) == (
        "min", 0.1, 0.1,
    )  # fmt: skip
    m = manager()
    assert m._baseline_ema is None and m._pending_sends == [] and m.exit_counter == 0 and m.is_running


@pytest.mark.parametrize(
    ("wrong", "name"),
    [
        (lambda: ReplayBufferManager(SAMPLE, -1, 1), "rank"),
        (lambda: ReplayBufferManager(SAMPLE, True, 1), "rank"),
        (lambda: ReplayBufferManager(SAMPLE, 1, -1), "num_training_ranks"),
        (lambda: manager(n=True), "num_training_ranks"),
        (lambda: manager(n=3, worker_ranks=[2, 3]), "num_training_ranks"),
        (lambda: manager(PLAIN, evict="lowest"), "evict"),
        (lambda: manager(diverse_replay_buffer=True), "diversity"),
        (lambda: Diversity(p=0.5), "p"),
        (lambda: Diversity(p=float("nan")), "p"),
        (lambda: Diversity(cutoff=float("nan")), "cutoff"),
        (lambda: Shards((2, 2)), "manager_ranks"),
        (lambda: Shards(()), "manager_ranks"),
        (lambda: Shards((2, 3), sync_s=0.0), "sync_s"),
        (lambda: Checkpoint("x", every_s=-1.0), "every_s"),
        (lambda: Checkpoint("x", every_s=0.0), "every_s"),
        *[(lambda n=n: Limits(max_window=n), "max_window") for n in (0, 4097, True, 1.5, "4")],
        *[(lambda n=n: Limits(**{n: float("nan")}), n)
          for n in ("join_s", "rejoin_s", "silence_s", "send_s", "drain_s")],
    ],
)  # fmt: skip
def test_what_cannot_be_is_a_value_error(wrong: Callable[[], Any], name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name}:"):
        wrong()


def test_records_have_the_defaults_of_the_contract() -> None:
    assert Diversity() == Diversity("final_state", 0.0, 1.0)
    assert Shards([2, np.int64(3)]) == Shards((2, 3), 1.0)  # any sequence of ranks
    assert Checkpoint("runs") == Checkpoint("runs", 300.0, False, False)
    assert Limits() == Limits(64, 300.0, 10.0, 300.0, 30.0, 5.0)


@pytest.mark.parametrize(
    "fine",
    [
        {"baseline_percentile": 0},
        {"baseline_percentile": 1},
        {"baseline_ema_alpha": 1},
        {"worker_ranks": [2]},
        {"limits": Limits(max_window=4096)},
    ],
)
def test_the_ends_of_a_range_belong_to_it(fine: dict[str, Any]) -> None:
    manager(**fine).close()


def test_a_container_of_another_kind_is_rejected_whole() -> None:
    m = manager()
    with pytest.raises(SchemaError):
        m.add(paths([1, 2, 3], [0.0, 0.0, 0.0]))
    with pytest.raises(SchemaError):
        m.add({"id": np.zeros(2)})  # how many it holds cannot be told
    assert (m.stats().offered, m.stats().rejected) == (4, {"schema": 4})
    assert_doors(m.stats())


def test_a_closed_manager_says_so() -> None:
    m = manager()
    m.add(samples([1], [0.0]))
    m.close()
    for call in (lambda: m.add(samples([2], [0.0])), lambda: m.sample(1), m.run, m.start):
        with pytest.raises(ClosedError, match="ReplayBufferManager: was closed"):
            call()
    assert m.stats().offered == m.stats().live == 1


def test_trajectories_need_a_length() -> None:
    with pytest.raises(ValueError, match="max_length"):
        manager(grid())


def test_no_worker_ends_at_once() -> None:
    ends = LocalCarrier.group(2)
    stats = manager(n=0, communication_backend=ends[1]).run()
    assert stats.offered == 0
    ends[1].close()


# -- what is kept


def model_of_lowest(values: list[float], capacity: int) -> list[float]:
    """A full buffer gives up its lowest, of equals the older; a lower newcomer is rejected."""
    held: list[float] = []
    for value in values:
        if np.isnan(value) or value == INF:
            continue
        if len(held) < capacity:
            held.append(value)
        elif value >= min(held):
            held.remove(min(held))
            held.append(value)
    return sorted(held)


rewards = st.one_of(st.floats(-5, 5), st.sampled_from([-INF, INF, float("nan"), 0.0]))


@given(st.lists(st.lists(rewards, max_size=6), max_size=8), st.integers(1, 5))
def test_the_best_are_kept_and_every_item_leaves_by_a_door(
    containers: list[list[float]], capacity: int
) -> None:
    m = manager(capacity=capacity)
    seen: list[float] = []
    for values in containers:
        m.add(samples(range(len(seen), len(seen) + len(values)), values))
        seen += values
        assert len(m.buffer) <= capacity
        assert sorted(m.buffer[:]["log_reward"].tolist()) == model_of_lowest(seen, capacity)
        stats = m.stats()
        assert stats.offered == len(seen)
        assert_doors(stats)
        assert stats.rejected.get("bad_value", 0) == sum(np.isnan(v) or v == INF for v in seen)


@given(st.lists(st.lists(rewards, min_size=1, max_size=5), max_size=6), st.integers(1, 6))
def test_trajectories_are_kept_whole(containers: list[list[float]], capacity: int) -> None:
    m = manager(grid(), capacity=capacity, max_length=MAX_LENGTH)
    seen: list[float] = []
    for i, values in enumerate(containers):
        m.add(paths(range(len(seen), len(seen) + len(values)), values, seed=i))
        seen += values
    assert sorted(m.buffer[:]["log_reward"].tolist()) == model_of_lowest(seen, capacity)
    assert_doors(m.stats())
    for i in range(len(m.buffer)):
        one = m.buffer[i]
        assert (one["steps"]["state"][:, 0] == int(one["id"]) % 8).all()
        assert one["final_state"].tolist() == [int(one["id"]), int(one["id"]) + 0.5]


def test_too_long_a_trajectory_is_rejected_and_its_neighbours_are_not() -> None:
    m = manager(grid(), max_length=4)
    m.add(paths([1, 2, 3], [0.0, 1.0, 2.0], lengths=[4, 5, 1]))
    assert sorted(m.buffer[:]["id"].tolist()) == [1, 3]
    assert m.stats().rejected["too_long"] == 1


def test_items_without_a_reward_go_round_the_ring() -> None:
    m = manager(PLAIN, capacity=3)
    assert m.add(samples([1, 2])) == {"score": INF}
    m.add(samples([3, 4]))
    assert m.buffer[:]["id"].tolist() == [2, 3, 4]
    assert (m.stats().evicted, m.stats().live) == (1, 3)


def test_storing_nothing_passes_everything() -> None:
    m = manager(store_locally=False)
    assert m.add(samples([1, 2], [0.0, -1.0])) == {"score": INF, "baseline_log_reward": -1.0}
    assert m.buffer is None and m.stats().passed == 2
    with pytest.raises(EmptyError):
        m.sample(1)
    assert_doors(m.stats())


def test_unwritten_room_costs_no_memory() -> None:
    """A row has room for a million steps of 16 bytes; a thousand short trajectories stay small."""
    import resource

    m = manager(grid(), capacity=1000, max_length=200_000)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    m.add(paths(range(200), np.zeros(200), lengths=np.ones(200, int)))
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 50_000  # kB; 200 rows of 3.2 MB each would be 640 MB


def test_a_wrong_container_changes_nothing() -> None:
    m = manager()
    with pytest.raises(SchemaError, match="log_reward"):
        m.add({"id": np.arange(3)})
    assert len(m.buffer) == 0
    assert m.stats().rejected["schema"] == 1
    assert_doors(m.stats())


# -- the baseline


@given(
    st.lists(st.lists(rewards, max_size=6), min_size=1, max_size=8),
    st.integers(1, 6),
    st.sampled_from(["min", "percentile", "ema"]),
    st.floats(0, 1),
    st.floats(0.01, 1),
)
@example([[0.0, -INF]], 2, "min", 0.5, 0.5)
@example([[0.0, -INF, 1.0]], 3, "percentile", 0.5, 0.5)
def test_baseline_is_as_the_rules_say(
    containers: list[list[float]], capacity: int, strategy: str, percentile: float, alpha: float
) -> None:
    m = manager(
        capacity=capacity,
        baseline_strategy=strategy,
        baseline_percentile=percentile,
        baseline_ema_alpha=alpha,
    )
    ema: float | None = None
    for values in containers:
        scores = m.add(samples(range(len(values)), values))
        finite = [v for v in values if np.isfinite(v)]
        if finite:
            ema = min(finite) if ema is None else alpha * min(finite) + (1 - alpha) * ema
        f = m.buffer[:]["log_reward"]
        f = f[np.isfinite(f)]
        expected = ema
        if strategy != "ema" and len(m.buffer) == capacity and len(f):
            expected = f.min() if strategy == "min" else np.quantile(f, percentile)
        assert scores.get("baseline_log_reward") == expected
        assert m._baseline_ema == ema


@given(hnp.arrays(np.float64, st.integers(1, 40), elements=st.floats(-1e6, 1e6)), st.floats(0, 1))
def test_quantiles_are_numpys_to_the_last_bit(values: Any, q: float) -> None:
    ranking = Ranking(len(values))
    ranking.finite()
    ranking.set(np.arange(len(values)), values)
    assert ranking.quantile(q) == np.quantile(values, q)


def test_of_equal_rewards_each_leaves_the_order_by_itself() -> None:
    ranking = Ranking(5)
    ranking.set(np.arange(5), np.array([1.0, 3.0, 1.0, 2.0, 1.0]))
    assert ranking.finite().tolist() == [1.0, 1.0, 1.0, 2.0, 3.0]
    ranking.set(np.array([0, 2]), np.array([5.0, 4.0]))
    assert ranking.finite().tolist() == [1.0, 2.0, 3.0, 4.0, 5.0]


def test_a_container_without_a_finite_reward_leaves_the_average_as_it_is() -> None:
    m = manager()
    assert "baseline_log_reward" not in m.add(samples([1], [-INF]))
    m.add(samples([2], [2.0]))
    assert m.add(samples([3, 4], [-INF, -INF]))["baseline_log_reward"] == 2.0


@pytest.mark.parametrize(("strategy", "baseline"), [("min", 2.0), ("percentile", 2.3)])
def test_the_baseline_of_a_ring_is_about_what_is_in_it(strategy: str, baseline: float) -> None:
    m = manager(evict="oldest", capacity=2, baseline_strategy=strategy)
    m.add(samples([1, 2], [0.0, 5.0]))
    assert m.add(samples([3], [2.0]))["baseline_log_reward"] == pytest.approx(baseline)
    assert m.buffer[:]["id"].tolist() == [2, 3]


# -- drawing


def test_drawing_by_reward_follows_the_rewards() -> None:
    m = manager(seed=0)
    m.add(samples([0, 1, 2, 3], [np.log(1), np.log(3), -INF, np.log(6)]))
    ids = m.sample(20_000, by="log_reward")["id"]
    share = np.bincount(ids, minlength=4) / 20_000
    assert share == pytest.approx([0.1, 0.3, 0.0, 0.6], abs=0.015)
    assert sorted(m.sample(3, by="log_reward", replace=False)["id"].tolist()) == [0, 1, 3]
    assert sorted(m.sample(4, replace=False)["id"].tolist()) == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="without replacement"):
        m.sample(4, by="log_reward", replace=False)
    with pytest.raises(ValueError, match="by"):
        m.sample(1, by="luck")


def test_drawing_by_reward_without_replacement_follows_the_rewards_too() -> None:
    m = manager(seed=0)
    m.add(samples([0, 1, 2], [np.log(1), np.log(3), np.log(6)]))
    first = [int(m.sample(1, by="log_reward", replace=False)["id"][0]) for _ in range(3000)]
    assert np.bincount(first, minlength=3) / 3000 == pytest.approx([0.1, 0.3, 0.6], abs=0.04)


@pytest.mark.parametrize("replace", [True, False])
@pytest.mark.parametrize("high", [1000.0, 0.0, -2000.0])
def test_drawing_by_reward_takes_rewards_of_any_size(high: float, replace: bool) -> None:
    m = manager(seed=0)
    m.add(samples([0, 1], [high - 100.0, high]))
    assert {int(m.sample(1, by="log_reward", replace=replace)["id"][0]) for _ in range(50)} == {1}


def test_without_replacement_the_second_best_is_drawn_before_the_third_however_low_both_are() -> None:
    m = manager(seed=0)
    m.add(samples([0, 1, 2], [0.0, -100.0, -60.0]))
    drawn = [m.sample(2, by="log_reward", replace=False)["id"].tolist() for _ in range(50)]
    assert drawn == [[0, 2]] * 50


def test_what_was_just_added_is_drawn_by_its_reward_at_once() -> None:
    m = manager(seed=0)
    m.add(samples([0], [0.0]))
    assert m.sample(1, by="log_reward")["id"].tolist() == [0]
    m.add(samples([1], [100.0]))
    assert m.sample(20, by="log_reward")["id"].tolist() == [1] * 20


@pytest.mark.parametrize("n", [-1, 1.5, True])
def test_so_many_items_must_be_a_number(n: Any) -> None:
    m = manager()
    m.add(samples([1], [0.0]))
    with pytest.raises(ValueError, match="n:"):
        m.sample(n)


def test_nothing_can_be_drawn_from_nothing() -> None:
    m = manager()
    with pytest.raises(EmptyError):
        m.sample(1)
    m.add(samples([1], [-INF]))
    with pytest.raises(EmptyError):
        m.sample(1, by="log_reward")
    assert m.sample(2)["id"].tolist() == [1, 1]


# -- running


class Rig:
    """A manager in a thread and the ends of its workers."""

    def __init__(self, env: Any, n: int | None, workers: int, **kw: Any) -> None:
        self.ends = LocalCarrier.group(workers + 1)
        self.rank = workers
        self.manager = ReplayBufferManager(env, workers, n, communication_backend=self.ends[workers], **kw)
        self.manager.start()

    def client(self, rank: int = 0, env: Any = SAMPLE, **kw: Any) -> RemoteReplay:
        return RemoteReplay(env, self.rank, self.ends[rank], **{"deadline": 10.0, "retry_s": 0.5, **kw})

    def close(self) -> None:
        self.manager.close()
        for end in self.ends:
            end.close()


@pytest.fixture
def rig() -> Iterator[Callable[..., Rig]]:
    made: list[Rig] = []

    def make(env: Any = SAMPLE, n: int | None = 1, workers: int = 1, **kw: Any) -> Rig:
        made.append(Rig(env, n, workers, **kw))
        return made[-1]

    yield make
    for one in made:
        one.close()


_earlier: set[threading.Thread] = set()


@pytest.fixture(autouse=True)
def _threads_of_other_tests() -> None:
    _earlier.update(threading.enumerate())


def ended(m: ReplayBufferManager) -> bool:
    """Wait until the thread of a manager has ended."""
    name = f"recollect-manager-{m.rank}"
    eventually(lambda: name not in {thread.name for thread in set(threading.enumerate()) - _earlier})
    return not m.is_running


@pytest.mark.parametrize("mode", ["sync", "async_score", "async_comm"])
def test_all_modes_hand_out_the_same_scores_in_order(rig: Any, mode: str) -> None:
    r = rig(capacity=5, scoring_function=lambda obj, sender_rank: {"score": float(obj["id"].sum())})
    with r.client(mode=mode, window=3) as replay:
        out = [replay.add(samples([i, i], [i, i + 0.5])) for i in range(10)]
        rest = replay.flush()
    assert [o is None for o in out] == [mode != "sync" and i < 3 for i in range(10)]
    scores = [o for o in out if o is not None] + rest
    assert [s["score"] for s in scores] == [2.0 * i for i in range(10)]
    assert scores[-1]["baseline_log_reward"] == 7.5
    assert ended(r.manager) and r.manager.exit_counter == 1
    assert_doors(replay.stats())
    assert_doors(r.manager.stats())
    assert replay.stats().kept == 20


def test_a_worker_draws_what_it_added(rig: Any) -> None:
    r = rig(grid(), max_length=MAX_LENGTH)
    with r.client(env=grid()) as replay:
        replay.add(paths(range(8), np.arange(8.0)))
        drawn = replay.sample(50)
        assert isinstance(drawn, Trajectories) and len(drawn) == 50
        for i in range(50):
            one = drawn[i]
            assert (one["steps"]["state"][:, 0] == int(one["id"]) % 8).all()
        assert len(set(replay.sample(8, replace=False).fields["id"].tolist())) == 8
        with pytest.raises(ValueError, match="without replacement"):
            replay.sample(9, replace=False)


def test_a_draw_beyond_a_frame_comes_in_parts() -> None:
    ends = LocalCarrier.group(2, max_frame=1 << 16)
    env = {"x": ((1000,), "uint8"), "id": ((), "int64")}
    m = ReplayBufferManager(env, 1, 1, communication_backend=ends[1]).start()
    with RemoteReplay(env, 1, ends[0], deadline=10.0) as replay:
        for first in range(0, 300, 50):
            ids = np.arange(first, first + 50)
            replay.add({"x": np.repeat(ids[:, None], 1000, 1).astype("uint8"), "id": ids})
        got = replay.sample(300, replace=False)
        assert sorted(got["id"].tolist()) == list(range(300))
        assert (got["x"] == got["id"][:, None] % 256).all()
        with pytest.raises(ValueError, match="65536 bytes"):
            replay.add({"x": np.zeros((100, 1000), "uint8"), "id": np.arange(100)})
        assert_doors(replay.stats())
    m.close()
    for end in ends:
        end.close()


def test_another_space_is_refused_naming_the_leaf(rig: Any) -> None:
    r = rig()
    replay = r.client(env={"id": ((), "int64"), "log_reward": ((), "float32")})
    with pytest.raises(SchemaError, match="log_reward"):
        replay.add({"id": np.arange(1), "log_reward": np.zeros(1, "float32")})
    replay.close()


def test_a_client_may_take_the_managers_space(rig: Any) -> None:
    r = rig(grid(), max_length=5)
    with r.client(env=None) as replay:
        replay.add(paths([1, 2], [0.0, 0.0], lengths=[5, 6]))
        assert replay.stats().reasons == {"too_long": 1}
        assert r.manager.stats().offered == 1  # the other was not sent
        assert replay.sample(1).fields["id"].tolist() == [1]


def test_metadata_neither_waits_for_scores_nor_is_taken_for_them(rig: Any) -> None:
    go = threading.Event()

    class Modes(ReplayBufferManager):
        def _compute_metadata(self) -> dict[str, Any]:
            return super()._compute_metadata() | {"n_modes": 3}

    ends = LocalCarrier.group(2)
    m = Modes(SAMPLE, 1, 1, communication_backend=ends[1]).start()
    with RemoteReplay(SAMPLE, 1, ends[0], mode="async_comm", deadline=10.0) as replay:
        for i in range(3):
            replay.add(samples([i], [float(i)]))
        got = replay.metadata()
        assert got["n_modes"] == 3 and got["length"] == 3 and got["n_present"] == 1
        assert replay.stats().retried == 0
        assert ReplayBufferManager.get_metadata(1, ends[0])["log_reward_max"] == 2.0
        assert len(replay.flush()) == 3
    go.set()
    m.close()
    for end in ends:
        end.close()


def test_metadata_that_raises_is_a_remote_error(rig: Any) -> None:
    class Broken(ReplayBufferManager):
        def _compute_metadata(self) -> dict[str, Any]:
            return {"x": object()}

    ends = LocalCarrier.group(2)
    m = Broken(SAMPLE, 1, None, communication_backend=ends[1]).start()
    with pytest.raises(RemoteError, match="_compute_metadata"):
        ReplayBufferManager.get_metadata(1, ends[0], timeout=5.0)
    m.close()
    for end in ends:
        end.close()


def test_a_broken_score_reaches_its_worker_alone(rig: Any) -> None:
    def score(obj: Any, sender_rank: int) -> dict[str, float]:
        if (obj["id"] == 13).any():
            raise KeyError("unlucky")
        return {"score": 1.0}

    r = rig(n=2, workers=2, scoring_function=score)
    with r.client(0) as a, r.client(1) as b:
        with pytest.raises(ScoringError, match="unlucky") as caught:
            a.add(samples([13], [0.0]))
        assert (caught.value.seq, caught.value.kept) == (1, 1)
        assert b.add(samples([1], [0.0]))["score"] == 1.0
        assert a.add(samples([2], [0.0]))["score"] == 1.0
        assert_doors(a.stats())


def test_filtering_leaves_out_what_would_be_evicted(rig: Any) -> None:
    r = rig(capacity=2)
    with r.client(baseline_filtering=True, refresh_after=3) as replay:
        replay.add(samples([1, 2, 3], [1.0, 2.0, 3.0]))
        assert replay.baseline == 2.0
        replay.add(samples([4, 5], [1.5, 2.5]))
        assert replay.stats().filtered == 1
        assert replay.baseline == 2.5
        assert replay.add(samples([6], [0.0])) is None
        assert replay.add(samples([7], [0.0])) is None
        assert replay.add(samples([8], [0.0])) is not None  # the third in a row is sent whole
        stats = replay.stats()
        assert (stats.skipped, stats.forced) == (2, 1)
        assert_doors(stats)
    assert sorted(r.manager.buffer[:]["id"].tolist()) == [3, 5]


def test_filtering_needs_rewards() -> None:
    with pytest.raises(ValueError, match="log_reward"):
        RemoteReplay(PLAIN, 1, LocalCarrier.group(1)[0], baseline_filtering=True)


def test_bad_values_stay_in_the_worker(rig: Any) -> None:
    r = rig()
    with r.client() as replay:
        replay.add(samples([1, 2, 3], [float("nan"), 0.0, INF]))
        assert replay.stats().reasons == {"bad_value": 2}
    assert r.manager.stats().offered == 1


def test_several_adds_make_one_container(rig: Any) -> None:
    r = rig()
    with r.client(send_every=3, retry_s=10.0) as replay:
        got = [replay.add(samples([i], [0.0])) for i in range(4)]
        assert [g is None for g in got] == [True, True, False, True]
        assert replay.stats().pending == 1
        assert len(replay.flush()) == 1 and replay.stats().retried == 0
    assert r.manager.stats().containers == 2 and r.manager.stats().offered == 4


def test_scoring_only_sends_no_steps(rig: Any) -> None:
    r = rig(
        grid(),
        max_length=MAX_LENGTH,
        scoring_function=lambda obj, sender_rank: {"n": float(obj.fields["id"].sum())},
    )
    with r.client(env=grid(), scoring_only=True) as replay:
        assert replay.add(paths([1, 2], [0.0, 1.0]))["n"] == 3.0
        assert replay.stats().passed == 2
    assert r.manager.stats().passed == 2 and r.manager.stats().live == 0


def test_a_batch_and_packed_rows_are_containers_too(rig: Any) -> None:
    buf = rc.ReplayBuffer.create("memory", SAMPLE, capacity=10)
    buf.extend(samples(range(4), np.zeros(4)))
    r = rig()
    with r.client() as replay:
        replay.add(buf)
        replay.add(buf.get_packed_at([1, 2]))
    assert sorted(r.manager.buffer[:]["id"].tolist()) == [0, 1, 1, 2, 2, 3]


def test_exit_twice_is_harmless_and_ranks_count_by_number(rig: Any) -> None:
    r = rig(n=2, workers=2)
    with r.client(0) as replay:
        replay.add(samples([1], [0.0]))
    for _ in range(3):
        r.ends[0].send(2, 0, encode(Exit(1, bytes(16), 0, "")))
    assert ReplayBufferManager.get_metadata(2, r.ends[1])["n_left"] == 1
    assert r.manager.is_running
    ReplayBufferManager.send_termination_signal(2, r.ends[1])
    assert ended(r.manager) and r.manager.exit_counter == 2


def test_a_termination_signal_flushes_the_client(rig: Any) -> None:
    r = rig()
    replay = r.client(mode="async_comm", send_every=2)
    replay.add(samples([1], [0.0]))
    ReplayBufferManager.send_termination_signal(1, r.ends[0])
    assert ended(r.manager) and r.manager.stats().offered == 1


def test_a_worker_that_only_said_exit_counts_as_having_come() -> None:
    ends = LocalCarrier.group(2)
    m = manager(communication_backend=ends[1], limits=Limits(join_s=60.0))
    ReplayBufferManager.send_termination_signal(1, ends[0])
    assert m.run().exit_counter == 1 and not m.is_running
    m.close()
    for end in ends:
        end.close()


def test_a_run_to_which_no_worker_came_is_a_deadline_error() -> None:
    ends = LocalCarrier.group(2)
    m = manager(communication_backend=ends[1], limits=Limits(join_s=0.2))
    with pytest.raises(DeadlineError, match="no worker came"):
        m.run()
    ends[1].close()


def test_a_run_stopped_before_a_worker_came_is_no_error() -> None:
    ends = LocalCarrier.group(2)
    m = manager(communication_backend=ends[1])
    m.stop()
    assert m.run().offered == 0 and m.is_running is False
    ends[1].close()


@pytest.mark.parametrize("how", ["before run", "while it runs", "carrier"])
def test_is_running_set_to_false_ends_it_like_stop(how: str) -> None:
    ends = LocalCarrier.group(2)
    m = manager(communication_backend=ends[1])
    if how == "before run":
        m.is_running = False
        assert m.run().offered == 0 and not m.is_running
        m.is_running = True  # and it may serve again
        ReplayBufferManager.send_termination_signal(1, ends[0])
        assert m.run().exit_counter == 1
    else:
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(m.run)
            ReplayBufferManager.get_metadata(1, ends[0])
            if how == "carrier":
                ends[1].close()
            else:
                m.is_running = False
            assert running.result(10.0).offered == 0 and not m.is_running
    m.close()
    for carrier in ends:
        carrier.close()


def test_it_runs_once_at_a_time(rig: Any) -> None:
    with pytest.raises(RuntimeError, match="already running"):
        rig(limits=Limits(join_s=60.0)).manager.start()


def test_close_tells_once_how_it_ended_and_then_nothing_can_be_done(rig: Any) -> None:
    r = rig(limits=Limits(join_s=0.0))
    assert ended(r.manager)
    with pytest.raises(DeadlineError, match="no worker came"):
        r.manager.close()
    r.manager.close()
    for call in (
        lambda: r.manager.add(samples([1], [0.0])),
        lambda: r.manager.sample(1),
        r.manager.run,
        r.manager.start,
    ):
        with pytest.raises(ClosedError):
            call()


def test_close_waits_for_the_loop_and_gives_up_the_buffer(rig: Any) -> None:
    r = rig(n=None)
    with r.client() as replay:
        replay.add(samples([1, 2], [3.0, 4.0]))
        before = r.manager.stats()
    r.manager.close()
    assert ended(r.manager)
    with pytest.raises(ClosedError):
        r.manager.buffer[:]
    after = r.manager.stats()
    assert (after.live, after.baseline) == (before.live, before.baseline) == (2, 3.0)


def test_a_carrier_that_is_closed_ends_it(rig: Any) -> None:
    r = rig(n=None)
    r.ends[1].close()
    assert ended(r.manager) and not r.manager.is_running
    r.manager.close()


def test_run_returns_when_the_carrier_is_closed() -> None:
    ends = LocalCarrier.group(2)
    with manager(n=None, communication_backend=ends[1]) as m:
        m.add(samples([1], [0.0]))
        ends[1].close()
        assert m.run().live == 1 and not m.is_running
    ends[0].close()


def test_close_waits_for_a_run_in_whatever_thread(tmp_path: Path) -> None:
    ends = LocalCarrier.group(2)
    m = manager(n=None, communication_backend=ends[1], checkpoint=Checkpoint(tmp_path / "dump"))
    with ThreadPoolExecutor() as pool:
        running = pool.submit(m.run)
        with RemoteReplay(SAMPLE, 1, ends[0], deadline=10.0) as replay:
            replay.add(samples([1], [0.0]))
        m.close()
        assert running.result(10.0).live == 1
    for end in ends:
        end.close()


def test_close_waits_for_a_thread_that_has_not_begun() -> None:
    may_begin = threading.Event()

    class Late(ReplayBufferManager):
        def run(self, async_send: bool = True) -> Any:
            assert may_begin.wait(10.0)
            raise OSError("what it ended with")

    (end,) = LocalCarrier.group(1)
    m = Late(SAMPLE, 0, None, communication_backend=end).start()
    threading.Timer(0.1, may_begin.set).start()
    with pytest.raises(OSError, match="what it ended with"):
        m.close()
    end.close()


def test_close_says_that_it_does_not_end_and_may_be_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def hang(obj: Any, sender_rank: int = -1) -> dict[str, float]:
        begun.set()
        assert go_on.wait(20.0)
        return {}

    monkeypatch.setattr(managers, "_END_S", 0.1)
    ends = LocalCarrier.group(2)
    m = manager(
        n=None, communication_backend=ends[1], scoring_function=hang, limits=Limits(drain_s=0.0)
    ).start()
    replay = RemoteReplay(SAMPLE, 1, ends[0], mode="async_comm", deadline=10.0)
    replay.add(samples([1], [0.0]))
    assert begun.wait(10.0)
    with pytest.raises(DeadlineError, match="does its scoring function hang"):
        m.close()
    go_on.set()
    monkeypatch.undo()
    m.close()
    assert m.stats().live == 1
    for end in ends:
        end.close()


def test_it_can_be_run_again(rig: Any) -> None:
    r = rig(n=None)
    for i in range(2):
        if i:
            r.manager.is_running = True
            r.manager.start()
        with r.client() as replay:
            replay.add(samples([i], [0.0]))
        r.manager.stop()
        assert ended(r.manager)
    assert r.manager.buffer[:]["id"].tolist() == [0, 1]


@pytest.mark.parametrize(
    "call",
    [
        lambda m: m.add(samples([1], [0.0])),
        lambda m: m.sample(1),
        lambda m: m.stats(),
        lambda m: m.exit_counter,
        lambda m: m._comm_stats,
    ],
)
def test_other_threads_wait_while_the_manager_works(call: Callable[[Any], Any]) -> None:
    at_work, goes_on = threading.Event(), threading.Event()

    def score(obj: Any, sender_rank: int) -> dict[str, float]:
        at_work.set()
        assert goes_on.wait(10.0)
        return {}

    m = manager(scoring_function=score)
    with ThreadPoolExecutor(2) as beside:
        adding = beside.submit(m.add, samples([0], [0.0]))
        assert at_work.wait(10.0)
        waiting = beside.submit(call, m)
        with pytest.raises(TimeoutError):
            waiting.result(0.05)
        goes_on.set()
        for one in (adding, waiting):
            one.result(10.0)


def test_at_the_end_a_checkpoint_is_written(rig: Any, tmp_path: Path) -> None:
    r = rig(checkpoint=Checkpoint(tmp_path))
    with r.client() as replay:
        replay.add(samples([1], [0.0]))
    assert ended(r.manager)
    (log,) = tmp_path.glob("log-*.bin")
    assert not log.stat().st_size  # the dump has it


def test_a_worker_that_vanishes_has_left_after_rejoin(rig: Any) -> None:
    r = rig(limits=Limits(rejoin_s=0.2))
    replay = r.client()
    replay.add(samples([1], [0.0]))
    r.ends[0].close()
    assert ended(r.manager) and r.manager.exit_counter == 1 and r.manager.stats().live == 1


def test_a_stranger_is_refused(rig: Any) -> None:
    r = rig(n=1, workers=2, worker_ranks=[0])
    with pytest.raises(RemoteError, match="serves the ranks"):
        r.client(1).add(samples([1], [0.0]))


def test_late_senders_hear_that_it_has_ended(rig: Any) -> None:
    r = rig(n=1, workers=2, worker_ranks=[0, 1])
    late = r.client(1)
    late.add(samples([1], [0.0]))
    with r.client(0) as replay:
        replay.add(samples([2], [0.0]))
    assert ended(r.manager)
    with pytest.raises(ClosedError):
        late.add(samples([3], [0.0]))
    assert late.stats().lost == 1
    assert_doors(late.stats())


def test_without_launch_a_name_is_an_error_that_names_it() -> None:
    with pytest.raises(ValueError, match="launch"):
        RemoteReplay(SAMPLE, 1, "local").add(samples([1], [0.0]))


def test_start_raises_where_there_is_no_carrier() -> None:
    with manager(communication_backend="local") as m, pytest.raises(ValueError, match="launch"):
        m.start()


def test_threads_take_turns(rig: Any) -> None:
    r = rig()
    with r.client(mode="async_score") as replay:

        def work(k: int) -> None:
            for i in range(20):
                replay.add(samples([100 * k + i], [0.0]))

        threads = [threading.Thread(target=work, args=(k,)) for k in range(3)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
    ids = sorted(r.manager.buffer[:]["id"].tolist())
    assert ids == sorted(100 * k + i for k in range(3) for i in range(20))


def test_forwarding_gives_another_manager_what_was_kept() -> None:
    ends = LocalCarrier.group(3)
    last = ReplayBufferManager(SAMPLE, 2, 1, communication_backend=ends[2], worker_ranks=[1]).start()
    first = ReplayBufferManager(
        SAMPLE, 1, 1, capacity=3, communication_backend=ends[1], worker_ranks=[0], remote_manager_rank=2
    ).start()
    with RemoteReplay(SAMPLE, 1, ends[0], deadline=10.0) as replay:
        for i in range(20):
            replay.add(samples([i], [float(i % 7)]))
    assert ended(first) and ended(last)
    assert last.stats().offered == first.stats().offered - first.stats().n_rejected
    assert first.stats().forwarded.kept == last.stats().offered
    for m in (first, last):
        m.close()
    for end in ends:
        end.close()


def test_a_manager_that_stores_nothing_forwards_everything() -> None:
    ends = LocalCarrier.group(3)
    last = ReplayBufferManager(SAMPLE, 2, 1, communication_backend=ends[2], worker_ranks=[1]).start()
    first = ReplayBufferManager(
        SAMPLE,
        1,
        1,
        store_locally=False,
        communication_backend=ends[1],
        worker_ranks=[0],
        remote_manager_rank=2,
    ).start()
    with RemoteReplay(SAMPLE, 1, ends[0], deadline=10.0) as replay:
        replay.add(samples([1, 2], [0.0, 1.0]))
        assert replay.stats().passed == 2
    assert ended(first) and ended(last)
    assert last.buffer[:]["id"].tolist() == [1, 2] and last.exit_counter == 1
    for m in (first, last):
        m.close()
    for end in ends:
        end.close()


def test_what_cannot_be_forwarded_in_time_is_lost_and_counted() -> None:
    ends = LocalCarrier.group(3)
    first = ReplayBufferManager(
        SAMPLE, 1, 1, communication_backend=ends[1], remote_manager_rank=2, limits=Limits(drain_s=0.1)
    ).start()
    with RemoteReplay(SAMPLE, 1, ends[0], deadline=10.0) as replay:
        replay.add(samples([1, 2], [0.0, 1.0]))
    assert ended(first)
    doors = first.stats().forwarded
    assert (doors.offered, doors.lost, doors.pending) == (2, 2, 0)
    first.close()
    for end in ends:
        end.close()


def test_the_summary_is_printed(capsys: pytest.CaptureFixture[str], rig: Any) -> None:
    r = rig(timing=True)
    with r.client() as replay:
        replay.add(samples([1], [0.0]))
    assert ended(r.manager)
    text = capsys.readouterr().out
    assert "offered 1" in text and "store" in text
    phases = r.manager.stats().phases
    assert {"recv", "validate", "store", "score", "baseline", "send"} <= set(phases)
    assert phases["store"].count == 1 and len(r.manager._timing_data["store"]) == 1


def test_nothing_is_printed_or_timed_unless_asked_for(capsys: pytest.CaptureFixture[str], rig: Any) -> None:
    r = rig()
    with r.client() as replay:
        replay.add(samples([1], [0.0]))
    assert ended(r.manager)
    assert capsys.readouterr().out == "" and r.manager.stats().phases == {} and r.manager._timing_data == {}


def test_stats_are_a_record_of_one_moment() -> None:
    with manager() as m:
        stats = m.stats()
        with pytest.raises(FrozenInstanceError):
            stats.offered = 5  # type: ignore[misc]
        m.add(samples([1], [0.0]))
        assert stats.offered == stats.live == 0


def test_phases_can_be_read_while_another_thread_adds_new_ones() -> None:
    timing = Timing(True)

    def add() -> None:
        for i in range(3000):
            timing.add(f"phase {i}", 1.0)

    with ThreadPoolExecutor(1) as beside:
        adding = beside.submit(add)
        while not adding.done():
            assert all(phase.count == 1 for phase in timing.phases().values())
    assert len(timing.phases()) == 3000


def test_phases_have_their_figures_and_the_last_thousand() -> None:
    timing = Timing(True)
    for seconds in [1.0, 3.0, *[2.0] * 1008]:
        timing.add("store", seconds)
    phase = timing.phases()["store"]
    assert (phase.count, phase.total_s, phase.mean_s, phase.min_s, phase.max_s) == (
        1010,
        2020.0,
        2.0,
        1.0,
        3.0,
    )
    assert timing.recent() == {"store": [2.0] * 1000}
