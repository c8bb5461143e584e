"""What the training demo leaves: a plot of the return and of where the time went, and what to look at next."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from recollect.budget import human_nbytes
from recollect.cli.live import clock
from recollect.cli.train import report
from recollect.errors import MissingExtraError

LEARNER = {
    "wait": "wait for collectors", "batch": "take the batch", "train": "train", "weight_sync": "publish weights",
}  # fmt: skip
COLLECTOR = {
    "wait": "wait for leave", "weight_sync": "read weights", "action_select": "choose actions",
    "env_step": "step the environments", "replay": "write to replay",
}  # fmt: skip
_COLOURS = ("#ced4da", "#ffa94d", "#4dabf7", "#69db7c", "#da77f2")
Points = Sequence[tuple[float, dict[str, float]]]


def draw(points: Points, kills: Sequence[float], title: str, path: Path) -> None:
    """Write the plot as a PNG; MissingExtraError without matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtraError('a plot needs matplotlib; run pip install "recollect[plot]"') from error
    figure = Figure(figsize=(9, 8.5), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    upper, middle, lower = figure.subplots(3, 1, height_ratios=[4, 3, 1.7])
    figure.suptitle(title)
    _draw_return(upper, points, kills)
    _draw_learner(middle, points)
    _draw_shares(lower, points)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _draw_return(axes: Any, points: Points, kills: Sequence[float]) -> None:
    for name, label, style in (
        ("reward/recent", "mean of the last 20 episodes", {"color": _COLOURS[2], "linewidth": 1.8}),
        ("reward/mean", "mean of the last 100", {"color": _COLOURS[0], "linewidth": 1.4}),
    ):
        seen = [(at, values[name]) for at, values in points if name in values]
        axes.plot([at for at, _ in seen], [x for _, x in seen], label=label, **style)
    for k, at in enumerate(kills):
        axes.axvline(
            at, color="#e03131", linewidth=1, linestyle="--", label=None if k else "a collector is killed"
        )
    axes.set(ylabel="return of an episode", xlabel="seconds since the start")
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")


def _draw_learner(axes: Any, points: Points) -> None:
    at = [at for at, _ in points]
    phases = [[values.get(f"time/learner_{phase}_ms", 0.0) for _, values in points] for phase in LEARNER]
    if at:
        axes.stackplot(at, *phases, labels=list(LEARNER.values()), colors=_COLOURS, linewidth=0)
        total = sorted(sum(column) for column in zip(*phases))
        axes.set_ylim(
            0, 1.25 * total[int(0.98 * (len(total) - 1))] or 1.0
        )  # one slow line must not flatten the rest
        axes.legend(loc="upper right", ncols=2)
    axes.set(ylabel="learner, ms an iteration", xlabel="seconds since the start")


def _draw_shares(axes: Any, points: Points) -> None:
    """Two bars: the share of each phase in the time of the learner and of a collector."""
    for row, (process, phases) in enumerate((("collector", COLLECTOR), ("learner", LEARNER))):
        sums = {k: sum(values.get(f"time/{process}_{k}_ms", 0.0) for _, values in points) for k in phases}
        whole, left = sum(sums.values()) or 1.0, 0.0
        for k, (phase, label) in enumerate(phases.items()):
            share = 100 * sums[phase] / whole
            axes.barh(row, share, left=left, color=_COLOURS[k], height=0.62)
            if share > 12:
                axes.text(
                    left + share / 2, row, f"{label}\n{share:.0f} %", ha="center", va="center", fontsize=8
                )
            left += share
    axes.set(yticks=[0, 1], yticklabels=["collectors", "learner"], xlim=(0, 100), xlabel="% of the time")


def show(summary: Any, log: Any, title: str, out: Path, plot: Path | None, go_on: str) -> None:
    """Print the summary, and the commands to look at what is there and to train on."""
    from rich.console import Console

    from recollect.cli.terminal import words

    console = Console()
    report(summary, title, out, console, go_on)
    for at in log.kills:
        console.print(
            f"A collector was killed with SIGKILL at {clock(at)} on purpose and started again.",
            highlight=False,
        )
    steps = [
        ("the plot", f"xdg-open {plot}" if plot else None),
        ("the replay", _replay_command(summary, "inspect")),
        ("", _replay_command(summary, "view")),
        ("the curves", f"tensorboard --logdir {out}"),
        (
            "the trace",
            f"open {summary.trace_path} at https://ui.perfetto.dev" if summary.trace_path else None,
        ),
        (
            "a run as it goes on",
            "recollect top, or recollect dash, while recollect demo runs in another terminal",
        ),
    ]
    console.print("\nLook at")
    if shutil.which("recollect") is None:
        place = Path(sys.executable).parent
        console.print(words(f"  (the command recollect is in {place}: put that on the PATH)"), soft_wrap=True)
    for what, command in steps:
        if command:
            console.print(words(f"  {what:20} {command}"), soft_wrap=True)


def _replay_command(summary: Any, command: str) -> str | None:
    if not summary.last_checkpoint:
        return None
    replay = Path(summary.last_checkpoint) / "replay"
    size = sum(file.stat().st_size for file in replay.rglob("*") if file.is_file())
    return f"recollect {command} {replay}" + (f"   ({human_nbytes(size)})" if command == "inspect" else "")
