"""Phases: the phases of a loop as slices of a trace."""

from __future__ import annotations

import logging
from typing import Any

_log = logging.getLogger(__name__)


class Phases:
    """Records what a loop did, phase by phase; a recorder that fails ends the tracing, not the loop.

    `names` gives phases another name than `<process>/<phase>`. Concurrency: the thread of the loop.

    >>> from recollect.observe import TraceRecorder
    >>> with TraceRecorder("phases.json") as trace:
    ...     Phases(trace, "learner", wait="ring/read_wait").add("wait", 1_000, 2_000)
    """

    def __init__(self, recorder: Any, process: str, **names: str) -> None:
        self._recorder, self._process, self._names = recorder, process, names
        if recorder is not None:
            recorder.name_process(process)

    def add(self, phase: str, start_ns: int, end_ns: int) -> None:
        """Record one phase from one `time.monotonic_ns()` to another."""
        if self._recorder is None:
            return
        name = self._names.get(phase, f"{self._process.split()[0]}/{phase}")
        try:
            self._recorder.add_slice(name, self._process, start_ns, end_ns)
        except Exception:
            self._recorder = None
            _log.warning("the trace recorder failed; tracing ends here", exc_info=True)
