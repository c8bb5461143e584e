"""RolloutRingBuffer: slots, views and copies in one process; order, back-pressure, laps and deaths between several."""

from __future__ import annotations

import os
import pickle
import signal
import threading
from collections import deque
from time import monotonic_ns
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.process.actor import Actor
from tests.timing import Stopwatch

import recollect as rc
from recollect.ipc.rollout_ring_buffer import RolloutRingBuffer
from recollect.memory.ring import Ring

N, T, O, A = 3, 4, 5, 2
PLAIN = ["log_probs", "rewards", "dones", "truncated"]


def ring_of(**kwargs: Any) -> RolloutRingBuffer:
    return RolloutRingBuffer(N, T, O, A, **{"deadline": 5.0, **kwargs})


def fill(ring: RolloutRingBuffer, number: int) -> None:
    """A rollout that can tell whether it is whole: every cell of every field says its number and its place."""
    for i, (name, array) in enumerate(ring.write_buffer.items()):
        cells = np.arange(array.size).reshape(array.shape) % 7
        array[...] = (number % 1000) * 64 + i * 8 + cells if name != "final_count" else number % 5


def write(ring: RolloutRingBuffer, number: int) -> None:
    fill(ring, number)
    ring.signal_write_done(version=number)


def number_in(views: dict[str, Any], names: list[str] | None = None) -> int:
    """The number of a rollout, after checking every byte of it."""
    first = int(np.asarray(views["obs"]).flat[0]) // 64
    for i, name in enumerate(names or views):
        array = np.asarray(views[name])
        if name == "final_count":
            continue
        wanted = first * 64 + i * 8 + np.arange(array.size).reshape(array.shape) % 7
        assert (array == wanted).all(), f"torn: {name} of rollout {first}"
    return first


def read(ring: RolloutRingBuffer) -> int:
    found = number_in(ring.read_numpy_views())
    assert ring.read_info.version % 1000 == found
    ring.advance_read()
    return found


class TestSlots:
    def test_fields_and_shapes(self) -> None:
        base = {"obs": (N, T, O), "actions": (N, T, A), **dict.fromkeys(PLAIN, (N, T)), "last_obs": (N, O)}
        with ring_of() as ring:
            assert ring.slot_shapes == base
            assert {n: a.shape for n, a in ring.write_buffer.items()} == base
            assert all(a.dtype == np.float32 for a in ring.write_buffer.values())
        with ring_of(critic_dim=6, order="time", finals=True, fields={"valid": ((), "bool"), "h": ((2, 2), "int16")},
                     dtypes={"obs": "uint8", "actions": "int64"}) as ring:  # fmt: skip
            assert ring.slot_shapes == {
                "obs": (T, N, O), "actions": (T, N, A), **dict.fromkeys(PLAIN, (T, N)),
                "last_obs": (N, O), "critic": (T, N, 6), "last_critic": (N, 6), "valid": (T, N), "h": (T, N, 2, 2),
                "final_obs": (T * N, O), "final_index": (T * N,), "final_count": (), "final_critic": (T * N, 6),
            }  # fmt: skip
            env = ring_of(critic_dim=6, finals=True, fields={"valid": ((), "bool"), "h": ((2, 2), "int16")})
            assert env.slot_shapes == {
                name: (N, T, *shape[2:]) if shape[:2] == (T, N) else shape
                for name, shape in ring.slot_shapes.items()
            }
            env.close()
            kinds = {name: a.dtype.name for name, a in ring.write_buffer.items()}
            assert {kinds[n] for n in ("obs", "last_obs", "final_obs")} == {"uint8"}
            assert (kinds["actions"], kinds["valid"], kinds["h"], kinds["final_index"]) == (
                "int64",
                "bool",
                "int16",
                "int64",
            )

    def test_a_step_is_one_block_in_either_order(self) -> None:
        with ring_of() as env, ring_of(order="time") as time:
            assert env.write_buffer["obs"][:, 1].strides == time.write_buffer["obs"][1].strides == (4 * O, 4)
            assert time.write_buffer["obs"][1].flags.c_contiguous

    def test_either_side_chooses_its_order(self) -> None:
        with ring_of(order="time") as writer, ring_of(create=False, shm_name_prefix=writer.name) as reader:
            write(writer, 3)
            views = reader.read_numpy_views()
            assert views["obs"].shape == (N, T, O)
            turned = {n: v if n == "last_obs" else v.swapaxes(0, 1) for n, v in views.items()}
            assert number_in(turned) == 3

    def test_obs_may_have_a_shape(self) -> None:
        with RolloutRingBuffer(N, T, (2, 3), A, finals=True) as ring:
            shapes = ring.slot_shapes
            assert shapes["obs"] == (N, T, 2, 3) and shapes["last_obs"] == (N, 2, 3)
            assert shapes["final_obs"] == (N * T, 2, 3)

    def test_the_count_of_finals_starts_at_zero(self) -> None:
        with ring_of(finals=True, num_slots=2) as ring:
            for _ in range(5):
                assert int(ring.write_buffer["final_count"]) == 0
                ring.write_buffer["final_count"][...] = 3
                ring.signal_write_done()
                assert int(ring.read_numpy_views()["final_count"]) == 3
                ring.advance_read()

    @pytest.mark.parametrize(
        ("wrong", "text"),
        [
            ({"num_slots": 1}, "num_slots: must be an int of at least 2"),
            ({"policy": "drop"}, "policy"),
            ({"order": "T"}, "order"),
            ({"critic_dim": -1}, "critic_dim"),
            ({"deadline": float("inf")}, "deadline"),
            ({"fields": {"obs": ((), "bool")}}, "obs"),
            ({"fields": {"x": "bool"}}, "fields"),
            ({"dtypes": {"reward": "float64"}}, "dtypes: must name fields of the slot, got 'reward'"),
            ({"lane": 1}, "lane"),
            ({"create": False}, "shm_name_prefix"),
        ],
    )
    def test_refusals(self, wrong: dict[str, Any], text: str) -> None:
        with pytest.raises(ValueError, match=text):
            ring_of(**wrong)

    def test_attach_names_the_first_difference(self) -> None:
        with ring_of(num_lanes=2) as ring:
            for wrong, text in (
                ({"num_lanes": 1}, "num_lanes must be 1, found 2"),
                ({"num_lanes": 2, "num_slots": 8}, "num_slots must be 8, found 4"),
                (
                    {"num_lanes": 2, "dtypes": {"rewards": "float64"}},
                    "rewards: dtype must be float64, found float32",
                ),
                ({"num_lanes": 2, "critic_dim": 1}, "fields must be"),
            ):
                with pytest.raises(rc.AttachError, match=text):
                    ring_of(create=False, shm_name_prefix=ring.name, **wrong)
            with pytest.raises(rc.AttachError, match="obs: shape must be"):
                RolloutRingBuffer(N, T, O + 1, A, create=False, shm_name_prefix=ring.name, num_lanes=2)
            assert len(set(ring.name.values())) == 1 and set(ring.name) == set(ring.slot_shapes)
        with (
            Ring.create({"x": ((), "int64")}, 2) as other,
            pytest.raises(rc.AttachError, match="another ring"),
        ):
            ring_of(create=False, shm_name_prefix=other.name)

    def test_a_lane_of_its_own(self) -> None:
        with ring_of(num_lanes=3, lane=1) as ring:
            write(ring, 1)
            with ring_of(create=False, shm_name_prefix=ring.name, num_lanes=3, lane=2) as other:
                write(other, 2)
                assert ring.available() == ring.stats().available == 2
                for lane, number in ((1, 1), (2, 2)):
                    assert ring.read_info.lane == lane and read(ring) == number
            for bad in (3, -1, None, True):
                with pytest.raises((ValueError, TypeError), match="lane"):
                    ring.on_lane(bad)  # type: ignore[arg-type]


class TestWriter:
    def test_the_same_slot_until_it_is_published(self) -> None:
        with ring_of() as ring:
            first, buffer = ring.write_slot, ring.write_buffer
            assert ring.write_slot == first and ring.write_buffer is buffer
            ring.signal_write_done()
            assert ring.write_slot != first

    def test_published_arrays_turn_read_only(self) -> None:
        with ring_of() as ring:
            arrays = dict(ring.write_buffer)
            write(ring, 1)
            for array in arrays.values():
                with pytest.raises(ValueError, match="read-only"):
                    array[...] = 0
            assert read(ring) == 1

    def test_nothing_claimed(self) -> None:
        with ring_of() as ring, pytest.raises(rc.EmptyError, match="signal_write_done: .* write_buffer"):
            ring.signal_write_done()

    def test_a_full_ring_blocks_until_the_deadline(self) -> None:
        with ring_of(num_slots=2, deadline=0.05) as ring:
            write(ring, 1)
            write(ring, 2)
            with pytest.raises(rc.DeadlineError):
                ring.write_buffer
            assert read(ring) == 1
            write(ring, 3)
            assert [read(ring), read(ring)] == [2, 3]

    def test_a_blocked_writer_is_woken_by_advance_read(self) -> None:
        with ring_of(num_slots=2, deadline=20.0) as ring:
            write(ring, 1)
            write(ring, 2)
            thread = threading.Thread(target=write, args=(ring, 3))
            thread.start()
            assert [read(ring), read(ring)] == [1, 2]
            assert ring.wait_for_data(10.0)
            thread.join(10)
            assert read(ring) == 3

    def test_release_lane_frees_what_was_not_published(self) -> None:
        with ring_of() as ring:
            fill(ring, 1)
            ring.release_lane()
            with pytest.raises(rc.EmptyError):
                ring.signal_write_done()
            assert ring.stats().written == 0


class TestReader:
    def test_empty(self) -> None:
        with ring_of() as ring:
            assert ring.wait_for_data(0.0) is False and ring.available() == 0
            for call in (
                lambda: ring.read_slot,
                lambda: ring.read_info,
                lambda: ring.read_torch("cpu"),
                lambda: ring.copy_read_slot_to_torch({}),
                ring.read_numpy_views,
                ring.advance_read,
            ):
                with pytest.raises(rc.EmptyError, match=r"call wait_for_data\(\) first"):
                    call()

    @pytest.mark.parametrize("timeout", [float("nan"), float("inf"), -1.0])
    def test_bad_timeouts(self, timeout: float) -> None:
        with ring_of() as ring:
            for _ in range(2):  # the second time while a rollout is being read
                with pytest.raises(ValueError, match="timeout"):
                    ring.wait_for_data(timeout)
                write(ring, 1)
                ring.read_slot

    def test_the_oldest_is_kept_until_advance(self) -> None:
        with ring_of() as ring:
            before = monotonic_ns()
            write(ring, 1)
            after = monotonic_ns()
            slot = ring.read_slot
            assert ring.wait_for_data(0.0) and ring.available() == 1
            write(ring, 2)
            assert ring.read_slot == slot and ring.available() == 2
            info = ring.read_info
            assert (info.lane, info.version) == (0, 1) and info.sequence < 3
            assert before <= info.committed_ns <= after
            assert read(ring) == 1
            assert ring.read_info.sequence > info.sequence
            assert ring.available() == 1

    def test_advance_without_reading_skips_and_counts(self) -> None:
        with ring_of() as ring:
            write(ring, 1)
            write(ring, 2)
            ring.advance_read()
            assert read(ring) == 2
            stats = ring.stats()
            assert (stats.written, stats.delivered, stats.skipped, stats.available) == (2, 1, 1, 0)

    def test_views_are_borrowed_and_read_only(self) -> None:
        with ring_of() as ring:
            write(ring, 1)
            for view in ring.read_numpy_views().values():
                assert not view.flags.writeable and not view.flags.owndata

    @pytest.mark.parametrize("order", ["env", "time"])
    @pytest.mark.parametrize("device", ["cpu", "numpy"])
    def test_read_torch_gives_new_contiguous_tensors(self, order: str, device: str) -> None:
        with ring_of(order=order, num_slots=2, critic_dim=2, finals=True) as ring:
            write(ring, 1)
            found = ring.read_torch(device)
            ring.advance_read()
            for number in (2, 3, 4):
                write(ring, number)
                ring.advance_read()
            assert number_in(found) == 1
            for x in found.values():
                assert isinstance(x, torch.Tensor if device == "cpu" else np.ndarray)
                assert x.is_contiguous() if device == "cpu" else x.flags.c_contiguous

    def test_another_device(self) -> None:
        """Of `meta`, which nothing can be read of, but which has no memory on the host either."""
        with ring_of() as ring:
            write(ring, 5)
            found = ring.read_torch("meta")
            assert {n: tuple(x.shape) for n, x in found.items()} == ring.slot_shapes
            assert all(x.device.type == "meta" and x.is_contiguous() for x in found.values())
            ring.copy_read_slot_to_torch(found)
            ring.copy_read_slot_to_torch(into := {n: torch.zeros(s) for n, s in ring.slot_shapes.items()})
            assert number_in(into) == 5

    def test_copy_into_a_tensor_whose_memory_is_not_its_value(self) -> None:
        with ring_of() as ring:
            write(ring, 5)
            into = {n: torch.zeros(s) for n, s in ring.slot_shapes.items()}
            into["obs"] = torch.zeros(ring.slot_shapes["obs"], dtype=torch.complex64).conj().imag
            assert into["obs"].is_neg()
            ring.copy_read_slot_to_torch(into)
            assert number_in({n: x.resolve_neg() for n, x in into.items()}) == 5

    @pytest.mark.parametrize("order", ["env", "time"])
    def test_copy_into_tensors_of_any_strides(self, order: str) -> None:
        with ring_of(order=order) as ring:
            for kind in ("contiguous", "strided", "numpy"):
                write(ring, 5)
                into: dict[str, Any] = {}
                for name, shape in ring.slot_shapes.items():
                    big = torch.zeros((shape[0], 2 * shape[1], *shape[2:]))
                    into[name] = {
                        "contiguous": torch.zeros(shape),
                        "strided": big[:, ::2],
                        "numpy": np.zeros(shape, "f4"),
                    }[kind]
                into["other"] = torch.zeros(1)
                ring.copy_read_slot_to_torch(into)
                ring.advance_read()
                assert into.pop("other").item() == 0
                assert number_in(into) == 5

    def test_copy_checks_everything_before_the_first_byte(self) -> None:
        with ring_of() as ring:
            write(ring, 5)
            for wrong, error in (
                (None, KeyError),
                (torch.zeros(N, O + 1), ValueError),
                (torch.zeros(N, O, dtype=torch.float64), TypeError),
                ([1.0], ValueError),
                (np.broadcast_to(np.float32(0), (N, O)), ValueError),
            ):
                into: dict[str, Any] = {name: torch.zeros(shape) for name, shape in ring.slot_shapes.items()}
                if wrong is None:
                    del into["last_obs"]  # the last field
                else:
                    into["last_obs"] = wrong
                with pytest.raises(error, match="last_obs"):
                    ring.copy_read_slot_to_torch(into)
                assert all(not x.any() for name, x in into.items() if name != "last_obs")
            assert read(ring) == 5

    def test_small_dtypes_survive(self) -> None:
        with ring_of(dtypes={"rewards": "bfloat16"}) as ring:
            ring.write_buffer["rewards"][...] = 1.5
            ring.signal_write_done()
            assert ring.read_torch("cpu")["rewards"].dtype == torch.bfloat16
            into = {
                n: torch.zeros(s, dtype=torch.bfloat16 if n == "rewards" else torch.float32)
                for n, s in ring.slot_shapes.items()
            }
            ring.copy_read_slot_to_torch(into)
            assert (into["rewards"] == 1.5).all()


class TestPolicies:
    @pytest.mark.parametrize(("policy", "then"), [("drop_oldest", [5]), ("drop_newest", [])])
    def test_what_is_being_read_is_never_dropped(self, policy: str, then: list[int]) -> None:
        with ring_of(policy=policy, num_slots=2) as ring:
            write(ring, 1)
            views = ring.read_numpy_views()
            for number in (2, 3, 4, 5):
                write(ring, number)
                assert number_in(views) == 1
            ring.advance_read()
            assert [read(ring) for _ in range(ring.available())] == then

    @given(
        st.sampled_from(["block", "drop_oldest", "drop_newest"]),
        st.integers(2, 4),
        st.lists(st.sampled_from(["write", "read", "skip", "take"]), max_size=40),
    )
    def test_against_a_list(self, policy: str, num_slots: int, ops: list[str]) -> None:
        model: deque[int] = deque()
        taken: int | None = None
        counts = {"written": 0, "delivered": 0, "dropped": 0, "skipped": 0}
        with ring_of(policy=policy, num_slots=num_slots, deadline=0.0) as ring:
            for number, op in enumerate(ops, 1):
                if op == "write":
                    used = len(model) + (taken is not None)
                    if policy == "block" and used == num_slots:
                        with pytest.raises(rc.DeadlineError):
                            ring.write_buffer
                        continue
                    if policy == "drop_oldest" and used == num_slots:
                        model.popleft()
                        counts["dropped"] += 1
                    write(ring, number)
                    counts["written"] += 1
                    if policy == "drop_newest" and used >= num_slots - 1:
                        counts["dropped"] += 1
                    else:
                        model.append(number)
                    continue
                if op in ("read", "take") and taken is None:
                    if not model:
                        with pytest.raises(rc.EmptyError):
                            ring.read_slot
                        continue
                    taken = model.popleft()
                    assert number_in(ring.read_numpy_views()) == taken
                if op == "take":
                    continue
                if taken is None and not model:
                    with pytest.raises(rc.EmptyError):
                        ring.advance_read()
                    continue
                counts["delivered" if taken is not None else "skipped"] += 1
                if taken is None:
                    model.popleft()
                taken = None
                ring.advance_read()
            stats = ring.stats()
            assert {name: getattr(stats, name) for name in counts} == counts
            assert ring.available() == stats.available == len(model) + (taken is not None)
            assert stats.written == stats.delivered + stats.dropped + stats.skipped + stats.available


class TestLife:
    def test_closed(self) -> None:
        ring = ring_of()
        other = pickle.loads(pickle.dumps(ring))
        write(ring, 1)
        views = other.read_numpy_views()
        other.write_buffer
        ring.cleanup()
        ring.cleanup()
        ring.close()
        assert number_in(views) == 1  # late reads give old bytes
        for r in (ring, other):
            for call in (
                lambda: r.write_buffer,  # noqa: B023
                lambda: r.write_slot,  # noqa: B023
                lambda: r.read_slot,  # noqa: B023
                lambda: r.read_info,  # noqa: B023
                lambda: r.wait_for_data(0.0),  # noqa: B023
                lambda: r.name,  # noqa: B023
                lambda: r.nbytes,  # noqa: B023
                lambda: r.on_lane(0),  # noqa: B023
                lambda: r.read_torch("cpu"),  # noqa: B023
                lambda: r.copy_read_slot_to_torch({}),  # noqa: B023
                lambda: pickle.dumps(r),  # noqa: B023
                r.available,
                r.advance_read,
                r.stats,
                r.signal_write_done,
                r.release_lane,
                r.read_numpy_views,
            ):
                with pytest.raises(rc.ClosedError):
                    call()
        other.close()

    def test_stats_are_a_frozen_record(self) -> None:
        with ring_of() as ring:
            for stats in (ring.stats(), ring.stats().lanes[0]):
                with pytest.raises(AttributeError):
                    stats.written = 1  # type: ignore[misc]

    def test_a_handle_is_small_and_keeps_lane_and_order(self) -> None:
        with ring_of(num_lanes=3, order="time", finals=True) as ring:
            with ring.on_lane(2) as lane:
                data = pickle.dumps(lane)
            assert len(data) < 300
            again = pickle.loads(data)
            write(again, 4)
            assert again.order == "time" and ring.read_info.lane == 2
            again.close()
            ring.attach_sync_primitives(None, None)

    def test_a_handle_keeps_the_deadline(self) -> None:
        with ring_of(deadline=0.01, num_slots=2) as ring:
            again = pickle.loads(pickle.dumps(ring))
            for number in (1, 2):
                write(again, number)
            with pytest.raises(rc.DeadlineError, match=r"within 0.01 s"):
                again.write_buffer
            again.close()


@pytest.mark.process
class TestProcesses:
    def test_two_lanes_merge_in_commit_order(self) -> None:
        with ring_of(num_lanes=2, num_slots=3) as ring:
            children = [Actor(write=lambda n, k=k: write(ring.on_lane(k), n)) for k in range(2)]
            for number, lane in enumerate([0, 1, 1, 0, 1], 1):
                children[lane].do("write", number)
            lanes = []
            for number in range(1, 6):
                lanes.append(ring.read_info.lane)
                assert read(ring) == number
            assert lanes == [0, 1, 1, 0, 1]
            stats = ring.stats()
            assert [lane.written for lane in stats.lanes] == [2, 3] and stats.delivered == 5
            for child in children:
                child.kill()

    def test_a_lane_has_one_writer(self) -> None:
        with ring_of() as ring:
            child = Actor(write=lambda n: write(ring, n))
            child.do("write", 1)
            with pytest.raises(rc.LaneBusyError, match=str(child.pid)):
                ring.write_buffer
            child.kill()
            write(ring, 2)  # the dead are replaced silently
            assert [read(ring), read(ring)] == [1, 2]

    @pytest.mark.parametrize("policy", ["drop_oldest", "drop_newest"])
    def test_a_writer_that_laps_a_slow_reader_tears_nothing(self, policy: str) -> None:
        def lap(n: int) -> int:
            for number in range(1, n + 1):
                write(ring, number)
            return n

        with RolloutRingBuffer(16, 8, 32, 2, num_slots=3, policy=policy) as ring:
            child = Actor(lap=lap)
            child.tell("lap", 4000)
            seen: list[int] = []
            while ring.stats().written < 4000 or ring.available():
                if not ring.wait_for_data(0.01):
                    continue
                version = ring.read_info.version
                copy = ring.read_torch("numpy")
                views = ring.read_numpy_views()
                assert number_in(copy) == number_in(views) == version % 1000
                ring.advance_read()
                seen.append(version)
            assert child.answer() == 4000
            stats = ring.stats()
            assert seen == sorted(set(seen)) and stats.delivered == len(seen)
            assert stats.written == 4000 == stats.delivered + stats.dropped
            assert stats.dropped > 0
            child.kill()

    def test_block_loses_nothing(self) -> None:
        def feed(n: int) -> None:
            for number in range(1, n + 1):
                write(ring, number)

        with ring_of(num_slots=2, deadline=30.0) as ring:
            child = Actor(feed=feed)
            child.tell("feed", 3000)
            for number in range(1, 3001):
                assert ring.wait_for_data(30.0)
                assert ring.read_info.version == number and read(ring) == number % 1000
            child.answer()
            child.kill()

    def test_a_writer_killed_in_the_middle_costs_its_rollout(self) -> None:
        def die_writing(n: int) -> None:
            write(ring, n)
            fill(ring, n + 1)
            os.kill(os.getpid(), signal.SIGKILL)

        with ring_of(num_slots=2) as ring:
            child = Actor(go=die_writing)
            child.tell("go", 1)
            assert ring.wait_for_data(20.0) and read(ring) == 1
            start = Stopwatch()
            with pytest.raises(rc.PeerDiedError):
                ring.wait_for_data(20.0)
            assert start.s < 1.0
            child.kill()
            for number in (2, 3, 4):
                write(ring, number)
                assert read(ring) == number
            assert (ring.stats().abandoned, ring.stats().written) == (1, 4)

    def test_a_reader_killed_in_the_middle_is_delivered_again(self) -> None:
        with ring_of(num_slots=2, deadline=20.0) as ring:
            child = Actor(take=lambda: number_in(ring.read_numpy_views()))
            write(ring, 1)
            assert child.do("take") == 1
            write(ring, 2)
            child.kill()
            with pytest.raises(rc.PeerDiedError):  # nobody will ever free a slot
                ring.write_buffer
            assert [read(ring), read(ring)] == [1, 2]

    @pytest.mark.parametrize("lanes", [1, 2])
    def test_who_waits_hears_of_what_a_killed_reader_held(self, lanes: int) -> None:
        """The only rollout there is: no other wakes who waits for it."""
        with ring_of(num_slots=2, num_lanes=lanes, lane=lanes - 1) as ring:
            child = Actor(take=lambda: number_in(ring.read_numpy_views()))
            write(ring, 1)
            assert child.do("take") == 1
            assert not ring.wait_for_data(0.0)  # it is held by a live one
            child.kill()
            assert ring.wait_for_data(0.0) and ring.available() == 1
            assert read(ring) == 1
            assert not ring.wait_for_data(0.0) and ring.stats().delivered == 1

    def test_closing_wakes_a_waiting_writer_and_reader(self) -> None:
        def wait_to_write() -> str:
            try:
                for number in range(10):
                    write(ring, number)
            except rc.ClosedError:
                return "closed"
            return "wrote"

        with ring_of(num_slots=2, deadline=30.0) as ring:
            child = Actor(go=wait_to_write)
            child.tell("go")
            assert ring.wait_for_data(20.0)
            ring.cleanup()
            assert child.answer(5.0) == "closed"
            child.kill()
