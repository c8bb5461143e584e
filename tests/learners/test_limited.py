"""Collectors that run free beside a RateLimiter: whoever is ahead waits for the other, and neither for the dead."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.ipc.crews import wait_until
from tests.learners.test_sac import runner

import recollect as rc
from recollect.errors import CollectorDiedError
from recollect.learners.checkpoint import load_checkpoint

FREE = {"sync_collection": False}


@pytest.mark.process
@pytest.mark.timeout(120)
def test_collectors_wait_for_the_learner(tmp_path: Path) -> None:
    limiter = rc.RateLimiter(4, min_size=40, band=200)
    most: list[float] = []

    def pause(iteration: int, values: Any) -> None:
        wait_until(lambda: limiter.stats().waiting > 0, 20.0)
        most.append(limiter.stats().difference)

    with runner(cfg=FREE, limiter=limiter, num_collectors=2) as r:
        r.learn(20, 0, tmp_path, on_metrics=pause)
    assert r.last_run_summary.status == "completed"
    assert (
        len(most) == 2 and 200 - 2 * 4 * 4 < min(most) <= max(most) <= 200
    )  # two rows of each might have fitted


@pytest.mark.process
@pytest.mark.timeout(120)
def test_the_learner_waits_for_collectors_and_goes_on_where_it_was(tmp_path: Path) -> None:
    limiter = rc.RateLimiter(0.05, min_size=40, band=10)
    with runner(cfg=FREE, limiter=limiter) as r:
        r.learn(20, 0, tmp_path)
        assert limiter.samples == 20 * 16 and limiter.inserts >= (20 * 16 - 10) / 0.05
    saved = load_checkpoint(tmp_path / "model_20")["limiter"]
    again = rc.RateLimiter(0.05, min_size=40, band=10)
    with runner(cfg=FREE, limiter=again) as r:
        r.learn(24, 0, tmp_path, resume=tmp_path / "model_20")
        assert again.samples == 24 * 16
        assert again.inserts >= max(saved["inserts"], (24 * 16 - 10) / 0.05)


@pytest.mark.process
@pytest.mark.timeout(120)
def test_a_wait_for_rows_hears_of_a_collector_that_died(tmp_path: Path) -> None:
    limiter = rc.RateLimiter(0.001, min_size=40, band=20)
    with runner(cfg=FREE, env={"dies_at": 100}, limiter=limiter) as r, pytest.raises(CollectorDiedError):
        r.learn(1000, 0, tmp_path)


@pytest.mark.parametrize(
    ("limiter", "cfg", "error", "text"),
    [
        (rc.RateLimiter(1, min_size=40, band=100), {}, ValueError, "limiter: is for collectors that run free"),
        (4.0, FREE, TypeError, "limiter: must be a RateLimiter or None, got float"),
        (rc.RateLimiter(1, min_size=39, band=100), FREE, ValueError, r"min_size must be in \[40, 800\]"),
        (rc.RateLimiter(1, min_size=801, band=900), FREE, ValueError, r"min_size must be in \[40, 800\]"),
        (rc.RateLimiter(0.01, min_size=40, band=8), FREE, ValueError, "band must be at least .* to draw 16"),
        (rc.RateLimiter(9, min_size=40, band=360), {**FREE, "batch_size": 720}, ValueError, "min_size"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_at_once(limiter: Any, cfg: Any, error: Any, text: str) -> None:
    with pytest.raises(error, match=text):
        runner(cfg=cfg, limiter=limiter)


def test_one_limiter_is_for_one_replay(tmp_path: Path) -> None:
    used = rc.RateLimiter(1, min_size=40, band=100)
    rc.ReplayBuffer.create(rc.MemoryStorage, ((), "int64"), capacity=50, limiter=used)
    with pytest.raises(ValueError, match="must limit one buffer"):
        runner(cfg=FREE, limiter=used)


def test_rows_too_many_for_the_band_are_refused() -> None:
    with pytest.raises(ValueError, match=r"band must be at least .* to insert 400"):
        runner(cfg=FREE, limiter=rc.RateLimiter(9, min_size=40, band=400), num_envs=400)
