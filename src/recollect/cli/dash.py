"""`recollect dash`: the running jobs of this user on a local web page, live."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass


@dataclass
class Dash:
    """Show running jobs live on a web page: curves of their figures, their tables, their state.

    It finds jobs of the same user on this computer (train, demo, serve, rollout) as they come and go. The page is
    served to this computer alone, at an address with a secret in it, until Ctrl-C; it needs no internet.

    Example: recollect dash
    """

    port: int = 0
    """The port of the page; 0 takes any that is free."""
    browser: bool = True
    """Open the browser; --no-browser only prints the address."""
    json: bool = False
    """Print one JSON object with the address, and open no browser."""

    def run(self) -> None:
        """Serve and wait for Ctrl-C."""
        from recollect.observe.dash import dash_routes
        from recollect.observe.web import WebServer, browsing, make_app  # says what to install, if it must

        try:
            server = WebServer(make_app(dash_routes()), self.port)
        except OSError as error:
            sys.exit(f"recollect dash: port {self.port}: {error.strerror}; choose another --port")
        with server:
            print(
                json.dumps({"url": server.url}) if self.json else f"{server.url}   (Ctrl-C ends it)",
                flush=True,
            )
            with browsing(server.url, self.browser and not self.json):
                server.wait()
