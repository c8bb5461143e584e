"""A local carrier that a test can look into. In a module of its own: spawned children import it."""

from __future__ import annotations

from recollect.remote import LocalCarrier


class Local(LocalCarrier):
    """A local carrier that tells a test what its threads wait for."""

    def is_led(self) -> bool:
        return self._leader.is_led

    def is_idle(self) -> bool:
        """No frame waits for a peer, and no thread looks for one."""
        return not self._absent and self._flusher is None

    def addresses(self) -> list[bytes]:
        return self._addresses(self.rank)

    def n_overflow(self) -> int:
        """Frames that other ends of this process sent and that have no room here."""
        return len(self._overflow)
