"""A coordinator as a named Ray actor, for trainers on other machines."""

from __future__ import annotations

from typing import Any

from recollect.rollout.config import Config
from recollect.rollout.models.openai import OpenAIHandle, OpenAIModel
from recollect.rollout.runners.ray import need_ray

ASYNC = (
    "prepare", "shutdown", "submit_batch", "finalize_train_batch", "finalize_eval_batch", "abort_batch",
    "process_experiences", "sync_weights",
)  # fmt: skip
PLAIN = ("batches", "batch_state", "stats", "why_waiting")


class CoordinatorActor:
    """A coordinator behind Ray: each method is the coordinator's own, in the actor's loop."""

    def __init__(self, cls: Any, config: Config, models: list[Any], auxiliary: list[list[Any]]) -> None:
        self.config = config
        opened = [_opened(spec) for spec in models]
        self.inner = cls(config, opened, [[_opened(spec) for spec in specs] for specs in auxiliary])

    async def difference(self, config: Config) -> str | None:
        """The first field in which another config differs."""
        for name in config.__struct_fields__:
            if _plain(getattr(config, name)) != _plain(getattr(self.config, name)):
                return name
        return None

    async def model_version(self) -> int:
        """The lowest version that the rollout models serve."""
        return int(self.inner.model_version)

    async def get(self, n: int, timeout: float = 60.0, min_version: int | None = None) -> Any:
        """Take n rows out of a queue sink, as samples of the space."""
        x = await self.inner.sink.get(n, timeout, min_version)
        return x.get_at(slice(None))


def _delegate(name: str) -> Any:
    async def method(self: CoordinatorActor, *args: Any, **kwargs: Any) -> Any:
        found = getattr(self.inner, name)(*args, **kwargs)
        return await found if name in ASYNC else found

    method.__name__ = name
    return method


for _name in (*ASYNC, *PLAIN):
    setattr(CoordinatorActor, _name, _delegate(_name))


def _plain(value: Any) -> Any:
    """A value that compares equal in two processes: functions by name, objects by type and contents."""
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    if callable(value) or type(value).__module__.partition(".")[0] not in ("builtins", "recollect"):
        return getattr(value, "__qualname__", repr(type(value)))
    return value


def _sent(model: Any) -> Any:
    """A model as it goes to the actor: its handle, or the factory that makes it there."""
    handle = getattr(model, "handle", None)
    if handle is not None:
        return handle
    if callable(model):
        return model
    raise TypeError(
        f"models: must have a handle or be factories called over there, got {type(model).__name__}; "
        "pass a function that returns the model"
    )


def _opened(spec: Any) -> Any:
    return OpenAIModel.from_handle(spec) if isinstance(spec, OpenAIHandle) else spec()


def get_actor(cls: Any, config: Config, models: list[Any], auxiliary: list[Any] | None) -> Any:
    """Return the actor `config.name` of this namespace, or make it; ValueError if it has another config."""
    sent = [_sent(model) for model in models]
    roles = [[_sent(model) for model in role] for role in auxiliary or ()]
    ray = need_ray()
    options = {"name": config.name, "get_if_exists": True, "max_concurrency": 1000, "num_cpus": 0}
    actor = ray.remote(CoordinatorActor).options(**options).remote(cls, config, sent, roles)
    field = ray.get(actor.difference.remote(config), timeout=60.0)
    if field is not None:
        raise ValueError(
            f"config: the actor {config.name!r} is there with another {field}; use that or another name"
        )
    return actor
