"""Rollout: which experience is made, on which runner, and when a batch of it is done.

`import recollect.rollout as rr` gives every name below; the module behind a name is imported when it is first
used, so this loads no torch, httpx or ray.

A batch goes through `coordinator` (the calls), `batch/submit`, `scheduler` (which attempts start, and which results
are taken), `runners/` (where attempts run), `batch/finalize`, `batch/cut`, `batch/deliver`, `experience/pipeline`
(operators, then the sink) and `batch/end`; `batch/abort` ends it early. `context` is what these steps share,
`journal/` what outlives a kill.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

_NAMES = {
    "recollect.rollout.config": "Config",
    "recollect.rollout.coordinator": "RolloutCoordinator",
    "recollect.rollout.events": "Event",
    "recollect.rollout.experience.experience": "Experience Experiences experience_buffer experience_space",
    "recollect.rollout.models.base": "Generation InferenceModel",
    "recollect.rollout.models.openai": "OpenAIModel",
    "recollect.rollout.models.scripted": "ScriptedModel",
    "recollect.rollout.models.torch": "TorchModel",
    "recollect.rollout.experience.operators": (
        "Dedupe DropUniformGroups GroupAdvantage LengthFilter RewardFilter ShapeReward StalenessFilter operator"
    ),
    "recollect.rollout.experience.payload": "decode encode",
    "recollect.rollout.experience.sinks": "FileSink QueueSink ReplaySink",
    "recollect.rollout.batch.state": "BatchLifecycleState BatchState TaskStatus",
    "recollect.rollout.tasks": "GiveUp Result Task workflow",
}
_HOME = {name: module for module, names in _NAMES.items() for name in names.split()}

if TYPE_CHECKING:
    from recollect.rollout.batch.state import BatchLifecycleState as BatchLifecycleState
    from recollect.rollout.batch.state import BatchState as BatchState
    from recollect.rollout.batch.state import TaskStatus as TaskStatus
    from recollect.rollout.config import Config as Config
    from recollect.rollout.coordinator import RolloutCoordinator as RolloutCoordinator
    from recollect.rollout.events import Event as Event
    from recollect.rollout.experience.experience import Experience as Experience
    from recollect.rollout.experience.experience import Experiences as Experiences
    from recollect.rollout.experience.experience import experience_buffer as experience_buffer
    from recollect.rollout.experience.experience import experience_space as experience_space
    from recollect.rollout.experience.operators import Dedupe as Dedupe
    from recollect.rollout.experience.operators import DropUniformGroups as DropUniformGroups
    from recollect.rollout.experience.operators import GroupAdvantage as GroupAdvantage
    from recollect.rollout.experience.operators import LengthFilter as LengthFilter
    from recollect.rollout.experience.operators import RewardFilter as RewardFilter
    from recollect.rollout.experience.operators import ShapeReward as ShapeReward
    from recollect.rollout.experience.operators import StalenessFilter as StalenessFilter
    from recollect.rollout.experience.operators import operator as operator
    from recollect.rollout.experience.payload import decode as decode
    from recollect.rollout.experience.payload import encode as encode
    from recollect.rollout.experience.sinks import FileSink as FileSink
    from recollect.rollout.experience.sinks import QueueSink as QueueSink
    from recollect.rollout.experience.sinks import ReplaySink as ReplaySink
    from recollect.rollout.models.base import Generation as Generation
    from recollect.rollout.models.base import InferenceModel as InferenceModel
    from recollect.rollout.models.openai import OpenAIModel as OpenAIModel
    from recollect.rollout.models.scripted import ScriptedModel as ScriptedModel
    from recollect.rollout.models.torch import TorchModel as TorchModel
    from recollect.rollout.tasks import GiveUp as GiveUp
    from recollect.rollout.tasks import Result as Result
    from recollect.rollout.tasks import Task as Task
    from recollect.rollout.tasks import workflow as workflow

__all__ = sorted(_HOME)

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name not in _HOME:
            raise AttributeError(f"module 'recollect.rollout' has no attribute {name!r}")
        value = getattr(import_module(_HOME[name]), name)
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
