"""Everything that a coordinator can be told: the defaults, the bounds, and errors that name their place."""

from __future__ import annotations

import asyncio
import math
import os
from pathlib import Path
from typing import Any

import pytest

import recollect.rollout as rr
from recollect.errors import (
    SchemaError,
)
from recollect.rollout.experience.space import plan_of
from recollect.rollout.models.replicas import ModelPool
from recollect.rollout.runners.base import RunnerContext
from recollect.rollout.runners.local import LocalPool
from recollect.rollout.runners.process import ProcessPool

DEFAULTS: dict[str, Any] = {
    "name": "rollout", "seed": 0, "trace": None, "auxiliary_names": (),
    "runner": "local", "runners": None, "repeats_per_attempt": 1,
    "workflow_modules": (), "ray_options": {},
    "max_retries": 2, "retry_backoff_s": 0.5, "retry_backoff_max_s": 30.0,
    "attempt_timeout_s": 1800.0, "cancel_grace_s": 2.0,
    "dynamic_timeout": None, "dynamic_timeout_warmup": 3,
    "batch_timeout_s": 3600.0, "pipeline_timeout_s": 300.0,
    "over_rollout": 0.0, "wait_after_min_s": 30.0,
    "below_min": "raise", "stragglers": "cancel",
    "partial_results": "drop", "min_group_size": 2,
    "max_batches": 1024, "max_queued_runs": 1_000_000, "max_staged_nbytes": 2**30, "history": 256,
    "submit_timeout_s": 60.0, "eval_share": 0.25,
    "max_staleness": None, "versions_per_batch": 1.0,
    "space": None, "operators": (), "sink": "queue",
    "journal": None, "power_safe": False, "drain_s": 10.0,
}  # fmt: skip


LEAST = {
    "runners": 1, "repeats_per_attempt": 1, "dynamic_timeout": 1, "min_group_size": 1, "max_batches": 1,
    "max_queued_runs": 1,
}  # fmt: skip


SECONDS = [name for name in DEFAULTS if name.endswith("_s")]


NUMBERS = [
    *LEAST, *SECONDS, "max_retries", "dynamic_timeout_warmup", "over_rollout", "max_staged_nbytes", "history",
    "eval_share", "max_staleness", "versions_per_batch",
]  # fmt: skip


def test_fields_and_defaults_of_the_config_are_those_of_the_contract() -> None:
    made = rr.Config()
    assert {name: getattr(made, name) for name in made.__struct_fields__} == DEFAULTS
    with pytest.raises(AttributeError):
        made.seed = 1  # type: ignore[misc]


@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_of_the_config_has_its_least(name: str) -> None:
    least = LEAST.get(name, 0)
    assert getattr(rr.Config(**{name: least}), name) == least
    with pytest.raises(SchemaError, match=rf"^{name}: must be a number from {least} to"):
        rr.Config(**{name: least - 1})


@pytest.mark.parametrize(
    "name", [*SECONDS, "over_rollout", "eval_share", "dynamic_timeout", "versions_per_batch"]
)
def test_a_number_of_the_config_is_finite_and_bounded(name: str) -> None:
    for value in (math.nan, math.inf):
        with pytest.raises(SchemaError, match=f"^{name}: must be a number"):
            rr.Config(**{name: value})
    if name in ("over_rollout", "eval_share"):
        assert getattr(rr.Config(**{name: 1.0}), name) == 1.0
        with pytest.raises(SchemaError, match=f"^{name}: must be a number from 0 to 1,"):
            rr.Config(**{name: 1.01})


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"auxiliary_names": ("judge", 5)}, r"^auxiliary_names\[1\]: "),
        ({"workflow_modules": "os"}, "^workflow_modules: "),
        ({"seed": "x"}, "^seed: .*got 'x'"),
        ({"power_safe": 1}, "^power_safe: "),
        ({"below_min": "rase"}, "^below_min: .*did you mean 'raise'"),
        ({"operators": ("grpo", "zero_varience")}, r"^operators\[1\]\.name: .*did you mean 'zero_variance'"),
        ({"operators": (5,)}, r"^operators\[0\]: must be a callable, a name or a table"),
        ({"operators": ({"eps": 1.0},)}, r"^operators\[0\]: must be a callable, a name or a table"),
        ({"operators": ("length", {"name": "grpo", "eps": -1})}, r"^operators\[1\]\.eps: must be a number"),
        ({"operators": ({"name": "grpo", "min_size": 0},)}, r"^operators\[0\]\.min_size: "),
        ({"operators": ({"name": "dedupe", "key": 5},)}, r"^operators\[0\]\.key: "),
        ({"operators": ({"name": "staleness", "max_staleness": -1},)}, r"^operators\[0\]\.max_staleness: "),
        ({"operators": ({"name": "zero_variance", "tol": -1},)}, r"^operators\[0\]\.tol: "),
        ({"sink": {"kind": "tape"}}, r"^sink\.kind: .*'tape'"),
        ({"sink": {"kind": "queue", "capasity": 5}}, r"^sink\.capasity: .*did you mean 'capacity'"),
    ],
)
def test_config_errors_say_where_and_what_is_near(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(SchemaError, match=said):
        rr.Config(**fields)


def test_a_sink_of_ones_own_has_all_three_methods() -> None:
    class Half:
        def write(self, x: Any, commit_id: str) -> None: ...
        def close(self) -> None: ...

    with pytest.raises(
        SchemaError, match=r"^sink: must be a ReplayBuffer, a sink, a path or 'queue', got \S*Half"
    ):
        rr.Config(sink=Half())


def test_an_override_wins_over_the_file_and_lists_become_tuples(tmp_path: Any) -> None:
    path = tmp_path / "c.toml"
    path.write_text(
        'seed = 3\nauxiliary_names = ["a", "b"]\nworkflow_modules = ["os"]\noperators = ["grpo"]\n'
    )
    made = rr.Config.from_toml(path, seed=4)
    assert made.seed == 4 and made.auxiliary_names == ("a", "b")
    assert (made.workflow_modules, made.operators) == (("os",), ("grpo",))


@pytest.mark.parametrize(
    ("changes", "said"),
    [({"runers": 4}, "did you mean 'runners'"), ({"seed": "x"}, "^seed: "), ({"max_retries": -1}, "from 0")],
)
def test_a_copy_with_other_values_is_checked_like_a_new_one(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(SchemaError, match=said):
        rr.Config().replace(**changes)


def test_runners_are_as_many_as_the_kind_allows_unless_told() -> None:
    around = [
        RunnerContext(
            None, rr.Config(runners=n), ModelPool([], [], [], float, 0.0), plan_of(), None, None, None
        )  # type: ignore[arg-type]
        for n in (None, 3)
    ]
    cpus = len(os.sched_getaffinity(0))

    async def sizes(kind: Any) -> list[int]:
        return [kind(one).size for one in around]

    assert asyncio.run(sizes(LocalPool)) == [256, 3]
    assert asyncio.run(sizes(ProcessPool)) == [cpus, 3]


def test_config_errors_name_their_place() -> None:
    for fields, text in [
        ({"runers": 3}, "did you mean 'runners'"),
        ({"runner": "lokal"}, "did you mean 'local'"),
        ({"operators": ("grpo", {"name": "grpo", "epz": 1})}, r"operators\[1\].epz.*'eps'"),
        ({"max_retries": -1}, "max_retries"),
        ({"cancel_grace_s": float("inf")}, "cancel_grace_s"),
        ({"runners": "many"}, "runners"),
        ({"sink": 5}, "sink"),
    ]:
        with pytest.raises(SchemaError, match=text):
            rr.Config(**fields)


def test_config_from_toml(tmp_path: Any) -> None:
    path = tmp_path / "c.toml"
    path.write_text(
        'runners = 3\noperators = ["grpo", {name = "length", high = 9}]\n[sink]\nkind = "queue"\ncapacity = 8\n'
    )
    made = rr.Config.from_toml(path, seed=4)
    assert (made.runners, made.seed, made.operators[1]["high"]) == (3, 4, 9)
    with pytest.raises(SchemaError, match="runner"):
        made.replace(runner="x")


def test_a_file_names_the_space_by_its_options(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text("[space]\nmax_tokens = 9\nleaves = ['advantages']\n")
    space = rr.Config.from_toml(file).space
    assert space.max_tokens == 9 and "advantages" in space.spaces
    for wrong in ("max_tokenz = 9", "max_tokens = 0"):
        file.write_text(f"[space]\n{wrong}\n")
        with pytest.raises(SchemaError, match="^space: must have options of experience_space"):
            rr.Config.from_toml(file)
