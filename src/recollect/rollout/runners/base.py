"""The seam to runners: a pool takes attempts, reports their runs, and can stop any of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from recollect.rollout.event_loop import Threads
    from recollect.rollout.experience.space import ExperiencePlan
    from recollect.rollout.models.replicas import ModelPool
    from recollect.rollout.runners.execute import LoopLag
    from recollect.rollout.tasks import AttemptSpec, RunOutcome


class RunnerReports(Protocol):
    """What a pool tells the scheduler; all calls come in the coordinator's event loop."""

    def run_ended(self, attempt_id: int, outcome: RunOutcome) -> None: ...
    def attempt_ended(self, attempt_id: int, error: str = "") -> None: ...
    def runner_lost(self, runner: int, attempt_id: int | None, why: str) -> None: ...
    def runners_changed(self) -> None: ...
    def runners_broken(self, why: str) -> None: ...


@dataclass(frozen=True, slots=True)
class RunnerContext:
    """What a pool needs of the coordinator."""

    reports: RunnerReports
    config: Any
    models: ModelPool
    plan: ExperiencePlan
    threads: Threads
    lag: LoopLag
    clock: Any
    tell: Callable[[str, float], None] | None = None  # of model calls, for a trace


class RunnerPool(Protocol):
    """A fixed number of places for attempts; `recollect.testing.RunnerContract` is its suite."""

    size: int

    @property
    def n_fenced(self) -> int:
        """How many attempts go on though they were given up."""

    async def start(self) -> None:
        """Start the runners; WorkerDiedError if none can be."""

    def n_free(self) -> int:
        """How many attempts could start now."""

    def launch(self, spec: AttemptSpec, workflow: Any, avoid: int) -> int:
        """Start an attempt on a free runner, not `avoid` if there is another; return which."""

    def cancel(self, attempt_id: int) -> None:
        """Ask an attempt to stop."""

    def kill(self, attempt_id: int) -> None:
        """Make an attempt stop, or fence it; `attempt_ended` follows at once or when it is dead."""

    def synced(self) -> None:
        """Rollout models serve another version from now on."""

    def doing(self, attempt_id: int) -> str | None:
        """The model call that an attempt is in, if that is known."""

    def n_alive(self) -> int:
        """How many runners there are."""

    async def close(self) -> None:
        """Stop everything."""


def make_pool(context: RunnerContext) -> RunnerPool:
    """Return a pool of the config's kind; it is not started."""
    kind = context.config.runner
    if kind == "local":
        from recollect.rollout.runners.local import LocalPool

        return LocalPool(context)
    if kind == "process":
        from recollect.rollout.runners.process import ProcessPool

        return ProcessPool(context)
    from recollect.rollout.runners.ray import RayPool

    return RayPool(context)
