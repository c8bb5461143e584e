"""The space of one transition of an environment."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from gymnasium import Space, spaces

from recollect.errors import class_name
from recollect.spaces.make import as_space
from recollect.spaces.tree import check_space, make_dict

DEFAULT_KEYS = ("obs", "action", "reward", "next_obs", "terminated", "truncated")


def transition_space(env: Any, keys: Sequence[str] = DEFAULT_KEYS) -> spaces.Dict:
    """Return the Dict space of one transition of one slot of an Env or VectorEnv.

    Keys may be any of `obs action reward next_obs terminated truncated done env_index context`, in any order.
    """
    if isinstance(keys, str):
        raise ValueError(f"keys: must be a list of names, got the str {keys!r}; pass [{keys!r}]")
    for key in keys:
        if key not in _PARTS or list(keys).count(key) > 1:
            raise ValueError(
                f"keys: must be different ones of {list(_PARTS)}, got {list(keys)}; change {key!r}"
            )
    parts = {key: _PARTS[key](env) for key in keys}
    for key, part in parts.items():
        check_space(part, (key,))
    return make_dict(parts.items())


def _slot_space(env: Any, name: str) -> Space[Any]:
    """Return the space of one slot: a VectorEnv has it under `single_...`."""
    for attribute in (f"single_{name}", name):
        space = _attribute(env, attribute)
        if isinstance(space, Space):
            return space
    if isinstance(env, str):
        raise ValueError(f"env: must be an environment, got the str {env!r}; pass gym.make({env!r})")
    raise ValueError(
        f"env: must have {'an' if name[0] in 'ao' else 'a'} {name}, got {class_name(env)} without; leave its key out"
    )


def _attribute(env: Any, name: str) -> Any:
    # Wrappers of gymnasium 1.x do not forward unknown attributes; they have to be asked.
    if hasattr(env, name) or not getattr(env, "has_wrapper_attr", lambda _: False)(name):
        return getattr(env, name, None)
    return env.get_wrapper_attr(name)


_PARTS: dict[str, Callable[[Any], Space[Any]]] = {
    "obs": lambda env: _slot_space(env, "observation_space"),
    "action": lambda env: _slot_space(env, "action_space"),
    "reward": lambda env: as_space(((), "float32")),
    "next_obs": lambda env: _slot_space(env, "observation_space"),
    "terminated": lambda env: as_space(((), "bool")),
    "truncated": lambda env: as_space(((), "bool")),
    "done": lambda env: as_space(((), "bool")),
    "env_index": lambda env: as_space(((), "int64")),
    "context": lambda env: _slot_space(env, "context_space"),
}
