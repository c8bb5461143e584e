"""CarrierContract: what every carrier promises, as tests that each implementation inherits."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from time import monotonic
from typing import Any

import numpy as np
import pytest

from recollect.errors import ClosedError, DeadlineError, FrameError, PeerDiedError

SOON = 10.0


def eventually(check: Any, within: float = SOON) -> None:
    """Wait until `check()` is true."""
    end = monotonic() + within
    pause = threading.Event()
    while not check():
        assert monotonic() < end, f"not within {within} s"
        pause.wait(0.005)


class CarrierContract:
    """Inherit it and give `make(n)`: n connected ends, ranks 0 to n - 1, each used by one thread at a time.

    `sees_close`: whether a peer that closes is seen to be gone. `ordered_ranks`: the ranks that `make` gives.
    """

    sees_close = True
    tags = (0, 7, 0xFFFF)

    def make(self, n: int) -> list[Any]:
        """Return n connected ends."""
        raise NotImplementedError

    @pytest.fixture
    def pair(self) -> Iterator[tuple[Any, Any]]:
        ends = self.make(2)
        yield ends[0], ends[1]
        for end in ends:
            end.close()

    @pytest.mark.parametrize("sizes", [(0,), (1,), (63, 65), (5, 0, 7), (1 << 16,), (40, 1 << 20, 3)])
    def test_moves_bytes_in_parts(self, pair: Any, sizes: tuple[int, ...]) -> None:
        a, b = pair
        rng = np.random.default_rng(0)
        parts: list[Any] = [rng.integers(0, 256, size, np.uint8) for size in sizes]
        handle = a.isend(b.rank, 1, parts)
        source, tag, frame = b.recv(timeout=SOON)
        assert (source, tag) == (a.rank, 1)
        assert bytes(frame) == b"".join(part.tobytes() for part in parts)
        handle.wait(SOON)

    def test_what_is_received_is_the_callers_own(self, pair: Any) -> None:
        a, b = pair
        sent = bytearray(b"x" * 100)
        a.send(b.rank, 0, [sent], SOON)
        sent[:] = b"y" * 100
        frame = b.recv(timeout=SOON)[2]
        assert bytes(frame) == b"x" * 100
        assert not frame.readonly
        frame[0] = 1
        a.send(b.rank, 0, [b"z"], SOON)
        assert bytes(b.recv(timeout=SOON)[2]) == b"z"
        assert frame[0] == 1

    def test_order_is_kept_per_tag(self, pair: Any) -> None:
        a, b = pair
        handles = [a.isend(b.rank, self.tags[i % 3], [bytes([i])]) for i in range(60)]
        for tag in reversed(self.tags):
            got = [b.recv(a.rank, tag, SOON)[2][0] for _ in range(20)]
            assert got == [i for i in range(60) if self.tags[i % 3] == tag]
        for handle in handles:
            handle.wait(SOON)

    def test_receives_from_one_source(self) -> None:
        a, b, c = ends = self.make(3)
        try:
            a.send(c.rank, 0, [b"a"], SOON)
            b.send(c.rank, 0, [b"b"], SOON)
            assert bytes(c.recv(b.rank, timeout=SOON)[2]) == b"b"
            assert c.recv(timeout=SOON)[0] == a.rank
        finally:
            for end in ends:
                end.close()

    @pytest.mark.parametrize("timeout", [-1.0, float("nan"), float("inf"), None, "1", True])
    def test_every_wait_is_finite(self, pair: Any, timeout: Any) -> None:
        a, b = pair
        with pytest.raises(ValueError, match="timeout"):
            a.recv(timeout=timeout)
        with pytest.raises(ValueError, match="timeout"):
            a.send(b.rank, 0, [b""], timeout)
        handle = a.isend(b.rank, 0, [b""])
        with pytest.raises(ValueError, match="timeout"):
            handle.wait(timeout)

    def test_a_deadline_says_what_was_awaited(self, pair: Any) -> None:
        a, b = pair
        a.send(b.rank, 0, [b""], SOON)
        start = monotonic()
        with pytest.raises(DeadlineError, match=rf"tag 7.*rank {a.rank}"):
            b.recv(a.rank, 7, 0.05)
        assert 0.04 < monotonic() - start < SOON
        with pytest.raises(DeadlineError):
            a.recv(timeout=0.0)

    @pytest.mark.parametrize(("dest", "tag"), [(-1, 0), (1, -1), (1, 1 << 16), ("1", 0), (True, 0)])
    def test_impossible_addresses_are_refused(self, pair: Any, dest: Any, tag: Any) -> None:
        with pytest.raises(ValueError, match=r"dest|tag"):
            pair[0].send(dest, tag, [b""], 0.1)

    @pytest.mark.parametrize(
        ("source", "tag"), [(-2, 0), ("1", 0), (True, 0), (1, -2), (1, 1 << 16), (1, True)]
    )
    def test_nothing_is_awaited_that_cannot_come(self, pair: Any, source: Any, tag: Any) -> None:
        with pytest.raises(ValueError, match=r"source|tag"):
            pair[0].recv(source, tag, 0.1)

    def test_isend_never_waits_and_completes_by_itself(self, pair: Any) -> None:
        a, b = pair
        a.send(b.rank, 0, [b"here"], SOON)
        b.recv(timeout=SOON)
        block = np.arange(1 << 20, dtype=np.uint8)
        start = monotonic()
        handles = [a.isend(b.rank, 0, [block]) for _ in range(24)]
        assert monotonic() - start < SOON
        for _ in range(24):
            assert b.recv(timeout=SOON)[2] == block.data
        eventually(lambda: all(handle.is_complete() for handle in handles))

    def test_a_frame_too_large_is_refused(self, pair: Any) -> None:
        a, b = pair
        with pytest.raises(FrameError, match=str(a.max_frame)):
            a.send(b.rank, 0, [np.zeros(a.max_frame + 1, np.uint8)], SOON)
        handle = a.isend(b.rank, 0, [np.ones(a.max_frame, np.uint8)])
        assert b.recv(timeout=SOON)[2].nbytes == a.max_frame
        handle.wait(SOON)

    def test_one_thread_sends_while_another_receives(self, pair: Any) -> None:
        a, b = pair
        n = 200

        def echo() -> None:
            for _ in range(n):
                source, tag, frame = b.recv(timeout=SOON)
                b.send(source, tag, [frame], SOON)

        def send() -> None:
            for i in range(n):
                a.send(b.rank, 0, [i.to_bytes(4, "little"), bytes(i)], SOON)

        threads = [threading.Thread(target=work, daemon=True) for work in (echo, send)]
        for thread in threads:
            thread.start()
        got = [int.from_bytes(a.recv(timeout=SOON)[2][:4], "little") for _ in range(n)]
        assert got == list(range(n))
        for thread in threads:
            thread.join(SOON)

    def test_close_wakes_who_waits(self, pair: Any) -> None:
        a, _ = pair
        caught: list[Exception] = []
        began = threading.Event()

        def wait() -> None:
            began.set()
            try:
                a.recv(timeout=6 * SOON)
            except Exception as error:
                caught.append(error)

        thread = threading.Thread(target=wait, daemon=True)
        thread.start()
        began.wait(SOON)
        a.close()
        thread.join(SOON)
        assert [type(error) for error in caught] == [ClosedError]
        with pytest.raises(ClosedError):
            a.recv(timeout=0.1)
        a.close()

    def test_who_spoke_and_who_heard_it_are_alive(self, pair: Any) -> None:
        a, b = pair
        a.send(b.rank, 0, [b"hello"], SOON)
        b.recv(timeout=SOON)
        eventually(lambda: {a.rank, b.rank} <= a.alive() & b.alive())

    def test_a_peer_that_closes_is_gone(self, pair: Any) -> None:
        if not self.sees_close:
            pytest.skip("this carrier does not see a peer that closes")
        a, b = pair
        a.send(b.rank, 0, [b"last"], SOON)
        with ThreadPoolExecutor(1) as beside:
            waits = beside.submit(b.recv, a.rank, 7, 2 * SOON)
            eventually(lambda: a.rank in b.alive())
            a.close()
            with pytest.raises(PeerDiedError, match=f"rank {a.rank}"):
                waits.result(SOON)
        eventually(lambda: a.rank not in b.alive())
        assert bytes(b.recv(a.rank, timeout=SOON)[2]) == b"last"
        with pytest.raises(PeerDiedError, match=f"rank {a.rank}"):
            b.recv(a.rank, timeout=SOON)
        with pytest.raises((PeerDiedError, DeadlineError)), suppress(ClosedError):
            b.send(a.rank, 0, [b"to nobody"], 0.2)
