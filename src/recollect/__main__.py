"""`python -m recollect` and the `recollect` command."""

from __future__ import annotations


def main() -> None:
    """Run the command line."""
    from recollect.cli import run

    run()


if __name__ == "__main__":
    main()
