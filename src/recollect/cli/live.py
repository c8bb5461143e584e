"""A job's state in the terminal: in place where there is a terminal, else a plain line every few seconds."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from time import monotonic
from typing import Any, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from recollect.cli.terminal import words
from recollect.observe.jobs import COMPLETED, INTERRUPTED, RUNNING, STARTING, Cell, Snapshot
from recollect.text import printable

_BARS = "▁▂▃▄▅▆▇█"
_WIDTH = 32
_LINE_EVERY_S = 5.0
_LINE_CHARTS = 5
_RESTARTS = "collectors/restarts"  # has no place in a line until there are some
_STYLES = {STARTING: "yellow", RUNNING: "green", COMPLETED: "green", INTERRUPTED: "yellow"}


def sparkline(values: Sequence[float | None], width: int = _WIDTH) -> str:
    """Return numbers as bars, lowest to highest; more than `width` are averaged.

    >>> sparkline([0.0, 1.0, 2.0])
    '▁▄█'
    """
    known = [x for x in values if x is not None]
    cut = [known[len(known) * k // width : len(known) * (k + 1) // width] for k in range(width)]
    shown = known if len(known) <= width else [sum(part) / len(part) for part in cut]
    low, high = min(shown, default=0.0), max(shown, default=0.0)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[int((x - low) * scale)] for x in shown)


def number(x: float) -> str:
    """Return a number as people read it.

    >>> [number(x) for x in (1234567, -1119.94, 0.1234, 0.0001, 3.0)]
    ['1,234,567', '-1,119.9', '0.123', '0.0001', '3']
    """
    if x == int(x) or abs(x) >= 10_000:
        return f"{x:,.0f}"
    return f"{x:,.1f}" if abs(x) >= 100 else f"{x:.3g}"


def clock(seconds: float) -> str:
    """Return a time as minutes and seconds.

    >>> clock(83.4), clock(3661)
    ('1:23', '1:01:01')
    """
    minutes, s = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{s:02}" if hours else f"{minutes}:{s:02}"


def line(snapshot: Snapshot) -> str:
    """Return a state as one plain line: the first figure of the first charts."""
    charts = snapshot.chart_names()
    first = [(title, charts[title][0]) for title in snapshot.headlines if charts[title][0] != _RESTARTS]
    shown = [(title, x) for title, x in first[:_LINE_CHARTS] if x in snapshot.figures]
    parts = [f"{title} {number(snapshot.figures[x])}" for title, x in shown]
    restarts = snapshot.figures.get(_RESTARTS, 0)
    if restarts:
        parts.append(f"restarts {number(restarts)}")
    done = _progress(snapshot)
    at = f" iteration {done[0]:,} of {done[1]:,}:" if done else f" {snapshot.state}:"
    return printable(
        f"{clock(snapshot.elapsed_s):>5} {snapshot.title}{at} {', '.join(parts) or 'no figures yet'}"
    )


def render(snapshot: Snapshot) -> RenderableType:
    """Return a state as a block for the terminal."""
    parts: list[RenderableType] = [_head(snapshot), _charts(snapshot)]
    parts += [_table(name, rows) for name, rows in snapshot.tables.items() if rows]
    return Group(*parts)


def _head(snapshot: Snapshot) -> RenderableType:
    grid = Table.grid(padding=(0, 2))
    state = words((snapshot.state, _STYLES.get(snapshot.state, "bold red")))
    about = words((f"{snapshot.kind}, pid {snapshot.pid}", "dim"))
    cells: list[RenderableType] = [
        words((snapshot.title, "bold")),
        state,
        clock(snapshot.elapsed_s),
        about,
    ]
    done = _progress(snapshot)
    if done:
        cells += [ProgressBar(total=done[1], completed=done[0], width=16), f"{done[0]:,} of {done[1]:,}"]
    if snapshot.state == RUNNING and snapshot.age_s > 5.0:
        cells.append(words((f"nothing new for {snapshot.age_s:.0f} s", "yellow")))
    grid.add_row(*cells)
    return grid


def _progress(snapshot: Snapshot) -> tuple[int, int] | None:
    total, done = snapshot.facts.get("iterations"), snapshot.figures.get("iteration")
    if done is None or not isinstance(total, int | float) or not math.isfinite(total):
        return None
    return int(done), int(total)


def _charts(snapshot: Snapshot) -> Table:
    """One row for each chart, then the figures that are in none, by group."""
    grid = Table.grid(padding=(0, 2))
    shown, headlines = {"iteration"}, snapshot.headlines
    for title, names in snapshot.chart_names().items():
        values = {name: snapshot.figures[name] for name in names if name in snapshot.figures}
        shown |= values.keys()
        if title in headlines:
            text = "  ".join(number(x) for x in values.values())
            bars = sparkline(snapshot.history.values.get(names[0], []))
            grid.add_row(words((title, "dim")), words(text, "  ", (bars, "cyan")))
        else:
            grid.add_row(words((title, "dim")), _joined(values))
    for group, values in _groups(snapshot.figures, shown):
        grid.add_row(words((group, "dim")), _joined(values))
    return grid


def _groups(figures: Mapping[str, float], but: set[str]) -> Iterator[tuple[str, dict[str, float]]]:
    rest = {name: x for name, x in figures.items() if name not in but}
    for group in dict.fromkeys(name.split("/")[0] for name in rest):
        yield group, {name: x for name, x in rest.items() if name.split("/")[0] == group}


def _joined(values: Mapping[str, float]) -> Text:
    names = [name.split("/", 1)[-1] for name in values]
    start = _common(names)
    shown = [name.removeprefix(start).removesuffix("_ms") for name in names]
    return Text("  ").join(words(name, " ", (number(x), "bold")) for name, x in zip(shown, values.values()))


def _common(names: list[str]) -> str:
    """The words that all names begin with: learner_ of learner_wait_ms and learner_train_ms."""
    heads = {name.split("_")[0] for name in names}
    return f"{heads.pop()}_" if len(heads) == 1 and len(names) > 1 else ""


def _table(name: str, rows: Sequence[Mapping[str, Cell]]) -> Table:
    table = Table(title=words((name, "dim")), title_justify="left")
    columns = list(dict.fromkeys(column for row in rows for column in row))
    for column in columns:
        numbers = all(isinstance(row.get(column), int | float | None) for row in rows)
        table.add_column(words(column), justify="right" if numbers else "left")
    for row in rows:
        table.add_row(*(words(_cell(row.get(column))) for column in columns))
    return table


def _cell(x: Any) -> str:
    if x is None:
        return "–"
    if isinstance(x, bool) or not isinstance(x, int | float) or not math.isfinite(x):
        return str(x)
    return str(x) if isinstance(x, int) else number(x)


class JobView:
    """Shows states as they come.

    Concurrency: one thread.
    """

    def __init__(
        self, *, quiet: bool = False, console: Console | None = None, clock: Any = monotonic
    ) -> None:
        self._console = console or Console(stderr=True)
        self._quiet, self._clock = quiet, clock
        self._last_line = -math.inf
        self._live: Live | None = None

    def __enter__(self) -> Self:
        if not self._quiet and self._console.is_terminal:
            first = Spinner("dots", " starting: collectors import what they need and fill the replay")
            self._live = Live(first, console=self._console, transient=True, refresh_per_second=8)
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, snapshot: Snapshot | None) -> None:
        """Show one state."""
        if self._quiet or snapshot is None:
            return
        if self._live is not None:
            self._live.update(render(snapshot))
        elif self._clock() - self._last_line >= _LINE_EVERY_S:
            self._last_line = self._clock()
            self._console.print(words(line(snapshot)), soft_wrap=True)
