"""OpenAIModel: a model behind an OpenAI-compatible HTTP endpoint."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from email.utils import parsedate_to_datetime
from typing import Any

import msgspec
import numpy as np

from recollect.errors import ClosedError, MissingExtraError, ModelError, SchemaError
from recollect.rollout.models.base import Generation, Messages, Prompt, told_of_tries

RETRIED = frozenset({408, 429, *range(500, 600)})


class OpenAIHandle(msgspec.Struct, array_like=True):
    """All that another process needs to open the same model; the key included, so it goes to our own runners only."""

    base_url: str
    model: str
    api_key: str | None
    timeout_s: float
    connect_timeout_s: float
    max_retries: int
    max_connections: int
    version: int


class OpenAIModel:
    """Asks `{base_url}/completions` and `/chat/completions`; retries lost connections, 408, 429 and 5xx.

    Ownership: opens its connections at the first call and closes them in `close()`. Concurrency: one event loop.
    Cancelling a call closes its request. The key is in no repr and no message.

    >>> OpenAIModel("http://127.0.0.1:8000/v1", "policy", api_key="secret")
    OpenAIModel('http://127.0.0.1:8000/v1', 'policy')
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        *,
        api_key: str | None = None,
        timeout_s: float = 600.0,
        connect_timeout_s: float = 10.0,
        max_retries: int = 3,
        max_connections: int = 256,
        tokenizer: Any = None,
        version: int = 0,
    ) -> None:
        if not base_url.startswith(("http://", "https://")):
            raise ValueError(f"base_url: must begin with http:// or https://, got {base_url!r}")
        self.address, self.model, self._api_key = base_url.rstrip("/"), model, api_key
        self.timeout_s, self.connect_timeout_s = timeout_s, connect_timeout_s
        self.max_retries, self.max_connections, self.tokenizer = max_retries, max_connections, tokenizer
        self.backoff_s, self.backoff_max_s = 0.5, 30.0  # the first and the longest pause before another try
        self._version = version
        self._client: Any = None
        self._closed = False
        self._random = random.Random()

    def __repr__(self) -> str:
        return f"OpenAIModel({self.address!r}, {self.model!r})"

    @property
    def version(self) -> int:
        """What the server last said, else what `sync` said."""
        return self._version

    @version.setter
    def version(self, version: int) -> None:
        self._version = version

    @property
    def handle(self) -> OpenAIHandle | None:
        """What a runner opens the model by; None with a tokenizer, whose calls travel back instead."""
        if self.tokenizer is not None:
            return None
        return OpenAIHandle(
            self.address, self.model, self._api_key, self.timeout_s, self.connect_timeout_s, self.max_retries,
            self.max_connections, self._version,
        )  # fmt: skip

    @staticmethod
    def from_handle(h: OpenAIHandle) -> OpenAIModel:
        """Open the model of a handle."""
        return OpenAIModel(
            h.base_url, h.model, api_key=h.api_key, timeout_s=h.timeout_s, connect_timeout_s=h.connect_timeout_s,
            max_retries=h.max_retries, max_connections=h.max_connections, version=h.version,
        )  # fmt: skip

    # -- calls

    async def generate(self, prompt: Prompt, *, n: int = 1, **sampling: Any) -> list[Generation]:
        """Complete a prompt (text or token ids) n times."""
        body = {"model": self.model, "prompt": prompt if isinstance(prompt, str) else list(prompt), "n": n}
        reply = await self._post("/completions", body | {"logprobs": 0, "return_token_ids": True} | sampling)
        return self._generations(reply, n, prompt)

    async def chat(self, messages: Messages, *, n: int = 1, **sampling: Any) -> list[Generation]:
        """Answer a conversation n times."""
        body = {"model": self.model, "messages": list(messages), "n": n}
        reply = await self._post(
            "/chat/completions", body | {"logprobs": True, "return_token_ids": True} | sampling
        )
        return self._generations(reply, n, messages)

    async def logprobs(self, tokens: Sequence[int], prompt_length: int = 0) -> Any:
        """Return the logprob of each token after the prompt."""
        body = {
            "model": self.model,
            "prompt": [int(t) for t in tokens],
            "max_tokens": 0,
            "echo": True,
            "logprobs": 0,
        }
        reply = await self._post("/completions", body)
        try:
            found = reply["choices"][0]["logprobs"]["token_logprobs"]
            return np.array([0.0 if v is None else v for v in found[prompt_length : len(tokens)]], np.float32)
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise self._malformed(error) from None

    async def sync(self, version: int | None = None) -> int:
        """Take note of the version that the server serves from now on."""
        self._version = self._version + 1 if version is None else version
        return self._version

    async def close(self) -> None:
        """Close all connections."""
        self._closed = True
        if self._client is not None:
            await self._client.aclose()
            self._client = None

    # -- HTTP

    def _connect(self) -> Any:
        if self._closed:
            raise ClosedError(f"OpenAIModel {self.address}: was closed")
        if self._client is None:
            try:
                import httpx
            except ImportError:
                raise MissingExtraError('OpenAIModel: needs httpx; pip install "recollect[http]"') from None
            headers = {} if self._api_key is None else {"Authorization": f"Bearer {self._api_key}"}
            self._client = httpx.AsyncClient(
                headers=headers,
                # Calls beyond the limit queue: the time in the queue is not the server's.
                timeout=httpx.Timeout(self.timeout_s, connect=self.connect_timeout_s, pool=None),
                limits=httpx.Limits(
                    max_connections=self.max_connections, max_keepalive_connections=self.max_connections
                ),
            )
        return self._client

    async def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        client = self._connect()
        import httpx

        url, last, tell = self.address + path, "", told_of_tries.get()
        for attempt in range(self.max_retries + 1):
            wait = pause_after(attempt, self.backoff_s, self.backoff_max_s, self._random)
            try:
                reply = await client.post(url, json=body)
            except httpx.TransportError as error:
                last, short = f"{type(error).__name__} {error}".strip(), type(error).__name__
            else:
                if reply.status_code == 200:
                    return self._parsed(reply)
                short = f"status {reply.status_code}"
                last = f"{short}: {reply.text[:200]}"
                if reply.status_code not in RETRIED:
                    hint = self._hint() if reply.status_code == 404 else ""
                    raise ModelError(f"{url}: must answer 200, got {self._hidden(last)}{hint}")
                wait = retry_after(reply.headers.get("retry-after"), wait)
            if attempt < self.max_retries:
                if tell is not None:
                    tell(f"try {attempt + 2} of {self.max_retries + 1}, last {short}")
                await asyncio.sleep(wait)
        raise ModelError(
            f"{url}: no answer after {self.max_retries + 1} tries, the last: {self._hidden(last)}"
            f"{'' if last.startswith('status') else self._hint()}"
        )

    def _hint(self) -> str:
        return "" if self.address.endswith("/v1") else "; does base_url end in /v1?"

    def _hidden(self, text: str) -> str:
        return text if self._api_key is None else text.replace(self._api_key, "***")

    def _parsed(self, reply: Any) -> dict[str, Any]:
        try:
            found = reply.json()
            if not isinstance(found["choices"], list):
                raise TypeError("choices is no list")
        except (ValueError, KeyError, TypeError) as error:
            raise self._malformed(error) from None
        version = found.get("model_version")
        if isinstance(version, int) and not isinstance(version, bool):
            self._version = version
        result: dict[str, Any] = found
        return result

    def _malformed(self, error: Exception) -> ModelError:
        return ModelError(f"{self.address}: must answer as OpenAI does, got a malformed reply ({error!r})")

    # -- replies

    def _generations(self, reply: dict[str, Any], n: int, prompt: Any) -> list[Generation]:
        try:
            choices = sorted(reply["choices"], key=lambda c: c.get("index", 0))
            if len(choices) != n:
                raise ValueError(f"{len(choices)} choices for n = {n}")
            return [self._generation(reply, choice, prompt) for choice in choices]
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            if isinstance(error, SchemaError):
                raise
            raise self._malformed(error) from None

    def _generation(self, reply: dict[str, Any], choice: dict[str, Any], prompt: Any) -> Generation:
        message = None if "text" in choice else choice["message"]
        if message is None:
            text = choice["text"]
        else:  # one that calls tools may say nothing else
            text = (message.get("content") if message.get("tool_calls") else message["content"]) or ""
        before = choice.get("prompt_token_ids") or reply.get("prompt_token_ids")
        after = choice.get("token_ids")
        if self.tokenizer is not None:
            before = self._tokenized(prompt) if before is None else before
            after = list(self.tokenizer.encode(text)) if after is None else after
        elif (
            before is None
            and isinstance(prompt, Sequence)
            and not isinstance(prompt, str)
            and _is_ids(prompt)
        ):
            before = list(prompt)
        logprobs = _logprobs(choice.get("logprobs"))
        if logprobs is not None and after is not None and len(logprobs) != len(after):
            logprobs = None  # of other tokens than ours
        return Generation(
            text,
            tokens=[*before, *after] if before is not None and after is not None else None,
            prompt_length=len(before) if before is not None and after is not None else 0,
            logprobs=logprobs,
            finish_reason=str(choice.get("finish_reason") or "stop"),
            version=self._version,
            message=message,
        )

    def _tokenized(self, prompt: Any) -> list[int]:
        if isinstance(prompt, str):
            return list(self.tokenizer.encode(prompt))
        if _is_ids(prompt):
            return list(prompt)
        return list(self.tokenizer.apply_chat_template(list(prompt), add_generation_prompt=True))


def _is_ids(prompt: Any) -> bool:
    return all(isinstance(token, int | np.integer) for token in prompt)


def _logprobs(given: Any) -> list[float] | None:
    """From either form: completions have `token_logprobs`, chats `content[].logprob`."""
    if not isinstance(given, dict):
        return None
    if isinstance(given.get("content"), list):
        return [float(item["logprob"]) for item in given["content"]]
    found = given.get("token_logprobs")
    return None if found is None else [float(value) for value in found]


def pause_after(attempt: int, first_s: float, longest_s: float, source: random.Random) -> float:
    """Seconds before another try: doubling from the first to the longest, ±20 %."""
    seconds: float = min(first_s * 2**attempt, longest_s)
    return seconds * source.uniform(0.8, 1.2)


def retry_after(value: str | None, otherwise: float) -> float:
    """Seconds to wait as the server asks, by a number or a date; never more than the longest pause."""
    if value is None:
        return otherwise
    try:
        seconds = float(value)
    except ValueError:
        try:
            from datetime import UTC, datetime

            seconds = (parsedate_to_datetime(value) - datetime.now(UTC)).total_seconds()
        except (TypeError, ValueError):
            return otherwise
    return min(max(seconds, 0.0), 60.0)
