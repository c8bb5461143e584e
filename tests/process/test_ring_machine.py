"""Ring against a small model: any order of claims, commits, takes, releases, deaths and restarts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.process.actor import Actor

import recollect as rc
from recollect.memory.ring import Ring

pytestmark = pytest.mark.process

LANES, SLOTS, WORDS = 2, 3, 16
Value = tuple[int, int, int]  # ticket, lane, number


@dataclass
class Model:
    """Lists for slots."""

    policy: str
    ready: list[Value] = field(default_factory=list)
    writing: dict[int, bool] = field(default_factory=dict)  # lane: a slot is claimed (by a dead writer too)
    reading: Value | None = None
    written: int = 0
    dropped: int = 0
    delivered: int = 0

    def free(self, lane: int) -> int:
        held = [v for v in (*self.ready, *([self.reading] if self.reading else [])) if v[1] == lane]
        return SLOTS - len(held) - self.writing.get(lane, False)

    def claim(self, lane: int) -> bool:
        if not self.writing.get(lane) and self.free(lane) == 0:
            if self.policy != "drop_oldest":
                return False
            self.ready.remove(min(v for v in self.ready if v[1] == lane))
            self.dropped += 1
        self.writing[lane] = True
        return True

    def commit(self, lane: int, number: int) -> bool:
        self.written += 1
        if self.policy == "drop_newest" and self.free(lane) == 0:
            self.dropped += 1
            return False
        self.ready.append((self.written, lane, number))
        self.writing[lane] = False
        return True

    def take(self) -> Value | None:
        if self.reading is None and self.ready:
            self.reading = min(self.ready)
            self.ready.remove(self.reading)
        return self.reading


def outcome(actor: Actor, name: str, *args: Any) -> Any:
    try:
        return actor.do(name, *args)
    except rc.RecollectError as error:
        return type(error).__name__


class RingMachine(RuleBasedStateMachine):
    """Writers and reader are processes of their own, which may be killed between any two calls."""

    @initialize(policy=st.sampled_from(["block", "drop_oldest", "drop_newest"]))
    def start(self, policy: str) -> None:
        self.ring = Ring.create({"words": ((WORDS,), "int64")}, SLOTS, LANES, policy=policy)
        self.model = Model(policy)
        self.number = 0
        self.abandoned = 0
        self.writers: dict[int, Actor | None] = {}
        self.dead: set[str] = set()  # roles whose holder died and has no successor yet: "0", "1", "reader"
        self.roles: set[str] = set()  # roles that somebody ever took
        self.reader: Actor | None = None
        for lane in range(LANES):
            self.start_writer(lane)
        self.start_reader()

    def start_writer(self, lane: int) -> None:
        mine = self.ring.on_lane(lane)

        def claim(number: int) -> int:
            mine.claim(0.0)["words"][:] = number
            return 1

        self.writers[lane] = Actor(claim=claim, commit=lambda number: mine.commit(number, -number))
        mine.close()  # in the parent; the child has its own copy

    def start_reader(self) -> None:
        ring = self.ring

        def take() -> Any:
            taken = ring.take(0.0)
            words = set(taken.values["words"].tolist())
            assert len(words) == 1, f"torn: {words}"
            number = words.pop()
            assert taken.info[:2] == (number, -number)
            return taken.lane, number

        self.reader = Actor(take=take, release=ring.release, skip=ring.skip)

    @rule(lane=st.integers(0, LANES - 1))
    def claim(self, lane: int) -> None:
        writer, name = self.writers[lane], str(lane)
        if writer is None:
            return
        if name in self.dead and self.model.writing.get(lane):
            self.model.writing[lane] = False
            self.abandoned += 1
        self.dead.discard(name)
        self.roles.add(name)
        fits = self.model.claim(lane)
        if fits:
            self.number += 1
            assert outcome(writer, "claim", self.number) == 1
            self.claimed = {**getattr(self, "claimed", {}), lane: self.number}
        else:
            wanted = "PeerDiedError" if "reader" in self.dead else "DeadlineError"
            assert outcome(writer, "claim", 0) == wanted

    @rule(lane=st.integers(0, LANES - 1))
    def commit(self, lane: int) -> None:
        writer = self.writers[lane]
        if writer is None:
            return
        if not self.model.writing.get(lane) or str(lane) in self.dead:
            assert outcome(writer, "commit", 0) == "EmptyError"
            return
        number = self.claimed[lane]
        assert outcome(writer, "commit", number) == self.model.commit(lane, number)

    def expect_reader(self) -> None:
        if "reader" in self.dead and self.model.reading is not None:  # delivered again
            self.model.ready.append(self.model.reading)
            self.model.reading = None
        self.dead.discard("reader")
        self.roles.add("reader")

    @precondition(lambda self: self.reader is not None)
    @rule()
    def take(self) -> None:
        self.expect_reader()
        found = self.model.take()
        if found is None:
            held = self.roles & {"0", "1"}
            wanted = "PeerDiedError" if held and held <= self.dead else "DeadlineError"
            assert outcome(self.reader, "take") == wanted  # type: ignore[arg-type]
        else:
            assert outcome(self.reader, "take") == found[1:]  # type: ignore[arg-type]

    @precondition(lambda self: self.reader is not None)
    @rule()
    def release(self) -> None:
        if "reader" in self.dead or self.model.reading is None:
            assert outcome(self.reader, "release") == "EmptyError"  # type: ignore[arg-type]
            return
        assert outcome(self.reader, "release") is None  # type: ignore[arg-type]
        self.model.delivered += 1
        self.model.reading = None

    @rule(role=st.sampled_from(["0", "1", "reader"]), now=st.booleans())
    def kill_or_restart(self, role: str, now: bool) -> None:
        actor = self.reader if role == "reader" else self.writers[int(role)]
        if actor is not None and now:
            actor.kill()
            if role in self.roles:
                self.dead.add(role)
            if role == "reader":
                self.reader = None
            else:
                self.writers[int(role)] = None
        elif actor is None:
            self.start_reader() if role == "reader" else self.start_writer(int(role))

    @invariant()
    def counts_add_up(self) -> None:
        if not hasattr(self, "ring"):
            return
        found = self.ring.stats()
        assert found.written == found.delivered + found.dropped + found.skipped + found.available
        assert (found.written, found.delivered, found.dropped, found.abandoned) == (
            self.model.written,
            self.model.delivered,
            self.model.dropped,
            self.abandoned,
        )
        assert self.ring.available() == len(self.model.ready) + (self.model.reading is not None)

    def teardown(self) -> None:
        for actor in (*getattr(self, "writers", {}).values(), getattr(self, "reader", None)):
            if actor is not None:
                actor.kill()
        if hasattr(self, "ring"):
            self.ring.cleanup()


TestRing = RingMachine.TestCase
TestRing.settings = settings(
    max_examples=25, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)


def test_tickets_rise_within_a_lane() -> None:
    """A commit during the reader's look may not let a younger value overtake an older one."""
    ring = Ring.create(((), "int64"), 4)

    def write() -> None:
        with ring.on_lane(0) as mine:
            for number in range(20_000):
                mine.claim()["value"][...] = number
                mine.commit()

    writer = Actor(write=write)
    writer.tell("write")
    last = (0, -1)
    for _ in range(20_000):
        taken = ring.take()
        now = (taken.sequence, int(np.asarray(taken.values["value"])))
        assert now[0] > last[0] and now[1] == last[1] + 1
        last = now
        ring.release()
    writer.answer()
    writer.kill()
    ring.cleanup()
