"""Sphinx: build with `make docs`."""

from __future__ import annotations

from recollect import __version__

project = "Recollect"
author = "the Recollect authors"
copyright = author
version = release = __version__

extensions = ["myst_parser"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["build"]
nitpicky = True
myst_heading_anchors = 3

html_theme = "furo"
html_title = f"Recollect {release}"
