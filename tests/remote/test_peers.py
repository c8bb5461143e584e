"""Which workers are expected, present or gone, by a fake clock."""

from __future__ import annotations

import multiprocessing
import os

import pytest

from recollect import _core
from recollect.remote import Limits, rank_layout
from recollect.remote.manager.peers import Workers
from recollect.remote.ranks import HOST

LIMITS = Limits(join_s=10.0, rejoin_s=2.0, silence_s=5.0)
ME = _core.process_word(os.getpid())
ALL = frozenset({0, 1, 2})


def book(n: int | None = 2, ranks: list[int] | None = None) -> Workers:
    made = Workers(n, ranks, LIMITS)
    made.begin(0.0)
    return made


def test_the_first_to_say_hello_are_expected() -> None:
    b = book(2)
    assert b.admit(5, HOST, ME, 0.0) is None and b.admit(7, HOST, ME, 0.0) is None
    assert "has them" in (b.admit(8, HOST, ME, 0.0) or "")
    assert b.admit(5, HOST, ME, 0.0) is None  # it may come again
    assert b.n_present == 2 and not b.is_over


def test_named_ranks_alone_are_served() -> None:
    b = book(1, [3])
    assert "serves the ranks [3]" in (b.admit(4, HOST, ME, 0.0) or "")
    b.leave(4)
    assert b.n_left == 0 and b.states() == {3: "expected"}
    b.admit(3, HOST, ME, 0.0)
    b.leave(3)
    b.leave(3)
    assert b.n_left == 1 and b.is_over


def test_a_worker_that_does_not_come_in_time_has_left() -> None:
    b = book(3, [0, 1, 2])
    b.admit(0, HOST, ME, 1.0)
    b.tick(9.9, ALL, True)
    assert b.n_left == 0
    b.tick(10.0, ALL, True)
    assert b.n_left == 2 and b.has_seen_any
    b.admit(1, HOST, ME, 11.0)  # late, but there
    assert b.n_left == 1


def test_places_that_no_worker_took_count_as_left() -> None:
    b = book(3)
    b.admit(0, HOST, ME, 1.0)
    b.tick(10.0, ALL, True)
    assert b.n_left == 2


def test_of_named_ranks_each_counts_once_though_fewer_have_to_leave() -> None:
    b = book(2, [0, 1, 2])
    b.admit(0, HOST, ME, 1.0)
    b.admit(1, HOST, ME, 1.0)
    b.tick(10.0, ALL, True)
    assert b.n_left == 1 and not b.is_over
    b.leave(0)
    assert b.n_left == 2 and b.is_over


@pytest.mark.parametrize("ranks", [None, [0, 1, 2]])
def test_a_late_worker_is_admitted_while_others_are_at_work(ranks: list[int] | None) -> None:
    b = book(3, ranks)
    b.admit(0, HOST, ME, 1.0)
    b.tick(10.0, ALL, True)
    assert b.admit(1, HOST, ME, 11.0) is None
    assert (b.n_present, b.n_left) == (2, 1)
    b.tick(12.0, ALL, True)
    assert (b.n_present, b.n_left) == (2, 1)
    assert b.admit(2, HOST, ME, 13.0) is None and b.admit(3, HOST, ME, 13.0) is not None
    for rank in range(3):
        assert not b.is_over
        b.leave(rank)
    assert b.is_over


def test_a_worker_that_never_came_and_leaves_late_is_counted_once() -> None:
    b = book(3)
    b.admit(0, HOST, ME, 1.0)
    b.tick(10.0, ALL, True)
    b.leave(1)
    assert b.n_left == 2 and not b.is_over


def test_a_manager_that_begins_again_waits_again() -> None:
    b = book(1, [0])
    b.begin(8.0)
    b.tick(17.9, ALL, True)
    assert b.states() == {0: "expected"}
    b.tick(18.0, ALL, True)
    assert b.is_over


def test_an_exit_without_a_place_is_not_counted() -> None:
    b = book(2)
    b.admit(0, HOST, ME, 1.0)
    b.leave(4)  # it never said Hello, but a place was free
    assert b.states() == {0: "present", 4: "left"}
    b.leave(5)
    assert b.n_left == 1 and not b.is_over


def test_a_lost_connection_may_come_back_for_a_while() -> None:
    b = book(2)
    b.admit(0, "elsewhere", 0, 0.0)
    b.tick(1.0, frozenset(), True)
    b.tick(2.9, frozenset(), True)
    assert b.n_left == 0
    b.tick(2.95, frozenset({0}), True)  # back
    b.tick(4.0, frozenset(), True)
    b.tick(5.9, frozenset(), True)
    assert b.n_left == 0
    b.tick(6.1, frozenset(), True)
    assert b.n_left == 1
    b.admit(0, "elsewhere", 0, 7.0)
    assert b.n_left == 0 and b.n_present == 1


@pytest.mark.parametrize("sees_death", [True, False])
def test_a_dead_process_of_this_machine_has_left_at_once(sees_death: bool) -> None:
    context = multiprocessing.get_context("fork")
    may_end = context.Event()
    child = context.Process(target=may_end.wait, args=(30.0,))
    child.start()
    word = _core.process_word(child.pid)  # while it lives: of a process that has ended there is none
    may_end.set()
    b = book(2)
    b.admit(0, HOST, word, 0.0)
    b.admit(1, HOST, ME, 0.0)
    child.join()
    child.close()
    b.tick(0.1, ALL, sees_death)
    assert b.states() == {0: "left", 1: "present"}


def test_where_no_death_is_seen_silence_counts_on_other_machines_alone() -> None:
    b = book(2)
    b.admit(0, "elsewhere", 0, 0.0)
    b.admit(1, HOST, ME, 0.0)
    b.note_message(0, 3.0)
    b.tick(7.9, ALL, False)
    assert b.n_left == 0
    b.tick(8.1, ALL, False)
    assert b.states() == {0: "left", 1: "present"}


def test_a_process_of_this_host_in_another_pid_namespace_is_judged_by_what_is_heard_of_it() -> None:
    elsewhere = ME ^ (1 << 48)  # its namespace is another; whatever is found here under its pid is not it
    b = book(1)
    b.admit(0, HOST, elsewhere, 0.0)
    b.tick(0.1, ALL, True)
    b.tick(4.9, ALL, False)
    assert b.states() == {0: "present"}
    b.tick(5.1, ALL, False)
    assert b.states() == {0: "left"}


@pytest.mark.parametrize(("size", "n"), [(1, 1), (2, 2), (3, 0)])
def test_a_layout_needs_a_worker_and_a_manager(size: int, n: int) -> None:
    with pytest.raises(ValueError, match="size"):
        rank_layout(size, n)


def test_workers_go_round_the_managers() -> None:
    layout = rank_layout(6, 2)
    assert [layout.manager_of(worker) for worker in layout.workers] == [4, 5, 4, 5]
    assert layout.workers_of(5) == (1, 3)


def test_a_hello_counts_as_heard_and_as_back() -> None:
    b = book(2)
    b.admit(0, "elsewhere", 0, 50.0)
    b.tick(54.9, ALL, False)
    assert b.states() == {0: "present"}
    b.tick(55.1, ALL, False)
    assert b.states() == {0: "left"}
    b.admit(0, "elsewhere", 0, 56.0)
    b.tick(57.0, frozenset(), True)  # its connection is lost
    b.admit(0, "elsewhere", 0, 58.5)
    b.tick(59.1, frozenset(), True)  # and again
    b.tick(61.0, frozenset(), True)
    assert b.states() == {0: "present"}
    b.tick(61.2, frozenset(), True)
    assert b.states() == {0: "left"}


@pytest.mark.parametrize("sees_death", [True, False])
def test_processes_of_other_machines_and_unknown_ones_are_not_looked_for_here(sees_death: bool) -> None:
    b = book(2)
    b.admit(0, "elsewhere", ME + (1 << 40), 0.0)  # a process word that no process has here
    b.admit(1, HOST, 0, 0.0)
    b.tick(0.1, ALL, sees_death)
    assert b.states() == {0: "present", 1: "present"}


def test_counts_are_not_disturbed_by_a_worker_that_comes() -> None:
    """`exit_counter` is looked at by other threads than the manager's."""
    ranks = book(None)

    class Seen:
        @property
        def state(self) -> str:
            ranks.admit(len(ranks.by_rank), HOST, 0, 0.0)
            return "left"

    ranks.by_rank[0] = ranks.by_rank[1] = Seen()  # type: ignore[assignment]
    assert (ranks.n_left, ranks.n_present) == (2, 2)
