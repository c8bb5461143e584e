"""A job: tasks from files through a coordinator into files, as one TOML file says.

`[rollout]` holds the fields of `rr.Config`; `[[models]]` and `[[auxiliary.NAME]]` the models; `[train]` and `[eval]`
where tasks come from. The tasks of a step depend on the step and the seed alone, so that a job that was stopped goes
on, from its journal, with what it would have done.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections.abc import Awaitable, Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec

from recollect.errors import SchemaError
from recollect.files.record import read_bytes
from recollect.rollout.batch.state import BatchLifecycleState
from recollect.rollout.config import Config, read_toml
from recollect.rollout.coordinator import RolloutCoordinator
from recollect.rollout.experience.sinks import is_queue
from recollect.rollout.tasks import Task, find_workflow, import_modules

OnResult = Callable[[dict[str, Any]], None]


class ModelSpec(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """One model: an address, a script for trials, or a `module:function` that makes it."""

    kind: str
    base_url: str = ""
    model: str = ""
    api_key_env: str | None = None
    timeout_s: float = 600.0
    max_connections: int = 256
    tokenizer: str | None = None
    script: list[str] = []
    latency_s: float = 0.0
    factory: str = ""
    options: dict[str, Any] = {}


class Source(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Where the tasks of a kind of batch come from: a JSONL file, each line the `data` of one task."""

    tasks: str
    workflow: str
    args: dict[str, Any] = {}
    repeat_times: int = 1


class TrainSource(Source, forbid_unknown_fields=True, kw_only=True):
    """Train batches: how many, how large, and how many are rolled out at once."""

    batch_size: int
    steps: int
    ahead: int = 1
    shuffle: bool = True
    min_wait_num: int | None = None


class EvalSource(Source, forbid_unknown_fields=True, kw_only=True):
    """Eval batches: all tasks of the file, before the first step and after every so many."""

    every: int = 10
    name: str = "eval"


class JobSpec(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A whole job."""

    models: list[ModelSpec]
    train: TrainSource
    rollout: dict[str, Any] = {}
    auxiliary: dict[str, list[ModelSpec]] = {}
    eval: EvalSource | None = None


class RolloutJob:
    """A checked job: its coordinator's config, its models' makers, and its tasks.

    Ownership: makes the models when it runs, and closes them.
    """

    def __init__(self, spec: JobSpec, folder: Path) -> None:
        self.spec, self.folder = spec, folder
        fields = dict(spec.rollout, auxiliary_names=tuple(spec.auxiliary))
        self.config = Config.from_fields(_placed(fields, folder))
        if is_queue(self.config.sink):
            raise SchemaError("rollout.sink: must keep what is delivered, got a queue, which has no reader here; "
                              'use {kind = "file", path = "out"}')  # fmt: skip
        for number in ("batch_size", "steps", "repeat_times"):
            _check_count(f"train.{number}", getattr(spec.train, number), 1)
        _check_count("train.ahead", spec.train.ahead, 0)
        import_modules(self.config.workflow_modules)
        for place, source in (("train", spec.train), ("eval", spec.eval)):
            if source is not None:
                self._check_workflow(place, source.workflow)
        self.train_rows = self._rows("train", spec.train)
        self.eval_rows = [] if spec.eval is None else self._rows("eval", spec.eval)

    @classmethod
    def from_toml(cls, path: str | Path, **overrides: Any) -> RolloutJob:
        """Read a job; SchemaError names the place of what is wrong. `overrides` are fields of `[rollout]`."""
        try:
            spec = msgspec.convert(read_toml(path), JobSpec)
            spec.rollout |= overrides
        except msgspec.ValidationError as error:
            text, _, place = str(error).partition(" - at `$")
            raise SchemaError(f"{path}: {place.strip('.`') or 'the file'}: {text}") from None
        return cls(spec, Path(path).parent)

    def _check_workflow(self, place: str, name: str) -> None:
        try:
            find_workflow(name, modules=self.config.workflow_modules)
        except ValueError as error:
            raise SchemaError(f"{place}.{error}; name its module in rollout.workflow_modules") from None

    def _rows(self, place: str, source: Source) -> list[dict[str, Any]]:
        path = self.folder / source.tasks
        try:
            lines = read_bytes(path.absolute(), most=1 << 40, follow=True).splitlines()
            rows = [json.loads(line) for line in lines if line.strip()]
        except (OSError, ValueError, RecursionError) as error:
            raise SchemaError(f"{place}.tasks: must be a JSONL file, got {path}: {error}") from None
        if not rows or not all(isinstance(row, dict) for row in rows):
            raise SchemaError(f"{place}.tasks: must have one object per line and at least one, got {path}")
        return rows

    # -- tasks

    def train_tasks(self, step: int) -> list[Task]:
        """The tasks of a step: the next of the file, in an order of their own each time through it."""
        source, rows = self.spec.train, self.train_rows
        chosen = []
        for at in range(step * source.batch_size, (step + 1) * source.batch_size):
            epoch, place = divmod(at, len(rows))
            chosen.append(rows[self._order(epoch)[place]])
        return [_task(source, row) for row in chosen]

    def _order(self, epoch: int) -> list[int]:
        order = list(range(len(self.train_rows)))
        if self.spec.train.shuffle:
            random.Random(f"{self.config.seed}/{epoch}").shuffle(order)
        return order

    def eval_tasks(self) -> list[Task]:
        """All tasks of the eval file."""
        source = self.spec.eval
        return [] if source is None else [_task(source, row) for row in self.eval_rows]

    # -- running

    async def run(self, watch: Callable[[RolloutCoordinator], Awaitable[None]], told: OnResult) -> None:
        """Run what is left of the job. `watch(c)` runs beside it; `told` gets each batch's result."""
        models = [make_model(spec) for spec in self.spec.models]
        auxiliary = [[make_model(spec) for spec in specs] for specs in self.spec.auxiliary.values()]
        try:
            async with RolloutCoordinator(self.config, models, auxiliary) as c:
                watching = asyncio.ensure_future(watch(c))
                try:
                    await self._steps(c, told)
                finally:
                    watching.cancel()
                    await asyncio.wait([watching])
        finally:
            for model in (*models, *(model for role in auxiliary for model in role)):
                await model.close()

    async def _steps(self, c: RolloutCoordinator, told: OnResult) -> None:
        steps, ahead = self.spec.train.steps, self.spec.train.ahead
        first = first_step(c, steps)
        submitted = first
        await self._evaluate(c, first, told)  # at the beginning, or where a restart cut it short
        for step in range(first, steps):
            while submitted < min(step + 1 + ahead, steps):
                if submitted not in c.batches():  # it may have come back from the journal
                    await self._submit(c, submitted)
                submitted += 1
            told(await c.finalize_train_batch(step))
            await self._evaluate(c, step + 1, told)

    async def _submit(self, c: RolloutCoordinator, step: int) -> None:
        tasks, least = self.train_tasks(step), self.spec.train.min_wait_num
        await c.submit_batch(batch_id=step, tasks=tasks, batch_type="train", min_wait_num=least)

    async def _evaluate(self, c: RolloutCoordinator, step: int, told: OnResult) -> None:
        source = self.spec.eval
        if source is None or (step % source.every and step < self.spec.train.steps):
            return
        ident = f"{step}/{source.name}"
        state = state_of(c, ident)
        if state is BatchLifecycleState.FINALIZED:  # before a restart
            return
        if state in (None, BatchLifecycleState.ABORTED):
            await c.submit_batch(batch_id=ident, tasks=self.eval_tasks(), batch_type="eval")
        told(await c.finalize_eval_batch(ident))


def state_of(c: RolloutCoordinator, batch_id: int | str) -> BatchLifecycleState | None:
    """Where a batch is; None if the coordinator does not know it."""
    try:
        return c.batch_state(batch_id).state
    except KeyError:
        return None


def first_step(c: RolloutCoordinator, steps: int) -> int:
    """The first step that is not done: after a restart the journal knows the newest ones."""
    live = [ident for ident in c.batches() if isinstance(ident, int)]
    if live:
        return min(live)
    done = [step for step in range(steps) if state_of(c, step) is BatchLifecycleState.FINALIZED]
    return max(done, default=-1) + 1


def _placed(fields: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Paths of a job are meant from where its file is."""
    found = fields | {
        key: str(folder / fields[key])
        for key in ("journal", "trace")
        if fields.get(key) and isinstance(fields[key], str)
    }
    sink = fields.get("sink", "queue")
    if isinstance(sink, dict) and isinstance(sink.get("path"), str):
        found["sink"] = sink | {"path": str(folder / sink["path"])}
    elif isinstance(sink, str) and sink != "queue":
        found["sink"] = str(folder / sink)
    return found


def _task(source: Source, row: dict[str, Any]) -> Task:
    return Task(source.workflow, row, args=source.args, repeat_times=source.repeat_times)


def _check_count(place: str, value: int, least: int) -> None:
    if value < least:
        raise SchemaError(f"{place}: must be at least {least}, got {value}")


def make_model(spec: ModelSpec) -> Any:
    """Return the model that a spec names."""
    if spec.kind == "openai":
        from recollect.rollout.models.openai import OpenAIModel

        key = None if spec.api_key_env is None else os.environ.get(spec.api_key_env)
        if spec.api_key_env is not None and key is None:
            raise SchemaError(
                f"models.api_key_env: must name a variable of the environment, got {spec.api_key_env!r}, which is not "
                "set; set it, or leave api_key_env out"
            )
        tokenizer = None if spec.tokenizer is None else imported("tokenizer", spec.tokenizer)()
        return OpenAIModel(
            spec.base_url, spec.model, api_key=key, timeout_s=spec.timeout_s, tokenizer=tokenizer,
            max_connections=spec.max_connections,
        )  # fmt: skip
    if spec.kind == "scripted":
        from recollect.rollout.models.scripted import ScriptedModel

        return ScriptedModel(spec.script, latency_s=spec.latency_s)
    if spec.kind == "factory":
        return imported("factory", spec.factory)(**spec.options)
    raise SchemaError(f"models.kind: must be 'openai', 'scripted' or 'factory', got {spec.kind!r}")


def imported(place: str, path: str) -> Any:
    """Return what `module:name` names."""
    module, _, name = path.partition(":")
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise SchemaError(f"models.{place}: must be 'module:name', got {path!r} ({error})") from None
