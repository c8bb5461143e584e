"""The Carrier protocol: bytes from rank to rank, in order, with every wait bounded."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from typing import Any, Protocol, runtime_checkable

from recollect.errors import ClosedError, DeadlineError, PeerDiedError

ANY = -1
"""Any source, or any tag."""
TIMEOUT = 30.0
MOST_TAG = 0xFFFF
Frame = tuple[int, int, memoryview]  # source, tag, bytes


class SendHandle(Protocol):
    """A send under way; it completes by itself."""

    def is_complete(self) -> bool: ...
    def wait(self, timeout: float = TIMEOUT) -> None: ...


@runtime_checkable
class Carrier(Protocol):
    """Moves frames between ranks; `recollect.testing.CarrierContract` is its public test suite.

    `parts` are buffers, borrowed until `send` returns or the handle completes; what `recv` returns is fresh memory,
    the caller's own. Order is kept per (source, dest, tag). Every wait is finite: DeadlineError says what was awaited.
    A peer that is gone is a PeerDiedError. `close()` wakes waiters with ClosedError.

    A carrier may also have `reconnect(dest, timeout)`, if a lost connection can be made again, `refuse(rank,
    for_ever)`, which closes the connection of a peer that sends rubbish, and `sees_death`, False where a peer's
    death does not show in `alive()`.

    Concurrency: one thread may send while another receives.
    """

    rank: int
    size: int | None
    max_frame: int

    def send(self, dest: int, tag: int, parts: Sequence[Any], timeout: float = TIMEOUT) -> None: ...
    def isend(self, dest: int, tag: int, parts: Sequence[Any]) -> SendHandle: ...
    def recv(
        self, source: int = ANY, tag: int = ANY, timeout: float = TIMEOUT
    ) -> tuple[int, int, memoryview]: ...
    def alive(self) -> frozenset[int]: ...
    def close(self) -> None: ...


class Done:
    """The handle of a send that is complete."""

    def is_complete(self) -> bool:
        return True

    def wait(self, timeout: float = TIMEOUT) -> None:
        check_timeout(timeout)


def is_over(handle: SendHandle) -> bool:
    """Whether a send is complete, or never can be."""
    try:
        return handle.is_complete()
    except (PeerDiedError, ClosedError, DeadlineError):
        return True


def check_timeout(timeout: Any) -> float:
    """Return the seconds if they are finite and not negative; ValueError otherwise."""
    if (
        isinstance(timeout, bool)
        or not isinstance(timeout, int | float)
        or not isfinite(timeout)
        or timeout < 0
    ):
        raise ValueError(f"timeout: must be a finite number of seconds, got {timeout!r}")
    return float(timeout)


def check_tag(tag: Any, *, any_allowed: bool = False) -> int:
    """Return the tag if it may be one."""
    low = ANY if any_allowed else 0
    if isinstance(tag, bool) or not isinstance(tag, int) or not low <= tag <= MOST_TAG:
        raise ValueError(f"tag: must be in [0, {MOST_TAG}], got {tag!r}")
    return tag


def check_rank(rank: Any, size: int | None, name: str = "rank", *, any_allowed: bool = False) -> int:
    """Return the rank if there can be one of that number."""
    low = ANY if any_allowed else 0
    top = 2**31 if size is None else size
    if isinstance(rank, bool) or not isinstance(rank, int) or not low <= rank < top:
        raise ValueError(f"{name}: must be in [0, {top}), got {rank!r}")
    return rank


def named(what: int, word: str) -> str:
    """`rank 3`, or `any rank`."""
    return f"any {word}" if what == ANY else f"{word} {what}"


def awaited(source: int, tag: int) -> str:
    """What a receive waits for, as an error says it."""
    return f"recv of {named(tag, 'tag')} from {named(source, 'rank')}"


def too_late(what: str, timeout: float) -> DeadlineError:
    """The error of a wait whose time is up."""
    return DeadlineError(f"{what}: nothing within {timeout:g} s; is the peer alive and at work?")
