"""What a ReplayBuffer promises, as lists: one per lane, of samples that know their segment and step."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(eq=False)
class Sample:
    """One sample; `place` is the (row, generation) at which the buffer last had it."""

    value: int
    segment: int = -1
    step: int = -1
    place: tuple[int, int] | None = None


@dataclass
class Model:
    """Lanes, each oldest first; `run` is the capacity of one (None: unbounded)."""

    run: int | None
    tracked: bool
    n_lanes: int = 1
    lanes: list[list[Sample]] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)  # the row of each lane's oldest sample
    open: list[int | None] = field(default_factory=list)
    next_segment: int = 0
    offered: int = 0
    evicted: int = 0
    removed: int = 0
    rejected: int = 0

    def __post_init__(self) -> None:
        self.lanes = [[] for _ in range(self.n_lanes)]
        self.starts, self.open = [0] * self.n_lanes, [None] * self.n_lanes

    def all(self) -> list[Sample]:
        return [s for lane in self.lanes for s in lane]

    def add(self, k: int, value: int, ends: bool) -> None:
        lane, new, self.offered = self.lanes[k], Sample(value), self.offered + 1
        if self.tracked:
            going_on = self.open[k] is not None
            self.open[k] = self.open[k] if going_on else self.new_segment()
            new.segment, new.step = self.open[k], lane[-1].step + 1 if going_on else 0
            self.open[k] = None if ends else self.open[k]
        lane.append(new)
        if self.run is not None and len(lane) > self.run:
            del lane[0]
            self.evicted += 1
            self.starts[k] = (self.starts[k] + 1) % self.run

    def extend(self, k: int, values: list[int], ends: list[bool] | None = None) -> None:
        """Without `ends` a whole segment; with them the block goes on with the open one and may leave one open."""
        for i, value in enumerate(values):
            self.add(k, value, i == len(values) - 1 if ends is None else ends[i])
        if self.run is not None and len(values) >= self.run:
            self.starts[k] = 0

    def new_segment(self) -> int:
        self.next_segment += 1
        return self.next_segment

    def remove(self, gone: set[int]) -> None:
        at, self.removed = 0, self.removed + len(gone)
        for k, lane in enumerate(self.lanes):
            kept: list[Sample] = []
            renamed: dict[int, int] = {}
            last, hole = None, False
            for s in lane:
                at += 1
                if at - 1 in gone:
                    hole = True
                    continue
                original = s.segment
                if hole and self.tracked and last == original:
                    renamed[original] = self.new_segment()
                s.segment = renamed.get(original, original)
                last, hole = original, False
                kept.append(s)
            self.lanes[k] = kept

    def clear(self) -> None:
        self.removed += len(self.all())
        self.__post_init__()

    def segments(self) -> list[tuple[int, int]]:
        """Closed ones, as index pairs."""
        found: dict[int, list[int]] = {}
        for i, s in enumerate(self.all()):
            if s.segment not in self.open:
                found.setdefault(s.segment, []).append(i)
        return [(at[0], at[-1] + 1) for at in found.values()]

    def open_segment(self, k: int) -> tuple[int, int] | None:
        at = [i for i, s in enumerate(self.all()) if self.open[k] is not None and s.segment == self.open[k]]
        return (at[0], at[-1] + 1) if at else None

    def row(self, k: int, i: int) -> int:
        """The row of sample i of lane k."""
        return self.starts[k] + i if self.run is None else k * self.run + (self.starts[k] + i) % self.run
