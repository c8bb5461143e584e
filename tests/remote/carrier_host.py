"""A rank of an MPI or torch job whose carrier the tests drive from outside, call by call.

Run as `carrier_host.py mpi|torch ADDRESS`: connects to the test at an abstract Unix address, says its rank, and does
what it is told. The test's side is `Proxy`: a carrier whose calls are made over there.
"""

from __future__ import annotations

import os
import pickle
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from itertools import count
from typing import Any


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


def make_carrier(kind: str) -> Any:
    if kind == "mpi":
        from recollect.remote import MpiCarrier

        return MpiCarrier(max_frame=2 << 20)
    import torch.distributed as distributed

    from recollect.remote import TorchCarrier

    distributed.init_process_group("gloo")
    return TorchCarrier(max_frame=2 << 20)


def host(kind: str, address: str) -> None:
    """Serve calls, each in a thread of its own, until told to stop."""
    carrier = make_carrier(kind)
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(b"\0" + address.encode())
    lock = threading.Lock()
    handles: dict[int, Any] = {}
    _write(sock, (carrier.rank, carrier.max_frame), lock)

    def call(number: int, name: str, args: tuple[Any, ...]) -> None:
        try:
            if name == "isend":
                handles[number] = carrier.isend(*args)
                result: Any = number
            elif name in ("is_complete", "wait"):
                result = getattr(handles[args[0]], name)(*args[1:])
            else:
                result = getattr(carrier, name)(*args)
            if name == "recv":
                result = (result[0], result[1], bytes(result[2]), result[2].readonly)
            answer = (number, True, result)
        except Exception as error:
            answer = (number, False, error)
        with suppress(OSError):
            _write(sock, answer, lock)

    while True:
        try:
            number, name, args = _read(sock)
        except EOFError:
            break
        if name == "stop":
            break
        if name == "isend":  # in order: a thread each could overtake one another
            call(number, name, args)
        else:
            threading.Thread(target=call, args=(number, name, args), daemon=True).start()
    carrier.close()
    if kind == "torch":
        import torch.distributed as distributed

        distributed.destroy_process_group()
    sock.close()


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
        self.rank, self.max_frame = _read(sock)
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
            assert self._came.wait_for(lambda: number in self._answers, 40), name
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

    def stop(self) -> None:
        with suppress(OSError):
            _write(self._sock, (0, "stop", ()), self._lock)
        self._reader.join(10)
        self._sock.close()


class Job:
    """The ranks of a job, as proxies; a context that ends them."""

    def __init__(self, kind: str, n: int) -> None:
        self.kind, self.n = kind, n

    def __enter__(self) -> list[Proxy]:
        address = f"recollect-test-{os.getpid()}-{os.urandom(4).hex()}"
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(b"\0" + address.encode())
        listener.listen(self.n)
        listener.settimeout(50)
        self.processes = self._started(address)
        self.proxies = sorted((Proxy(listener.accept()[0]) for _ in range(self.n)), key=lambda p: p.rank)
        listener.close()
        return self.proxies

    def _started(self, address: str) -> list[subprocess.Popen[bytes]]:
        command = [sys.executable, __file__, self.kind, address]
        if self.kind == "mpi":
            mpiexec = os.path.join(os.path.dirname(sys.executable), "mpiexec")
            return [subprocess.Popen([mpiexec, "-n", str(self.n), *command])]
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        found = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(self.n)}
        return [subprocess.Popen(command, env=found | {"RANK": str(rank)}) for rank in range(self.n)]

    def __exit__(self, *error: object) -> None:
        for proxy in self.proxies:
            proxy.stop()
        for process in self.processes:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


if __name__ == "__main__":
    host(sys.argv[1], sys.argv[2])
