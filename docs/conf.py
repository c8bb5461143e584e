"""Sphinx: build with `make docs`."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from recollect import __version__

sys.path.insert(0, str(Path(__file__).parent))
import figures  # beside this file

project = "Recollect"
author = "the Recollect authors"
copyright = author
version = release = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["build"]
nitpicky = True
# Annotations name private aliases and other projects' classes; prose is held to its links all the same.
nitpick_ignore_regex = [("py:.*", ".*")]
autodoc_member_order = "bysource"
autodoc_typehints = "none"
autodoc_mock_imports = ["torch", "jax", "ray", "mpi4py", "h5py", "pyarrow", "av", "PIL", "httpx", "tqdm"]
myst_heading_anchors = 3

html_theme = "furo"
html_title = f"Recollect {release}"


def _code_in_backticks(
    app: object, what: str, name: str, obj: object, options: object, lines: list[str]
) -> None:
    """Docstrings put code in single backticks, which reStructuredText has for something else."""
    lines[:] = [re.sub(r"(?<!`)`([^`]+)`(?!`)(?=(\w)?)", lambda m: f"``{m[1]}``" + ("\\ " if m[2] else ""), line)
                for line in lines]  # fmt: skip


def _put_figures(app: object, docname: str, source: list[str]) -> None:
    """Put the measured figures where a page asks for them."""
    source[0] = source[0].replace("<!-- figures of compare.py -->", figures.compared())


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.connect("source-read", _put_figures)
    app.connect("autodoc-process-docstring", _code_in_backticks)
