"""The reference has every public name and no other, and every class has the members that its page promises."""

from __future__ import annotations

import ast
import dataclasses
import enum
import inspect
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import pytest
from tests.docs.pages import CONSTANTS, PAGES

import recollect as rc
from recollect import cli
from recollect.batch import CastTransformation
from recollect.rollout import BatchLifecycleState

REFERENCE = Path(__file__).parents[2] / "docs" / "reference"
ENTRY = re.compile(r"^\.\. (?:autoclass|autofunction|automodule|data):: (\S+)", re.MULTILINE)
MODULES = (
    "recollect",
    "recollect.ipc",
    "recollect.ipc.replay_pipelines",
    "recollect.remote",
    "recollect.rollout",
    "recollect.datasets",
    "recollect.learners",
    "recollect.observe",
    "recollect.testing",
)
ADAPTERS = "recollect.adapters."  # each needs a framework, which need not be installed here
ALL_ENTRIES = [name for page in REFERENCE.glob("*.md") for name in ENTRY.findall(page.read_text())]
ENTRIES = [name for name in ALL_ENTRIES if not name.startswith(ADAPTERS)]


def found(entry: str) -> Any:
    """What an entry is about: a name of a module, or a module."""
    module, _, name = entry.rpartition(".")
    return getattr(import_module(module), name)


@pytest.mark.parametrize("module", MODULES)
def test_every_public_name_has_an_entry(module: str) -> None:
    there = [found(entry) for entry in ENTRIES]
    for name in import_module(module).__all__:
        value = getattr(import_module(module), name)
        assert name.startswith("__") or any(value is other for other in there), f"{module}.{name}"


def test_no_entry_is_there_twice() -> None:
    assert len(ALL_ENTRIES) == len(set(ALL_ENTRIES))


def test_every_public_name_of_an_adapter_has_an_entry_and_no_other() -> None:
    wanted = set()
    for file in (Path(rc.__file__).parent / "adapters").glob("[!_]*.py"):
        tree = ast.parse(file.read_text())
        made = [
            x.name for x in tree.body if isinstance(x, ast.ClassDef | ast.FunctionDef) and x.name[0] != "_"
        ]
        lists = [
            x.value for x in tree.body if isinstance(x, ast.Assign) and ast.unparse(x.targets[0]) == "__all__"
        ]
        names = ast.literal_eval(lists[0]) if lists else made
        wanted |= {f"{ADAPTERS}{file.stem}.{name}" for name in names}
    assert len(wanted) > 15
    assert {name for name in ALL_ENTRIES if name.startswith(ADAPTERS)} == wanted


def test_every_command_is_described() -> None:
    page = (REFERENCE / "cli.md").read_text()
    assert all(f"## recollect {name}\n" in page for name in cli._COMMANDS)


class Member(NamedTuple):
    """A line of a page: what a class must have."""

    owner: Any
    kind: str
    name: str
    rest: str  # parameters in parentheses, or a value


def promised() -> Iterator[tuple[str, Member]]:
    for module, page in PAGES.items():
        owner: Any = None
        for line in page.split("\n")[1:-1]:
            kind, name, rest = re.fullmatch(r"(\w+) (\w+)(.*)", line).groups()  # type: ignore[union-attr]
            if kind in ("class", "protocol"):
                owner = getattr(import_module(module), name)
            label = f"{module}.{owner.__name__}" + ("" if kind in ("class", "protocol") else f".{name}")
            yield label, Member(owner, kind, name, rest)


MEMBERS = dict(promised())


def make_manager() -> rc.remote.ReplayBufferManager:
    ends = rc.remote.LocalCarrier.group(2)
    return rc.remote.ReplayBufferManager({"id": ((), "int64")}, 0, 1, communication_backend=ends[0])


def make_transformed() -> rc.TransformedBatch:
    buffer = rc.ReplayBuffer.create("memory", ((), "int64"), capacity=2)
    return rc.TransformedBatch(buffer, CastTransformation({"*": "float32"}))


MADE: dict[str, Any] = {"ReplayBufferManager": make_manager, "TransformedBatch": make_transformed}


def parameters_of(rest: str) -> list[inspect.Parameter]:
    made: dict[str, Any] = {}
    exec(f"def promised{rest}: pass", {"BatchLifecycleState": BatchLifecycleState}, made)
    return list(inspect.signature(made["promised"]).parameters.values())


def check_parameters(found: Any, rest: str, is_bound: bool) -> None:
    """The same parameters in the same order; others are keywords, and one that the page asks for may have a default."""
    ours = list(inspect.signature(found).parameters.values())[not is_bound :]
    wanted = parameters_of(rest)
    names = {p.name for p in wanted}
    more = [p for p in ours if p.name not in names]
    assert [(p.name, p.kind) for p in ours if p.name in names] == [(p.name, p.kind) for p in wanted]
    for p in more:
        is_optional = p.kind is p.KEYWORD_ONLY and p.default is not p.empty
        assert is_optional or p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL), f"{p} is asked for"
    by_name = {p.name: p.default for p in ours}
    for p in wanted:
        if p.default is ...:  # made anew
            assert repr(by_name[p.name]) == "<factory>"
        elif p.default is not p.empty:
            assert by_name[p.name] == p.default and type(by_name[p.name]) is type(p.default), p


@pytest.mark.parametrize("label", MEMBERS)
def test_a_member_is_as_its_page_says(label: str) -> None:
    owner, kind, name, rest = MEMBERS[label]
    if kind == "class":
        check_parameters(owner.__init__, rest, is_bound=False)
        return
    if kind == "protocol":
        assert Protocol in owner.__mro__
        return
    if kind == "field":
        assert name in {field.name for field in dataclasses.fields(owner)}
        return
    if kind == "instance":
        value = getattr(MADE[owner.__name__](), name)
        assert rest == " = ..." or value == eval(rest.removeprefix(" = "))
        return
    found = inspect.getattr_static(owner, name)
    if kind == "attribute":
        assert found == eval(rest.removeprefix(" = "))
    elif kind == "property":
        assert isinstance(found, property)
    elif kind in ("classmethod", "staticmethod"):
        assert type(found).__name__ == kind
        check_parameters(getattr(owner, name), rest, is_bound=True)
    else:
        assert not isinstance(found, property | staticmethod | classmethod)
        found = getattr(owner, name)
        assert inspect.isfunction(found)
        assert inspect.iscoroutinefunction(found) == (kind == "async")
        check_parameters(found, rest, is_bound=False)


@pytest.mark.parametrize("label", [label for label, m in MEMBERS.items() if m.kind == "class"])
def test_a_subclass_must_give_what_its_page_calls_abstract_and_no_more(label: str) -> None:
    owner = MEMBERS[label].owner
    wanted = {m.name for m in MEMBERS.values() if m.owner is owner and m.kind == "abstract"}
    assert getattr(owner, "__abstractmethods__", frozenset()) == wanted


@pytest.mark.parametrize("name", CONSTANTS)
def test_a_constant_has_its_value(name: str) -> None:
    found: Any = import_module("recollect")
    for part in name.split(".")[1:]:
        found = getattr(found, part)
    assert found == CONSTANTS[name]


def rows_of(page: str, heading: str) -> dict[str, Any]:
    """The defaults in the table below a heading, by the names of the fields."""
    part = (REFERENCE / page).read_text().split(f"### {heading}\n")[1].split("\n#")[0]
    rows = re.findall(r"^\| `(\w+)` \| `.+?` \| `(.+?)` \| \S", part, re.MULTILINE)
    return {name: eval(default) for name, default in rows}


def test_every_field_of_the_rollout_config_has_a_row_with_its_default() -> None:
    config = rc.rollout.Config()
    fields = {name: getattr(config, name) for name in config.__struct_fields__}
    assert rows_of("rollout.md", "Fields of Config") == fields


@pytest.mark.parametrize("config", [rc.learners.sac.SACConfig, rc.learners.appo.APPOConfig])
def test_every_field_of_a_learners_config_has_a_row_with_its_default(config: Any) -> None:
    assert rows_of("learners.md", f"Fields of {config.__name__}") == dataclasses.asdict(config())


CLASSES = {
    entry: found(entry)
    for entry in ENTRIES
    if isinstance(found(entry), type)
    and inspect.isfunction(found(entry).__init__)
    and not issubclass(found(entry), enum.Enum)
    and Protocol not in found(entry).__bases__
}


@pytest.mark.parametrize("entry", CLASSES)
def test_help_shows_what_a_constructor_takes(entry: str) -> None:
    """`help()`, editors and the reference ask `inspect.signature`; each parameter has a name and a type."""
    taken = inspect.signature(CLASSES[entry]).parameters.values()
    assert not [p for p in taken if p.kind is p.VAR_POSITIONAL]
    assert not [p.name for p in taken if p.annotation is p.empty]
