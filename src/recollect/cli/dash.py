"""`recollect dash`: the running jobs of this user, and runs that have ended, on a local web page, live."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from recollect.text import printable


@dataclass
class Dash:
    """Show running jobs live on a web page: curves of their figures, their tables, their state.

    It finds jobs of the same user on this computer (train, demo, serve, rollout) as they come and go. Directories of
    runs are shown too, also when the runs have ended: several in one plot, over steps. The page is served to this
    computer alone, at an address with a secret in it, until Ctrl-C; it needs no internet.

    Example: recollect dash runs/*
    """

    paths: Annotated[tuple[Path, ...], tyro.conf.Positional] = ()
    """Directories of runs, each with a metrics.jsonl."""
    port: int = 0
    """The port of the page; 0 takes any that is free."""
    browser: bool = True
    """Open the browser; --no-browser only prints the address."""
    json: bool = False
    """Print one JSON object with the address, and open no browser."""

    def run(self) -> None:
        """Serve and wait for Ctrl-C."""
        from recollect.learners.shown import CHARTS
        from recollect.observe.dash import dash_routes
        from recollect.observe.web import WebServer, browsing, make_app  # says what to install, if it must

        routes = dash_routes(self._runs(), CHARTS)
        try:
            server = WebServer(make_app(routes), self.port)
        except OSError as error:
            sys.exit(f"recollect dash: port {self.port}: {error.strerror}; choose another --port")
        except ValueError as error:
            sys.exit(f"recollect dash: {error}")
        with server:
            print(
                json.dumps({"url": server.url}) if self.json else f"{server.url}   (Ctrl-C ends it)",
                flush=True,
            )
            with browsing(server.url, self.browser and not self.json):
                server.wait()

    def _runs(self) -> list[Path]:
        """The paths that are runs; of `runs/*` some may be something else, but not all."""
        from recollect.observe.runs import METRICS

        found = [path for path in self.paths if (path / METRICS).is_file()]
        others = ", ".join(printable(path) for path in self.paths if path not in found)
        if self.paths and not found:
            sys.exit(
                f"recollect dash: must be given directories with a {METRICS}, got {others}; name a log_dir"
            )
        if others:
            print(f"recollect dash: no {METRICS} in {others}", file=sys.stderr)
        return found
