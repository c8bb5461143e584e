"""Sphinx: build with `make docs`."""

from __future__ import annotations

import enum
import re
from inspect import isfunction
from typing import Any

from docutils import nodes
from sphinx.util import inspect

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
autodoc_mock_imports += ["stable_baselines3", "torchrl", "tensordict", "gfn", "trinity"]  # of the adapters
myst_heading_anchors = 3

html_theme = "furo"
html_title = f"Recollect {release}"
html_static_path = ["static"]
html_css_files = ["site.css"]

_NOTES = re.compile(r"^( *)(Ownership|Concurrency|Example):(?: +|$)")


def _as_written(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Docstrings put code in single backticks, and begin what they say of memory and threads with a word."""

    def literal(found: re.Match[str]) -> str:
        joined = " ".join(found[1].split())
        return f"``{joined}``" + ("\\ " if found[2] else "")

    text = re.sub(r"(?<!`)`([^`\n]+(?:\n[^`\n]+)?)`(?!`)(?=(\w)?)", literal, "\n".join(lines))
    shown: list[str] = []
    for line in text.split("\n"):
        if note := _NOTES.match(line):
            shown += ["", f"{note[1]}**{note[2]}:** {line[note.end() :]}".rstrip()]
        else:
            shown.append(line)
    lines[:] = shown


MADE_BY_METHODS = ("recollect.replay.lane.Lane",)  # on_lane()


def _signature(app: Any, what: str, name: str, obj: Any, options: Any, shown: str, returns: str) -> Any:
    """What a constructor takes; nothing where nobody calls it."""
    if what != "class":
        return None
    if (
        name in MADE_BY_METHODS
        or getattr(obj, "_is_protocol", False)
        or issubclass(obj, enum.Enum)
        or re.search(r"\b_\w+:", shown or "")
    ):
        return "", None
    if isfunction(obj.__new__):  # it only checks what it is given
        taken = inspect.signature(obj.__init__, bound_method=True)
        return inspect.stringify_signature(
            taken, show_return_annotation=False, unqualified_typehints=True
        ), None
    return None


def _bases(app: Any, name: str, obj: Any, options: Any, bases: list[Any]) -> None:
    """The nearest bases that have a page, or belong to others."""
    public = app.env.public_classes

    def seen(cls: Any) -> list[Any]:
        ours = getattr(cls, "__module__", "").startswith("recollect")
        return [cls] if not ours or cls in public else [x for base in cls.__bases__ for x in seen(base)]

    found = [x for base in bases for x in seen(base)]
    known = [x for x in found if getattr(x, "__module__", "") not in ("builtins", "abc", "typing", "msgspec")]
    if obj is not None and issubclass(obj, BaseException | enum.Enum | tuple):
        known = found
    bases[:] = list(dict.fromkeys(known))


def _no_empty_line(app: Any, doctree: nodes.document) -> None:
    """Leave out the line of a class that has no such base."""
    for line in [x for x in doctree.findall(nodes.paragraph) if x.astext() == "Bases:"]:
        line.parent.remove(line)


def _public(app: Any, env: Any, docnames: Any) -> None:
    """Find the classes that the reference has."""
    import recollect

    modules = [recollect, *(getattr(recollect, name) for name in recollect._MODULES)]
    env.public_classes = {x for m in modules for n in m.__all__ if isinstance(x := getattr(m, n, None), type)}


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.connect("autodoc-process-docstring", _as_written)
    app.connect("autodoc-process-signature", _signature)
    app.connect("autodoc-process-bases", _bases)
    app.connect("doctree-read", _no_empty_line)
    app.connect("env-before-read-docs", _public)
