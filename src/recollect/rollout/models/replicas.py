"""The models of a coordinator, shared among its attempts: the least busy is asked, one that fails rests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError as FutureCancelled
from typing import Any

from recollect.errors import ClosedError
from recollect.rollout.models.base import Generation, prompt_words, told_of_tries
from recollect.rollout.stats import ModelStats

FAILURES_TO_REST = 5


class Replica:
    """One model and how busy it is."""

    __slots__ = ("attempts", "calls", "failed", "failed_in_row", "label", "model", "rests_until", "served")

    def __init__(self, model: Any, label: str) -> None:
        self.model = model
        self.label = getattr(model, "address", None) or label
        self.attempts = self.calls = self.failed = self.failed_in_row = self.served = 0
        self.rests_until = 0.0


class Role:
    """Replicas of one model."""

    def __init__(self, name: str, models: Sequence[Any], clock: Callable[[], float], rest_s: float) -> None:
        self.name, self.clock, self.rest_s = name, clock, rest_s
        self.replicas = [Replica(model, f"{name}[{i}]") for i, model in enumerate(models)]

    def _awake(self) -> list[Replica]:
        now = self.clock()
        return [r for r in self.replicas if r.rests_until <= now] or self.replicas

    def for_attempt(self) -> Replica:
        """The one with the fewest attempts."""
        return min(self._awake(), key=lambda r: (r.attempts, r.calls))

    def for_call(self) -> Replica:
        """The least busy one."""
        return min(self._awake(), key=lambda r: (r.calls, r.served))

    def failed(self, replica: Replica) -> None:
        replica.failed += 1
        replica.failed_in_row += 1
        if replica.failed_in_row >= FAILURES_TO_REST and len(self.replicas) > 1:
            replica.rests_until = self.clock() + self.rest_s
            replica.failed_in_row = 0


class ModelPool:
    """All models: rollout replicas, and a list of replicas per auxiliary role."""

    def __init__(
        self,
        rollout: Sequence[Any],
        auxiliary: Sequence[Sequence[Any]],
        names: Sequence[str],
        clock: Callable[[], float],
        rest_s: float,
    ) -> None:
        self.rollout = Role("rollout", rollout, clock, rest_s)
        labels = [*names, *(f"auxiliary{i}" for i in range(len(names), len(auxiliary)))]
        self.auxiliary = [Role(label, models, clock, rest_s) for label, models in zip(labels, auxiliary)]
        self.by_name = {role.name: role for role in self.auxiliary}

    def version(self) -> int:
        """The lowest version that answers now; 0 without rollout models."""
        return min((int(r.model.version) for r in self.rollout.replicas), default=0)

    def stats(self) -> tuple[ModelStats, ...]:
        now = self.rollout.clock()
        return tuple(
            ModelStats(r.label, r.served, r.failed, r.calls, r.attempts, r.rests_until > now)
            for role in (self.rollout, *self.auxiliary)
            for r in role.replicas
        )


class Models:
    """What a workflow sees of the models during one attempt.

    `models.rollout` is the same throughout; `models["judge"]` and `models.auxiliary[i]` the least busy replica.
    Once fenced, every call raises. In a sync workflow the methods block, in an async one they are awaited.
    """

    __slots__ = ("_pool", "_replica", "doing", "fenced", "in_flight", "loop", "tell", "versions")

    def __init__(self, pool: ModelPool, tell: Callable[..., None] | None = None) -> None:
        self._pool = pool
        self._replica: Replica | None = None
        self.doing: str | None = None  # the model call that it is in
        self.fenced = False
        self.versions: list[int] = []  # of the generations of this run
        self.loop: asyncio.AbstractEventLoop | None = None  # set for a sync workflow
        self.in_flight: Any = None
        self.tell = tell

    def use(self, index: int) -> None:
        """Hold the rollout replica that the coordinator chose."""
        self._replica = self._pool.rollout.replicas[index]

    def choose(self) -> int:
        """Choose the rollout replica of this attempt now; return its index, -1 if there is no rollout model."""
        replicas = self._pool.rollout.replicas
        return replicas.index(self._chosen()) if replicas else -1

    def _chosen(self) -> Replica:
        if self._replica is None:
            if not self._pool.rollout.replicas:
                raise ValueError("models.rollout: there is no rollout model; give the coordinator one")
            self._replica = self._pool.rollout.for_attempt()
            self._replica.attempts += 1
        return self._replica

    @property
    def rollout(self) -> Any:
        """The rollout model of this attempt."""
        return self._bound(self._pool.rollout, self._chosen(), self.versions)

    @property
    def auxiliary(self) -> Any:
        """The auxiliary models in order."""
        return [self._bound(role, role.for_call(), None) for role in self._pool.auxiliary]

    def __getitem__(self, name: str) -> Any:
        if name == "rollout":
            return self.rollout
        role = self._pool.by_name.get(name)
        if role is None:
            raise KeyError(f"models: must be one of {sorted(self._pool.by_name)}, got {name!r}")
        return self._bound(role, role.for_call(), None)

    def _bound(self, role: Role, replica: Replica, versions: list[int] | None) -> Any:
        bound = BoundModel(self, role, replica, versions)
        return bound if self.loop is None else BlockingModel(bound, self)

    def fence(self) -> None:
        """Refuse every later call, and cancel the one that a thread of a sync workflow waits for."""
        self.fenced = True
        if self.in_flight is not None:
            self.in_flight.cancel()

    def release(self) -> None:
        """Give the rollout replica back."""
        if self._replica is not None:
            self._replica.attempts -= 1
            self._replica = None


class BoundModel:
    """A model as one attempt sees it: calls are counted, named while they last, and refused once fenced."""

    __slots__ = ("_models", "_replica", "_role", "_versions")

    def __init__(self, models: Models, role: Role, replica: Replica, versions: list[int] | None) -> None:
        self._models, self._role, self._replica, self._versions = models, role, replica, versions

    @property
    def version(self) -> int:
        return int(self._replica.model.version)

    async def generate(self, prompt: Any, *, n: int = 1, **sampling: Any) -> Any:
        return _asked(prompt, await self._call("generate", prompt, n=n, **sampling))

    async def chat(self, messages: Any, *, n: int = 1, **sampling: Any) -> Any:
        return _asked(messages, await self._call("chat", messages, n=n, **sampling))

    async def logprobs(self, tokens: Any, prompt_length: int = 0) -> Any:
        return await self._call("logprobs", tokens, prompt_length)

    def __getattr__(self, name: str) -> Any:  # a method of the model's own
        return getattr(self._replica.model, name)

    async def _call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        models, replica = self._models, self._replica
        if models.fenced:
            raise ClosedError("models: this attempt was given up; its calls are refused")
        models.doing = doing = f"{method} at {replica.label}"

        def tell_try(text: str) -> None:
            models.doing = f"{doing}, {text}"

        before = told_of_tries.set(tell_try)
        replica.calls += 1
        start = self._role.clock()
        try:
            answer = await getattr(replica.model, method)(*args, **kwargs)
        except asyncio.CancelledError:
            raise
        except BaseException:
            self._role.failed(replica)
            raise
        finally:
            told_of_tries.reset(before)
            replica.calls -= 1
            models.doing = None
            if models.tell is not None:
                models.tell(method, start)
        replica.served += 1
        replica.failed_in_row = 0
        if models.fenced:
            raise ClosedError("models: this attempt was given up; its calls are refused")
        if self._versions is not None and isinstance(answer, list):
            self._versions.extend([int(g.version) for g in answer])
        return answer


def _asked(prompt: Any, answers: Any) -> Any:
    """Note in answers what was asked, in words."""
    words = prompt_words(prompt)
    for answer in answers if isinstance(answers, list) else ():
        if isinstance(answer, Generation):
            answer.prompt = answer.prompt or words
    return answers


class BlockingModel:
    """A bound model for a sync workflow: each call runs in the loop and blocks the workflow's thread."""

    __slots__ = ("_bound", "_models")

    def __init__(self, bound: BoundModel, models: Models) -> None:
        self._bound, self._models = bound, models

    @property
    def version(self) -> int:
        return self._bound.version

    def generate(self, prompt: Any, *, n: int = 1, **sampling: Any) -> Any:
        return self._wait(self._bound.generate(prompt, n=n, **sampling))

    def chat(self, messages: Any, *, n: int = 1, **sampling: Any) -> Any:
        return self._wait(self._bound.chat(messages, n=n, **sampling))

    def logprobs(self, tokens: Any, prompt_length: int = 0) -> Any:
        return self._wait(self._bound.logprobs(tokens, prompt_length))

    def _wait(self, call: Any) -> Any:
        if self._models.fenced or self._models.loop is None:
            call.close()
            raise ClosedError("models: this attempt was given up; its calls are refused")
        future = asyncio.run_coroutine_threadsafe(call, self._models.loop)
        self._models.in_flight = future
        if self._models.fenced:  # since the test above, by the loop, which saw no call in flight
            future.cancel()
        try:
            return future.result()
        except FutureCancelled:
            raise ClosedError("models: this attempt was cancelled during the call") from None
        finally:
            self._models.in_flight = None
