"""RolloutCoordinator: batches of tasks in, experience out, with every outcome accounted for.

This is the face; the steps of a batch's life are in the modules that `desk` names. All of it lives in one event
loop; what may block runs in threads and comes back as a future.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from typing import Any, Self

from recollect.errors import ClosedError, FormatError, class_name
from recollect.rollout import aborting, admission, finalize, lifecycle
from recollect.rollout.clock import Clock
from recollect.rollout.config import Config
from recollect.rollout.decoding import decode
from recollect.rollout.desk import Desk
from recollect.rollout.events import Event
from recollect.rollout.observe import Stats
from recollect.rollout.passing import pass_payloads
from recollect.rollout.schema import Plan
from recollect.rollout.sinks import ReplaySink
from recollect.rollout.state import BatchId, BatchState, BatchType
from recollect.rollout.submission import check_id
from recollect.rollout.tasks import Task
from recollect.rollout.waiting import Waiting, why_waiting


class RolloutCoordinator:
    """Runs batches of tasks on runners and delivers what they made, exactly once, to a sink.

    Ownership: closes what the config made (journal, sink, runners), never a model or buffer that was given.
    Concurrency: lives in the event loop of `prepare()`; other threads use `get_local`.

    >>> import asyncio, recollect as rc, recollect.rollout as rr
    >>> async def add(task, models):
    ...     [g] = await models.rollout.generate(f"{task.data['a']}+{task.data['b']}=")
    ...     return g.experience(reward=float(g.text == "5"))
    >>> async def main():
    ...     async with rc.RolloutCoordinator(rr.Config(), [rr.ScriptedModel(["5", "6"])]) as c:
    ...         tasks = [rr.Task(add, {"a": 2, "b": 3}, repeat_times=4)]
    ...         await c.submit_batch(batch_id=1, tasks=tasks, batch_type="train")
    ...         result = await c.finalize_train_batch(1, timeout=30)
    ...         return result["metrics"]["rollout/reward/mean"], len(await c.sink.get(4))
    >>> asyncio.run(main())
    (0.5, 4)
    """

    def __init__(
        self,
        config: Config,
        rollout_model: Sequence[Any],
        auxiliary_models: Sequence[Sequence[Any]] | None = None,
        *,
        clock: Clock | None = None,
    ) -> None:
        """Check and keep; nothing is opened before `prepare`."""
        if not isinstance(config, Config):
            raise TypeError(f"config: must be a rr.Config, got {class_name(config)}")
        _check_list("rollout_model", rollout_model, "models", "pass [model], or [] for none")
        if auxiliary_models is not None:
            _check_list("auxiliary_models", auxiliary_models, "lists of models", "pass a list for each role")
            for number, models in enumerate(auxiliary_models):
                _check_list(f"auxiliary_models[{number}]", models, "models", "pass a list for each role")
        auxiliary = [list(models) for models in auxiliary_models or ()]
        if len(config.auxiliary_names) > len(auxiliary):
            raise ValueError(
                f"auxiliary_names: must name lists of auxiliary_models, got {len(config.auxiliary_names)} names "
                f"for {len(auxiliary)} lists"
            )
        if any(not models for models in auxiliary):
            raise ValueError("auxiliary_models: each role must have at least one model, got an empty list")
        self._desk = Desk(config, rollout_model, auxiliary, clock)
        self._starting: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None

    # -- starting and stopping

    async def prepare(self) -> None:
        """Open journal and sink and start the runners; does nothing while it is running."""
        if self._closing is not None:
            await asyncio.shield(self._closing)
        if self._desk.is_open:
            self._check()
            return
        loop = asyncio.get_running_loop()
        if self._starting is None:
            self._starting = loop.create_task(lifecycle.start(self._desk))
            self._starting.add_done_callback(self._started)
        elif self._starting.get_loop() is not loop:
            raise _wrong_loop()
        await asyncio.shield(self._starting)

    def _started(self, starting: asyncio.Task[None]) -> None:
        self._starting = None
        if not starting.cancelled():
            starting.exception()  # nobody may be left to hear of it

    async def shutdown(self) -> None:
        """Wake every waiter with ClosedError, stop all work, and close what the config made."""
        if self._starting is not None:
            await asyncio.wait([self._starting])
        if not self._desk.is_open and self._closing is None:
            return
        if self._closing is None:
            self._check()
            self._closing = self._desk.loop.create_task(lifecycle.stop(self._desk))
            self._closing.add_done_callback(self._stopped)
        closing = self._closing
        try:
            await asyncio.shield(closing)
        except asyncio.CancelledError:
            if (
                not closing.done()
            ):  # asyncio.run would cancel it next, at Ctrl-C, and the journal would stay locked
                await asyncio.wait([closing])
            raise

    def _stopped(self, closing: asyncio.Task[None]) -> None:
        self._closing = None
        if not closing.cancelled():
            closing.exception()  # nobody may be left to hear of it

    async def __aenter__(self) -> Self:
        try:
            await self.prepare()
        except asyncio.CancelledError:
            await self.shutdown()
            raise
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.shutdown()

    def _check(self) -> Desk:
        """Return the desk if it is open and the call comes from its loop."""
        desk = self._desk
        if not desk.is_open:
            raise ClosedError(
                "coordinator: must be prepared, got a call before prepare() or after shutdown()"
            )
        try:
            here = asyncio.get_running_loop()
        except RuntimeError:
            here = None
        if here is not desk.loop and (here is not None or threading.get_ident() != desk.thread):
            raise _wrong_loop()
        return desk

    # -- batches

    async def submit_batch(
        self,
        *,
        batch_id: BatchId,
        tasks: list[Task],
        batch_type: BatchType,
        min_wait_num: int | None = None,
        priority: int | None = None,
    ) -> None:
        """Register a batch and return once it is admitted; a refused one leaves no trace.

        With a journal it is recorded then. OSError: it could not be, and it was aborted; it may be submitted again.
        """
        desk = self._check()
        batch = await admission.submit(desk, batch_id, tasks, batch_type, min_wait_num, priority)
        await aborting.unless_recorded(desk, batch)

    async def finalize_train_batch(
        self, batch_id: int | str, *, timeout: float | None = None, below_min: str | None = None
    ) -> dict[str, Any]:
        """Wait for a train batch, deliver it, and return its counts and metrics."""
        return await finalize.finalize(self._check(), batch_id, "train", timeout, below_min)

    async def finalize_eval_batch(
        self, batch_id: int | str, *, timeout: float | None = None, below_min: str | None = None
    ) -> dict[str, Any]:
        """Wait for an eval batch and return its counts and metrics."""
        return await finalize.finalize(self._check(), batch_id, "eval", timeout, below_min)

    async def abort_batch(
        self, batch_id: BatchId, *, reason: str, keep_partial_results: bool = False
    ) -> None:
        """Stop a batch; with `keep_partial_results` the good tasks finished by now are delivered first."""
        desk = self._check()
        check_id(batch_id)
        if type(reason) is not str or not reason:
            raise ValueError(f"reason: must be a non-empty str, got {reason!r}")
        admission.forget_cancelled(desk)
        batch = desk.batches.get(batch_id)
        if batch is not None:
            await aborting.abort(desk, batch, reason, keep_partial_results)

    # -- weights

    async def sync_weights(self, version: int | None = None) -> int:
        """Load the newest weights into all rollout models; return the lowest version they serve."""
        desk = self._check()
        if version is not None:
            if isinstance(version, bool) or not isinstance(version, int):
                raise TypeError(f"version: must be an int or None, got {version!r}")
            if version < desk.version:
                raise ValueError(f"version: must not go back from {desk.version}, got {version}")
        lowest = desk.version + 1 if version is None else version
        if desk.rollout_models:
            found = await asyncio.gather(*[model.sync(version) for model in desk.rollout_models])
            lowest = min(map(int, found))
        if lowest < desk.version:
            raise ValueError(
                f"version: must not go back from {desk.version}, got {lowest} from a model's sync"
            )
        desk.version = lowest
        desk.scheduler.pool.synced()
        desk.observer.event_of("synced", detail=f"version {lowest}")
        admission.admit(desk)
        return lowest

    @property
    def model_version(self) -> int:
        """The lowest version that the rollout models serve."""
        return self._desk.version

    # -- other code's payloads

    async def process_experiences(self, payloads: list[bytes]) -> dict[str, float]:
        """Run payloads of other code through one pass; all are checked before any is used."""
        desk = self._check()
        if not payloads:
            return {}
        given = list(payloads)
        try:
            await desk.threads.call(_check_payloads, given, desk.plan)
        except FormatError:
            desk.payloads_refused += 1
            raise
        return await pass_payloads(self._check(), given)

    # -- seeing

    @property
    def config(self) -> Config:
        """What it was told."""
        return self._desk.config

    @property
    def sink(self) -> Any:
        """Where experience goes: the queue, the file sink, the given sink, or the given buffer."""
        sink = self._desk.sink
        return sink.buffer if isinstance(sink, ReplaySink) else sink

    def batches(self) -> list[BatchId]:
        """The ids of live batches, in the order of submission."""
        return list(self._check().batches)

    def batch_state(self, batch_id: BatchId) -> BatchState:
        """Return a copy of what is known of a live or remembered batch."""
        check_id(batch_id)
        return self._desk.state_of(batch_id)

    def why_waiting(self, batch_id: BatchId) -> Waiting | None:
        """Say why a batch is not done; None when it is done or unknown."""
        desk = self._check()
        batch = desk.batches.get(batch_id)
        if batch is None:
            return None
        return why_waiting(batch, desk.scheduler, desk.pipeline.stage_of(batch.commit_id), desk.clock.time())

    def stats(self) -> Stats:
        """Return one moment: doors, attempts, runners, queue, bytes, models."""
        return self._check().stats()

    def events(self, batch_id: BatchId | None = None) -> AsyncIterator[Event]:
        """Iterate over what happens from now on, of one batch or of all."""
        return self._check().hub.listen(batch_id)

    # -- other places

    @classmethod
    def get_actor(cls, config: Config, models: list[Any], auxiliary_models: list[Any]) -> Any:
        """Return the Ray actor `config.name` of this namespace, or make it."""
        from recollect.rollout.actor import get_actor

        return get_actor(cls, config, models, auxiliary_models)

    @classmethod
    def get_local(cls, config: Config, models: list[Any], auxiliary_models: list[Any] | None = None) -> Any:
        """Return the same in a thread of its own: `h.submit_batch(...)` blocks, `.remote(...)` can be awaited."""
        from recollect.rollout.handle import LocalHandle

        return LocalHandle(cls, config, models, auxiliary_models)


def _check_list(name: str, given: Any, what: str, remedy: str) -> None:
    if not isinstance(given, list | tuple):
        raise TypeError(f"{name}: must be a list of {what}, got {class_name(given)}; {remedy}")


def _wrong_loop() -> RuntimeError:
    return RuntimeError(
        "coordinator: lives in the event loop of prepare(), got a call from another; use RolloutCoordinator.get_local"
    )


def _check_payloads(payloads: list[bytes], plan: Plan) -> None:
    for position, payload in enumerate(payloads):
        try:
            decode(payload, space=plan)
        except (FormatError, TypeError) as error:
            raise FormatError(f"payloads[{position}]: {error}") from None
