"""Any interleaving of events moves batches only as the table says, and delivers each payload once or not at all."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.rollout.make import Gates, ListSink, check_doors, config, inner, is_open, settle

import recollect.rollout as rr
from recollect.errors import BatchAborted, BatchFailed, ClosedError, DeadlineError, PipelineError
from recollect.rollout.batch.state import MOVES, BatchLifecycleState
from recollect.testing import FakeClock

S = BatchLifecycleState
IDS = st.sampled_from([1, 2, "3/copy", "x"])
PICK = st.integers(
    0, 11
)  # which of those there are: threads end in any order, what is drawn must not depend on it


GATES: list[Gates] = []  # of the machine that runs


@rr.workflow("tests.machine.gated")
async def gated(task: Any, models: Any) -> Any:
    return await GATES[-1](task, models)


def picked(found: list[Any], pick: int) -> Any:
    return found[pick % len(found)] if found else None


def reachable(start: S) -> set[S]:
    """Where some moves of the table lead; staying is no move."""
    found = {start}
    while more := {to for state in found for to in MOVES[state]} - found:
        found |= more
    return found


class Plain:
    """What the table says of one batch, in as few words as possible."""

    def __init__(self, kind: str, n_tasks: int, repeats: int, least: int | None) -> None:
        self.kind, self.least = kind, least
        self.tasks = [dict.fromkeys(range(repeats), "live") for _ in range(n_tasks)]
        self.state = S.RUNNING if n_tasks else S.PENDING
        self.cut = False  # a pass was tried
        self.good_since: float | None = None

    def end(self, task: int, run: int, how: str, now: float) -> None:
        if self.state is S.RUNNING and not self.cut:
            self.tasks[task][run] = how
            if self.least and self.n_good == self.least and self.good_since is None:
                self.good_since = now

    @property
    def n_ended(self) -> int:
        return sum("live" not in task.values() for task in self.tasks)

    @property
    def n_good(self) -> int:
        return sum(set(task.values()) == {"good"} for task in self.tasks)

    def verdict(self, now: float, deadline: float, wait: float) -> str:
        """cut, failed, late or wait."""
        if self.cut:
            return "cut"
        n, need = len(self.tasks), self.least or min(1, len(self.tasks))
        if self.n_ended == n:
            return "cut" if self.n_good >= need else "failed"
        enough = self.least is not None and self.n_good >= self.least and self.good_since is not None
        if enough and (now >= self.good_since + wait or now >= deadline):
            return "cut"
        return "late" if now >= deadline else "wait"


class Machine(RuleBasedStateMachine):
    """One coordinator and one plain model of it through the same events."""

    wait_after_min_s = 5.0

    @initialize(
        stragglers=st.sampled_from(["cancel", "carry"]), runners=st.integers(1, 4), has_journal=st.booleans()
    )
    def start(self, stragglers: str, runners: int, has_journal: bool) -> None:
        self.loop = asyncio.new_event_loop()
        self.clock, self.sink, self.gates = FakeClock(), ListSink(), Gates()
        GATES[:] = [self.gates]
        self.place = Path(tempfile.mkdtemp()) if has_journal else None
        self.n_kills = 0
        self.live: dict[Any, Plain] = {}
        self.ended: dict[Any, S] = {}
        self.waiting: list[tuple[asyncio.Task[Any], Any, Plain, float]] = []
        self.seen: dict[int, S] = {}
        self.carries = stragglers == "carry"
        self.n_delivered = 0
        self.doors: Counter[str] = Counter()
        self.fields = {"runners": runners, "stragglers": stragglers}
        self.c = self.made()
        self.do(self.c.prepare())

    def made(self) -> Any:
        journal = None if self.place is None else str(self.place / f"{self.n_kills}.sqlite")
        return rr.RolloutCoordinator(
            config(
                sink=self.sink, wait_after_min_s=self.wait_after_min_s, attempt_timeout_s=50.0, drain_s=0.0,
                cancel_grace_s=1.0, journal=journal, **self.fields,
            ),
            [],
            clock=self.clock,
        )  # fmt: skip

    def teardown(self) -> None:
        if hasattr(self, "c"):
            for task, *_ in self.waiting:
                task.cancel()
            self.do(self.c.shutdown())
            self.loop.close()
            if self.place is not None:
                shutil.rmtree(self.place)

    def do(self, work: Any) -> Any:
        async def then_settle() -> Any:
            result = await asyncio.wait_for(work, 200)
            if is_open(self.c):
                await settle(self.c)
            return result

        result = self.loop.run_until_complete(then_settle())
        self.time_out()
        self.reap()
        return result

    def pause(self) -> None:
        self.do(asyncio.sleep(0))

    # -- what waits comes to its end as the model says

    def reap(self) -> None:
        """Compare every finalize that returned with the model, and move the model on."""
        for item in list(self.waiting):
            task, ident, plain, deadline = item
            if not task.done():
                continue
            self.waiting.remove(item)
            error = None if task.cancelled() else task.exception()
            said = plain.verdict(self.clock.now, deadline, self.wait_after_min_s)
            if task.cancelled():
                continue
            if error is None:
                result = task.result()
                assert plain.state in (S.RUNNING, S.PENDING, S.FINALIZED)
                if plain.state is not S.FINALIZED:
                    of_others = [
                        other.verdict(self.clock.now, at, self.wait_after_min_s)
                        for _, _, other, at in self.waiting
                        if other is plain
                    ]
                    assert "cut" in (said, *of_others), said  # one whose deadline came cuts for all
                    self.finish(ident, plain, S.FINALIZED)
                assert result["batch_id"] == ident and result["expected_task_count"] == len(plain.tasks)
                total = sum(
                    result[f"{k}_task_count"] for k in ("ok", "partial", "failed", "cancelled", "carried")
                )
                assert total == len(plain.tasks)
            elif isinstance(error, PipelineError):
                assert self.sink.fail is not None
                plain.cut = True
            elif isinstance(error, BatchAborted):
                assert plain.state is S.ABORTED
            elif isinstance(error, DeadlineError):
                assert said == "late", said
            elif isinstance(error, BatchFailed):
                assert said == "failed", said
            else:
                assert isinstance(error, ClosedError), error

    def finish(self, ident: Any, plain: Plain, state: S) -> None:
        plain.state = state
        if self.live.get(ident) is plain:
            del self.live[ident]
        self.ended[ident] = state
        self.count_doors(plain, state, ident)
        result = self.c.batch_state(ident).final_result if is_open(self.c) else None
        if result is not None:
            good = [task for task in plain.tasks if set(task.values()) == {"good"}]
            if plain.kind == "eval":
                self.n_delivered += sum(map(len, good))
            else:
                self.n_delivered += result["experience_count"]
                carried = result["metrics"].get("rollout/carried_in_count", 0)
                assert result["experience_count"] >= sum(map(len, good))
                assert carried or result["experience_count"] == sum(map(len, good))

    def count_doors(self, plain: Plain, state: S, ident: Any) -> None:
        """By which door each run of a batch that has ended must have left."""
        is_delivered = state is S.FINALIZED or (
            is_open(self.c) and self.c.batch_state(ident).final_result is not None
        )
        for task in plain.tasks:
            door = {"good": "unused", "failed": "failed", "live": "cancelled"}
            if is_delivered and set(task.values()) == {"good"}:
                door["good"] = "delivered"
            self.doors.update(door[how] for how in task.values())

    # -- events

    @rule(ident=IDS, kind=st.sampled_from(["train", "train", "eval"]), n=st.sampled_from([2, 1, 3, 0]),
          repeats=st.integers(1, 2), least=st.sampled_from([None, 1, None, 2, 3]))  # fmt: skip
    def submit(self, ident: Any, kind: str, n: int, repeats: int, least: int | None) -> None:
        tasks = [rr.Task("tests.machine.gated", repeat_times=repeats) for _ in range(n)]
        work = self.c.submit_batch(batch_id=ident, tasks=tasks, batch_type=kind, min_wait_num=least)
        if ident in self.live or (least is not None and least > n):
            before = self.c.stats()
            try:
                self.do(work)
            except ValueError:
                assert self.c.stats().runs == before.runs
                return
            raise AssertionError("must be refused")
        self.do(work)
        self.ended.pop(ident, None)
        self.live[ident] = Plain(kind, n, repeats, least)

    @rule(ends=st.lists(st.tuples(PICK, st.sampled_from(["good", "good", "failed"])), min_size=1, max_size=6))
    def end_runs(self, ends: list[tuple[int, str]]) -> None:
        for pick, how in ends:
            self.end_run(pick, how)

    @rule(pick=PICK, n_most=st.integers(1, 6))
    def work_off(self, pick: int, n_most: int) -> None:
        """A batch whose runs are good, most of them or all, and a finalize that takes what there is."""
        ident = picked(sorted(self.live, key=repr), pick)
        for _ in range(n_most):
            own = [key for key in sorted(self.gates.waiting, key=repr) if key[0] == ident]
            if own:
                self.end_run(sorted(self.gates.waiting, key=repr).index(own[0]), "good")
        self.finalize(pick, 0.0)

    def end_run(self, pick: int, how: str) -> None:
        key = picked(sorted(self.gates.waiting, key=repr), pick)
        if key is None:
            return
        plain = self.live.get(key[0])
        self.gates.end(key, None if how == "good" else ValueError("no"))
        if plain is not None and self.is_current(key):
            plain.end(key[1], key[2], how, self.clock.now)
        self.pause()

    def is_current(self, key: Any) -> bool:
        """Whether a run is of the live batch of that id, not one that an earlier batch of the id left behind."""
        batch = inner(self.c).batches.get(key[0])
        return batch is not None and any(
            a.unit.task.task_id == key[1] and key[2] in a.unit.run_ids and a.is_live for a in batch.running
        )

    @rule(seconds=st.sampled_from([0.5, 2.0, 10.0, 60.0]))
    def pass_time(self, seconds: float) -> None:
        end = self.clock.now + seconds
        while self.clock.now < end:
            self.clock.advance(0.25)
            self.pause()

    def time_out(self) -> None:
        """The model's runs fail where attempts were stopped at their limit."""
        for ident, plain in self.live.items():
            batch = inner(self.c).batches.get(ident)
            for task in () if batch is None else batch.tasks:
                for run, error in task.failed.items():
                    if plain.tasks[task.task_id][run] == "live":
                        assert "limit of 50 s" in error
                        plain.end(task.task_id, run, "failed", self.clock.now)

    @rule(pick=PICK, timeout=st.sampled_from([0.0, 3.0, 100.0]))
    def finalize(self, pick: int, timeout: float) -> None:
        ident = picked(sorted(self.live, key=repr), pick)
        if ident is None:
            return
        plain = self.live[ident]
        call = self.c.finalize_train_batch if plain.kind == "train" else self.c.finalize_eval_batch
        task = self.loop.create_task(call(ident, timeout=timeout))
        self.waiting.append((task, ident, plain, self.clock.now + timeout))
        self.pause()

    @rule(pick=PICK, keep=st.booleans())
    def abort(self, pick: int, keep: bool) -> None:
        ident = picked(sorted(self.live, key=repr), pick)
        if ident is None:
            return
        plain = self.live[ident]
        keeps = keep and bool(plain.tasks)
        was, plain.state = plain.state, S.ABORTED
        try:
            self.do(self.c.abort_batch(ident, reason="told to", keep_partial_results=keep))
        except PipelineError:
            assert keeps and self.sink.fail is not None
            plain.state, plain.cut = was, True
            return
        self.finish(ident, plain, S.ABORTED)

    @rule(fail=st.sampled_from([None, "before", "after"]))
    def break_sink(self, fail: str | None) -> None:
        self.sink.fail = fail

    @rule(pick=PICK)
    def cancel_a_waiter(self, pick: int) -> None:
        waiter = picked(self.waiting, pick)
        if waiter is not None:
            waiter[0].cancel()
            self.pause()

    @rule()
    def restart(self) -> None:
        if self.place is None:
            for ident, plain in list(self.live.items()):
                self.finish(ident, plain, S.ABORTED)
        self.do(self.c.shutdown())
        self.prepare_again()

    @precondition(lambda self: getattr(self, "place", None) is not None)
    @rule()
    def kill(self) -> None:
        """Another coordinator goes on from what the journal holds now; what the old one records is not read."""
        assert self.place is not None
        self.do(inner(self.c).journal.flush())
        old, name = self.c, f"{self.n_kills}.sqlite"
        self.n_kills += 1
        for file in self.place.glob(f"{name}*"):
            shutil.copy(file, self.place / file.name.replace(name, f"{self.n_kills}.sqlite"))
        self.do(old.shutdown())
        self.c = self.made()
        self.n_delivered = 0
        self.doors.clear()
        self.seen.clear()
        self.prepare_again()

    def prepare_again(self) -> None:
        self.do(self.c.prepare())
        for plain in self.live.values():
            plain.good_since = None
            if plain.least and plain.n_good >= plain.least:
                plain.good_since = self.clock.now

    # -- what always holds

    @invariant()
    def states_agree(self) -> None:
        if not hasattr(self, "c"):
            return
        for ident, plain in self.live.items():
            found = self.c.batch_state(ident)
            assert found.state is plain.state, ident
            assert plain.cut or found.completed_task_count == plain.n_ended, ident
        for ident, state in self.ended.items():
            assert self.c.batch_state(ident).state is state, ident
        for batch in inner(self.c).batches.values():
            assert batch.state.state in reachable(self.seen.get(batch.serial, S.PENDING))
            self.seen[batch.serial] = batch.state.state

    @invariant()
    def nothing_is_lost_or_doubled(self) -> None:
        if not hasattr(self, "c"):
            return
        check_doors(self.c)
        uids = self.sink.uids
        assert len(uids) == len(set(uids))
        runs = self.c.stats().runs
        assert runs.delivered == self.n_delivered  # one row per run here
        if not self.carries:  # else a run may leave with another batch than it came with
            for door in ("delivered", "unused", "failed", "cancelled"):
                assert getattr(runs, door) == self.doors[door], (door, runs, self.doors)

    @invariant()
    def waiters_wait_for_a_reason(self) -> None:
        if not hasattr(self, "c"):
            return
        for task, ident, plain, deadline in self.waiting:
            if not task.done() and self.live.get(ident) is plain:
                assert plain.verdict(self.clock.now, deadline, self.wait_after_min_s) == "wait"
                assert self.c.why_waiting(ident) is not None


TestMachine = Machine.TestCase
if settings.default.max_examples <= 50:  # the ordinary profile; `make soak` runs many more
    TestMachine.settings = settings(settings.default, max_examples=15)
