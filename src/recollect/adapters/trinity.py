"""Trinity-RFT on Recollect: its Workflow and Task classes run on our coordinator, its Experience goes both ways.

A task travels as names and JSON: its workflow and reward function by the path they are imported from, or the name they
are registered under. So it can go to another process and into a journal. Each attempt makes a new Workflow.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from inspect import isawaitable
from types import SimpleNamespace
from typing import Any

import numpy as np

from recollect.errors import MissingExtraError, SchemaError
from recollect.rollout import Config, Experience, Experiences, Task, experience_space, workflow

try:
    import torch
    from trinity.common import workflows
    from trinity.common.config import FormatConfig, GenerationConfig
    from trinity.common.constants import PromptType
    from trinity.common.experience import EID
    from trinity.common.experience import Experience as TheirExperience
    from trinity.common.rewards import REWARD_FUNCTIONS
except ImportError as error:
    raise MissingExtraError(
        'recollect.adapters.trinity: needs Trinity-RFT; run pip install "recollect[trinity]"'
    ) from error

_NAMES = {False: ("trinity", "trinity/async"), True: ("trinity/repeat", "trinity/repeat/async")}
_NO_LEAF = (
    "token_level_reward", "advantages", "returns", "chosen", "rejected", "multi_modal_inputs", "teacher_logprobs",
    "routed_experts",
)  # fmt: skip
_ALL_REPEATS = 2**20


def trinity_task(task: Any, **fields: Any) -> Task:
    """Our task of one of Trinity's; `fields` (task_id, timeout_s, max_retries, repeat_times) are ours.

    Its place in the batch is its id unless `task_id` is given, as with Trinity.
    """
    kind = task.workflow
    form = task.format_args
    args = {
        "workflow": _named(workflows.WORKFLOWS, kind, "workflow"),
        "reward_fn": None
        if task.reward_fn is None
        else _named(REWARD_FUNCTIONS, task.reward_fn, "reward_fn"),
        "format_args": asdict(form) | {"prompt_type": getattr(form.prompt_type, "value", form.prompt_type)},
        "rollout_args": asdict(task.rollout_args),
        **{name: getattr(task, name) for name in ("workflow_args", "reward_fn_args", "index")},
    }
    repeat = {"repeat_times": task.repeat_times or 1} | fields
    return Task(_NAMES[bool(kind.can_repeat)][bool(kind.is_async)], task.raw_task or {}, args=args, **repeat)


def trinity_config(config: Any, **fields: Any) -> Config:
    """Our Config of one of Trinity's, as far as it is about the coordinator; `fields` are ours and come first."""
    explorer, over = config.explorer, config.explorer.over_rollout
    longest = explorer.rollout_model.max_model_len
    ours: dict[str, Any] = {
        "name": explorer.name,
        "runners": explorer.runner_per_model * explorer.rollout_model.engine_num,
        "repeats_per_attempt": explorer.max_repeat_times_per_runner or _ALL_REPEATS,
        "attempt_timeout_s": float(explorer.max_timeout),
        "max_retries": explorer.max_retry_times,
        "over_rollout": float(over.ratio),
        "wait_after_min_s": float(over.wait_after_min),
        "partial_results": "keep" if over.return_partial_tasks else "drop",
        "workflow_modules": (__name__,),
    }
    if over.return_partial_tasks:
        ours["min_group_size"] = 1  # Trinity keeps a task of which any run is good
    if explorer.dynamic_timeout.enable:
        ours["dynamic_timeout"] = float(explorer.dynamic_timeout.ratio)
        ours["dynamic_timeout_warmup"] = explorer.dynamic_timeout.warmup_min_steps
    if longest:
        ours["space"] = experience_space(max_tokens=longest)
    return Config(**ours | fields)


def from_trinity(experience: Any) -> Experience:
    """Our experience of one of Trinity's; SchemaError for what has no leaf in `experience_space()`."""
    for name in _NO_LEAF:
        if getattr(experience, name, None) is not None:
            raise SchemaError(f"{name}: must be None, got a value, which has no leaf here; put it into info")
    tokens = np.asarray(experience.tokens, np.int32)
    n = max(0, len(tokens) - experience.prompt_length)
    logprobs, mask = experience.logprobs, experience.action_mask
    info = dict(experience.info or {})
    said = {"prompt": experience.prompt_text, "answer": experience.response_text}
    version = info.pop("model_version", None)
    leaves: dict[str, Any] = {} if version is None else {"model_version": int(version)}
    return Experience(
        metrics=experience.metrics, info={k: v for k, v in said.items() if v} | info, tokens=tokens,
        prompt_length=experience.prompt_length,
        logprobs=np.full(n, np.nan, np.float32) if logprobs is None else np.asarray(logprobs, np.float32),
        action_mask=np.ones(n, bool) if mask is None else np.asarray(mask).astype(bool),
        reward=np.nan if experience.reward is None else float(experience.reward),
        truncated=experience.truncate_status is not None, **leaves,
    )  # fmt: skip


def to_trinity(x: Experiences) -> list[Any]:
    """Trinity's experiences of what a sink gave: ids, tokens, logprobs, reward, advantage per token, metrics, info."""
    found = []
    for i, group in enumerate(x.group_id.tolist()):
        row = x[i]
        batch, task = x.task_of(group)
        advantage, mask = float(row["advantage"]), torch.from_numpy(np.array(row["action_mask"]))
        info = dict(x.info[i]) | {"model_version": int(row["model_version"])}
        found.append(TheirExperience(
            eid=EID(batch=batch, task=task, run=int(row["run_id"]), step=int(row["step"])),
            tokens=torch.from_numpy(np.array(row["tokens"])), prompt_length=int(row["prompt_length"]),
            logprobs=torch.from_numpy(np.array(row["logprobs"])), action_mask=mask, reward=float(row["reward"]),
            advantages=None if np.isnan(advantage) else advantage * mask.float(),
            truncate_status="response_truncated" if row["truncated"] else None, metrics=dict(x.row_metrics[i]),
            prompt_text=info.pop("prompt", None), response_text=info.pop("answer", None), info=info,
        ))  # fmt: skip
    return found


def _named(registry: Any, kind: Any, what: str) -> str:
    path = f"{kind.__module__}.{kind.__qualname__}"
    names = [name for name, known in registry.modules.items() if known is kind]
    if not names and "<locals>" not in path and registry.get(path) is kind:
        names = [path]
    if not names:
        raise TypeError(
            f"{what}: must be registered or at the top of a module, got {path}; other processes could not find it"
        )
    return str(names[0])


# -- what runs on the coordinator


def _made(work: Any, models: Any) -> Any:
    """The Workflow object of an attempt."""
    args = dict(work.args)
    kind, reward_fn = workflows.WORKFLOWS.get(args.pop("workflow")), args.pop("reward_fn")
    form = args.pop("format_args")
    task = workflows.Task(
        workflow=kind, repeat_times=len(work.run_ids), is_eval=work.is_eval, raw_task=work.data,
        batch_id=work.batch_id, task_id=work.task_id,
        reward_fn=None if reward_fn is None else REWARD_FUNCTIONS.get(reward_fn),
        format_args=FormatConfig(**form | {"prompt_type": PromptType(form["prompt_type"])}),
        rollout_args=GenerationConfig(**args.pop("rollout_args")), **args,
    )  # fmt: skip
    made = task.to_workflow(TrinityModel(models.rollout), [TrinityModel(m) for m in models.auxiliary] or None)
    if kind.can_repeat:
        made.set_repeat_times(len(work.run_ids), 0)
    return made


@workflow(_NAMES[False][False])
def _run(work: Any, models: Any) -> Any:
    return list(map(from_trinity, _made(work, models).run()))


@workflow(_NAMES[False][True])
async def _run_async(work: Any, models: Any) -> Any:
    return list(map(from_trinity, await _made(work, models).run_async()))


@workflow(_NAMES[True][False], grouped=True)
def _repeat(work: Any, models: Any) -> Any:
    return _by_run(_made(work, models).run(), len(work.run_ids))


@workflow(_NAMES[True][True], grouped=True)
async def _repeat_async(work: Any, models: Any) -> Any:
    return _by_run(await _made(work, models).run_async(), len(work.run_ids))


def _by_run(experiences: Iterable[Any], n: int) -> list[list[Experience]]:
    found: list[list[Experience]] = [[] for _ in range(n)]
    for experience in experiences:
        if not 0 <= experience.eid.run < n:
            raise ValueError(
                f"eid.run: must be 0 to {n - 1}, got {experience.eid.run}; count from run_id_base"
            )
        found[experience.eid.run].append(from_trinity(experience))
    return found


class TrinityModel:
    """A model of ours under the names of Trinity's ModelWrapper; every answer is kept in `history`.

    Ownership: of one attempt. Concurrency: of its workflow.
    """

    enable_history = True
    model_path = model_name = "recollect"

    def __init__(self, model: Any) -> None:
        self.model, self.history = model, list[Any]()

    def chat(self, messages: Sequence[dict[str, Any]], **sampling: Any) -> list[Any]:
        """Answer messages."""
        return self._kept(_at_once("chat", self.model.chat(messages, **_sampling(sampling))))

    async def chat_async(self, messages: Sequence[dict[str, Any]], **sampling: Any) -> list[Any]:
        """Answer messages."""
        return self._kept(await self.model.chat(messages, **_sampling(sampling)))

    def generate(self, prompts: Sequence[str], **sampling: Any) -> list[Any]:
        """Answer prompts, one after another."""
        asked = ((self.model.generate(p, **_sampling(sampling))) for p in prompts)
        return [one for answer in asked for one in self._kept(_at_once("generate", answer))]

    async def generate_async(self, prompts: Sequence[str], **sampling: Any) -> list[Any]:
        """Answer prompts, one after another."""
        return [
            one for p in prompts for one in self._kept(await self.model.generate(p, **_sampling(sampling)))
        ]

    def logprobs(self, tokens: Sequence[int], temperature: float | None = None) -> Any:
        """One per token after the first."""
        return torch.as_tensor(_at_once("logprobs", self.model.logprobs(tokens, 1)))

    async def logprobs_async(self, tokens: Sequence[int], temperature: float | None = None) -> Any:
        """One per token after the first."""
        return torch.as_tensor(await self.model.logprobs(tokens, 1))

    @property
    def model_version(self) -> int:
        """The version of the weights that answer now."""
        return int(self.model.version)

    @property
    async def model_version_async(self) -> int:
        """The version of the weights that answer now."""
        return int(self.model.version)

    def extract_experience_from_history(self, clear_history: bool = True) -> list[Any]:
        """What was answered since the last call."""
        found = list(self.history)
        if clear_history:
            self.history.clear()
        return found

    def get_openai_client(self) -> Any:
        """A client with `chat.completions.create(...)`, whose answers have choices with a message."""

        def create(*, messages: Any, model: Any = None, **sampling: Any) -> Any:
            return _completion(self.chat(messages, **sampling))

        return _client(create)

    def get_openai_async_client(self) -> Any:
        """The same, awaited."""

        async def create(*, messages: Any, model: Any = None, **sampling: Any) -> Any:
            return _completion(await self.chat_async(messages, **sampling))

        return _client(create)

    def _kept(self, answers: Iterable[Any]) -> list[Any]:
        found = [_their_answer(answer) for answer in answers]
        self.history.extend(found)
        return found


def _at_once(name: str, answer: Any) -> Any:
    if isawaitable(answer):
        answer.close()  # type: ignore[attr-defined]
        raise TypeError(f"{name}: must not be called by an async workflow, whose loop it would block; "
                        f"await {name}_async")  # fmt: skip
    return answer


def _sampling(given: dict[str, Any]) -> dict[str, Any]:
    """What was set: Trinity's -1 and None mean the server's own; logprobs are always asked for."""
    left_out = {"logprobs", "lora_request"} | ({"top_k"} if given.get("top_k") == -1 else set())
    return {name: value for name, value in given.items() if value is not None and name not in left_out}


def _their_answer(answer: Any) -> Any:
    leaves = answer.experience().leaves  # SchemaError without tokens or logprobs
    tokens, n = torch.from_numpy(np.array(leaves["tokens"])), len(leaves["logprobs"])
    return TheirExperience(
        tokens=tokens, prompt_length=answer.prompt_length, logprobs=torch.from_numpy(np.array(leaves["logprobs"])),
        action_mask=torch.ones(n, dtype=torch.bool), response_text=answer.text, prompt_text=answer.prompt or None,
        truncate_status="response_truncated" if leaves["truncated"] else None,
        info={"model_version": answer.version},
    )  # fmt: skip


def _client(create: Any) -> Any:
    completions = SimpleNamespace(create=create)
    return SimpleNamespace(chat=SimpleNamespace(completions=completions), model_path=TrinityModel.model_path)


def _completion(answers: Sequence[Any]) -> Any:
    return SimpleNamespace(model=TrinityModel.model_path, choices=[
        SimpleNamespace(
            index=i, finish_reason="length" if answer.truncate_status else "stop",
            message=SimpleNamespace(role="assistant", content=answer.response_text, tool_calls=None),
        )
        for i, answer in enumerate(answers)
    ])  # fmt: skip
