"""Config: everything that a coordinator can be told, checked field by field."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from recollect.errors import SchemaError
from recollect.text import nearest


class _Checked(msgspec.StructMeta):
    """Turns an unknown keyword into a SchemaError that names the nearest field."""

    def __call__(cls, *args: Any, **fields: Any) -> Any:
        known = cls.__struct_fields__
        for name in fields:
            if name not in known:
                raise SchemaError(
                    f"{name}: must be a field of Config, got an unknown one{nearest(name, known)}"
                )
        return super().__call__(*args, **fields)


# name -> (least, greatest, may be equal to the least)
_RANGES: dict[str, tuple[float, float]] = {
    "runners": (1, 1_000_000),
    "repeats_per_attempt": (1, math.inf),
    "max_retries": (0, math.inf),
    "retry_backoff_s": (0, 1e9),
    "retry_backoff_max_s": (0, 1e9),
    "attempt_timeout_s": (0, 1e9),
    "cancel_grace_s": (0, 1e9),
    "dynamic_timeout": (1, math.inf),
    "dynamic_timeout_warmup": (0, math.inf),
    "batch_timeout_s": (0, 1e9),
    "pipeline_timeout_s": (0, 1e9),
    "over_rollout": (0, 1),
    "wait_after_min_s": (0, 1e9),
    "min_group_size": (1, math.inf),
    "max_batches": (1, math.inf),
    "max_queued_runs": (1, math.inf),
    "max_staged_nbytes": (0, math.inf),
    "history": (0, math.inf),
    "submit_timeout_s": (0, 1e9),
    "eval_share": (0, 1),
    "max_staleness": (0, math.inf),
    "versions_per_batch": (0, math.inf),
    "drain_s": (0, 1e9),
}


class Config(msgspec.Struct, frozen=True, kw_only=True, metaclass=_Checked):
    """What a coordinator is told; frozen, and checked when it is made.

    >>> Config(runners=64).replace(max_retries=0).max_retries
    0
    >>> Config(runers=64)
    Traceback (most recent call last):
    recollect.errors.SchemaError: runers: must be a field of Config, got an unknown one; did you mean 'runners'?
    """

    name: str = "rollout"
    seed: int = 0
    trace: str | None = None
    auxiliary_names: tuple[str, ...] = ()
    runner: Literal["local", "process", "ray"] = "local"
    runners: int | None = None
    repeats_per_attempt: int = 1
    workflow_modules: tuple[str, ...] = ()
    ray_options: dict[str, Any] = {}
    max_retries: int = 2
    retry_backoff_s: float = 0.5
    retry_backoff_max_s: float = 30.0
    attempt_timeout_s: float = 1800.0
    cancel_grace_s: float = 2.0
    dynamic_timeout: float | None = None
    dynamic_timeout_warmup: int = 3
    batch_timeout_s: float = 3600.0
    pipeline_timeout_s: float = 300.0
    over_rollout: float = 0.0
    wait_after_min_s: float = 30.0
    below_min: Literal["raise", "accept"] = "raise"
    stragglers: Literal["cancel", "carry"] = "cancel"
    partial_results: Literal["drop", "keep", "raise"] = "drop"
    min_group_size: int = 2
    max_batches: int = 1024
    max_queued_runs: int = 1_000_000
    max_staged_nbytes: int = 2**30
    history: int = 256
    submit_timeout_s: float = 60.0
    eval_share: float = 0.25
    max_staleness: int | None = None
    versions_per_batch: float = 1.0
    space: Any = None
    operators: tuple[Any, ...] = ()
    sink: Any = "queue"
    journal: str | None = None
    power_safe: bool = False
    drain_s: float = 10.0

    def __post_init__(self) -> None:
        for info in msgspec.structs.fields(Config):
            _check_field(info.name, info.type, getattr(self, info.name))
        _check_operators(self.operators, self.workflow_modules)
        _check_sink(self.sink)

    def replace(self, **changes: Any) -> Config:
        """Return a copy with other values, checked anew."""
        return Config(**{name: getattr(self, name) for name in self.__struct_fields__} | changes)

    @classmethod
    def from_toml(cls, path: str | Path, **overrides: Any) -> Config:
        """Read a TOML file whose keys are fields; `overrides` win."""
        return cls.from_fields(read_toml(path) | overrides)

    @classmethod
    def from_fields(cls, given: Mapping[str, Any]) -> Config:
        """Make one of plain values, as they come out of a file."""
        fields = dict(given)
        for name in ("auxiliary_names", "workflow_modules", "operators"):
            if isinstance(fields.get(name), list):
                fields[name] = tuple(fields[name])
        if isinstance(fields.get("space"), dict):
            fields["space"] = _space_of(fields["space"])
        return cls(**fields)


def read_toml(path: str | Path) -> dict[str, Any]:
    """Read a TOML file; SchemaError if it is none."""
    import tomllib

    try:
        return tomllib.loads(Path(path).read_bytes().decode())
    except (ValueError, RecursionError) as error:  # no UTF-8 either, or too many levels
        raise SchemaError(f"{path}: must be TOML, got {error}; correct it") from None


def _check_field(name: str, kind: Any, value: Any) -> None:
    if isinstance(value, Path) and name in ("journal", "trace"):
        value = str(value)
    try:
        msgspec.convert(value, kind, strict=True)
    except msgspec.ValidationError as error:
        path = str(error).rpartition(" - at `$")[2].rstrip("`") if " - at `$" in str(error) else ""
        text = str(error).partition(" - at")[0]
        choices = getattr(kind, "__args__", ())
        hint = nearest(value, choices) if isinstance(value, str) and value and _is_choice(kind) else ""
        raise SchemaError(f"{name}{path}: {text[0].lower()}{text[1:]}, got {value!r}{hint}") from None
    low, high = _RANGES.get(name, (-math.inf, math.inf))
    if isinstance(value, int | float) and not isinstance(value, bool) and name in _RANGES:
        finite = math.isfinite(value)
        if not finite or not low <= value <= high:
            raise SchemaError(f"{name}: must be a number from {low:g} to {high:g}, got {value!r}")


def _space_of(table: dict[str, Any]) -> Any:
    """The space that a table of a file names by the options of `experience_space`."""
    from recollect.rollout.experience.space import experience_space

    try:
        return experience_space(**table)
    except (TypeError, ValueError) as error:
        raise SchemaError(f"space: must have options of experience_space, got {table!r}: {error}") from None


def _is_choice(kind: Any) -> bool:
    return getattr(kind, "__origin__", None) is Literal


def _check_operators(operators: tuple[Any, ...], modules: tuple[str, ...]) -> None:
    from recollect.rollout.experience.operators import is_known, make_operator
    from recollect.rollout.tasks import import_modules

    if not all(map(is_known, operators)):
        import_modules(modules)
    for position, spec in enumerate(operators):
        make_operator(spec, f"operators[{position}]")


def _check_sink(sink: Any) -> None:
    from recollect.rollout.experience.sinks import check_sink

    check_sink(sink)
