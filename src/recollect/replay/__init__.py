"""The replay buffer: a storage, a cursor and segments."""

from __future__ import annotations

from recollect.replay.buffer import ReplayBuffer, ReplayStats
from recollect.replay.lane import Lane
from recollect.replay.limiter import LimiterStats, RateLimiter

__all__ = ["Lane", "LimiterStats", "RateLimiter", "ReplayBuffer", "ReplayStats"]
