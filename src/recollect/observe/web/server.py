"""WebServer: an app on a loopback port, served from a thread of its own."""

from __future__ import annotations

import socket
import threading
from typing import Self

import uvicorn

from recollect import checks
from recollect.observe.web.app import Guard

HOST = "127.0.0.1"


class WebServer:
    """Serves an app to the browsers of this computer until it is closed.

    From another computer: `ssh -L 8000:127.0.0.1:8000 host` and the same address.

    Ownership: the port and a thread, until `close`. Concurrency: any thread.
    """

    def __init__(self, app: Guard, port: int = 0) -> None:
        """Take the port, 0 for any free one; OSError if it is in use, ValueError if it can be none."""
        checks.count("port", port, 0, most=65535, advice="0 takes any that is free")
        self._socket = socket.create_server((HOST, port))
        self.port: int = self._socket.getsockname()[1]
        self.url = f"http://{HOST}:{self.port}/{app.token}/"
        config = uvicorn.Config(app, log_level="critical", access_log=False, lifespan="off",
                                timeout_graceful_shutdown=1, ws="none")  # fmt: skip
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(
            target=self._server.run, args=([self._socket],), name="recollect-web", daemon=True
        )
        self._thread.start()

    def wait(self) -> None:
        """Serve until Ctrl-C."""
        self._thread.join()

    def close(self) -> None:
        """End it, live streams too; may be called twice."""
        self._server.should_exit = True
        self._thread.join()
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
