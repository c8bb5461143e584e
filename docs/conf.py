"""Sphinx: build with `make docs`."""

from __future__ import annotations

import re
from typing import Any

from recollect import __version__

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
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
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


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.connect("autodoc-process-docstring", _code_in_backticks)
