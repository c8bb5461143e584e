"""RayCarrier: managers are Ray actors placed over machines; frames go by tcp, not through Ray.

A named actor, the registry of a job, hands out the addresses of the managers and a random token.
"""

from __future__ import annotations

import secrets
import time
from typing import Any

from recollect.errors import DeadlineError, MissingExtraError, WorkerError
from recollect.remote.carriers.base import check_timeout
from recollect.remote.carriers.tcp import TcpCarrier
from recollect.remote.frame import MAX_FRAME
from recollect.remote.ranks import RankLayout

_ASK_S = 30.0


def _ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise MissingExtraError(
            'the carrier "ray" needs ray; run pip install "recollect[ray]", or use "local", which needs nothing'
        ) from error
    return ray


class Registry:
    """What the named actor of a job knows: where its managers listen, and their token."""

    def __init__(self) -> None:
        self._token = secrets.token_bytes(32)
        self._addresses: dict[int, str] = {}

    def token(self) -> bytes:
        return self._token

    def enter(self, rank: int, address: str) -> None:
        self._addresses[rank] = address

    def addresses(self) -> dict[int, str]:
        return dict(self._addresses)


def _registry(job: str) -> Any:
    ray = _ray()
    actor = ray.remote(num_cpus=0)(Registry)
    return actor.options(name=f"recollect-{job}", get_if_exists=True).remote()


class RayCarrier(TcpCarrier):
    """A TcpCarrier whose addresses and token come from the named actor of a Ray job.

    Ownership: `close()` gives up the sockets. The registry lives as long as a carrier of the job holds it (Ray ends an
    actor without a handle), or until `RayCarrier.forget(job)`.
    """

    _registry: Any = None

    @classmethod
    def serve(cls, job: Any, rank: int = 0, **kwargs: Any) -> TcpCarrier:  # type: ignore[override]
        """Listen on this node, for a manager of a job."""
        ray = _ray()
        registry = _registry(job)
        token = ray.get(registry.token.remote(), timeout=_ASK_S)
        several = len([node for node in ray.nodes() if node["Alive"]]) > 1
        host = ray.util.get_node_ip_address() if several else "127.0.0.1"
        old = ray.get(registry.addresses.remote(), timeout=_ASK_S).get(rank)
        address = f"{host}:0"
        if old is not None and old.rpartition(":")[0] == host:
            address = old  # started again on its node, it listens where it did
        try:
            carrier = super().serve(rank, address, token=token, **kwargs)
        except OSError:
            carrier = super().serve(rank, f"{host}:0", token=token, **kwargs)
        try:
            ray.get(registry.enter.remote(rank, carrier.address), timeout=_ASK_S)
        except BaseException:
            carrier.close()
            raise
        carrier._registry = registry  # type: ignore[attr-defined]
        return carrier

    @classmethod
    def join(  # type: ignore[override]
        cls, job: Any, rank: int | None = None, *, n_managers: int = 1, own: int | None = None,
        timeout: float = 30.0, max_frame: int = MAX_FRAME,
    ) -> TcpCarrier:  # fmt: skip
        """Join the managers of a job, once `n_managers` of them have come.

        `own` (the lowest, unless told) must answer; the others may have served their workers and ended.
        """
        ray = _ray()
        registry = _registry(job)
        end = time.monotonic() + check_timeout(timeout)
        while True:
            found = ray.get(registry.addresses.remote(), timeout=_ASK_S)
            if len(found) >= n_managers:
                break
            if time.monotonic() > end:
                raise DeadlineError(
                    f"job {job!r}: must have {n_managers} managers, got {len(found)} in {timeout:g} s"
                )
            time.sleep(0.05)
        token = ray.get(registry.token.remote(), timeout=_ASK_S)
        first = found[min(found) if own is None else own]
        carrier = super().join([first], token=token, rank=rank, timeout=timeout, max_frame=max_frame)
        try:
            carrier.link_others(found)
        except BaseException:
            carrier.close()
            raise
        carrier._registry = registry  # type: ignore[attr-defined]
        return carrier

    def _look_up(self, dest: int, timeout: float) -> str | None:
        """Ask the registry: a manager that was started again may listen elsewhere."""
        known = super()._look_up(dest, timeout)
        if self._registry is None:
            return known
        try:
            found = _ray().get(self._registry.addresses.remote(), timeout=min(timeout, _ASK_S))
        except Exception:  # the registry does not answer, or is gone: look where it was last
            return known
        address: str | None = found.get(dest, known)
        return address

    @staticmethod
    def forget(job: str) -> None:
        """End the registry of a job."""
        ray = _ray()
        try:
            ray.kill(ray.get_actor(f"recollect-{job}"))
        except ValueError:
            return


class _Rank:
    """An actor that does the work of one rank."""

    def run(self, worker: Any, manager: Any, layout: RankLayout, job: str, rank: int, seed: int) -> Any:
        from recollect.remote.carriers.by_name import set_launched
        from recollect.remote.launcher import run_rank, tell_absence

        if rank in layout.managers:
            carrier = RayCarrier.serve(job, rank)
        else:
            own = layout.manager_of(rank)
            carrier = RayCarrier.join(job, rank, n_managers=len(layout.managers), own=own)
        set_launched("ray", carrier)
        try:
            return run_rank(worker, manager, layout, carrier, seed)
        finally:
            tell_absence(layout, carrier)
            set_launched("ray", None)
            carrier.close()


def launch_on_ray(worker: Any, manager: Any, layout: RankLayout, max_restarts: int, seed: int) -> Any:
    """Do `launch` with an actor per rank; one whose process dies is started again as `launch` says."""
    from recollect.remote.launcher import Launched, most_restarts, only_tell_absence

    ray = _ray()
    if not ray.is_initialized():
        ray.init(log_to_driver=False)
    job = secrets.token_hex(8)
    registry = _registry(job)  # held here, so that a manager that starts again finds its address and token
    kind_of_actor = ray.remote(num_cpus=0)(_Rank)
    actors: dict[int, Any] = {}
    running: dict[Any, int] = {}  # what will be the outcome of which rank

    def start(rank: int) -> None:
        actors[rank] = kind_of_actor.remote()
        running[actors[rank].run.remote(worker, manager, layout, job, rank, seed)] = rank

    launched, failed, leaving = Launched(), {}, []
    restarts = dict.fromkeys([*layout.managers, *layout.workers], 0)
    try:
        for rank in restarts:
            start(rank)
        while running:
            (done,), _ = ray.wait(list(running), num_returns=1)
            rank = running.pop(done)
            try:
                kind, value = ray.get(done)
            except Exception as error:
                is_dead = isinstance(error, ray.exceptions.RayActorError)
                if is_dead and restarts[rank] < most_restarts(rank, layout, max_restarts):
                    restarts[rank] += 1
                    start(rank)
                    continue
                failed[rank] = f"rank {rank}: {error}"
                if is_dead and rank in layout.workers:  # it may have died before its manager knew of it
                    leaving.append(kind_of_actor.remote())
                    leaving[-1].run.remote(only_tell_absence, manager, layout, job, rank, seed)
                continue
            (launched.results if kind == "result" else launched.stats)[rank] = value
    finally:
        for one in (*actors.values(), *leaving, registry):
            ray.kill(one)
    if failed:
        raise WorkerError("launch: " + "\n".join(failed[rank] for rank in sorted(failed)))
    return launched
