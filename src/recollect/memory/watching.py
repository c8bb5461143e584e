"""Looking after others while one waits for them."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic

LOOK_S = 0.1  # between looks of whoever watches


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
