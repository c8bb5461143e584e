"""Readers and writers of one process, many at a time: rows are whole, in order, and each call is one moment.

Under ThreadSanitizer (make sanitize) this is what shows it the protocol.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.core.make import stream_at
from tests.core.plain import flat_codec, ints, rows_in_memory

import recollect as rc

WORDS = 40


def run(*works: Callable[[], None]) -> None:
    """Run each in a thread until the first, the writer, ends; raise what any of them raised."""
    errors: list[BaseException] = []

    def guarded(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(w,)) for w in works]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    if errors:
        raise errors[0]


def block(first: int, n: int) -> dict[str, Any]:
    number = np.arange(first, first + n)
    return {"f0": number, "f1": np.repeat(number[:, None], WORDS, 1)}


def check(batch: dict[str, Any]) -> None:
    assert (batch["f1"] == batch["f0"][:, None]).all(), "torn"


@pytest.mark.parametrize("n_lanes", [1, 3])
@pytest.mark.parametrize("tagged", [False, True])
def test_readers_beside_writers(n_lanes: int, tagged: bool) -> None:
    codec, row_nbytes = flat_codec([("int64", ()), ("int64", (WORDS,))])
    rows = rows_in_memory(96, row_nbytes, n_lanes, tagged)
    done = threading.Event()
    lanes_left = list(range(n_lanes))

    def write(lane: int) -> Callable[[], None]:
        def work() -> None:
            rng = np.random.default_rng(lane)
            n = 0
            try:
                while n < 3_000:
                    size = int(rng.integers(1, 12))
                    if size == 1:
                        rows.append(codec, {"f0": np.int64(n), "f1": np.full(WORDS, n)}, lane)
                    else:
                        rows.extend(codec, block(n, size), lane, keep_open=bool(rng.integers(2)))
                    n += size
                    if rng.random() < 0.02:
                        rows.end_segment(lane)
            finally:
                lanes_left.remove(lane)
                if not lanes_left:
                    done.set()

        return work

    def draw() -> None:
        stream = stream_at(1)
        while not done.is_set():
            batch = rows.draw(codec, stream, 16)
            if batch is not None:
                check(batch)

    def read() -> None:
        while not done.is_set():
            n = rows.count()
            try:
                batch = rows.read(codec, np.arange(max(0, n - 20), n))
                where = rows.locate(ints([max(0, n - 1)])) if n else None
            except (IndexError, rc.ContentionError):  # it shrank since it was counted
                continue
            check(batch)
            if n_lanes == 1:
                assert (np.diff(batch["f0"]) == 1).all()
            if where is not None:
                rows.index_of(where[0], where[1])

    def look() -> None:
        while not done.is_set():
            try:
                _, _, starts, lengths, _, _ = rows.segments()
                assert (lengths > 0).all() and (np.diff(starts) > 0).all()
                rows.open_segment(n_lanes - 1)
            except rc.ContentionError:
                continue
            counters = rows.counters()
            assert counters["offered"] == sum(v for k, v in counters.items() if k != "offered")

    run(*(write(k) for k in range(n_lanes)), draw, read, look)
    assert rows.count() == 96


def test_readers_beside_changes_in_place() -> None:
    """set, remove and clear: a reader sees the whole change or none of it."""
    codec, row_nbytes = flat_codec([("int64", ()), ("int64", (WORDS,))])
    rows = rows_in_memory(32, row_nbytes, 1, True)
    done = threading.Event()

    def write() -> None:
        rng = np.random.default_rng(0)
        try:
            n = 0
            for _ in range(400):
                size = int(rng.integers(1, 8))
                rows.extend(codec, block(n, size))
                n += size
                held = rows.count()
                kind = rng.integers(12)
                if kind < 4 and held > 4:
                    rows.remove(ints(np.sort(rng.permutation(held)[:3])))
                elif kind < 8:
                    index = ints(rng.permutation(held)[:3])
                    numbers = rows.read(codec, index)["f0"]
                    rows.overwrite(codec, index, [numbers, np.repeat(numbers[:, None], WORDS, 1)])
                elif kind == 8:
                    rows.clear()
        finally:
            done.set()

    def read() -> None:
        while not done.is_set():
            n = rows.count()
            try:
                batch = rows.read(codec, np.arange(n))
            except (IndexError, rc.ContentionError):
                continue
            check(batch)
            assert (np.diff(batch["f0"]) > 0).all()  # no row twice, none out of order

    run(write, read, read)
    counters = rows.counters()
    assert counters["live"] == rows.count() and counters["dropped"] == 0


def test_threads_share_a_lane() -> None:
    """Each call is atomic: blocks of different threads never interleave."""
    codec, row_nbytes = flat_codec([("int64", ()), ("int64", (WORDS,))])
    rows = rows_in_memory(4 * 50 * 8, row_nbytes)

    def write(k: int) -> Callable[[], None]:
        def work() -> None:
            for i in range(50):
                rows.extend(codec, block(1_000_000 * k + 8 * i, 8))

        return work

    run(*(write(k) for k in range(4)))
    batch = rows.read(codec, np.arange(rows.count()))
    check(batch)
    assert rows.count() == 4 * 50 * 8
    assert (np.diff(batch["f0"].reshape(-1, 8), axis=1) == 1).all()
    for k in range(4):
        mine = batch["f0"][batch["f0"] // 1_000_000 == k]
        assert mine.tolist() == list(range(1_000_000 * k, 1_000_000 * k + 400))


def test_readers_beside_growth() -> None:
    codec, row_nbytes = flat_codec([("int64", ()), ("int64", (WORDS,))])
    rows = rows_in_memory(0, row_nbytes)
    done = threading.Event()

    def write() -> None:
        try:
            for n in range(0, 9_000, 100):
                rows.extend(codec, block(n, 100))
        finally:
            done.set()

    def read() -> None:
        while not done.is_set():
            n = rows.count()
            if n:
                batch = rows.read(codec, ints([0, n // 2, n - 1]))
                check(batch)
                assert batch["f0"].tolist() == [0, n // 2, n - 1]

    run(write, read, read)
    assert rows.count() == 9_000
