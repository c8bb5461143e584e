"""What the scheduler reports, and whom it concerns."""

from __future__ import annotations

from recollect.errors import WorkerDiedError
from recollect.rollout.batch.end import raise_in
from recollect.rollout.batch.finalize import look
from recollect.rollout.batch.records import TaskRecord
from recollect.rollout.batch.submit import admit
from recollect.rollout.context import Desk
from recollect.rollout.runners.execute import Outcome


class Reports:
    """The scheduler's owner: it passes on what finalizers, submitters and the journal must know."""

    def __init__(self, desk: Desk) -> None:
        self.desk = desk

    def task_ended(self, task: TaskRecord) -> None:
        batch, state = task.batch, task.batch.state
        if batch.finalizers and (
            len(state.statuses) == state.expected_task_count or state.min_wait_num or not task.is_fine
        ):
            look(self.desk, batch)

    def run_staged(self, task: TaskRecord, outcome: Outcome) -> None:
        if self.desk.journal is not None:
            self.desk.journal.run(task, outcome)

    def run_failed(self, task: TaskRecord, run_id: int, error: str) -> None:
        if self.desk.journal is not None:
            self.desk.journal.run(task, Outcome(run_id, False, 0.0, error=error, final=True))

    def room_made(self) -> None:
        if self.desk.waiting and self.desk.is_open:
            admit(self.desk)

    def runners_broken(self, why: str) -> None:
        for batch in self.desk.batches.values():
            raise_in(batch, WorkerDiedError(f"runners: none could be started; {why}"))
