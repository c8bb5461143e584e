"""The command line: one module per command, its dataclass is its options."""

from __future__ import annotations

import os
import re
import select
import sys
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from importlib import import_module
from typing import Any

from recollect.errors import MissingExtraError, RecollectError, check_installed
from recollect.text import nearest, printable

# Each is a module here, and in it a dataclass of the same name.
_COMMANDS = {
    "bench": "time a buffer on this machine, beside memcpy",
    "convert": "copy a dump or data set into another form",
    "dash": "show running jobs live on a web page",
    "demo": "see Recollect at work",
    "doctor": "say what is wrong with this machine or an environment",
    "inspect": "say what is in a dump or data set",
    "rollout": "roll out the tasks of a TOML file",
    "serve": "serve a replay buffer to other machines",
    "top": "watch a running job from another terminal",
    "train": "train a reference learner",
    "verify": "check the files of a dump or data set",
    "view": "look at the episodes of a dump or data set in the browser",
}
# What a command needs besides the packages of the command line, whatever its arguments are.
_NEEDS = {
    "dash": ("starlette", "uvicorn"),
    "view": ("starlette", "uvicorn"),
    "train": ("torch",),
    "demo": ("torch",),
}
# What a function calls otherwise than the flag that it comes from.
_FLAGS = {"tasks": "task", "chunk_size": "chunk", "num_collectors": "collectors"}


def run(args: list[str] | None = None) -> None:
    """Run the command that `args` (or the process's own) name; errors end with one line and status 1."""
    chosen: list[Any] = []
    try:
        _run(sys.argv[1:] if args is None else args, chosen)
    except SystemExit as end:  # its text may quote a file, a peer or a model
        if isinstance(end.code, str):
            sys.exit(printable(with_flags(end.code, chosen)))
        raise


def _about_itself(args: list[str]) -> bool:
    """Answer what is asked of no command in particular: help, the version, or a command that is not there."""
    if args[:1] == ["--version"]:
        from recollect import __version__

        print(f"recollect {__version__}")
        return True
    _check_packages(args)
    if not args or args[0] in ("-h", "--help"):
        print(_help(), file=sys.stdout if args else sys.stderr)
        if not args:
            sys.exit(2)
    elif args[0] not in _COMMANDS:
        sys.stderr.write(
            f"recollect: must be given a command, got {printable(args[0])!r}{nearest(args[0], _COMMANDS)}\n"
        )
        sys.exit(2)
    else:
        return False
    return True


def _check_packages(args: list[str]) -> None:
    """Without the packages of the command line, end with one line: everything that the command needs."""
    try:
        check_installed("command line", "tyro", "rich")
        return
    except MissingExtraError:
        name = args[0] if args and args[0] in _COMMANDS else ""
    try:
        check_installed(f"recollect {name}".rstrip(), "tyro", "rich", *_NEEDS.get(name, ()))
    except MissingExtraError as error:
        sys.exit(str(error))


def _help() -> str:
    lines = [f"  {name:9}{about}" for name, about in _COMMANDS.items()]
    return "\n".join(
        [
            "usage: recollect COMMAND ...",
            "",
            "Experience for reinforcement learning: replay buffers, data sets, rollouts.",
            "",
            *lines,
            "",
            "recollect COMMAND --help tells its options; recollect --version the version.",
        ]
    )


def with_flags(text: str, commands: list[Any]) -> str:
    """Return a message with the command's flags in place of the arguments that they became."""
    flags = [name for command in commands for name in _options(command)]

    def flag(found: re.Match[str]) -> str:
        name = _FLAGS.get(found["name"], found["name"])
        return f"{found['before']}--{name.replace('_', '-')}{found['after']}" if name in flags else found[0]

    text = re.sub(r"^(?P<before>recollect(?: \w+)?: )(?P<name>\w+)(?P<after>: )", flag, text)
    return re.sub(r"(?P<before>; pass )(?P<name>\w+)(?P<after>)=", flag, text)


def _options(command: Any) -> Iterator[str]:
    """Yield the fields that are flags, those of nested settings too."""
    for field in fields(command) if is_dataclass(command) else ():
        if is_dataclass(value := getattr(command, field.name)):
            yield from _options(value)
        elif "Positional" not in str(field.type):
            yield field.name


def _run(args: list[str], chosen: list[Any]) -> None:
    """Run a command, and leave in `chosen` which one it is."""
    try:
        if not _about_itself(args):
            chosen.append(_chosen(args))
            chosen[0].run()
        sys.stdout.flush()
    except KeyboardInterrupt:
        sys.exit(130)
    except (RecollectError, OSError) as error:  # OSError: a full disk, a place that cannot be written
        if isinstance(error, BrokenPipeError) and _reader_has_left():
            sys.exit(141)
        sys.exit(f"recollect: {error}")


def _reader_has_left() -> bool:
    """Whether nobody reads our output any more, as in `recollect ... | head`; then nothing more is written to it."""
    output = select.poll()
    output.register(sys.stdout, 0)
    if not any(event & select.POLLERR for _, event in output.poll(0)):
        return False
    # The interpreter flushes once more as it ends.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return True


def _chosen(args: list[str]) -> Any:
    import tyro

    if args[:1] == ["demo"]:
        from recollect.cli.demo import demos, with_default

        about = "See Recollect at work. Without a name, the first of these runs."
        return tyro.extras.subcommand_cli_from_dict(
            demos(), prog="recollect demo", description=about, args=with_default(args[1:])
        )
    # The modules of the others take a second to import.
    return tyro.cli(_command(args[0]), prog=f"recollect {args[0]}", args=args[1:])


def _command(name: str) -> Any:
    return getattr(import_module(f"recollect.cli.{name}"), name.capitalize())
