"""A model of the protocol in _core/latest.hpp, small enough to walk through every interleaving of it.

Memory is weaker than the machine's: a store waits in its process's buffer, loads overtake it, and stores to different
words reach memory in any order, unless they are release stores (after all earlier ones) or a fence stands between.
A process can be killed at any step; what it has stored still arrives. A value is two words, so that half of one shows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

Memory = tuple[Any, ...]  # latest, stamps 0-2, hold, the words of slots 0-2
LATEST, STAMP, HOLD, DATA = 0, 1, 4, 5
EMPTY: Memory = ((0, 3), 0, 0, 0, None, *([None] * 6))

# Steps that can be left out, to see that the walk notices.
BREAKAGES = (
    "writer looks at hold again",
    "writer fences before it looks",
    "holder fences before it looks",
    "holder looks at the stamp",
    "reader looks at the stamp again",
    "stamp and latest are released after the words",  # either would do
)


class Violation(AssertionError):
    """The protocol did what it must never do."""


@dataclass(frozen=True, slots=True)
class Process:
    """One process between two steps: where it is, what it knows, and the stores that have not arrived."""

    role: str
    at: str
    left: int = 0  # values still to write, or to read
    life: int = 0
    slot: int = 3
    version: int = 0
    before: int = 0
    word: Any = None
    floor: int = 0
    held: bool = False
    buffer: tuple[tuple[int, Any, bool], ...] = ()


@dataclass(frozen=True, slots=True)
class World:
    memory: Memory
    processes: tuple[Process, ...]
    kills: int


class Model:
    """All that can happen next in a world; `broken` names the step that is left out."""

    def __init__(self, broken: str = "") -> None:
        self.broken = broken

    def has(self, step: str) -> bool:
        assert step in BREAKAGES
        return step != self.broken

    def next(self, world: World) -> Iterator[World]:
        for k, p in enumerate(world.processes):
            for i, (at, value, _) in enumerate(p.buffer):
                if self.may_arrive(p, i):
                    memory = (*world.memory[:at], value, *world.memory[at + 1 :])
                    yield self.put(world, k, replace(p, buffer=p.buffer[:i] + p.buffer[i + 1 :]), memory)
            for q, memory in self.step(world, k, p):
                yield self.put(world, k, q, memory)
            if world.kills and p.at not in ("done", "dead"):
                again = "pick" if p.role == "writer" else "dead"
                q = Process(p.role, again, p.left, p.life + 1, buffer=p.buffer)
                yield replace(self.put(world, k, q, world.memory), kills=world.kills - 1)

    @staticmethod
    def put(world: World, k: int, p: Process, memory: Memory) -> World:
        return World(memory, (*world.processes[:k], p, *world.processes[k + 1 :]), world.kills)

    @staticmethod
    def may_arrive(p: Process, i: int) -> bool:
        at, _, release = p.buffer[i]
        return i == 0 if release else all(other != at for other, *_ in p.buffer[:i])

    def step(self, world: World, k: int, p: Process) -> list[tuple[Process, Memory]]:
        return (self.write if p.role == "writer" else self.read)(world.memory, k, p)

    @staticmethod
    def load(memory: Memory, p: Process, at: int) -> Any:
        for other, value, _ in reversed(p.buffer):
            if other == at:
                return value
        return memory[at]

    @staticmethod
    def store(p: Process, place: int, value: Any, release: bool = False, **changes: Any) -> Process:
        return replace(p, buffer=(*p.buffer, (place, value, release)), **changes)

    # -- the writer

    def write(self, memory: Memory, k: int, p: Process) -> list[tuple[Process, Memory]]:
        if p.at == "pick":
            if not p.left or (p.life and p.buffer):  # the next writer comes after the dead one's stores
                return []
            version, last = self.load(memory, p, LATEST)
            held = self.load(memory, p, HOLD)
            slot = 0 if last == 3 else (last + 1) % 3
            if held is not None and held[1] == slot:
                slot = (slot + 1) % 3
            before = self.load(memory, p, STAMP + slot)
            q = replace(p, at="odd", slot=slot, version=version + 1, before=before)
            return [(q, memory)]
        if p.at == "odd":
            return [(self.store(p, STAMP + p.slot, p.before | 1, at="look"), memory)]
        if p.at == "look":
            if p.buffer and self.has("writer fences before it looks"):
                return []
            held = self.load(memory, p, HOLD)
            if held is not None and held[1] == p.slot and self.has("writer looks at hold again"):
                return [(self.store(p, STAMP + p.slot, p.before, True, at="pick"), memory)]
            return [(replace(p, at="word0"), memory)]
        if p.at in ("word0", "word1"):
            i = int(p.at[-1])
            q = self.store(p, DATA + 2 * p.slot + i, (p.version, p.life), at="stamp" if i else "word1")
            return [(q, memory)]
        if p.at == "stamp":
            release = self.has("stamp and latest are released after the words")
            return [(self.store(p, STAMP + p.slot, 2 * p.version, release, at="latest"), memory)]
        if p.at == "latest":
            release = self.has("stamp and latest are released after the words")
            q = self.store(p, LATEST, (p.version, p.slot), release, at="pick", left=p.left - 1)
            return [(q, memory)]
        return []

    # -- a reader: "plain" never holds, "holder" does at once, "thief" takes over whatever hold it finds

    def read(self, memory: Memory, k: int, p: Process) -> list[tuple[Process, Memory]]:
        if p.at == "begin":
            version, slot = memory[LATEST]
            if not version or not p.left:
                return []
            after = "stamp" if p.role == "plain" else "hold"
            return [(replace(p, at=after, version=version, slot=slot, floor=p.floor or version), memory)]
        if p.at == "hold":
            if memory[HOLD] is not None and p.role != "thief":
                return [(replace(p, at="begin"), memory)]
            memory = (*memory[:HOLD], (k, p.slot), *memory[HOLD + 1 :])
            if not self.has("holder fences before it looks"):  # the hold itself is late then
                q = self.store(p, HOLD, (k, p.slot), held=True, at="stamp")
                return [(q, (*memory[:HOLD], None, *memory[HOLD + 1 :]))]
            return [(replace(p, at="stamp", held=True), memory)]
        if p.at == "stamp":
            stamp = memory[STAMP + p.slot]
            if stamp != 2 * p.version and (not p.held or self.has("holder looks at the stamp")):
                return [(replace(p, at="give up"), memory)]
            return [(replace(p, at="word0"), memory)]
        if p.at == "word0":
            return [(replace(p, at="word1", word=memory[DATA + 2 * p.slot]), memory)]
        if p.at == "word1":
            return [(replace(p, at="again", word=(p.word, memory[DATA + 2 * p.slot + 1])), memory)]
        if p.at == "again":
            same = memory[STAMP + p.slot] == 2 * p.version
            mine = p.held and self.load(memory, p, HOLD) == (k, p.slot)
            if same or mine or not self.has("reader looks at the stamp again"):
                self.check(p)
                return [(replace(p, at="let go", left=p.left - 1, floor=p.version), memory)]
            return [(replace(p, at="give up"), memory)]
        if p.at in ("let go", "give up"):
            if p.buffer:
                return []
            if p.held and memory[HOLD] == (k, p.slot):
                memory = (*memory[:HOLD], None, *memory[HOLD + 1 :])
            at = "begin" if p.left else "done"
            return [(replace(p, at=at, held=False, word=None), memory)]
        return []

    @staticmethod
    def check(p: Process) -> None:
        first, second = p.word
        if first != second or first is None or first[0] != p.version:
            raise Violation(f"torn: version {p.version} has words {p.word}")
        if p.version < p.floor:
            raise Violation(f"went back from {p.floor} to {p.version}")


def walk(model: Model, processes: list[Process], kills: int = 0, limit: int = 3_000_000) -> int:
    """Visit every world that can come about; the number of them. Violation if one must not be."""
    start = World(EMPTY, tuple(processes), kills)
    seen, todo = {start}, [start]
    while todo:
        world = todo.pop()
        for after in model.next(world):
            if after not in seen:
                seen.add(after)
                todo.append(after)
        assert len(seen) < limit, "too many worlds"
    return len(seen)
