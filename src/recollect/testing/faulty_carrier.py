"""FaultyCarrier: a carrier that drops, repeats, delays, cuts and corrupts frames, by a seed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from recollect.remote.carriers.base import ANY, TIMEOUT, Done, SendHandle

FAULTS = ("drop", "repeat", "delay", "cut", "corrupt")


class FaultyCarrier:
    """Wraps a carrier; what is sent through it may be dropped, repeated, delayed (so reordered), cut or corrupted.

    `rate` is the share of frames that suffer, each by one of `faults`. Equal seeds and calls suffer equally. A delayed
    frame leaves after one to four later sends; `release()` lets all of them go.

    Ownership: does not own the carrier; `close()` closes it.
    Concurrency: one thread sends at a time.

    Example:
        >>> from recollect.remote import LocalCarrier
        >>> from recollect.testing import FaultyCarrier
        >>> a, b = LocalCarrier.group(2)
        >>> faulty = FaultyCarrier(a, seed=0, rate=1.0, faults=("repeat",))
        >>> faulty.send(1, 0, [b"once"])
        >>> [bytes(b.recv(timeout=5.0)[2]) for _ in range(2)]
        [b'once', b'once']
        >>> faulty.close(), b.close()
        (None, None)
    """

    def __init__(self, carrier: Any, seed: int, *, rate: float = 0.2, faults: Sequence[str] = FAULTS) -> None:
        unknown = [fault for fault in faults if fault not in FAULTS]
        if unknown or not faults or not 0 <= rate <= 1:
            raise ValueError(f"faults: must be of {FAULTS} and rate in [0, 1], got {faults} and {rate}")
        self.carrier, self.rate, self.faults = carrier, rate, tuple(faults)
        self.counts = dict.fromkeys(FAULTS, 0)
        self._random = random.Random(seed)
        self._held: list[list[Any]] = []  # [sends to wait for, dest, tag, frame]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.carrier, name)

    def send(self, dest: int, tag: int, parts: Sequence[Any], timeout: float = TIMEOUT) -> None:
        """Send a frame, or not."""
        for frame in self._suffered(dest, tag, b"".join(parts)):
            self.carrier.send(dest, tag, [frame], timeout)
        self._let_go(1, timeout)

    def isend(self, dest: int, tag: int, parts: Sequence[Any]) -> SendHandle:
        """Send a frame, or not; the handle of what was really sent."""
        handle: SendHandle = Done()
        for frame in self._suffered(dest, tag, b"".join(parts)):
            handle = self.carrier.isend(dest, tag, [frame])
        self._let_go(1, 0.0)
        return handle

    def _suffered(self, dest: int, tag: int, frame: bytes) -> list[bytes]:
        if self._random.random() >= self.rate:
            return [frame]
        fault = self._random.choice(self.faults)
        self.counts[fault] += 1
        if fault == "repeat":
            return [frame, frame]
        if fault == "delay":
            later = self._random.randint(1, 4)
            self._held.append([later + 1, dest, tag, frame])  # this send is counted too
        elif fault == "cut":
            return [frame[: self._random.randrange(len(frame) + 1)]]
        elif fault == "corrupt" and frame:
            at = self._random.randrange(len(frame))
            return [frame[:at] + bytes([frame[at] ^ (1 << self._random.randrange(8))]) + frame[at + 1 :]]
        return []

    def _let_go(self, n: int, timeout: float) -> None:
        for held in self._held:
            held[0] -= n
        due = [held for held in self._held if held[0] <= 0]
        self._held = [held for held in self._held if held[0] > 0]
        for _, dest, tag, frame in due:
            self.carrier.isend(dest, tag, [frame])

    def release(self) -> None:
        """Let all delayed frames go."""
        self._let_go(1 << 30, 0.0)

    def recv(self, source: int = ANY, tag: int = ANY, timeout: float = TIMEOUT) -> Any:
        """Receive as the carrier does."""
        return self.carrier.recv(source, tag, timeout)

    def alive(self) -> frozenset[int]:
        """Who is alive, as the carrier says."""
        found: frozenset[int] = self.carrier.alive()
        return found

    def close(self) -> None:
        """Close the carrier; delayed frames are lost."""
        self.carrier.close()
