"""What a pipeline tells of itself: trace slices, one line or one csv row for each tick, and counts."""

from __future__ import annotations

import csv
import inspect
import logging
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from time import monotonic_ns
from typing import Any

from recollect.ipc.replay_pipelines.base import ReplayTickMetadata

_log = logging.getLogger("recollect.ipc.replay_pipelines")
CSV_NAME = "pack_fields.csv"
COLUMNS = [*(f.name for f in fields(ReplayTickMetadata)), "redrawn", "pack_us", "copy_us", "wait_us"]


@dataclass(frozen=True, slots=True)
class PipelineStats:
    """Running totals. started = ticks + failed + what is pending or ready now (or was when it was closed).

    ticks = hits (the batch was ready when it was asked for) + misses. Times are sums over ticks, in microseconds.
    """

    started: int
    ticks: int
    hits: int
    misses: int
    failed: int
    takeovers: int
    redrawn: int
    pack_us: float
    copy_us: float
    wait_us: float


class PipelineTrace:
    """A recorder that cannot stop training: its first exception ends the tracing."""

    def __init__(self, recorder: Any, gpu: bool = False) -> None:
        self._recorder, self._gpu = recorder, gpu
        self._by_name: dict[str, bool] = {}  # methods that take some of their arguments by name alone

    def slice(self, name: str, start_ns: int, **args: Any) -> None:
        """Record what began at `start_ns` and ends now."""
        if self._recorder is not None:
            full = f"replay_pipeline/{name}"
            self._record(
                "add_slice",
                name=full,
                category="replay_pipeline",
                start_ns=start_ns,
                end_ns=monotonic_ns(),
                args=args,
            )

    def count(self, name: str, value: int) -> None:
        """Record a running total."""
        if self._recorder is not None:
            self._record("add_counter", name=f"replay_pipeline/{name}", ts_ns=monotonic_ns(), value=value)

    def copy(self, transfer: Any, slot: int, **args: Any) -> None:
        """Record the copy between a backend's two events, once they have passed."""
        if self._recorder is not None and self._gpu and hasattr(transfer, "trace_events"):
            start, end = transfer.trace_events(slot)
            name = "gpu/replay_pipeline_batch_h2d"
            self._record("add_cuda_pending_span", name=name, start_event=start, end_event=end, args=args)

    def _record(self, method: str, **values: Any) -> None:
        try:
            record = getattr(self._recorder, method)
            if method not in self._by_name:
                self._by_name[method] = not _takes_places(record, len(values))
            if self._by_name[method]:
                record(**values)
            else:
                record(*values.values())
        except Exception:
            self._recorder = None
            _log.warning("the trace recorder failed; tracing ends here", exc_info=True)


def _takes_places(method: Any, n: int) -> bool:
    try:
        inspect.signature(method).bind(*range(n))
    except TypeError:
        return False
    except ValueError:  # not written in Python
        pass
    return True


class TickLog:
    """One line in the log and one row in `pack_fields.csv` for each tick, as far as asked for.

    Ownership: the file is open until `close()`. Concurrency: one thread at a time.
    """

    def __init__(self, verbose: bool, output_dir: Any) -> None:
        self._verbose, self._file = verbose, None
        if output_dir is not None:
            folder = Path(output_dir)
            folder.mkdir(parents=True, exist_ok=True)
            self._file = open(folder / CSV_NAME, "w", newline="")  # noqa: SIM115
            self._rows = csv.writer(self._file)
            self._rows.writerow(COLUMNS)

    def write(self, metadata: ReplayTickMetadata, **figures: float) -> None:
        """Tell of one tick."""
        row = asdict(metadata) | {k: round(v, 1) for k, v in figures.items()}
        if self._verbose:
            _log.info("replay pipeline: %s", " ".join(f"{k}={v}" for k, v in row.items()))
        if self._file is not None:
            self._rows.writerow(["" if row[k] is None else row[k] for k in COLUMNS])

    def close(self) -> None:
        """Write out and close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None
