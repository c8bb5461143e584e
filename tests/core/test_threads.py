"""Two writers and two readers of one process at once: every sample that is read is whole."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.core.make import make_rows, stream_at

from recollect import _core
from recollect.errors import ContentionError, SegmentOpenError

N_WORDS = 64
RUN = 128  # rows of a lane
ROUNDS = 120  # of a writer
INT = np.dtype(np.int64)
STEPS = np.arange(1, N_WORDS, dtype=np.int64) * 0x1E3779B97F4A7C15
CODEC = _core.Codec([(0, INT, (), False), (8, INT, (N_WORDS - 1,), False)], None, 8 * N_WORDS)


def block(first: int, n: int) -> list[np.ndarray]:
    """Samples that carry their own check: each word follows from the first."""
    ids = np.arange(first, first + n)
    with np.errstate(over="ignore"):
        return [ids, (ids[:, None] + 1) * STEPS]


def check(got: list[np.ndarray]) -> None:
    with np.errstate(over="ignore"):
        torn = np.flatnonzero((got[1] != (got[0][:, None] + 1) * STEPS).any(axis=1))
    assert torn.size == 0, f"torn: {got[0][torn]}"


def together(*works: Callable[[], None]) -> None:
    """Run all at once; the first that fails ends them."""
    failed: list[BaseException] = []
    start = threading.Barrier(len(works))

    def run(work: Callable[[], None]) -> None:
        try:
            start.wait()
            work()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]


class Run:
    """Writers on their own lanes, who now and then change what is there, and readers beside them."""

    def __init__(self, tagged: bool) -> None:
        self.rows = make_rows(8 * N_WORDS, 2 * RUN, 2, tagged)
        self.writing = 2
        self.n_read = 0
        self.n_changed = 0

    def write(self, lane: int) -> None:
        rng = np.random.default_rng(lane)
        at = lane << 32
        try:
            for i in range(ROUNDS):
                n = int(rng.choice([1, 3, 40, 64, 100, RUN + 5]))
                ends = rng.random(n) < 0.1
                self.rows.write(CODEC, block(at, n), n, lane, ends, bool(i % 3))
                at += n
                if i % 7 == 0:
                    self.change(rng, lane)
            self.rows.end_segment(lane)
        finally:
            self.writing -= 1

    def change(self, rng: Any, lane: int) -> None:
        n = self.rows.count()
        index = np.unique(rng.integers(0, n, 5)) if n else np.zeros(0, np.int64)
        try:
            self.rows.overwrite(CODEC, index, block(int(rng.integers(0, 1 << 40)), len(index)))
            self.rows.end_segment(lane)
            self.rows.remove(index)
            self.n_changed += 1
        except (IndexError, SegmentOpenError):
            pass  # the other writer was quicker

    def read(self, seed: int) -> None:
        stream = stream_at(seed)
        while self.writing or not self.n_read:  # it may have had no turn while they wrote
            drawn = self.rows.draw(CODEC, stream, 100)
            if drawn is None:
                continue
            check(drawn)
            try:
                check(self.rows.read(CODEC, np.arange(self.rows.count())))
                row, generation, *_ = self.rows.locate(np.arange(3))
            except IndexError:
                continue  # it has become shorter
            self.rows.index_of(row, generation)
            self.rows.segments()
            check(self.rows.read_rows(CODEC, row))
            self.n_read += 1


@pytest.mark.parametrize("tagged", [False, True])
def test_readers_beside_writers_see_whole_samples(tagged: bool) -> None:
    run = Run(tagged)
    together(lambda: run.write(0), lambda: run.write(1), lambda: run.read(1), lambda: run.read(2))
    assert run.n_read and run.n_changed
    check(run.rows.read(CODEC, np.arange(run.rows.count())))
    counts = run.rows.counters()
    assert counts["live"] == run.rows.count() and counts["dropped"] == 0
    assert counts["offered"] == counts["live"] + counts["evicted"] + counts["removed"]


def test_a_read_is_of_one_moment() -> None:
    """The oldest rows are copied last: by then a writer has replaced them, and the read must begin again."""
    capacity, n = 2048, 80  # 80 rows are written without the GIL
    rows = make_rows(8 * N_WORDS, capacity)
    rows.write(CODEC, block(0, capacity), capacity)
    done = threading.Event()

    def write() -> None:
        try:
            for at in range(capacity, capacity + 400 * n, n):
                rows.write(CODEC, block(at, n), n)
        finally:
            done.set()

    def read() -> None:
        while not done.is_set():
            try:
                got = rows.read(CODEC, np.arange(rows.count())[::-1].copy())
            except (
                IndexError,
                ContentionError,
            ):  # a write under way has made it shorter, or all were too quick
                continue
            check(got)
            assert (np.diff(got[0]) == -1).all(), "rows of two moments"

    together(write, read, read)


def test_readers_beside_a_lane_that_grows() -> None:
    rows = make_rows(8 * N_WORDS, None)
    total = 4 * _core.FIRST_CHUNK + 1

    def write() -> None:
        for at in range(0, total, 500):
            n = min(500, total - at)
            rows.write(CODEC, block(at, n), n)

    def read() -> None:
        while (n := rows.count()) < total:
            if n:
                got = rows.read(CODEC, np.linspace(0, n - 1, 100).astype(np.int64))
                check(got)
                assert got[0][-1] == n - 1

    together(write, read, read)


def test_two_threads_take_turns_on_one_lane() -> None:
    rows = make_rows(8 * N_WORDS, 1000)

    def write(first: int) -> None:
        for at in range(first, first + 480, 48):  # large enough to be copied without the GIL
            rows.write(CODEC, block(at, 48), 48, 0)

    together(lambda: write(0), lambda: write(10_000))
    got = rows.read(CODEC, np.arange(rows.count()))
    check(got)
    assert sorted(got[0].tolist()) == [*range(480), *range(10_000, 10_480)]


def segments_are_consecutive(rows: _core.Rows) -> None:
    """Each sample is a segment of its own: ids follow each other, the oldest first."""
    ids, _, start, length, *_ = rows.segments()
    assert (np.diff(ids) == 1).all() and (length == 1).all()
    assert start.tolist() == list(range(len(ids)))


def places_follow_each_other(rows: _core.Rows) -> None:
    _, _, segment, _ = rows.locate(np.arange(rows.count()))
    assert (np.diff(segment) == 1).all()


def places_are_found_again(rows: _core.Rows) -> None:
    """Some of the oldest are gone by now; the others follow each other from 0 on, or from where they were."""
    row, generation, *_ = rows.locate(np.arange(rows.count() // 2))
    found = rows.index_of(row, generation)
    left = found[found >= 0]
    assert (found[: len(found) - len(left)] == -1).all()
    assert not len(left) or (left == np.arange(len(left))).all()


def repeat(look: Callable[[], None], done: threading.Event) -> None:
    """Look again and again until it is done."""
    n = 0
    while not done.is_set() or not n:
        try:
            look()
        except (IndexError, ContentionError):  # it has become shorter, or the writer was too quick
            continue
        n += 1


@pytest.mark.parametrize("look", [segments_are_consecutive, places_follow_each_other, places_are_found_again])
def test_a_look_at_tags_is_of_one_moment(look: Callable[[_core.Rows], None]) -> None:
    """To write so many numbers takes less time than to look at them, and goes on without the GIL: the second half
    of a block comes in between."""
    run = 1 << 16
    rows, codec = make_rows(8, run, tagged=True), _core.Codec([(0, INT, (), False)], None, 8)
    numbers, ends = np.arange(run - 1), np.ones(run - 1, bool)
    done = threading.Event()

    def write() -> None:
        try:
            for _ in range(200):
                rows.write(codec, [numbers], len(numbers), 0, ends)
        finally:
            done.set()

    together(write, lambda: repeat(lambda: look(rows), done))


def test_rows_read_by_their_numbers_are_whole() -> None:
    """Whether they are in the window or not; the writer is at work on them without the GIL."""
    run, n = 8192, 4096
    rows = make_rows(8 * N_WORDS, run)
    rows.write(CODEC, block(0, run), run)
    done = threading.Event()

    def write() -> None:
        try:
            for at in range(run, run + 100 * n, n):
                rows.write(CODEC, block(at, n), n)
        finally:
            done.set()

    together(write, lambda: repeat(lambda: check(rows.read_rows(CODEC, np.arange(run))), done))


def test_a_block_under_lowest_is_seen_whole_or_not_at_all() -> None:
    n = 2000  # written without the GIL
    rows, done = make_rows(8 * N_WORDS, n, tagged=True), threading.Event()

    def write() -> None:
        try:
            for _ in range(50):
                rows.clear()
                rows.extend_lowest(CODEC, block(0, n), _core.MinTree(n), np.arange(n) * 1.0, 0)
        finally:
            done.set()

    def look() -> None:
        assert rows.count() in (0, n)

    together(write, lambda: repeat(look, done))


def test_the_oldest_row_is_whole_while_the_next_one_takes_its_place() -> None:
    """One row at a time: it is the only one that is lapped. It is read from its end, or the writer never caught up."""
    words, run = 1 << 18, 4  # of a half row: to copy it takes long, and does not need the GIL
    halves = [(0, INT, (words,), False), (8 * words, INT, (words,), False)]
    codec = _core.Codec(halves, None, 16 * words)
    backwards = _core.Codec(halves[::-1], None, 16 * words)
    rows, done = make_rows(16 * words, run), threading.Event()
    values = [np.full((1, words), n) for n in range(run + 1)]  # one more: what takes a row's place is another

    def write() -> None:
        try:
            for at in range(150):
                rows.write(codec, [values[at % (run + 1)]] * 2, 1)
        finally:
            done.set()

    def look() -> None:
        last, first = rows.read(backwards, np.zeros(1, np.int64))
        assert (last == first[0, 0]).all() and (first == first[0, 0]).all(), "torn"

    together(write, lambda: repeat(look, done))
