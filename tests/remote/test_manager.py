"""The manager: what it keeps, scores, answers and counts, without and with a carrier."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from tests.remote.make import MAX_LENGTH, PLAIN, SAMPLE, assert_doors, grid, paths, samples

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
    Trajectories,
)
from recollect.remote.desk import Reply
from recollect.remote.messages import Exit
from recollect.remote.ranking import Ranking
from recollect.remote.wire import encode

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
        {"baseline_ema_alpha": 0.0},
        {"capacity": 0},
        {"communication_backend": "carrier pigeon"},
        {"communication_backend": 7},
        {"remote_manager_rank": 1},
        {"worker_ranks": [1]},
        {"worker_ranks": [2, 2]},
        {"storage": "memmap"},
        {"evict": "newest"},
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


# -- diversity


@given(
    st.lists(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6), st.integers(-3, 3)), max_size=6), max_size=5),
    st.sampled_from([0.0, 1.0, 2.5]),
    st.sampled_from([1.0, 2.0, INF]),
    st.integers(1, 8),
)  # fmt: skip
def test_no_two_kept_items_are_close(containers: Any, cutoff: float, p: float, capacity: int) -> None:
    m = manager(grid(), capacity=capacity, max_length=MAX_LENGTH, diverse_replay_buffer=True,
                diversity=Diversity(cutoff=cutoff, p=p))  # fmt: skip
    n = 0
    for rows in containers:
        finals = np.array([[x, y] for x, y, _ in rows], float).reshape(-1, 2)
        m.add(paths(range(n, n + len(rows)), [float(r) for *_, r in rows], finals=finals))
        n += len(rows)
        kept = m.buffer[:]["final_state"]
        for i in range(len(kept)):
            for j in range(i):
                assert np.linalg.norm(kept[i] - kept[j], ord=p) > cutoff
        assert_doors(m.stats())
    assert m.stats().offered == n


def test_a_better_item_makes_its_worse_neighbours_leave() -> None:
    m = manager(grid(), max_length=MAX_LENGTH, diverse_replay_buffer=True, diversity=Diversity(cutoff=1.0))
    m.add(paths([1, 2], [0.0, 0.0], finals=[[0, 0], [5, 5]]))
    m.add(paths([3], [1.0], finals=[[0, 1]]))
    m.add(paths([4], [0.5], finals=[[0, 1]]))
    assert sorted(m.buffer[:]["id"].tolist()) == [2, 3]
    stats = m.stats()
    assert (stats.removed, stats.rejected["too_close"]) == (1, 1)


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


# -- scoring


def test_a_scoring_function_sees_the_container_and_what_was_kept() -> None:
    seen: list[Any] = []

    def score(obj: Any, sender_rank: int) -> dict[str, float]:
        seen.append((obj, sender_rank))
        return {"score": float(obj.kept.mean()), "baseline_log_reward": 99.0}

    m = manager(grid(), scoring_function=score, capacity=2, max_length=MAX_LENGTH)
    scores = m.add(paths([1, 2, 3], [0.0, 1.0, 2.0], lengths=[1, 2, 3]), sender_rank=5)
    obj, rank = seen[0]
    assert rank == 5
    assert obj.kept.tolist() == [False, True, True] and obj.row[0] == -1
    assert m.buffer.storage.get(obj.row[1:].tolist())["id"].tolist() == [2, 3]
    assert obj.lengths.tolist() == [1, 2, 3] and len(obj.steps["state"]) == 6
    assert obj.fields["final_state"].tolist() == [[1, 1.5], [2, 2.5], [3, 3.5]]
    assert obj.log_rewards.tolist() == [0.0, 1.0, 2.0]
    assert scores == {"score": pytest.approx(2 / 3), "baseline_log_reward": 1.0}
    kept = obj.fields["final_state"]
    kept[:] = -7  # its own memory
    assert (m.buffer[:]["final_state"] >= 0).all()


@pytest.mark.parametrize(
    "function",
    [
        lambda obj, sender_rank: 1 / 0,
        lambda obj, sender_rank: 3,
        lambda obj, sender_rank: {"score": "high"},
        lambda obj, sender_rank: {1: 2.0},
        lambda obj, sender_rank: {"score": np.zeros(2)},
        lambda obj, sender_rank: {"score": None},
        lambda obj, sender_rank: {"score": 10**400},
    ],
)
def test_a_broken_scoring_function_is_that_containers_error(function: Callable[..., Any]) -> None:
    m = manager(scoring_function=function)
    with pytest.raises(ScoringError) as caught:
        m.add(samples([1, 2], [0.0, 1.0]))
    assert caught.value.kept == 2
    assert m.stats().scoring_errors == 1 and m.stats().live == 2


def test_nan_and_infinite_scores_pass() -> None:
    m = manager(
        PLAIN, scoring_function=lambda obj, sender_rank: {"a": float("nan"), "b": -INF, "c": np.float32(2)}
    )
    scores = m.add(samples([1]))
    assert np.isnan(scores["a"]) and scores["b"] == -INF and scores["c"] == 2.0


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


def ended(m: ReplayBufferManager) -> bool:
    m._thread.join(10.0)
    return not m._thread.is_alive()


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
    with r.client(send_every=3) as replay:
        got = [replay.add(samples([i], [0.0])) for i in range(4)]
        assert [g is None for g in got] == [True, True, False, True]
        assert replay.stats().pending == 1
        assert len(replay.flush()) == 1
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
    import recollect as rc

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
        writer = replay._session.writer
    for _ in range(3):
        r.ends[0].send(2, 0, encode(Exit(1, writer, 0, "")))
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


def test_nobody_came() -> None:
    ends = LocalCarrier.group(2)
    m = manager(communication_backend=ends[1], limits=Limits(join_s=0.2))
    with pytest.raises(DeadlineError, match="no worker came"):
        m.run()
    ends[1].close()


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
    first._thread.join(10)
    last._thread.join(10)
    assert last.stats().offered == first.stats().offered - first.stats().n_rejected
    assert first.stats().forwarded.kept == last.stats().offered
    for m in (first, last):
        m.close()
    for end in ends:
        end.close()


# -- checkpoint


def test_a_checkpoint_goes_on_where_it_was(tmp_path: Path) -> None:
    class Novelty:
        def __init__(self) -> None:
            self.seen = 0

        def __call__(self, obj: Any, sender_rank: int) -> dict[str, float]:
            self.seen += len(obj)
            return {"seen": float(self.seen)}

        def state_dict(self) -> dict[str, int]:
            return {"seen": self.seen}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.seen = state["seen"]

    def made(**kw: Any) -> ReplayBufferManager:
        return manager(grid(), scoring_function=Novelty(), capacity=4, max_length=MAX_LENGTH,
                       checkpoint=Checkpoint(tmp_path / "m", **kw))  # fmt: skip

    a = made()
    for i in range(6):
        scores = a.add(paths([2 * i, 2 * i + 1], [float(i), -float(i)]))
        if i == 2:
            a._desk.saving.dump()
    before = a.stats()
    held = a.buffer[:]
    a._desk.saving.log.close()
    with pytest.raises(FileExistsError, match="resume"):
        made()
    b = made(resume=True)
    assert b.stats() == before
    assert b.buffer[:]["id"].tolist() == held["id"].tolist()
    assert b.scoring_function.seen == scores["seen"] == 12
    assert b._baseline_ema == a._baseline_ema
    b.close()
    with pytest.raises(ValueError, match="capacity"):
        manager(grid(), capacity=5, max_length=MAX_LENGTH, checkpoint=Checkpoint(tmp_path / "m", resume=True))


@pytest.mark.parametrize("cut", [1, 10, 40, 200])
def test_a_torn_record_was_never_acknowledged(tmp_path: Path, cut: int) -> None:
    a = manager(checkpoint=Checkpoint(tmp_path))
    for i in range(3):
        a.add(samples([i], [0.0]))
    log = a._desk.saving.log.path
    data = log.read_bytes()
    log.write_bytes(data[: len(data) - cut])
    b = manager(checkpoint=Checkpoint(tmp_path, resume=True))
    n = len(b.buffer)
    assert b.buffer[:]["id"].tolist() == list(range(n)) and n == (2 if cut < 150 else n)
    b.add(samples([9], [0.0]))
    b._desk.saving.log.close()
    c = manager(checkpoint=Checkpoint(tmp_path, resume=True))
    assert c.buffer[:]["id"].tolist() == [*range(n), 9]


def test_a_log_that_cannot_be_written_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    m = manager(checkpoint=Checkpoint(tmp_path))

    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("recollect.remote.checkpoint.os.writev", full)
    with pytest.raises(OSError, match="No space"):
        m.add(samples([1], [0.0]))
    assert len(m.buffer) == 0 and m.stats().offered == 0


def test_a_record_that_was_written_in_part_is_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    m = manager(checkpoint=Checkpoint(tmp_path))
    m.add(samples([0], [0.0]))

    def part(fd: int, parts: Any) -> int:
        return os.write(fd, parts[0])

    def full(*args: Any) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as disk:
        disk.setattr(
            "recollect.remote.checkpoint.os", SimpleNamespace(**{**vars(os), "writev": part, "write": full})
        )
        with pytest.raises(OSError, match="No space"):
            m.add(samples([1], [0.0]))
    m.add(samples([2], [0.0]))
    m._desk.close()
    again = manager(checkpoint=Checkpoint(tmp_path, resume=True))
    assert again.buffer[:]["id"].tolist() == [0, 2]
    again.close()


def test_answers_that_a_worker_does_not_take_are_bounded_and_others_are_not_held_up() -> None:
    class Stuck:
        def is_complete(self) -> bool:
            return False

    class Never:
        def isend(self, dest: int, tag: int, parts: Any) -> Any:
            return Stuck()

    m = manager(limits=Limits(max_window=4))
    for _ in range(20):
        m._serving._answer_soon(Never(), Reply(0, 0, []))  # type: ignore[arg-type]
    assert len(m._pending_sends) == 5 and m._serving.unsent == 15
    m._serving._answer_soon(Never(), Reply(3, 0, []))  # type: ignore[arg-type]
    assert len(m._pending_sends) == 6


def test_power_safe_syncs_before_answers_leave(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    real = os.fdatasync
    monkeypatch.setattr("recollect.remote.checkpoint.os.fdatasync", lambda fd: (synced.append(fd), real(fd)))
    ends = LocalCarrier.group(2)
    m = ReplayBufferManager(
        SAMPLE, 1, 1, communication_backend=ends[1], checkpoint=Checkpoint(tmp_path, power_safe=True)
    ).start()
    with RemoteReplay(SAMPLE, 1, ends[0], deadline=10.0) as replay:
        for i in range(3):
            replay.add(samples([i], [0.0]))
            assert len(synced) == i + 1
    m.close()
    for end in ends:
        end.close()


def test_power_safe_syncs_once_for_all_messages_at_hand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    monkeypatch.setattr("recollect.remote.checkpoint.os.fdatasync", synced.append)
    ends = LocalCarrier.group(2)
    m = ReplayBufferManager(
        SAMPLE, 1, 1, communication_backend=ends[1], checkpoint=Checkpoint(tmp_path, power_safe=True)
    )
    replay = RemoteReplay(SAMPLE, 1, ends[0], deadline=10.0, mode="async_comm", window=8)
    with ThreadPoolExecutor(1) as beside:  # it says Hello, and then sends while nobody works
        greeted = beside.submit(replay.add, samples([0], [0.0]))
        while not greeted.done():
            m._serving._serve(True)
        greeted.result(10)
    for i in range(1, 6):
        replay.add(samples([i], [0.0]))
    synced.clear()
    m._serving._serve(True)
    assert len(m.buffer) == 6 and len(synced) == 1
    m.start()
    assert len(replay.close()) == 6
    m.close()
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
