"""What stacks, sequences, n-step returns and relabelled goals are, as loops over a list of samples.

The list is that of `tests.replay.model.Model` in index order: rings of segments, each sample with its lane, its
segment and its step. Nothing here knows of rows, cursors or tags.
"""

from __future__ import annotations

from dataclasses import dataclass

from tests.replay.model import Model


@dataclass(frozen=True)
class Step:
    """One sample as the reference sees it."""

    value: int
    lane: int
    segment: int
    step: int
    terminated: bool


def steps_of(model: Model, terminated: set[int]) -> list[Step]:
    lanes = enumerate(model.lanes)
    return [Step(s.value, k, s.segment, s.step, s.value in terminated) for k, lane in lanes for s in lane]


def in_run(steps: list[Step], i: int, j: int) -> bool:
    """Are samples i and j in one run: is everything from one to the other there, in one lane and one segment?"""
    if not 0 <= j < len(steps):
        return False
    return all(
        (s.lane, s.segment) == (steps[i].lane, steps[i].segment) for s in steps[min(i, j) : max(i, j) + 1]
    )


def mask(steps: list[Step], i: int, offsets: list[int]) -> list[bool]:
    return [in_run(steps, i, i + d) for d in offsets]


def stack(steps: list[Step], i: int, offsets: list[int]) -> list[int]:
    """An invalid frame shows the nearest valid one on the anchor's side."""
    valid = [d for d in offsets if in_run(steps, i, i + d)]
    return [steps[i + min(max(d, valid[0]), valid[-1])].value for d in offsets]


def starts(steps: list[Step], length: int, pad: bool) -> list[int]:
    whole = [i for i in range(len(steps)) if in_run(steps, i, i + length - 1)]
    first = [i for i in range(len(steps)) if not in_run(steps, i, i - 1)]
    return sorted({*whole, *(first if pad else ())})


def window(steps: list[Step], i: int, length: int, burn_in: int) -> list[int]:
    offsets = list(range(-burn_in, length))
    return [steps[i + d].value if ok else 0 for d, ok in zip(offsets, mask(steps, i, offsets))]


def n_step(steps: list[Step], i: int, n: int, gamma: float) -> tuple[float, int, bool, float]:
    """Return, value of the last step, its flag, and the discount; the reward of a step is its value."""
    total, k = 0.0, 0
    while k < n and in_run(steps, i, i + k):
        total += gamma**k * steps[i + k].value
        k += 1
        if steps[i + k - 1].terminated:
            break
    last = steps[i + k - 1]
    return total, last.value, last.terminated, gamma**k * (not last.terminated)


def goals(steps: list[Step], i: int, strategy: str) -> list[int]:
    """The samples whose achieved goal sample i may take."""
    run = [j for j in range(len(steps)) if in_run(steps, i, j)]
    return {"future": [j for j in run if j >= i], "final": run[-1:], "episode": run}[strategy]
