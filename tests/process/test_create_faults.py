"""A buffer whose making fails at any step leaves the old one or the new one, and never half of either."""

from __future__ import annotations

import gc
import shutil
from pathlib import Path

import numpy as np
import pytest
from tests.interruption import interrupted
from tests.process.failing import Fault, check_steps, may_die, no_syncs, ways
from tests.process.test_commit_faults import NEW, OLD, few, most
from tests.process.test_file_kills import block, check_tidy, create, state

import recollect as rc

pytestmark = pytest.mark.process

# Not Ctrl-C at each step that follows: nothing could be given back then.
EVERY = ways([("EIO", False), ("interrupt", False)])
WAYS = [way for way in EVERY if getattr(way, "values", way) != ("interrupt", True)]


@pytest.mark.parametrize(("fault", "lasts"), WAYS)
@pytest.mark.parametrize("kind", few("parquet"))
def test_making_a_buffer_over_an_old_one(
    kind: str, fault: str, lasts: bool, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    path = tmp_path / "data"

    def attempt(fault: Fault) -> None:
        with create(kind, path) as buffer:
            buffer.extend(block(kind, 0, 9), ends=np.arange(9) == 8)
        may_die(fault, lambda: fault.during(lambda: create(kind, path, overwrite=True).close()))
        assert state(kind, path)[0] in (OLD, [])
        with rc.ReplayBuffer.load_from(path, read_only=False) as buffer:
            buffer.extend(block(kind, 100, 5))
        assert state(kind, path)[0] in ([*OLD, *NEW][-12 if "ring" in kind else 0 :], NEW)
        if not kind.startswith("image"):  # files of images whose index cannot be read stay
            check_tidy(kind, path)
        shutil.rmtree(path)

    n = check_steps(fault, lasts, attempt, most(request))
    request.node.user_properties.append(("steps", n))


@pytest.mark.parametrize("kind", few("parquet"))
def test_ctrl_c_anywhere_while_a_buffer_is_made_over_an_old_one(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "data"
    made: list[rc.ReplayBuffer] = []
    n, came = 0, True
    with no_syncs():
        while came:
            with create(kind, path, overwrite=True) as buffer:
                buffer.extend(block(kind, 0, 9), ends=np.arange(9) == 8)
            came = interrupted(lambda: made.append(create(kind, path, overwrite=True)), n)
            while made:
                made.pop().close()
            gc.collect()  # a buffer that was made and did not reach its caller
            assert state(kind, path)[0] in (OLD, [])
            n += 47
