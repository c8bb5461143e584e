"""ReplayBufferCollectionWrapper: an environment that records every transition, and otherwise changes nothing.

What an Env and a VectorEnv have in common is here; `single.py` and `vector.py` have the two kinds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MethodType
from typing import Any, Literal, Self

import gymnasium
import numpy as np
from gymnasium.error import AlreadyPendingCallError, NoAsyncCallError
from gymnasium.vector import VectorEnv

from recollect import interrupts
from recollect.collect.autoreset import Slots, mode_of
from recollect.collect.builders import has_context
from recollect.collect.recorder import Recorder
from recollect.collect.sinks import Targets
from recollect.errors import ClosedError, SegmentOpenError, class_name
from recollect.replay import Lane, ReplayBuffer
from recollect.spaces import first_difference
from recollect.storage.contract import PathName

Bools = np.ndarray[Any, np.dtype[np.bool_]]
Ints = np.ndarray[Any, np.dtype[np.int64]]

_NOT_MOVED = (AlreadyPendingCallError, NoAsyncCallError)  # errors of which it is known that nothing happened


class _IfEnvHas:
    """A method of the class that an object has only where its environment has it, so that `hasattr` tells."""

    def __init__(self, function: Any) -> None:
        self._function, self.__doc__ = function, function.__doc__

    def __get__(self, wrapper: Any, owner: Any = None) -> Any:
        if wrapper is None:
            return self._function
        name = self._function.__name__
        if not hasattr(wrapper.env, name):
            raise AttributeError(f"{type(wrapper.env).__name__} has no {name}; use step() and reset()")
        return MethodType(self._function, wrapper)


class ReplayBufferCollectionWrapper:
    """Records every transition of an environment into one or more replay buffers.

    Round a `gymnasium.Env` it is a `gymnasium.Wrapper`, round a `VectorEnv` a `VectorWrapper`. It returns what the
    environment returns. One buffer takes one Env, or a vector of B slots if it has B lanes, or one lane and no
    segments; B buffers take a slot each. `buf.on_lane(k)` in the place of a buffer records into that lane alone, a
    list of them a slot each: so several processes record into one buffer. Lanes stay the caller's.

    `transition_builder` makes the sample of a step (a callable for one slot, or a DataTransformation for a batch);
    without one the buffer's Dict space names what it holds. `validate_transition` also checks bounds and NaN.
    `dump_on_episode_end` and `dump_on_reset_boundary` save to `dump_path`. `autoreset_mode` overrides what a
    VectorEnv declares. `record_final_obs` is for rows without `next_obs`: after an episode's last step it writes one
    more row with the observation that the step led to (the action again, reward 0, no flags), also where `reset()`,
    `close()` or other buffers cut the episode; `TransitionBatch` shows such rows as transitions.

    Ownership: observations and actions are copied when seen. Buffers are the caller's and never closed here; the
    lanes of one that has B are held until `close()`.
    Concurrency: one thread at a time.

    >>> import gymnasium as gym, recollect as rc
    >>> env = gym.make("CartPole-v1")
    >>> buf = rc.ReplayBuffer.create(
    ...     rc.MemoryStorage, rc.transition_space(env), capacity=1_000, maintain_segment_metadata=True
    ... )
    >>> env = rc.ReplayBufferCollectionWrapper(env, buf)
    >>> obs, info = env.reset(seed=0)
    >>> for _ in range(100):
    ...     obs, reward, terminated, truncated, info = env.step(0)
    ...     if terminated or truncated:
    ...         obs, info = env.reset()
    >>> len(buf), len(buf.get_segments()) > 5
    (100, True)
    >>> env.close()
    """

    env: Any
    _slots: Slots
    _recorder: Recorder

    def __new__(cls, env: Any, *args: Any, **kwargs: Any) -> Self:
        """Make the kind of wrapper that fits `env`."""
        from recollect.collect.single import EnvCollectionWrapper
        from recollect.collect.vector import VectorCollectionWrapper

        kind: type[Any]
        if isinstance(env, VectorEnv):
            kind = VectorCollectionWrapper
        elif isinstance(env, gymnasium.Env):
            kind = EnvCollectionWrapper
        else:
            way = (
                f"pass gym.make({env!r})" if isinstance(env, str) else "pass the environment, then the buffer"
            )
            raise TypeError(f"env: must be a gymnasium Env or VectorEnv, got {class_name(env)}; {way}")
        if not issubclass(cls, gymnasium.Wrapper | VectorEnv):
            # A class of the caller's own gets the kind as a second base.
            cls = kind if cls is ReplayBufferCollectionWrapper else type(cls.__name__, (cls, kind), {})
        return object.__new__(cls)

    def __init__(
        self,
        env: Any,
        replay_buffers: ReplayBuffer | Lane | Sequence[ReplayBuffer | Lane],
        replay_mode: str = "auto",
        transition_builder: Any = None,
        validate_transition: bool = False,
        dump_on_episode_end: bool = False,
        dump_on_reset_boundary: bool = False,
        dump_path: PathName | None = None,
        *,
        autoreset_mode: Any = None,
        record_final_obs: bool = False,
    ) -> None:
        self._wrap(env)
        self._n = self._count(env)
        self._builder_given, self._validate = transition_builder, validate_transition
        self._finals = record_final_obs
        self.dump_on_episode_end, self.dump_on_reset_boundary = dump_on_episode_end, dump_on_reset_boundary
        self.dump_path = dump_path
        self._slots = Slots(mode_of(env, autoreset_mode), self._n)
        self._has_context = has_context(env)
        self._obs: Any = None
        self._context: Any = None
        self._pending: Any = None
        self._warned = False  # of an overwritten final_obs
        self._closed = False  # nothing is recorded any more
        self._env_closed = False
        recorder: Recorder | None = None
        try:
            with interrupts.deferred():
                recorder = self._make_recorder(replay_buffers, replay_mode)
                _check_not_recorded_twice(env, recorder)
        except BaseException:
            if recorder is not None:
                recorder.sink.release()
            raise
        self._recorder, self.replay_mode = recorder, recorder.sink.mode  # what "auto" came to

    @classmethod
    def shared(cls, env: Any, replay_buffer: ReplayBuffer, **kwargs: Any) -> ReplayBufferCollectionWrapper:
        """Wrap with one buffer for all slots."""
        return cls(env, replay_buffer, replay_mode="shared", **kwargs)

    @classmethod
    def per_env(
        cls, env: Any, replay_buffers: Sequence[ReplayBuffer], **kwargs: Any
    ) -> ReplayBufferCollectionWrapper:
        """Wrap with one buffer for each slot."""
        return cls(env, replay_buffers, replay_mode="per_env", **kwargs)

    # -- what a kind of environment gives

    def _wrap(self, env: Any) -> None:
        raise NotImplementedError

    def _count(self, env: Any) -> int:
        raise NotImplementedError

    def _reset_arguments(self, mask: Any, kwargs: dict[str, Any]) -> tuple[Bools | None, dict[str, Any]]:
        raise NotImplementedError

    def _take_reset(self, context: Any, obs: Any, mask: Bools | None) -> None:
        raise NotImplementedError

    def _record(self, action: Any, result: Any) -> tuple[Exception | None, Iterable[int]]:
        """Record a step; return the error, if any, and the slots whose episodes ended."""
        raise NotImplementedError

    def _copy_action(self, action: Any) -> Any:
        raise NotImplementedError

    # -- the environment

    def reset(self, *args: Any, mask: Any = None, seed: Any = None, **kwargs: Any) -> Any:
        """Reset all slots, or those of `mask`; ends their open segments and returns what the environment returns."""
        slots, kwargs = self._begin_reset(mask, kwargs)
        with _Losing(self, slots) as call:
            result = self.env.reset(*args, seed=seed, **kwargs)
            call.has_returned = True
            self._end_reset(result, slots)
        return result

    @_IfEnvHas
    def reset_async(self, *args: Any, mask: Any = None, seed: Any = None, **kwargs: Any) -> None:
        """Begin a reset that `reset_wait` ends."""
        slots, kwargs = self._begin_reset(mask, kwargs)
        with self._beginning(("reset", slots), slots):
            self.env.reset_async(*args, seed=seed, **kwargs)

    @_IfEnvHas
    def reset_wait(self, *args: Any, **kwargs: Any) -> Any:
        """End a reset that `reset_async` began."""
        self._check_open()
        with _Losing(self, None) as call:
            result = self.env.reset_wait(*args, **kwargs)
            call.has_returned = True
            kind, slots = self._pending or ("", None)
            if kind == "reset":  # not one that a `reset` began, which was interrupted
                self._end_reset(result, slots)
        return result

    def _begin_reset(self, mask: Any, kwargs: dict[str, Any]) -> tuple[Bools | None, dict[str, Any]]:
        self._check_open()
        slots, kwargs = self._reset_arguments(mask, kwargs)
        self._slots.check_reset(slots)
        return slots, kwargs

    def _end_reset(self, result: Any, mask: Bools | None) -> None:
        context, obs = (result[0], result[1]) if self._has_context else (None, result[0])
        ended = range(self._n) if mask is None else np.flatnonzero(mask).tolist()
        error = self._recorder.end(ended)
        self._take_reset(context, obs, mask)
        self._slots.reset(mask)
        self._pending = None
        if self.dump_on_reset_boundary:
            self._dump(self._recorder, ended, always=False)
        _raise(error)

    def step(self, action: Any) -> Any:
        """Step and record; returns what the environment returns."""
        self._check_step()
        seen = self._copy_action(action)
        with _Losing(self, None) as call:
            result = self.env.step(action)
            call.has_returned = True
            self._end_step(seen, result)
        return result

    @_IfEnvHas
    def step_async(self, action: Any) -> None:
        """Begin a step that `step_wait` ends and records."""
        self._check_step()
        seen = self._copy_action(action)
        with self._beginning(("step", seen), None):
            self.env.step_async(action)

    @_IfEnvHas
    def step_wait(self, *args: Any, **kwargs: Any) -> Any:
        """End a step that `step_async` began, and record it."""
        self._check_open()
        with _Losing(self, None) as call:
            result = self.env.step_wait(*args, **kwargs)
            call.has_returned = True
            (kind, seen), self._pending = self._pending or ("", None), None
            if kind == "step":  # not one that a `step` began, which was interrupted
                self._end_step(seen, result)
        return result

    @contextmanager
    def _beginning(self, what: tuple[str, Any], slots: Bools | None) -> Iterator[None]:
        """Round the begin of a call that is ended by another, which finds `what`, however this one ends."""
        before = self._pending
        with _Losing(self, slots):
            try:
                self._pending = what
                yield
            except _NOT_MOVED:
                self._pending = before
                raise

    def _check_step(self) -> None:
        self._check_open()
        self._slots.check_step()

    def _end_step(self, action: Any, result: Any) -> None:
        error, ended = self._record(action, result)
        if self.dump_on_episode_end and ended:
            self._dump(self._recorder, ended, always=True)
        _raise(error)

    def _lose(self, mask: Bools | None) -> None:
        """After an error of the environment nobody knows where its slots are: they need a reset."""
        self._slots.lose(mask)
        with suppress(ClosedError):
            self._recorder.sink.end(range(self._n) if mask is None else np.flatnonzero(mask).tolist())

    # -- buffers

    @property
    def replay_buffers(self) -> list[ReplayBuffer]:
        """The buffers that are recorded into."""
        return list(self._recorder.sink.buffers)

    @property
    def dump_path(self) -> PathName | None:
        """Where automatic dumps go; may be assigned."""
        return self._dump_path

    @dump_path.setter
    def dump_path(self, path: PathName | None) -> None:
        if path is None and (self.dump_on_episode_end or self.dump_on_reset_boundary):
            raise ValueError("dump_path: is needed for automatic dumps, got None; pass a directory")
        self._dump_path = path
        self._dump_place = None if path is None else Path(path).absolute()  # this process may go elsewhere

    def _dump(self, recorder: Recorder, slots: Iterable[int], *, always: bool) -> None:
        if self._dump_place is None:
            raise ValueError("dump_path: is needed for a dump, got None; assign a directory")
        recorder.sink.dump(self._dump_place, slots, always=always)

    def _make_recorder(self, buffers: Targets, mode: str) -> Recorder:
        if mode == "per_env" and not isinstance(self.env, VectorEnv):
            raise ValueError(
                "replay_mode: per_env must be of a VectorEnv, got a single environment; pass its buffer as shared"
            )
        return Recorder(self.env, self._n, buffers, mode, self._builder_given, self._validate, self._finals)

    def set_replay_buffers(
        self,
        replay_buffers: ReplayBuffer | Lane | Sequence[ReplayBuffer | Lane],
        *,
        replay_mode: str | None = None,
        require_same_space: bool = True,
        allow_mid_episode: bool = False,
        finalize_old_segments: bool = False,
        dump_old: bool = False,
    ) -> list[ReplayBuffer]:
        """Record into other buffers from now on and return the old ones, unclosed.

        With a segment open it needs `finalize_old_segments`, which ends it, or `allow_mid_episode`, which leaves it
        open. `dump_old` saves the old buffers to `dump_path`, after ending their segments. Everything is checked
        before anything changes.
        """
        self._check_open()
        mode = self.replay_mode if replay_mode is None else replay_mode
        old = self._recorder
        if old.sink.open_slots() and not (allow_mid_episode or finalize_old_segments):
            raise SegmentOpenError(
                f"set_replay_buffers: slots {old.sink.open_slots()[:8]} have open segments; pass "
                "finalize_old_segments=True to end them or allow_mid_episode=True to leave them open"
            )
        if dump_old and self._dump_path is None:
            raise ValueError("dump_old: needs dump_path, got None; assign it first")
        new: Recorder | None = None
        try:
            with interrupts.deferred():  # it claims lanes
                new = self._make_recorder(replay_buffers, mode)
            difference = first_difference(new.space, old.space) if require_same_space else None
            if difference:
                raise ValueError(
                    f"replay_buffers: must have the old buffers' space, got a difference at {difference}; "
                    "pass require_same_space=False"
                )
            if finalize_old_segments or dump_old:
                _raise(old.end(range(self._n)))
            if dump_old:
                self._dump(old, range(self._n), always=True)
            with interrupts.deferred():
                self._recorder, self.replay_mode = new, new.sink.mode
                _release(old, unless=new)
        except BaseException:
            if new is not None and self._recorder is old:
                _release(new, unless=old)
            raise
        return old.sink.buffers

    # -- life

    def close(self, **kwargs: Any) -> Any:
        """End open segments, give up lanes and close the environment; buffers stay open."""
        if self._env_closed:
            return
        try:
            with interrupts.deferred():
                if not self._closed:
                    self._closed = True
                    try:
                        with suppress(ClosedError):
                            _raise(self._recorder.end(range(self._n)))
                    finally:
                        self._recorder.sink.release()
        finally:
            try:
                self._env_closed = True
                self.env.close(**kwargs)
            except KeyboardInterrupt:
                self._env_closed = False  # the next call goes on
                raise

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(f"{type(self).__name__}: was closed; wrap a new environment")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> Literal[False]:
        self.close()
        return False


# What help() and editors show.
ReplayBufferCollectionWrapper.__new__.__wrapped__ = ReplayBufferCollectionWrapper.__init__  # type: ignore[attr-defined]


class _Losing:
    """Round a call of the environment and its recording: what may have moved it unseen means that it needs a reset.

    That is an error of its own, and an interrupt anywhere: the caller did not get the observation to go on from.
    """

    def __init__(self, wrapper: ReplayBufferCollectionWrapper, mask: Bools | None) -> None:
        self._wrapper, self._mask = wrapper, mask
        self.has_returned = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, Exception) and (self.has_returned or isinstance(error, _NOT_MOVED)):
            return
        if error is not None:
            self._wrapper._lose(self._mask)


def _raise(error: Exception | None) -> None:
    if error is not None:
        raise error


def _check_not_recorded_twice(env: Any, recorder: Recorder) -> None:
    """Raise if a wrapper inside `env` records into the same buffer: each step would be there twice."""
    buffers = recorder.sink.buffers
    while env is not None:
        is_recorded = isinstance(env, ReplayBufferCollectionWrapper) and not env._closed
        if is_recorded and any(theirs is ours for theirs in env._recorder.sink.buffers for ours in buffers):
            raise ValueError(
                "env: must not be recorded into this buffer already, got one that is; go on with the wrapper that "
                "there is, or make the environment anew"
            )
        env = vars(env).get("env")


def _release(recorder: Recorder, unless: Recorder) -> None:
    """Give up lanes, but not those of a buffer that the other recorder writes to as well."""
    shared = {id(buffer) for buffer in unless.sink.buffers}
    if not shared & {id(buffer) for buffer in recorder.sink.buffers}:
        recorder.sink.release()
