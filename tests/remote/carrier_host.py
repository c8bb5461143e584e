"""A rank of a job (mpi, torch or tcp) whose carrier the tests drive from outside, call by call or case by case.

Run as `carrier_host.py KIND ADDRESS N`: connects to the test at an abstract Unix address, says its rank, and does what
it is told. Under mpi `mpiexec` starts the ranks; for the others one process forks them, so that torch is loaded once.
The test's side is `Proxy`: a carrier whose calls are made over there.
"""

from __future__ import annotations

import os
import pickle
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
MAX_FRAME = 2 << 20
TOKEN = b"a token of the tests"


def _write(sock: socket.socket, value: Any, lock: threading.Lock) -> None:
    data = pickle.dumps(value)
    with lock:
        sock.sendall(len(data).to_bytes(8, "little") + data)


def _read(sock: socket.socket) -> Any:
    def exactly(n: int) -> bytes:
        data = bytearray()
        while len(data) < n:
            part = sock.recv(min(n - len(data), 1 << 20))
            if not part:
                raise EOFError
            data += part
        return bytes(data)

    return pickle.loads(exactly(int.from_bytes(exactly(8), "little")))


def make_carrier(kind: str, rank: int, n: int, port: int) -> Any:
    from recollect import remote

    if kind == "mpi":
        return remote.MpiCarrier(max_frame=MAX_FRAME)
    if kind == "torch":
        return remote.TorchCarrier(max_frame=MAX_FRAME)
    address = f"127.0.0.1:{port}"
    if rank == n - 1:
        return remote.TcpCarrier.serve(rank, address, token=TOKEN, max_frame=MAX_FRAME)
    return remote.TcpCarrier.join([address], token=TOKEN, rank=rank, max_frame=MAX_FRAME)


class Host:
    """One rank: serves calls, each in a thread of its own, until told to stop."""

    def __init__(self, kind: str, address: str, rank: int, n: int, port: int) -> None:
        self.made = (kind, rank, n, port)
        self.carrier = make_carrier(*self.made)
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(b"\0" + address.encode())
        self.lock = threading.Lock()
        self.handles: dict[int, Any] = {}
        _write(self.sock, (self.carrier.rank, self.carrier.max_frame, os.getpid()), self.lock)

    def serve(self) -> None:
        with suppress(EOFError, OSError):
            while True:
                number, name, args = _read(self.sock)
                if name == "stop":
                    break
                if name == "isend":  # in order: a thread each could overtake one another
                    self._call(number, name, args)
                else:
                    threading.Thread(target=self._call, args=(number, name, args), daemon=True).start()
        self.carrier.close()

    def _call(self, number: int, name: str, args: tuple[Any, ...]) -> None:
        try:
            answer = (number, True, self._done(number, name, args))
        except Exception as error:
            answer = (number, False, error)
        with suppress(OSError):
            _write(self.sock, answer, self.lock)

    def _done(self, number: int, name: str, args: tuple[Any, ...]) -> Any:
        if name == "renew":
            self.carrier = make_carrier(*self.made)
            return None
        if name == "case":
            from tests.remote import job_cases

            return getattr(job_cases, args[0])(self.carrier, *args[1:])
        if name == "isend":
            self.handles[number] = self.carrier.isend(*args)
            return number
        if name in ("is_complete", "wait"):
            return getattr(self.handles[args[0]], name)(*args[1:])
        result = getattr(self.carrier, name)(*args)
        return (*result[:2], bytes(result[2]), result[2].readonly) if name == "recv" else result


def main(kind: str, address: str, n: int) -> None:
    sys.path.insert(0, str(ROOT))
    if kind == "mpi":
        Host(kind, address, -1, n, 0).serve()
        return
    if kind == "torch":
        import torch.distributed  # noqa: F401
    import recollect.remote.client.client
    import recollect.remote.manager.manager  # noqa: F401

    with socket.create_server(("127.0.0.1", 0)) as free:  # it is taken again soon, before others can take it
        port = free.getsockname()[1]
    children = []
    for rank in range(n):
        children.append(os.fork())
        if not children[-1]:
            _be_rank(kind, address, rank, n, port)
    for child in children:
        os.waitpid(child, 0)


def _be_rank(kind: str, address: str, rank: int, n: int, port: int) -> None:
    try:
        if kind == "torch":
            import torch.distributed as distributed

            distributed.init_process_group(
                "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=n
            )
        Host(kind, address, rank, n, port).serve()
    finally:
        os._exit(0)


class _Handle:
    def __init__(self, proxy: Proxy, number: int) -> None:
        self._proxy, self._number = proxy, number

    def is_complete(self) -> bool:
        return self._proxy._call("is_complete", self._number)

    def wait(self, timeout: float = 30.0) -> None:
        self._proxy._call("wait", self._number, timeout)


class Proxy:
    """A carrier in another process."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock, self._lock = sock, threading.Lock()
        self.rank, self.max_frame, self.pid = _read(sock)
        self._numbers = count()
        self._answers: dict[int, Any] = {}
        self._came = threading.Condition()
        self._reader = threading.Thread(target=self._read_all, daemon=True)
        self._reader.start()

    def _read_all(self) -> None:
        with suppress(OSError, EOFError):
            while True:
                number, ok, value = _read(self._sock)
                with self._came:
                    self._answers[number] = (ok, value)
                    self._came.notify_all()

    def _call(self, name: str, *args: Any) -> Any:
        number = next(self._numbers)
        _write(self._sock, (number, name, args), self._lock)
        with self._came:
            assert self._came.wait_for(lambda: number in self._answers, 200), name
            ok, value = self._answers.pop(number)
        if not ok:
            raise value
        return value

    def send(self, dest: int, tag: int, parts: Any, timeout: float = 30.0) -> None:
        self._call("send", dest, tag, [bytes(part) for part in parts], timeout)

    def isend(self, dest: int, tag: int, parts: Any) -> _Handle:
        return _Handle(self, self._call("isend", dest, tag, [bytes(part) for part in parts]))

    def recv(self, source: int = -1, tag: int = -1, timeout: float = 30.0) -> Any:
        source, tag, data, readonly = self._call("recv", source, tag, timeout)
        frame = memoryview(bytearray(data))
        return source, tag, frame.toreadonly() if readonly else frame

    def alive(self) -> frozenset[int]:
        return self._call("alive")

    def close(self) -> None:
        self._call("close")

    def case(self, name: str, *args: Any) -> Any:
        """Run a function of `job_cases` over there, with its carrier."""
        return self._call("case", name, *args)

    def begin_case(self, name: str, *args: Any) -> None:
        """The same, for a rank that will not live to answer."""
        _write(self._sock, (next(self._numbers), "case", (name, *args)), self._lock)

    def renew(self) -> None:
        self._call("renew")

    def stop(self) -> None:
        with suppress(OSError):
            _write(self._sock, (0, "stop", ()), self._lock)
        self._reader.join(10)
        self._sock.close()


def everywhere(proxies: list[Any], name: str, *args: Any) -> list[Any]:
    """Call a method of all ranks at once; their results by rank."""
    with ThreadPoolExecutor(len(proxies)) as pool:
        return list(pool.map(lambda proxy: getattr(proxy, name)(*args), proxies))


def renew(proxies: list[Any]) -> None:
    """Give all ranks new carriers, once the old ones are gone."""
    everywhere(proxies, "close")
    everywhere(proxies, "renew")


class Job:
    """The ranks of a job, as proxies; a context that ends them."""

    def __init__(self, kind: str, n: int) -> None:
        self.kind, self.n = kind, n
        self.proxies: list[Proxy] = []

    def __enter__(self) -> list[Proxy]:
        address = f"recollect-test-{os.getpid()}-{os.urandom(4).hex()}"
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(b"\0" + address.encode())
            listener.listen(self.n)
            listener.settimeout(100)
            command = [sys.executable, __file__, self.kind, address, str(self.n)]
            if self.kind == "mpi":
                mpiexec = os.path.join(os.path.dirname(sys.executable), "mpiexec")
                command = [mpiexec, "-n", str(self.n), *command]
            self.process = subprocess.Popen(command)
            made = [Proxy(listener.accept()[0]) for _ in range(self.n)]
        self.proxies = sorted(made, key=lambda proxy: proxy.rank)
        return self.proxies

    def __exit__(self, *error: object) -> None:
        for proxy in self.proxies:
            proxy.stop()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
