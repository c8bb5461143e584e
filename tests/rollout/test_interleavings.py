"""Calls that begin, overlap and are cancelled in any turn of the loop end as the table of a batch says."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from tests.rollout.make import Gates, ListSink, check_doors, config, experience, inner
from tests.rollout.test_state_machine import picked, reachable

import recollect.rollout as rr
from recollect.errors import BatchAborted, BatchFailed, DeadlineError, PipelineError
from recollect.rollout.batch.state import ENDED, BatchLifecycleState
from recollect.testing import FakeClock

S = BatchLifecycleState
IDS = st.sampled_from([1, 2, "3/x"])
PICK = st.integers(0, 11)
TURNS = st.sampled_from([0, 0, 1, 1, 2, 3, 5, 20])


class TurnThreads:
    """Calls happen in the loop, in the turn after their start or when they are let go: each order can be had again."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop, self.is_held = loop, False
        self.held: list[Callable[[], None]] = []

    def call(self, function: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        future = self.loop.create_future()

        def work() -> None:  # like a thread also after its call was cancelled
            try:
                value, error = function(*args), None
            except Exception as raised:
                value, error = None, raised
            if not future.done():
                future.set_result(value) if error is None else future.set_exception(error)

        if self.is_held:
            self.held.append(work)
        else:
            self.loop.call_soon(work)
        return future

    def let_go(self) -> None:
        self.is_held = False
        while self.held:
            self.loop.call_soon(self.held.pop(0))


class Turns(RuleBasedStateMachine):
    """One coordinator; what is started is looked at in the very turn in which it ends."""

    @initialize(
        partial=st.sampled_from(["keep", "drop"]),
        stragglers=st.sampled_from(["cancel", "carry"]),
        runners=st.integers(1, 4),
        max_batches=st.integers(1, 3),
    )
    def start(self, partial: str, stragglers: str, runners: int, max_batches: int) -> None:
        self.loop = asyncio.new_event_loop()
        self.troubles: list[Any] = []
        self.loop.set_exception_handler(lambda loop, context: self.troubles.append(context))
        self.clock, self.sink, self.gates = FakeClock(), ListSink(), Gates()
        made = config(
            partial_results=partial, stragglers=stragglers, runners=runners, max_batches=max_batches, sink=self.sink,
            attempt_timeout_s=50.0, cancel_grace_s=1.0, submit_timeout_s=20.0, wait_after_min_s=5.0,
            pipeline_timeout_s=30.0,
        )  # fmt: skip
        self.c = rr.RolloutCoordinator(made, [], clock=self.clock)
        self.calls: list[asyncio.Task[Any]] = []
        self.seen: dict[int, S] = {}
        self.loop.run_until_complete(self.c.prepare())
        self.context = inner(self.c)
        self.threads: Any = TurnThreads(self.loop)
        self.context.pipeline.threads = self.context.threads = self.threads
        self.threads.close = lambda: None

    def turns(self, n: int) -> None:
        async def some() -> None:
            for _ in range(n):
                await asyncio.sleep(0)

        self.loop.run_until_complete(some())
        for call in [call for call in self.calls if call.done()]:
            self.calls.remove(call)
            if not call.cancelled():
                call.result()

    def begin(self, call: Coroutine[Any, Any, None], n: int) -> None:
        self.calls.append(self.loop.create_task(call))
        self.turns(n)

    # -- calls, and what must be true in the turn in which each ends

    async def submits(self, ident: Any, kind: Any, n: int, repeats: int, least: int | None) -> None:
        tasks = [rr.Task(self.gates, repeat_times=repeats) for _ in range(n)]
        before = {id(batch) for batch in self.context.batches.values()}
        try:
            await self.c.submit_batch(batch_id=ident, tasks=tasks, batch_type=kind, min_wait_num=least)
        except ValueError:
            assert id(self.context.batches.get(ident)) in before
        except (BatchAborted, DeadlineError, asyncio.CancelledError):
            found = self.context.batches.get(ident)
            assert found is None or found.admitted or id(found) in before or any(
                sub.batch is found for sub in self.context.waiting
            )  # fmt: skip

    async def finalizes(self, ident: Any, kind: str, timeout: float, below_min: str) -> None:
        batch = self.context.batches.get(ident)
        call = self.c.finalize_train_batch if kind == "train" else self.c.finalize_eval_batch
        try:
            result = await call(ident, timeout=timeout, below_min=below_min)
        except BatchAborted:
            assert batch is None or batch.state.state is S.ABORTED or batch.aborting is not None
        except PipelineError:
            assert batch is not None and batch.state.state is not S.FINALIZED
        except (KeyError, ValueError, DeadlineError, BatchFailed, asyncio.CancelledError):
            pass
        else:
            assert result["batch_id"] == ident
            assert batch is None or (batch.state.state is S.FINALIZED and batch.state.final_result == result)

    async def aborts(self, ident: Any, keep: bool) -> None:
        batch = self.context.batches.get(ident)
        try:
            await self.c.abort_batch(ident, reason="told to", keep_partial_results=keep)
        except PipelineError:
            assert keep
        except asyncio.CancelledError:
            pass
        else:
            if batch is not None:
                assert self.context.batches.get(ident) is not batch
                assert batch.state.state in ENDED or not batch.admitted
                assert not batch.running

    async def processes(self, n: int) -> None:
        group = self.context.next_group = self.context.next_group + 1
        payloads = [rr.encode([experience()], group_id=group, run_id=i) for i in range(n)]
        with suppress(PipelineError, asyncio.CancelledError):
            await self.c.process_experiences(payloads)

    # -- events

    @rule(ident=IDS, kind=st.sampled_from(["train", "train", "eval"]), n=st.sampled_from([1, 2, 0]),
          repeats=st.integers(1, 3), least=st.sampled_from([None, 1]), turns=TURNS)  # fmt: skip
    def submit(self, ident: Any, kind: str, n: int, repeats: int, least: int | None, turns: int) -> None:
        self.begin(self.submits(ident, kind, n, repeats, least if n else None), turns)

    @rule(ident=IDS, kind=st.sampled_from(["train", "train", "eval"]), timeout=st.sampled_from([0.0, 8.0, 100.0]),
          below_min=st.sampled_from(["raise", "accept"]), turns=TURNS)  # fmt: skip
    def finalize(self, ident: Any, kind: str, timeout: float, below_min: str, turns: int) -> None:
        self.begin(self.finalizes(ident, kind, timeout, below_min), turns)

    @rule(ident=IDS, keep=st.booleans(), turns=TURNS)
    def abort(self, ident: Any, keep: bool, turns: int) -> None:
        self.begin(self.aborts(ident, keep), turns)

    @rule(n=st.integers(1, 2), turns=TURNS)
    def process(self, n: int, turns: int) -> None:
        self.begin(self.processes(n), turns)

    @rule(pick=PICK, turns=TURNS)
    def cancel(self, pick: int, turns: int) -> None:
        call = picked(self.calls, pick)
        if call is not None:
            call.cancel()
            self.turns(turns)

    @rule(ends=st.lists(st.tuples(PICK, st.sampled_from(["good", "good", "failed"])), min_size=1, max_size=4),
          turns=TURNS)  # fmt: skip
    def end_runs(self, ends: list[tuple[int, str]], turns: int) -> None:
        for pick, how in ends:
            key = picked(sorted(self.gates.waiting, key=repr), pick)
            if key is not None and not self.gates.waiting[key].done():
                self.gates.end(key, None if how == "good" else ValueError("no"))
        self.turns(turns)

    @rule(fail=st.sampled_from([None, "before", "after"]))
    def break_sink(self, fail: str | None) -> None:
        self.sink.fail = fail

    @rule()
    def hold_passes(self) -> None:
        self.threads.is_held = True

    @rule(turns=TURNS)
    def let_passes_go(self, turns: int) -> None:
        self.threads.let_go()
        self.turns(turns)

    @rule(turns=TURNS)
    def one_step_of_a_pass(self, turns: int) -> None:
        if self.threads.held:
            self.loop.call_soon(self.threads.held.pop(0))
        self.turns(turns)

    @rule(seconds=st.sampled_from([1.0, 10.0, 60.0]), turns=TURNS)
    def pass_time(self, seconds: float, turns: int) -> None:
        self.clock.advance(seconds)
        self.turns(turns)

    # -- what always holds

    @invariant()
    def all_is_counted_and_nothing_doubled(self) -> None:
        if not hasattr(self, "c"):
            return
        assert not self.troubles, self.troubles
        check_doors(self.c)
        assert len(self.sink.uids) == len(set(self.sink.uids))
        for batch in self.context.batches.values():
            assert batch.state.state in reachable(self.seen.get(batch.serial, S.PENDING))
            self.seen[batch.serial] = batch.state.state
            assert (batch.state.state is S.FINALIZING) == (batch.passing is not None)
            assert batch.admitted or any(sub.batch is batch for sub in self.context.waiting)

    def teardown(self) -> None:
        if not hasattr(self, "c"):
            return
        try:
            self.sink.fail = None
            self.threads.let_go()
            for _ in range(8):  # every deadline passes, and whoever waits is told
                self.clock.advance(60.0)
                self.turns(60)
            assert not self.calls, self.calls
            self.all_is_counted_and_nothing_doubled()
            for ident in list(self.context.batches):
                self.loop.run_until_complete(self.aborts(ident, False))
            for _ in range(3):
                self.clock.advance(60.0)
                self.turns(30)
            stats = self.c.stats()
            if not self.context.carriers:
                assert (stats.runs.live, stats.staged_nbytes, stats.queue.queued_runs) == (0, 0, 0), stats
            self.loop.run_until_complete(self.c.shutdown())
            self.turns(5)
            assert not self.troubles, self.troubles
            assert not asyncio.all_tasks(self.loop)
        finally:
            self.gates.let_go()
            self.loop.close()


TestTurns = Turns.TestCase
if settings.default.max_examples <= 50:  # the ordinary profile; `make soak` runs many more
    TestTurns.settings = settings(settings.default, max_examples=25)
