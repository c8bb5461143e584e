"""Models: a real server on the loopback that is slow, failing, malformed or gone; a model in this process."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import numpy as np
import pytest
from tests.rollout.make import coordinator, run

import recollect.rollout as rr
from recollect.errors import ClosedError, ModelError, SchemaError
from recollect.rollout.models.pool import ModelPool, Models
from recollect.testing import InferenceModelContract

pytest.importorskip("httpx")


class Server:
    """An OpenAI-compatible server; `script` says how the next calls are answered, then all are good."""

    def __init__(self) -> None:
        self.script: list[Any] = []
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[str] = []
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


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("recollect.rollout.models.openai.BACKOFF_S", 0.0)


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
def test_what_may_pass_is_tried_again(trouble: Any) -> None:
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
def test_what_will_not_pass_says_status_and_address_and_no_key(
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


# -- in this process


def torch_model(**fields: Any) -> Any:
    torch = pytest.importorskip("torch")
    module = torch.nn.Linear(1, 1)

    def fn(prompts: Any, sampling: Any) -> Any:
        return [(torch.tensor([len(p), 7]), torch.tensor([-0.1, -0.2])) for p in prompts]

    return rr.TorchModel(
        fn, module=module, logprobs_fn=lambda rows: [np.full(len(r), -0.5) for r in rows], **fields
    )


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
