"""The command line: one module per command, its dataclass is its options."""

from __future__ import annotations

import sys
from typing import Any

from recollect.errors import MissingExtraError, RecollectError


def run(args: list[str] | None = None) -> None:
    """Run the command that `args` (or the process's own) name; errors end with one line and status 1."""
    try:
        import rich  # noqa: F401
        import tyro  # noqa: F401
    except ImportError as error:
        raise MissingExtraError(
            'the command line needs tyro and rich; run pip install "recollect[cli]"'
        ) from error
    command = _chosen(sys.argv[1:] if args is None else args)
    try:
        command.run()
    except KeyboardInterrupt:
        sys.exit(130)
    except (RecollectError, OSError) as error:  # OSError: a full disk, a place that cannot be written
        sys.exit(f"recollect: {error}")


def _chosen(args: list[str]) -> Any:
    import tyro

    from recollect.cli.demo import demos, with_default

    if args[:1] == ["demo"]:
        about = "See Recollect at work. Without a name, the first of these runs."
        return tyro.extras.subcommand_cli_from_dict(
            demos(), prog="recollect demo", description=about, args=with_default(args[1:])
        )
    return tyro.extras.subcommand_cli_from_dict(
        _commands(), prog="recollect", description="Experience for reinforcement learning.", args=args
    )


def _commands() -> dict[str, Any]:
    from recollect.cli.bench import Bench
    from recollect.cli.convert import Convert
    from recollect.cli.demo import Demo
    from recollect.cli.doctor import Doctor
    from recollect.cli.inspect import Inspect
    from recollect.cli.rollout import Rollout
    from recollect.cli.serve import Serve
    from recollect.cli.train import Train
    from recollect.cli.verify import Verify
    from recollect.cli.view import View

    return {
        "bench": Bench,
        "convert": Convert,
        "demo": Demo,
        "doctor": Doctor,
        "inspect": Inspect,
        "rollout": Rollout,
        "serve": Serve,
        "train": Train,
        "verify": Verify,
        "view": View,
    }
