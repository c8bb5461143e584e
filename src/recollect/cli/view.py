"""`recollect view`: look at the episodes of a dump or data set in the browser."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import tyro

from recollect.datasets.open import packages_at
from recollect.errors import check_installed
from recollect.text import printable


@dataclass
class View:
    """Show what is at a path in the browser: its episodes, curves of every number, pictures as film, two side by side.

    The path is a dump or live directory of Recollect, what `recollect rollout` wrote to files, a dump of UniEnv, or
    a data set of LeRobot, Minari or Hugging Face. The page is served to this computer alone, at an address with a
    secret in it, until Ctrl-C; it needs no internet.

    Example: recollect view runs/demo/model_6000/replay
    """

    path: Annotated[Path, tyro.conf.Positional]
    """The directory to look at, or the id of a set of the Hugging Face Hub or of Minari."""
    reward: str | None = None
    """The leaf whose sum over an episode is its return; without one, the leaf called reward."""
    port: int = 0
    """The port of the page; 0 takes any that is free."""
    browser: bool = True
    """Open the browser; --no-browser only prints the address."""
    split: str | None = None
    """Which split of a Hugging Face data set."""
    json: bool = False
    """Print one JSON object with the address and what was found, and open no browser."""

    def run(self) -> None:
        """Open, serve, and wait for Ctrl-C."""
        check_installed("recollect view", "starlette", "uvicorn", *packages_at(self.path))
        from recollect.observe.view.catalogue import open_catalogue
        from recollect.observe.web import browsing

        with (
            open_catalogue(self.path, split=self.split, reward=self.reward) as catalogue,
            self._serve(catalogue) as server,
        ):
            about = catalogue.about()
            if self.json:
                sys.stdout.write(json.dumps({"url": server.url, **about}) + "\n")
            else:
                path = printable(self.path)
                print(f"{path}: {about['samples']:,} samples in {about['episodes']:,} episodes")
                print(f"{server.url}   (Ctrl-C ends it)")
            sys.stdout.flush()
            with browsing(server.url, self.browser and not self.json):
                server.wait()

    def _serve(self, catalogue: Any) -> Any:
        from recollect.observe.web import WebServer, make_app

        # Not before recollect.observe.web, which says what is missing where its packages are not installed.
        site = import_module("recollect.observe.view.site")
        try:
            return WebServer(make_app(site.site_routes(catalogue)), self.port)
        except OSError as error:
            sys.exit(
                f"recollect: --port {self.port}: {os.strerror(error.errno or 0)}; leave it out to take any that is free"
            )
        except ValueError as error:
            sys.exit(f"recollect view: {error}")
