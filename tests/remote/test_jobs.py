"""The carriers mpi and torch keep the contract, in jobs that the tests start themselves."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.remote.carrier_host import Job

from recollect.errors import DeadlineError
from recollect.testing import CarrierContract

EXAMPLE = Path(__file__).parents[2] / "examples" / "gflownet_hypergrid.py"


class OneJob:
    """One job for the whole class: starting ranks costs seconds. What closes ends has a job of its own."""

    kind = ""
    proxies: list[Any]

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def job(cls) -> Iterator[None]:
        pytest.importorskip({"mpi": "mpi4py"}.get(cls.kind, cls.kind))
        with Job(cls.kind, 3) as proxies:
            cls.proxies = [Kept(proxy) for proxy in proxies]
            yield

    def make(self, n: int) -> list[Any]:
        ends = self.proxies[:n]
        for end in ends:
            end.drain()
        return ends

    def test_close_wakes_who_waits(self, pair: Any) -> None:
        pytest.skip("has a job of its own")

    def test_a_peer_that_closes_is_gone(self, pair: Any) -> None:
        pytest.skip("has a job of its own")


class Kept:
    """An end that outlives the test: closing it does nothing."""

    def __init__(self, proxy: Any) -> None:
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


class TestMpi(OneJob, CarrierContract):
    kind = "mpi"


class TestTorch(OneJob, CarrierContract):
    kind = "torch"


@pytest.mark.parametrize("kind", ["mpi", "torch"])
def test_closing_in_a_job_wakes_and_shows(kind: str) -> None:
    pytest.importorskip({"mpi": "mpi4py"}.get(kind, kind))
    contract = CarrierContract()
    with Job(kind, 2) as (a, b):
        if kind == "torch":
            contract.test_a_peer_that_closes_is_gone((a, b))
            contract.test_close_wakes_who_waits((b, a))
        else:
            contract.test_close_wakes_who_waits((a, b))


def run_example(*command: str) -> str:
    done = subprocess.run(
        [*command],
        capture_output=True,
        text=True,
        timeout=55,
        check=False,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.process
def test_the_example_learns_over_local() -> None:
    out = run_example(sys.executable, str(EXAMPLE))
    assert out.count("L1 distance 1.40 before, 0.0") == 2 and "32000 items offered" in out


@pytest.mark.process
def test_the_example_learns_over_mpi() -> None:
    pytest.importorskip("mpi4py")
    mpiexec = str(Path(sys.executable).parent / "mpiexec")
    out = run_example(mpiexec, "-n", "3", sys.executable, str(EXAMPLE), "--carrier", "mpi")
    assert out.count("L1 distance 1.40 before, 0.0") == 2 and "32000 items offered" in out
