"""What the system gives, one concern a module: the means of Linux, or what POSIX has.

Memory that processes share is in `recollect.memory.descriptor`, waits and words of processes are in the core. All of
them ask `is_portable()`, which is settled when the process begins: RECOLLECT_PORTABLE=1 in the environment, or a system
without the means of Linux, or a core that was built without them.
"""

from __future__ import annotations

from recollect.system.switch import is_portable

__all__ = ["is_portable"]
