"""One campaign: a family of artefacts, a seed, a number of cases, in a process with bounded memory and time.

python -m tests.fuzz.campaign manifests 0 1000

A case that ends its process is told by its seed, and the next one goes on in a new process.
"""

from __future__ import annotations

import faulthandler
import os
import resource
import sys
import tempfile
import time
import traceback
from collections import Counter
from mmap import mmap
from pathlib import Path
from random import Random

from tests.fuzz.artefacts import FAMILIES

from recollect.errors import BudgetError, FormatError, FrameError

ALLOWED = (FormatError, FrameError, BudgetError)
ROOM_NBYTES = 1 << 30
CASE_S = 120.0
SLOW_S = 60.0


def campaign(family: str, first: int, n: int) -> int:
    """Run cases in child processes; return how many of them went wrong or ended in a crash."""
    end, at, n_wrong = first + n, mmap(-1, 9), 0  # the seed, and whether all are done
    while first < end:
        at[:8] = first.to_bytes(8, "little")
        child = os.fork()
        if not child:
            problems = run(family, first, end - first, at)
            print(*problems, sep="\n", end="", flush=True)
            at[8] = 1
            os._exit(min(len(problems), 100))
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        n_wrong += abs(status)
        if at[8]:
            return n_wrong
        seed = int.from_bytes(at[:8], "little")
        print(f"{family} {seed}: ended its process with status {status}", flush=True)
        first = seed + 1
    return n_wrong


def run(family: str, first: int, n: int, at: mmap) -> list[str]:
    """Run cases, telling the seed of each `at`; return what went wrong, one text for each kind of failure."""
    with tempfile.TemporaryDirectory() as home:
        cases = FAMILIES[family](Path(home))
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + ROOM_NBYTES, resource.RLIM_INFINITY))
        counts: Counter[str] = Counter()
        found: dict[str, str] = {}
        for seed in range(first, first + n):
            random = Random(seed)
            at[:8] = seed.to_bytes(8, "little")
            case = cases[seed % len(cases)]
            faulthandler.dump_traceback_later(CASE_S, exit=True)
            start = time.monotonic()
            what = f"{family} {seed} {getattr(case, 'file', '')}"
            try:
                case(random)
                counts["loaded"] += 1
            except ALLOWED as error:
                counts[type(error).__name__] += 1
            except BaseException as error:
                if isinstance(error, KeyboardInterrupt):
                    raise
                frames = traceback.extract_tb(error.__traceback__)
                last = next((f for f in reversed(frames) if "/recollect/" in f.filename), frames[-1])
                key = f"{type(error).__name__} at {last.filename.rsplit('/', 2)[-2:]}:{last.lineno}"
                counts[key] += 1
                if key not in found:
                    print(what, key, str(error)[:200], flush=True)
                    found[key] = f"{what}: {''.join(traceback.format_exception(error))[-900:]}"
            spent = time.monotonic() - start
            if spent > SLOW_S:
                counts["slow"] += 1
                found.setdefault(f"slow {getattr(case, 'file', '')}", f"{what}: took {spent:.1f} s")
        faulthandler.cancel_dump_traceback_later()
        print(family, first, n, dict(counts), flush=True)
        return list(found.values())


if __name__ == "__main__":
    sys.exit(1 if campaign(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])) else 0)
