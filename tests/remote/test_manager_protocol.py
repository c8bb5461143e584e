"""The protocol, frame by frame: what a manager answers, and what it refuses and counts."""

from __future__ import annotations

import os
import secrets
import tracemalloc
import warnings
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from tests.remote.make import PLAIN, SAMPLE, assert_doors, manager_protocol, samples
from tests.remote.scripted import ITEMS, Peer, ScriptedCarrier

from recollect.remote import Checkpoint, Limits, ReplayBufferManager, config
from recollect.remote.items.space import item_space
from recollect.remote.manager.peers import Writers
from recollect.remote.messages import (
    METADATA_TAG,
    AnyMessage,
    Data,
    Exit,
    Failed,
    GetMetadata,
    Goodbye,
    Hello,
    Items,
    Metadata,
    Sample,
    Scores,
    Sync,
    Welcome,
)
from recollect.remote.stats import OTHERS
from recollect.spaces.json import canonical, space_to_json
from recollect.testing.carrier_contract import eventually

WRITER = bytes(range(16))
_started: list[ReplayBufferManager] = []


@pytest.fixture(autouse=True)
def _managers_are_closed() -> Iterator[None]:
    yield
    while _started:
        _started.pop().close()


def made(
    n: int | None = None, env: Any = PLAIN, kind: type[ReplayBufferManager] = ReplayBufferManager,
    max_frame: int = 1 << 26, **kw: Any,
) -> ReplayBufferManager:  # fmt: skip
    """A manager at work, whose peers are the test."""
    m = kind(env, 9, n, communication_backend=ScriptedCarrier(9, max_frame=max_frame), **kw)
    _started.append(m)
    return m.start()


def kill(m: ReplayBufferManager) -> None:
    """End a manager without its last dump, as a kill would."""
    m.communication_backend.close()
    m.close()


def log_of(path: Path) -> Path:
    (log,) = path.glob("log-*.bin")
    return log


def held(manager: ReplayBufferManager) -> list[int]:
    return manager.buffer[:]["id"].tolist()


def figures(core: Any) -> Any:
    return core.stats(pending_sends=0, unsent=0)


def stored(core: Any) -> list[int]:
    return core.state.buffer[:]["id"].tolist()


def test_hello_is_welcomed_with_what_a_client_needs() -> None:
    m = made(limits=Limits(max_window=5))
    welcome = Peer(m).hello()
    assert isinstance(welcome, Welcome)
    assert (welcome.last_seq, welcome.max_window, welcome.baseline, welcome.space) == (0, 5, None, ITEMS.text)
    Peer(m).data(1, [1])
    assert Peer(m).hello().last_seq == 1
    assert Peer(m, writer=bytes(16)[:-1] + b"x").hello().last_seq == 0
    assert Peer(m).hello().incarnation == welcome.incarnation != Peer(made()).hello().incarnation


def test_a_welcome_brings_the_baseline() -> None:
    m = made(env=SAMPLE, capacity=2)
    assert Peer(m).hello().baseline is None
    m.add(samples([1, 2], [3.0, 4.0]))
    assert Peer(m).hello().baseline == 3.0


def test_any_rank_may_draw_and_ask_for_metadata() -> None:
    m = made(n=1, worker_ranks=[0])
    m.add(samples([5]))
    stranger = Peer(m, 3)
    ((_, drawn),) = stranger.say(Sample(1, 2, "uniform", True))
    ((_, told),) = stranger.say(GetMetadata(2))
    assert (drawn.request, drawn.n) == (1, 2) and told.values["length"] == 1


def test_a_log_that_cannot_be_written_refuses_the_container_and_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    m = made(checkpoint=Checkpoint(tmp_path))
    peer = Peer(m)
    peer.hello()

    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as disk:
        disk.setattr("recollect.remote.manager.checkpoint.os.writev", full)
        (refused,) = peer.data(1, [1])
    assert refused.error == "RemoteError" and "No space" in refused.text
    assert held(m) == [] and m.stats().offered == 0
    assert isinstance(peer.data(1, [1])[0], Scores) and held(m) == [1]
    m.close()


def test_what_a_sender_sent_is_counted() -> None:
    m = made()
    peer = Peer(m, 4)
    sent = []
    real = peer.send
    peer.send = lambda frame: sent.append(len(frame)) or real(frame)  # type: ignore[method-assign]
    peer.hello()
    peer.data(1, [1, 2, 3])
    peer.say(GetMetadata(5))
    about = m.stats().senders[4]
    assert (about.requests, about.items, about.nbytes, about.state) == (3, 3, sum(sent), "present")
    assert m._comm_stats[4] == {
        "requests": 3, "items": 3, "nbytes": sum(sent), "malformed": 0, "undelivered": 0, "state": "present",
    }  # fmt: skip
    peer.say(Exit(6, WRITER, 0, ""))
    assert m.stats().senders[4].state == "left" and m.stats().containers == 1


def test_an_exit_with_another_ranks_writer_changes_nothing() -> None:
    m = made()
    Peer(m, 0).hello()
    Peer(m, 1, b"z" * 16).hello()
    assert [type(a) for _, a in Peer(m, 1, WRITER).say(Exit(3, WRITER, 4, ""))] == [Goodbye]
    assert m.exit_counter == 0
    assert {rank: sender.state for rank, sender in m.stats().senders.items()} == {0: "present", 1: "present"}


def test_a_new_client_of_a_rank_ends_the_answers_of_its_earlier_one() -> None:
    m = made()
    old, new = Peer(m, 0), Peer(m, 0, b"z" * 16)
    old.hello()
    old.data(1, [1])
    new.hello()
    assert old.data(1, [1]) == [] and m.stats().duplicates == 1 and held(m) == [1]


@pytest.mark.parametrize(
    ("wrong", "error", "text"),
    [
        ({"protocol": 2}, "RemoteError", "protocol"),
        ({"rank": 5}, "RemoteError", "rank"),
        ({"space": item_space(SAMPLE).text}, "SchemaError", "log_reward"),
        ({"space": "rubbish"}, "SchemaError", "JSON"),
    ],
)
def test_a_wrong_hello_is_refused(wrong: dict[str, Any], error: str, text: str) -> None:
    m = made()
    refused = Peer(m).hello(**wrong)
    assert isinstance(refused, Failed) and refused.error == error and text in refused.text
    assert [f.error for f in Peer(m).data(1, [1])] == ["UnknownWriter"] and held(m) == []


def test_a_writer_belongs_to_its_rank() -> None:
    m = made()
    Peer(m, 0).hello()
    assert Peer(m, 1).hello().error == "RemoteError"
    assert Peer(m, 1).data(1, [1])[0].error == "RemoteError" and held(m) == []


def test_a_reader_is_no_worker() -> None:
    m = made(n=1, worker_ranks=[0])
    assert isinstance(Peer(m, 3).hello("reader"), Welcome)
    assert Peer(m, 3).data(1, [1])[0].error == "UnknownWriter"
    assert Peer(m, 3).hello("worker").error == "RemoteError"
    assert held(m) == [] and m.exit_counter == 0


def test_a_container_seen_before_gets_its_first_answer_again() -> None:
    calls: list[int] = []
    m = made(scoring_function=lambda obj, sender_rank: {"n": float(calls.append(1) or len(calls))})
    peer = Peer(m)
    peer.hello()
    first = peer.data(1, [1, 2])
    second = peer.data(2, [3])
    assert peer.data(1, [1, 2]) == first and peer.data(2, [9]) == second
    assert first[0].scores == {"n": 1.0} and (first[0].kept, first[0].rejected) == (2, {})
    assert held(m) == [1, 2, 3] and m.stats().duplicates == 2 and m.stats().offered == 3
    assert_doors(m.stats())


def test_only_the_last_answers_are_kept() -> None:
    m = made(limits=Limits(max_window=2))
    peer = Peer(m)
    peer.hello()
    for seq in range(1, 5):
        peer.data(seq, [seq])
    assert [len(peer.data(seq, [seq])) for seq in range(1, 5)] == [0, 0, 1, 1]
    assert held(m) == [1, 2, 3, 4]


def test_after_a_gap_the_client_is_told_once_where_to_go_on() -> None:
    m = made()
    peer = Peer(m)
    peer.hello()
    peer.data(1, [1])
    (gap,) = peer.data(3, [3])
    assert isinstance(gap, Failed) and (gap.error, gap.expected) == ("Gap", 2)
    assert peer.data(4, [4]) == [] and held(m) == [1]
    for seq in (2, 3, 4):
        assert isinstance(peer.data(seq, [seq])[0], Scores)
    assert held(m) == [1, 2, 3, 4]
    assert peer.data(6, [6])[0].expected == 5


def test_after_a_hello_a_gap_is_told_again() -> None:
    peer = Peer(made())
    for _ in range(2):
        peer.hello()
        assert [answer.error for answer in peer.data(3, [3])] == ["Gap"]
        assert peer.data(4, [4]) == []


def test_the_writer_that_was_silent_longest_is_forgotten_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "MOST_CLIENTS", 2)
    known = Writers()
    for rank, name in enumerate((b"a", b"b", b"a", b"c")):
        known.enter(name, rank)
    assert list(known.by_id) == [b"a", b"c"]


def test_a_writer_that_left_is_forgotten_before_one_that_is_only_silent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(config, "MOST_CLIENTS", 2)
    m = made()
    silent, left, new = (Peer(m, rank, bytes([rank]) * 16) for rank in range(3))
    for peer in (silent, left):
        peer.hello()
        peer.data(1, [peer.rank])
    left.say(Exit(8, left.writer, 0, ""))
    new.hello()
    (again,) = silent.data(1, [0])
    assert isinstance(again, Scores) and held(m) == [0, 1]  # its first answer; nothing is stored twice


def test_sums_over_more_clients_than_are_remembered_stay_exact(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A forgotten client is counted among the others; one that is present is not forgotten, however silent it is."""
    monkeypatch.setattr(config, "MOST_CLIENTS", 50)
    m = made(None, checkpoint=Checkpoint(tmp_path / "m"))
    first = Peer(m, 0, b"f" * 16)
    first.hello()
    first.data(1, [0])
    for rank in range(1, 301):
        peer = Peer(m, rank, rank.to_bytes(16, "big"))
        peer.hello()
        peer.data(1, [rank])
        peer.data(1, [rank])  # again: it is stored once
        peer.send(b"rubbish")
        peer.say(Exit(9, peer.writer, 2, ""))
        if rank % 2 == 0:
            peer.send(b"rubbish")
    assert m.exit_counter == 300 and m._compute_metadata()["n_present"] == 1
    m.close()
    m = made(None, checkpoint=Checkpoint(tmp_path / "m", resume=True))
    stats = m.stats()
    assert stats.offered == 301 and stats.duplicates == 300 and stats.malformed == 450
    assert len(stats.senders) == 51 and stats.senders[OTHERS].state == "left"
    for name, total in (("items", 301), ("malformed", 450), ("undelivered", 600), ("requests", 1202)):
        assert sum(getattr(sender, name) for sender in stats.senders.values()) == total
    assert len(m._compute_metadata()["n_items"]) == 51
    assert 0 in stats.senders and Peer(m, 0, first.writer).hello().last_seq == 1
    m.close()


def test_another_layout_is_refused_and_takes_no_number() -> None:
    m = made()
    peer = Peer(m)
    peer.hello()
    (refused,) = peer.data(1, [1], layout=bytes(16))
    assert refused.error == "SchemaError" and held(m) == []
    assert isinstance(peer.data(1, [1])[0], Scores)


def test_blocks_that_do_not_fit_are_malformed_and_change_nothing() -> None:
    m = made()
    peer = Peer(m)
    peer.hello()
    wrong = Data(1, WRITER, 1, ITEMS.id, 2, 2, False)
    ((_, answer),) = peer.say(wrong, [np.zeros((1, 8), np.uint8)])
    assert answer.error == "FrameError" and m.stats().malformed == 1 and held(m) == []
    assert m.stats().senders[0].malformed == 1
    assert isinstance(peer.data(1, [1])[0], Scores)


def test_a_number_of_items_beyond_reason_is_malformed(tmp_path: Path) -> None:
    """Of trajectories without fields nothing travels but their number; a manager must not make room for it."""
    step = spaces.Dict({"action": spaces.Discrete(3)})
    env = spaces.Dict({"steps": spaces.Sequence(step, stack=True)})
    m = made(env=env, max_length=4, checkpoint=Checkpoint(tmp_path))
    peer = Peer(m)
    peer.hello()
    ((_, answer),) = peer.say(Data(1, WRITER, 1, item_space(env, 4).id, 2**60, 0, True))
    assert answer.error == "FrameError" and m.stats().offered == 0
    assert not log_of(tmp_path).stat().st_size
    m.close()


def test_the_sixteenth_malformed_frame_in_a_row_shuts_a_peer_out() -> None:
    m = made()
    peer, other = Peer(m, 0), Peer(m, 1, b"y" * 16)
    peer.hello()
    other.hello()
    for _ in range(15):
        assert peer.send(b"rubbish") == []
    assert isinstance(peer.data(1, [1])[0], Scores)  # a good one ends the row
    for _ in range(15):
        peer.send(b"rubbish")
    assert isinstance(peer.data(2, [2])[0], Scores)
    for _ in range(16):
        peer.send(b"rubbish")
    assert peer.data(3, [3]) == [] and m.stats().malformed == 46
    peer.send(b"rubbish")
    assert m.stats().malformed == 46
    assert isinstance(other.data(1, [7])[0], Scores) and held(m) == [1, 2, 7]


def test_a_peer_that_is_shut_out_is_not_answered_any_more() -> None:
    m = made()
    peer = Peer(m)
    peer.hello()
    head = Data(1, WRITER, 1, ITEMS.id, 2, 2, False)  # and no rows behind it
    for _ in range(15):
        ((_, answer),) = peer.say(head)
        assert answer.error == "FrameError"
    assert peer.say(head) == [] and m.stats().malformed == 16


@pytest.mark.parametrize(
    "answer",
    [
        Scores(5, {"score": 1.0}, 0, 0, {}),
        Goodbye(5),
        Metadata(5, {}),
        Failed(5, "RemoteError", ""),
        Items(5, ITEMS.id, 0, 0, 0, 1),
        Sync(0, 3, "agreed", 1.0, 0, False, None, 0),
    ],
)
def test_answers_that_no_request_waits_for_are_dropped_and_counted(answer: AnyMessage) -> None:
    m = made()
    assert Peer(m).say(answer) == [] and m.stats().stray == 1


def test_metadata_comes_on_its_own_tag() -> None:
    ((tag, answer),) = Peer(made()).say(GetMetadata(5))
    assert tag == METADATA_TAG and isinstance(answer, Metadata) and answer.request == 5
    assert {
        "length", "capacity", "log_reward_min", "log_reward_max", "log_reward_mean", "baseline_log_reward",
        "n_requests", "n_items", "n_present", "n_left",
    } <= set(answer.values)  # fmt: skip


@pytest.mark.parametrize(
    "values",
    [
        {"x": object()},
        {"x": datetime(2026, 1, 1, tzinfo=UTC)},
        {"x": {"deep": [datetime(2026, 1, 1, tzinfo=UTC)]}},
        {"x" * 256: 1},
        {1: 1},
        {"x": "y" * (8 << 20)},
        [],
    ],
    ids=["object", "time", "deep", "name", "number", "long", "list"],
)
def test_metadata_that_no_peer_could_read_is_an_error(values: Any) -> None:
    m = made()
    m._compute_metadata = lambda: values  # type: ignore[method-assign]
    ((tag, answer),) = Peer(m).say(GetMetadata(5))
    assert (tag, answer.request, answer.error) == (METADATA_TAG, 5, "RemoteError")
    assert answer.text.startswith("_compute_metadata: raised")


def test_metadata_beyond_a_frame_is_an_answer() -> None:
    m = made(max_frame=4096)
    m._compute_metadata = lambda: {"x": "y" * 5000}  # type: ignore[method-assign]
    ((_, answer),) = Peer(m).say(GetMetadata(5))
    assert answer.error == "RemoteError" and "4096" in answer.text


def test_metadata_is_about_finite_rewards() -> None:
    m = made(env=SAMPLE)
    m.add(samples([1, 2, 3, 4], [-np.inf, 1.0, 2.0, 6.0]), sender_rank=4)
    got = m._compute_metadata()
    assert (got["log_reward_min"], got["log_reward_max"], got["log_reward_mean"]) == (1.0, 6.0, 3.0)
    assert (got["length"], got["n_items"], got["capacity"]) == (4, {"4": 4}, 10_000)
    assert got["baseline_log_reward"] == m.stats().baseline == 1.0
    assert (got["n_present"], got["n_left"]) == (0, 0)
    Peer(m, 4).say(GetMetadata(5))
    assert m._compute_metadata()["n_requests"] == {"4": 1}


def test_exit_counts_a_rank_once_and_what_it_could_not_deliver() -> None:
    m = made(n=2)
    peer = Peer(m)
    peer.hello()
    assert [type(a) for _, a in peer.say(Exit(3, WRITER, 4, ""))] == [Goodbye]
    assert [a.request for _, a in peer.say(Exit(8, WRITER, 4, ""))] == [8]
    assert m.exit_counter == 1 and m.stats().senders[0].undelivered == 4
    peer.hello()  # an old Hello, delayed on its way, does not bring it back
    assert m.exit_counter == 1
    Peer(m, 0, b"z" * 16).hello()  # a new client of that rank does
    assert m.exit_counter == 0 and m.stats().senders[0].state == "present"


def test_what_peers_could_not_deliver_is_never_more_than_a_dump_can_hold(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Five Exits with the largest number that a message takes, of one rank and of many that are forgotten."""
    monkeypatch.setattr(config, "MOST_CLIENTS", 2)
    m = made(checkpoint=Checkpoint(tmp_path / "m"))
    for rank in (1, 1, 1, 1, 1, 2, 3, 4, 5, 6, 7, 8):
        peer = Peer(m, rank, secrets.token_bytes(16))
        peer.hello()
        assert [type(a) for _, a in peer.say(Exit(3, peer.writer, 2**62, ""))] == [Goodbye]
    m.close()
    m = made(checkpoint=Checkpoint(tmp_path / "m", resume=True))
    assert {sender.undelivered for sender in m.stats().senders.values()} == {2**62}
    m.close()


def test_a_worker_that_left_stays_away_over_a_restart(tmp_path: Path) -> None:
    first = made(checkpoint=Checkpoint(tmp_path))
    peer = Peer(first)
    peer.hello()
    peer.data(1, [1])
    peer.say(Exit(3, WRITER, 0, ""))
    first.close()
    second = made(checkpoint=Checkpoint(tmp_path, resume=True))
    assert isinstance(
        Peer(second).hello(), Welcome
    )  # an old Hello, delayed on its way, does not bring it back
    assert second._compute_metadata()["n_present"] == 0
    Peer(second, 1, b"z" * 16).hello()
    assert second._compute_metadata()["n_present"] == 1 and held(second) == [1]


def test_a_logged_container_is_scored_again_after_a_kill_and_has_its_answer(tmp_path: Path) -> None:
    calls: list[int] = []

    def score(obj: Any, sender_rank: int) -> dict[str, float]:
        calls.append(sender_rank)
        return {"n": float(obj["id"].sum())}

    first = made(scoring_function=score, checkpoint=Checkpoint(tmp_path))
    Peer(first, 6).hello()
    (answer,) = Peer(first, 6).data(1, [1, 2])
    kill(first)
    second = made(scoring_function=score, checkpoint=Checkpoint(tmp_path, resume=True))
    assert calls == [6, 6] and Peer(second, 6).hello().last_seq == 1
    assert Peer(second, 6).data(1, [1, 2]) == [answer] and held(second) == [1, 2]
    second.close()


def test_a_dump_is_written_when_its_time_has_come_since_the_last_one(tmp_path: Path) -> None:
    n_open = len(os.listdir("/proc/self/fd"))
    core = manager_protocol(checkpoint=Checkpoint(tmp_path, every_s=10.0))
    n_at_work = len(os.listdir("/proc/self/fd"))
    peer = Peer(core)
    peer.hello()
    for seq in (1, 2):
        peer.data(seq, [seq])
        log = log_of(tmp_path)
        core.tick(monotonic() + 9.0)
        assert log_of(tmp_path) == log and log.stat().st_size
        core.tick(monotonic() + 10.0)
        assert log_of(tmp_path) != log and not log_of(tmp_path).stat().st_size  # the dump has what it said
        assert len(os.listdir("/proc/self/fd")) == n_at_work
    core.close()
    assert len(os.listdir("/proc/self/fd")) == n_open
    log = log_of(tmp_path)
    again = manager_protocol(checkpoint=Checkpoint(tmp_path, every_s=10.0, resume=True))
    again.tick(monotonic() + 9.0)  # a restart has just read one
    assert log_of(tmp_path) == log
    again.close()


def full_disk(*args: Any, **kw: Any) -> Any:
    raise OSError(28, "No space left on device")


def test_a_dump_that_fails_is_warned_of_once_and_tried_again_while_the_log_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = manager_protocol(checkpoint=Checkpoint(tmp_path, every_s=10.0))
    peer = Peer(core)
    peer.hello()
    peer.data(1, [1])
    first = log_of(tmp_path)
    with monkeypatch.context() as disk:
        disk.setattr("recollect.storage.dump.write_manifest", full_disk)
        with pytest.warns(RuntimeWarning, match=r"checkpoint.*No space"):
            core.tick(monotonic() + 11.0)
        for n in (1, 2, 3):
            assert figures(core).dump_errors == n and isinstance(peer.data(n + 1, [n + 1])[0], Scores)
            with warnings.catch_warnings(action="error"):
                core.tick(monotonic() + 9.0)  # its next time counts from when it was tried
                core.tick(monotonic() + 11.0)
    assert log_of(tmp_path) == first
    core.close()
    core = manager_protocol(checkpoint=Checkpoint(tmp_path, every_s=10.0, resume=True))
    assert stored(core) == [1, 2, 3, 4] and Peer(core).hello().last_seq == 4
    core.tick(monotonic() + 11.0)
    assert log_of(tmp_path) != first and figures(core).dump_errors == 0
    core.close()


def test_another_dump_that_fails_is_warned_of_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    core = manager_protocol(checkpoint=Checkpoint(tmp_path, every_s=10.0))
    for _ in range(2):
        with monkeypatch.context() as disk:
            disk.setattr("recollect.storage.dump.write_manifest", full_disk)
            with pytest.warns(RuntimeWarning, match="free the disk"):
                core.tick(monotonic() + 11.0)
        core.tick(monotonic() + 11.0)
    core.close()


@pytest.mark.parametrize("step", ["ContainerLog", "sync_directory"])
def test_behind_a_commit_without_its_log_nothing_is_taken_before_another_dump(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """A restart would take the new commit, and never look into the old log."""
    core = manager_protocol(checkpoint=Checkpoint(tmp_path, every_s=10.0))
    peer = Peer(core)
    peer.hello()
    peer.data(1, [1])
    with monkeypatch.context() as disk:
        disk.setattr(f"recollect.remote.manager.checkpoint.{step}", full_disk)
        with pytest.warns(RuntimeWarning, match="No space"):
            core.tick(monotonic() + 11.0)
        (refused,) = peer.data(2, [2])
        assert refused.error == "RemoteError" and "No space" in refused.text
        with pytest.raises(OSError, match="No space"):
            core.add_local(samples([3]), -1)
        assert stored(core) == [1] and figures(core).offered == 1
    assert isinstance(peer.data(2, [2])[0], Scores)
    core.close()
    with ReplayBufferManager(
        PLAIN, 9, None, evict="oldest", checkpoint=Checkpoint(tmp_path, resume=True)
    ) as m:
        assert held(m) == [1, 2]


def test_an_old_log_that_cannot_be_deleted_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = manager_protocol(checkpoint=Checkpoint(tmp_path, every_s=10.0))
    first, real = log_of(tmp_path), os.unlink

    def unlink(path: Any, **kw: Any) -> None:
        (full_disk if Path(path).name == first.name else real)(path, **kw)

    with monkeypatch.context() as disk:
        disk.setattr("os.unlink", unlink)
        core.tick(monotonic() + 11.0)
    assert first.exists() and len(list(tmp_path.glob("log-*.bin"))) == 2
    core.tick(monotonic() + 11.0)
    assert log_of(tmp_path) != first
    core.close()


def test_nothing_is_stored_under_a_new_name_of_the_forwarder_before_a_dump_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    core, carrier = manager_protocol(checkpoint=Checkpoint(tmp_path), forward_to=5), ScriptedCarrier()
    peer, other = Peer(core), Peer(core, 5)
    peer.hello()

    def forwarded() -> AnyMessage:
        core.forwarder.work(carrier)
        return carrier.sent[-1][3]

    core.add_local(samples([1]), -1)
    hello = forwarded()
    other.say(Welcome(hello.request, bytes(16), 0, 8, None, ITEMS.text, 0, "host", 0))
    refused = Failed(forwarded().request, "RemoteError", "no")  # then it goes on under a new name
    with monkeypatch.context() as disk:
        disk.setattr("recollect.storage.dump.write_manifest", full_disk)
        with pytest.warns(RuntimeWarning, match="No space"):
            other.say(refused)
        assert peer.data(1, [2])[0].error == "RemoteError" and stored(core) == [1]
        assert other.say(Goodbye(1)) == [] and figures(core).dump_errors == 2
    first = log_of(tmp_path)
    assert isinstance(peer.data(1, [2])[0], Scores) and log_of(tmp_path) != first
    core.close()


def test_a_dump_that_fails_at_the_end_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    m = ReplayBufferManager(
        PLAIN, 9, 0, communication_backend=ScriptedCarrier(), checkpoint=Checkpoint(tmp_path)
    )
    m.add(samples([1]))
    with monkeypatch.context() as disk:
        disk.setattr("recollect.storage.dump.write_manifest", full_disk)
        with pytest.warns(RuntimeWarning, match="No space"):
            m.run()
    assert m.stats().dump_errors == 1
    m.close()
    with ReplayBufferManager(PLAIN, 9, 0, checkpoint=Checkpoint(tmp_path, resume=True)) as again:
        assert held(again) == [1]


def test_a_container_that_cannot_be_synced_is_answered_when_a_dump_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    m = made(checkpoint=Checkpoint(tmp_path, power_safe=True))
    peer = Peer(m)
    peer.hello()
    first = log_of(tmp_path)
    with monkeypatch.context() as disk:
        disk.setattr("recollect.remote.manager.checkpoint.os.fdatasync", full_disk)
        disk.setattr("recollect.storage.dump.write_manifest", full_disk)
        assert peer.data(1, [1]) == [] and m.stats().unsent == 1
    # The client's retry; that another sync says all is well proves nothing.
    assert [type(message) for message in peer.data(1, [1])] == [Scores] and held(m) == [1]
    assert log_of(tmp_path) != first


def test_an_add_here_that_cannot_be_synced_is_not_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    m = made(checkpoint=Checkpoint(tmp_path, power_safe=True))
    m.add(samples([1]))
    log = log_of(tmp_path)
    nbytes = log.stat().st_size
    with monkeypatch.context() as disk:
        disk.setattr("recollect.remote.manager.checkpoint.os.fdatasync", full_disk)
        with pytest.raises(OSError, match="No space"):
            m.add(samples([2]))
    assert held(m) == [1] and log.stat().st_size == nbytes
    m.add(samples([3]))
    assert log_of(tmp_path) != log  # what else was in it may not be on disk
    kill(m)
    assert held(made(checkpoint=Checkpoint(tmp_path, resume=True))) == [1, 3]


def test_drawing_what_is_not_there_is_an_answer() -> None:
    peer = Peer(made())
    ((_, empty),) = peer.say(Sample(1, 3, "uniform", True))
    assert empty.error == "EmptyError"
    peer.hello()
    peer.data(1, [1])
    ((_, few),) = peer.say(Sample(2, 3, "uniform", False))
    assert few.error == "ValueError" and "without replacement" in few.text
    ((_, by),) = peer.say(Sample(3, 3, "log_reward", True))
    assert by.error == "ValueError"
    ((_, many),) = peer.say(Sample(4, 2**50, "uniform", True))
    assert many.error == "BudgetError" and many.request == 4


def test_a_short_message_draws_no_gigabytes() -> None:
    """A `Sample` of 49 bytes asks for 20 million rows. It is refused before they are drawn."""
    m = made()
    m.add(samples([1, 2]))
    tracemalloc.start()
    try:
        ((_, many),) = Peer(m).say(Sample(4, 20_000_000, "uniform", True))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert many.error == "BudgetError" and peak < 1 << 20


def test_after_the_end_stored_containers_have_their_answer_and_all_else_closed_error() -> None:
    m = made(n=2)
    peer, other = Peer(m), Peer(m, 1, b"y" * 16)
    peer.hello()
    other.hello()
    (stored,) = peer.data(1, [1])
    for one in (peer, other):
        one.say(Exit(1, one.writer, 0, ""))
    eventually(lambda: not m.is_running)
    assert peer.data(1, [1]) == [stored] and m.stats().duplicates == 1
    assert [a.error for a in peer.data(2, [2])] == ["ClosedError"] and m.stats().duplicates == 1
    other.writer = WRITER
    assert [a.error for a in other.data(1, [1])] == ["ClosedError"]  # the number of another's container
    ((tag, answer),) = peer.say(GetMetadata(1))
    assert tag == METADATA_TAG and answer.error == "ClosedError"
    ((_, answer),) = peer.say(Sample(1, 1, "uniform", True))
    assert answer.error == "ClosedError"
    ((_, answer),) = peer.say(Hello(1, "worker", b"z" * 16, 0, "host", 0, 1, ""))
    assert answer.error == "ClosedError"
    assert [type(a) for _, a in peer.say(Exit(1, WRITER, 0, ""))] == [Goodbye]
    assert peer.say(Goodbye(1)) == [] and held(m) == [1]


def test_text_cut_inside_a_character_ends_no_manager() -> None:
    """In the error of a scoring function, in the name of a score, of a leaf and of a value, however long it is."""
    said = "cut \ud83d"
    names = iter([said, None, "\ud83d" * 100])

    def score(obj: Any, sender_rank: int) -> dict[str, float]:
        if (name := next(names)) is None:
            raise ValueError("\ud83d" * 60_000)
        return {name: 1.0}

    class Odd(ReplayBufferManager):
        def _compute_metadata(self) -> dict[str, Any]:
            return {said: said}

    peer = Peer(made(kind=Odd, scoring_function=score))
    assert isinstance(peer.hello(), Welcome)
    (scored,) = peer.data(1, [1])
    assert isinstance(scored, Scores) and scored.scores[r"cut \ud83d"] == 1.0
    (failed,) = peer.data(2, [2])
    assert (
        isinstance(failed, Failed) and failed.error == "ScoringError" and r"ValueError: \ud83d" in failed.text
    )
    (failed,) = peer.data(3, [3])
    assert isinstance(failed, Failed) and "names must be short" in failed.text
    ((_, about),) = peer.say(GetMetadata(8))
    assert isinstance(about, Metadata) and about.values == {r"cut \ud83d": r"cut \ud83d"}
    space = canonical(space_to_json(spaces.Dict({**ITEMS.space.spaces, said: spaces.Discrete(2)})))
    refused = peer.hello(space=space)
    assert isinstance(refused, Failed) and refused.error == "SchemaError" and r"\ud83d" in refused.text
