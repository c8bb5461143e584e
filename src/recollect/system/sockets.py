"""Addresses of one machine that have no name that stays: abstract ones, or paths in the private directory."""

from __future__ import annotations

import errno
import os
import socket
import struct
import weakref
from contextlib import suppress

from recollect.system.directory import remove_if_deserted, shared_directory, turn
from recollect.system.switch import is_portable

_PEER = struct.Struct("3i")
_paths: dict[str, int] = {}  # of sockets that a process listens at, and which process that is


def address_of(digest: str) -> bytes:
    """The address that a digest of 32 letters names."""
    if is_portable():
        return os.fsencode(shared_directory() / f"socket-{digest}")
    return b"\0recollect-" + digest.encode()


def listen_at(listener: socket.socket, address: bytes) -> bool:
    """Take an address; False if somebody has it. Where addresses are paths, listening begins at once."""
    try:
        if not is_portable():
            listener.bind(address)
            return True
        path = os.fsdecode(address)
        with turn():  # one that nobody listens at yet would look as if it was left
            if os.path.lexists(path) and not remove_if_deserted(shared_directory() / os.path.basename(path)):
                return False
            _paths[path] = os.getpid()
            listener.bind(path)
            listener.listen(128)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        return False
    weakref.finalize(listener, _remove, path, os.getpid())
    return True


def _remove(path: str, pid: int) -> None:
    if pid == os.getpid():
        leave(path)


def stop_listening(listener: socket.socket, address: bytes | None) -> None:
    """End a listener and wake the thread that waits at it for a connection; then that must not wait again."""
    with suppress(OSError):
        listener.shutdown(socket.SHUT_RDWR)
    if is_portable() and address is not None:
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as caller:
            caller.settimeout(0.2)  # elsewhere a shutdown wakes nobody, a caller does
            caller.connect(os.fsdecode(address))
    leave(address)
    listener.close()


def leave(address: str | bytes | None) -> None:
    """Give up the address of a listener of this process that is closed, or about to be."""
    path = os.fsdecode(address) if address else ""
    if is_portable() and _paths.get(path) == os.getpid():
        with turn():
            if _paths.pop(path, None) is not None:
                with suppress(FileNotFoundError):
                    os.unlink(path)


def peer_of(sock: socket.socket) -> int:
    """Return the pid of a peer, 0 if it is another process that does not say; PermissionError if it is of another user.

    Nobody else can enter the directory of those paths.
    """
    if is_portable():
        try:
            path = sock.getpeername()
        except OSError:
            return 0
        return os.getpid() if isinstance(path, str) and _paths.get(path) == os.getpid() else 0
    pid, uid, _ = _PEER.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    if uid != os.geteuid():
        raise PermissionError(f"the peer must be of user {os.geteuid()}, got {uid}")
    return int(pid)
