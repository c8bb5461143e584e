"""Models that answer, and the pool that shares them among attempts."""
