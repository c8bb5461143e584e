"""`recollect demo NAME`: what Recollect is for, each shown by one run that takes a few minutes at most."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

DEFAULT = "sac"


@dataclass
class Demo:
    """See Recollect at work: `recollect demo --help` lists the demos, `recollect demo` runs the first of them."""


def demos() -> dict[str, Any]:
    """Return the demos by name; each is a dataclass of options with a `run` method."""
    from recollect.cli.demo.gflownet import DemoGflownet
    from recollect.cli.demo.grpo import DemoGrpo
    from recollect.cli.demo.sac import DemoSac

    return {
        "sac": DemoSac,
        "grpo": DemoGrpo,
        "gflownet": DemoGflownet,
    }


def with_default(args: list[str]) -> list[str]:
    """Return the words after `recollect demo` with the demo's name in front, unless help is asked for.

    >>> with_default(["--seconds", "2"])
    ['sac', '--seconds', '2']
    """
    if args and (not args[0].startswith("-") or args[0] in ("-h", "--help")):
        return args
    return [DEFAULT, *args]
