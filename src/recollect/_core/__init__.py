"""The native core: packed rows, stamps, trees, waits on shared words, crc32c.

Its functions trust their callers with meaning (which space, which lane) and nobody with memory: bounds and
sizes are checked before a byte moves. `_native.pyi` has the signatures.
"""

from __future__ import annotations

from recollect._core import _native
from recollect._core._native import *  # noqa: F403
from recollect.system.switch import be_portable, is_portable

if _native.IS_PORTABLE:
    be_portable()
if is_portable():
    from recollect.system.directory import directory_id, shared_directory, sweep

    _native.use_portable(str(shared_directory()), directory_id())
    sweep()
