"""`extend_from`: copy one batch into another, in chunks, keeping the segments."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from recollect import checks
from recollect.batch.base import BatchBase
from recollect.batch.location import runs_of
from recollect.batch.structure import empty_batch
from recollect.batch.walk import Walk
from recollect.errors import MissingExtraError, class_name

Progress = Callable[[int], Any]


def copy_into(target: BatchBase, other: BatchBase, chunk_size: int, tqdm: bool) -> None:
    """Do `target.extend_from(other, chunk_size, tqdm)`."""
    _check(target, other, chunk_size)
    walk = Walk.start(other)
    copied = 0
    try:
        with _progress(len(walk), tqdm) as advance:
            for start, end in walk.segments():
                for n in _copy_segment(target, walk, start, end, chunk_size):
                    copied += n
                    advance(n)
    except BaseException as error:
        error.copied = copied  # type: ignore[attr-defined]
        raise


def _check(target: BatchBase, other: BatchBase, chunk_size: int) -> None:
    name = type(target).__name__
    if not isinstance(other, BatchBase):
        raise TypeError(f"{name}: other must be a batch, got {class_name(other)}; use extend for a block")
    checks.count("chunk_size", chunk_size, advice="8 is the default")
    if any(source is target._written()._identity() for source in _roots(other)):
        raise ValueError(f"{name}: other must be another batch, got itself or a view of it; copy it first")


def _roots(batch: BatchBase) -> list[object]:
    sources = batch._sources()
    if not sources:
        return [batch._identity()]
    return [root for source in sources for root in _roots(source)]


def _copy_segment(target: BatchBase, walk: Walk, start: int, end: int, chunk_size: int) -> Iterator[int]:
    """Copy one segment and yield the size of each chunk; nothing is left open, whatever happens."""
    is_open, reached = False, start
    try:
        for first in range(start, end, chunk_size):
            for a, b, data in _intact(walk, first, min(first + chunk_size, end)):
                if is_open and a != reached:
                    _close(target)
                target._extend_part(data, b == end)
                is_open, reached = b != end, b
                yield b - a
    finally:
        if is_open:
            _close(target)


def _close(target: BatchBase) -> None:
    target._extend_part(empty_batch(target.single_space), True)


def _intact(walk: Walk, a: int, b: int) -> Iterator[tuple[int, int, Any]]:
    """Yield the runs of samples in [a, b) that still exist, with their data."""
    found = walk.read(np.arange(a, b))
    if found is not None:
        yield a, b, found[0]
        return
    current = walk.current(np.arange(a, b))
    if current.all():
        raise walk.batch._contention()
    for first, last in runs_of(current):
        if current[first]:
            yield from _intact(walk, a + first, a + last)


def _progress(total: int, wanted: bool) -> AbstractContextManager[Progress]:
    if not wanted:
        return nullcontext(lambda n: None)
    try:
        from tqdm import tqdm
    except ImportError as error:
        raise MissingExtraError(
            'tqdm=True: needs the package tqdm, got none; pip install "recollect[progress]"'
        ) from error
    return _Bar(tqdm(total=total, unit=" samples"))


class _Bar:
    """A progress bar that is closed at the end."""

    def __init__(self, bar: Any) -> None:
        self._bar = bar

    def __enter__(self) -> Progress:
        self._bar.__enter__()
        advance: Progress = self._bar.update
        return advance

    def __exit__(self, *error: Any) -> None:
        self._bar.__exit__(*error)
