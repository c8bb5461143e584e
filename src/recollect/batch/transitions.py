"""TransitionBatch: observation and next observation out of rows that keep each observation once.

A transition is two neighbours of one segment: the row of the step, and the row after it, whose observation is the next
one. So the last row of a segment is none, and an episode of T steps has T + 1 rows: the wrapper writes the last one
with `record_final_obs=True`. Nothing has to mark it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from gymnasium import Space, spaces

from recollect import checks
from recollect.batch.base import BatchBase
from recollect.batch.boundaries import Ask, Boundaries, Found, Stream, as_labels, check_known
from recollect.batch.frames import fold, frame
from recollect.batch.location import Ints, Location, Segments
from recollect.batch.structure import Keys, has_no_array, map_leaves, pick
from recollect.batch.view import Read, as_source
from recollect.batch.windows import WindowBatch
from recollect.errors import EmptyError, MissingLeafError, class_name
from recollect.indexing import is_single, normalize
from recollect.spaces import batch_space, space_at
from recollect.spaces.tree import make_dict

Part = Callable[[Space[Any], Any], Any]


class TransitionBatch(WindowBatch):
    """Transitions out of a `batch` of rows that keep each observation once: `obs`, and `next_obs` from the row after.

    With `stack` both are stacks of as many observations, `(B, stack, ...)`, the newest last; before an episode's
    start its first observation stands in, as in gymnasium's `FrameStackObservation`. The other fields are the step's.
    Record with `ReplayBufferCollectionWrapper(env, buf, record_final_obs=True)`: then the last step of an episode has
    its next observation too, whether it terminated or was cut short.

    Draws, epochs and priorities are over transitions alone: rows with one after them in their segment. Where the last
    row of an episode has a flag `terminated` or `truncated`, nothing says where it led: they raise. Indices are
    those of `batch`, and any may be read; at a segment's last row the last observation stands in for the next one.
    Metadata: `segment`, `step`, and `valid_mask` `(B, stack + 1)`, False where an observation stands in. That is so
    too where a ring has overwritten the head of an episode, for the `stack - 1` rows that are next to be overwritten.

    Ownership: owns nothing. Read-only; write to the batch it views. `obs` and `next_obs` share no memory.
    Concurrency: as the batch it views; a call sees one moment.

    Example:
        >>> import numpy as np, recollect as rc
        >>> space = {"obs": ((), "int64"), "reward": ((), "float32")}
        >>> buf = rc.ReplayBuffer.create(rc.MemoryStorage, space, capacity=8, maintain_segment_metadata=True)
        >>> buf.extend({"obs": np.arange(4), "reward": np.ones(4, "float32")})  # three steps, and where they led
        >>> found = rc.TransitionBatch(buf, stack=2)[[0, 2]]
        >>> found["obs"].tolist(), found["next_obs"].tolist()
        ([[0, 0], [1, 2]], [[0, 1], [2, 3]])
        >>> sum(len(batch["obs"]) for batch in rc.StepSampler(rc.TransitionBatch(buf), 2).epoch_iter())
        3
    """

    def __init__(
        self, batch: BatchBase, stack: int | None = None, obs: str = "obs", next_obs: str = "next_obs"
    ) -> None:
        """View `batch`, which must keep segments; `stack=None` is one observation, without an axis of time."""
        check_known(as_source(batch), type(self).__name__)
        self.stack = (
            None if stack is None else checks.count("stack", stack, advice="pass how many to stack, or None")
        )
        self.obs, self.next_obs = obs, next_obs
        parts = _parts(batch.single_space, obs, next_obs)
        super().__init__(batch, 2, (self.stack or 1) - 1, pad=False)
        shown = parts[obs] if self.stack is None else batch_space(parts[obs], self.stack)
        self.single_space = make_dict([*(parts | {obs: shown}).items(), (next_obs, shown)])
        self._flags = [key for key in ("terminated", "truncated") if key in parts]
        self._has_seen_an_end = not self._flags

    # Reads

    def _frames(self, ask: Ask, keys: Keys, flat: bool) -> Found | None:
        if ask.stream is not None:
            self._check_ends()
        return self.batch._read_frames(ask, self._source_keys(keys), False)

    def _source_keys(self, keys: Keys) -> Keys:
        """What of the source's rows shows what is at `keys`."""
        if not keys:
            return ()
        return (self.obs if keys[0] == self.next_obs else keys[0],)

    def _dress(self, found: Found, keys: Keys, flat: bool, metadata: bool) -> Read:
        """Take the parts of folded frames; what is not valid has been filled by its neighbour."""
        data, valid, segment, step = found
        space = space_at(self.batch.single_space, self._source_keys(keys))
        frames = fold(space, data, *valid.shape)
        if keys:
            data = pick(self._part(str(keys[0]), space, frames), keys[1:])
        else:
            data = {key: self._part(key, part, frames[key]) for key, part in space.spaces.items()}  # type: ignore[attr-defined]
            data[self.next_obs] = self._part(self.next_obs, space_at(space, (self.obs,)), frames[self.obs])
        if flat:
            data = self._flatten(data, False, keys)
        if not metadata:
            return data, None
        return data, as_labels(self, {"segment": segment, "step": step, "valid_mask": valid})

    def _part(self, key: str, space: Space[Any], frames: Any) -> Any:
        """What is shown under a key, as a copy of its own, given the frames `(B, stack + 1, ...)`."""
        last = self.burn_in + 1 if key == self.next_obs else self.burn_in
        if self.stack is None or key not in (self.obs, self.next_obs):
            return map_leaves(self._own, space, frame(space, frames, last))
        at = slice(last - self.burn_in, last + 1)
        return map_leaves(lambda leaf, x: self._own(leaf, _span(leaf, x, at)), space, frames)

    def _own(self, leaf: Space[Any], x: Any) -> Any:
        if has_no_array(leaf) or self.backend.name == "jax":  # neither can be changed
            return x
        return np.array(x, order="C") if isinstance(x, np.ndarray) else x.clone()

    def get_located(
        self, location: Location, keys: Keys = (), flat: bool = False, metadata: bool = False
    ) -> Read | None:
        self._check_ends()
        found = self._frames(Ask(self._offsets, place=location), keys, flat)
        return None if found is None else self._dress(found, keys, flat, metadata)

    def _check_ends(self) -> None:
        """Once there is a whole episode, see that it has the row of where it led: else its last step is never drawn."""
        segments = None if self._has_seen_an_end else self.batch.get_segments()
        if not segments:
            return
        last = segments[0][1] - 1
        self._has_seen_an_end = True  # the read comes by here too
        try:
            step, meta = self.get_at_with_metadata(last)
        except IndexError:  # gone meanwhile
            self._has_seen_an_end = False
            return
        if any(step[key] for key in self._flags) and meta is not None and not meta["valid_mask"][-1]:
            self._has_seen_an_end = False
            raise ValueError(
                f"TransitionBatch: an episode that ended must have one more row, of where its last step led, got none "
                f"after row {last}; record with record_final_obs=True, or append one with the last observation, and "
                "flags that are False"
            )

    def draw_starts(self, stream: Stream, n: int) -> Location:
        self._check_ends()
        return super().draw_starts(stream, n)

    def _located(self) -> tuple[Sequence[int] | Ints, Location | None]:
        self._check_ends()
        return super()._located()

    def _empty(self) -> EmptyError:
        return EmptyError(
            f"{type(self).__name__}: must hold two rows of one segment to draw from, got {len(self.batch)} rows "
            "without; append more"
        )

    # Places: the last row of a segment is in none here, so that n-step returns end before it

    def locate(self, idx: Any) -> Location:
        self._check_ends()
        index = np.atleast_1d(normalize(idx, len(self.batch)))
        frames = self.batch._boundaries().frames(index, np.arange(2))
        at = frames.column(0)
        segment = np.where(frames.valid(0)[:, 1], at.segment, -2 - index)
        found = Location(at.row, at.generation, segment, at.step, index)
        return found.take(0) if is_single(idx) else found

    def _boundaries(self) -> Boundaries:
        return Boundaries(self)

    def get_segments(self) -> Segments | None:
        known = self.batch.get_segments()
        return None if known is None else [(start, end - 1) for start, end in known if end - start > 1]


def _span(leaf: Space[Any], x: Any, at: slice) -> Any:
    return x[at] if has_no_array(leaf) else x[:, at]


def _parts(space: Space[Any], obs: str, next_obs: str) -> dict[str, Space[Any]]:
    if not isinstance(space, spaces.Dict):
        raise ValueError(f"batch: space must be a Dict with {obs!r}, got {class_name(space)}; name its parts")
    if obs not in space.spaces:
        raise MissingLeafError(
            f"TransitionBatch: obs must name a part of a sample, got {obs!r}, and there are {list(space.spaces)}; "
            "pass obs=... as yours is called"
        )
    if next_obs in space.spaces:
        raise ValueError(
            f"TransitionBatch: {next_obs!r} must not be kept in the rows, got it there; record without it, or view "
            "the batch as it is"
        )
    return dict(space.spaces)
