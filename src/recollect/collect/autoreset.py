"""How episodes end: every rule about auto-reset, here and nowhere else.

An environment of B slots (an Env has one) says by its mode what the step after an episode's last one is:

    DISABLED   nothing: that slot must be reset first
    NEXT_STEP  the reset itself: no transition, its observation starts the next episode
    SAME_STEP  the next episode's first step: the reset came with the last step, whose own observation is in
               `info["final_obs"]`

`Slots` keeps where each slot is. It is asked before a step, told of every step and reset, and knows no buffer.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode

from recollect.collect.values import replaced, same_at
from recollect.errors import ResetNeeded, SchemaError

Bools = np.ndarray[Any, np.dtype[np.bool_]]
Ints = np.ndarray[Any, np.dtype[np.int64]]

KEY = "autoreset_mode"


def mode_of(
    env: Any, given: AutoresetMode | str | None, version: str = gymnasium.__version__
) -> AutoresetMode:
    """Return an environment's auto-reset mode: the given one, or what it declares; ValueError if it declares none."""
    if given is not None:
        return as_mode(given, "autoreset_mode")
    if isinstance(env, gymnasium.Env):
        # An Env's metadata does not count: older vector environments leave their own mode in their sub-environments'.
        return AutoresetMode.NEXT_STEP if has_autoreset(env) else AutoresetMode.DISABLED
    declared = (env.metadata or {}).get(KEY)
    if declared is not None:
        return as_mode(declared, f"metadata[{KEY!r}]")
    if version.split(".")[:2] == ["1", "0"]:
        return AutoresetMode.NEXT_STEP  # the only one that gymnasium 1.0 had, and did not declare
    raise ValueError(
        f"env: must declare its auto-reset mode in metadata[{KEY!r}], got none in {type(env.unwrapped).__name__}; "
        f"pass {KEY}=AutoresetMode.NEXT_STEP, SAME_STEP or DISABLED"
    )


def mode_or_next_step(env: Any) -> AutoresetMode:
    """Return the mode a vector environment declares; NEXT_STEP, with a warning, if it declares none."""
    if (env.metadata or {}).get(KEY) is not None:
        return mode_of(env, None)
    warnings.warn(
        f"env: {type(env.unwrapped).__name__} declares no auto-reset mode in metadata[{KEY!r}]; NEXT_STEP is assumed. "
        "If it resets at once, declare SAME_STEP: otherwise its final observations are lost",
        UserWarning,
        stacklevel=2,
    )
    return AutoresetMode.NEXT_STEP


def as_mode(value: AutoresetMode | str, what: str) -> AutoresetMode:
    """Return a mode given as a member, its value or its name."""
    for mode in AutoresetMode:
        if value is mode or value in (mode.value, mode.name):
            return mode
    known = ", ".join(f"AutoresetMode.{mode.name}" for mode in AutoresetMode)
    raise ValueError(f"{what}: must be one of {known}, got {value!r}")


def has_autoreset(env: Any) -> bool:
    """Tell whether `wrappers.Autoreset` is among an Env's wrappers."""
    while isinstance(env, gymnasium.Wrapper):
        if isinstance(env, gymnasium.wrappers.Autoreset):
            return True
        env = env.env
    return False


class Slots:
    """Which slots have an observation to go on from, and which are past their episode's end."""

    def __init__(self, mode: AutoresetMode, n: int) -> None:
        self.mode, self.n = mode, n
        self.started = False  # whether there was a full reset
        self._over = np.zeros(n, bool)
        self._lost = np.zeros(n, bool)  # an error left them in a state that nobody knows
        self._any_over = self._any_lost = False

    # -- before a step

    def check_step(self) -> None:
        """Raise ResetNeeded if some slot has no observation to step from."""
        if not self.started:
            raise ResetNeeded("step: needs a reset first, got none; call reset()")
        if self._any_lost:
            raise ResetNeeded(f"step: {self._named(self._lost)} left by an error; call reset() first")
        if self._any_over and self.mode is AutoresetMode.DISABLED:
            how = "reset()" if self.n == 1 else "reset() or reset(mask=...)"
            raise ResetNeeded(f"step: {self._named(self._over)} past the end of an episode; call {how} first")

    def check_reset(self, mask: Bools | None) -> None:
        """Raise ResetNeeded for a mask before the first full reset."""
        if mask is not None and not self.started:
            raise ResetNeeded("reset: the first one must be of all slots, got a mask; call reset()")

    def _named(self, which: Bools) -> str:
        slots = np.flatnonzero(which).tolist()
        shown = ", ".join(map(str, slots[:8])) + (", ..." if len(slots) > 8 else "")
        if self.n == 1:
            return "the environment is"
        return f"slot {shown} is" if len(slots) == 1 else f"slots {shown} are"

    # -- after it

    def recorded(self) -> Ints | None:
        """Return the slots whose step is a transition, None if all: where the step is the reset, there is none."""
        if self.mode is AutoresetMode.NEXT_STEP and self._any_over:
            return np.flatnonzero(~self._over)
        return None

    def stepped(self, done: Bools, any_done: bool) -> None:
        """Take note of a step that ended the episodes of `done`."""
        self._over, self._any_over = done, any_done

    def reset(self, mask: Bools | None) -> None:
        """Take note of a reset of all slots, or of those in `mask`."""
        self.started = True
        for which in (self._over, self._lost):
            which[... if mask is None else mask] = False
        self._any_over, self._any_lost = bool(self._over.any()), bool(self._lost.any())

    def lose(self, mask: Bools | None = None) -> None:
        """Take note that an error left slots in an unknown state."""
        self._lost[... if mask is None else mask] = True
        self._any_lost = True

    @property
    def lost(self) -> Bools:
        """Slots that an error left in an unknown state."""
        return self._lost

    @property
    def keeps_final_obs(self) -> bool:
        """Whether an episode's last observation is in `info`, not in the step's result."""
        return self.mode is AutoresetMode.SAME_STEP


def final_obs(info: Mapping[str, Any], slot: int, is_vector: bool = True) -> Any:
    """Return `info["final_obs"]` of a slot; ValueError naming the slot if it is missing."""
    key = "final_observation" if "final_obs" not in info and "final_observation" in info else "final_obs"
    found = info.get(key)  # the longer name is that of gymnasium before 1.0
    if is_vector and found is not None:
        present = info.get(f"_{key}")
        if present is not None and not present[slot]:
            found = None
        else:
            found = _of_slot(found, slot)
    if found is None:
        raise ValueError(
            f'slot {slot}: info["final_obs"] must hold the last observation of the episode that ended here, got none; '
            "the environment must give it in SAME_STEP mode, or declare another mode"
        )
    return found


def _of_slot(found: Any, slot: int) -> Any:
    if isinstance(found, Mapping):  # a batch of a Dict space
        return {key: _of_slot(part, slot) for key, part in found.items()}
    return found[slot]


def last_observations(
    space: Any, obs: Any, info: Mapping[str, Any], slots: Ints
) -> tuple[Any, dict[int, Exception], int | None]:
    """Return a batch of observations with those slots' final ones in place.

    Also what is wrong, by slot, and a slot whose final observation equals the next episode's first, if any:
    the sign of an environment that has overwritten it.
    """
    finals: dict[int, Any] = {}
    wrong: dict[int, Exception] = {}
    equal = None
    for slot in slots.tolist():
        try:
            finals[slot] = final_obs(info, slot)
            if same_at(space, obs, slot, finals[slot]):
                equal = slot
        except (ValueError, TypeError, LookupError) as error:
            wrong[slot] = error
    obs, misfits = replaced(space, obs, finals)
    wrong |= {
        slot: SchemaError(f'slot {slot}: info["final_obs"] must fit the observation space, got {problem}')
        for slot, problem in misfits.items()
    }
    return obs, wrong, equal


def warn_of_overwritten(slot: int) -> None:
    """Say that a final observation looks overwritten."""
    warnings.warn(
        f'slot {slot}: info["final_obs"] equals the next episode\'s first observation; an environment that reuses its '
        "arrays overwrites it in SAME_STEP mode: let it return copies, or use NEXT_STEP. "
        "recollect.check_env_pipeline(env) tells more.",
        UserWarning,
        stacklevel=6,
    )
