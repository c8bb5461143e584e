"""check_env_pipeline: step an environment, record it, and say what is wrong before a long run finds out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from gymnasium import Space, spaces
from gymnasium.vector import VectorEnv

from recollect.batch.structure import has_no_array
from recollect.collect.autoreset import Slots, final_obs, last_observations, mode_of
from recollect.collect.bounds import outside
from recollect.collect.builders import CONVERTED, converted
from recollect.collect.sinks import has_lanes, n_lanes
from recollect.collect.values import copied, same, same_at, slot_of
from recollect.collect.wrapper import ReplayBufferCollectionWrapper
from recollect.replay import ReplayBuffer
from recollect.spaces import as_numpy, transition_space
from recollect.spaces.arrays import is_arraylike
from recollect.spaces.tree import children, path_name
from recollect.storage import MemoryStorage

_ROWS = 64  # of each slot that the scratch buffer holds; each row is looked at as soon as it is written


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong, or may be: how bad, where, what, and what to do about it."""

    level: Literal["error", "warning"]
    place: str
    problem: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.level}: {self.place}: {self.problem}; {self.remedy}"


Path = tuple[str | int, ...]


def check_env_pipeline(
    env: Any,
    buffer: ReplayBuffer | None = None,
    steps: int = 1000,
    seed: int | None = 0,
    strict: bool = False,
    *,
    progress: Callable[[int], None] | None = None,
) -> list[Finding]:
    """Step a fresh environment at random, record it, and return what is wrong with it, worst first.

    Finds values off their space (shape, dtype, bounds, NaN), arrays that are written over later, a missing or wrong
    `final_obs`, an undeclared auto-reset mode, and rows unlike what the environment gave. `buffer` is written to:
    pass a new one like that of the run; without one a scratch buffer is used. `strict` raises the first error as a
    ValueError. `progress` is called with the number of each step.

    Ownership: the environment is stepped and left open; so is the buffer.

    >>> import gymnasium as gym, recollect as rc
    >>> rc.check_env_pipeline(gym.make("CartPole-v1"), steps=100)
    []
    """
    check = _Check(env, strict)
    with suppress(_StopChecking):
        check.run(buffer, steps, seed, progress or (lambda step: None))
    return sorted(check.found.values(), key=lambda finding: finding.level)


class _StopChecking(Exception):
    """Nothing more can be learnt."""


class _Probe:
    """Stands between the wrapper and the environment, so that errors of either can be told apart."""

    def __init__(self, env: Any) -> None:
        self._env, self.result = env, None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._env, name)

    def step(self, action: Any) -> Any:
        self.result = None
        self.result = self._env.step(action)
        return self.result

    def reset(self, **kwargs: Any) -> Any:
        self.result = None
        self.result = self._env.reset(**kwargs)
        return self.result


class _Check:
    def __init__(self, env: Any, strict: bool) -> None:
        self._env, self._strict = env, strict
        self._n = env.num_envs if isinstance(env, VectorEnv) else None
        self._parts = transition_space(env)
        self.found: dict[tuple[str, str], Finding] = {}
        self._step = 0
        self._slots: Slots | None = None
        self._refused: Exception | None = None  # why the newest step was not recorded
        self._obs: Any = None  # a copy of the newest observation
        self._held: tuple[Any, Any] | None = None  # the object itself, and the copy made when it was seen

    def _say(self, level: Any, place: str, kind: str, problem: str, remedy: str) -> None:
        """Note a finding, once for each place and kind."""
        if (place, kind) in self.found:
            return
        finding = Finding(level, place, f"{problem} (step {self._step})" if self._step else problem, remedy)
        self.found[place, kind] = finding
        if self._strict and level == "error":
            raise ValueError(str(finding))

    # -- the run

    def run(
        self, buffer: ReplayBuffer | None, steps: int, seed: int | None, progress: Callable[[int], None]
    ) -> None:
        try:
            self._slots = Slots(mode_of(self._env, None), self._n or 1)
        except ValueError as error:
            self._say("error", "metadata", "mode", _problem_of(error),
                      'declare it, as metadata["autoreset_mode"] = AutoresetMode.NEXT_STEP')  # fmt: skip
        wrapper = self._wrapped(buffer)
        try:
            self._run(wrapper, steps, seed, progress)
        finally:
            wrapper._recorder.sink.end(range(self._n or 1))
            wrapper._recorder.sink.release()

    def _wrapped(self, buffer: ReplayBuffer | None) -> ReplayBufferCollectionWrapper:
        n = self._n or 1
        if buffer is None:
            buffer = ReplayBuffer.create(
                MemoryStorage, self._parts, capacity=_ROWS * n, num_lanes=n, maintain_segment_metadata=True
            )
        mode = None if self._slots else "NEXT_STEP"
        try:
            wrapper = ReplayBufferCollectionWrapper(
                self._env, buffer, replay_mode="shared", autoreset_mode=mode
            )
        except (ValueError, TypeError) as error:
            self._say(
                "error", "buffer", "layout", _problem_of(error), _remedy_of(error, "create another buffer")
            )
            raise _StopChecking from None
        wrapper.env = _Probe(self._env)
        wrapper._warned = True  # what it would warn of is a finding here
        self._buffer = buffer
        return wrapper

    def _run(self, wrapper: Any, steps: int, seed: int | None, progress: Callable[[int], None]) -> None:
        self._env.action_space.seed(seed)
        self._reset(wrapper, None, seed=seed)
        for step in range(1, steps + 1):
            self._step = step
            done = self._one_step(wrapper)
            progress(step)
            if not done.any():
                continue
            if self._slots is None:
                return  # what comes next depends on the mode
            if self._slots.mode.name == "DISABLED":
                self._reset(wrapper, None if self._n is None or done.all() else done)

    def _reset(self, wrapper: Any, mask: Any, **kwargs: Any) -> None:
        if mask is not None:
            kwargs["mask"] = mask
        result = self._asked(wrapper, "reset", lambda: wrapper.reset(**kwargs))
        obs = result[1] if wrapper._has_context else result[0]
        self._look_at_obs(obs, "reset")
        self._look_at_refusal()
        if self._slots is not None:
            self._slots.reset(mask)

    def _asked(self, wrapper: Any, what: str, call: Callable[[], Any]) -> Any:
        """Call the wrapper; an error is the environment's if it gave no result, else one of recording."""
        try:
            return call()
        except Exception as error:
            result = wrapper.env.result
            if result is None:
                self._say("error", what, "raised", f"the environment raised {type(error).__name__}: {error}",
                          "correct the environment")  # fmt: skip
                raise _StopChecking from None
            if not isinstance(result, tuple) or len(result) != (
                5 if what == "step" else 2 + wrapper._has_context
            ):
                problem = f"must return a tuple as gymnasium says, got {type(result).__name__}"
                self._say("error", what, "result", problem, "correct the environment")
                raise _StopChecking from None
            self._refused = error
            return result

    def _look_at_refusal(self) -> None:
        """A step that could not be recorded, unless what was said of its values explains it."""
        error, self._refused = self._refused, None
        if error is None:
            return
        if "final_obs" in str(error):
            remedy = _remedy_of(error, "give what the last step led to")
            self._say("error", "final_obs", "missing", _problem_of(error), remedy)
        elif not any(finding.level == "error" for finding in self.found.values()):
            remedy = _remedy_of(error, "correct the environment or the buffer's space")
            self._say("error", "recording", "rejected", _problem_of(error), remedy)

    def _one_step(self, wrapper: Any) -> Any:
        action = self._env.action_space.sample()
        given = copied(action)
        before = self._obs
        offered = self._buffer.stats().offered
        rejected = self._buffer.stats().rejected
        result = self._asked(wrapper, "step", lambda: wrapper.step(action))
        obs, reward, terminated, truncated, info = result
        if not same(action, given):
            self._say("warning", "action", "changed", "the environment changes the action array it is given",
                      "let it work on a copy")  # fmt: skip
        self._look_at_obs(obs, "step")
        for place, problem in (
            ("reward", reward_problem(reward, self._n)),
            ("terminated", flag_problem(terminated, self._n)),
            ("truncated", flag_problem(truncated, self._n)),
        ):
            if problem:
                self._say("error", place, "value", problem, "correct what step returns")
        self._look_at_refusal()
        done = np.atleast_1d(np.logical_or(as_numpy(terminated), as_numpy(truncated)))
        if self._slots is not None:
            parts = {"obs": before, "action": given, "reward": reward, "terminated": terminated,
                     "truncated": truncated, "done": done if self._n else done[0]}  # fmt: skip
            self._look_at_rows(self._slots, parts, info, done, offered, rejected)
        return done

    # -- what it gave

    def _look_at_obs(self, obs: Any, where: str) -> None:
        for leaf, problem in problems(self._parts["obs"], obs, self._n):
            place = "obs" if leaf == "value" else f"obs/{leaf}"
            kind = problem.split(" ")[0]  # shape, dtype, value
            self._say("error", place, kind, f"{where} returns one off its space: {problem}",
                      "return what the observation space says, or correct the space")  # fmt: skip
        if self._held is not None:
            held, seen = self._held
            if share(held, obs) or not same(held, seen):
                self._say("warning", "obs", "reused", "the environment writes over arrays that it returned before",
                          "return copies, or copy what you keep; recording does so by itself")  # fmt: skip
        self._obs = copied(obs)
        self._held = (obs, self._obs)

    def _last(self, before: Any, info: Any, done: Any) -> tuple[Any, set[int]]:
        """Return the observations that the step led to, and the slots where that is unknown."""
        slots, space = self._slots, self._parts["obs"]
        if slots is None or not slots.keeps_final_obs or not done.any():
            return self._obs, set()
        if self._n is None:
            try:
                last = final_obs(info, 0, is_vector=False)
            except ValueError:
                return self._obs, {0}
            self._look_at_final(last, before, self._obs)
            return last, set()
        last, wrong, _ = last_observations(space, self._obs, info, np.flatnonzero(done))
        for slot in np.flatnonzero(done).tolist():
            if slot not in wrong:  # recording refused the others, and said why
                self._look_at_final(
                    final_obs(info, slot), slot_of(space, before, slot), slot_of(space, self._obs, slot)
                )
        return last, set(wrong)

    def _look_at_final(self, last: Any, before: Any, after: Any) -> None:
        if same(last, after):
            self._say("error", "final_obs", "overwritten", "it equals the next episode's first observation",
                      "the environment writes over it: let its step and reset return copies")  # fmt: skip
        elif same(last, before):
            self._say("error", "final_obs", "stale", "it equals the observation before the last step",
                      "give the observation that the last step led to")  # fmt: skip
        for _, problem in problems(self._parts["obs"], last, None):
            self._say("error", "final_obs", "value", f"it is off the observation space: {problem}",
                      "give the observation that the last step led to")  # fmt: skip

    # -- what was recorded

    def _look_at_rows(
        self, slots: Slots, parts: dict[str, Any], info: Any, done: Any, offered: int, rejected: int
    ) -> None:
        recorded = slots.recorded()
        next_obs, unknown = self._last(parts["obs"], info, done)
        slots.stepped(done, bool(done.any()))
        every = np.arange(self._n or 1) if recorded is None else recorded
        stats = self._buffer.stats()
        if stats.offered - offered != len(every):
            self._say("error", "rows", "count", f"{len(every)} transitions gave {stats.offered - offered} rows",
                      "does something else write to this buffer?")  # fmt: skip
            return
        if stats.rejected > rejected:
            return  # said already
        parts |= {"next_obs": next_obs, "env_index": np.arange(self._n) if self._n else 0}
        rows = self._buffer[self._newest(every)]
        for key, leaf in self._buffer.single_space.spaces.items():  # type: ignore[attr-defined]
            if key not in parts:
                continue
            for i, slot in enumerate(every.tolist()):
                if slot not in unknown:
                    self._compare(key, leaf, rows[key], i, parts[key], slot)

    def _newest(self, slots: Any) -> Any:
        """Return the index of each slot's newest row."""
        if self._n is None or n_lanes(self._buffer) == 1 or not has_lanes(self._buffer):
            return np.arange(-len(slots), 0)
        counts = [cursor - low for low, cursor, _ in self._buffer.engine.native.windows()]
        return np.cumsum(counts)[slots] - 1

    def _compare(self, key: str, leaf: Any, rows: Any, i: int, given: Any, slot: int) -> None:
        row = slot_of(leaf, rows, i)
        if key in CONVERTED:
            value = converted(given, leaf, key)
            value = value if self._n is None else value[slot]
            is_same = bool(np.array_equal(as_numpy(row), value, equal_nan=value.dtype.kind == "f"))
        else:
            source = self._parts[key] if key in self._parts.spaces else leaf
            is_same = (
                same_at(source, given, slot, row) if self._n is not None else same(_like(row, given), row)
            )
        if not is_same:
            self._say("error", f"rows/{key}", "unlike", "a recorded value is not what the environment gave",
                      "give the buffer the environment's own dtypes and a storage that loses nothing")  # fmt: skip


def _like(row: Any, given: Any) -> Any:
    """A plain number as the array or scalar that a buffer returns for it."""
    return np.asarray(given, row.dtype) if isinstance(given, int | float) and hasattr(row, "dtype") else given


def _problem_of(error: Exception) -> str:
    return str(error).rsplit("; ", 1)[0]


def _remedy_of(error: Exception, otherwise: str) -> str:
    return str(error).rsplit("; ", 1)[1] if "; " in str(error) else otherwise


def problems(space: Space[Any], value: Any, n: int | None, path: Path = ()) -> Iterator[tuple[str, str]]:
    """Yield (leaf, problem) for each leaf of a value that is off its space; `n` is the batch axis, if there is one."""
    parts = dict(children(space))
    if parts:
        if not _has_parts(space, value, parts):
            keys = list(parts) if isinstance(space, spaces.Dict) else len(parts)
            yield path_name(path), f"must have the parts {keys}, got {_brief(value)}"
            return
        for key, part in parts.items():
            yield from problems(part, value[key], n, (*path, key))
        return
    wrong = _leaf_problem(space, value, n)
    if wrong:
        yield path_name(path), wrong


def _has_parts(space: Space[Any], value: Any, parts: Mapping[Any, Any]) -> bool:
    if isinstance(space, spaces.Dict):
        return isinstance(value, Mapping) and set(value) == set(parts)
    return isinstance(value, tuple) and len(value) == len(parts)


def _leaf_problem(space: Space[Any], value: Any, n: int | None) -> str | None:
    if has_no_array(space):
        items = [value] if n is None else value
        if n is not None and (not isinstance(value, tuple) or len(value) != n):
            return f"must be a tuple of {n}, got {_brief(value)}"
        bad = [item for item in items if not space.contains(item)]
        return f"must be a member of {space}, got {bad[0]!r}" if bad else None
    if not is_arraylike(value):
        if n is None and isinstance(space, spaces.Discrete) and type(value) is int:
            return None if space.contains(value) else f"must be a member of {space}, got {value}"
        return f"must be an array, got {_brief(value)}"
    array = as_numpy(value)
    shape = tuple(space.shape or ()) if n is None else (n, *(space.shape or ()))
    if array.shape != shape:
        return f"shape must be {shape}, got {array.shape}"
    if array.dtype != space.dtype and not (
        n is None and isinstance(space, spaces.Discrete) and array.dtype.kind in "iu"
    ):
        return f"dtype must be {space.dtype}, got {array.dtype}"
    found = outside(space, array[None] if n is None else array, n or 1)
    for i, problem in found.items():
        where = "" if n is None else f" in slot {i}"
        return problem.removeprefix("value: ") + where
    return None


def _brief(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"a dict with {list(value)}"
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)}"
    return type(value).__name__


def arrays_of(value: Any) -> list[np.ndarray[Any, Any]]:
    """Return the numpy arrays in a nested value, themselves and not copies."""
    if isinstance(value, np.ndarray):
        return [value] if value.dtype != object else []
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, tuple | list) else ()
    return [array for part in parts for array in arrays_of(part)]


def share(a: Any, b: Any) -> bool:
    """Tell whether two nested values have memory in common."""
    pairs = zip(arrays_of(a), arrays_of(b))
    return any(x.size and np.may_share_memory(x, y) for x, y in pairs)


def flag_problem(value: Any, n: int | None) -> str | None:
    """Say what is wrong with `terminated` or `truncated`."""
    if n is None:
        return None if isinstance(value, bool | np.bool_) else f"must be a bool, got {_brief(value)}"
    return _vector_problem(value, n, lambda a: a.dtype == bool, "bool")


def reward_problem(value: Any, n: int | None) -> str | None:
    """Say what is wrong with a reward."""
    if n is None:
        try:
            number = float(value)
        except (TypeError, ValueError):
            return f"must be a number, got {_brief(value)}"
        return None if np.isfinite(number) else f"must be finite, got {number}"
    wrong = _vector_problem(value, n, lambda a: a.dtype.kind in "fiub", "numbers")
    if wrong:
        return wrong
    bad = np.flatnonzero(~np.isfinite(as_numpy(value)))
    return f"must be finite, got {as_numpy(value)[bad[0]]} in slot {bad[0]}" if len(bad) else None


def _vector_problem(value: Any, n: int, fits: Any, what: str) -> str | None:
    if not is_arraylike(value):
        return f"must be an array of {n} {what}, got {_brief(value)}"
    array = as_numpy(value)
    if array.shape != (n,) or not fits(array):
        return f"must be an array of {n} {what}, got {array.dtype} of shape {array.shape}"
    return None
