"""Any run of steps, resets and masked resets in any mode and layout, against a list of episodes per slot."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium.vector import SyncVectorEnv
from hypothesis import given
from hypothesis import strategies as st
from tests.collect.worlds import DISABLED, MODES, NEXT_STEP, Counting, lanes_for, tracked_for

import recollect as rc

Episode = list[tuple[int, int]]  # (episode, step) that each transition starts from


class Slot:
    """The list model of one slot: it knows its environment's script and what a loop by hand would see."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths, self.episode, self.step = lengths, 0, 0
        self.over = False
        self.rows: list[tuple[int, int, int, int, bool]] = []  # episode, step, next episode, next step, done
        self.cuts: list[int] = []

    def length(self) -> int:
        return self.lengths[self.episode % len(self.lengths)]

    def cut(self) -> None:
        if self.rows and (not self.cuts or self.cuts[-1] != len(self.rows)):
            self.cuts.append(len(self.rows))

    def reset(self) -> None:
        self.cut()
        self.episode, self.step, self.over = self.episode + 1, 0, False

    def advance(self, mode: Any) -> bool:
        if self.over and mode is NEXT_STEP:
            self.reset()
            return False
        self.step += 1
        done = self.step >= self.length()
        self.rows.append((self.episode, self.step - 1, self.episode, self.step, done))
        if done:
            self.cut()
            if mode.name == "SAME_STEP":
                self.reset()
                return True
        self.over = done
        return done


class Scripted(Counting):
    def __init__(self, lengths: list[int]) -> None:
        super().__init__(reuses=False)
        self.lengths = lengths

    def reset(self, **kwargs: Any) -> Any:
        obs, info = super().reset(**kwargs)
        self.length = self.lengths[self.episode % len(self.lengths)]
        return obs, info


@given(
    scripts=st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=3), min_size=2, max_size=4),
    mode=st.sampled_from(MODES),
    layout=st.sampled_from(["lanes", "per_env"]),
    data=st.data(),
)
def test_rows_and_segments(scripts: list[list[int]], mode: Any, layout: str, data: Any) -> None:
    n = len(scripts)
    envs = SyncVectorEnv([lambda s=s: Scripted(s) for s in scripts], autoreset_mode=mode)
    buffers = [lanes_for(envs, n)] if layout == "lanes" else [tracked_for(envs) for _ in range(n)]
    wrapped = rc.ReplayBufferCollectionWrapper(envs, buffers)
    model = [Slot(script) for script in scripts]
    wrapped.reset()
    for slot in model:
        slot.reset()
    for what in data.draw(st.lists(st.sampled_from(["step", "step", "step", "mask", "reset"]), max_size=25)):
        over = np.array([slot.over for slot in model])
        if what == "step" and not (mode is DISABLED and over.any()):
            wrapped.step(np.zeros(n, np.int64))
            for slot in model:
                slot.advance(mode)
        elif what == "reset":
            wrapped.reset()
            for slot in model:
                slot.reset()
        else:
            mask = np.array(data.draw(st.lists(st.booleans(), min_size=n, max_size=n))) | over
            if mask.any():
                wrapped.reset(mask=mask)
                for slot, chosen in zip(model, mask):
                    if chosen:
                        slot.reset()
    wrapped.close()
    for slot in model:
        slot.cut()
    found = [found_in(buffers[0], slots=model, i=i) if layout == "lanes" else (b[:], b.get_segments())
             for i, b in enumerate(buffers * n if layout == "lanes" else buffers)]  # fmt: skip
    for slot, (rows, segments) in zip(model, found):
        truth = np.array(slot.rows, float).reshape(-1, 5)
        assert np.array_equal(rows["obs"][:, 1:3], truth[:, 0:2])
        assert np.array_equal(rows["next_obs"][:, 1:3], truth[:, 2:4])
        assert np.array_equal(rows["terminated"] | rows["truncated"], truth[:, 4] == 1)
        assert segments == list(zip([0, *slot.cuts], slot.cuts))


def found_in(buf: rc.ReplayBuffer, slots: list[Slot], i: int) -> tuple[Any, Any]:
    start = sum(len(slot.rows) for slot in slots[:i])
    end = start + len(slots[i].rows)
    return buf[start:end], [(a - start, b - start) for a, b in buf.get_segments() or () if start <= a < end]
