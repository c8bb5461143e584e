"""HindsightSampler: transitions whose goal is one that their episode did achieve."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from gymnasium import Space, spaces

from recollect import checks
from recollect.backends import Backend, move
from recollect.batch.base import BatchBase
from recollect.batch.boundaries import Lapped, Runs, again_and_again, as_labels, check_known, drawn, is_same
from recollect.batch.location import Bools, Ints, Location
from recollect.batch.nstep import NStepBatch
from recollect.batch.stacked import SliceStackedBatch
from recollect.batch.structure import Keys, pick
from recollect.batch.view import Read, View
from recollect.errors import DtypeError, SchemaError
from recollect.indexing import is_single, positions
from recollect.sampling.base import BatchSampler, limiter_of, unweighted
from recollect.sampling.stream import IndexStream
from recollect.spaces import as_numpy, as_space, first_difference, space_at
from recollect.spaces.tree import make_dict, path_name

STRATEGIES = ("future", "final", "episode")
ACHIEVED: Keys = ("next_obs", "achieved_goal")
DESIRED: tuple[Keys, ...] = (("obs", "desired_goal"), ("next_obs", "desired_goal"))
REWARD: Keys = ("reward",)
GOAL_SPACES = {"goal_segment": ((), "int64"), "goal_step": ((), "int64"), "relabelled": ((), "bool")}
ComputeReward = Callable[[Any, Any, Any], Any]


class HindsightSampler(BatchSampler):
    """Draws samples of `data` uniformly, a share `ratio` of them with a goal that was achieved in the same segment.

    The goal is `next_obs/achieved_goal` of another step of the segment: with strategy `future` this step or a later
    one, with `final` its last so far, with `episode` any. It takes the place of `desired_goal` in `obs` and
    `next_obs`, and the reward becomes what `compute_reward(achieved, desired, info)` says of `next_obs/achieved_goal`
    and the new goals; it gets whole batches, `info` being the relabelled batch, and its answer counts for the
    relabelled samples. Metadata: `goal_segment` and `goal_step` say where the goal is from (-1 if it is the
    sample's own), `relabelled` where it was changed. Getters show samples as they are. `backend="torch"` (or `"jax"`)
    gives tensors; `compute_reward` gets the arrays of `data`.

    Ownership: holds no data; a batch is the caller's own.
    Concurrency: one thread at a time, a second raises RuntimeError; several samplers may share a source.

    Example:
        >>> import numpy as np, recollect as rc
        >>> goal = {"achieved_goal": ((1,), "float32"), "desired_goal": ((1,), "float32")}
        >>> space = {"obs": goal, "next_obs": goal, "reward": ((), "float32")}
        >>> buf = rc.ReplayBuffer.create(rc.MemoryStorage, space, capacity=50, maintain_segment_metadata=True)
        >>> at = lambda t: {"achieved_goal": t[:, None], "desired_goal": np.full((5, 1), 9, "float32")}
        >>> t = np.arange(5, dtype="float32")
        >>> buf.extend({"obs": at(t), "next_obs": at(t + 1), "reward": np.full(5, -1, "float32")})
        >>> reached = lambda achieved, desired, info: (achieved == desired).all(-1) - np.float32(1)
        >>> batch = rc.HindsightSampler(buf, 64, reached, strategy="final", ratio=1.0, seed=0).sample()
        >>> np.unique(batch["obs"]["desired_goal"]).tolist(), np.unique(batch["reward"]).tolist()
        ([5.0], [-1.0, 0.0])
    """

    def __init__(
        self,
        data: BatchBase,
        batch_size: int,
        compute_reward: ComputeReward,
        strategy: str = "future",
        ratio: float = 0.8,
        seed: int | None = None,
        *,
        device: Any = None,
        backend: str | Backend | None = None,
    ) -> None:
        """Draw from `data`, which must keep segments; no sample is read yet."""
        check_known(unweighted(data, type(self).__name__), type(self).__name__)
        if not callable(compute_reward):
            kind = type(compute_reward).__name__
            raise TypeError(
                f"compute_reward: must be callable, got {kind}; pass compute_reward(achieved, desired, info)"
            )
        self.compute_reward, self.strategy = compute_reward, checks.choice("strategy", strategy, STRATEGIES)
        self.ratio = checks.fraction("ratio", ratio, advice="pass the share of draws to relabel")
        super().__init__(data.single_space, _metadata_space(data), batch_size)
        self._bind(data, device, backend)
        if seed is not None:
            self._seed(seed)

    def _bind(self, data: BatchBase, device: Any, backend: str | Backend | None = None) -> None:
        check_known(unweighted(data, type(self).__name__), type(self).__name__)
        _check_single_steps(data)
        _check_leaves(data.single_space)
        self._data, self._limiter = data, limiter_of(data)
        self.batch = _GoalsUnchanged(self._moved(data, device, backend), _metadata_space(data))

    @property
    def _epoch_batch(self) -> BatchBase:
        return _Relabelled(self.batch.batch, self.batch.single_metadata_space, self)

    def _draw_index(self) -> Ints:
        size = len(self._data)
        if not size:
            raise self._data._empty()
        return np.asarray(self._data._pick(self._stream, size, self.batch_size))

    def _sample_once(self, flat: bool, metadata: bool) -> Read:
        return again_and_again(self, lambda: self._draw_once(flat, metadata))

    def _draw_once(self, flat: bool, metadata: bool) -> Read:
        runs = drawn(self._data, lambda size: self._data._boundaries().runs(self._draw_index()))
        return relabelled(self, self._stream, runs, flat, metadata)

    def _configuration(self) -> dict[str, Any]:
        return {**super()._configuration(), "strategy": self.strategy, "ratio": self.ratio}


class _GoalsUnchanged(View):
    """The source as it is, with metadata that says that no goal was changed."""

    def __init__(self, batch: BatchBase, metadata_space: Any) -> None:
        super().__init__(batch, batch.single_space, metadata_space)

    def _outward(self, found: Read, keys: Keys, flat: bool) -> Read:
        return found

    def _read(self, idx: Any, keys: Keys = (), flat: bool = False, metadata: bool = False) -> Read:
        data, found = self.batch._read(idx, keys, flat, metadata)
        if not metadata:
            return data, None
        n = () if is_single(idx) else (len(positions(idx, len(self.batch))),)
        return data, {**(found or {}), **self._unchanged(n)}

    def get_located(
        self, location: Location, keys: Keys = (), flat: bool = False, metadata: bool = False
    ) -> Read | None:
        found = self.batch.get_located(location, keys, flat, metadata)
        if found is None or not metadata:
            return found
        return found[0], {**(found[1] or {}), **self._unchanged((len(location),))}

    def _unchanged(self, n: tuple[int, ...]) -> Any:
        own = np.full(n, -1, np.int64)[()]
        return as_labels(self.batch, _goal_labels(own, own, np.zeros(n, np.bool_)[()]))


class _Relabelled(_GoalsUnchanged):
    """The source with goals changed anew at each read: what an epoch reads."""

    def __init__(self, batch: BatchBase, metadata_space: Any, sampler: HindsightSampler) -> None:
        super().__init__(batch, metadata_space)
        self._sampler = sampler

    def _read(self, idx: Any, keys: Keys = (), flat: bool = False, metadata: bool = False) -> Read:
        found = self.get_located(self.batch.locate(idx), keys, flat, metadata)
        if found is None:
            raise IndexError("index: a sample is gone; count again")
        return found

    def get_located(
        self, location: Location, keys: Keys = (), flat: bool = False, metadata: bool = False
    ) -> Read | None:
        def attempt() -> Read | None:
            index = self.batch.relocate(location)
            if (index < 0).any():
                return None
            try:
                runs = self.batch._boundaries().runs(index)
            except IndexError:
                raise Lapped from None
            if not is_same(runs.place, location):
                raise Lapped
            return relabelled(self._sampler, stream, runs, flat, metadata)

        stream = self._sampler._stream
        return again_and_again(self, attempt)


def relabelled(
    sampler: HindsightSampler, stream: IndexStream, runs: Runs, flat: bool, metadata: bool
) -> Read:
    """Read the samples at the places of `runs` and change the goals of a share of them; Lapped if one is gone."""
    source, shown = (
        sampler._data,
        sampler.batch.batch,
    )  # `shown` are the same samples as the caller wants them
    changed = _share(stream, sampler.ratio, len(runs.place))
    step = runs.place.step.copy()
    step[changed] = _goal_steps(stream, sampler.strategy, runs)[changed]
    goal = _goal_places(source, runs.place.take(changed), (step - runs.place.step)[changed])
    found = source.get_located(runs.place, (), False, metadata)
    new = source.get_located(goal, ACHIEVED) if changed.any() else None
    if found is None or (changed.any() and new is None):
        raise Lapped
    data, meta = found
    if new is not None:
        data = _with_goals(sampler, data, new[0], changed)
    if flat:
        data = source._flatten(data, False)
    if shown is not source:
        data, meta = move((data, meta), shown.backend, shown.device)
    if not metadata:
        return data, None
    labels = _goal_labels(np.where(changed, runs.place.segment, -1), np.where(changed, step, -1), changed)
    return data, {**(meta or {}), **as_labels(shown, labels)}


def _share(stream: IndexStream, ratio: float, n: int) -> Bools:
    """Choose a share `ratio` of n: as near to it as whole numbers allow, and on average exactly it."""
    m = int(ratio * n + stream.uniform(1)[0])
    changed = np.zeros(n, np.bool_)
    changed[stream.permutation(n)[:m]] = True
    return changed


def _goal_steps(stream: IndexStream, strategy: str, runs: Runs) -> Ints:
    if strategy == "final":
        return runs.end - 1
    first = runs.place.step if strategy == "future" else runs.first
    ahead = (stream.uniform(len(first)) * (runs.end - first)).astype(np.int64)
    return np.asarray(np.minimum(first + ahead, runs.end - 1))  # rounding up at 2**53 steps


def _goal_places(source: BatchBase, place: Location, ahead: Ints) -> Location:
    """Locate the samples that are so many steps ahead of located ones; Lapped if any is gone.

    Never by index alone: what is found must be in the same segment, and that many steps away.
    """
    if not len(place):
        return place
    both = np.stack([np.zeros_like(ahead), ahead], axis=1)
    frames = source._boundaries().frames_round(place, both, 0)
    if frames is None or not frames.valid(0).all():
        raise Lapped
    goal = frames.column(1)
    if not np.array_equal(goal.step - place.step, ahead):
        raise Lapped
    return goal


def _with_goals(sampler: HindsightSampler, data: Any, new: Any, changed: Bools) -> Any:
    """Return the batch with new goals where `changed`, and the reward of these."""
    source = sampler._data
    desired = np.array(as_numpy(pick(data, DESIRED[1])))
    desired[changed] = as_numpy(new)
    own = np.array(as_numpy(pick(data, DESIRED[0])))
    own[changed] = as_numpy(new)

    def out(x: Any) -> Any:
        return move(x, source.backend, source.device)

    goals = out(desired)
    data = {
        **data,
        "obs": {**data["obs"], "desired_goal": out(own)},
        "next_obs": {**data["next_obs"], "desired_goal": goals},
    }
    reward = np.array(as_numpy(data["reward"]))
    said = _checked_reward(sampler.compute_reward(pick(data, ACHIEVED), goals, data), reward)
    reward[changed] = said[changed]
    return {**data, "reward": out(reward)}


def _checked_reward(said: Any, reward: Any) -> Any:
    found = np.asarray(as_numpy(said))
    if found.shape != reward.shape:
        raise SchemaError(
            f"compute_reward: must return shape {reward.shape}, one reward per sample, got {found.shape}; "
            "compute it for whole batches"
        )
    if not np.can_cast(found.dtype, reward.dtype, "same_kind"):
        raise DtypeError(
            f"compute_reward: must return {reward.dtype}, got {found.dtype}; convert what it returns"
        )
    return found


def _goal_labels(segment: Any, step: Any, changed: Any) -> dict[str, Any]:
    return {"goal_segment": segment, "goal_step": step, "relabelled": changed}


def _metadata_space(data: BatchBase) -> spaces.Dict:
    source = data.single_metadata_space
    parts = {} if source is None else dict(source.spaces)
    return make_dict([*parts.items(), *((name, as_space(spec)) for name, spec in GOAL_SPACES.items())])


def _check_single_steps(batch: BatchBase) -> None:
    """Raise ValueError if a sample is several steps: a sum of rewards, or frames with a goal each."""
    if isinstance(batch, NStepBatch | SliceStackedBatch):
        raise ValueError(
            f"data: must hold single steps to change their goals, got {type(batch).__name__}, whose samples have "
            "the rewards or goals of several; draw from the batch it views"
        )
    for source in batch._sources():
        _check_single_steps(source)


def _check_leaves(space: Space[Any]) -> None:
    """Raise ValueError unless samples have goals and a reward."""
    for keys in (ACHIEVED, *DESIRED, REWARD):
        try:
            space_at(space, keys)
        except (KeyError, TypeError):
            raise ValueError(
                f"{path_name(keys)}: must be in the samples to relabel them, got {space}; record goals"
            ) from None
    for keys in DESIRED:
        differs = first_difference(space_at(space, ACHIEVED), space_at(space, keys))
        if differs is not None:
            raise ValueError(
                f"{path_name(keys)}: must be like {path_name(ACHIEVED)}, got {differs}; record both alike"
            )
