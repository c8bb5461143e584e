"""TorchModel: a model in this process; calls that wait together become one batch."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from recollect.errors import ClosedError, SchemaError
from recollect.rollout.models.base import Generation, Messages

Asked = tuple[list[int], tuple[Any, ...], dict[str, Any], "asyncio.Future[Any]"]


class TorchModel:
    """Calls `fn(prompts, sampling)` -> (tokens, logprobs) per prompt, in one thread.

    `prompts` are lists of token ids. `sync` reads `weights` (a SharedWeightSync, or anything with its `version` and
    `read_weights_into(state_dict)`) into `module` between batches, so that no sequence mixes versions. Prompts as text
    and chats need a `tokenizer`.

    Ownership: owns its thread; module and weights stay the caller's. Concurrency: one event loop.
    """

    def __init__(
        self,
        fn: Callable[[list[list[int]], dict[str, Any]], Sequence[tuple[Any, Any]]],
        *,
        module: Any = None,
        weights: Any = None,
        max_batch: int = 64,
        tokenizer: Any = None,
        logprobs_fn: Callable[[list[list[int]]], Sequence[Any]] | None = None,
        version: int = 0,
    ) -> None:
        if max_batch < 1:
            raise ValueError(f"max_batch: must be at least 1, got {max_batch}")
        self.fn, self.module, self.weights = fn, module, weights
        self.max_batch, self.tokenizer, self.logprobs_fn = max_batch, tokenizer, logprobs_fn
        self.version = version
        self._asked: list[Asked] = []
        self._worker: asyncio.Task[None] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="torch-model")
        self._closed = False
        self.batch_sizes: list[int] = []

    async def generate(self, prompt: Any, *, n: int = 1, **sampling: Any) -> list[Generation]:
        """Complete a prompt n times."""
        tokens = self._ids(prompt)
        key = tuple(sorted((name, repr(value)) for name, value in sampling.items()))
        found = await asyncio.gather(*[self._ask(tokens, key, sampling) for _ in range(n)])
        return [self._generation(tokens, *answer) for answer in found]

    async def chat(self, messages: Messages, *, n: int = 1, **sampling: Any) -> list[Generation]:
        """Answer a conversation n times."""
        if self.tokenizer is None:
            raise SchemaError(
                "chat: must have a tokenizer with apply_chat_template, got none; give tokenizer="
            )
        ids = self.tokenizer.apply_chat_template(list(messages), add_generation_prompt=True)
        return await self.generate(list(ids), n=n, **sampling)

    async def logprobs(self, tokens: Sequence[int], prompt_length: int = 0) -> Any:
        """Return the logprob of each token after the prompt."""
        if self.logprobs_fn is None:
            raise SchemaError("logprobs: must have a function, got none; give logprobs_fn=")
        [found] = await self._in_thread(self.logprobs_fn, [list(tokens)])
        return _array(found, np.float32)[-(len(tokens) - prompt_length) or len(tokens) :]

    async def sync(self, version: int | None = None) -> int:
        """Load the newest weights, between two batches."""
        if self.weights is None or self.module is None:
            self.version = self.version + 1 if version is None else version
        else:
            self.version = int(await self._in_thread(load_weights, self.weights, self.module, self.version))
        return self.version

    async def close(self) -> None:
        """End the thread once its batch is done."""
        self._closed = True
        for *_, future in self._asked:
            if not future.done():
                future.set_exception(ClosedError("TorchModel: was closed"))
        self._asked.clear()
        await asyncio.get_running_loop().run_in_executor(None, self._thread.shutdown)

    # -- batches

    async def _ask(self, tokens: list[int], key: tuple[Any, ...], sampling: dict[str, Any]) -> Any:
        if self._closed:
            raise ClosedError("TorchModel: was closed")
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        self._asked.append((tokens, key, sampling, future))
        if self._worker is None or self._worker.done():
            self._worker = loop.create_task(self._serve())
        return await future

    async def _serve(self) -> None:
        """One batch after another, each of those that wait with equal sampling."""
        await asyncio.sleep(0)  # calls of this turn of the loop join the batch
        while self._asked:
            key = self._asked[0][1]
            batch = [asked for asked in self._asked if asked[1] == key and not asked[3].cancelled()][
                : self.max_batch
            ]
            taken = {id(asked[3]) for asked in batch}
            self._asked = [a for a in self._asked if id(a[3]) not in taken and not a[3].cancelled()]
            if not batch:
                continue
            self.batch_sizes.append(len(batch))
            del self.batch_sizes[:-1024]
            try:
                answers = await self._in_thread(self.fn, [asked[0] for asked in batch], dict(batch[0][2]))
                if len(answers) != len(batch):
                    raise ValueError(f"fn: must answer {len(batch)} prompts, got {len(answers)}")
            except Exception as error:
                answers = [error] * len(batch)
            version = self.version
            for (*_, future), answer in zip(batch, answers):
                if future.done():
                    continue
                if isinstance(answer, Exception):
                    future.set_exception(answer)
                else:
                    future.set_result((*answer, version))

    async def _in_thread(self, function: Callable[..., Any], *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *args)

    def _ids(self, prompt: Any) -> list[int]:
        if not isinstance(prompt, str):
            return [int(token) for token in prompt]
        if self.tokenizer is None:
            raise SchemaError("prompt: must be token ids without a tokenizer, got text; give tokenizer=")
        return list(self.tokenizer.encode(prompt))

    def _generation(self, prompt: list[int], tokens: Any, logprobs: Any, version: int) -> Generation:
        after = _array(tokens, np.int32)
        text = "" if self.tokenizer is None else self.tokenizer.decode(after.tolist())
        return Generation(
            text, tokens=np.concatenate([np.array(prompt, np.int32), after]), prompt_length=len(prompt),
            logprobs=_array(logprobs, np.float32), version=version,
        )  # fmt: skip


def _array(value: Any, dtype: Any) -> Any:
    if hasattr(value, "detach"):
        value = value.detach().cpu().numpy()
    return np.asarray(value, dtype)


def load_weights(weights: Any, module: Any, version: int) -> int:
    """Read shared weights (a SharedWeightSync) into a module in place; return the version of what is in it."""
    if weights.version <= version:
        return version
    return int(weights.read_weights_into(module.state_dict()))
