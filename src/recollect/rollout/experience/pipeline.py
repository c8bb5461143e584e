"""The pass: staged payloads through the operators into the sink, one batch at a time.

Operators and sink run in threads, so a slow one delays no deadline. A call that overran goes on in its thread; the
next pass waits for it first and asks the sink whether the write was done, so that nothing is delivered twice.
"""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from recollect.errors import PipelineError, class_name
from recollect.rollout.event_loop import Clock, Limit, Threads
from recollect.rollout.experience.experience import Experiences
from recollect.rollout.experience.operators import Operator, StalenessFilter, make_operator
from recollect.rollout.experience.payload import decode_many
from recollect.rollout.experience.sinks import ExperienceSink, QueueSink, ReplaySink
from recollect.rollout.experience.space import ExperiencePlan

_log = logging.getLogger(__name__)


@dataclass
class Delivery:
    """What a pass did."""

    n_in: int = 0
    n_out: int = 0
    runs_out: int = 0
    stale: int = 0
    metrics: dict[str, float] = field(default_factory=dict)


class Pipeline:
    """Operators in order, then the sink.

    Concurrency: one pass at a time, started in the coordinator's loop. `stage` says what it is doing now.
    """

    def __init__(
        self, config: Any, plan: ExperiencePlan, sink: ExperienceSink, threads: Threads, clock: Clock
    ) -> None:
        self.config, self.plan, self.sink, self.threads, self.clock = config, plan, sink, threads, clock
        self.operators = [make_operator(spec) for spec in config.operators]
        self.lock = asyncio.Lock()
        self.stage: str | None = None
        self._commit_id: str | None = None  # of the pass under way
        self._overran: asyncio.Future[Any] | None = None

    async def run(
        self,
        payloads: list[bytes],
        commit_id: str,
        version: int,
        *,
        maybe_written: bool = False,
        begin_commit: Callable[[], Any] | None = None,
    ) -> Delivery:
        """Take payloads through a pass; PipelineError if an operator or the sink raised or overran.

        `maybe_written`: an earlier try may have reached the sink, so it is asked first. `begin_commit` is called
        (and awaited, if it returns something) just before the write.
        """
        async with self.lock:
            self._commit_id = commit_id
            limit = Limit(self.clock, self.config.pipeline_timeout_s)
            try:
                async with limit:
                    await self._finish_overrun()
                    return await self._pass(payloads, commit_id, version, maybe_written, begin_commit)
            except TimeoutError:
                if not limit.expired:
                    raise
                raise PipelineError(
                    f"{self.stage}: must be done within pipeline_timeout_s = {limit.seconds:g} s, got no end; "
                    "everything stays staged, finalize again"
                ) from None
            finally:
                self.stage = self._commit_id = None

    def stage_of(self, commit_id: str) -> str | None:
        """What this pass is doing; None if it is another's turn."""
        return self.stage if commit_id == self._commit_id else None

    async def _finish_overrun(self) -> None:
        if self._overran is not None and not self._overran.done():
            self.stage = "a call of an earlier pass that overran"
            await asyncio.wait([self._overran])
        self._overran = None

    async def _pass(self, payloads: list[bytes], commit_id: str, version: int, maybe_written: bool,
                    begin_commit: Callable[[], Any] | None) -> Delivery:  # fmt: skip
        done = Delivery()
        start = self.clock.time()
        self.stage = "decoding"
        x = await self._call("decode", decode_many, payloads, self.plan)
        done.n_in = len(x)
        if self.config.max_staleness is not None:
            fresh = x.where(x.model_version >= version - self.config.max_staleness)
            done.stale = len(x) - len(fresh)
            done.metrics["pipeline/staleness/dropped"] = float(done.stale)
            if done.stale == len(x) > 0:
                _tell_all_stale(commit_id, x, version, self.config.max_staleness)
            x = fresh
        for name, operator in self.operators:
            x = await self._operate(name, operator, x, commit_id, version, done)
        done.n_out, done.runs_out = len(x), _n_runs(x)
        if len(x):
            await self._write(x, commit_id, maybe_written, begin_commit, done)
        for name, operator in self.operators:
            if hasattr(operator, "commit"):
                await self._call(f"commit of operator {name}", operator.commit)
        done.metrics |= {"pipeline/in_count": float(done.n_in), "pipeline/out_count": float(done.n_out),
                         "pipeline/s": self.clock.time() - start}  # fmt: skip
        return done

    async def _operate(self, name: str, operator: Operator, x: Experiences, commit_id: str, version: int,
                       done: Delivery) -> Experiences:  # fmt: skip
        self.stage, start = f"operator {name}", self.clock.time()
        call = operator.at(version) if isinstance(operator, StalenessFilter) else operator
        returned = await self._call(self.stage, lambda: call(x))
        extra: dict[str, Any] = {}
        if isinstance(returned, tuple) and len(returned) == 2:
            returned, extra = returned
        if not isinstance(returned, Experiences):
            raise PipelineError(f"operator {name}: must return Experiences, got {class_name(returned)}")
        if returned is not x and not _is_part(returned, x):
            raise PipelineError(f"operator {name}: may drop and change rows, got new or repeated ones")
        found = {"dropped": len(x) - len(returned), "s": self.clock.time() - start, **extra}
        for key, value in found.items():
            metric = f"pipeline/{name}/{key}"
            done.metrics[metric] = done.metrics.get(metric, 0.0) + float(value)  # one name, one count
        if len(x) and not len(returned):
            if extra.get("no_reward") == len(x):
                _log.warning(
                    "operator %s: dropped all %d rows of %s, none has a reward; return g.experience(reward=...)",
                    name, len(x), commit_id,
                )  # fmt: skip
            elif isinstance(operator, StalenessFilter):
                _tell_all_stale(commit_id, x, version, operator.max_staleness)
        return returned

    async def _write(self, x: Experiences, commit_id: str, maybe_written: bool,
                     begin_commit: Callable[[], Any] | None, done: Delivery) -> None:  # fmt: skip
        self.stage, start = "the sink", self.clock.time()
        if begin_commit is not None:
            waiting = begin_commit()
            if waiting is not None:
                await waiting
        held = maybe_written and await self._call("the sink", self._holds, x, commit_id)
        if not held:
            try:
                await self._call("the sink", self.sink.write, x, commit_id)
            except asyncio.CancelledError:
                if isinstance(self.sink, QueueSink):  # else it would enter when there is room, wanted or not
                    self.sink.give_up(commit_id)
                raise
        done.metrics["pipeline/sink/s"] = self.clock.time() - start

    def _holds(self, x: Experiences, commit_id: str) -> bool:
        sink = self.sink
        return sink.holds_rows(x, commit_id) if isinstance(sink, ReplaySink) else sink.holds(commit_id)

    async def _call(self, what: str, function: Callable[..., Any], *args: Any) -> Any:
        """Run one call in a thread; if we are stopped meanwhile, it goes on and the next pass waits for it."""
        call = self.threads.call(function, *args)
        try:
            return await asyncio.shield(call)
        except asyncio.CancelledError:
            if not call.done():
                self._overran = call
                call.add_done_callback(lambda done: done.cancelled() or done.exception())
            raise
        except Exception as error:
            text = traceback.format_exception_only(error)[-1].strip()
            raise PipelineError(f"{what}: must not raise, got {text}; everything stays staged") from error


def _tell_all_stale(commit_id: str, x: Experiences, version: int, most: int) -> None:
    _log.warning(
        "staleness: dropped all %d rows of %s, made by versions up to %d while the newest is %d and max_staleness %d; "
        "see that new weights reach the server, and that it says their model_version, or none",
        len(x), commit_id, x.model_version.max(), version, most,
    )  # fmt: skip


def _n_runs(x: Experiences) -> int:
    if not len(x):
        return 0
    return len(np.unique(np.stack([x.group_id, x.run_id.astype(np.int64)]), axis=1).T)


def _is_part(part: Experiences, whole: Experiences) -> bool:
    """Whether all rows are of `whole`, none more often than there."""
    return not Counter(part.uids.tolist()) - Counter(whole.uids.tolist())
