"""A manager's checkpoint: what it comes back with, what does not fit, and what a kill or a full disk leaves."""

from __future__ import annotations

import os
import pickle
import tarfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests.remote.make import MAX_LENGTH, PLAIN, SAMPLE, grid, paths, samples
from tests.remote.scripted import ITEMS, ScriptedCarrier

import recollect as rc
from recollect.errors import (
    FormatError,
    LaneBusyError,
    RemoteError,
    ScoringError,
)
from recollect.remote import (
    Checkpoint,
    Diversity,
    LocalCarrier,
    RemoteReplay,
    ReplayBufferManager,
)
from recollect.remote.frame import encode
from recollect.remote.manager.checkpoint import record_head
from recollect.remote.messages import Data, Goodbye, Hello, Scores, Welcome
from recollect.replay import snapshot

INF = float("inf")


def manager(env: Any = SAMPLE, n: int | None = 1, **kw: Any) -> ReplayBufferManager:
    return ReplayBufferManager(env, 1, n, **{"communication_backend": ScriptedCarrier(1), **kw})


def log_of(path: Path) -> Path:
    (log,) = path.glob("log-*.bin")
    return log


def dumped(m: ReplayBufferManager) -> None:
    """Let a manager write a dump, as it does whenever it ends."""
    m.stop()
    m.run()


def saved(tmp_path: Path, resume: bool = True, **kw: Any) -> ReplayBufferManager:
    return manager(checkpoint=Checkpoint(tmp_path, resume=resume), **{"capacity": 4, **kw})


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
            dumped(a)
    before = a.stats()
    held = a.buffer[:]
    a.close()  # without a dump, as a kill would
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


def test_what_is_drawn_after_a_restart_is_what_would_have_been(tmp_path: Path) -> None:
    a = saved(tmp_path, resume=False, seed=3)
    a.add(samples(range(4), np.zeros(4)))
    a.sample(7)
    dumped(a)
    drawn = a.sample(50)["id"].tolist()
    a.close()
    b = saved(tmp_path, seed=4)
    assert b.sample(50)["id"].tolist() == drawn
    b.close()


@pytest.mark.parametrize(
    ("other", "name"),
    [
        ({"capacity": 5}, "capacity"),
        ({"env": PLAIN, "evict": "oldest"}, "space"),
        ({"evict": "oldest"}, "evict"),
        ({"baseline_strategy": "ema"}, "strategy"),
        ({"baseline_percentile": 0.2}, "percentile"),
        ({"baseline_ema_alpha": 0.2}, "alpha"),
        ({"store_locally": False}, "store_locally"),
        ({"diverse_replay_buffer": True, "diversity": Diversity("id")}, "diverse"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_a_value_error(
    tmp_path: Path, other: dict[str, Any], name: str
) -> None:
    saved(tmp_path, resume=False).close()
    n_open = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ValueError, match=f"{name}.*choose another path|space"):
        saved(tmp_path, **other)
    assert len(os.listdir("/proc/self/fd")) == n_open  # the log is given up
    saved(tmp_path).close()


def test_a_checkpoint_of_other_lengths_or_of_a_buffer_alone_is_a_value_error(tmp_path: Path) -> None:
    saved(tmp_path, resume=False, env=grid(), max_length=4).close()
    with pytest.raises(ValueError, match="max_length"):
        saved(tmp_path, env=grid(), max_length=5)
    with rc.ReplayBuffer.create("memory", SAMPLE, capacity=4) as alone:
        alone.dumps(tmp_path / "alone")
    with pytest.raises(ValueError, match="of a buffer alone"):
        saved(tmp_path / "alone")


@pytest.mark.parametrize("part", [0.0, 0.5])
def test_a_damaged_checkpoint_is_named(tmp_path: Path, part: float) -> None:
    saved(tmp_path, resume=False).close()
    (state,) = tmp_path.glob("**/manager-*.bin")
    data = bytearray(state.read_bytes())
    data[int(part * len(data))] ^= 1
    state.write_bytes(data)
    with pytest.raises(FormatError, match=rf"{state.name}.*checksum"):
        saved(tmp_path)


def test_a_checkpoint_of_a_later_release_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as later:
        later.setattr("recollect.remote.manager.checkpoint.VERSION", 3)
        saved(tmp_path, resume=False).close()
    with pytest.raises(FormatError, match="version must be at most 2, got 3"):
        saved(tmp_path)


def test_a_new_log_is_on_disk_before_it_is_used_and_the_old_one_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[str]] = []

    def look(path: Path) -> None:
        seen.append(sorted(log.name for log in path.glob("log-*.bin")))

    a = saved(tmp_path, resume=False)
    old = log_of(tmp_path).name
    monkeypatch.setattr("recollect.remote.manager.checkpoint.sync_directory", look)
    dumped(a)
    assert seen == [[log_of(tmp_path).name]] and not (tmp_path / old).exists()
    a.close()


def test_an_add_here_may_be_larger_than_a_frame(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing travels; what is logged is bounded by the log alone."""
    monkeypatch.setitem(encode.__kwdefaults__, "max_frame", 4096)
    a = saved(tmp_path, resume=False, capacity=1000)
    a.add(samples(range(1000), np.zeros(1000)))
    a.close()
    b = saved(tmp_path, capacity=1000)
    assert len(b.buffer) == 1000
    b.close()


def test_a_log_of_something_else_is_refused(tmp_path: Path) -> None:
    a = saved(tmp_path, resume=False)
    a.close()
    frame = b"".join(encode(Goodbye(1)))
    log_of(tmp_path).write_bytes(record_head(frame, 0) + frame)
    with pytest.raises(RemoteError, match="must hold containers"):
        saved(tmp_path)


@pytest.mark.parametrize("where", ["magic", "size", "sender", "checksum", "frame"])
@pytest.mark.parametrize("victim", [0, 2, 4])
def test_damage_in_a_log_costs_one_container_and_is_told(tmp_path: Path, victim: int, where: str) -> None:
    """One flipped bit: the others are there, also after the next restart, and the damaged file is kept."""
    a = saved(tmp_path, resume=False, capacity=10)
    starts = []
    for i in range(5):
        starts.append(log_of(tmp_path).stat().st_size)
        a.add(samples([i], [0.0]))
    log = log_of(tmp_path)
    a.close()
    data = bytearray(log.read_bytes())
    data[starts[victim] + {"magic": 0, "size": 4, "sender": 9, "checksum": 16, "frame": 60}[where]] ^= 1
    log.write_bytes(data)
    others = [i for i in range(5) if i != victim]
    with pytest.warns(RuntimeWarning, match="is damaged in 1 places"):
        b = saved(tmp_path, capacity=10)
    assert b.buffer[:]["id"].tolist() == others and b.stats().log_damages == 1
    assert (tmp_path / f"damaged-{log.name}").read_bytes() == data
    b.add(samples([9], [0.0]))
    b.close()
    with saved(tmp_path, capacity=10) as c:
        assert c.buffer[:]["id"].tolist() == [*others, 9] and c.stats().log_damages == 0


def test_a_damaged_log_goes_on_if_no_dump_can_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a = saved(tmp_path, resume=False, capacity=10)
    for i in range(3):
        a.add(samples([i], [0.0]))
    log = log_of(tmp_path)
    a.close()
    data = bytearray(log.read_bytes())
    data[-1] ^= 1
    log.write_bytes(data)

    def full(*args: Any, **options: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as disk:
        disk.setattr(snapshot, "dump", full)
        with pytest.warns(RuntimeWarning):
            b = saved(tmp_path, capacity=10)
    b.add(samples([9], [0.0]))
    assert log.read_bytes().startswith(data)
    b.close()
    with pytest.warns(RuntimeWarning, match="is damaged"), saved(tmp_path, capacity=10) as c:
        assert c.buffer[:]["id"].tolist() == [0, 1, 9]


def test_a_container_that_could_not_be_scored_does_not_stop_a_restart(tmp_path: Path) -> None:
    def score(obj: Any, sender_rank: int) -> dict[str, float]:
        raise KeyError("never")

    a = saved(tmp_path, resume=False, scoring_function=score)
    with pytest.raises(ScoringError):
        a.add(samples([1], [0.0]))
    a.close()
    b = saved(tmp_path, scoring_function=score)
    assert b.buffer[:]["id"].tolist() == [1] and b.stats().scoring_errors == 1
    b.close()


def test_a_shared_buffer_stays_shared_over_a_restart(tmp_path: Path) -> None:
    saved(tmp_path, resume=False, storage="shared").close()
    with saved(tmp_path, storage="shared") as m:
        pickle.loads(pickle.dumps(m.buffer)).close()


@pytest.mark.parametrize("cut", [1, 10, 40, 200])
def test_a_torn_record_was_never_acknowledged(tmp_path: Path, cut: int) -> None:
    a = manager(checkpoint=Checkpoint(tmp_path))
    for i in range(3):
        a.add(samples([i], [0.0]))
    log = log_of(tmp_path)
    data = log.read_bytes()
    log.write_bytes(data[: len(data) - cut])
    a.close()  # without a dump, as a kill would
    b = manager(checkpoint=Checkpoint(tmp_path, resume=True))
    n = len(b.buffer)
    assert b.buffer[:]["id"].tolist() == list(range(n)) and n == (2 if cut < 150 else n)
    b.add(samples([9], [0.0]))
    b.close()
    c = manager(checkpoint=Checkpoint(tmp_path, resume=True))
    assert c.buffer[:]["id"].tolist() == [*range(n), 9]


def test_a_log_that_cannot_be_written_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    m = manager(checkpoint=Checkpoint(tmp_path))

    def full(*args: Any, **more: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("recollect.remote.manager.checkpoint.os.writev", full)
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
            "recollect.remote.manager.checkpoint.os",
            SimpleNamespace(**{**vars(os), "writev": part, "write": full}),
        )
        with pytest.raises(OSError, match="No space"):
            m.add(samples([1], [0.0]))
    m.add(samples([2], [0.0]))
    m.close()
    again = manager(checkpoint=Checkpoint(tmp_path, resume=True))
    assert again.buffer[:]["id"].tolist() == [0, 2]
    again.close()


def test_behind_a_torn_log_a_record_that_was_written_in_part_is_taken_back_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    m = manager(checkpoint=Checkpoint(tmp_path))
    m.add(samples([0], [0.0]))
    log = log_of(tmp_path)
    with log.open("ab") as f:
        f.write(log.read_bytes()[:-1])  # killed while it wrote the second
    m.close()
    again = manager(checkpoint=Checkpoint(tmp_path, resume=True))

    def full(*args: Any) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as disk:
        disk.setattr("recollect.remote.manager.checkpoint.os.writev", full)
        with pytest.raises(OSError, match="No space"):
            again.add(samples([1], [0.0]))
    again.add(samples([2], [0.0]))
    again.close()
    last = manager(checkpoint=Checkpoint(tmp_path, resume=True))
    assert last.buffer[:]["id"].tolist() == [0, 2]
    last.close()


@pytest.mark.parametrize("state", [b"\xc1", b"\x91\x01", b""])
def test_a_state_that_is_none_is_named(tmp_path: Path, state: bytes) -> None:
    with rc.ReplayBuffer.create("memory", SAMPLE, capacity=4) as buffer:
        snapshot.dump(buffer, tmp_path, False, {"manager": state})
    with pytest.raises(FormatError, match=r"manager-\d+\.bin: cannot be read"):
        saved(tmp_path)


def test_behind_a_record_that_cannot_be_taken_back_nothing_is_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A restart would read no further than that record."""
    m = manager(checkpoint=Checkpoint(tmp_path))
    m.add(samples([0], [0.0]))

    def part(fd: int, parts: Any) -> int:
        return os.write(fd, parts[0])

    def full(*args: Any) -> int:
        raise OSError(28, "No space left on device")

    broken = {**vars(os), "writev": part, "write": full, "ftruncate": full}
    with monkeypatch.context() as disk:
        disk.setattr("recollect.remote.manager.checkpoint.os", SimpleNamespace(**broken))
        with pytest.raises(OSError, match="No space"):
            m.add(samples([1], [0.0]))
    m.add(samples([2], [0.0]))
    m.close()
    again = manager(checkpoint=Checkpoint(tmp_path, resume=True))
    assert again.buffer[:]["id"].tolist() == [0, 2]
    again.close()


def test_an_add_here_is_on_disk_before_it_returns_if_that_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    for power_safe in (True, False):
        m = manager(checkpoint=Checkpoint(tmp_path / str(power_safe), power_safe=power_safe))
        with monkeypatch.context() as disk:
            disk.setattr("recollect.remote.manager.checkpoint.os.fdatasync", synced.append)
            m.add(samples([1], [0.0]))
        m.close()
        assert len(synced) == 1


def test_power_safe_syncs_before_answers_leave(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    real = os.fdatasync
    monkeypatch.setattr(
        "recollect.remote.manager.checkpoint.os.fdatasync", lambda fd: (synced.append(fd), real(fd))
    )
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
    carrier = ScriptedCarrier()
    checkpoint = Checkpoint(tmp_path, power_safe=True)
    m = ReplayBufferManager(PLAIN, 9, None, communication_backend=carrier, checkpoint=checkpoint)
    monkeypatch.setattr("recollect.remote.manager.checkpoint.os.fdatasync", synced.append)
    carrier.give(0, b"".join(encode(Hello(1, "worker", bytes(range(16)), 0, "host", 0, 1, ""))))
    for seq in range(1, 6):
        packed = ITEMS.encode(samples([seq]))
        data = Data(1 + seq, bytes(range(16)), seq, ITEMS.id, 1, 1, False)
        carrier.give(0, b"".join(encode(data, packed.blocks())))
    m.start()
    carrier.settle()
    assert len(m.buffer) == 5 and len(synced) == 1
    assert [type(message) for *_, message in carrier.sent] == [Welcome] + [Scores] * 5
    m.close()


def test_a_dump_is_a_phase(tmp_path: Path) -> None:
    with manager(timing=True, checkpoint=Checkpoint(tmp_path)) as m:
        dumped(m)
        assert m.stats().phases["dump"].count == 2


def test_a_checkpoint_of_version_1_goes_on(tmp_path: Path) -> None:
    """Rows 0 to 2 are in its dump, 3 to 6 in its log, whose checksums are those of the frames alone."""
    with tarfile.open(Path(__file__).with_name("version-1.tar.xz")) as archive:
        archive.extractall(tmp_path, filter="data")
    about = Checkpoint(tmp_path / "manager", resume=True)
    for new in (7, 8):  # 7 is written to the log of version 1
        m = ReplayBufferManager({"id": ((), "int64")}, 1, 1, capacity=10, checkpoint=about)
        assert m.buffer[:]["id"].tolist() == [*range(new)]
        assert m.stats().log_damages == 0
        m.add({"id": np.array([new])})
        m.close()  # as a kill would


@pytest.mark.parametrize("resume", [False, True])
def test_a_second_manager_on_one_directory_is_refused(tmp_path: Path, resume: bool) -> None:
    first = manager(checkpoint=Checkpoint(tmp_path))
    with pytest.raises(LaneBusyError, match=f"process {os.getpid()}"):
        manager(checkpoint=Checkpoint(tmp_path, resume=resume))
    first.add(samples([1], [0.0]))
    first.close()
    with manager(checkpoint=Checkpoint(tmp_path, resume=True)) as second:
        assert second.buffer[:]["id"].tolist() == [1]


@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_a_log_that_is_a_link_is_not_cut(tmp_path: Path, link: object) -> None:
    path, other = tmp_path / "m", tmp_path / "other"
    other.write_text("mine")
    manager(checkpoint=Checkpoint(path)).close()
    [log] = path.glob("log-*.bin")
    log.unlink()
    link(other, log)  # type: ignore[operator]
    with pytest.raises(FormatError):
        manager(checkpoint=Checkpoint(path, resume=True))
    assert other.read_text() == "mine"
