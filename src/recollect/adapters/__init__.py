"""Recollect inside other frameworks: one module per framework, which needs that framework installed."""
