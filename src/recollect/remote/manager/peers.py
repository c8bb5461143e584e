"""Writers: what a manager remembers of each client, so that a container is stored once however often it comes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from recollect.remote import config
from recollect.remote.messages import Id


@dataclass(slots=True)
class Writer:
    """One client: its rank, the last container it sent, and the answers it may still ask for."""

    rank: int
    last_seq: int = 0
    answers: OrderedDict[int, bytes | Callable[[], bytes]] = field(default_factory=OrderedDict)
    gap_told: int = -1  # after which seq a gap was already answered
    has_left: bool = False

    def remember(self, seq: int, answer: bytes | Callable[[], bytes], most: int) -> None:
        """Keep the answer to the container that was just stored, or what makes it: it is rarely asked for."""
        self.last_seq = seq
        self.answers[seq] = answer
        while len(self.answers) > most:
            self.answers.popitem(last=False)

    def answer(self, seq: int) -> bytes | None:
        """The answer to a container, if it is kept."""
        found = self.answers.get(seq)
        return found() if callable(found) else found

    def kept_answers(self) -> list[tuple[int, bytes]]:
        return [(seq, found() if callable(found) else found) for seq, found in self.answers.items()]


class Writers:
    """All writers by id. When there are too many, one that said Exit is forgotten first, the longest silent of them.

    Such a client sends nothing again, so that a container is still stored once; others go only if none has left.
    """

    def __init__(self) -> None:
        self.by_id: OrderedDict[Id, Writer] = OrderedDict()

    def get(self, writer: Id) -> Writer | None:
        return self.by_id.get(writer)

    def enter(self, writer: Id, rank: int) -> Writer:
        """Return the record of a writer; a new one of a rank ends the answers kept for its earlier ones."""
        found = self.by_id.get(writer)
        if found is None:
            for other in self.by_id.values():
                if other.rank == rank:
                    other.answers.clear()
            found = self.by_id[writer] = Writer(rank)
            while len(self.by_id) > config.MOST_CLIENTS:
                del self.by_id[next((i for i, w in self.by_id.items() if w.has_left), next(iter(self.by_id)))]
        self.by_id.move_to_end(writer)
        return found
