"""Looking after others while one waits for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic

LOOK_S = 0.1  # between looks of whoever watches


_of_process: list[Callable[[], bool]] = []


@contextmanager
def watched_process(look: Callable[[], bool]) -> Iterator[None]:
    """Have `look()` called in the waits of everything that this process attaches meanwhile: it serves another."""
    _of_process[:] = [look]
    try:
        yield
    finally:
        _of_process.clear()


def process_watch() -> Watch | None:
    """What looks after a new object's waits until somebody says otherwise."""
    return Watch(_of_process[0]) if _of_process else None


class Watch:
    """Calls somebody's `look()` from waits: in slices of those that last, by the way in those that end at once.

    Who is always given at once what it waits for never sleeps; without a look by the way it would not hear of the
    one of its peers that is dead.

    Concurrency: any thread.
    """

    def __init__(self, look: Callable[[], object]) -> None:
        self._look, self._last = look, monotonic()

    def look(self) -> bool:
        """Look now; what it says or raises is the watcher's."""
        self._last = monotonic()
        return bool(self._look())

    def by_the_way(self) -> None:
        """Look if the last look is too long ago."""
        if monotonic() - self._last >= LOOK_S:
            self.look()
