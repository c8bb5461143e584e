"""Samplers drawn from by worker processes ahead of time: the sampler, its processes, and their messages."""
