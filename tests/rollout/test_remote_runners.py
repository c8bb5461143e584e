"""What runners elsewhere and the coordinator say to each other, with both sides in one loop and no process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, ClassVar

import msgspec
import numpy as np
import pytest
from tests.rollout.make import Gates, ListSink, check_doors, config, experience, run

import recollect.rollout as rr
from recollect.errors import BatchAborted, BatchFailed, ModelError, WorkerDiedError
from recollect.rollout.models.base import from_wire, to_wire
from recollect.rollout.models.openai import OpenAIModel
from recollect.rollout.runners import messages
from recollect.rollout.runners.child import RemoteModel, RunnerSession
from recollect.rollout.runners.remote import RemotePool, RemoteRunner
from recollect.rollout.tasks import AttemptSpec, RunOutcome
from recollect.testing import FakeClock

GATES: list[Gates] = []


@rr.workflow("tests.far.gated")
async def gated(task: Any, models: Any) -> Any:
    return await GATES[-1](task, models)


@rr.workflow("tests.far.asks")
async def asks(task: Any, models: Any) -> Any:
    [g] = await models.rollout.generate([1, 2, 3])
    if task.data.get("impatient"):
        call = asyncio.ensure_future(models.rollout.chat([{"role": "user", "content": "?"}]))
        for _ in range(5):
            await asyncio.sleep(0)
        call.cancel()
    logprobs = await models.rollout.logprobs([1, 2, 3, 4], 2)
    return rr.Result(g.experience(reward=float(len(logprobs))), {"version": models.rollout.version})


class NearRunner(RemoteRunner):
    """A runner whose far side is here; a deaf one hears nothing."""

    is_deaf = False

    def __init__(self, number: int, on_message: Any, on_death: Any) -> None:
        super().__init__(number, on_message, on_death)
        self.loop = asyncio.get_running_loop()
        loop = self.loop
        self.session = RunnerSession(lambda data: loop.call_soon(self.arrived, data) and None)
        self.immortal = self.is_gone = False
        self.n_kills = 0

    def arrived(self, data: bytes) -> None:
        if not self.is_dead:
            self.received(data)

    def send(self, data: bytes) -> None:
        self.loop.call_soon(self.heard, data)

    def heard(self, data: bytes) -> None:
        if not self.is_gone and not self.is_deaf:
            self.session.receive(data)

    def kill(self) -> None:
        self.n_kills += 1
        if not self.immortal:
            self.die("killed")

    def die(self, why: str) -> None:
        self.is_gone = True
        for task, *_ in self.session.attempts.values():
            task.cancel()
        self.loop.call_soon(self.died, why)

    async def closed(self) -> None:
        for task, *_ in self.session.attempts.values():
            task.cancel()
        self.session.threads.close()
        await asyncio.sleep(0)


class NearPool(RemotePool):
    """Runners in this process; `broken` is why none can be started."""

    broken: ClassVar[list[Exception]] = []
    made: ClassVar[list[NearPool]] = []
    pause_s = 0.0

    def __init__(self, context: Any) -> None:
        super().__init__(context, context.config.runners)
        self.made[:] = [self]

    async def make_runner(self, number: int) -> RemoteRunner:
        if self.broken:
            raise self.broken[0]
        return NearRunner(number, self.received, self.died)


@pytest.fixture(autouse=True)
def _near(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("recollect.rollout.runners.process.ProcessPool", NearPool)
    NearPool.broken, NearPool.pause_s = [], 0.0


@asynccontextmanager
async def coordinator(
    models: Any = (), auxiliary: Any = None, clock: Any = None, **fields: Any
) -> AsyncIterator[Any]:
    GATES[:] = [Gates()]
    given: dict[str, Any] = {"runner": "process", "runners": 1, "sink": ListSink(), "cancel_grace_s": 20.0}
    made: Any = rr.RolloutCoordinator(config(**given | fields), models, auxiliary, clock=clock)
    async with made:
        made.gates, made.list_sink = GATES[-1], made.sink
        try:
            yield made
        except BaseException:
            made.gates.let_go()
            raise
    left = asyncio.all_tasks() - {asyncio.current_task()}
    assert not left, left


def runners(c: Any) -> list[Any]:
    return list(NearPool.made[0].runners.values())


def attempt_id(c: Any) -> int:
    """The id of the one attempt that runs."""
    [found] = NearPool.made[0].by_attempt
    return found


async def some_turns() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def until(condition: Any) -> None:
    while not condition():
        await asyncio.sleep(0)


async def submit(c: Any, n: int = 1, name: str = "tests.far.gated", ident: Any = 1, **fields: Any) -> None:
    tasks = [rr.Task(name, **fields) for _ in range(n)]
    await c.submit_batch(batch_id=ident, tasks=tasks, batch_type="train")


# -- attempts


def test_a_retry_goes_to_another_runner() -> None:
    async def main() -> None:
        async with coordinator(runners=2, max_retries=1) as c:
            await until(lambda: len(runners(c)) == 2 and all(r.is_ready for r in runners(c)))
            await submit(c)
            await until(lambda: c.gates.waiting)
            first = NearPool.made[0].by_attempt[attempt_id(c)]
            c.gates.end((1, 0, 0), ValueError("no"))
            await until(lambda: len(c.gates.started) == 2)
            assert NearPool.made[0].by_attempt[attempt_id(c)] is not first
            c.gates.end((1, 0, 0))
            assert (await c.finalize_train_batch(1))["ok_task_count"] == 1

    run(main())


def test_a_runner_that_stops_its_attempt_in_time_is_kept() -> None:
    async def main() -> None:
        async with coordinator(attempt_timeout_s=0.01) as c:
            [runner] = runners(c)
            await submit(c)
            with pytest.raises(BatchFailed, match="limit of 0.01 s"):
                await c.finalize_train_batch(1)
            assert runners(c) == [runner] and runner.n_kills == 0
            check_doors(c)

    run(main())


def test_a_runner_whose_attempt_is_cancelled_before_it_began_is_kept() -> None:
    """Both messages arrive in one turn of its loop."""

    async def main() -> None:
        async with coordinator() as c:
            [runner] = runners(c)
            await submit(c)
            await c.abort_batch(
                1, reason="at once"
            )  # returns when it has really stopped, long before the grace
            assert runners(c) == [runner] and runner.n_kills == 0 and not c.gates.waiting
            assert c.stats().attempts.cancelled == 1
            check_doors(c)

    run(main(), 10)


def test_a_runner_that_does_not_stop_its_attempt_is_killed_after_the_grace_and_replaced() -> None:
    async def main() -> None:
        async with coordinator(attempt_timeout_s=0.01, cancel_grace_s=0.01) as c:
            [runner] = runners(c)
            c.gates.ignores_cancel = True
            await submit(c)
            with pytest.raises(BatchFailed, match="limit of 0.01 s"):
                await c.finalize_train_batch(1)
            assert runner.n_kills == 1 and runner.is_dead
            attempts = c.stats().attempts
            assert (attempts.timed_out, attempts.lost) == (1, 0)  # it was killed, not lost
            c.gates.ignores_cancel = False
            c.gates.end((1, 0, 0))
            await until(lambda: runners(c) and runners(c)[0].is_ready)
            check_doors(c)

    run(main())


def test_a_dead_runner_is_replaced_whether_it_worked_or_not() -> None:
    async def main() -> None:
        async with coordinator() as c:
            stream = c.events()
            [idle] = runners(c)
            idle.die("idle")
            await until(lambda: idle.is_dead and runners(c) and runners(c)[0].is_ready)
            await submit(c)
            await until(lambda: c.gates.waiting)
            [busy] = runners(c)
            busy.die("busy")
            await until(lambda: len(c.gates.started) == 2)
            c.gates.end((1, 0, 0))
            result = await c.finalize_train_batch(1)
            assert result["metrics"]["rollout/requeue_count"] == 1 and c.stats().attempts.lost == 1
            await c.shutdown()
            died = [event.detail async for event in stream if event.kind == "runner_died"]
            assert died == ["runner 0: idle", "runner 0: busy"]

    run(main())


@rr.workflow("tests.far.turns")
async def turns(task: Any, models: Any) -> Any:
    [g] = await models.rollout.generate("?")
    await asyncio.sleep(0)
    return g.experience(reward=float(task.run_id))


@pytest.mark.parametrize("event", ["dies", "abort"])
def test_after_any_number_of_turns_a_runner_may_die_or_its_batch_be_aborted(event: str) -> None:
    """Each run of the others is delivered once; a runner that was only told to stop is kept."""

    async def main() -> None:
        async with coordinator([rr.ScriptedModel(["x"])], repeats_per_attempt=2) as c:
            ident, n_turns, is_done = 0, 0, False
            while not is_done:
                await until(lambda: any(runner.is_ready for runner in runners(c)))
                [runner] = runners(c)
                await submit(c, 2, "tests.far.turns", ident, repeat_times=3)
                waits = asyncio.create_task(c.finalize_train_batch(ident, timeout=20))
                for _ in range(n_turns):
                    await asyncio.sleep(0)
                is_done = waits.done()
                if event == "dies":
                    runner.die("now")
                    assert (await waits)["experience_count"] == 6, n_turns
                else:
                    await c.abort_batch(ident, reason="now")
                    [outcome] = await asyncio.gather(waits, return_exceptions=True)
                    assert isinstance(outcome, dict | BatchAborted), outcome
                    assert runners(c) == [runner] and runner.n_kills == 0, n_turns
                check_doors(c)
                stats = c.stats()
                assert (stats.runs.live, stats.attempts.running, stats.models[0].attempts) == (0, 0, 0), (
                    n_turns
                )
                assert stats.models[0].calls == 0 and len(c.list_sink.uids) == stats.runs.delivered
                ident, n_turns = ident + 1, n_turns + 1 + n_turns // 8
            assert ident > 20 and len(set(c.list_sink.uids)) == len(c.list_sink.uids)

    run(main())


def test_a_runner_that_outlives_its_kill_does_not_hold_up_shutdown() -> None:
    async def main() -> float:
        async with coordinator(cancel_grace_s=0.0) as c:
            c.gates.ignores_cancel = True
            await submit(c)
            await until(lambda: c.gates.waiting)
            [runner] = runners(c)
            runner.immortal = True
            start = asyncio.get_running_loop().time()
            await c.shutdown()
            took = asyncio.get_running_loop().time() - start
            c.gates.ignores_cancel = False
            for task, *_ in runner.session.attempts.values():
                task.cancel()
            for _ in range(3):
                await asyncio.sleep(0)
            return took

    assert run(main()) < 5.0


def test_a_workflow_that_has_no_name_cannot_go_to_a_runner() -> None:
    async def nameless(task: Any, models: Any) -> Any:
        return None

    async def main() -> None:
        async with coordinator() as c:
            with pytest.raises(TypeError, match="must have a name or an import path"):
                await c.submit_batch(batch_id=1, tasks=[rr.Task(nameless)], batch_type="train")
            assert c.batches() == []

    run(main())


# -- what comes from a runner is checked


def test_a_result_of_another_attempt_is_dropped() -> None:
    async def main() -> None:
        async with coordinator() as c:
            await submit(c)
            await until(lambda: c.gates.waiting)
            [runner] = runners(c)
            payload = rr.encode([experience()], group_id=1, run_id=0)
            stale = messages.Ran(attempt_id(c) + 1, RunOutcome(0, True, 0.1, payload=payload, n=1), True)
            runner.received(messages.encode(stale))
            assert runner.attempt_id == attempt_id(c) and c.stats().staged_nbytes == 0
            c.gates.end((1, 0, 0))
            assert (await c.finalize_train_batch(1))["experience_count"] == 1
            check_doors(c)

    run(main())


def test_a_malformed_payload_is_a_failed_attempt_and_counted() -> None:
    async def main() -> None:
        async with coordinator() as c:
            await submit(c)
            await until(lambda: c.gates.waiting)
            [runner] = runners(c)
            payload = rr.encode([experience()], group_id=1, run_id=0)[:-1]
            runner.received(
                messages.encode(
                    messages.Ran(attempt_id(c), RunOutcome(0, True, 0.1, payload=payload, n=1), True)
                )
            )
            with pytest.raises(BatchFailed, match="FormatError: payload"):
                await c.finalize_train_batch(1)
            assert c.stats().payloads_refused == 1 and c.stats().staged_nbytes == 0

    run(main())


@pytest.mark.parametrize("data", [b"\xc1", b"\x92\xa6Broken\xa1\xff", b"\x92\xa6Broken" + b"\x91" * 100_000])
def test_a_malformed_message_ends_its_runner_and_is_counted(data: bytes) -> None:
    """Also one whose text is not UTF-8, or that is nested without end."""

    async def main() -> None:
        async with coordinator() as c:
            [runner] = runners(c)
            runner.received(data)
            assert runner.n_kills == 1 and c.stats().payloads_refused == 1
            await until(lambda: runners(c) and runners(c) != [runner] and runners(c)[0].is_ready)
            await submit(c)
            await until(lambda: c.gates.waiting)
            c.gates.end((1, 0, 0))
            assert (await c.finalize_train_batch(1))["ok_task_count"] == 1

    run(main())


def test_a_runner_that_cannot_read_a_message_is_replaced_and_its_attempt_done_again() -> None:
    async def main() -> None:
        async with coordinator() as c:
            await submit(c)
            await until(lambda: c.gates.waiting)
            [runner] = runners(c)
            runner.send(b"\x92\xa6Answer\xa1\xff")
            await until(lambda: runners(c) and runners(c) != [runner] and c.gates.waiting)
            c.gates.end((1, 0, 0))
            assert (await c.finalize_train_batch(1))["ok_task_count"] == 1
            check_doors(c)

    run(main())


def test_an_answer_that_cannot_be_sent_is_an_error_of_the_call() -> None:
    class Odd(rr.ScriptedModel):
        async def generate(self, prompt: Any, **sampling: Any) -> Any:
            [found] = await super().generate(prompt, **sampling)
            found.finish_reason = object()
            return [found]

    async def main() -> None:
        async with coordinator([Odd(["5"])], max_retries=0) as c:
            await submit(c, name="tests.far.asks")
            with pytest.raises(BatchFailed, match="ModelError: TypeError"):
                await c.finalize_train_batch(1)
            check_doors(c)

    run(main())


# -- starting


def test_replacing_a_runner_backs_off_and_finalizers_hear_of_five_failures_in_a_row() -> None:
    async def main() -> None:
        clock = FakeClock()
        NearPool.pause_s = 0.1
        async with coordinator(clock=clock) as c:
            pool = NearPool.made[0]
            pool.pause_max_s = 1.0
            await submit(c)
            await until(lambda: c.gates.waiting)
            waits = asyncio.create_task(c.finalize_train_batch(1, timeout=100))
            await asyncio.sleep(0)
            NearPool.broken = [OSError("no memory")]
            runners(c)[0].die("killed")
            for n, pause in enumerate((0.1, 0.2, 0.4, 0.8, 1.0, 1.0), 1):
                await until(lambda n=n: pool.n_failed_starts == n)
                await asyncio.sleep(0)
                assert waits.done() is (n >= 5), n
                clock.advance(pause - 0.01)
                await some_turns()
                assert pool.n_failed_starts == n  # not before the pause is over
                clock.advance(0.02)
            with pytest.raises(WorkerDiedError, match="none could be started; OSError.*no memory"):
                await waits
            assert "no runner can be started" in str(c.why_waiting(1))
            await until(lambda: pool.n_failed_starts == 7)
            NearPool.broken = []
            clock.advance(1.0)
            await until(lambda: runners(c) and runners(c)[0].is_ready)
            assert pool.n_failed_starts == 0  # a good start begins the count again
            assert "no runner" not in str(c.why_waiting(1))
            await until(lambda: len(c.gates.started) == 2)
            c.gates.end((1, 0, 0))
            assert (await c.finalize_train_batch(1))["ok_task_count"] == 1

    run(main())


def test_a_runner_that_is_never_ready_is_replaced() -> None:
    async def main() -> None:
        clock = FakeClock()
        async with coordinator(clock=clock, runners=2) as c:
            await until(lambda: len(runners(c)) == 2 and all(r.is_ready for r in runners(c)))
            dead, _ = runners(c)
            NearRunner.is_deaf = True
            dead.die("killed")
            await until(lambda: dead.is_dead and len(runners(c)) == 2)
            [deaf] = [runner for runner in runners(c) if not runner.is_ready]
            clock.advance(59.9)
            await some_turns()
            assert deaf.n_kills == 0 and c.stats().runners.alive == 1
            NearRunner.is_deaf = False
            clock.advance(0.2)
            await until(lambda: deaf.is_dead)
            clock.advance(0.1)
            await until(lambda: len(runners(c)) == 2 and all(r.is_ready for r in runners(c)))
            assert clock.n_timers == 0  # an idle coordinator does not wake
            assert c.stats().runners.alive == 2 and deaf.n_kills == 1

    run(main())


def test_failed_starts_raise_nothing_while_another_runner_is_left() -> None:
    async def main() -> None:
        async with coordinator(runners=2) as c:
            await until(lambda: len(runners(c)) == 2 and all(r.is_ready for r in runners(c)))
            pool = NearPool.made[0]
            await submit(c, 2)
            await until(lambda: len(c.gates.waiting) == 2)
            waits = asyncio.create_task(c.finalize_train_batch(1, timeout=100))
            await asyncio.sleep(0)
            NearPool.broken = [OSError("no memory")]
            runners(c)[0].die("killed")
            await until(lambda: pool.n_failed_starts > 7)
            assert not waits.done() and c.stats().runners.alive == 1
            while not waits.done():
                for key in list(c.gates.waiting):
                    c.gates.end(key)
                await asyncio.sleep(0)
            assert (await waits)["ok_task_count"] == 2

    run(main())


def test_a_first_start_that_fails_five_times_raises_with_the_cause() -> None:
    async def main() -> None:
        NearPool.broken = [OSError("no memory")]
        c = rr.RolloutCoordinator(config(runner="process", runners=1), [])
        with pytest.raises(WorkerDiedError, match="none could be started; OSError.*no memory"):
            await c.prepare()
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run(main())


def test_a_module_that_cannot_be_imported_is_the_cause() -> None:
    async def main() -> None:
        c = rr.RolloutCoordinator(
            config(runner="process", runners=1, workflow_modules=("no_such_module",)), []
        )
        with pytest.raises(WorkerDiedError, match="no_such_module"):
            await c.prepare()

    run(main())


# -- models


class Counting(rr.ScriptedModel):
    """Says how many of its calls were cancelled, and hangs in chats."""

    n_cancelled = 0

    async def chat(self, messages: Any, **sampling: Any) -> Any:
        try:
            await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            self.n_cancelled += 1
            raise


def test_a_generation_is_the_same_at_the_other_end() -> None:
    about = {
        "prompt_length": 1,
        "finish_reason": "length",
        "version": 9,
        "message": {"tool_calls": [{"id": 1}]},
    }
    for leaves in ({"tokens": [1, 2, 3], "logprobs": [-0.5, -0.25]}, {}):
        g = from_wire(to_wire(rr.Generation("text", **about, **leaves)))
        assert {name: getattr(g, name) for name in about} == about and g.text == "text"
        for name in ("tokens", "logprobs"):
            found = getattr(g, name)
            assert (None if found is None else found.tolist()) == leaves.get(name)


def test_calls_travel_back_with_versions_and_logprobs() -> None:
    async def main() -> None:
        model = Counting(["abc"], version=7)
        async with coordinator([model]) as c:
            await submit(c, name="tests.far.asks", data={"impatient": True})
            result = await c.finalize_train_batch(1)
            assert (
                result["metrics"]["rollout/reward/mean"] == 2.0
                and result["metrics"]["rollout/version/mean"] == 7
            )
            [x] = c.list_sink.parts.values()
            assert x.model_version.tolist() == [7] and x.prompt_length.tolist() == [3]
            assert x.tokens.values.tolist() == [1, 2, 3, *b"abc"] and x.logprobs.values.tolist() == [-1.0] * 3
            assert model.n_cancelled == 1  # the attempt no longer waited for that answer
            assert c.stats().models[0].served == 2 and c.stats().models[0].calls == 0

    run(main())


def test_the_calls_of_an_attempt_that_is_over_are_cancelled() -> None:
    async def main() -> None:
        model = Counting(["abc"])

        async with coordinator([model]) as c:
            await submit(c)
            await until(lambda: c.gates.waiting)
            [runner] = runners(c)
            args = msgspec.msgpack.encode(([[{"role": "user", "content": "?"}]], {}))
            runner.received(messages.encode(messages.ModelCall(1, attempt_id(c), -1, "chat", args)))
            await until(lambda: c.stats().models[0].calls == 1)
            assert "in chat at rollout[0]" in str(c.why_waiting(1))
            waits = asyncio.create_task(c.finalize_train_batch(1))
            await asyncio.sleep(0)
            await c.abort_batch(1, reason="enough")
            with pytest.raises(BatchAborted):
                await waits
            await until(lambda: model.n_cancelled == 1)
            assert (c.stats().models[0].calls, c.stats().models[0].attempts) == (0, 0)

    run(main())


@pytest.mark.parametrize(
    ("fields", "said"),
    [({"method": "close"}, "no model call 'close'"), ({"attempt_id": 99}, "the attempt is over")],
)
def test_a_runner_calls_nothing_but_a_models_own_methods_and_for_its_own_attempt(
    fields: Any, said: str
) -> None:
    async def main() -> None:
        model = rr.ScriptedModel(["x"])
        async with coordinator([model]) as c:
            await submit(c)
            await until(lambda: c.gates.waiting)
            [runner] = runners(c)
            sent: list[Any] = []
            runner.send = lambda data: sent.append(messages.decode_down(data))
            given = {"attempt_id": attempt_id(c), "method": "generate"} | fields
            args = msgspec.msgpack.encode((["?"] if given["method"] != "close" else [], {}))
            runner.received(
                messages.encode(messages.ModelCall(1, given["attempt_id"], -1, given["method"], args))
            )
            await until(lambda: sent)
            assert said in sent[0].error and model.n_calls == 0 and not model.closed
            del runner.send
            c.gates.end((1, 0, 0))
            await c.finalize_train_batch(1)

    run(main())


def test_the_error_of_a_model_comes_back_as_text() -> None:
    async def main() -> None:
        async with coordinator([rr.ScriptedModel(["x"], failures={0: OSError("it is down")})]) as c:
            await submit(c, name="tests.far.asks")
            with pytest.raises(BatchFailed, match="ModelError: OSError: it is down"):
                await c.finalize_train_batch(1)

    run(main())


def test_a_model_with_a_handle_is_opened_at_the_runner_and_another_is_not() -> None:
    class Words:
        def encode(self, text: str) -> list[int]:
            return [1]

    async def main() -> None:
        def remote(**fields: Any) -> OpenAIModel:
            return OpenAIModel("http://127.0.0.1:9/v1", "m", **fields)

        models = [remote(api_key="k", timeout_s=3.0, max_retries=1), remote(tokenizer=Words())]
        auxiliary = [[remote(), remote()], [remote(), rr.ScriptedModel(["x"])]]
        async with coordinator(models, auxiliary, auxiliary_names=("judge", "other")) as c:
            pool = runners(c)[0].session.pool
            first, second = [replica.model for replica in pool.rollout.replicas]
            assert (
                isinstance(first, OpenAIModel) and first is not models[0] and isinstance(second, RemoteModel)
            )
            fields = (
                "address",
                "model",
                "_api_key",
                "timeout_s",
                "connect_timeout_s",
                "max_retries",
                "max_connections",
            )
            assert [getattr(first, name) for name in fields] == [getattr(models[0], name) for name in fields]
            judges, others = [[r.model for r in role.replicas] for role in pool.auxiliary]
            assert [type(model) for model in judges] == [OpenAIModel] * 2
            assert [type(model) for model in others] == [RemoteModel] and others[0].role == 1
            assert pool.by_name.keys() == {"judge", "other"}

    run(main())


def test_a_model_that_was_opened_at_a_runner_hears_of_newer_weights() -> None:
    """Its server may not say versions; what sync said is then what its answers are labelled with."""

    def versions(c: Any) -> list[int]:
        return [replica.model.version for replica in runners(c)[0].session.pool.rollout.replicas]

    async def main() -> None:
        models = [OpenAIModel("http://127.0.0.1:9/v1", "m", version=2), rr.ScriptedModel(["x"], version=2)]
        async with coordinator(models) as c:
            await c.sync_weights(5)
            await until(lambda: versions(c) == [5, 5])
            [first] = runners(c)
            first.die("killed")
            await until(lambda: first.is_dead and runners(c) and runners(c)[0].is_ready)
            await submit(c, 2)  # the next one was set up as the first: an attempt says what is newest
            for task in (0, 1):
                await until(lambda task=task: (1, task, 0) in c.gates.waiting)
                c.gates.end((1, task, 0))
            await c.finalize_train_batch(1)
            assert versions(c) == [5, 5]

    run(main())


# -- the far side alone


def session_of(setup: messages.Setup) -> tuple[RunnerSession, list[Any]]:
    sent: list[Any] = []
    session = RunnerSession(lambda data: sent.append(messages.decode_up(data)))
    session.receive(messages.encode(setup))
    return session, sent


def job(workflow: str, **fields: Any) -> AttemptSpec:
    given: dict[str, Any] = {
        "attempt_id": 1, "workflow": workflow, "data": msgspec.msgpack.encode(({}, {})), "repeat_times": 1,
        "task_id": 0, "batch_id": 1, "is_eval": False, "run_ids": (0,), "number": 1, "seeds": (0,), "group_id": 1,
        "version": 0,
    }  # fmt: skip
    return AttemptSpec(**given | fields)


def setup() -> messages.Setup:
    from recollect.rollout.experience.space import plan_of

    return messages.Setup(plan_of().layout.to_json(), [], [None], [], [], 1.0)


def test_a_workflow_that_the_runner_does_not_know_says_where_to_name_it() -> None:
    async def main() -> None:
        session, sent = session_of(setup())
        session.receive(messages.encode(messages.Start(job("nowhere"))))
        assert isinstance(sent[0], messages.Ready) and sent[1].last and "workflow_modules" in sent[1].error
        session.threads.close()

    run(main())


def test_a_sync_workflow_that_is_cancelled_is_refused_its_next_call() -> None:
    async def main() -> None:
        session, sent = session_of(setup())
        session.receive(messages.encode(messages.Start(job("recollect.testing.asks_sync"))))
        await until(lambda: any(isinstance(message, messages.ModelCall) for message in sent))
        session.receive(messages.encode(messages.Cancel(1)))
        await until(lambda: isinstance(sent[-1], messages.Ran))
        assert any(isinstance(message, messages.Uncall) for message in sent)
        assert sent[-1].last and not sent[-1].outcome.ok and "ClosedError" in sent[-1].outcome.error
        session.receive(messages.encode(messages.Cancel(1)))  # it is over
        session.threads.close()

    import recollect.testing.rollout_workflows  # noqa: F401

    run(main())


def test_an_answer_without_a_waiting_call_is_dropped_and_an_error_is_raised() -> None:
    async def main() -> None:
        session, sent = session_of(setup())
        model = RemoteModel(session.call, -1)
        call = asyncio.ensure_future(model.logprobs(np.array([1, 2]), 1))
        await asyncio.sleep(0)
        for ident in (99, sent[-1].call_id, sent[-1].call_id):
            session.receive(messages.encode(messages.Answer(ident, error="OSError: down")))
        with pytest.raises(ModelError, match="down"):
            await call
        assert not session.calls
        session.threads.close()

    run(main())


@pytest.mark.parametrize(
    ("message", "packed"),
    [
        (messages.Start(AttemptSpec(1, "w", b"", 1, 0, "b", True, (0,), 1, (5,), 2, 3)),
         ["Start", [1, "w", b"", 1, 0, "b", True, [0], 1, [5], 2, 3, -1]]),
        (messages.Cancel(1), ["Cancel", 1]),
        (messages.Synced([1, 2]), ["Synced", [1, 2]]),
        (messages.Answer(1, error="no"), ["Answer", 1, None, None, "no"]),
        (messages.Ready(), ["Ready"]),
        (messages.Broken("why"), ["Broken", "why"]),
        (messages.Ran(1, RunOutcome(0, True, 0.5, {"x": 1.0}), True),
         ["Ran", 1, [0, True, 0.5, {"x": 1.0}, 0, None, 0, None, None, 0, "", False], True, ""]),
        (messages.ModelCall(1, 2, -1, "chat", b"x"), ["Call", 1, 2, -1, "chat", b"x"]),
        (messages.Uncall(1), ["Uncall", 1]),
    ],
)  # fmt: skip
def test_messages_have_the_names_and_the_order_of_their_first_version(message: Any, packed: Any) -> None:
    assert msgspec.msgpack.decode(messages.encode(message)) == packed
