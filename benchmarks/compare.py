"""Time the same works in Recollect, in its peers and in plain C, side by side in one run.

    python benchmarks/compare.py                       everything
    python benchmarks/compare.py --quick               a smoke test: small buffers, figures without meaning
    python benchmarks/compare.py --works add-1 --peers sb3,cpprb

README.md beside this file says how it measures. Goals are listed in results.py, works in works.py.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from adapters import ENTRIES
from participants import Participant, Skipped
from prioritized import WORKS as PRIORITIZED
from report import as_json, first_match, full_text
from results import GOALS, Outcome, Results, Timing
from works import WORKS, Work, quick, rows_that_fit

WORKS |= {work.name: work for work in PRIORITIZED}
HERE = Path(__file__).parent
LARGEST_BUFFER_NBYTES = 2 << 30
MEMORY_SHARE = 0.4
BUSY_LOAD = 0.7
Opened = dict[Participant, dict[str, Any]]
PEERS = [name for name, entry in ENTRIES.items() if entry.role in ("peer", "note")]


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def list_of(text: str, known: Sequence[str], what: str) -> list[str]:
    """A comma-separated option, checked."""
    names = [name for name in text.split(",") if name and name != "none"]
    unknown = [name for name in names if name not in known]
    if unknown:
        raise SystemExit(f"--{what}: must be among {', '.join(known)}; got {', '.join(unknown)}")
    return names


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    usage = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("compare.py", description=__doc__, formatter_class=usage)
    add = parser.add_argument
    add("--works", default=",".join(WORKS), help="comma-separated; default all: %(default)s")
    add("--peers", default=",".join(PEERS), help="comma-separated, or none; default all: %(default)s")
    add("--rounds", type=int, default=None, help="rounds per work; default 80, with --quick 3")
    add("--quick", action="store_true", help="small buffers and short turns: does it run at all?")
    add("--json", type=Path, default=None, help="result file; default results/compare.json, if quick none")
    add("--env", type=Path, default=HERE.parent / ".venv-bench", help="where setup.sh put the peers")
    add("--check", action="store_true", help="exit with status 1 if a goal is missed")
    return parser.parse_args(argv)


def available_nbytes() -> float:
    text = first_match("/proc/meminfo", "MemAvailable")
    return float(text.split()[0]) * 1024 if text != "unknown" else float(8 << 30)


def join(names: Sequence[str], env: Path, stack: ExitStack, results: Results) -> list[Participant]:
    """Start those who can take part."""
    joined: list[Participant] = []
    for name in names:
        host = next((p for p in joined if p.name == ENTRIES[name].host), None)
        participant = stack.enter_context(Participant(name, env, host))
        try:
            results.versions[name] = participant.ask("hello")["version"]
            joined.append(participant)
            say(f"{name} {results.versions[name]}")
        except Skipped as skipped:
            results.skip(name, str(skipped))
    return joined


def budget_nbytes(work: Work, participants: Sequence[Participant]) -> float:
    """How large a buffer may be: everybody who can do the work has one at the same time."""
    able = 1
    for participant in participants if work.kind != "memory" else ():
        with suppress(Skipped):
            able += participant.ask("can", kind=work.kind)["can"]
    return min(LARGEST_BUFFER_NBYTES, available_nbytes() * MEMORY_SHARE / able)


def open_all(work: Work, participants: Sequence[Participant], turn_s: float, results: Results) -> Opened:
    """Give everybody who can do this work a full buffer."""
    opened = {}
    for participant in participants:
        participant.revive()
        try:
            opened[participant] = participant.ask("open", work=work.name, rows=work.rows, turn_s=turn_s)
        except Skipped as skipped:
            expected = participant.entry.role in ("baseline", "note") and "has no" in str(skipped)
            if not expected:
                results.skip(f"{participant.name} at {work.name}", str(skipped))
    return opened


def compare(work: Work, opened: Opened, rounds: int, results: Results) -> None:
    """Rounds in which everybody has one turn, in an order that changes from round to round."""
    times: dict[Participant, list[float]] = {participant: [] for participant in opened}

    def ask(participant: Participant, do: str) -> dict[str, Any]:
        """One who fails once is out of this work."""
        try:
            return participant.ask(do)
        except Skipped as skipped:
            del times[participant]
            results.skip(f"{participant.name} at {work.name}", str(skipped))
            return {}

    for k in range(rounds):
        for participant in random.Random(k).sample(list(times), len(times)):
            if reply := ask(participant, "turn"):
                times[participant].append(reply["us"])
    for participant in list(times):
        ask(participant, "close")
    timings = {p.name: Timing(tuple(us), opened[p]["calls"], opened[p]["nbytes"]) for p, us in times.items()}
    results.outcomes[work.name] = Outcome(work, timings)


def measure_memory(work: Work, participants: Sequence[Participant], env: Path, results: Results) -> None:
    """Peak memory of making one buffer, each in a fresh process."""
    results.memory_work = work
    for name in (p.name for p in participants if p.entry.role in ("ours", "peer")):
        with Participant(name, env) as fresh:
            try:
                results.memory[name] = fresh.ask("memory", work=work.name, rows=work.rows)
            except Skipped as skipped:
                results.skip(f"{name} at {work.name}", str(skipped))


def run(works: Sequence[Work], peers: Sequence[str], rounds: int, turn_s: float, env: Path) -> Results:
    """Every work, one after the other."""
    results = Results()
    names = [name for name, entry in ENTRIES.items() if name in peers or entry.role in ("ours", "baseline")]
    with ExitStack() as stack:
        participants = join(names, env, stack, results)
        for work in works:
            work = rows_that_fit(work, budget_nbytes(work, participants))
            say(f"{work.name}: {work.title} ...")
            if work.kind == "memory":
                measure_memory(work, participants, env, results)
            else:
                compare(work, open_all(work, participants, turn_s, results), rounds, results)
    return results


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    works = [WORKS[name] for name in list_of(options.works, list(WORKS), "works")]
    peers = list_of(options.peers, PEERS, "peers")
    rounds = options.rounds or (3 if options.quick else 80)
    turn_s = 0.002 if options.quick else 0.01
    works = [quick(work) for work in works] if options.quick else works
    load = os.getloadavg()[0]
    results = run(works, peers, rounds, turn_s, options.env)
    print(full_text(results))
    if load > BUSY_LOAD:
        print(f"\nThe machine was busy before the start (load {load:.1f}): do not rely on these figures.")
    if options.quick:
        print("\n--quick: small buffers and short turns; these figures say only that everything runs.")
    target = options.json or (None if options.quick else HERE / "results" / "compare.json")
    if target is not None:
        target.parent.mkdir(parents=True, exist_ok=True)
        settings = {"rounds": rounds, "turn_s": turn_s, "quick": options.quick, "load_before": load}
        target.write_text(json.dumps(as_json(results, settings), indent=1) + "\n")
    missed = any(goal.verdict(results) == "MISS" for goal in GOALS)
    return 1 if options.check and missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
