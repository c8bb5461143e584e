"""`recollect serve`: a replay manager on TCP, who is connected to it and at what rate."""

from __future__ import annotations

import json
import os
import secrets
import signal
import sys
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Iterator

    from recollect.remote.manager.manager import ReplayBufferManager


@dataclass
class Serve:
    """Serve a replay buffer to workers on other machines, until they have left or a signal ends it.

    Workers join with the same token: RECOLLECT_TOKEN in the environment of both, or a file that only its owner may
    read. Every few seconds it tells who is connected and at what rate, as do `recollect top` and `recollect dash`;
    Ctrl-C or SIGTERM ends it after the message at hand, with a checkpoint if one was asked for, and prints a summary.

    Example: recollect serve --env CartPole-v1 --address 0.0.0.0:7077 --token-file token.txt

    The worker: RemoteReplay(env, 0, TcpCarrier.join(["host:7077"], token=open("token.txt").read().strip()))
    """

    env: str | None = None
    """A gymnasium environment id: items are its transitions."""
    space: Path | None = None
    """A file with the space of an item as JSON (recollect.spaces.space_to_json), instead of --env."""
    address: str = "127.0.0.1:0"
    """Where to listen; port 0 takes a free one."""
    token_file: Path | None = None
    """A file with the token; made, for its owner alone, if it is not there. Else RECOLLECT_TOKEN is used."""
    capacity: int = 10_000
    """Items that the buffer holds."""
    max_length: int | None = None
    """The most steps of a trajectory, if items are trajectories."""
    baseline: Literal["min", "percentile", "ema"] = "min"
    """How the baseline is found."""
    workers: int = 0
    """End when this many workers have left; 0 serves until a signal."""
    checkpoint: Path | None = None
    """A directory for checkpoints; what is there is taken up again."""
    every: float = 2.0
    """Seconds between two reports."""
    json: bool = False
    """Print one JSON object per line instead of text."""

    def run(self) -> None:
        """Serve until the end, and report."""
        from recollect.cli.serve_view import ServeView
        from recollect.remote.stats import as_plain

        if not self.every > 0:
            sys.exit(f"recollect serve: --every must be above 0 seconds, got {self.every}")
        space, token = self._space(), self._token()
        with self._listening(token) as carrier, self._manager(space, carrier) as manager:
            view = ServeView(manager, carrier.address, self.every, self.json)
            with _stopped_by_signals(manager), view:
                view.say({"address": carrier.address, "pid": os.getpid()}, f"serving at {carrier.address}")
                stats = manager.run()
            if self.json:
                print(json.dumps({"stats": as_plain(stats)}, default=str), flush=True)
            else:
                manager._print_timing_summary()

    def _listening(self, token: str | None) -> Any:
        from recollect.remote.carriers.tcp import TcpCarrier

        try:
            return TcpCarrier.serve(0, self.address, token)
        except OSError as error:
            sys.exit(f"recollect serve: cannot listen at {self.address} ({error}); choose another --address")
        except ValueError as error:
            sys.exit(f"recollect serve: {error}")

    def _manager(self, space: Any, carrier: Any) -> ReplayBufferManager:
        from recollect.remote.config import Checkpoint
        from recollect.remote.manager.manager import ReplayBufferManager

        save = None if self.checkpoint is None else Checkpoint(str(self.checkpoint), resume=True)
        try:
            return ReplayBufferManager(
                space, 0, self.workers or None, capacity=self.capacity, communication_backend=carrier,
                baseline_strategy=self.baseline, max_length=self.max_length, checkpoint=save,
            )  # fmt: skip
        except (ValueError, TypeError, OSError) as error:
            sys.exit(f"recollect serve: {error}")

    def _space(self) -> Any:
        import gymnasium

        from recollect.spaces import space_from_json, transition_space

        if (self.env is None) == (self.space is None):
            sys.exit("recollect serve: give --env or --space, and not both")
        try:
            if self.env is not None:
                return transition_space(gymnasium.make(self.env))
            return space_from_json(json.loads(self.space.read_text()))  # type: ignore[union-attr]
        except (gymnasium.error.Error, OSError, ValueError, TypeError, KeyError) as error:
            sys.exit(f"recollect serve: {error}")

    def _token(self) -> str | None:
        if self.token_file is None:
            if not os.environ.get("RECOLLECT_TOKEN"):
                sys.exit("recollect serve: a token is needed; set RECOLLECT_TOKEN or give --token-file PATH")
            return None
        try:
            with suppress(FileExistsError):
                made = os.open(self.token_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
                with os.fdopen(made, "w") as file:
                    file.write(secrets.token_hex(32))
            mode = self.token_file.stat().st_mode & 0o777
            if mode & 0o077:
                sys.exit(
                    f"recollect serve: {self.token_file}: must be for its owner alone, got mode {mode:o}; "
                    f"run chmod 600 {self.token_file}"
                )
            return self.token_file.read_text().strip()
        except OSError as error:
            sys.exit(f"recollect serve: {error}")


@contextmanager
def _stopped_by_signals(manager: ReplayBufferManager) -> Iterator[None]:
    """Let SIGINT and SIGTERM end the manager's loop, and nothing else."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number in before:
        signal.signal(number, lambda *_: manager.stop())
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
