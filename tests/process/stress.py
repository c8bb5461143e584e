"""The processes of the stress test: writers that may be killed at any moment, and readers that check what they see."""

from __future__ import annotations

import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from tests.process import rows

import recollect as rc
from recollect import _core

REPORT = 8_192  # rows between two reports of a writer
BLOCKS = (1, 2, 3, 7, 64, 256, 500)  # all at most half a lane, so that each call is one moment


class Board:
    """What every process can see: per lane the numbers begun and the numbers whose call returned, and `stop`."""

    def __init__(self, path: Path, n_lanes: int) -> None:
        self.path, self.n_lanes = path, n_lanes
        if not path.exists():
            path.write_bytes(bytes(8 * (2 * n_lanes + 1)))
        self._words = np.memmap(path, np.int64, "r+")
        self.begun, self.returned = self._words[:n_lanes], self._words[n_lanes : 2 * n_lanes]

    @property
    def stop(self) -> bool:
        return bool(self._words[-1])

    @stop.setter
    def stop(self, value: bool) -> None:
        self._words[-1] = value

    def __reduce__(self) -> Any:
        return Board, (self.path, self.n_lanes)


def newest_number(buffer: rc.ReplayBuffer, lane: int) -> int:
    """The number of a lane's newest row, -1 if it has none; the caller holds the lane."""
    storage: Any = buffer.storage
    low, cursor, _ = storage.rows.native.windows()[lane]
    run = buffer.capacity // board_lanes(buffer)  # type: ignore[operator]
    return int(storage.get(lane * run + (cursor - 1) % run)["number"]) if cursor > low else -1


def board_lanes(buffer: rc.ReplayBuffer) -> int:
    storage: Any = buffer.storage
    return int(storage.rows.geometry.n_lanes)


def write(buffer: rc.ReplayBuffer, lane: int, board: Board, seed: int, report: Connection) -> None:
    """Write for ever, now single rows and now blocks; the first report says where this writer took over."""
    rng = np.random.default_rng(seed)
    if lane % 2:
        _core.stream_from(0, 0)  # past the caches, whatever this machine prefers
    with buffer, buffer.on_lane(lane) as out:
        last = newest_number(buffer, lane)
        # Each call is one moment: the dead writer's last call happened or did not, and what returned is there.
        report.send(last)
        begun, returned = board.begun, board.returned
        begun[lane] = returned[lane] = last + 1
        reported = last
        while not board.stop:
            n = int(rng.choice(BLOCKS))
            first = last + 1
            if rng.random() < 0.5:
                begun[lane] = first + n
                out.extend(rows.block(lane, first, n))
                returned[lane] = first + n
            else:
                made = rows.block(lane, first, n)
                singles = [dict(zip(made, values)) for values in zip(*made.values())]
                for i, single in enumerate(singles, first + 1):
                    begun[lane] = i
                    out.append(single)
                    returned[lane] = i
            last += n
            if last - reported > REPORT:
                report.send(last)
                reported = last


def read(buffer: rc.ReplayBuffer, board: Board, seed: int, pipe: Connection) -> None:
    """Draw and slice until told to stop; send what was seen, or the traceback of what went wrong."""
    seen = {"draws": 0, "slices": 0, "newest": 0, "lapped": 0, "rows": 0}
    try:
        with buffer:
            sampler = rc.StepSampler(buffer, 256, seed=seed)
            rng = np.random.default_rng(seed)
            pipe.send("ready")
            while not pipe.poll():
                _draw(sampler, seen)
                _slice(buffer, rng, seen)
                _newest(buffer, board, int(rng.integers(board.n_lanes)), seen)
        pipe.send(seen)
    except BaseException:
        pipe.send(traceback.format_exc())


def _draw(sampler: Any, seen: dict[str, int]) -> None:
    try:
        batch = sampler.sample()
    except rc.EmptyError:
        return
    rows.check_whole(batch)
    seen["draws"] += 1
    seen["rows"] += len(batch["lane"])


def _slice(buffer: rc.ReplayBuffer, rng: Any, seen: dict[str, int]) -> None:
    start = int(rng.integers(max(len(buffer), 1)))
    batch = buffer[start : start + 512]
    rows.check_whole(batch)
    rows.check_order(batch)
    seen["slices"] += 1
    seen["rows"] += len(batch["lane"])


def _newest(buffer: rc.ReplayBuffer, board: Board, lane: int, seen: dict[str, int]) -> None:
    """The end of a lane: what had returned before the read is there, and nothing that was not begun after it."""
    returned = int(board.returned[lane])
    end = (lane + 1) * buffer.capacity // board.n_lanes  # type: ignore[operator]
    try:
        batch = buffer[max(0, end - (lane + 1) * max(BLOCKS) - 8) : end + 8]
    except rc.ContentionError:  # the oldest rows of the next lane, overwritten again and again
        seen["lapped"] += 1
        return
    begun = int(board.begun[lane])
    rows.check_whole(batch)
    rows.check_order(batch)
    numbers = batch["number"][batch["lane"] == lane]
    if len(numbers) and (lane + 1 == board.n_lanes or batch["lane"][-1] > lane):
        if not returned <= numbers[-1] + 1 <= begun:
            raise AssertionError(f"lane {lane}: newest {numbers[-1]}, {returned} returned, {begun} begun")
        seen["newest"] += 1
    seen["rows"] += len(batch["lane"])
