"""The command line: one module per command, its dataclass is its options."""

from __future__ import annotations

import os
import select
import sys
from importlib import import_module
from typing import Any

from recollect.errors import MissingExtraError, RecollectError

# Each is a module here, and in it a dataclass of the same name.
_COMMANDS = (
    "bench", "convert", "dash", "demo", "doctor", "inspect", "rollout", "serve", "top", "train", "verify", "view",
)  # fmt: skip


def run(args: list[str] | None = None) -> None:
    """Run the command that `args` (or the process's own) name; errors end with one line and status 1."""
    try:
        import rich  # noqa: F401
        import tyro  # noqa: F401
    except ImportError as error:
        raise MissingExtraError(
            'the command line needs tyro and rich; run pip install "recollect[cli]"'
        ) from error
    try:
        _chosen(sys.argv[1:] if args is None else args).run()
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
    if args and args[0] in _COMMANDS:  # the modules of the others take a second to import
        return tyro.cli(_command(args[0]), prog=f"recollect {args[0]}", args=args[1:])
    return tyro.extras.subcommand_cli_from_dict(
        {name: _command(name) for name in _COMMANDS},
        prog="recollect",
        description="Experience for reinforcement learning.",
        args=args,
    )


def _command(name: str) -> Any:
    return getattr(import_module(f"recollect.cli.{name}"), name.capitalize())
