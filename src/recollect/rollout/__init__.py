"""Rollout: which experience is made, by whom, and when a batch of it is done.

`import recollect.rollout as rr` gives every name below; the module behind a name is imported when it is first
used, so this loads no torch, httpx or ray.
"""

from __future__ import annotations

from recollect._lazy import lazy

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

__getattr__, __dir__, __all__ = lazy(__name__, _HOME)
