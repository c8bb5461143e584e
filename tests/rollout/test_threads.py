"""Threads for calls that may block: none is left behind."""

from __future__ import annotations

import asyncio
import threading

from recollect.rollout.event_loop import Threads


def test_a_thread_whose_loop_stopped_meanwhile_ends_after_its_call() -> None:
    loop, gate, entered = asyncio.new_event_loop(), threading.Event(), threading.Event()
    found: list[threading.Thread] = []

    def work() -> None:
        found.append(threading.current_thread())
        entered.set()
        gate.wait(60.0)

    async def begin() -> None:
        threads = Threads(loop, "busy")
        threads.call(work).add_done_callback(lambda future: None)
        threads.close()

    loop.run_until_complete(begin())
    entered.wait(60.0)
    gate.set()
    found[0].join(60.0)
    assert not found[0].is_alive()
    loop.close()
