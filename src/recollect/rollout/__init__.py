"""Rollout: which experience is made, by whom, and when a batch of it is done.

`import recollect.rollout as rr` gives every name below; the module behind a name is imported when it is first
used, so this loads no torch, httpx or ray.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

_NAMES = {
    "recollect.rollout.config": "Config",
    "recollect.rollout.coordinator": "RolloutCoordinator",
    "recollect.rollout.decoding": "decode",
    "recollect.rollout.events": "Event",
    "recollect.rollout.experience": "Experience Experiences experience_buffer experience_space",
    "recollect.rollout.models.base": "Generation InferenceModel",
    "recollect.rollout.models.openai": "OpenAIModel",
    "recollect.rollout.models.scripted": "ScriptedModel",
    "recollect.rollout.models.torch": "TorchModel",
    "recollect.rollout.operators": (
        "Dedupe DropUniformGroups GroupAdvantage LengthFilter RewardFilter ShapeReward StalenessFilter operator"
    ),
    "recollect.rollout.payload": "encode",
    "recollect.rollout.sinks": "FileSink QueueSink ReplaySink",
    "recollect.rollout.state": "BatchLifecycleState BatchState TaskStatus",
    "recollect.rollout.tasks": "GiveUp Result Task workflow",
}
_HOME = {name: module for module, names in _NAMES.items() for name in names.split()}

if TYPE_CHECKING:
    from recollect.rollout.config import Config as Config
    from recollect.rollout.coordinator import RolloutCoordinator as RolloutCoordinator
    from recollect.rollout.decoding import decode as decode
    from recollect.rollout.events import Event as Event
    from recollect.rollout.experience import Experience as Experience
    from recollect.rollout.experience import Experiences as Experiences
    from recollect.rollout.experience import experience_buffer as experience_buffer
    from recollect.rollout.experience import experience_space as experience_space
    from recollect.rollout.models.base import Generation as Generation
    from recollect.rollout.models.base import InferenceModel as InferenceModel
    from recollect.rollout.models.openai import OpenAIModel as OpenAIModel
    from recollect.rollout.models.scripted import ScriptedModel as ScriptedModel
    from recollect.rollout.models.torch import TorchModel as TorchModel
    from recollect.rollout.operators import Dedupe as Dedupe
    from recollect.rollout.operators import DropUniformGroups as DropUniformGroups
    from recollect.rollout.operators import GroupAdvantage as GroupAdvantage
    from recollect.rollout.operators import LengthFilter as LengthFilter
    from recollect.rollout.operators import RewardFilter as RewardFilter
    from recollect.rollout.operators import ShapeReward as ShapeReward
    from recollect.rollout.operators import StalenessFilter as StalenessFilter
    from recollect.rollout.operators import operator as operator
    from recollect.rollout.payload import encode as encode
    from recollect.rollout.sinks import FileSink as FileSink
    from recollect.rollout.sinks import QueueSink as QueueSink
    from recollect.rollout.sinks import ReplaySink as ReplaySink
    from recollect.rollout.state import BatchLifecycleState as BatchLifecycleState
    from recollect.rollout.state import BatchState as BatchState
    from recollect.rollout.state import TaskStatus as TaskStatus
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
