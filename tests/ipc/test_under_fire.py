"""Weights, rollouts and replay under fire: at full speed, lapped, overwritten, and with any party killed at any time.

Briefly here; a minute and more of each with `-m soak`.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import Pipe
from typing import Any

import numpy as np
import pytest

import recollect as rc
from recollect import _core

pytestmark = [pytest.mark.process, pytest.mark.timeout(60)]
LONG_S = 30.0


class Party:
    """A forked process that runs `work(tell)` and sends what it returns or raises; `tell()` shows that it goes on."""

    def __init__(self, work: Callable[[Callable[[], None]], Any]) -> None:
        self.beats = mmap.mmap(-1, 4096)
        self.pipe, theirs = Pipe()
        self.pid = os.fork()
        if self.pid == 0:
            _end_with_parent()
            try:
                theirs.send(("returned", work(self._beat)))
            except BaseException as error:
                theirs.send(
                    (type(error).__name__, error if isinstance(error, rc.RecollectError) else repr(error))
                )
            finally:
                os._exit(0)
        theirs.close()

    def _beat(self) -> None:
        self.beats[:8] = struct.pack("q", time.monotonic_ns())

    def goes_on_after(self, at_ns: int) -> bool:
        return bool(struct.unpack("q", self.beats[:8])[0] > at_ns)

    def result(self, timeout_s: float = LONG_S) -> Any:
        assert self.pipe.poll(timeout_s), "the party does not answer"
        kind, value = self.pipe.recv()
        assert kind == "returned", (kind, value)
        return value

    def end(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        self.pipe.close()
        self.beats.close()


def _end_with_parent() -> None:
    """A test that is killed leaves no party behind."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


@contextmanager
def parties(*works: Callable[[Callable[[], None]], Any]) -> Iterator[list[Party]]:
    started: list[Party] = []
    try:
        started.extend(map(Party, works))
        yield started
    finally:
        for party in started:
            party.end()


# -- weights rewritten back to back while three processes read


def weights(n: int) -> dict[str, Any]:
    return {
        "w": np.full((64, 48), n, "float32"), "b": np.full(48, -n, "float64"), "steps": np.array(n),
        "big": np.full(100_000, n, "int64"),
    }  # fmt: skip


def rewrite_and_read(seconds: float) -> dict[str, int]:
    with rc.ipc.SharedWeightSync.from_state_dict(weights(1)) as sync:
        end = time.monotonic() + seconds

        def read(_: Any) -> tuple[int, int]:
            mine, before, reads, changes = weights(0), 0, 0, 0
            while (now := time.monotonic()) < end or (changes <= 2 and now < end + LONG_S):
                version = sync.read_weights_into(mine)
                assert version >= before, f"went back from {before} to {version}"
                for name, x in mine.items():
                    assert (x == (-version if name == "b" else version)).all(), f"{name}: torn at {version}"
                reads, changes, before = reads + 1, changes + (version > before), version
            return reads, changes

        with parties(read, read, read) as readers:
            version = 1
            while time.monotonic() < end or not all(reader.pipe.poll() for reader in readers):
                version += 1
                sync.write_weights(weights(version))
            found = [reader.result() for reader in readers]
        assert sync.version == version and all(changes > 2 for _, changes in found)
        return {"writes": version, "reads": sum(reads for reads, _ in found)}


def test_weights_rewritten_back_to_back() -> None:
    rewrite_and_read(0.5)


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_weights_rewritten_back_to_back_for_a_minute() -> None:
    print(rewrite_and_read(60.0))


# -- a rollout writer that laps a slow reader


def lap(seconds: float, policy: str) -> dict[str, int]:
    with rc.ipc.RolloutRingBuffer(16, 8, 12, 3, policy=policy, num_slots=3) as ring:

        def write(_: Any) -> int:
            n, end = 0, time.monotonic() + seconds
            while time.monotonic() < end:
                n += 1
                for x in ring.write_buffer.values():
                    x[...] = n % 1_000_003
                ring.signal_write_done(version=n)
            return n

        with parties(write) as (writer,):
            before = reads = 0
            while not writer.pipe.poll() or ring.available():
                try:
                    if not ring.wait_for_data(timeout=0.05):
                        continue
                except rc.PeerDiedError:  # it has ended, and nothing is left to read
                    break
                views, number = ring.read_numpy_views(), ring.read_info.version
                assert number > before, f"{number} after {before}"
                for _ in range(3):  # slow: the writer laps meanwhile, and never this slot
                    assert all((x == number % 1_000_003).all() for x in views.values()), f"torn: {number}"
                    os.sched_yield()
                ring.advance_read()
                before, reads = number, reads + 1
            writes = writer.result()
        stats = ring.stats()
        assert (stats.written, stats.delivered) == (writes, reads)
        assert stats.dropped == writes - reads > 0
        return {"writes": writes, "reads": reads, "dropped": stats.dropped}


@pytest.mark.parametrize("policy", ["drop_oldest", "drop_newest"])
def test_a_writer_laps_a_slow_reader(policy: str) -> None:
    lap(0.4, policy)


@pytest.mark.soak
@pytest.mark.timeout(300)
@pytest.mark.parametrize("policy", ["drop_oldest", "drop_newest"])
def test_a_writer_laps_a_slow_reader_for_a_minute(policy: str) -> None:
    print(lap(60.0, policy))


# -- replay added while sampled, on a full ring


ROWS = 64
POISON = -7.0


def transitions(lane: int, first: int) -> dict[str, Any]:
    """Rows that tell their number in every column; each third one is terminal, and poisoned if it is not patched."""
    number = np.arange(first, first + ROWS, dtype=np.float32)
    obs = np.repeat(number[:, None], 5, 1)
    done = np.arange(first, first + ROWS) % 3 == 0
    next_obs = obs + 1
    final = next_obs.copy()
    next_obs[done] = POISON
    return {
        "obs": obs, "actions": np.full((ROWS, 2), lane, "float32"), "rewards": number, "next_obs": next_obs,
        "dones": done, "truncated": np.zeros(ROWS, bool), "terminal_mask": done, "terminal_next_obs": final,
    }  # fmt: skip


def check_batch(batch: dict[str, Any]) -> None:
    number = batch["rewards"]
    assert not (batch["next_obs"] == POISON).any(), "an unpatched terminal row"
    assert (batch["obs"] == number[:, None]).all() and (batch["next_obs"] == number[:, None] + 1).all(), (
        "torn"
    )
    assert (batch["dones"] == (number % 3 == 0)).all(), "torn"
    assert (batch["actions"] == batch["actions"][:, :1]).all(), "torn"


def add_and_sample(n_rows: int, seconds: float) -> dict[str, int]:
    with rc.ipc.ReplayBuffer(2 * 512, 5, 2, "numpy", num_lanes=2, seed=0) as buf:

        def adder(lane: int) -> Callable[..., int]:
            def add(_: Any) -> int:
                mine, n = buf.on_lane(lane), 0
                if lane:
                    _core.stream_from(0, 0)  # past the caches, whatever this machine prefers
                while not stop[0]:
                    mine.add(**transitions(lane, n % 3_000_000))  # numbers that float32 can tell apart
                    n += ROWS
                return n

            return add

        stop = mmap.mmap(-1, 4096)
        with parties(adder(0), adder(1)) as adders:
            drawn, end = 0, time.monotonic() + seconds
            while buf.size < buf.capacity:
                os.sched_yield()
            while min(drawn, buf.ptr) < n_rows or time.monotonic() < end:
                check_batch(buf.sample(2048))
                drawn += 2048
            stop[0] = 1
            added = sum(party.result() for party in adders)
        stop.close()
        assert buf.ptr == added > buf.capacity
        return {"added": added, "drawn": drawn}


def test_replay_added_while_sampled_on_a_full_ring() -> None:
    add_and_sample(100_000, 0.3)


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_ten_million_rows_of_replay_added_while_sampled() -> None:
    print(add_and_sample(10_000_000, 60.0))


# -- any party killed at any time


def be_learner(names: Any, beat: Callable[[], None]) -> None:
    """Owns everything: publishes weights and statistics, takes rollouts, samples."""
    sync = rc.ipc.SharedWeightSync.from_state_dict({"w": np.zeros(256, "float32")})
    norm = rc.ipc.SharedObsNormStats()
    ring = rc.ipc.RolloutRingBuffer(4, 4, 5, 2, num_lanes=2, num_slots=2)
    buf = rc.ipc.ReplayBuffer(2 * 256, 5, 2, "numpy", num_lanes=2, seed=0)
    for pipe in names:
        pipe.send((sync, norm, ring, buf))
    n = 0
    while True:
        n += 1
        sync.write_weights({"w": np.full(256, n, "float32")})
        norm.put((np.zeros(5, "float32"), np.ones(5, "float32")))
        if ring.wait_for_data(timeout=LONG_S):
            view = ring.read_numpy_views()["obs"]
            assert (view == view.flat[0]).all(), "torn rollout"
            ring.advance_read()
        if buf.size:
            check_batch(buf.sample(64))
        beat()


def be_collector(names: Any, lane: int, beat: Callable[[], None]) -> None:
    """Reads the newest weights, fills rollouts, adds rows."""
    sync, norm, ring, buf = names.recv()
    ring, buf = ring.on_lane(lane), buf.on_lane(lane)
    mine, n = {"w": np.zeros(256, "float32")}, 0
    while True:
        version = sync.read_weights_into(mine)
        assert (mine["w"] == version - 1).all() or (mine["w"] == mine["w"][0]).all(), "torn weights"
        norm.get()
        for x in ring.write_buffer.values():
            x[...] = n
        ring.signal_write_done(version=version)
        buf.add(**transitions(lane, n % 3_000_000))
        n += ROWS
        if lane == 0:  # the other one runs until its lane is full, and waits there
            sync.wait_newer(version, LONG_S)
        beat()


def is_settled(party: Party, at_ns: int, may_go_on: bool) -> bool:
    """It goes on a while after the kill, or ended with one of our own errors."""
    if may_go_on and party.goes_on_after(at_ns + 50_000_000):
        return True
    if not party.pipe.poll():
        return False
    kind, value = party.pipe.recv()
    assert isinstance(value, rc.RecollectError), (kind, value)
    return True


def kill_one(victim_number: int, after_s: float, patience_s: float = 20.0) -> float:
    """Start three parties, kill one at some moment, and wait until the others have settled; seconds of that."""
    (ours_0, theirs_0), (ours_1, theirs_1) = Pipe(), Pipe()
    start = time.monotonic_ns()
    with parties(
        lambda beat: be_learner((ours_0, ours_1), beat),
        lambda beat: be_collector(theirs_0, 0, beat),
        lambda beat: be_collector(theirs_1, 1, beat),
    ) as all_three:
        try:
            eventually(lambda: all(party.goes_on_after(start) for party in all_three), LONG_S)
            end = time.monotonic() + after_s
            eventually(lambda: time.monotonic() > end, LONG_S)
            victim = all_three[victim_number]
            os.kill(victim.pid, signal.SIGKILL)
            at_ns, was_learner = time.monotonic_ns(), victim is all_three[0]
            waiting = [party for party in all_three if party is not victim]

            def look() -> bool:  # without a learner nobody can go on: weights stay old, the ring stays full
                waiting[:] = [p for p in waiting if not is_settled(p, at_ns, may_go_on=not was_learner)]
                return not waiting

            eventually(look, patience_s)
            return (time.monotonic_ns() - at_ns) / 1e9
        finally:
            for end_of_pipe in (ours_0, theirs_0, ours_1, theirs_1):
                end_of_pipe.close()


def eventually(ready: Callable[[], bool], timeout_s: float) -> None:
    end = time.monotonic() + timeout_s
    while not ready():
        assert time.monotonic() < end, f"not within {timeout_s:g} s"
        time.sleep(0.001)  # the processors are for those we wait for


@pytest.mark.parametrize("victim", ["learner", "collector"])
def test_any_party_may_be_killed(victim: str) -> None:
    kill_one(["learner", "collector"].index(victim), 0.001)


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_two_hundred_kills() -> None:
    rng = np.random.default_rng(0)
    took = [kill_one(int(rng.integers(3)), float(rng.uniform(0, 0.02))) for _ in range(200)]
    print({"kills": len(took), "median_s": float(np.median(took)), "most_s": max(took)})
    assert max(took) < 1.0
