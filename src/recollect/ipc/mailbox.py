"""What objects on one `Latest` share: their name, their version, their waits, their end, and how they pickle."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

from recollect.memory.latest import Latest


class Mailbox:
    """An object whose whole shared state is one `Latest`; a subclass gives values a form.

    `_setup(box, *options)` begins an object, made or attached; `_options()` is what a copy elsewhere begins with.

    Ownership: the memory goes with its last user; there is no name to unlink.
    Concurrency: as `Latest`: one writer process, any number of readers. Pickles to a small handle.
    """

    _box: Latest

    def _setup(self, box: Latest) -> None:
        self._box = box

    def _options(self) -> tuple[Any, ...]:
        return ()

    @classmethod
    def attach(cls, name: str, *options: Any) -> Self:
        """Return one over the mailbox of that name, in any process of the same user."""
        made = cls.__new__(cls)
        made._setup(Latest.attach(name), *options)
        return made

    @property
    def name(self) -> str:
        """The handle as text."""
        return self._box.name

    @property
    def version(self) -> int:
        """How many values were written so far; 0 before the first."""
        return self._box.version

    @property
    def nbytes(self) -> int:
        """Bytes of the segment; untouched pages cost nothing."""
        return self._box.nbytes

    def wait_newer(self, version: int, timeout: float | None = None) -> bool:
        """Wait until there is a version above `version`; False if `timeout` seconds (None: 60) passed."""
        return self._box.wait_newer(version, timeout)

    def watch(self, look: Callable[[], object] | None) -> None:
        """Have `look()` called in waits, every 100 ms; it may raise."""
        self._box.watch(look)

    def release_lane(self) -> None:
        """Let another process write."""
        self._box.release_lane()

    def close(self) -> None:
        """Detach this object; may be called twice."""
        self._box.close()

    def cleanup(self) -> None:
        """Close; in the process that made it, for everybody."""
        self._box.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self).attach, (self.name, *self._options())
