"""Models: a real server on the loopback that is slow, failing, malformed or gone; a model in this process."""

from __future__ import annotations

import asyncio
import json
import random
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import numpy as np
import pytest
from tests.rollout.make import coordinator, run

import recollect.rollout as rr
from recollect.errors import (
    ClosedError,
    ModelError,
    SchemaError,
)
from recollect.rollout.models.openai import pause_after
from recollect.rollout.models.replicas import ModelPool, Models
from recollect.testing import InferenceModelContract

pytest.importorskip("httpx")


class Server:
    """An OpenAI-compatible server; `script` says how the next calls are answered, then all are good."""

    def __init__(self) -> None:
        self.script: list[Any] = []
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[str] = []
        self.times: list[float] = []
        self.open = self.most = self.n_hung_up = 0
        self.release = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.open += 1
        self.most = max(self.most, self.open)
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                size = next(
                    int(line.split(":")[1])
                    for line in head.split("\r\n")
                    if line.lower().startswith("content-length")
                )
                body = json.loads(await reader.readexactly(size))
                self.bodies.append(body)
                self.headers.append(head)
                self.times.append(asyncio.get_running_loop().time())
                if not await self.answer(head, body, reader, writer):
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.open -= 1
            writer.close()

    async def answer(self, head: str, body: dict[str, Any], reader: Any, writer: Any) -> bool:
        how = self.script.pop(0) if self.script else "good"
        if how == "hang":
            gone = asyncio.ensure_future(reader.read(1))
            done = asyncio.ensure_future(self.release.wait())
            await asyncio.wait([gone, done], return_when=asyncio.FIRST_COMPLETED)
            self.n_hung_up += gone.done()
            gone.cancel()
            done.cancel()
            return False
        if how == "drop":
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n{")
            await writer.drain()
            return False
        status, extra, content = 200, "", json.dumps(self.reply(head, body)).encode()
        if isinstance(how, int):
            status, extra, content = how, "Retry-After: 0\r\n", b'{"error": "secret-key is wrong"}'
        elif isinstance(how, dict):
            content = json.dumps(how).encode()
        elif how == "malformed":
            content = b'{"choices": 5}'
        elif how == "no json":
            content = b"<html>"
        chunks = [content[:10], content[10:]] if how == "slow" else [content]
        writer.write(f"HTTP/1.1 {status} X\r\nContent-Length: {len(content)}\r\n{extra}\r\n".encode())
        for chunk in chunks:
            writer.write(chunk)
            await writer.drain()
            await asyncio.sleep(0)
        return True

    def reply(self, head: str, body: dict[str, Any]) -> dict[str, Any]:
        n, chat = body.get("n", 1), "/chat/" in head
        if body.get("echo"):
            return {
                "choices": [
                    {"text": "", "logprobs": {"token_logprobs": [None, *[-0.25] * (len(body["prompt"]) - 1)]}}
                ]
            }
        logprobs = {"content": [{"logprob": -0.5}] * 2} if chat else {"token_logprobs": [-0.5, -0.5]}
        said = {"message": {"content": "ok"}} if chat else {"text": "ok"}
        choices = [
            {
                "index": i,
                **said,
                "finish_reason": "length",
                "token_ids": [111, 107],
                "prompt_token_ids": [1, 2, 3],
                "logprobs": logprobs,
            }
            for i in reversed(range(n))
        ]
        return {"choices": choices, "model_version": 12}


@asynccontextmanager
async def serving(**fields: Any) -> AsyncIterator[tuple[Any, Any]]:
    server = Server()
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    port = listening.sockets[0].getsockname()[1]
    model = rr.OpenAIModel(
        f"http://127.0.0.1:{port}/v1", "m", **{"max_retries": 2, "api_key": "secret-key"} | fields
    )
    model.backoff_s = 0.0
    try:
        yield server, model
    finally:
        await model.close()
        server.release.set()
        listening.close()
        for _ in range(200):
            if not server.open:
                break
            await asyncio.sleep(0.005)
        assert server.open == 0, "a connection was left open"


def torch_model(**fields: Any) -> Any:
    torch = pytest.importorskip("torch")
    module = torch.nn.Linear(1, 1)

    def fn(prompts: Any, sampling: Any) -> Any:
        return [(torch.tensor([len(p), 7]), torch.tensor([-0.1, -0.2])) for p in prompts]

    return rr.TorchModel(
        fn, module=module, logprobs_fn=lambda rows: [np.full(len(r), -0.5) for r in rows], **fields
    )


class Words:
    """A tokenizer: one token per letter."""

    def encode(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]

    def decode(self, tokens: list[int]) -> str:
        return "".join(map(chr, tokens))

    def apply_chat_template(self, messages: Any, add_generation_prompt: bool) -> list[int]:
        assert add_generation_prompt
        return self.encode("".join(m["content"] for m in messages))


def bare(text: str, *logprobs: float, **fields: Any) -> dict[str, Any]:
    """A reply that says no token ids."""
    return {"choices": [{"text": text, "logprobs": {"token_logprobs": list(logprobs)}}]} | fields


class Slow:
    """A function for a TorchModel that waits in its thread until it is let go."""

    def __init__(self) -> None:
        self.inside, self.gate = threading.Event(), threading.Event()
        self.prompts: list[Any] = []

    def __call__(self, prompts: Any, sampling: Any) -> Any:
        self.prompts.append(prompts)
        self.inside.set()
        self.gate.wait(20)
        return [([7], [-0.5]) for _ in prompts]


async def until(event: threading.Event) -> None:
    while not event.is_set():
        await asyncio.sleep(0)


def test_answers_carry_tokens_logprobs_and_version() -> None:
    async def main() -> None:
        async with serving() as (server, model):
            for call in (
                model.generate("abc", n=2, temperature=0.5),
                model.chat([{"role": "user", "content": "x"}], n=2),
            ):
                first, second = await call
                assert first.text == second.text == "ok" and first.version == 12 == model.version
                e = first.experience(reward=1.0)
                assert e.tokens.tolist() == [1, 2, 3, 111, 107] and e.prompt_length == 3 and e.truncated
                assert e.logprobs.tolist() == [-0.5, -0.5] and e.model_version == 12
            assert server.bodies[0]["temperature"] == 0.5
            assert "Bearer secret-key" in server.headers[0]
            assert (await model.logprobs([1, 2, 3, 4], 2)).tolist() == [-0.25, -0.25]

    run(main())


@pytest.mark.parametrize("trouble", [429, 503, 500, 408, "drop", "slow"])
def test_errors_that_may_pass_are_tried_again(trouble: Any) -> None:
    async def main() -> None:
        async with serving() as (server, model):
            server.script = [trouble]
            [g] = await model.generate("x")
            assert g.text == "ok" and len(server.bodies) == (1 if trouble == "slow" else 2)

    run(main())


@pytest.mark.parametrize(
    ("script", "calls", "text"),
    [([401], 1, "status 401"), ([404], 1, "404"), ([503] * 3, 3, "status 503"), (["drop"] * 3, 3, "3 tries"),
     (["malformed"], 1, "malformed"), (["no json"], 1, "malformed")],
)  # fmt: skip
def test_errors_that_will_not_pass_say_status_and_address_and_no_key(
    script: list[Any], calls: int, text: str
) -> None:
    async def main() -> None:
        async with serving() as (server, model):
            server.script = script
            with pytest.raises(ModelError, match=text) as caught:
                await model.generate("x")
            assert model.address in str(caught.value) and "secret" not in str(caught.value) + repr(model)
            assert len(server.bodies) == calls

    run(main())


@pytest.mark.parametrize("content", [{"content": None}, {}], ids=["null", "none"])
def test_a_call_of_a_tool_is_in_the_message_of_an_answer(content: dict[str, Any]) -> None:
    async def main() -> None:
        async with serving() as (server, model):
            calls = [{"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}]
            said = {"role": "assistant", **content, "tool_calls": calls}
            server.script = [{"choices": [{"message": said, "finish_reason": "tool_calls"}]}]
            [g] = await model.chat([{"role": "user", "content": "x"}])
            assert (g.text, g.finish_reason, g.message) == ("", "tool_calls", said)
            [plain] = await model.chat([{"role": "user", "content": "x"}])
            assert plain.text == plain.message["content"] == "ok"

    run(main())


@pytest.mark.parametrize(("script", "last"), [([429], "status 429"), (["drop"], "RemoteProtocolError")])
def test_why_waiting_names_the_last_error_of_a_call_that_is_tried_again(script: Any, last: str) -> None:
    async def main() -> None:
        async def asks(task: Any, models: Any) -> Any:
            [g] = await models.rollout.generate("x")
            return g.experience(reward=1.0)

        async with serving() as (server, model), coordinator([model]) as c:
            server.script = [*script, "hang"]
            await c.submit_batch(batch_id=1, tasks=[rr.Task(asks)], batch_type="train")
            while len(server.bodies) < 2:
                await asyncio.sleep(0)
            assert f"in generate at {model.address}, try 2 of 3, last {last}" in str(c.why_waiting(1))
            await c.abort_batch(1, reason="seen")

    run(main())


@pytest.mark.parametrize("script", [[404], ["drop"] * 3], ids=["404", "disconnect"])
def test_an_address_that_does_not_end_in_v1_is_asked_about(script: list[Any]) -> None:
    async def main() -> None:
        async with serving() as (server, model):
            other = rr.OpenAIModel(model.address.removesuffix("/v1"), "m", max_retries=2)
            other.backoff_s = 0.0
            for one, hint in ((other, r"does base_url end in /v1\?$"), (model, r"[^?]$")):
                server.script = list(script)
                with pytest.raises(ModelError, match=hint):
                    await one.generate("x")
            await other.close()

    run(main())


def test_a_timeout_and_a_cancel_close_the_request() -> None:
    async def main() -> None:
        async with serving(timeout_s=0.1, max_retries=0) as (server, model):
            server.script = ["hang"]
            with pytest.raises(ModelError, match="ReadTimeout"):
                await model.generate("x")
        async with serving() as (server, model):
            server.script = ["hang"]
            call = asyncio.create_task(model.generate("x"))
            while not server.bodies:
                await asyncio.sleep(0.001)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            while not server.n_hung_up:
                await asyncio.sleep(0.001)

    run(main())


def test_calls_beyond_the_connections_queue() -> None:
    async def main() -> None:
        async with serving(max_connections=2) as (server, model):
            answers = await asyncio.gather(*(model.generate("x") for _ in range(12)))
            assert len(answers) == 12 and server.most <= 2

    run(main())


def test_logprobs_that_a_server_did_not_give_can_be_passed_on() -> None:
    g = rr.Generation("8", tokens=[5, 6, 8], prompt_length=2)
    with pytest.raises(
        SchemaError, match=r"^logprobs: must be known .*pass logprobs= of models.rollout.logprobs"
    ):
        g.experience()
    assert g.experience(logprobs=np.float32([-0.5])).logprobs.tolist() == [-0.5]


def test_without_tokens_there_is_no_token_level_experience() -> None:
    with pytest.raises(SchemaError, match="tokenizer"):
        rr.Generation("text").experience(reward=1.0)


def test_a_train_and_a_judged_batch_through_a_server_in_trouble() -> None:
    async def essay(task: Any, models: Any) -> Any:
        [g] = await models.rollout.chat([{"role": "user", "content": "?"}])
        [v] = await models["judge"].chat([{"role": "user", "content": g.text}])
        return g.experience(reward=float(v.text))

    async def main() -> None:
        judge = rr.ScriptedModel({"ok": "1"})
        async with serving(max_retries=6) as (server, model):
            server.script = [429, "good", "drop", 503, "good", 500]
            async with coordinator(
                models=[model], auxiliary=[[judge]], auxiliary_names=("judge",), runners=3
            ) as c:
                given = [rr.Task(essay, repeat_times=4) for _ in range(3)]
                await c.submit_batch(batch_id=1, tasks=given, batch_type="train")
                result = await c.finalize_train_batch(1)
                assert result["experience_count"] == 12 and result["metrics"]["rollout/reward/mean"] == 1.0
                assert len(set(c.list_sink.uids)) == 12 and judge.n_calls == 12

    run(main())


def test_calls_that_wait_together_become_one_batch() -> None:
    async def main() -> None:
        model = torch_model(max_batch=4)
        found = await asyncio.gather(*(model.generate([1] * i, temperature=1.0) for i in range(1, 7)))
        assert [g.tokens[g.prompt_length] for [g] in found] == [1, 2, 3, 4, 5, 6]
        assert model.batch_sizes == [4, 2]
        await asyncio.gather(model.generate([1], temperature=0.5), model.generate([1], temperature=0.7))
        assert model.batch_sizes[2:] == [1, 1]  # other sampling, another batch
        assert (await model.logprobs([1, 2, 3], 1)).tolist() == [-0.5, -0.5]
        await model.close()
        with pytest.raises(ClosedError):
            await model.generate([1])

    run(main())


def test_sync_reads_weights_between_batches() -> None:
    class Weights:
        version = 3

        def read_weights_into(self, state: Any) -> int:
            state["weight"].fill_(42.0)
            return self.version

    async def main() -> None:
        model = torch_model(weights=Weights())
        assert await model.sync() == 3 and float(model.module.weight[0, 0].detach()) == 42.0
        [g] = await model.generate([5])
        assert g.version == 3 and g.experience(reward=0.0).tokens.tolist() == [5, 1, 7]
        await model.close()

    run(main())


class TestScripted(InferenceModelContract):
    @asynccontextmanager
    async def serving(self) -> AsyncIterator[Any]:
        yield rr.ScriptedModel(["ok"])


class TestOpenAI(InferenceModelContract):
    @asynccontextmanager
    async def serving(self) -> AsyncIterator[Any]:
        async with serving() as (_, model):
            yield model


class TestTorch(InferenceModelContract):
    chats = False
    prompt = (1, 2)

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[Any]:
        yield torch_model()


def test_five_failures_in_a_row_make_a_model_rest_unless_it_is_the_only_one() -> None:
    class Moody:
        version, fails = 0, True

        async def generate(self, prompt: Any, **sampling: Any) -> Any:
            if self.fails:
                raise OSError("no")
            return []

    def resting(models: list[Any], answers: str) -> bool:
        """Whether the first one rests after calls that are good (g) or fail (f)."""
        pool = ModelPool(models, [], [], lambda: 0.0, 30.0)
        calls = Models(pool)
        calls.use(0)

        async def main() -> None:
            for answer in answers:
                models[0].fails = answer == "f"
                with suppress(OSError):
                    await calls.rollout.generate("?")

        asyncio.run(main())
        return pool.stats()[0].resting

    assert resting([Moody(), Moody()], "fffff")
    assert not resting([Moody(), Moody()], "ffffgffff")
    assert not resting([Moody()], "ffffffffff")


def test_tokens_that_the_server_does_not_say_come_from_the_tokenizer_or_the_prompt() -> None:
    async def main() -> None:
        async with serving(tokenizer=Words()) as (server, model):
            for prompt, before in (("ab", [97, 98]), ([5, 6, 7], [5, 6, 7])):
                server.script = [bare("ok", -0.5, -0.25)]
                [g] = await model.generate(prompt)
                assert g.tokens.tolist() == [*before, 111, 107] and g.prompt_length == len(before)
                assert g.logprobs.tolist() == [-0.5, -0.25] and g.finish_reason == "stop"
            server.script = [bare("ok", -0.5, -0.25)]
            [g] = await model.chat([{"role": "user", "content": "c"}, {"role": "user", "content": "d"}])
            assert g.tokens.tolist() == [99, 100, 111, 107]
            assert model.handle is None  # its calls travel back: the tokenizer is here
        async with serving() as (server, model):
            known = {"text": "ok", "token_ids": [8, 9], "logprobs": {"token_logprobs": [-1, -2]}}
            server.script = [{"choices": [known]}, bare("ok", -0.5), bare("ok")]
            [g] = await model.generate([5, 6])
            assert g.experience().tokens.tolist() == [5, 6, 8, 9]
            for prompt in ("text", [5, 6]):
                [g] = await model.generate(prompt)
                assert g.tokens is None and g.text == "ok"
                with pytest.raises(SchemaError, match="^tokens: "):
                    g.experience(reward=1.0)
            assert model.handle is not None and model.handle.api_key == "secret-key"

    run(main())


def test_logprobs_of_other_tokens_are_not_taken() -> None:
    async def main() -> None:
        async with serving(tokenizer=Words()) as (server, model):
            server.script = [bare("ok", -0.5), {"choices": [{"text": "ok"}]}]
            for _ in range(2):
                [g] = await model.generate("x")
                assert g.tokens is not None and g.logprobs is None
                with pytest.raises(SchemaError, match="^logprobs: "):
                    g.experience(reward=1.0)

    run(main())


def test_a_version_is_the_servers_word_else_what_sync_said() -> None:
    async def main() -> None:
        async with serving() as (server, model):
            assert (await model.sync(4), await model.sync(), model.version) == (4, 5, 5)
            for said, version in ((None, 5), (True, 5), ("9", 5), (8, 8)):
                server.script = [bare("ok") | ({} if said is None else {"model_version": said})]
                [g] = await model.generate("x")
                assert g.version == version == model.version

    run(main())


@pytest.mark.parametrize(
    "reply",
    [{"choices": []}, {"choices": [{"text": "a"}, {"text": "b"}]}, {"choices": [{}]}, {"choices": [5]}, {}],
)
def test_a_reply_with_another_number_of_choices_or_none_is_malformed(reply: Any) -> None:
    async def main() -> None:
        async with serving() as (server, model):
            server.script = [reply, reply]
            with pytest.raises(ModelError, match="malformed") as caught:
                await model.generate("x")
            assert model.address in str(caught.value)
            if not reply.get("choices"):
                with pytest.raises(ModelError, match="malformed"):
                    await model.logprobs([1, 2])

    run(main())


def test_choices_come_in_the_order_of_their_index() -> None:
    async def main() -> None:
        async with serving() as (server, model):
            server.script = [{"choices": [{"index": i, "text": str(i)} for i in (2, 0, 1)]}]
            assert [g.text for g in await model.generate("x", n=3)] == ["0", "1", "2"]

    run(main())


def test_pauses_grow_to_their_longest_and_the_servers_word_goes_first() -> None:
    async def main() -> None:
        async with serving(max_retries=4) as (server, model):
            model.backoff_s, model.backoff_max_s = 0.01, 0.03
            server.script = ["drop"] * 5
            with pytest.raises(ModelError, match="5 tries"):
                await model.generate("x")
            times = server.times  # a busy machine makes pauses longer, never shorter
            assert len(times) == 5
            for before, after, pause in zip(times, times[1:], (0.01, 0.02, 0.03, 0.03)):
                assert after - before >= 0.8 * pause
            model.backoff_s = model.backoff_max_s = 1e6
            server.script = [503]
            await model.generate("x")  # Retry-After: 0 came with it

    run(main())


def test_the_pause_before_another_try_doubles_and_varies_by_a_fifth() -> None:
    model, source = rr.OpenAIModel("http://127.0.0.1:9/v1", "m"), random.Random(0)
    for attempt, wanted in enumerate((0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0)):
        pauses = [pause_after(attempt, model.backoff_s, model.backoff_max_s, source) for _ in range(200)]
        assert 0.8 * wanted <= min(pauses) < wanted < max(pauses) <= 1.2 * wanted


def test_a_model_has_the_limits_of_the_contract_and_is_closed_for_good() -> None:
    async def main() -> None:
        async with serving() as (_, model):
            pass
        with pytest.raises(ClosedError):
            await model.generate("x")
        plain = rr.OpenAIModel("http://127.0.0.1:9/v1/", "m")
        assert (plain.timeout_s, plain.connect_timeout_s, plain.max_retries) == (600.0, 10.0, 3)
        assert (plain.max_connections, plain.address) == (256, "http://127.0.0.1:9/v1")
        with pytest.raises(ValueError, match="^base_url: "):
            rr.OpenAIModel("127.0.0.1:9", "m")

    run(main())


def test_a_cancelled_call_is_not_computed_and_a_waiting_one_raises_at_the_close() -> None:
    async def main() -> None:
        slow = Slow()
        model = rr.TorchModel(slow)
        first = asyncio.create_task(model.generate([1]))
        await until(slow.inside)
        second, third = (asyncio.create_task(model.generate([n])) for n in (2, 3))
        for _ in range(3):
            await asyncio.sleep(0)
        second.cancel()
        slow.gate.set()
        await asyncio.gather(first, third)
        assert slow.prompts == [[[1]], [[3]]] and (model.max_batch, model.version) == (64, 0)
        slow.gate.clear()
        slow.inside.clear()
        computed = asyncio.create_task(model.generate([4]))
        await until(slow.inside)
        waits = asyncio.create_task(model.generate([5]))
        for _ in range(3):
            await asyncio.sleep(0)
        closing = asyncio.create_task(model.close())
        with pytest.raises(ClosedError):
            await waits
        slow.gate.set()
        await closing
        assert len(await computed) == 1

    run(main())


def test_weights_are_read_between_batches_and_never_older_ones() -> None:
    class Weights:
        version = 3
        n_reads = 0

        def read_weights_into(self, state: Any) -> int:
            self.n_reads += 1
            return self.version

    class Module:
        def state_dict(self) -> Any:
            return {}

    async def main() -> None:
        slow, weights = Slow(), Weights()
        model = rr.TorchModel(slow, module=Module(), weights=weights)
        before = asyncio.create_task(model.generate([1]))
        await until(slow.inside)
        syncing = asyncio.create_task(model.sync())
        for _ in range(10):
            await asyncio.sleep(0)
        assert weights.n_reads == 0  # a batch is under way
        slow.gate.set()
        [g] = await before
        assert g.version == 0 and await syncing == 3 and weights.n_reads == 1
        [g] = await model.generate([1])
        assert g.version == 3
        assert await model.sync() == 3 and weights.n_reads == 1  # there is nothing newer
        await model.close()
        plain = rr.TorchModel(slow)
        assert (await plain.sync(), await plain.sync(9), plain.version) == (1, 9, 9)
        await plain.close()

    run(main())


def test_an_error_or_a_missing_answer_of_the_function_reaches_its_caller() -> None:
    async def main() -> None:
        def short(prompts: Any, sampling: Any) -> Any:
            if sampling.get("fail"):
                raise ZeroDivisionError("inside")
            return []

        model = rr.TorchModel(short)
        with pytest.raises(ValueError, match="must answer 2 prompts, got 0"):
            await model.generate([1], n=2)
        with pytest.raises(ZeroDivisionError, match="inside"):
            await model.generate([1], fail=True)
        for call in (model.generate("text"), model.chat([]), model.logprobs([1])):
            with pytest.raises(SchemaError, match="give (tokenizer|logprobs_fn)="):
                await call
        await model.close()
        with pytest.raises(ClosedError):
            await model.generate([1])
        with pytest.raises(ValueError, match="max_batch"):
            rr.TorchModel(short, max_batch=0)

    run(main())


def test_a_tokenizer_makes_texts_and_chats_of_a_model_of_ids() -> None:
    async def main() -> None:
        def echo(prompts: Any, sampling: Any) -> Any:
            return [(prompt[::-1], [-0.5] * len(prompt)) for prompt in prompts]

        model = rr.TorchModel(echo, tokenizer=Words(), logprobs_fn=lambda rows: [list(range(len(rows[0])))])
        [g] = await model.generate("abc")
        assert g.text == "cba" and g.prompt_length == 3 and g.tokens.tolist() == [97, 98, 99, 99, 98, 97]
        [g] = await model.chat([{"role": "user", "content": "xy"}])
        assert g.text == "yx"
        assert (await model.logprobs([1, 2, 3], 1)).tolist() == [1.0, 2.0]
        assert (await model.logprobs([1, 2, 3])).tolist() == [0.0, 1.0, 2.0]
        assert (await model.logprobs([1, 2, 3], 3)).tolist() == []
        await model.close()

    run(main())


def test_a_call_of_a_sync_workflow_is_cancelled_by_a_fence_whether_or_not_it_is_known_yet() -> None:
    """The fence comes in the loop while the workflow's thread notes which call it waits for."""

    async def main() -> None:
        for _ in range(30):
            models = Models(ModelPool([Fences()], [], [], lambda: 0.0, 30.0))
            models.loop = asyncio.get_running_loop()
            Fences.fence = models.fence
            for said in ("cancelled during the call", "given up"):
                with pytest.raises(ClosedError, match=said):
                    await asyncio.to_thread(models.rollout.generate, "?")

    class Fences(rr.ScriptedModel):
        fence: Any

        def __init__(self) -> None:
            super().__init__(["x"])

        async def generate(self, prompt: Any, **sampling: Any) -> Any:
            self.fence()
            await asyncio.get_running_loop().create_future()

    run(main(), 20)


def test_a_model_that_fails_rests_and_the_least_busy_answers() -> None:
    async def main() -> None:
        broken = rr.ScriptedModel(["a"], failures=dict.fromkeys(range(100), OSError("down")))
        works = rr.ScriptedModel(["b"])

        async def asks(task: Any, models: Any) -> Any:
            [g] = await models["judge"].chat([{"role": "user", "content": "?"}])
            return rr.Result(metrics={"ok": float(g.text == "b")})

        async with coordinator(
            auxiliary=[[broken, works]], auxiliary_names=("judge",), max_retries=20, runners=1
        ) as c:
            await c.submit_batch(batch_id="e", tasks=[rr.Task(asks) for _ in range(40)], batch_type="eval")
            result = await c.finalize_eval_batch("e")
            assert result["ok_task_count"] == 40 and broken.n_calls == 5

    run(main())
