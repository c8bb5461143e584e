"""The native core: packed rows, stamps, trees, waits on shared words, crc32c.

Its functions trust their callers with meaning (which space, which lane) and nobody with memory: bounds and
sizes are checked before a byte moves. `_native.pyi` has the signatures.
"""

from __future__ import annotations

from recollect._core._native import *  # noqa: F403
