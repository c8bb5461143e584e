"""Why a batch is not done, in sentences."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from recollect.rollout.batch.records import BatchRecord
from recollect.rollout.batch.state import BatchLifecycleState
from recollect.rollout.scheduler import Scheduler

S = BatchLifecycleState


@dataclass(frozen=True, slots=True)
class Waiting:
    """Why a batch is not done, worst first; prints as sentences."""

    batch_id: Any
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        return "; ".join(self.reasons)


SHOWN = 8


def why_waiting(batch: BatchRecord, scheduler: Scheduler, stage: str | None, now: float) -> Waiting:
    """Return every reason that the batch has not been delivered."""
    state = batch.state
    if not batch.admitted:
        return Waiting(batch.id, (f"not admitted: {batch.not_admitted}",))
    reasons = [_count(batch)]
    if batch.last_failure is not None and state.state is not S.FINALIZING:
        return Waiting(batch.id, (f"the last pass failed: {batch.last_failure}",))
    if state.state is S.FINALIZING:
        return Waiting(batch.id, (f"in {stage}" if stage else "waiting for another pass",))
    if scheduler.broken is not None:
        reasons.append(f"no runner can be started: {scheduler.broken}")
    pool = scheduler.pool
    if pool.n_fenced >= pool.size:
        reasons.append(
            f'all {pool.size} runners are fenced: their code ignores its cancel; use runner="process"'
        )
    reasons += [
        _running(a, scheduler, now) for a in sorted(batch.running, key=lambda a: a.started_at)[:SHOWN]
    ]
    for unit in sorted(batch.backing_off, key=lambda u: u.backs_off_until or 0)[:SHOWN]:
        wait = (unit.backs_off_until or now) - now
        last = unit.error.strip().rpartition("\n")[2]
        reasons.append(f"{_named(unit)}: backing off for {wait:.1f} s after attempt {unit.attempts}, {last}")
    n_ready = batch.n_queued - sum(len(u.run_ids) for u in batch.backing_off)
    if n_ready:
        reasons.append(f"{n_ready} runs queued{_behind(batch, scheduler)}")
    if (
        state.min_wait_num
        and batch.min_reached_at is not None
        and state.completed_task_count < state.expected_task_count
    ):
        left = batch.min_reached_at + batch.config.wait_after_min_s - now
        reasons.append(f"waiting {max(left, 0):.1f} s for more after the minimum")
    if batch.running or n_ready or batch.backing_off:
        return Waiting(batch.id, tuple(reasons))
    return Waiting(batch.id, (*reasons, "nobody has finalized it"))


def _count(batch: BatchRecord) -> str:
    need = batch.state.min_wait_num or batch.state.expected_task_count
    return f"{batch.n_good} of {need} good"


def _named(unit: Any) -> str:
    return f"task {unit.task.task_id} run {unit.run_ids[0]}"


def _running(attempt: Any, scheduler: Scheduler, now: float) -> str:
    config, task = scheduler.config, attempt.unit.task
    most = (config.max_retries if task.max_retries is None else task.max_retries) + 1
    doing = scheduler.pool.doing(attempt.id)
    text = f"{_named(attempt.unit)}: attempt {attempt.number} of {most} on runner {attempt.runner}"
    text += f", {now - attempt.started_at:.0f} s"
    text += f", in {doing}" if doing else ""
    return text if attempt.is_live else f"{text}, being stopped"


def _behind(batch: BatchRecord, scheduler: Scheduler) -> str:
    ahead = [b.id for b in scheduler.batches if b.order < batch.order and (b.has_work() or b.running)]
    if scheduler.staged_nbytes > scheduler.config.max_staged_nbytes:
        return f": {scheduler.staged_nbytes:,} bytes staged, over max_staged_nbytes; finalize an older batch"
    if batch.is_eval and scheduler.n_eval_running >= scheduler._eval_most():
        return ": eval holds its share of the runners while train work waits"
    return f" behind {ahead}" if ahead else f": all {scheduler.pool.size} runners are busy"
