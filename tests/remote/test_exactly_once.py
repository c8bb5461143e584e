"""Exactly once, in order, over a network that drops, repeats, delays and reorders, and over restarts of all.

The protocols of clients and of a manager are joined by a list of frames in flight; hypothesis decides what happens.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import warnings
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule
from tests.remote.make import PLAIN, assert_doors, manager_protocol, samples

from recollect.remote import Checkpoint
from recollect.remote.client.protocol import ClientProtocol
from recollect.remote.frame import decode, joined
from recollect.remote.items.space import item_space
from recollect.remote.manager.protocol import ManagerProtocol

N_CLIENTS = 2
IN_MEMORY = "/dev/shm" if os.path.isdir("/dev/shm") else None
MANAGER = N_CLIENTS
BASE = 1_000_000  # the ids of life i are i * BASE, i * BASE + 1, …


@dataclass
class Life:
    """A worker's process, from its start to its end: its session, and what it added, in order."""

    session: ClientProtocol
    added: list[int] = field(default_factory=list)
    is_over: bool = False


class Network(RuleBasedStateMachine):
    """Frames in flight as (source, dest, bytes); the model is what each life of a worker added, in order."""

    frames = Bundle("frames")
    with_checkpoint = True

    @initialize()
    def begin(self) -> None:
        self.path = tempfile.mkdtemp(dir=IN_MEMORY)  # as SIGKILL does, nothing here loses what was written
        self.manager = self._made(resume=False)
        self.flight: list[tuple[int, int, bytes]] = []
        self.lives: list[Life] = []
        self.clients: list[Life] = [self._born(rank) for rank in range(N_CLIENTS)]

    def _made(self, resume: bool) -> ManagerProtocol:
        save = Checkpoint(self.path, resume=resume) if self.with_checkpoint else None
        return manager_protocol(PLAIN, MANAGER, capacity=400, checkpoint=save)

    def _born(self, rank: int) -> Life:
        life = Life(ClientProtocol(item_space(PLAIN), rank))
        self.lives.append(life)
        self._say(rank, [life.session.greet()])
        return life

    def _say(self, rank: int, frames: list[Any]) -> None:
        self.flight += [(rank, MANAGER, joined(parts)) for parts in frames]

    def _deliver(self, frame: tuple[int, int, bytes]) -> None:
        source, dest, data = frame
        message, _, body = decode(data)
        if dest == MANAGER:
            replies = self.manager.handle(source, message, body, memoryview(data))
            self.flight += [(MANAGER, reply.dest, joined(reply.parts)) for reply in replies]
        else:
            self._say(dest, self.clients[dest].session.receive(message, body))

    @rule(client=st.integers(0, N_CLIENTS - 1), n=st.integers(1, 3))
    def add(self, client: int, n: int) -> None:
        life = self.clients[client]
        session = life.session
        if session.is_ready and session.n_unanswered < 6:
            first = self.lives.index(life) * BASE + len(life.added)
            ids = list(range(first, first + n))
            life.added += ids
            session.doors.offered += n
            packed = item_space(PLAIN).encode(samples(ids))
            self._say(client, [session.put(packed).parts])

    @rule(at=st.integers(0, 1 << 16))
    def deliver(self, at: int) -> None:
        if self.flight:
            self._deliver(self.flight.pop(at % len(self.flight)))

    @rule()
    def deliver_first(self) -> None:
        if self.flight:
            self._deliver(self.flight.pop(0))

    @rule(at=st.integers(0, 1 << 16))
    def drop(self, at: int) -> None:
        if self.flight:
            self.flight.pop(at % len(self.flight))

    @rule()
    def deliver_all(self) -> None:
        """A quiet moment; without it most runs would never get past Hello."""
        for _ in range(100):
            if self.flight:
                self._deliver(self.flight.pop(0))

    @rule()
    def lose_all_answers(self) -> None:
        """The manager hears everything, its clients nothing."""
        for frame in [f for f in self.flight if f[1] == MANAGER]:
            self._deliver(frame)
        self.flight = []

    @rule(at=st.integers(0, 1 << 16))
    def repeat(self, at: int) -> None:
        if self.flight:
            self.flight.append(self.flight[at % len(self.flight)])

    @rule(client=st.integers(0, N_CLIENTS - 1))
    def retry(self, client: int) -> None:
        session = self.clients[client].session
        self._say(client, session.unanswered() if session.is_ready else [session.greet()])

    @rule()
    def kill_and_restart_the_manager(self) -> None:
        """As SIGKILL does: nothing is closed in order; frames in flight survive or not, as they please."""
        self.manager.close()  # without a dump; the kernel would take its log and its lock
        self.manager = self._made(resume=True)

    @rule(client=st.integers(0, N_CLIENTS - 1))
    def kill_and_restart_a_worker(self, client: int) -> None:
        """What it had sent may still arrive, behind what its successor sends."""
        self.clients[client].is_over = True
        self.clients[client] = self._born(client)

    @rule()
    def dump(self) -> None:
        self.manager.checkpoint.dump()

    def _stored(self) -> list[list[int]]:
        ids = self.manager.state.buffer[:]["id"].tolist()
        return [[i for i in ids if i // BASE == life] for life in range(len(self.lives))]

    @invariant()
    def what_is_stored_is_what_was_added_once_and_in_order(self) -> None:
        if not hasattr(self, "manager"):
            return
        for life, stored in zip(self.lives, self._stored()):
            assert stored == life.added[: len(stored)]
            session = life.session
            assert len(stored) >= session.doors.kept  # what was acknowledged is there
            assert session.doors.offered == len(life.added) == session.doors.kept + session.n_pending
        stats = self.manager.stats(pending_sends=0, unsent=0)
        assert stats.offered == len(self.manager.state.buffer)
        assert_doors(stats)

    def teardown(self) -> None:
        if not hasattr(self, "manager"):
            return
        for _ in range(10):  # now the network is sound: everything arrives
            for rank, life in enumerate(self.clients):
                session = life.session
                self._say(rank, session.unanswered() if session.is_ready else [session.greet()])
            while self.flight:
                self._deliver(self.flight.pop(0))
        self.what_is_stored_is_what_was_added_once_and_in_order()
        for life, stored in zip(self.lives, self._stored()):
            if not life.is_over:
                assert stored == life.added
                assert life.session.n_unanswered == 0 and life.session.forgotten == 0
        self.manager.close()
        shutil.rmtree(self.path)


TestNetwork = Network.TestCase
TestNetwork.settings = settings(max_examples=settings.default.max_examples // 2)


def test_a_manager_back_without_its_memory_is_counted_and_warned_of_once() -> None:
    """Without a checkpoint a restart loses what was acknowledged, and the client says so."""
    session = ClientProtocol(item_space(PLAIN), 0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for restart in range(3):
            manager = manager_protocol(capacity=100)
            packed = item_space(PLAIN).encode(samples(np.arange(5)))
            if restart == 0:
                talk(manager, session, [session.greet()])
            session.doors.offered += 5
            entry = session.put(packed)
            talk(manager, session, [entry.parts])
            assert entry.answer == {"score": float("inf")}
            assert manager.state.buffer[:]["id"].tolist() == list(range(5))
    assert session.forgotten == 10
    assert len([w for w in caught if "acknowledged" in str(w.message)]) == 1


def talk(manager: ManagerProtocol, session: ClientProtocol, frames: list[Any]) -> None:
    """Exchange frames until there are no more."""
    while frames:
        data = joined(frames.pop(0))
        message, _, body = decode(data)
        for reply in manager.handle(session.rank, message, body, memoryview(data)):
            answer, _, rest = decode(joined(reply.parts))
            frames += session.receive(answer, rest)
