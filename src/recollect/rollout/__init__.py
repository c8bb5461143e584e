"""Rollout: which experience is made, on which runner, and when a batch of it is done.

`import recollect.rollout as rr` gives every name below; the module behind a name is imported when it is first
used, so this loads no torch, httpx or ray.

A batch goes through `coordinator` (the calls), `batch/submit`, `scheduler` (which attempts start, and which results
are taken), `runners/` (where attempts run), `batch/finalize`, `batch/cut`, `batch/deliver`, `experience/pipeline`
(operators, then the sink) and `batch/end`; `batch/abort` ends it early. `context` is what these steps share,
`journal/` what outlives a kill.
"""

from __future__ import annotations

from recollect._lazy import lazy

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

__getattr__, __dir__, __all__ = lazy(__name__, _HOME)
