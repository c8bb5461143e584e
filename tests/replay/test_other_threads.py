"""Another thread changes what a call was given, while the call runs: no crash, and no sample that nobody wrote."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from tests.process.killing import in_child

import recollect as rc
from recollect.errors import RecollectError

N, WIDTH, CAPACITY, ROUNDS = 60_000, 32, 120_000, 15
FAR = 2**40


def values(number: int, n: int = N) -> np.ndarray:
    """Samples of one number, in memory of their own: it is unmapped as soon as nobody has the array."""
    array = np.frombuffer(mmap.mmap(-1, n * WIDTH * 8), np.int64).reshape(n, WIDTH)
    if number:
        array[:] = number
    return array


def buffer_of(capacity: int = CAPACITY) -> rc.ReplayBuffer:
    buffer = rc.ReplayBuffer.create(rc.MemoryStorage, {"x": ((WIDTH,), "int64")}, capacity=capacity)
    buffer.extend({"x": values(1, capacity)})
    return buffer


def check_whole(found: Any) -> None:
    """Each sample has one number, one that was written."""
    assert (found == found[:, :1]).all()
    assert set(np.unique(found[:, 0])) <= {0, 1, 2}


def beside(meanwhile: Callable[[], object], work: Callable[[], object], rounds: int = ROUNDS) -> None:
    """Do `work()` so often, while another thread does `meanwhile()` all the time; what either refuses is no matter."""
    over, begun = threading.Event(), threading.Event()
    wrong: list[BaseException] = []

    def other() -> None:
        try:
            while not over.is_set():
                with suppress(ValueError):
                    meanwhile()
                begun.set()
        except BaseException as error:
            wrong.append(error)
            begun.set()

    thread = threading.Thread(target=other)
    thread.start()
    begun.wait()
    try:
        for _ in range(rounds):
            with suppress(RecollectError, IndexError, ValueError):
                work()
    finally:
        over.set()
        thread.join()
    assert not wrong, wrong


def changes(index: np.ndarray, far: int = FAR) -> Callable[[], None]:
    """Let an index be far outside and right again; numpy copies without the GIL."""
    right, outside = index.copy(), np.full_like(index, far)

    def change() -> None:
        np.copyto(index, outside)
        np.copyto(index, right)

    return change


def replaced_in_extend() -> None:
    buffer, batch = buffer_of(), {"x": values(0)}
    beside(lambda: batch.update(x=values(0)), lambda: buffer.extend(batch))
    check_whole(buffer[...]["x"])


def replaced_in_a_read() -> None:
    buffer, out, index = buffer_of(), {"x": values(0)}, np.arange(N)
    beside(lambda: out.update(x=values(0)), lambda: buffer.get_at(index, out=out))


def index_of_a_read() -> None:
    buffer, index = buffer_of(), np.arange(N)
    beside(changes(index), lambda: check_whole(buffer.get_at(index)["x"]))


def index_of_a_column() -> None:
    buffer, index = buffer_of(), np.arange(N)
    beside(changes(index), lambda: check_whole(buffer.get_column_at(("x",), index)))


def index_of_a_storage() -> None:
    buffer, index = buffer_of(), np.arange(N)
    beside(changes(index), lambda: check_whole(buffer.storage.get(index)["x"]))


def index_of_a_change() -> None:
    buffer, index = buffer_of(), np.arange(N)
    beside(changes(index), lambda: buffer.set_at(index, {"x": values(2)}), 10)
    assert len(buffer) == CAPACITY
    check_whole(buffer[...]["x"])


def index_of_a_removal() -> None:
    buffer, index = buffer_of(), np.arange(0, 2 * N, 2)

    def remove() -> None:
        try:
            buffer.remove_at(index)
        finally:
            if len(buffer) < CAPACITY:
                buffer.extend({"x": values(2, CAPACITY - len(buffer))})

    beside(changes(index), remove, 10)
    assert len(buffer) == CAPACITY
    check_whole(buffer[...]["x"])


def priorities_while_they_are_saved() -> None:
    """Its state is asked for by another thread, as one that writes checkpoints does."""
    buffer = buffer_of()
    sampler = rc.PrioritizedSampler(buffer, N, seed=0)
    batch = {"x": values(2, 64)}

    def draw() -> None:
        buffer.extend(batch)
        check_whole(sampler.sample()["x"])

    beside(sampler.state_dict, draw)


CASES = (
    replaced_in_extend, replaced_in_a_read, index_of_a_read, index_of_a_column,
    index_of_a_storage, index_of_a_change, index_of_a_removal, priorities_while_they_are_saved,
)  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_what_another_thread_changes_meanwhile_crashes_nobody(case: Callable[[], None]) -> None:
    in_child(case)
