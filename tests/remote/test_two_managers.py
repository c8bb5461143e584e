"""Two managers on one checkpoint directory, and a log that is a link."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.remote.test_checkpoint import manager, samples

from recollect.errors import FormatError, LaneBusyError
from recollect.remote import Checkpoint


@pytest.mark.parametrize("resume", [False, True])
def test_a_second_manager_is_refused(tmp_path: Path, resume: bool) -> None:
    first = manager(checkpoint=Checkpoint(tmp_path))
    with pytest.raises(LaneBusyError, match=f"process {os.getpid()}"):
        manager(checkpoint=Checkpoint(tmp_path, resume=resume))
    first.add(samples([1], [0.0]))
    first.close()
    with manager(checkpoint=Checkpoint(tmp_path, resume=True)) as second:
        assert second.buffer[:]["id"].tolist() == [1]


@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_a_log_that_is_a_link_is_not_cut(tmp_path: Path, link: object) -> None:
    path, other = tmp_path / "m", tmp_path / "other"
    other.write_text("mine")
    manager(checkpoint=Checkpoint(path)).close()
    [log] = path.glob("log-*.bin")
    log.unlink()
    link(other, log)  # type: ignore[operator]
    with pytest.raises(FormatError):
        manager(checkpoint=Checkpoint(path, resume=True))
    assert other.read_text() == "mine"
