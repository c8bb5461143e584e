"""A manager's log, damaged in every way: whole records are kept, each once, and the rest is told and kept aside."""

from __future__ import annotations

import random
import shutil
import warnings
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from tests.process.failing import no_syncs

from recollect.remote import Checkpoint, ReplayBufferManager

N = 6
CHANGES = ("flip", "overwrite", "remove", "insert", "insert inside", "twice", "swap", "drop", "cut")
Piece = tuple[bytes, int | None]  # bytes, and which record they are, if they are a whole one


def opened(path: Path, resume: bool) -> ReplayBufferManager:
    about = Checkpoint(path, resume=resume)
    return ReplayBufferManager(
        {"id": ((), "int64"), "text": ((40,), "uint8")}, 1, 1, capacity=50, checkpoint=about
    )


def written(path: Path) -> list[Piece]:
    """Make a checkpoint whose log has N records, of 1 to 3 rows each, and return them."""
    m = opened(path, False)
    (log,) = path.glob("log-*.bin")
    ends = [0]
    for i in range(N):
        n = 1 + i % 3
        m.add({"id": np.full(n, i), "text": np.full((n, 40), i, np.uint8)})
        ends.append(log.stat().st_size)
    data = log.read_bytes()
    m.close()  # as a kill would
    return [(data[a:b], i) for i, (a, b) in enumerate(pairwise(ends))]


def changed(pieces: list[Piece], chance: random.Random) -> list[Piece]:
    """One change of a log."""
    pieces, kind = list(pieces), chance.choice(CHANGES)
    if not pieces:
        return pieces
    at = chance.randrange(len(pieces))
    data, _ = pieces[at]
    where = chance.randrange(max(1, len(data)))
    garbage = chance.choice([chance.randbytes(chance.randrange(1, 60)), b"RLOG" * 3, bytes(8)])
    if kind == "flip" and data:
        changed = bytearray(data)
        changed[where] ^= 1 << chance.randrange(8)
        pieces[at] = (bytes(changed), None)
    elif kind == "overwrite":
        pieces[at] = (data[:where] + garbage + data[where + len(garbage) :], None)
    elif kind == "remove" and data:
        pieces[at] = (data[:where] + data[where + chance.randrange(1, 30) :], None)
    elif kind == "insert":
        pieces.insert(at, (garbage, None))
    elif kind == "insert inside" and where:
        new = chance.choice([(garbage, None), chance.choice(pieces)])
        pieces[at : at + 1] = [(data[:where], None), new, (data[where:], None)]
    elif kind == "twice":
        pieces.insert(chance.randrange(len(pieces) + 1), pieces[at])
    elif kind == "swap":
        other = chance.randrange(len(pieces))
        pieces[at], pieces[other] = pieces[other], pieces[at]
    elif kind == "drop":
        del pieces[at]
    elif kind == "cut":
        pieces[at:] = [(data[:where], None)] if where else []
    return pieces


def found_in(data: bytes, first: list[Piece]) -> list[int | None]:
    """The records that are whole in a log, in order, with None for what lies between."""
    found: list[int | None] = []
    at = 0
    while at < len(data):
        begins = [
            (where, i) for record, i in first if i is not None and (where := data.find(record, at)) >= 0
        ]
        where, number = min(begins, default=(len(data), None))
        if where > at:
            found.append(None)
        if number is not None:
            found.append(number)
        at = where + (0 if number is None else len(first[number][0]))
    return found


def check_damage(seed: int, first: list[Piece], template: Path, path: Path) -> None:
    chance = random.Random(seed)
    pieces = first
    for _ in range(chance.choice([1, 1, 1, 2, 4])):
        pieces = changed(pieces, chance)
    data = b"".join(piece for piece, _ in pieces)
    found = found_in(data, first)  # not of the pieces: two changes may undo each other
    whole = [i for i in found if i is not None]
    kept = list(dict.fromkeys(whole))
    shutil.copytree(template, path)
    (log,) = path.glob("log-*.bin")
    log.write_bytes(data)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        m = opened(path, True)
    n_damages = m.stats().log_damages
    rows = [i for i in kept for _ in range(1 + i % 3)]
    assert m.buffer[:]["id"].tolist() == rows
    assert np.array_equal(m.buffer[:]["text"][:, 0], rows)
    n_last = next((n for n, i in enumerate(reversed(found)) if i is not None), len(found))
    if len(found) - n_last > len(kept):
        assert n_damages
    elif not n_last:  # else a kill may have cut it short
        assert not n_damages
    assert bool(told) == bool(n_damages)
    aside = list(path.glob("damaged-log-*.bin"))
    assert [file.read_bytes() for file in aside] == ([data] if n_damages else [])
    m.add({"id": np.full(1, 99), "text": np.full((1, 40), 99, np.uint8)})
    m.close()
    with opened(path, True) as again:
        assert again.buffer[:]["id"].tolist() == [*rows, 99] and not again.stats().log_damages
    shutil.rmtree(path)


@pytest.mark.parametrize("n", [25, pytest.param(100_000, marks=pytest.mark.soak)])
def test_whole_records_of_a_damaged_log_are_kept_each_once(n: int, tmp_path: Path) -> None:
    with no_syncs():
        first = written(tmp_path / "template")
        for seed in range(n):
            try:
                check_damage(seed, first, tmp_path / "template", tmp_path / "log")
            except BaseException as error:
                error.add_note(f"seed {seed}")
                raise
