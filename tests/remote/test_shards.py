"""Several managers, one baseline: over a plain model, with managers that fall silent, and over a carrier."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.remote.make import SAMPLE, samples
from tests.remote.scripted import ScriptedCarrier

from recollect.remote import LocalCarrier, RemoteReplay, ReplayBufferManager, Shards
from recollect.remote.frame import encode
from recollect.remote.manager.baseline import ShardSummary, SharedBaseline, agreed_value
from recollect.remote.messages import Sync
from recollect.testing.carrier_contract import eventually

shard = st.tuples(st.lists(st.floats(-9, 9), max_size=5), st.booleans(), st.floats(-9, 9), st.integers(1, 9))


def summary(values: list[float], is_full: bool, ema: float, containers: int) -> ShardSummary:
    ordered = np.sort(np.array(values, float))
    return ShardSummary(min(values) if values else None, is_full, ema, containers, ordered)


@given(
    st.lists(shard, min_size=1, max_size=4), st.sampled_from(["min", "percentile", "ema"]), st.floats(0, 1)
)
def test_the_value_is_that_of_the_union(shards: list[Any], strategy: str, q: float) -> None:
    union = [v for values, *_ in shards for v in values]
    total = sum(n for *_, n in shards)
    expected = sum(ema * n for _, _, ema, n in shards) / total
    if strategy != "ema" and all(full for _, full, *_ in shards) and union:
        expected = min(union) if strategy == "min" else np.quantile(union, q)
    assert agreed_value([summary(*s) for s in shards], strategy, q) == pytest.approx(expected, abs=1e-12)


def exchange(parties: dict[int, SharedBaseline], now: float, mine: dict[int, ShardSummary]) -> None:
    for rank, party in parties.items():
        for dest, message, values in party.tick(now, mine[rank]):
            if dest in parties:
                parties[dest].receive(rank, message, values, now)


def test_equal_epochs_are_equal_baselines_also_when_the_lowest_falls_silent() -> None:
    shards = Shards((4, 5, 6), sync_s=1.0)
    parties = {rank: SharedBaseline(rank, shards, "min", 0.1) for rank in (4, 5, 6)}
    mine = {rank: summary([float(rank)], True, 0.0, 1) for rank in parties}
    seen: dict[int, float | None] = {}
    epochs = []
    for step in range(30):
        if step == 10:
            del parties[4]  # killed: says nothing any more
        exchange(parties, float(step), mine)
        for party in parties.values():
            current = party.current(float(step))
            if current is not None:
                assert seen.setdefault(*current) == current[1]
        epochs.append(max(seen, default=0))
    assert parties[5].current(29.0) == parties[6].current(29.0)
    assert parties[5].current(29.0)[1] == 5.0  # the silent one is left out
    assert epochs[9] > 0 and epochs == sorted(epochs)


def test_a_manager_without_the_others_uses_its_own_baseline() -> None:
    party = SharedBaseline(5, Shards((4, 5), sync_s=1.0), "min", 0.1)
    other = SharedBaseline(4, Shards((4, 5), sync_s=1.0), "min", 0.1)
    both = {4: other, 5: party}
    mine = {rank: summary([1.0], True, 0.0, 1) for rank in both}
    exchange(both, 0.0, mine)
    exchange(both, 4.0, mine)
    assert party.current(4.5) is not None
    assert party.current(7.5) is None


def test_an_older_epoch_counts_again_after_a_long_silence() -> None:
    """All others were started again: their epochs begin anew, and this one must not hold out for its own."""
    party = SharedBaseline(5, Shards((4, 5), sync_s=1.0), "min", 0.1)
    nothing = np.empty(0)

    def agreed(epoch: int, value: float, now: float) -> tuple[int, float | None] | None:
        party.receive(4, Sync(0, epoch, "agreed", value, 0, False, None, 0), nothing, now)
        return party.current(now)

    assert agreed(100, 1.0, 0.0) == (100, 1.0)
    assert agreed(6, 2.0, 1.0) == (100, 1.0)  # delayed on its way
    assert agreed(8, 3.0, 4.0) == (8, 3.0)


def test_managers_agree_over_a_carrier() -> None:
    ends = LocalCarrier.group(4)
    shards = Shards((2, 3), sync_s=0.3)
    managers = [
        ReplayBufferManager(
            SAMPLE, rank, None, capacity=4, communication_backend=ends[rank], shards=shards
        ).start()
        for rank in (2, 3)
    ]
    with (
        RemoteReplay(SAMPLE, 2, ends[0], deadline=10.0) as a,
        RemoteReplay(SAMPLE, 3, ends[1], deadline=10.0) as b,
    ):
        a.add(samples(range(4), [1.0, 2.0, 3.0, 4.0]))
        b.add(samples(range(4), [5.0, 6.0, 7.0, 8.0]))

        def agree() -> bool:
            x, y = a.add(samples([9], [-9.0])), b.add(samples([9], [-9.0]))
            if "baseline_epoch" in x and x["baseline_epoch"] == y.get("baseline_epoch"):
                assert x["baseline_log_reward"] == y["baseline_log_reward"]
                return x["baseline_log_reward"] == 1.0
            return False

        eventually(agree)
        eventually(lambda: a.add(samples([9], [-9.0])) and b.metadata()["baseline_log_reward"] == 1.0)
        eventually(lambda: managers[1].stats().baseline == 1.0)
        assert managers[1].buffer[:]["id"].tolist() == [0, 1, 2, 3]  # items stay where they are
    for manager in managers:
        manager.close()
    for end in ends:
        end.close()


@pytest.mark.parametrize("strategy", ["min", "percentile", "ema"])
def test_a_shard_says_what_it_holds(strategy: str) -> None:
    carrier = ScriptedCarrier(2)
    m = ReplayBufferManager(
        SAMPLE, 2, None, capacity=3, shards=Shards((2, 3), sync_s=0.01), baseline_strategy=strategy,
        baseline_ema_alpha=0.5, communication_backend=carrier,
    ).start()  # fmt: skip

    def said(containers: int) -> list[Any]:
        found = [message for *_, message in carrier.sent if isinstance(message, Sync)]
        return [sync for sync in found if sync.kind == "summary" and sync.containers == containers]

    eventually(lambda: said(0))
    assert not said(0)[-1].is_full and said(0)[-1].value is None
    m.add(samples([1, 2], [4.0, -np.inf]))
    m.add(samples([3], [2.0]))
    eventually(lambda: said(2))
    got = said(2)[-1]
    assert (got.value, got.is_full, got.ema, got.n) == (2.0, True, 3.0, 2 if strategy == "percentile" else 0)
    m.close()


def test_two_managers_that_both_decide_never_share_an_epoch() -> None:
    """The network between 4 and 5 is cut, and 6 hears both."""
    shards = Shards((4, 5, 6), sync_s=1.0)
    parties = {rank: SharedBaseline(rank, shards, "min", 0.1) for rank in (4, 5, 6)}
    seen: dict[int, float | None] = {}
    for step in range(20):
        for rank, party in parties.items():
            for dest, message, values in party.tick(float(step), summary([float(rank)], True, 0.0, 1)):
                if {rank, dest} != {4, 5}:
                    parties[dest].receive(rank, message, values, float(step))
        for party in parties.values():
            current = party.current(float(step))
            if current is not None:
                assert seen.setdefault(*current) == current[1]
    assert len(set(seen.values())) > 1


def agreed_by(party: SharedBaseline, now: float, mine: ShardSummary) -> list[Sync]:
    """What a manager decides at this moment."""
    return [message for _, message, _ in party.tick(now, mine) if message.kind == "agreed"]


MINE = summary([5.0], False, 2.5, 7)
NOTHING = np.empty(0)


def test_an_agreed_value_is_used_for_three_times_sync_s_and_a_repeated_one_no_longer() -> None:
    party = SharedBaseline(5, Shards((4, 5), sync_s=2.0), "min", 0.1)
    agreed = Sync(0, 100, "agreed", 1.0, 0, False, None, 0)
    assert party.receive(4, agreed, NOTHING, 0.0) and party.receive(4, agreed, NOTHING, 3.0)
    assert party.current(6.0) == (100, 1.0) and party.current(6.01) is None


def test_a_rank_that_is_no_manager_of_the_shards_is_ignored() -> None:
    party = SharedBaseline(5, Shards((4, 5), sync_s=1.0), "min", 0.1)
    assert not party.receive(9, Sync(0, 100, "agreed", 1.0, 0, False, None, 0), NOTHING, 0.0)
    assert not party.receive(9, Sync(0, 100, "summary", 1.0, 0, True, None, 1), NOTHING, 0.0)
    assert party.current(0.0) is None
    assert agreed_by(party, 0.0, MINE) == []
    (decided, *_) = agreed_by(party, 4.0, MINE)
    assert (decided.value, decided.epoch) == (2.5, 3)  # by its own average alone


def test_a_manager_sends_its_summary_every_sync_s() -> None:
    party = SharedBaseline(5, Shards((4, 5), sync_s=2.0), "percentile", 0.1)
    ((dest, said, values),) = party.tick(10.0, MINE)
    assert dest == 4 and values.tolist() == [5.0]
    assert said == Sync(0, 0, "summary", 5.0, 1, False, 2.5, 7)
    assert party.tick(11.9, MINE) == [] and len(party.tick(12.0, MINE)) == 1


def test_a_manager_that_takes_over_waits_and_goes_on_with_greater_epochs() -> None:
    party = SharedBaseline(5, Shards((4, 5, 6), sync_s=1.0), "min", 0.1)
    assert agreed_by(party, 0.0, MINE) == []  # the lowest has not had the time to speak
    party.receive(4, Sync(0, 100, "agreed", 1.0, 0, False, None, 0), NOTHING, 1.0)
    party.receive(4, Sync(0, 100, "summary", 1.0, 0, False, None, 1), NOTHING, 1.0)
    assert agreed_by(party, 4.0, MINE) == []
    decided = agreed_by(party, 5.0, MINE)
    assert len(decided) == 2 and decided[0].epoch > 100
    assert party.current(5.0) == (decided[0].epoch, 2.5)


def test_scores_hold_the_epoch_only_of_a_value_that_was_agreed() -> None:
    carrier = ScriptedCarrier(3)
    m = ReplayBufferManager(
        SAMPLE, 3, None, shards=Shards((2, 3), sync_s=60.0), communication_backend=carrier
    )
    m.start()
    for epoch, value, want in (
        (3, None, {"score": np.inf, "baseline_log_reward": 4.0}),  # no shard had anything yet
        (5, 1.5, {"score": np.inf, "baseline_log_reward": 1.5, "baseline_epoch": 5.0}),
    ):
        carrier.exchange(2, b"".join(encode(Sync(0, epoch, "agreed", value, 0, False, None, 0))))
        assert m.add(samples([1], [4.0])) == want
        assert m.stats().baseline == want["baseline_log_reward"]
    m.close()
