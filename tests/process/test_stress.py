"""Four writers and two readers in processes of their own; writers are killed and replaced meanwhile."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.process import rows, stress

import recollect as rc

pytestmark = pytest.mark.process
LANES = 4
SPAWN = multiprocessing.get_context("spawn")


class Writer:
    """A writer process and its end of the pipe."""

    def __init__(self, buffer: rc.ReplayBuffer, lane: int, board: stress.Board, seed: int) -> None:
        self.lane, self.has_taken_over = lane, False
        self.begun, self.returned = int(board.begun[lane]), int(board.returned[lane])  # by those before it
        self.pipe, theirs = SPAWN.Pipe(duplex=False)
        self.process: Any = SPAWN.Process(
            target=stress.write, args=(buffer, lane, board, seed, theirs), daemon=True
        )
        self.process.start()
        theirs.close()

    def end(self) -> None:
        self.process.join(30)
        assert self.process.exitcode is not None
        self.process.close()
        self.pipe.close()


def start_reader(buffer: rc.ReplayBuffer, board: stress.Board, seed: int) -> tuple[Any, Connection]:
    ours, theirs = SPAWN.Pipe()
    process: Any = SPAWN.Process(target=stress.read, args=(buffer, board, seed, theirs), daemon=True)
    process.start()
    theirs.close()
    assert ours.recv() == "ready"
    return process, ours


def end_reader(process: Any, pipe: Connection) -> dict[str, int]:
    pipe.send("stop")
    seen = pipe.recv()
    process.join(30)
    process.close()
    pipe.close()
    assert isinstance(seen, dict), seen
    return seen


def take_over(writer: Writer, newest: int) -> None:
    """The first report of a writer: of its predecessor's calls all that returned are there, the last one or not."""
    found = newest + 1
    assert found in (writer.begun, writer.returned), f"{found} found; {writer.begun=} {writer.returned=}"
    writer.has_taken_over = True


def run(tmp_path: Path, n_rows: int, n_kills: int, seed: int) -> dict[str, Any]:
    """Write at least `n_rows` with at least `n_kills` kills spread over them; return what the readers saw."""
    rng = np.random.default_rng(seed)
    seeds = iter(range(1_000_000))
    board = stress.Board(tmp_path / "board", LANES)
    capacity = LANES * 4096
    with rc.ReplayBuffer.create(rc.SharedMemoryStorage, rows.SPACE, capacity=capacity, num_lanes=LANES,
                                multiprocessing=True) as buffer:  # fmt: skip
        try:
            readers = [start_reader(buffer, board, 100 + i) for i in range(2)]
            start = time.monotonic()
            writers = {k: Writer(buffer, k, board, next(seeds)) for k in range(LANES)}
            kills = 0
            while (done := int(board.returned.sum())) < n_rows or kills < n_kills:
                pipes = {w.pipe: w for w in writers.values()} | {pipe: None for _, pipe in readers}
                for pipe in wait(list(pipes), 30):
                    writer = pipes[pipe]  # type: ignore[index]
                    assert writer is not None, pipe.recv()  # a reader only speaks before its end to complain
                    number = pipe.recv()  # type: ignore[union-attr]
                    if not writer.has_taken_over:
                        take_over(writer, number)
                        continue
                    due = n_kills * min(1.0, done / n_rows)
                    if kills <= due and rng.random() < 0.5:
                        kill(writer)
                        kills += 1
                        writers[writer.lane] = Writer(buffer, writer.lane, board, next(seeds))
            elapsed = time.monotonic() - start
            board.stop = True
            for writer in writers.values():
                drain(writer)
                writer.end()
            seen = [end_reader(*reader) for reader in readers]
            check_end(buffer, board)
            total = {key: sum(s[key] for s in seen) for key in seen[0]}
            return {**total, "written": int(board.returned.sum()), "kills": kills, "seconds": elapsed}
        finally:  # only after a failure is anyone left
            for child in multiprocessing.active_children():
                child.kill()
                child.join()


def kill(writer: Writer) -> None:
    os.kill(writer.process.pid, signal.SIGKILL)
    writer.end()


def drain(writer: Writer) -> None:
    """Read a writer's pipe to its end, so that it cannot wait for us."""
    try:
        while True:
            number = writer.pipe.recv()
            if not writer.has_taken_over:
                take_over(writer, number)
    except EOFError:
        return


def check_end(buffer: rc.ReplayBuffer, board: stress.Board) -> None:
    """Quiet now: each lane ends with the last number that returned, and all doors add up."""
    batch = buffer[...]
    rows.check_whole(batch)
    rows.check_order(batch)
    for lane in range(LANES):
        numbers = batch["number"][batch["lane"] == lane]
        assert numbers[-1] + 1 == board.returned[lane]
        assert len(numbers) >= 4096 - max(stress.BLOCKS)  # what a killed call displaced
    stats = buffer.stats()
    assert stats.offered == board.returned.sum()
    assert stats.offered == stats.live + stats.evicted + stats.removed + stats.rejected + stats.dropped
    assert (stats.live, stats.dropped, stats.removed, stats.rejected) == (len(buffer), 0, 0, 0)


def test_four_writers_two_readers_with_kills(tmp_path: Path, record_property: Any) -> None:
    seen = run(tmp_path, n_rows=400_000, n_kills=6, seed=0)
    record_property("seen", seen)
    print(seen)
    assert seen["kills"] >= 6 and seen["draws"] > 20 and seen["slices"] > 20 and seen["newest"] > 20


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_ten_million_rows_with_kills(tmp_path: Path) -> None:
    seen = run(tmp_path, n_rows=12_000_000, n_kills=60, seed=1)
    print(seen)
    assert seen["written"] >= 10_000_000 and seen["kills"] >= 60
