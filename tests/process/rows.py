"""Rows that can tell whether they are whole: a lane, a number in it, words made from both, and their checksum."""

from __future__ import annotations

from typing import Any

import numpy as np

WORDS = 6
SPACE = {
    "lane": ((), "int64"),
    "number": ((), "int64"),
    "words": ((WORDS,), "uint64"),
    "checksum": ((), "uint64"),
}
_ODD = np.uint64(0x9E3779B97F4A7C15)
_STEPS = np.arange(1, WORDS + 1, dtype=np.uint64) * np.uint64(0xBF58476D1CE4E5B9)


def block(lane: int, first: int, n: int) -> dict[str, Any]:
    """Rows `first` to `first + n` of a lane."""
    number = np.arange(first, first + n, dtype=np.int64)
    words = (number.astype(np.uint64)[:, None] + np.uint64(lane + 1)) * _ODD ^ _STEPS
    lanes = np.full(n, lane, np.int64)
    return {"lane": lanes, "number": number, "words": words, "checksum": checksum(lanes, number, words)}


def row(lane: int, number: int) -> dict[str, Any]:
    """One row of a lane."""
    return {key: value[0] for key, value in block(lane, number, 1).items()}


def checksum(lane: Any, number: Any, words: Any) -> Any:
    """A sum over all other bytes of each row."""
    total = (words * (_STEPS | np.uint64(1))).sum(axis=1, dtype=np.uint64)
    return total ^ (number.astype(np.uint64) * _ODD) ^ (lane.astype(np.uint64) + np.uint64(0xABCD))


def check_whole(batch: dict[str, Any]) -> None:
    """Raise if any row is not exactly what some writer wrote."""
    lane, number, words = batch["lane"], batch["number"], batch["words"]
    torn = checksum(lane, number, words) != batch["checksum"]
    torn |= (
        words
        != (number.astype(np.uint64)[:, None] + lane.astype(np.uint64)[:, None] + np.uint64(1)) * _ODD
        ^ _STEPS
    ).any(1)
    if torn.any():
        i = int(np.argmax(torn))
        raise AssertionError(f"torn row at {i}: lane {lane[i]} number {number[i]} words {words[i]}")


def check_order(batch: dict[str, Any]) -> None:
    """Raise unless lanes follow one another and numbers within a lane rise by one: none lost, none out of order."""
    lane, number = batch["lane"], batch["number"]
    if len(lane) < 2:
        return
    d_lane, d_number = np.diff(lane), np.diff(number)
    wrong = (d_lane < 0) | ((d_lane == 0) & (d_number != 1))
    if wrong.any():
        i = int(np.argmax(wrong))
        raise AssertionError(
            f"after lane {lane[i]} number {number[i]} came lane {lane[i + 1]} number {number[i + 1]}"
        )
