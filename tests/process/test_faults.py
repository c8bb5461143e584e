"""A writer killed at every step of every operation: others read at once, a new writer goes on, nothing is torn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.process.killing import EVERY, in_child, killed_at, steps
from tests.timing import Stopwatch

import recollect as rc

pytestmark = pytest.mark.process

CAPACITY = 16
EPISODE = 5
NEW = 1000  # what set_at writes over row i is row NEW + i: the same episode and step
SPACE = {"id": ((), "int64"), "words": ((5,), "uint64")}
_STEPS = np.arange(1, 6, dtype=np.uint64) * np.uint64(0xBF58476D1CE4E5B9)
Ids = list[int]


def block(ids: Any) -> dict[str, Any]:
    number = np.asarray(ids, np.int64)
    return {"id": number, "words": (number.astype(np.uint64)[:, None] + np.uint64(1)) * _STEPS}


def ids_of(batch: dict[str, Any]) -> Ids:
    """The ids of rows, each of them whole."""
    ids, words = batch["id"], batch["words"]
    assert np.array_equal(words, (ids.astype(np.uint64)[:, None] + np.uint64(1)) * _STEPS), (
        f"torn: {ids} {words}"
    )
    return list(ids.tolist())


def ends_of(ids: Any) -> Any:
    return np.asarray(ids) % EPISODE == EPISODE - 1


# -- what can be done to a buffer, and what may be left of it when it is killed


@dataclass(frozen=True)
class Operation:
    """`work` on a buffer, and `allowed(before, found)`: the number of rows lost to a torn write, or None if wrong."""

    work: Callable[[rc.ReplayBuffer], object]
    allowed: Callable[[Ids, Ids], bool]
    at_least: int  # steps
    removes: int = 0


def adding(new: Ids, piece: int, work: Callable[[rc.ReplayBuffer], object], at_least: int) -> Operation:
    """Rows that are added in pieces: each is there whole or not; what a piece displaces may be gone before it."""

    def allowed(before: Ids, found: Ids) -> bool:
        everything = before + new
        for done in (*range(0, len(new), piece), len(new)):
            end = len(before) + done
            going = min(piece, len(new) - done)
            for start in (max(0, end - CAPACITY), max(0, min(end, end + going - CAPACITY))):
                if found == everything[start:end]:
                    return True
        return False

    return Operation(work, allowed, at_least)


def oversized(new: Ids) -> Operation:
    kept = new[-CAPACITY:]

    def allowed(before: Ids, found: Ids) -> bool:
        old = any(
            found == before[n:] for n in range(len(before) + 1)
        )  # at most what the first half displaces
        return old or found in (kept[: CAPACITY // 2], kept)

    return Operation(lambda b: b.extend(block(new), ends=ends_of(new)), allowed, 8)


def setting(index: Ids) -> Operation:
    def work(buffer: rc.ReplayBuffer) -> None:
        ids = np.array(ids_of(buffer[index]))
        buffer.set_at(index, block(ids + NEW))

    def allowed(before: Ids, found: Ids) -> bool:
        for done in range(len(index) + 1):
            after = list(before)
            for i in index[:done]:
                after[i] += NEW
            torn = [x for j, x in enumerate(after) if done == len(index) or j != index[done]]
            if found in (after, torn):
                return True
        return False

    return Operation(work, allowed, 4)


def removing(index: Ids, at_least: int) -> Operation:
    def allowed(before: Ids, found: Ids) -> bool:
        gone = {before[i] for i in index}
        return found in (before, [x for x in before if x not in gone])

    return Operation(lambda b: b.remove_at(index), allowed, at_least, len(index))


def appending_and_ending(buffer: rc.ReplayBuffer) -> None:
    buffer.append({k: v[0] for k, v in block([100]).items()})
    buffer.mark_segment_end()


OPERATIONS = {
    "append": adding([100], 1, lambda b: b.append({k: v[0] for k, v in block([100]).items()}), 3),
    "append that needs conversion": adding(
        [100], 1, lambda b: b.append({"id": 100, "words": block([100])["words"][0].tolist()}), 3
    ),
    "extend": adding([100, 101, 102], 8, lambda b: b.extend(block([100, 101, 102])), 3),
    "extend by more than half a lane": adding(
        list(range(100, 112)), 8, lambda b: b.extend(block(range(100, 112)), ends=ends_of(range(100, 112))), 6
    ),
    "extend by more than a lane": oversized(list(range(100, 120))),
    "set one": setting([2]),
    "set several": setting([1, 2, 5]),
    "remove the oldest": removing([0, 1], 4),
    "remove the newest": removing([-1, -2], 4),
    "remove near the oldest": removing([1], 6),
    "remove near the newest": removing([-2], 6),
    "remove here and there": removing([1, 3, -2], 8),
    "clear": Operation(lambda b: b.clear(), lambda before, found: found in (before, []), 4),
    "mark_segment_end": adding([100], 1, appending_and_ending, 3),
}


# -- where the buffer lies


class Shared:
    """Shared memory: the child inherits it, the parent is the other process."""

    def __init__(self, tmp_path: Path, fill: int, tracked: bool = True) -> None:
        self.buffer = rc.ReplayBuffer.create(
            rc.SharedMemoryStorage,
            SPACE,
            capacity=CAPACITY,
            multiprocessing=True,
            maintain_segment_metadata=tracked,
        )
        fill_up(self.buffer, fill, tracked)

    def in_writer(self, work: Callable[[rc.ReplayBuffer], object]) -> Callable[[], object]:
        return lambda: work(self.buffer)

    def reader(self, step: int) -> rc.ReplayBuffer:
        return self.buffer

    def close(self) -> None:
        self.buffer.close()


class Memmap:
    """A file that nobody but the killed process had open; it is opened again, for reading or for writing."""

    def __init__(self, tmp_path: Path, fill: int, tracked: bool = True) -> None:
        self.path = tmp_path / "buffer"
        self.opened: list[rc.ReplayBuffer] = []
        with rc.ReplayBuffer.create(rc.MemmapStorage, SPACE, capacity=CAPACITY, cache_path=self.path, overwrite=True,
                                    maintain_segment_metadata=tracked) as buffer:  # fmt: skip
            fill_up(buffer, fill, tracked)

    def in_writer(self, work: Callable[[rc.ReplayBuffer], object]) -> Callable[[], object]:
        return lambda: work(rc.ReplayBuffer.load_from(self.path, read_only=False))

    def reader(self, step: int) -> rc.ReplayBuffer:
        self.opened.append(rc.ReplayBuffer.load_from(self.path, read_only=step % 2 == 0))
        return self.opened[-1]

    def close(self) -> None:
        for buffer in self.opened:
            buffer.close()


Place = Shared | Memmap


def fill_up(buffer: rc.ReplayBuffer, n: int, tracked: bool) -> None:
    """Write rows 0 to n, in episodes of five, on a lane that is free again afterwards."""
    with buffer.on_lane(0) as lane:
        for first in range(0, n, 7):
            ids = list(range(first, min(first + 7, n)))
            for i in ids:
                lane.append({k: v[0] for k, v in block([i]).items()})
                if tracked and i % EPISODE == EPISODE - 1:
                    lane.mark_segment_end()


# -- checks


def check_segments(buffer: rc.ReplayBuffer, ids: Ids) -> None:
    """Each segment is one stretch of one episode without a hole, with one id that no other has; all are covered."""
    segments = buffer.get_segments()
    assert segments is not None
    where = buffer.locate(...)
    seen = set()
    covered = 0
    for start, end in segments:
        part = np.array(ids[start:end]) % NEW
        assert start == covered and end > start
        assert (np.diff(part) == 1).all() and len(set((part // EPISODE).tolist())) == 1, f"segment {part}"
        names = set(where.segment[start:end].tolist())
        assert len(names) == 1 and not names & seen, f"segment ids {where.segment}"
        assert (np.diff(where.step[start:end]) == 1).all()
        seen |= names
        covered = end
    assert covered == len(ids)


def check_counts(
    buffer: rc.ReplayBuffer, operation: Operation, before: rc.ReplayBuffer, ids: Ids, old: Ids
) -> None:
    """Every sample left by one door."""
    stats = buffer.stats()
    assert stats.live == len(ids) and stats.rejected == 0
    assert stats.offered == stats.live + stats.evicted + stats.removed + stats.rejected + stats.dropped
    missing = len({x % NEW for x in old} - {x % NEW for x in ids})
    if operation.removes:
        assert (stats.removed, stats.dropped) in ((0, 0), (operation.removes, 0)) and stats.removed == missing
    elif max(ids, default=0) > NEW or stats.dropped:
        assert stats.dropped == missing <= 1
    new = [x for x in ids if 100 <= x < NEW]
    assert stats.offered >= len(new)


def go_on(buffer: rc.ReplayBuffer) -> None:
    buffer.extend(block([900, 901]))


def remove_both_ends(buffer: rc.ReplayBuffer) -> None:
    """All that is between them moves: what a killed removal had marked must not go with them."""
    buffer.remove_at([0, -1])


def check_after_kill(place: Place, operation: Operation, before: Ids, step: int) -> None:
    reader = place.reader(step)
    start = Stopwatch()
    found = ids_of(reader[...])
    assert start.s < 1.0
    assert operation.allowed(before, found), f"step {step}: {before} became {found}"
    check_segments(reader, found)
    check_counts(reader, operation, reader, found, before)

    expected = [*found, 900, 901][-CAPACITY:]
    for work, left in ((go_on, expected), (remove_both_ends, expected[1:-1])):
        in_child(place.in_writer(work))
        after = ids_of(reader[...])
        assert after == left, f"step {step}: {found} went on as {after}"
        check_segments(reader, after)
    stats = reader.stats()
    assert stats.offered == stats.live + stats.evicted + stats.removed + stats.rejected + stats.dropped


@pytest.mark.parametrize("fill", [7, 23])
@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("kind", [Shared, Memmap])
def test_killed_at_every_step(kind: type[Place], name: str, fill: int, tmp_path: Path) -> None:
    operation = OPERATIONS[name]
    before = list(range(max(0, fill - CAPACITY), fill))
    for step in steps():
        place = kind(tmp_path, fill)
        killed = killed_at(step, place.in_writer(operation.work))
        check_after_kill(place, operation, before, step)
        place.close()
        if not killed:
            break
    assert step >= operation.at_least, f"only {step} steps: are the fault points still there?"


@pytest.mark.parametrize("fill", [7, 23])
def test_what_a_killed_block_never_committed_was_not_offered(fill: int, tmp_path: Path) -> None:
    """Of twenty samples for a lane of sixteen the first four pass by with the first half; then comes the other half."""
    seen = set()
    for step in steps():
        place = Shared(tmp_path, fill)
        killed = killed_at(step, place.in_writer(OPERATIONS["extend by more than a lane"].work))
        in_child(place.in_writer(go_on))  # two samples, after whoever comes next has put things right
        seen.add(place.buffer.stats().offered - fill - 2)
        place.close()
        if not killed:
            break
    assert seen == {0, 12, 20}


def unfinished_rows(place: Shared) -> Ids:
    """The rows whose stamps say that they are being written."""
    rows: Any = place.buffer.storage.rows  # type: ignore[attr-defined]
    stamps = rows.header.view(rows.geometry.stamps_at, 8 * CAPACITY).view(np.uint64)
    return list(np.flatnonzero(stamps & 1).tolist())


@pytest.mark.parametrize("name", ["append", "extend"])
def test_a_row_that_was_never_finished_is_not_read_by_its_number(name: str, tmp_path: Path) -> None:
    for step in steps():
        place = Shared(tmp_path, 7)
        assert killed_at(step, place.in_writer(OPERATIONS[name].work)), "no row was seen unfinished"
        if unfinished := unfinished_rows(place):
            with pytest.raises(rc.ContentionError, match="written for 1 s"):
                place.buffer.storage.get(unfinished)
            in_child(place.in_writer(go_on))
            assert ids_of(place.buffer.storage.get([7, 8])) == [900, 901]
        place.close()
        if unfinished:
            break


def test_a_row_whose_overwriting_was_not_finished_is_dropped(tmp_path: Path) -> None:
    """Whatever its bytes look like: the kill may have come between any two of them."""
    seen = set()
    for step in steps():
        place = Shared(tmp_path, 7)
        killed = killed_at(step, place.in_writer(OPERATIONS["set several"].work))
        unfinished = len(unfinished_rows(place))
        found = ids_of(place.buffer[...])
        assert (len(found), place.buffer.stats().dropped) == (7 - unfinished, unfinished)
        seen.add(unfinished)
        place.close()
        if not killed:
            break
    assert seen == {0, 1}


def test_a_change_that_was_finished_is_not_done_again(tmp_path: Path) -> None:
    """Its journal is still there when the next one is killed before it has written its own."""

    def remove_and_append(buffer: rc.ReplayBuffer) -> None:
        buffer.remove_at([1, -2])
        buffer.extend(block([100]))

    before = [0, 2, 3, 4, 6, 100]
    for name in ("set one", "remove the oldest", "remove near the newest", "clear"):
        for step in steps():
            place = Shared(tmp_path, 7)
            in_child(place.in_writer(remove_and_append))
            killed = killed_at(step, place.in_writer(OPERATIONS[name].work))
            found = ids_of(place.buffer[...])
            assert OPERATIONS[name].allowed(before, found), f"{name}, step {step}: {before} became {found}"
            check_segments(place.buffer, found)
            place.close()
            if not killed:
                break


@pytest.mark.parametrize("name", ["set one", "remove near the oldest", "remove here and there", "clear"])
def test_an_unbounded_file_is_repaired_by_whoever_opens_it(name: str, tmp_path: Path) -> None:
    """Before it has looked at any of its rows."""
    operation, before = OPERATIONS[name], list(range(7))
    for step in steps():
        path = tmp_path / str(step)
        with rc.ReplayBuffer.create(rc.MemmapStorage, SPACE, capacity=None, cache_path=path,
                                    maintain_segment_metadata=True) as buffer:  # fmt: skip
            fill_up(buffer, 7, True)

        def work(path: Path = path) -> None:
            operation.work(rc.ReplayBuffer.load_from(path, read_only=False))

        killed = killed_at(step, work)
        with rc.ReplayBuffer.load_from(path, read_only=step % 2 == 0) as buffer:
            found = ids_of(buffer[...])
            assert operation.allowed(before, found), f"step {step}: {before} became {found}"
            check_segments(buffer, found)
        if not killed:
            break
    assert step >= 4


@pytest.mark.parametrize("every", EVERY)
@pytest.mark.parametrize("name", ["set several", "remove here and there", "remove near the oldest", "clear"])
def test_a_process_that_repairs_may_be_killed_too(name: str, every: int, tmp_path: Path) -> None:
    operation = OPERATIONS[name]
    before = list(range(7))
    repairs = 0
    for step in steps(every=every):
        for again in steps(every=every):
            place = Shared(tmp_path, 7)
            killed = killed_at(step, place.in_writer(operation.work))
            repairing = killed_at(again, place.in_writer(lambda b: b[...]))
            repairs += repairing
            check_after_kill(place, operation, before, step)
            place.close()
            if not repairing:
                break
        if not killed:
            break
    assert repairs > 5 // every
