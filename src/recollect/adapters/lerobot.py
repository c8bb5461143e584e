"""LeRobotDataset: a LeRobot data set for a training loop that was written for LeRobot's class of that name.

Numbers and texts are held in memory and read by the batch; pictures and videos stay in their files. torch is needed,
the package `lerobot` is not.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from recollect.batch import BatchBase, SliceStackedBatch
from recollect.datasets.hub import hub_dataset
from recollect.datasets.lerobot.dataset import LeRobotBatch, from_lerobot
from recollect.datasets.lerobot.meta import INFO, OWN, read_json
from recollect.datasets.torch import Collated
from recollect.indexing import normalize
from recollect.replay import ReplayBuffer


class LeRobotDataset(torch.utils.data.Dataset):
    """The data set at `root`, or where LeRobot keeps `repo_id`, item for item as LeRobot's own class gives it.

    `delta_timestamps`, in seconds, are offsets per key with a mask `*_is_pad` each; `episodes` and `episode_filter`
    choose some; `task` is the task in words. `features`, which LeRobot has not, chooses some beside those that it
    fills in: pictures that are not among them are never decoded. A DataLoader reads each batch at once; `batches` does
    without a loader. `meta` has what a training loop asks for: stats, features, fps, tasks by index, episodes,
    camera_keys. What is not on this machine is downloaded if `huggingface_hub` is installed. `revision`,
    `video_backend` and `depth_output_unit` are taken from calls that name them, and mean nothing here. Features that
    cannot be shown (depth videos, language events) are in `left_out`, with the reason.

    Ownership: holds numbers and texts of the chosen episodes in memory, and some decoded frames; `close()` frees these.
    Concurrency: any thread; workers of a DataLoader get it by fork, or open it again.

    Example:
        >>> import numpy as np, recollect as rc, torch
        >>> from recollect.adapters.lerobot import LeRobotDataset
        >>> buf = rc.ReplayBuffer.create(
        ...     "memory", {"action": ((2,), "float32")}, capacity=9, maintain_segment_metadata=True)
        >>> buf.extend({"action": np.ones((9, 2), "float32")}, ends=np.isin(np.arange(9), [3, 8]))
        >>> rc.datasets.to_lerobot(buf, "cubes", fps=10, tasks="pick the cube")
        >>> data = LeRobotDataset("me/cubes", "cubes", delta_timestamps={"action": [0.0, 0.1, 0.2]})
        >>> data[3]["action"].shape, data[3]["action_is_pad"].tolist(), data[3]["task"]
        (torch.Size([3, 2]), [False, True, True], 'pick the cube')
        >>> next(iter(torch.utils.data.DataLoader(data, batch_size=4)))["action"].shape
        torch.Size([4, 3, 2])
    """

    def __init__(
        self,
        repo_id: str,
        root: str | os.PathLike[str] | None = None,
        episodes: Sequence[int] | None = None,
        episode_filter: Callable[[dict[str, Any]], bool] | None = None,
        image_transforms: Callable[[Any], Any] | None = None,
        delta_timestamps: dict[str, list[float]] | None = None,
        tolerance_s: float = 1e-4,
        *,
        return_uint8: bool = False,
        features: Sequence[str] | None = None,
        revision: str | None = None,
        video_backend: str | None = None,
        depth_output_unit: str = "mm",
    ) -> None:
        """Open a data set; the arguments are those of LeRobot's class, and `features`."""
        self.repo_id, self.root, self.tolerance_s = repo_id, _find(repo_id, root), tolerance_s
        self.image_transforms, self.return_uint8 = image_transforms, return_uint8
        self.delta_timestamps = delta_timestamps
        self._chosen = None if features is None else list(features)
        with from_lerobot(self.root, features=_with_own(self.root, features)) as every:
            self.left_out, self.meta = every.left_out, _metadata(every)
        self.fps, self.features = self.meta.fps, self.meta.features
        self.episodes, self._rows = _choose(self.meta.episodes, episodes, episode_filter)
        cameras = self.meta.camera_keys
        names = [[key for key in self.features if key not in cameras], cameras]
        self._files = [from_lerobot(self.root, features=some) for some in names if some]
        numbers, *pictures = [file.get_slice(self._rows) for file in self._files]
        held = ReplayBuffer.create(
            "memory", numbers.single_space, capacity=len(numbers), maintain_segment_metadata=True
        )
        held.extend_from(numbers, chunk_size=4096)
        offsets = _offsets(delta_timestamps or {}, self.features, self.fps, tolerance_s)
        _check_reach(offsets, max(self.meta.episodes["length"]), self.fps)
        parts: list[BatchBase] = [held, *pictures]
        self._stacks = [
            SliceStackedBatch(part, {key: offsets[key] for key in some if key in offsets})
            for part, some in zip(parts, names)
        ]

    @property
    def num_frames(self) -> int:
        """How many frames the chosen episodes have."""
        return len(self._rows)

    @property
    def num_episodes(self) -> int:
        """How many episodes were chosen."""
        return len(self.meta.episodes["length"] if self.episodes is None else self.episodes)

    @property
    def absolute_to_relative_idx(self) -> dict[int, int] | None:
        """The place here of each chosen frame of the data set; None if all episodes were chosen."""
        return None if self.episodes is None else {row: i for i, row in enumerate(self._rows.tolist())}

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(len(self))[index]]
        at = normalize(index, len(self))
        if not isinstance(at, int):
            raise TypeError(f"index: must be an int or a slice, got {index!r}; __getitems__ takes several")
        return {key: value[0] for key, value in self._read([at]).items()}

    def __getitems__(self, indices: Sequence[int]) -> Collated:
        return Collated(self._read(indices))

    def batches(
        self, batch_size: int, *, shuffle: bool = True, seed: int | None = None, drop_last: bool = False
    ) -> Iterator[dict[str, Any]]:
        """Yield every frame once, in batches as a DataLoader makes them, each of one read."""
        n = len(self)
        order = np.random.default_rng(seed).permutation(n) if shuffle else np.arange(n)
        for first in range(0, n - n % batch_size if drop_last else n, batch_size):
            yield self._read(order[first : first + batch_size])

    def _read(self, index: Any) -> dict[str, Any]:
        index = np.asarray(index, np.int64)
        data = {key: value for stack in self._stacks for key, value in stack.get_at(index).items()}
        item = {key: self._show(key, data[key]) for key in self.features}
        for key in self.delta_timestamps or ():
            item[f"{key}_is_pad"] = torch.from_numpy(~data[f"{key}_valid_mask"])
        return item | {"task": [self.meta.tasks[i] for i in data["task_index"].tolist()]}

    def _show(self, key: str, value: Any) -> Any:
        """What LeRobot makes of a column: float32 or int64, a single number without its axis, pictures (C, H, W)."""
        if isinstance(value, tuple):
            return list(value)
        found, is_video = torch.from_numpy(value), key in self.meta.video_keys
        if key in self.meta.camera_keys:
            found = found.movedim(-1, -3)
            if is_video and found.ndim == 5 and found.shape[1] == 1:  # the only frame of a video
                found = found.squeeze(1)
            found = found.contiguous() if is_video and self.return_uint8 else found.float() / 255
            transform = self.image_transforms
            return found if transform is None else torch.stack([transform(one) for one in found])
        if found.dtype != torch.bool:
            found = found.float() if found.is_floating_point() else found.long()
        return found.squeeze(-1) if self.features[key]["shape"] == (1,) and key not in OWN else found

    @classmethod
    def create(cls, *args: Any, **options: Any) -> Any:
        """Raise AttributeError: this class only reads."""
        raise AttributeError(
            "LeRobotDataset.create: this class only reads; record into a ReplayBuffer and write that by "
            "recollect.datasets.to_lerobot(buffer, path, fps=..., tasks=...)"
        )

    def close(self) -> None:
        """Free the decoded frames; may be called twice."""
        for file in self._files:
            file.close()

    def __reduce__(self) -> Any:
        given = (self.repo_id, self.root, self.episodes, None, None, self.delta_timestamps, self.tolerance_s)
        return (
            partial(type(self), features=self._chosen),
            given,
            {k: getattr(self, k) for k in ("image_transforms", "return_uint8")},
        )


def _find(repo_id: str, root: Any) -> Path:
    path = (hub_dataset(repo_id) if root is None else Path(root)).absolute()
    if not (path / INFO).exists():
        raise FileNotFoundError(
            f"LeRobotDataset: {path} must hold a data set, got no {INFO}; run "
            f"hf download {repo_id} --repo-type dataset --local-dir {path}"
        )
    return path


def _with_own(root: Path, features: Sequence[str] | None) -> list[str] | None:
    """The chosen features and those that LeRobot fills in, in the order of the set; None for all."""
    if features is None:
        return None
    known = [str(key) for key in read_json(root / INFO).get("features") or ()]
    unknown = [key for key in features if key not in known]  # which the set refuses
    return [key for key in known if key in OWN or key in features] + unknown


def _metadata(data: LeRobotBatch) -> SimpleNamespace:
    meta, ends = data.meta, np.cumsum([episode.length for episode in data.meta.episodes]).tolist()
    shown = {key: about for key, about in meta.features.items() if key in data.single_space.spaces}  # type: ignore[attr-defined]
    kinds = {key: about["dtype"] for key, about in shown.items() if about["dtype"] in ("image", "video")}
    stats = meta.path / "meta" / "stats.json"
    return SimpleNamespace(
        fps=int(meta.fps) if meta.fps.is_integer() else meta.fps,
        features={key: {**about, "shape": tuple(about["shape"])} for key, about in shown.items()},
        stats=_arrays(read_json(stats)) if stats.exists() else None,
        tasks=meta.tasks,
        episodes={
            "episode_index": [episode.number for episode in meta.episodes],
            "tasks": [list(episode.tasks) for episode in meta.episodes],
            "length": [episode.length for episode in meta.episodes],
            "dataset_from_index": [0, *ends[:-1]],
            "dataset_to_index": ends,
        },
        total_episodes=len(ends), total_frames=len(data), robot_type=meta.robot_type, root=meta.path,
        camera_keys=list(kinds), image_keys=[k for k in kinds if kinds[k] == "image"], depth_keys=[],
        video_keys=[k for k in kinds if kinds[k] == "video"], has_language_columns=False,
    )  # fmt: skip


def _arrays(stats: Any) -> Any:
    return {k: _arrays(v) for k, v in stats.items()} if isinstance(stats, dict) else np.array(stats)


def _choose(about: dict[str, list[Any]], episodes: Any, keep: Any) -> tuple[list[int] | None, Any]:
    """The numbers of the chosen episodes, None for all, and their rows."""
    every = {row[0]: dict(zip(about, row)) for row in zip(*about.values())}
    chosen = every if episodes is None else {int(i) for i in episodes}
    rows = [row for i, row in every.items() if i in chosen and (keep is None or keep(row))]
    if not rows or not set(chosen) <= set(every):
        raise ValueError(f"episodes: must be some of the {len(every)} that there are, got {episodes}")
    index = np.concatenate([np.arange(row["dataset_from_index"], row["dataset_to_index"]) for row in rows])
    if keep is not None:
        episodes = [row["episode_index"] for row in rows]
    return None if episodes is None else list(episodes), index


def _offsets(deltas: dict[str, list[float]], features: Any, fps: float, tolerance_s: float) -> dict[str, Any]:
    """The steps that are meant by seconds."""
    for key, seconds in deltas.items():
        if key not in features:
            raise KeyError(f"delta_timestamps: must be of {sorted(features)}, got {key!r}")
        off = [s for s in seconds if abs(s * fps - round(s * fps)) / fps > tolerance_s]
        if off:
            raise ValueError(
                f"delta_timestamps {key!r}: must be multiples of 1/{fps} s, got {off}; round them"
            )
    return {key: [round(s * fps) for s in seconds] for key, seconds in deltas.items()}


def _check_reach(offsets: dict[str, list[int]], longest: int, fps: float) -> None:
    """Warn of offsets that no episode reaches: steps given for seconds have them."""
    for key, steps in offsets.items():
        far = max(map(abs, steps), default=0)
        if far >= longest:
            warnings.warn(
                f"delta_timestamps {key!r}: {far / fps:g} s is further than the longest episode, {longest / fps:g} s: "
                f"padding in every item; offsets are seconds, as [i / {fps:g} for i in range(n)]",
                UserWarning,
                stacklevel=3,
            )
