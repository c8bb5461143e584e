"""FaultyCarrier: each fault does what its name says, as often as told, and the same for the same seed."""

from __future__ import annotations

from typing import Any

import pytest

from recollect.testing import FaultyCarrier
from recollect.testing.faulty_carrier import FAULTS

FRAMES = [bytes([i]) * 20 for i in range(40)]


class Kept:
    """A carrier that keeps what it is given."""

    def __init__(self) -> None:
        self.frames: list[bytes] = []

    def send(self, dest: int, tag: int, parts: Any, timeout: float = 30.0) -> None:
        self.frames.append(b"".join(parts))

    def isend(self, dest: int, tag: int, parts: Any) -> None:
        self.frames.append(b"".join(parts))


def received(
    faults: Any = FAULTS, rate: float = 1.0, seed: int = 0, is_async: bool = False
) -> tuple[list[bytes], dict[str, int]]:
    """What comes out when all frames go in, and what they suffered."""
    kept = Kept()
    faulty = FaultyCarrier(kept, seed, rate=rate, faults=faults)
    for frame in FRAMES:
        (faulty.isend if is_async else faulty.send)(1, 0, [frame[:5], frame[5:]])
    faulty.release()
    return kept.frames, faulty.counts


def test_drop() -> None:
    assert received(("drop",))[0] == []


def test_the_handle_of_a_dropped_frame_is_complete_and_waits_no_longer_than_others() -> None:
    handle = FaultyCarrier(Kept(), 0, rate=1.0, faults=("drop",)).isend(1, 0, [b"x"])
    assert handle.is_complete()
    handle.wait(0.0)
    with pytest.raises(ValueError, match="timeout"):
        handle.wait(float("inf"))


def test_repeat() -> None:
    assert received(("repeat",))[0] == [frame for frame in FRAMES for _ in range(2)]


def test_delay_reorders_and_loses_nothing() -> None:
    got, _ = received(("delay",))
    assert sorted(got) == FRAMES
    mixed, _ = received(("delay",), rate=0.3)
    assert sorted(mixed) == FRAMES and mixed != FRAMES


def test_a_delayed_frame_leaves_when_it_is_released() -> None:
    for seed in range(20):
        kept = Kept()
        faulty = FaultyCarrier(kept, seed, rate=1.0, faults=("delay",))
        faulty.send(1, 0, [b"late"])
        assert kept.frames == [], seed
        faulty.release()
        assert kept.frames == [b"late"], seed


def test_cut() -> None:
    got, _ = received(("cut",))
    assert len(got) == len(FRAMES) and got != FRAMES
    assert all(frame.startswith(part) for frame, part in zip(FRAMES, got))


def test_corrupt_turns_one_bit() -> None:
    got, _ = received(("corrupt",))
    for frame, other in zip(FRAMES, got, strict=True):
        turned = int.from_bytes(frame, "big") ^ int.from_bytes(other, "big")
        assert turned.bit_count() == 1


@pytest.mark.parametrize("is_async", [False, True])
def test_equal_seeds_suffer_equally(is_async: bool) -> None:
    first, counts = received(rate=0.5, seed=3, is_async=is_async)
    assert received(rate=0.5, seed=3, is_async=is_async) == (first, counts)
    assert received(rate=0.5, seed=4, is_async=is_async)[0] != first
    assert 5 < sum(counts.values()) < 35


def test_nothing_suffers_at_rate_zero() -> None:
    assert received(rate=0.0) == (FRAMES, dict.fromkeys(FAULTS, 0))


@pytest.mark.parametrize("wrong", [{"rate": 1.5}, {"faults": ("burn",)}, {"faults": ()}])
def test_faults_and_rates_that_cannot_be(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="faults"):
        FaultyCarrier(Kept(), 0, **wrong)
