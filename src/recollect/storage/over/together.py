"""Several storages that hold parts of the same rows: a change is made in all of them, or in none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from recollect import interrupts
from recollect.errors import FormatError
from recollect.storage.contract import SpaceStorage
from recollect.storage.filed.base import Ints
from recollect.storage.filed.commits import Live

Undo = Callable[[], Any]


def do_to_all(
    storages: Sequence[SpaceStorage],
    live: Live | None,
    do: Callable[[Any, int], Any],
    undo: Callable[[Any], Undo],
) -> None:
    """Do something to every storage, with its number; if one fails, undo it in those before.

    `undo(storage)` is asked before the change for what takes it back. Storages below one roof commit after the last.
    """
    done: list[Undo] = []
    owner = live.owner if live is not None else None
    if live is not None and owner is None:
        live.owner = _nobody  # a storage must not commit before the last has written
    try:
        for number, storage in enumerate(storages):
            back = undo(storage)
            do(storage, number)
            done.append(back)
    except BaseException:
        with interrupts.deferred():  # a second Ctrl-C would leave half of it
            for back in reversed(done):
                back()
        raise
    finally:
        if live is not None:
            live.owner = owner
    if live is not None and owner is None:
        live.settle()


def _nobody(stored: int) -> dict[str, Any]:
    return {}


def undo_set(storage: SpaceStorage, rows: Ints) -> Undo:
    """What takes back a `set` of these rows: the old values, or in an unbounded storage the end moved and back."""
    if storage.is_append_only:
        return lambda: _refill(storage, len(rows))
    try:
        old = storage.get(rows)
    except FormatError:  # rows that were never written: nobody counts them
        return lambda: None
    return lambda: storage.set(rows, old)


def _refill(storage: SpaceStorage, n: int) -> None:
    storage.shrink_length(n)
    storage.extend_length(n)
