"""SharedWeightSync: the newest weights of the learner, whole, for any number of collectors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from recollect._core import exact_parts
from recollect.errors import MissingLeafError, SchemaError
from recollect.ipc import parameters as params
from recollect.ipc.mailbox import Mailbox
from recollect.ipc.parameters import Array, Parameter
from recollect.memory.latest import Latest, latest_nbytes


@dataclass(frozen=True, slots=True)
class WeightStats:
    """What was written, and what this process read."""

    version: int
    nbytes: int
    n_params: int
    param_nbytes: int
    writer_pid: int | None
    reads: int
    overtaken: int


class SharedWeightSync(Mailbox):
    """A learner's weights in shared memory: it writes, collectors read the newest whole version.

    Ownership: both ways are copies. The memory goes with its last user; there is no name to unlink.
    Concurrency: one writer process, readers anywhere, no locks: a slow or dead reader never delays the writer, a
    slow or dead writer never delays a reader, and no read mixes two versions. Pickles to a small handle.

    >>> import numpy as np, recollect as rc
    >>> weights = {"w": np.ones((2, 3), "float32"), "steps": np.array(7)}
    >>> sync = rc.ipc.SharedWeightSync.from_state_dict(weights)
    >>> mine = {"w": np.zeros((2, 3), "float32"), "steps": np.array(0)}
    >>> sync.version, sync.read_weights_into(mine), mine["steps"].item()
    (1, 1, 7)
    >>> sync.cleanup()
    """

    def __init__(
        self,
        param_shapes: Mapping[str, Any],
        *,
        create: bool = True,
        shm_name: str | None = None,
        lock: Any = None,
        dtypes: Mapping[str, Any] | None = None,
        exclude: Sequence[str] = (),
        strict: bool = True,
        cast: bool = False,
    ) -> None:
        """Make the memory for parameters name → shape (float32) or (shape, dtype), or attach to `shm_name`.

        On attach a shape alone says nothing of the dtype, which is the one that it was made with.
        `dtypes` overrides by name. `exclude`: shell patterns of names that are neither written nor read. `strict=False`
        ignores names that are not declared. `cast` converts dtypes within a kind. `lock` is accepted and never taken.
        """
        exclude = (exclude,) if isinstance(exclude, str) else tuple(exclude)
        wanted = params.parse(param_shapes, dtypes, exclude, "float32" if create else params.ANY)
        if create:
            self._setup(Latest.create(*_plan(wanted, exclude)), strict, cast)
            return
        if shm_name is None:
            raise ValueError(
                "shm_name: is needed with create=False, got None; pass the `name` of the other one"
            )
        self._setup(Latest.attach(shm_name), strict, cast)
        try:
            params.check_same(wanted, self._params)
        except BaseException:
            self.close()
            raise
        self._exclude += exclude

    _exclude: tuple[str, ...]

    def _setup(self, box: Latest, strict: bool = True, cast: bool = False) -> None:
        super()._setup(box)
        self._strict, self._cast = strict, cast
        self._params = [Parameter.from_json(p) for p in box.schema["params"]]
        self._exclude = tuple(box.schema["exclude"])
        self._usual = [(p.name, p.shape, p.usual_dtype, p.dtype) for p in self._params]

    def _options(self) -> tuple[bool, bool]:
        return self._strict, self._cast

    @classmethod
    def from_state_dict(cls, state_dict: Mapping[str, Any], **kwargs: Any) -> Self:
        """Make one with the shapes and dtypes of these arrays or tensors, and write them: version 1."""
        exclude = kwargs.get("exclude", ())
        patterns = (exclude,) if isinstance(exclude, str) else exclude
        shapes = {}
        for name, x in params.checked_mapping("state_dict", state_dict).items():
            if params.is_excluded(name, patterns):
                continue
            if not hasattr(x, "shape") or not hasattr(x, "dtype"):
                raise SchemaError(f"{name}: must be an array or a tensor, got {type(x).__name__}")
            shapes[name] = (tuple(x.shape), x.dtype)
        sync = cls(shapes, **kwargs)
        try:
            sync.write_weights(state_dict)
        except BaseException:
            sync.cleanup()
            raise
        return sync

    # -- what it is

    def stats(self) -> WeightStats:
        """Return a frozen record of what was written, and of this process's reads."""
        s = self._box.stats()
        nbytes = sum(self._box.sizes)
        return WeightStats(s.version, s.nbytes, len(self._params), nbytes, s.writer_pid, s.reads, s.overtaken)

    # -- values

    def write_weights(self, state_dict: Mapping[str, Any]) -> None:
        """Publish these weights as the next version; on any error the shared bytes and version stay as they were."""
        ready = self._ready(state_dict)
        if ready is not None:
            with suppress(BufferError, ValueError):  # strided: a copy is needed
                self._box.publish(ready)
                return
        checked = self._checked(state_dict)
        values = [params.as_declared(p, x) if cast else x for p, (x, cast) in zip(self._params, checked)]
        self._box.publish(_to_host(self._params, values))

    def read_weights_into(self, state_dict: Mapping[str, Any]) -> int:
        """Copy the newest weights in place and return their version; at version 0 nothing is touched."""
        ready = self._ready(state_dict)
        if ready is not None:
            with suppress(BufferError, ValueError):  # strided, or it may not be written
                return self._box.latest(ready)
        values = self._checked(state_dict)
        casts = any(cast for _, cast in values)  # a cast may be refused, and until then nothing is touched
        targets: list[Array] = []
        pending: list[Any] = []  # what cannot be filled in place
        for p, (x, _) in zip(self._params, values):
            if not params.is_tensor(x) and not (isinstance(x, np.ndarray) and x.flags.writeable):
                got = "a read-only array" if isinstance(x, np.ndarray) else type(x).__name__
                raise SchemaError(f"{p.name}: must be writable in place, got {got}; pass an array of its own")
            found = None if casts else params.target_array(p, x)
            targets.append(np.empty(p.shape, p.numpy_dtype) if found is None else found)
            pending.append(x if found is None else None)
        version = self._box.latest(targets)
        if version:
            for p, bits, (x, cast) in zip(self._params, targets, values):
                if cast:
                    params.check_fits(p, bits, x)
            _from_host(self._params, targets, pending)
        return version

    def _ready(self, state_dict: Mapping[str, Any]) -> list[Any] | None:
        """What the core can copy as it is, exact arrays and exact tensors with their addresses; None if any is not."""
        if len(params.checked_mapping("state_dict", state_dict)) != len(self._params):
            self._check_names(state_dict)
        return exact_parts(state_dict, self._usual, params.tensor_dtypes)

    def _checked(self, state_dict: Mapping[str, Any]) -> list[tuple[Any, bool]]:
        """Each declared parameter's value, and whether it needs a cast; every check is made here."""
        found = []
        for p in self._params:
            try:
                x = state_dict[p.name]
            except KeyError:
                raise MissingLeafError(
                    f"{p.name}: must be in the state dict, got none of that name"
                ) from None
            found.append((x, params.check(p, x, self._cast)))
        if len(state_dict) != len(found):
            self._check_names(state_dict)
        return found

    def _check_names(self, state_dict: Mapping[str, Any]) -> None:
        if self._strict:
            declared = {p.name for p in self._params}
            for name in state_dict:
                if name not in declared and not params.is_excluded(name, self._exclude):
                    raise SchemaError(
                        f"{name}: is not declared; exclude it, or pass strict=False to ignore it"
                    )


def _plan(wanted: Sequence[Parameter], exclude: Sequence[str]) -> tuple[list[int], dict[str, Any]]:
    schema = {"params": [p.to_json() for p in wanted], "exclude": list(exclude)}
    return [p.nbytes for p in wanted], schema


def weights_nbytes(
    param_shapes: Mapping[str, Any], dtypes: Mapping[str, Any] | None = None, exclude: Sequence[str] = ()
) -> int:
    """Bytes of the segment that `SharedWeightSync(param_shapes, ...)` would make."""
    return latest_nbytes(*_plan(params.parse(param_shapes, dtypes, exclude), exclude))


def _to_host(declared: Sequence[Parameter], values: Sequence[Any]) -> list[Array]:
    """Host bytes of all values; those on a device come in one transfer per device and dtype."""
    found: list[Any] = [None] * len(values)
    groups: dict[Any, list[int]] = {}
    for i, (p, x) in enumerate(zip(declared, values)):
        if params.is_on_device(x):
            groups.setdefault((x.device, x.dtype), []).append(i)
        else:
            found[i] = params.host_array(p, x)
    for members in groups.values():
        import torch

        block = torch.cat([values[i].detach().reshape(-1) for i in members]).to("cpu")
        for i, part in zip(members, block.split([values[i].numel() for i in members])):
            found[i] = params.host_array(declared[i], part)
    return found


def _from_host(declared: Sequence[Parameter], targets: Sequence[Array], pending: Sequence[Any]) -> None:
    """Bring values to where they belong, if that is not None; one transfer per device and dtype."""
    groups: dict[Any, list[int]] = {}
    for i, (p, x) in enumerate(zip(declared, pending)):
        if params.is_on_device(x):
            groups.setdefault((x.device, p.dtype), []).append(i)
        elif x is not None:
            params.copy_into(p, targets[i], x)
    for (device, dtype), members in groups.items():
        import torch

        block = torch.from_numpy(np.concatenate([targets[i].reshape(-1) for i in members]))
        if dtype != str(block.dtype)[6:]:
            block = block.view(getattr(torch, dtype))
        block = block.to(device)
        sizes = [pending[i].numel() for i in members]
        for i, part in zip(members, block.split(sizes)):
            pending[i].detach().copy_(part.view(pending[i].shape))
