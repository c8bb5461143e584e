"""The command line: one module per command, its dataclass is its options."""

from __future__ import annotations

import sys
from typing import Any

from recollect.errors import MissingExtraError, RecollectError


def run(args: list[str] | None = None) -> None:
    """Run the command that `args` (or the process's own) name; errors end with one line and status 1."""
    try:
        import rich  # noqa: F401
        import tyro
    except ImportError as error:
        raise MissingExtraError(
            'the command line needs tyro and rich; run pip install "recollect[cli]"'
        ) from error
    from recollect.cli.convert import Convert
    from recollect.cli.demo import Demo
    from recollect.cli.doctor import Doctor
    from recollect.cli.inspect import Inspect
    from recollect.cli.serve import Serve
    from recollect.cli.train import Train
    from recollect.cli.verify import Verify

    commands = {
        "convert": Convert,
        "demo": Demo,
        "doctor": Doctor,
        "inspect": Inspect,
        "serve": Serve,
        "train": Train,
        "verify": Verify,
    }
    command: Any = tyro.extras.subcommand_cli_from_dict(
        commands,
        prog="recollect",
        description="Experience for reinforcement learning.",
        args=args,
    )
    try:
        command.run()
    except KeyboardInterrupt:
        sys.exit(130)
    except RecollectError as error:
        sys.exit(f"recollect: {error}")
