"""One campaign: a family of artefacts, a seed, a number of cases, in a process with bounded memory and time.

python -m tests.fuzz.campaign manifests 0 1000
"""

from __future__ import annotations

import faulthandler
import resource
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path
from random import Random

from tests.fuzz.artefacts import FAMILIES

from recollect.errors import BudgetError, FormatError, FrameError

ALLOWED = (FormatError, FrameError, BudgetError)
ROOM_NBYTES = 1 << 30
CASE_S = 120.0
SLOW_S = 60.0


def run(family: str, first: int, n: int) -> list[str]:
    """Run cases; return what went wrong, one text for each kind of failure."""
    with tempfile.TemporaryDirectory() as home:
        cases = FAMILIES[family](Path(home))
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + ROOM_NBYTES, resource.RLIM_INFINITY))
        counts: Counter[str] = Counter()
        found: dict[str, str] = {}
        for seed in range(first, first + n):
            random = Random(seed)
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
    problems = run(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
    for text in problems:
        print(text)
    sys.exit(1 if problems else 0)
