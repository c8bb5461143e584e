"""Jobs of three ranks over tcp, mpi and torch: the carrier's contract, and what happens when a rank misbehaves."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from tests.remote.carrier_host import Job, Proxy, everywhere, renew
from tests.remote.make import assert_doors

from recollect.errors import DeadlineError
from recollect.testing import CarrierContract


class OneJob:
    """One job for the whole class: starting ranks costs seconds."""

    kind = ""
    proxies: list[Proxy]

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def job(cls) -> Iterator[None]:
        pytest.importorskip({"mpi": "mpi4py"}.get(cls.kind, "recollect" if cls.kind == "tcp" else cls.kind))
        with Job(cls.kind, 3) as proxies:
            cls.proxies = proxies
            yield

    def cases(self, name: str, *args: Any) -> list[Any]:
        """Let every rank do its part of a case, on new carriers; what each returned."""
        renew(self.proxies)
        return everywhere(self.proxies, "case", name, *args)


class JobContract(OneJob, CarrierContract):
    """The public contract, by calls made in other processes."""

    def make(self, n: int) -> list[Any]:
        ends = [Kept(proxy) for proxy in self.proxies[:n]]
        for end in ends:
            end.drain()
        return ends

    def test_close_wakes_who_waits(self, pair: Any) -> None:
        super().test_close_wakes_who_waits(tuple(self.proxies[:2]))
        renew(self.proxies)

    def test_a_peer_that_closes_is_gone(self, pair: Any) -> None:
        super().test_a_peer_that_closes_is_gone(tuple(self.proxies[:2]))
        renew(self.proxies)


class Kept:
    """An end that outlives the test: closing it does nothing."""

    def __init__(self, proxy: Proxy) -> None:
        self._proxy = proxy

    def __getattr__(self, name: str) -> Any:
        return getattr(self._proxy, name)

    def drain(self) -> None:
        try:
            while True:
                self._proxy.recv(timeout=0.0)
        except DeadlineError:
            return

    def close(self) -> None:
        pass


class JobCases(OneJob):
    """Two workers and a manager; one fails, and the others go on."""

    def test_a_scoring_function_that_raises_is_that_workers_error(self) -> None:
        (got, mine), (others, _), manager = self.cases("score_raises")
        assert got[0] == 0.0 and got[2] == 0.0
        text, seq, kept = got[1]
        assert "unlucky" in text and (seq, kept) == (2, 1)
        assert others == [1.0, 1.0, 1.0]
        assert manager["stats"].scoring_errors == 1 and sorted(manager["ids"]) == [1, 2, 3, 12, 13, 14]
        assert_doors(mine)
        assert_doors(manager["stats"])

    def test_exit_twice_is_one_rank_that_left(self, tmp_path: Path) -> None:
        _, left, manager = self.cases("exit_twice", str(tmp_path))
        assert left == 1
        assert manager["stats"].exit_counter == 2 and sorted(manager["ids"]) == [0, 1, 7]

    def test_a_worker_that_does_not_read_delays_no_other(self, tmp_path: Path) -> None:
        _, (usual, meanwhile), manager = self.cases(
            "slow_reader", str(tmp_path), 40, 60_000
        )  # 40 draws of 1 MB
        assert median(meanwhile) < 2 * median(usual) + 1.0 and max(meanwhile) < 10.0
        assert len([i for i in manager["ids"] if i < 40]) >= 80
        assert manager["stats"].pending_sends <= 65

    @pytest.mark.parametrize("n", [10_000, pytest.param(100_000, marks=pytest.mark.soak)])
    def test_malformed_frames_are_refused_counted_and_shut_out(self, tmp_path: Path, n: int) -> None:
        sent, stats, manager = self.cases("malformed", str(tmp_path), n)
        assert sent == n - 1 if self.kind == "mpi" else sent >= 1  # a stream is closed at once
        counts = manager["stats"]
        assert counts.offered == stats.kept >= 200 and 1 <= counts.malformed <= 17 + 10
        assert counts.senders[0].malformed == counts.malformed and counts.senders[1].malformed == 0


class WithToken(OneJob):
    """Where frames go by tcp, also between ranks that torch knows."""

    def test_a_wrong_token_is_an_error_there_and_nothing_here(self, tmp_path: Path) -> None:
        said, nothing, manager = self.cases("wrong_token", str(tmp_path))
        assert "token does not match" in said and nothing is None
        assert manager["refused"] == 1 and 7 not in manager["alive"] and sorted(manager["ids"]) == [0, 1]


class Killing(WithToken):
    """After the others: ranks are gone then. Under mpi their death would end the job, whatever mpiexec is told."""

    def test_a_killed_worker_costs_what_it_had_not_finished_and_a_killed_manager_is_told(
        self, tmp_path: Path
    ) -> None:
        renew(self.proxies)
        for rank in (0, 2):
            self.proxies[rank].begin_case("until_killed", str(tmp_path), 30)
        seen_s, held, ids, gone_s, text, stats = self.proxies[1].case("until_killed", str(tmp_path), 30)
        assert seen_s < 5.0  # a second, and what a loaded machine adds
        theirs = sorted(i for i in ids if i >= 0)
        assert theirs == list(range(len(theirs))) and len(theirs) > 30 and -1 in ids
        assert (held["n_left"], held["n_present"], len(ids)) == (1, 1, held["length"])
        assert "rank 2: the manager is gone; 1 items wait here" in text and gone_s < 10.0
        assert_doors(stats)


@pytest.mark.timeout(120)
class TestTcp(Killing, JobCases):
    kind = "tcp"


class Learning(OneJob):
    def test_the_example_learns(self) -> None:
        workers = self.cases("example", 60)[:2]
        for ((before, after),) in workers:
            assert before == pytest.approx(1.40, abs=0.01) and after < 1.3


@pytest.mark.timeout(120)
class TestMpi(JobCases, Learning, JobContract):
    kind = "mpi"
    sees_close = False


@pytest.mark.timeout(240)
class TestTorch(Killing, JobCases, JobContract):
    kind = "torch"
